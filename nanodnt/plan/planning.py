"""What a run will need, before it is started: memory on each GPU, the largest micro batch, days,
disk."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from nanodnt.engine import split_batch
from nanodnt.optim import state_bytes
from nanodnt.plan.memory import StepMemory, total_bytes
from nanodnt.plan.split import (
    busy_micro_batch,
    choose_split,
    choose_way,
    count_step,
    largest_micro_batch,
    list_ways,
)
from nanodnt.run.environment import Env, possible_parallel
from nanodnt.run.hardware import PEAK_FLOPS
from nanodnt.tables import table
from nanodnt.tasks import task_of

# GB that tensors can have (our choice), and the name in PEAK_FLOPS. A GPU has 2 to 6 GB more (an
# H100 85, in GB of 10⁹ bytes), which CUDA, NCCL, the kernels' workspaces and the allocator's gaps
# need.
GPUS = {"h100": (80, "H100"), "h200": (141, "H200"), "h800": (80, "H800"), "gh200": (96, "GH200")}
GPUS |= {
    "h20": (96, "H20"),
    "b200": (180, "B200"),
    "gb200": (186, "GB200"),
    "b300": (270, "B300"),
    "l20": (46, "L20"),
}
GPUS |= {"a100": (80, "A100"), "a100-40": (40, "A100"), "a800": (80, "A800"), "l40s": (46, "L40S")}
GPUS |= {
    "mi300x": (188, "MI300X"),
    "mi325x": (252, "MI325X"),
    "5090": (31, "RTX 5090"),
    "4090-d": (24, "4090 D"),
}
GPUS |= {"4090": (24, "RTX 4090"), "3090": (24, "RTX 3090"), "v100": (32, "V100"), "t4": (15, "T4")}
NO_BF16 = ("v100", "t4")  # here dtype=auto is fp16
CHECKPOINTS = 4  # on disk at a time: last, prev, best, and the next one while it is written


@dataclass
class PlanConfig:
    # --- plan: only with --plan ---
    gpus: int = 1  # GPUs in all, one process each
    gpu: Literal[tuple(GPUS)] = "h100"  # their kind
    gpu_mem_gb: float = 0.0  # GB (10⁹ bytes) that tensors can have on one GPU; 0 = by kind
    mfu: float = 0.4  # assumed: model FLOP/s over peak FLOP/s (our choice); train.py logs the real
    #   one

    def check(self):
        """ValueError for values that no machine could have."""
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        if self.gpu_mem_gb < 0:
            raise ValueError(f"gpu_mem_gb={self.gpu_mem_gb:g} must not be negative (0 = by kind)")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu={self.mfu:g} must be above 0 and at most 1")


def describe_flops(model) -> str:
    """A line: FLOPs per token, of images also per image, and the shares of blocks, head and
    attention."""
    c, task = model.config, task_of(model.config)
    total = model.flops_per_token()
    blocks, attention = 6 * model.active_matrices(), model.attention_flops()
    parts = {
        "blocks": blocks,
        task.other_matrices: total - blocks - attention,
        "attention": attention,
    }
    shares = ", ".join(f"{name} {flops / total:.0%}" for name, flops in parts.items())
    a_row = f", {total * c.block_size / 1e9:.4g} per {task.counted_row}" if task.counted_row else ""
    counted = ", counting active parameters" if c.n_expert else ""
    return f"{total / 1e9:.3f} GFLOPs per token{a_row}, forward and backward{counted} ({shares})"


def describe_ways(model, config, env, share: int, limit: float) -> list:
    """A table: the memory of one process at its peak, with the largest micro batch that fits into
    `limit` bytes. `share`: rows of one process in a step."""
    columns = []
    kinds = possible_parallel("auto", env)
    model, optimizer, _ = count_step(model, config, env)
    steps = {c: StepMemory(model, optimizer, config, checkpointing=c) for c in (False, True)}
    for kind in kinds:
        ways = list_ways(kind, model, optimizer, config, env.world_size)
        for checkpointing, step in steps.items():
            way = choose_way(
                step, ways, share, busy_micro_batch(model.config.block_size, share), limit
            )
            micro = largest_micro_batch(step, way, share, limit)
            peak = step.peak(micro, share, way.held)
            sizes = {part: f"{n / 1e9:.2f}" for part, n in peak.parts.items()}
            columns.append(
                {
                    "GB": way.name + (", checkpointing" if checkpointing else ""),
                    "micro_batch_size that fits": str(micro)
                    if peak.total <= limit
                    else "none, 1 shown",
                    "accumulation": str(share // micro),
                    **sizes,
                    "peak": f"{peak.total / 1e9:.2f}",
                    "phase of the peak": peak.phase,
                }
            )
    return table([(title, *(column[title] for column in columns)) for title in columns[0]])


def describe_time(model, config, plan: PlanConfig, dtype) -> list:
    """Lines: the work of the run, and its days at the assumed MFU."""
    rows, steps, context = config.batch_size, config.max_iters, model.config.block_size
    row = task_of(model.config).counted_row
    counted = f" {row}s" if row else ""
    tokens = rows * context
    flops = tokens * model.flops_per_token()
    work = f"{steps:,} steps of {rows}{counted} × {context} = {tokens:,} tokens are "
    if row:
        work += f"{steps * rows:,}{counted}, "
    work += f"{steps * tokens / 1e9:.4g}e9 tokens, {steps * flops:.3g} FLOPs"
    peak = config.peak_flops or (PEAK_FLOPS[GPUS[plan.gpu][1]] if dtype != torch.float32 else 0)
    if not peak:
        return [
            work,
            "days: unknown, because the GPU's fp32 peak is unknown: give it with --peak_flops",
        ]
    seconds = flops / (plan.mfu * peak * plan.gpus)
    time = f"{steps * seconds / 86400:.3g} days, {seconds:.3g} s a step, {tokens / seconds:,.0f} tokens/s"
    if row:
        time += f", {rows / seconds:,.0f}{counted}/s"
    time += f" at an assumed MFU of {plan.mfu:.0%} of {plan.gpus} × {peak / 1e12:.0f} TFLOP/s; with activation "
    return [work, f"{time}checkpointing about 4/3 of the time"]


def describe_plan(model, config, plan: PlanConfig) -> list:
    """Lines for a model on the meta device. ValueError if GPUs cannot share the batch, or a copy of
    the model."""
    plan.check()
    half = torch.float16 if plan.gpu in NO_BF16 else torch.bfloat16
    dtype = half if config.dtype == "auto" else getattr(torch, config.dtype)
    env = Env(0, plan.gpus, torch.device("meta"), dtype, distributed=plan.gpus > 1)
    share = math.prod(split_batch(config.batch_size, 0, plan.gpus))
    limit = 1e9 * (plan.gpu_mem_gb or GPUS[plan.gpu][0])
    saved = total_bytes(model.state_dict().values()) + state_bytes(model, config)
    size = f"{model.num_params():,} parameters"
    if model.config.n_expert:
        size += f", {model.num_params(active=True):,} of them active"
    split = choose_split(model, replace(config, must_fit=False), env, limit)
    return [
        f"{size}, {config.optimizer}, products in {str(dtype).removeprefix('torch.')}",
        describe_flops(model),
        *describe_time(model, config, plan, dtype),
        describe_disk(config, saved),
        "",
        f"memory of one of {plan.gpus} {plan.gpu}, {limit / 1e9:g} GB each for tensors, not compiled "
        f"({share} {task_of(model.config).row_noun} of a step each):",
        *describe_ways(model, config, env, share, limit),
        f"a run with these flags: parallel {split.parallel}, {split.reason}",
        "kept for the backward: activations, and the folded and cast weights; with torch.compile less, so an upper "
        "bound",
        "not counted: CUDA, NCCL, workspaces of kernels, gaps between tensors",
    ]


def describe_disk(config, checkpoint_bytes: int) -> str:
    """A line: the size of a checkpoint, and of all that a run keeps."""
    kept = config.max_iters // config.keep_every if config.keep_every else 0
    files = f"{CHECKPOINTS} and {kept} kept ones" if kept else str(CHECKPOINTS)
    line = f"a checkpoint: {checkpoint_bytes / 1e9:.2f} GB, and as much host memory on rank 0 while it is written; "
    return f"{line}on disk up to {files} at a time: {(CHECKPOINTS + kept) * checkpoint_bytes / 1e9:.2f} GB"
