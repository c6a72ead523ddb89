"""Batches of a long text, cut into windows."""

import numpy as np

from nanodnt.data.prepared import Tokens


class PreparedText(Tokens):
    """A prepared text cut into windows of `block_size` + 1 tokens.

    Training windows of one epoch do not overlap and are drawn in a pseudorandom order without replacement. Every epoch
    moves the window boundaries and has another order. With `doc_mask` batches have positions, which begin at 0 in each
    document; the rest of a document that began before the window is one too.
    """

    kind = "text"

    def __init__(self, name: str, block_size: int, seed: int = 1337, meta: dict | None = None, doc_mask: bool = False):
        super().__init__(name, block_size, seed, meta, doc_mask)
        tokens = {split: part["tokens"] for split, part in self.splits.items()}
        for split, n in tokens.items():
            if n < block_size + 1:
                raise ValueError(
                    f"{split}.bin of {name!r} holds {n} tokens, too few for one window of block_size+1 = "
                    f"{block_size + 1}: lower --block_size or prepare more text"
                )
        self.opening = opening_token(self.meta, name) if doc_mask else None
        self.n_train = max(1, (tokens["train"] - block_size) // block_size)  # windows of an epoch
        self.n_val = (tokens["val"] - 1) // block_size
        self.shifts = min(block_size, tokens["train"] - self.n_train * block_size)  # allowed window offsets

    def describe(self) -> str:
        return f"{self.n_train:,} windows an epoch"

    def validation(self, eval_tokens: int = 0) -> np.ndarray:
        """First tokens of the validation windows: evenly spaced over val.bin, at most `eval_tokens` (0 = all)."""
        return super().validation(eval_tokens) * self.block_size

    def _place(self, rows, key):
        return rows * self.block_size + key % self.shifts

    def _rows(self, split, starts):
        ids = np.empty((len(starts), self.block_size + 1), np.int64)
        for row, start in zip(ids, starts.tolist(), strict=True):
            row[:] = self._read(split, start, self.block_size + 1)
        x, y = ids[:, :-1], ids[:, 1:]
        return (x, y, document_positions(x, self.opening)) if self.doc_mask else (x, y)


def opening_token(meta: dict, name: str) -> int:
    """The token that opens each document of a text: the first of the tokenizer's `start`, else end of text, which
    stands behind a document and is the first that a model reads of the next. ValueError where there is neither."""
    from nanodnt.data.tokenizer import parse_json, start_of

    start = start_of(parse_json(meta["json"])) if meta["tokenizer"] == "json" else []
    opening = start[0] if start else meta["eot"]
    if opening is None:
        raise ValueError(
            f"doc_mask=True needs documents, and nothing marks where those of {name!r} begin: its tokenizer "
            f"({meta['tokenizer']}) has no end of text; use doc_mask=False, or prepare it with another tokenizer"
        )
    return opening


def document_positions(x: np.ndarray, opening: int) -> np.ndarray:
    """Position of each token of x (rows, T) in its document, int64: how far behind the last `opening` it stands, or
    behind the start of its row where that comes later."""
    index = np.arange(x.shape[1], dtype=np.int64)
    return index - np.maximum.accumulate(np.where(x == opening, index, 0), axis=1)
