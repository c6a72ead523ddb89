"""Examples and documents on several processes: the run of one, though each has another number of targets that count."""

import re

import numpy as np
import pytest

from support.examples import UNEVEN, write_documents, write_examples
from support.prepared import open_prepared
from support.processes import assert_same_values, left, play, processes
from support.runs import column, different, load, metrics
from support.tracked import assert_close_numbers, tracks

pytestmark = pytest.mark.usefixtures("one_thread")

FLAGS = dict(block_size=32, doc_mask=True, max_iters=8, lr_decay_iters=8, eval_interval=4, eval_tokens=0)
FLAGS |= dict(track_interval=4)
KINDS = {"examples": dict(), "text": dict(pos="rope", n_kv_head=1)}
FSDP = dict(parallel="fsdp")
FAST = {"ddp": dict(micro_batch_size=2), "fsdp": dict(FSDP, micro_batch_size=3)}  # 12 rows in all
PLAIN = dict(doc_mask=False)
FURTHER = {"ddp": dict(micro_batch_size=1), "ddp, whole": dict(), "fsdp": FSDP, "recomputed": FSDP}
FURTHER["recomputed"] |= dict(activation_checkpointing=True)


def play_all(rank, world, folder, kinds, launches, **config):
    """Runs of these kinds of datasets in each launch, on this process, one of `world`."""
    for kind in kinds:
        for launch, how in launches.items():
            flags = FLAGS | KINDS[kind] | how | config
            play(rank, world, folder / f"{kind}, {launch}{world}", dataset=folder / f"data, {kind}", **flags)


def play_two(rank, world, folder):
    play_all(rank, world, folder, ["examples"], FAST | dict(half=dict(max_iters=4)))


def play_two_more(rank, world, folder):
    evaluate = dict(init_from=folder / "examples, one1" / "last.pt", eval_only=True)
    play_all(rank, world, folder, ["examples"], dict(plain=PLAIN, eval_only=evaluate | FSDP))
    play_all(rank, world, folder, ["text"], FAST)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with the datasets, and a run of one process."""
    folder = tmp_path_factory.mktemp("examples")
    write_examples(folder / "data, examples", **UNEVEN)
    write_documents(folder / "data, text")
    play_all(0, 1, folder, ["examples"], dict(one={}))
    return folder


@pytest.fixture(scope="module")
def pair(single):
    processes(2, play_two, single)
    return single


@pytest.fixture(scope="module")
def more(single):
    """The same folder with the runs of the deep suite, on one process and on two."""
    play_all(0, 1, single, ["text"], dict(one={}))
    play_all(0, 1, single, ["examples"], dict(plain=PLAIN))
    processes(2, play_two_more, single)
    return single


def assert_same_run_as_one(folder, kind, launch, world, reference="one"):
    """Losses of steps and of validation, gradient norms, tracked numbers; all processes have the same weights."""
    got, expected = folder / f"{kind}, {launch}{world}", folder / f"{kind}, {reference}1"
    parts = left(got, world)
    assert_same_values(got, expected)
    assert [*column(got, "train_loss")] == list(range(1, 9)) and [*column(got, "val_loss")] == [0, 4, 8]
    assert_close_numbers(tracks(got), tracks(expected), rel=2e-3)
    if "ddp" in launch:
        assert all(different(part["end"], load(got / "last.pt")["model"]) == [] for part in parts)
    return parts


@pytest.mark.parametrize("launch", FAST)
def test_examples(launch, pair):
    assert "with a mask of documents" in assert_same_run_as_one(pair, "examples", launch, 2)[0]["output"]


@pytest.mark.deep
@pytest.mark.parametrize("launch", FAST)
def test_a_text(launch, more):
    assert_same_run_as_one(more, "text", launch, 2)


@pytest.mark.deep
def test_examples_without_doc_mask(more):
    assert_same_run_as_one(more, "examples", "plain", 2, "plain")
    assert column(more / "examples, plain1", "train_loss") != column(more / "examples, one1", "train_loss")


@pytest.mark.deep
def test_evaluation_alone(more):
    output = left(more / "examples, eval_only2", 2)[0]["output"]
    loss = float(re.search(r"step 0: validation loss ([\d.]+)", output)[1])
    assert loss == pytest.approx(column(more / "examples, one1", "val_loss")[8], rel=2e-6)


def test_processes_have_other_numbers_of_targets(single):
    """So that a mean of their means would be another number. Of a text they have other numbers of validation rows."""
    data = open_prepared(single / "data, examples", 32)
    counts = np.array([(data.batch(step, 12)[1] != -1).reshape(2, -1).sum(1) for step in range(8)])
    assert (counts.max(1) > 1.25 * counts.min(1)).sum() >= 3
    assert counts.sum(1).tolist() == [data.loss_tokens(step, 12) for step in range(8)]
    assert open_prepared(single / "data, text", 32).val_windows % 2


def test_what_two_processes_began_one_goes_on_with(pair):
    out, whole = pair / "examples, half2", pair / "examples, one1"
    left(out, 2)
    assert [row["step"] for row in metrics(out)] == list(range(5))
    play(0, 1, out, dataset=pair / "data, examples", init_from="resume", **FLAGS)
    assert_same_values(out, whole)


@pytest.mark.deep
@pytest.mark.parametrize("world", (3, 4))
def test_more_processes(world, more):
    processes(world, play_all, more, [*KINDS], FURTHER)
    for kind in KINDS:
        for launch in FURTHER:
            assert_same_run_as_one(more, kind, launch, world)
