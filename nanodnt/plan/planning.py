"""What a run will need, before it is started: memory on each GPU, the largest micro batch, days, disk."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from nanodnt.engine import prepare_model, split_batch
from nanodnt.optim import make_optimizer
from nanodnt.plan.memory import Timeline, largest_micro_batch, make_strategy, state_tensors, total_bytes
from nanodnt.run.environment import Env
from nanodnt.run.hardware import PEAK_FLOPS
from nanodnt.tables import table
from nanodnt.tasks import task_of

# GB that tensors can have (our choice), and the name in PEAK_FLOPS. A GPU has 2 to 6 GB more (an H100 85, in GB of 10⁹
# bytes), which CUDA, NCCL, the kernels' workspaces and the allocator's gaps need.
GPUS = {"h100": (80, "H100"), "h200": (141, "H200"), "h800": (80, "H800"), "gh200": (96, "GH200")}
GPUS |= {"h20": (96, "H20"), "b200": (180, "B200"), "gb200": (186, "GB200"), "b300": (270, "B300"), "l20": (46, "L20")}
GPUS |= {"a100": (80, "A100"), "a100-40": (40, "A100"), "a800": (80, "A800"), "l40s": (46, "L40S")}
GPUS |= {"mi300x": (188, "MI300X"), "mi325x": (252, "MI325X"), "5090": (31, "RTX 5090"), "4090-d": (24, "4090 D")}
GPUS |= {"4090": (24, "RTX 4090"), "3090": (24, "RTX 3090"), "v100": (32, "V100"), "t4": (15, "T4")}
NO_BF16 = ("v100", "t4")  # here dtype=auto is fp16
GROUPED = ("h100", "h200", "h800", "h20", "gh200", "b200", "gb200", "b300")  # torch multiplies all experts in one go
CHECKPOINTS = 4  # on disk at a time: last, prev, best, and the next one while it is written


@dataclass
class PlanConfig:
    # --- plan: only with --plan ---
    gpus: int = 1  # GPUs in all, one process each
    gpu: Literal[tuple(GPUS)] = "h100"  # their kind
    gpu_mem_gb: float = 0.0  # GB (10⁹ bytes) that tensors can have on one GPU; 0 = by kind
    mfu: float = 0.4  # assumed: model FLOP/s over peak FLOP/s (our choice); train.py logs the real one

    def check(self):
        """ValueError for values that no machine could have."""
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        if self.gpu_mem_gb < 0:
            raise ValueError(f"gpu_mem_gb={self.gpu_mem_gb:g} must not be negative (0 = by kind)")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu={self.mfu:g} must be above 0 and at most 1")


def describe_flops(model) -> str:
    """A line: FLOPs per token, of images also per image, and the shares of blocks, head and attention."""
    c, task, total = model.config, task_of(model.config), model.flops_per_token()
    parts = {"blocks": 6 * model.active_matrices(), task.other_matrices: 0, "attention": model.attention_flops()}
    parts[task.other_matrices] = total - sum(parts.values())
    shares = ", ".join(f"{name} {flops / total:.0%}" for name, flops in parts.items())
    counted = ", counting active parameters" if c.n_expert else ""
    a_row = f", {total * c.block_size / 1e9:.4g} per {task.counted_row}" if task.counted_row else ""
    return f"{total / 1e9:.3f} GFLOPs per token{a_row}, forward and backward{counted} ({shares})"


def describe_strategies(timelines: dict, choices: list, share: int, given: int, limit: float) -> list:
    """A table: the memory of one process at its peak, with the largest micro batch that fits into `limit` bytes, and
    the peak with the micro batch `given` (0 = none). `timelines`: {whether with activation checkpointing: Timeline};
    `choices`: strategies; `share`: rows of one process in a step."""
    columns = []
    for strategy in choices:
        for checkpointing, timeline in timelines.items():
            micro = largest_micro_batch(timeline, strategy, share, limit)
            peak, of_given = (timeline.peak(n, share, strategy) for n in (micro, given or micro))
            column = {"GB": strategy.name + ", checkpointing" * checkpointing}
            column["micro_batch_size that fits"] = str(micro) if peak.total <= limit else "none, 1 shown"
            column["accumulation"] = str(share // micro)
            column |= {part: f"{n / 1e9:.2f}" for part, n in (peak.parts | dict(peak=peak.total)).items()}
            column["phase of the peak"] = peak.phase
            column[f"peak with micro_batch_size={given}"] = f"{of_given.total / 1e9:.2f}"
            columns.append(column)
    rows = [(title, *(column[title] for column in columns)) for title in columns[0]]
    return table(rows if given else rows[:-1])


def describe_time(model, config, plan: PlanConfig, dtype) -> list:
    """Lines: the work of the run, and its days at the assumed MFU."""
    rows, steps, context = config.batch_size, config.max_iters, model.config.block_size
    row = task_of(model.config).counted_row
    tokens, counted = rows * context, f" {row}s" if row else ""
    flops = tokens * model.flops_per_token()
    work = f"{steps:,} steps of {rows}{counted} × {context} = {tokens:,} tokens are "
    work += f"{steps * rows:,}{counted}, " if row else ""
    work += f"{steps * tokens / 1e9:.4g}e9 tokens, {steps * flops:.3g} FLOPs"
    peak = config.peak_flops or (PEAK_FLOPS[GPUS[plan.gpu][1]] if dtype != torch.float32 else 0)
    if not peak:
        return [work, "days: unknown, because the GPU's fp32 peak is unknown: give it with --peak_flops"]
    speed = plan.mfu * peak * plan.gpus
    days, seconds = steps * flops / speed / 86400, flops / speed
    time = f"{days:.3g} days, {seconds:.3g} s a step, {speed / model.flops_per_token():,.0f} tokens/s"
    time += f", {rows * speed / flops:,.0f}{counted}/s" if row else ""
    time += f" at an assumed MFU of {plan.mfu:.0%} of {plan.gpus} × {peak / 1e12:.0f} TFLOP/s; with activation "
    lines = [work, time + "checkpointing about 4/3 of the time"]
    if model.config.n_expert:
        lines.append("many small experts reach less than a dense model of as many active parameters: set --mfu lower")
        if plan.gpu not in GROUPED:
            lines.append(f"on {plan.gpu} the experts' products are a loop, in which the host waits for the device")
    return lines


def describe_plan(model, config, plan: PlanConfig) -> list:
    """Lines for a model on the meta device. ValueError if GPUs cannot share the batch, or a copy of the model."""
    plan.check()
    half = torch.float16 if plan.gpu in NO_BF16 else torch.bfloat16
    dtype = half if config.dtype == "auto" else getattr(torch, config.dtype)
    prepare_model(model, config, Env(0, 1, torch.device("meta"), dtype, False))
    optimizer = make_optimizer(model, config)  # after prepare_model, which sets the dtype of Muon's products
    share = math.prod(split_batch(config.batch_size, 0, plan.gpus))
    given = config.micro_batch_size if config.micro_batch_size and share % config.micro_batch_size == 0 else 0
    limit, kinds = 1e9 * (plan.gpu_mem_gb or GPUS[plan.gpu][0]), ("none",) if plan.gpus == 1 else ("ddp", "fsdp")
    choices = [make_strategy(kind, model, optimizer, config, plan.gpus, limit) for kind in kinds]
    choices = choices[:1] if dtype == torch.float16 else choices  # FSDP has no loss scaling
    timelines = {checkpointing: Timeline(model, optimizer, config, checkpointing) for checkpointing in (False, True)}
    saved = total_bytes(model.state_dict().values()) + total_bytes(state_tensors(optimizer))
    kept = config.max_iters // config.keep_every if config.keep_every else 0
    disk = f"on disk up to {CHECKPOINTS} " + f"and {kept} kept ones " * (kept > 0)
    disk += f"at a time: {(CHECKPOINTS + kept) * saved / 1e9:.2f} GB"
    size = f"{model.num_params():,} parameters"
    size += f", {model.num_params(active=True):,} of them active" if model.config.n_expert else ""
    return [
        f"{size}, {config.optimizer}, products in {str(dtype).removeprefix('torch.')}",
        describe_flops(model),
        *describe_time(model, config, plan, dtype),
        f"a checkpoint: {saved / 1e9:.2f} GB, and as much host memory on rank 0 while it is written; {disk}",
        "",
        f"memory of one of {plan.gpus} {plan.gpu}, {limit / 1e9:g} GB each for tensors, not compiled "
        f"({share} {task_of(model.config).row_noun} of a step each):",
        *describe_strategies(timelines, choices, share, given, limit),
        *(strategy.note for strategy in choices if strategy.note),
        "kept for the backward: activations, and the folded and cast weights; with torch.compile less, so an upper "
        "bound",
        "not counted: CUDA, NCCL, workspaces of kernels, gaps between tensors",
    ]
