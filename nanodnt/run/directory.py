"""A run directory: who may write to it, its records in config.json and metrics.jsonl, and wandb beside them."""

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
from nanodnt.files import all_of, link_file, make_folder, make_printable, retry_once, write_file
from nanodnt.run.checkpoints import fingerprint, load_checkpoint, name_checkpoint
from nanodnt.run.metrics import finite, flat, read_metrics, training_seconds
from nanodnt.run.shards import remove_unused

ROOT = Path(__file__).resolve().parents[2]
MAX_PATCH, MAX_CHANGED = 10_000_000, 1000  # bytes of source.patch; changed files that a record names: our choices
OF_A_START = ("wall_s", "goodput", "peak_mem_bytes", "energy_j")  # what a start that has nothing left to train leaves
GIT_SECONDS = 10  # to wait for each answer of git, and for a whole source.patch: our choice
DIFF = "diff --no-color --no-ext-diff --no-textconv --no-renames --no-relative --ignore-submodules=dirty -U3"
DIFF += " --src-prefix=a/ --dst-prefix=b/"  # what `git apply` reads, whatever the user's configuration of git says


class RunDirectory:
    """A run directory, written by rank 0. Nothing is written before `claim`."""

    def __init__(self, path: Path):
        self.path, self.metrics, self.lock, self.wandb = path, path / "metrics.jsonl", None, None
        self.record, self.earlier_end = {}, None  # what config.json holds, and its "end" when this start found it

    def claim(self, resumed: Path | None, keep_until, configs: dict, needed_bytes: int, seen: dict, wandb_id=None):
        """Make the directory this run's. Returns the id of its run at wandb, or None. ValueError, before anything is
        changed: no access, less than `needed_bytes` free, damaged metrics, no wandb, another run at work.

        resumed     the checkpoint to go on from, which becomes last.pt; None: a new run, which deletes those it finds
        keep_until  (step, roll-backs): later rows of metrics.jsonl are dropped
        configs     goes into config.json
        seen        the fingerprint of the directory before any file in it was read
        wandb_id    of the wandb run to continue, or None"""
        make_folder(self.path, "--out_dir")
        free = shutil.disk_usage(self.path).free
        if free < needed_bytes:
            need = f"{needed_bytes / 1e9:.2f} GB"
            raise ValueError(f"{self.path} has {free / 1e9:.2f} GB free, a checkpoint needs {need}: make room")
        rows = read_metrics(self.path) if resumed else []
        rows = [row for row in rows if row["step"] <= keep_until[0] and row.get("rollbacks", 0) <= keep_until[1]]
        self.record, patch = {**configs, **run_record()}, source_patch()
        if configs["train"]["wandb_log"]:
            self._start_wandb(wandb_id)
        self.lock = lock_folder(self.path)
        if fingerprint(self.path) != seen:
            raise ValueError(f"another run has written to {self.path} since this one began: start again")
        # from here on it writes
        if resumed:
            self.earlier_end = read_end(self.path)
        self._write_record()
        (self.path / "source.patch").unlink(missing_ok=True)
        if patch:
            write_file(self.path / "source.patch", lambda f: f.write(patch))
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

    def _start_wandb(self, run_id):
        try:
            import wandb

            project, group, tags = (self.record["train"][f"wandb_{name}"] for name in ("project", "group", "tags"))
            tags = [tag for tag in map(str.strip, tags.split(",")) if tag]
            how = dict(project=project, group=group or None, tags=tags)
            how |= dict(name=make_printable(self.path.name), id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(dir=self.path, config=self.record, **how)
        except Exception as e:  # no key, no network, a full disk: wandb's errors share no base class
            if isinstance(e, ModuleNotFoundError) and e.name == "wandb":
                raise ValueError("wandb_log=True needs wandb: pip install wandb, or leave it out") from None
            fix = "if it is the login or the network, run `wandb login`, set WANDB_MODE=offline, or --wandb_log=False"
            raise ValueError(f"wandb did not start ({all_of(e)}): {fix}") from e

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
                self.wandb.log(flat(row), step=row["step"])

    def close(self, end: dict | None = None, trained: bool = True) -> None:
        """`end`: what `Meter.end` found, which goes into config.json, with seconds of training; None: the run failed. A
        start that found nothing left to train (not `trained`) leaves there what an earlier one took."""
        if end:
            end["training_s"] = (training_seconds(read_metrics(self.path)) or [0.0])[-1]
            took = {} if trained else self.earlier_end or {}
            self.record["end"] = end | {name: took[name] for name in OF_A_START if name in took}
            self._write_record()
        if self.wandb:
            self._finish_wandb(end)
        self.lock.close()

    def _finish_wandb(self, end):
        with wandb_may_fail("loss.png or the end of the run"):
            import wandb

            if end:
                self.wandb.summary.update({"best_checkpoint": str(self.path / "best.pt"), "end": self.record["end"]})
                if (self.path / "loss.png").exists():
                    self.wandb.log({"loss": wandb.Image(str(self.path / "loss.png"))})  # which needs Pillow
        with wandb_may_fail("the end of the run"):
            self.wandb.finish(exit_code=0 if end else 1)


@contextmanager
def wandb_may_fail(what: str):
    """An error of wandb in the block becomes a note that it did not take `what`: it may lose its own process, and the
    run directory holds everything. Its errors share no base class; a BrokenPipeError would end the run in silence."""
    try:
        yield
    except Exception as e:
        print(f"note: wandb did not take {what} ({all_of(e)})", file=sys.stderr)


def read_end(path: Path) -> dict | None:
    """The "end" of the config.json in a run directory; None where there is none, or a damaged one."""
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        end = json.loads((path / "config.json").read_text(encoding="utf-8")).get("end")
        return end if isinstance(end, dict) else None
    return None


def lock_folder(out_dir: Path):
    """A file: while it is open, no other process can lock `out_dir`, where there are locks. ValueError if one has."""
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


def git(*command, at: str = "") -> bytes | None:
    """What git prints in a folder, ROOT; None where there is no git, no repository, or no answer in time."""
    call = ["git", "--no-optional-locks", "--literal-pathspecs", "-C", at or ROOT, *command]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(call, capture_output=True, timeout=GIT_SECONDS)
        return done.stdout if done.returncode in (0, 1) else None
    return None


def changed_files() -> list | None:
    """What differs from the commit below ROOT, Python first: as git shows it, two letters, a space, and the path from
    the top of the repository. None where git does not say."""
    found = git(*"status --porcelain -z -uall --no-renames --ignore-submodules=dirty -- .".split())
    return None if found is None else sorted(found.split(b"\0")[:-1], key=lambda entry: not entry.endswith(b".py"))


def source_patch() -> bytes:
    """What `git apply` makes of the commit in config.json the code of this run: changes of tracked files, and new text
    files, of at most MAX_PATCH bytes together; those left out are named."""
    top, changed = os.fsdecode((git("rev-parse", "--show-toplevel") or b"").rstrip(b"\n")), changed_files() or []
    head, parts, size, began = [], [], 0, time.monotonic()
    for entry in changed[:MAX_CHANGED]:
        name, how, part, fits = entry[3:], ("--binary", "HEAD", "--"), b"", time.monotonic() - began < GIT_SECONDS
        if entry[:2] == b"??":
            how = "--no-index", "--", "/dev/null"
        with suppress(OSError):  # it is gone
            fits = fits and os.lstat(os.path.join(top, os.fsdecode(name))).st_size <= MAX_PATCH
        if fits:
            part = git(*DIFF.split(), *how, name, at=top) or b""
        if not part or b"\nBinary files " in part or size + len(part) > MAX_PATCH:
            head.append(f"left out (too large, not text, or git is slow): {os.fsdecode(name)!a}\n".encode())
        else:
            parts.append(part)
            size += len(part)
    head += [f"left out: {len(changed) - MAX_CHANGED:,} more files\n".encode()] * (len(changed) > MAX_CHANGED)
    return b"".join(head + parts)


def run_record() -> dict:
    """What config.json holds besides the configuration: command line, versions, git commit, time."""
    commit, changed = (git("rev-parse", "--verify", "-q", "HEAD") or b"").decode().strip(), changed_files()
    names = None if changed is None else [entry.decode(errors="backslashreplace") for entry in changed[:MAX_CHANGED]]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    versions |= {"numpy": np.__version__, "nanodnt": VERSION}
    record = {"command": sys.argv, "versions": versions, "git_commit": commit or None}
    return record | {"git_changed_files": names, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
