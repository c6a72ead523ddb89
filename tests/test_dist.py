"""train.py on two processes (torchrun, gloo): the run of one process; stopped and resumed; a bad gradient on a rank.
Then every optimizer on one to seven processes.
"""

import io
import math
import multiprocessing
import os
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partial
from itertools import count, product

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
    tensors,
    wait_for_row,
)

import optim
import rundir
import train
from model import GPT, GPTConfig

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


# ---------------------------------------------------------------------------- every optimizer on one to seven processes

# These processes are forked from one that has imported torch, which takes longer than all they do.
multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo", "pytest"])

SPREAD = dict(batch_size=12, max_iters=12, eval_interval=12, eval_tokens=15 * 32, timeout_s=60)
KINDS = {
    "adamw": dict(),
    "nesterov": dict(optimizer="msgdw", learning_rate=0.1, nesterov=True),
    "dampening": dict(optimizer="msgdw", learning_rate=0.5, dampening=0.5),
    "muon": dict(optimizer="muon", mlp="swiglu", n_kv_head=1),  # 14 matrices of 4 shapes
    "adam_mini": dict(optimizer="adam_mini"),
    "blockwise": dict(blockwise_lr=True, learning_rate=2e-3),
}


def processes(world, function, *args):
    """function(rank, world, *args) on each of `world` processes; what one of them raises is raised here."""
    mp.start_processes(function, (world, *args), nprocs=world, start_method="forkserver")


def meeting(rank, world, path):
    """Where processes meet: at a file, a new one each time, since a port would be taken when the next run begins."""
    return dict(init_method=f"file://{path}.meeting", rank=rank, world_size=world)


def spread_run(rank, world, out, stop_in=0, **config):
    """A run on this process, one of `world`. The last has a bad gradient in step 8, and gets SIGTERM in step `stop_in`.
    Each leaves its parameters next to `out`."""
    torch.set_num_threads(1)
    last, models, make, said = rank == world - 1, [], train.make_optimizer, io.StringIO()

    def make_and_watch(model, config):
        optimizer, steps = make(model, config), count(1)
        if last:
            optimizer.register_step_post_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGTERM) if next(steps) == stop_in else None
            )
        models.append(model)
        return optimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "draw_loss", lambda *_: None)
        patch.setattr(train, "make_optimizer", make_and_watch)
        if world > 1:
            for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="file").items():
                patch.setenv(name, str(value))
            meet = meeting(rank, world, f"{out}.{stop_in}")
            patch.setattr(dist, "init_process_group", partial(dist.init_process_group, **meet))
        with redirect_stdout(said), redirect_stderr(said), spoil_gradients(math.nan, {7} if last else (), "wte.weight"):
            code = run(out_dir=out, **SPREAD | config)
    assert code == (143 if stop_in else 0), said.getvalue()
    torch.save(models[0].state_dict(), f"{out}.rank{rank}")


def spread_runs(rank, world, folder, dataset):
    for name, flags in KINDS.items():
        spread_run(rank, world, folder / f"{name}{world}", dataset=dataset, **flags)


@pytest.fixture(scope="module")
def spread(dataset, tmp_path_factory):
    """A folder with a run of every optimizer on one, two, three and four processes."""
    folder = tmp_path_factory.mktemp("spread")
    spread_runs(0, 1, folder, dataset)
    for world in (2, 3, 4):
        processes(world, spread_runs, folder, dataset)
    return folder


def assert_close(got, expected, rel, start=None):
    """The difference is small next to the tensor, or next to its distance from where it started."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = (tensor - start[name] if start else tensor).norm()
        assert (got[name] - tensor).norm() <= rel * scale, (name, (got[name] - tensor).norm() / scale)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_every_optimizer_is_the_same_on_several_processes(name, world, spread):
    """To rounding: losses, gradient norms, parameters, optimizer state. All ranks end with the same bits. A gradient
    that is bad on one rank is skipped by all."""
    out, one = spread / f"{name}{world}", spread / f"{name}1"
    for field, rel in dict(TOLERANCES, train_loss=3e-6, val_loss=3e-6).items():
        assert column(out, field) == pytest.approx(column(one, field), rel=rel, abs=0), field
    assert column(out, "skipped_steps")[12] == 1 and column(out, "grad_norm")[8] is None
    got, expected = load(out / "last.pt"), load(one / "last.pt")
    for rank in range(world):
        assert different(load(f"{out}.rank{rank}"), got["model"]) == [], rank
    begun = GPT(GPTConfig(**got["model_config"]), seed=1337).state_dict()
    assert_close(got["model"], expected["model"], 5e-4, begun)
    assert_close(tensors(got["optimizer"]["state"]), tensors(expected["optimizer"]["state"]), 1e-3)


def stop_and_resume(rank, world, out, copy, dataset):
    config = dict(dataset=dataset, init_from="auto", **KINDS["muon"])
    spread_run(rank, world, out, stop_in=5, **config)
    if rank == 0:
        shutil.copytree(out, copy)
    spread_run(rank, world, out, **config)


def resume(rank, world, out, dataset):
    spread_run(rank, world, out, dataset=dataset, init_from="resume", **KINDS["muon"])


def test_muon_stopped_and_resumed(spread, dataset, tmp_path):
    """One of two processes gets SIGTERM, and the run goes on exactly; with three processes, to rounding."""
    processes(2, stop_and_resume, tmp_path / "run", tmp_path / "stopped", dataset)
    assert load(tmp_path / "stopped" / "last.pt")["step"] == 5
    assert_same_run(tmp_path / "run", spread / "muon2")
    processes(3, resume, tmp_path / "stopped", dataset)
    for field in ("train_loss", "val_loss"):
        assert column(tmp_path / "stopped", field) == pytest.approx(column(spread / "muon1", field), rel=3e-6), field


MATRICES = {"6 of 3 shapes": dict(n_layer=1), "14 of 4 shapes": dict(n_layer=2, mlp="swiglu", n_kv_head=1)}  # Muon's


def muon_steps(rank, world, folder):
    """Six steps from gradients that are the same everywhere, in bf16 and fp32, matrices singly and in stacks. Those of
    the third are not finite; in the fifth some matrices have none. Leaves parameters and optimizer state in a file."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meeting(rank, world, folder / str(world)))
    found = {}
    for how, dtype, singly in product(MATRICES, ("bfloat16", "float32"), (True, False)):
        model = GPT(GPTConfig(n_head=2, n_embd=32, block_size=8, vocab_size=31, **MATRICES[how]))
        model.set_compute_dtype(getattr(torch, dtype))
        optim.fill_defaults(config := train.TrainConfig(optimizer="muon"))
        optimizer, random = optim.make_optimizer(model, config), torch.Generator().manual_seed(0)
        for step in range(6):
            for name, p in model.named_parameters():
                p.grad = torch.randn(p.shape, generator=random)
                if step == 2:
                    p.grad[0] = math.inf
                if step == 4 and name.endswith(("q.weight", "down.weight")):
                    p.grad = None
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.found_inf = torch.tensor(float(step == 2))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(optim, "one_at_a_time", lambda device, singly=singly: singly)
                optimizer.step()
        state = [model.state_dict(), optimizer.state_dict()["state"]]
        found[f"{how}, {dtype}, {'singly' if singly else 'in stacks'}"] = state
    torch.save(found, folder / f"{world}.{rank}")
    if world > 1:
        dist.destroy_process_group()


def test_muons_steps_are_the_same_bits_on_any_number_of_processes(tmp_path):
    """Seven are more than one block has matrices."""
    muon_steps(0, 1, tmp_path)
    one = load(tmp_path / "1.0")
    for world in (2, 3, 4, 7):
        processes(world, muon_steps, tmp_path)
        for rank in range(world):
            found = load(tmp_path / f"{world}.{rank}")
            assert [case for case in one if different(found[case], one[case])] == [], (world, rank)
