"""sample.py end to end, in this process, on tiny checkpoints: one trained, the others with weights
written by hand."""

import io
import shutil
import sys

import pytest
import torch

import sample
from nanodnt import generate as generation
from nanodnt import weights
from nanodnt.data.tokenizer import Tokenizer
from support.hostile import refusal
from support.runs import call
from support.sampling import chain, make_dataset, train_run

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run trained on bytes, whose dataset is gone by the time anyone samples from it."""
    folder = tmp_path_factory.mktemp("bytes")
    data = make_dataset(folder / "data")
    train_run(folder / "run", data, "--max_iters=40")
    shutil.rmtree(data)
    return folder / "run"


@pytest.fixture
def draw(run, capsys):
    """draw(flags) → the printed samples, prompt included. Flags win over the defaults here."""

    def draw(*flags):
        argv = {
            "out_dir": run,
            "device": "cpu",
            "dtype": "float32",
            "max_new_tokens": 24,
            "num_samples": 2,
        }
        argv |= dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        capsys.readouterr()
        code = call(sample.main, *(f"--{key}={value}" for key, value in argv.items()))
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        *samples, end = out.split("\n" + "-" * 80 + "\n")
        assert end == ""
        return samples

    return draw


@pytest.fixture
def drawn(monkeypatch):
    """The token ids of every batch of samples, prompt included, as the model returned them."""
    batches, generate = [], generation.generate

    def recorded(*args, **how):
        batches.append(generate(*args, **how))
        return batches[-1]

    monkeypatch.setattr(generation, "generate", recorded)
    return batches


ABC = {"a": "b", "b": "c", "c": [""], "": "a"}


# ------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("prompt", ["déjà → vu", " two\nlines\n"])
def test_a_prompt_is_the_same_from_a_flag_a_file_and_stdin(draw, tmp_path, monkeypatch, prompt):
    """A byte order mark, the ends of lines and a last newline, as an editor writes them, make no
    difference."""
    from_flag, written = draw(f"--start={prompt}"), "\ufeff" + prompt.replace("\n", "\r\n") + "\r\n"
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in from_flag)
    (tmp_path / "prompt.txt").write_bytes(written.encode())
    assert draw(f"--start_file={tmp_path / 'prompt.txt'}") == from_flag
    nanogpts = f"--init_from=resume --start=FILE:{tmp_path / 'prompt.txt'} --num_samples=2"
    nanogpts += " --max_new_tokens=24 --temperature=0.8 --top_k=200 --seed=1337"
    assert draw(*nanogpts.split()) == from_flag
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(written.encode()), encoding="utf-8")
    )
    assert draw("--start_file=-") == from_flag


def test_a_prompt_that_is_no_text_is_refused(run, capsys, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes(b"a\0b")
    flags = f"--out_dir={run}", "--device=cpu"
    code = call(sample.main, *flags, f"--start_file={tmp_path / 'prompt.txt'}")
    refusal(capsys, code, f"{tmp_path / 'prompt.txt'} is binary, no text: byte 1 is 0")
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO("a".encode("utf-16")), encoding="utf-8")
    )
    refusal(
        capsys, call(sample.main, *flags, "--start_file=-"), "standard input is binary, no text"
    )


def test_the_prompt_conditions_the_text(run, draw, tmp_path):
    out = chain(run, tmp_path / "chain", {"a": "b", "b": "a", "x": "y", "y": "x"})
    three = draw(f"--out_dir={out}", "--start=abx", "--max_new_tokens=5", "--num_samples=3")
    assert three == ["abxyxyxy"] * 3


def test_an_empty_prompt_starts_a_document(run, draw, tmp_path):
    # begins after end of text
    assert draw(f"--out_dir={chain(run, tmp_path / 'chain', ABC)}") == ["abc"] * 2
    assert len(set(draw("--start=", "--num_samples=4", "--temperature=2"))) == 4


# -------------------------------------------------------------------------------------------- draws


def test_the_seed_decides(draw):
    hot = ["--start=It", "--temperature=1.5", "--top_k=0"]
    first = draw(*hot, "--seed=1")
    assert draw(*hot, "--seed=1") == first != draw(*hot, "--seed=2")
    assert first[0] != first[1]  # samples of one batch differ


def test_greedy_is_deterministic(draw):
    start = "--start=It was a"
    greedy = draw(start, "--temperature=0")
    for flags in (
        ["--temperature=0", "--seed=7"],
        ["--temperature=1.0", "--top_k=1"],
        ["--top_p=1e-9"],
    ):
        assert draw(start, *flags) == greedy
    assert draw(start, "--temperature=1.0", "--top_k=0") != greedy


# -------------------------------------------------------------------------------------- end of text


def test_stops_at_end_of_text(run, draw, drawn, tmp_path):
    out = chain(run, tmp_path / "chain", ABC)
    assert (
        draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=50", "--num_samples=3")
        == ["abc"] * 3
    )
    # no time is spent on what comes after it
    assert [tuple(ids.shape) for ids in drawn] == [(3, 4)]


def test_an_alphabet_without_end_of_text_never_stops(run, draw, tmp_path):
    alphabet = Tokenizer.meta_for("chars", ["\n", "a", "b"])
    out = chain(run, tmp_path / "chain", {"a": "b", "b": "\n", "\n": "a"}, alphabet)
    assert draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=8") == ["ab\nab\nab\n"] * 2
    # an empty prompt begins after a newline
    assert draw(f"--out_dir={out}", "--max_new_tokens=5") == ["ab\nab"] * 2


# ----------------------------------------------------------------------- vocabulary and checkpoints


def test_ids_that_are_no_token_are_never_drawn(run, draw, drawn, tmp_path):
    """A model of 300 ids with a tokenizer of 257, as imported models have it, that would only draw
    id 299."""
    out = chain(run, tmp_path / "chain", {"a": "b", "b": "c", "c": "a"})
    checkpoint = torch.load(out / "best.pt", weights_only=True)
    checkpoint["model_config"]["vocab_size"] = 300  # the weights are padded to 320
    checkpoint["model"]["head.weight"][299] = 2 * checkpoint["model"]["head.weight"][
        ord("a") : ord("d")
    ].sum(0)
    torch.save(checkpoint, out / "best.pt")
    for how in ("--temperature=0", "--top_k=0"):
        assert draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=7", how) == ["abcabcab"] * 2
    assert drawn[0].max() < 257


def test_best_is_the_default_and_any_checkpoint_can_be_named(run, draw, tmp_path):
    for name, letter in (("best.pt", "b"), ("last.pt", "l"), ("prev.pt", "p")):
        out = chain(run, tmp_path / "chain", {"a": letter, letter: [""]}, names=[name])
    flags = [f"--out_dir={out}", "--start=a"]
    assert draw(*flags) == ["ab"] * 2
    assert [
        draw(*flags, f"--checkpoint={name}")[0] for name in ("best.pt", "last.pt", "prev.pt")
    ] == ["ab", "al", "ap"]


def test_without_interop(run, monkeypatch, capsys):
    """What needs it ends in one line; all else does not import it."""
    monkeypatch.setattr(weights, "READERS", [])
    code = call(sample.main, f"--out_dir={run}", "--device=cpu", "--init_from=gpt2")
    refusal(capsys, code, "init_from=gpt2 is no checkpoint, and this copy has no interop/")
