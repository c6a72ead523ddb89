"""Batches as a function of the step, validation windows, tokenizers, and the checks of
meta.json."""

import os
from pathlib import Path

import numpy as np
import pytest

from nanodnt.data import load_meta
from nanodnt.data.__main__ import main as check_dataset
from nanodnt.data.prepared import permutation
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.data.windows import PreparedText
from support.images import change_meta
from support.runs import write_ids


def prepare(folder, train, val, vocab_size=1000, **changes):
    chars = [chr(0x1_0000 + i) for i in range(vocab_size)]
    tokenizer = dict(tokenizer="chars", vocab_size=vocab_size, eot=None, chars=chars)
    return str(write_ids(folder, tokenizer, dict(train=train, val=val), **changes))


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path / "d", np.arange(830), np.arange(97))


@pytest.mark.parametrize("n", [1, 2, 7, 16, 1000])
def test_permutation_is_one_and_depends_on_the_key(n):
    results = [permutation(np.arange(n), n, key).tolist() for key in range(20)]
    assert all(sorted(r) == list(range(n)) for r in results)
    assert n < 7 or len({tuple(r) for r in results}) == 20


def test_an_epoch_sees_every_window_once_and_targets_are_shifted_by_one(folder):
    data = PreparedText(folder, block_size=8, seed=3)
    assert data.n_train == (830 - 8) // 8
    # 102 windows: an epoch
    x, y = map(np.concatenate, zip(*(data.batch(step, 2) for step in range(51)), strict=True))
    assert data.n_train == len(x) and (np.diff(np.sort(x[:, 0])) == 8).all()
    assert (x == x[:, :1] + np.arange(8)).all() and (y == x + 1).all()  # token i of the file is i


def test_epochs_differ_in_order_and_offset(folder):
    data = PreparedText(folder, block_size=8)
    epochs = [data.batch(epoch, 102)[0][:, 0] for epoch in range(8)]
    assert len({tuple(e) for e in epochs}) == 8 and len({e.min() for e in epochs}) > 2
    assert np.min(epochs) >= 0 and np.max(epochs) + 8 < 830


def test_a_batch_depends_on_dataset_seed_and_step_alone(folder):
    a, b = PreparedText(folder, 8, seed=1), PreparedText(folder, 8, seed=1)
    for step in (5, 0, 77, 5):  # in any order, with anything in between
        b.batch(step + 1, 4)
        assert (a.batch(step, 6)[0] == b.batch(step, 6)[0]).all()
    assert (a.batch(5, 6)[0] != PreparedText(folder, 8, seed=2).batch(5, 6)[0]).any()
    assert (a.batch(5, 6)[0] != a.batch(6, 6)[0]).any()


def test_an_offset_moves_a_batch_by_so_many_rows(folder):
    """Steps 2 and 3 of 5 rows after 14 rows: rows 14 to 24 of the order, 4 more than steps of 5
    rows have read."""
    data = PreparedText(folder, 8)
    moved = [data.batch(step, 5, offset=4)[0] for step in (2, 3)]
    assert (np.concatenate(moved) == data.batch(0, 24)[0][14:24]).all()


def test_ranks_and_micro_batches_are_slices_of_one_batch(folder):
    data = PreparedText(folder, 8)
    whole = data.batch(9, 12)[0]
    for n in (4, 3):
        assert (
            np.concatenate([data.batch(9, 12, slice(i, i + n))[0] for i in range(0, 12, n)])
            == whole
        ).all()
    x, _ = data.batch(0, 250)  # two and a half epochs
    assert len(x) == 250 and len({int(r[0]) for r in x[:102]}) == 102


@pytest.mark.parametrize("tokens", [9, 17])
def test_the_smallest_files(tmp_path, tokens):
    data = PreparedText(prepare(tmp_path / "s", np.arange(tokens), np.arange(9)), 8)
    seen = np.concatenate([np.concatenate(data.batch(step, 1), axis=None) for step in range(200)])
    assert seen.min() >= 0 and seen.max() <= tokens - 1
    assert data.validation().tolist() == [0]


def test_validation_windows_are_fixed_spread_and_bounded(folder):
    data = PreparedText(folder, 8)
    assert data.validation().tolist() == [i * 8 for i in range(12)]  # (97 - 1) // 8 windows
    assert data.validation(32).tolist() == [0, 24, 48, 72]
    assert data.validation(33, "first").tolist() == [0, 8, 16, 24]
    assert data.validation(96, "first").tolist() == data.validation().tolist()
    with pytest.raises(ValueError, match="eval_tokens=104 are 13 rows of 8, but .* has 12 for"):
        data.validation(104, "first")
    x, y = data.val_batch(data.validation(32), 6)
    assert x.shape == y.shape == (6, 8) and (y[:4] == x[:4] + 1).all() and (y[4:] == -1).all()


def test_uint32_files(tmp_path):
    tokens = np.arange(70_000, 70_100)
    data = PreparedText(
        prepare(tmp_path / "u", tokens, tokens, vocab_size=80_000, dtype="uint32"), 8
    )
    assert data.batch(0, 3)[0].min() >= 70_000 and data.batch(0, 3)[0].dtype == np.int64


def test_ids_beyond_the_vocabulary_and_a_file_cut_short_are_noticed_while_reading(folder):
    data = PreparedText(folder, 8)
    data.meta["vocab_size"] = 100
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        data.batch(0, 102)
    os.truncate(Path(folder) / "train.bin", 40)
    with pytest.raises(ValueError, match="shorter during the run"):
        data.batch(0, 102)


def edit(**changes):
    return lambda f: change_meta(f, lambda meta: meta.update(changes))


def flip_byte(f):
    raw = bytearray((f / "train.bin").read_bytes())
    raw[100] ^= 1
    (f / "train.bin").write_bytes(raw)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / "meta.json").unlink(), "not prepared"),
        (lambda f: (f / "meta.json").write_text("{"), "damaged"),
        (edit(dtype="float64"), "damaged"),
        (edit(vocab_size="many"), "damaged"),
        (edit(splits={}), "damaged"),
        (edit(tokenizer="words"), "tokenizer"),
        (edit(tokenizer="chars", chars=["a"]), "tokenizer"),
        (edit(eot=5000), "beyond the vocabulary"),
        (flip_byte, "sha256"),
        (lambda f: (f / "val.bin").unlink(), "missing"),
        (lambda f: os.truncate(f / "val.bin", 50), "bytes where"),
    ],
)
def test_a_damaged_dataset_is_refused_in_one_line(folder, damage, words):
    load_meta(folder)
    damage(Path(folder))
    with pytest.raises(ValueError, match=words) as error:
        load_meta(folder)
    assert "\n" not in str(error.value) and "prepare" in str(error.value)


def test_too_short_for_a_window(folder):
    with pytest.raises(
        ValueError, match="prepare more text, or lower --block_size .not with a checkpoint"
    ):
        PreparedText(folder, 97)


def test_the_command_line_check(folder, capsys):
    check_dataset([folder])
    assert "all checksums match" in capsys.readouterr().out
    flip_byte(Path(folder))
    with pytest.raises(ValueError, match="does not match the sha256"):
        check_dataset([folder])
    with pytest.raises(SystemExit, match=r"^usage: .*$"):
        check_dataset([])


def test_tokenizers():
    text = "naïve → λ\n"
    byte = Tokenizer(Tokenizer.meta_for("bytes"))
    assert byte.encode(text) == list(text.encode()) and byte.decode(byte.encode(text)) == text
    assert (byte.vocab_size, byte.eot) == (257, 256)
    assert byte.decode([104, 256, 105, 9999, -1]) == "hi" and byte.decode([0xC3]) == "\ufffd"
    char = Tokenizer(Tokenizer.meta_for("chars", sorted(set(text))))
    assert (
        char.decode(char.encode(text)) == text
        and char.eot is None
        and char.vocab_size == len(set(text))
    )
    with pytest.raises(ValueError, match="alphabet"):
        char.encode("xyz")
