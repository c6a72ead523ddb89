"""Draw a figure for each paper from the runs that reproduce.py has made: losses, and the paper's own diagnostic.

    python reproduce.py && python docs/draw_claims.py        # the runs take about two hours on 2 CPU cores

Reads out/reproduce/tiny, writes docs/results/claims/PAPER.png. Bands are the range over seeds.
"""

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import diagnostics  # noqa: E402
import quantities  # noqa: E402
import rundir  # noqa: E402
from claims import ARMS  # noqa: E402
from reproduce import Missing, ReproduceConfig, Runner  # noqa: E402

SEEDS = (1, 2, 3)
CURVES = {  # figure: (title, arms)
    "dnt": ("DNT's settings under momentum SGD", ("S1 mSGDW", "S2 mSGDW", "S3 mSGDW", "S4 mSGDW", "S5 mSGDW")),
    "blockwise": ("Blockwise learning rates", ("one LR", "Emb", "Emb, FFN", "all blocks")),
    "dyt": ("DyT", ("RMSNorm", "DyT", "hardtanh", "sigmoid", "identity")),
    "lns": ("LayerNorm Scaling", ("Pre-LN", "scaled init", "LNS")),
    "gains": ("Scale vectors", ("shared", "none", "QK-norm", "unified")),
}


def paths(runner: Runner, arm: str) -> list:
    """The run directories of an arm, a seed each."""
    lr = runner.rates(ARMS[arm])[0]
    return [runner.run(ARMS[arm], lr, seed).path for seed in SEEDS]


def band(axis, x, runs: list, **how) -> None:
    """Mean and range of several runs' values at x."""
    columns = list(zip(*runs, strict=True))
    (line,) = axis.plot(x, [statistics.mean(c) for c in columns], linewidth=1.6, **how)
    axis.fill_between(
        x, list(map(min, columns)), list(map(max, columns)), color=line.get_color(), alpha=0.15, linewidth=0
    )


def losses(axis, runner: Runner, title: str, arms: tuple) -> None:
    for arm in arms:
        runs = [
            [r for r in rundir.read_metrics(p) if r.get("val_loss") is not None and r["step"]]
            for p in paths(runner, arm)
        ]
        last = statistics.mean(quantities.loss(p) for p in paths(runner, arm))
        shared = range(min(map(len, runs)))
        steps = [runs[0][i]["step"] for i in shared]
        lr = runner.rates(ARMS[arm])[0]
        band(
            axis,
            steps,
            [[run[i]["val_loss"] for i in shared] for run in runs],
            marker="o",
            markersize=3,
            label=f"{arm}, LR {lr:g}: {last:.3f}",
        )
    axis.set(title=title, xlabel="step", ylabel="validation loss (nats per byte)")


def gradients(axis, runner: Runner) -> None:
    for arm, name in (("S1 AdamW", "S1: Pre-LN"), ("S5 AdamW", "S5: DNT")):
        curves = []
        for path in paths(runner, arm):
            g = quantities.early_gradients(path)
            x = torch.cat([g[t] / g[t].square().mean().sqrt() for t in g]).abs()
            bins = diagnostics.log_histogram(x, 60, 1e-2, 1e2)
            curves.append(bins["ccdf"])
        edges = bins["edges"][: len(curves[0])]
        band(axis, edges, [[max(v, 1e-8) for v in c] for c in curves], label=name)
    axis.set(
        title="Gradients of the matrices after warm-up", xlabel="|g| / RMS of its type", ylabel="share of entries above"
    )
    axis.set(xscale="log", yscale="log", ylim=(1e-7, 1.5), xlim=(0.1, 100))


def sharpness(axis, runner: Runner) -> None:
    runs = paths(runner, "one LR")
    steps = quantities.steps(runs[0])
    for kind in quantities.ORDER:
        band(axis, steps, [[quantities.sharpness(p, f"step_{s}.pt")[kind] for s in steps] for p in runs], label=kind)
    axis.set(
        title="Sharpness by block type, one LR", xlabel="step", ylabel="mean of B·g², sampled labels", yscale="log"
    )


def alphas(axis, runner: Runner) -> None:
    for seed, path in zip(SEEDS, paths(runner, "DyT"), strict=True):
        slots = diagnostics.dyt_alphas(quantities.model_of(path), quantities.probe(path))
        r = quantities.alpha_correlation(path)
        axis.plot(
            [s["inv_std"] for s in slots],
            [s["alpha"] for s in slots],
            "o",
            markersize=4,
            label=f"seed {seed}, r = {r:.2f}",
        )
    axis.set(title="DyT: α against its input at the end", xlabel="1 / std of the slot's input", ylabel="α")


def variance(axis, runner: Runner) -> None:
    for arm in ("Pre-LN", "LNS"):
        runs = [
            diagnostics.stream_variance(quantities.model_of(p), quantities.probe(p))["stream"]
            for p in paths(runner, arm)
        ]
        band(axis, range(len(runs[0])), runs, marker="o", markersize=3, label=arm)
    axis.set(
        title="Variance of the stream at the end",
        xlabel="after block (0: embedding)",
        ylabel="variance over channels",
        yscale="log",
    )


def trajectories(axis, runner: Runner) -> None:
    """How far the gains before linear maps have moved from 1, block by block, at the end."""
    for arm in ("shared", "QK-norm", "unified"):
        runs = []
        for path in paths(runner, arm):
            model = quantities.model_of(path)
            spread = []
            for block in model.blocks:
                slots = [block.attn.pre, *(m.pre for m in (block.attn.f.q, block.attn.f.k, block.attn.f.v))]
                gains = [s.gain_vector() for s in slots if s.gain_vector() is not None]
                spread.append(statistics.mean(g.std().item() for g in gains))
            runs.append(spread)
        band(axis, range(1, len(runs[0]) + 1), runs, marker="o", markersize=3, label=arm)
    axis.set(title="Spread of attention's input gains at the end", xlabel="block", ylabel="std over channels")


SECOND = {"dnt": gradients, "blockwise": sharpness, "dyt": alphas, "lns": variance, "gains": trajectories}


def main():
    runner = Runner(ReproduceConfig(judge_only=True))
    for name, (title, arms) in CURVES.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
        losses(left, runner, title, arms)
        SECOND[name](right, runner)
        for axis in (left, right):
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(fontsize=8, frameon=False)
            axis.title.set_fontsize(10)
        figure.tight_layout()
        picture = ROOT / "docs" / "results" / "claims" / f"{name}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, dpi=100)
        print(picture, flush=True)


if __name__ == "__main__":
    try:
        main()
    except Missing:
        sys.exit("error: runs are missing: python reproduce.py")
