"""chat.py: each answer is what the model generates from the whole conversation before
it."""

import io
import sys

import pytest
import torch

import chat as command
import sample
from interop.conversations.chat import chat_with
from interop.conversations.template import TEMPLATES, encode_conversation
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.generate import generate
from nanodnt.weights import Trained
from support.examples import chat as messages_of
from support.models import build
from support.runs import call
from support.sampling import chain, make_dataset, train_run

pytestmark = pytest.mark.usefixtures("quick")
META = Tokenizer.meta_for("bytes")
TALK = META | {"template": {"system": "{system};", "turn": "{prompt}={response}"}}
SAYS = {"=": "b", "b": "c", "c": [""]}  # every answer is "bc"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    return train_run(folder / "run", make_dataset(folder / "data"), "--max_iters=10")


@pytest.fixture
def chat(run, tmp_path, capsys, monkeypatch):
    """chat(raw bytes of standard input, flags) → (exit code, stdout, stderr), of the model that
    answers "bc"."""

    def chat(raw, *flags, tokenizer=TALK, follows=SAYS):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        out = chain(run, tmp_path / "chat", follows, tokenizer)
        capsys.readouterr()
        flags = (
            f"--out_dir={out}",
            "--device=cpu",
            "--dtype=float32",
            "--temperature=0",
            *flags,
        )
        return call(command.main, *flags), *capsys.readouterr()

    return chat


@pytest.mark.parametrize("block_size", [32, 256])
def test_each_answer_is_generated_from_the_whole_conversation(block_size, monkeypatch, capsys):
    """With a system message, in a context that holds all of it or only its end."""
    model = build(dict(vocab_size=257, block_size=block_size), dtype=torch.float32)
    tokenizer = Tokenizer(META)
    said, prompts = [], ["Hi", "Wie geht's, ☃?", " x "]
    for number in range(1, 4):
        contents = [text for turn in zip(prompts, [*said, ""], strict=False) for text in turn][:-1]
        ids, _ = encode_conversation(
            tokenizer, TEMPLATES["chat"], messages_of(*contents, system="Be.")
        )
        drawn = generate(model, torch.tensor([ids]), 6, temperature=0, stop=256)
        said.append(tokenizer.decode(drawn[0, len(ids) :]))
        assert len(said) == number and said[-1].strip()
    raw = io.BytesIO("Hi\nWie geht's, ☃?\r\n x ".encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw, encoding="utf-8"))
    chat_with(Trained(model, tokenizer, META, "it", 0), "chat", "Be.", 6, temperature=0)
    assert capsys.readouterr() == ("".join(f"{text}\n" for text in said), "")


def test_lines_that_are_no_prompt_have_an_empty_answer(chat):
    code, out, err = chat(b"hi\n\nd\xe9\nxy")
    assert (code, out) == (0, "bc\n\n\nbc\n")
    blank, other = err.splitlines()
    assert blank == "left out: message 3, of the user, is empty or only white space"
    assert other.startswith("left out: this line is not UTF-8 text")


def test_an_answer_of_no_token_is_forgotten(chat):
    assert chat(b"hi\nxy\n", follows={"=": [""]}) == (0, "\n\n", "")


def test_the_template_of_a_chat(chat):
    plain = {"hi"[-1]: "b"} | SAYS  # the prompt's last letter is followed by an answer
    assert chat(b"hi\n", "--template=plain", tokenizer=META, follows=plain) == (0, "bc\n", "")
    assert chat(b"hi\n", "--system=s") == (0, "bc\n", "")


@pytest.mark.parametrize(
    "flags, tokenizer, words",
    [
        (
            "--template=alpaca --system=s",
            TALK,
            "a system message, and this template has no text for one",
        ),
        ("", META, "best.pt has no template"),
        ("", TALK | {"template": 5}, "damaged"),
    ],
)
def test_what_a_chat_refuses(chat, flags, tokenizer, words):
    code, out, err = chat(b"hi\n", *flags.split(), tokenizer=tokenizer)
    assert (
        (code, out) == (1, "")
        and err.startswith("error: ")
        and words in err
        and err.count("\n") == 1
    )


def test_a_tokenizer_without_end_of_text(chat):
    letters = Tokenizer.meta_for("chars", list("=bchi"))
    code, out, err = chat(
        b"hi\n", "--template=plain", tokenizer=letters, follows={"=": "b", "b": "c"}
    )
    assert (code, out) == (1, "") and "tokenizer (chars) has no end of text" in err


@pytest.mark.parametrize("flag", ["--chat", "--system=s", "--template=chat"])
def test_sample_names_the_command_of_a_chat(flag, capsys):
    assert call(sample.main, flag) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: unknown flag {flag.partition('=')[0]} ")
    assert "python chat.py" in line
