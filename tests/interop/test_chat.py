"""Conversations: each turn equals generation from the whole history; what is fed, what is cut, text as it comes."""

import io
import sys
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

import interop.conversations.chat as chat_module
import sample
from interop.conversations.chat import Chat, pieces, talk, user_lines
from interop.conversations.template import TEMPLATES, Template, encode_conversation
from nanodnt.data.tokenizer import Tokenizer
from support.models import LLAMA, S5, build
from support.runs import call
from support.sampling import chain, make_dataset, train_run

pytestmark = pytest.mark.usefixtures("quick")
BYTES, GPT2_4096 = (Tokenizer(Tokenizer.meta_for(kind)) for kind in ("bytes", "gpt2_4096"))
EOT = 256
LETTERS = list(range(ord("a"), ord("z") + 1))
QUESTION = Template("S{system};", "Q{prompt}:{response}")  # as few tokens as possible


def bytes_model(block_size=128, **flags):
    return build(dict(vocab_size=257, block_size=block_size, **flags))


def say(chat, text) -> str:
    chat.ask(text)
    return "".join(chat.answer())


@pytest.fixture
def letters(monkeypatch):
    """Greedy, among letters only: answers that are text, and never end by themselves. Returns the choice (B, 1)."""

    def choose(logits, **how):
        return torch.tensor(LETTERS)[logits[:, LETTERS].argmax(-1)][:, None]

    monkeypatch.setattr("nanodnt.generate.sample_token", choose)
    return choose


@pytest.fixture
def script(monkeypatch):
    """script(…): what is drawn from now on, whatever the model: ids, texts in bytes with end of text behind them, and
    KeyboardInterrupt, which is raised."""

    def script(*tokens):
        drawn = [i for token in tokens for i in ([*token.encode(), EOT] if isinstance(token, str) else [token])]

        def draw(*_, **how):
            if drawn[0] is KeyboardInterrupt:
                raise drawn.pop(0)
            return torch.tensor([[drawn.pop(0)]])

        monkeypatch.setattr("nanodnt.generate.sample_token", draw)

    return script


def messages_of(chat) -> list:
    """The conversation as messages, an answer's text being that of its tokens."""
    messages = list(chat.system)
    for turn in chat.turns:
        messages.append({"role": "user", "content": turn.text})
        if turn.answer:
            messages.append({"role": "assistant", "content": chat.tokenizer.decode(turn.answer)})
    return messages


# ------------------------------------------------------------------------------------------------- the tokens it reads


@pytest.mark.parametrize("flags", (dict(), dict(LLAMA, **S5)), ids=("learned", "llama S5"))
@pytest.mark.parametrize("system", ("", "Be brief."))
def test_each_turn_equals_generation_from_the_whole_history(flags, system, letters):
    model = bytes_model(**flags)
    chat, fed = Chat(model, BYTES, TEMPLATES["chat"], system, max_new_tokens=4), []
    model.register_forward_pre_hook(lambda module, args: fed.append(args[0].shape[1]))  # tokens of each pass
    history = chat.system.copy()
    for text in ("Hi", "Wie geht's, ☃?", " x "):
        history.append({"role": "user", "content": text})
        ids = encode_conversation(BYTES, TEMPLATES["chat"], history)[0]
        seen = len(chat.ids[:-1])  # the last token of an answer has not been read yet, nor its end of text
        fed.clear()
        answer = say(chat, text)
        assert fed == [len(ids) - seen, 1, 1, 1]  # of the next turn only the new tokens
        for _ in range(4):  # without a cache
            ids.append(letters(model(torch.tensor([ids]))[0][:, -1]).item())
        assert chat.ids == ids and answer == bytes(ids[-4:]).decode()
        history.append({"role": "assistant", "content": answer})
    assert len(chat.notes) == 3 and set(chat.notes) == {"note: the answer is cut after max_new_tokens=4"}
    chat.ask("And now?")  # which ends what was cut
    history.append({"role": "user", "content": "And now?"})
    assert chat.ids == encode_conversation(BYTES, TEMPLATES["chat"], history)[0]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_tokens_are_the_templates(template, script):
    system = "Be brief." if template.system else ""
    chat = Chat(bytes_model(512), BYTES, template, system)
    script("Yes", "No, ☃", "Maybe")
    assert [say(chat, text) for text in ("a", "b c", "d")] == ["Yes", "No, ☃", "Maybe"] and chat.notes == []
    assert chat.ids == encode_conversation(BYTES, template, messages_of(chat))[0]


def test_an_answer_keeps_the_tokens_that_were_drawn(script):
    """Here "ab" drawn as a and b, where the tokenizer has a token for both."""
    drawn = [*GPT2_4096.encode("a"), *GPT2_4096.encode("b"), GPT2_4096.eot] * 2
    assert len(GPT2_4096.encode("ab")) == 1
    script(*drawn)
    chat = Chat(build(dict(vocab_size=4096, block_size=64)), GPT2_4096, TEMPLATES["chat"])
    assert say(chat, "Hi") == "ab" == say(chat, "Hi")
    prompt, _ = encode_conversation(GPT2_4096, TEMPLATES["chat"], [{"role": "user", "content": "Hi"}])
    assert chat.ids == [*prompt, *drawn[:3], *GPT2_4096.encode("\nUser: Hi\nAssistant:\n"), *drawn[:3]]


def test_an_answer_of_no_token(script):
    chat = Chat(bytes_model(), BYTES, QUESTION)
    script("", "ok")
    assert say(chat, "a") == "" and say(chat, "b") == "ok"
    assert bytes(i for i in chat.ids if i != EOT) == b"Qa:\nQb:ok" and chat.ids.count(EOT) == 3


# ----------------------------------------------------------------------------------------------- where it does not fit


@pytest.fixture
def reads(letters, monkeypatch):
    """[(ids that the model has read, how many of them were fed)] of every token, each checked without a cache."""
    found, generate = [], chat_module.generate

    def checked(model, idx, n, cache, **how):
        found.append((idx[0].tolist(), idx.shape[1] - cache[0].length))
        out = generate(model, idx, n, cache=cache, **how)
        assert out[0, -1] == letters(model(idx)[0][:, -1]) and {c.length for c in cache} == {idx.shape[1]}
        return out

    monkeypatch.setattr(chat_module, "generate", checked)
    return found


def test_the_oldest_turns_make_room(reads):
    """In 32 tokens: a system message, turns of 4 and answers of 5 tokens and end of text."""
    chat, notes = Chat(bytes_model(32, pos="rope"), BYTES, QUESTION, "sys", max_new_tokens=5), []
    fresh = 0
    for number in range(9):
        reads.clear()
        answer = say(chat, str(number)).encode()
        assert len(answer) == 5 and chat.turns[-1].answer == list(answer)
        read, _ = encode_conversation(BYTES, QUESTION, messages_of(chat)[:-1])  # without what was dropped
        assert chat.ids == [*read, *answer] and read[1:6] == list(b"Ssys;")
        for n, (ids, fed) in enumerate(reads):
            assert len(ids) <= 32 and ids[-n or len(ids) :] == list(answer[:n])
            assert fed in (1 if n else 6, len(ids))  # the new ones, or all in a fresh cache
        fresh += sum(fed == len(ids) for ids, fed in reads)
        notes += [(number, note) for note in chat.notes if "max_new_tokens" not in note]
        chat.notes.clear()
    outgrew = "note: the conversation outgrew block_size=32: its 2 oldest turns are dropped"  # to 16 tokens or fewer
    assert notes == [(number, outgrew) for number in (2, 4, 6, 8)] and fresh == 1 + 4


def test_room_is_made_within_an_answer(reads):
    chat = Chat(bytes_model(32), BYTES, QUESTION, max_new_tokens=14)
    first, second = say(chat, "a"), say(chat, "b")
    lengths = [len(ids) for ids, _ in reads]
    assert len(first) == len(second) == 14 and max(lengths) == 32
    at = 14 + lengths[14:].index(32) + 1  # the first turn is dropped here, and the second goes on
    assert lengths[at] < lengths[at - 1] and reads[at][0] == [EOT, *b"Qb:", *second[: at - 14].encode()]
    assert reads[at][1] == lengths[at] and reads[at + 1][1] == 1
    assert chat.notes[1] == "note: the conversation outgrew block_size=32: its oldest turn is dropped"


def test_an_answer_that_fills_the_context(reads):
    chat = Chat(bytes_model(16), BYTES, QUESTION, "sys")
    answer = say(chat, "ab")
    assert len(answer) == 17 - 10 and len(reads[-1][0]) == 16
    assert chat.notes == ["note: the answer is cut after 7 tokens: block_size=16 is full"]
    say(chat, "c")
    assert chat.ids[:9] == [EOT, *b"Ssys;Qc:"] and [turn.text for turn in chat.turns] == ["c"]


def test_a_prompt_without_room_for_an_answer(reads):
    chat = Chat(bytes_model(16), BYTES, QUESTION, "sys", max_new_tokens=3)
    say(chat, "1")
    before = chat.ids
    with pytest.raises(ValueError, match=r"makes 16 tokens with its template and system message, and block_size=16"):
        chat.ask("12345678")
    for text, words in (("a\ud800", "is not text in UTF-8"), (" ", "empty")):
        with pytest.raises(ValueError, match=words):
            chat.ask(text)
    assert chat.ids == before and len(chat.turns) == 1
    assert len(say(chat, "1234567")) == 2  # its 15 tokens leave room for one, and end of text
    assert chat.notes[-1].startswith("note: the answer is cut after 2 tokens: block_size=16")


def test_what_a_chat_cannot_be():
    chars = Tokenizer(Tokenizer.meta_for("chars", ["\n", "a"]))
    with pytest.raises(ValueError, match="tokenizer .chars. has no end of text"):
        Chat(bytes_model(), chars, QUESTION)
    with pytest.raises(ValueError, match="the system message .* is empty"):
        Chat(bytes_model(), BYTES, QUESTION, "  ")


# ------------------------------------------------------------------------------------------------------ interruptions


def test_an_answer_that_nobody_reads_to_the_end(reads):
    chat = Chat(bytes_model(), BYTES, QUESTION, max_new_tokens=5)
    chat.ask("a")
    answer = chat.answer()
    next(answer), next(answer)
    answer.close()
    say(chat, "b")
    drawn = chat.turns[0].answer
    assert len(drawn) == 4 and chat.ids[:-5] == [EOT, *b"Qa:", *drawn, *b"\nQb:"] and drawn[-1] == EOT
    assert [fed for _, fed in reads] == [4, 1, 1, 1 + 1 + 4, 1, 1, 1, 1]


def test_a_pass_that_is_interrupted_between_two_layers(reads):
    """Some layers have its keys, others not: the next answer starts with a fresh cache."""
    model = bytes_model()
    chat = Chat(model, BYTES, QUESTION, max_new_tokens=5)
    say(chat, "a")

    def interrupt(*_):
        handle.remove()
        raise KeyboardInterrupt

    handle = model.blocks[1].register_forward_pre_hook(interrupt)
    chat.ask("b")
    with pytest.raises(KeyboardInterrupt):
        list(chat.answer())
    reads.clear()
    say(chat, "c")
    assert chat.turns[1].answer == [EOT] and reads[0] == (chat.ids[:-5], len(chat.ids) - 5)
    assert [fed for _, fed in reads[1:]] == [1] * 4


# ----------------------------------------------------------------------------------------------------- text as it comes


def streamed(tokenizer, ids) -> list:
    """The pieces of a text. They are complete: none ends in half a character."""
    found = list(pieces(iter(ids), tokenizer.decode))
    assert all(not piece.endswith("\ufffd") for piece in found[:-1])
    return found


def json_tokenizer(vocab, decoder):
    made = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(["<eot>", *vocab])}))
    made.add_special_tokens(["<eot>"])
    made.decoder = decoder
    meta = {"tokenizer": "json", "vocab_size": len(vocab) + 1, "eot": 0, "bos": None, "json": made.to_str()}
    return Tokenizer(meta)


@given(st.text(max_size=9), st.binary(max_size=4), st.sampled_from([BYTES, GPT2_4096]))
def test_pieces_together_are_the_text(text, noise, tokenizer):
    whole = [*tokenizer.encode(text), tokenizer.eot]
    assert "".join(streamed(tokenizer, whole)) == text
    broken = [*noise, *tokenizer.encode(text), *noise, tokenizer.eot]
    assert "".join(pieces(iter(broken), tokenizer.decode)) == tokenizer.decode(broken)


def test_a_character_comes_whole_and_text_one_token_late():
    assert streamed(BYTES, "né☃".encode()) == ["n", "é", "☃"]
    come = []

    def tokens():
        for i in b"abc":
            yield i
            come.append("".join(seen))

    seen = []
    for piece in pieces(tokens(), BYTES.decode):
        seen.append(piece)
    assert come == ["", "a", "ab"] and seen == ["a", "b", "c"]


LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize(
    "decoder, tokens, expected",
    [
        (LLAMA_DECODER, ["▁a", "▁b", "<0xC3>", "<0xA9>", "<0xE2>", "<0x98>", "<0x83>", "c"], ["a", " b", "é☃", "c"]),
        (decoders.WordPiece(cleanup=True), ["do", "##n", "'", "##t", "it", "."], ["do", "n", " '", "t", " it", "."]),
        (decoders.BPEDecoder(suffix="</w>"), ["a</w>", "b</w>"], ["a", " b"]),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("xy", "z")]), ["a", "x", "y"], ["a", "z"]),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("abc", "z")]), ["a", "b", "c"], ["a", "\nz"]),
    ],
)
def test_tokenizers_whose_tokens_have_no_text_of_their_own(decoder, tokens, expected):
    tokenizer = json_tokenizer(sorted(set(tokens)), decoder)
    ids = [tokenizer.json.token_to_id(token) for token in tokens]
    assert streamed(tokenizer, [*ids, 0]) == expected
    assert "".join(expected).rpartition("\n")[2] == tokenizer.decode(ids)


# --------------------------------------------------------------------------------------------------------- the terminal


def piped(monkeypatch, raw: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))


def typed(monkeypatch, *lines):
    """A terminal at which these lines are typed; an exception stands for a key such as Ctrl-D."""
    prompts, lines = [], list(lines)

    def read(prompt):
        prompts.append(prompt)
        if isinstance(lines[0], type):
            raise lines.pop(0)
        return lines.pop(0)

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", read)
    return prompts


def test_ids_that_are_no_token_are_never_drawn():
    """In a model of 300 ids, whose last ones are by far the most likely."""
    model = build(dict(vocab_size=300, block_size=128))
    with torch.no_grad():
        model.wte.weight[257:300] *= 100  # the head is the same matrix
    chat = Chat(model, BYTES, QUESTION, max_new_tokens=30, temperature=1.0, generator=torch.Generator())
    say(chat, "abc")
    assert len(chat.turns[0].answer) >= 1 and max(chat.turns[0].answer) < 257


def test_what_a_prompt_names_is_said():
    chat = Chat(bytes_model(), BYTES, QUESTION, max_new_tokens=1)
    chat.ask("a<|endoftext|>b")
    assert chat.notes == ["note: the prompt: <|endoftext|> is read as ordinary text, not as a token"]


def test_lines_from_a_pipe(monkeypatch):
    piped(monkeypatch, b"\xef\xbb\xbfa\r\nb")
    assert list(user_lines()) == ["a", "b"]
    piped(monkeypatch, "a ☃ \r\n\n  \nlast".encode())
    assert list(user_lines()) == ["a ☃ ", "", "  ", "last"]
    piped(monkeypatch, b"good\nd\xe9j\xe0\n")
    lines = user_lines()
    assert next(lines) == "good"
    with pytest.raises(ValueError, match="^line 2 of standard input is not UTF-8 text: byte 1 is not"):
        next(lines)


def test_a_blank_line_from_a_pipe_is_a_blank_answer(script, monkeypatch, capsys):
    script(*b"x", EOT, *b"y", EOT)
    piped(monkeypatch, b"1\n\n2\n")
    talk(Chat(bytes_model(), BYTES, QUESTION))
    out, err = capsys.readouterr()
    assert out == "x\n\ny\n" and err == "left out: the prompt (message 1) is empty or only white space\n"


def test_ctrl_c(script, monkeypatch, capsys):
    script(*[*b"abc", KeyboardInterrupt, "ok"] * 2)
    typed(monkeypatch, "1", "2", KeyboardInterrupt)
    chat = Chat(bytes_model(), BYTES, QUESTION)
    with pytest.raises(KeyboardInterrupt):  # at the prompt it ends the program
        talk(chat)
    note = "note: the answer is cut by Ctrl-C; Ctrl-D ends the conversation\n"
    assert capsys.readouterr() == ("ab\nok\n", note)
    assert chat.ids == [EOT, *b"Q1:abc", EOT, *b"\nQ2:ok", EOT]  # what was drawn is in the conversation
    piped(monkeypatch, b"1\n2\n")
    with pytest.raises(KeyboardInterrupt):  # and where there is none
        talk(Chat(bytes_model(), BYTES, QUESTION))


# ----------------------------------------------------------------------------------------------------- sample.py --chat

META = Tokenizer.meta_for("bytes")
TALK = META | {"template": {"system": "{system};", "turn": "{prompt}={response}"}}
SAYS = {"=": "b", "b": "c", "c": [""]}  # every answer is "bc"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    return train_run(folder / "run", make_dataset(folder / "data"), "--max_iters=10")


@pytest.fixture
def chat(run, tmp_path, capsys, monkeypatch):
    """chat(raw bytes of standard input, flags) → (exit code, stdout, stderr), of the model that answers "bc"."""

    def chat(raw, *flags, tokenizer=TALK, follows=SAYS):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        out = chain(run, tmp_path / "chat", follows, tokenizer)
        capsys.readouterr()
        code = call(sample.main, f"--out_dir={out}", "--device=cpu", "--dtype=float32", "--temperature=0", *flags)
        return code, *capsys.readouterr()

    return chat


def test_a_conversation(chat):
    assert chat(b"hi\n", "--chat") == (0, "bc\n", "")
    assert chat(b"", "--chat=True") == (0, "", "")
    code, out, err = chat(b"hi\nxy\na long prompt\nz", "--chat", "--system=s", "--num_samples=1", "--compile=False")
    assert (code, out) == (0, "bc\nbc\n\nbc\n")
    outgrew, left_out, again = err.splitlines()
    assert outgrew == again == "note: the conversation outgrew block_size=8: its oldest turn is dropped"
    assert left_out.startswith("left out: this prompt makes 17 tokens with its template and system message")


def test_the_template_of_a_chat(chat):
    code, out, err = chat(b"hi\n", "--chat", "--template=plain", "--max_new_tokens=3")
    assert code == 0 and out != "bc\n" and "note: --template is used; the checkpoint was fine-tuned with another" in err
    plain = {"hi"[-1]: "b"} | SAYS  # the prompt's last letter is followed by an answer
    assert chat(b"hi\n", "--chat", "--template=plain", tokenizer=META, follows=plain) == (0, "bc\n", "")
    code, out, err = chat(b"hi\n", "--chat", tokenizer=META)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert "best.pt has no template" in err and "--template=chat|alpaca|chatml|plain" in err
    code, _, err = chat(b"hi\n", "--chat", tokenizer=TALK | {"template": 5})
    assert code == 1 and "damaged" in err and err.count("\n") == 1
    code, _, err = chat(b"x\n", "--chat", "--system=a long system message")
    assert code == 1 and "the system message leaves no room in block_size=8: shorten it" in err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--chat --start=It", "start is not for a chat"),
        ("--chat --start_file=-", "start_file is not for a chat"),
        ("--chat --num_samples=2", "leave out --chat or --num_samples"),
        ("--chat --compile=True", "compile is not for a chat"),
        ("--system=s", "template and system are for a chat: add --chat"),
        ("--template=chat", "template and system are for a chat: add --chat"),
        ("--chat --template=alpaca --system=s", "a system message, and this template has no text for one"),
    ],
)
def test_what_a_chat_refuses(chat, flags, words):
    code, out, err = chat(b"hi\n", *flags.split())
    notes, error = err.splitlines()[:-1], err.splitlines()[-1]
    assert (code, out) == (1, "") and error.startswith("error: ") and words in error
    assert all(note.startswith("note: ") for note in notes)
