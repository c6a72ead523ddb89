"""What train.py and sample.py say to settings that are wrong: one line that names the mistake, and nothing changed.

Every case starts from a folder that holds an earlier run, its dataset, and a command line that works (see
test_bad_files.py), and adds one mistake. The command line of train.py says --overwrite=True where a case does not set
it: not even then may a mistake cost the earlier run.
"""

import math

import pytest
import torch

import sample
import train
from support.hostile import CHECKPOINTS, RESUME, Outcome, assert_refused, cases, command_line, refuse
from support.processes import Forked, call_main, finish
from support.runs import contents
from support.spoil import broken_compiler, checkpoint, cut, environ, missing_package, put, write

pytestmark = pytest.mark.usefixtures("quick")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
NO_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has mps")
GROUP = dict(WORLD_SIZE="2", RANK="1", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")  # has no rank 0

CONFIG = "{tmp}/c.py"


def config(text):
    return write("{tmp}/c.py", text)


# ------------------------------------------------------------------------------------------------------------ training

VALUES = cases(
    ("unknown flag", "--learning_rat=1", ["--learning_rat", "did you mean --learning_rate?"]),
    ("wrong optimizer", "--optimizer=adam", ["optimizer", "adamw", "msgdw", "muon", "adam_mini"]),
    # a config file
    ("unknown key", CONFIG, ["c.py:2", "n_layers", "n_layer?"], config("n_head = 2\nn_layers = 3\n")),
    ("a call", CONFIG, ["c.py:1", "not allowed"], config("n_head = __import__('os').mkdir('pwned')\n")),
    ("flag after a good file", f"{CONFIG} --n_laver=3", ["--n_laver", "--n_layer?"], config("n_head = 2\n")),
    # the model
    ("n_embd, n_head", "--n_embd=10 --n_head=4", ["n_embd=10", "multiple", "n_head=4"]),
    ("too small a vocabulary", "--vocab_size=40", ["50", "40", "vocabulary"]),
    ("more weights than memory", f"--n_embd={2**24}", ["memory"]),
    # the layout
    ("norm=none", "--norm=none", ["norm=none", "mid_norm", "input_norm"]),
    # the batch
    ("micro batch", "--batch_size=12 --micro_batch_size=5", ["micro_batch_size=5", "batch_size=12", "4 or 6"]),
    ("too large a batch", f"--batch_size={2**60}", [f"batch_size={2**60}", "at most 1048576"]),
    # half a process group
    ("WORLD_SIZE alone", "", ["WORLD_SIZE=2", "not RANK, LOCAL_RANK", "torchrun"], environ(WORLD_SIZE="2")),
    ("RANK alone", "", ["RANK=1", "not WORLD_SIZE", "unset"], environ(RANK="1")),
    ("no address", "", ["not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"], environ(WORLD_SIZE="2", RANK="1")),
    ("no LOCAL_RANK", "", ["but not LOCAL_RANK:"], environ(**GROUP | {"LOCAL_RANK": None})),
    ("RANK=2 of 2", "", ["RANK=2", "not from 0 to WORLD_SIZE - 1"], environ(**GROUP | {"RANK": "2"})),
    ("LOCAL_RANK=-1", "", ["LOCAL_RANK=-1"], environ(**GROUP | {"LOCAL_RANK": "-1"})),
    ("WORLD_SIZE=two", "", ["WORLD_SIZE=two", "unset"], environ(WORLD_SIZE="two", RANK="0")),
    ("RANK empty", "", ["WORLD_SIZE=2", "but not RANK:"], environ(**GROUP | {"RANK": ""})),
    ("MASTER_ADDR empty", "", ["but not MASTER_ADDR:"], environ(**GROUP | {"MASTER_ADDR": ""})),
    ("no first rank", "--timeout_s=1", ["127.0.0.1"], environ(**GROUP), pytest.mark.deep),
    # optimizer and schedule; test_schedules.py and test_run_choices.py have the others
    ("momentum for AdamW", "--momentum=0.9", ["momentum=0.9", "no effect on adamw", "msgdw or muon"]),
    # the machine
    ("banana", "--device=banana", ["banana", "cpu", "cuda", "mps", "auto"]),
    ("no number", "--device=cuda:x", ["cuda:x"]),
    ("cpu:0", "--device=cpu:0", ["cpu:0"]),
    ("no GPU", "--device=cuda", ["device=cuda", "none", "cpu"], NO_GPU),
    ("no second GPU", "--device=cuda:99", ["cuda:99"]),
    ("no mps", "--device=mps", ["device=mps", "cpu"], NO_MPS),
    ("no compiler", "--compile=True", ["torch.compile", "no compiler", "--compile=False"], broken_compiler),
    ("no wandb", "--wandb_log=True", ["wandb_log", "pip install wandb"], missing_package("wandb")),
    ("no hub", "--init_from=gpt2", ["huggingface_hub", "requirements.txt"], missing_package("huggingface_hub")),
)


@VALUES
def test_values(world, case):
    refuse(world, train, case)


def not_finite(saved):
    saved["model"]["final_norm.gain"].fill_(math.nan)


SAMPLING = cases(
    ("unknown flag", "--temprature=1", ["--temprature", "--temperature?"]),
    ("missing run", "--out_dir={tmp}/nothing", ["nothing", "no checkpoint"]),
    ("a file for a run", "--out_dir={data}/meta.json", ["meta.json"]),
    ("missing checkpoint", "--checkpoint=step5.pt", ["step5.pt", "no checkpoint"]),
    ("no best.pt yet", "", ["best.pt", "no checkpoint"], lambda w: (w.run / "best.pt").unlink()),
    ("unknown field", "", ["swish"], checkpoint(put("model_config", "swish", 1))),
    ("unknown tokenizer", "", ["sentencepiece"], checkpoint(put("meta", "tokenizer", "sentencepiece"))),
    ("no alphabet", "", ["chars"], checkpoint(lambda c: c["meta"].pop("chars"))),
    ("missing prompt file", "--start= --start_file={tmp}/no.txt", ["no.txt", "No such file"]),
    ("missing FILE:", "--start=FILE:{tmp}/no.txt", ["start=FILE:", "no.txt", "No such file"]),
    ("FILE: without a name", "--start=FILE:", ["start=FILE:", "directory"]),
    ("a folder for a prompt", "--start=FILE:.", ["start=FILE:.", "directory"]),
    ("not UTF-8", "--start=FILE:{tmp}/p.txt", ["is not UTF-8 text"], write("{tmp}/p.txt", "déjà".encode("latin-1"))),
    ("FILE: and start_file", "--start=FILE:p.txt --start_file={data}/meta.json", ["start and start_file", "keep one"]),
    ("binary prompt", "--start= --start_file={run}/best.pt", ["best.pt", "zip archive"]),
    ("unknown characters", "--start=AB7é", ["'7'", "'é'", "alphabet"]),
    ("no new document", "--start=", ["start"]),  # the alphabet has no newline to begin one after
    ("both prompts", "--start_file={data}/meta.json", ["start", "start_file", "keep one"]),
    ("temperature", "--temperature=-1", ["temperature=-1"]),
    ("tiny temperature", "--temperature=1e-39", ["temperature=1e-39", "0, or at least 0.0001"]),
    ("weights not finite", "--start=A", ["logits are not finite"], checkpoint(not_finite)),
    ("top_p above 1", "--top_p=1.5", ["top_p=1.5", "at most 1"]),
    ("top_k", "--top_k=-1", ["top_k=-1"]),
    ("no samples", "--num_samples=0", ["num_samples=0", "at least 1"]),
    ("banana", "--device=banana", ["banana", "cpu", "cuda", "mps", "auto"]),
    ("no GPU", "--device=cuda", ["device=cuda", "cpu"], NO_GPU),
)


@SAMPLING
def test_sampling(world, case):
    refuse(world, sample, case)


def test_as_a_program(world):
    cut(*CHECKPOINTS)(world)
    before = contents(world.tmp)
    process = Forked(world.tmp.with_name("program"), call_main, "train", *command_line(world, train, RESUME))
    assert_refused(Outcome(1, *finish(process, 1)), ["last.pt", "prev.pt", "damaged"])
    assert contents(world.tmp) == before
