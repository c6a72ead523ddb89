"""Check and measure a machine in parts, each a process of its own that anyone can start alone.

python -m nanodnt.bench gpu-check out/gpu          # tests and speed of one GPU, 14 minutes (guess)
python -m nanodnt.bench gpu-profile out/gpu        # time of a step by kind of kernel, 4 minutes
python -m nanodnt.bench gpu-papers out/gpu         # DyT's Table 7, DNT's Table 2, 8 minutes
python -m nanodnt.bench cpu-check out/cpu          # our step beside nanoGPT's, up to an hour
python -m nanodnt.bench gpu-check out/try --tiny   # every part with tiny models on a CPU

A part that takes too long is ended. An error ends its own part only; the last line names the parts
that failed, and the exit code is then 1. Each part writes its figures to FOLDER/PART.json.
"""

import json
import shlex
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from nanodnt.files import make_folder
from nanodnt.script import run

ROOT = Path(__file__).resolve().parents[2]

WORKERS = " -n 8" if find_spec("xdist") else ""
TESTS = f"-m pytest -q -m gpu tests/gpu -k 'operators or compiled or updates'{WORKERS}"
GPT2 = "bench.py config/gpt2_small.py --micro_batch_size=32"
GPT2_64 = "bench.py config/gpt2_small.py --micro_batch_size=64 --batch_size=64"
DNT = "bench.py config/dnt_small.py --micro_batch_size=32"
OPTIMIZERS = f"{DNT} --batch_size=512 --vary=optimizer=adamw,msgdw,muon,adam_mini --repeats=3"
MUONS = "config/optimizers/muon.py,config/optimizers/muon_polar.py"
MUONS += ",config/optimizers/normuon.py,config/optimizers/muon_2026.py"
XL = "bench.py config/dnt_xl.py --micro_batch_size=8 --batch_size=32"
PEAK = f"{XL} --compile=False --warmup=1 --repeats=1 --steps=2"
NORMS = "bench.py config/dyt/7b.py --vary=norms --batch_size=1 --micro_batch_size=1"
NORMS += " --vocab_size=32000 --dtype=bfloat16 --stream_dtype=bfloat16 --compile=blocks --repeats=4"
SMALL = "bench.py config/shakespeare_char.py config/dnt/s1.py --norm=layernorm --n_layer=4"
SMALL += " --n_head=4 --n_embd=128 --block_size=64 --batch_size=12 --dropout=0.0 --vocab_size=65"
SMALL += " --compile=True --steps=30"
LARGE = "bench.py config/gpt2_small.py --micro_batch_size=1 --compile=True --repeats=3 --steps=1"


class Part(NamedTuple):
    """A part of a script."""

    seconds: float  # the part is ended after this time: our guess
    command: str  # arguments of Python


SCRIPTS = {
    "gpu-check": {
        "tests": Part(150, TESTS),
        "gpt2": Part(140, f"{GPT2} --batch_size=32 --against=nanogpt"),
        "dnt": Part(100, f"{DNT} --batch_size=32"),
        "gpt2_64": Part(90, GPT2_64),
        "xl": Part(120, f"{XL} --accumulation=4 --repeats=3 --steps=5"),
        "optimizers": Part(120, OPTIMIZERS),
        "muon": Part(120, f"{DNT} --batch_size=512 --vary={MUONS} --repeats=3"),
        # of ten updates one changes the bases
        "soap": Part(200, f"{DNT} --batch_size=32 --vary=optimizer=adamw,soap --steps=10"),
        "accumulation": Part(70, f"{GPT2} --batch_size=32 --vary=accumulation=1,4 --repeats=3"),
    },
    "gpu-profile": {
        "profile_gpt2": Part(80, f"{GPT2} --batch_size=32 --profile"),
        "kernels": Part(120, f"{GPT2} --batch_size=32 --vary=kernels=off,auto,all --repeats=3"),
        "profile_nanogpt": Part(60, f"{GPT2} --batch_size=32 --profile --only=nanogpt"),
        "stream": Part(
            70, f"{GPT2} --batch_size=32 --vary=stream_dtype=float32,bfloat16 --repeats=3"
        ),
        "profile_dnt": Part(70, f"{DNT} --batch_size=32 --profile"),
    },
    "gpu-papers": {
        "dnt_table_2_adamw": Part(50, f"{PEAK} --optimizer=adamw"),
        "dnt_table_2_msgdw": Part(50, f"{PEAK} --optimizer=msgdw"),
        "dyt_table_7": Part(380, f"{NORMS} --steps=10"),
    },
    "cpu-check": {},
}
for i in range(1, 6):
    for only in ("nanogpt", "nanogpt-bf16", "ours"):
        SCRIPTS["cpu-check"][f"small_{only}_{i}"] = Part(150, f"{SMALL} --only={only}")
    for only in ("nanogpt", "nanogpt-bf16", "ours"):
        SCRIPTS["cpu-check"][f"124m_{only}_{i}"] = Part(400, f"{LARGE} --only={only}")

# flags of --tiny, in place of a part's own
TINY = {
    "--n_layer": 1,
    "--n_head": 2,
    "--n_embd": 32,
    "--n_ff": 64,
    "--block_size": 16,
    "--vocab_size": 64,
    "--batch_size": 4,
    "--micro_batch_size": 2,
    "--repeats": 1,
    "--steps": 1,
    "--device": "cpu",
    "--dtype": "float32",
    "--compile": False,
}


def run_part(command: str, figures: Path, seconds: float, tiny: bool) -> str:
    """Run Python with this command; bench.py writes its figures to a file. Returns the reason of a
    failure, or ""."""
    words = shlex.split(command)
    if tiny and words[0] == "bench.py":
        words = [word for word in words if word.partition("=")[0] not in TINY]
        words += [f"{flag}={value}" for flag, value in TINY.items()]
    if words[0] == "bench.py":
        words += ["--data=random", f"--json={figures}"]
    print(f"\n{time.strftime('%X')} python {shlex.join(words)}", flush=True)
    try:
        code = subprocess.run([sys.executable, "-u", *words], cwd=ROOT, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return f"not done in {seconds:g} s"
    return f"exit code {code}" if code else ""


def run_script(name: str, folder: Path, tiny: bool) -> list[str]:
    """Run the parts of a script. Returns those that failed, each with the reason."""
    failed = []
    for part, (seconds, command) in SCRIPTS[name].items():
        figures = folder / f"{part}.json"
        figures.unlink(missing_ok=True)  # those of an earlier run
        reason = run_part(command, figures, seconds, tiny)
        if reason:
            failed.append(f"{part} ({reason})")
    return failed


def print_medians(folder: Path) -> None:
    """Print the median speed of the processes of each size and step, by the figures in the
    folder."""
    speeds_of = {}  # {size and step: tokens/s of its processes}
    for part in SCRIPTS["cpu-check"]:
        figures = folder / f"{part}.json"
        if figures.exists():
            (row,) = json.loads(figures.read_bytes())["variants"]
            name, _, _ = part.rpartition("_")
            speeds_of.setdefault(name, []).append(row["tokens_per_s"])
    for name, speeds in speeds_of.items():
        print(f"{name}: {statistics.median(speeds):,.0f} tokens/s, median of {len(speeds)}")


def main(argv: list[str]) -> None:
    """Run the script that `argv` names. Raises SystemExit if it needs a GPU and there is none, and
    if a part fails."""
    tiny = argv[2:] == ["--tiny"]
    if len(argv) != 2 + tiny or argv[0] not in SCRIPTS:
        sys.exit(f"usage: python -m nanodnt.bench {'|'.join(SCRIPTS)} FOLDER [--tiny]")
    name = argv[0]
    folder = Path(argv[1]).absolute()
    if name.startswith("gpu") and not tiny and not torch.cuda.is_available():
        sys.exit("error: this machine has no CUDA GPU")
    make_folder(folder, "FOLDER")
    failed = run_script(name, folder, tiny)
    if name == "cpu-check":
        print_medians(folder)
    print(f"figures: {folder}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
