"""Without interop/, studies/, their commands, data and tests, the core trains, samples and passes its tests."""

import sys

import pytest

from support.runs import TINY, column, make_dataset
from support.trees import call, copy_tree

COMMANDS = ["export.py", "evaluate.py", "analyze.py", "sweep.py", "reproduce.py"]
DATA = ["data/sft", "data/commonsense170k"]
DELETED = ["interop", "studies", *COMMANDS, *DATA, "tests/interop", "tests/studies"]
FLAGS = {name: value for name, value in TINY.items() if name != "max_iters"} | dict(eval_interval=2)
TRAIN = f"train.py {' '.join(f'--{name}={value}' for name, value in FLAGS.items())} --dataset=data/walk"
OUT = " --out_dir=out/run"
ONE_BY_ONE = """
import runpy, sys
for line in sys.argv[1:]:
    sys.argv = line.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        assert not e.code, line
"""
BENCH = "--data=random --device=cpu --compile=False --n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=50"
BENCH += " --batch_size=4 --steps=2"


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    root = copy_tree(tmp_path_factory.mktemp("core") / "tree", DELETED)
    make_dataset(root / "data" / "walk")
    return root


def test_the_core_runs(core):
    """All in one process, which imports torch once."""
    lines = [f"{TRAIN}{OUT} --max_iters=4 --track_interval=2", f"{TRAIN}{OUT} --max_iters=6 --init_from=resume"]
    lines += ["sample.py --out_dir=out/run --start=AB --max_new_tokens=8 --device=cpu"]
    printed = call(core, [sys.executable, "-c", ONE_BY_ONE, *lines])
    assert "done at step 4" in printed and "done at step 6" in printed and "\nAB" in printed
    assert [*column(core / "out" / "run", "val_loss")] == [0, 2, 4, 6]


@pytest.mark.deep
def test_what_was_deleted_is_missed_in_one_line(core):
    for line in (f"{TRAIN} --out_dir=out/gpt2 --init_from=gpt2", "sample.py --init_from=gpt2"):
        err = call(core, f"python {line}", code=1)
        assert err.startswith("error: ") and "interop" in err and err.count("\n") == 1, err


@pytest.mark.deep
def test_its_tests_are_collected(core):
    found = call(core, "python -m pytest --collect-only -p no:cacheprovider tests")
    assert "tests/unit/test_layers.py" in found and "tests/docs/test_docs.py" in found


@pytest.mark.deep
def test_it_runs_on_two_processes_and_is_timed(core):
    torchrun = "torchrun --standalone --nproc_per_node=2"
    assert "done at step 4" in call(core, f"{torchrun} {TRAIN} --out_dir=out/two --max_iters=4 --parallel=fsdp")
    assert "tokens/s" in call(core, f"python bench.py {BENCH}")


@pytest.mark.deep
def test_its_tests_pass(core):
    files = "test_layers test_layout_equations test_optim test_data test_step test_configurator test_house"
    found = call(core, f"python -m pytest -p no:cacheprovider {' '.join(f'tests/unit/{f}.py' for f in files.split())}")
    assert " passed" in found
