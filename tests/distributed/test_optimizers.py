"""Every optimizer in runs on one to four processes under DDP: the same losses, parameters and optimizer state."""

import shutil
from math import nan

import pytest

from model import GPT, GPTConfig
from support.processes import assert_close, assert_same_values, left, play, processes
from support.runs import assert_same_run, column, different, load, spoil_gradients, tensors

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.deep]

CONFIG = dict(block_size=32, max_iters=12, lr_decay_iters=12, eval_interval=12, eval_tokens=15 * 32)
OPTIMIZERS = {
    "adamw": dict(),
    "nesterov": dict(optimizer="msgdw", learning_rate=0.1, nesterov=True),
    "dampening": dict(optimizer="msgdw", learning_rate=0.5, dampening=0.5),
    "muon": dict(optimizer="muon", mlp="swiglu", n_kv_head=1),  # 14 matrices of 4 shapes
    "adam_mini": dict(optimizer="adam_mini"),
    "blockwise": dict(blockwise_lr=True, learning_rate=2e-3),
}


def make_run(rank, world, out, dataset, name, **how):
    """A run whose last process has a bad gradient in step 8, before DDP averages."""
    within = spoil_gradients(nan, {7} if rank == world - 1 else (), "wte.weight")
    play(rank, world, out, within=within, dataset=dataset, **CONFIG | OPTIMIZERS[name] | how)


def make_runs(rank, world, folder, dataset):
    for name in OPTIMIZERS:
        make_run(rank, world, folder / f"{name}{world}", dataset, name)


@pytest.fixture(scope="module")
def made(dataset, tmp_path_factory):
    """A folder with a run of every optimizer on one, two, three and four processes."""
    folder = tmp_path_factory.mktemp("made")
    make_runs(0, 1, folder, dataset)
    for world in (2, 3, 4):
        processes(world, make_runs, folder, dataset)
    return folder


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_the_same_on_several_processes(name, world, made):
    """To rounding: losses, gradient norms, parameters, optimizer state. All ranks end with the same bits. A gradient
    that is bad on one rank is skipped by all."""
    out, one = made / f"{name}{world}", made / f"{name}1"
    assert_same_values(out, one, train_loss=3e-6, val_loss=3e-6)
    assert column(out, "skipped_steps")[12] == 1 and column(out, "grad_norm")[8] is None
    got, expected = load(out / "last.pt"), load(one / "last.pt")
    for part in left(out, world):
        assert different(part["end"], got["model"]) == []
    begun = GPT(GPTConfig(**got["model_config"]), seed=1337).state_dict()
    assert_close(got["model"], expected["model"], 5e-4, begun)
    assert_close(tensors(got["optimizer"]["state"]), tensors(expected["optimizer"]["state"]), 1e-3)


def stop_and_resume(rank, world, out, copy, dataset):
    make_run(rank, world, out, dataset, "muon", init_from="auto", stop_in=5)
    if rank == 0:
        shutil.copytree(out, copy)
    make_run(rank, world, out, dataset, "muon", init_from="auto")


def resume(rank, world, out, dataset):
    make_run(rank, world, out, dataset, "muon", init_from="resume")


def test_muon_stopped_and_resumed(made, dataset, tmp_path):
    """One of two processes gets SIGTERM, and the run goes on exactly; with three processes, to rounding."""
    processes(2, stop_and_resume, tmp_path / "run", tmp_path / "stopped", dataset)
    assert load(tmp_path / "stopped" / "last.pt")["step"] == 5
    assert_same_run(tmp_path / "run", made / "muon2")
    processes(3, resume, tmp_path / "stopped", dataset)
    for field in ("train_loss", "val_loss"):
        assert column(tmp_path / "stopped", field) == pytest.approx(column(made / "muon1", field), rel=3e-6), field
