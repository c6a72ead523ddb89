"""The numbers that the papers' claims are judged by, each of one finished run.

`MEASURES`: name → function of the directory of a run that did not diverge, which returns a float. The definitions are
those of studies/analysis; the sizes below are small enough for a CPU. How types, slots or halves of the network are
pooled is our choice.
"""

import math
import statistics
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path

import torch

from model import Transformer
from nanodnt.run.environment import choose_device
from nanodnt.run.metrics import read_metrics
from nanodnt.tasks import task_of
from studies.analysis import gradients, norms, streams
from studies.analysis.pipeline import AnalyzeConfig
from studies.analysis.runs import Batches, CheckpointedRun, kept_steps

GRADIENT_TOKENS = 65536  # of the validation set
LOSS_TOKENS = 16384
PROBE_TOKENS = 2048  # for measures that need fewer
SCATTER_POINTS = 100_000  # elements of a norm's input
DRAWS = 8  # of labels, for sharpness
SEED = 1  # of those draws


@cache
def open_run(path: Path) -> CheckpointedRun:
    return CheckpointedRun(path, path.name, AnalyzeConfig(seed=SEED), choose_device("auto")[0])


def load_model(path: Path, name: str = "last.pt") -> Transformer:
    """The model of a checkpoint, in fp32 and eval mode."""
    return open_run(path).load(path / name)[0]


def read(path: Path, tokens: int = PROBE_TOKENS) -> Batches:
    """Whole validation sequences, or images, of about so many tokens."""
    return Batches(open_run(path), tokens)


def steps_of(path: Path) -> list:
    """The steps of the checkpoints step_N.pt. ValueError if none was kept."""
    if not (steps := list(kept_steps(path))):
        raise ValueError(f"{path} has kept no checkpoints: remove it, to train it again")
    return steps


@cache
def gradient_tails(path: Path) -> list:
    """Tail statistics of the gradient entries at the first checkpoint after warm-up: of q, k, v, o, w1, w2, each with
    all layers in one."""
    early = next(step for step in steps_of(path) if step >= open_run(path).train_config["warmup_iters"])
    pooled = gradients.pool_gradients(load_model(path, f"step_{early}.pt"), read(path, GRADIENT_TOKENS))
    return [gradients.tail_statistics(g) for g in pooled.values()]


def mean_log_tail(path: Path, what: str) -> float:
    return statistics.mean(math.log10(tail[what]) for tail in gradient_tails(path))


ORDER = ("emb", "qk", "ffn", "vo", "norm")  # from the least sharp, as the paper claims


@cache
def sharpness(path: Path, name: str = "last.pt") -> dict:
    """{block type: arithmetic mean of the sharpness} at a checkpoint."""
    model, run = load_model(path, name), open_run(path)
    h = gradients.estimate_sharpness(model, read(path), DRAWS, run.generator(run.device))
    by_type = gradients.average_by_type(gradients.drop_padding_rows(model, h), model.block_types())
    return {t: by_type[t]["arithmetic"] for t in ORDER}


def sharpness_ratio(a: str, b: str):
    """A measure: log10 of the sharpness of type a over that of type b, at the end."""
    return lambda path: math.log10(sharpness(path)[a] / sharpness(path)[b])


def is_ordered(path: Path, step: int) -> bool:
    """Whether the sharpness at this step has the claimed order."""
    found = list(sharpness(path, f"step_{step}.pt").values())
    return all(a < b for a, b in pairwise(found))


def order_onset(path: Path) -> float:
    """The share of the run after which every checkpoint has the order; 1 if the last one does not."""
    ordered = list(takewhile(lambda step: is_ordered(path, step), reversed(steps_of(path))))
    return ordered[-1] / open_run(path).train_config["max_iters"] if ordered else 1.0


def tail_slope(path: Path) -> float:
    """How a norm's output y grows with its input x where x is largest: the least-squares slope of log |y| on log |x|
    over the 1% largest |x|, mean over the norms. 1 for a straight line, less for an S-shape."""
    model, x, generator = load_model(path), read(path), torch.Generator().manual_seed(SEED)
    slopes = []
    for name in norms.norm_slots(model):
        points = norms.norm_scatter(model, x, name, SCATTER_POINTS, generator)
        size, out = (torch.tensor(points[key]).abs() for key in ("x", "y"))
        largest = size.topk(len(size) // 100).indices
        slopes.append(statistics.linear_regression(size[largest].log().tolist(), out[largest].log().tolist()).slope)
    return statistics.mean(slopes)


def alpha_correlation(path: Path) -> float:
    """Pearson's r of α and 1/std of the input, over the slots."""
    slots = norms.dyt_alphas(load_model(path), read(path))
    return statistics.correlation([s["alpha"] for s in slots], [s["inv_std"] for s in slots])


def top1(path: Path) -> float:
    """Top-1 at the end, in percent of the validation images."""
    return 100 * [row["val_top1"] for row in read_metrics(path) if "val_top1" in row][-1]


def log_variances(path: Path, start: bool = False) -> list:
    """log10 of the stream's variance before the first and after each block, at the end, or before the first step. Not
    for Admin, whose ω are profiled."""
    run = open_run(path)
    network = task_of(run.model_config).network()
    model = network(run.model_config, run.train_config["seed"]).eval().to(run.device) if start else load_model(path)
    return [math.log10(v) for v in streams.stream_variance(model, read(path))["stream"]]


def variance_growth(path: Path, start: bool = False) -> float:
    """log10 of the stream's variance after the last block over that after the first."""
    v = log_variances(path, start)
    return v[-1] - v[1]


def mean_of_halves(values: list) -> tuple:
    """(mean over the shallower half of the blocks, mean over the deeper half)."""
    half = len(values) // 2
    return statistics.mean(values[:half]), statistics.mean(values[-half:])


@cache
def block_angles(path: Path) -> tuple:
    """Mean angular distance between a block's input and the next block's, in the shallower and in the deeper half."""
    d = streams.angular_distance(load_model(path), read(path))
    return mean_of_halves([d[i][i + 1] for i in range(len(d) - 1)])


@cache
def removal_losses(path: Path) -> tuple:
    """Mean rise of the loss when one block is deleted, in the shallower and in the deeper half."""
    return mean_of_halves(streams.removal_drop(load_model(path), read(path, LOSS_TOKENS))["drop"])


MEASURES = {
    "top-1": top1,
    "log10 gradient RMS": lambda path: mean_log_tail(path, "rms"),
    "log10 gradient kurtosis": lambda path: mean_log_tail(path, "kurtosis"),
    **{f"log10 sharpness {a}/{b}": sharpness_ratio(a, b) for b, a in pairwise(ORDER)},
    "log10 sharpness norm/emb": sharpness_ratio("norm", "emb"),
    "onset of the order": order_onset,
    "order at the start": lambda path: float(is_ordered(path, 0)),
    "tail slope": tail_slope,
    "alpha and 1/std": alpha_correlation,
    "log10 variance growth": variance_growth,
    "log10 variance growth at the start": lambda path: variance_growth(path, start=True),
    "log10 last variance": lambda path: log_variances(path)[-1],
    "angular ratio": lambda path: block_angles(path)[1] / block_angles(path)[0],
    "angular deep": lambda path: block_angles(path)[1],
    "removal ratio": lambda path: removal_losses(path)[1] / removal_losses(path)[0],
    "removal deep": lambda path: removal_losses(path)[1],
}
