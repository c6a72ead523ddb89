"""A run directory: who may write to it, its records in config.json and metrics.jsonl, and wandb beside them."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from nanodnt.files import link_file, reason_of, retry_once, write_file
from nanodnt.run.checkpoints import fingerprint, load_checkpoint, name_checkpoint
from nanodnt.run.metrics import finite, flat, read_metrics
from nanodnt.run.shards import remove_unused


class RunDirectory:
    """A run directory, written by rank 0. Nothing is written before `claim`."""

    def __init__(self, path: Path):
        self.path, self.metrics, self.lock, self.wandb = path, path / "metrics.jsonl", None, None

    def claim(self, resumed: Path | None, keep_until, configs: dict, needed_bytes: int, seen: dict, wandb=None):
        """Make the directory this run's. Returns the id of its run at wandb, or None. ValueError, before anything is
        changed: no access, less than `needed_bytes` free, damaged metrics, no wandb, another run at work.

        resumed     the checkpoint to go on from, which becomes last.pt; None: a new run, which deletes those it finds
        keep_until  (step, roll-backs): later rows of metrics.jsonl are dropped
        configs     goes into config.json
        seen        the fingerprint of the directory before any file in it was read
        wandb       None, or (project, id of the wandb run to continue or None)"""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        except OSError as e:
            raise ValueError(f"cannot use out_dir {self.path} ({e.strerror}): choose another --out_dir") from None
        if free < needed_bytes:
            need = f"{needed_bytes / 1e9:.2f} GB"
            raise ValueError(f"{self.path} has {free / 1e9:.2f} GB free, a checkpoint needs {need}: make room")
        rows = read_metrics(self.path) if resumed else []
        rows = [row for row in rows if row["step"] <= keep_until[0] and row.get("rollbacks", 0) <= keep_until[1]]
        if wandb:
            self._start_wandb(*wandb, configs)
        self.lock = lock_folder(self.path)
        if fingerprint(self.path) != seen:
            raise ValueError(f"another run has written to {self.path} since this one began: start again")
        # from here on it writes
        record = json.dumps({**configs, **run_record()}, indent=2)
        write_file(self.path / "config.json", lambda f: f.write(record.encode()))
        write_file(self.metrics, lambda f: f.writelines(json.dumps(row).encode() + b"\n" for row in rows))
        if resumed is None:
            for name in seen:
                (self.path / name).unlink(missing_ok=True)
            remove_unused(self.path, set())
        elif resumed.name == "new.pt":
            name_checkpoint(self.path, load_checkpoint(resumed, parts=())["names"])
        elif resumed.name != "last.pt":
            link_file(resumed, self.path / "last.pt")
        return self.wandb and self.wandb.id

    def _start_wandb(self, project, run_id, configs):
        try:
            import wandb

            names = dict(project=project, name=self.path.name, id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(dir=self.path, config=configs, **names)
        except ImportError:
            raise ValueError("wandb_log=True needs wandb: pip install wandb, or leave it out") from None
        except Exception as e:  # no key, no network, a full disk: wandb's errors share no base class
            reason = reason_of(e)
            raise ValueError(f"wandb did not start ({reason}): set WANDB_MODE=offline or --wandb_log=False") from e

    def write(self, row: dict) -> None:
        """Append one row to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""
        row = finite(row)
        size = self.metrics.stat().st_size if self.metrics.exists() else 0

        def append():
            with open(self.metrics, "ab") as f:
                if f.tell() > size:
                    f.truncate(size)  # remove what a failed attempt has left
                f.write(json.dumps(row).encode() + b"\n")

        retry_once(self.metrics, append)
        if self.wandb:
            self.wandb.log(flat(row), step=row["step"])

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()
        self.lock.close()


def lock_folder(out_dir: Path):
    """A file: while it is open, no other process can lock `out_dir`, where there are locks. ValueError if one has."""
    file = open(out_dir / ".lock", "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        used = f"{out_dir} is in use by another run ({file.read() or 'of an unknown process'})"
        raise ValueError(f"{used}: end that first, or choose another --out_dir") from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


def run_record() -> dict:
    """What config.json holds besides the configuration: command line, versions, git commit, time."""

    def git(*command) -> str:
        call = ["git", "-C", str(Path(__file__).parent), *command]
        return subprocess.run(call, capture_output=True, text=True, timeout=10).stdout.strip()

    commit, changes = None, ""
    with suppress(OSError, subprocess.SubprocessError):  # git is not installed
        commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    record = {"command": sys.argv, "versions": versions | {"numpy": np.__version__}, "git_commit": commit or None}
    return record | {"git_changed_files": changes.splitlines(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
