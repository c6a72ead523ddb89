"""Data as a function of the step: batches, validation windows.

`Dataset.batch(step)` depends on (dataset, block_size, seed, batch_size, step) and on nothing else: not on the number of
processes, the micro batch, the evaluation settings, or whether the run was resumed. Nothing is remembered between
calls, so there is no loader state to save.

    python -m nanodnt.data pystdlib      # check a prepared dataset against its checksums and print its meta.json
"""

import hashlib
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanodnt.tokenizer import DATA, check_tokenizer

HASHED_AT_START = 1 << 30  # files up to this many bytes are hashed at every start (about a second)


# -------------------------------------------------------------------------------------------------------- meta.json


def folder_of(name: str) -> Path:
    """data/<name>, or the prepared folder that `name` is a path of."""
    return Path(name) if not (DATA / name).is_dir() and (Path(name) / "meta.json").is_file() else DATA / name


def _advise(name: str) -> str:
    """How to prepare the dataset `name`."""
    if name == "pystdlib_gpt2_4096":
        return "run `python data/pystdlib/prepare.py --tokenizer=gpt2_4096`"
    return f"run `python data/{name}/prepare.py`" if (DATA / name / "prepare.py").exists() else "prepare it again"


def load_meta(name: str, verify: bool = True, max_hashed_bytes: float = HASHED_AT_START) -> dict:
    """Read and check `data/<name>/meta.json` (`name` may also be the path of a prepared folder).

    Sizes, dtype and vocabulary are always checked; with `verify` also the sha256 of every file up to max_hashed_bytes.
    Raises ValueError with one line that says what is wrong and what to do.
    """
    folder = folder_of(name)
    path = folder / "meta.json"
    advice = _advise(name)
    if not path.is_file():
        ready = sorted(p.parent.name for p in DATA.glob("*/meta.json"))
        raise ValueError(f"dataset {name!r} is not prepared (no {path}): {advice}; prepared: {ready}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        itemsize = {"uint16": 2, "uint32": 4}[meta["dtype"]]
        vocab, eot = _read_int(meta, "vocab_size"), meta["eot"]
        parts = {split: meta["splits"][split] for split in ("train", "val")}
        sizes = {split: _read_int(part, "tokens") * itemsize for split, part in parts.items()}
        files = {split: folder / Path(part["file"]).name for split, part in parts.items()}
        ids = [_read_int(part, "max_id") for part in parts.values()] + [0 if eot is None else _read_int(meta, "eot")]
        hashes = {split: str(part["sha256"]) for split, part in parts.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        problem = f"{type(e).__name__}: {e}".replace("\n", " ")
        raise ValueError(f"{path} is damaged ({problem}): {advice}") from None
    if max(ids) >= vocab:
        raise ValueError(f"{path}: token id {max(ids)} is beyond the vocabulary of {vocab}: {advice}")
    try:
        check_tokenizer(meta, path)
    except ValueError as e:
        raise ValueError(f"{e}: {advice}") from None
    for split, file in files.items():
        size = file.stat().st_size if file.is_file() else None
        if size != sizes[split]:
            problem = "is missing" if size is None else f"has {size} bytes where meta.json says {sizes[split]}"
            raise ValueError(f"{file} {problem}: {advice}")
        if verify and size <= max_hashed_bytes and sha256(file) != hashes[split]:
            raise ValueError(f"{file} does not match the sha256 in meta.json (damaged or replaced): {advice}")
    return meta


def _read_int(values: dict, key: str) -> int:
    if type(values[key]) is not int:
        raise ValueError(f"{key} is {values[key]!r}, not a whole number")
    return values[key]


def sha256(path) -> str:
    """Hex digest of a file, which is read in pieces of 4 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------- batches


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
            key = _mix(_mix(self.seed) + int(e))
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


class Prefetch:
    """Call it with a step for the result of fetch(step); a thread then already works on that of the next step.

    An exception in fetch is raised by the call for its step."""

    def __init__(self, fetch):
        self.fetch, self.pool, self.next = fetch, ThreadPoolExecutor(1), {}

    def __call__(self, step: int):
        future = self.next.pop(step, None) or self.pool.submit(self.fetch, step)
        try:
            return future.result()
        finally:
            self.next = {step + 1: self.pool.submit(self.fetch, step + 1)}


def permutation(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a pseudorandom permutation of range(n) maps `index`; the permutation itself is never stored.

    A Feistel network permutes range(4ᵏ), the next power of four from n on. It is applied until the value is below n:
    that restricts it to a permutation of range(n).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(_mix(key + r)) for r in range(1, 9)]

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


def _mix(x: int) -> int:
    return int(_mix_array(np.array([x + 0x9E3779B97F4A7C15 & (1 << 64) - 1], np.uint64))[0])


def main(argv: list) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.exit("usage: python -m nanodnt.data DATASET     (a folder under data/, or the path of a prepared folder)")
    try:
        meta = load_meta(argv[0], max_hashed_bytes=math.inf)
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")
    meta = {key: value for key, value in meta.items() if key not in ("chars", "json")}  # long
    print(json.dumps(meta, indent=2))
    print("all checksums match")


if __name__ == "__main__":
    main(sys.argv[1:])
