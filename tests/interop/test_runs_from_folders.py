"""Folders of Hugging Face that export.py made: new runs of experts from them, and under FSDP2."""

import pytest

import export
from support.hostile import call
from support.processes import assert_same_values, join_rows, left, play, processes
from support.runs import column, different, load, run

pytestmark = pytest.mark.usefixtures("quick")
EXPERTS = dict(n_expert=4, n_ff=16, mlp="swiglu")


def export_to(folder, out_dir):
    assert (
        call(export.main, out_dir=out_dir, checkpoint="last.pt", to=folder, compare=False).code == 0
    )
    return folder


@pytest.mark.parametrize("old, new, found", [("none", "bias", "bias"), ("bias", "loss", "bias")])
def test_a_new_run_from_a_folder_chooses_its_balance(old, new, found, dataset, tmp_path, capsys):
    rate = dict(balance_rate=0.01) if found == "bias" else {}
    assert run(out_dir=tmp_path / "old", dataset=dataset, max_iters=1, **EXPERTS, balance=old) == 0
    folder = export_to(tmp_path / "exported", tmp_path / "old")
    capsys.readouterr()
    flags = dict(out_dir=tmp_path / "new", dataset=dataset, init_from=folder)
    assert run(**flags, max_iters=0, **EXPERTS, balance=new, **rate) == 0
    note = f"balance of experts: {old} in the run of the weights, {new} in this one\n"
    assert (note in capsys.readouterr().out) == (old != found)
    before, start = load(tmp_path / "old" / "last.pt"), load(tmp_path / "new" / "last.pt")
    assert start["model_config"] == before["model_config"] | dict(balance=found)
    assert (
        different({name: start["model"][name] for name in before["model"]}, before["model"]) == []
    )


def begin(rank, world, folder, dataset):
    flags = dict(parallel="fsdp") if world > 1 else {}
    play(
        rank,
        world,
        folder / f"on {world}",
        dataset=dataset,
        init_from=folder / "exported",
        max_iters=4,
        **flags,
    )


def test_begun_from_a_folder_on_two_processes(dataset, tmp_path):
    """Under FSDP2 each process takes its rows."""
    assert run(out_dir=tmp_path / "old", dataset=dataset, max_iters=2, block_size=16) == 0
    export_to(tmp_path / "exported", tmp_path / "old")
    begin(0, 1, tmp_path, dataset)
    processes(2, begin, tmp_path, dataset)
    start = join_rows(left(tmp_path / "on 2", 2), "start")
    assert different(start, load(tmp_path / "old" / "last.pt")["model"]) == []
    assert_same_values(tmp_path / "on 2", tmp_path / "on 1")
    assert len(column(tmp_path / "on 2", "train_loss")) == 4
