"""The numbers that the papers' claims are judged by, each of one finished run (reproduce.py).

`MEASURES` has them by name: run directory → float. Definitions are those of diagnostics.py, at the sizes below, which
are small enough for a CPU; what is pooled over types, slots or halves of the network is our choice [I].
"""

import json
import math
import statistics
import zlib
from functools import cache
from pathlib import Path

import torch

import diagnostics
import rundir
import runtime
from loader import Dataset
from model import GPT, GPTConfig, Slot
from optim import fill_defaults, lr_at, state_bytes
from train import TrainConfig

GRADIENT_TOKENS = 65536  # of the validation set
LOSS_TOKENS = 16384
PROBE_TOKENS = 2048  # for what needs less
DRAWS = 8  # of labels, for sharpness
SEED = 1  # of those draws


# ------------------------------------------------------------------------------------------------- what a run left


@cache
def configs(path: Path) -> tuple:
    """(GPTConfig, TrainConfig) of a run."""
    record = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return GPTConfig(**record["model"]), TrainConfig(**record["train"])


def val_losses(path: Path) -> list:
    return [row["val_loss"] for row in rundir.read_metrics(path) if row.get("val_loss") is not None]


def steps(path: Path) -> list:
    """The steps of the checkpoints that were kept."""
    return sorted(int(p.stem.removeprefix("step_")) for p in path.glob("step_*.pt"))


def device() -> torch.device:
    return runtime.choose_device("auto")[0]


def model_of(path: Path, name: str = "last.pt") -> GPT:
    """The model of a checkpoint, in fp32."""
    return GPT.from_checkpoint(rundir.load_checkpoint(path / name)).eval().to(device())


def batches(path: Path, tokens: int, size: int = 0) -> list:
    """[(inputs, targets)] of the validation windows that an evaluation of so many tokens reads, `size` a batch."""
    model, config = configs(path)
    size = size or max(1, diagnostics.MICRO_TOKENS // model.block_size)
    data = Dataset(config.dataset, model.block_size, config.seed, verify=False)
    starts = data.validation(tokens)
    pairs = [data.val_batch(starts[i : i + size], size) for i in range(0, len(starts), size)]
    return [(torch.from_numpy(x).to(device()), torch.from_numpy(y).to(device())) for x, y in pairs]


def probe(path: Path) -> torch.Tensor:
    """Whole sequences (B, T) of about PROBE_TOKENS tokens."""
    n = max(1, PROBE_TOKENS // configs(path)[0].block_size)
    return batches(path, PROBE_TOKENS, n)[0][0]


# -------------------------------------------------------------------------------------------------------- the runs


def start_loss(path: Path) -> float:
    """The loss of a model that knows nothing: ln of the vocabulary."""
    return math.log(configs(path)[0].vocab_size)


def loss(path: Path) -> float:
    """The validation loss at the end, in nats; of a run that diverged, or ended worse than it began, ln V."""
    last = rundir.read_metrics(path)[-1]
    value = None if "failure" in last else last.get("val_loss")
    return start_loss(path) if value is None else min(value, start_loss(path))


def rise(path: Path) -> float:
    """How far the validation loss ends above its lowest."""
    return loss(path) - min([*val_losses(path), loss(path)])


# -------------------------------------------------------------------------------------------------------- gradients


def early_gradients(path: Path) -> dict:
    """{q, k, v, o, w1, w2: gradient entries of all layers together}, at the first checkpoint after warm-up."""
    warmup = configs(path)[1].warmup_iters
    early = next((step for step in steps(path) if step >= warmup), None)
    if early is None:
        raise ValueError(f"{path} has kept no checkpoint after its warm-up: remove it, to train it again")
    model = model_of(path, f"step_{early}.pt")
    gradients, types = diagnostics.gradients(model, batches(path, GRADIENT_TOKENS)), diagnostics.matrix_types(model)
    return {t: torch.cat([gradients[n].flatten() for n, u in types.items() if u == t]) for t in types.values()}


@cache
def gradient_tails(path: Path) -> list:
    return [diagnostics.tail_statistics(g) for g in early_gradients(path).values()]


def gradient_rms(path: Path) -> float:
    return statistics.mean(math.log10(tail["rms"]) for tail in gradient_tails(path))


def gradient_kurtosis(path: Path) -> float:
    return statistics.mean(math.log10(tail["kurtosis"]) for tail in gradient_tails(path))


# -------------------------------------------------------------------------------------------------------- sharpness

ORDER = ("emb", "qk", "ffn", "vo", "norm")


@cache
def sharpness(path: Path, name: str) -> dict:
    """{type: arithmetic mean of the sharpness} at a checkpoint."""
    model, generator = model_of(path, name), torch.Generator(device()).manual_seed(SEED)
    h = diagnostics.sharpness(model, probe(path), DRAWS, generator)
    h = diagnostics.without_padding(model, h)
    by_type = diagnostics.sharpness_by(h, diagnostics.block_types(model))
    return {t: by_type[t]["arithmetic"] for t in ORDER}


def sharpness_ratio(a: str, b: str):
    return lambda path: math.log10(sharpness(path, "last.pt")[a] / sharpness(path, "last.pt")[b])


def is_ordered(path: Path, step: int) -> bool:
    s = sharpness(path, f"step_{step}.pt")
    return all(s[a] < s[b] for a, b in zip(ORDER, ORDER[1:], strict=False))


def onset(path: Path) -> float:
    """The share of the run from which on every checkpoint has the order; 1 where the last has it not."""
    first = 1.0
    for step in reversed(steps(path)):
        if not is_ordered(path, step):
            break
        first = step / configs(path)[1].max_iters
    return first


# -------------------------------------------------------------------------------------------------------------- DyT


@cache
def tanh_fits(path: Path) -> list:
    model, x, generator = model_of(path), probe(path), torch.Generator().manual_seed(SEED)
    return [diagnostics.norm_scatter(model, x, name, 4000, generator) for name in diagnostics.norm_slots(model)]


def tanh_r2(path: Path) -> float:
    return statistics.mean(fit["r2"] for fit in tanh_fits(path))


def tanh_over_linear(path: Path) -> float:
    return statistics.mean(fit["r2"] - fit["linear_r2"] for fit in tanh_fits(path))


def alpha_correlation(path: Path) -> float:
    """Pearson's r of α and 1/std of the input, over the slots."""
    slots = diagnostics.dyt_alphas(model_of(path), probe(path))
    return statistics.correlation([s["alpha"] for s in slots], [s["inv_std"] for s in slots])


# -------------------------------------------------------------------------------------------------------------- LNS


def variance_growth(path: Path) -> float:
    """log10 of the stream's variance after the last block over that after the first."""
    v = diagnostics.stream_variance(model_of(path), probe(path))["stream"]
    return math.log10(v[-1] / v[1])


def halves(values: list) -> tuple:
    """Means of the shallower and the deeper half."""
    half = len(values) // 2
    return statistics.mean(values[:half]), statistics.mean(values[-half:])


@cache
def turns(path: Path) -> tuple:
    """Mean angular distance between the input of a block and the next: blocks of the shallower, the deeper half."""
    d = diagnostics.angular_distance(diagnostics.streams(model_of(path), probe(path)))
    return halves([d[i][i + 1] for i in range(len(d) - 1)])


@cache
def drops(path: Path) -> tuple:
    """Mean rise of the loss without one block: blocks of the shallower, the deeper half."""
    return halves(diagnostics.removal_drop(model_of(path), batches(path, LOSS_TOKENS))["drop"])


# ------------------------------------------------------------------------------------------------------------- gains


def share_of_ones(model: GPT) -> float:
    gains = [m.gain for m in model.modules() if isinstance(m, Slot) and m.gain is not None]
    return sum((g == 1).sum().item() for g in gains) / sum(g.numel() for g in gains)


def frozen(path: Path) -> float:
    """The share of gains that are exactly 1 at the end."""
    return share_of_ones(model_of(path))


def frozen_in_bf16(path: Path) -> float:
    """The same after this run with weights, gradients and AdamW's state in bf16, as pure-bf16 training has them."""
    config, train = configs(path)
    fill_defaults(train)
    model = GPT(config, train.seed).bfloat16().to(device())
    data = Dataset(train.dataset, config.block_size, train.seed, verify=False)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(train.beta1, train.beta2), weight_decay=0.0)
    for step in range(train.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, train)
        x, y = (torch.from_numpy(a).to(device()) for a in data.batch(step, train.batch_size))
        logits = model(x)[0]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip or math.inf)
        optimizer.step()
    return share_of_ones(model)


MEASURES = {
    "loss": loss,
    "rise": rise,
    "log10 gradient RMS": gradient_rms,
    "log10 gradient kurtosis": gradient_kurtosis,
    **{f"log10 sharpness {a}/{b}": sharpness_ratio(a, b) for b, a in zip(ORDER, ORDER[1:], strict=False)},
    "onset of the order": onset,
    "order at the start": lambda path: float(is_ordered(path, 0)),
    "tanh fit": tanh_r2,
    "tanh fit over linear": tanh_over_linear,
    "alpha and 1/std": alpha_correlation,
    "log10 variance growth": variance_growth,
    "angular ratio": lambda path: turns(path)[1] / turns(path)[0],
    "angular deep": lambda path: turns(path)[1],
    "removal ratio": lambda path: drops(path)[1] / drops(path)[0],
    "removal deep": lambda path: drops(path)[1],
    "frozen gains": frozen,
    "frozen gains in bf16": frozen_in_bf16,
}


def state_gigabytes(flags: GPTConfig, config: TrainConfig) -> float:
    """GB of optimizer state on the model, with GPT-2's vocabulary."""
    flags.vocab_size = flags.vocab_size or 50257
    fill_defaults(config)
    return state_bytes(GPT.empty(flags), config) / 1e9


OF_CONFIG = {"state GB": state_gigabytes}  # of what needs no run


def cached(measure: str, path: Path) -> float:
    """A measure of a run, kept in its measures.json until this file or diagnostics.py changes."""
    file = path / "measures.json"
    code = zlib.crc32(Path(diagnostics.__file__).read_bytes() + Path(__file__).read_bytes())
    kept = json.loads(file.read_text()) if file.exists() else {}
    if kept.get(measure, [None])[0] != code:
        kept[measure] = code, MEASURES[measure](path)
        rundir.write_file(file, lambda f: f.write(json.dumps(kept, indent=1).encode()))
    return kept[measure][1]
