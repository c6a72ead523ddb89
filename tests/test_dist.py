"""train.py on two processes (torchrun, gloo): the run of one process; stopped and resumed; a bad gradient on a rank."""

import math
import os
import shutil
import signal

import pytest
from helpers import (
    assert_same_run,
    column,
    different,
    finish,
    load,
    metrics,
    run,
    some_step,
    spoil_gradients,
    start,
    wait_for_row,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = dict(max_iters=50, save_interval=9, eval_tokens=15 * 32)  # 15 windows: the ranks have 8 and 7
BAD_STEP = dict(value=math.nan, bad_steps={14}, name="wte.weight")
# train.py with rank 1's gradient of one step spoilt; when it has ended, each rank leaves its exit code and parameters
SPOILT = f"""
import os, sys
from math import nan
from pathlib import Path
import torch
import rundir, train
from helpers import spoil_gradients

models, make, rank = [], train.make_optimizer, int(os.environ["RANK"])
train.make_optimizer = lambda model, config: models.append(model) or make(model, config)
rundir.draw_loss = lambda *_: None
bad_step = {BAD_STEP}
with spoil_gradients(**bad_step if rank == 1 else bad_step | dict(bad_steps=())):
    code = train.main()
torch.save(dict(code=code, model=models[0].state_dict()), Path(__file__).with_name(f"rank{{rank}}.pt"))
sys.exit(code)
"""
# train.py whose rank 1 is slow to read a checkpoint
SLOW = """
import os, sys, time
import rundir, train

load = rundir.load_checkpoint
rundir.load_checkpoint = lambda path: time.sleep(1.5 * int(os.environ["RANK"])) or load(path)
rundir.draw_loss = lambda *_: None
sys.exit(train.main())
"""


def torchrun(processes):
    return "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"


def start_two(folder, script=SPOILT, **config):
    """Two processes that leave their run in folder/run, and rank0.pt and rank1.pt in folder."""
    (folder / "script.py").write_text(script)
    for old in folder.glob("rank*.pt"):
        old.unlink()
    return start(*torchrun(2), script=folder / "script.py", out_dir=folder / "run", **{**CONFIG, **config})


def ranks(folder, *codes):
    """The parameters both ranks ended with, which must be the same; each rank's exit code is one of `codes`."""
    zero, one = (load(folder / f"rank{rank}.pt") for rank in (0, 1))
    assert {zero["code"], one["code"]} <= set(codes)
    assert different(zero["model"], one["model"]) == []
    return zero["model"]


@pytest.fixture(scope="module")
def two(dataset, tmp_path_factory):
    """A run of 50 steps on two processes, with accumulation."""
    folder = tmp_path_factory.mktemp("two")
    out, err = finish(start_two(folder, dataset=dataset, micro_batch_size=2), 0)
    assert "2 processes × 2 accumulation × 2 sequences" in out
    assert out.count("step 50/50 ") == 1  # rank 0 alone speaks
    return folder


TOLERANCES = dict(train_loss=2e-5, val_loss=2e-5, grad_norm=2e-4, lr=0, tokens=0, skipped_steps=0)


def test_two_processes_are_one(two, dataset, tmp_path):
    assert [row["step"] for row in metrics(two / "run")] == list(range(51))
    saved = load(two / "run" / "last.pt")
    assert different(saved["model"], ranks(two, 0)) == []
    for micro in (8, 4, 1):
        out = tmp_path / str(micro)
        with spoil_gradients(**BAD_STEP):
            assert run(out_dir=out, dataset=dataset, micro_batch_size=micro, **CONFIG) == 0
        for name, rel in TOLERANCES.items():
            assert column(two / "run", name) == pytest.approx(column(out, name), rel=rel, abs=0), (micro, name)
    assert column(two / "run", "skipped_steps")[50] == 1  # a bad gradient on one rank is skipped by both
    losses = column(two / "run", "train_loss")
    assert losses[50] < losses[1] - 1  # it learns


def test_layouts_on_two_processes(dataset, tmp_path):
    """What a layout adds to the loop, on both ranks alike: σReparam's power iteration; and gains of every kind."""
    layout = dict(sigma_reparam=True, gain="branch", gain_out="norm", gain_param="magdir", qk_norm=False, mlp="swiglu")
    config = dict(dataset=dataset, max_iters=12, decay_gains="input", **layout)
    finish(start_two(tmp_path, micro_batch_size=2, **config), 0)
    assert different(load(tmp_path / "run" / "last.pt")["model"], ranks(tmp_path, 0)) == []
    assert run(out_dir=tmp_path / "one", **CONFIG | config) == 0
    for name, rel in TOLERANCES.items():
        assert column(tmp_path / "run", name) == pytest.approx(column(tmp_path / "one", name), rel=rel, abs=0), name


def test_stopped_and_resumed(two, dataset, tmp_path):
    """SIGTERM to torchrun, as a cluster sends it: both ranks save and end, and the run goes on exactly."""
    config = dict(dataset=dataset, micro_batch_size=2, init_from="auto")
    process = start_two(tmp_path, **config)
    wait_for_row(process, tmp_path / "run", step := some_step(2, 20))
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "SIGTERM: saving, then exiting" in out
    saved = load(tmp_path / "run" / "last.pt")
    assert step <= saved["step"] < 50
    assert different(saved["model"], ranks(tmp_path, 143)) == []
    finish(start_two(tmp_path, **config), 0)
    ranks(tmp_path, 0)
    assert_same_run(tmp_path / "run", two / "run")


def test_overwriting_waits_until_every_rank_has_read(dataset, tmp_path):
    """A new run in the place of the one whose weights it starts from."""
    assert run(out_dir=tmp_path / "run", dataset=dataset, max_iters=2) == 0
    weights = tmp_path / "run" / "best.pt"
    process = start_two(tmp_path, SLOW, dataset=dataset, init_from=weights, overwrite=True, max_iters=3, timeout_s=30)
    finish(process, 0)
    assert load(tmp_path / "run" / "last.pt")["step"] == 3


def test_processes_that_find_different_checkpoints_say_so(two, dataset, tmp_path):
    """As on two machines without a shared folder: rank 1 finds nothing to resume."""
    script = SLOW.replace('time.sleep(1.5 * int(os.environ["RANK"])) or load(path)', "load(path)")
    script = script.replace("sys.exit(", 'os.chdir(os.environ["RANK"])\nsys.exit(')
    for rank in "01":
        (tmp_path / rank).mkdir()
    shutil.copytree(two / "run", tmp_path / "0" / "run")
    (tmp_path / "script.py").write_text(script)
    config = CONFIG | dict(out_dir="run", dataset=dataset, init_from="auto", max_iters=60)
    process = start(*torchrun(2), script=tmp_path / "script.py", cwd=tmp_path, **config)
    _, err = finish(process, 1)
    assert "processes found different checkpoints" in err
    assert load(tmp_path / "0" / "run" / "last.pt")["step"] == 50 and not (tmp_path / "1" / "run").exists()


def test_one_process_under_torchrun(dataset, tmp_path):
    """`torchrun train.py` is `python train.py`, bit by bit: stopped by Ctrl-C in its terminal, resumed without it."""
    config = dict(dataset=dataset, max_iters=100, eval_interval=30, micro_batch_size=4, dropout=0.2)
    process = start(*torchrun(1), out_dir=tmp_path / "run", **config)
    wait_for_row(process, tmp_path / "run", step := some_step(2, 30))
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "SIGINT: saving, then exiting" in out
    assert step <= load(tmp_path / "run" / "last.pt")["step"] < 100
    assert run(out_dir=tmp_path / "run", init_from="resume", **config) == 0
    assert run(out_dir=tmp_path / "python", **config) == 0
    assert_same_run(tmp_path / "run", tmp_path / "python")
