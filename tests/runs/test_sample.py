"""sample.py end to end, in this process, on tiny checkpoints: one trained, the others with weights written by hand."""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import sample
import train
from model import GPT, GPTConfig
from nanodnt.data.tokenizer import Tokenizer
from support.hostile import refusal
from support.runs import ROOT

pytestmark = pytest.mark.usefixtures("one_thread", "quick")
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 8
TINY = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=8", "--batch_size=4", "--eval_interval=10"]
TINY += ["--warmup_iters=1", "--learning_rate=1e-2", "--device=cpu", "--dtype=float32", "--compile=False"]
BYTES = Tokenizer.meta_for("bytes")


def make_dataset(folder, tokenizer=BYTES, text=TEXT):
    """A prepared dataset written from the description of the format, without nanodnt/prepare."""
    folder.mkdir(parents=True)
    ids = Tokenizer(tokenizer).encode(text)
    splits = {}
    for split, tokens in (("train", ids), ("val", ids[: len(ids) // 2])):
        raw = np.array(tokens, "<u2").tobytes()
        (folder / f"{split}.bin").write_bytes(raw)
        splits[split] = {"file": f"{split}.bin", "tokens": len(tokens), "max_id": max(tokens)}
        splits[split]["sha256"] = hashlib.sha256(raw).hexdigest()
    meta = {"format": 1, "dataset": folder.name, "source": "a test", **tokenizer, "dtype": "uint16", "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def call(main, *argv):
    """The exit code of `main` (of train or sample) for this command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, argv)])
        try:
            return main()
        except SystemExit as e:
            return e.code


def train_run(out_dir, dataset, *flags):
    assert call(train.main, *TINY, f"--out_dir={out_dir}", f"--dataset={dataset}", *flags) == 0
    return out_dir


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
        argv = {"out_dir": run, "device": "cpu", "dtype": "float32", "max_new_tokens": 24, "num_samples": 2}
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
    batches, generate = [], sample.generate

    def recorded(*args, **how):
        batches.append(generate(*args, **how))
        return batches[-1]

    monkeypatch.setattr(sample, "generate", recorded)
    return batches


# A model that knows only which token follows which: its blocks write nothing, and row w of the head looks for the
# embedding of the tokens that w follows, so that all of them are equally likely and nothing else ever is.


def chain(run, out_dir, follows, tokenizer=BYTES, padding=0.0, names=("best.pt",)):
    """A run directory whose checkpoints continue token t by one of follows[t], from the trained run's by new weights.

    Tokens are characters, "" is end of text. `padding` is the weight of the entries beyond the vocabulary."""
    tokens = {*follows, *(c for after in follows.values() for c in after)}
    ids = {c: Tokenizer(tokenizer).encode(c)[0] if c else tokenizer["eot"] for c in tokens}
    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=tokenizer["vocab_size"], tie_weights=False)
    model = GPT(GPTConfig(**sizes))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0 if name == "final_norm.gain" else 0.0)
        model.head.weight[tokenizer["vocab_size"] :] = padding
        for i, (c, after) in enumerate(follows.items()):
            model.wte.weight[ids[c], i] = 1.0
            for d in after:
                model.head.weight[ids[d], i] = 50.0
    checkpoint = torch.load(run / "last.pt", weights_only=True)
    checkpoint |= {
        "model": model.state_dict(),
        "model_config": vars(model.config),
        "meta": checkpoint["meta"] | tokenizer,
    }
    out_dir.mkdir(exist_ok=True)
    for name in names:
        torch.save(checkpoint, out_dir / name)
    return out_dir


ABC = {"a": "b", "b": "c", "c": [""], "": "a"}


# ------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("prompt", ["It was", "déjà → vu", " two\nlines ", "It ends here.\n"])
def test_a_prompt_is_the_same_from_a_flag_a_file_and_stdin(draw, tmp_path, monkeypatch, prompt):
    from_flag = draw(f"--start={prompt}")
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text in from_flag)
    (tmp_path / "prompt.txt").write_bytes(prompt.encode() + b"\n")  # as an editor writes it, and echo
    assert draw(f"--start_file={tmp_path / 'prompt.txt'}") == from_flag
    assert draw(f"--start=FILE:{tmp_path / 'prompt.txt'}") == from_flag  # nanoGPT's name for it
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode() + b"\n")))
    assert draw("--start_file=-") == from_flag


def test_a_prompt_file_that_cannot_be_read(run, tmp_path, capsys):
    (tmp_path / "latin1.txt").write_bytes("déjà".encode("latin-1"))
    (tmp_path / "prompt.txt").write_text("a")
    for name, problem in (
        ("missing.txt", "No such file"),
        ("", "directory"),
        ("latin1.txt", "is not UTF-8 text"),
        (".", "directory"),
    ):
        start = f"FILE:{tmp_path / name if name else ''}"
        code = call(sample.main, f"--out_dir={run}", f"--start={start}")
        refusal(capsys, code, f"start={start}", problem)
    both = f"--start=FILE:{tmp_path / 'prompt.txt'}", f"--start_file={tmp_path / 'prompt.txt'}"
    refusal(capsys, call(sample.main, f"--out_dir={run}", *both), "start and start_file", "keep one")
    assert call(sample.main, "--help") == 0
    assert "FILE:" in capsys.readouterr().out


def test_the_prompt_conditions_the_text(run, draw, tmp_path):
    out = chain(run, tmp_path / "chain", {"a": "b", "b": "a", "x": "y", "y": "x"})
    assert draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=5") == ["ababab"] * 2
    assert draw(f"--out_dir={out}", "--start=abx", "--max_new_tokens=5") == ["abxyxyxy"] * 2


def test_an_empty_prompt_starts_a_document(run, draw, tmp_path):
    assert draw(f"--out_dir={chain(run, tmp_path / 'chain', ABC)}") == ["abc"] * 2  # begins after end of text
    assert len(set(draw("--start=", "--num_samples=4", "--temperature=2"))) == 4


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_a_prompt_longer_than_the_context(tmp_path, draw, drawn, pos):
    out = train_run(tmp_path / "run", make_dataset(tmp_path / "data"), "--max_iters=60", f"--pos={pos}")
    prompt = TEXT[:40]  # the context is 8
    for start in (prompt, prompt[-4:]):
        texts = draw(f"--out_dir={out}", "--temperature=1.0", "--num_samples=64", f"--start={start}")
        assert all(text.startswith(start) for text in texts)
    assert drawn[0].shape == (64, 40 + 24)
    assert torch.equal(drawn[0][:, 40:], drawn[1][:, 4:])  # it goes on from the last block_size/2 tokens


# --------------------------------------------------------------------------------------------------------- draws


def test_the_seed_decides(draw):
    hot = ["--start=It", "--temperature=1.5", "--top_k=0"]
    first = draw(*hot, "--seed=1")
    assert draw(*hot, "--seed=1") == first
    assert draw(*hot, "--seed=2") != first
    assert first[0] != first[1]  # samples of one batch differ


def test_greedy_is_deterministic(draw):
    greedy = draw("--start=It was a", "--temperature=0", "--num_samples=5")
    assert len(set(greedy)) == 1
    same = ["--start=It was a", "--num_samples=5"]
    assert draw(*same, "--temperature=0", "--seed=7") == greedy
    assert draw(*same, "--temperature=1.0", "--top_k=1") == greedy
    assert draw(*same, "--temperature=1.0", "--top_p=1e-9") == greedy  # the most likely token always stays
    assert draw(*same, "--temperature=1.0", "--top_k=0") != greedy


def test_compiled_steps_draw_the_same_text(draw, monkeypatch, run, capsys):
    hot = ["--start=It", "--temperature=1.5", "--top_k=0"]
    plain, steps, compile_step = draw(*hot), [], sample.compile_step
    monkeypatch.setattr(sample, "compile_step", lambda: steps.append(compile_step("eager")) or steps[-1])
    assert draw(*hot, "--compile=True") == plain and len(steps) == 1

    def broken(*args):
        raise RuntimeError("no compiler found\nat line 1")

    monkeypatch.setattr(sample, "compile_step", lambda: broken)
    code = call(sample.main, f"--out_dir={run}", "--device=cpu", "--start=It", "--compile=True")
    refusal(capsys, code, "torch.compile failed (no compiler found)", "use --compile=False")


@pytest.mark.parametrize("n", [1, 3])
def test_as_many_samples_and_tokens_as_asked(run, draw, tmp_path, n):
    out = chain(run, tmp_path / "chain", {"a": "a"})
    assert draw(f"--out_dir={out}", "--start=a", f"--num_samples={n}", "--max_new_tokens=7") == ["a" * 8] * n


def test_top_k_and_top_p_cut(run, draw, tmp_path):
    """a is followed by a to h with equal probability 1/8: without a cut all appear, with top_p=1/8 only one does."""
    letters = "abcdefgh"
    out = chain(run, tmp_path / "chain", dict.fromkeys(letters, letters))
    flags = [f"--out_dir={out}", "--start=a", "--max_new_tokens=10", "--num_samples=20", "--temperature=1.0"]
    assert set("".join(draw(*flags, "--top_k=0"))) == set(letters)
    assert len(set("".join(draw(*flags, "--top_k=0", "--top_p=0.1"))) - {"a"}) <= 1
    assert set("".join(draw(*flags, "--top_k=8", "--top_p=0.95"))) == set(letters)


# ---------------------------------------------------------------------------------------------------- end of text


def test_stops_at_end_of_text(run, draw, drawn, tmp_path):
    out = chain(run, tmp_path / "chain", ABC)
    assert draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=50", "--num_samples=3") == ["abc"] * 3
    assert [tuple(ids.shape) for ids in drawn] == [(3, 4)]  # no time is spent on what comes after it


def test_each_sample_stops_at_its_own_end(run, draw, tmp_path):
    out = chain(run, tmp_path / "chain", ABC | {"c": ["a", ""]})  # after c: again, or the end
    texts = draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=90", "--num_samples=16", "--temperature=1.0")
    assert all(re.fullmatch("(abc)+", text) for text in texts), texts  # 30 times c and no end: once in 10⁸
    assert len({len(text) for text in texts}) > 1


def test_an_alphabet_without_end_of_text_never_stops(run, draw, tmp_path):
    out = chain(
        run, tmp_path / "chain", {"a": "b", "b": "\n", "\n": "a"}, Tokenizer.meta_for("chars", ["\n", "a", "b"])
    )
    assert draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=8") == ["ab\nab\nab\n"] * 2
    assert draw(f"--out_dir={out}", "--max_new_tokens=5") == ["ab\nab"] * 2  # an empty prompt begins after a newline


# ------------------------------------------------------------------------------------- vocabulary and checkpoints


def test_padding_entries_are_never_drawn(run, draw, drawn, tmp_path):
    """257 tokens are padded to 320. Were the other 63 allowed, they would win here, and be missing in the text."""
    out = chain(run, tmp_path / "chain", ABC, padding=1000.0)
    assert draw(f"--out_dir={out}", "--start=a", "--temperature=0") == ["abc"] * 2
    draw("--start=a", "--temperature=100", "--top_k=0", "--max_new_tokens=40", "--num_samples=40")
    assert 200 < drawn[-1].max() < 257  # hot enough to have drawn them


def test_the_tokenizer_comes_from_the_checkpoint(tmp_path, draw):
    """Training on characters, then sampling without the dataset: only the corpus' own characters, as in the text."""
    corpus = "свобода — это рабство\n" * 30
    data = make_dataset(tmp_path / "data", Tokenizer.meta_for("chars", sorted(set(corpus))), corpus)
    out = train_run(tmp_path / "run", data, "--max_iters=60")
    shutil.rmtree(data)
    texts = draw(f"--out_dir={out}", "--start=это", "--temperature=1.0", "--max_new_tokens=50")
    assert all(text.startswith("это") and len(text) == 53 for text in texts)
    assert set("".join(texts)) <= set(corpus)


def test_an_alphabet_without_newline_takes_a_prompt(run, draw, tmp_path):
    out = chain(run, tmp_path / "chain", {"a": "b", "b": "a"}, Tokenizer.meta_for("chars", ["a", "b"]))
    assert draw(f"--out_dir={out}", "--start=a", "--max_new_tokens=3") == ["abab"] * 2


def test_best_is_the_default_and_any_checkpoint_can_be_named(run, draw, tmp_path):
    for name, letter in (("best.pt", "b"), ("last.pt", "l"), ("prev.pt", "p")):
        out = chain(run, tmp_path / "chain", {"a": letter, letter: [""]}, names=[name])
    flags = [f"--out_dir={out}", "--start=a"]
    assert draw(*flags) == ["ab"] * 2
    assert [draw(*flags, f"--checkpoint={name}")[0] for name in ("best.pt", "last.pt", "prev.pt")] == ["ab", "al", "ap"]


def test_training_leaves_what_sampling_reads(run, draw):
    assert [len(draw(f"--checkpoint={name}")) for name in ("best.pt", "last.pt", "prev.pt")] == [2, 2, 2]


# ------------------------------------------------------------------------------------------------------------ --chat

TALK = BYTES | {"template": {"system": "{system};", "turn": "{prompt}={response}"}}
SAYS = {"=": "b", "b": "c", "c": [""]}  # every answer is "bc"


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
        ("--chat --template=alpaca --system=s", "no text for a system message: leave --system out"),
    ],
)
def test_what_a_chat_refuses(chat, flags, words):
    code, out, err = chat(b"hi\n", *flags.split())
    notes, error = err.splitlines()[:-1], err.splitlines()[-1]
    assert (code, out) == (1, "") and error.startswith("error: ") and words in error
    assert all(note.startswith("note: ") for note in notes)


def test_a_chat_that_cannot_be(chat):
    chars = Tokenizer.meta_for("chars", ["=", "b", "c"])
    code, _, err = chat(b"b\n", "--chat", "--template=plain", tokenizer=chars, follows={"=": "b", "b": "c"})
    assert code == 1 and err.count("\n") == 1 and "(chars) has no end of text" in err
    code, out, err = chat(b"hi\nd\xe9j\xe0\n", "--chat")
    assert (code, out, err) == (1, "bc\n", "error: line 2 of standard input is not UTF-8 text\n")


def test_as_a_program_with_the_prompt_piped_in(run, draw):
    argv = [f"--out_dir={run}", "--device=cpu", "--dtype=float32", "--max_new_tokens=24", "--num_samples=2"]
    command = [sys.executable, ROOT / "sample.py", *argv, "--start_file=-"]
    done = subprocess.run(command, input="Où était\n".encode(), capture_output=True, timeout=120)
    expected = "".join(text + "\n" + "-" * 80 + "\n" for text in draw("--start=Où était"))
    assert (done.returncode, done.stderr, done.stdout.decode()) == (0, b"", expected)
