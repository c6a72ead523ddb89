"""What a run logged about itself while training, drawn: row["track"] of metrics.jsonl (nanodnt/run/tracking.py)."""

import math
from functools import partial
from itertools import product

import numpy as np
from matplotlib.colors import LogNorm

from layers.roles import ROLES
from nanodnt.run.checkpoints import is_number
from nanodnt.run.metrics import read_metrics
from studies.analysis.figure import NotApplicable, Panel, blocks_over_steps, line, register
from studies.analysis.norms import LINES
from studies.analysis.runs import pick_evenly

BY_ROLE = {"grad_norm": "gradient norm", "grad_kurtosis": "gradient kurtosis", "update_ratio": "update / weight norm"}
BY_DEPTH = {"stream_var": "variance of the stream", "logit_max": "largest attention logit"}
SHAPES = dict.fromkeys((*BY_ROLE, "embedding"), (dict,)) | dict.fromkeys((*BY_DEPTH, "router_entropy"), (list,))
SHAPES |= dict(gain=(dict, 3), block_norm=(dict, list))  # as `fits` takes them; and the load of experts


def fits(value, shape: tuple) -> bool:
    """Whether `value` is nested as `shape` says, from outside in: dict, list, or a list's length. Inside are numbers or
    None."""
    if not shape:
        return value is None or is_number(value)
    kind = shape[0]
    if not isinstance(value, dict if kind is dict else list) or kind not in (dict, list, len(value)):
        return False
    return all(fits(inner, shape[1:]) for inner in (value.values() if kind is dict else value))


def read_tracks(run, config) -> dict:
    """{step: row["track"]} of metrics.jsonl; NotApplicable if there is none. ValueError for a damaged one."""
    if run.folder is None:
        raise NotApplicable("a model of Hugging Face has no record of its training")
    tracks = {row["step"]: row["track"] for row in read_metrics(run.folder) if isinstance(row.get("track"), dict)}
    if not tracks:
        raise NotApplicable("metrics.jsonl has no tracked rows (train.py --track_interval)")
    shapes = SHAPES | dict(load=(config.n_layer, config.n_expert))
    for step, track in tracks.items():
        if wrong := next((key for key in shapes if track.get(key) and not fits(track[key], shapes[key])), None):
            what = f"{run.folder / 'metrics.jsonl'}, step {step}: {wrong} is damaged ({str(track[wrong])[:60]})"
            raise ValueError(f"{what}: repair it, or leave the figures experts and tracking out")
    return tracks


def measure_experts(model, batches, run):
    if not model.config.n_expert:
        raise NotApplicable("no mixture of experts")
    tracks = {step: track for step, track in read_tracks(run, model.config).items() if track.get("load")}
    if not tracks:
        raise NotApplicable("no tracked row has the load of experts")
    load = np.array([track["load"] for track in tracks.values()], float) * model.config.n_expert  # (rows, L, E); mean 1
    shown = pick_evenly(list(range(load.shape[1])), 3)
    found = {"steps": list(tracks), "experts": model.config.n_expert}
    found |= {"load": {block + 1: load[:, block].tolist() for block in shown}}
    found |= {"largest": load.max(-1).tolist(), "smallest": load.min(-1).tolist()}
    return found | {"entropy": [track.get("router_entropy") or [] for track in tracks.values()]}


@register("experts", measure_experts)
def draw_experts(measured):
    """Load of experts and entropy of the router's scores, as logged while training."""
    last = measured[-1]
    steps, experts = last["steps"], last["experts"]
    edges = [*steps, steps[-1] + (steps[-1] - steps[-2] if steps[1:] else 1)]  # a row's colors are right of its step

    def draw_load(ax, load):
        values = np.maximum(np.array(load, float).T, 1e-9)  # a load of 0 has a color: the lowest
        return ax.pcolormesh(edges, np.arange(experts + 1) + 0.5, values, norm=LogNorm(0.25, 4), cmap="RdBu_r")

    upper, lower = [], []
    for block, load in last["load"].items():
        upper.append(Panel(f"load / mean, block {block}", "step", ylabel="expert", paint=partial(draw_load, load=load)))
    for key, title, limit, label in (
        ("largest", "largest load / mean", 1, "even"),
        ("smallest", "smallest load / mean", 1, "even"),
        ("entropy", "entropy of the scores, nats", math.log(experts), f"ln {experts}"),
    ):
        even = line([steps[0], steps[-1]], [limit, limit], "k:", label=label)
        lower.append(Panel(title, "step", [*blocks_over_steps(steps, last[key]), even]))
    return [upper, lower]


def measure_tracking(model, batches, run):
    steps, tracks = zip(*read_tracks(run, model.config).items(), strict=True)
    found = {key: [track.get(key) or {} for track in tracks] for key in (*BY_ROLE, "block_norm", "embedding")}
    found |= {key: [track.get(key) or [] for track in tracks] for key in BY_DEPTH}
    gains = [(track.get("gain") or {}).items() for track in tracks]
    ranges = [{slot: g[2] - g[1] for slot, g in found if None not in g} for found in gains]
    return {"steps": list(steps), **found, "gain_range": ranges}


@register("tracking", measure_tracking)
def draw_tracking(measured):
    """What the run logged about itself: gradients and updates by role, stream, logits, gains, norms of the theorems."""
    last = measured[-1]
    steps, upper, lower, bounds = last["steps"], [], [], []
    for key, title in BY_ROLE.items():
        lines = []
        for role in [role for role in ROLES if any(role in values for values in last[key])]:
            values = np.array([values.get(role) for values in last[key]], float)
            label = role if key == "grad_norm" else None
            lines.append(line(steps, values, "-", color=f"C{ROLES.index(role) % 10}", label=label))
        upper.append(Panel(title, "step", lines, log="y"))
    for key, title in BY_DEPTH.items():
        lines = blocks_over_steps(steps, last[key], first=int(key == "logit_max"))
        lower.append(Panel(f"{title}, by block", "step", lines, log="y"))
    gains = [[found.get(slot, math.nan) for found in last["gain_range"]] for slot in last["gain_range"][-1]]
    lower.append(Panel("gains: largest − smallest, each slot", "step", [line(steps, gain, "C0-") for gain in gains]))
    for branch, kinds in LINES.items():
        lines = []
        for (color, kind), (block, style) in product(zip("kbgrm", kinds, strict=False), ((0, "-"), (-1, "--"))):
            norms = np.array([(its.get(kind) or [None])[block] for its in last["block_norm"]], float)
            lines.append(line(steps, norms, color + style, label=None if block else kind))
        bounds.append(Panel(f"{branch}: ‖W‖, ‖γ‖ of block 1\n(dashed: of the last)", "step", lines, log="y"))
    table = {key: np.array([its.get(key) for its in last["embedding"]], float) for key in ("rows", "smallest", "gain")}
    lines = [line(steps, table["rows"] * table["smallest"], "-", label="d · min ‖w̃‖²")]
    lines.append(line(steps, table["gain"] ** 2, "k-", label="‖γ‖²"))
    bounds.append(Panel("smallest row of the embedding,\nand the norm after it", "step", lines, log="y"))
    return [upper, lower, bounds]
