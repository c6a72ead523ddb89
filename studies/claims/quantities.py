"""The numbers that the papers' claims are judged by, each of one finished run.

`MEASURES`: name → function of the directory of a run that did not diverge, which returns a float. The definitions are
those of studies/analysis; the sizes below are small enough for a CPU. How types, slots or halves of the network are
pooled is our choice [I].
"""

import json
import math
import statistics
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from model import GPTConfig, Transformer
from nanodnt.data import load_meta
from nanodnt.optim import fill_defaults, state_bytes
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.run.environment import choose_device
from nanodnt.run.metrics import read_metrics
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, task_of
from nanodnt.weights import model_from_checkpoint
from studies.analysis import gradients, norms, runs, streams

GRADIENT_TOKENS = 65536  # of the validation set
LOSS_TOKENS = 16384
PROBE_TOKENS = 2048  # for measures that need fewer
SCATTER_POINTS = 100_000  # elements of a norm's input
DRAWS = 8  # of labels, for sharpness
SEED = 1  # of those draws


# ----------------------------------------------------------------------------------------- reading a run directory


@cache
def load_configs(path: Path) -> tuple:
    """(GPTConfig, TrainConfig) of a run. Flags of an earlier version that no longer exist are dropped."""
    record = json.loads((path / "config.json").read_text(encoding="utf-8"))
    train = {name: value for name, value in record["train"].items() if name in TrainConfig.__dataclass_fields__}
    return GPTConfig(**record["model"]), TrainConfig(**train)


def kept_steps(path: Path) -> list:
    """The steps of the checkpoints step_N.pt."""
    return sorted(int(p.stem.removeprefix("step_")) for p in path.glob("step_*.pt"))


def measuring_device() -> torch.device:
    return choose_device("auto")[0]


def load_model(path: Path, name: str = "last.pt") -> Transformer:
    """The model of a checkpoint, in fp32 and eval mode."""
    return model_from_checkpoint(load_checkpoint(path / name)).eval().to(measuring_device())


def first_model(path: Path) -> Transformer:
    """The model before the first step, in fp32 and eval mode. Not for Admin, whose ω are profiled."""
    model, config = load_configs(path)
    return task_of(model).network()(model, config.seed).eval().to(measuring_device())


def validation_batches(path: Path, tokens: int, size: int = 0) -> list:
    """[(inputs, targets)] of the validation windows, or images, that an evaluation of that many tokens reads; `size` of
    them per batch, 0 = as many as MICRO_TOKENS allows."""
    model, config = load_configs(path)
    size = size or max(1, runs.MICRO_TOKENS // model.block_size)
    data = open_data(replace(config, doc_mask=False), model, load_meta(config.dataset, verify=False))
    starts, device = data.validation(tokens), measuring_device()
    batches = [data.val_batch(starts[i : i + size], size) for i in range(0, len(starts), size)]
    return [tuple(torch.from_numpy(part).to(device) for part in batch[:2]) for batch in batches]


def probe_batch(path: Path) -> torch.Tensor:
    """Whole validation sequences (B, T), or images, of about PROBE_TOKENS tokens."""
    n = max(1, PROBE_TOKENS // load_configs(path)[0].block_size)
    return validation_batches(path, PROBE_TOKENS, n)[0][0]


# -------------------------------------------------------------------------------------------------------- gradients


def early_gradients(path: Path) -> dict:
    """{q, k, v, o, w1, w2: gradient entries of all layers in one tensor} at the first checkpoint after warm-up.
    ValueError if none was kept."""
    warmup = load_configs(path)[1].warmup_iters
    early = next((step for step in kept_steps(path) if step >= warmup), None)
    if early is None:
        raise ValueError(f"{path} has kept no checkpoint after its warm-up: remove it, to train it again")
    model = load_model(path, f"step_{early}.pt")
    found = gradients.compute_gradients(model, validation_batches(path, GRADIENT_TOKENS))
    types = gradients.matrix_types(model)
    return {t: torch.cat([found[n].flatten() for n, u in types.items() if u == t]) for t in types.values()}


@cache
def gradient_tails(path: Path) -> list:
    return [gradients.tail_statistics(g) for g in early_gradients(path).values()]


def gradient_rms(path: Path) -> float:
    return statistics.mean(math.log10(tail["rms"]) for tail in gradient_tails(path))


def gradient_kurtosis(path: Path) -> float:
    return statistics.mean(math.log10(tail["kurtosis"]) for tail in gradient_tails(path))


# -------------------------------------------------------------------------------------------------------- sharpness

ORDER = ("emb", "qk", "ffn", "vo", "norm")  # from the least sharp, as the paper claims


@cache
def sharpness(path: Path, name: str) -> dict:
    """{block type: arithmetic mean of the sharpness} at a checkpoint."""
    model, generator = load_model(path, name), torch.Generator(measuring_device()).manual_seed(SEED)
    h = gradients.estimate_sharpness(model, probe_batch(path), DRAWS, generator)
    h = gradients.drop_padding_rows(model, h)
    by_type = gradients.average_by_type(h, model.block_types())
    return {t: by_type[t]["arithmetic"] for t in ORDER}


def sharpness_ratio(a: str, b: str):
    """A measure: log10 of the sharpness of type a over that of type b, at the end."""
    return lambda path: math.log10(sharpness(path, "last.pt")[a] / sharpness(path, "last.pt")[b])


def is_ordered(path: Path, step: int) -> bool:
    """Whether the sharpness at this step has the claimed order."""
    s = sharpness(path, f"step_{step}.pt")
    return all(s[a] < s[b] for a, b in zip(ORDER, ORDER[1:], strict=False))


def order_onset(path: Path) -> float:
    """The share of the run after which every checkpoint has the order; 1 if the last one does not. ValueError if none
    was kept."""
    first, kept = 1.0, kept_steps(path)
    if not kept:
        raise ValueError(f"{path} has kept no checkpoints: remove it, to train it again")
    for step in reversed(kept):
        if not is_ordered(path, step):
            break
        first = step / load_configs(path)[1].max_iters
    return first


# -------------------------------------------------------------------------------------------------------------- DyT


def tail_slope(path: Path) -> float:
    """How a norm's output y grows with its input x where x is largest: the least-squares slope of log |y| on log |x|
    over the 1% largest |x|, mean over the norms. 1 for a straight line, less for an S-shape."""
    model, x, generator = load_model(path), probe_batch(path), torch.Generator().manual_seed(SEED)
    slopes = []
    for name in norms.norm_slots(model):
        points = norms.norm_scatter(model, x, name, SCATTER_POINTS, generator)
        size, out = (torch.tensor(points[key]).abs() for key in ("x", "y"))
        largest = size.topk(len(size) // 100).indices
        slopes.append(statistics.linear_regression(size[largest].log().tolist(), out[largest].log().tolist()).slope)
    return statistics.mean(slopes)


def alpha_correlation(path: Path) -> float:
    """Pearson's r of α and 1/std of the input, over the slots."""
    slots = norms.dyt_alphas(load_model(path), probe_batch(path))
    return statistics.correlation([s["alpha"] for s in slots], [s["inv_std"] for s in slots])


# -------------------------------------------------------------------------------------------------------------- LNS


def variance_growth(path: Path, start: bool = False) -> float:
    """log10 of the stream's variance after the last block over that after the first, at the end or at the start."""
    v = streams.stream_variance(first_model(path) if start else load_model(path), probe_batch(path))["stream"]
    return math.log10(v[-1] / v[1])


def last_variance(path: Path) -> float:
    """log10 of the stream's variance after the last block, at the end."""
    return math.log10(streams.stream_variance(load_model(path), probe_batch(path))["stream"][-1])


def mean_of_halves(values: list) -> tuple:
    """(mean over the shallower half of the blocks, mean over the deeper half)."""
    half = len(values) // 2
    return statistics.mean(values[:half]), statistics.mean(values[-half:])


@cache
def block_angles(path: Path) -> tuple:
    """Mean angular distance between a block's input and the next block's, in the shallower and in the deeper half."""
    d = streams.angular_distance(load_model(path), probe_batch(path))
    return mean_of_halves([d[i][i + 1] for i in range(len(d) - 1)])


@cache
def removal_losses(path: Path) -> tuple:
    """Mean rise of the loss when one block is deleted, in the shallower and in the deeper half."""
    return mean_of_halves(streams.removal_drop(load_model(path), validation_batches(path, LOSS_TOKENS))["drop"])


# ----------------------------------------------------------------------------------------------------------- images


def top1(path: Path) -> float:
    """Top-1 at the end, in percent of the validation images. ValueError for a run on text."""
    shares = [row["val_top1"] for row in read_metrics(path) if "val_top1" in row]
    if not shares:
        raise ValueError(f"{path / 'metrics.jsonl'} has no top-1, which only images have")
    return 100 * shares[-1]


MEASURES = {
    "top-1": top1,
    "log10 gradient RMS": gradient_rms,
    "log10 gradient kurtosis": gradient_kurtosis,
    **{f"log10 sharpness {a}/{b}": sharpness_ratio(a, b) for b, a in zip(ORDER, ORDER[1:], strict=False)},
    "log10 sharpness norm/emb": sharpness_ratio("norm", "emb"),
    "onset of the order": order_onset,
    "order at the start": lambda path: float(is_ordered(path, 0)),
    "tail slope": tail_slope,
    "alpha and 1/std": alpha_correlation,
    "log10 variance growth": variance_growth,
    "log10 variance growth at the start": lambda path: variance_growth(path, start=True),
    "log10 last variance": last_variance,
    "angular ratio": lambda path: block_angles(path)[1] / block_angles(path)[0],
    "angular deep": lambda path: block_angles(path)[1],
    "removal ratio": lambda path: removal_losses(path)[1] / removal_losses(path)[0],
    "removal deep": lambda path: removal_losses(path)[1],
}


def state_gigabytes(flags: GPTConfig, config: TrainConfig) -> float:
    """GB of optimizer state for the model; its vocabulary is GPT-2's, and its images ImageNet's, unless set."""
    task = task_of(flags)
    task.fit(flags, task.stand_in(flags)[0], config.dataset)
    fill_defaults(config)
    return state_bytes(task.network().empty(flags), config) / 1e9


CONFIG_MEASURES = {"state GB": state_gigabytes}  # of a configuration alone: (GPTConfig, TrainConfig) → float
