"""Several processes: DDP keeps the whole model in each of them, FSDP2 shards it.

The order in a run: `shard_model` on the empty model (FSDP), storage and weights, activation
checkpointing (`prepare_model`), the optimizer, compilation, `data_parallel` or `averaging` (DDP).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from layers.linear import Linear
from layers.roles import BLOCK_ROLES
from layers.sharding import choose_dim, shard_numel
from model import Transformer
from nanodnt.run.environment import Env

# Size of DDP's buckets. Torch's default, 25 MB, takes not much longer to send than a message's
# latency: our choice
BUCKET_MB = 100


def choose_shard_size(setting: int, processes: int) -> int:
    """The number of processes that share one copy of the model: `setting`, 0 = all. ValueError if
    it does not divide the number of processes."""
    if setting and processes % setting:
        divisors = [str(n) for n in range(1, processes + 1) if processes % n == 0]
        raise ValueError(
            f"fsdp_shard_size={setting} does not divide the {processes} processes: "
            f"use one of {', '.join(divisors)}"
        )
    return setting or processes


def shard_model(model: Transformer, shard_size: int, env: Env, keep: bool) -> None:
    """Apply FSDP2 in place: `shard_size` processes (0 = all) share the rows of one copy of the
    model; several copies are kept equal (HSDP). ValueError as in `choose_shard_size`.

    The matrices of a block, and an untied head, are gathered when they are used, in the dtype of
    the matrix multiplications; everything else is gathered in fp32 at the start of a step. All
    gradients are reduced in fp32. With `keep`, each weight is gathered and each gradient reduced
    once a step. Without it, the weights of the blocks' matrices are gathered twice and their
    gradients reduced once in every micro batch."""
    from torch.distributed.device_mesh import init_device_mesh  # half a second, needed only here
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    size = choose_shard_size(shard_size, env.world_size)
    mesh_shape = {"shard": size}
    if shard_size:
        mesh_shape = {"replicate": env.world_size // size, "shard": size}
    mesh = init_device_mesh(
        env.device.type, tuple(mesh_shape.values()), mesh_dim_names=tuple(mesh_shape)
    )
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(env.timeout, group)  # default: torch's timeout
    policy = MixedPrecisionPolicy(
        param_dtype=gathered_dtype(model, env.dtype),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    gathered_once = [
        model
    ]  # modules whose weights are gathered, and gradients reduced, once a step
    if head := own_head(model):  # a unit of its own, so that its gradient leaves first
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        gathered_once.append(head)
        for name in ("logits", "loss"):
            gather_for(model, name, head)
    if keep:
        gathered_once.extend(model.blocks)
    # the model before its blocks, so that it gets the blocks' gains
    matrices = set(block_matrices(model))
    fully_shard(model, mesh=mesh, ignored_params=matrices)
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            ignored_params={p for p in block.parameters() if p not in matrices},
            mp_policy=policy,
            reshard_after_forward=not keep,
            shard_placement_fn=lambda p: Shard(choose_dim(p, size)),
        )
    model.no_sync = partial(_accumulate, model, gathered_once)


def gather_for(model: Transformer, name: str, module: nn.Module) -> None:
    """Let FSDP gather `module`, a unit of its own, around each call of the model's method
    `name`."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    setattr(module, name, getattr(model, name))
    register_fsdp_forward_method(module, name)
    setattr(model, name, getattr(module, name))


def own_head(model: Transformer) -> nn.Module | None:
    """The untied head of a language model, which is a unit of FSDP; else None."""
    return model.head if model.config.causal else None


def padded_numel(params: Iterable[Tensor], n: int) -> int:
    """The entries that FSDP2 gathers from n processes, each of which sends as many as the largest
    shard has."""
    return n * sum(shard_numel(p, n) for p in params)


def block_matrices(module: nn.Module) -> list[Tensor]:
    """The matrices of attention and FFN in a model or a block, with those of experts, without
    those of routers."""
    linears = [m for m in module.modules() if isinstance(m, Linear)]
    return [m.weight for m in linears if m.param_roles["weight"] in BLOCK_ROLES]


def gathered_dtype(model: Transformer, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which FSDP gathers the matrices of the blocks. σReparam computes σ from the fp32
    weight."""
    return torch.float32 if model.config.sigma_reparam else compute_dtype


@contextmanager
def _accumulate(model: Transformer, units: list[nn.Module]) -> Iterator[None]:
    """The model's `no_sync`: the weights of these units stay gathered, and their gradients are
    added up in this process. For the gradients of other units, HSDP's copies of the model wait for
    the last micro batch before they reduce them between each other."""

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


def data_parallel(model: nn.Module, env: Env) -> DistributedDataParallel:
    """The model wrapped for DDP, with all gradients 0 in DDP's buckets."""
    for p in model.parameters():
        # DDP moves these into its buckets; the first micro batch would make gradients outside
        p.grad = torch.zeros_like(p)
    with warnings.catch_warnings():
        # about broadcast_buffers: all ranks compute the same buffers
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model,
            device_ids=[env.device.index] if env.device.type == "cuda" else None,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=BUCKET_MB,
        )


def averaging(model: Transformer) -> Callable[[], None]:
    """DDP without buckets: give all processes the weights of the first, as torch's DDP does, and
    return a function that averages the gradients, to be called after the last backward pass of a
    step. All ranks must call both."""
    for t in model.state_dict().values():
        dist.broadcast(t, 0)
    return partial(average_gradients, model)


@torch.no_grad()
def average_gradients(model: Transformer) -> None:
    """Average p.grad over the processes in one message; from then on the gradients are views of
    it. All processes must have gradients of the same parameters. Each is divided before the sum, so
    that two processes get the bits of torch's DDP; more may add in another order."""
    params = [p for p in model.parameters() if p.grad is not None]
    # Matrices come first, so that their views stay aligned to 16 bytes.
    params.sort(key=torch.numel, reverse=True)
    sizes = [p.numel() for p in params]
    message = params[0].new_empty(sum(sizes))
    for p, part in zip(params, message.split(sizes), strict=True):
        p.grad = torch.div(p.grad, dist.get_world_size(), out=part.view_as(p))
    dist.all_reduce(message)
