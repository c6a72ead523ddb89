"""Draw the charts of docs/results/speed.md from the figures that bench.py wrote.

    python docs/scripts/draw_speed.py docs/results/cpu    # a folder with scaling.json, layouts.json → *.png beside them

scaling.png: tokens/s and peak memory against width, depth, context and micro batch. Dashed lines are expectations. For
speed: time grows with FLOPs per token. For memory: 16 bytes for each further parameter (weight, gradient, two moments),
and activations that grow in proportion to the axis, with the slope fitted to the second point.
layouts.png: time of a step against plain Pre-LN, with the range of the rounds.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

AXES = {"n_embd": "width", "n_layer": "depth", "block_size": "context", "micro_batch_size": "micro batch"}
BYTES = 16  # of a parameter under AdamW: weight, gradient, two moments


def expected_memory(rows: list) -> list:
    """Bytes at each point: those of the first point, 16 for each further parameter, and a part linear in the axis."""
    value, memory, parameters = ([r[key] for r in rows] for key in ("value", "peak_mem_bytes", "parameters"))
    grown = [BYTES * (p - parameters[0]) for p in parameters]
    slope = (memory[1] - memory[0] - grown[1]) / (value[1] - value[0])
    return [memory[0] + g + slope * (v - value[0]) for v, g in zip(value, grown, strict=True)]


def draw_scaling(rows: list, device: str, path: Path) -> None:
    figure, axes = plt.subplots(2, len(AXES), figsize=(13, 6), sharex="col")
    for column, (axis, title) in zip(axes.T, AXES.items(), strict=True):
        points = [r for r in rows if r["axis"] == axis]
        value = [r["value"] for r in points]
        speed, memory = ([r[key] for r in points] for key in ("tokens_per_s", "peak_mem_bytes"))
        if None in memory:
            raise SystemExit(f"error: {path.stem}.json has no memory figures: measure on Linux or on a GPU")
        kept = [speed[0] * points[0]["flops_per_token"] / r["flops_per_token"] for r in points]
        column[0].plot(value, speed, "o-", label="measured")
        column[0].plot(value, kept, "k--", lw=1, label="by FLOPs per token")
        column[1].plot(value, [m / 1e9 for m in memory], "o-", label="measured")
        if len(points) > 1:
            column[1].plot(value, [m / 1e9 for m in expected_memory(points)], "k--", lw=1, label="expected")
        column[0].set(title=f"{title} ({axis})", xscale="log")
        column[0].set(yscale="log") if max(speed) > 2 * min(speed) else column[0].set_ylim(bottom=0)
        column[1].set_xlabel(axis)
        column[1].set_ylim(bottom=0)
        column[1].set_xticks(value, [str(v) for v in value])
        column[1].minorticks_off()
    axes[0, 0].set_ylabel("tokens/s")
    axes[1, 0].set_ylabel("peak memory, GB")
    axes[0, 0].legend()
    axes[1, 0].legend()
    figure.suptitle(device)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def draw_layouts(rows: list, device: str, path: Path) -> None:
    rows = sorted(rows, key=lambda r: -r["ratio"])
    price, names = [100 * (1 / r["ratio"] - 1) for r in rows], [r["name"] for r in rows]
    low, high = ([abs(100 * (1 / r[key] - 1) - p) for r, p in zip(rows, price, strict=True)] for key in KEYS)
    figure, axis = plt.subplots(figsize=(7, 0.28 * len(rows) + 1))
    axis.barh(names, price, xerr=(low, high), color="tab:blue", error_kw=dict(lw=1, capsize=2))
    axis.axvline(0, color="k", lw=0.8)
    axis.set(xlabel="time of a step against Pre-LN with RMSNorm, %", title=device)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


KEYS = ("ratio_max", "ratio_min")  # the fastest round is the lower end of the time


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(
            "usage: python docs/scripts/draw_speed.py FOLDER     (with scaling.json, layouts.json of bench.py)",
            file=sys.stderr,
        )
        return 2
    folder = Path(sys.argv[1])
    for name, draw, key in (("scaling", draw_scaling, "scaling"), ("layouts", draw_layouts, "layouts")):
        path = folder / f"{name}.json"
        if not path.exists():
            print(f"no {path}: left out")
            continue
        result = json.loads(path.read_text())
        facts = result["header"]
        draw(result[key], f"{facts['device']}, torch {facts['torch']}", path.with_suffix(".png"))
        print(path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
