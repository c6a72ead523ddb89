"""Token ids that others have made, in the form of llm.c: files of a header, 256 int32 that begin
with MAGIC, VERSION and the number of tokens, and of uint16 ids. GPT-2's end of text stands before
each document, so between any two."""

from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER = 20240520, 1, 1024  # the header's bytes


def token_files(files) -> list:
    """The .bin files among `files`, if all are, or if one of them begins as those of this form do;
    else none."""
    found = [file for file in files if file.suffix == ".bin"]
    return found if len(found) == len(files) or any(map(is_shard, found)) else []


def is_shard(file: Path) -> bool:
    """Whether a file begins as those of this form do."""
    with open(file, "rb") as f:
        return f.read(4) == np.array(MAGIC, "<i4").tobytes()


def read_ids(file: Path, vocab_size: int) -> np.ndarray:
    """The token ids of a file, mapped. ValueError, which names it, where it is none of this form,
    or damaged."""
    header = np.fromfile(file, "<i4", 256)
    if not is_shard(file) or len(header) < 256:
        raise ValueError(
            f"{file} does not begin as llm.c's files of token ids do, with {MAGIC} and {HEADER} bytes"
        )
    if header[1] != VERSION:
        raise ValueError(
            f"{file} is of version {header[1]} of llm.c's files: only {VERSION}, of GPT-2's ids, is read"
        )
    size = file.stat().st_size - HEADER
    if size != 2 * int(header[2]) or not size:
        what = f"{size:,} bytes of ids, where its header says {header[2]:,} tokens of 2 bytes"
        raise ValueError(f"{file} holds {what}: it is damaged, download it again")
    ids = np.memmap(file, "<u2", "r", HEADER)
    if ids.max() >= vocab_size:
        raise ValueError(
            f"{file} holds token id {ids.max()}, beyond the vocabulary of {vocab_size}"
        )
    return ids


def split(files: list, val_fraction: float, vocab_size: int) -> dict:
    """{"train": ids, "val": ids} of `files`, as lists of arrays: val are the files with "val" in
    their names; where there are none, or only such, the last `val_fraction` of all tokens."""
    shards = {file: read_ids(file, vocab_size) for file in files}
    val = [file for file in files if "val" in file.name]
    if 0 < len(val) < len(files):
        train = [file for file in files if file not in val]
        return {"train": [shards[file] for file in train], "val": [shards[file] for file in val]}
    left = round(sum(map(len, shards.values())) * (1 - val_fraction))
    parts = {"train": [], "val": []}
    for ids in shards.values():
        parts["train"].append(ids[:left])
        parts["val"].append(ids[left:])
        left = max(0, left - len(ids))
    return parts
