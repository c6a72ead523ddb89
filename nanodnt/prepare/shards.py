"""Token ids that others have made, in the form of llm.c: files of a header, 256 int32 that begin with MAGIC, VERSION
and the number of tokens, and of uint16 ids. GPT-2's end of text stands before each document, so between any two."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

MAGIC, VERSION, HEADER = 20240520, 1, 1024  # the header's bytes


class Shard(NamedTuple):
    """Some tokens of a file: from number `first` up to `last`."""

    file: Path
    first: int
    last: int
    vocab_size: int

    def read_bytes(self) -> bytes:
        """Their ids as the file has them. ValueError where one is beyond the vocabulary."""
        with open(self.file, "rb") as f:
            f.seek(HEADER + 2 * self.first)
            raw = f.read(2 * (self.last - self.first))
        if (most := np.frombuffer(raw, "<u2").max(initial=0)) >= self.vocab_size:
            raise ValueError(f"{self.file} holds token id {most}, beyond the vocabulary of {self.vocab_size}")
        return raw


def token_files(files) -> list:
    """The .bin files among `files`, if all are, or if one of them begins as those of this form do; else none."""
    found = [file for file in files if file.suffix == ".bin"]
    return found if len(found) == len(files) or any(map(is_shard, found)) else []


def is_shard(file: Path) -> bool:
    """Whether a file begins as those of this form do."""
    with open(file, "rb") as f:
        return f.read(4) == np.array(MAGIC, "<i4").tobytes()


def whole(file: Path, vocab_size: int) -> Shard:
    """All tokens of a file. ValueError, which names it, where it is none of this form, or damaged."""
    with open(file, "rb") as f:
        raw, size = f.read(HEADER), file.stat().st_size
    if len(raw) < HEADER or (head := np.frombuffer(raw, "<i4"))[0] != MAGIC:
        raise ValueError(f"{file} does not begin as llm.c's files of token ids do, with {MAGIC} and {HEADER} bytes")
    if head[1] != VERSION:
        raise ValueError(f"{file} is of version {head[1]} of llm.c's files: only {VERSION}, of GPT-2's ids, is read")
    if head[2] < 1 or size != HEADER + 2 * int(head[2]):
        what = f"{size - HEADER:,} bytes of ids, where its header says {head[2]:,} tokens of 2 bytes"
        raise ValueError(f"{file} holds {what}: it is damaged, download it again")
    return Shard(file, 0, int(head[2]), vocab_size)


def split(files: list, val_fraction: float, vocab_size: int) -> dict:
    """{"train": shards, "val": shards} of `files`: val are those with "val" in their names; where there are none, or
    only such, the last `val_fraction` of all tokens."""
    shards = [whole(file, vocab_size) for file in files]
    val = [shard for shard in shards if "val" in shard.file.name]
    if 0 < len(val) < len(shards):
        return {"train": [shard for shard in shards if shard not in val], "val": val}
    left, found = round(sum(shard.last for shard in shards) * (1 - val_fraction)), {"train": [], "val": []}
    for shard in shards:
        cut = min(left, shard.last)
        found["train"] += [shard._replace(last=cut)] * (cut > 0)
        found["val"] += [shard._replace(first=cut)] * (cut < shard.last)
        left -= cut
    return found
