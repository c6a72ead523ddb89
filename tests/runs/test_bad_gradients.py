"""Gradients and states that are not finite: steps are skipped, the run ends after too many, nothing
bad is saved."""

import math
import signal

import pytest

import train
from support.hostile import refusal
from support.runs import assert_same_run, bits, column, different, load, metrics, run, tensors
from support.strikes import VICTIM, at_call, at_row, kill_me, optimizers, spoil_gradients

pytestmark = pytest.mark.usefixtures("quick")

# with their learning rates
OPTIMIZERS = dict(adamw=1e-2, msgdw=0.5, muon=1e-2, adam_mini=1e-2, soap=1e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_gradient_is_skipped(optimizer, dataset, tmp_path):
    changed = []  # one entry a step: names of what it changed

    def watch(model, optimizer):
        def now():
            return bits([dict(model.named_parameters()), optimizer.state_dict()["state"]])

        def after(*_):
            before = changed.pop()
            changed.append({name for name, value in now().items() if value != before.get(name)})

        optimizer.register_step_pre_hook(lambda *_: changed.append(now()))
        optimizer.register_step_post_hook(after)

    bad = {4, 5, 8, 9}
    with optimizers(watch), spoil_gradients(math.nan, bad, VICTIM):
        config = dict(
            optimizer=optimizer,
            learning_rate=OPTIMIZERS[optimizer],
            weight_decay=0.1,
            max_skipped=3,
        )
        assert run(out_dir=tmp_path, dataset=dataset, **config) == 0
    assert [step for step, names in enumerate(changed) if not names] == sorted(bad)
    last = load(tmp_path / "last.pt")
    # a good step changes them all, but not SOAP's first one
    assert changed[1] >= {f"/0/{name}" for name in last["model"]}
    skipped = [sum(b < step for b in bad) for step in range(1, 21)]
    assert list(column(tmp_path, "skipped_steps").values()) == skipped and last["skipped"] == 4
    assert [step for step, norm in column(tmp_path, "grad_norm").items() if norm is None] == [
        5,
        6,
        9,
        10,
    ]


def test_too_many_bad_gradients_end_the_run(short, dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path, dataset=dataset, max_iters=30, save_interval=5, max_skipped=3)
    with spoil_gradients(math.inf, range(13, 1000), VICTIM):
        code = run(**config)
    refusal(
        capsys,
        code,
        "3 steps in a row, up to about step 16,",
        f"first bad tensor: the gradient of {VICTIM})",
    )
    last, prev = (load(tmp_path / name) for name in ("last.pt", "prev.pt"))
    assert (last["step"], last["skipped"], prev["step"], prev["skipped"]) == (16, 3, 15, 2)
    assert different(last["model"], prev["model"]) == []
    assert run(**config, init_from="resume") == 0
    rows = {row["step"]: row for row in metrics(tmp_path)}
    usual = {step: loss for step, loss in column(short, "train_loss").items() if step <= 13}
    assert {step: row["train_loss"] for step, row in rows.items() if 0 < step <= 13} == usual
    assert (
        rows[14]["skipped_steps"] == 1
        and rows[16]["skipped_steps"] == rows[30]["skipped_steps"] == 3
    )


def test_bad_gradients_between_two_logged_steps_count(dataset, tmp_path, capsys):
    """Four in a row, all over when the next row is logged."""
    for allowed, code in ((5, 0), (4, 1)):
        with spoil_gradients(math.nan, range(3, 7), VICTIM):
            config = dict(
                out_dir=tmp_path / str(allowed),
                dataset=dataset,
                log_interval=20,
                max_skipped=allowed,
            )
            assert run(**config) == code
    assert "4 steps in a row" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["parameter", "exp_avg", "momentum_buffer"])
def test_a_state_that_is_not_finite_is_never_saved(what, dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path, dataset=dataset, save_interval=1)
    config |= dict(optimizer="msgdw", learning_rate=0.1) if what == "momentum_buffer" else {}

    def spoil(trainer, *_):
        p = dict(trainer.model.named_parameters())[VICTIM]
        (p if what == "parameter" else trainer.optimizer.state[p][what]).data[0, 0] = math.inf

    with at_call(train, "training_step", 8, spoil, after=True):
        code = run(**config)
    refusal(capsys, code, "not finite at step 8", VICTIM if what == "parameter" else what)
    found = {path.name: load(path) for path in tmp_path.glob("*.pt")}
    assert {name: c["step"] for name, c in found.items()} == {
        "last.pt": 7,
        "prev.pt": 6,
        "best.pt": 0,
    }
    assert all(t.isfinite().all() for t in tensors(found).values())


def test_fp16_with_loss_scaling_resumes(dataset, tmp_path):
    """The scale is halved by an overflow in step 4, and that is remembered."""
    config = dict(dataset=dataset, dtype="float16")
    with spoil_gradients(math.inf, {3}, VICTIM):
        assert run(out_dir=tmp_path / "whole", **config) == 0
    with spoil_gradients(math.inf, {3}, VICTIM), at_row(12, lambda: kill_me(signal.SIGTERM)):
        assert run(out_dir=tmp_path / "run", **config) == 143
    scaler = load(tmp_path / "run" / "last.pt")["scaler"]
    assert scaler["scale"] == 2.0**15 and scaler["_growth_tracker"] == 8
    assert run(out_dir=tmp_path / "run", **config, init_from="resume") == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert load(tmp_path / "run" / "last.pt")["scaler"]["_growth_tracker"] == 16
    assert column(tmp_path / "run", "skipped_steps")[20] == 1
    losses = column(tmp_path / "run", "train_loss")
    assert losses[20] < losses[1] - 0.2
