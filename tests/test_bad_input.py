"""What train.py and sample.py say to bad input: one line that names what is wrong, an exit code, and nothing damaged.

Every case starts from a directory that holds an earlier run, its dataset, and a command line that works (see
`test_the_command_lines_work_without_the_mistake`), adds one mistake, and compares the whole directory afterwards. The
command line of train.py says --overwrite=True wherever a case does not say otherwise: not even then may a mistake
cost the earlier run.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import helpers
import numpy as np
import pytest
import torch

import loader
import sample
import train

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN = helpers.TINY | dict(n_layer=1, n_embd=16, block_size=16, batch_size=4, overwrite=True)
TRAIN |= dict(max_iters=3, eval_interval=1, eval_tokens=64)
SAMPLE = dict(start="AB", max_new_tokens=4, num_samples=2, device="cpu", dtype="float32")
CHECKPOINTS = ("last.pt", "prev.pt", "best.pt")


@dataclass
class World:
    """A directory to spoil, and how to spoil the machine for as long as the case runs."""

    tmp: Path  # the working directory; it holds:
    run: Path  # a run of 3 steps
    data: Path  # its dataset
    patch: pytest.MonkeyPatch
    later: ExitStack  # undone after the case


class Case(NamedTuple):
    name: str
    argv: str  # beside the flags that work; {tmp} {run} {data} are filled in
    words: list  # what the message must contain
    spoil: Any = None  # called with the World before the program
    kept: str = "**/*"  # files that must stay the same


def cases(*rows):
    """Parameters of a test from the rows of a table; a row may end with a mark."""
    marks = [row[-1] if isinstance(row[-1], pytest.MarkDecorator) else () for row in rows]
    rows = [Case(*(row[:-1] if mark else row)) for row, mark in zip(rows, marks, strict=True)]
    assert len({row.name for row in rows}) == len(rows)
    params = [pytest.param(row, id=row.name, marks=mark) for row, mark in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize("case", params)


# ------------------------------------------------------------------------------------------------------- the stage


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    helpers.make_dataset(folder / "data")
    flags = TRAIN | dict(out_dir=folder / "run", dataset=folder / "data")
    assert helpers.run(**flags) == 0
    assert {p.name for p in (folder / "run").iterdir()} >= {*CHECKPOINTS, "metrics.jsonl", "config.json"}
    return folder


@pytest.fixture
def world(earlier, tmp_path, monkeypatch):
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as later:
        yield World(tmp_path, tmp_path / "run", tmp_path / "data", monkeypatch, later)


def command_line(world, program, argv="") -> list:
    """The flags that work, less those that `argv` sets, then `argv`."""
    words = shlex.split(argv.format(tmp=world.tmp, run=world.run, data=world.data))
    flags = {train: TRAIN | dict(dataset=world.data), sample: SAMPLE}[program] | dict(out_dir=world.run)
    said = {word.lstrip("-").partition("=")[0] for word in words}
    return [f"--{name}={value}" for name, value in flags.items() if name not in said] + words


def start(world, program, argv=""):
    """Run train.py or sample.py in this process; the exit code."""
    world.patch.setattr(sys, "argv", [f"{program.__name__}.py", *command_line(world, program, argv)])
    try:
        return program.main()
    except SystemExit as e:
        return e.code
    except Exception as e:
        pytest.fail(f"a traceback instead of a message: {type(e).__name__}: {e}")


def files(folder, pattern="**/*") -> dict:
    """{path: content} of the files, folders and links in `folder`."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.glob(pattern)}


def assert_refused(code, out, err, words):
    assert code in (1, 2), (code, out[-500:])
    assert "Traceback" not in out + err
    assert re.fullmatch(r"(\[rank \d\] )?error: [^\n]+\n", err), err
    missing = [word for word in words if word not in err]
    assert not missing, f"{missing} not in: {err}"


def refuse(world, capsys, program, case):
    if case.spoil:
        case.spoil(world)
    before = files(world.tmp, case.kept)
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as shown:  # a program would print them on stderr
        warnings.simplefilter("ignore")
        for kind in (UserWarning, FutureWarning, RuntimeWarning):
            warnings.simplefilter("always", kind)
        code = start(world, program, case.argv)
    world.later.close()
    assert not shown, f"more than one line on stderr: {shown[0].message}"
    assert_refused(code, *capsys.readouterr(), case.words)
    after = files(world.tmp, case.kept)
    changed = [str(p.relative_to(world.tmp)) for p in before | after if before.get(p, ()) != after.get(p, ())]
    assert not changed, f"changed, new or gone: {changed}"


# ------------------------------------------------------------------------------------------------- ways to spoil it


def write(name, content):
    """Write a file: text, bytes, or None for a folder."""

    def spoil(w):
        path = Path(name.format(tmp=w.tmp, run=w.run, data=w.data))
        if path.is_file():
            path.unlink()  # checkpoints are hard links of one another
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def meta(change):
    """Change meta.json: `change` gets its content."""

    def spoil(w):
        content = json.loads((w.data / "meta.json").read_text())
        change(content)
        (w.data / "meta.json").write_text(json.dumps(content))

    return spoil


def put(*path_and_value):
    """put("a", "b", 1) → a change that sets x["a"]["b"] = 1."""
    *path, last, value = path_and_value

    def change(x):
        for key in path:
            x = x[key]
        x[last] = value

    return change


def drop(key):
    return lambda x: x.pop(key)


def token(split, value):
    """Set every eighth token of a split to `value`, with a hash that fits."""

    def spoil(w):
        ids = np.fromfile(w.data / f"{split}.bin", "<u2")
        ids[::8] = value
        ids.tofile(w.data / f"{split}.bin")
        meta(put("splits", split, "sha256", hashlib.sha256(ids.tobytes()).hexdigest()))(w)

    return spoil


def checkpoint(change, names=CHECKPOINTS):
    """Change checkpoints: `change` gets the content."""

    def spoil(w):
        for name in names:
            content = helpers.load(w.run / name)
            (w.run / name).unlink()
            change(content)
            torch.save(content, w.run / name)

    return spoil


def all_checkpoints(content):
    return lambda w: [write(f"{{run}}/{name}", content)(w) for name in CHECKPOINTS]


def saved(content):
    """Checkpoints that hold something else, saved by torch."""
    return lambda w: [torch.save(content, w.run / name) for name in CHECKPOINTS]


def cut(*names):
    """Truncate files of the run to half of their size."""

    def spoil(w):
        for name in names:
            raw = (w.run / name).read_bytes()
            write(f"{{run}}/{name}", raw[: len(raw) // 2])(w)

    return spoil


class Evil:
    """Unpickled without care, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil(save):
    def spoil(w):
        for name in CHECKPOINTS:
            with open(w.run / name, "wb") as f:
                save(Evil(w.tmp / "pwned"), f)

    return spoil


def environ(**values):
    return lambda w: [w.patch.setenv(name, value) for name, value in values.items()]


def missing_package(name):
    return lambda w: w.patch.setitem(sys.modules, name, None)


def during(action, step=4):
    """Do `action` when the run (resumed at step 3) comes to `step`."""

    def spoil(w):
        real, done = train.lr_at, []

        def lr_at(i, *args):
            if i == step and not done:  # it is called for every group
                done.append(action(w))
            return real(i, *args)

        w.patch.setattr(train, "lr_at", lr_at)

    return spoil


def truncate(split):
    return lambda w: os.truncate(w.data / f"{split}.bin", 10)


def unreadable(w):
    def read(*_):
        raise OSError(errno.EIO, "Input/output error")

    w.patch.setattr(loader.Dataset, "_read", read)


def full_disk(larger_than=-1):
    """No room for files above this size, which shows at fsync as it does on a network file system."""

    def spoil(w):
        real = os.fsync

        def fsync(fd):
            if os.fstat(fd).st_size > larger_than:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(fd)

        w.patch.setattr(os, "fsync", fsync)
        w.patch.setattr(time, "sleep", lambda s: None)  # before the second attempt

    return spoil


def file_size_limit(w):
    """The kernel itself refuses to write more than 10 kB to a file; a checkpoint has more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    w.later.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    w.patch.setattr(time, "sleep", lambda s: None)


def no_links_and_full(w):
    def refuse(code):
        def call(*_):
            raise OSError(code, os.strerror(code))

        return call

    w.patch.setattr(os, "link", refuse(errno.EPERM))  # as FAT and some network file systems do
    for name in ("copyfile", "copyfileobj", "copy", "copy2"):
        w.patch.setattr(shutil, name, refuse(errno.ENOSPC))


def little_space(w):
    w.patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))


def broken_compiler(w):
    def broken(model, **_):
        def call(*_):
            raise RuntimeError("no compiler\nand more lines")

        return call

    w.patch.setattr(torch, "compile", broken)


def named_dataset(w):
    """data/corpus, with its prepare.py, but not prepared."""
    (w.tmp / "corpus").mkdir()
    (w.tmp / "corpus" / "prepare.py").touch()
    w.patch.setattr(loader, "DATA", w.tmp)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
NO_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has mps")
RESUME = "--init_from=resume --max_iters=6 --eval_interval=100 "
MSGDW = "--optimizer=msgdw --weight_decay=0"
PT = "run/*.pt"  # what a case that fails in the middle of a run must keep
OTHER = [chr(ord("a") + i) for i in range(50)]  # another alphabet of 50

# ------------------------------------------------------------------------------------------------- the command line

FLAGS = cases(
    ("unknown flag", "--learning_rat=1", ["--learning_rat", "did you mean --learning_rate?"]),
    ("nothing like it", "--xyzzy=1", ["--xyzzy", "--help"]),
    ("nanoGPT's accumulation", "--gradient_accumulation_steps=5", ["batch_size", "micro_batch_size"]),
    ("nanoGPT's eval_iters", "--eval_iters=200", ["eval_iters", "eval_tokens"]),
    ("nanoGPT's decay_lr", "--decay_lr=False", ["decay_lr", "schedule=constant"]),
    ("a word for an int", "--n_layer=two", ["n_layer", "two", "int"]),
    ("a fraction for an int", "--n_layer=1.5", ["n_layer", "1.5", "int"]),
    ("a word for a float", "--dropout=low", ["dropout", "low", "float"]),
    ("nan", "--learning_rate=nan", ["learning_rate", "nan", "float"]),
    ("wrong norm", "--norm=layer_norm", ["norm", "layer_norm", "layernorm", "rmsnorm", "dyt"]),
    ("wrong optimizer", "--optimizer=adam", ["optimizer", "adamw", "msgdw", "muon", "adam_mini"]),
    ("wrong schedule", "--schedule=wds", ["schedule", "wds", "cosine", "wsd", "linear", "constant", "dyt"]),
    ("wrong convention", "--muon_adjust_lr=spectral", ["muon_adjust_lr", "original", "match_rms_adamw"]),
    ("wrong form of decay", "--wsd_decay=exp", ["wsd_decay", "linear", "sqrt", "cosine"]),
    ("wrong dtype", "--dtype=float64", ["dtype", "float64", "bfloat16"]),
    ("no for a bool", "--bias=no", ["bias", "'no'", "True", "False"]),
    ("no value", "--n_layer", ["--n_layer=VALUE"]),
    ("a blank for =", "--n_layer 2", ["--n_layer=VALUE"]),
    ("one dash", "-n_layer=2", ["--n_layer=2"]),
    ("twice", "--seed=1 --seed=2", ["--seed", "twice"]),
    ("a value of another flag's", "--schedule=adamw", ["schedule", "cosine", "constant"]),
)


def config(text):
    return write("{tmp}/c.py", text)


C = "{tmp}/c.py"
CONFIG_FILES = cases(
    ("missing", C, ["c.py", "No such file"]),
    ("a folder", "{run}", ["config file", "directory"]),
    ("unknown key", C, ["c.py:2", "n_layers", "n_layer?"], config("n_head = 2\nn_layers = 3\n")),
    ("nanoGPT's key", C, ["c.py:1", "batch_size"], config("gradient_accumulation_steps = 5 * 8\n")),
    ("wrong type", C, ["c.py:1", "n_layer", "'3'", "int"], config("n_layer = '3'\n")),
    ("wrong choice", C, ["c.py:1", "norm", "rms", "rmsnorm"], config("norm = 'rms'\n")),
    ("code", C, ["c.py:2", "import os"], config("n_head = 2\nimport os\n")),
    ("a call", C, ["c.py:1", "not allowed"], config("n_head = __import__('os').mkdir('pwned')\n")),
    ("a condition", C, ["c.py:1", "not allowed"], config("if True:\n    n_head = 2\n")),
    ("no quotes", C, ["c.py:1", "rmsnorm", "quotes"], config("norm = rmsnorm\n")),
    ("twice", C, ["c.py:2", "n_head", "c.py:1"], config("n_head = 2\nn_head = 4\n")),
    ("syntax error", C, ["c.py:2"], config("n_head = 2\nn_layer = = 3\n")),
    ("binary", C, ["c.py", "not a config file"], config(bytes(range(256)))),
    ("division by zero", C, ["c.py:1", "2 // 0", "zero"], config("n_head = 2 // 0\n")),
    ("flag after a good file", f"{C} --n_laver=3", ["--n_laver", "--n_layer?"], config("n_head = 2\n")),
)

# -------------------------------------------------------------------------------------------------------- the values

VALUES = cases(
    # the model
    ("n_embd, n_head", "--n_embd=10 --n_head=4", ["n_embd=10", "multiple", "n_head=4"]),
    ("n_head, n_kv_head", "--n_head=4 --n_kv_head=3", ["n_head=4", "n_kv_head=3"]),
    ("no layers", "--n_layer=0", ["n_layer=0", "at least 1"]),
    ("negative width", "--n_embd=-8", ["n_embd=-8"]),
    ("no heads", "--n_head=0", ["n_head=0", "at least 1"]),
    ("no context", "--block_size=0", ["block_size=0"]),
    ("negative FFN", "--n_ff=-1", ["n_ff"]),
    ("dropout", "--dropout=1.5", ["dropout=1.5", "below 1"]),
    ("init_std", "--init_std=0", ["init_std", "positive"]),
    ("negative vocabulary", "--vocab_size=-5", ["vocab_size=-5"]),
    ("too small a vocabulary", "--vocab_size=40", ["50", "40", "vocabulary"]),
    ("more weights than memory", f"--n_embd={2**24}", ["memory"]),
    # the layout
    ("norm=none", "--norm=none", ["norm=none", "mid_norm", "input_norm"]),
    ("norm=none, post", "--norm=none --mid_norm=none --input_norm=False --post_norm=both", ["norm=none", "post_norm"]),
    ("DyT's alpha", "--dyt_alpha_attn=0.5", ["dyt_alpha_attn", "norm=dyt"]),
    ("DyT's bias", "--dyt_bias=True --norm=layernorm", ["dyt_bias", "norm=dyt"]),
    ("rope_theta", "--rope_theta=5e5", ["rope_theta", "pos=rope"]),
    ("rope, odd heads", "--pos=rope --n_embd=6 --n_head=2", ["pos=rope", "even"]),
    # the batch
    ("micro batch", "--batch_size=12 --micro_batch_size=5", ["micro_batch_size=5", "batch_size=12", "4 or 6"]),
    ("micro above batch", "--batch_size=4 --micro_batch_size=8", ["micro_batch_size=8", "batch_size=4", "2 or 4"]),
    ("no batch", "--batch_size=0", ["batch_size=0"]),
    ("negative batch", "--batch_size=-4", ["batch_size=-4"]),
    ("negative micro batch", "--micro_batch_size=-1", ["micro_batch_size=-1"]),
    ("batch over ranks", "", ["batch_size=4", "3 processes", "3 or 6"], environ(WORLD_SIZE="3", RANK="0")),
    ("few over many ranks", "", ["batch_size=4", "8 processes", "use 8"], environ(WORLD_SIZE="8", RANK="0")),
    ("WORLD_SIZE alone", "", ["batch_size=4", "3 processes", "3 or 6"], environ(WORLD_SIZE="3")),
    ("WORLD_SIZE=two", "", ["WORLD_SIZE"], environ(WORLD_SIZE="two", RANK="0")),
    (
        "no first rank",
        "--timeout_s=1",
        ["127.0.0.1"],
        environ(WORLD_SIZE="2", RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9"),
    ),
    # optimizer and schedule
    ("lr times decay", "--learning_rate=1 --weight_decay=0.5", ["learning_rate", "weight_decay", "50%"]),
    ("AdamW's decay", "--optimizer=msgdw --learning_rate=1 --weight_decay=0.1", ["weight_decay", "0.0001"]),
    ("negative lr", "--learning_rate=-1", ["learning_rate=-1"]),
    ("negative decay", "--weight_decay=-0.1", ["weight_decay=-0.1"]),
    ("min_lr", "--min_lr=0.1 --learning_rate=0.01", ["min_lr=0.1", "learning_rate=0.01"]),
    ("momentum", "--optimizer=msgdw --momentum=1.0 --weight_decay=0", ["momentum=1.0", "below 1"]),
    ("beta2", "--beta2=1", ["beta2=1", "below 1"]),
    ("grad_clip", "--grad_clip=-1", ["grad_clip=-1"]),
    ("warmup", "--warmup_iters=-1", ["warmup_iters=-1"]),
    ("lr_decay_iters", "--lr_decay_iters=-1", ["lr_decay_iters=-1"]),
    ("momentum for AdamW", "--momentum=0.9", ["momentum=0.9", "no effect on adamw", "msgdw or muon"]),
    ("its default, for AdamW", "--dampening=0", ["dampening=0", "no effect on adamw", "choose msgdw"]),
    ("nesterov for Adam-mini", "--optimizer=adam_mini --nesterov=False", ["nesterov", "no effect on adam_mini"]),
    ("dampening for Muon", "--optimizer=muon --dampening=0.1", ["dampening=0.1", "no effect on muon"]),
    ("Muon's steps for AdamW", "--muon_steps=5", ["muon_steps=5", "no effect on adamw", "choose muon"]),
    ("a second LR for mSGDW", f"{MSGDW} --adamw_learning_rate=1e-3", ["adamw_learning_rate", "no effect on msgdw"]),
    ("a second decay for AdamW", "--adamw_weight_decay=0.1", ["adamw_weight_decay", "no effect on adamw"]),
    ("nesterov, dampening", f"{MSGDW} --nesterov=True --dampening=0.1", ["nesterov", "no dampening"]),
    ("nesterov, no momentum", "--optimizer=muon --momentum=0", ["nesterov needs momentum"]),
    ("dampening", f"{MSGDW} --dampening=1", ["dampening=1.0", "below 1"]),
    ("no steps", "--optimizer=muon --muon_steps=0", ["muon_steps=0", "between 1 and 20"]),
    ("many steps", "--optimizer=muon --muon_steps=21", ["muon_steps=21", "between 1 and 20"]),
    ("negative second LR", "--optimizer=muon --adamw_learning_rate=-1", ["adamw_learning_rate=-1"]),
    ("negative second decay", "--optimizer=muon --adamw_weight_decay=-1", ["adamw_weight_decay=-1"]),
    (
        "second LR times decay",
        "--optimizer=muon --adamw_learning_rate=1 --adamw_weight_decay=0.5",
        ["adamw_learning_rate·adamw_weight_decay = 0.5", "50%"],
    ),
    ("ratio, not blockwise", "--lr_ratio_qk=8", ["lr_ratio_qk", "needs blockwise_lr=True"]),
    ("start, not blockwise", "--blockwise_start=warmup_end", ["blockwise_start", "needs blockwise_lr=True"]),
    ("min_lr, not blockwise", "--blockwise_min_lr=proportional", ["blockwise_min_lr", "needs blockwise_lr=True"]),
    ("decay, not blockwise", "--blockwise_decay=unscaled", ["blockwise_decay", "needs blockwise_lr=True"]),
    ("negative ratio", "--blockwise_lr=True --lr_ratio_emb=-1", ["lr_ratio_emb=-1"]),
    ("ratio below min_lr", "--blockwise_lr=True --lr_ratio_vo=0.01", ["lr_ratio_vo=0.01", "min_lr=0.001"]),
    ("lr times decay times ratio", "--blockwise_lr=True --weight_decay=1", ["learning_rate·weight_decay·ratio = 0.1"]),
    ("wsd's decay without wsd", "--wsd_decay=sqrt", ["wsd_decay", "needs schedule=wsd", "schedule=cosine"]),
    ("wsd's steps without wsd", "--wsd_decay_iters=2", ["wsd_decay_iters", "needs schedule=wsd"]),
    (
        "wsd's steps in warm-up",
        "--schedule=wsd --max_iters=20 --wsd_decay_iters=16",
        ["wsd_decay_iters=16", "15 steps after warm-up", "lr_decay_iters=20, warmup_iters=5"],
    ),
    ("wsd's negative steps", "--schedule=wsd --wsd_decay_iters=-1", ["wsd_decay_iters=-1"]),
    # the run
    ("seed", "--seed=-1", ["seed=-1"]),
    ("max_iters", "--max_iters=-1", ["max_iters=-1"]),
    ("eval_interval", "--eval_interval=0", ["eval_interval=0", "at least 1"]),
    ("log_interval", "--log_interval=0", ["log_interval=0", "at least 1"]),
    ("save_interval", "--save_interval=-1", ["save_interval=-1"]),
    ("eval_tokens", "--eval_tokens=-1", ["eval_tokens=-1"]),
    ("max_skipped", "--max_skipped=0", ["max_skipped=0"]),
    ("timeout", "--timeout_s=0", ["timeout_s=0"]),
    # the machine
    ("banana", "--device=banana", ["banana", "cpu", "cuda", "mps", "auto"]),
    ("no number", "--device=cuda:x", ["cuda:x"]),
    ("cpu:0", "--device=cpu:0", ["cpu:0"]),
    ("no GPU", "--device=cuda", ["device=cuda", "none", "cpu"], NO_GPU),
    ("no second GPU", "--device=cuda:99", ["cuda:99"]),
    ("no mps", "--device=mps", ["device=mps", "cpu"], NO_MPS),
    ("no compiler", "--compile=True", ["torch.compile", "no compiler", "--compile=False"], broken_compiler),
    ("no wandb", "--wandb_log=True", ["wandb_log", "pip install wandb"], missing_package("wandb")),
    ("no transformers", "--init_from=gpt2", ["gpt2", "pip install transformers"], missing_package("transformers")),
)

# -------------------------------------------------------------------------------------------------------------- data

M = ["meta.json", "prepare"]
HUGE = {"vocab_size": 300, "chars": [chr(256 + i) for i in range(300)]}
BYTES = dict(tokenizer="bytes", vocab_size=257, eot=256)
DATA = cases(
    ("no such folder", "--dataset={tmp}/nothing", ["nothing", "is not prepared"]),
    ("no name", "--dataset=", ["dataset", "is not prepared"]),
    ("too long a name", f"--dataset={'x' * 300}", ["name too long"]),
    ("a file", "--dataset={data}/train.bin", ["train.bin", "is not prepared"]),
    ("says what to run", "--dataset=corpus", ["corpus", "is not prepared", "data/corpus/prepare.py"], named_dataset),
    ("broken JSON", "", [*M, "damaged"], write("{data}/meta.json", '{"dtype": "uint16",')),
    ("empty", "", [*M, "damaged"], write("{data}/meta.json", "")),
    ("not an object", "", [*M, "damaged"], write("{data}/meta.json", "[1, 2]")),
    ("not text", "", [*M, "damaged"], write("{data}/meta.json", bytes(range(256)))),
    ("no splits", "", [*M, "splits"], meta(drop("splits"))),
    ("no val", "", [*M, "val"], meta(lambda m: m["splits"].pop("val"))),
    ("no dtype", "", [*M, "dtype"], meta(drop("dtype"))),
    ("no tokenizer", "", [*M, "tokenizer"], meta(drop("tokenizer"))),
    ("no hash", "", [*M, "sha256"], meta(lambda m: m["splits"]["train"].pop("sha256"))),
    ("wrong dtype", "", [*M, "float32"], meta(put("dtype", "float32"))),
    ("another dtype", "", ["train.bin", "bytes", "prepare"], meta(put("dtype", "uint32"))),
    ("max_id", "", [*M, "60", "vocabulary of 50"], meta(put("splits", "val", "max_id", 60))),
    ("end of text", "", [*M, "50", "vocabulary of 50"], meta(put("eot", 50))),
    ("tokenizer", "", [*M, "sentencepiece"], meta(put("tokenizer", "sentencepiece"))),
    ("short alphabet", "", [*M, "chars", "50"], meta(put("chars", ["a", "b"]))),
    ("vocabulary as a string", "", ["meta.json", "vocab_size"], meta(put("vocab_size", "50"))),
    ("tokens as a string", "", ["meta.json", "tokens"], meta(put("splits", "train", "tokens", "20000"))),
    ("hash", "", ["val.bin", "sha256", "prepare"], meta(put("splits", "val", "sha256", "0" * 64))),
    ("flipped bits", "", ["val.bin", "sha256"], write("{data}/val.bin", bytes(6000))),
    ("cut file", "", ["train.bin", "1000", "40000"], write("{data}/train.bin", bytes(1000))),
    ("missing file", "", ["val.bin", "missing", "prepare"], lambda w: (w.data / "val.bin").unlink()),
    ("shorter than the context", "--block_size=4000", ["val.bin", "3000", "block_size"]),
    ("id in val.bin", "", ["val.bin", "60", "vocabulary of 50"], token("val", 60)),
    (
        "id in train.bin, found in training",
        RESUME,
        ["train.bin", "60", "vocabulary of 50", "prepare"],
        token("train", 60),
        PT,
    ),
    ("cut during the run", RESUME, ["train.bin", "shorter", "prepare"], during(truncate("train")), PT),
    ("val cut during the run", RESUME, ["val.bin", "shorter", "prepare"], during(truncate("val")), PT),
    ("cannot be read during the run", RESUME, ["Input/output error"], during(unreadable), PT),
)

# ------------------------------------------------------------------------------------------------------- checkpoints

R = "--init_from=resume"
P = "--init_from={run}/best.pt"  # its weights only, overwriting the run
NOT = ["last.pt", "not a checkpoint"]
PLAIN = pickle.dumps({"step": 3})
STATE = "blocks.0.attn.f.q.weight"


def longer_context(c):
    c["model_config"]["block_size"], c["model"]["wpe.weight"] = 4000, torch.zeros(4000, 16)


def renamed(rename):
    """Every name the optimizer knows a parameter by, changed."""

    def change(c):
        for group in c["optimizer"]["param_groups"]:
            group["param_names"] = [rename(name) for name in group["param_names"]]

    return change


def last_dropped(c):
    """The optimizer of a model that had one parameter less."""
    c["optimizer"]["param_groups"][-1]["param_names"].pop()
    c["optimizer"]["state"].pop(c["optimizer"]["param_groups"][-1]["params"].pop())


def momentum_alone(c):
    """What mSGDW would have saved, in a checkpoint that says adamw."""
    c["optimizer"]["state"] = {i: {"momentum_buffer": s["exp_avg"]} for i, s in c["optimizer"]["state"].items()}


def checkpoint_rows():
    """Every mistake in a checkpoint's content, resumed and as a source of weights."""
    for name, words, change in (
        ("unknown field", ["swish"], put("model_config", "swish", 1)),
        ("unknown norm", ["norm", "rms2"], put("model_config", "norm", "rms2")),
        ("field of another type", ["n_layer"], put("model_config", "n_layer", "1")),
        ("wider than its weights", ["wte.weight", "model_config"], put("model_config", "n_embd", 32)),
        ("deeper than its weights", ["blocks.1", "model_config"], put("model_config", "n_layer", 2)),
        ("a weight too few", [STATE], lambda c: c["model"].pop(STATE)),
        ("weights that are none", ["model"], put("model", 7)),
        ("no model", ["model"], drop("model")),
        ("no model_config", ["model_config"], drop("model_config")),
        ("no meta", ["meta"], drop("meta")),
        ("no step", ["step"], drop("step")),
        ("no format", ["not a checkpoint"], drop("format")),
        ("another format", ["not a checkpoint"], put("format", "nanoDNT checkpoint 0")),
        ("another alphabet", ["vocabulary", "dataset"], put("meta", "chars", OTHER)),
    ):
        for how, argv in (("resumed", R), ("weights of", P)):
            yield f"{how} {name}", argv, words, checkpoint(change)
    for name, words, change in (
        ("no optimizer", ["optimizer"], drop("optimizer")),
        ("no scaler", ["scaler"], drop("scaler")),
        ("no train_config", ["train_config"], drop("train_config")),
        ("empty optimizer state", ["optimizer"], put("optimizer", "state", {})),
        ("optimizer state of another shape", ["optimizer"], put("optimizer", "state", 0, "exp_avg", torch.zeros(3))),
        ("optimizer of other parameters", ["optimizer"], lambda c: c["optimizer"]["param_groups"].pop()),
        ("optimizer of fewer parameters", ["optimizer"], last_dropped),
        ("optimizer of renamed parameters", ["optimizer"], renamed(lambda n: f"model.{n}")),
        ("optimizer of one parameter", ["optimizer"], renamed(lambda n: STATE)),
        ("optimizer without names", ["optimizer"], lambda c: c["optimizer"]["param_groups"][0].pop("param_names")),
        ("optimizer state without a tensor", ["optimizer"], lambda c: c["optimizer"]["state"][0].pop("exp_avg")),
        ("optimizer state with one more", ["optimizer"], put("optimizer", "state", 0, "more", torch.zeros(3))),
        ("optimizer state of another kind", ["optimizer"], momentum_alone),
        ("optimizer state that is none", ["optimizer"], put("optimizer", "state", 0, 7)),
        ("a list of optimizer states", ["optimizer"], put("optimizer", "state", [1, 2])),
        ("a word for the step", ["step"], put("step", "three")),
    ):
        # no further step: with a wrong shape, torch's fused AdamW would write beyond its memory
        yield f"resumed {name}", R, words, checkpoint(change)


CHECKPOINT_CASES = cases(
    ("scratch over a run", "--overwrite=False", ["earlier run", "--init_from=resume", "--overwrite=True"]),
    ("weights over a run", f"{P} --overwrite=False", ["earlier run", "--init_from=resume", "--overwrite=True"]),
    ("nothing there", f"{R} --out_dir={{tmp}}/new", ["new", "nothing to resume"]),
    ("no such start", "--init_from={tmp}/no.pt", ["no.pt", "scratch", "resume", "auto", "gpt2"]),
    ("a folder for a start", "--init_from={run}", ["run", "scratch", "resume", "auto"]),
    ("misspelt start", "--init_from=resum", ["resum", "resume"]),
    ("all truncated", R, ["last.pt", "prev.pt", "damaged"], cut(*CHECKPOINTS)),
    ("auto, all truncated", "--init_from=auto", ["last.pt", "prev.pt", "damaged"], cut(*CHECKPOINTS)),
    ("weights truncated", P, ["best.pt", "damaged"], cut("best.pt")),
    ("empty files", R, ["last.pt", "damaged"], all_checkpoints(b"")),
    ("random bytes", R, ["last.pt", "damaged"], all_checkpoints(np.random.default_rng(0).bytes(5000))),
    ("text", R, ["last.pt", "damaged"], all_checkpoints("not a checkpoint\n" * 100)),
    ("a folder", R, ["last.pt"], all_checkpoints(None)),
    ("a plain pickle", R, ["last.pt"], all_checkpoints(PLAIN)),
    ("somebody's state dict", R, NOT, saved({"w": torch.ones(3)})),
    ("a tensor", R, NOT, saved(torch.ones(3))),
    ("a list", R, NOT, saved([1, 2])),
    ("code in a pickle", R, ["last.pt"], evil(pickle.dump)),
    ("code in torch.save", R, ["last.pt"], evil(torch.save)),
    ("code in the weights' file", P, ["best.pt"], evil(torch.save)),
    ("another vocabulary", R, ["300", "50", "vocabulary"], meta(lambda m: m.update(HUGE))),
    ("another vocabulary for weights", P, ["300", "50", "vocabulary"], meta(lambda m: m.update(HUGE))),
    ("another tokenizer", R, ["bytes", "chars", "dataset"], meta(lambda m: m.update(BYTES))),
    ("a longer context than the data", P, ["val.bin", "3000", "block_size"], checkpoint(longer_context)),
    (
        "broken metrics",
        R,
        ["metrics.jsonl:2"],
        write("{run}/metrics.jsonl", '{"step": 1, "tokens": 64}\n{"st\n{"step": 3}\n'),
    ),
    ("binary metrics", R, ["metrics.jsonl"], write("{run}/metrics.jsonl", b"\xff\xfe\n" * 3)),
    ("metrics are a folder", R, ["metrics.jsonl"], write("{run}/metrics.jsonl", None)),
    *checkpoint_rows(),
)

# ----------------------------------------------------------------------------------------------------------- writing

OUT = cases(
    ("a file", "--out_dir={data}/meta.json", ["meta.json", "--out_dir"]),
    ("below a file", "--out_dir={data}/meta.json/run", ["meta.json/run", "--out_dir"]),
    ("below a file, resumed", f"{R} --out_dir={{data}}/meta.json/run", ["meta.json/run"]),
    ("a device", "--out_dir=/dev/full", ["/dev/full", "--out_dir"]),
    ("an empty name", "--out_dir=", ["out_dir"]),
    ("too long a name", f"--out_dir={'x' * 300}", ["name too long"]),
    ("too long a name, resumed", f"{R} --out_dir={'x' * 300}", ["name too long"]),
    ("not for writing", "--out_dir=/proc/nanodnt", ["/proc/nanodnt", "--out_dir"]),
    (
        "no permission",
        "--out_dir={tmp}/closed/run",
        ["closed/run"],
        lambda w: (w.tmp / "closed").mkdir(mode=0o500),
        pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"),
    ),
    ("full disk at the start", R, ["config.json", "No space left", "intact"], full_disk()),
    ("full disk, overwriting", "", ["config.json", "No space left", "intact"], full_disk()),
    ("full disk at a checkpoint", RESUME, ["No space left", "intact"], full_disk(10_000), PT),
    ("limit on file size", RESUME, ["File too large", "intact"], file_size_limit, PT),
    ("no links, full disk", RESUME, ["No space left"], no_links_and_full, "run/last.pt"),
    ("no room at the start", "", ["0.00 GB free", "make room"], little_space),
    (
        "metrics full",
        RESUME,
        ["metrics.jsonl", "No space left", "intact"],
        during(lambda w: [(w.run / "metrics.jsonl").unlink(), (w.run / "metrics.jsonl").symlink_to("/dev/full")]),
        PT,
    ),
    (
        "run directory removed",
        RESUME,
        ["metrics.jsonl", "No such file"],
        during(lambda w: shutil.rmtree(w.run)),
        "data/*",
    ),
)


@FLAGS
def test_flags(world, capsys, case):
    refuse(world, capsys, train, case)


@CONFIG_FILES
def test_config_files(world, capsys, case):
    refuse(world, capsys, train, case)


@VALUES
def test_values(world, capsys, case):
    refuse(world, capsys, train, case)


@DATA
def test_data(world, capsys, case):
    refuse(world, capsys, train, case)


@CHECKPOINT_CASES
def test_checkpoints(world, capsys, case):
    refuse(world, capsys, train, case)


@OUT
def test_run_directory(world, capsys, case):
    refuse(world, capsys, train, case)


# ---------------------------------------------------------------------------------------------------------- sampling

SAMPLING = cases(
    ("unknown flag", "--temprature=1", ["--temprature", "--temperature?"]),
    ("a flag of train.py", "--batch_size=1", ["--batch_size"]),
    ("missing run", "--out_dir={tmp}/nothing", ["nothing", "no checkpoint"]),
    ("a file for a run", "--out_dir={data}/meta.json", ["meta.json"]),
    ("missing checkpoint", "--checkpoint=step5.pt", ["step5.pt", "no checkpoint"]),
    ("no best.pt yet", "", ["best.pt", "no checkpoint"], lambda w: (w.run / "best.pt").unlink()),
    ("truncated", "", ["best.pt", "damaged"], cut("best.pt")),
    ("random bytes", "", ["best.pt", "damaged"], all_checkpoints(np.random.default_rng(0).bytes(5000))),
    (
        "somebody's state dict",
        "",
        ["best.pt", "not a checkpoint"],
        saved({"w": torch.ones(3)}),
    ),
    ("code", "", ["best.pt"], evil(torch.save)),
    ("unknown field", "", ["swish"], checkpoint(put("model_config", "swish", 1))),
    ("unknown norm", "", ["norm", "rms2"], checkpoint(put("model_config", "norm", "rms2"))),
    ("wider than its weights", "", ["wte.weight", "model_config"], checkpoint(put("model_config", "n_embd", 32))),
    ("deeper than its weights", "", ["blocks.1", "model_config"], checkpoint(put("model_config", "n_layer", 2))),
    ("no model", "", ["model"], checkpoint(drop("model"))),
    ("no meta", "", ["meta"], checkpoint(drop("meta"))),
    ("unknown tokenizer", "", ["sentencepiece"], checkpoint(put("meta", "tokenizer", "sentencepiece"))),
    ("no alphabet", "", ["chars"], checkpoint(lambda c: c["meta"].pop("chars"))),
    ("missing prompt file", "--start= --start_file={tmp}/no.txt", ["no.txt", "No such file"]),
    ("too long a name", f"--start= --start_file={'x' * 300}", ["start_file", "name too long"]),
    ("a folder for a prompt", "--start= --start_file={tmp}", ["start_file", "directory"]),
    ("binary prompt", "--start= --start_file={run}/best.pt", ["best.pt", "UTF-8"]),
    ("unknown characters", "--start=AB7é", ["'7'", "'é'", "alphabet"]),
    ("no new document", "--start=", ["start"]),  # the alphabet has no newline to begin one after
    ("both prompts", "--start_file={data}/meta.json", ["start", "start_file", "keep one"]),
    ("temperature", "--temperature=-1", ["temperature=-1"]),
    ("temperature nan", "--temperature=nan", ["temperature", "nan"]),
    ("top_p above 1", "--top_p=1.5", ["top_p=1.5", "at most 1"]),
    ("top_p 0", "--top_p=0", ["top_p=0", "above 0"]),
    ("top_k", "--top_k=-1", ["top_k=-1"]),
    ("no samples", "--num_samples=0", ["num_samples=0", "at least 1"]),
    ("no tokens", "--max_new_tokens=0", ["max_new_tokens=0", "at least 1"]),
    ("banana", "--device=banana", ["banana", "cpu", "cuda", "mps", "auto"]),
    ("no GPU", "--device=cuda", ["device=cuda", "cpu"], NO_GPU),
)


@SAMPLING
def test_sampling(world, capsys, case):
    refuse(world, capsys, sample, case)


# ------------------------------------------------------------------------------------------- what must not be refused


@pytest.mark.parametrize(
    "program, argv",
    [(train, ""), (train, R), (train, "--init_from=auto"), (train, P), (train, RESUME), (sample, "")],
    ids=["train", "resume", "auto", "weights", "longer", "sample"],
)
def test_the_command_lines_work_without_the_mistake(world, capsys, program, argv):
    assert start(world, program, argv) == 0
    assert capsys.readouterr().err == ""


def test_evil_checkpoints_are_evil(world):
    """The code in the cases above does run where a checkpoint is loaded without care."""
    for save, load in ((pickle.dump, pickle.load), (torch.save, lambda f: torch.load(f, weights_only=False))):
        evil(save)(world)
        with open(world.run / "last.pt", "rb") as f:
            load(f)
        (world.tmp / "pwned").rmdir()


@pytest.mark.parametrize("init_from", ["resume", "auto"])
@pytest.mark.parametrize("spoil", [cut("last.pt"), lambda w: (w.run / "last.pt").unlink()], ids=["damaged", "missing"])
def test_prev_replaces_a_bad_last(world, capsys, init_from, spoil):
    """Resumed from step 2 instead of 3, the run ends as it did."""
    expected = helpers.load(world.run / "last.pt")
    spoil(world)
    had_last = (world.run / "last.pt").exists()
    assert start(world, train, f"--init_from={init_from}") == 0
    out, err = capsys.readouterr()
    assert err == "" and "step 2" in out
    assert ("warning: " in out and "prev.pt" in out) == had_last
    again = helpers.load(world.run / "last.pt")
    assert again["step"] == 3 and helpers.different(expected["model"], again["model"]) == []


def test_data_removed_during_the_run(world, capsys):
    """An open file outlives its name: the run goes on with the same batches."""
    assert start(world, train, RESUME) == 0
    expected = helpers.load(world.run / "last.pt")
    during(lambda w: shutil.rmtree(w.data))(world)
    assert start(world, train, "--max_iters=6") == 0
    again = helpers.load(world.run / "last.pt")
    assert again["step"] == 6 and helpers.different(expected["model"], again["model"]) == []


def test_a_full_disk_costs_one_attempt(world, capsys, monkeypatch):
    """One failure is retried, and leaves nothing behind."""
    real, calls = os.fsync, []

    def fsync(fd):
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(time, "sleep", lambda s: None)
    assert start(world, train, RESUME) == 0
    assert helpers.load(world.run / "last.pt")["step"] == 6
    assert not list(world.run.glob("*.tmp"))


# -------------------------------------------------------------------------------------------- as a user runs them

PROGRAMS = cases(
    ("a typo in a config", C, ["c.py:1", "max_iter", "max_iters?"], config("max_iter = 3\n")),
    ("damaged checkpoints", R, ["last.pt", "prev.pt", "damaged"], cut(*CHECKPOINTS)),
    ("sampling from nothing", "--out_dir={tmp}/nothing", ["nothing", "no checkpoint"]),
)


@PROGRAMS
def test_programs(world, case):
    program = sample if "sampling" in case.name else train
    if case.spoil:
        case.spoil(world)
    before = files(world.tmp)
    argv = [sys.executable, helpers.ROOT / f"{program.__name__}.py", *command_line(world, program, case.argv)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert_refused(done.returncode, done.stdout, done.stderr, case.words)
    assert done.returncode == (2 if "typo" in case.name else 1)
    assert files(world.tmp) == before
