"""What train.py and sample.py say to settings that are wrong: one line that names the mistake, and
nothing changed.

Every case starts from a folder that holds an earlier run, its dataset, and a command line that
works (see test_bad_files.py), and adds one mistake. The command line of train.py says
--overwrite=True where a case does not set it: not even then may a mistake cost the earlier run.
"""

import math

import pytest
import torch

import sample
import train
from support.hostile import (
    CHECKPOINTS,
    RESUME,
    Outcome,
    assert_refused,
    cases,
    command_line,
    refuse,
    start,
)
from support.processes import Forked, call_main, finish
from support.runs import contents
from support.spoil import broken_compiler, checkpoint, cut, environ, missing_package, put, write

pytestmark = pytest.mark.usefixtures("quick")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
# has no rank 0
GROUP = dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")

CONFIG = "{tmp}/c.py"
BIAS = "--n_expert=4 --balance=bias"


def config(text):
    return write("{tmp}/c.py", text)


# ----------------------------------------------------------------------------------------- training

VALUES = cases(
    ("unknown flag", "--learning_rat=1", ["--learning_rat", "did you mean --learning_rate?"]),
    # a config file
    (
        "unknown key",
        CONFIG,
        ["c.py:2", "n_layers", "n_layer?"],
        config("n_head = 2\nn_layers = 3\n"),
    ),
    # the model
    ("n_embd, n_head", "--n_embd=10 --n_head=4", ["n_embd=10", "multiple", "n_head=4"]),
    ("too small a vocabulary", "--vocab_size=40", ["50", "40", "vocabulary"]),
    ("more weights than memory", f"--n_embd={2**24}", ["memory"]),
    # experts
    (
        "balance_coef, without experts",
        "--balance_coef=0.5",
        ["balance_coef=0.5 needs experts", "leave balance_coef"],
    ),
    (
        "balance_coef of a bias",
        f"{BIAS} --balance_coef=0.5",
        ["balance_coef=0.5 needs balance=loss", "balance=bias"],
    ),
    # the batch
    (
        "micro batch",
        "--batch_size=12 --micro_batch_size=5",
        ["micro_batch_size=5", "batch_size=12", "4 or 6"],
    ),
    ("too large a batch", f"--batch_size={2**60}", [f"batch_size={2**60}", "1048576"]),
    # half a process group
    (
        "WORLD_SIZE alone",
        "",
        ["WORLD_SIZE=2", "not RANK, LOCAL_RANK", "torchrun"],
        environ(WORLD_SIZE="2"),
    ),
    (
        "RANK=2 of 2",
        "",
        ["RANK=2", "not from 0 to WORLD_SIZE - 1"],
        environ(**GROUP | {"RANK": "2"}),
    ),
    ("WORLD_SIZE=two", "", ["WORLD_SIZE=two", "unset"], environ(WORLD_SIZE="two", RANK="0")),
    (
        "MASTER_PORT=abc",
        "",
        ["MASTER_PORT=abc", "unset"],
        environ(**GROUP | {"MASTER_PORT": "abc"}),
    ),
    ("MASTER_ADDR empty", "", ["but not MASTER_ADDR:"], environ(**GROUP | {"MASTER_ADDR": ""})),
    ("no first rank", "--timeout_s=1", ["127.0.0.1"], environ(**GROUP), pytest.mark.deep),
    # the machine
    ("banana", "--device=banana", ["banana", "cpu", "cuda", "mps", "auto"]),
    ("no GPU", "--device=cuda", ["device=cuda", "none", "cpu"], NO_GPU),
    ("no second GPU", "--device=cuda:99", ["cuda:99"]),
    (
        "no compiler",
        "--compile=True",
        ["torch.compile", "no compiler", "--compile=False"],
        broken_compiler,
    ),
    ("no wandb", "--wandb_log=True", ["wandb_log", "pip install wandb"], missing_package("wandb")),
    (
        "no hub",
        "--init_from=gpt2",
        ["huggingface_hub", "requirements.txt"],
        missing_package("huggingface_hub"),
    ),
)


@VALUES
def test_values(world, case):
    refuse(world, train, case)


def not_finite(saved):
    saved["model"]["final_norm.gain"].fill_(math.nan)


SAMPLING = cases(
    ("missing run", "--out_dir={tmp}/nothing", ["nothing", "no checkpoint"]),
    ("no best.pt yet", "", ["best.pt", "no checkpoint"], lambda w: (w.run / "best.pt").unlink()),
    (
        "unknown tokenizer",
        "",
        ["sentencepiece"],
        checkpoint(put("meta", "tokenizer", "sentencepiece")),
    ),
    ("missing FILE:", "--start=FILE:{tmp}/no.txt", ["start=FILE:", "no.txt", "No such file"]),
    (
        "not UTF-8",
        "--start=FILE:{tmp}/p.txt",
        ["is not UTF-8 text"],
        write("{tmp}/p.txt", "déjà".encode("latin-1")),
    ),
    ("unknown characters", "--start=AB7é", ["'7'", "'é'", "alphabet"]),
    ("no new document", "--start=", ["start"]),  # the alphabet has no newline to begin one after
    ("both prompts", "--start_file={data}/meta.json", ["start", "start_file", "keep one"]),
    ("temperature", "--temperature=-1", ["temperature=-1"]),
    ("weights not finite", "--start=A", ["logits are not finite"], checkpoint(not_finite)),
    ("top_p above 1", "--top_p=1.5", ["top_p=1.5", "at most 1"]),
    ("no samples", "--num_samples=0", ["num_samples=0", "at least 1"]),
)


@SAMPLING
def test_sampling(world, case):
    refuse(world, sample, case)


def test_a_dense_run_stays_dense_when_resumed_with_experts(world):
    """The architecture comes from the checkpoint, and a line says so."""
    outcome = start(world, train, f"{RESUME} --n_expert=4 --n_expert_active=1 --max_iters=4")
    assert (outcome.code, outcome.err) == (0, "")
    assert (
        "model of the checkpoint, not of the flags: n_expert 4 → 0, n_expert_active 1 → 2\n"
        in outcome.out
    )


def test_as_a_program(world):
    cut(*CHECKPOINTS)(world)
    before = contents(world.tmp)
    process = Forked(
        world.tmp.with_name("program"), call_main, "train", *command_line(world, train, RESUME)
    )
    assert_refused(Outcome(1, *finish(process, 1)), ["last.pt", "prev.pt", "damaged"])
    assert contents(world.tmp) == before
