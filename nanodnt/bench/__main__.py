"""Check and measure a machine in parts, each a process of its own that anyone can start alone.

python -m nanodnt.bench gpu-check out/gpu          # 9 minutes on one GPU (a guess): is it right, how fast is it
python -m nanodnt.bench gpu-profile out/gpu        # 4 minutes: where the time of a step goes
python -m nanodnt.bench gpu-papers out/gpu         # 8 minutes: DyT's Table 7, DNT's Table 2
python -m nanodnt.bench cpu-check out/cpu          # up to an hour: our step beside nanoGPT's on a CPU
python -m nanodnt.bench gpu-check out/try --tiny   # tiny models on a CPU: does every part run

A part that takes too long is ended. An error ends its own part only; the last line names what
failed, and the exit code is then 1. Figures of each part come as FOLDER/PART.json.
"""

import json
import shlex
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from nanodnt.files import make_folder
from nanodnt.script import run

ROOT = Path(__file__).resolve().parents[2]

WORKERS = " -n 8" if find_spec("xdist") else ""
GPT2, DNT = (f"bench.py config/{name}_small.py --micro_batch_size=32" for name in ("gpt2", "dnt"))
XL = "bench.py config/dnt_xl.py --micro_batch_size=8 --batch_size=32"
PEAK = f"{XL} --compile=False --warmup=1 --repeats=1 --steps=2"
NORMS = "bench.py config/dyt/7b.py --vary=norms --batch_size=1 --micro_batch_size=1"
NORMS += " --vocab_size=32000 --dtype=bfloat16 --stream_dtype=bfloat16 --compile=blocks --repeats=4"
SMALL = (
    "bench.py config/shakespeare_char.py config/dnt/s1.py --norm=layernorm --n_layer=4 --n_head=4"
)
SMALL += (
    " --n_embd=128 --block_size=64 --batch_size=12 --dropout=0.0 --vocab_size=65 --compile=True"
)
SMALL += " --steps=30"
LARGE = "bench.py config/gpt2_small.py --micro_batch_size=1 --compile=True --repeats=3 --steps=1"
SCRIPTS = {  # {part: (seconds after which it is ended, our guess; arguments)}
    "gpu-check": {
        "tests": (
            150,
            f"-m pytest -m gpu tests/gpu -k 'operators or compiled or updates'{WORKERS}",
        ),
        "gpt2": (140, f"{GPT2} --batch_size=32 --against=nanogpt"),
        "dnt": (100, f"{DNT} --batch_size=32"),
        "gpt2_64": (90, "bench.py config/gpt2_small.py --micro_batch_size=64 --batch_size=64"),
        "xl": (120, f"{XL} --accumulation=4 --repeats=3 --steps=5"),
        "optimizers": (
            120,
            f"{DNT} --batch_size=512 --vary=optimizer=adamw,msgdw,muon,adam_mini --repeats=3",
        ),
        "accumulation": (70, f"{GPT2} --batch_size=32 --vary=accumulation=1,4 --repeats=3"),
    },
    "gpu-profile": {
        "profile_gpt2": (80, f"{GPT2} --batch_size=32 --profile"),
        "kernels": (120, f"{GPT2} --batch_size=32 --vary=kernels=off,auto,all --repeats=3"),
        "profile_nanogpt": (60, f"{GPT2} --batch_size=32 --profile --only=nanogpt"),
        "stream": (70, f"{GPT2} --batch_size=32 --vary=stream_dtype=float32,bfloat16 --repeats=3"),
        "profile_dnt": (70, f"{DNT} --batch_size=32 --profile"),
    },
    "gpu-papers": {
        "dnt_table_2_adamw": (50, f"{PEAK} --optimizer=adamw"),
        "dnt_table_2_msgdw": (50, f"{PEAK} --optimizer=msgdw"),
        "dyt_table_7": (380, f"{NORMS} --steps=10"),
    },
    "cpu-check": {
        f"{size}_{only}_{i}": (seconds, f"{command} --only={only}")
        for i in range(1, 6)
        for size, seconds, command in (("small", 150, SMALL), ("124m", 400, LARGE))
        for only in ("nanogpt", "nanogpt-bf16", "ours")
    },
}
TINY = dict(n_layer=1, n_head=2, n_embd=32, n_ff=64, block_size=16, vocab_size=64, batch_size=4)
TINY |= dict(micro_batch_size=2, repeats=1, steps=1, device="cpu", dtype="float32", compile=False)


def run_part(command: str, figures: Path, seconds: float, tiny: bool) -> str:
    """Run Python with this command; bench.py writes its figures to a file. Returns why it failed,
    or ""."""
    words = shlex.split(command)
    if tiny and words[0] == "bench.py":
        flags = {f"--{name}": value for name, value in TINY.items()}
        words = [word for word in words if word.partition("=")[0] not in flags]
        words += [f"{flag}={value}" for flag, value in flags.items()]
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
        figures.unlink(missing_ok=True)  # of an earlier run
        if reason := run_part(command, figures, seconds, tiny):
            failed.append(f"{part} ({reason})")
    return failed


def print_medians(folder: Path) -> None:
    """Print the median speed of the processes of each size and step, by the figures in the
    folder."""
    speeds = {}
    for part in SCRIPTS["cpu-check"]:
        if (figures := folder / f"{part}.json").exists():
            (row,) = json.loads(figures.read_bytes())["variants"]
            speeds.setdefault(part.rpartition("_")[0], []).append(row["tokens_per_s"])
    for name, found in speeds.items():
        print(f"{name}: {statistics.median(found):,.0f} tokens/s, median of {len(found)}")


def main(argv: list[str]) -> None:
    """Run the script that `argv` names. SystemExit without a GPU for it, and if a part fails."""
    tiny = argv[2:] == ["--tiny"]
    if len(argv) != 2 + tiny or argv[0] not in SCRIPTS:
        sys.exit(f"usage: python -m nanodnt.bench {'|'.join(SCRIPTS)} FOLDER [--tiny]")
    name, folder = argv[0], Path(argv[1]).absolute()
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
