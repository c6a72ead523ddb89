"""What strikes a run in this process: bad gradients, signals and crashes in a chosen call or after
a chosen row."""

import itertools
import os
import random
from contextlib import contextmanager

import pytest


@contextmanager
def patched(owner, name: str, wrap):
    """Replace owner.NAME by wrap(owner.NAME)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrap(getattr(owner, name)))
        yield


def optimizers(prepare):
    """Call prepare(model, optimizer) when a run makes its optimizer. A context manager."""
    import train

    def wrap(make):
        def make_and_prepare(model, config):
            optimizer = make(model, config)
            prepare(model, optimizer)
            return optimizer

        return make_and_prepare

    return patched(train, "make_optimizer", wrap)


def steps_noted(current: list):
    """Keep current[0] at the step being made, counted from 0. A context manager."""
    import train

    def wrap(set_learning_rates):
        def note_and_set(optimizer, step, config):
            current[:] = [step]
            return set_learning_rates(optimizer, step, config)

        return note_and_set

    return patched(train, "set_learning_rates", wrap)


VICTIM = "blocks.1.mlp.f.up.weight"  # a parameter of a tiny run, to spoil


@contextmanager
def spoil_gradients(value: float, bad_steps, name: str):
    """Put `value` into the gradient of parameter `name` in the training steps `bad_steps`, counted
    from 0."""
    current = []

    def spoil(grad):
        if current[0] in bad_steps:
            grad = grad.clone()
            grad.view(-1)[-1] = value
        return grad

    def add_hook(model, optimizer):
        dict(model.named_parameters())[name].register_hook(spoil)

    with steps_noted(current), optimizers(add_hook):
        yield


# ------------------------------------------------------------------------------------ interruptions


class Crash(BaseException):
    """Ends a run on the spot, as a power cut would: nothing is caught, nothing is saved."""


def crash(*_):
    raise Crash


def kill_me(*signals):
    """Send signals to this process."""
    for signum in signals:
        os.kill(os.getpid(), signum)


ALWAYS = 10**9  # times


def at_call(
    owner,
    name: str,
    number: int,
    action,
    when=lambda *args: True,
    times: int = 1,
    after: bool = False,
):
    """Do action(*args) in call `number` (from 1) of owner.NAME for which when(*args) is true, and
    in so many `times` in all, before its work or after it. A context manager."""

    def wrap(function):
        calls = itertools.count(1)

        def call(*args, **kwargs):
            now = when(*args) and number <= next(calls) < number + times
            if now and not after:
                action(*args)
            result = function(*args, **kwargs)
            if now and after:
                action(*args)
            return result

        return call

    return patched(owner, name, wrap)


def at_row(step: int, action):
    """Do `action()` right after the row of `step` is written to metrics.jsonl. A context
    manager."""
    from nanodnt.run.directory import RunDirectory

    here = dict(when=lambda self, row: row["step"] == step, times=ALWAYS, after=True)
    return at_call(RunDirectory, "write", 1, lambda *_: action(), **here)


def some_step(low: int, high: int) -> int:
    """A step drawn anew in every test run; printed, so that a failure shows it."""
    step = random.randint(low, high)
    print(f"drawn: step {step}")
    return step
