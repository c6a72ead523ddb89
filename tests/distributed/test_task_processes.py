"""Every task on several processes: the run of one process, under DDP, FSDP2 and HSDP; stopped, resumed, compiled.

Three experts do not divide over two processes, and of two experts three processes share two: one has none. Examples
give each process another number of targets that count. An image and the one that it is mixed with may lie on different
processes, and 47 validation images divide over none.
"""

import re
from datetime import timedelta
from functools import partial

import numpy as np
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
from support.prepared import open_prepared
from support.processes import TOLERANCES, assert_close, assert_same_values, join_rows, left, meeting, play, processes
from support.runs import assert_same_run, column, deep_but, different, load, tensors
from support.tasks import BIAS, PRE, TASKS, write_all
from support.tracked import assert_close_numbers, tracks
from support.vision import AUGMENTED

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = dict(max_iters=6, lr_decay_iters=6, eval_interval=3, batch_size=12, micro_batch_size=3)
RANDOM = dict(AUGMENTED, drop_path=0.4, dropout=0.1)  # drawn anew by each process: not the run of one
DYT = dict(PRE, norm="dyt", dyt_bias=True, optimizer="adam_mini", blockwise_lr=True, learning_rate=1e-3)
HG = dict(BIAS, optimizer="muon", gain="branch", gain_out="scale", mid_norm="none", pre_norm="both")
ONE_OF_TWO = dict(BIAS, n_expert=2, n_expert_active=1, router_norm=False, blockwise_lr=True, learning_rate=1e-3)
MSGDW = dict(optimizer="msgdw", learning_rate=0.5, z_coef=0.01, balance_coef=0.1)
SMOOTHED = dict(PRE, branch_scale="layerscale", activation_checkpointing=True, data_workers=1)
# name: (task, flags). Images have QK-norm: without it a bias of keys is moved by rounding alone.
CASES = {
    "experts": ("experts", dict(BIAS, n_expert=3, n_expert_shared=1, router="sigmoid", track_interval=4)),
    "experts, muon": ("experts", dict(n_expert=3, optimizer="muon", balance_coef=0.1, z_coef=0.01)),
    "examples": ("examples", dict(micro_batch_size=2, track_interval=3)),
    "images": ("images", dict(AUGMENTED, track_interval=3)),
    "experts, msgdw": ("experts", dict(MSGDW, n_expert=3)),
    "experts, adam_mini": ("experts", dict(BIAS, n_expert=3, optimizer="adam_mini", bias=True, norm="layernorm")),
    "experts, muon, HG": ("experts", dict(HG, n_expert=3)),
    "two experts": ("experts", ONE_OF_TWO),
    "one expert": ("experts", dict(n_expert=1, n_expert_active=1, mlp="gelu")),
    "experts, recomputed": ("experts", dict(BIAS, n_expert=3, activation_checkpointing=True)),
    "experts, kept": ("experts", dict(BIAS, n_expert=3)),
    "experts, no router_norm": ("experts", dict(n_expert=3, balance="none", router_norm=False, router_scale=2.0)),
    "experts on examples": ("examples", TASKS["experts"].flags | dict(BIAS, n_expert=3, z_coef=0.01)),
    "examples, whole rows": ("examples", dict(doc_mask=False)),
    "examples, recomputed": ("examples", dict(activation_checkpointing=True)),
    "documents": ("documents", dict(micro_batch_size=2, track_interval=3)),
    "images, muon": ("images", dict(AUGMENTED, optimizer="muon", pool="mean", learning_rate=1e-2)),
    "images, adam_mini, DyT": ("images", AUGMENTED | DYT),
    "images, experts": ("images", dict(AUGMENTED, optimizer="msgdw", learning_rate=0.1, n_expert=3, n_ff=16)),
    "images, recomputed": ("images", AUGMENTED | SMOOTHED),
    "images, LNS": ("images", dict(AUGMENTED, **PRE, norm="layernorm", lns="norm", cutmix=0)),
    "images, odd": (
        "images",
        dict(AUGMENTED, batch_size=9),
    ),  # on three, each has an image whose neighbour is elsewhere
}
CASES["images, muon"][1].update(crop_area=1.0, crop_padding=2)
CASES["images, experts"][1].update(mlp="swiglu", balance="bias")
CASES["two experts"][1].update(max_iters=7)  # biases go up and down: after 6 steps they are where they began
FAST = ["experts", "experts, muon", "examples", "images"]
DEEP = [case for case in CASES if case not in (*FAST, "images, odd")]
# A third of a whole number is rounded: a load that is even may move its bias on three processes. It is not even here.
ON_THREE = ["experts", "experts, muon", "two experts", "one expert", "examples", "documents", "images, odd"]
ON_FOUR = ["experts", "two experts", "one expert", "examples", "documents", "images", "images, experts"]
LAUNCHES = dict(ddp=dict(), fsdp=dict(parallel="fsdp"))
CHAINS = {case: dict(eval_interval=2, track_interval=0) for case in ("experts", "examples", "images")}
# runs that go on exactly under each launch
STOPPED = {"experts": dict(track_interval=0), "images": RANDOM | dict(track_interval=0)}
COMPILED = {"experts": dict(n_layer=1, track_interval=0), "images": dict(n_layer=1, track_interval=0)}
BY_BLOCKS = ("nanodnt.run.parallel.choose_kept", lambda *_: (False, "by blocks, as asked by a test"))
SPOILT = ("support.processes.SPOILT", "blocks.1.mlp.f.experts.up.weight")
BAD = 5  # in this step of the run with a bad gradient


def go(rank, world, folder, case, name, *args, **changes):
    """The run of a case on this process, one of `world`, in folder/NAME."""
    task, flags = CASES[case]
    patches = changes.pop("patches", ())
    config = TASKS[task].flags | SHORT | flags | dict(dataset=folder / "data" / task) | changes
    play(rank, world, folder / name, *args, patches=patches, **config)


def play_cases(rank, world, folder, cases, launches):
    for case in cases:
        for launch, how in launches.items():
            go(rank, world, folder, case, f"{case}, {launch}{world}", **how)


def go_on(rank, world, folder, chains, until, **how):
    for case in chains:
        go(rank, world, folder, case, f"{case}, chain", init_from="auto", max_iters=until, **CHAINS[case] | how)


def on_one(folder):
    play_cases(0, 1, folder, FAST, dict(one={}))
    go_on(0, 1, folder, ["experts"], 2)
    go(0, 1, folder, "experts", "bad, one1", lambda step: step == BAD, patches=[SPOILT], track_interval=0)


def on_two(rank, world, folder):
    play_cases(rank, world, folder, FAST, LAUNCHES)
    go_on(rank, world, folder, ["experts"], 4, parallel="fsdp")
    go_on(rank, world, folder, ["experts"], 5)
    bad = dict(patches=[SPOILT], parallel="fsdp", track_interval=0)
    go(rank, world, folder, "experts", "bad, fsdp2", lambda step: rank == 1 and step == BAD, **bad)


def on_one_more(folder):
    play_cases(0, 1, folder, [*DEEP, "images, odd"], dict(one={}))
    go_on(0, 1, folder, ["examples", "images"], 2)


def on_two_more(rank, world, folder):
    play_cases(rank, world, folder, DEEP, LAUNCHES)
    go_on(rank, world, folder, ["examples", "images"], 4, parallel="fsdp")
    go_on(rank, world, folder, ["examples", "images"], 5)
    start = partial(go, rank, world, folder)
    for launch, how in LAUNCHES.items():
        for case, flags in STOPPED.items():
            start(case, f"{case}, whole, {launch}", **flags | how)
            start(case, f"{case}, halves, {launch}", stop_in=3, **flags | how)
            start(case, f"{case}, halves, {launch}", init_from="resume", **flags | how)
    compile = (torch, "compile", partial(torch.compile, backend="aot_eager"))
    for case, flags in COMPILED.items():
        start(case, f"{case}, eager", **flags)
        start(case, f"{case}, compiled", patches=[compile], compile="blocks", **flags)
    start("experts", "by blocks", patches=[BY_BLOCKS], parallel="fsdp", track_interval=0)
    start("examples", "eval_only", init_from=folder / "examples, one1" / "last.pt", eval_only=True, parallel="fsdp")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with the datasets, and with runs on one process."""
    folder = tmp_path_factory.mktemp("tasks")
    write_all(folder / "data")
    on_one(folder)
    return folder


@pytest.fixture(scope="module")
def pair(single):
    processes(2, on_two, single)
    return single


@pytest.fixture(scope="module")
def more(pair):
    """The same folder with the runs of the deep suite, on one process and on two."""
    on_one_more(pair)
    processes(2, on_two_more, pair)
    return pair


@pytest.fixture(scope="module")
def many(more):
    """The same folder with runs on three and on four processes."""
    small = {launch: how | dict(micro_batch_size=1) for launch, how in LAUNCHES.items()}
    processes(3, play_cases, more, ON_THREE, small)
    hsdp = dict(hsdp=dict(parallel="fsdp", fsdp_shard_size=2, micro_batch_size=1))
    processes(4, play_cases, more, ON_FOUR, hsdp)
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
    assert len(column(got, "train_loss")) >= 6 and [*column(got, "val_loss")][:3] == [0, 3, 6]
    for name in ("val_top1", "val_top5"):  # shares of 47 images, each of which is counted once
        assert column(got, name) == column(expected, name)
        assert all(47 * x == pytest.approx(round(47 * x)) for x in column(got, name).values())
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
@pytest.mark.parametrize("case", ON_FOUR)
def test_two_copies_on_four_processes(case, many):
    assert_same_case(many, case, "hsdp", 4)


def held(folder, case, world) -> list:
    """The number of experts that each process holds under FSDP2."""
    parts = left(folder / f"{case}, fsdp{world}", world)
    return [len(part["end"]["blocks.0.mlp.f.experts.up.weight"]) for part in parts]


def note(folder, case, world) -> list:
    output = left(folder / f"{case}, fsdp{world}", world)[0]["output"]
    return re.findall(r"note: (\d+ experts do not divide evenly over .*)", output)


def test_experts_that_do_not_divide_are_noted(pair):
    assert held(pair, "experts", 2) == [2, 1]
    assert note(pair, "experts", 2) == [
        "3 experts do not divide evenly over 2 processes: some hold 2, others fewer or none; with n_expert a multiple "
        "of 2 all hold the same"
    ]
    assert "experts do not divide" not in left(pair / "experts, ddp2", 2)[0]["output"]


@pytest.mark.deep
def test_processes_without_an_expert(many):
    assert held(many, "two experts", 3) == [1, 1, 0] and len(note(many, "two experts", 3)) == 1
    assert held(many, "one expert", 3) == [1, 0, 0]
    assert held(many, "experts", 3) == [1, 1, 1] and note(many, "experts", 3) == []


def test_what_fsdp_shards_of_images(pair):
    """Patches, class token, positions and head too."""
    part = left(pair / "images, fsdp2", 2)[0]
    assert {"patch.weight", "cls.weight", "wpe.weight", "head.weight"} <= part["sharded"]
    assert len(part["start"]["patch.weight"]) == 16 and len(part["start"]["wpe.weight"]) == 9


def test_processes_have_other_numbers_of_targets(pair):
    """So that a mean of their means would be another number. Of a text they have other numbers of validation rows."""
    assert "with a mask of documents" in left(pair / "examples, ddp2", 2)[0]["output"]
    data = open_prepared(pair / "data" / "examples", 32)
    counts = np.array([(data.batch(step, 12)[1] != -1).reshape(2, -1).sum(1) for step in range(8)])
    assert (counts.max(1) > 1.25 * counts.min(1)).sum() >= 3
    assert counts.sum(1).tolist() == [data.loss_tokens(step, 12) for step in range(8)]
    assert open_prepared(pair / "data" / "documents", 32).n_val % 2


@pytest.mark.deep
def test_a_mask_of_documents_changes_the_run(more):
    assert column(more / "examples, whole rows, one1", "train_loss") != column(more / "examples, one1", "train_loss")


# ------------------------------------------------------------------------------------- skipped, stopped, resumed


def test_a_bad_gradient_leaves_all_as_it_was(pair):
    """Biases of choices too, though their own numbers are finite."""
    got, expected = pair / "bad, fsdp2", pair / "bad, one1"
    assert [part["frozen"] for part in [*left(got, 2), *left(expected, 1)]] == [[BAD]] * 3
    assert column(got, "skipped_steps")[6] == 1
    assert_same_values(got, expected)
    assert different(biases(load(got / "last.pt")), biases(load(expected / "last.pt"))) == []


def check_chain(folder, case):
    """Begun on one process, two steps under FSDP2 on two, one under DDP on two, the rest on one."""
    out, smooth = folder / f"{case}, chain", folder / f"{case}, one1"
    assert load(out / "last.pt")["step"] == 5
    go_on(0, 1, folder, [case], 6)
    for field in ("train_loss", "grad_norm"):
        assert column(out, field) == pytest.approx(column(smooth, field), rel=TOLERANCES[field], abs=0)
    assert_same_end(load(out / "last.pt"), load(smooth / "last.pt"), left(smooth, 1)[0]["start"])


def test_saved_in_one_launch_and_resumed_in_another(pair):
    check_chain(pair, "experts")


@pytest.mark.deep
@pytest.mark.parametrize("case", ("examples", "images"))
def test_saved_in_one_launch_and_resumed_in_another_further(case, more):
    check_chain(more, case)


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", STOPPED)
def test_stopped_and_resumed(case, launch, more):
    """One of two processes gets SIGTERM, and the run goes on exactly, with dropout and stochastic depth."""
    left(more / f"{case}, halves, {launch}", 2)
    assert_same_run(more / f"{case}, halves, {launch}", more / f"{case}, whole, {launch}")


@pytest.mark.deep
def test_evaluation_alone(more):
    output = left(more / "eval_only", 2)[0]["output"]
    loss = float(re.search(r"step 0: validation loss ([\d.]+)", output)[1])
    assert loss == pytest.approx(column(more / "examples, one1", "val_loss")[6], rel=2e-6)


@pytest.mark.deep
def test_gathered_by_blocks_in_every_micro_batch(more):
    """As FSDP2 does where memory is short."""
    assert_same_values(more / "by blocks", more / "experts, one1")
    ends = (load(more / name / "last.pt") for name in ("by blocks", "experts, one1"))
    assert_same_end(*ends, left(more / "experts, one1", 1)[0]["start"])


@pytest.mark.deep
def test_activation_checkpointing_changes_no_bit(more):
    for launch in ("one1", "ddp2", "fsdp2"):
        a, b = (load(more / f"experts, {case}, {launch}" / "last.pt") for case in ("recomputed", "kept"))
        assert different(a["model"], b["model"]) == []


@pytest.mark.deep
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_blocks_under_ddp(case, more):
    got, expected = more / f"{case}, compiled", more / f"{case}, eager"
    assert "compiling each block and the loss by themselves" in left(got, 2)[0]["output"]
    assert_same_values(got, expected)
    ends = [biases(load(out / "last.pt")) for out in (got, expected)]
    assert ends == [{}, {}] or different(*ends) == []


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
