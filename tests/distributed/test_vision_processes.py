"""Runs on images on several processes: the run of one process, under DDP, FSDP2 and HSDP.

An image and the one that it is mixed with may lie on different processes, and 47 validation images divide over none.
"""

from functools import partial

import pytest
import torch

from support.processes import assert_close, assert_same_values, join_rows, left, play, processes
from support.runs import assert_same_run, column, different, load, metrics, tensors
from support.tracked import assert_close_numbers, tracks
from support.vision import AUGMENTED, TINY, make_digits

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = TINY | AUGMENTED | dict(max_iters=6, lr_decay_iters=6, eval_interval=3, batch_size=12, micro_batch_size=3)
PRE = dict(pre_norm="both", mid_norm="none", input_norm=False)
CASES = {  # all with QK-norm: without it a bias of keys is moved by rounding alone
    "adamw": dict(track_interval=4),
    "muon, mean": dict(optimizer="muon", pool="mean", learning_rate=1e-2, crop_area=1.0, crop_padding=2),
    "adam_mini, DyT": dict(PRE, norm="dyt", dyt_bias=True, optimizer="adam_mini", blockwise_lr=True),
    "msgdw, experts": dict(optimizer="msgdw", learning_rate=0.1, n_expert=3, n_ff=16, mlp="swiglu", balance="bias"),
    "recomputed": dict(PRE, branch_scale="layerscale", activation_checkpointing=True, data_workers=1),
    "LNS, LayerNorm": dict(PRE, norm="layernorm", lns="norm", cutmix=0),
}
CASES["adam_mini, DyT"] |= dict(learning_rate=1e-3)
FAST = ["adamw"]
DEEP = [case for case in CASES if case not in FAST]
LAUNCHES = dict(ddp=dict(), fsdp=dict(parallel="fsdp"))
RANDOM = SHAPE | dict(drop_path=0.4, dropout=0.1)  # drawn anew by each process: not the run of one
ODD = dict(batch_size=9, micro_batch_size=3)  # each of three processes has an image whose neighbour is elsewhere


def play_cases(rank, world, folder, cases, launches, **changes):
    for case in cases:
        for launch, how in launches.items():
            out = folder / f"{case}, {launch}{world}"
            play(rank, world, out, dataset=folder / "digits", **SHAPE | CASES[case] | how | changes)


def play_two(rank, world, folder):
    play_cases(rank, world, folder, FAST, LAUNCHES)


def play_two_more(rank, world, folder):
    play_cases(rank, world, folder, DEEP, LAUNCHES)
    go = partial(play, rank, world, dataset=folder / "digits")
    for launch, how in LAUNCHES.items():
        go(folder / f"whole, {launch}", **RANDOM | how)
        go(folder / f"halves, {launch}", stop_in=3, **RANDOM | how)
        go(folder / f"halves, {launch}", init_from="resume", **RANDOM | how)
    # one process has begun this run; FSDP2 and DDP go on with it, one after the other
    chain = SHAPE | CASES["adamw"] | dict(init_from="auto", eval_interval=2, track_interval=0)
    for until, how in ((4, LAUNCHES["fsdp"]), (6, LAUNCHES["ddp"])):
        go(folder / "chain", **chain | how | dict(max_iters=until))
    compile = (torch, "compile", partial(torch.compile, backend="aot_eager"))
    small = SHAPE | dict(n_layer=1, max_iters=3)
    go(folder / "eager", **small)
    go(folder / "compiled", patches=[compile], **small | dict(compile="blocks"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with digits, and runs on one process."""
    folder = tmp_path_factory.mktemp("images")
    make_digits(folder / "digits", train=100, val=47)
    play_cases(0, 1, folder, FAST, dict(one={}))
    return folder


@pytest.fixture(scope="module")
def pair(single):
    processes(2, play_two, single)
    return single


@pytest.fixture(scope="module")
def more(single):
    play_cases(0, 1, single, DEEP, dict(one={}))
    chain = SHAPE | CASES["adamw"] | dict(init_from="auto", eval_interval=2, track_interval=0, max_iters=2)
    play(0, 1, single / "chain", dataset=single / "digits", **chain)
    play(0, 1, single / "smooth", dataset=single / "digits", **chain | dict(max_iters=6))
    processes(2, play_two_more, single)
    return single


@pytest.fixture(scope="module")
def many(more):
    """The same folder with runs on three and on four processes."""
    play_cases(0, 1, more, ["muon, mean"], dict(odd={}), **ODD)
    processes(3, partial(play_cases, **ODD), more, ["muon, mean"], LAUNCHES)
    hsdp = dict(hsdp=dict(parallel="fsdp", fsdp_shard_size=2, micro_batch_size=1))
    processes(4, play_cases, more, ["adamw", "msgdw, experts"], hsdp)
    return more


def assert_same_case(folder, case, launch, world, one="one"):
    got, expected = folder / f"{case}, {launch}{world}", folder / f"{case}, {one}1"
    assert_same_values(got, expected)
    for name in ("val_top1", "val_top5"):  # shares of 47 images, each of which is counted once
        assert column(got, name) == column(expected, name)
        assert all(47 * x == pytest.approx(round(47 * x)) for x in column(got, name).values())
    assert_close_numbers(tracks(got), tracks(expected), rel=2e-3)
    parts, (alone,) = left(got, world), left(expected, 1)
    a, b = load(got / "last.pt"), load(expected / "last.pt")
    assert_close(a["model"], b["model"], 5e-4, alone["start"])
    assert_close(*(tensors(c["optimizer"]["state"]) for c in (a, b)), 1e-3)
    if launch == "ddp":
        assert all(different(part["end"], a["model"]) == [] for part in parts)
    if launch == "fsdp":
        assert different(join_rows([part["start"] for part in parts]), alone["start"]) == []
        assert different(join_rows([part["end"] for part in parts]), a["model"]) == []


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", FAST)
def test_two_processes(case, launch, pair):
    assert_same_case(pair, case, launch, 2)


def test_what_fsdp_shards(pair):
    """Patches, class token, positions and head too."""
    part = left(pair / "adamw, fsdp2", 2)[0]
    assert {"patch.weight", "cls.weight", "wpe.weight", "head.weight"} <= part["sharded"]
    assert len(part["start"]["patch.weight"]) == 16 and len(part["start"]["wpe.weight"]) == 9


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", DEEP)
def test_two_processes_further(case, launch, more):
    assert_same_case(more, case, launch, 2)


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
def test_mixed_with_a_neighbour_on_another_of_three_processes(launch, many):
    assert_same_case(many, "muon, mean", launch, 3, "odd")


@pytest.mark.deep
@pytest.mark.parametrize("case", ("adamw", "msgdw, experts"))
def test_two_copies_on_four_processes(case, many):
    assert_same_case(many, case, "hsdp", 4)


@pytest.mark.deep
@pytest.mark.parametrize("launch", LAUNCHES)
def test_two_processes_go_on_exactly(launch, more):
    """With dropout and stochastic depth; stopped by SIGTERM to one of them, and resumed."""
    whole, halves = more / f"whole, {launch}", more / f"halves, {launch}"
    assert load(halves / "last.pt")["step"] == 6 and len(metrics(halves)) == 7
    assert_same_run(halves, whole)


@pytest.mark.deep
def test_a_run_goes_on_under_other_launches(more):
    left(more / "chain", 2)
    assert_same_values(more / "chain", more / "smooth")


@pytest.mark.deep
def test_compiled_by_blocks(more):
    assert "compiling each block and the loss by themselves" in left(more / "compiled", 2)[0]["output"]
    assert_same_values(more / "compiled", more / "eager")
