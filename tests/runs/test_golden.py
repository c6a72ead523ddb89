"""Twenty steps of `train.py`, loss by loss, against recorded values: any change of the mathematics shows here.

The values were recorded in fp32 on a CPU. After a deliberate change `python tests/runs/test_golden.py` prints new ones;
the commit must say why they changed.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

import train
from nanodnt.data.tokenizer import Tokenizer
from support.depth import spread
from support.runs import call, metrics, write_ids

pytestmark = pytest.mark.usefixtures("quick", "one_thread")
QUICK = ("pre_ln", "dnt_s5_msgdw", "llama", "dyt", "dropout", "muon", "adam_mini", "blockwise_warmup_end", "wsd")


TINY = "n_layer=2 n_head=2 n_embd=32 block_size=16 batch_size=8 max_iters=20 warmup_iters=5 log_interval=4 seed=7"
COMMON = f"{TINY} eval_interval=20 eval_tokens=0 dtype=float32 device=cpu compile=False learning_rate=0.01"
DNT = "pre_norm=attn mid_norm=both input_norm=True qk_norm=True"
LLAMA = "pos=rope mlp=swiglu n_kv_head=1 tie_weights=False residual_init=plain"
MSGDW = f"{DNT} optimizer=msgdw"
ORIGINAL = f"{LLAMA} optimizer=muon muon_adjust_lr=original learning_rate=0.02 adamw_learning_rate=0.01"
MINI = "optimizer=adam_mini qk_norm=True learning_rate=0.03"  # q and k, whose blocks are heads, matter
BLOCKWISE = "blockwise_lr=True learning_rate=0.002"
BLOCKWISE_LLAMA = f"{LLAMA} bias=True blockwise_lr=True learning_rate=0.003 blockwise_start=warmup_end"
BLOCKWISE_LLAMA += " blockwise_min_lr=proportional"
WSD = "schedule=wsd wsd_decay=sqrt wsd_decay_iters=8"

# name: flags, training loss at steps 4, 8, 12, 16, 20, validation loss at step 20
GOLDEN = {
    "pre_ln": ("norm=layernorm bias=True norm_eps=1e-5", [5.13064, 4.21032, 3.45092, 3.06338, 3.10931, 2.90732]),
    "dnt_s5_adamw": (DNT, [5.14939, 4.25782, 3.56763, 3.20803, 3.3003, 3.07863]),
    "dnt_s5_msgdw": (f"{DNT} optimizer=msgdw learning_rate=0.5", [5.22079, 3.8235, 2.62817, 2.07223, 2.27148, 1.96611]),
    "llama": (LLAMA, [4.99669, 4.00085, 3.08223, 2.54399, 2.59373, 2.41442]),
    "post_ln": ("pre_norm=none post_norm=both mlp=relu", [5.19233, 4.18445, 3.4652, 3.08105, 3.12121, 2.96861]),
    "dyt": (f"norm=dyt dyt_bias=True {LLAMA}", [5.53511, 5.31745, 4.08076, 3.92267, 4.16116, 3.87519]),
    "dropout": (f"{DNT} dropout=0.2 micro_batch_size=4", [5.21417, 4.34884, 3.76699, 3.53514, 3.59611, 3.29232]),
    "muon": (f"{DNT} optimizer=muon", [5.13433, 4.19349, 3.51542, 3.16032, 3.20669, 3.01975]),
    "muon_original": (ORIGINAL, [5.04246, 3.96955, 3.04788, 2.49011, 2.52721, 2.38225]),
    "adam_mini": (f"{LLAMA} {MINI}", [4.48584, 2.78273, 1.17565, 0.88108, 1.10341, 0.98076]),
    "nesterov": (f"{MSGDW} learning_rate=0.1 nesterov=True", [5.39389, 4.87266, 4.29349, 3.80808, 3.76824, 3.50026]),
    "dampening": (f"{MSGDW} learning_rate=0.5 dampening=0.5", [5.28856, 4.11941, 3.29506, 2.72885, 2.81498, 2.34965]),
    "blockwise": (f"{DNT} {BLOCKWISE}", [4.84764, 3.61995, 2.88203, 2.46461, 2.69561, 2.42102]),
    "blockwise_warmup_end": (BLOCKWISE_LLAMA, [5.31558, 4.89036, 4.5344, 4.33461, 4.34116, 4.27631]),
    "wsd": (f"{DNT} {WSD}", [5.14939, 4.24924, 3.45098, 2.98265, 3.05752, 2.82236]),
    "dyt_schedule": (f"{DNT} schedule=dyt", [5.04912, 4.20033, 3.7069, 3.44953, 3.51724, 3.30121]),
}


def write_dataset(folder: Path) -> None:
    """A prepared dataset of bytes: a linear congruential walk over 64 values, so that a model can learn something."""
    state, tokens = 12345, []
    for i in range(6000):
        state = (1103515245 * state + 12345) % 2**31
        tokens.append((tokens[i - 1] * 5 + 3) % 64 if i and state >> 28 else state >> 25)
    write_ids(folder, Tokenizer.meta_for("bytes"), {"train": tokens[:5000], "val": tokens[5000:]})


def losses(folder: Path, dataset: Path, flags: str) -> list:
    """Training losses at steps 4, 8, … 20 and the validation loss at the end, of a run with these flags."""
    chosen = dict(pair.split("=") for pair in f"{COMMON} {flags}".split())
    chosen |= {"dataset": dataset, "out_dir": folder / "out"}
    assert call(train.main, *(f"--{k}={v}" for k, v in chosen.items())) == 0
    rows = metrics(folder / "out")
    return [row["train_loss"] for row in rows if "train_loss" in row] + [rows[-1]["val_loss"]]


@pytest.fixture(scope="module")
def golden_dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "data"
    write_dataset(folder)
    return folder


@pytest.mark.parametrize("name", spread(GOLDEN, fast=QUICK))
def test_losses_are_the_recorded_ones(name, golden_dataset, tmp_path):
    flags, expected = GOLDEN[name]
    assert losses(tmp_path, golden_dataset, flags) == pytest.approx(expected, abs=3e-4)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write_dataset(data := Path(temporary) / "data")
        for name, (flags, _) in GOLDEN.items():
            found = [round(loss, 5) for loss in losses(Path(temporary) / name, data, flags)]
            print(name, found, file=sys.stderr)
