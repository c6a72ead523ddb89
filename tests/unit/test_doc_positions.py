"""Positions of a text's tokens in their documents, against a loop over the whole file."""

import numpy as np
import pytest

from nanodnt.data.tokenizer import Tokenizer
from nanodnt.data.windows import PreparedText
from support import examples as made
from support.prepared import open_prepared
from support.runs import write_ids

T = 8


def positions_plainly(ids, opening):
    """Position of each token of a window in its document, token by token."""
    positions, at = [], 0
    for i, token in enumerate(ids):
        at = 0 if i == 0 or token == opening else at + 1
        positions.append(at)
    return positions


def documents(seed, n, before, after):
    """A text of n documents of 1 to 29 letters, with these ids before and after each."""
    rng = np.random.default_rng(seed)
    return [
        i
        for _ in range(n)
        for i in (*before, *rng.integers(3, 28, rng.integers(1, 30)).tolist(), *after)
    ]


KINDS = {  # tokenizer, what stands before and after a document, what opens one
    "end of text": (Tokenizer.meta_for("bytes"), [], [256], 256),
    "start": (made.starting_tokenizer(), [0, 1], [2], 0),
    "json without a start": (made.starting_tokenizer(start=False), [], [2], 2),
}


@pytest.fixture(scope="module", params=KINDS)
def text(request, tmp_path_factory):
    tokenizer, before, after, opening = KINDS[request.param]
    splits = {
        split: (documents(seed, 40, before, after), {})
        for split, seed in (("train", 0), ("val", 1))
    }
    return write_ids(tmp_path_factory.mktemp("text"), tokenizer, splits), opening


def check(batch, opening):
    x, _, positions = batch
    assert positions.dtype == np.int64
    assert positions.tolist() == [positions_plainly(row, opening) for row in x.tolist()]
    return positions


def test_windows_have_positions(text):
    folder, opening = text
    data = PreparedText(folder, T, doc_mask=True)
    positions = check(data.batch(0, data.n_train), opening)
    assert (positions[:, 0] == 0).all()  # though most windows begin inside a document
    assert (positions[:, 1:] == 0).any(0).all() and (
        data.batch(0, data.n_train)[0][:, 0] != opening
    ).any()
    check(data.val_batch(data.validation(), len(data.validation())), opening)


def test_the_rest_of_a_batch_is_the_same(text):
    folder, _ = text
    data, plain = PreparedText(folder, T, seed=4, doc_mask=True), open_prepared(folder, T, seed=4)
    x, y, _ = data.batch(3, 5)
    assert all((a == b).all() for a, b in zip((x, y), plain.batch(3, 5), strict=True))
    _, y, positions = data.val_batch(data.validation(2 * T), 5)
    assert (y[2:] == -1).all() and (positions[2:] == np.arange(T)).all()
    assert data.describe() == f"{data.n_train} windows an epoch" and data.loss_tokens(3, 5) is None


def test_characters_have_no_documents(dataset):
    with pytest.raises(
        ValueError, match="doc_mask=True needs documents.*chars.*no end of text"
    ) as error:
        open_prepared(str(dataset), T, doc_mask=True)
    assert "\n" not in str(error.value) and open_prepared(str(dataset), T).doc_mask is False
