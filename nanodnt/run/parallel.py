"""Several processes: DDP keeps the whole model in each, FSDP2 shards it."""

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FIXED_SHARE = 0.7  # of a GPU's memory, for weights, gradients and optimizer state; activations need the rest


def choose_parallel(setting: str, env, fixed_bytes: int) -> tuple:
    """(none, ddp or fsdp, reason). `fixed_bytes`: what each process holds under DDP before the first activation.

    ValueError for a setting that does not fit how the processes were started. All ranks must call it."""
    if env.distributed and setting == "none" and env.world_size > 1:
        raise ValueError(f"parallel=none, but torchrun started {env.world_size} processes: use --parallel=auto")
    if not env.distributed and setting in ("ddp", "fsdp"):
        raise ValueError(f"parallel={setting} needs torchrun: torchrun --standalone --nproc_per_node=N train.py …")
    if setting == "fsdp" and env.dtype == torch.float16:
        raise ValueError("parallel=fsdp has no loss scaling, which fp16 needs: use --dtype=bfloat16 or float32, or ddp")
    if setting != "auto":
        return setting, "as asked"
    if not env.distributed:
        return "none", "auto: one process"
    if env.device.type != "cuda" or env.dtype == torch.float16:
        return "ddp", "auto"
    total = env.minimum(torch.cuda.get_device_properties(env.device).total_memory)
    text = f"auto: ddp's weights, gradients and optimizer state are {fixed_bytes / 1e9:.1f} of {total / 1e9:.0f} GB"
    return "fsdp" if fixed_bytes > FIXED_SHARE * total and env.world_size > 1 else "ddp", text


def shard_model(model, shard_size: int, env) -> None:
    """FSDP2, in place: every process keeps some rows of each parameter; those of a block are gathered while it runs.

    shard_size 0: one copy of the model over all processes. Otherwise shard_size processes hold one copy, and the
    copies are kept equal (HSDP). ValueError if it does not divide the number of processes. Weights are gathered in
    fp32, since gains stay fp32 and the casts to bf16 are part of the blocks."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # half a second, needed only here
    from torch.distributed.fsdp import fully_shard

    size = shard_size or env.world_size
    if env.world_size % size:
        valid = ", ".join(str(n) for n in range(1, env.world_size + 1) if env.world_size % n == 0)
        raise ValueError(f"fsdp_shard_size={size} does not divide the {env.world_size} processes: use one of {valid}")
    if shard_size:  # groups with our timeout: those of init_device_mesh would have torch's default
        ranks = torch.arange(env.world_size).view(-1, size)
        groups = [_new_groups(rows, env) for rows in (ranks.T.tolist(), ranks.tolist())]
        mesh = DeviceMesh.from_group(groups, env.device.type, ranks, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(env.device.type, (size,), mesh_dim_names=("shard",))
    for part in (*model.blocks, model):  # `model` stands for the rest: embeddings, final norm, head
        fully_shard(part, mesh=mesh)


def _new_groups(groups: list, env):
    """Create a process group for each list of ranks; returns the one with this process. All ranks must call it."""
    made = [(ranks, dist.new_group(ranks, timeout=env.timeout)) for ranks in groups]
    return next(group for ranks, group in made if env.rank in ranks)


def distribute(model, env):
    """The model as the training step calls it: under DDP wrapped; under FSDP it is sharded already."""
    if env.parallel != "ddp":
        return model
    ids = [env.device.index] if env.device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about broadcast_buffers: all ranks compute the same ones
        return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)


def sync_gradients(model, last: bool):
    """Context of one micro batch. DDP averages gradients over processes only in the `last` one. FSDP does it in each:
    otherwise every process would hold all gradients."""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
