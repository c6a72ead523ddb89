"""Train the layouts side by side on the embedded text, 300 steps each, and draw their loss curves.

    python data/pystdlib/prepare.py && python docs/scripts/compare_layouts.py        # about an hour on 2 CPU cores

Finished runs in out/compare are not repeated, so it can be stopped and started again. Every arm has the same model
size, data, seeds and learning rate; only the configs listed in ARMS differ. Writes docs/layouts/curves.png and prints
the table of docs/layouts.md.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
SIZE = "config/quickstart.py --n_layer=8 --n_embd=128 --n_head=4 --max_iters=300 --warmup_iters=30 --eval_interval=50"
SIZE += " --log_interval=10 --compile=False"
SEEDS = (1, 2, 3)

# arm: what follows config/quickstart.py. S1 is Pre-LN with RMSNorm and shared gains, the baseline of all panels but
# LNS's, whose initial weights are not scaled by 1/√(2L). DyT does not scale up small signals as a norm does, and with
# matrices of std 0.02 they are small at width 128; 0.1 keeps std·√width near that of the paper's 4096-wide models.
ARMS = {
    "S1: Pre-LN": "config/dnt/s1.py",
    "S2: + QK-norm": "config/dnt/s2.py",
    "S3: + input norm": "config/dnt/s3.py",
    "S4: + mid norms": "config/dnt/s4.py",
    "S5: DNT": "config/dnt/s5.py",
    "Pre-LN, plain init": "config/dnt/s1.py config/lns/pre_ln.py",
    "LNS": "config/dnt/s1.py config/lns/lns.py",
    "DyT": "config/dnt/s1.py config/dyt/dyt.py",
    "RMSNorm, init_std 0.1": "config/dnt/s1.py --init_std=0.1",
    "DyT, init_std 0.1": "config/dnt/s1.py config/dyt/dyt.py --init_std=0.1",
    "unified scale vectors": "config/dnt/s1.py config/scale_vectors/unified.py",
}
BASELINE = {"LNS": "Pre-LN, plain init", "DyT, init_std 0.1": "RMSNorm, init_std 0.1"}  # of the others: S1
PANELS = {
    "DNT's settings": ["S1: Pre-LN", "S2: + QK-norm", "S3: + input norm", "S4: + mid norms", "S5: DNT"],
    "LNS": ["Pre-LN, plain init", "LNS"],
    "DyT": ["S1: Pre-LN", "DyT", "RMSNorm, init_std 0.1", "DyT, init_std 0.1"],
    "scale vectors": ["S1: Pre-LN", "S2: + QK-norm", "unified scale vectors"],
}


def find_losses(arm: str, seed: int) -> dict:
    """{step: validation loss} of a run, which is trained if it is not there."""
    out = ROOT / "out" / "compare" / f"{''.join(c if c.isalnum() else '_' for c in arm)}-{seed}"
    metrics = out / "metrics.jsonl"
    if not (out / "loss.png").exists():  # train.py draws it at the very end
        command = f"train.py {SIZE} {ARMS[arm]} --seed={seed} --init_from=auto --out_dir={out}"
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)
    rows = map(json.loads, metrics.read_text().splitlines())
    return {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}


def main():
    curves = {arm: [find_losses(arm, seed) for seed in SEEDS] for arm in ARMS}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(15, 3.6), sharey=True)
    for axis, (title, arms) in zip(axes, PANELS.items(), strict=True):
        for arm in arms:
            steps = sorted(step for step in curves[arm][0] if step)
            values = [[run[step] for run in curves[arm]] for step in steps]
            (line,) = axis.plot(steps, [statistics.mean(v) for v in values], label=arm)
            axis.fill_between(steps, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss, nats per byte")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "layouts" / "curves.png", dpi=80)

    print("\n| layout | put after config/quickstart.py | loss at step 300 | minus its baseline's, by seed |")
    print("|---|---|---|---|")
    for arm, configs in ARMS.items():
        last, baseline = ([run[300] for run in curves[name]] for name in (arm, BASELINE.get(arm, "S1: Pre-LN")))
        differences = (
            ", ".join(f"{a - b:+.3f}" for a, b in zip(last, baseline, strict=True)) if last != baseline else ""
        )
        spread = f"{statistics.mean(last):.3f} ({min(last):.3f} to {max(last):.3f})"
        print(f"| {arm} | {configs} | {spread} | {differences} |")


if __name__ == "__main__":
    main()
