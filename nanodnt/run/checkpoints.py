"""Atomic checkpoints, written in the background, loaded with weights_only."""

import math
import os
import re
import secrets
import shlex
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_with_path

from layers.sharding import full_tensor
from nanodnt.files import link_file, replace_file, write_file
from nanodnt.run.environment import Env
from nanodnt.tasks import task_of_data

CHECKPOINT_FORMAT = "nanoDNT checkpoint 1"

# The latest checkpoint, newest first. new.pt is written but not yet renamed if the run was killed.
LATEST = ("new.pt", "last.pt", "prev.pt")
# step_N.pt is never overwritten, best.pt by a better checkpoint
KEPT_NAME = re.compile(r"best\.pt|step_\d+\.pt")

SHARDS_FOLDER = "shards"  # in the run directory: see shards.py
SHARDS_NAME = re.compile(r"[0-9a-f]{8}-\d{1,15}")  # RUN-STEP
# Bytes of weights and optimizer state from which checkpoint_format=auto shards: our choice
FROM_BYTES = 10e9


@dataclass
class RunState:
    """The progress of a run, as a checkpoint stores it beside tensors and configurations."""

    step: int = 0  # optimizer steps made
    tokens: int = 0  # tokens trained on
    skipped: int = 0  # steps whose gradient was not finite, which changed nothing
    evaluated: int = -1  # step of the last evaluation, -1 = none yet
    best_val_loss: float = math.inf
    pending: dict = field(default_factory=dict)  # the metrics row of an interrupted evaluation
    wandb_id: str | None = None
    recent: list = field(default_factory=list)  # logged losses that a spike is measured against
    shift: int = 0  # step s trains on batch s + shift
    rows: int = 0  # training rows that steps have read, or that a roll-back has skipped
    rollbacks: int = 0  # roll-backs made

    def advance(self, rows: int, tokens: int) -> None:
        """Count an optimizer step that has read `rows` training rows and `tokens` tokens."""
        self.step += 1
        self.rows += rows
        self.tokens += tokens


class Checkpoint(TypedDict):
    """The keys of a checkpoint. The fields of RunState are keys beside these, and a loaded one has
    its "path", a Path."""

    names: list  # further names of this checkpoint: best.pt, step_N.pt
    model: dict  # state dict, full tensors
    optimizer: dict  # state dict
    scaler: dict  # state dict of the loss scaler; empty if the run needs none
    meta: dict  # meta.json of the dataset
    model_config: dict  # GPTConfig
    train_config: dict  # TrainConfig
    shards: dict  # a ShardsRecord of shards.py; empty if the tensors are in this file


# The type of each key, checked when a checkpoint is loaded.
KINDS = Checkpoint.__annotations__ | RunState.__annotations__
# Values of the keys that earlier versions did not save. rows = -1: not counted, all steps had the
# batch size of the checkpoint.
OLDER = {"names": [], "recent": [], "shift": 0, "rollbacks": 0, "shards": {}, "rows": -1}


class FileIdentity(NamedTuple):
    """Tells a file from the one that replaced it."""

    inode: int
    mtime_ns: int  # time of the last change
    size: int  # bytes


def is_metrics_row(value: Any) -> bool:
    """Whether `value` is a row of metrics.jsonl. Only the fields that this project reads back are
    checked."""
    if not isinstance(value, dict):
        return False
    counts = [value.get("step"), value.get("tokens"), value.get("rollbacks", 0)]
    losses = [value[name] for name in ("train_loss", "val_loss") if value.get(name) is not None]
    return all(map(is_count, counts)) and all(map(is_number, losses))


def is_count(value: Any) -> bool:
    """Whether `value` is a number of steps or tokens that a run can have."""
    return type(value) is int and 0 <= value < 2**48


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number. An int that is too large for a float is none."""
    return type(value) in (int, float) and abs(value) < 1e300


# ---------------------------------------------------------------------------------------- writing


def save_checkpoint(out_dir: Path, checkpoint: Checkpoint, best: bool, keep: bool = False) -> None:
    """Write last.pt, and keep the one before as prev.pt.

    With `best` the same file is also best.pt (a hard link), with `keep` also step_N.pt, which no
    later save overwrites. Checkpoints are never changed in place. ValueError, with last.pt
    untouched, for tensors that are not finite, or a file that cannot be written."""
    check_finite(checkpoint["model"], checkpoint["step"])
    for i, state in checkpoint["optimizer"]["state"].items():
        tensors = {f"optimizer state {i}.{name}": t for name, t in state.items()}
        check_finite(tensors, checkpoint["step"])
    names = []
    if best:
        names.append("best.pt")
    if keep:
        names.append(f"step_{checkpoint['step']}.pt")
    content = {"format": CHECKPOINT_FORMAT, "names": names, **checkpoint}
    write_file(out_dir / "new.pt", lambda f: torch.save(content, f))
    name_checkpoint(out_dir, names)


def check_finite(tensors: dict[str, Any], step: int) -> None:
    """Raise ValueError, which names it, for a tensor that is not finite."""
    for name, t in tensors.items():
        if torch.is_tensor(t) and not t.is_meta and not t.isfinite().all():
            raise ValueError(
                f"{name} is not finite at step {step}: not saved; earlier files are intact"
            )


def name_checkpoint(out_dir: Path, names: list[str]) -> None:
    """Rename new.pt to last.pt, and link it to `names`. After a kill the resumed run does it
    again."""
    new = out_dir / "new.pt"
    last = out_dir / "last.pt"
    if last.exists():
        link_file(last, out_dir / "prev.pt")
    for name in names:
        link_file(new, out_dir / name)
    replace_file(last, lambda tmp: os.replace(new, last))


def use_shards(setting: str, env: Env, total_bytes: float) -> bool:
    """Whether checkpoints are sharded, for this value of `checkpoint_format`. ValueError if that is
    "sharded" and the model is not sharded."""
    is_fsdp = env.parallel == "fsdp"
    if setting == "sharded" and not is_fsdp:
        raise ValueError(
            f"checkpoint_format=sharded needs parallel=fsdp, not {env.parallel}: use auto or file"
        )
    if setting == "auto":
        return is_fsdp and total_bytes >= FROM_BYTES
    return setting == "sharded"


class Saver:
    """Writes checkpoints in a thread, one at a time: rank 0 writes one file or, if `sharded`, each
    rank its shards. An error of a write is raised by the next `copy`, `save` or `finish`. All ranks
    of `env` must call these alike."""

    def __init__(self, out_dir: Path, env: Env | None = None, sharded: bool = False) -> None:
        self.out_dir = out_dir
        self.env = env
        self.is_main = env is None or env.is_main
        self.sharded = sharded
        self.pool = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.abandoned = threading.Event()  # set: rank 0 no longer waits for shards of the others
        self.memory = {}  # {path of a tensor: memory for its copy on the host}
        # shards are called NAME-STEP
        self.name = env.gather(secrets.token_hex(4))[0] if sharded else ""

    def copy(self, value: Any) -> Any:
        """Copy nested dicts and lists for `save`. The copy is good until the next.

        On rank 0 it has full tensors on the CPU, on other ranks None in their place. If sharded, it
        is a ShardedCopy: nothing is gathered, each rank copies its own rows."""
        self.finish()  # the last write reads the memory of the last copy
        if self.sharded:
            from nanodnt.run.shards import copy_shards

            copied = copy_shards(value, self._copy_tensor)
        else:
            copied = tree_map_with_path(self._copy_full, value)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _copy_full(self, path: tuple, value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        value = full_tensor(value.detach())  # all ranks must call this
        return self._copy_tensor(path, value) if self.is_main else None

    def _copy_tensor(self, path: Any, value: Tensor) -> Tensor:
        memory = self.memory.get(path)
        layout = value.shape, value.dtype, value.stride()
        if memory is None or (memory.shape, memory.dtype, memory.stride()) != layout:
            # The copy keeps the strides: the bits of a product depend on them.
            memory = torch.empty_like(value, device="cpu")
            if value.is_cuda:
                # copies to memory that is fresh and not pinned are many times slower
                with suppress(RuntimeError):  # the driver may refuse to pin more
                    memory = memory.pin_memory()
            self.memory[path] = memory
        return memory.copy_(value, non_blocking=value.is_cuda)

    def save(self, copied: Any, other: dict[str, Any], best: bool, keep: bool) -> None:
        """Begin `save_checkpoint`. `copied` is a copy of "model" and "optimizer", `other` has the
        other keys of a Checkpoint. Nobody may change them after this."""
        self.finish()
        if self.sharded:
            name = f"{self.name}-{other['step']}"
            checkpoint = {**copied.value, **other, "shards": {**copied.record, "name": name}}
            self.writing = self.pool.submit(
                self._write_shards, checkpoint, copied.own_rows, best, keep
            )
        elif self.is_main:
            self.writing = self.pool.submit(self._write, {**copied, **other}, best, keep)

    def _write(self, checkpoint: Checkpoint, best: bool, keep: bool) -> None:
        save_checkpoint(self.out_dir, checkpoint, best, keep)
        self.clean(checkpoint["step"])

    def _write_shards(
        self, checkpoint: Checkpoint, own_rows: dict[str, Tensor], best: bool, keep: bool
    ) -> None:
        from nanodnt.run.shards import wait_for_shards, write_shards

        check_finite({path[1:]: t for path, t in own_rows.items()}, checkpoint["step"])
        folder = self.out_dir / SHARDS_FOLDER
        folder.mkdir(exist_ok=True)
        name = checkpoint["shards"]["name"]
        write_shards(folder, name, self.env.rank, own_rows)
        if self.is_main:
            count = checkpoint["shards"]["count"]
            timeout_s = self.env.timeout.total_seconds()
            wait_for_shards(folder, name, count, timeout_s, self.abandoned)
            self._write(checkpoint, best, keep)

    def clean(self, step: int = -1) -> None:
        """Delete the shards that no checkpoint needs, except those that this run makes after
        `step`: other ranks may be writing them."""
        if self.is_main and (self.out_dir / SHARDS_FOLDER).exists():
            with suppress(ValueError):  # a damaged checkpoint: nobody knows which shards it needs
                used = names_of_shards(self.out_dir)
                remove_unused(self.out_dir, used, self.name, step)

    def finish(self, wait: bool = True) -> None:
        """Wait until the last checkpoint is on disk, and raise the error of its write. Without
        `wait`, do so only if the write has ended."""
        if self.writing is None:
            return
        if wait or self.writing.done():
            writing = self.writing
            self.writing = None
            writing.result()

    def close(self) -> None:
        """Wait for the last write, but not for shards of processes that may be gone."""
        self.abandoned.set()
        self.pool.shutdown()
        self.memory.clear()


def names_of_shards(out_dir: Path) -> set[str]:
    """The names of the shards that the checkpoints in `out_dir` need. Reads no tensor. ValueError
    if a checkpoint cannot be read."""
    names = set()
    for file_name in fingerprint(out_dir):
        path = out_dir / file_name
        try:
            record = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            shards = record.get("shards")
        except Exception as e:  # a damaged file can raise nearly anything
            raise ValueError(f"{path} cannot be read ({type(e).__name__})") from e
        if shards:
            names.add(shards["name"])
    return names


def remove_unused(out_dir: Path, used: set[str], run: str = "", step: int = -1) -> None:
    """Delete all shards, and the unfinished files of a killed run, except those of the names
    `used`, and those that `run` makes after `step`."""
    for path in (Path(out_dir) / SHARDS_FOLDER).glob("*.pt*"):
        name = path.name.split(".")[0]
        is_next = run and name.startswith(f"{run}-") and int(name.rpartition("-")[2]) > step
        if name not in used and not is_next:
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------- reading


def fingerprint(out_dir: Path | str) -> dict[str, FileIdentity]:
    """{name: identity} of the checkpoints in `out_dir`. A replaced file gets a new entry."""
    identities = {}
    for path in Path(out_dir).glob("*.pt"):
        if path.name in LATEST or KEPT_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                status = path.stat()
                identities[path.name] = FileIdentity(
                    status.st_ino, status.st_mtime_ns, status.st_size
                )
    return identities


def how_to_continue(out_dir: Path, damaged: Iterable[str] = ()) -> str:
    """How the run in `out_dir` can be continued without its `damaged` checkpoints, in words for an
    error message; "" if there is no other checkpoint."""
    files = fingerprint(out_dir)
    # grouped by inode, because best.pt is often a link to last.pt
    damaged_inodes = {files[name].inode for name in damaged if name in files}
    times = {
        name: file.mtime_ns for name, file in files.items() if file.inode not in damaged_inodes
    }
    if not times:
        return ""
    if any(name in times for name in LATEST):
        return "--init_from=resume continues it"
    newest = max(times, key=times.get)
    link = shlex.join(["ln", "-f", str(out_dir / newest), str(out_dir / "last.pt")])
    return f"`{link}`, then --init_from=resume, continues it from {newest}"


def verify_records(path: Path | str) -> None:
    """Raise ValueError unless the file has the format of torch.save and all its CRC-32 match."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.compress_type for record in archive.infolist()):
                raise ValueError("packed by another program")  # torch would misread its tensors
            if record := archive.testzip():
                raise ValueError(f"checksum of {record}")
    except Exception as e:  # a damaged file can raise nearly anything
        reason = str(e)
        if not reason.startswith(("checksum", "packed")):
            reason = type(e).__name__
        raise ValueError(
            f"{path} cannot be read as a checkpoint, it is damaged or foreign ({reason})"
        ) from e


def load_checkpoint(
    path: Path | str, parts: Sequence[str] | None = None, share: tuple[int, int] = (0, 1)
) -> Checkpoint:
    """A checkpoint on the CPU, loaded without running code from it. Processes of one machine share
    its memory.

    parts  of a sharded checkpoint: the keys whose tensors will be read (`ShardReader`); None = all
    share  of a sharded checkpoint: (rank, world size) of the processes that verify its files by
           turns

    ValueError if it cannot be read, a checksum does not match, or its structure is not a
    checkpoint's."""
    if not os.path.exists(path):
        raise ValueError(f"there is no checkpoint {path}")
    verify_records(path)
    checkpoint = load_file(path)
    check_format(checkpoint, path)
    checkpoint = {**OLDER, **checkpoint}
    try:
        check_structure(checkpoint)
        task = task_of_data(checkpoint["meta"])
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    task.check_trained_meta(checkpoint["meta"], path)
    checkpoint["path"] = Path(path)
    if checkpoint["shards"]:
        from nanodnt.run.shards import attach_shards

        folder = Path(path).parent / SHARDS_FOLDER
        attach_shards(checkpoint, folder, parts, share, verify_records)
    return checkpoint


def load_file(path: Path | str) -> Any:
    """The content of a file of torch.save on the CPU, mapped, loaded without running code from it.
    ValueError if it cannot be read, or needs code to be run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles, which are refused here anyway
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file can raise nearly anything
        raise ValueError(
            f"{path} cannot be read as a checkpoint, it is damaged, or holds more than tensors and "
            f"plain values ({type(e).__name__})"
        ) from e


def is_nanogpt(content: Any) -> bool:
    """Whether `content`, read from a file, is a checkpoint of nanoGPT."""
    return isinstance(content, dict) and {"model_args", "iter_num"} <= content.keys()


def check_format(content: Any, path: Path | str) -> None:
    """Raise ValueError unless `content`, read from the file `path`, is of this project's format."""
    if isinstance(content, dict) and content.get("format") == CHECKPOINT_FORMAT:
        return
    if is_nanogpt(content):
        raise ValueError(
            f"{path} is a checkpoint of nanoGPT: --init_from={path} takes its weights, with the "
            "code in interop/ (in Python: import interop)"
        )
    raise ValueError(f"{path} is not a checkpoint of this project ({CHECKPOINT_FORMAT!r} expected)")


def check_structure(checkpoint: dict[str, Any]) -> None:
    """Raise ValueError, which names the keys, unless each key of KINDS has a value of its type, and
    each text that becomes part of a path is a name that a run gives. The contents of "model" and
    "optimizer" are checked when they are loaded into a model and an optimizer."""
    wrong = [key for key, kind in KINDS.items() if not isinstance(checkpoint.get(key), kind)]
    if not wrong and not all(KEPT_NAME.fullmatch(str(name)) for name in checkpoint["names"]):
        wrong = ["names"]
    shards = checkpoint.get("shards")
    if not wrong and shards and not SHARDS_NAME.fullmatch(str(shards.get("name"))):
        wrong = ["shards"]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} missing, or nothing that a run saves")


def load_latest(
    out_dir: Path, say: Callable[[str], None] = print, env: Env | None = None
) -> Checkpoint | None:
    """The latest checkpoint: last.pt, or new.pt if a kill came before its renaming.

    If it cannot be read, the one before, with a warning by `say`. None if there is no checkpoint;
    ValueError if none can be read. All ranks of `env` must call this: they verify shards by turns,
    and read the same checkpoint."""
    names = [name for name in LATEST if (out_dir / name).exists()]
    if any(other_names != names for other_names in gather(names, env)):
        raise ValueError(
            f"processes found different checkpoints: {out_dir} must be a folder that all share"
        )
    share = (env.rank, env.world_size) if env else (0, 1)
    problems = []
    for name in names:
        path = out_dir / name
        problem = None
        try:
            checkpoint = load_checkpoint(path, share=share)
        except ValueError as e:
            problem = str(e)
        problems_of_ranks = [message for message in gather(problem, env) if message]
        if not problems_of_ranks:
            if problems:
                say(f"warning: {problems[0]}; going on from {path}, step {checkpoint['step']}")
            return checkpoint
        problems.append(problems_of_ranks[0])
    if not problems:
        return None
    advice = ["nothing to resume from"]
    if other := how_to_continue(out_dir, damaged=names):
        advice.append(other)
    raise ValueError(f"{'; '.join(problems)}: {'; '.join(advice)}")


def gather(value: Any, env: Env | None) -> list[Any]:
    """`value` of each rank of `env`, or of this process alone."""
    return env.gather(value) if env else [value]
