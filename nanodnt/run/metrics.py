"""What a run measures, its records in config.json and metrics.jsonl, the lock, and what the console shows of a row."""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from nanodnt.files import link_file, reason_of, retry_once, write_file
from nanodnt.run.checkpoints import fingerprint, is_row, load_checkpoint, name_checkpoint
from nanodnt.run.hardware import peak_flops, peak_memory_bytes


class Reading(NamedTuple):
    """What the host fetches at a logged step."""

    loss: float  # mean over all processes, nats per token, or image
    grad_norm: float
    skipped: float  # steps skipped in the whole run
    streak: float  # steps being skipped in a row now; not used on the host
    longest_streak: float  # since the last reading


class Meter:
    """Counts skipped steps on the device, and time on the host. Between readings nobody waits for the device."""

    def __init__(self, state, step_tokens: int, step_flops: float, config, env, step_rows: dict):
        self.env, self.step_tokens, self.step_flops = env, step_tokens, step_flops
        self.peak = peak_flops(env.device, env.dtype, config.peak_flops)
        self.counts = torch.tensor([state.skipped, 0.0, 0.0], device=env.device)  # skipped, streak, longest_streak
        self.last_step, self.clock = state.step, time.perf_counter()
        self.step_rows = step_rows  # {field of a row of metrics.jsonl: what a step has of it}

    def count(self, found_inf) -> None:
        """Note whether the step just made was skipped."""
        skipped, streak, longest = self.counts
        streak = (streak + 1) * found_inf
        self.counts = torch.stack((skipped + found_inf, streak, torch.maximum(longest, streak)))

    def skipped(self) -> int:
        """Steps skipped in the whole run. Waits for the device."""
        return int(self.counts[0])

    def read(self, result, step: int) -> tuple:
        """(Reading, seconds per step) since the last reading. Waits for the device. All ranks must call it."""
        loss = self.env.sum(result.loss.clone()) / self.env.world_size
        reading = Reading(*torch.stack((loss, result.grad_norm, *self.counts)).tolist())
        seconds = (time.perf_counter() - self.clock) / (step - self.last_step)
        self.last_step, self.clock, self.counts[2] = step, time.perf_counter(), 0.0
        return reading, seconds

    def row(self, reading: Reading, rates: dict, seconds: float) -> dict:
        """The logged step's fields of metrics.jsonl."""
        row = {"train_loss": reading.loss, **rates, "grad_norm": reading.grad_norm}
        row |= {"skipped_steps": int(reading.skipped), "tokens_per_s": self.step_tokens / seconds}
        row |= {name: count / seconds for name, count in self.step_rows.items()}
        row |= {"peak_mem_bytes": peak_memory_bytes(self.env.device), "mfu": None}
        if self.peak:
            row["mfu"] = self.step_flops / seconds / (self.peak * self.env.world_size)
        return row

    @contextmanager
    def paused(self, wait: bool):
        """Time inside does not count as training. `wait`: for the device first, whose work so far is training."""
        if wait:
            self.env.synchronize()
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start


class Metrics:
    """A run directory's records, written by rank 0: config.json, metrics.jsonl, and wandb if it is on.

    resumed     the checkpoint that the run goes on from, which becomes last.pt; None for a new run, which deletes the
                checkpoints of an earlier one (overwrite=True allowed it)
    keep_until  (step, roll-backs): later rows of metrics.jsonl are dropped
    configs     goes into config.json
    seen        the fingerprint of `out_dir` before any file in it was read
    wandb       None, or (project, id of the wandb run to continue or None)

    ValueError, before anything is changed: no access, less than `needed_bytes` free, damaged metrics, wandb does not
    start, another run uses the folder or has changed it."""

    def __init__(self, out_dir: Path, resumed: Path | None, keep_until, configs: dict, needed_bytes, seen, wandb=None):
        self.path, self.wandb, self.wandb_id = out_dir / "metrics.jsonl", None, wandb and wandb[1]
        # checks
        check_space(out_dir, needed_bytes)
        rows = read_metrics(out_dir) if resumed else []
        rows = [row for row in rows if row["step"] <= keep_until[0] and row.get("rollbacks", 0) <= keep_until[1]]
        if wandb:
            self._start_wandb(*wandb, configs)
        self.lock = lock_folder(out_dir)
        if fingerprint(out_dir) != seen:
            raise ValueError(f"another run has written to {out_dir} since this one began: start again")
        # writes
        record = json.dumps({**configs, **run_record()}, indent=2)
        write_file(out_dir / "config.json", lambda f: f.write(record.encode()))
        write_file(self.path, lambda f: f.writelines(json.dumps(row).encode() + b"\n" for row in rows))
        if resumed is None:
            for name in seen:
                (out_dir / name).unlink(missing_ok=True)
        elif resumed.name == "new.pt":
            name_checkpoint(out_dir, load_checkpoint(resumed)["names"])
        elif resumed.name != "last.pt":
            link_file(resumed, out_dir / "last.pt")

    def _start_wandb(self, project, run_id, configs):
        try:
            import wandb

            folder = self.path.parent
            how = dict(project=project, name=folder.name, dir=folder, id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(**how, config=configs)
        except ImportError:
            raise ValueError("wandb_log=True needs wandb: pip install wandb, or leave it out") from None
        except Exception as e:  # no key, no network, a full disk: wandb's errors share no base class
            raise ValueError(
                f"wandb did not start ({reason_of(e)}): set WANDB_MODE=offline or --wandb_log=False"
            ) from e
        self.wandb_id = self.wandb.id

    def write(self, row: dict) -> None:
        """Append one row to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""
        row = finite(row)
        size = self.path.stat().st_size if self.path.exists() else 0

        def append():
            with open(self.path, "ab") as f:
                if f.tell() > size:
                    f.truncate(size)  # remove what a failed attempt has left
                f.write(json.dumps(row).encode() + b"\n")

        retry_once(self.path, append)
        if self.wandb:
            self.wandb.log(flat(row), step=row["step"])

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()
        if self.lock:
            self.lock.close()


# --------------------------------------------------------------------------------------------------- the run directory


def check_space(out_dir: Path, needed_bytes: int) -> None:
    """Create `out_dir`. ValueError if that fails, or if less than `needed_bytes` are free there."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out_dir).free
    except OSError as e:
        raise ValueError(f"cannot use out_dir {out_dir} ({e.strerror}): choose another --out_dir") from None
    if free < needed_bytes:
        need = f"{needed_bytes / 1e9:.2f} GB"
        raise ValueError(f"{out_dir} has {free / 1e9:.2f} GB free, a checkpoint needs {need}: make room")


def lock_folder(out_dir: Path):
    """An open file: while it is open, no other process can lock `out_dir`. ValueError if another holds the lock.

    None, or a file without a lock, where the system has no locks."""
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
    if file.read() != (owner := f"process {os.getpid()} on {platform.node()}"):
        file.truncate(0)
        file.write(owner)
        file.flush()
    return file


# ------------------------------------------------------------------------------------------------------------- rows


def finite(value):
    """`value`, nested dicts and lists, with None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(value, name: str = "") -> dict:
    """{path, such as track/stream_var/0: value} of nested dicts and lists."""
    if not isinstance(value, (dict, list)):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, part in parts for k, v in flat(part, f"{name}/{key}" if name else str(key)).items()}


def read_metrics(out_dir: Path) -> list:
    """The rows of metrics.jsonl, without a last line cut short. ValueError if any other line is not a row."""
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


def validation_line(scores: dict, digits: int = 4) -> str:
    """The console's words for what `evaluate` returns."""
    shares = [f", top-{k} {scores[f'val_top{k}']:.2%}" for k in (1, 5) if f"val_top{k}" in scores]
    return f"validation loss {scores['val_loss']:.{digits}f}" + "".join(shares)


def progress_line(row: dict, max_iters: int, seconds: float) -> str:
    """The console's line for a metrics row; `seconds` per step."""
    left = int(seconds * (max_iters - row["step"]))
    eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
    skipped = f"  skipped {row['skipped_steps']}" if row["skipped_steps"] else ""
    images = f"  {row['images_per_s']:,.0f} images/s" if "images_per_s" in row else ""
    return (
        f"step {row['step']}/{max_iters}  loss {row['train_loss']:.4f}  lr {row['lr']:.2e}  "
        f"norm {row['grad_norm']:.2f}  {seconds * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s"
        f"{images}{mfu}{skipped}  eta {eta}"
    )


def run_record() -> dict:
    """What config.json holds besides the configuration: command line, versions, git commit, time."""

    def git(*command) -> str:
        call = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(call, capture_output=True, text=True, timeout=10).stdout.strip()

    commit, changes = None, ""
    with suppress(OSError, subprocess.SubprocessError):  # git is not installed
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "command": sys.argv,
        "versions": versions | {"numpy": np.__version__},
        "git_commit": commit or None,
        "git_changed_files": changes.splitlines(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
