"""The numbers that the papers' claims are judged by: `MEASURES`, functions of the directory of a
run that ended well.

The definitions are those of studies/analysis; the sizes below are small enough for a CPU. How
types, slots or halves of the network are pooled is our choice.
"""

import math
import statistics
from functools import cache, partial
from itertools import pairwise, takewhile
from pathlib import Path

from nanodnt.run.environment import choose_device
from nanodnt.run.metrics import read_metrics
from nanodnt.tasks import task_of
from studies.analysis import gradients, streams
from studies.analysis.figure import FIGURES
from studies.analysis.pipeline import AnalyzeConfig
from studies.analysis.runs import Batches, CheckpointedRun, kept_steps

TOKENS = dict(gradients=65536, removal=16384)  # of the validation set
PROBE_TOKENS = 2048  # for figures that need fewer
DRAWS = 8  # of labels, for sharpness
SEED = 1  # of those draws
ORDER = ("emb", "qk", "ffn", "vo", "norm")  # from the least sharp, as the paper claims


@cache
def open_run(path: Path) -> CheckpointedRun:
    return CheckpointedRun(
        path, path.name, AnalyzeConfig(seed=SEED, draws=DRAWS), choose_device("auto")[0]
    )


def probe(path: Path, tokens: int = PROBE_TOKENS, name: str = "last.pt") -> tuple:
    """(a checkpoint's model, fp32, eval mode; whole validation sequences, or images, of about so
    many tokens; run)."""
    run = open_run(path)
    return run.load(path / name)[0], Batches(run, tokens), run


@cache
def measured(path: Path, figure: str, name: str = "last.pt") -> dict:
    """What a figure of analyze.py measures at a checkpoint."""
    return FIGURES[figure].measure(*probe(path, TOKENS.get(figure, PROBE_TOKENS), name))


def steps_of(path: Path) -> list:
    """The steps of the checkpoints step_N.pt. ValueError if none was kept."""
    if not (steps := list(kept_steps(path))):
        raise ValueError(
            f"{path} has kept no checkpoints: give its arm keep=True, and remove it to train it again"
        )
    return steps


def early_checkpoint(path: Path) -> str:
    """The first one after warm-up."""
    warmup = open_run(path).train_config["warmup_iters"]
    return f"step_{next(step for step in steps_of(path) if step >= warmup)}.pt"


def mean_log_tail(path: Path, what: str) -> float:
    """The mean log10 of a statistic of the gradient entries after warm-up: of q, k, v, o, w1, w2,
    each with all layers in one."""
    tails = measured(path, "gradients", early_checkpoint(path))["types"].values()
    return statistics.mean(math.log10(tail[what]) for tail in tails)


def mean_log_kurtosis(path: Path) -> float:
    """The mean over all matrices of the blocks, each by itself, of the log10 of the kurtosis of its
    gradient entries, after warm-up."""
    model, batches, _ = probe(path, TOKENS["gradients"], early_checkpoint(path))
    found = gradients.compute_gradients(model, batches)
    tails = (gradients.tail_statistics(found[name]) for name in gradients.matrix_types(model))
    return statistics.mean(math.log10(tail["kurtosis"]) for tail in tails)


def rise(path: Path) -> float:
    """How far the last validation loss is above the lowest one."""
    losses = [row["val_loss"] for row in read_metrics(path) if "val_loss" in row]
    return losses[-1] - min(losses)


def loss_at_a_quarter(path: Path) -> float:
    """The first validation loss after a quarter of the steps."""
    quarter = open_run(path).train_config["max_iters"] / 4
    return next(
        row["val_loss"]
        for row in read_metrics(path)
        if "val_loss" in row and row["step"] >= quarter
    )


def sharpness(path: Path, name: str = "last.pt") -> dict:
    """{block type: arithmetic mean of the sharpness} at a checkpoint."""
    by_type = measured(path, "sharpness", name)["types"]
    return {t: by_type[t]["arithmetic"] for t in ORDER}


def is_ordered(path: Path, step: int) -> bool:
    """Whether the sharpness at this step has the claimed order."""
    return all(a < b for a, b in pairwise(sharpness(path, f"step_{step}.pt").values()))


def order_onset(path: Path) -> float:
    """The share of the run after which every checkpoint has the order; 1 if the last one does
    not."""
    ordered = list(takewhile(lambda step: is_ordered(path, step), reversed(steps_of(path))))
    return ordered[-1] / open_run(path).train_config["max_iters"] if ordered else 1.0


def probe_start(path: Path) -> tuple:
    """`probe` with the initial weights, which the seed gives. Not for Admin."""
    _, x, run = probe(path)
    network = task_of(run.model_config).network()
    return network(run.model_config, run.train_config["seed"]).eval().to(run.device), x, run


@cache
def log_variances(path: Path, start: bool = False) -> list:
    """log10 of the stream's variance before the first and after each block, at the end or at
    first."""
    model, x, _ = (probe_start if start else probe)(path)
    return [math.log10(v) for v in streams.stream_variance(model, x)["stream"]]


def grown(path: Path, block: int) -> float:
    """How far training has raised `log_variances` after a block, from 1."""
    return log_variances(path)[block] - log_variances(path, True)[block]


def turns(found: dict) -> list:
    """The angular distance between each block's input and the next block's, of what analyze.py
    measures."""
    return [row[i + 1] for i, row in enumerate(found["distance"][:-1])]


def deeper_half(values: list) -> float:
    return statistics.mean(values[-(len(values) // 2) :])


def removal_ratio(path: Path) -> float:
    """The mean rise of the loss when one block is deleted: of the deeper half, over the others
    after the first."""
    costs = measured(path, "removal")["drop"]
    return deeper_half(costs) / statistics.mean(costs[1 : -(len(costs) // 2)])


MEASURES = {
    # percent
    "top-1": lambda path: (
        100 * [row["val_top1"] for row in read_metrics(path) if "val_top1" in row][-1]
    ),
    "log10 gradient RMS": partial(mean_log_tail, what="rms"),
    "log10 gradient kurtosis": partial(mean_log_tail, what="kurtosis"),
    "log10 gradient kurtosis by matrix": mean_log_kurtosis,
    "rise": rise,
    "loss at a quarter": loss_at_a_quarter,
    **{
        f"log10 sharpness {a}/{b}": lambda path, a=a, b=b: math.log10(
            sharpness(path)[a] / sharpness(path)[b]
        )
        for b, a in (*pairwise(ORDER), ("emb", "norm"))
    },
    "onset of the order": order_onset,
    "log10 last variance": lambda path: log_variances(path)[-1],
    "log10 last variance since the start": partial(grown, block=-1),
    "log10 variance growth since the start": lambda path: grown(path, -1) - grown(path, 1),
    "angular deep": lambda path: deeper_half(turns(measured(path, "angular"))),
    "angular deep at the start": lambda path: deeper_half(
        turns(FIGURES["angular"].measure(*probe_start(path)))
    ),
    "removal deep": lambda path: deeper_half(measured(path, "removal")["drop"]),
    "removal ratio after the first": removal_ratio,
}
