"""Batches of a long text, cut into windows."""

import numpy as np

from nanodnt.data.prepared import Tokens


class PreparedText(Tokens):
    """A prepared text cut into windows of `block_size` + 1 tokens.

    Training windows of one epoch do not overlap and are drawn in a pseudorandom order without
    replacement. Every epoch moves the window boundaries and has another order. With `doc_mask`
    batches have positions, which begin at 0 in each document; the rest of a document that began
    before the window is one too."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        T, tokens = self.block_size, {split: part["tokens"] for split, part in self.splits.items()}
        for split, n in tokens.items():
            if n < T + 1:
                problem = f"holds {n} tokens, too few for one window of block_size+1 = {T + 1}"
                fix = "prepare more text, or lower --block_size (not with a checkpoint, which keeps its own)"
                raise ValueError(f"{split}.bin of {self.name!r} {problem}: {fix}")
        self.opening = self._opening_token() if self.doc_mask else None
        self.n_train = max(1, (tokens["train"] - T) // T)  # windows of an epoch
        self.n_val = (tokens["val"] - 1) // T
        # of windows in the text
        self.stride, self.shifts = T, min(T, tokens["train"] - self.n_train * T)

    def describe(self) -> str:
        return f"{self.n_train:,} windows an epoch"

    def _rows(self, split, starts):
        ids = np.stack([self._read(split, start, self.block_size + 1) for start in starts.tolist()])
        x, y = ids[:, :-1], ids[:, 1:]
        return (x, y, document_positions(x, self.opening)) if self.doc_mask else (x, y)

    def _opening_token(self):
        """The token that opens each document: the first of the tokenizer's `start`, else end of
        text, which stands behind a document and is the first that a model reads of the next.
        ValueError where there is neither."""
        from nanodnt.data.tokenizer import parse_json, start_of

        kind = self.meta["tokenizer"]
        start = start_of(parse_json(self.meta["json"])) if kind == "json" else []
        if not start and self.meta["eot"] is None:
            problem = f"nothing marks where those of {self.name!r} begin: its tokenizer ({kind}) has no end of text"
            hint = "use doc_mask=False, or prepare it with another tokenizer"
            raise ValueError(f"doc_mask=True needs documents, and {problem}; {hint}")
        return start[0] if start else self.meta["eot"]


def document_positions(x: np.ndarray, opening: int) -> np.ndarray:
    """Position of each token of x (rows, T) in its document, int64: how far behind the last
    `opening` it stands, or behind the start of its row where that comes later."""
    index = np.arange(x.shape[1], dtype=np.int64)
    return index - np.maximum.accumulate(np.where(x == opening, index, 0), axis=1)
