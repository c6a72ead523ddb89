"""What holds for every task: interrupted runs go on exactly, the micro batch and tracking make no
difference, and evaluation finds what was logged."""

import shutil
import signal

import pytest
import torch

import train
from support.depth import spread
from support.faults import Command, Fault, Trial, strike_all
from support.models import NGPT
from support.prepared import open_prepared
from support.processes import TOLERANCES, assert_same_values
from support.runs import assert_same_run, column, different, evaluated, load, logged, run
from support.strikes import Crash, at_call, at_row, crash, kill_me, patched, some_step
from support.tasks import BIAS, PRE, TASKS, write_all
from support.tolerances import LOSS
from support.vision import AUGMENTED

pytestmark = pytest.mark.usefixtures("quick")

RANDOM = dict(AUGMENTED, drop_path=0.3, dropout=0.1)
SHORT = dict(
    max_iters=12,
    eval_interval=6,
    save_interval=4,
    init_from="auto",
    batch_size=12,
    micro_batch_size=6,
)
HG = dict(
    BIAS, optimizer="adam_mini", micro_batch_size=2, gain="branch", mid_norm="none", pre_norm="both"
)
CASES = {  # name: (task, flags)
    "text": ("text", dict(drop_path=0.4, n_layer=3)),
    "examples": ("examples", dict(dropout=0.2)),
    "documents": ("documents", dict(dropout=0.2)),
    "experts": (
        "experts",
        dict(BIAS, optimizer="muon", n_expert_shared=1, router="sigmoid", dropout=0.1),
    ),
    "images": ("images", RANDOM),
    "experts, loss": ("experts", dict(balance_coef=0.1, z_coef=0.01, dropout=0.2)),
    "experts, adam_mini": ("experts", HG),
    "experts, blockwise": (
        "experts",
        dict(blockwise_lr=True, lr_ratio_router=2, learning_rate=2e-3, bias=True),
    ),
    "images, muon": ("images", dict(RANDOM, optimizer="muon", pool="mean", learning_rate=1e-2)),
    "images, msgdw, DyT": (
        "images",
        dict(
            RANDOM,
            **PRE,
            norm="dyt",
            dyt_bias=True,
            qk_norm=False,
            optimizer="msgdw",
            learning_rate=0.1,
        ),
    ),
    "images, checkpointing": ("images", dict(RANDOM, activation_checkpointing=True)),
    "unified": (
        "text",
        dict(
            qk_norm=False, gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"
        ),
    ),
    "adamw, blockwise, wsd": (
        "text",
        dict(blockwise_lr=True, learning_rate=2e-3, schedule="wsd", bias=True),
    ),
    "sigmaReparam": ("text", dict(sigma_reparam=True)),
    "nGPT": ("text", NGPT),
    "Admin": (
        "text",
        dict(pre_norm="none", mid_norm="none", post_norm="both", input_norm=False, admin=True),
    ),
}
EACH = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def config(folders):
    """config(case, changes) → the flags of a run."""

    def config(case, **changes):
        task, flags = CASES[case]
        return TASKS[task].flags | SHORT | flags | dict(dataset=folders[task]) | changes

    return config


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """whole(case) → the directory of its run without interruption, made when first asked for. Read
    only."""
    made = {}

    def whole(case):
        if case not in made:
            made[case] = tmp_path_factory.mktemp("whole")
            assert run(out_dir=made[case], **config(case)) == 0
        return made[case]

    return whole


@pytest.mark.parametrize("case", spread(CASES, [*TASKS, "unified", "nGPT"]))
def test_goes_on_exactly(case, config, whole, tmp_path):
    """With all that is random. Stopped by SIGTERM, then ended by a crash between two
    checkpoints."""
    with at_row(some_step(2, 5), lambda: kill_me(signal.SIGTERM)):
        assert run(out_dir=tmp_path, **config(case)) == 128 + signal.SIGTERM
    with at_row(some_step(9, 11), crash), pytest.raises(Crash):
        run(out_dir=tmp_path, **config(case))
    assert run(out_dir=tmp_path, **config(case)) == 0
    assert_same_run(tmp_path, whole(case))
    losses = column(tmp_path, "val_loss")
    assert [*losses] == [0, 6, 12]
    # which take longer: see test_it_learns_digits
    assert losses[12] < losses[0] or case.startswith("images")


PLACES = ["forward", "update", "checkpoint", "rename"]


@pytest.mark.deep
def test_killed_anywhere(dataset, tmp_path):
    command = Command(TASKS["experts"].flags | CASES["experts"][1])
    reference = Trial(tmp_path / "reference", command, dataset)
    strike_all(
        Trial(tmp_path / "trial", command, dataset, reference),
        [Fault("SIGKILL", place, 0.4) for place in PLACES],
    )


@pytest.mark.deep
def test_two_processes_killed_anywhere(dataset, tmp_path):
    flags = TASKS["experts"].flags | CASES["experts"][1] | dict(parallel="fsdp", n_expert=3)
    command = Command(flags, processes=2)
    reference = Trial(tmp_path / "reference", command, dataset)
    faults = [Fault("SIGKILL", "forward", 0.5), Fault("SIGTERM", "forward", 0.5, rank=1)]
    strike_all(Trial(tmp_path / "trial", command, dataset, reference), faults)


MICRO = [(task, micro) for task in TASKS for micro in (1, 4)]
FEW = [("text", 4), ("examples", 1), ("documents", 4), ("experts", 4), ("images", 4)]
# what is drawn depends on the micro batch
PLAIN = dict(dropout=0.0, drop_path=0.0, max_iters=8, init_from="scratch")


@pytest.mark.parametrize("case", spread(MICRO, FEW))
def test_the_micro_batch_makes_no_difference(case, config, folders, tmp_path):
    """To losses, gradient norms, and validation losses, of rows that do not come to whole batches
    of 4."""
    task, micro = case
    for name, size in (("whole", 12), ("parts", micro)):
        assert run(out_dir=tmp_path / name, **config(task, micro_batch_size=size, **PLAIN)) == 0
    assert_same_values(tmp_path / "parts", tmp_path / "whole")
    if task in ("examples", "documents"):
        assert open_prepared(folders[task], 32).n_val % 4


# of the others in test_tracking.py
@pytest.mark.parametrize("task", ["examples", "documents", "images"])
def test_tracking_changes_no_bit(task, config, tmp_path):
    for name, interval in (("with", 2), ("without", 0)):
        assert (
            run(out_dir=tmp_path / name, **config(task, max_iters=6, track_interval=interval)) == 0
        )
    tracked, plain = tmp_path / "with", tmp_path / "without"
    assert [*column(tracked, "track")] == [2, 4, 6]
    assert different(load(tracked / "last.pt")["model"], load(plain / "last.pt")["model"]) == []
    assert [
        (step, {k: v for k, v in row.items() if k != "track"}) for step, row in logged(tracked)
    ] == logged(plain)


@EACH
def test_eval_only_prints_the_loss_that_was_logged(task, config, whole, tmp_path, capsys):
    source = whole(task) / "last.pt"
    capsys.readouterr()
    flags = config(task, init_from=source, eval_only=True, micro_batch_size=3)
    assert run(out_dir=tmp_path, **flags) == 0
    expected = column(whole(task), "val_loss")[12]
    allowed = expected * LOSS + 5e-7  # six decimals are printed
    assert evaluated(capsys) == pytest.approx(expected, abs=allowed)


@pytest.mark.deep
@pytest.mark.parametrize("task", ["text", "images"])
def test_a_compiled_run_goes_on_exactly(task, config, tmp_path):
    """From the checkpoint of its middle, compiled anew; on two threads, where a backward pass that
    adds with atomics would differ from run to run."""
    flags = config(
        task, compile=True, n_layer=1, n_embd=64, max_iters=8, eval_interval=4, keep_every=4
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch._dynamo.reset()
        assert run(out_dir=tmp_path / "whole", **flags) == 0
        shutil.copytree(tmp_path / "whole", tmp_path / "halves")
        (tmp_path / "halves" / "prev.pt").unlink()
        (tmp_path / "halves" / "step_4.pt").rename(tmp_path / "halves" / "last.pt")
        torch._dynamo.reset()
        assert run(out_dir=tmp_path / "halves", **flags) == 0
    finally:
        torch.set_num_threads(threads)
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


@pytest.mark.deep
@pytest.mark.parametrize("compile", (True, "blocks"))
@pytest.mark.parametrize("task", ["text", "examples", "images"])
def test_compiled_is_eager(task, compile, config, tmp_path, capsys):
    """The graphs, for evaluation and for training, are compiled before the first step: of the whole
    model, or of embedding and loss and one that all blocks share. Nothing compiles in the run
    itself, whatever its documents."""
    graphs, before = torch._dynamo.utils.counters["stats"], []

    def strictly(function):
        return torch._dynamo.config.patch(error_on_recompile=True)(function)

    torch._dynamo.reset()
    graphs.clear()
    flags = config(task, n_layer=1 if compile is True else 2, **PLAIN)
    assert run(out_dir=tmp_path / "eager", **flags) == 0
    note = at_call(train, "train", 1, lambda *_: before.append(graphs["unique_graphs"]))
    with patched(train, "train", strictly), note:
        assert run(out_dir=tmp_path / "compiled", **flags | dict(compile=compile)) == 0
    assert "compiled in" in capsys.readouterr().out
    assert before == [graphs["unique_graphs"]] and (
        task != "text" or before == [2 if compile is True else 6]
    )
    assert_same_values(
        tmp_path / "compiled", tmp_path / "eager", grad_norm=3 * TOLERANCES["grad_norm"]
    )
