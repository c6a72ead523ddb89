"""Mixtures of experts on several processes: the run of one process, under DDP, FSDP2 and HSDP.

Three experts do not divide over two processes, and of two experts three processes share two: one has none.
"""

import re
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from model import GPT, GPTConfig
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.run.checkpoints import snapshot
from nanodnt.run.environment import Env
from nanodnt.run.parallel import shard_model
from nanodnt.settings import TrainConfig
from support.examples import UNEVEN, write_examples
from support.processes import TOLERANCES, assert_close, assert_same_values, join_rows, left, meeting, play, processes
from support.runs import assert_same_run, column, deep_but, different, load, tensors
from support.tracked import assert_close_numbers, tracks

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = dict(n_expert=3, n_ff=16, mlp="swiglu", max_iters=7, lr_decay_iters=7, eval_interval=7, micro_batch_size=6)
BIAS = dict(balance="bias", balance_rate=0.01)
CASES = {
    "bias, adamw": dict(BIAS, n_expert_shared=1, router="sigmoid", track_interval=4),
    "loss, muon": dict(optimizer="muon", balance_coef=0.1, z_coef=0.01, micro_batch_size=3),
    "loss, msgdw": dict(optimizer="msgdw", learning_rate=0.5, z_coef=0.01, balance_coef=0.1),
    "bias, adam_mini": dict(BIAS, optimizer="adam_mini", bias=True, norm="layernorm"),
    "bias, muon, HG": dict(BIAS, optimizer="muon", gain="branch", gain_out="scale", mid_norm="none", pre_norm="both"),
    "two experts": dict(BIAS, n_expert=2, n_expert_active=1, router_norm=False, blockwise_lr=True, learning_rate=1e-3),
    "one expert": dict(n_expert=1, n_expert_active=1, mlp="gelu"),
    "recomputed": dict(BIAS, activation_checkpointing=True),
    "kept": BIAS,
    "none, no router_norm": dict(balance="none", router_norm=False, router_scale=2.0),
}
FAST = ["bias, adamw", "loss, muon"]
DEEP = [case for case in CASES if case not in FAST]
# A third of a whole number is rounded: a load that is even may move its bias on three processes. It is not even here.
ON_THREE = ["loss, muon", "bias, adamw", "two experts", "one expert"]
CHAIN = SHAPE | CASES["bias, adamw"] | dict(micro_batch_size=3, track_interval=0)
EXAMPLES = dict(SHAPE, block_size=32, doc_mask=True, eval_tokens=0, batch_size=12)
EXAMPLES |= dict(BIAS, z_coef=0.01)
LAUNCHES = dict(ddp=dict(), fsdp=dict(parallel="fsdp"))
BY_BLOCKS = ("nanodnt.start.choose_kept", lambda *_: (False, "by blocks, as asked by a test"))
SPOILT = ("support.processes.SPOILT", "blocks.1.mlp.f.experts.up.weight")
BAD = 5  # in this step of the run with a bad gradient


def play_cases(rank, world, folder, cases, launches, dataset):
    for case in cases:
        for launch, how in launches.items():
            flags = SHAPE | CASES[case] | how
            play(rank, world, folder / f"{case}, {launch}{world}", dataset=dataset, **flags)


def play_two(rank, world, folder, dataset):
    go = partial(play, rank, world, dataset=dataset)
    play_cases(rank, world, folder, FAST, LAUNCHES, dataset)
    for until, how in ((4, LAUNCHES["fsdp"]), (6, LAUNCHES["ddp"])):
        go(folder / "chain", init_from="auto", **CHAIN | how | dict(max_iters=until))
    bad = SHAPE | CASES["bias, adamw"] | dict(track_interval=0)
    go(folder / "bad, fsdp2", lambda step: rank == 1 and step == BAD, patches=[SPOILT], parallel="fsdp", **bad)


def play_two_more(rank, world, folder, dataset):
    play_cases(rank, world, folder, DEEP, LAUNCHES, dataset)
    for launch, how in LAUNCHES.items():
        play(rank, world, folder / f"examples, {launch}2", dataset=folder / "data", **EXAMPLES | how)
    go = partial(play, rank, world, dataset=dataset)
    blocks = SHAPE | CASES["bias, adamw"] | dict(parallel="fsdp", track_interval=0)
    go(folder / "by blocks", patches=[BY_BLOCKS], **blocks)
    go(folder / "stopped", stop_in=3, **blocks)
    go(folder / "stopped", init_from="resume", **blocks)
    go(folder / "smooth", **blocks)
    compile = (torch, "compile", partial(torch.compile, backend="aot_eager"))
    small = SHAPE | CASES["bias, adamw"] | dict(n_layer=1, max_iters=4, eval_interval=4, track_interval=0)
    go(folder / "eager", **small)
    go(folder / "compiled", patches=[compile], **small | dict(compile="blocks"))


@pytest.fixture(scope="module")
def single(dataset, tmp_path_factory):
    """A folder with runs on one process."""
    folder = tmp_path_factory.mktemp("experts")
    play_cases(0, 1, folder, FAST, dict(one={}), dataset)
    play(0, 1, folder / "chain", init_from="auto", dataset=dataset, **CHAIN | dict(max_iters=2))
    bad = SHAPE | CASES["bias, adamw"] | dict(track_interval=0)
    play(0, 1, folder / "bad, one1", lambda step: step == BAD, patches=[SPOILT], dataset=dataset, **bad)
    return folder


@pytest.fixture(scope="module")
def pair(single, dataset):
    processes(2, play_two, single, dataset)
    return single


@pytest.fixture(scope="module")
def more(single, dataset):
    play_cases(0, 1, single, DEEP, dict(one={}), dataset)
    write_examples(single / "data", **UNEVEN)
    play(0, 1, single / "examples, one1", dataset=single / "data", **EXAMPLES)
    processes(2, play_two_more, single, dataset)
    return single


@pytest.fixture(scope="module")
def many(more, dataset):
    """The same folder with runs on three and on four processes."""
    small = {launch: how | dict(micro_batch_size=2) for launch, how in LAUNCHES.items()}
    processes(3, play_cases, more, ON_THREE, small, dataset)
    hsdp = dict(hsdp=dict(parallel="fsdp", fsdp_shard_size=2, micro_batch_size=1))
    processes(4, play_cases, more, ON_THREE, hsdp, dataset)
    return more


# --------------------------------------------------------------------------------------------- as on one process


def biases(checkpoint: dict) -> dict:
    return {name: t for name, t in checkpoint["model"].items() if name.endswith("choice_bias")}


def assert_same_end(got, expected, start):
    """Two checkpoints: parameters next to how far they have come, and optimizer state to rounding; biases of choices
    to the bit."""
    assert different({0: biases(got)}, {0: biases(expected)}) == [] if biases(expected) else not biases(got)
    assert_close(got["model"], expected["model"], 5e-4, start)
    assert_close(*(tensors(c["optimizer"]["state"]) for c in (got, expected)), 1e-3)


def assert_same_case(folder, case, launch, world):
    got, expected = folder / f"{case}, {launch}{world}", folder / f"{case}, one1"
    assert_same_values(got, expected)
    assert_close_numbers(tracks(got), tracks(expected), rel=2e-3)
    parts, (one,) = left(got, world), left(expected, 1)
    a, b = load(got / "last.pt"), load(expected / "last.pt")
    assert_same_end(a, b, one["start"])
    moved = biases(b)
    assert not moved or any(t.any() for t in moved.values())
    if launch == "ddp":
        assert all(different(part["end"], a["model"]) == [] for part in parts)
    if launch == "fsdp":
        assert different(join_rows([part["start"] for part in parts]), one["start"]) == []
        assert different(join_rows([part["end"] for part in parts]), a["model"]) == []
    return parts, one


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", FAST)
def test_two_processes(case, launch, pair):
    assert_same_case(pair, case, launch, 2)


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", DEEP)
def test_two_processes_further(case, launch, more):
    assert_same_case(more, case, launch, 2)


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", ON_THREE)
def test_three_processes(case, launch, many):
    assert_same_case(many, case, launch, 3)


@pytest.mark.deep
@pytest.mark.parametrize("case", ON_THREE)
def test_two_copies_on_four_processes(case, many):
    assert_same_case(many, case, "hsdp", 4)


def held(folder, case, world) -> list:
    """The number of experts that each process holds under FSDP2."""
    return [
        len(part["end"]["blocks.0.mlp.f.experts.up.weight"]) for part in left(folder / f"{case}, fsdp{world}", world)
    ]


def note(folder, case, world) -> list:
    output = left(folder / f"{case}, fsdp{world}", world)[0]["output"]
    return re.findall(r"note: (\d+ experts do not divide evenly over .*)", output)


def test_experts_that_do_not_divide_are_noted(pair):
    assert held(pair, "bias, adamw", 2) == [2, 1]
    assert note(pair, "bias, adamw", 2) == [
        "3 experts do not divide evenly over 2 processes: some hold 2, others fewer or none; with n_expert a multiple "
        "of 2 all hold the same"
    ]
    assert "experts do not divide" not in left(pair / "bias, adamw, ddp2", 2)[0]["output"]


@pytest.mark.deep
def test_processes_without_an_expert(many):
    assert held(many, "two experts", 3) == [1, 1, 0] and len(note(many, "two experts", 3)) == 1
    assert held(many, "one expert", 3) == [1, 0, 0]
    assert held(many, "bias, adamw", 3) == [1, 1, 1] and note(many, "bias, adamw", 3) == []


# ------------------------------------------------------------------------------------- skipped, stopped, resumed


def test_a_bad_gradient_leaves_all_as_it_was(pair):
    """Biases of choices too, though their own numbers are finite."""
    got, expected = pair / "bad, fsdp2", pair / "bad, one1"
    assert [part["frozen"] for part in [*left(got, 2), *left(expected, 1)]] == [[BAD]] * 3
    assert column(got, "skipped_steps")[7] == 1
    assert_same_values(got, expected)
    assert different(biases(load(got / "last.pt")), biases(load(expected / "last.pt"))) == []


def test_saved_in_one_launch_and_resumed_in_another(pair, dataset):
    """Two steps on one process, two under FSDP2 on two, two under DDP on two, the rest on one."""
    out, smooth = pair / "chain", pair / "bias, adamw, one1"
    assert load(out / "last.pt")["step"] == 6
    play(0, 1, out, init_from="auto", dataset=dataset, **CHAIN)
    for field in ("train_loss", "grad_norm"):
        assert column(out, field) == pytest.approx(column(smooth, field), rel=TOLERANCES[field], abs=0)
    assert_same_end(load(out / "last.pt"), load(smooth / "last.pt"), left(smooth, 1)[0]["start"])


@pytest.mark.deep
def test_stopped_and_resumed(more):
    """One of two processes gets SIGTERM, and the run goes on exactly."""
    left(more / "stopped", 2)
    assert_same_run(more / "stopped", more / "smooth")


@pytest.mark.deep
def test_gathered_by_blocks_in_every_micro_batch(more):
    """As FSDP2 does where memory is short."""
    got, expected = more / "by blocks", more / "smooth"
    assert_same_values(got, expected)
    assert_same_end(load(got / "last.pt"), load(expected / "last.pt"), left(more / "bias, adamw, one1", 1)[0]["start"])


# ----------------------------------------------------------------------------------------------- further settings


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
def test_examples_and_documents(launch, more):
    """Processes have other numbers of targets that count."""
    got, expected = more / f"examples, {launch}2", more / "examples, one1"
    assert "with a mask of documents" in left(got, 2)[0]["output"]
    assert_same_values(got, expected)
    assert different(biases(load(got / "last.pt")), biases(load(expected / "last.pt"))) == []


@pytest.mark.deep
def test_activation_checkpointing_changes_no_bit(more):
    for launch in ("one1", "ddp2", "fsdp2"):
        a, b = (load(more / f"{case}, {launch}" / "last.pt") for case in ("recomputed", "kept"))
        assert different(a["model"], b["model"]) == []


@pytest.mark.deep
def test_compiled_blocks_under_ddp(more):
    got, expected = more / "compiled", more / "eager"
    assert "compile True" in left(got, 2)[0]["output"]
    assert_same_values(got, expected)
    assert different(biases(load(got / "last.pt")), biases(load(expected / "last.pt"))) == []


# ------------------------------------------------------------------------------------------------- Muon's stacks


def muon_steps(rank, world, folder, experts, dtype):
    """Four steps of Muon from gradients that are the same everywhere; leaves full parameters and momenta in a file."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting(rank, world, folder / f"{world}"))
    model = GPT.empty(GPTConfig(1, 2, 32, 8, 31, mlp="swiglu", n_ff=48, n_expert=experts, n_expert_active=1))
    if world > 1:
        shard_model(model, 0, Env(rank, world, torch.device("cpu"), torch.float32, True), keep=False)
    model.to_empty(device="cpu").init_weights(1)
    model.set_runtime(compute_dtype=getattr(torch, dtype))
    fill_defaults(config := TrainConfig(optimizer="muon"))
    optimizer, random = make_optimizer(model, config), torch.Generator().manual_seed(0)
    for step in range(4):
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=random)
            if step == 1:  # some experts see no token
                grad[len(grad) // 2 :] = 0
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if world > 1 else grad
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.found_inf = torch.tensor(float(step == 2))
        optimizer.step()
    stacks = {name: p for name, p in model.named_parameters() if ".experts." in name}
    found = {"stacks": stacks, "momenta": {name: optimizer.state[p]["momentum_buffer"] for name, p in stacks.items()}}
    torch.save(snapshot(found), folder / f"{world}.rank{rank}")
    if world > 1:
        dist.destroy_process_group()


MUON = [(2, 3, "float32"), (2, 4, "bfloat16"), (3, 2, "float32"), (3, 4, "bfloat16")]


@pytest.mark.parametrize("case", deep_but(MUON, MUON[0]))
def test_muons_steps_of_stacks_are_the_same_bits_on_shards(case, tmp_path):
    """An expert is orthogonalised where it lies; a process may have none."""
    world, experts, dtype = case
    muon_steps(0, 1, tmp_path, experts, dtype)
    processes(world, muon_steps, tmp_path, experts, dtype)
    one = load(tmp_path / "1.rank0")
    assert len(tensors(one)) == 6
    for rank in range(world):
        assert different(load(tmp_path / f"{world}.rank{rank}"), one) == []
