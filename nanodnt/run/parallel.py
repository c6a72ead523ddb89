"""Several processes: DDP keeps the whole model in each, FSDP2 shards it.

A run does, in this order: `shard_model` the empty model (FSDP), storage and weights, activation
checkpointing (`prepare_model`), the optimizer, compilation, `data_parallel` or `averaging` (DDP).
Before the backward pass: `sync_gradients`."""

import warnings
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from layers.linear import Linear
from layers.roles import BLOCK_ROLES
from layers.sharding import choose_dim, shard_numel

# of DDP's buckets: to send torch's 25 takes not much more than a message's latency; our choice
BUCKET_MB = 100


def choose_shard_size(setting: int, processes: int) -> int:
    """The number of processes that share one copy of the model: `setting`, or all. ValueError for
    no divisor."""
    if setting and processes % setting:
        valid = ", ".join(str(n) for n in range(1, processes + 1) if processes % n == 0)
        raise ValueError(
            f"fsdp_shard_size={setting} does not divide the {processes} processes: use one of {valid}"
        )
    return setting or processes


def shard_model(model, shard_size: int, env, keep: bool) -> None:
    """FSDP2, in place: shard_size processes (0: all) share the rows of one copy of the model;
    several copies are kept equal (HSDP). ValueError if shard_size does not divide the number of
    processes.

    The matrices of a block, and a head of its own, are gathered when they are used, in the dtype in
    which they are multiplied; everything else is gathered in fp32 at the start of a step. All
    gradients are reduced in fp32. With `keep`, each weight is gathered and each gradient reduced
    once a step; without, those of the blocks' matrices in every micro batch, weights twice."""
    from torch.distributed.device_mesh import init_device_mesh  # half a second, needed only here
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    size = choose_shard_size(shard_size, env.world_size)
    shape = {"replicate": env.world_size // size, "shard": size} if shard_size else {"shard": size}
    mesh = init_device_mesh(env.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(env.timeout, group)  # theirs is torch's default
    dtype = gathered_dtype(model, env.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    matrices, split = set(block_matrices(model)), lambda p: Shard(choose_dim(p, size))
    once = [model]  # what is gathered and reduced once a step
    if head := own_head(model):  # its gradient leaves first, not with the rest at last
        once.append(fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False))
        for name in ("logits", "loss"):
            gather_for(model, name, head)
    # before the blocks, so that it gets their gains
    fully_shard(model, mesh=mesh, ignored_params=matrices)
    for block in model.blocks:
        others = {p for p in block.parameters() if p not in matrices}
        how = dict(mp_policy=policy, reshard_after_forward=not keep, shard_placement_fn=split)
        fully_shard(block, mesh=mesh, ignored_params=others, **how)
    model.no_sync = partial(_accumulate, model, once + list(model.blocks if keep else ()))


def gather_for(model, name: str, module) -> None:
    """Let FSDP gather `module`, a unit of its own, around each call of the model's method `name` in
    its forward."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(module, name, getattr(model, name))
    register_fsdp_forward_method(module, name)
    setattr(model, name, getattr(module, name))


def own_head(model):
    """A language model's head, if it is not the embedding: a unit of FSDP's; or None."""
    return model.head if model.config.causal else None


def padded_numel(params, n: int) -> int:
    """The entries that FSDP2 gathers from n processes, each of which sends as many as the largest
    shard has."""
    return n * sum(shard_numel(p, n) for p in params)


def block_matrices(module) -> list:
    """The matrices of attention and FFN in a model or a block, experts included; routers are none
    of them."""
    linears = [m for m in module.modules() if isinstance(m, Linear)]
    return [m.weight for m in linears if m.param_roles["weight"] in BLOCK_ROLES]


def gathered_dtype(model, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP gathers the matrices of the blocks. σReparam takes σ from the fp32
    weight."""
    return torch.float32 if model.config.sigma_reparam else compute_dtype


@contextmanager
def _accumulate(model, units: list):
    """no_sync: weights of these units stay gathered, their gradients are added up in this process.
    For the gradients of others, HSDP's copies of the model wait for the last micro batch before
    they reduce them between each other."""

    def set_all(value: bool) -> None:
        for unit in units:
            unit.set_requires_gradient_sync(value, recurse=False)
            unit.set_reshard_after_backward(value, recurse=False)
        model.set_requires_all_reduce(value)

    set_all(False)
    try:
        yield
    finally:
        set_all(True)


def data_parallel(model, env):
    """The model wrapped for DDP, all gradients 0 in its buckets."""
    for p in model.parameters():
        # which DDP moves into its buckets: a first micro batch would make its own
        p.grad = torch.zeros_like(p)
    ids = [env.device.index] if env.device.type == "cuda" else None
    with warnings.catch_warnings():
        # about broadcast_buffers: all ranks compute the same ones
        warnings.simplefilter("ignore", FutureWarning)
        how = dict(broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
        return DistributedDataParallel(model, device_ids=ids, **how)


def averaging(model):
    """DDP without buckets: give all processes the weights of the first, as torch's DDP does.
    Returns `average_gradients` of this model, to be called after the last backward pass of a step.
    All ranks must call both."""
    for t in model.state_dict().values():
        dist.broadcast(t, 0)
    return partial(average_gradients, model)


@torch.no_grad()
def average_gradients(model) -> None:
    """Average p.grad over the processes in one message, of which they are views from then on. All
    processes must have gradients of the same parameters. Each is divided before the sum, so that
    two processes get the bits of torch's DDP; more may add in another order."""
    params = [p for p in model.parameters() if p.grad is not None]
    # so that no vector of one entry moves a matrix off its 16 bytes
    params.sort(key=torch.numel, reverse=True)
    sizes = [p.numel() for p in params]
    message = params[0].new_empty(sum(sizes))
    for p, part in zip(params, message.split(sizes), strict=True):
        p.grad = torch.div(p.grad, dist.get_world_size(), out=part.view_as(p))
    dist.all_reduce(message)
