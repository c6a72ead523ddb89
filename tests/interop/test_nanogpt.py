"""What nanoGPT has written goes on here: its token ids, byte for byte, and its checkpoints, whose
logits and losses are its own."""

import os
import pickle
import shutil

import numpy as np
import pytest
import torch

import evaluate
import export
import nanodnt
import sample
import train
from interop.nanogpt.tokens import OPCODES
from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.prepare import hub, shards
from nanodnt.weights import load_pretrained, model_from_checkpoint, read_pretrained
from support import hostile, nanogpt, prepared, runs
from support.models import error
from support.nanogpt import CHARS
from support.runs import contents
from support.tolerances import FORWARD

local = prepared.load_script("local")
SIZES = nanogpt.SIZES


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder data/ of a new user, who works in the folder above it."""
    monkeypatch.chdir(tmp_path)
    return prepared.use_other_home(tmp_path / "data", monkeypatch)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """nanoGPT's folder, with a dataset and a checkpoint of a model that was trained on it. Read
    only."""
    root = tmp_path_factory.mktemp("nanogpt")
    data = nanogpt.write_tokens(root / "data" / "walk")
    model = nanogpt.train(data)
    nanogpt.save(root / "out-walk" / "ckpt.pt", model)
    return root, model


def carry_over(theirs, *flags):
    """Prepare nanoGPT's dataset under its own name."""
    local.main([f"--input={theirs[0] / 'data' / 'walk'}", "--tokenizer=chars", "--name=walk"])


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("opened",)


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("kind", ["chars", "gpt2"])
def test_token_ids_stay_byte_for_byte_and_in_their_split(kind, home, tmp_path, monkeypatch):
    prepared.use_fake_bpe(monkeypatch)
    monkeypatch.setattr(shards, "PIECE_TOKENS", 7)
    old = nanogpt.write_tokens(tmp_path / "old", CHARS if kind == "chars" else None)
    (old / "input.txt").write_text("the text")
    flags = [f"--tokenizer={kind}", "--name=new"]
    local.main([f"--input={old}", *flags])
    meta = load_meta("new")
    assert meta["tokenizer"] == kind and (kind == "gpt2" or meta["chars"] == CHARS)
    for name in ("train.bin", "val.bin"):
        assert (home / "new" / name).read_bytes() == (old / name).read_bytes()
    local.main([f"--input={old / 'train.bin'}", *flags, "--val_fraction=0.25"])
    made = [(home / "new" / name).read_bytes() for name in ("train.bin", "val.bin")]
    assert b"".join(made) == (old / "train.bin").read_bytes() and len(made[1]) == 2000
    (old / "val.bin").unlink()
    local.main([f"--input={old}", *flags, "--val_fraction=0.25"])
    assert [(home / "new" / name).read_bytes() for name in ("train.bin", "val.bin")] == made


def test_no_more_than_a_piece_is_in_memory(monkeypatch):
    monkeypatch.setattr(shards, "PIECE_TOKENS", 7)
    files = [np.arange(20), np.arange(7), np.arange(0)]
    pieces = list(shards.read_pieces(files, "ids"))
    assert [len(piece) for piece in pieces] == [7, 7, 6, 7]
    assert np.array_equal(np.concatenate(pieces), np.concatenate(files))


def test_a_folder_may_keep_its_name(home, tmp_path):
    """Where a script here prepares a dataset of that name: nanoGPT's own tokens take its place, and
    nothing else does."""
    (home / "walk").mkdir(parents=True)
    (home / "walk" / "prepare.py").touch()
    old = nanogpt.write_tokens(tmp_path / "walk")
    flags = "--tokenizer=chars", "--name=walk"
    other = shutil.copytree(old, tmp_path / "other")
    refused = prepared.error_of(local.main, f"--input={other}", *flags)
    assert "walk is the source folder of another dataset: give another --name" in refused
    local.main([f"--input={old}", *flags])
    assert load_meta("walk")["chars"] == CHARS and (home / "walk" / "prepare.py").exists()


def test_a_disk_without_room(home, tmp_path, monkeypatch):
    old = nanogpt.write_tokens(tmp_path / "old")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: type("", (), {"free": 8999}))
    refused = prepared.error_of(
        local.main, f"--input={old}", "--tokenizer=chars", "--name=new", "--val_fraction=0.1"
    )
    assert "0.0 GB free, and this needs 0.0 GB: make room, or give --out_dir" in refused
    assert not (home / "new").exists()


def put(name, content):
    """Replace the file `name` of nanoGPT's folder; None removes it."""

    def spoil(folder):
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return spoil


def alphabet(*chars, **changes):
    itos = dict(enumerate(chars or CHARS))
    stoi = {char: i for i, char in itos.items()}
    return put("meta.pkl", pickle.dumps({"itos": itos, "stoi": stoi} | changes))


def ids(*values):
    return np.array(values, "<u2").tobytes()


HEADER = np.array([20240520, 1, 3] + [0] * 253, "<i4").tobytes()
NO_ALPHABET = "meta.pkl is damaged, or is no alphabet of single characters"
CHARS_FLAG = dict(tokenizer="chars")
BAD_TOKENS = {  # case: how nanoGPT's folder is spoilt, flags, words of the one line
    "half an id": (put("val.bin", bytes(7)), {}, "val.bin holds 7 bytes"),
    "empty": (put("train.bin", b""), {}, "train.bin holds 0 bytes"),
    "missing": (put("train.bin", None), {}, "train.bin"),
    "one file of llm.c": (
        put("val.bin", HEADER + ids(1, 2, 3)),
        {},
        "val.bin is a file of llm.c, with a header: prepare such files by themselves",
    ),
    "numpy": (put("val.bin", b"\x93NUMPY\1\0"), {}, "val.bin is a .npy file, not uint16"),
    "text": (put("val.bin", "Zeilen für GPT".encode() * 600), {}, "val.bin is text, not uint16"),
    "an id beyond the alphabet": (
        put("val.bin", ids(*range(28), 0, 28)),
        {},
        "val.bin holds token id 28, beyond the vocabulary of 28, at token 29 (counted from 0)",
    ),
    "an id beyond GPT-2's": (
        lambda folder: [put("meta.pkl", None)(folder), put("val.bin", ids(0, 50257))(folder)],
        dict(tokenizer="gpt2"),
        "val.bin holds token id 50257, beyond the vocabulary of 50257, at token 1",
    ),
    "gpt2 with a meta.pkl": (
        lambda folder: None,
        dict(tokenizer="gpt2"),
        "are characters (there is a meta.pkl): --tokenizer=chars; another",
    ),
    "bytes": (lambda folder: None, dict(tokenizer="bytes"), "--tokenizer=chars; another tokenizer"),
    "chars without a meta.pkl": (
        put("meta.pkl", None),
        {},
        "are GPT-2's (there is no meta.pkl): --tokenizer=gpt2; another",
    ),
    "the pickle itself": (
        lambda folder: None,
        dict(input="old/meta.pkl"),
        "run `python data/local/prepare.py --input=old --tokenizer=chars --name=old`",
    ),
    "code": (put("meta.pkl", pickle.dumps(RunsCode())), {}, f"{NO_ALPHABET} .* STACK_GLOBAL"),
    "old code": (put("meta.pkl", pickle.dumps(RunsCode(), 0)), {}, f"{NO_ALPHABET} .* GLOBAL"),
    "a far place of the memo": (
        put("meta.pkl", b"\x80\x04}r\xff\xff\xff\x7f."),
        {},
        f"{NO_ALPHABET} .* LONG_BINPUT",
    ),
    "no pickle": (put("meta.pkl", b"\n \t"), {}, NO_ALPHABET),
    "a cut pickle": (
        put("meta.pkl", pickle.dumps({"itos": dict(enumerate(CHARS))})[:-20]),
        {},
        NO_ALPHABET,
    ),
    "too large": (put("meta.pkl", bytes((1 << 24) + 1)), {}, "it has more than 16,777,216 bytes"),
    "without itos": (put("meta.pkl", pickle.dumps({"stoi": {}})), {}, NO_ALPHABET),
    "a list": (put("meta.pkl", pickle.dumps({"itos": CHARS})), {}, NO_ALPHABET),
    "a gap": (alphabet(itos={0: "a", 2: "b"}), {}, NO_ALPHABET),
    "two characters": (alphabet("a", "bc"), {}, NO_ALPHABET),
    "twice": (alphabet("a", "b", "a"), {}, NO_ALPHABET),
    "half a character": (alphabet("a", "\ud800"), {}, NO_ALPHABET),
    "another stoi": (alphabet("a", "b", stoi={"a": 1, "b": 0}), {}, "stoi and itos differ"),
    "another size": (alphabet("a", "b", vocab_size=3), {}, "vocab_size is another"),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_bad_token_ids_are_one_line_and_leave_no_trace(case, home, tmp_path):
    spoil, flags, words = BAD_TOKENS[case]
    spoil(nanogpt.write_tokens(tmp_path / "old"))
    before = contents(tmp_path)
    flags = dict(input="old", tokenizer="chars", name="new") | flags
    argv = [f"--{name}={value}" for name, value in flags.items()]
    with hostile.limits():
        line = prepared.error_of(local.main, *argv)
    for part in words.split(" .* "):
        assert part in line
    assert contents(tmp_path) == before


def test_no_opcode_that_is_allowed_runs_code():
    assert not [name for name in OPCODES if "GLOBAL" in name or "OBJ" in name or "EXT" in name]
    assert OPCODES.isdisjoint({"REDUCE", "BUILD", "INST", "PERSID", "BINPERSID"})


# -------------------------------------------------------------------------------------- checkpoints


def ours(path, **flags):
    """Our model of a checkpoint, by the readers that train.py asks."""
    pretrained = read_pretrained(str(path), GPTConfig(**flags))
    content = {"model_config": vars(pretrained.config), "model": pretrained.weights}
    return model_from_checkpoint(content).eval(), pretrained


FORMS = {  # case: sizes of the model, what stands before names
    "as it is": ({}, ""),
    "biases, compiled": (dict(bias=True), "_orig_mod."),
    "DDP, compiled": ({}, "module._orig_mod."),
    "GPT-2's vocabulary, padded": (dict(vocab_size=50257), ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_function_is_nanogpts(form, theirs, tmp_path):
    """Its logits, all 50,304 of GPT-2's too."""
    sizes, wrapper = FORMS[form]
    model = nanogpt.train(theirs[0] / "data" / "walk", steps=2, **sizes)
    path = nanogpt.save(tmp_path / "ckpt.pt", model)
    content = torch.load(path, weights_only=True)
    weights = content["model"]
    # old versions saved the mask of attention
    weights["transformer.h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 16, 16))
    content["model"] = {wrapper + name: t for name, t in weights.items()}
    torch.save(content, path)
    net, pretrained = ours(path)
    idx = torch.randint(28, (3, 16))
    expected = model(idx, idx)[0]
    assert error(net(idx)[0], expected) < FORWARD
    assert net.config.bias == ("biases" in form) and net.head is None
    is_gpt2 = "GPT-2" in form
    assert (pretrained.meta or {}).get("tokenizer") == ("gpt2" if is_gpt2 else None)
    short, _ = ours(path, block_size=8, dropout=0.25)
    assert (short.config.block_size, short.config.dropout) == (8, 0.25)
    assert error(short(idx[:, :8])[0], expected[:, :8]) < FORWARD


def test_a_head_of_its_own_is_kept(theirs, tmp_path):
    path = nanogpt.save(tmp_path / "ckpt.pt", theirs[1])
    content = torch.load(path, weights_only=True)
    content["model"]["lm_head.weight"] = 2 * content["model"]["lm_head.weight"]
    torch.save(content, path)
    net, _ = ours(path)
    idx = torch.randint(28, (3, 16))
    assert error(net(idx)[0], 2 * theirs[1](idx, idx)[0]) < FORWARD


@torch.no_grad()
def loss_on(model, file):
    """nanoGPT's mean loss over the windows that lie one behind the other in a file of ids."""
    tokens = torch.from_numpy(np.fromfile(file, "<u2").astype(np.int64))
    n = (len(tokens) - 1) // 16
    windows = tokens[: 16 * n].view(n, 16), tokens[1 : 16 * n + 1].view(n, 16)
    return model(*windows)[1].item()


def test_a_run_goes_on_from_nanogpts(theirs, home, tmp_path, capsys):
    """The same loss on the same tokens, printed beside nanoGPT's own; then training, sampling,
    evaluation, and an export that `transformers` computes the same from."""
    root, model = theirs
    carry_over(theirs)
    start = dict(init_from=root / "out-walk", dataset="walk", eval_tokens=0)
    assert runs.run(**start, out_dir=tmp_path / "no", eval_only=True) == 0
    out = capsys.readouterr().out
    about = "nanoGPT's step 20, its validation loss 2.5000; the moments of its AdamW"
    assert f"weights: {root / 'out-walk'}, {about} are not taken over\n" in out
    loss = float(out.rpartition("validation loss ")[2].split()[0])
    assert loss == pytest.approx(loss_on(model, root / "data/walk/val.bin"), abs=1e-5)

    start["init_from"] = f"auto:{root / 'out-walk' / 'ckpt.pt'}"
    for steps in (4, 8):  # it starts, then it resumes
        flags = dict(out_dir=tmp_path / "run", max_iters=steps, lr_decay_iters=8)
        assert runs.run(**start, **flags, learning_rate=1e-3) == 0
    losses = runs.column(tmp_path / "run", "val_loss")
    assert losses[8] < loss
    # a run of ours wins over a ckpt.pt in its folder
    shutil.copy(root / "out-walk" / "ckpt.pt", tmp_path / "run")
    capsys.readouterr()
    assert (
        runs.run(
            **start | dict(init_from=tmp_path / "run"), out_dir=tmp_path / "no", eval_only=True
        )
        == 0
    )
    assert "best.pt, step 8" in capsys.readouterr().out

    checkpoint = f"--init_from={root / 'out-walk' / 'ckpt.pt'}"
    assert runs.call(sample.main, checkpoint, "--max_new_tokens=9", "--device=cpu") == 0
    drawn = set(capsys.readouterr().out.replace("-" * 80, ""))
    assert len(drawn) > 3 and drawn <= {*CHARS, "\n"}
    assert runs.call(export.main, checkpoint, f"--to={tmp_path / 'hf'}") == 0
    assert "step 20, as gpt2 in float32" in (out := capsys.readouterr().out)
    assert "transformers computes the same" in out
    back = load_pretrained(str(tmp_path / "hf"))
    assert back.model.config.mlp == "gelu_erf" and back.meta["vocab_size"] == len(CHARS)
    task = "--tasks=text", "--input=walk", "--device=cpu", "--dtype=float32"
    assert runs.call(evaluate.main, checkpoint, f"--out_dir={tmp_path / 'eval'}", *task) == 0
    assert f"{loss:.4f}" in capsys.readouterr().out


def test_characters_need_their_dataset(theirs, home, tmp_path, capsys):
    """Without it a command is named; training takes them to be those of its dataset, and says so.
    A dataset of that name with other tokens is another."""
    root = theirs[0]
    checkpoint = f"--init_from={root / 'out-walk'}"
    nanogpt.write_tokens(tmp_path / "mine" / "walk", CHARS[:-1], 99)
    for before in ([], ["--input=mine/walk", "--tokenizer=chars", "--name=walk"]):
        for argv in filter(None, [before]):
            (tmp_path / "mine/walk/val.bin").write_bytes(bytes(8))
            (tmp_path / "mine/walk/train.bin").write_bytes(bytes(8))
            local.main(argv)
        outcome = hostile.call(sample.main, checkpoint)
        command = "--input=nanoGPT/data/walk --tokenizer=chars --name=walk`"
        hostile.assert_refused(outcome, ["its 28 tokens", "nanoGPT's dataset walk", command])
    local.main([f"--input={root / 'data/walk'}", "--tokenizer=chars", "--name=mine"])
    flags = dict(init_from=root / "out-walk", dataset="mine", max_iters=0)
    assert runs.run(**flags, out_dir=tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "has no tokenizer" in said and "its tokens are taken to be those of mine" in said


def test_what_is_no_checkpoint_of_nanogpt(dataset, tmp_path, capsys, monkeypatch):
    """Runs and checkpoints of ours, other folders, and copies without interop/."""
    runs.run(dataset=dataset, out_dir=tmp_path / "run", max_iters=1)
    best = tmp_path / "run" / "best.pt"
    assert read_pretrained(str(best), GPTConfig()) is None
    assert load_pretrained(str(best)).step == 1
    (tmp_path / "run" / "ckpt.pt").touch()
    with pytest.raises(ValueError, match="it is a run: train.py takes"):
        load_pretrained(str(tmp_path / "run"))


def test_without_interop(theirs, dataset, tmp_path, monkeypatch):
    """As after its deletion: the readers are gone."""
    monkeypatch.setattr(nanodnt.weights, "READERS", [])
    path = theirs[0] / "out-walk" / "ckpt.pt"
    for source in (path, path.parent):
        flags = runs.flags(dataset=dataset, out_dir=tmp_path / "run", init_from=source)
        outcome = hostile.call(train.main, *flags)
        hostile.assert_refused(outcome, ["interop/"])


# ------------------------------------------------------------------------------ damaged checkpoints


def change(part, **values):
    """Change entries of a part of the checkpoint ("" = of itself); None removes one."""

    def spoil(path):
        content = torch.load(path, weights_only=True)
        target = content[part] if part else content
        for name, value in values.items():
            target.pop(name.replace("__", "."), None)
            if value is not None:
                target[name.replace("__", ".")] = value
        torch.save(content, path)

    return spoil


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


MATRIX = "transformer__h__1__mlp__c_fc__weight"
BAD = {  # how ckpt.pt is spoilt, words of the refusal
    "cut off": (lambda path: os.truncate(path, 5000), "cannot be read as a checkpoint, it is dam"),
    "empty": (lambda path: os.truncate(path, 0), "cannot be read as a checkpoint, it is damaged"),
    "text": (lambda path: path.write_text("x" * 999), "cannot be read as a checkpoint"),
    "flipped": (flip, "damaged or foreign (checksum of"),
    "code": (change("config", dataset=RunsCode()), "more than tensors and plain values"),
    "no weights": (change("", model=None), "cannot be used: it is damaged (KeyError: 'model')"),
    "no sizes": (change("model_args", n_head=None, n_embd=None), "model_args lack n_head, n_embd"),
    "sizes of the wrong type": (change("model_args", n_layer="two"), "n_layer='two'"),
    "millions of blocks": (change("model_args", n_layer=10**6), "n_layer=1000000"),
    "more blocks": (change("model_args", n_layer=3), "the tensor h.2.ln_1.weight is missing"),
    "another width": (change("model_args", n_embd=64), "is [28, 32], which its configuration"),
    "biases that are not there": (change("model_args", bias=True), "h.0.ln_1.bias is missing"),
    "a matrix missing": (change("model", **{MATRIX: None}), "h.1.mlp.c_fc.weight is missing"),
    "another shape": (change("model", **{MATRIX: torch.ones(32, 128)}), "c_fc.weight is [32, 128]"),
    "no tensor": (change("model", **{MATRIX: [1, 2]}), "it is damaged"),
    "unknown": (change("model", rotary=torch.ones(2)), "the tensor rotary is unknown"),
    "steps of the wrong type": (change("", iter_num="many"), "iter_num is no number of steps"),
    "loss of the wrong type": (change("", best_val_loss=torch.ones(3)), "it is damaged"),
    "sizes as a list": (change("", model_args=[1]), "model_args lack n_layer"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_in_one_line(case, theirs, tmp_path, dataset, monkeypatch):
    """By the path and by the folder, in train.py and in sample.py; nothing of it runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "out" / "ckpt.pt"
    path.parent.mkdir()
    shutil.copy(theirs[0] / "out-walk" / "ckpt.pt", path)
    spoil, words = BAD[case]
    spoil(path)
    flags = runs.flags(dataset=dataset, out_dir=tmp_path / "run", init_from=path)
    hostile.assert_refused(hostile.call(train.main, *flags), ["ckpt.pt", words])
    outcome = hostile.call(sample.main, f"--init_from={path.parent}")
    hostile.assert_refused(outcome, ["ckpt.pt", words])
    assert not (tmp_path / "opened").exists() and not (tmp_path / "run").exists()
