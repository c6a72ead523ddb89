"""A conversation with a model: what it has read stays in a cache, and each turn feeds it the new tokens only."""

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import commonprefix  # of any strings, character by character

import torch

from configurator import decode_argument
from interop.conversations import template as templates
from interop.conversations.template import Template, encode_conversation
from model import GPT
from nanodnt.data.inputs import decode_text
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.generate import KVCache, find_unused, generate
from nanodnt.weights import Trained


@dataclass
class Turn:
    text: str  # the user's
    prompt: list  # its token ids, with those of the template around it
    answer: list = field(default_factory=list)  # token ids as they were drawn, and end of text


class Chat:
    """A conversation with `model`, in eval mode, by `template`: `ask`, then read the `answer`.

    Answers stay the tokens that the model has drawn: their text, tokenised, could be others. Where block_size is full,
    the oldest turns are dropped, until the rest takes up half of it or is one turn; the system message stays. `notes`
    collects lines for the user about what was cut. `how`: options of `generate`. ValueError, one line, where the
    tokenizer has no end of text, or the template no place for the system message."""

    def __init__(self, model: GPT, tokenizer: Tokenizer, template: Template, system="", max_new_tokens=500, **how):
        if tokenizer.eot is None:
            what = f"the model's tokenizer ({tokenizer.kind}) has no end of text, with which every answer ends"
            raise ValueError(f"{what}: a chat needs a model that was trained with one")
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.max_new_tokens, self.how = max_new_tokens, how
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns, self.cache, self.notes = [], None, []
        self.how["unused"] = find_unused(model, tokenizer)
        shortest = len(self._encode("a", first=True)) if system else 0  # ValueError where it cannot be encoded
        if shortest >= model.config.block_size:
            raise ValueError(f"the system message leaves no room in block_size={model.config.block_size}: shorten it")

    @property
    def ids(self) -> list:
        """The token ids of the conversation. The model has read those that the cache holds, the first ones."""
        return [i for turn in self.turns for i in (*turn.prompt, *turn.answer)]

    def ask(self, text: str) -> None:
        """Add the user's text. ValueError, nothing added, where it cannot be encoded or leaves no room to answer."""
        limit, first = self.model.config.block_size, self._encode(text, first=True)
        if len(first) >= limit:
            what = f"this prompt makes {len(first)} tokens with its template{' and system message' * bool(self.system)}"
            raise ValueError(f"{what}, and block_size={limit} must hold the answer too: shorten it")
        prompt = self._encode(text, first=False) if self.turns else first
        if self.turns and self.turns[-1].answer[-1:] != [self.tokenizer.eot]:  # it was cut short
            self.turns[-1].answer.append(self.tokenizer.eot)
        self.notes += [f"note: the prompt: {remark}" for remark in self.tokenizer.remarks(text)]
        self.turns.append(Turn(text, prompt))

    def answer(self):
        """Yield the answer to what was asked last, piece by piece, while the model writes it."""
        return pieces(self._draw_tokens(), self.tokenizer.decode)

    def _encode(self, text, first):
        """Token ids from the beginning (`first`), or from the end of an answer, to the place of the next answer."""
        user, assistant = ({"role": role, "content": text} for role in ("user", "assistant"))
        before = self.system if first else [user, assistant]  # any turn will do
        ids, _ = encode_conversation(self.tokenizer, self.template, [*before, user])
        return ids if first else ids[len(encode_conversation(self.tokenizer, self.template, before)[0]) :]

    def _draw_tokens(self):
        """Yield the answer's token ids as they are drawn, its end of text included. Each is in the turn by then."""
        answer, limit = self.turns[-1].answer, self.model.config.block_size
        for _ in range(self.max_new_tokens):
            full, dropped = len(self.ids) > limit, 0
            while full and len(self.turns) > 1 and len(self.ids) > limit // 2:  # the oldest turns make room
                del self.turns[0]
                self.turns[0].prompt = self._encode(self.turns[0].text, first=True)
                self.cache, dropped = None, dropped + 1
            if dropped:
                what = f"{dropped} oldest turns are" if dropped > 1 else "oldest turn is"
                self.notes.append(f"note: the conversation outgrew block_size={limit}: its {what} dropped")
            if len(self.ids) > limit:
                self.notes.append(f"note: the answer is cut after {len(answer)} tokens: block_size={limit} is full")
                return
            cache = self.cache or [KVCache(limit) for _ in self.model.blocks]
            self.cache = None  # and so it stays if this is interrupted, when some layers have the new keys and some not
            idx = torch.tensor([self.ids], device=self.model.wte.weight.device)
            answer.append(int(generate(self.model, idx, 1, cache=cache, **self.how)[0, -1]))
            self.cache = cache
            yield answer[-1]
            if answer[-1] == self.tokenizer.eot:
                return
        self.notes.append(f"note: the answer is cut after max_new_tokens={self.max_new_tokens}")


def pieces(tokens, decode):
    """Yield the text of token ids as they come: together the pieces are `decode` of all ids. A piece is text that the
    latest token has not changed, so the bytes of a character come together. Should a token change older text, the whole
    text follows, on a line of its own."""
    ids, before, shown = [], "", ""
    for token in tokens:
        ids.append(token)
        text = decode(ids)
        settled = commonprefix([before, text]).rstrip("\ufffd")  # which stands for bytes that are not yet a character
        if len(settled) > len(shown) and settled.startswith(shown):
            yield settled[len(shown) :]
            shown = settled
        before = text
    if before != shown:
        yield before[len(shown) :] if before.startswith(shown) else "\n" + before


def chat_with(trained: Trained, name: str, system: str, max_new_tokens: int, how: dict) -> None:
    """`talk` by the template `name`, or else the checkpoint's. ValueError, one line, if there is none."""
    own = templates.template_of(trained.meta)
    if own is None and not name:
        why = f"{trained.source} has no template, since it was not fine-tuned on conversations (data/sft/prepare.py)"
        raise ValueError(f"{why}: give --template={'|'.join(templates.TEMPLATES)}")
    template = templates.named_template(name) if name else own
    if own not in (None, template):
        print("note: --template is used; the checkpoint was fine-tuned with another", file=sys.stderr)
    talk(Chat(trained.model, trained.tokenizer, template, system, max_new_tokens, **how))


def talk(chat: Chat) -> None:
    """Answer the lines of standard input until they end. Ctrl-C at a terminal ends an answer. Answers go to standard
    output, everything else to standard error."""
    for text in user_lines():
        try:
            chat.ask(text)
            for piece in chat.answer():
                print(piece, end="", flush=True)
        except ValueError as e:  # its answer is an empty line: in a pipe, the nth line stays the nth answer
            chat.notes.append(f"left out: {e}")
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            chat.notes.append("note: the answer is cut by Ctrl-C; Ctrl-D ends the conversation")
        print(flush=True)
        while chat.notes:
            print(chat.notes.pop(0), file=sys.stderr)


def user_lines():
    """Yield the lines of standard input, without their ends. ValueError where one is not UTF-8 text."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # few Pythons lack it
            import readline  # noqa: F401  # makes `input` edit lines and remember them
        while True:
            try:
                if (text := input("> ")).strip():
                    yield decode_argument(text, "left out")
            except EOFError:
                return print()
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield decode_text(line, f"line {number} of standard input").removesuffix("\n")
