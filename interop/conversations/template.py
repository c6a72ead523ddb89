r"""Templates: from the messages of a conversation to token ids, with marks for the tokens of
answers.

A conversation is a list of messages {"role": "system" | "user" | "assistant", "content": text}:
user and assistant alternate, after at most one system message. A template has two texts with places
for the contents:

    turn     a prompt and its response; it ends with {response}
    system   the system message, in front of the first turn; if it is "", such a message is refused

The whole conversation is: begin, [system], turn, end of text, newline, turn, end of text, …
(data/sft/prepare.py --help has more on it.) The text before an answer is tokenised as one text, and
the answer by itself: so its tokens are the same in training and in a chat. A content never becomes
a special token.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanodnt.data.examples import ANSWER, BEGIN
from nanodnt.data.inputs import Notes
from nanodnt.data.meta import check_template
from nanodnt.data.tokenizer import Tokenizer

Message = dict[str, str]  # {"role": …, "content": …}

AFTER = {  # {role of a message, None before the first: roles of the next one}
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
}


@dataclass(frozen=True)
class Template:
    system: str
    turn: str


ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request."
)
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
            f"template {name!r} is none of {', '.join(TEMPLATES)} "
            "(interop/conversations/template.py)"
        )
    return TEMPLATES[name]


def template_of(meta: dict[str, Any]) -> Template | None:
    """The template in the meta of a dataset or a checkpoint, or None. The meta has its texts, not
    its name: so it stays the same, and templates of earlier versions are read. ValueError if it is
    damaged."""
    texts = meta.get("template")
    check_template(texts)
    return texts and Template(texts["system"], texts["turn"])


def check_messages(messages: list[Message], last: str | None = None) -> None:
    """ValueError, one line, unless `messages` are a conversation: their roles in order, their
    contents text that is not blank, and the last one of the role `last` (None: of any role)."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("there are no messages")
    before = None
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            message = {}
        role = message.get("role")
        content = message.get("content")
        if role not in AFTER[before]:
            raise ValueError(
                f"message {number} has the role {role!r}, where {' or '.join(AFTER[before])} is "
                "due: after at most one system message, user and assistant alternate"
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


class Piece(NamedTuple):
    """A piece of text before an answer."""

    text: str
    is_template: bool  # the template's own text, whose special tokens are recognised


class Encoded(NamedTuple):
    ids: list[int]
    marks: list[int]  # for each id: 2 if it is the first, 1 for answers with end of text, else 0


def encode_conversation(
    tokenizer: Tokenizer, template: Template, messages: list[Message]
) -> Encoded:
    """The ids and marks of a conversation. If it ends with a user's message, the ids are the
    model's input, after which it writes its answer. ValueError, one line, for messages that are no
    conversation, or do not fit the tokenizer or the template."""
    check_messages(messages)
    if tokenizer.eot is None:
        raise ValueError(
            "this tokenizer has no end of text, with which every answer ends: choose another "
            "--tokenizer"
        )
    if messages[0]["role"] == "system" and not template.system:
        raise ValueError(
            "a system message, and this template has no text for one: use one that has: chat, "
            "chatml"
        )
    text = template.system + template.turn
    # the special tokens in the template; a token of spaces is text
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
            marks += [ANSWER] * (len(ids) - len(marks))
            waiting = [Piece("\n", True)]
        else:
            if role == "system":
                before, after = template.system.split("{system}")
            else:
                before, after = template.turn.removesuffix("{response}").split("{prompt}")
            waiting += [Piece(before, True), Piece(content, False), Piece(after, True)]
            if role == "user":
                ids += _encode_pieces(tokenizer, waiting, named)
            marks += [0] * (len(ids) - len(marks))
    return Encoded(ids, marks)


def encode_all(
    conversations: Iterable[tuple[str, str, list[Message]]],
    tokenizer: Tokenizer,
    template: Template,
    notes: Notes,
) -> Iterator[tuple[str, str, Encoded]]:
    """(name, place, ids and marks) of each conversation (name, place, messages). One that cannot be
    encoded is for `notes.leave_out_bad`."""
    for name, place, messages in conversations:
        try:
            encoded = encode_conversation(tokenizer, template, messages)
        except ValueError as e:
            notes.leave_out_bad(ValueError(f"{place}: {e}"))
        else:
            yield name, place, encoded


def _encode_pieces(tokenizer: Tokenizer, pieces: list[Piece], named: dict[str, int]) -> list[int]:
    """Token ids of pieces. A name of a special token, `named` {name: id}, in the template's own
    pieces becomes that token; the pieces between these names are one ordinary text."""
    names = "|".join(re.escape(name) for name in sorted(named, key=len, reverse=True))
    parts = [""]  # text, name, text, name, text
    for text, is_template in pieces:
        split = re.split(f"({names})", text) if is_template and names else [text]
        parts[-1] += split[0]
        parts += split[1:]
    ids = []
    for i, part in enumerate(parts):
        if i % 2:
            ids.append(named[part])
        elif part:
            ids += tokenizer.encode(part)
    return ids
