r"""Templates: how the messages of a conversation become token ids, and which of these are an
answer's.

A conversation is a list of messages {"role": "system" | "user" | "assistant", "content": text}: a
user's and an assistant's in turn, in front of them at most one of the system. A template has two
texts with places for the contents:

    turn     a prompt and its response; it ends with {response}
    system   stands in front of the first turn where there is a system message; where it is "", that is refused

The whole conversation is: begin, [system], turn, end of text, newline, turn, end of text, …
(data/sft/prepare.py --help says more.) What stands before an answer is tokenised as one text, and
the answer by itself: so its tokens are the same in training and in a chat. A content never becomes
a special token.
"""

import re
from dataclasses import dataclass

from nanodnt.data.examples import ANSWER, BEGIN
from nanodnt.data.inputs import Notes
from nanodnt.data.meta import check_template

AFTER = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
}


@dataclass(frozen=True)
class Template:
    system: str
    turn: str


ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
TEMPLATES = {
    "chat": Template("System: {system}\n", "User: {prompt}\nAssistant:\n{response}"),
    "alpaca": Template("", ALPACA + "\n\n### Instruction:\n{prompt}\n\n### Response:\n{response}"),
    "chatml": Template(
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}",
    ),
    "plain": Template("", "{prompt}{response}"),
}


def named_template(name: str) -> Template:
    """The template of this name. ValueError where there is none."""
    if name not in TEMPLATES:
        raise ValueError(
            f"template {name!r} is none of {', '.join(TEMPLATES)} (interop/conversations/template.py)"
        )
    return TEMPLATES[name]


def template_of(meta: dict) -> Template | None:
    """The template in the meta of a dataset or a checkpoint, or None. Its texts stand there, not
    its name: so it stays the same, and templates of earlier versions are read. ValueError if it is
    damaged."""
    found = meta.get("template")
    check_template(found)
    return found and Template(found["system"], found["turn"])


def check_messages(messages: list, last: str | None = None) -> None:
    """ValueError, one line, unless `messages` are a conversation: their roles in order, their
    contents text that is not blank, and the last of the role `last` (None: of any)."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("there are no messages")
    before = None
    for number, message in enumerate(messages, 1):
        role, content = (
            message.get(key) if isinstance(message, dict) else None for key in ("role", "content")
        )
        if role not in AFTER[before]:
            what = (
                f"message {number} has the role {role!r}, where {' or '.join(AFTER[before])} is due"
            )
            raise ValueError(
                f"{what}: after at most one system message, user and assistant alternate"
            )
        if not isinstance(content, str):
            raise ValueError(
                f"message {number}, of the {role}, is of type {type(content).__name__}, not text"
            )
        if not content.strip():
            raise ValueError(f"message {number}, of the {role}, is empty or only white space")
        before = role
    if last not in (before, None):
        raise ValueError(f"the last message has the role {before}, where {last} is due")


def encode_conversation(tokenizer, template: Template, messages: list) -> tuple:
    """(ids, marks) of a conversation, two lists of the same length. Marks are 2 for the first
    token, 1 for the tokens of answers and the end of text after each, else 0. After a user's
    message the ids are all that a model reads before its answer, with which the conversation goes
    on. ValueError, one line, for messages that are no conversation, or that tokenizer or template
    do not fit."""
    check_messages(messages)
    if tokenizer.eot is None:
        raise ValueError(
            "this tokenizer has no end of text, with which every answer ends: choose another --tokenizer"
        )
    if messages[0]["role"] == "system" and not template.system:
        raise ValueError(
            "a system message, and this template has no text for one: use one that has: chat, chatml"
        )
    text = template.system + template.turn
    # "  " is text
    named = {name: i for name, i in tokenizer.added.items() if name in text and name.strip()}
    ids = list(tokenizer.start or [tokenizer.bos])
    marks = [BEGIN] + [0] * (len(ids) - 1)
    waiting = []  # pieces of text before the next answer
    for number, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        if role == "assistant":
            answer = tokenizer.encode(content)
            if not answer:
                raise ValueError(
                    f"this tokenizer makes no token of the response (message {number})"
                )
            ids += [*answer, tokenizer.eot]
            waiting = [("\n", True)]
        else:
            form = template.system if role == "system" else template.turn.removesuffix("{response}")
            before, after = form.split("{system}" if role == "system" else "{prompt}")
            waiting += [(before, True), (content, False), (after, True)]
            if role == "user":
                ids += _encode_pieces(tokenizer, waiting, named)
        marks += [ANSWER if role == "assistant" else 0] * (len(ids) - len(marks))
    return ids, marks


def encode_all(found, tokenizer, template: Template, notes: Notes):
    """Yield (name, place, (ids, marks)) of each of the conversations `found`, (name, place,
    messages). One that cannot be encoded is for `notes.leave_out_bad`."""
    for name, where, messages in found:
        try:
            pair = encode_conversation(tokenizer, template, messages)
        except ValueError as e:
            notes.leave_out_bad(ValueError(f"{where}: {e}"))
        else:
            yield name, where, pair


def _encode_pieces(tokenizer, pieces, named):
    """Token ids of pieces [(text, whether it is the template's own)]. The template's own become the
    tokens `named`, {name: id}, where they name them; between these all is one ordinary text."""
    names = "|".join(re.escape(name) for name in sorted(named, key=len, reverse=True))
    parts = [""]  # text, name, text, name, text
    for text, own in pieces:
        first, *rest = re.split(f"({names})", text) if own and names else [text]
        parts[-1] += first
        parts += rest
    ids = []
    for i, part in enumerate(parts):
        if i % 2:
            ids.append(named[part])
        elif part:
            ids += tokenizer.encode(part)
    return ids
