"""Token ids that others have made, in files of llm.c's form: a header of 256 int32, which begins
with MAGIC, VERSION and the number of tokens, then uint16 ids. GPT-2's end of text stands before
each document, so between any two."""

from pathlib import Path

import numpy as np

MAGIC = 20240520
VERSION = 1
HEADER = 1024  # bytes of the header


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
    largest = ids.max()
    if largest >= vocab_size:
        raise ValueError(f"{file} holds token id {largest}, beyond the vocabulary of {vocab_size}")
    return ids


def split(files: list[Path], val_fraction: float, vocab_size: int) -> dict[str, list[np.ndarray]]:
    """The token ids of `files` by split, "train" and "val".

    The files with "val" in their names are held out; where there are none, or only such, the last
    `val_fraction` of all tokens."""
    shards = {file: read_ids(file, vocab_size) for file in files}
    parts = {"train": [], "val": []}
    n_val_files = sum("val" in file.name for file in files)
    if 0 < n_val_files < len(files):
        for file, ids in shards.items():
            parts["val" if "val" in file.name else "train"].append(ids)
        return parts
    n_tokens = sum(map(len, shards.values()))
    left = round(n_tokens * (1 - val_fraction))  # tokens still to train on
    for ids in shards.values():
        parts["train"].append(ids[:left])
        parts["val"].append(ids[left:])
        left = max(0, left - len(ids))
    return parts
