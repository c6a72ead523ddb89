"""What nanoGPT has written goes on here: its token ids, byte for byte, and its checkpoints, whose
logits and losses are its own."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import export
import nanodnt.weights
import sample
import train
from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.prepare import hub, shards
from nanodnt.weights import load_pretrained, model_from_checkpoint, read_pretrained
from support import hostile, nanogpt, prepared, runs
from support.models import error
from support.nanogpt import CHARS, write_alphabet
from support.runs import contents
from support.tolerances import FORWARD

local = prepared.load_script("local")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder data/ of a new user, who works in the folder above it; there is old/, a dataset of
    nanoGPT."""
    monkeypatch.chdir(tmp_path)
    prepared.use_fake_bpe(monkeypatch)
    nanogpt.write_tokens(tmp_path / "old")
    return prepared.use_other_home(tmp_path / "data", monkeypatch)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """nanoGPT's folder, with data/walk and out/ckpt.pt, and the model of that. Read only."""
    root = tmp_path_factory.mktemp("nanogpt")
    model = nanogpt.train(nanogpt.write_tokens(root / "data" / "walk"), 20)
    nanogpt.save(root / "out", model)
    return root, model


def prepare(name="new", input="old", tokenizer="chars", **flags):
    flags |= dict(name=name, input=input, tokenizer=tokenizer)
    local.main([f"--{key}={value}" for key, value in flags.items()])


def ids_in(folder):
    return [(folder / name).read_bytes() for name in ("train.bin", "val.bin")]


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("opened",)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("kind", ["chars", "gpt2"])
def test_token_ids_stay_byte_for_byte_and_in_their_split(kind, home, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PIECE_TOKENS", 7)
    pieces = [*shards.read_pieces([np.arange(16), np.arange(0), np.arange(3)], "ids")]
    assert [piece.tolist() for piece in pieces] == [
        [*range(7)],
        [*range(7, 14)],
        [14, 15],
        [0, 1, 2],
    ]
    old = tmp_path / "old"
    if kind == "gpt2":
        (old / "meta.pkl").unlink()
    prepare(tokenizer=kind)
    meta = load_meta("new")
    assert meta["tokenizer"] == kind and meta.get("chars", CHARS) == CHARS
    assert ids_in(home / "new") == ids_in(old)
    prepare(tokenizer=kind, input="old/train.bin", val_fraction=0.25)
    made = ids_in(home / "new")
    assert b"".join(made) == ids_in(old)[0] and len(made[1]) == 2000
    (old / "val.bin").unlink()
    prepare(tokenizer=kind, val_fraction=0.25)
    assert ids_in(home / "new") == made


def test_a_folder_may_keep_its_name(home, tmp_path):
    """Where a script here prepares a dataset of that name: nanoGPT's own tokens take its place, and
    nothing else does."""
    (home / "old").mkdir(parents=True)
    (home / "old" / "prepare.py").touch()
    shutil.copytree("old", "other")
    with pytest.raises(ValueError, match="old is the source folder of another dataset"):
        prepare("old", "other")
    prepare("old")
    assert load_meta("old")["chars"] == CHARS


def put(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def ids(*values):
    return np.array(values, "<u2").tobytes()


def alphabet(*chars, **changes):
    return lambda folder: write_alphabet(folder, chars, **changes)


HEADER = np.array([20240520, 1, 3] + [0] * 253, "<i4").tobytes()
PICKLE = "meta.pkl is damaged, or is no alphabet of single characters"
BAD_TOKENS = {  # words of the one line: how nanoGPT's folder is spoilt
    "val.bin holds 7 bytes": put("val.bin", bytes(7)),
    "train.bin holds 0 bytes": put("train.bin", b""),
    "train.bin'": lambda folder: (folder / "train.bin").unlink(),
    "val.bin is a file of llm.c": put("val.bin", HEADER),
    "val.bin is a .npy file": put("val.bin", b"\x93NUMPY\1\0"),
    "val.bin is text": put("val.bin", "Zeilen für GPT".encode() * 600),
    "id 28, beyond the vocabulary of 28, at token 2 ": put("val.bin", ids(0, 0, 28)),
    "(there is no meta.pkl): --tokenizer=gpt2": lambda folder: (folder / "meta.pkl").unlink(),
    f"{PICKLE} … it holds STACK_GLOBAL": put("meta.pkl", pickle.dumps(RunsCode())),
    f"{PICKLE} … it holds GLOBAL": put("meta.pkl", pickle.dumps(RunsCode(), 0)),
    f"{PICKLE} … it holds LONG_BINPUT": put("meta.pkl", b"\x80\x04}r\xff\xff\xff\x7f."),
    f"{PICKLE} … it has more than": put("meta.pkl", bytes((1 << 22) + 1)),
    f"{PICKLE} … (KeyError": alphabet(itos={0: "a", 2: "b"}),
    f"{PICKLE} … chars": alphabet("a", "bc"),
    f"{PICKLE} … (UnicodeEncodeError": alphabet("\ud800"),
    "its stoi and itos differ": alphabet("a", "b", stoi={"a": 1, "b": 0}),
    "its vocab_size is another": alphabet("a", "b", vocab_size=3),
}
BAD_FLAGS = {
    "(there is a meta.pkl): --tokenizer=chars": dict(tokenizer="gpt2"),
    "another tokenizer needs the text itself": dict(tokenizer="bytes"),
    "run `python data/local/prepare.py --input=old --tokenizer=chars": dict(input="old/meta.pkl"),
    "old holds --input=old/train.bin": dict(input="old/train.bin", out_dir="old"),
    "this needs 0.0 GB: make room, or give --out_dir": dict(name="full"),
}


@pytest.mark.parametrize("words", [*BAD_TOKENS, *BAD_FLAGS])
def test_bad_token_ids_are_one_line_and_leave_no_trace(words, home, tmp_path, monkeypatch):
    flags = BAD_FLAGS.get(words, {})
    if "name" in flags:
        monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: type("", (), {"free": 8999}))
    BAD_TOKENS.get(words, bool)(tmp_path / "old")
    before = contents(tmp_path)
    with hostile.limits():
        line = prepared.error_of(lambda argv: prepare(**flags))
    assert all(part in line for part in words.split(" … ")), line
    assert contents(tmp_path) == before


# -------------------------------------------------------------------------------------- checkpoints


FORMS = {  # case: sizes of the model, what stands before names
    "as it is": ({}, ""),
    "biases, compiled": (dict(bias=True), "_orig_mod."),
    "GPT-2's vocabulary, DDP, compiled": (dict(vocab_size=50257), "module._orig_mod."),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_function_is_nanogpts(form, theirs, tmp_path):
    """Its logits, all 50,304 of GPT-2's too; also with the masks that old versions saved."""
    sizes, prefix = FORMS[form]
    model = nanogpt.train(theirs[0] / "data" / "walk", 2, **sizes)
    path = nanogpt.save(tmp_path / "out", model, prefix)
    change("model", **{f"{prefix}transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)})(path)
    idx = torch.randint(28, (3, 16))
    expected = model(idx, idx)[0]
    for length in (16, 8):
        pretrained = read_pretrained(str(path), GPTConfig(block_size=length, dropout=0.25))
        config = pretrained.config
        assert (config.block_size, config.dropout, config.bias) == (length, 0.25, "bias" in sizes)
        net = model_from_checkpoint({"model_config": vars(config), "model": pretrained.weights})
        assert error(net.eval()(idx[:, :length])[0], expected[:, :length]) < FORWARD
    assert (pretrained.meta or {}).get("tokenizer") == ("gpt2" if "vocab_size" in sizes else None)


@torch.no_grad()
def loss_on(model, file):
    """nanoGPT's mean loss over the windows that lie one behind the other in a file of ids."""
    tokens = torch.from_numpy(np.fromfile(file, "<u2").astype(np.int64))
    n = (len(tokens) - 1) // 16 * 16
    return model(tokens[:n].view(-1, 16), tokens[1 : n + 1].view(-1, 16))[1].item()


def test_a_run_goes_on_from_nanogpts(theirs, home, tmp_path, capsys):
    """The same loss on the same tokens, printed beside nanoGPT's own; then training, sampling, and
    an export that `transformers` computes the same from."""
    root, model = theirs
    prepare("walk", root / "data" / "walk")
    flags = dict(dataset="walk", eval_tokens=0, out_dir=tmp_path / "run", learning_rate=1e-3)
    assert runs.run(**flags, init_from=root / "out", eval_only=True) == 0
    out = capsys.readouterr().out
    about = "nanoGPT's step 20, its validation loss 2.5000; the moments of its AdamW"
    assert f"weights: {root / 'out'}, {about} are not taken over\n" in out
    loss = float(out.rpartition("validation loss ")[2].split()[0])
    assert loss == pytest.approx(loss_on(model, root / "data/walk/val.bin"), abs=1e-5)

    for steps in (4, 8):  # it starts, then it resumes
        source = f"auto:{root / 'out' / 'ckpt.pt'}"
        assert runs.run(**flags, init_from=source, max_iters=steps, lr_decay_iters=8) == 0
    assert runs.column(tmp_path / "run", "val_loss")[8] < loss
    shutil.copy(root / "out" / "ckpt.pt", tmp_path / "run")  # a run of ours wins over it
    assert runs.run(**flags, init_from=tmp_path / "run", eval_only=True) == 0
    assert "best.pt, step 8" in capsys.readouterr().out

    checkpoint = f"--init_from={root / 'out' / 'ckpt.pt'}"
    assert runs.call(sample.main, checkpoint, "--max_new_tokens=9", "--device=cpu") == 0
    drawn = set(capsys.readouterr().out.replace("-" * 80, ""))
    assert len(drawn) > 3 and drawn <= {*CHARS}
    assert runs.call(export.main, checkpoint, f"--to={tmp_path / 'hf'}") == 0
    out = capsys.readouterr().out
    assert "step 20, as gpt2 in float32" in out and "transformers computes the same" in out


def test_characters_need_their_dataset(theirs, home, tmp_path, capsys):
    """Without it, or with another of its name, a command is named. Training takes them to be those
    of its dataset, and says so."""
    words = ["its 28 tokens", "--input=nanoGPT/data/walk --tokenizer=chars --name=walk`"]
    source = theirs[0] / "out"
    hostile.assert_refused(hostile.call(sample.main, init_from=source), words)
    prepare("mine")
    Path("text.txt").write_text("another text", encoding="utf-8")
    prepare("walk", "text.txt")
    hostile.assert_refused(hostile.call(sample.main, init_from=source), words)
    assert runs.run(init_from=source, dataset="mine", max_iters=0, out_dir=tmp_path / "run") == 0
    assert "its tokens are taken to be those of mine" in capsys.readouterr().out


def test_what_is_no_checkpoint_of_nanogpt(theirs, dataset, tmp_path, monkeypatch):
    """Those of ours; and none is where interop/ was deleted, and with it the readers."""
    runs.run(dataset=dataset, out_dir=tmp_path / "run", max_iters=1)
    assert load_pretrained(str(tmp_path / "run" / "best.pt")).step == 1
    monkeypatch.setattr(nanodnt.weights, "READERS", [])
    for source in (theirs[0] / "out", theirs[0] / "out" / "ckpt.pt"):
        flags = runs.flags(dataset=dataset, out_dir=tmp_path / "new", init_from=source)
        hostile.assert_refused(hostile.call(train.main, *flags), ["interop/"])


def test_its_folder_is_no_run_but_says_what_to_do(theirs, dataset, tmp_path):
    out = shutil.copytree(theirs[0] / "out", tmp_path / "out")
    flags = runs.flags(dataset=dataset, out_dir=out, init_from="resume")
    for outcome in (hostile.call(train.main, *flags), hostile.call(sample.main, out_dir=out)):
        hostile.assert_refused(outcome, ["nanoGPT's ckpt.pt there", f"--init_from={out}"])


def change(part, **values):
    """Change entries of a part of the checkpoint ("" = of itself); None removes one."""

    def spoil(path):
        content = torch.load(path, weights_only=True)
        target = content[part] if part else content
        target |= values
        for name in [name for name in values if values[name] is None]:
            del target[name]
        torch.save(content, path)

    return spoil


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


MATRIX = "transformer.h.1.mlp.c_fc.weight"
BAD = {  # words of the refusal: how ckpt.pt is spoilt
    "cannot be read as a checkpoint, it is damaged": lambda path: os.truncate(path, 5000),
    "cannot be read as a checkpoint": lambda path: path.write_text("x" * 999),
    "damaged or foreign (checksum of": flip,
    "more than tensors and plain values": change("config", dataset=RunsCode()),
    "it is damaged (KeyError: 'model')": change("", model=None),
    "it is damaged (KeyError: 'n_head')": change("model_args", n_head=None),
    "n_layer='two'": change("model_args", n_layer="two"),
    "15 tensors, too few for 9999 layers": change("model_args", n_layer=9999),
    "the tensor h.2.ln_1.weight is missing": change("model_args", n_layer=3),
    "c_fc.weight is [32, 128], which its configuration": change(
        "model", **{MATRIX: torch.ones(32, 128)}
    ),
    "c_fc.weight is not one of floating": change("model", **{MATRIX: torch.ones(128, 32).int()}),
    "it is damaged (AttributeError": change("model", **{MATRIX: [1, 2]}),
    "the tensor lm_head.weight is unknown": change("model", **{"lm_head.weight": torch.ones(28)}),
    "iter_num is no number of steps": change("", iter_num="many"),
    "could not convert string to float": change("", best_val_loss="many"),
}


@pytest.mark.parametrize("words", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(words, theirs, tmp_path, dataset, monkeypatch):
    """By the path and by the folder, in train.py and in sample.py; nothing of it runs."""
    monkeypatch.chdir(tmp_path)
    out = shutil.copytree(theirs[0] / "out", tmp_path / "out")
    BAD[words](out / "ckpt.pt")
    flags = runs.flags(dataset=dataset, out_dir=tmp_path / "run", init_from=out / "ckpt.pt")
    hostile.assert_refused(hostile.call(train.main, *flags), ["ckpt.pt", words])
    hostile.assert_refused(hostile.call(sample.main, init_from=out), ["ckpt.pt", words])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
