"""row["track"] of runs on four processes: the numbers of one process, and no compilation of its own."""

from functools import partial

import pytest
import torch

from nanodnt.run import tracking
from support.processes import left, play, processes
from support.runs import different, load
from support.tracked import UNIFIED, assert_close_numbers, tracks

pytestmark = pytest.mark.usefixtures("one_thread")

SHARDED = {
    "DNT, msgdw": dict(optimizer="msgdw", learning_rate=0.5, grad_clip=0.5),
    "unified, DyT": dict(
        UNIFIED, norm="dyt", mlp="swiglu", pos="rope", n_kv_head=1, tie_weights=False, optimizer="muon"
    ),
    "experts": dict(n_expert=6, n_expert_shared=1, balance="bias", balance_rate=0.01, gain="branch", optimizer="muon"),
}
HSDP = dict(parallel="fsdp", fsdp_shard_size=2, micro_batch_size=1)
LAUNCHES = {  # the embedding has 64 rows; a gain of q or k has 16; α of DyT has 1, so three processes have none of it
    "DNT, msgdw": {"ddp": dict(parallel="ddp"), "hsdp": HSDP},
    "unified, DyT": {"fsdp": dict(parallel="fsdp")},
    "experts": {"fsdp": dict(parallel="fsdp")},
}
SHORT = dict(track_interval=2, max_iters=2, eval_interval=2)


def play_all(rank, world, folder, dataset, launches):
    """The runs of SHARDED, each in every launch of its name, on this process, one of `world`."""
    for case, flags in SHARDED.items():
        for launch, how in launches[case].items():
            few = [(tracking, "SAMPLE", 300)]  # so that matrices are sampled
            play(rank, world, folder / f"{case}, {launch}", patches=few, dataset=dataset, **SHORT | flags | how)


def play_compiled(rank, world, folder, dataset):
    """FSDP with compiled parts, without and with tracking; leaves how many graphs each took."""
    compile, graphs = (torch, "compile", partial(torch.compile, backend="eager")), []
    flags = dict(n_layer=1, max_iters=2, eval_interval=1, compile=True, parallel="fsdp", dataset=dataset)
    for interval in (0, 1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        play(rank, world, folder / f"compiled {interval}", patches=[compile], track_interval=interval, **flags)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.save(graphs, folder / f"graphs.{rank}")


@pytest.fixture(scope="module")
def played(dataset, tmp_path_factory):
    """A folder with all runs on one process and on four."""
    folder = tmp_path_factory.mktemp("played")
    play_all(0, 1, folder, dataset, dict.fromkeys(SHARDED, {"one": {}}))
    processes(4, play_all, folder, dataset, LAUNCHES)
    return folder


@pytest.mark.parametrize("case, launch", [(case, launch) for case in LAUNCHES for launch in LAUNCHES[case]])
def test_four_processes_track_what_one_does(case, launch, played):
    """However rows are split: the sums count every row once, and the sample is the same."""
    left(played / f"{case}, {launch}", 4)
    got, expected = tracks(played / f"{case}, {launch}"), tracks(played / f"{case}, one")
    assert list(got) == list(expected) == [2]
    assert_close_numbers(got, expected, rel=2e-3)
    for name in ("stream_var", "grad_norm", "weight_norm"):
        assert_close_numbers(got[2][name], expected[2][name], rel=2e-4)


@pytest.mark.deep
def test_tracking_leaves_compiled_parts_alone(dataset, tmp_path):
    """No graph more, and the bits of the run without tracking."""
    processes(4, play_compiled, tmp_path, dataset)
    for interval in (0, 1):
        left(tmp_path / f"compiled {interval}", 4)
    for rank in range(4):
        without, tracked = torch.load(tmp_path / f"graphs.{rank}")
        assert tracked == without > 0
    assert list(tracks(tmp_path / "compiled 1")) == [1, 2]
    off, on = (load(tmp_path / f"compiled {interval}" / "last.pt") for interval in (0, 1))
    assert different(on["model"], off["model"]) == []
