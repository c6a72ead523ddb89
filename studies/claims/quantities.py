"""The quantities in the papers' claims: `MEASURES`, functions of the directory of a run that ended
well.

The definitions are those of studies/analysis; the sizes below are small enough for a CPU. The
pooling over types, slots or halves of the network is our choice.
"""

import math
import statistics
from functools import cache, partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from model import Transformer
from nanodnt.run.environment import choose_device
from nanodnt.run.metrics import read_metrics
from nanodnt.tasks import task_of
from studies.analysis import gradients, streams
from studies.analysis.figure import FIGURES
from studies.analysis.pipeline import AnalyzeConfig
from studies.analysis.runs import Batches, CheckpointedRun, kept_steps

TOKENS = dict(gradients=65536, removal=16384)  # tokens of the validation set, by figure
PROBE_TOKENS = 2048  # for figures that need fewer
DRAWS = 8  # draws of labels, for sharpness
SEED = 1  # seed of those draws
ORDER = ("emb", "qk", "ffn", "vo", "norm")  # from the least sharp, as the paper claims


class Probe(NamedTuple):
    """The arguments of a figure's `measure`."""

    model: Transformer  # in fp32 and eval mode
    batches: Batches  # whole validation sequences, or images
    run: CheckpointedRun


@cache
def open_run(path: Path) -> CheckpointedRun:
    config = AnalyzeConfig(seed=SEED, draws=DRAWS)
    return CheckpointedRun(path, path.name, config, choose_device("auto")[0])


def probe(path: Path, tokens: int = PROBE_TOKENS, name: str = "last.pt") -> Probe:
    """A checkpoint's model, and batches of about this many tokens in all."""
    run = open_run(path)
    return Probe(run.load(path / name)[0], Batches(run, tokens), run)


@cache
def measured(path: Path, figure: str, name: str = "last.pt") -> dict[str, Any]:
    """The measurement of a figure of analyze.py at a checkpoint."""
    return FIGURES[figure].measure(*probe(path, TOKENS.get(figure, PROBE_TOKENS), name))


def steps_of(path: Path) -> list[int]:
    """The steps of the checkpoints step_N.pt. ValueError if none was kept."""
    steps = list(kept_steps(path))
    if not steps:
        raise ValueError(
            f"{path} has kept no checkpoints: give its arm keep=True, and remove it to train it "
            "again"
        )
    return steps


def early_checkpoint(path: Path) -> str:
    """The name of the first checkpoint after warm-up."""
    warmup = open_run(path).train_config["warmup_iters"]
    step = next(step for step in steps_of(path) if step >= warmup)
    return f"step_{step}.pt"


def mean_log_tail(path: Path, statistic: str) -> float:
    """The mean over q, k, v, o, w1, w2, each with all layers in one, of the log10 of a statistic of
    the gradient entries, after warm-up."""
    tails = measured(path, "gradients", early_checkpoint(path))["types"].values()
    return statistics.mean(math.log10(tail[statistic]) for tail in tails)


def mean_log_kurtosis(path: Path) -> float:
    """The mean over all matrices of the blocks, each by itself, of the log10 of the kurtosis of its
    gradient entries, after warm-up."""
    model, batches, _ = probe(path, TOKENS["gradients"], early_checkpoint(path))
    by_matrix = gradients.compute_gradients(model, batches)
    logs = []
    for name in gradients.matrix_types(model):
        tail = gradients.tail_statistics(by_matrix[name])
        logs.append(math.log10(tail["kurtosis"]))
    return statistics.mean(logs)


def logged(path: Path, key: str) -> list[float]:
    """The values of one key in metrics.jsonl, in the order of the steps."""
    return [row[key] for row in read_metrics(path) if key in row]


def last_top1(path: Path) -> float:
    """The last top-1 accuracy, in percent."""
    return 100 * logged(path, "val_top1")[-1]


def rise(path: Path) -> float:
    """The last validation loss minus the lowest."""
    losses = logged(path, "val_loss")
    return losses[-1] - min(losses)


def loss_after(path: Path, share: float) -> float:
    """The first validation loss after this share of the steps."""
    start = share * open_run(path).train_config["max_iters"]
    rows = [row for row in read_metrics(path) if "val_loss" in row and row["step"] >= start]
    return rows[0]["val_loss"]


def sharpness(path: Path, name: str = "last.pt") -> dict[str, float]:
    """{block type: arithmetic mean of the sharpness} at a checkpoint."""
    by_type = measured(path, "sharpness", name)["types"]
    return {t: by_type[t]["arithmetic"] for t in ORDER}


def log_sharpness_ratio(path: Path, above: str, below: str) -> float:
    """log10 of the sharpness of one block type over another's, at the end."""
    by_type = sharpness(path)
    return math.log10(by_type[above] / by_type[below])


def is_ordered(path: Path, step: int) -> bool:
    """Whether the sharpness at this step has the claimed order."""
    return all(a < b for a, b in pairwise(sharpness(path, f"step_{step}.pt").values()))


def order_onset(path: Path) -> float:
    """The share of the run after which every checkpoint has the order; 1 if the last one does
    not."""
    ordered = list(takewhile(lambda step: is_ordered(path, step), reversed(steps_of(path))))
    if not ordered:
        return 1.0
    return ordered[-1] / open_run(path).train_config["max_iters"]


def probe_start(path: Path) -> Probe:
    """`probe` with the initial weights, which the seed gives. Not for Admin."""
    _, batches, run = probe(path)
    network = task_of(run.model_config).network()
    model = network(run.model_config, run.train_config["seed"])
    return Probe(model.eval().to(run.device), batches, run)


@cache
def log_variances(path: Path, start: bool = False) -> list[float]:
    """log10 of the stream's variance before the first block and after each, at the end of training
    or, if `start`, before its first step."""
    model, batches, _ = probe_start(path) if start else probe(path)
    return [math.log10(v) for v in streams.stream_variance(model, batches)["stream"]]


def log_growth(path: Path, block: int) -> float:
    """The change in training of `log_variances` after a block, counted from 1."""
    return log_variances(path)[block] - log_variances(path, True)[block]


def deeper_half(values: list[float]) -> float:
    """The mean over the last half of the blocks."""
    return statistics.mean(values[-(len(values) // 2) :])


def deep_angle(angular: dict[str, Any]) -> float:
    """The mean angular distance between a block's input and the next block's in the deeper half,
    from the measurement of the figure "angular"."""
    angles = [row[i + 1] for i, row in enumerate(angular["distance"][:-1])]
    return deeper_half(angles)


def deep_angle_at_the_start(path: Path) -> float:
    return deep_angle(FIGURES["angular"].measure(*probe_start(path)))


def removal_ratio(path: Path) -> float:
    """The mean rise of the loss when one block of the deeper half is deleted, over that of the
    other blocks after the first."""
    costs = measured(path, "removal")["drop"]
    return deeper_half(costs) / statistics.mean(costs[1 : -(len(costs) // 2)])


MEASURES = {
    "top-1": last_top1,
    "log10 gradient RMS": partial(mean_log_tail, statistic="rms"),
    "log10 gradient kurtosis": partial(mean_log_tail, statistic="kurtosis"),
    "log10 gradient kurtosis by matrix": mean_log_kurtosis,
    "rise": rise,
    "loss at a sixteenth": partial(loss_after, share=1 / 16),
    "loss at an eighth": partial(loss_after, share=1 / 8),
    "loss at a quarter": partial(loss_after, share=1 / 4),
    "loss at a half": partial(loss_after, share=1 / 2),
    "onset of the order": order_onset,
    "log10 last variance": lambda path: log_variances(path)[-1],
    "log10 last variance since the start": partial(log_growth, block=-1),
    "log10 variance growth since the start": lambda path: (
        log_growth(path, -1) - log_growth(path, 1)
    ),
    "angular deep": lambda path: deep_angle(measured(path, "angular")),
    "angular deep at the start": deep_angle_at_the_start,
    "removal deep": lambda path: deeper_half(measured(path, "removal")["drop"]),
    "removal ratio after the first": removal_ratio,
}
for below, above in (*pairwise(ORDER), ("emb", "norm")):
    name = f"log10 sharpness {above}/{below}"
    MEASURES[name] = partial(log_sharpness_ratio, above=above, below=below)
