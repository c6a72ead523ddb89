"""Base classes of datasets. `PreparedData`: files, the order of an epoch, the rows of an
evaluation. `Tokens`: rows of token ids, for texts and examples. `Prefetch` reads ahead."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanodnt.data.meta import Meta, folder_of, load_meta

ALL = slice(None)
Batch = tuple[np.ndarray, ...]  # inputs, targets, and further inputs of the network


class PreparedData:
    """A prepared dataset. A row of it is `block_size` tokens for the network.

    A subclass sets `n_train` and `n_val`, and reads rows. In a batch targets of −1 do not count in
    the loss. Files are read, not mapped."""

    n_train: int  # training rows of an epoch
    n_val: int  # validation rows
    # Row i starts at i·stride + shift. Each epoch has one shift of range(shifts).
    stride = 1
    shifts = 1

    def __init__(
        self,
        name: str,
        block_size: int,
        seed: int = 1337,
        meta: Meta | None = None,
        doc_mask: bool = False,
    ):
        """`meta`: the dataset's meta.json, if it is verified already."""
        self.meta = meta or load_meta(name)
        self.name = name
        self.block_size = block_size
        self.seed = seed
        self.doc_mask = doc_mask
        self.splits = {split: self.meta["splits"][split] for split in ("train", "val")}
        self.files = {split: self._open(entry["file"]) for split, entry in self.splits.items()}

    def describe(self) -> str:
        """The size of an epoch, in words."""
        raise NotImplementedError

    def batch(self, step: int, batch_size: int, rows: slice = ALL, offset: int = 0) -> Batch:
        """Rows `rows` of the batch of `step` (from 0). `offset`: see `_draw`."""
        raise NotImplementedError

    def val_batch(self, chosen: np.ndarray, size: int) -> Batch:
        """A batch of `size` rows: those of `chosen`, a part of `validation`, then rows without
        targets. So all evaluation batches have one shape."""
        raise NotImplementedError

    def validation(self, eval_tokens: int = 0, eval_rows: str = "spread") -> np.ndarray:
        """The starts of the validation rows, for `val_batch`: at most `eval_tokens` tokens in all
        (0 = no limit), "spread" evenly over the split, or its "first" ones; int64 (rows,).

        ValueError if the split has fewer first rows than that."""
        n_rows = self.n_val
        if eval_tokens:
            n_rows = max(1, eval_tokens // self.block_size)
        if eval_rows == "first":
            if n_rows > self.n_val:
                raise ValueError(
                    f"eval_rows=first: eval_tokens={eval_tokens} are {n_rows:,} rows of "
                    f"{self.block_size}, but {self.name} has {self.n_val:,} for validation: "
                    "lower eval_tokens, or prepare more"
                )
            return np.arange(n_rows, dtype=np.int64) * self.stride
        n_rows = min(n_rows, self.n_val)
        return np.arange(n_rows, dtype=np.int64) * self.n_val // n_rows * self.stride

    def loss_tokens(self, step: int, batch_size: int, offset: int = 0) -> int | None:
        """Number of targets in the whole batch of `step` that count in the loss; None = all.
        `offset`: see `_draw`."""
        return None

    def _draw(self, step: int, batch_size: int, rows: slice = ALL, offset: int = 0) -> np.ndarray:
        """The starts of rows `rows` of the batch of `step`, int64; without replacement within an
        epoch.

        The batch begins `step * batch_size + offset` rows after the start of the first epoch. The
        offset is 0 unless earlier steps had another batch size."""
        number = step * batch_size + offset + np.arange(batch_size, dtype=np.int64)[rows]
        epochs, position = np.divmod(number, self.n_train)
        starts = np.empty_like(number)
        for epoch in np.unique(epochs):
            key = mix(mix(self.seed) + int(epoch))
            inside = epochs == epoch
            row = permutation(position[inside], self.n_train, key)
            starts[inside] = row * self.stride + key % self.shifts
        return starts

    def _open(self, file: str) -> BinaryIO:
        return open(folder_of(self.name) / Path(file).name, "rb", buffering=0)

    def _read_values(self, file: BinaryIO, dtype: Any, start: int, n: int) -> np.ndarray:
        """n values of `dtype` from a file, from its value `start` on."""
        size = np.dtype(dtype).itemsize
        file.seek(start * size)
        raw = file.read(n * size)
        self._check_length(file, raw, n * size)
        return np.frombuffer(raw, dtype)

    def _check_length(self, file: BinaryIO, raw: bytes, expected: int) -> None:
        if len(raw) != expected:
            raise ValueError(
                f"{file.name} became shorter during the run; prepare {self.name!r} again"
            )


class Tokens(PreparedData):
    """A prepared dataset of token ids. A batch has inputs, targets and, with doc_mask, the position
    of each input in its document: int64 arrays (rows, block_size)."""

    def _rows(self, split: str, starts: np.ndarray) -> Batch:
        """The rows of a split that begin at `starts`."""
        raise NotImplementedError

    def batch(self, step: int, batch_size: int, rows: slice = ALL, offset: int = 0) -> Batch:
        return self._rows("train", self._draw(step, batch_size, rows, offset))

    def val_batch(self, chosen: np.ndarray, size: int) -> Batch:
        inputs = np.zeros((size, self.block_size), np.int64)
        targets = np.full_like(inputs, -1)
        batch = (inputs, targets)
        if self.doc_mask:
            batch = (inputs, targets, inputs + np.arange(self.block_size))
        if len(chosen):
            for padded, part in zip(batch, self._rows("val", chosen), strict=True):
                padded[: len(chosen)] = part
        return batch

    def _read(self, split: str, start: int, n: int) -> np.ndarray:
        """n token ids of a split from its token `start` on, int64."""
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        ids = self._read_values(self.files[split], dtype, start, n).astype(np.int64)
        largest = ids.max()
        if largest >= self.meta["vocab_size"]:
            raise ValueError(
                f"{self.files[split].name} holds token id {largest}, beyond the vocabulary of "
                f"{self.meta['vocab_size']} in its meta.json; prepare {self.name!r} again"
            )
        return ids


class Prefetch:
    """Calls `fetch(step)` one step ahead, in a thread.

    A call with a step returns fetch(step), and begins fetch(step + 1). An exception in fetch is
    raised by the call for its step."""

    def __init__(self, fetch: Callable[[int], Any]):
        self.fetch = fetch
        self.pool = ThreadPoolExecutor(1)
        self.next: dict[int, Future] = {}  # {next step: its batch}

    def __call__(self, step: int) -> Any:
        future = self.next.pop(step, None) or self.pool.submit(self.fetch, step)
        try:
            return future.result()
        finally:
            self.next = {step + 1: self.pool.submit(self.fetch, step + 1)}


# ---------------------------------------------------------------------------- the order of an epoch


def permutation(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """The values of a pseudorandom permutation of range(n) at `index`, int64. The permutation
    itself is never stored.

    A Feistel network permutes range(4ᵏ), where 4ᵏ is the next power of four from n on. It is
    applied until the value is below n: that restricts it to a permutation of range(n)."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(mix(key + r)) for r in range(1, 9)]

    def encrypt(v: np.ndarray) -> np.ndarray:
        left = v >> np.uint64(half)
        right = v & mask
        for k in keys:
            left, right = right, left ^ (_mix_array(right + k) & mask)
        return left << np.uint64(half) | right

    out = encrypt(np.asarray(index).astype(np.uint64))
    outside = out >= n
    while outside.any():
        out[outside] = encrypt(out[outside])
        outside = out >= n
    return out.astype(np.int64)


def _mix_array(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def mix(x: int) -> int:
    """A hash of an integer to 64 bits, by splitmix64."""
    word = x + 0x9E3779B97F4A7C15 & (1 << 64) - 1
    return int(_mix_array(np.array([word], np.uint64))[0])
