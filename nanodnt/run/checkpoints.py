"""Checkpoints, dicts of what KINDS says: written in a thread, complete or not at all, and read without running code."""

import json
import math
import os
import re
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.amp import GradScaler

from layers.sharding import full_tensor
from nanodnt.files import link_file, replace_file, write_file
from nanodnt.tasks import task_of_data

CHECKPOINT_FORMAT = "nanoDNT checkpoint 1"

LATEST = ("new.pt", "last.pt", "prev.pt")  # new.pt: written, but not yet renamed when the run was killed
KEPT_NAME = re.compile(r"best\.pt|step_\d+\.pt")  # step_N.pt stays for good, best.pt until a better one


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
    rollbacks: int = 0  # roll-backs made


def is_metrics_row(value) -> bool:
    """Whether it is a row of metrics.jsonl: only the fields that this project reads back are checked."""
    if not isinstance(value, dict):
        return False
    counts = value.get("step"), value.get("tokens"), value.get("rollbacks", 0)
    losses = [value[name] for name in ("train_loss", "val_loss") if value.get(name) is not None]
    return all(map(is_count, counts)) and all(map(is_number, losses))


def is_count(value) -> bool:
    """Whether it is a number of steps or tokens that a run can have."""
    return type(value) is int and 0 <= value < 2**48


def is_number(value) -> bool:
    """Whether it is a finite int or float."""
    return type(value) in (int, float) and abs(value) < math.inf


KINDS = dict.fromkeys(("model", "optimizer", "scaler", "meta", "model_config", "train_config"), dict)
KINDS |= dict(names=list, **RunState.__annotations__)
OLDER = {"names": [], "recent": [], "shift": 0, "rollbacks": 0}  # what checkpoints of earlier versions lack


def save_checkpoint(out_dir: Path, checkpoint: dict, best: bool, keep: bool = False) -> None:
    """Write last.pt, keeping the one before as prev.pt. With `best` the same file is best.pt too (a hard link), with
    `keep` also step_N.pt, which no later save overwrites. Checkpoints are never changed in place. ValueError, with
    last.pt untouched, for tensors that are not finite, or a file that cannot be written."""
    tensors = dict(checkpoint["model"])
    for i, state in checkpoint["optimizer"]["state"].items():
        tensors |= {f"optimizer state {i}.{name}": t for name, t in state.items()}
    for name, t in tensors.items():
        if torch.is_tensor(t) and not t.isfinite().all():
            raise ValueError(f"{name} is not finite at step {checkpoint['step']}: not saved; earlier files are intact")
    names = ["best.pt"] * best + [f"step_{checkpoint['step']}.pt"] * keep
    checkpoint = {"format": CHECKPOINT_FORMAT, "names": names, **checkpoint}
    write_file(out_dir / "new.pt", lambda f: torch.save(checkpoint, f))
    name_checkpoint(out_dir, names)


def name_checkpoint(out_dir: Path, names: list) -> None:
    """Make new.pt the latest checkpoint, known also by `names`. After a kill the resumed run does it again."""
    last, new = out_dir / "last.pt", out_dir / "new.pt"
    if last.exists():
        link_file(last, out_dir / "prev.pt")
    for name in names:
        link_file(new, out_dir / name)
    replace_file(last, lambda tmp: os.replace(new, last))


class Saver:
    """Writes checkpoints in a thread, one at a time. Its error is raised by the next `copy`, `save` or `finish`."""

    def __init__(self, out_dir: Path):
        self.out_dir, self.pool, self.writing = out_dir, ThreadPoolExecutor(1), None
        self.memory = {}  # of the copy of each tensor, by its path

    def copy(self, value, keep: bool = True):
        """A copy of nested dicts and lists with full tensors on the CPU, good until the next; None in their place on
        ranks that need not `keep` it. Sharded tensors are gathered, so all ranks must call this."""
        self.finish()  # who reads the memory of the last copy
        copied = self._copy(value, keep, ())
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return copied

    def _copy(self, value, keep: bool, path: tuple):
        if isinstance(value, dict):
            return {key: self._copy(part, keep, (*path, key)) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy(part, keep, (*path, i)) for i, part in enumerate(value))
        if not torch.is_tensor(value):
            return value
        value, memory = full_tensor(value.detach()), self.memory.get(path)
        if not keep:
            return None
        if memory is None or (memory.shape, memory.dtype) != (value.shape, value.dtype):
            # pinned for a GPU: its copies to fresh memory that is not are many times slower
            memory = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.is_cuda)
            self.memory[path] = memory
        return memory.copy_(value, non_blocking=True)

    def save(self, checkpoint: dict, best: bool, keep: bool) -> None:
        """Begin `save_checkpoint`. Nobody may change `checkpoint` after this."""
        self.finish()
        self.writing = self.pool.submit(save_checkpoint, self.out_dir, checkpoint, best, keep)

    def finish(self, wait: bool = True) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of its write; without `wait`, if it has ended."""
        if self.writing and (wait or self.writing.done()):
            writing, self.writing = self.writing, None
            writing.result()


def fingerprint(out_dir: Path) -> dict:
    """{name: (inode, time, size)} of the checkpoints in `out_dir`. A replaced file gets a new entry."""
    found = {}
    for path in Path(out_dir).glob("*.pt"):
        if path.name in LATEST or KEPT_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[path.name] = status.st_ino, status.st_mtime_ns, status.st_size
    return found


def load_checkpoint(path) -> dict:
    """A checkpoint on the CPU, with its "path", loaded without running code from it; processes of one machine share its
    memory. ValueError if it cannot be read, a checksum does not match, or its structure is not a checkpoint's."""
    if not os.path.exists(path):
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # as torch.save writes it, and all its CRC-32 match
            names = archive.namelist()
            if len(set(names)) < len(names) or any(record.compress_type for record in archive.infolist()):
                raise ValueError("packed by another program")  # torch would misread its tensors
            if record := archive.testzip():
                raise ValueError(f"checksum of {record}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles, which are refused here anyway
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a damaged file can raise nearly anything
        reason = str(e) if str(e).startswith(("checksum", "packed")) else type(e).__name__
        raise ValueError(f"{path} cannot be read as a checkpoint, it is damaged or foreign ({reason})") from e
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this project ({CHECKPOINT_FORMAT!r} expected)")
    checkpoint = OLDER | checkpoint
    try:
        check_structure(checkpoint)
        task = task_of_data(checkpoint["meta"])
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    task.check_trained_meta(checkpoint["meta"], path)
    # a prefix that is left by code that saves a compiled model
    model = {str(name).removeprefix("_orig_mod."): p for name, p in checkpoint["model"].items()}
    return {**checkpoint, "model": model, "path": Path(path)}


def check_structure(checkpoint: dict) -> None:
    """ValueError, which names the key, unless each key of KINDS has a value of that kind that a run can have: numbers,
    words, and ordinary tensors of floats in "model" and "optimizer". What these two need is checked as they load it."""

    def check_tensor(value):  # json calls it for whatever it does not know
        if not isinstance(value, torch.Tensor) or value.is_nested or not value.is_floating_point():
            raise TypeError
        if value.layout != torch.strided or value.device.type != "cpu":
            raise TypeError

    step, scaled = checkpoint.get("step"), GradScaler("cpu").state_dict().keys()
    checks = dict.fromkeys(("step", "tokens", "skipped", "shift", "rollbacks"), is_count) | dict(
        evaluated=lambda value: is_count(step) and -1 <= value <= step,
        pending=lambda value: not value or is_metrics_row(value) and value["step"] == step,
        scaler=lambda value: value.keys() in (set(), scaled) and all(map(is_number, value.values())),  # or not scaled
        recent=lambda value: all(map(is_number, value)),
        names=lambda value: all(KEPT_NAME.fullmatch(str(name)) for name in value),
    )
    wrong = []
    for key, kind in KINDS.items():
        value = checkpoint.get(key, ...)
        try:
            json.dumps(value, default=check_tensor if key in ("model", "optimizer") else None)
            fits = isinstance(value, kind) and (key not in checks or checks[key](value))
        except (TypeError, ValueError, RecursionError):
            fits = False
        wrong += [] if fits else [key]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} missing, or nothing that a run saves")


def load_latest(out_dir: Path, say=print) -> dict | None:
    """The latest checkpoint: last.pt, or new.pt if a kill came before its renaming. If that cannot be read, the one
    before, with a warning. None where there is no checkpoint; ValueError where none can be read."""
    problems = []
    for path in (out_dir / name for name in LATEST if (out_dir / name).exists()):
        try:
            checkpoint = load_checkpoint(path)
        except ValueError as e:
            problems.append(str(e))
            continue
        if problems:
            say(f"warning: {problems[0]}; going on from {path}, step {checkpoint['step']}")
        return checkpoint
    if problems:
        raise ValueError("; ".join(problems) + ": nothing to resume from")
    return None
