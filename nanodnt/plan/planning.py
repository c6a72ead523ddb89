"""The needs of a run before it is started: memory on each GPU, the largest micro batch, days,
disk."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from model import Transformer
from nanodnt.engine import split_batch
from nanodnt.optim import state_bytes
from nanodnt.plan.memory import StepMemory, total_bytes
from nanodnt.plan.split import (
    Way,
    busy_micro_batch,
    choose_split,
    choose_way,
    count_step,
    largest_micro_batch,
    list_ways,
)
from nanodnt.run.environment import Env, possible_parallel
from nanodnt.run.hardware import ASSUMED_MFU, PEAK_FLOPS
from nanodnt.settings import TrainConfig
from nanodnt.tables import count, table
from nanodnt.tasks import task_of


class Gpu(NamedTuple):
    # GB (10⁹ bytes) that tensors can have: our choice. A GPU has 2 to 6 GB more (an H100 85), which
    # CUDA, NCCL, the kernels' workspaces and the allocator's gaps need
    memory_gb: int
    name: str  # in PEAK_FLOPS


GPUS = {
    "h100": Gpu(80, "H100"),
    "h200": Gpu(141, "H200"),
    "h800": Gpu(80, "H800"),
    "gh200": Gpu(96, "GH200"),
    "h20": Gpu(96, "H20"),
    "b200": Gpu(180, "B200"),
    "gb200": Gpu(186, "GB200"),
    "b300": Gpu(270, "B300"),
    "l20": Gpu(46, "L20"),
    "a100": Gpu(80, "A100"),
    "a100-40": Gpu(40, "A100"),
    "a800": Gpu(80, "A800"),
    "l40s": Gpu(46, "L40S"),
    "mi300x": Gpu(188, "MI300X"),
    "mi325x": Gpu(252, "MI325X"),
    "5090": Gpu(31, "RTX 5090"),
    "4090-d": Gpu(24, "4090 D"),
    "4090": Gpu(24, "RTX 4090"),
    "3090": Gpu(24, "RTX 3090"),
    "v100": Gpu(32, "V100"),
    "t4": Gpu(15, "T4"),
}
NO_BF16 = ("v100", "t4")  # on these dtype=auto is fp16
CHECKPOINTS = 4  # on disk at a time: last, prev, best, and the next one while it is written


@dataclass
class PlanConfig:
    # --- plan: only with --plan ---
    gpus: int = 1  # number of GPUs, one process each
    gpu: Literal[tuple(GPUS)] = "h100"  # their kind
    gpu_mem_gb: float = 0.0  # GB (10⁹ bytes) that tensors can have on one GPU; 0 = by kind
    mfu: float = ASSUMED_MFU  # assumed: model FLOP/s over peak FLOP/s; train.py logs the real one

    def check(self) -> None:
        """Raises ValueError for values that no machine could have."""
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        if self.gpu_mem_gb < 0:
            raise ValueError(f"gpu_mem_gb={self.gpu_mem_gb:g} must not be negative (0 = by kind)")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu={self.mfu:g} must be above 0 and at most 1")


def describe_flops(model: Transformer) -> str:
    """A line: FLOPs per token, of images also per image, and the shares of blocks, head and
    attention."""
    config = model.config
    task = task_of(config)
    total = model.flops_per_token()
    blocks = 6 * model.active_matrices()
    attention = model.attention_flops()
    parts = {
        "blocks": blocks,
        task.other_matrices: total - blocks - attention,
        "attention": attention,
    }
    line = f"{total / 1e9:.3f} GFLOPs per token"
    if task.counted_row:
        line += f", {total * config.block_size / 1e9:.4g} per {task.counted_row}"
    line += ", forward and backward"
    if config.n_expert:
        line += ", counting active parameters"
    shares = ", ".join(f"{name} {flops / total:.0%}" for name, flops in parts.items())
    return f"{line} ({shares})"


def describe_ways(
    model: Transformer, config: TrainConfig, env: Env, share: int, limit: float
) -> list[str]:
    """A table with a column for each way to split the run, with and without checkpointing: the
    memory of one process at its peak, with the largest micro batch that fits into `limit` bytes.
    `share`: rows of one process in a step."""
    step = count_step(model, config, env)
    wanted = busy_micro_batch(model.config.block_size, share)
    memories = [
        StepMemory(step.model, step.optimizer, config.grad_clip, checkpointing)
        for checkpointing in (False, True)
    ]
    columns = []
    for parallel in possible_parallel("auto", env):
        ways = list_ways(parallel, step)
        for memory in memories:
            way = choose_way(memory, ways, share, wanted, limit)
            columns.append(describe_way(memory, way, share, limit))
    return table([(title, *(column[title] for column in columns)) for title in columns[0]])


def describe_way(step: StepMemory, way: Way, share: int, limit: float) -> dict[str, str]:
    """A column of the table: {title of the row: text}."""
    micro = largest_micro_batch(step, way, share, limit)
    peak = step.peak(micro, share, way.held)
    name = way.name
    if step.checkpointing:
        name += ", checkpointing"
    fitting = str(micro)
    if peak.total > limit:
        fitting = "none, 1 shown"
    return {
        "GB": name,
        "micro_batch_size that fits": fitting,
        "accumulation": str(share // micro),
        **{part: f"{size / 1e9:.2f}" for part, size in peak.parts.items()},
        "peak": f"{peak.total / 1e9:.2f}",
        "phase of the peak": peak.phase,
    }


def describe_time(
    model: Transformer, config: TrainConfig, plan: PlanConfig, dtype: torch.dtype
) -> list[str]:
    """Lines: the work of the run, and its days at the assumed MFU."""
    rows = config.batch_size
    steps = config.max_iters
    context = model.config.block_size
    tokens = rows * context
    flops = tokens * model.flops_per_token()
    row = task_of(model.config).counted_row  # "image", or "" for text
    counted = f" {row}s" if row else ""
    work = f"{steps:,} steps of {rows}{counted} × {context} = {tokens:,} tokens are "
    if row:
        work += f"{steps * rows:,}{counted}, "
    work += f"{steps * tokens / 1e9:.4g}e9 tokens, {steps * flops:.3g} FLOPs"
    peak = config.peak_flops
    if not peak and dtype != torch.float32:
        peak = PEAK_FLOPS[GPUS[plan.gpu].name]
    if not peak:
        unknown = "days: unknown, because the GPU's fp32 peak is unknown: give it with --peak_flops"
        return [work, unknown]
    seconds = flops / (plan.mfu * peak * plan.gpus)
    time = f"{steps * seconds / 86400:.3g} days, {seconds:.3g} s a step"
    time += f", {tokens / seconds:,.0f} tokens/s"
    if row:
        time += f", {rows / seconds:,.0f}{counted}/s"
    time += f" at an assumed MFU of {plan.mfu:.0%} of {plan.gpus} × {peak / 1e12:.0f} TFLOP/s"
    return [work, f"{time}; with activation checkpointing about 4/3 of the time"]


def describe_plan(model: Transformer, config: TrainConfig, plan: PlanConfig) -> list[str]:
    """The lines of --plan, for a model on the meta device. Raises ValueError if the GPUs cannot
    share the batch, or a copy of the model."""
    plan.check()
    dtype = choose_dtype(config, plan)
    env = Env(0, plan.gpus, torch.device("meta"), dtype, distributed=plan.gpus > 1)
    micro, accumulation = split_batch(config.batch_size, 0, plan.gpus)
    share = micro * accumulation  # rows of one process in a step
    limit = 1e9 * (plan.gpu_mem_gb or GPUS[plan.gpu].memory_gb)
    split = choose_split(model, replace(config, must_fit=False), env, limit)
    size = f"{model.num_params():,} parameters"
    if model.config.n_expert:
        size += f", {model.num_params(active=True):,} of them active"
    memory = f"memory of one of {plan.gpus} {plan.gpu}, {limit / 1e9:g} GB each for tensors"
    rows = count(share, task_of(model.config).row_noun)
    return [
        f"{size}, {config.optimizer}, products in {str(dtype).removeprefix('torch.')}",
        describe_flops(model),
        *describe_time(model, config, plan, dtype),
        describe_disk(model, config),
        "",
        f"{memory}, not compiled ({rows} of a step each):",
        *describe_ways(model, config, env, share, limit),
        f"a run with these flags: parallel {split.parallel}, {split.reason}",
        "kept for the backward: activations, and the folded and cast weights; "
        "with torch.compile less, so an upper bound",
        "not counted: CUDA, NCCL, workspaces of kernels, gaps between tensors",
    ]


def choose_dtype(config: TrainConfig, plan: PlanConfig) -> torch.dtype:
    """The dtype of the matrix products on the planned GPU."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if plan.gpu in NO_BF16:
        return torch.float16
    return torch.bfloat16


def describe_disk(model: Transformer, config: TrainConfig) -> str:
    """A line: the size of a checkpoint, and of all checkpoints that a run keeps."""
    size = total_bytes(model.state_dict().values()) + state_bytes(model, config)
    kept = config.max_iters // config.keep_every if config.keep_every else 0
    files = str(CHECKPOINTS)
    if kept:
        files += f" and {kept} kept ones"
    return (
        f"a checkpoint: {size / 1e9:.2f} GB, and as much host memory on rank 0 while it is "
        f"written; on disk up to {files} at a time: {(CHECKPOINTS + kept) * size / 1e9:.2f} GB"
    )
