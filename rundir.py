"""A run directory: checkpoints, metrics.jsonl, config.json, loss.png.

Files are written whole or not at all, and checkpoints are loaded without running code from them. What goes wrong raises
ValueError with one clear line.
"""

import errno
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from loader import check_tokenizer
from model import whole

CHECKPOINT_FORMAT = "nanoDNT checkpoint 1"

# ------------------------------------------------------------------------------------------------------ checkpoints


def _twice(path: Path, act) -> None:
    """Do `act()`. One failure is retried; after a second ValueError that `path` cannot be written."""
    for attempt in (1, 2):
        try:
            return act()
        except (OSError, RuntimeError) as e:  # torch.save turns some I/O errors into RuntimeError
            if attempt == 2:
                reason = str(e).splitlines()[0] if str(e) else type(e).__name__
                raise ValueError(f"cannot write {path} ({reason}); earlier files are intact") from e
            time.sleep(1)


def _replace(path: Path, change) -> None:
    """Do `change(tmp)`, which makes the temporary file `tmp` and renames it to `path`, and bring that to the disk.
    Retried like `_twice`; where it fails, `path` is as it was."""
    tmp = path.with_name(path.name + ".tmp")

    def act():
        try:
            tmp.unlink(missing_ok=True)
            change(tmp)
        except BaseException:
            with suppress(OSError):
                tmp.unlink(missing_ok=True)
            raise

    _twice(path, act)
    _twice(path, lambda: sync_folder(path.parent))


def sync_folder(folder: Path) -> None:
    """Bring renames in `folder` to the disk, where the system has this (Windows and some network disks have not)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


def write_file(path: Path, write) -> None:
    """Write through a temporary file, fsync, rename: `path` is the old file or the whole new one, never a part.

    `write(f)` gets the open file. ValueError if it fails twice."""

    def change(tmp):
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)

    _replace(path, change)


def link_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy where the file system has no hard links."""

    def change(tmp):
        try:
            os.link(source, tmp)
        except OSError:
            shutil.copyfile(source, tmp)
        os.replace(tmp, target)

    _replace(target, change)


def save_checkpoint(out_dir: Path, state: dict, best: bool, keep: bool = False) -> None:
    """Write last.pt, keeping the one before as prev.pt; with `best` the same file is best.pt too (a hard link), with
    `keep` also step_N.pt, which no later save touches.

    Checkpoints are never changed in place, so links are safe, and at every moment last.pt is whole. The file is a zip
    archive that holds a CRC-32 of each tensor and of the rest, which `load_checkpoint` verifies.
    ValueError for a state that is not finite, or a file that cannot be written: last.pt is untouched then."""
    tensors = dict(state["model"])
    tensors |= {f"optimizer state {i}.{k}": t for i, s in state["optimizer"]["state"].items() for k, t in s.items()}
    tensors = {name: t for name, t in tensors.items() if torch.is_tensor(t)}
    finite = torch.stack([t.isfinite().all().cpu() for t in tensors.values()])
    if not finite.all():
        name = list(tensors)[int(finite.logical_not().nonzero()[0])]
        raise ValueError(f"{name} is not finite at step {state['step']}: not saved; earlier checkpoints are intact")
    names = ["best.pt"] * best + [f"step_{state['step']}.pt"] * keep
    checkpoint = {"format": CHECKPOINT_FORMAT, "names": names, **state}
    write_file(out_dir / "new.pt", lambda f: torch.save(checkpoint, f))
    name_checkpoint(out_dir, names)


def name_checkpoint(out_dir: Path, names: list) -> None:
    """Make new.pt the latest, and `names` too. A kill may come anywhere in here: the run that resumes does it again."""
    last, new = out_dir / "last.pt", out_dir / "new.pt"
    if last.exists():
        link_file(last, out_dir / "prev.pt")
    for name in names:
        link_file(new, out_dir / name)
    _replace(last, lambda tmp: os.replace(new, last))


def snapshot(value, keep: bool = True):
    """Nested dicts and lists with their tensors copied whole to the CPU, or, where not `keep`, dropped.

    Sharded tensors are gathered, so that all ranks must call this; one of them keeps what it gets."""
    if isinstance(value, dict):
        return {key: snapshot(part, keep) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(part, keep) for part in value)
    if not torch.is_tensor(value):
        return value
    value = whole(value.detach())
    return value.to("cpu", copy=True) if keep else None


class Saver:
    """Writes checkpoints in a thread while training goes on, one at a time. What fails there is raised by the next
    `check`, `save` or `finish`."""

    def __init__(self, out_dir: Path):
        self.out_dir, self.pool, self.writing = out_dir, ThreadPoolExecutor(1), None

    def save(self, state: dict, best: bool, keep: bool) -> None:
        """Begin `save_checkpoint` of a state that nobody changes any more."""
        self.finish()
        self.writing = self.pool.submit(save_checkpoint, self.out_dir, state, best, keep)

    def check(self) -> None:
        if self.writing and self.writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last one is on the disk."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def close(self) -> None:
        """Wait, whatever comes of it: for the end of a run that something else ended."""
        self.pool.shutdown()


# A new one that a kill kept from becoming the latest, the latest, the one before, and the best by validation loss.
CHECKPOINT_FILES = ("new.pt", "last.pt", "prev.pt", "best.pt")


def fingerprint(out_dir: Path) -> dict:
    """{name: what tells whether it was replaced} of the checkpoints in `out_dir`, step_N.pt included."""
    found = {}
    for path in Path(out_dir).glob("*.pt"):
        if path.name in CHECKPOINT_FILES or re.fullmatch(r"step_\d+\.pt", path.name):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[path.name] = status.st_ino, status.st_mtime_ns, status.st_size
    return found


def is_count(value) -> bool:
    return type(value) is int and 0 <= value < 2**48


def is_number(value) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_tensor(value) -> bool:
    """Whether it is an ordinary tensor of real numbers on the CPU: not sparse, nested, complex, without storage …"""
    if not torch.is_tensor(value) or value.is_nested or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_complex() and not value.is_quantized


def is_plain(value) -> bool:
    """Whether it is made of numbers, texts, None, dicts and lists alone."""
    if isinstance(value, (dict, list, tuple)):
        return all(is_plain(part) for part in (value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (int, float, str))


def is_nested(value, depth: int) -> bool:
    """Whether it is made of numbers and None alone, in dicts with texts for keys and lists, up to `depth` deep."""
    if isinstance(value, (dict, list)):
        keys, parts = (value, value.values()) if isinstance(value, dict) else ((), value)
        return depth > 0 and all(isinstance(k, str) for k in keys) and all(is_nested(v, depth - 1) for v in parts)
    return value is None or is_number(value)


def is_row(value) -> bool:
    """Whether it is a row of metrics.jsonl, as far as this project reads them."""
    if not isinstance(value, dict) or not is_count(value.get("step")) or not is_count(value.get("tokens")):
        return False
    losses = [value[name] for name in ("train_loss", "val_loss") if value.get(name) is not None]
    return is_count(value.get("rollbacks", 0)) and all(map(is_number, losses))


def is_optimizer_state(value) -> bool:
    states = value.get("state") if isinstance(value, dict) else None
    if not isinstance(states, dict) or not all(isinstance(state, dict) for state in states.values()):
        return False
    entries = [entry for state in states.values() for entry in state.values()]
    return is_plain({**value, "state": None}) and all(is_tensor(entry) or is_plain(entry) for entry in entries)


# What a checkpoint holds: tensors and plain values only.
CHECKPOINT = {
    "model": lambda v: isinstance(v, dict) and all(is_tensor(t) and t.is_floating_point() for t in v.values()),
    "optimizer": is_optimizer_state,
    "scaler": lambda v: isinstance(v, dict) and all(map(is_number, v.values())),
    "evaluated": lambda v: is_count(v) or (type(v) is int and v == -1),
    "pending": lambda v: v == {} or (is_row(v) and is_nested(v, 4)),  # row["track"] has dicts of dicts of lists
    "best_val_loss": lambda v: type(v) in (int, float) and not math.isnan(v),
    "wandb_id": lambda v: v is None or isinstance(v, str),
    "recent": lambda v: isinstance(v, list) and all(map(is_number, v)),
    "names": lambda v: isinstance(v, list) and all(re.fullmatch(r"best\.pt|step_\d+\.pt", str(name)) for name in v),
    **dict.fromkeys(("step", "tokens", "skipped", "shift", "rollbacks"), is_count),
    **dict.fromkeys(("meta", "model_config", "train_config"), lambda v: isinstance(v, dict) and is_plain(v)),
}
ABSENT = {"names": [], "recent": [], "shift": 0, "rollbacks": 0}  # from checkpoints of earlier versions


def load_checkpoint(path) -> dict:
    """A checkpoint on the CPU, without running code from it (`weights_only`). ValueError if it cannot be read, or if a
    checksum says that it is not what was written.

    The tensors are mapped, not read: processes of one machine share the memory, and load what they copy."""
    if not os.path.exists(path):
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) < len(names) or any(record.compress_type for record in archive.infolist()):
                raise ValueError("packed by another program")  # whose tensors torch would misread
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
    checkpoint = ABSENT | checkpoint
    wrong = [key for key, fits in CHECKPOINT.items() if not fits(checkpoint.get(key, ...))]
    step, row = checkpoint.get("step"), checkpoint.get("pending")
    if not wrong and (checkpoint["evaluated"] > step or row.get("step", step) != step):
        wrong = ["evaluated or pending"]
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} missing or of a wrong kind")
    check_tokenizer(checkpoint["meta"], path)
    prefix = "_orig_mod."  # left by code that saves a compiled model
    checkpoint["model"] = {str(name).removeprefix(prefix): p for name, p in checkpoint["model"].items()}
    return {**checkpoint, "path": Path(path)}


def load_latest(out_dir: Path, say=print) -> dict | None:
    """The latest checkpoint: last.pt, or new.pt where a kill came before that was renamed; where it cannot be read the
    one before, with a message. None where there is none."""
    found = [out_dir / name for name in CHECKPOINT_FILES[:3] if (out_dir / name).exists()]
    problems = []
    for path in found:
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


# ---------------------------------------------------------------------------------------------------------- records


def lock(out_dir: Path):
    """Keep other processes from writing to `out_dir` while the file returned is open, and the system knows locks.

    ValueError if one does."""
    if fcntl is None:
        return None
    file = open(out_dir / ".lock", "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise ValueError(
            f"{out_dir} is in use by another run ({file.read() or 'of an unknown process'}): end that first, or choose "
            "another --out_dir"
        ) from None
    except OSError:  # a file system without locks
        return file
    file.seek(0)
    if file.read() != (me := f"process {os.getpid()} on {platform.node()}"):
        file.truncate(0)
        file.write(me)
        file.flush()
    return file


class Metrics:
    """A run directory's records, written by rank 0: config.json, metrics.jsonl, and wandb where it is on.

    Nothing in `out_dir` changes before everything that can be checked has been. A run resumed from the checkpoint
    `resumed` goes on where that is: rows of metrics.jsonl beyond `until` (step, roll-backs), and a row cut short by a
    kill, are dropped, and if it is not last.pt, it replaces that. A fresh run (None) removes the checkpoints that
    overwrite=True gave up. `seen`: the fingerprint of `out_dir` before anything of it was read.
    `wandb`: None, or (project, id of the run to go on with or None).
    """

    def __init__(self, out_dir: Path, resumed: Path | None, until, configs: dict, needed_bytes: int, seen, wandb=None):
        self.path, self.wandb, self.wandb_id = out_dir / "metrics.jsonl", None, wandb and wandb[1]
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(out_dir).free
        except OSError as e:
            raise ValueError(f"cannot use out_dir {out_dir} ({e.strerror}): choose another --out_dir") from None
        if free < needed_bytes:
            need = f"{needed_bytes / 1e9:.2f} GB"
            raise ValueError(f"{out_dir} has {free / 1e9:.2f} GB free, a checkpoint needs {need}: make room")
        rows = read_metrics(out_dir) if resumed else []
        rows = [row for row in rows if row["step"] <= until[0] and row.get("rollbacks", 0) <= until[1]]
        if wandb:
            self._start_wandb(*wandb, configs)
        self.lock = lock(out_dir)
        if fingerprint(out_dir) != seen:
            raise ValueError(f"another run has written to {out_dir} since this one began: start again")
        record = json.dumps({**configs, **run_record()}, indent=2)
        write_file(out_dir / "config.json", lambda f: f.write(record.encode()))
        write_file(self.path, lambda f: f.writelines(json.dumps(row).encode() + b"\n" for row in rows))
        if resumed and resumed.name == "new.pt":
            name_checkpoint(out_dir, load_checkpoint(resumed)["names"])
        elif resumed and resumed.name != "last.pt":
            link_file(resumed, out_dir / "last.pt")
        for name in () if resumed else fingerprint(out_dir):
            (out_dir / name).unlink(missing_ok=True)

    def _start_wandb(self, project, run_id, configs):
        try:
            import wandb

            folder = self.path.parent
            how = dict(project=project, name=folder.name, dir=folder, id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(**how, config=configs)
        except ImportError:
            raise ValueError("wandb_log=True needs wandb: pip install wandb, or leave it out") from None
        except Exception as e:  # no key, no network, a full disk: wandb's errors share no base class
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise ValueError(f"wandb did not start ({reason}): set WANDB_MODE=offline or --wandb_log=False") from e
        self.wandb_id = self.wandb.id

    def write(self, row: dict) -> None:
        """Append one row to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""
        row = finite(row)
        size = self.path.stat().st_size if self.path.exists() else 0

        def append():
            with open(self.path, "ab") as f:
                if f.tell() > size:
                    f.truncate(size)  # what an attempt that failed has left
                f.write(json.dumps(row).encode() + b"\n")

        _twice(self.path, append)
        if self.wandb:
            self.wandb.log(flat(row), step=row["step"])

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()
        if self.lock:
            self.lock.close()


def finite(value):
    """`value`, nested dicts and lists, with None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(value, name: str = "") -> dict:
    """{path, such as track/stream_var/0: value} of nested dicts and lists."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, part in parts for k, v in flat(part, f"{name}/{key}" if name else str(key)).items()}


def read_metrics(out_dir: Path) -> list:
    """The rows of metrics.jsonl; a last line cut short is left out. ValueError for anything else that is no row."""
    path, rows = Path(out_dir) / "metrics.jsonl", []
    if not path.exists():
        return rows
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} cannot be read ({type(e).__name__}): repair or remove it") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if is_row(row):
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{path}:{number} is not a metrics row: repair or remove the file")
    return rows


def run_record() -> dict:
    """What config.json holds beside the configuration: command line, versions, git commit, time."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit, changes = None, None
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, timeout=10).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        pass  # no git here
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "command": sys.argv,
        "versions": versions | {"numpy": np.__version__},
        "git_commit": commit or None,
        "git_changed_files": changes.splitlines() if changes else [],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def smoothed(values: list, share: float) -> list:
    """Means over a window of that `share` of the values, shorter at both ends; centred, since a trailing one lags."""
    half, n = int(len(values) * share / 2), len(values)
    sums = np.cumsum([0.0, *values])
    low, high = np.maximum(np.arange(n) - half, 0), np.minimum(np.arange(n) + half + 1, n)
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def draw_loss(out_dir: Path, title: str) -> Path | None:
    """Draw loss.png from metrics.jsonl; None, with a message, where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("loss.png is not drawn: matplotlib is not installed")
        return None
    rows = read_metrics(out_dir)
    train, val = ([(r["step"], r[k]) for r in rows if r.get(k) is not None] for k in ("train_loss", "val_loss"))
    fig, ax = plt.subplots(figsize=(6.4, 4), dpi=160)
    if train:
        steps, losses = zip(*train, strict=True)
        ax.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        ax.plot(steps, smoothed(losses, 0.05), color="tab:blue", linewidth=1.6, label="training, smoothed")
    if val:
        label = f"held-out, {val[-1][1]:.3f} at the end"
        ax.plot(*zip(*val, strict=True), "o-", color="tab:orange", markersize=3.5, linewidth=1.4, label=label)
    points = [loss for step, loss in train + val if step >= 0.05 * rows[-1]["step"]]
    if points:  # the first steps fall from ln(vocabulary) and would flatten all the rest
        low, high = min(points), max(points)
        ax.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
    per_step = next((f" ({r['tokens'] // r['step']:,} tokens each)" for r in rows[::-1] if r["step"]), "")
    ax.set(xlabel=f"step{per_step}", ylabel="loss (nats per token)", title=title.replace("$", r"\$"))
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if train or val:
        ax.legend(frameon=False)
    fig.tight_layout()
    path = out_dir / "loss.png"
    write_file(path, lambda f: fig.savefig(f, format="png"))
    plt.close(fig)
    return path
