"""When DDP's buckets leave: by three ways to compile a model for it, on two processes over gloo.

    python docs/scripts/compare_ddp.py    # about three minutes on 2 CPU cores

6 blocks, 256 wide, 8 sequences of 128 tokens, buckets of 2 MB, fp32. "Whole, then wrapped": one graph, compiled before
DDP wraps it. "DDPOptimizer": DDP around the eager model is compiled, and dynamo splits the graph at the buckets.
"Parts": blocks and loss compiled by themselves, as train.py does.

Prints the table of docs/scale.md, for each way: when the first, the median and the last bucket leave, in percent of the
backward pass; its milliseconds; and the seconds of the first two steps, which compile.
"""

import gc
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from model import GPT, GPTConfig
from nanodnt.run.compilation import compile_parts

SIZE = dict(n_layer=6, n_head=4, n_embd=256, block_size=128, vocab_size=4096)
WORLD, ROWS, STEPS, BUCKET_MB = 2, 8, 15, 2
wrap = partial(DistributedDataParallel, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
compiled = partial(torch.compile, dynamic=False)
WAYS = {
    "whole, then wrapped": lambda model, batch: wrap(tried(compiled(model), batch)),
    "DDPOptimizer": lambda model, batch: compiled(wrap(model)),
    "parts": lambda model, batch: wrap(tried(compile_parts(model), batch)),
}


class Buckets(TorchDispatchMode):
    """Notes when each bucket leaves."""

    def __init__(self):
        super().__init__()
        self.left = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "allreduce_":
            self.left.append(time.perf_counter())
        return func(*args, **kwargs or {})


def tried(model, batch):
    """The model, compiled now: what DDP wraps is not split any more."""
    model(*batch)[1].backward()
    model.zero_grad(set_to_none=True)
    return model


def measure(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    tokens = torch.randint(SIZE["vocab_size"], (ROWS, SIZE["block_size"]))
    for name, way in WAYS.items():
        torch._dynamo.reset()
        model, started = GPT(GPTConfig(**SIZE)), time.perf_counter()
        call = way(model, (tokens, tokens))
        shares, seconds = [], []
        for step in range(STEPS):
            if step == 2:
                compile_s = time.perf_counter() - started
            loss = call(tokens, tokens)[1]
            dist.barrier()
            begun = time.perf_counter()
            with Buckets() as buckets:
                loss.backward()
            took = time.perf_counter() - begun
            model.zero_grad(set_to_none=True)
            if step >= 5:  # compiled, and DDP has arranged its buckets
                seconds.append(took)
                shares.append([(t - begun) / took for t in buckets.left])
        first, middle, last = (statistics.median(map(f, shares)) for f in (min, statistics.median, max))
        if rank == 0:
            print(
                f"| {name} | {len(shares[0])} | {first:.0%}, {middle:.0%}, {last:.0%} | "
                f"{1e3 * statistics.median(seconds):.0f} ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}) | "
                f"{compile_s:.0f} |",
                flush=True,
            )
    del call, loss
    gc.collect()  # DDP before its group: the last owner of a group holds the GIL, for which gloo may wait
    dist.destroy_process_group()


if __name__ == "__main__":
    print(
        "| compiled | buckets | first, median, last leaves at | backward, ms | first steps, s |\n|---|---|---|---|---|"
    )
    with TemporaryDirectory() as folder:
        mp.spawn(measure, (f"{folder}/meeting",), WORLD)
