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

ROOT = Path(__file__).resolve().parents[2]
MAX_PATCH = 10_000_000  # bytes of source.patch


class RunDirectory:
    """A run directory, written by rank 0. Nothing is written before `claim`."""

    def __init__(self, path: Path):
        self.path, self.metrics, self.lock, self.wandb = path, path / "metrics.jsonl", None, None

    def claim(self, resumed: Path | None, keep_until, configs: dict, needed_bytes: int, seen: dict, wandb_id=None):
        """Make the directory this run's. Returns the id of its run at wandb, or None. ValueError, before anything is
        changed: no access, less than `needed_bytes` free, damaged metrics, no wandb, another run at work.

        resumed     the checkpoint to go on from, which becomes last.pt; None: a new run, which deletes those it finds
        keep_until  (step, roll-backs): later rows of metrics.jsonl are dropped
        configs     goes into config.json
        seen        the fingerprint of the directory before any file in it was read
        wandb_id    of the wandb run to continue, or None"""
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
        if configs["train"]["wandb_log"]:
            self._start_wandb(wandb_id, configs)
        self.lock = lock_folder(self.path)
        if fingerprint(self.path) != seen:
            raise ValueError(f"another run has written to {self.path} since this one began: start again")
        # from here on it writes
        self.record = {**configs, **run_record()}
        self._write_record()
        write_patch(self.path / "source.patch")
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

    def _write_record(self):
        record = json.dumps(self.record, indent=2).encode()
        write_file(self.path / "config.json", lambda f: f.write(record))

    def _start_wandb(self, run_id, configs):
        try:
            import wandb

            config = {**configs, "git": {key: value for key, value in run_record().items() if key.startswith("git")}}
            how = {name: configs["train"][f"wandb_{name}"] or None for name in ("project", "group", "tags")}
            how["tags"] = how["tags"] and [tag.strip() for tag in how["tags"].split(",")]
            how |= dict(name=self.path.name, id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(dir=self.path, config=config, **how)
        except ImportError:
            raise ValueError("wandb_log=True needs wandb: pip install wandb, or leave it out") from None
        except Exception as e:  # no key, no network, a full disk: wandb's errors share no base class
            reason = reason_of(e)
            fix = "run `wandb login`, set WANDB_MODE=offline, or --wandb_log=False"
            raise ValueError(f"wandb did not start ({reason}): {fix}") from e

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

    def close(self, end: dict | None = None) -> None:
        """`end`: how the run has ended, and what it took; it goes into config.json."""
        if end:
            self.record["end"] = finite(end)
            self._write_record()
        if self.wandb:
            if (self.path / "loss.png").exists():
                import wandb

                self.wandb.log({"loss": wandb.Image(str(self.path / "loss.png"))})
            self.wandb.summary.update({"best_checkpoint": str(self.path / "best.pt"), "end": end})
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


def git(*command) -> bytes:
    """What git prints in this repository; b"" where there is no git, or no repository."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, timeout=10).stdout
    return b""


def write_patch(path: Path) -> None:
    """Write what `git apply` makes of the commit in config.json the code of this run: changes of tracked files, and new
    text files, of at most MAX_PATCH bytes together; those left out are named. Without changes there is no file."""
    how = "diff", "--no-color", "--no-ext-diff"
    tracked = git(*how, "HEAD")
    parts = [tracked if len(tracked) <= MAX_PATCH else b"left out: the changes of tracked files, which are too large\n"]
    for name in git("ls-files", "--others", "--exclude-standard", "-z").decode().split("\0")[:-1]:
        size, new = sum(map(len, parts)), b""
        if os.path.getsize(ROOT / name) + size <= MAX_PATCH:
            new = git(*how, "--no-index", "--", "/dev/null", name)
        parts.append(b"" if not new or b"\nBinary files " in new else new)
        if not parts[-1]:
            parts.insert(0, f"left out, too large or not text: {name}\n".encode())
    path.unlink(missing_ok=True)
    if any(parts):
        write_file(path, lambda f: f.writelines(parts))


def run_record() -> dict:
    """What config.json holds besides the configuration: command line, versions, git commit, time."""
    commit, changes = git("rev-parse", "HEAD").decode().strip(), git("status", "--porcelain", "-uall").decode()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    record = {"command": sys.argv, "versions": versions | {"numpy": np.__version__}, "git_commit": commit or None}
    return record | {"git_changed_files": changes.splitlines(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
