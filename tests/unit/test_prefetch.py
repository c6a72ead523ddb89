"""Prefetch: batches read ahead in a thread arrive with their step, and so do its errors."""

import threading

import numpy as np
import pytest

from nanodnt.data import Prefetch


def test_prefetch_gives_the_step_asked_for():
    steps = [0, 1, 2, 2, 7, 3, 100, 0]
    ahead = Prefetch(lambda step: step)
    assert [ahead(step) for step in steps] == steps


def test_prefetch_reads_each_batch_once_and_while_the_step_is_made():
    """When the batch of a step is there, fetch of the next has begun in another thread; the caller
    does not wait."""
    fetched, begun, may_end = [], threading.Event(), threading.Event()

    def fetch(step):
        fetched.append((step, threading.get_ident()))
        if step == 10:
            begun.set()
            assert may_end.wait(30)
        return np.full(3, step)  # without a truth value

    ahead = Prefetch(fetch)
    for step in range(10):
        assert (ahead(step) == step).all()
    assert begun.wait(30)
    may_end.set()
    assert [step for step, _ in fetched] == list(range(11)) and threading.get_ident() not in dict(
        fetched
    ).values()
    assert (ahead(10) == 10).all()


def test_what_fetch_raises_arrives_with_its_step():
    ahead = Prefetch(lambda step: 6 // (3 - step))
    assert ahead(2) == 6
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ahead(3)
    assert [ahead(1), ahead(4)] == [3, -6]
