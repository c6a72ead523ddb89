"""Examples packed into rows: targets, positions and order against plain Python, token by token."""

import os
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodnt.data.examples import PreparedExamples, pack
from nanodnt.data.windows import PreparedText
from support import examples as made
from support.depth import examples as count
from support.images import change_meta
from support.prepared import open_prepared
from support.runs import put_file

EOT, T, VAL = 256, 16, made.uneven_examples(1, 31, 2, 17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made.write_examples(
        tmp_path_factory.mktemp("examples") / "d", train=made.uneven_examples(0, 90, 2, 17), val=VAL
    )


def fullness_plainly(sizes, room):
    """How much each row holds, sorted, after best-fit decreasing, which looks at all rows each
    time. Which one of equally full rows is taken makes no difference to this."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fullest = max((row for row in rows if row + size <= room), default=0)
        if fullest:
            rows.remove(fullest)
        rows.append(fullest + size)
    return sorted(rows)


def check_rows(batch, examples, block_size):
    """Every row is whole examples, (ids, marks), and padding; all rows together hold `examples`,
    each once."""
    fullness, seen = [], Counter()
    for x, y, positions in zip(*(values.tolist() for values in batch), strict=True):
        parts = list(pairwise([i for i, p in enumerate(positions) if p == 0] + [block_size]))
        assert positions == [p for a, b in parts for p in range(b - a)]
        if set(y[slice(*parts[-1])]) == {-1}:  # every example has an answer
            assert set(x[slice(*parts.pop())]) == {EOT}
        seen.update((tuple(x[a:b]), tuple(y[a:b])) for a, b in parts)
        fullness.append(parts[-1][1])
    targets = (
        (i if mark == 1 else -1 for i, mark in zip(ids[1:], marks[1:], strict=True))
        for ids, marks in examples
    )
    assert seen == Counter(
        (tuple(ids[:-1]), tuple(y)) for (ids, _), y in zip(examples, targets, strict=True)
    )
    assert sorted(fullness) == fullness_plainly([len(ids) - 1 for ids, _ in examples], block_size)


def test_the_validation_split_is_packed_too(folder):
    data = PreparedExamples(folder, T, doc_mask=True)
    everything = data.validation()
    check_rows(data.val_batch(everything, len(everything)), VAL, T)
    assert data.validation(4 * T).tolist() == [i * len(everything) // 4 for i in range(4)]
    some, whole = data.val_batch(everything[[3, 1]], 5), data.val_batch(everything, len(everything))
    assert all(
        (values[:2] == all_values[[3, 1]]).all()
        for values, all_values in zip(some, whole, strict=True)
    )
    assert (some[1][2:] == -1).all() and (some[2][2:] == np.arange(T)).all()


def test_a_known_row(tmp_path):
    examples = [made.example(("ab", "c"), ("d", "ef")), made.example(("x", "y"))]
    data = PreparedExamples(
        made.write_examples(tmp_path / "d", train=examples, val=examples), 16, doc_mask=True
    )
    x, y, positions = (values.tolist() for values in data.batch(0, 1))
    a, b, c, d, e, f, x_, y_ = b"abcdefxy"
    assert x == [[EOT, a, b, c, EOT, d, e, f, EOT, x_, y_, EOT, EOT, EOT, EOT, EOT]]
    assert y == [[-1, -1, c, EOT, -1, e, f, EOT, -1, y_, EOT, -1, -1, -1, -1, -1]]
    assert positions == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 0, 1, 2, 3, 4]]
    assert data.describe() == "2 examples in 1 row an epoch, 69% filled"
    assert data.loss_tokens(0, 1) == 7 and data.loss_tokens(3, 4) == 28


@given(st.lists(st.integers(1, 12), min_size=1, max_size=40), st.integers(12, 20))
@settings(max_examples=count(100, 2000), deadline=None)
def test_packing_is_best_fit_decreasing(sizes, room):
    rows = pack(np.array(sizes), room)
    assert set(rows.tolist()) == set(range(max(rows) + 1))
    held = [
        sum(size for size, r in zip(sizes, rows, strict=True) if r == row)
        for row in range(max(rows) + 1)
    ]
    assert max(held) <= room and sorted(held) == fullness_plainly(sizes, room)


def test_equal_examples_are_taken_in_the_order_of_the_file():
    assert pack(np.array([3, 5] * 50), 8).tolist() == [
        row for i in range(50) for row in (49 - i, i)
    ]


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 20))
@settings(max_examples=count(15, 300), deadline=None)
def test_an_epoch_is_every_example_once_in_whole_rows_token_by_token(
    tmp_path_factory, seed, n, high
):
    examples = made.uneven_examples(seed, n, 2, high)
    folder = made.write_examples(tmp_path_factory.mktemp("any"), train=examples, val=examples[:1])
    data = PreparedExamples(folder, 20, doc_mask=True)
    batch = data.batch(1, data.n_train)
    assert all(values.dtype == np.int64 for values in batch)
    check_rows(batch, examples, 20)
    for values, same in zip(
        PreparedExamples(folder, 20).batch(1, data.n_train), batch[:2], strict=True
    ):
        assert (values == same).all()  # without doc_mask there are no positions
    assert data.loss_tokens(1, data.n_train) == (batch[1] != -1).sum()


def test_epochs_hold_the_same_rows_in_another_order(folder):
    data = PreparedExamples(folder, T)
    epochs = [[row.tobytes() for row in data.batch(epoch, data.n_train)[0]] for epoch in range(3)]
    assert (
        len({tuple(sorted(epoch)) for epoch in epochs}) == 1
        and len({tuple(epoch) for epoch in epochs}) == 3
    )
    # the last two rows of an epoch, the first of the next
    _, targets = data.batch(1, data.n_train, offset=-2)
    assert data.loss_tokens(1, data.n_train, offset=-2) == (targets != -1).sum()


def test_only_the_room_for_the_longest_is_needed(tmp_path):
    examples = [made.example(([5], [6] * n)) for n in (20, 36, 37)]  # of 23, 39 and 40 tokens
    folder = made.write_examples(tmp_path / "d", train=examples, val=examples[:2])
    assert PreparedExamples(folder, 39).n_train == 3
    with pytest.raises(ValueError) as error:
        PreparedExamples(folder, 34)
    for words in ("3 examples", "block_size+1 = 35 tokens (the longest has 40)", "--max_tokens=34"):
        assert words in str(error.value)


def fill(begin, end, value):
    """Change train.marks, with a hash that fits."""

    def apply(folder):
        marks = bytearray((folder / "train.marks").read_bytes())
        marks[begin:end] = bytes([value]) * len(marks[begin:end])
        entry = put_file(folder / "train.marks", bytes(marks))
        change_meta(folder, lambda meta: meta["splits"]["train"].update(marks=entry))

    return apply


@pytest.fixture
def small(tmp_path):
    examples = [made.example(("ab", "c"))] * 4  # five tokens each
    return made.write_examples(tmp_path / "d", train=examples, val=examples)


@pytest.mark.parametrize(
    "damage, words",
    [
        (fill(0, 1, 3), "does not mark 4 examples, each with its first token: prepare"),
        (fill(1, 5, 0), "does not mark 4 examples, each with its first token and an answer"),
        (
            lambda folder: change_meta(folder, lambda m: m["splits"]["train"].pop("marks")),
            "is damaged",
        ),
        (lambda folder: change_meta(folder, lambda m: m.update(eot=None)), "is damaged"),
    ],
)
def test_damaged_marks_are_refused_in_one_line(small, damage, words):
    assert PreparedExamples(small, 8).n_train == 2
    damage(small)
    with pytest.raises(ValueError, match=words) as error:
        PreparedExamples(small, 8)
    assert "\n" not in str(error.value) and "prepare" in str(error.value)


def test_a_file_cut_short_is_noticed_while_reading(small):
    data = PreparedExamples(small, 8)
    os.truncate(small / "train.marks", 2)
    with pytest.raises(ValueError, match="train.marks became shorter during the run"):
        data.batch(0, 2)


def test_each_kind_of_dataset_is_opened_as_what_it_is(folder, dataset):
    assert (
        type(open_prepared(folder, T)) is PreparedExamples
        and type(open_prepared(dataset, T)) is PreparedText
    )
