"""Batches of a long text, cut into windows.

Row i of the batch of a step, for a text in `tokens` tokens, block_size T and batch size B:

    number          = step·B + i
    epoch, position = divmod(number, n_train)        n_train = (tokens - T) // T
    start           = T·π(position) + shift          π (a permutation) and shift from (seed, epoch)
    inputs          = text[start : start + T]
    targets         = text[start + 1 : start + T + 1]

So a batch depends on the text, T, seed, B and step alone. `PreparedData._draw` computes `start`.
"""

from typing import Any

import numpy as np

from nanodnt.data.prepared import Batch, Tokens
from nanodnt.tables import count


class PreparedText(Tokens):
    """A prepared text, in windows of `block_size` + 1 tokens.

    Training windows of one epoch do not overlap and come in a pseudorandom order without
    replacement. Every epoch has other window boundaries and another order. With `doc_mask` batches
    have positions, which begin at 0 in each document; where a window begins inside a document, the
    rest of that document counts as one."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        T = self.block_size
        for split, entry in self.splits.items():
            if entry["tokens"] < T + 1:
                raise ValueError(
                    f"{split}.bin of {self.name!r} holds {entry['tokens']} tokens, too few for one "
                    f"window of block_size+1 = {T + 1}: prepare more text, or lower --block_size "
                    "(not with a checkpoint, which keeps its own)"
                )
        if self.doc_mask:
            self.opening = self._opening_token()
        n_tokens = self.splits["train"]["tokens"]
        self.n_train = max(1, (n_tokens - T) // T)
        self.n_val = (self.splits["val"]["tokens"] - 1) // T
        self.stride = T
        self.shifts = min(T, n_tokens - self.n_train * T)

    def describe(self) -> str:
        return f"{count(self.n_train, 'window')} an epoch"

    def _rows(self, split: str, starts: np.ndarray) -> Batch:
        n = self.block_size + 1
        windows = np.stack([self._read(split, start, n) for start in starts.tolist()])
        inputs = windows[:, :-1]
        targets = windows[:, 1:]
        if not self.doc_mask:
            return inputs, targets
        return inputs, targets, document_positions(inputs, self.opening)

    def _opening_token(self) -> int:
        """The token that opens each document: the first of the tokenizer's `start`, else end of
        text, which stands behind a document and is the first that a model reads of the next.
        ValueError where there is neither."""
        from nanodnt.data.tokenizer import parse_json, start_of

        kind = self.meta["tokenizer"]
        if kind == "json":
            start = start_of(parse_json(self.meta["json"]))
            if start:
                return start[0]
        if self.meta["eot"] is None:
            raise ValueError(
                f"doc_mask=True needs documents, and nothing marks where those of {self.name!r} "
                f"begin: its tokenizer ({kind}) has no end of text; use doc_mask=False, or prepare "
                "it with another tokenizer"
            )
        return self.meta["eot"]


def document_positions(ids: np.ndarray, opening: int) -> np.ndarray:
    """Position of each token in its document, int64 (rows, T): the distance to the last `opening`
    before it in the row, or to the start of the row.

    `ids`: token ids (rows, T), or booleans with opening=True."""
    index = np.arange(ids.shape[1], dtype=np.int64)
    begins = np.where(ids == opening, index, 0)
    return index - np.maximum.accumulate(begins, axis=1)
