"""Optimizer steps on several processes, without a run: the same as on one, from gradients that are the same everywhere.

With full tensors, as under DDP, where Muon's matrices are computed by different processes; and on FSDP2's shards.
"""

from datetime import timedelta
from itertools import product
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from layers.sharding import local_shard
from model import GPT, GPTConfig
from nanodnt.optim import fill_defaults, make_optimizer, newton_schulz
from nanodnt.run.checkpoints import snapshot
from nanodnt.run.environment import Env
from nanodnt.run.parallel import shard_model
from nanodnt.settings import TrainConfig
from support.processes import assert_close, meeting, processes
from support.runs import deep_but, different, load, tensors

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL, LARGER = dict(n_layer=1), dict(n_layer=2, mlp="swiglu", n_kv_head=1)
MATRICES = {"6 of 3 shapes": SMALL, "14 of 4 shapes": LARGER}  # Muon's


def six_steps(model, config, dtype: str, singly: bool, grad_of):
    """Six steps; the optimizer. grad_of(step, name, parameter) gives the gradients. Those of the third step are not
    finite; in the fifth some matrices have none. `singly`: whether Muon's matrices are computed one by one."""
    model.set_runtime(compute_dtype=getattr(torch, dtype))
    fill_defaults(config)
    optimizer = make_optimizer(model, config)
    for step in range(6):
        for name, p in model.named_parameters():
            grad = grad_of(step, name, p)
            p.grad = None if step == 4 and name.endswith(("q.weight", "down.weight")) else grad
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.grad_scale = torch.tensor(1.0 if step == 2 else 1.0 + step)  # as if it clipped
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(newton_schulz, "one_at_a_time", lambda x: singly)
            optimizer.step()
    return optimizer


def start_gloo(rank, world, path):
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting(rank, world, path))


# ------------------------------------------------------------------------------------------------------ full tensors


def muon_steps(rank, world, folder):
    """Steps in bf16 and fp32, of matrices singly and in stacks. Leaves parameters and optimizer state in a file."""
    start_gloo(rank, world, folder / str(world))
    found = {}
    for matrices, dtype, singly in product(MATRICES, ("bfloat16", "float32"), (True, False)):
        model = GPT(GPTConfig(n_head=2, n_embd=32, block_size=8, vocab_size=31, **MATRICES[matrices]))
        random = torch.Generator().manual_seed(0)

        def grad_of(step, name, p, random=random):
            grad = torch.randn(p.shape, generator=random)
            if step == 2:
                grad[0] = inf
            return grad

        optimizer = six_steps(model, TrainConfig(optimizer="muon"), dtype, singly, grad_of)
        state = [model.state_dict(), optimizer.state_dict()["state"]]
        found[f"{matrices}, {dtype}, {'singly' if singly else 'in stacks'}"] = state
    torch.save(found, folder / f"{world}.{rank}")
    if world > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", deep_but((2, 3, 4, 7), 2))  # seven are more than one block has matrices
def test_muons_steps_are_the_same_bits_on_any_number_of_processes(world, tmp_path):
    muon_steps(0, 1, tmp_path)
    one = load(tmp_path / "1.0")
    processes(world, muon_steps, tmp_path)
    for rank in range(world):
        found = load(tmp_path / f"{world}.{rank}")
        assert [case for case in one if different(found[case], one[case])] == [], rank


# ------------------------------------------------------------------------------------------------------------ shards

STEPS = {  # optimizer, layout, dtype of Muon's iteration, matrices singly
    "adamw": ("adamw", LARGER, "float32", False),
    "dampening": ("msgdw", LARGER, "float32", False),
    "adam_mini": ("adam_mini", LARGER, "float32", False),
    "muon": ("muon", LARGER, "float32", False),
    "muon, bf16": ("muon", SMALL, "bfloat16", True),
}


def sharded_steps(rank, world, folder, shard_sizes=(0,)):
    """Leaves full parameters and full optimizer state, and how much of the state is on this process."""
    start_gloo(rank, world, folder / str(world))
    env, found = Env(rank, world, torch.device("cpu"), torch.float32, world > 1), {}
    for (case, (name, layout, dtype, singly)), shard_size in product(STEPS.items(), shard_sizes):
        model = GPT.empty(GPTConfig(n_head=2, n_embd=32, block_size=8, vocab_size=31, qk_norm=True, **layout))
        if world > 1:
            shard_model(model, shard_size, env, keep=False)
        model.to_empty(device="cpu").init_weights(1)
        config = TrainConfig(optimizer=name, dampening=0.5 if name == "msgdw" else None)
        random = torch.Generator().manual_seed(0)

        def grad_of(step, name, p, random=random):
            grad = torch.randn(p.shape, generator=random)
            if step < 2:  # some processes have only zeros
                grad[len(grad) // 2 :] = 0
            if step == 2:
                grad[0] = inf
            return distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if world > 1 else grad

        state = six_steps(model, config, dtype, singly, grad_of).state_dict()["state"]
        sizes = {key: local_shard(t).numel() for key, t in tensors(state).items()}
        full = snapshot({"model": model.state_dict(), "state": state})
        found[case, shard_size] = dict(full, sizes=sizes)
    torch.save(found, folder / f"{world}.rank{rank}")
    if world > 1:
        dist.destroy_process_group()


WORLDS = [(2, (0,)), (3, (0,)), (4, (0, 2)), (7, (0,))]


@pytest.mark.parametrize(
    "world, shard_sizes", [pytest.param(*world, marks=pytest.mark.deep if world[0] > 2 else ()) for world in WORLDS]
)
def test_steps_on_shards(world, shard_sizes, tmp_path):
    """Muon's are the same bits as on full matrices. The others are the same to rounding: they work entry by entry, or
    by Adam-mini's blocks, which shards divide, and a kernel rounds the last few entries of a tensor differently."""
    sharded_steps(0, 1, tmp_path)
    processes(world, sharded_steps, tmp_path, shard_sizes)
    one = torch.load(tmp_path / "1.rank0")
    for rank in range(world):
        for (case, shard_size), got in torch.load(tmp_path / f"{world}.rank{rank}").items():
            expected = one[case, 0]
            for part in ("model", "state"):
                a, b = tensors(got[part]), tensors(expected[part])
                assert_close(a, b, 1e-6)
                exact = [key for key in a if "momentum" in key or ".f." in key] if case.startswith("muon") else []
                assert different([a[key] for key in exact], [b[key] for key in exact]) == [] if exact else True, case
            moments = [key for key in got["sizes"] if key.endswith(("momentum_buffer", "exp_avg", "exp_avg_sq"))]
            held, full = (sum(sizes[key] for key in moments) for sizes in (got["sizes"], expected["sizes"]))
            assert held < 1.2 * full / (shard_size or world), (case, rank)
