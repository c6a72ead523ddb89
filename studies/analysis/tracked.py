"""What a run logged about itself while training, drawn: row["track"] of metrics.jsonl (nanodnt/run/tracking.py)."""

import math

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from layers.roles import ROLES
from nanodnt.run.metrics import read_metrics
from studies.analysis.figure import NotApplicable, make_panels, plot_blocks_over_steps, register, rows_of
from studies.analysis.runs import pick_evenly

LOAD_COLORS = LogNorm(0.25, 4)  # of an expert's load over the mean
BY_ROLE = {"grad_norm": "gradient norm", "grad_kurtosis": "gradient kurtosis", "update_ratio": "update / weight norm"}
BY_DEPTH = {"stream_var": "variance of the stream", "logit_max": "largest attention logit"}


def read_tracks(run) -> dict:
    """{step: row["track"]} of metrics.jsonl; NotApplicable if there is none."""
    tracks = {row["step"]: row["track"] for row in read_metrics(run.folder) if isinstance(row.get("track"), dict)}
    if not tracks:
        raise NotApplicable("metrics.jsonl has no tracked rows (train.py --track_interval)")
    return tracks


def measure_experts(model, batches, run):
    if not model.config.n_expert:
        raise NotApplicable("no mixture of experts")
    tracks = {step: track for step, track in read_tracks(run).items() if track.get("load")}
    if not tracks:
        raise NotApplicable("no tracked row has the load of experts")
    load = np.array([track["load"] for track in tracks.values()], float) * model.config.n_expert  # (rows, L, E); mean 1
    return {
        "steps": list(tracks),
        "experts": model.config.n_expert,
        "load": {block + 1: load[:, block].tolist() for block in pick_evenly(list(range(load.shape[1])), 3)},
        "largest": load.max(-1).tolist(),
        "smallest": load.min(-1).tolist(),
        "entropy": [track.get("router_entropy") or [] for track in tracks.values()],
    }


@register("experts", measure_experts)
def draw_experts(results):
    """Load of experts and entropy of the router's scores, as logged while training."""
    figure, axes = make_panels(2 * len(results), 3, 2.4)
    most = np.nanmax([1, *(load for *_, last in results.values() for row in last["largest"] for load in row)])
    for (upper, lower), (*_, last) in rows_of(axes.reshape(-1, 2, 3), results):
        steps, experts = last["steps"], last["experts"]
        for ax, (block, load) in zip(upper, last["load"].items(), strict=False):
            values = np.maximum(np.array(load, float).T, 1e-9)  # a load of 0 has a color: the lowest
            rows = np.arange(experts + 1) + 0.5
            image = ax.pcolormesh(cell_edges(steps), rows, values, norm=LOAD_COLORS, cmap="RdBu_r")
            ax.grid(False)
            ax.set(title=f"load / mean, block {block}", ylabel="expert", xlabel="step")
            ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        for ax in upper[len(last["load"]) :]:
            ax.set_visible(False)
        bar = figure.colorbar(image, ax=upper, extend="both", ticks=(0.25, 0.5, 1, 2, 4), format="%g", pad=0.01)
        bar.ax.minorticks_off()
        lines = ("largest", "largest load / mean", 1, "even"), ("smallest", "smallest load / mean", 1, "even")
        lines += (("entropy", "entropy of the scores, nats", math.log(experts), f"ln {experts}"),)
        for ax, (key, title, limit, label) in zip(lower, lines, strict=True):
            plot_blocks_over_steps(ax, steps, last[key], style=".-")
            ax.axhline(limit, color="k", linestyle=":", linewidth=1, label=label)
            ax.set(title=title, xlabel="step")
            ax.set_ylim(bottom=0)
            ax.legend(fontsize="x-small")
        lower[0].set_ylim(0, 1.05 * most)  # one scale for all runs
    return figure


def cell_edges(steps: list) -> list:
    """The borders of one cell for each step, half-way to the next."""
    if len(steps) == 1:
        return [steps[0] - 0.5, steps[0] + 0.5]
    between = [(a + b) / 2 for a, b in zip(steps, steps[1:], strict=False)]
    return [2 * steps[0] - between[0], *between, 2 * steps[-1] - between[-1]]


def measure_tracking(model, batches, run):
    steps, tracks = zip(*read_tracks(run).items(), strict=True)
    found = {key: [track.get(key) or {} for track in tracks] for key in BY_ROLE}
    found |= {key: [track.get(key) or [] for track in tracks] for key in BY_DEPTH}
    gains = [(track.get("gain") or {}).items() for track in tracks]
    ranges = [{slot: g[2] - g[1] for slot, g in found if None not in g} for found in gains]
    return {"steps": list(steps), **found, "gain_range": ranges}


@register("tracking", measure_tracking)
def draw_tracking(results):
    """What the run logged about itself: gradients and updates by role, stream, logits, gains."""
    figure, axes = make_panels(2 * len(results), 3, 2.4)
    for (upper, lower), (*_, last) in rows_of(axes.reshape(-1, 2, 3), results):
        for ax, (key, title) in zip(upper, BY_ROLE.items(), strict=True):
            for role in [role for role in ROLES if any(role in values for values in last[key])]:
                values = np.array([values.get(role) for values in last[key]], float)
                ax.plot(last["steps"], values, color=f"C{ROLES.index(role) % 10}", label=role)
            ax.set(title=title, yscale="log")
        for ax, (key, title) in zip(lower, BY_DEPTH.items(), strict=False):
            plot_blocks_over_steps(ax, last["steps"], last[key], first=int(key == "logit_max"))
            ax.set(title=f"{title}, by block", yscale="log", xlabel="step")
            if ax.lines:
                ax.legend()
        for slot in last["gain_range"][-1]:
            values = [found.get(slot, math.nan) for found in last["gain_range"]]
            lower[2].plot(last["steps"], values, color="C7" if slot == "final_norm" else "C0", alpha=0.6)
        lower[2].set(title="gains: largest − smallest, each slot", xlabel="step")
        upper[0].legend(ncols=2)
    return figure
