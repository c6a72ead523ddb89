"""Twenty steps of `train.py`, loss by loss, against recorded values: any change of the mathematics
shows here.

The values were recorded in fp32 on a CPU. After a deliberate change `python
tests/runs/test_golden.py` prints new ones; the commit must say why they changed.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

import train
from model import GPT
from nanodnt.data.tokenizer import Tokenizer
from support.depth import spread
from support.runs import call, metrics, write_ids
from support.tolerances import LOSS, roundings, shake

pytestmark = pytest.mark.usefixtures("quick")
QUICK = (
    "pre_ln",
    "dnt_s5_msgdw",
    "llama",
    "dyt",
    "dropout",
    "muon",
    "adam_mini",
    "blockwise_warmup_end",
    "wsd",
)


TINY = "n_layer=2 n_head=2 n_embd=32 block_size=16 batch_size=8"
TINY += " max_iters=20 warmup_iters=5 log_interval=4 seed=7"
COMMON = f"{TINY} eval_interval=20 eval_tokens=0 learning_rate=0.01"
COMMON += " dtype=float32 device=cpu compile=False"
DNT = "pre_norm=attn mid_norm=both input_norm=True qk_norm=True"
LLAMA = "pos=rope mlp=swiglu n_kv_head=1 tie_weights=False residual_init=plain"
MSGDW = f"{DNT} optimizer=msgdw"
ORIGINAL = (
    f"{LLAMA} optimizer=muon muon_adjust_lr=original learning_rate=0.02 adamw_learning_rate=0.01"
)
# q and k, whose blocks are heads, matter
MINI = "optimizer=adam_mini qk_norm=True learning_rate=0.03"
BLOCKWISE = "blockwise_lr=True learning_rate=0.002"
BLOCKWISE_LLAMA = (
    f"{LLAMA} bias=True blockwise_lr=True learning_rate=0.003 blockwise_start=warmup_end"
)
BLOCKWISE_LLAMA += " blockwise_min_lr=proportional"
WSD = "schedule=wsd wsd_decay=sqrt wsd_decay_iters=8"

# name: flags, training loss at steps 4, 8, 12, 16, 20, validation loss at step 20
GOLDEN = {
    "pre_ln": (
        "norm=layernorm bias=True norm_eps=1e-5",
        [5.10523, 4.17156, 3.36744, 2.92526, 2.98912, 2.79471],
    ),
    "dnt_s5_adamw": (DNT, [5.17332, 4.25538, 3.57677, 3.25116, 3.30256, 3.12058]),
    "dnt_s5_msgdw": (
        f"{DNT} optimizer=msgdw learning_rate=0.5",
        [5.26955, 3.58966, 2.47129, 1.86699, 1.9919, 1.69709],
    ),
    "llama": (LLAMA, [5.01641, 4.03736, 3.0737, 2.54456, 2.62011, 2.43464]),
    "post_ln": (
        "pre_norm=none post_norm=both mlp=relu",
        [5.19661, 4.14863, 3.41037, 2.99213, 3.08183, 2.89924],
    ),
    "dyt": (
        f"norm=dyt dyt_bias=True {LLAMA}",
        [5.53488, 5.32631, 4.09234, 3.95721, 4.12394, 3.88596],
    ),
    "dropout": (
        f"{DNT} dropout=0.2 micro_batch_size=4",
        [5.18265, 4.33817, 3.7776, 3.47832, 3.61238, 3.30488],
    ),
    "muon": (f"{DNT} optimizer=muon", [5.16987, 4.19095, 3.4453, 3.05125, 3.13578, 2.96123]),
    "muon_original": (ORIGINAL, [5.04889, 3.98623, 3.03906, 2.51235, 2.55933, 2.39196]),
    "adam_mini": (f"{LLAMA} {MINI}", [4.48827, 2.89679, 1.11242, 0.83032, 1.1068, 0.94694]),
    "nesterov": (
        f"{MSGDW} learning_rate=0.1 nesterov=True",
        [5.37322, 4.9666, 4.32199, 3.79998, 3.7618, 3.52395],
    ),
    "dampening": (
        f"{MSGDW} learning_rate=0.5 dampening=0.5",
        [5.27499, 4.22037, 3.12916, 2.48536, 2.56801, 2.20247],
    ),
    "blockwise": (f"{DNT} {BLOCKWISE}", [4.86836, 3.64686, 3.00201, 2.59926, 2.8572, 2.5987]),
    "blockwise_warmup_end": (
        BLOCKWISE_LLAMA,
        [5.32779, 4.88154, 4.52863, 4.32698, 4.32789, 4.27894],
    ),
    "wsd": (f"{DNT} {WSD}", [5.17332, 4.24712, 3.49719, 3.04507, 3.06146, 2.885]),
    "dyt_schedule": (f"{DNT} schedule=dyt", [5.02913, 4.23552, 3.70127, 3.44172, 3.56601, 3.34428]),
}


def write_dataset(folder: Path) -> None:
    """A prepared dataset of bytes: a linear congruential walk over 64 values, so that a model can
    learn something."""
    state, tokens = 12345, []
    for i in range(6000):
        state = (1103515245 * state + 12345) % 2**31
        tokens.append((tokens[i - 1] * 5 + 3) % 64 if i and state >> 28 else state >> 25)
    write_ids(folder, Tokenizer.meta_for("bytes"), {"train": tokens[:5000], "val": tokens[5000:]})


def losses(folder: Path, dataset: Path, flags: str) -> list:
    """Training losses at steps 4, 8, … 20 and the validation loss at the end, of a run with these
    flags."""
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
def test_losses_are_the_recorded_ones(name, golden_dataset, tmp_path, monkeypatch):
    """Another machine adds in another order in each of 20 steps, and training makes errors larger:
    by how much, a run shows whose initial weights are moved by 16 roundings. Beside it: five
    digits, and the roundings of a loss of 5."""
    flags, expected = GOLDEN[name]
    found, draw = losses(tmp_path, golden_dataset, flags), GPT.init_weights

    def draw_and_shake(self, *args, **changes):
        draw(self, *args, **changes)
        shake(self, roundings(16))

    monkeypatch.setattr(GPT, "init_weights", draw_and_shake)
    moved = losses(tmp_path / "moved", golden_dataset, flags)
    far = max(abs(a - b) for a, b in zip(found, moved, strict=True))
    assert 0 < far < 1e-3
    assert found == pytest.approx(expected, abs=far + 5e-6 + 5 * LOSS)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write_dataset(data := Path(temporary) / "data")
        for name, (flags, _) in GOLDEN.items():
            found = [round(loss, 5) for loss in losses(Path(temporary) / name, data, flags)]
            print(name, found, file=sys.stderr)
