"""Loss spikes: the run goes back to its last checkpoint and skips the batches since."""

import io
from contextlib import ExitStack, redirect_stdout

import pytest
import torch

import train
from nanodnt.data.windows import PreparedText
from nanodnt.run.directory import RunDirectory
from support.runs import assert_same_run, different, load, logged, metrics, run
from support.strikes import ALWAYS, at_call

pytestmark = pytest.mark.usefixtures("quick")

SPIKE = dict(max_iters=40, eval_interval=20, save_interval=6, loss_spike=0.5)


def spoil(trainer, *_):
    """Spoil the weights."""
    weight = trainer.model.wte.weight
    with torch.no_grad():
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


def spoilt_after(*steps):
    """Spoil the weights after these steps, counted over all runs meanwhile. A context manager."""
    stack = ExitStack()
    for step in steps:
        stack.enter_context(at_call(train, "training_step", step, spoil, after=True))
    return stack


@pytest.fixture(scope="module")
def rolled_back(dataset, tmp_path_factory):
    """(run directory, output, steps whose batches were read) of a run whose weights are spoilt
    after step 21: the loss of step 22 shows it, and the last checkpoint is of step 20."""
    out_dir, output, read = tmp_path_factory.mktemp("rolled_back"), io.StringIO(), []
    note = at_call(PreparedText, "batch", 1, lambda data, step, *_: read.append(step), times=ALWAYS)
    with spoilt_after(21), note, redirect_stdout(output):
        assert run(out_dir=out_dir, dataset=dataset, **SPIKE) == 0
    return out_dir, output.getvalue(), read


def test_a_spike_rolls_back_and_skips_the_batches_since(
    rolled_back, dataset, tmp_path, monkeypatch
):
    out_dir, output, read = rolled_back
    assert "rolled back to step 20: the loss spiked to" in output and "at step 22" in output
    assert "the run skips 2 batches between (1 of 3)" in output
    assert sorted(set(read)) == list(range(43)) and read.count(24) == 1  # one is read ahead
    rows = metrics(out_dir)
    (event,) = [row for row in rows if "rolled_back_from" in row]
    assert (event["step"], event["rolled_back_from"], event["rollbacks"]) == (20, 22, 1)
    assert event["spike_loss"] > event["usual_loss"] + 0.5
    assert [row["step"] for row in rows if row is not event] == list(range(41))
    assert (
        max(row["train_loss"] for row in rows if "train_loss" in row and row["step"] > 5)
        < event["spike_loss"]
    )
    last = load(out_dir / "last.pt")
    assert (last["shift"], last["rollbacks"]) == (2, 1)
    assert last["rows"] == (40 + 2) * 8  # with those of the batches that were skipped

    batch = PreparedText.batch  # the same by hand: from step 20 on the batches of 2 steps later
    monkeypatch.setattr(
        PreparedText, "batch", lambda self, s, *args: batch(self, s + 2 * (s >= 20), *args)
    )
    assert run(out_dir=tmp_path, dataset=dataset, **SPIKE) == 0
    by_hand = load(tmp_path / "last.pt")
    assert different(last["model"], by_hand["model"]) == [] and last["recent"] == by_hand["recent"]
    without = [row for row in logged(out_dir) if "rolled_back_from" not in row[1]]
    assert without == logged(tmp_path)


@pytest.mark.parametrize("crash_at", [20, 21, 30])
def test_a_rolled_back_run_goes_on_exactly(crash_at, rolled_back, dataset, tmp_path):
    """Killed right after the roll-back (it is logged, but nothing is saved), one step later, or
    much later."""
    config = dict(out_dir=tmp_path, dataset=dataset, **SPIKE)

    def die(*_):
        raise KeyboardInterrupt

    # of the row with this step: the first one after the roll-back
    number = 1 if crash_at > 22 else 2
    dies = at_call(
        RunDirectory, "write", number, die, lambda _, row: row["step"] == crash_at, after=True
    )
    # then the roll-back was not saved: it happens again
    with spoilt_after(21, *[23] * (crash_at == 20)):
        with dies:
            assert run(**config) == 130
        assert run(**config, init_from="resume") == 0
    assert_same_run(tmp_path, rolled_back[0])


def test_too_many_spikes_end_the_run_with_the_last_good_checkpoint(dataset, tmp_path, capsys):
    with spoilt_after(21, 24):  # 22 steps, back to 20, two more
        assert run(out_dir=tmp_path, dataset=dataset, **SPIKE, max_rollbacks=1) == 1
    err = capsys.readouterr().err
    assert (
        err.startswith("error: the loss spiked to ")
        and "after 1 roll-back:" in err
        and err.count("\n") == 1
    )
    last = load(tmp_path / "last.pt")
    assert (last["step"], last["shift"], last["rollbacks"]) == (20, 2, 1)
    assert metrics(tmp_path)[-1]["failure"].startswith("the loss spiked")


def test_a_save_between_two_logged_steps_could_be_of_a_spike(dataset, tmp_path, capsys):
    config = dict(out_dir=tmp_path / "run", dataset=dataset, loss_spike=1.0, log_interval=5)
    assert run(**config, save_interval=7, keep_every=10) == 1
    err = capsys.readouterr().err
    assert err == "error: loss_spike needs save_interval to be a multiple of log_interval=5\n"
    assert run(**config, save_interval=5) == 0


def test_what_is_no_spike_changes_nothing(dataset, tmp_path):
    for name, spike in (("with", 0.5), ("without", 0.0)):
        assert (
            run(
                out_dir=tmp_path / name,
                dataset=dataset,
                **SPIKE | dict(loss_spike=spike, max_iters=24),
            )
            == 0
        )
    assert_same_run(tmp_path / "with", tmp_path / "without")
