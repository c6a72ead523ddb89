"""sample.py --chat end to end, in this process, on a checkpoint with weights written by hand."""

import io
import sys

import pytest

import sample
from support.runs import call
from support.sampling import BYTES, chain, make_dataset, train_run

pytestmark = pytest.mark.usefixtures("one_thread")
TALK = BYTES | {"template": {"system": "{system};", "turn": "{prompt}={response}"}}
SAYS = {"=": "b", "b": "c", "c": [""]}  # every answer is "bc"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    return train_run(folder / "run", make_dataset(folder / "data"), "--max_iters=10")


@pytest.fixture
def chat(run, tmp_path, capsys, monkeypatch):
    """chat(raw bytes of standard input, flags) → (exit code, stdout, stderr), of the model that answers "bc"."""

    def chat(raw, *flags, tokenizer=TALK, follows=SAYS):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        out = chain(run, tmp_path / "chat", follows, tokenizer)
        capsys.readouterr()
        code = call(sample.main, f"--out_dir={out}", "--device=cpu", "--dtype=float32", "--temperature=0", *flags)
        return code, *capsys.readouterr()

    return chat


def test_a_conversation(chat):
    assert chat(b"hi\n\n", "--chat") == (0, "bc\n", "")
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
    assert chat(b"hi\n", "--chat", "--template=plain", tokenizer=BYTES, follows=plain) == (0, "bc\n", "")
    code, out, err = chat(b"hi\n", "--chat", tokenizer=BYTES)
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
        ("--chat --template=unknown", "is none of chat, alpaca, chatml, plain"),
        ("--chat --template=alpaca --system=s", "a system message, and this template has no text for one"),
    ],
)
def test_what_a_chat_refuses(chat, flags, words):
    code, out, err = chat(b"hi\n", *flags.split())
    notes, error = err.splitlines()[:-1], err.splitlines()[-1]
    assert (code, out) == (1, "") and error.startswith("error: ") and words in error
    assert all(note.startswith("note: ") for note in notes)
