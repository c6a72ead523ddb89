"""Draw a figure for each paper from the runs that reproduce.py has made: losses, and the paper's own diagnostic.

    python reproduce.py && python docs/scripts/draw_claims.py        # the runs take about two hours on 2 CPU cores

Reads out/reproduce/tiny, writes docs/results/claims/PAPER.png. Bands are the range over seeds.
"""

import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanodnt.analysis.gradients import log_histogram  # noqa: E402
from nanodnt.analysis.norms import dyt_alphas  # noqa: E402
from nanodnt.analysis.streams import stream_variance  # noqa: E402
from nanodnt.claims import quantities  # noqa: E402
from nanodnt.claims.claims import ARMS  # noqa: E402
from nanodnt.claims.runner import MissingRun, ReproduceConfig, Runner  # noqa: E402
from nanodnt.run.metrics import read_metrics  # noqa: E402

SEEDS = (1, 2, 3)
CURVES = {  # figure: (title, arms)
    "dnt": ("DNT's settings under momentum SGD", ("S1 mSGDW", "S2 mSGDW", "S3 mSGDW", "S4 mSGDW", "S5 mSGDW")),
    "blockwise": ("Blockwise learning rates", ("one LR", "Emb", "Emb, FFN", "all blocks")),
    "dyt": ("DyT", ("RMSNorm", "DyT", "hardtanh", "sigmoid", "identity")),
    "lns": ("LayerNorm Scaling", ("Pre-LN", "scaled init", "LNS")),
    "gains": ("Scale vectors", ("shared", "none", "QK-norm", "unified")),
}


def run_folders(runner: Runner, arm: str) -> list:
    """The run directories of an arm, one per seed."""
    lr = runner.search_rate(ARMS[arm])[0]
    return [runner.training_run(ARMS[arm], lr, seed).path for seed in SEEDS]


def draw_band(axis, x, runs: list, **how) -> None:
    """Mean and range of several runs' values at x."""
    columns = list(zip(*runs, strict=True))
    (line,) = axis.plot(x, [statistics.mean(c) for c in columns], linewidth=1.6, **how)
    low, high = list(map(min, columns)), list(map(max, columns))
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def draw_losses(axis, runner: Runner, title: str, arms: tuple) -> None:
    for arm in arms:
        folders, lr = run_folders(runner, arm), runner.search_rate(ARMS[arm])[0]
        runs = [[r for r in read_metrics(p) if r.get("val_loss") is not None and r["step"]] for p in folders]
        last = statistics.mean(quantities.final_loss(p) for p in folders)
        shared = range(min(map(len, runs)))
        steps = [runs[0][i]["step"] for i in shared]
        losses = [[run[i]["val_loss"] for i in shared] for run in runs]
        draw_band(axis, steps, losses, marker="o", markersize=3, label=f"{arm}, LR {lr:g}: {last:.3f}")
    axis.set(title=title, xlabel="step", ylabel="validation loss (nats per byte)")


def draw_gradients(axis, runner: Runner) -> None:
    for arm, name in (("S1 AdamW", "S1: Pre-LN"), ("S5 AdamW", "S5: DNT")):
        curves = []
        for path in run_folders(runner, arm):
            g = quantities.early_gradients(path)
            x = torch.cat([g[t] / g[t].square().mean().sqrt() for t in g]).abs()
            bins = log_histogram(x, 60, 1e-2, 1e2)
            curves.append(bins["ccdf"])
        edges = bins["edges"][: len(curves[0])]
        draw_band(axis, edges, [[max(v, 1e-8) for v in c] for c in curves], label=name)
    axis.set(title="Gradients of the matrices after warm-up", xlabel="|g| / RMS of its type")
    axis.set(ylabel="share of entries above", xscale="log", yscale="log", ylim=(1e-7, 1.5), xlim=(0.1, 100))


def draw_sharpness(axis, runner: Runner) -> None:
    folders = run_folders(runner, "one LR")
    steps = quantities.kept_steps(folders[0])
    for kind in quantities.ORDER:
        values = [[quantities.sharpness(p, f"step_{s}.pt")[kind] for s in steps] for p in folders]
        draw_band(axis, steps, values, label=kind)
    axis.set(title="Sharpness by block type, one LR", xlabel="step", ylabel="mean of B·g², sampled labels")
    axis.set(yscale="log")


def draw_alphas(axis, runner: Runner) -> None:
    for seed, path in zip(SEEDS, run_folders(runner, "DyT"), strict=True):
        slots = dyt_alphas(quantities.load_model(path), quantities.probe_batch(path))
        x, y = [s["inv_std"] for s in slots], [s["alpha"] for s in slots]
        label = f"seed {seed}, r = {quantities.alpha_correlation(path):.2f}"
        axis.plot(x, y, "o", markersize=4, label=label)
    axis.set(title="DyT: α against its input at the end", xlabel="1 / std of the slot's input", ylabel="α")


def draw_variance(axis, runner: Runner) -> None:
    for arm in ("Pre-LN", "LNS"):
        inputs = [(quantities.load_model(p), quantities.probe_batch(p)) for p in run_folders(runner, arm)]
        runs = [stream_variance(model, idx)["stream"] for model, idx in inputs]
        draw_band(axis, range(len(runs[0])), runs, marker="o", markersize=3, label=arm)
    axis.set(title="Variance of the stream at the end", xlabel="after block (0: embedding)")
    axis.set(ylabel="variance over channels", yscale="log")


def draw_gain_spread(axis, runner: Runner) -> None:
    """How different the gains before attention's linear maps are at the end, block by block."""
    for arm in ("shared", "QK-norm", "unified"):
        runs = []
        for path in run_folders(runner, arm):
            spread = []
            for block in quantities.load_model(path).blocks:
                slots = [block.attn.pre, *(m.pre for m in (block.attn.f.q, block.attn.f.k, block.attn.f.v))]
                gains = [s.gain_vector() for s in slots if s.gain_vector() is not None]
                spread.append(statistics.mean(g.std().item() for g in gains))
            runs.append(spread)
        draw_band(axis, range(1, len(runs[0]) + 1), runs, marker="o", markersize=3, label=arm)
    axis.set(title="Spread of attention's input gains at the end", xlabel="block", ylabel="std over channels")


SECOND = {"dnt": draw_gradients, "blockwise": draw_sharpness, "dyt": draw_alphas, "lns": draw_variance}
SECOND |= {"gains": draw_gain_spread}


def main():
    runner = Runner(ReproduceConfig(judge_only=True))
    for name, (title, arms) in CURVES.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
        draw_losses(left, runner, title, arms)
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
    except MissingRun:
        sys.exit("error: runs are missing: python reproduce.py")
