"""Figures of the measurements that a run logs while training: row["track"] of metrics.jsonl
(nanodnt/run/tracking.py)."""

import math
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm
from torch.utils._pytree import tree_map

from model import Transformer
from nanodnt.run.metrics import read_metrics
from studies.analysis.figure import (
    Line,
    Measured,
    NotApplicable,
    Panel,
    PanelRows,
    blocks_over_steps,
    line,
    register,
)
from studies.analysis.norms import LINES, SMALLEST_ROW
from studies.analysis.runs import CheckpointedRun, pick_evenly

BY_ROLE = {
    "grad_norm": "gradient norm",
    "grad_kurtosis": "gradient kurtosis",
    "update_ratio": "update / weight norm",
}
BY_DEPTH = {"stream_var": "variance of the stream", "logit_max": "largest attention logit"}


def read_tracks(run: CheckpointedRun) -> dict[int, dict[str, Any]]:
    """{step: row["track"]} of metrics.jsonl, nan for numbers that were not finite; NotApplicable
    without such rows."""
    if run.folder is None:
        raise NotApplicable("a model of Hugging Face has no record of its training")
    tracks = {row["step"]: row["track"] for row in read_metrics(run.folder) if row.get("track")}
    if not tracks:
        raise NotApplicable("metrics.jsonl has no tracked rows (train.py --track_interval)")
    return tree_map(lambda x: math.nan if x is None else x, tracks)


def measure_experts(model: Transformer, batches: None, run: CheckpointedRun) -> Measured:
    if not model.config.n_expert:
        raise NotApplicable("no mixture of experts")
    tracks = read_tracks(run)
    load = np.array([track["load"] for track in tracks.values()])  # (rows, L, E)
    load = load * model.config.n_expert  # mean 1
    shown = pick_evenly(list(range(load.shape[1])), 3)
    return {
        "steps": list(tracks),
        "experts": model.config.n_expert,
        "load": {block + 1: load[:, block].tolist() for block in shown},
        "largest": load.max(-1).tolist(),
        "smallest": load.min(-1).tolist(),
        "entropy": [track["router_entropy"] for track in tracks.values()],
    }


@register("experts", measure_experts)
def draw_experts(measured: list[Measured]) -> PanelRows:
    """Load of experts and entropy of the router's scores, as logged while training."""
    last = measured[-1]
    steps = last["steps"]
    upper = []
    for block, load in last["load"].items():
        paint = partial(paint_load, steps, np.array(load))
        upper.append(Panel(f"load / mean, block {block}", "step", ylabel="expert", paint=paint))
    values_if_even = (
        ("largest", "largest load / mean", 1),
        ("smallest", "smallest load / mean", 1),
        ("entropy", "entropy of the scores, nats", math.log(last["experts"])),
    )
    lower = []
    for key, title, even in values_if_even:
        limit = line([steps[0], steps[-1]], [even, even], ":", color="k", label="even")
        lower.append(Panel(title, "step", [*blocks_over_steps(steps, last[key]), limit]))
    return [upper, lower]


def paint_load(steps: list[int], load: np.ndarray, ax: Axes) -> QuadMesh:
    """A map of load (rows, E) over the steps. A load of 0 has the lowest color."""
    experts = range(1, load.shape[1] + 1)
    shown = np.maximum(load.T, 1e-9)
    norm = LogNorm(0.25, 4)
    colors = dict(norm=norm, cmap="RdBu_r", shading="nearest", rasterized=True)
    return ax.pcolormesh(steps, experts, shown, **colors)


def measure_tracking(model: Transformer, batches: None, run: CheckpointedRun) -> Measured:
    tracks = read_tracks(run)
    measured = {"steps": list(tracks)}
    for key in [*BY_ROLE, *BY_DEPTH, "block_norm", "embedding"]:
        measured[key] = [track[key] for track in tracks.values()]
    measured["gain_range"] = []
    for track in tracks.values():
        ranges = {slot: high - low for slot, (_, low, high) in track["gain"].items()}
        measured["gain_range"].append(ranges)
    return measured


@register("tracking", measure_tracking)
def draw_tracking(measured: list[Measured]) -> PanelRows:
    """The run's own log: gradients and updates by role, stream, logits, gains, norms of the
    theorems."""
    last = measured[-1]
    steps = last["steps"]

    def lines_of(rows: list[dict[str, float]]) -> list[Line]:
        """A line over the steps for each key of the rows, one row a step."""
        return [line(steps, [row[key] for row in rows], "-", label=key) for key in rows[0]]

    by_role = [Panel(title, "step", lines_of(last[key]), log="y") for key, title in BY_ROLE.items()]
    by_depth = []
    for key, title in BY_DEPTH.items():
        lines = blocks_over_steps(steps, last[key], first=int(key == "logit_max"))
        by_depth.append(Panel(f"{title}, by block", "step", lines, log="y"))
    gains = []
    for slot in last["gain_range"][0]:
        gains.append(line(steps, [row[slot] for row in last["gain_range"]], "C0-"))
    by_depth.append(Panel("gains: largest − smallest, each slot", "step", gains))
    bounds = []
    for branch, kinds in LINES.items():
        rows = [{kind: norms[kind][0] for kind in kinds} for norms in last["block_norm"]]
        bounds.append(Panel(f"{branch}: ‖W‖, ‖γ‖ of block 1", "step", lines_of(rows), log="y"))
    rows = []
    for e in last["embedding"]:
        if e:  # images have none
            rows.append({"d · min ‖w̃‖²": e["rows"] * e["smallest"], "‖γ‖²": e["gain"] ** 2})
    if rows:
        bounds.append(Panel(SMALLEST_ROW, "step", lines_of(rows), log="y"))
    return [by_role, by_depth, bounds]
