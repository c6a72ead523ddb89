"""Checkpoints in shards: under FSDP every process writes the rows that it holds, and nothing is
gathered.

The checkpoint itself (last.pt, …) then has tensors without contents, on the meta device, and says
where these are, in shards/ID.RANK.KIND.pt, KIND being "model" or "optimizer". Each such file is
complete or not there; the checkpoint is written when all of them are. They are read as checkpoints
are: CRC-32s are compared, no code runs.
"""

import re
import time
from functools import cache
from pathlib import Path

import torch

from layers.sharding import is_sharded, local_shard, row_ranges, shard_dim, shard_group
from nanodnt.files import write_file

FORMAT = "nanoDNT shard 1"
FOLDER, PARTS = "shards", ("model", "optimizer")
# of weights and optimizer state, from which a checkpoint is sharded under FSDP: our choice
FROM_BYTES = 10e9


def use_shards(setting: str, env, total_bytes: int) -> bool:
    """Whether checkpoints are sharded. ValueError where this is asked for and nothing is
    sharded."""
    if setting == "sharded" and env.parallel != "fsdp":
        raise ValueError(
            f"checkpoint_format=sharded needs parallel=fsdp, not {env.parallel}: use auto or file"
        )
    return setting == "sharded" or (
        setting == "auto" and env.parallel == "fsdp" and total_bytes >= FROM_BYTES
    )


def shard_path(out_dir: Path, name: str, rank: int, part: str) -> Path:
    return Path(out_dir) / FOLDER / f"{name}.{rank}.{part}.pt"


def is_description(value: dict) -> bool:
    """Whether a checkpoint may say this of its shards: {} for none; else the "name" of their files,
    the "count" of processes, the paths of tensors that one process has "whole", and "by_second", of
    those that are split along the second dimension (which checkpoints of earlier versions lack)."""
    return not value or bool(re.fullmatch(r"[0-9a-f]{8}-\d{1,15}", str(value.get("name"))))


# ---------------------------------------------------------------------------------------------------------- writing


def split(value, copy) -> tuple:
    """(`value` with meta tensors, {path: copy of what this process holds of a tensor}, what
    `is_description` describes but the name). `value`: nested dicts and lists; `copy(tensor,
    path)`."""
    mine, about = {}, dict(count=1, whole=[], by_second=[])

    def take(part, path):
        if isinstance(part, dict):
            return {key: take(inner, f"{path}/{key}") for key, inner in part.items()}
        if isinstance(part, (list, tuple)):
            return type(part)(take(inner, f"{path}/{i}") for i, inner in enumerate(part))
        if not torch.is_tensor(part):
            return part
        part, first = part.detach(), torch.distributed.get_rank() == 0
        if is_sharded(part):
            about["count"] = torch.distributed.get_world_size(shard_group(part))
            about["by_second"] += [path] * shard_dim(part)
            # HSDP: the first copy
            first = part.device_mesh.ndim == 1 or part.device_mesh.get_local_rank(0) == 0
        else:
            about["whole"].append(path)
        if first:
            mine[path] = copy(local_shard(part), path)
        return torch.empty(part.shape, dtype=part.dtype, device="meta")

    return take(value, ""), mine, about


def write_shards(out_dir: Path, name: str, rank: int, mine: dict, step: int) -> None:
    """Write what this process holds. ValueError for tensors that are not finite, or a file that
    cannot be written."""
    for path, t in mine.items():
        if not t.isfinite().all():
            raise ValueError(
                f"{path[1:]} is not finite at step {step}: not saved; earlier files are intact"
            )
    for part in PARTS if mine else ():
        tensors = {path: t for path, t in mine.items() if path.startswith(f"/{part}/")}
        shard = {"format": FORMAT, "name": name, "tensors": tensors}
        write_file(
            shard_path(out_dir, name, rank, part), lambda f, shard=shard: torch.save(shard, f)
        )


def wait_for_shards(out_dir: Path, name: str, count: int, timeout_s: float, abandoned) -> None:
    """Return when all files of a checkpoint are there. ValueError if that takes too long, or if
    `abandoned` is set."""
    waiting = [shard_path(out_dir, name, rank, part) for rank in range(count) for part in PARTS]
    start, pause = time.monotonic(), 0.01
    while waiting := [path for path in waiting if not path.exists()]:
        if abandoned.wait(pause) or time.monotonic() - start > timeout_s:
            raise ValueError(
                f"{waiting[0]} was not written: its process has ended or waits for its disk"
            )
        pause = min(2 * pause, 1.0)


def remove_unused(out_dir: Path, used: set, run: str = "", step: int = -1) -> None:
    """Delete the shards of all checkpoints but those named, and what a kill has left of them. Those
    that `run` makes after `step` stay, because other processes may be at work on them."""
    for path in (Path(out_dir) / FOLDER).glob("*.pt*"):
        name = path.name.split(".")[0]
        is_next = run and name.startswith(f"{run}-") and int(name.rpartition("-")[2]) > step
        if name not in used and not is_next:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- reading


def attach(checkpoint: dict, out_dir: Path, parts, share: tuple, verify) -> None:
    """Give each meta tensor of these parts a method read_into(out, rows, dim): `rows` of a
    dimension; None: all. `share`: (this process, of how many), which verify the files by turns;
    `verify(path)` raises ValueError. ValueError, with its name, for a file that is missing or
    damaged."""
    name, count, whole = (checkpoint["shards"][key] for key in ("name", "count", "whole"))
    whole, by_second = set(whole), set(checkpoint["shards"].get("by_second", ()))
    files = {
        (rank, part): shard_path(out_dir, name, rank, part)
        for rank in range(count)
        for part in parts
    }
    if missing := next((path for path in files.values() if not path.exists()), None):
        raise ValueError(f"{missing} is missing, which the checkpoint needs")

    @cache
    def tensors_of(rank: int, part: str) -> dict:
        path = files[rank, part]
        try:
            shard = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if (
                shard["format"] == FORMAT
                and shard["name"] == name
                and isinstance(shard["tensors"], dict)
            ):
                return shard["tensors"]
        except Exception as e:  # a damaged file can raise nearly anything
            raise ValueError(
                f"{path} cannot be read, it is damaged or foreign ({type(e).__name__})"
            ) from e
        raise ValueError(f"{path} is no part of this checkpoint")

    def take(rank: int, part: str, path: str, shape, dtype):
        found = tensors_of(rank, part).get(path)
        if not torch.is_tensor(found) or (found.shape, found.dtype) != (shape, dtype):
            raise ValueError(
                f"{files[rank, part]} has no {path[1:]} of {tuple(shape)}: it is damaged"
            )
        return found

    def add_read(value, path: str, part: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add_read(inner, f"{path}/{key}", part)
        elif torch.is_tensor(value):

            def read_into(out, rows=None, dim=0):
                if value.ndim == 0:
                    out.copy_(take(0, part, path, value.shape, value.dtype))
                    return
                split, shape = int(path in by_second), list(value.shape)
                rows = range(shape[dim]) if rows is None else rows
                for rank, held in enumerate(
                    row_ranges(shape[split], 1 if path in whole else count)
                ):
                    common = (
                        range(max(rows.start, held.start), min(rows.stop, held.stop))
                        if dim == split
                        else held
                    )
                    if common and rows:
                        shape[split] = len(held)
                        t = take(rank, part, path, tuple(shape), value.dtype)
                        t = t.narrow(split, common.start - held.start, len(common))
                        t = t if dim == split else t.narrow(dim, rows.start, len(rows))
                        out.narrow(
                            split, common.start - rows.start * (dim == split), len(common)
                        ).copy_(t)

            value.read_into = read_into

    for part in parts:
        add_read(checkpoint[part], f"/{part}", part)
    for i, (place, path) in enumerate(files.items()):
        if i % share[1] == share[0]:
            verify(path)
            tensors_of(*place)  # whose file may be that of another checkpoint
