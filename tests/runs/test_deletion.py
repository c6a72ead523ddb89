"""Without interop/, studies/, their commands, data and tests, the core trains, samples and passes
its tests."""

import sys

import pytest

import sample
from support import runs
from support.runs import TINY, column, make_dataset
from support.trees import call, copy_tree

COMMANDS = ["export.py", "evaluate.py", "chat.py", "analyze.py", "sweep.py", "reproduce.py"]
DATA = ["data/sft", "data/commonsense170k"]
DELETED = ["interop", "studies", *COMMANDS, *DATA, "tests/interop", "tests/studies"]
FLAGS = {name: value for name, value in TINY.items() if name != "max_iters"} | dict(eval_interval=2)
TRAIN = (
    f"train.py {' '.join(f'--{name}={value}' for name, value in FLAGS.items())} --dataset=data/walk"
)
OUT = " --out_dir=out/run"
ONE_BY_ONE = """
import runpy, sys
codes = []
for line in sys.argv[1:]:
    sys.argv = line.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        codes.append(e.code or 0)
assert len({*codes}) < 2, codes
sys.exit(max(codes, default=0))
"""
BENCH = "--data=random --device=cpu --compile=False --n_layer=1 --n_head=2 --n_embd=16"
BENCH += " --block_size=16 --vocab_size=50 --batch_size=4 --steps=2"


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    root = copy_tree(tmp_path_factory.mktemp("core") / "tree", DELETED)
    make_dataset(root / "data" / "walk")
    return root


def call_all(core, *lines, code=0):
    """All in one process, which imports torch once."""
    return call(core, [sys.executable, "-c", ONE_BY_ONE, *lines], code)


@pytest.mark.usefixtures("quick")
def test_the_core_imports_no_other_ring(dataset, tmp_path, monkeypatch, capsys):
    for name in ["interop", "studies", *sys.modules]:
        if name.partition(".")[0] in ("interop", "studies"):
            monkeypatch.setitem(sys.modules, name, None)
    flags = dict(dataset=dataset, out_dir=tmp_path, eval_interval=2, track_interval=2)
    assert (
        runs.run(**flags, max_iters=4) == 0
        and runs.run(**flags, max_iters=6, init_from="resume") == 0
    )
    assert (
        runs.call(
            sample.main, f"--out_dir={tmp_path}", "--start=AB", "--max_new_tokens=8", "--device=cpu"
        )
        == 0
    )
    assert "\nAB" in capsys.readouterr().out


@pytest.mark.deep
def test_the_core_runs(core):
    lines = [
        f"{TRAIN}{OUT} --max_iters=4 --track_interval=2",
        f"{TRAIN}{OUT} --max_iters=6 --init_from=resume",
    ]
    lines += [
        "sample.py --out_dir=out/run --start=AB --max_new_tokens=8 --device=cpu",
        f"bench.py {BENCH}",
    ]
    printed = call_all(core, *lines)
    assert (
        "done at step 4" in printed
        and "done at step 6" in printed
        and "\nAB" in printed
        and "tokens/s" in printed
    )
    assert [*column(core / "out" / "run", "val_loss")] == [0, 2, 4, 6]


@pytest.mark.deep
def test_what_was_deleted_is_missed_in_one_line(core):
    lines = f"{TRAIN} --out_dir=out/gpt2 --init_from=gpt2", "sample.py --init_from=gpt2"
    errors = call_all(core, *lines, code=1).splitlines()
    assert len(errors) == 2 and all(
        line.startswith("error: ") and "interop" in line for line in errors
    ), errors


@pytest.mark.deep
def test_it_runs_on_two_processes(core):
    torchrun = "torchrun --standalone --nproc_per_node=2"
    assert "done at step 4" in call(
        core, f"{torchrun} {TRAIN} --out_dir=out/two --max_iters=4 --parallel=fsdp"
    )


@pytest.mark.deep
def test_its_tests_are_collected_and_pass(core):
    files = "layers layout_equations optim data step configurator"
    chosen = " or ".join(f"test_{name}.py" for name in files.split())
    found = call(
        core, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests", "-k", chosen]
    )
    assert " passed" in found
