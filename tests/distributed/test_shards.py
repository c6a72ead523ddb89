"""Checkpoints in shards: the same tensors as in one file, whoever reads them; damage is named; what
nobody needs is deleted. That runs go on from them on another number of processes:
test_same_run.py."""

import shutil
from itertools import product
from types import SimpleNamespace

import pytest
import torch

import sample
from nanodnt.run import checkpoints
from nanodnt.run.checkpoints import (
    FROM_BYTES,
    load_checkpoint,
    load_latest,
    names_of_shards,
    remove_unused,
    use_shards,
)
from nanodnt.weights import load_trained
from support.hostile import refusal
from support.processes import play, processes
from support.runs import call, contents, load, make_dataset, run, tensors

CONFIG = dict(
    max_iters=20, eval_interval=10, parallel="fsdp", block_size=16, track_interval=0, n_expert=3
)
FORMATS = ("file", "sharded")


def never(*_):
    raise AssertionError("a tensor was gathered")


def make_runs(rank, world, folder):
    for form in FORMATS:
        alone = [(checkpoints, "full_tensor", never)] if form == "sharded" else []
        how = dict(checkpoint_format=form, dataset=folder / "data", patches=alone)
        play(rank, world, folder / form, **CONFIG | how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run of two processes in each format; nothing was gathered to save the shards."""
    folder = tmp_path_factory.mktemp("shards")
    make_dataset(folder / "data")
    processes(2, make_runs, folder)
    return folder


@pytest.fixture
def copy(runs, tmp_path):
    return shutil.copytree(runs / "sharded", tmp_path / "run")


def names(out_dir) -> set:
    return {path.name.split(".")[0] for path in (out_dir / "shards").iterdir()}


def test_shards_hold_what_the_file_holds(runs):
    """Read whole, and by rows as three processes, and seven, would. Three experts are split by
    rows."""
    found, wanted = load_checkpoint(runs / "sharded" / "last.pt"), load(runs / "file" / "last.pt")
    assert found["step"] == wanted["step"] == 20 and len(found["shards"]["by_second"]) == 2 * 2 * 3
    wanted = tensors([wanted["model"], wanted["optimizer"]])
    for name, t in tensors([found["model"], found["optimizer"]]).items():
        t.read_into(found := torch.empty_like(wanted[name]))
        assert t.is_meta and torch.equal(found, wanted[name])
        for parts, dim in product((3, 7), range({0: 0, 3: 2}.get(t.ndim, 1))):
            n, size = t.shape[dim], -(-t.shape[dim] // parts)
            found = torch.empty_like(wanted[name])
            for r in (*(range(i, min(i + size, n)) for i in range(0, n, size)), range(n, n)):
                t.read_into(found.narrow(dim, r.start, len(r)), r, dim)
            assert torch.equal(found, wanted[name])
    # last and prev, two processes, two parts
    assert len(list((runs / "sharded" / "shards").iterdir())) == 2 * 2 * 2


def test_tools_read_the_weights_alone(runs, copy, capsys):
    for path in (copy / "shards").glob("*.optimizer.pt"):
        path.unlink()
    one, other = (
        load_trained(str(out), "last.pt").model.state_dict() for out in (copy, runs / "file")
    )
    assert all(torch.equal(one[name], t) for name, t in other.items())
    assert (
        call(sample.main, f"--out_dir={copy}", "--start=A", "--num_samples=1", "--max_new_tokens=3")
        == 0
    )


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


DAMAGES = {  # what is done to a file, words of the message
    "missing": (lambda path: path.unlink(), "is missing"),
    "flipped": (flip, "it is damaged or foreign (checksum of"),
    "cut": (
        lambda path: path.write_bytes(path.read_bytes()[:-300]),
        "it is damaged or foreign (BadZipFile)",
    ),
    "of another": (
        lambda path: shutil.copyfile(str(path).replace("-20.", "-10."), path),
        "is no part of this",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_taken(damage, copy):
    spoil, words = DAMAGES[damage]
    (path,) = (copy / "shards").glob("*-20.1.optimizer.pt")
    spoil(path)
    said = []
    assert load_latest(copy, said.append)["step"] == 10
    assert str(path) in said[0] and words in said[0] and said[0].startswith("warning: ")
    (other,) = (copy / "shards").glob("*-10.1.optimizer.pt")
    other.unlink()
    before = contents(copy)
    with pytest.raises(ValueError, match="nothing to resume from") as e:
        load_latest(copy, said.append)
    assert str(path) in str(e.value) and str(other) in str(e.value) and contents(copy) == before


@pytest.mark.parametrize("name", ["../x-1", "ffffffff-1/..", None])
def test_what_names_no_shards_is_refused(name, copy):
    checkpoint = torch.load(copy / "last.pt", weights_only=True)
    checkpoint["shards"]["name"] = name
    torch.save(checkpoint, copy / "last.pt")
    with pytest.raises(
        ValueError, match="last.pt is damaged: shards missing, or nothing that a run saves"
    ):
        load_checkpoint(copy / "last.pt")


def test_shards_go_with_their_checkpoints(runs, copy, dataset):
    """A run in one file that goes on leaves those of best.pt at most; one that overwrites leaves
    none."""
    how = dict(
        out_dir=copy, dataset=runs / "data", block_size=16, eval_interval=10, track_interval=0
    )
    assert names(copy) == {name for name in names(copy) if name.endswith(("-10", "-20"))}
    stray = copy / "shards" / "ffffffff-5.0.model.pt.tmp"  # of a run killed as it wrote
    stray.write_bytes(b"")
    assert run(**how, init_from="resume", max_iters=40) == 0
    assert not stray.exists() and names(copy) == set()
    assert run(**how, overwrite=True, max_iters=2) == 0
    assert list((copy / "shards").iterdir()) == []


def test_shards_of_the_next_checkpoint_stay(copy):
    """A process may be at work on the next save while rank 0 still cleans up."""
    (last,) = {name for name in names(copy) if name.endswith("-20")}
    run, at_work = last.split("-")[0], copy / "shards" / f"{last.replace('-20', '-30')}.1.model.pt"
    for path in (
        at_work,
        *(copy / "shards" / f"{name}.0.model.pt" for name in (f"{run}-5", "ffffffff-30")),
    ):
        path.touch()
    remove_unused(copy, names_of_shards(copy), run, 20)
    assert names(copy) == {last, f"{run}-10", f"{run}-30"}


def test_what_is_sharded(runs, tmp_path, capsys):
    def env(parallel):
        return SimpleNamespace(parallel=parallel)

    assert [use_shards("auto", env(way), FROM_BYTES) for way in ("none", "ddp", "fsdp")] == [
        False,
        False,
        True,
    ]
    assert not use_shards("auto", env("fsdp"), FROM_BYTES - 1) and not use_shards(
        "file", env("fsdp"), 10**15
    )
    code = run(out_dir=tmp_path / "no", dataset=runs / "data", checkpoint_format="sharded")
    refusal(
        capsys, code, "checkpoint_format=sharded needs parallel=fsdp, not none: use auto or file"
    )
