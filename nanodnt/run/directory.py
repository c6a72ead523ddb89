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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypedDict

import numpy as np
import torch

from configurator import VERSION
from nanodnt.files import link_file, make_folder, reason_of, retry_once, write_file
from nanodnt.run.checkpoints import (
    FileIdentity,
    fingerprint,
    load_checkpoint,
    name_checkpoint,
    remove_unused,
)
from nanodnt.run.metrics import finite, read_metrics, training_seconds

ROOT = Path(__file__).resolve().parents[2]
# Keys of the "end" record that stay as they are if a start has nothing left to train
KEPT_OF_END = ("wall_s", "goodput", "peak_mem_bytes")
MAX_CHANGED = 1000  # changed files that a record names, and copies: our choice
GIT_TIMEOUT_S = 10  # our choice
CODE = ("*.py", "layers/**/*.py", "nanodnt/**/*.py", "interop/**/*.py", "studies/**/*.py")


class RunRecord(TypedDict):
    """The keys of config.json beside the configurations "model" and "train", and "end"."""

    command: list[str]
    versions: dict[str, str | None]  # cuda is None in a build for CPUs
    git_commit: str | None
    git_changed_files: list[str] | None  # as in `changed_files`
    started: str  # local time, ISO 8601


class RunDirectory:
    """A run directory, written by rank 0. Nothing is written before `claim`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.lock: TextIO | None = None
        self.wandb: Any = None  # the run at wandb
        self.record = {}  # the content of config.json
        self.earlier_end = {}  # the "end" that an earlier start left in it

    def claim(
        self,
        resumed: Path | None,
        keep_until: tuple[int, int],
        configs: dict[str, dict],
        needed_bytes: int,
        seen: dict[str, FileIdentity],
        wandb_id: str | None = None,
    ) -> str | None:
        """Make the directory this run's. Returns the id of its run at wandb, or None.

        resumed       the checkpoint to go on from, which becomes last.pt; None = a new run, which
                      deletes the checkpoints that it finds
        keep_until    (step, roll-backs): later rows of metrics.jsonl are dropped
        configs       "model" and "train", for config.json
        needed_bytes  least free space
        seen          the fingerprint of the directory before any file in it was read
        wandb_id      of the wandb run to continue, or None

        ValueError, before anything is changed: no access, too little space, a folder `source` that
        is of no run, damaged metrics, no wandb, another run at work."""
        make_folder(self.path, "--out_dir")
        check_space(self.path, needed_bytes)
        # config.json is written before source/
        if (self.path / "source").exists() and not (self.path / "config.json").exists():
            raise ValueError(
                f"{self.path}/source is of no run, and would be replaced: choose another --out_dir"
            )
        rows = []
        if resumed:
            last_step, last_rollback = keep_until
            for row in read_metrics(self.path):
                if row["step"] <= last_step and row.get("rollbacks", 0) <= last_rollback:
                    rows.append(row)
        self.record = {**configs, **run_record()}
        if configs["train"]["wandb_log"]:
            self._start_wandb(wandb_id)
        self.lock = lock_folder(self.path)
        if fingerprint(self.path) != seen:
            raise ValueError(
                f"another run has written to {self.path} since this one began: start again"
            )

        # nothing was written before this line
        if resumed:
            self.earlier_end = read_end(self.path)
        self._write_record()
        copy_code(self.path / "source")
        (self.path / "source.patch").unlink(missing_ok=True)  # earlier versions wrote this file
        lines = [json.dumps(row).encode() + b"\n" for row in rows]
        write_file(self.metrics, lambda f: f.writelines(lines))
        if resumed is None:
            self._delete_checkpoints(seen)
        elif resumed.name == "new.pt":
            name_checkpoint(self.path, load_checkpoint(resumed, parts=())["names"])
        elif resumed.name != "last.pt":
            link_file(resumed, self.path / "last.pt")
        return self.wandb.id if self.wandb else None

    def _delete_checkpoints(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        remove_unused(self.path, used=set())

    def _write_record(self) -> None:
        record = json.dumps(self.record, indent=2).encode()
        write_file(self.path / "config.json", lambda f: f.write(record))

    def _start_wandb(self, run_id: str | None) -> None:
        config = self.record["train"]
        try:
            import wandb

            tags = [tag.strip() for tag in config["wandb_tags"].split(",")]
            self.wandb = wandb.init(
                dir=self.path,
                config=self.record,
                project=config["wandb_project"],
                group=config["wandb_group"] or None,
                tags=[tag for tag in tags if tag],
                name=self.path.name,
                id=run_id,
                resume="allow" if run_id else None,
            )
        # no package, key or network, a full disk: wandb's errors share no base class
        except Exception as e:
            raise ValueError(
                f"wandb did not start ({reason_of(e)}): pip install wandb, run `wandb login`, set "
                "WANDB_MODE=offline, or --wandb_log=False"
            ) from e

    def write(self, row: dict[str, Any]) -> None:
        """Append one row to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""
        row = finite(row)
        size = self.metrics.stat().st_size if self.metrics.exists() else 0

        def append() -> None:
            with open(self.metrics, "ab") as f:
                if f.tell() > size:
                    f.truncate(size)  # remove the rest of a failed attempt
                f.write(json.dumps(row).encode() + b"\n")

        retry_once(self.metrics, append)
        if self.wandb:
            with wandb_may_fail(f"the metrics of step {row['step']}"):
                self.wandb.log(row, step=row["step"])

    def close(self, end: dict[str, Any] | None = None, trained: bool = True) -> None:
        """End the records of the run.

        end      the "end" record from `Meter.end`, which goes into config.json, with the seconds of
                 training; None = the run failed
        trained  False: there was nothing left to train, so times and memory of an earlier start
                 stay"""
        if end:
            seconds = training_seconds(read_metrics(self.path))
            end["training_s"] = seconds[-1] if seconds else 0.0
            self.record["end"] = dict(end)
            if not trained:
                for name in KEPT_OF_END:
                    if name in self.earlier_end:
                        self.record["end"][name] = self.earlier_end[name]
            self._write_record()
        if self.wandb:
            self._finish_wandb(end)
        self.lock.close()

    def _finish_wandb(self, end: dict[str, Any] | None) -> None:
        with wandb_may_fail("the end of the run"):
            if end:
                best = str(self.path / "best.pt")
                self.wandb.summary.update({"best_checkpoint": best, "end": self.record["end"]})
            self.wandb.finish(exit_code=0 if end else 1)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise ValueError if the disk of `folder` has less than `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ValueError(
            f"{folder} has {free_bytes / 1e9:.2f} GB free, a checkpoint needs "
            f"{needed_bytes / 1e9:.2f} GB: make room"
        )


@contextmanager
def wandb_may_fail(subject: str) -> Iterator[None]:
    """Turn an error of wandb in this context into a note that names `subject`. wandb may lose its
    own process, and the run directory holds everything. Its errors share no base class; a
    BrokenPipeError would end the run in silence."""
    try:
        yield
    except Exception as e:
        print(f"note: wandb did not take {subject} ({reason_of(e)})", file=sys.stderr)


def read_end(path: Path) -> dict[str, Any]:
    """The "end" of config.json in a run directory; {} if there is none."""
    with suppress(OSError, ValueError, AttributeError):  # absent, or damaged
        return json.loads((path / "config.json").read_text(encoding="utf-8")).get("end", {})
    return {}


def lock_folder(out_dir: Path) -> TextIO:
    """Lock `out_dir` against other processes, if its file system has locks. Returns a file; closing
    it ends the lock. ValueError if another process has locked the folder."""
    file = open(out_dir / ".lock", "a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read() or "of an unknown process"
        raise ValueError(
            f"{out_dir} is in use by another run ({owner}): end that first, or choose another "
            "--out_dir"
        ) from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


def git(*arguments: str) -> str | None:
    """The output of a git command in ROOT; None without git or a repository, and after a
    timeout."""
    command = ["git", "--no-optional-locks", "-C", ROOT, *arguments]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, check=True)
        return os.fsdecode(done.stdout)
    return None


def changed_files() -> list[str] | None:
    """The files below ROOT that differ from the commit, Python first, in git's format: two letters,
    a space, and the path from the top of the repository. None if git does not answer."""
    status = git("status", "--porcelain", "-z", "-uall", "--no-renames", "--", ".")
    if status is None:
        return None
    entries = status.split("\0")[:-1]
    entries.sort(key=lambda entry: not entry.endswith(".py"))
    return entries[:MAX_CHANGED]


def copy_code(target: Path) -> None:
    """Copy the Python files that are new or differ from the commit into the folder `target`; all of
    this code if git does not answer."""
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
        # git must not list the copies as changed files of the next run
        (target / ".gitignore").write_text("*\n", encoding="utf-8")
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def run_record() -> RunRecord:
    """Command line, versions, git commit and time of this start, for config.json."""
    commit = git("rev-parse", "--verify", "-q", "HEAD") or ""
    return {
        "command": sys.argv,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
            "nanodnt": VERSION,
        },
        "git_commit": commit.strip() or None,
        "git_changed_files": changed_files(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
