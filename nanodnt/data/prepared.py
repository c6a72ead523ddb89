"""What every kind of dataset shares: files, the order of an epoch, evenly spaced validation rows,
reading ahead; and what texts and examples share: rows of token ids."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanodnt.data.meta import folder_of, load_meta


class PreparedData:
    """A prepared dataset, a row of which is `block_size` tokens for the network.

    A kind says how many rows there are, `n_train` in an epoch and `n_val` to validate on; what they
    are, in words, `describe()`; and reads them: `batch(step, batch_size, rows)` and
    `val_batch(chosen, size)` give arrays, inputs first, targets second (−1 does not count), then
    what else the network takes. Files are read, not mapped."""

    n_train: int
    n_val: int
    # a row is read from its number · stride on, in an epoch further by one of so many shifts
    stride = shifts = 1

    def __init__(
        self,
        name: str,
        block_size: int,
        seed: int = 1337,
        meta: dict | None = None,
        doc_mask: bool = False,
    ):
        self.meta = meta or load_meta(name)  # a given one was verified
        self.name, self.block_size, self.seed, self.doc_mask = name, block_size, seed, doc_mask
        self.splits = {split: self.meta["splits"][split] for split in ("train", "val")}
        self.files = {split: self._open(part["file"]) for split, part in self.splits.items()}

    def validation(self, eval_tokens: int = 0) -> np.ndarray:
        """What the validation rows are read from, for `val_batch`: evenly spaced, at most
        `eval_tokens` (0 = all)."""
        wanted = (
            min(self.n_val, max(1, eval_tokens // self.block_size)) if eval_tokens else self.n_val
        )
        return np.arange(wanted, dtype=np.int64) * self.n_val // wanted * self.stride

    def loss_tokens(self, step: int, batch_size: int, offset: int = 0) -> int | None:
        """How many targets of the whole batch of `step` count in the loss; None: all. `offset`: see
        `_draw`."""
        return None

    def _draw(self, step: int, batch_size: int, part=slice(None), offset: int = 0) -> np.ndarray:
        """What the rows `part` of the batch of `step` are read from: without replacement within an
        epoch.

        The batch begins `step * batch_size + offset` rows after the start of the first epoch. The
        offset is 0 unless steps before had another batch size."""
        index = step * batch_size + offset + np.arange(batch_size, dtype=np.int64)[part]
        epoch, position = np.divmod(index, self.n_train)
        chosen = np.empty_like(index)
        for e in np.unique(epoch):
            key = mix(mix(self.seed) + int(e))
            rows = permutation(position[epoch == e], self.n_train, key)
            chosen[epoch == e] = rows * self.stride + key % self.shifts
        return chosen

    def _open(self, file):
        return open(folder_of(self.name) / Path(file).name, "rb", buffering=0)

    def _read_values(self, file, dtype, start, n):
        size = np.dtype(dtype).itemsize
        file.seek(start * size)
        raw = file.read(n * size)
        self._check_length(file, raw, n * size)
        return np.frombuffer(raw, dtype)

    def _check_length(self, file, raw, expected):
        if len(raw) != expected:
            raise ValueError(
                f"{file.name} became shorter during the run; prepare {self.name!r} again"
            )


class Tokens(PreparedData):
    """A prepared dataset of token ids: `batch` gives inputs, targets and, with doc_mask, each
    input's position in its document; int64 arrays (rows, block_size). Targets of -1 do not count in
    the loss. A kind has `_rows` to read."""

    def batch(
        self, step: int, batch_size: int, rows: slice = slice(None), offset: int = 0
    ) -> tuple:
        """Rows `rows` of the batch of `step` (from 0). `offset`: see `_draw`."""
        return self._rows("train", self._draw(step, batch_size, rows, offset))

    def val_batch(self, chosen: np.ndarray, size: int) -> tuple:
        """Some rows of `validation`. Further rows, up to `size`, have targets -1: evaluation
        batches have one shape."""
        x = np.zeros((size, self.block_size), np.int64)
        batch = (x, np.full_like(x, -1), x + np.arange(self.block_size))[: 2 + self.doc_mask]
        if len(chosen):
            for whole, part in zip(batch, self._rows("val", chosen), strict=True):
                whole[: len(chosen)] = part
        return batch

    def _read(self, split, start, n):
        """n token ids of a split from its token `start` on, int64."""
        dtype = np.dtype(self.meta["dtype"]).newbyteorder("<")
        ids = self._read_values(self.files[split], dtype, start, n).astype(np.int64)
        if (most := ids.max()) >= self.meta["vocab_size"]:
            problem = f"holds token id {most}, beyond the vocabulary of {self.meta['vocab_size']} in its meta.json"
            raise ValueError(f"{self.files[split].name} {problem}; prepare {self.name!r} again")
        return ids


class Prefetch:
    """Call it with a step for the result of fetch(step); a thread then already works on that of the
    next step.

    An exception in fetch is raised by the call for its step."""

    def __init__(self, fetch):
        self.fetch, self.pool, self.next = fetch, ThreadPoolExecutor(1), {}

    def __call__(self, step: int):
        future = self.next.pop(step, None) or self.pool.submit(self.fetch, step)
        try:
            return future.result()
        finally:
            self.next = {step + 1: self.pool.submit(self.fetch, step + 1)}


# ----------------------------------------------------------------------------------------- the order of an epoch


def permutation(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a pseudorandom permutation of range(n) maps `index`; the permutation itself is never
    stored.

    A Feistel network permutes range(4ᵏ), the next power of four from n on. It is applied until the
    value is below n: that restricts it to a permutation of range(n)."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(mix(key + r)) for r in range(1, 9)]

    def encrypt(v):
        left, right = v >> np.uint64(half), v & mask
        for k in keys:
            left, right = right, left ^ (_mix_array(right + k) & mask)
        return left << np.uint64(half) | right

    out = encrypt(np.asarray(index).astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = encrypt(out[outside])
    return out.astype(np.int64)


def _mix_array(x):  # splitmix64's finaliser: every input bit reaches every output bit
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def mix(x: int) -> int:
    return int(_mix_array(np.array([x + 0x9E3779B97F4A7C15 & (1 << 64) - 1], np.uint64))[0])
