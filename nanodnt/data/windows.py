"""Batches of a long text, cut into windows."""

from pathlib import Path

import numpy as np

from nanodnt.data.meta import folder_of, load_meta
from nanodnt.data.order import mix, permutation


class Dataset:
    """A prepared dataset cut into windows of `block_size` + 1 tokens.

    Training windows of one epoch do not overlap and are drawn in a pseudorandom order without replacement. Every epoch
    moves the window boundaries and has another order. Files are read, not mapped, so resident memory does not grow
    however long the run.
    """

    def __init__(self, name: str, block_size: int, seed: int = 1337, verify: bool = True):
        self.meta = load_meta(name, verify)
        self.name, self.block_size, self.seed = name, block_size, seed
        self.dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        splits = {split: self.meta["splits"][split] for split in ("train", "val")}
        self.tokens = {split: part["tokens"] for split, part in splits.items()}
        for split, tokens in self.tokens.items():
            if tokens < block_size + 1:
                raise ValueError(
                    f"{split}.bin of {name!r} holds {tokens} tokens, too few for one window of block_size+1 = "
                    f"{block_size + 1}: lower --block_size or prepare more text"
                )
        paths = {split: folder_of(name) / Path(part["file"]).name for split, part in splits.items()}
        self.files = {split: open(path, "rb", buffering=0) for split, path in paths.items()}
        self.windows = max(1, (self.tokens["train"] - block_size) // block_size)  # per epoch
        self.shifts = min(block_size, self.tokens["train"] - self.windows * block_size)  # allowed window offsets

    def batch(self, step: int, batch_size: int, rows: slice = slice(None)) -> tuple:
        """Rows `rows` of the batch of `step` (from 0): inputs and next-token targets, int64 arrays (rows, T)."""
        index = step * batch_size + np.arange(batch_size, dtype=np.int64)[rows]
        epoch, position = np.divmod(index, self.windows)
        starts = np.empty_like(index)
        for e in np.unique(epoch):
            key = mix(mix(self.seed) + int(e))
            window = permutation(position[epoch == e], self.windows, key)
            starts[epoch == e] = window * self.block_size + key % self.shifts
        return self._read("train", starts)

    def validation(self, eval_tokens: int = 0) -> np.ndarray:
        """First tokens of the validation windows: evenly spaced over val.bin, at most `eval_tokens` (0 = all)."""
        available = (self.tokens["val"] - 1) // self.block_size
        wanted = min(available, max(1, eval_tokens // self.block_size)) if eval_tokens else available
        return np.arange(wanted, dtype=np.int64) * available // wanted * self.block_size

    def val_batch(self, starts: np.ndarray, size: int) -> tuple:
        """The validation windows at `starts`, int64 arrays (size, T). Further rows have targets -1, which the loss
        ignores, so that every evaluation batch has one shape."""
        x, y = np.zeros((size, self.block_size), np.int64), np.full((size, self.block_size), -1, np.int64)
        if len(starts):
            x[: len(starts)], y[: len(starts)] = self._read("val", starts)
        return x, y

    def _read(self, split, starts):
        file, n_bytes = self.files[split], (self.block_size + 1) * self.dtype.itemsize
        out = np.empty((len(starts), self.block_size + 1), np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            file.seek(start * self.dtype.itemsize)
            raw = file.read(n_bytes)
            if len(raw) != n_bytes:
                raise ValueError(f"{file.name} became shorter during the run; prepare {self.name!r} again")
            row[:] = np.frombuffer(raw, self.dtype)
        if len(out) and out.max() >= self.meta["vocab_size"]:
            raise ValueError(
                f"{file.name} holds token id {out.max()}, beyond the vocabulary of "
                f"{self.meta['vocab_size']} in its meta.json; prepare {self.name!r} again"
            )
        return out[:, :-1], out[:, 1:]
