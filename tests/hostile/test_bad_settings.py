"""What train.py and sample.py say to settings that are wrong: one line that names the mistake, and nothing changed.

Every case starts from a folder that holds an earlier run, its dataset, and a command line that works (see
test_bad_files.py), and adds one mistake. The command line of train.py says --overwrite=True where a case does not set
it: not even then may a mistake cost the earlier run.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

import sample
import train
from support import runs
from support.hostile import CHECKPOINTS, RESUME, Outcome, assert_refused, cases, command_line, files, refuse
from support.spoil import (
    all_checkpoints,
    broken_compiler,
    checkpoint,
    cut,
    drop,
    environ,
    evil,
    missing_package,
    put,
    saved,
    write,
)

pytestmark = pytest.mark.usefixtures("one_thread")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
NO_MPS = pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has mps")
MSGDW = "--optimizer=msgdw --weight_decay=0"

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


CONFIG = "{tmp}/c.py"
CONFIG_FILES = cases(
    ("missing", CONFIG, ["c.py", "No such file"]),
    ("a folder", "{run}", ["config file", "directory"]),
    ("unknown key", CONFIG, ["c.py:2", "n_layers", "n_layer?"], config("n_head = 2\nn_layers = 3\n")),
    ("nanoGPT's key", CONFIG, ["c.py:1", "batch_size"], config("gradient_accumulation_steps = 5 * 8\n")),
    ("wrong type", CONFIG, ["c.py:1", "n_layer", "'3'", "int"], config("n_layer = '3'\n")),
    ("wrong choice", CONFIG, ["c.py:1", "norm", "rms", "rmsnorm"], config("norm = 'rms'\n")),
    ("code", CONFIG, ["c.py:2", "import os"], config("n_head = 2\nimport os\n")),
    ("a call", CONFIG, ["c.py:1", "not allowed"], config("n_head = __import__('os').mkdir('pwned')\n")),
    ("a condition", CONFIG, ["c.py:1", "not allowed"], config("if True:\n    n_head = 2\n")),
    ("no quotes", CONFIG, ["c.py:1", "rmsnorm", "quotes"], config("norm = rmsnorm\n")),
    ("twice", CONFIG, ["c.py:2", "n_head", "c.py:1"], config("n_head = 2\nn_head = 4\n")),
    ("syntax error", CONFIG, ["c.py:2"], config("n_head = 2\nn_layer = = 3\n")),
    ("binary", CONFIG, ["c.py", "not a config file"], config(bytes(range(256)))),
    ("division by zero", CONFIG, ["c.py:1", "2 // 0", "zero"], config("n_head = 2 // 0\n")),
    ("flag after a good file", f"{CONFIG} --n_laver=3", ["--n_laver", "--n_layer?"], config("n_head = 2\n")),
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
    ("too large a batch", f"--batch_size={2**60}", [f"batch_size={2**60}", "at most 1048576"]),
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
    ("no hub", "--init_from=gpt2", ["huggingface_hub", "requirements.txt"], missing_package("huggingface_hub")),
)


@FLAGS
def test_flags(world, case):
    refuse(world, train, case)


@CONFIG_FILES
def test_config_files(world, case):
    refuse(world, train, case)


@VALUES
def test_values(world, case):
    refuse(world, train, case)


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
def test_sampling(world, case):
    refuse(world, sample, case)


# -------------------------------------------------------------------------------------------- as a user runs them

PROGRAMS = cases(
    ("a typo in a config", CONFIG, ["c.py:1", "max_iter", "max_iters?"], config("max_iter = 3\n")),
    ("damaged checkpoints", RESUME, ["last.pt", "prev.pt", "damaged"], cut(*CHECKPOINTS)),
    ("sampling from nothing", "--out_dir={tmp}/nothing", ["nothing", "no checkpoint"], pytest.mark.deep),
)


@PROGRAMS
def test_programs(world, case):
    program = sample if "sampling" in case.name else train
    if case.spoil:
        case.spoil(world)
    before = files(world.tmp)
    argv = [sys.executable, runs.ROOT / f"{program.__name__}.py", *command_line(world, program, case.argv)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert_refused(Outcome(done.returncode, done.stdout, done.stderr), case.words)
    assert done.returncode == (2 if "typo" in case.name else 1)
    assert files(world.tmp) == before
