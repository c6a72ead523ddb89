"""Runs the sections of a report, each in a process of its own, so that an error or the end of memory ends only one."""

import ctypes
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from nanodnt.bench.checks.verdict import failures
from nanodnt.bench.report.page import DONE, ERROR, FAIL, LEFT_OUT, NO_MEMORY, NO_TIME, NOT_RUN, make_page
from nanodnt.bench.report.sections import SECTIONS, Section, arguments
from nanodnt.files import write_file
from nanodnt.run.environment import choose_device
from nanodnt.run.hardware import device_name
from nanodnt.run.metrics import run_record

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 3  # a section of a GPU is ended after so many times its planned seconds, and a minute
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def make_report(folder: str, size: str, minutes: float, device: str) -> int:
    """Run what `folder` does not hold yet, and write gpu.md and gpu.json there after each section. Returns the exit
    code: 1 if a check failed or a section ended with an error, else 0. What does not fit on this GPU, or into the time,
    is named, and is no failure.

    ValueError without a GPU, or if the folder holds the report of another device."""
    chosen, _ = choose_device(device)
    if chosen.type != "cuda" and size == "gpu":
        raise ValueError(
            "--report is about a GPU, and this machine has none; on a CPU it would take hours: --report_size=toy tries "
            "every part with a tiny model"
        )
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report, end = open_report(folder, size, device, chosen), time.monotonic() + 60 * minutes
    waiting = [s for s in SECTIONS if report["sections"][s.name]["status"] != DONE]
    waiting.sort(key=lambda s: report["sections"][s.name]["status"] not in (NOT_RUN, LEFT_OUT))  # those first
    say(f"{len(waiting)} of {len(SECTIONS)} sections to run, at most {minutes:g} min: {folder / 'gpu.md'}")
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the section's process ends too
    try:
        for number, section in enumerate(waiting, 1):
            left = end - time.monotonic()
            title = f"[{number}/{len(waiting)}] {section.title}, planned {section.seconds} s, {left / 60:.1f} min left"
            found, patience = None, PATIENCE * section.seconds + 60 if size == "gpu" else math.inf
            if left >= section.seconds:
                say(title)
                found = run_section(section, size, device, min(left, patience))
            if found and (found["status"] != NO_TIME or left >= patience):
                report["sections"][section.name] |= found
                say("\n".join(tell(found)))
            else:  # an earlier failure stays on record
                if report["sections"][section.name]["status"] == NOT_RUN:
                    report["sections"][section.name] |= dict(status=LEFT_OUT, message="no time was left")
                say(f"{title}: left out")
            write(folder, report)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return conclude(report)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def tell(section: dict) -> list:
    """Lines on a section that has just ended: its checks that failed, or why it has no result."""
    lines = [f"{section['status']} in {section['seconds']:.0f} s{': ' * bool(section['message'])}{section['message']}"]
    failed = failures(section["result"] or {})
    return lines + [f"  FAIL {c['what']}: {c['found']:.3g}, allowed {c['allowed']:.3g}" for c in failed]


def conclude(report: dict) -> int:
    """Print what is missing or wrong; returns the exit code."""
    found = {name: s["status"] for name, s in report["sections"].items() if s["status"] != DONE}
    say("; ".join(f"{name}: {status}" for name, status in found.items()) or "every section is done, every check passed")
    if found:
        say("the same command runs these again")
    return int(any(status in (FAIL, ERROR, NO_TIME) for status in found.values()))


# ----------------------------------------------------------------------------------------------------- gpu.json, gpu.md


def open_report(folder: Path, size: str, device: str, chosen: torch.device) -> dict:
    """What gpu.json in `folder` holds, or a new report, with all sections of today's code. ValueError if that file is
    damaged or of another device."""
    path, record = folder / "gpu.json", run_record()
    report = dict(size=size, device=device_name(chosen), driver=driver_version(), cuda=torch.version.cuda)
    report |= dict(torch=torch.__version__, python=platform.python_version(), started=record["started"])
    report |= dict(command=shlex.join(["python", *sys.argv]), sections={})
    if path.exists():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            different = [key for key in ("size", "device", "driver", "cuda", "torch") if earlier[key] != report[key]]
            report |= dict(started=earlier["started"], sections=earlier["sections"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not a report of this version: remove it, or choose another folder") from None
        if different:
            raise ValueError(f"{path} is a report with another {', '.join(different)}: choose another folder")
    kept, sections = report["sections"], {}
    for s in SECTIONS:
        command = " ".join(["python bench.py", *arguments(s, size, device)])
        new = dict(title=s.title, command=command, planned_s=s.seconds, status=NOT_RUN, seconds=None, message="")
        new |= dict(started=None, git_commit=None, git_changed_files=[], result=None)
        same = kept.get(s.name, {}).get("command") == command  # else it was another measurement
        sections[s.name] = new | (kept[s.name] if same else {})
    report["sections"] = sections
    write(folder, report)
    return report


def driver_version() -> str:
    """The version of NVIDIA's driver, where nvidia-smi tells it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def write(folder: Path, report: dict) -> None:
    """gpu.json, then the page that is made from it."""
    for name, text in (("gpu.json", json.dumps(report, indent=1)), ("gpu.md", make_page(report))):
        write_file(folder / name, lambda f, text=text: f.write(text.encode()))


# --------------------------------------------------------------------------------------------------------- one section


def run_section(section: Section, size: str, device: str, limit_s: float) -> dict:
    """What is to be noted of a section: status, seconds, message, and bench.py's figures if there are any."""
    record, begun = run_record(), time.monotonic()
    with TemporaryDirectory(prefix="nanodnt-") as scratch:
        json_path, log = Path(scratch) / "bench.json", Path(scratch) / "log"
        code = launch([*arguments(section, size, device), f"--json={json_path}"], log, limit_s)
        result = json.loads(json_path.read_text()) if json_path.exists() else None
        message = "" if result else last_line(log.read_text(encoding="utf-8", errors="replace"))
    if result:
        status = FAIL if failures(result) else DONE
    elif code is None:
        status, message = NO_TIME, f"ended after {limit_s:.0f} s"
    else:
        status = NO_MEMORY if "out of" in message and "memory" in message else ERROR
        message = f"exit code {code}: {message}"
    noted = {key: record[key] for key in ("started", "git_commit", "git_changed_files")}
    return dict(status=status, seconds=time.monotonic() - begun, message=message, result=result, **noted)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1][:300]


def launch(words: list, log: Path, limit_s: float) -> int | None:
    """bench.py with these arguments, in a process of its own whose output goes to the file `log`. Returns its exit
    code, or None if it was ended after `limit_s` seconds, with the processes that it has started."""
    with open(log, "wb") as out:
        command = [sys.executable, str(ROOT / "bench.py"), *words]
        streams = dict(stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, preexec_fn=end_with_parent, **streams)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def end_with_parent() -> None:
    """Let this new process be killed when its parent ends, however that ends: else a section of a report that was
    killed would still use the GPU while the next one measures. Linux alone can do this."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
