"""Train every optimizer on every layout in every way to parallelise, and compare each run with that of one process.

    python data/pystdlib/prepare.py && python docs/scripts/compare_parallel.py    # about eight minutes on 2 CPU cores
    python docs/scripts/compare_parallel.py --layouts=DNT,DyT                     # a part of it

30 steps of a tiny model, in fp32 on the CPU; processes talk over gloo. The checkpoint that one way has saved at step 15
is resumed in the next of WAYS, and compared with the run of one process without interruption. Each case has one such
handover, and each handover four or five optimizers. Finished runs in out/parallel are not repeated, so the script can
be stopped and started again; remove that folder after a change of the code. Prints the tables of
docs/results/parallel.md. Exit code 1 where a loss differs by more than 1e-4 of it.
"""

import io
import json
import math
import multiprocessing
import os
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
from configurator import configure
from nanodnt.data import load_meta
from nanodnt.run.errors import EXPECTED, report_error

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "parallel"
DATASET, STEPS, SAVED, LIMIT = "pystdlib", 30, 15, 1e-4
SIZE = f"--dataset={DATASET} --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=8 --eval_tokens=512"
SIZE += f" --warmup_iters=5 --max_iters={STEPS} --eval_interval={STEPS} --keep_every={SAVED} --log_interval=1"
SIZE += " --device=cpu --dtype=float32 --compile=False --timeout_s=120"

# Learning rates at which training is smooth. Much larger ones are rough here: gradient norms jump, and a difference in
# the last bit grows a thousandfold within a few steps, between two runs of one process too.
OPTIMIZERS = {
    "AdamW": "--optimizer=adamw --learning_rate=3e-3",
    "mSGDW, dampening": "--optimizer=msgdw --learning_rate=0.1 --dampening=0.5",
    "Muon": "--optimizer=muon --learning_rate=1e-2",
    "Adam-mini": "--optimizer=adam_mini --learning_rate=3e-3",
    "AdamW, blockwise": "--optimizer=adamw --blockwise_lr=True --learning_rate=6e-4",
}
LAYOUTS = {
    "Pre-LN": "config/dnt/s1.py --norm=layernorm --bias=True",
    "DNT": "config/dnt/s5.py",
    "LNS": "config/dnt/s1.py config/lns/lns.py",
    "DyT": "config/dnt/s1.py config/dyt/dyt.py --dyt_bias=True --init_std=0.1",
    "unified": "config/dnt/s1.py config/scale_vectors/unified.py --mlp=swiglu --pos=rope --n_kv_head=1"
    " --tie_weights=False",
    "DeepNorm": "config/dnt/s1.py config/lns/deepnorm.py",
}
# {name: (processes, flags)}. The second takes the 8 sequences of a step in four parts: the effect of another order of
# sums.
WAYS = {
    "one process": (1, "--micro_batch_size=8"),
    "one, in parts": (1, "--micro_batch_size=2"),
    "DDP on 2": (2, "--parallel=ddp --micro_batch_size=2"),
    "DDP on 4": (4, "--parallel=ddp --micro_batch_size=2"),
    "FSDP2 on 2": (2, "--parallel=fsdp --micro_batch_size=2"),
    "FSDP2 on 4": (4, "--parallel=fsdp --micro_batch_size=2"),
    "HSDP on 2 × 2": (4, "--parallel=fsdp --fsdp_shard_size=2 --micro_batch_size=1"),
}
ONE, *OTHERS = WAYS
CHAIN = list(zip(WAYS, [*OTHERS, ONE], strict=True))  # (saved in, resumed in)
# Parameters without effect: their gradients are rounding errors, which Adam makes as large as other gradients. A bias
# on k moves all scores of a query alike, which softmax divides out; gain_out=norm divides out a factor before it.
NO_EFFECT = {"Pre-LN": "attn.f.k.bias", "unified": "pre.magnitude"}
MEASURES = ("training loss", "validation loss", "gradient norm", "parameters", "optimizer state")


@dataclass
class Selection:
    layouts: str = ",".join(LAYOUTS)  # which ones, separated by commas

    def __post_init__(self):
        self.chosen = self.layouts.split(",")
        unknown = [name for name in self.chosen if name not in LAYOUTS]
        if unknown:
            raise ValueError(f"no layout {', '.join(map(repr, unknown))}: allowed are {', '.join(LAYOUTS)}")


# -------------------------------------------------------------------------------------------------------------- runs


def folder_of(case: tuple, way: str, before: str | None = None) -> Path:
    """The run directory of a case (optimizer, layout) in one way, from the start or from what `before` has saved."""
    names = " ".join(case), f"{before} to {way}" if before else way
    return OUT.joinpath(*("".join(c if c.isalnum() else "_" for c in name) for name in names))


def prepare(case: tuple, way: str, before: str | None = None) -> tuple:
    """(run directory, flags) of a run from the start, or from the checkpoint that `before` has kept."""
    out, (optimizer, layout) = folder_of(case, way, before), case
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if before:
        shutil.copyfile(folder_of(case, before) / f"step_{SAVED}.pt", out / "last.pt")
    flags = f"{SIZE} {LAYOUTS[layout]} {OPTIMIZERS[optimizer]} {WAYS[way][1]}".split()
    return out, [*flags, f"--out_dir={out}", f"--init_from={'resume' if before else 'scratch'}"]


def train_all(rank: int, world: int, runs: list) -> None:
    """train.py on this process, one of `world`, for each (run directory, flags) in turn. RuntimeError if one fails."""
    torch.set_num_threads(1)
    train.draw_loss = lambda *_: None
    begin, processes = dist.init_process_group, dict(rank=rank, world_size=world)
    if world > 1:  # as torchrun does
        os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost")
    for out, flags in runs:  # the processes meet in a file: a port may still be taken when the next run begins
        dist.init_process_group = partial(begin, init_method=f"file://{out}/meeting", **processes)
        sys.argv, output = ["train.py", *flags], io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = train.main()
        if code:
            raise RuntimeError(f"train.py {' '.join(flags)} ended with {code}: {output.getvalue()[-2000:]}")
        if rank == 0:
            (out / "done").touch()


def handover(case: tuple) -> tuple:
    """(saved in, resumed in): the part of the chain that a case makes."""
    return CHAIN[(list(OPTIMIZERS).index(case[0]) + list(LAYOUTS).index(case[1])) % len(CHAIN)]


def train_missing(cases: list) -> None:
    """Make the missing runs. All runs in one way share their processes."""
    wanted = {way: [(case, way) for case in cases] for way in WAYS}
    last = []  # resumed in the first way, from what the last way has saved
    for case in cases:
        before, way = handover(case)
        (last if way == ONE else wanted[way]).append((case, way, before))
    for way, runs in [*wanted.items(), (ONE, last)]:
        runs = [prepare(*run) for run in runs if not (folder_of(*run) / "done").exists()]
        if runs:
            print(f"{way}: {len(runs)} runs", file=sys.stderr)
            world = WAYS[way][0]
            mp.start_processes(train_all, (world, runs), nprocs=world, start_method="forkserver")


# -------------------------------------------------------------------------------------------------------- comparison


def read(out: Path) -> dict:
    """{step: row of metrics.jsonl}."""
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows}


def tensors(path: Path, layout: str) -> tuple:
    """({name: parameter}, {(name, key): tensor of its optimizer state}) of a checkpoint, without NO_EFFECT."""
    checkpoint = torch.load(path, weights_only=True)
    states = checkpoint["optimizer"]["state"]
    names = [name for group in checkpoint["optimizer"]["param_groups"] for name in group["param_names"]]
    kept = {name: states[i] for i, name in enumerate(names) if not name.endswith(NO_EFFECT.get(layout, "\n"))}
    state = {(name, key): t for name, tensors in kept.items() for key, t in tensors.items()}
    return {name: checkpoint["model"][name] for name in kept}, state


def relative(difference: float, scale: float) -> float:
    return difference / scale if scale else math.inf if difference else 0.0


def compare(case: tuple, way: str, before: str | None = None) -> dict:
    """{measure: the largest relative difference from the run of one process}: of losses and gradient norms, over the
    steps; of parameters, relative to how far they have come, and of optimizer state, by the norm of each tensor."""
    out, one, layout = folder_of(case, way, before), folder_of(case, ONE), case[1]
    rows, expected = read(out), read(one)
    steps = range(SAVED + 1 if before else 1, STEPS + 1)
    if [step for step, row in rows.items() if "train_loss" in row] != list(steps):
        raise SystemExit(f"{out} has other steps than {steps.start} to {STEPS}: remove it, and start again")

    def by_step(field, steps):
        pairs = [(rows[step][field], expected[step][field]) for step in steps]
        return max(math.inf if None in pair else relative(abs(pair[0] - pair[1]), abs(pair[1])) for pair in pairs)

    (params, state), (params_one, state_one) = (tensors(run / "last.pt", layout) for run in (out, one))
    start, _ = tensors(one / "step_0.pt", layout)
    far = {n: relative((params[n] - p).norm().item(), (p - start[n]).norm().item()) for n, p in params_one.items()}
    states = [relative((state[n] - s).norm().item(), s.norm().item()) for n, s in state_one.items()]
    losses = by_step("train_loss", steps), by_step("val_loss", [STEPS]), by_step("grad_norm", steps)
    return dict(zip(MEASURES, (*losses, max(far.values()), max(states)), strict=True))


def table(head: list, rows: list) -> None:
    """Print a Markdown table; numbers with one digit."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(cell if isinstance(cell, str) else f'{cell:.0e}' if cell else '0' for cell in row)} |")


def main() -> int:
    (selection,), _ = configure(Selection, description=__doc__)
    try:
        os.chdir(ROOT)
        # imported before the fork: importing takes longer than some of the runs
        multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "train"])
        load_meta(DATASET)
        cases = list(product(OPTIMIZERS, selection.chosen))
        train_missing(cases)
    except EXPECTED as e:
        return report_error(e)
    found = {(way, case): compare(case, way) for way, case in product(OTHERS, cases)}
    passed = {case: compare(case, way, before) for case in cases for before, way in [handover(case)]}

    def largest(some):
        return [max(values[measure] for values in some) for measure in MEASURES]

    rows = [[*case, *(found[way, case]["training loss"] for way in OTHERS)] for case in cases]
    table(["optimizer", "layout", *OTHERS], rows)
    table(["way", *MEASURES], [[way, *largest([found[way, case] for case in cases])] for way in OTHERS])
    shares = {pair: [case for case in cases if handover(case) == pair] for pair in CHAIN}
    rows = [[*pair, str(len(some)), *largest([passed[case] for case in some])] for pair, some in shares.items() if some]
    table(["saved in", "resumed in", "cases", *MEASURES], rows)
    worst = max(max(values[name] for name in MEASURES[:2]) for values in (*found.values(), *passed.values()))
    print(f"\nlargest relative difference of a loss: {worst:.1e} (limit {LIMIT:.0e})")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
