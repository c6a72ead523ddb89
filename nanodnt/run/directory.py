"""A run directory: who may write to it, its records in config.json and metrics.jsonl, and wandb
beside them."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from configurator import VERSION
from nanodnt.files import link_file, make_folder, reason_of, retry_once, write_file
from nanodnt.run.checkpoints import (
    fingerprint,
    load_checkpoint,
    name_checkpoint,
    remove_unused,
)
from nanodnt.run.metrics import finite, read_metrics, training_seconds

ROOT = Path(__file__).resolve().parents[2]
# what a start that has nothing left to train leaves
OF_A_START = ("wall_s", "goodput", "peak_mem_bytes")
MAX_CHANGED = 1000  # changed files that a record names, and copies: our choice
GIT_SECONDS = 10  # to wait for an answer of git: our choice
CODE = ("*.py", "layers/**/*.py", "nanodnt/**/*.py", "interop/**/*.py", "studies/**/*.py")


class RunDirectory:
    """A run directory, written by rank 0. Nothing is written before `claim`."""

    def __init__(self, path: Path):
        self.path, self.metrics, self.lock, self.wandb = path, path / "metrics.jsonl", None, None
        # what config.json holds, and its "end" when this start found it
        self.record, self.earlier_end = {}, {}

    def claim(
        self,
        resumed: Path | None,
        keep_until,
        configs: dict,
        needed_bytes: int,
        seen: dict,
        wandb_id=None,
    ):
        """Make the directory this run's. Returns the id of its run at wandb, or None. ValueError,
        before anything is changed: no access, less than `needed_bytes` free, a folder source of
        another use, damaged metrics, no wandb, another run at work.

        resumed     the checkpoint to go on from, which becomes last.pt; None: a new run, which deletes those it finds
        keep_until  (step, roll-backs): later rows of metrics.jsonl are dropped
        configs     goes into config.json
        seen        the fingerprint of the directory before any file in it was read
        wandb_id    of the wandb run to continue, or None"""
        make_folder(self.path, "--out_dir")
        free = shutil.disk_usage(self.path).free
        if free < needed_bytes:
            need = f"{needed_bytes / 1e9:.2f} GB"
            raise ValueError(
                f"{self.path} has {free / 1e9:.2f} GB free, a checkpoint needs {need}: make room"
            )
        # which is written first
        if (self.path / "source").exists() and not (self.path / "config.json").exists():
            raise ValueError(
                f"{self.path}/source is of no run, and would be replaced: choose another --out_dir"
            )
        rows = read_metrics(self.path) if resumed else []
        rows = [
            row
            for row in rows
            if row["step"] <= keep_until[0] and row.get("rollbacks", 0) <= keep_until[1]
        ]
        self.record = configs | run_record()
        if configs["train"]["wandb_log"]:
            self._start_wandb(wandb_id)
        self.lock = lock_folder(self.path)
        if fingerprint(self.path) != seen:
            raise ValueError(
                f"another run has written to {self.path} since this one began: start again"
            )
        # from here on it writes
        if resumed:
            self.earlier_end = read_end(self.path)
        self._write_record()
        copy_code(self.path / "source")
        (self.path / "source.patch").unlink(missing_ok=True)  # of an earlier version
        write_file(
            self.metrics, lambda f: f.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        )
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

    def _start_wandb(self, run_id):
        try:
            import wandb

            project, group, tags = (
                self.record["train"][f"wandb_{name}"] for name in ("project", "group", "tags")
            )
            tags = [tag for tag in map(str.strip, tags.split(",")) if tag]
            how = dict(project=project, group=group or None, tags=tags)
            how |= dict(name=self.path.name, id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(dir=self.path, config=self.record, **how)
        # no package, key or network, a full disk: wandb's errors share no base class
        except Exception as e:
            fix = (
                "pip install wandb, run `wandb login`, set WANDB_MODE=offline, or --wandb_log=False"
            )
            raise ValueError(f"wandb did not start ({reason_of(e)}): {fix}") from e

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
            with wandb_may_fail(f"the metrics of step {row['step']}"):
                self.wandb.log(row, step=row["step"])

    def close(self, end: dict | None = None, trained: bool = True) -> None:
        """`end`: what `Meter.end` found, which goes into config.json, with seconds of training;
        None: the run failed. A start that found nothing left to train (not `trained`) leaves there
        what an earlier one took."""
        if end:
            end["training_s"] = (training_seconds(read_metrics(self.path)) or [0.0])[-1]
            took = {} if trained else self.earlier_end
            self.record["end"] = end | {name: took[name] for name in OF_A_START if name in took}
            self._write_record()
        if self.wandb:
            self._finish_wandb(end)
        self.lock.close()

    def _finish_wandb(self, end):
        with wandb_may_fail("the end of the run"):
            if end:
                self.wandb.summary.update(
                    {"best_checkpoint": str(self.path / "best.pt"), "end": self.record["end"]}
                )
            self.wandb.finish(exit_code=0 if end else 1)


@contextmanager
def wandb_may_fail(what: str):
    """An error of wandb in the block becomes a note that it did not take `what`: it may lose its
    own process, and the run directory holds everything. Its errors share no base class; a
    BrokenPipeError would end the run in silence."""
    try:
        yield
    except Exception as e:
        print(f"note: wandb did not take {what} ({reason_of(e)})", file=sys.stderr)


def read_end(path: Path) -> dict:
    """The "end" of the config.json in a run directory; {} where there is none."""
    with suppress(OSError, ValueError, AttributeError):  # none, or damaged
        return json.loads((path / "config.json").read_text(encoding="utf-8")).get("end", {})
    return {}


def lock_folder(out_dir: Path):
    """A file: while it is open, no other process can lock `out_dir`, where there are locks.
    ValueError if one has."""
    file = open(out_dir / ".lock", "a+", encoding="utf-8")
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


def git(*command: str) -> str | None:
    """What git prints in ROOT; None where there is no git, no repository, or no answer in time."""
    call = ["git", "--no-optional-locks", "-C", ROOT, *command]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(call, capture_output=True, timeout=GIT_SECONDS, check=True)
        return os.fsdecode(done.stdout)
    return None


def changed_files() -> list[str] | None:
    """What differs from the commit below ROOT, Python first: as git shows it, two letters, a space,
    and the path from the top of the repository. None where git does not say."""
    status = git("status", "--porcelain", "-z", "-uall", "--no-renames", "--", ".")
    if status is None:
        return None
    entries = status.split("\0")[:-1]
    return sorted(entries, key=lambda entry: not entry.endswith(".py"))[:MAX_CHANGED]


def copy_code(target: Path) -> None:
    """Put the Python files that the commit lacks, changed or new, into the folder `target` as they
    are; all of this code where git does not answer."""
    shutil.rmtree(target, ignore_errors=True)
    top = git("rev-parse", "--show-toplevel")
    changed = changed_files() if top else None
    if changed is None:
        folder = ROOT
        names = [str(path.relative_to(ROOT)) for pattern in CODE for path in ROOT.glob(pattern)]
    else:
        folder = Path(top.rstrip("\n"))
        names = [entry[3:] for entry in changed if entry.endswith(".py")]
    names = [name for name in names if (folder / name).is_file()]  # not those that were deleted
    if names:
        target.mkdir(parents=True)
        # no later run copies the copies
        (target / ".gitignore").write_text("*\n", encoding="utf-8")
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def run_record() -> dict:
    """What config.json holds besides the configuration: command line, versions, git commit,
    time."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    versions |= {"numpy": np.__version__, "nanodnt": VERSION}
    commit = (git("rev-parse", "--verify", "-q", "HEAD") or "").strip()
    record = {"command": sys.argv, "versions": versions, "git_commit": commit or None}
    return record | {
        "git_changed_files": changed_files(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
