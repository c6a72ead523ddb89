"""What train.py says to a dataset, a checkpoint or a disk that is wrong: one line that names it,
and nothing changed.

Every case starts from a folder that holds an earlier run, its dataset, and a command line that
works (see `test_the_command_lines_work_without_the_mistake`), and adds one mistake. The command
line says --overwrite=True where a case does not set it: not even then may a mistake cost the
earlier run.
"""

import shutil
import time

import pytest
import torch

import sample
import train
from support.hostile import CHECKPOINTS, RESUME, WEIGHTS, cases, refuse, start
from support.spoil import (
    checkpoint,
    cut,
    drop,
    during,
    full_disk,
    little_space,
    meta,
    named_dataset,
    put,
    saved,
    token,
    truncate,
    write,
)

pytestmark = pytest.mark.usefixtures("quick")
LONGER = f"{RESUME} --max_iters=6 --eval_interval=100"
PT = "run/*.pt"  # what a case that fails in the middle of a run must keep
OTHER = [chr(ord("a") + i) for i in range(50)]  # another alphabet of 50

# --------------------------------------------------------------------------------------------- data

META = ["meta.json", "prepare"]
LARGER = meta(lambda m: m.update(vocab_size=300, chars=[chr(256 + i) for i in range(300)]))
BYTES = dict(tokenizer="bytes", vocab_size=257, eot=256)
DATA = cases(
    ("no such folder", "--dataset={tmp}/nothing", ["nothing", "is not prepared"]),
    (
        "says what to run",
        "--dataset=corpus",
        ["corpus", "is not prepared", "data/corpus/prepare.py"],
        named_dataset,
    ),
    ("no val", "", [*META, "val"], meta(lambda m: m["splits"].pop("val"))),
    ("id in val.bin", "", ["val.bin", "60", "vocabulary of 50"], token("val", 60)),
    (
        "id found in training",
        LONGER,
        ["train.bin", "60", "vocabulary of 50", "prepare"],
        token("train", 60),
        PT,
    ),
    (
        "cut during the run",
        LONGER,
        ["train.bin", "shorter", "prepare"],
        during(truncate("train")),
        PT,
    ),
)

# -------------------------------------------------------------------------------------- checkpoints

NOT = ["last.pt", "not a checkpoint"]
STATE = "blocks.0.attn.f.q.weight"


def longer_context(c):
    c["model_config"]["block_size"], c["model"]["wpe.weight"] = 4000, torch.zeros(4000, 16)


def momentum_alone(c):
    """What mSGDW would have saved, in a checkpoint that says adamw."""
    c["optimizer"]["state"] = {
        i: {"momentum_buffer": s["exp_avg"]} for i, s in c["optimizer"]["state"].items()
    }


CONTENT = {  # mistakes in a checkpoint's content: (words, change)
    "unknown field": (["swish"], put("model_config", "swish", 1)),
    "unknown norm": (["norm", "rms2"], put("model_config", "norm", "rms2")),
    "wider than its weights": (["wte.weight", "model_config"], put("model_config", "n_embd", 32)),
    "a weight too few": ([STATE], lambda c: c["model"].pop(STATE)),
    "no model_config": (["model_config"], drop("model_config")),
    "another alphabet": (["vocabulary", "dataset"], put("meta", "chars", OTHER)),
    "no optimizer": (["optimizer"], drop("optimizer")),
    # no further step: with a wrong shape, torch's fused AdamW would write beyond its memory
    "empty optimizer state": (["optimizer"], put("optimizer", "state", {})),
    "optimizer state of another shape": (
        ["optimizer"],
        put("optimizer", "state", 0, "exp_avg", torch.zeros(3)),
    ),
    "optimizer of other parameters": (
        ["optimizer"],
        lambda c: c["optimizer"]["param_groups"].pop(),
    ),
    "optimizer state of another kind": (["optimizer"], momentum_alone),
    "a word for the step": (["step"], put("step", "three")),
}
OF_WEIGHTS = ("wider than its weights", "another alphabet")

BROKEN = '{"step": 1, "tokens": 64}\n{"st\n{"step": 3}\n'
CHECKPOINT_CASES = cases(
    (
        "scratch over a run",
        "--overwrite=False",
        ["earlier run", "--init_from=resume", "--overwrite=True"],
    ),
    (
        "nothing there",
        f"{RESUME} --out_dir={{tmp}}/new",
        ["new", "nothing to resume", "--init_from=scratch"],
    ),
    ("no such start", "--init_from={tmp}/no.pt", ["no.pt", "scratch", "resume", "auto", "gpt2"]),
    ("all truncated", RESUME, ["last.pt", "prev.pt", "damaged"], cut(*CHECKPOINTS)),
    ("weights truncated", WEIGHTS, ["best.pt", "damaged"], cut("best.pt")),
    ("somebody's state dict", RESUME, NOT, saved({"w": torch.ones(3)})),
    ("another vocabulary", RESUME, ["300", "50", "vocabulary"], LARGER),
    ("another tokenizer", RESUME, ["bytes", "chars", "dataset"], meta(lambda m: m.update(BYTES))),
    (
        "a longer context than the data",
        WEIGHTS,
        ["val.bin", "3000", "block_size"],
        checkpoint(longer_context),
    ),
    ("broken metrics", RESUME, ["metrics.jsonl:2"], write("{run}/metrics.jsonl", BROKEN)),
    *(
        (f"resumed, {name}", RESUME, words, checkpoint(change))
        for name, (words, change) in CONTENT.items()
    ),
    *(
        (f"weights, {name}", WEIGHTS, CONTENT[name][0], checkpoint(CONTENT[name][1]))
        for name in OF_WEIGHTS
    ),
)

# ------------------------------------------------------------------------------------------ writing


def remove_run(w):
    shutil.rmtree(w.run)
    w.patch.setattr(time, "sleep", lambda seconds: None)  # before the second attempt


OUT = cases(
    ("a file", "--out_dir={data}/meta.json", ["meta.json", "--out_dir"]),
    ("an empty name", "--out_dir=", ["out_dir"]),
    ("not for writing", "--out_dir=/proc/nanodnt", ["/proc/nanodnt", "--out_dir"]),
    ("full disk at the start", RESUME, ["config.json", "No space left", "intact"], full_disk),
    ("no room at the start", "", ["0.00 GB free", "make room"], little_space),
    (
        "run directory removed",
        LONGER,
        ["metrics.jsonl", "No such file"],
        during(remove_run),
        "data/*",
    ),
)


@DATA
def test_data(world, case):
    refuse(world, train, case)


@CHECKPOINT_CASES
def test_checkpoints(world, case):
    refuse(world, train, case)


@OUT
def test_run_directory(world, case):
    refuse(world, train, case)


# ------------------------------------------------------------------------- what must not be refused


@pytest.mark.parametrize(
    "program, argv",
    [
        (train, ""),
        (train, RESUME),
        (train, "--init_from=auto"),
        (train, WEIGHTS),
        (train, LONGER),
        (sample, ""),
    ],
    ids=["train", "resume", "auto", "weights", "longer", "sample"],
)
def test_the_command_lines_work_without_the_mistake(world, program, argv):
    code, _, err = start(world, program, argv)
    assert (code, err) == (0, "")
