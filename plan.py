"""What a run will need, before it is started: memory on each GPU, the largest micro batch, days, disk.

python model.py config/dnt_xl.py --plan --gpus=32 --gpu=h100
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=a800 --mfu=0.45 --optimizer=msgdw

Activations are not reckoned by formula: train.py's own training step runs on the meta device, where tensors have shapes
but no contents, and every storage is counted from its making to its end. So any layout, optimizer or loss is counted as
it is. Marks: [I] our inference or choice.
"""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, NamedTuple
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import runtime
from optim import make_optimizer
from summary import describe_flops, table
from train import prepare_model, split_batch, training_step

# GB that tensors can have [I], and the name in runtime.PEAK_FLOPS. GPUs have 2 to 6 GB more (an H100 85, in GB of 10⁹
# bytes), which CUDA, NCCL, the kernels' workspaces and the allocator's gaps need.
GPUS = {
    "h100": (80, "H100"),
    "h200": (141, "H200"),
    "h800": (80, "H800"),
    "gh200": (96, "GH200"),
    "b200": (180, "B200"),
}
GPUS |= {"a100": (80, "A100"), "a100-40": (40, "A100"), "a800": (80, "A800"), "l40s": (46, "L40S")}
GPUS |= {"4090": (24, "RTX 4090"), "3090": (24, "RTX 3090"), "v100": (32, "V100"), "t4": (15, "T4")}
NO_BF16 = ("v100", "t4")  # dtype=auto is fp16 there
PARTS = (
    "weights",
    "gradients outside buckets",
    "optimizer state",
    "DDP's buckets, FSDP's whole copies",
    "kept for the backward",
)
PARTS += ("all else then",)
NOTES = (
    "kept for the backward: activations, and the weights as folded and cast. torch.compile keeps less: an upper bound",
    "outside: CUDA, NCCL, workspaces of kernels, gaps between tensors",
)
CHECKPOINTS = 4  # on disk at a time: last, prev, best, and the next one while it is written


@dataclass
class PlanConfig:
    # --- plan: with --plan alone ---
    gpus: int = 1  # GPUs in all, one process each
    gpu: Literal[tuple(GPUS)] = "h100"  # their kind
    gpu_mem_gb: float = 0.0  # GB (10⁹ bytes) that tensors can have on one; 0 = by kind
    mfu: float = 0.4  # model FLOP/s over peak FLOP/s that the run is assumed to reach [I]; train.py logs the real one

    def check(self):
        """ValueError for values that no machine could have."""
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        if self.gpu_mem_gb < 0:
            raise ValueError(f"gpu_mem_gb={self.gpu_mem_gb:g} must not be negative (0 = by kind)")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"mfu={self.mfu:g} must be above 0 and at most 1")

    @property
    def bytes(self) -> float:
        """That tensors can have on one GPU."""
        return 1e9 * (self.gpu_mem_gb or GPUS[self.gpu][0])


# ------------------------------------------------------------------------------------------ counting a training step


COPIES_INSIDE = (torch.ops.aten.logsumexp.default,)  # of the operators used here: they make a tensor like their first
#   argument, and drop it, where no one sees it


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while it is on, from their making to their end.

    `now` is their sum; those given to `gradient` are moved to `gradients`. After each operator a row (phase, gradients,
    now) is added to `rows`, unless `phase` is None. What was made before costs nothing, and neither do views and
    changes in place. `dry`: for meta tensors. Operators that return nothing, the fused updates of lists, are not called
    then, nor are numbers read, which meta tensors could not; neither makes anything."""

    def __init__(self, dry: bool = True):
        super().__init__()
        self.dry, self.storages, self.rows, self.phase = dry, {}, [], "forward"
        self.now = self.gradients = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self.meet(tensor, made=False)
        if self.dry and (not func._schema.returns or func is torch.ops.aten._local_scalar_dense.default):
            return 0.0 if func._schema.returns else None
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            self.meet(tensor, made=True)
        inside = size(args[:1]) if func in COPIES_INSIDE else 0
        self.peak = max(self.peak, self.now + inside)
        if self.phase:
            self.rows.append((self.phase, self.gradients, self.now + inside))
        return result

    def meet(self, tensor, made: bool) -> None:
        """Note a tensor's storage when it is first seen; it counts if an operator has just made it."""
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.storages:
            size = storage.nbytes() if made else 0
            self.storages[key] = ref(storage, partial(self.forget, key)), size
            self.now += size

    def forget(self, key, _) -> None:
        self.now -= self.storages.pop(key)[1]

    def gradient(self, p) -> None:
        """Count the storage of p.grad among the gradients from here on."""
        key = p.grad.untyped_storage()._cdata
        watch, size = self.storages[key]
        self.storages[key] = watch, 0
        self.now, self.gradients = self.now - size, self.gradients + size


@contextmanager
def fused_attention():
    """Attention by the operator of a fused kernel, which keeps q, k, v, the result and one fp32 number a row, as those
    on GPUs do. Meta tensors would get the plain formula with all its scores."""
    plain = F.scaled_dot_product_attention

    def fused(q, k, v, dropout_p, is_causal, enable_gqa):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal)[0]

    F.scaled_dot_product_attention = fused  # no mode: those are not on where checkpointing computes again
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def tokens(model, micro: int) -> torch.Tensor:
    """A micro batch of token ids (micro, T)."""
    return torch.zeros(micro, model.config.block_size, dtype=torch.long, device=model.wte.weight.device)


def trace(model, optimizer, config, micro: int, accumulation: int = 1) -> Memory:
    """A training step of train.py, counted. Phases: forward, None in the loss, backward, clip, optimizer."""
    memory, x = Memory(dry=model.wte.weight.is_meta), tokens(model, micro * accumulation)
    after, loss = dict(forward="backward", backward="clip", clip="optimizer"), model.loss

    def lap(part):
        memory.phase = after.get(part)

    def uncounted(*args):
        memory.phase = None
        return loss(*args)

    hooks = [p.register_post_accumulate_grad_hook(memory.gradient) for p in model.parameters()]
    model.loss = uncounted
    try:
        with fused_attention(), memory:
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            training_step(model, model, optimizer, scaler, x, x, micro, config, lap)
    finally:
        del model.loss
        optimizer.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.remove()
    return memory


class Timeline:
    """A training step operator by operator, for any micro batch: all bytes are linear in it, and two small ones say how
    (a single sequence would take shortcuts); but the loss takes its tokens in chunks, and is counted by itself."""

    def __init__(self, model, optimizer, config, checkpointing: bool):
        self.model, model.checkpointing = model, checkpointing
        two, three = (trace(model, optimizer, config, micro).rows for micro in (2, 3))
        phases, gradients, other = zip(*two, strict=True)
        self.before_loss, other = phases.index("backward") - 1, np.array(other, float)
        self.phases, self.phase = np.unique([*phases, "loss", "reduction"], return_inverse=True)
        self.gradients = np.array([*gradients, 0, max(gradients)]) / max(gradients)  # the share that is there
        self.slope = np.array([row[-1] for row in three]) - other
        self.start = other - 2 * self.slope

    @cache  # noqa: B019
    def other(self, micro: int) -> np.ndarray:
        """Bytes that are neither weights, gradients nor state, moment by moment; then in the loss, and after all."""
        other = self.start + self.slope * micro
        return np.append(other, (other[self.before_loss] + loss_bytes(self.model, micro), 0))

    def peak(self, micro: int, accumulates: bool, way: "Way") -> "Peak":
        """The moment when most is held. `accumulates`: an earlier micro batch's gradients are there from the start."""
        other, extra = self.other(micro), np.array([way.extra.get(str(phase), 0) for phase in self.phases])[self.phase]
        there = 1 if accumulates else 0 if way.in_buckets else self.gradients
        gradients = way.gradients * there + 0 * other
        i = (gradients + extra + other).argmax()
        kept = min(other[self.before_loss], other[i])
        phase = str(self.phases[self.phase[i]])
        return Peak(phase, way.weights, gradients[i], way.state, extra[i], kept, other[i] - kept)


def loss_bytes(model, micro: int) -> int:
    """Bytes that the loss of a micro batch has at most, beside the stream that it gets."""
    weight = model.wte.weight
    x = torch.empty(micro, model.config.block_size, weight.shape[1], device=weight.device, requires_grad=True)
    with Memory(dry=weight.is_meta) as memory:
        model.loss(x, tokens(model, micro))
    return memory.peak


class Peak(NamedTuple):
    """Bytes of one process at the moment when they are the most."""

    phase: str
    weights: float
    gradients: float
    state: float
    extra: float  # of the way to be parallel
    kept: float  # for the backward pass
    passing: float  # everything else

    @property
    def total(self) -> float:
        return sum(self[1:])


# ------------------------------------------------------------------------------------------------ several processes


class Way(NamedTuple):
    """What one process holds, in bytes, beside what a micro batch makes."""

    name: str
    weights: int
    gradients: int
    state: int
    extra: dict = {}  # more, by phase; "reduction" is the end of FSDP's backward pass
    in_buckets: bool = False  # the gradients of a single micro batch are; those of earlier ones are beside them


def gb(n: float) -> str:
    return f"{n / 1e9:.2f}"


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def shard_size(tensors, n: int) -> int:
    """Bytes of tensors on the process that has most, where n share their rows as FSDP2 does: ⌈rows/n⌉ each."""
    return sum(size([t]) if t.ndim == 0 else -(-len(t) // n) * size([t[0]]) for t in tensors)


def states(optimizer) -> list:
    return [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]


def exchanged(optimizer, gpus: int) -> int:
    """Muon's messages under DDP: the updates of all matrices of a shape, and what is sent of them; of two shapes."""
    found = []
    for group in optimizer.param_groups:
        shapes = Counter(p.shape for p in group["params"]) if group["rule"] == "muon" else {}
        for shape, count in shapes.items():
            one = math.prod(shape) * getattr(torch, group["ns_dtype"]).itemsize
            found.append(one * -(-count // gpus) * (gpus + 1))  # all send as many as the one that has most
    return sum(sorted(found)[-2:])


def ways(model, optimizer, config, gpus: int) -> list:
    """How to train on so many GPUs: on one, or by DDP or FSDP. ValueError if fsdp_shard_size does not divide them."""
    parameters, state, buffers = list(model.parameters()), states(optimizer), size(model.buffers())
    if gpus == 1:
        return [Way("one GPU", size(parameters) + buffers, size(parameters), size(state))]
    n = config.fsdp_shard_size or gpus
    if gpus % n:
        raise ValueError(f"fsdp_shard_size={n} does not divide gpus={gpus}: choose a divisor")
    buckets = dict.fromkeys(("forward", "loss", "backward", "clip", "optimizer"), size(parameters))
    buckets["optimizer"] += exchanged(optimizer, gpus)
    shard = shard_size(parameters, n)
    return [
        Way("DDP", size(parameters) + buffers, size(parameters), size(state), buckets, True),
        Way("FSDP", shard + buffers, shard, shard_size(state, n), whole_copies(model)),
    ]


def whole_copies(model) -> dict:
    """FSDP2's whole weights and gradients, as one process has them for a while, in bytes by phase [I].

    The root group, all but the blocks, is gathered from the start to the end, and then reduced. Blocks come in turns:
    the weights of one, and of the next twice, gathered and copied out of that; in the backward pass its gradients, and
    those of the one before on their way."""
    block = max(size(block.parameters()) for block in model.blocks)
    root = size(model.parameters()) - sum(size(block.parameters()) for block in model.blocks)
    return dict(forward=root + 3 * block, loss=root + 2 * block, backward=root + 5 * block, reduction=3 * root)


# ----------------------------------------------------------------------------------------------------------- the plan


def largest(line: Timeline, way: Way, share: int, limit: float) -> int:
    """The largest micro batch that divides a process's `share` of the batch and fits; 1 if none does."""
    valid = [micro for micro in range(share, 0, -1) if share % micro == 0]
    return next((micro for micro in valid if line.peak(micro, micro < share, way).total <= limit), 1)


def describe_memory(lines: dict, ways: list, share: int, config, limit: float) -> list:
    """A table: what one process holds with the largest micro batch that fits, at the moment when that is the most.

    `lines`: {whether with activation checkpointing: Timeline}."""
    given = config.micro_batch_size if config.micro_batch_size and share % config.micro_batch_size == 0 else 0
    columns = [("GB", "micro_batch_size that fits", "accumulation", *PARTS, "peak", "is in")]
    columns[0] += (f"peak with micro_batch_size={given}",) if given else ()
    for way in ways:
        for checkpointing, line in lines.items():
            micro = largest(line, way, share, limit)
            peak = line.peak(micro, micro < share, way)
            column = [
                way.name + ", checkpointing" * checkpointing,
                str(micro) if peak.total <= limit else "none, 1 shown",
            ]
            column += [str(share // micro), *map(gb, peak[1:]), gb(peak.total), peak.phase]
            columns.append(column + ([gb(line.peak(given, given < share, way).total)] if given else []))
    return table(list(zip(*columns, strict=True)))


def describe_time(model, config, plan: PlanConfig, dtype) -> list:
    """Days, at the MFU that is assumed."""
    tokens = config.batch_size * model.config.block_size
    flops = tokens * model.flops_per_token()
    peak = config.peak_flops or (runtime.PEAK_FLOPS[GPUS[plan.gpu][1]] if dtype != torch.float32 else 0)
    work = f"{config.max_iters:,} steps of {config.batch_size} × {model.config.block_size} = {tokens:,} tokens are "
    work += f"{config.max_iters * tokens / 1e9:.4g}e9 tokens, {config.max_iters * flops:.3g} FLOPs"
    if not peak:
        return [work, "days: unknown, since the GPU's fp32 peak is: give it with --peak_flops"]
    speed = plan.mfu * peak * plan.gpus
    days = config.max_iters * flops / speed / 86400
    return [
        work,
        f"{days:.3g} days, {flops / speed:.3g} s a step, {speed / model.flops_per_token():,.0f} tokens/s, if "
        f"{plan.gpus} × {peak / 1e12:.0f} TFLOP/s are used to {plan.mfu:.0%} (MFU: assumed); about "
        "4/3 of the time with activation checkpointing",
    ]


def describe_disk(model, optimizer, config) -> str:
    one = size(model.state_dict().values()) + size(states(optimizer))
    kept = config.max_iters // config.keep_every if config.keep_every else 0
    text = (
        f"a checkpoint: {gb(one)} GB, as much host memory on rank 0 while it is written; on disk up to {CHECKPOINTS} "
    )
    return text + (f"and {kept} kept ones " if kept else "") + f"at a time: {gb((CHECKPOINTS + kept) * one)} GB"


def describe_plan(model, config, plan: PlanConfig) -> list:
    """Lines for a model on the meta device. ValueError where the batch or the shards do not divide."""
    plan.check()
    half = torch.float16 if plan.gpu in NO_BF16 else torch.bfloat16
    dtype = half if config.dtype == "auto" else getattr(torch, config.dtype)
    prepare_model(model, config, runtime.Env(0, 1, torch.device("meta"), dtype, False))
    optimizer = make_optimizer(model, config)  # after that: Muon's products are in its dtype
    share = math.prod(split_batch(config.batch_size, 0, plan.gpus))
    choices = ways(model, optimizer, config, plan.gpus)
    if dtype == torch.float16:  # whose loss scaling FSDP has not
        choices = choices[:1]
    lines = {checkpointing: Timeline(model, optimizer, config, checkpointing) for checkpointing in (False, True)}
    return [
        f"{model.num_params():,} parameters, {config.optimizer}, products in {str(dtype).removeprefix('torch.')}",
        describe_flops(model),
        *describe_time(model, config, plan, dtype),
        describe_disk(model, optimizer, config),
        "",
        f"memory of one of {plan.gpus} {plan.gpu}, {plan.bytes / 1e9:g} GB each for tensors, not compiled "
        f"({share} sequences of a step each):",
        *describe_memory(lines, choices, share, config, plan.bytes),
        *NOTES,
    ]
