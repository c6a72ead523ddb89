"""Twenty steps of `train.py`, loss by loss, against recorded values: any change of the mathematics shows here.

The values were recorded in fp32 on a CPU. After a deliberate change `python tests/runs/test_golden.py` prints new ones;
the commit must say why they changed.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

from support.golden import GOLDEN, losses, write_dataset
from support.models import spread

pytestmark = pytest.mark.usefixtures("quick", "one_thread")
QUICK = ("pre_ln", "dnt_s5_msgdw", "llama", "dyt", "dropout", "muon", "adam_mini", "blockwise_warmup_end", "wsd")


@pytest.fixture(scope="module")
def golden_dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "data"
    write_dataset(folder)
    return folder


@pytest.mark.parametrize("name", spread(GOLDEN, fast=QUICK))
def test_losses_are_the_recorded_ones(name, golden_dataset, tmp_path):
    flags, expected = GOLDEN[name]
    assert losses(tmp_path, golden_dataset, flags) == pytest.approx(expected, abs=3e-4)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        write_dataset(data := Path(temporary) / "data")
        for name, (flags, _) in GOLDEN.items():
            found = [round(loss, 5) for loss in losses(Path(temporary) / name, data, flags)]
            print(name, found, file=sys.stderr)
