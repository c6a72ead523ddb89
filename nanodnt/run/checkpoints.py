"""Checkpoints, dicts of what KINDS says: written in a thread, complete or not at all, and read
without running code."""

import math
import os
import re
import secrets
import shlex
import threading
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_with_path

from layers.sharding import full_tensor
from nanodnt.files import link_file, replace_file, write_file
from nanodnt.run import shards
from nanodnt.tasks import task_of_data

CHECKPOINT_FORMAT = "nanoDNT checkpoint 1"

# new.pt: written, but not yet renamed when the run was killed
LATEST = ("new.pt", "last.pt", "prev.pt")
# step_N.pt stays for good, best.pt until a better one
KEPT_NAME = re.compile(r"best\.pt|step_\d+\.pt")


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


def is_metrics_row(value) -> bool:
    """Whether it is a row of metrics.jsonl: only the fields that this project reads back are
    checked."""
    if not isinstance(value, dict):
        return False
    counts = value.get("step"), value.get("tokens"), value.get("rollbacks", 0)
    losses = [value[name] for name in ("train_loss", "val_loss") if value.get(name) is not None]
    return all(map(is_count, counts)) and all(map(is_number, losses))


def is_count(value) -> bool:
    """Whether it is a number of steps or tokens that a run can have."""
    return type(value) is int and 0 <= value < 2**48


def is_number(value) -> bool:
    """Whether it is a finite int or float, and no int that is too large for a float."""
    return type(value) in (int, float) and abs(value) < 1e300


KINDS = dict.fromkeys(
    ("model", "optimizer", "scaler", "meta", "model_config", "train_config"), dict
)
KINDS |= dict(names=list, **RunState.__annotations__)
KINDS |= dict(shards=dict)  # {}, or where its tensors are: see shards.py
# what earlier versions did not save
OLDER = {"names": [], "recent": [], "shift": 0, "rollbacks": 0, "shards": {}}
OLDER |= {"rows": -1}  # not counted: all steps had the batch size of the checkpoint


def save_checkpoint(out_dir: Path, checkpoint: dict, best: bool, keep: bool = False) -> None:
    """Write last.pt, keeping the one before as prev.pt. With `best` the same file is best.pt too (a
    hard link), with `keep` also step_N.pt, which no later save overwrites. Checkpoints are never
    changed in place. ValueError, with last.pt untouched, for tensors that are not finite, or a file
    that cannot be written."""
    tensors = dict(checkpoint["model"])
    for i, state in checkpoint["optimizer"]["state"].items():
        tensors |= {f"optimizer state {i}.{name}": t for name, t in state.items()}
    for name, t in tensors.items():
        if torch.is_tensor(t) and not t.is_meta and not t.isfinite().all():
            raise ValueError(
                f"{name} is not finite at step {checkpoint['step']}: not saved; earlier files are intact"
            )
    names = ["best.pt"] * best + [f"step_{checkpoint['step']}.pt"] * keep
    checkpoint = {"format": CHECKPOINT_FORMAT, "names": names, **checkpoint}
    write_file(out_dir / "new.pt", lambda f: torch.save(checkpoint, f))
    name_checkpoint(out_dir, names)


def name_checkpoint(out_dir: Path, names: list) -> None:
    """Make new.pt the latest checkpoint, known also by `names`. After a kill the resumed run does
    it again."""
    last, new = out_dir / "last.pt", out_dir / "new.pt"
    if last.exists():
        link_file(last, out_dir / "prev.pt")
    for name in names:
        link_file(new, out_dir / name)
    replace_file(last, lambda tmp: os.replace(new, last))


class Saver:
    """Writes checkpoints in a thread, one at a time: rank 0, or, `sharded`, each rank its shards.
    An error of a write is raised by the next `copy`, `save` or `finish`. All ranks of `env` must
    call these alike."""

    def __init__(self, out_dir: Path, env=None, sharded: bool = False):
        self.out_dir, self.env, self.is_main, self.sharded = (
            out_dir,
            env,
            env is None or env.is_main,
            sharded,
        )
        self.pool, self.writing, self.abandoned = ThreadPoolExecutor(1), None, threading.Event()
        self.memory = {}  # of the copy of each tensor, by its path
        # of the shards, with the step
        self.name = env.gather(secrets.token_hex(4))[0] if sharded else ""

    def copy(self, value):
        """A copy of nested dicts and lists for `save`, good until the next: with full tensors on
        the CPU, and None in their place but on rank 0. Sharded, nothing is gathered, and each rank
        copies what it holds."""
        self.finish()  # who reads the memory of the last copy
        if self.sharded:
            copied = shards.split(value, self._copy_tensor)
        else:
            copied = tree_map_with_path(self._copy_full, value)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _copy_full(self, path, value):
        if not torch.is_tensor(value):
            return value
        value = full_tensor(value.detach())  # all ranks call it
        return self._copy_tensor(value, path) if self.is_main else None

    def _copy_tensor(self, value, path):
        memory = self.memory.get(path)
        layout = value.shape, value.dtype, value.stride()
        if memory is None or (memory.shape, memory.dtype, memory.stride()) != layout:
            memory = torch.empty_like(value, device="cpu")  # strides too: a product's bits need them
            # whose copies to fresh memory that is not pinned are many times slower
            if value.is_cuda:
                with suppress(RuntimeError):  # where the driver pins no more
                    memory = memory.pin_memory()
            self.memory[path] = memory
        return memory.copy_(value, non_blocking=value.is_cuda)

    def save(self, copied, rest: dict, best: bool, keep: bool) -> None:
        """Begin `save_checkpoint` of what `copy` returned and the `rest`, which nobody may change
        after this."""
        self.finish()
        if self.sharded:
            tensors, mine, about = copied
            checkpoint = (
                tensors | rest | {"shards": dict(about, name=f"{self.name}-{rest['step']}")}
            )
            self.writing = self.pool.submit(self._write_shards, checkpoint, mine, best, keep)
        elif self.is_main:
            self.writing = self.pool.submit(self._write, copied | rest, best, keep)

    def _write(self, checkpoint: dict, best: bool, keep: bool) -> None:
        save_checkpoint(self.out_dir, checkpoint, best, keep)
        self.clean(checkpoint["step"])

    def clean(self, step: int = -1) -> None:
        """Delete shards that no checkpoint needs, but those of this run after `step`, which may be
        being written."""
        if self.is_main and (self.out_dir / shards.FOLDER).exists():
            with suppress(ValueError):  # a damaged checkpoint: what it needs is not known
                shards.remove_unused(self.out_dir, names_of_shards(self.out_dir), self.name, step)

    def _write_shards(self, checkpoint: dict, mine: dict, best: bool, keep: bool) -> None:
        (self.out_dir / shards.FOLDER).mkdir(exist_ok=True)
        name, count, rank = (
            checkpoint["shards"]["name"],
            checkpoint["shards"]["count"],
            self.env.rank,
        )
        shards.write_shards(self.out_dir, name, rank, mine, checkpoint["step"])
        if self.is_main:
            shards.wait_for_shards(
                self.out_dir, name, count, self.env.timeout.total_seconds(), self.abandoned
            )
            self._write(checkpoint, best, keep)

    def close(self) -> None:
        """Wait for the last write, but not for shards of processes that may be gone."""
        self.abandoned.set()
        self.pool.shutdown()
        self.memory.clear()

    def finish(self, wait: bool = True) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of its write; without `wait`,
        if it has ended."""
        if self.writing and (wait or self.writing.done()):
            writing, self.writing = self.writing, None
            writing.result()


def names_of_shards(out_dir: Path) -> set:
    """The names of the shards that the checkpoints in `out_dir` need. ValueError if one of these
    cannot be read. It reads no tensor."""
    names = set()
    for name in fingerprint(out_dir):
        try:
            about = torch.load(
                out_dir / name, map_location="cpu", weights_only=True, mmap=True
            ).get("shards")
        except Exception as e:  # a damaged file can raise nearly anything
            raise ValueError(f"{out_dir / name} cannot be read ({type(e).__name__})") from e
        names |= {about["name"]} if about else set()
    return names


def fingerprint(out_dir: Path) -> dict:
    """{name: (inode, time, size)} of the checkpoints in `out_dir`. A replaced file gets a new
    entry."""
    found = {}
    for path in Path(out_dir).glob("*.pt"):
        if path.name in LATEST or KEPT_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[path.name] = status.st_ino, status.st_mtime_ns, status.st_size
    return found


def how_to_continue(out_dir: Path, damaged: list[str] | tuple = ()) -> str:
    """What continues the run in `out_dir` without its `damaged` checkpoints, in words for an error
    message. "" if there is no other checkpoint."""
    there = fingerprint(out_dir)
    # best.pt is often a link to last.pt
    bad_inodes = {there[name][0] for name in damaged if name in there}
    intact = {name: time for name, (inode, time, _) in there.items() if inode not in bad_inodes}
    if not intact:
        return ""
    if not intact.keys().isdisjoint(LATEST):
        return "--init_from=resume continues it"
    newest = max(intact, key=intact.get)
    link = shlex.join(["ln", "-f", str(out_dir / newest), str(out_dir / "last.pt")])
    return f"`{link}`, then --init_from=resume, continues it from {newest}"


def verify_records(path) -> None:
    """ValueError unless a file is as torch.save writes it, and all its CRC-32 match."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(record.compress_type for record in archive.infolist()):
                raise ValueError("packed by another program")  # torch would misread its tensors
            if record := archive.testzip():
                raise ValueError(f"checksum of {record}")
    except Exception as e:  # a damaged file can raise nearly anything
        reason = str(e) if str(e).startswith(("checksum", "packed")) else type(e).__name__
        raise ValueError(
            f"{path} cannot be read as a checkpoint, it is damaged or foreign ({reason})"
        ) from e


def load_checkpoint(path, parts=shards.PARTS, share: tuple = (0, 1)) -> dict:
    """A checkpoint on the CPU, with its "path", loaded without running code from it; processes of
    one machine share its memory. ValueError if it cannot be read, a checksum does not match, or its
    structure is not a checkpoint's. Of a sharded one, tensors of these `parts` can be read
    (`attach`), whose files the processes of `share` verify."""
    if not os.path.exists(path):
        raise ValueError(f"there is no checkpoint {path}")
    verify_records(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles, which are refused here anyway
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file can raise nearly anything
        raise ValueError(
            f"{path} cannot be read as a checkpoint, it is damaged ({type(e).__name__})"
        ) from e
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        if isinstance(checkpoint, dict) and {"model_args", "iter_num"} <= checkpoint.keys():
            raise ValueError(
                f"{path} is a checkpoint of nanoGPT, which is not read: see docs/from_nanogpt.md"
            )
        raise ValueError(
            f"{path} is not a checkpoint of this project ({CHECKPOINT_FORMAT!r} expected)"
        )
    checkpoint = OLDER | checkpoint
    try:
        check_structure(checkpoint)
        task = task_of_data(checkpoint["meta"])
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    task.check_trained_meta(checkpoint["meta"], path)
    if checkpoint["shards"]:
        shards.attach(checkpoint, Path(path).parent, parts, share, verify_records)
    return checkpoint | {"path": Path(path)}


def check_structure(checkpoint: dict) -> None:
    """ValueError, which names the keys, unless each key of KINDS has a value of that kind, and what
    becomes part of a path is a name that a run gives. What "model" and "optimizer" need is checked
    as they are loaded."""
    wrong = [key for key, kind in KINDS.items() if not isinstance(checkpoint.get(key), kind)]
    if not wrong and not all(KEPT_NAME.fullmatch(str(name)) for name in checkpoint["names"]):
        wrong = ["names"]
    if not wrong and not shards.is_description(checkpoint["shards"]):
        wrong = ["shards"]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} missing, or nothing that a run saves")


def load_latest(out_dir: Path, say=print, env=None) -> dict | None:
    """The latest checkpoint: last.pt, or new.pt if a kill came before its renaming. If that cannot
    be read, the one before, with a warning. None where there is no checkpoint; ValueError where
    none can be read. All ranks of `env` must call this: they verify shards by turns, and read the
    same checkpoint."""
    gather = env.gather if env else lambda value: [value]
    share = (env.rank, env.world_size) if env else (0, 1)
    there = [name for name in LATEST if (out_dir / name).exists()]
    if any(names != there for names in gather(there)):
        raise ValueError(
            f"processes found different checkpoints: {out_dir} must be a folder that all share"
        )
    problems = []
    for path in (out_dir / name for name in there):
        problem = None
        try:
            checkpoint = load_checkpoint(path, share=share)
        except ValueError as e:
            problem = str(e)
        of_all = [message for message in gather(problem) if message]
        if not of_all:
            if problems:
                say(f"warning: {problems[0]}; going on from {path}, step {checkpoint['step']}")
            return checkpoint
        problems.append(of_all[0])
    if problems:
        advice = ["nothing to resume from", how_to_continue(out_dir, damaged=there)]
        raise ValueError(f"{'; '.join(problems)}: {'; '.join(filter(None, advice))}")
    return None
