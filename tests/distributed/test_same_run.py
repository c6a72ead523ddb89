"""DDP and FSDP2 on two to four processes train what one process trains, and checkpoints go from any
launch to any."""

import re
from itertools import product

import pytest
import torch

import sample
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.weights import model_from_checkpoint
from support.models import error, off_unit
from support.parallel_runs import (
    CHAINS,
    DEEP,
    FAST,
    LONG_CHAINS,
    ON_FOUR,
    ON_THREE,
    SIGMA,
    make_chains,
)
from support.processes import (
    BAD,
    ENDS,
    NORMS,
    STEPS,
    TOLERANCES,
    assert_close,
    assert_same_values,
    join_rows,
    left,
)
from support.runs import assert_same_run, call, column, different, load, tensors
from support.tolerances import GRADIENTS, LOSS, roundings
from support.tracked import assert_close_numbers


def divided_out(case: str, name: str) -> bool:
    """Whether a later norm divides this parameter out. Then its gradient is nothing but rounding
    errors."""
    return "unified" in case and name.endswith(("pre.magnitude", ".sigma"))


def biases(checkpoint: dict) -> list:
    return [t for name, t in checkpoint["model"].items() if name.endswith("choice_bias")]


def assert_same_ends(case, got, expected, start):
    """Two checkpoints: parameters, next to how far they have come; buffers; optimizer state; biases
    of choices to the bit."""
    pairs = [({}, {}), ({}, {})]
    names = [
        name for group in expected["optimizer"]["param_groups"] for name in group["param_names"]
    ]
    for checkpoint, (moved, state) in zip((got, expected), pairs, strict=True):
        moved |= {name: checkpoint["model"][name] for name in names if not divided_out(case, name)}
        all_state = checkpoint["optimizer"]["state"]
        held = {
            name: all_state[i]
            for i, name in enumerate(names)
            if i in all_state and not divided_out(case, name)
        }
        state |= tensors(held)
    assert_close(pairs[0][0], pairs[1][0], ENDS, start)
    assert_close(pairs[0][1], pairs[1][1], ENDS)
    buffers = [
        {name: t for name, t in c["model"].items() if name not in names} for c in (got, expected)
    ]
    assert_close(*buffers, ENDS)
    assert all(map(torch.equal, biases(got), biases(expected)))


def assert_rows(parts, single, saved, world):
    """Each process starts and ends with its rows of the full parameters alone; of a stack whose
    matrices do not divide evenly, with rows of each."""
    assert different(join_rows(parts, "start"), single["start"]) == []
    for end in ("start", "end"):
        for name, p in single["start"].items():
            dim = 1 if p.ndim == 3 and len(p) % world and not p.shape[1] % world else 0
            n, size = p.shape[dim], -(-p.shape[dim] // world)
            rows = [min(n, (rank + 1) * size) - min(n, rank * size) for rank in range(world)]
            assert [part[end][name].shape[dim] for part in parts] == rows and parts[0]["dims"][
                name
            ] == dim, name
    ended = join_rows(parts, "end")
    assert different(ended, {name: saved["model"][name] for name in ended}) == []


def assert_same_case(folder, case, launch, world):
    """To rounding the run of one process: metrics, parameters, optimizer state. Nothing moves in
    the bad step."""
    got, expected = folder / f"{case}, {launch}{world}", folder / f"{case}, one1"
    assert_same_values(got, expected)
    assert column(got, "skipped_steps")[STEPS] == 1 and column(got, "grad_norm")[BAD] is None
    assert list(column(got, "train_loss")) == list(range(1, STEPS + 1)) and list(
        column(got, "val_loss")
    ) == [0, STEPS]
    assert column(got, "sample") == column(expected, "sample")
    for name in ("val_top1", "val_top5"):  # shares of 47 images, each of which is counted once
        assert column(got, name) == column(expected, name)
        assert all(47 * x == pytest.approx(round(47 * x)) for x in column(got, name).values())
    a, b = column(got, "track"), column(expected, "track")
    assert_close_numbers(a, b, rel=10 * NORMS)
    for step, name in product(
        b, ("stream_var", "grad_norm", "weight_norm", "block_norm", "embedding")
    ):
        assert_close_numbers(a[step][name], b[step][name], rel=NORMS)
    parts, (single,) = left(got, world), left(expected, 1)
    assert [part["frozen"] for part in (*parts, single)] == [[BAD]] * (world + 1)
    # else the process may never end
    assert [part["DDP outlives its group"] for part in parts] == [False] * world
    saved, whole = load(got / "last.pt"), load(expected / "last.pt")
    assert_same_ends(case, saved, whole, single["start"])
    assert not biases(whole) or any(t.any() for t in biases(whole))
    kinds = [
        {name: (type(t), t.dtype, t.shape) for name, t in tensors(c).items()}
        for c in (saved, whole)
    ]
    assert kinds[0] == kinds[1]
    assert saved["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]
    if launch == "ddp":
        for part in parts:
            assert (
                different(part["end"], {name: saved["model"][name] for name in part["end"]}) == []
            )
    if launch == "fsdp":
        assert_rows(parts, single, saved, world)


@pytest.mark.parametrize("launch", ("ddp", "fsdp"))
@pytest.mark.parametrize("case", FAST)
def test_two_processes(case, launch, two):
    assert_same_case(two, case, launch, 2)


FURTHER = [(2, launch, case) for launch in ("ddp", "fsdp") for case in DEEP]
FURTHER += [(3, launch, case) for launch in ON_THREE for case in ON_THREE[launch]]
FURTHER += [(4, launch, case) for launch in ON_FOUR for case in ON_FOUR[launch]]


@pytest.mark.deep
@pytest.mark.parametrize("world, launch, case", FURTHER)
def test_further_cases_and_processes(world, launch, case, four):
    assert_same_case(four, case, launch, world)


def test_ddp_with_a_bad_gradient_on_one_process(two):
    """All processes skip the step. They end with the same parameters."""
    got, expected = two / "one bad, ddp2", two / "one bad, one1"
    parts = left(got, 2)
    assert "2 processes × 2 accumulation steps × 2 sequences" in parts[0]["output"]
    # only rank 0 prints
    assert parts[0]["output"].count("step 20/20 ") == 1 and parts[1]["output"] == ""
    assert different(parts[0]["end"], parts[1]["end"]) == []
    assert different(parts[0]["end"], load(got / "last.pt")["model"]) == []
    assert_same_values(got, expected)
    assert column(got, "skipped_steps")[20] == 1 and column(got, "grad_norm")[15] is None
    losses = column(got, "train_loss")
    assert losses[20] < losses[1] - 0.5  # it learns


def test_rows_of_length_one_under_fsdp(two):
    """Columns of o and down are split over the processes."""
    got, expected = (two / f"nGPT, {launch}" for launch in ("fsdp2", "one1"))
    assert_same_values(got, expected)
    assert off_unit(load(got / "last.pt")["model"]) < roundings(32)


# -------------------------------------------------------------------------- what each process holds


def assert_one_process_has_all(folder, case, name, world):
    """Of a parameter with one entry, as σReparam's γ, one process has all."""
    parts = left(folder / f"{case}, fsdp{world}", world)
    (single,) = left(folder / f"{case}, one1", 1)
    assert [part["end"][name].numel() for part in parts] == [1, *[0] * (world - 1)]
    assert (parts[0]["end"][name] - single["start"][name]).abs() > 1e-4  # it is trained there


def test_a_process_without_a_row(two):
    assert_one_process_has_all(two, SIGMA, "blocks.0.attn.f.q.sigma", 2)


def assert_sharded(folder, case, world):
    """Parameters are sharded before they have storage, and so is the optimizer's state but for its
    counters."""
    single = left(folder / f"{case}, one1", 1)[0]
    parts = left(folder / f"{case}, fsdp{world}", world)
    n = sum(p.numel() for p in single["start"].values())
    for part in parts:
        assert part["meta"] and all(part["meta"])
        assert part["sharded"] == single["start"].keys()
        held = {name: p.numel() for name, p in part["start"].items()}
        assert sum(held.values()) == pytest.approx(n / world, rel=0.01)
        # padded to a row
        assert part["bytes"] == {name: 4 * max(1, size) for name, size in held.items()}
    assert sum(p.numel() for part in parts for p in part["start"].values()) == n
    for full, *held in zip(
        single["state_sizes"], *(part["state_sizes"] for part in parts), strict=True
    ):
        assert sum(held) == full or held == [1] * world  # AdamW counts steps, of each parameter


def test_each_process_holds_its_shards_only(two):
    assert_sharded(two, SIGMA, 2)
    single, ddp = left(two / f"{SIGMA}, one1", 1)[0], left(two / f"{SIGMA}, ddp2", 2)[1]
    assert not ddp["sharded"] and sum(ddp["bytes"].values()) == 4 * sum(
        p.numel() for p in single["start"].values()
    )
    part = left(two / "images, fsdp2", 2)[0]  # patches, class token, positions and head too
    assert {"patch.weight", "cls.weight", "wpe.weight", "head.weight"} <= part["sharded"]
    assert len(part["start"]["patch.weight"]) == 16 and len(part["start"]["wpe.weight"]) == 9


def held(folder, case, world) -> list:
    """What each process holds of a stack of experts under FSDP2: (experts, rows of each)."""
    parts = left(folder / f"{case}, fsdp{world}", world)
    return [tuple(part["end"]["blocks.0.mlp.f.experts.down.weight"].shape[:2]) for part in parts]


def test_rows_of_experts_are_split_where_experts_do_not_divide(two):
    assert held(two, "experts", 2) == [(3, 16)] * 2


@pytest.mark.deep
def test_a_process_without_an_expert(three):
    assert held(three, "two experts", 3) == [(1, 32), (1, 32), (0, 32)]


# -------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_load_anywhere(two, capsys):
    out, idx = two / "muon, unified, fsdp2", torch.arange(12)[None]
    folders = (out, two / "muon, unified, one1")
    a, b = (
        model_from_checkpoint(load_checkpoint(folder / "best.pt"))(idx)[0] for folder in folders
    )
    assert error(a, b) < 2 * GRADIENTS and a.std() > 0.1
    flags = ["--start=AB", "--device=cpu", "--num_samples=1", "--max_new_tokens=120"]
    assert call(sample.main, f"--out_dir={out}", *flags) == 0
    assert len(capsys.readouterr().out) > 100


def assert_continued(folder, case, name):
    """Continue a chain to its end on one process: it is the run that one process made without
    interruption."""
    out, smooth = folder / f"{case}, {name}", folder / f"{case}, one1"
    assert load(out / "last.pt")["step"] == 5
    make_chains(0, 1, folder, name, [case], 5, STEPS)
    assert list(column(out, "train_loss")) == list(range(1, STEPS + 1))
    for field in ("train_loss", "grad_norm", "lr", "tokens"):
        expected = column(smooth, field)
        got = {step: value for step, value in column(out, field).items() if step in expected}
        assert got == pytest.approx(expected, rel=TOLERANCES[field], abs=0), field
    assert_same_ends(
        case, load(out / "last.pt"), load(smooth / "last.pt"), left(smooth, 1)[0]["start"]
    )


@pytest.mark.parametrize("case", CHAINS)
def test_saved_in_one_launch_and_resumed_in_another(case, two):
    """One process, FSDP on two, DDP on two, one process again."""
    assert_continued(two, case, "chain")


@pytest.mark.deep
@pytest.mark.parametrize("case", LONG_CHAINS)
def test_saved_and_resumed_by_other_numbers_of_processes(case, four):
    """One process; FSDP on two; DDP on three; HSDP on four, with two shards; one again."""
    assert_continued(four, case, "long chain")


def assert_same_halves(folder, name):
    """One of two processes gets SIGTERM, and the run goes on exactly."""
    left(folder / f"{name}, halves", 2)
    assert_same_run(folder / f"{name}, halves", folder / f"{name}, whole")


def test_stopped_and_resumed(two):
    assert_same_halves(two, "by blocks")


@pytest.mark.deep
@pytest.mark.parametrize("name", ["experts, ddp", "images, fsdp", "soap, ddp", "soap, shards"])
def test_stopped_and_resumed_further(name, two_more):
    """With dropout and stochastic depth; and SOAP, with bases."""
    assert_same_halves(two_more, name)


def test_begun_from_weights(two):
    weights = load(two / "muon, unified, one1" / "last.pt")["model"]
    start = join_rows(left(two / "from a file, fsdp2", 2), "start")
    assert different(start, weights) == []
    assert_same_values(two / "from a file, fsdp2", two / "from a file, one1")


def test_eval_only(two):
    """It exits with the loss that the run of the checkpoint had logged."""
    output = left(two / "eval_only, fsdp2", 2)[0]["output"]
    loss = float(re.search(r"step 0: validation loss ([\d.]+)", output)[1])
    assert loss == pytest.approx(column(two / "muon, unified, one1", "val_loss")[STEPS], rel=LOSS)
    assert not (two / "eval_only, fsdp2").exists()
