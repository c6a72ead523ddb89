"""Checkpoints in shards: under FSDP every process writes its own rows, and nothing is gathered.

The checkpoint itself (last.pt, …) then has tensors without contents, on the meta device. Their
contents are in shards/NAME.RANK.PART.pt, where PART is "model" or "optimizer". Each of these files
is complete or absent; the checkpoint is written when all of them are there. They are read like
checkpoints: CRC-32s are compared, no code runs.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from layers.sharding import is_sharded, local_shard, row_ranges, shard_dim, shard_group
from nanodnt.files import write_file

FORMAT = "nanoDNT shard 1"
PARTS = ("model", "optimizer")


class ShardsRecord(TypedDict):
    """The value of "shards" in a checkpoint. A path is the keys to a tensor, as
    "/model/wte.weight"."""

    name: str  # name of its files; added when the checkpoint is saved
    count: int  # processes that share the rows of one copy of the model
    whole: list[str]  # paths of the tensors that are not split: rank 0 wrote them
    by_second: list[str]  # paths of the tensors that are split along their second dimension, not
    #   the first; checkpoints of earlier versions lack this key


class ShardedCopy(NamedTuple):
    """A copy of nested dicts and lists of tensors, made by one process."""

    value: Any  # the same dicts and lists, with tensors on the meta device
    own_rows: dict[str, Tensor]  # {path: the rows that this process writes}
    record: ShardsRecord  # without its name


def shard_path(folder: Path, name: str, rank: int, part: str) -> Path:
    return folder / f"{name}.{rank}.{part}.pt"


# ---------------------------------------------------------------------------------------- writing


def copy_shards(value: Any, copy_tensor: Callable[[str, Tensor], Tensor]) -> ShardedCopy:
    """Copy this process's rows of all tensors in nested dicts and lists by `copy_tensor(path,
    rows)`."""
    own_rows = {}
    record = {"count": 1, "whole": [], "by_second": []}

    def copy(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            return {key: copy(inner, f"{path}/{key}") for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copy(inner, f"{path}/{i}") for i, inner in enumerate(value))
        if not torch.is_tensor(value):
            return value
        t = value.detach()
        if is_sharded(t):
            record["count"] = dist.get_world_size(shard_group(t))
            if shard_dim(t) == 1:
                record["by_second"].append(path)
            # HSDP has several copies of the model: the first is written
            is_writer = t.device_mesh.ndim == 1 or t.device_mesh.get_local_rank(0) == 0
        else:
            record["whole"].append(path)
            is_writer = dist.get_rank() == 0
        if is_writer:
            own_rows[path] = copy_tensor(path, local_shard(t))
        return torch.empty(t.shape, dtype=t.dtype, device="meta")

    return ShardedCopy(copy(value, ""), own_rows, record)


def write_shards(folder: Path, name: str, rank: int, own_rows: dict[str, Tensor]) -> None:
    """Write this process's rows, one file for each part. ValueError if a file cannot be written."""
    if not own_rows:
        return
    for part in PARTS:
        tensors = {path: t for path, t in own_rows.items() if path.startswith(f"/{part}/")}
        shard = {"format": FORMAT, "name": name, "tensors": tensors}
        write_file(shard_path(folder, name, rank, part), partial(torch.save, shard))


def wait_for_shards(
    folder: Path, name: str, count: int, timeout_s: float, abandoned: threading.Event
) -> None:
    """Return when all files of a checkpoint are there. ValueError after `timeout_s` seconds, or if
    `abandoned` is set."""
    missing = [shard_path(folder, name, rank, part) for rank in range(count) for part in PARTS]
    start = time.monotonic()
    pause = 0.01  # seconds
    while missing := [path for path in missing if not path.exists()]:
        if abandoned.wait(pause) or time.monotonic() - start > timeout_s:
            raise ValueError(
                f"{missing[0]} was not written: its process has ended or waits for its disk"
            )
        pause = min(2 * pause, 1.0)


# ---------------------------------------------------------------------------------------- reading


class ShardReader:
    """Reads tensors of a sharded checkpoint from its files, each of which is opened when the first
    tensor of it is read."""

    def __init__(self, folder: Path, record: ShardsRecord) -> None:
        self.folder = folder
        self.name = record["name"]
        self.count = record["count"]
        self.whole = set(record["whole"])
        self.by_second = set(record.get("by_second", ()))
        self.opened = {}  # {(rank, part): tensors of this file}

    def path(self, rank: int, part: str) -> Path:
        return shard_path(self.folder, self.name, rank, part)

    def open_file(self, rank: int, part: str) -> dict[str, Tensor]:
        """{path: rows} in one file. ValueError if it is damaged or of another checkpoint."""
        if (rank, part) in self.opened:
            return self.opened[rank, part]
        file = self.path(rank, part)
        try:
            shard = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            is_ours = shard["format"] == FORMAT and shard["name"] == self.name
            tensors = shard["tensors"]
        except Exception as e:  # a damaged file can raise nearly anything
            raise ValueError(
                f"{file} cannot be read, it is damaged or foreign ({type(e).__name__})"
            ) from e
        if not (is_ours and isinstance(tensors, dict)):
            raise ValueError(f"{file} is no part of this checkpoint")
        self.opened[rank, part] = tensors
        return tensors

    def rows_of(
        self, rank: int, part: str, path: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The rows of a tensor that `rank` wrote. ValueError if shape or dtype are others."""
        rows = self.open_file(rank, part).get(path)
        if not torch.is_tensor(rows) or (rows.shape, rows.dtype) != (shape, dtype):
            raise ValueError(
                f"{self.path(rank, part)} has no {path[1:]} of {tuple(shape)}: it is damaged"
            )
        return rows

    def read_into(
        self,
        part: str,
        path: str,
        shape: torch.Size,
        dtype: torch.dtype,
        out: Tensor,
        rows: range | None = None,
        dim: int = 0,
    ) -> None:
        """Copy `rows` of dimension `dim` of a tensor of this full shape into `out`; None = all."""
        if not shape:
            out.copy_(self.rows_of(0, part, path, shape, dtype))
            return
        if rows is None:
            rows = range(shape[dim])
        if not rows:
            return
        split_dim = 1 if path in self.by_second else 0  # along which the files split the tensor
        n_writers = 1 if path in self.whole else self.count
        for rank, held in enumerate(row_ranges(shape[split_dim], n_writers)):
            if dim == split_dim:
                needed = range(max(rows.start, held.start), min(rows.stop, held.stop))
                out_start = needed.start - rows.start
            else:
                needed = held
                out_start = held.start
            if not needed:
                continue
            held_shape = list(shape)
            held_shape[split_dim] = len(held)
            t = self.rows_of(rank, part, path, tuple(held_shape), dtype)
            t = t.narrow(split_dim, needed.start - held.start, len(needed))
            if dim != split_dim:
                t = t.narrow(dim, rows.start, len(rows))
            out.narrow(split_dim, out_start, len(needed)).copy_(t)


def attach_shards(
    checkpoint: dict[str, Any],
    folder: Path,
    parts: Sequence[str] | None,
    share: tuple[int, int],
    verify: Callable[[Path], None],
) -> None:
    """Give each meta tensor of these parts of a checkpoint (None = all) a method read_into(out,
    rows, dim): see `ShardReader`. The processes of `share`, (rank, world size), verify the files by
    turns with `verify(path)`. ValueError, with its name, for a file that is missing or damaged."""
    if parts is None:
        parts = PARTS
    reader = ShardReader(folder, checkpoint["shards"])
    files = [(rank, part) for rank in range(reader.count) for part in parts]
    for rank, part in files:
        if not reader.path(rank, part).exists():
            raise ValueError(f"{reader.path(rank, part)} is missing, which the checkpoint needs")

    def attach(value: Any, path: str, part: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                attach(inner, f"{path}/{key}", part)
        elif torch.is_tensor(value):
            value.read_into = partial(reader.read_into, part, path, value.shape, value.dtype)

    for part in parts:
        attach(checkpoint[part], f"/{part}", part)
    own_rank, world_size = share
    for rank, part in files[own_rank::world_size]:
        verify(reader.path(rank, part))
        reader.open_file(rank, part)  # raises if the file is of another checkpoint
