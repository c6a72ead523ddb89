"""Tracking leaves compiled parts alone on several processes. (Its numbers: test_same_run.py.)"""

from functools import partial

import pytest
import torch

from support.processes import left, play, processes
from support.runs import different, load
from support.tracked import tracks

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.deep
def test_tracking_leaves_compiled_parts_alone(dataset, tmp_path):
    """No graph more, and the bits of the run without tracking."""
    processes(2, play_compiled, tmp_path, dataset)
    for interval in (0, 1):
        left(tmp_path / f"compiled {interval}", 2)
    for rank in range(2):
        without, tracked = torch.load(tmp_path / f"graphs.{rank}")
        assert tracked == without > 0
    assert list(tracks(tmp_path / "compiled 1")) == [1, 2]
    off, on = (load(tmp_path / f"compiled {interval}" / "last.pt") for interval in (0, 1))
    assert different(on["model"], off["model"]) == []
