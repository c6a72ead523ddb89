"""Optimizer steps on several processes, without a run: the same as on one, from gradients that are
the same everywhere.

With full tensors, as under DDP, where Muon's matrices are computed by different processes; and on
FSDP2's shards.
"""

from itertools import product
from math import inf

import pytest
import torch

from layers.sharding import local_shard
from model import GPT, GPTConfig
from nanodnt.optim import make_optimizer
from nanodnt.run.checkpoints import Saver
from nanodnt.run.parallel import shard_model
from support.depth import spread
from support.optimizers import VARIANTS, compile_updates, lion_source, registered, settings
from support.processes import assert_close, joined, processes, sharded_like
from support.runs import different, load, tensors
from support.tolerances import roundings

SIZE = dict(n_head=2, n_embd=32, block_size=8, vocab_size=31)
# 6 matrices of 3 shapes, 14 of 4
SMALL = dict(n_layer=1)
LARGER = dict(n_layer=2, mlp="swiglu", n_kv_head=1)

# Muon orthogonalises an expert where it lies. Three do not divide over two processes; at first some
# see no token.
EXPERTS = dict(n_layer=1, mlp="swiglu", n_ff=48, n_expert=3, n_expert_active=1)


def six_steps(model, optimizer, dtype: str, zeros: bool = False):
    """Six steps; the optimizer's state. The gradients of the third are not finite; in the fifth
    some matrices have none. `zeros`: in the first two steps the last half of each gradient is 0,
    which some processes have."""
    model.set_runtime(compute_dtype=getattr(torch, dtype))
    random = torch.Generator().manual_seed(0)
    for step in range(6):
        for name, p in model.named_parameters():
            grad = torch.randn(p.shape, generator=random)
            if zeros and step < 2:
                grad[len(grad) // 2 :] = 0
            if step == 2:
                grad[0] = inf
            p.grad = (
                None
                if step == 4 and name.endswith(("q.weight", "down.weight"))
                else sharded_like(p, grad)
            )
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.grad_scale = torch.tensor(1.0 if step == 2 else 1.0 + step)  # as if it clipped
        optimizer.step()
    return optimizer.state_dict()["state"]


# ------------------------------------------------------------------------------------- full tensors


OWNED = [("muon", SMALL, "float32"), ("muon", LARGER, "bfloat16")]
OWNED += [("muon_2026", SMALL, "bfloat16"), ("muon_2026", LARGER, "float32")]
OWNED += [("soap", LARGER, "float32"), ("soap", EXPERTS, "float32")]


def owned_steps(rank, world, folder, compiled=False):
    """Steps of the rules whose matrices have owners, Muon's in bf16 and fp32, perhaps with compiled
    updates, as on a GPU. Leaves parameters and optimizer state in a file."""
    found = {}
    with joined(rank, world, folder / str(world)), pytest.MonkeyPatch.context() as patch:
        if compiled:
            compile_updates(patch)
        for name, layout, dtype in OWNED:
            model = GPT(GPTConfig(**SIZE | layout))
            state = six_steps(model, make_optimizer(model, settings(**VARIANTS[name])), dtype)
            found[f"{name}, {len(state)} parameters, {dtype}"] = [model.state_dict(), state]
    torch.save(found, folder / f"{world}.{rank}")


# seven are more than one block has matrices
@pytest.mark.parametrize("world", spread((2, 3, 4, 7), [2]))
def test_owned_steps_are_the_same_bits_on_any_number_of_processes(world, tmp_path):
    compiled = world == 3  # which is deep
    owned_steps(0, 1, tmp_path, compiled)
    one = load(tmp_path / "1.0")
    assert len(one) == len(OWNED)
    processes(world, owned_steps, tmp_path, compiled)
    for rank in range(world):
        found = load(tmp_path / f"{world}.{rank}")
        assert [case for case in one if different(found[case], one[case])] == [], rank


def adapter_steps(rank, world, folder):
    """Steps of classes that are not ours, and what they say about shards."""
    found = {}
    with joined(rank, world, folder / str(world)) as env:
        for name in ("torch.optim:NAdam", "support.foreign:Nested"):
            model = GPT(GPTConfig(**SIZE | SMALL))
            state = six_steps(model, make_optimizer(model, settings(optimizer=name)), "float32")
            found[name] = [model.state_dict(), state]
        if world > 1:
            model = GPT.empty(GPTConfig(**SIZE | SMALL))
            shard_model(model, 0, env, keep=False)
            refused = (
                "cannot update the shards of FSDP: set --parallel=ddp, or choose one of adamw, "
            )
            with pytest.raises(ValueError, match=refused):
                make_optimizer(model, settings(optimizer="torch.optim:NAdam"))
    torch.save(found, folder / f"{world}.{rank}")


def test_other_classes_step_alike_on_every_process_but_not_on_shards(tmp_path):
    adapter_steps(0, 1, tmp_path)
    processes(2, adapter_steps, tmp_path)
    one = load(tmp_path / "1.0")
    for rank in range(2):
        assert different(load(tmp_path / f"2.{rank}"), one) == [], rank


# ------------------------------------------------------------------------------------------- shards

STEPS = {  # a key of VARIANTS, layout, dtype of Muon's iteration
    "adamw": ("adamw", LARGER, "float32"),
    "cautious": ("adamw_cautious", SMALL, "float32"),
    "dampening": ("msgdw_dampening", LARGER, "float32"),
    "adam_mini": ("adam_mini", LARGER, "float32"),
    "muon": ("muon", LARGER, "float32"),
    "muon, bf16": ("muon_2026", SMALL, "bfloat16"),
    "muon, 2026": ("muon_2026", LARGER, "float32"),
    "muon, experts": ("muon_2026", EXPERTS, "float32"),
    "soap": ("soap", LARGER, "float32"),
    "soap, experts": ("soap", EXPERTS, "float32"),
    "lion": ("lion", SMALL, "float32"),  # the docs' example, which nothing else knows
}
WHOLE = ("momentum_buffer", "row_squares", "left", "right", "_basis")  # of whole matrices
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "/m", "left", "right", "_basis")


def sharded_steps(rank, world, folder, shard_sizes=(0,)):
    """Leaves full parameters and full optimizer state, and how much of the state is on this
    process."""
    found = {}
    with joined(rank, world, folder / str(world)) as env, registered(lion_source()):
        for (case, (name, layout, dtype)), shard_size in product(STEPS.items(), shard_sizes):
            model = GPT.empty(GPTConfig(**SIZE | dict(qk_norm=True) | layout))
            if world > 1:
                shard_model(model, shard_size, env, keep=False)
            model.to_empty(device="cpu").init_weights(1)
            config = settings(**VARIANTS.get(name, dict(optimizer=name)))
            state = six_steps(model, make_optimizer(model, config), dtype, zeros=True)
            sizes = {
                key: local_shard(t).numel()
                for key, t in tensors(state).items()
                if key.endswith(MOMENTS)
            }
            full = Saver(folder).copy({"model": model.state_dict(), "state": state})
            found[case, shard_size] = dict(full, held=sum(sizes.values()))
    torch.save(found, folder / f"{world}.rank{rank}")


WORLDS = [(2, (0,)), (3, (0,)), (4, (0, 2)), (7, (0,))]


@pytest.mark.parametrize("worlds", spread(WORLDS, [WORLDS[0]]))
def test_steps_on_shards(worlds, tmp_path):
    """Muon's and SOAP's are the same bits as on full matrices. The others are the same to rounding:
    they work entry by entry, or by Adam-mini's blocks, which shards divide, and a kernel rounds the
    last few entries of a tensor differently."""
    world, shard_sizes = worlds
    sharded_steps(0, 1, tmp_path)
    processes(world, sharded_steps, tmp_path, shard_sizes)
    one = torch.load(tmp_path / "1.rank0")
    for rank in range(world):
        for (case, shard_size), got in torch.load(tmp_path / f"{world}.rank{rank}").items():
            expected = one[case, 0]
            for part in ("model", "state"):
                a = tensors(got[part])
                b = tensors(expected[part])
                assert_close(a, b, roundings(8))
                if case.startswith(("muon", "soap")):
                    exact = [key for key in a if ".f." in key and "router" not in key]
                    exact += [key for key in a if key.endswith(WHOLE)]
                    assert different([a[k] for k in exact], [b[k] for k in exact]) == [], case
            size = shard_size or world
            # rows of a stack are its 3 experts
            share = -(-3 // size) / 3 if "experts" in case else 1 / size
            assert 0 < got["held"] < 1.2 * share * expected["held"], (case, rank)
