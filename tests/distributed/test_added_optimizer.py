"""The docs' Lion, an optimizer that nothing else knows, on parameters that FSDP2 shards."""

from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist

from layers.sharding import full_tensor, local_shard
from model import GPT, GPTConfig
from nanodnt.optim import make_optimizer
from support.optimizers import lion_source, registered, settings
from support.processes import meeting, processes
from support.runs import load


def lion_steps(rank, world, folder):
    """Five steps from gradients that are the same everywhere; those of the third are not finite. Leaves the parameters
    and the number of state entries that this process holds."""
    torch.set_num_threads(1)
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=31), seed=1)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting(rank, world, folder / str(world)))
        for module in (*model.blocks, model):
            fully_shard(module)
    with registered(lion_source()):
        optimizer = make_optimizer(model, settings(optimizer="lion"))
        random = torch.Generator().manual_seed(0)
        for step in range(5):
            for p in model.parameters():
                grad = torch.randn(p.shape, generator=random)
                if step == 2:
                    grad[0] = inf
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if world > 1 else grad
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.grad_scale = torch.tensor(1.0 if step == 2 else 1.0 + step)
            optimizer.step()
    held = sum(local_shard(state["m"]).numel() for state in optimizer.state.values())
    torch.save([[full_tensor(p).detach() for p in model.parameters()], held], folder / f"{world}.{rank}")
    if world > 1:
        dist.destroy_process_group()


def test_lion_takes_the_same_steps_on_shards(tmp_path):
    """The same bits as in one process, and each process holds its part of the state."""
    lion_steps(0, 1, tmp_path)
    whole, entries = load(tmp_path / "1.0")
    processes(3, lion_steps, tmp_path)
    for rank in range(3):
        found, held = load(tmp_path / f"3.{rank}")
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
        assert held < 0.4 * entries
