"""Sweep the learning rate of each optimizer on Pre-LN and on DNT, on the embedded text, and draw loss against LR.

    python data/pystdlib/prepare.py && python docs/scripts/sweep_lr.py        # about an hour on 2 CPU cores

Finished runs in out/sweep are not repeated, so it can be stopped and started again. Two runs at a time, with one thread
each. Writes docs/optimizers/lr_sweep.png and prints the tables of docs/optimizers.md. A run counts as diverged, and is
drawn as a cross, if it was ended because of gradients that are not finite, or if any evaluation was worse than the one
before training.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
SIZE = "config/quickstart.py --n_layer=4 --n_embd=128 --n_head=4 --max_iters=300 --warmup_iters=30 --eval_interval=50"
SIZE += " --log_interval=10 --compile=False"
LAYOUTS = {"Pre-LN (S1)": "config/dnt/s1.py", "DNT (S5)": "config/dnt/s5.py"}
ADAM_LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
# optimizer: flags, learning rates. Decay, betas and momentum are the defaults; min_lr is a tenth of the LR.
OPTIMIZERS = {
    "AdamW": ("--optimizer=adamw", ADAM_LRS),
    "mSGDW": ("--optimizer=msgdw", (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
    "Muon": ("--optimizer=muon", ADAM_LRS),
    "Adam-mini": ("--optimizer=adam_mini", ADAM_LRS),
    "AdamW, blockwise": ("--optimizer=adamw --blockwise_lr=True", (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
}
SEEDS = (1, 2, 3)  # the first for the whole grid, all at each optimizer's best LR


def find_losses(optimizer: str, layout: str, lr: float, seed: int) -> dict:
    """{step: validation loss} of a run, which is trained if it is not there."""
    name = "".join(c if c.isalnum() else "_" for c in f"{optimizer} {layout}")
    out = ROOT / "out" / "sweep" / f"{name}-{lr:g}-{seed}"
    if not (out / "done").exists():
        command = (
            f"train.py {SIZE} {LAYOUTS[layout]} {OPTIMIZERS[optimizer][0]} --learning_rate={lr} --min_lr={lr / 10}"
        )
        command += f" --seed={seed} --overwrite=True --out_dir={out}"
        run = subprocess.run(
            [sys.executable, *command.split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if run.returncode and "gradient that is not finite" not in run.stderr:
            raise SystemExit(f"{command}\n{run.stderr}")
        (out / "done").write_text(run.stderr)
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["val_loss"] for row in rows if row.get("val_loss") is not None}


def has_diverged(curve: dict) -> bool:
    """Whether a curve {step: loss} ends early or was ever above its start."""
    return 300 not in curve or max(curve.values()) > curve[0]


def find_all_losses(runs: list) -> list:
    """`find_losses` of every run, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda run: find_losses(*run), runs))


def main():
    grid = [(o, layout, lr, SEEDS[0]) for o, layout in product(OPTIMIZERS, LAYOUTS) for lr in OPTIMIZERS[o][1]]
    curves = dict(zip(grid, find_all_losses(grid), strict=True))
    best = {}
    for optimizer, layout, lr, seed in grid:
        curve = curves[optimizer, layout, lr, seed]
        if not has_diverged(curve):
            key = optimizer, layout
            best[key] = min(best.get(key, (curve[300], lr)), (curve[300], lr))
    again = [(o, layout, lr, seed) for (o, layout), (_, lr) in best.items() for seed in SEEDS]
    repeated = dict(zip(again, find_all_losses(again), strict=True))

    figure, axes = plt.subplots(1, len(OPTIMIZERS), figsize=(16, 3.6), sharey=True)
    for axis, (optimizer, (_, lrs)) in zip(axes, OPTIMIZERS.items(), strict=True):
        for layout, color in zip(LAYOUTS, ("tab:blue", "tab:orange"), strict=True):
            points = [(lr, curves[optimizer, layout, lr, SEEDS[0]]) for lr in lrs]
            ends = [(lr, min(4.0, curve.get(300, 4.0)), has_diverged(curve)) for lr, curve in points]
            axis.plot([lr for lr, _, _ in ends], [loss for _, loss, _ in ends], color=color, linewidth=1)
            for bad, marker in ((False, "o"), (True, "x")):
                some = [(lr, loss) for lr, loss, d in ends if d == bad]
                label = layout if not bad else f"{layout}, diverged"
                if some:
                    axis.plot(*zip(*some, strict=True), marker, color=color, label=label, markersize=6)
        axis.set(title=optimizer, xlabel="peak learning rate", xscale="log")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss at step 300, nats per byte")
    figure.tight_layout()
    picture = ROOT / "docs" / "optimizers" / "lr_sweep.png"
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=80)

    print("\n| optimizer | layout | loss at step 300 by LR, seed 1 (✗: diverged) |\n|---|---|---|")
    for optimizer, layout in product(OPTIMIZERS, LAYOUTS):
        cells = []
        for lr in OPTIMIZERS[optimizer][1]:
            curve = curves[optimizer, layout, lr, SEEDS[0]]
            cells.append(f"{lr:g}: {curve[300]:.3f}" if 300 in curve else f"{lr:g}: stopped")
            cells[-1] += " ✗" * has_diverged(curve)
        print(f"| {optimizer} | {layout} | {', '.join(cells)} |")
    print("\n| optimizer | layout | best LR | loss at step 300, seeds 1, 2, 3 |\n|---|---|---|---|")
    for (optimizer, layout), (_, lr) in best.items():
        ends = [f"{repeated[optimizer, layout, lr, seed].get(300, float('nan')):.3f}" for seed in SEEDS]
        print(f"| {optimizer} | {layout} | {lr:g} | {', '.join(ends)} |")


if __name__ == "__main__":
    main()
