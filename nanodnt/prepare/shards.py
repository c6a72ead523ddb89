"""Token ids that others have made, in files of llm.c's form: a header of 256 int32, which begins
with MAGIC, VERSION and the number of tokens, then uint16 ids. GPT-2's end of text stands before
each document, so between any two."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

MAGIC = 20240520
VERSION = 1
HEADER = 1024  # bytes of the header
PIECE_TOKENS = 1 << 24  # tokens of a file that are in memory at a time

Splits = dict[str, list[np.ndarray]]  # {"train": mapped files of ids, "val": mapped files}


def token_files(files: list[Path]) -> list[Path]:
    """The .bin files among `files`, if all are, or if one of them has this form; else none."""
    binary = [file for file in files if file.suffix == ".bin"]
    if len(binary) == len(files) or any(map(is_shard, binary)):
        return binary
    return []


def is_shard(file: Path) -> bool:
    """Whether a file begins like those of this form."""
    with open(file, "rb") as f:
        return f.read(4) == np.array(MAGIC, "<i4").tobytes()


def read_ids(file: Path, vocab_size: int) -> np.ndarray:
    """The token ids of a file, mapped; uint16. Raises ValueError, with its name, where it has
    another form, or is damaged."""
    header = np.fromfile(file, "<i4", 256)
    if not is_shard(file) or len(header) < 256:
        raise ValueError(
            f"{file} does not begin as llm.c's files of token ids do, with {MAGIC} and {HEADER} "
            "bytes"
        )
    _, version, n_tokens = header[:3].tolist()
    if version != VERSION:
        raise ValueError(
            f"{file} is of version {version} of llm.c's files: only {VERSION}, of GPT-2's ids, "
            "is read"
        )
    size = file.stat().st_size - HEADER
    if size != 2 * n_tokens or not size:
        raise ValueError(
            f"{file} holds {size:,} bytes of ids, where its header says {n_tokens:,} tokens of "
            "2 bytes: it is damaged, download it again"
        )
    ids = np.memmap(file, "<u2", "r", HEADER)
    check_ids(file, ids, vocab_size)
    return ids


def check_ids(file: Path, ids: np.ndarray, vocab_size: int) -> None:
    """ValueError, with the file and the place, where one of its `ids` is beyond the vocabulary."""
    start = 0
    for piece in read_pieces([ids], f"checking {file.name}"):
        place = int(piece.argmax())
        if piece[place] >= vocab_size:
            raise ValueError(
                f"{file} holds token id {piece[place]}, beyond the vocabulary of {vocab_size}, "
                f"at token {start + place:,} (counted from 0)"
            )
        start += len(piece)


def read_pieces(files: list[np.ndarray], title: str) -> Iterator[np.ndarray]:
    """Yield the token ids of mapped files of any size in pieces that fit in memory. A terminal
    shows the progress."""
    total = sum(map(len, files))
    how = dict(unit=" tokens", unit_scale=True, disable=None)  # None: shown only on a terminal
    with tqdm(desc=title, total=total, **how) as bar:
        for ids in files:
            for start in range(0, len(ids), PIECE_TOKENS):
                piece = ids[start : start + PIECE_TOKENS]
                yield piece
                bar.update(len(piece))


def split(files: list[Path], val_fraction: float, vocab_size: int) -> Splits:
    """The token ids of `files` by split.

    The files with "val" in their names are held out; where there are none, or only such, the last
    `val_fraction` of all tokens."""
    shards = {file: read_ids(file, vocab_size) for file in files}
    train = [ids for file, ids in shards.items() if "val" not in file.name]
    val = [ids for file, ids in shards.items() if "val" in file.name]
    if train and val:
        return {"train": train, "val": val}
    return hold_out_end(train + val, val_fraction)


def hold_out_end(shards: list[np.ndarray], val_fraction: float) -> Splits:
    """The token ids by split: the last `val_fraction` of all is held out."""
    parts = {"train": [], "val": []}
    n_tokens = sum(map(len, shards))
    left = round(n_tokens * (1 - val_fraction))  # tokens still to train on
    for ids in shards:
        parts["train"].append(ids[:left])
        parts["val"].append(ids[left:])
        left = max(0, left - len(ids))
    return parts
