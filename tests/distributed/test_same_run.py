"""DDP and FSDP2 on two to four processes train what one process trains, and checkpoints go from any launch to any."""

import re

import pytest
import torch

import sample
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.weights import model_from_checkpoint
from support import parallel_runs
from support.parallel_runs import BAD, CASES, DDP_ON_THREE, DEEP, FAST, LONG_CHAIN, ON_FOUR, ON_THREE
from support.processes import TOLERANCES, assert_close, assert_same_values, join_rows, left
from support.runs import assert_same_run, column, different, load, tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def divided_out(case: str, name: str) -> bool:
    """Whether a later norm divides this parameter out. Then its gradient is nothing but rounding errors."""
    return "unified" in case and name.endswith(("pre.magnitude", ".sigma"))


def assert_same_ends(case, got, expected, start):
    """Two checkpoints: parameters, next to how far they have come; buffers; optimizer state."""
    pairs = [({}, {}), ({}, {})]
    names = [name for group in expected["optimizer"]["param_groups"] for name in group["param_names"]]
    for checkpoint, (moved, state) in zip((got, expected), pairs, strict=True):
        moved |= {name: checkpoint["model"][name] for name in names if not divided_out(case, name)}
        all_state = checkpoint["optimizer"]["state"]
        state |= tensors({name: all_state[i] for i, name in enumerate(names) if not divided_out(case, name)})
    assert_close(pairs[0][0], pairs[1][0], 5e-4, start)
    assert_close(pairs[0][1], pairs[1][1], 1e-3)
    buffers = [{name: t for name, t in c["model"].items() if name not in names} for c in (got, expected)]
    assert_close(*buffers, 5e-4)


def assert_same_case(folder, case, launch, world):
    """To rounding the run of one process: metrics, parameters, optimizer state. Nothing moves in the bad step."""
    got, expected = folder / f"{case}, {launch}", folder / f"{case}, one"
    assert_same_values(got, expected)
    assert column(got, "skipped_steps")[20] == 1 and column(got, "grad_norm")[BAD] is None
    parts, (start,) = left(got, world), left(expected, 1)
    assert [part["frozen"] for part in parts] == [[BAD]] * world
    assert [part["DDP outlives its group"] for part in parts] == [False] * world  # else the process may never end
    a, b = load(got / "last.pt"), load(expected / "last.pt")
    assert_same_ends(case, a, b, start["start"])
    return parts, a, b


def assert_same_fsdp(folder, case, world):
    """Starts from the same bits, ends the same to rounding; each process holds its rows and no others."""
    parts, saved, expected = assert_same_case(folder, case, f"fsdp{world}", world)
    (single,) = left(folder / f"{case}, one", 1)
    assert different(join_rows([part["start"] for part in parts]), single["start"]) == []
    for end in ("start", "end"):
        for name, p in single["start"].items():
            size = -(-len(p) // world)
            rows = [min(len(p), (rank + 1) * size) - min(len(p), rank * size) for rank in range(world)]
            assert [len(part[end][name]) for part in parts] == rows, name
    ended = join_rows([part["end"] for part in parts])
    assert different(ended, {name: saved["model"][name] for name in ended}) == []
    kinds = [{name: (type(t), t.dtype, t.shape) for name, t in tensors(c).items()} for c in (saved, expected)]
    assert kinds[0] == kinds[1]
    assert saved["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


@pytest.mark.parametrize("case", FAST)
def test_ddp(case, two):
    assert_same_case(two, case, "ddp2", 2)


@pytest.mark.parametrize("case", FAST)
def test_fsdp(case, two):
    assert_same_fsdp(two, case, 2)


@pytest.mark.deep
@pytest.mark.parametrize("world, case", [(2, case) for case in DEEP] + [(3, case) for case in DDP_ON_THREE])
def test_ddp_further(world, case, three):
    assert_same_case(three, case, f"ddp{world}", world)


FURTHER = [(2, case) for case in DEEP] + [(3, case) for case in ON_THREE] + [(4, case) for case in ON_FOUR]


@pytest.mark.deep
@pytest.mark.parametrize("world, case", FURTHER)
def test_fsdp_further(world, case, four):
    assert_same_fsdp(four, case, world)


def test_ddp_with_a_bad_gradient_on_one_process(two):
    """All processes skip the step. They end with the same parameters."""
    got, expected = two / "one bad, ddp2", two / "one bad, one"
    parts = left(got, 2)
    assert "2 processes × 2 accumulation × 2 sequences" in parts[0]["output"]
    assert parts[0]["output"].count("step 20/20 ") == 1 and parts[1]["output"] == ""  # only rank 0 prints
    assert different(parts[0]["end"], parts[1]["end"]) == []
    assert different(parts[0]["end"], load(got / "last.pt")["model"]) == []
    assert list(column(got, "train_loss")) == list(range(1, 21))
    assert_same_values(got, expected)
    assert column(got, "skipped_steps")[20] == 1 and column(got, "grad_norm")[15] is None
    losses = column(got, "train_loss")
    assert losses[20] < losses[1] - 0.5  # it learns


@pytest.mark.deep
def test_clipping_is_at_work(two_more):
    norms = [n for n in column(two_more / "msgdw, DNT, one", "grad_norm").values() if n is not None]
    assert sum(n > CASES["msgdw, DNT"]["grad_clip"] for n in norms) > 6


def assert_one_process_has_all(folder, case, name, world):
    parts, (single,) = left(folder / f"{case}, fsdp{world}", world), left(folder / f"{case}, one", 1)
    assert [part["end"][name].numel() for part in parts] == [1, *[0] * (world - 1)]
    assert (parts[0]["end"][name] - single["start"][name]).abs() > 1e-3  # it is trained there


def test_a_process_without_a_row(two):
    """Of a parameter with one entry, as σReparam's γ, one process has all."""
    assert_one_process_has_all(two, "blockwise, sigmaReparam", "blocks.0.attn.f.q.sigma", 2)


@pytest.mark.deep
def test_processes_without_a_row(three):
    assert_one_process_has_all(three, "nesterov, DyT", "final_norm.alpha", 3)
    assert_one_process_has_all(three, "blockwise, sigmaReparam", "blocks.0.attn.f.q.sigma", 3)


def assert_sharded(folder, case, world):
    """Parameters are sharded before they have storage, and so is the optimizer's state but for its counters."""
    single, parts = left(folder / f"{case}, one", 1)[0], left(folder / f"{case}, fsdp{world}", world)
    n = sum(p.numel() for p in single["start"].values())
    for part in parts:
        assert part["meta"] and all(part["meta"])
        assert part["sharded"] == single["start"].keys()
        held = {name: p.numel() for name, p in part["start"].items()}
        assert sum(held.values()) == pytest.approx(n / world, rel=0.01)
        assert part["bytes"] == {name: 4 * max(1, size) for name, size in held.items()}  # padded to a row
    assert sum(p.numel() for part in parts for p in part["start"].values()) == n
    for full, *held in zip(single["state_sizes"], *(part["state_sizes"] for part in parts), strict=True):
        assert sum(held) == full or held == [1] * world  # AdamW counts steps, of each parameter


def test_each_process_holds_its_shards_only(two):
    case = "blockwise, sigmaReparam"
    assert_sharded(two, case, 2)
    single, ddp = left(two / f"{case}, one", 1)[0], left(two / f"{case}, ddp2", 2)[1]
    assert not ddp["sharded"] and sum(ddp["bytes"].values()) == 4 * sum(p.numel() for p in single["start"].values())


@pytest.mark.deep
def test_each_of_two_or_four_processes_holds_its_shards_only(four):
    for world in (2, 4):
        assert_sharded(four, "msgdw, DNT", world)
        assert_sharded(four, "muon, unified", world)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_load_anywhere(two, capsys, monkeypatch):
    out = two / "muon, unified, fsdp2"
    idx = torch.arange(12)[None]
    a, b = (
        model_from_checkpoint(load_checkpoint(folder / "best.pt"))(idx)[0]
        for folder in (out, two / "muon, unified, one")
    )
    assert torch.allclose(a, b, atol=1e-3) and a.std() > 0.1
    flags = ["--start=AB", "--device=cpu", "--num_samples=1", "--max_new_tokens=120"]
    monkeypatch.setattr("sys.argv", ["sample.py", f"--out_dir={out}", *flags])
    assert sample.main() == 0
    assert len(capsys.readouterr().out) > 100


def assert_continued(folder, case, name, dataset):
    """Continue a chain to step 20 on one process: it is the run that one process made without interruption."""
    parallel_runs.make_chain(0, 1, folder, name, [case], 20, dataset=dataset)
    out, smooth = folder / f"{case}, {name}", folder / f"{case}, smooth"
    assert list(column(out, "train_loss")) == list(range(1, 21))
    for field in ("train_loss", "grad_norm", "lr", "tokens"):
        expected = column(smooth, field)
        got = {step: value for step, value in column(out, field).items() if step in expected}
        assert got == pytest.approx(expected, rel=TOLERANCES[field], abs=0), field
    assert_same_ends(case, load(out / "last.pt"), load(smooth / "last.pt"), left(smooth, 1)[0]["start"])


def test_saved_in_one_launch_and_resumed_in_another(two, dataset):
    """One process, FSDP on two, DDP on two: four steps each; then one process again."""
    assert_continued(two, "muon, unified", "short chain", dataset)


@pytest.mark.deep
@pytest.mark.parametrize("case", LONG_CHAIN)
def test_saved_and_resumed_by_other_numbers_of_processes(case, four, dataset):
    """One process; FSDP on two; DDP on three; HSDP on four, with two shards; one again: four steps each."""
    assert_continued(four, case, "chain", dataset)


def test_stopped_and_resumed(two):
    """One of two processes gets SIGTERM, and the run goes on exactly."""
    assert load(two / "stopped.pt")["step"] == 5
    left(two / "stopped", 2)
    assert_same_run(two / "stopped", two / "short")


def test_begun_from_weights(two):
    weights = load(two / "muon, unified, one" / "last.pt")["model"]
    start = join_rows([part["start"] for part in left(two / "from a file, fsdp2", 2)])
    assert different(start, weights) == []
    assert_same_values(two / "from a file, fsdp2", two / "from a file, one")


def test_eval_only(two):
    """Exits with the loss that the run of the checkpoint had logged."""
    output = left(two / "eval_only, fsdp2", 2)[0]["output"]
    loss = float(re.search(r"step 0: validation loss ([\d.]+)", output)[1])
    assert loss == pytest.approx(column(two / "muon, unified, one", "val_loss")[20], rel=2e-6)
    assert not (two / "eval_only, fsdp2").exists()
