"""Gradients of several processes are those of one: in DDP's buckets during the backward pass, or in
one message after it, and under FSDP. (What is sent: test_messages.py.)"""

import os
import signal
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layers.sharding import full_tensor
from model import GPT, GPTConfig
from nanodnt.engine import prepare_model, sync_gradients
from nanodnt.run import parallel
from nanodnt.run.compilation import compile_model
from nanodnt.run.environment import Env, Stop
from nanodnt.settings import TrainConfig
from nanodnt.weights import load_weights
from support.depth import spread
from support.models import error
from support.processes import assert_close, joined, processes
from support.runs import different, load
from support.tolerances import LOSS, roundings

DNT = dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True)
SIZE = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50)
ROWS = 6  # of each process in a step
MICRO = 2  # so there are three micro batches
CONFIG = TrainConfig(compile=True)


def make_model(flags) -> GPT:
    """Gains and biases are as after some training: a gain of 1 would round nothing."""
    model, random = GPT(GPTConfig(**SIZE | flags)), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.3 * torch.randn(p.shape, generator=random)
    return model


def rows_of(rank: int) -> tuple:
    tokens = torch.randint(50, (ROWS, 17), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_gradients(model, call, rows, micro: int, average=lambda: None) -> tuple:
    """(losses, gradients) of the rows, `micro` at a time, as training_step makes them."""
    model.zero_grad(set_to_none=True)
    batches, losses = list(zip(*(t.split(micro) for t in rows), strict=True)), []
    for i, batch in enumerate(batches):
        with sync_gradients(call, i == len(batches) - 1):
            losses.append(call(*batch)[1])
            (losses[-1] / len(batches)).backward()
    average()
    return torch.stack(losses).detach(), {
        name: full_tensor(p.grad).clone() for name, p in model.named_parameters()
    }


def alone(flags, world: int, micro: int, dtype=torch.float32) -> tuple:
    """({rank: losses}, gradients) of all processes' rows, made in one process."""
    model = prepare_model(make_model(flags), CONFIG, Env(0, 1, torch.device("cpu"), dtype, False))
    made = [make_gradients(model, model, rows_of(rank), micro) for rank in range(world)]
    sums = {name: sum(grads[name] for _, grads in made) / world for name in made[0][1]}
    return {rank: losses for rank, (losses, _) in enumerate(made)}, sums


class Note(TorchDispatchMode):
    """Notes every matrix product and every bucket of DDP."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.found.append("product")
        if name == "allreduce_":
            self.found.append("bucket")
        return func(*args, **kwargs or {})


# ---------------------------------------------------------------------------------------------- DDP


def ddp_compiled(rank, world, folder, backend):
    """Leaves what `ddp_steps` finds."""
    with joined(rank, world, folder / "ddp", parallel="ddp") as env:
        torch.save(ddp_steps(rank, env, backend), folder / f"{rank}")


def ddp_steps(rank, env, backend) -> dict:
    """As `place` in train.py does it, with small buckets: gradients, and in which order things
    happened."""
    found = {}
    model = prepare_model(make_model(DNT), CONFIG, env).set_runtime(kernels=("cross_entropy",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        patch.setattr(parallel, "BUCKET_MB", 0.02)
        compiled = compile_model(model, replace(CONFIG, compile="blocks"), rows_of(0), env)
        call = parallel.data_parallel(compiled, env)
    found["once"] = make_gradients(model, call, rows_of(rank), ROWS)
    model.zero_grad(set_to_none=True)
    loss = call(*rows_of(rank))[1]
    with Note() as note:  # after one step DDP has arranged its buckets
        loss.backward()
    found["order"] = note.found
    model.runtime.checkpointing = True
    found["recomputed"] = make_gradients(model, call, rows_of(rank), ROWS)
    return found


@pytest.mark.parametrize("backend", spread(("eager", "aot_eager"), ["eager"]))
def test_buckets_leave_during_the_backward_pass(backend, tmp_path):
    """If the model were one graph, all matrix products would come before the first bucket. (With
    aot_eager, which has a graph of the backward pass, as inductor has.)"""
    processes(2, ddp_compiled, tmp_path, backend)
    losses, expected = alone(DNT, 2, ROWS)
    for rank in range(2):
        found = load(tmp_path / f"{rank}")
        order = found["order"]
        products = order.count("product")
        assert products > 12 and order.count("bucket") > 2
        assert order[order.index("bucket") :].count("product") > products / 3
        for way in ("once", "recomputed"):
            assert error(found[way][0], losses[rank]) < LOSS
            assert_close(found[way][1], expected, SUMS)


LAYOUTS = {  # biases of choices get loads as gradients; each α of DyT is a vector of one entry
    "experts": DNT | dict(n_expert=3, n_expert_active=1, n_ff=24, mlp="swiglu", balance="bias"),
    "dyt": dict(norm="dyt", dyt_bias=True, n_layer=1),
}
SPLITS = list(product(LAYOUTS, (ROWS, MICRO)))


def ways_of_ddp(rank, world, folder):
    """Leaves, for each of SPLITS, the gradients that are averaged in one message, and in
    buckets."""
    found = {}
    with joined(rank, world, folder / "ddp", parallel="ddp") as env:
        for layout, micro in SPLITS:
            model = prepare_model(make_model(LAYOUTS[layout]), CONFIG, env)
            model.wte.weight.data += rank  # the first one's is taken
            average = parallel.averaging(model)
            message = make_gradients(model, model, rows_of(rank), micro, average)[1]
            model.wpe.weight.grad = None
            average()
            assert model.wpe.weight.grad is None
            wrapped = parallel.data_parallel(model, env)
            found[layout, micro] = message, make_gradients(model, wrapped, rows_of(rank), micro)[1]
    torch.save(found, folder / f"{rank}")


@pytest.mark.parametrize("world", spread((2, 3, 4), [2]))
def test_one_message_has_the_gradients_of_buckets(world, tmp_path):
    """Two processes get the same bits: the sum of two numbers has no order. However rows are split
    over micro batches and processes, gradients are those of one process."""
    processes(world, ways_of_ddp, tmp_path)
    found = [torch.load(tmp_path / f"{rank}", weights_only=False) for rank in range(world)]
    for layout, micro in SPLITS:
        message, buckets = found[0][layout, micro]
        assert_close(message, alone(LAYOUTS[layout], world, micro)[1], SUMS)
        assert world > 2 or different(message, buckets) == []
        assert all(different(its[layout, micro][0], message) == [] for its in found)


# --------------------------------------------------------------------------------------------- FSDP

PRE = dict(bias=True, norm="layernorm", gain="none")
HEAD = DNT | dict(tie_weights=False)
# layout, dtype, whether weights and gradients are kept during a step, whether each product is one
# process's
WAYS = {
    "fp32": (DNT, torch.float32, True, True),
    "fp32, head, by blocks": (HEAD, torch.float32, False, True),
    # where a gain is folded into a weight, the weight is rounded twice
    "bf16": (DNT, torch.bfloat16, True, False),
    "bf16, head": (HEAD, torch.bfloat16, True, False),
    "bf16, by blocks": (PRE, torch.bfloat16, False, True),  # no gain is folded
    # its weights are gathered in fp32
    "bf16, sigmaReparam": (dict(sigma_reparam=True), torch.bfloat16, True, True),
}
SUMS = roundings(40)  # of gradients: over processes and micro batches, in another order


def fsdp_steps(rank, world, folder):
    for way, (flags, dtype, keep, _) in WAYS.items():
        with joined(rank, world, folder / way, dtype, parallel="fsdp") as env:
            model = GPT.empty(GPTConfig(**SIZE | flags))
            parallel.shard_model(model, 0, env, keep)
            load_weights(model.to_empty(device="cpu"), make_model(flags).state_dict())
            prepare_model(model, CONFIG, env)
            torch.save(make_gradients(model, model, rows_of(rank), MICRO), folder / f"{way}.{rank}")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    processes(2, fsdp_steps, folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_gradients_under_fsdp(way, sharded):
    """In bf16 what is multiplied in bf16; gradients are fp32. Where each product is that of one
    process, so are they, but for the order of sums. Else their error is as large as that of one
    process that multiplies in bf16."""
    flags, dtype, _, same_products = WAYS[way]
    losses, expected = alone(flags, 2, MICRO, dtype)
    _, exact = alone(flags, 2, MICRO)
    for rank in range(2):
        found, gradients = torch.load(sharded / f"{way}.{rank}", weights_only=False)
        assert {grad.dtype for grad in gradients.values()} == {torch.float32}
        if same_products:
            assert error(found, losses[rank]) < LOSS
            assert_close(gradients, expected, SUMS)
        else:
            # a mean over 32 tokens
            assert error(found, losses[rank]) < roundings(1 / 2, torch.bfloat16)
            for name, right in exact.items():
                far, usual = ((grads[name] - right).norm() for grads in (gradients, expected))
                assert usual / 3 < far < 3 * usual, name


def hsdp_steps(rank, world, folder):
    """Two copies of a model, each over two processes."""
    with joined(rank, world, folder / "hsdp", parallel="fsdp") as env:
        model = GPT.empty(GPTConfig(**SIZE | DNT))
        parallel.shard_model(model, 2, env, keep=False)
        load_weights(model.to_empty(device="cpu"), make_model(DNT).state_dict())
        prepare_model(model, CONFIG, env)
        _, gradients = make_gradients(model, model, rows_of(rank), MICRO)
        stops = []
        with Stop() as stop:
            stop.nothing_to_lose = False
            for i in range(4):
                if rank == 1 and i == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                stops.append(stop.agreed(env))
        torch.save((gradients, stops), folder / f"{rank}")


def test_copies_of_a_model(tmp_path):
    """Their gradients are those of one process. A signal to one process ends all of them at the
    same step, the next."""
    processes(4, hsdp_steps, tmp_path)
    _, expected = alone(DNT, 4, MICRO)
    for rank in range(4):
        gradients, stops = torch.load(tmp_path / f"{rank}", weights_only=False)
        assert_close(gradients, expected, SUMS)
        assert stops == [False, False, True, True]
