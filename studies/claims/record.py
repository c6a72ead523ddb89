"""The record of a scale's runs: docs/results/claims/SCALE.json. Every verdict and figure is derived from it alone.

{run's name: {"args", "settings", "outcome", "seconds", "measures": {measure: value or null}, "machine"}}. A run's name
ends with a digest of its command; "settings" is one of its resolved configuration.
"""

import fcntl
import json
import zlib
from dataclasses import fields
from pathlib import Path

from nanodnt.files import write_file
from studies.sweep.runner import IGNORED_FIELDS, TrainingRun, resolve_configs

ENTRY = {"args", "settings", "outcome", "seconds", "measures", "machine"}


def digest_settings(run: TrainingRun) -> str:
    """A checksum of the run's settings that are not the default; so a new flag with a default changes nothing, nor does
    a new type of block, whose ratio of learning rates is 1."""
    found = {}
    for part in resolve_configs(run.args):
        found |= {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
    unused = {name for name, value in found.items() if name.startswith("lr_ratio_") and value == 1}
    kept = {name: value for name, value in sorted(found.items()) if name not in {*IGNORED_FIELDS, *unused}}
    return f"{zlib.crc32(json.dumps(kept).encode()):08x}"


class Record:
    """Runs and what was measured of them, kept in one file that is written after each change. Threads may share it."""

    def __init__(self, path: Path):
        """ValueError if the file is damaged."""
        self.path, self.checked = path, set()
        self.runs = self._read()

    def _read(self) -> dict:
        try:
            runs = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
            if all(ENTRY <= run.keys() for run in runs.values()):
                return runs
        except (ValueError, AttributeError):
            pass
        raise ValueError(f"{self.path} is damaged: restore it from git, or remove it")

    def measures(self, run: TrainingRun) -> dict:
        """{measure: value, None for a run that diverged} of what is known. ValueError if the run was recorded with
        other settings than its command has now."""
        if (name := run.path.name) not in self.runs:
            return {}
        if name not in self.checked and self.runs[name]["settings"] != digest_settings(run):
            raise ValueError(
                f"{self.path}: {name} was recorded with other settings than its config files have now: undo their "
                "change, or remove the entry and its folder to train it again"
            )
        self.checked.add(name)
        return self.runs[name]["measures"]

    def add(self, run: TrainingRun, measure: str, value: float | None, **about) -> None:
        """Note a measure, and `about`: outcome, seconds and machine of the run; write the file. What another process
        has recorded meanwhile is kept."""
        about |= {"args": list(run.args), "settings": digest_settings(run)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(f".{self.path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # between threads too
            runs = self._read()
            known = runs.get(run.path.name, {"measures": {}})
            runs[run.path.name] = known | about | {"measures": known["measures"] | {measure: value}}
            lines = [f"{json.dumps(name)}: {json.dumps(runs[name], ensure_ascii=False)}" for name in sorted(runs)]
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            write_file(self.path, lambda f: f.write(text.encode()))
            self.runs = runs  # another thread sees the old dictionary or the new one
