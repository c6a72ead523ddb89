"""Validation loss with the residual stream in fp32 and in bf16, in pairs of runs of one seed: docs/results/speed.md.

python docs/scripts/compare_streams.py     # 12 runs of about a minute; again: only those that are missing

Runs go to out/streams/. What it can show: a difference that is larger than its spread over seeds, at this size. What it
cannot: that there is none in deeper models, whose streams add up more branches.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {"DNT": "config/dnt/s5.py", "Pre-LN": "config/dnt/s1.py"}
SEEDS = (1, 2, 3)
SIZE = "--n_layer=6 --n_head=2 --n_embd=64 --batch_size=4 --max_iters=250 --warmup_iters=50 --eval_interval=250"
SIZE += " --eval_tokens=50000 --track_interval=0 --dtype=float32 --compile=False --device=cpu"


def final_loss(file: str, seed: int, dtype: str) -> float:
    """Validation loss at the end of the run, in nats per token; the run is made if it is not there."""
    out_dir = ROOT / "out/streams" / f"{Path(file).stem}_{dtype}_{seed}"
    flags = [f"--out_dir={out_dir}", f"--seed={seed}", f"--stream_dtype={dtype}", "--init_from=auto", *SIZE.split()]
    command = [sys.executable, "train.py", "config/quickstart.py", file, *flags]
    if not (out_dir / "loss.png").exists():
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["val_loss"] for row in rows if "val_loss" in row][-1]


def main() -> None:
    print("| layout | fp32 stream | bf16 stream | bf16 - fp32, mean | by seed |\n|---|---|---|---|---|")
    for layout, file in FILES.items():
        losses = {dtype: [final_loss(file, seed, dtype) for seed in SEEDS] for dtype in ("float32", "bfloat16")}
        differences = [b - a for a, b in zip(*losses.values(), strict=True)]
        means = " | ".join(f"{statistics.mean(values):.4f}" for values in losses.values())
        each = ", ".join(f"{d:+.4f}" for d in differences)
        print(f"| {layout} | {means} | {statistics.mean(differences):+.4f} | {each} |", flush=True)


if __name__ == "__main__":
    main()
