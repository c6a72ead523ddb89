"""What a run prints: few lines before the first step, notes last, and what it is doing, in a
terminal on one line that updates."""

import io
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import train
from nanodnt.run import console
from nanodnt.run.console import CLEAR, Console
from nanodnt.run.environment import Env
from nanodnt.run.metrics import Clock, Meter, progress_line
from nanodnt.settings import TrainConfig
from nanodnt.start import time_notes
from nanodnt.tables import count, duration
from support.devices import CPU
from support.runs import assert_same_run, call, run

pytestmark = pytest.mark.usefixtures("quick")

WIDTH = 70


@pytest.fixture
def eager(monkeypatch):
    """A thread that looks a thousand times a second, and waits for no silence."""
    monkeypatch.setattr(console, "TICK_S", 0.001)
    monkeypatch.setattr(console, "QUIET_S", 0.0)


@contextmanager
def terminal() -> Iterator[list[str]]:
    """Inside, stdout is a real one. Afterwards the list holds what was written to it."""
    master, slave = pty.openpty()
    written = []

    def read() -> None:
        chunks = []
        try:
            while chunk := os.read(master, 4096):
                chunks.append(chunk)
        except OSError:  # as soon as the other end is closed
            written.append(b"".join(chunks).decode().replace("\r\n", "\n"))

    reader = threading.Thread(target=read)
    reader.start()
    with pytest.MonkeyPatch.context() as patch, open(slave, "w", encoding="utf-8") as stdout:
        patch.setattr(sys, "stdout", stdout)
        patch.setenv("COLUMNS", str(WIDTH))
        yield written
    reader.join()
    os.close(master)


def shapes(text: str) -> list[str]:
    """The lines that a terminal shows in the end, without numbers."""
    lines = [line.rpartition(CLEAR)[2] for line in text.split("\n")]
    return [re.sub(r"[-+\d.,:]+(e[-+]\d+)?", "#", line) for line in lines]


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ------------------------------------------------------------------------------------ before a step


def test_a_start_is_short_and_its_notes_come_last(dataset, tmp_path, capsys, monkeypatch):
    """Of the 40 lines before the first step, test_configs.py counts those of settings and groups.
    Notes stand before a compilation, which may take minutes."""
    flags = dict(dataset=dataset, max_iters=3, decay_scalars=True)  # two notes
    monkeypatch.setattr(
        "nanodnt.run.compilation.compile_model", lambda model, *_: print("compiling") or model
    )
    assert run(out_dir=tmp_path / "a", **flags, compile=True) == 0
    assert run(out_dir=tmp_path / "b", **flags | dict(max_iters=1)) == 0
    first, second = capsys.readouterr().out.split("\ndone", 1)
    for text, last in ((first, ["compiling", "step #"]), (second, ["step #"])):
        lines = shapes(text[text.index("device cpu") :].partition("\nstep 1/")[0])
        n_settings = lines.index("parallel none (auto)# # process") - 1
        n_groups = len([line for line in lines if line.startswith("  ") and "adamw" in line]) + 1
        assert n_settings + n_groups > 8 and len(lines) - n_settings - n_groups <= 9, lines
        kinds = [
            re.match(r"note|compile |compiling|step #", line) for line in lines[-3 - len(last) :]
        ]
        assert [kind and kind[0] for kind in kinds] == ["compile ", "note", "note", *last], lines


def test_nothing_given_is_refused(capsys):
    assert call(train.main) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(r"error: nothing is set: .*config/quickstart\.py.*--help.*\n", err)
    assert out == ""


def test_a_dataset_that_is_not_named_is_noted(tmp_path, monkeypatch, capsys):
    """Also where the start ends in an error."""
    monkeypatch.setattr("nanodnt.data.meta.DATA", tmp_path)
    assert call(train.main, "--device=cpu", f"--out_dir={tmp_path / 'run'}") == 1
    note = "note: dataset is not set, so this run trains on pystdlib,"
    assert capsys.readouterr().out.splitlines()[-1].startswith(note)


ONE_DAY = 86400 * 75e9  # FLOPs of a day of one thread
GPU = dict(device=torch.device("cuda"), dtype=torch.bfloat16)
LONG = [  # steps of a day, changes of the run, of the device → words of the note, or none
    (8, {}, {}, "about 8 days on this CPU .*config/quickstart.py"),
    (7, {}, {}, None),
    (730, {}, {}, "about 2 years on this CPU"),
    (20, dict(step=12), {}, "about 8 days"),
    (20, dict(step=13), {}, None),
    (20, dict(eval_only=True), {}, None),
    (20, {}, dict(world_size=2), "about 10 days"),
    (8, dict(peak_flops=75e9 / 0.4), GPU, "about 8 days on this GPU .*more GPUs"),
    (800, {}, GPU, None),  # of an unknown name
]


@pytest.mark.parametrize("steps, changes, device, words", LONG)
def test_a_run_of_more_than_a_week_is_noted(steps, changes, device, words, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "unknown")
    step = changes.pop("step", 0)
    config = TrainConfig(max_iters=steps, batch_size=2, **changes)
    model = SimpleNamespace(
        config=SimpleNamespace(block_size=4), flops_per_token=lambda: ONE_DAY / 8
    )
    env = Env(
        **dict(rank=0, world_size=1, device=CPU.device, dtype=CPU.dtype, distributed=False) | device
    )
    notes = time_notes(model, config, step, env)
    assert len(notes) == (words is not None)
    assert not words or re.search(words, notes[0])


# ----------------------------------------------------------------------------------- while it works


def test_a_terminal_and_a_file_show_the_same_lines(short, dataset, tmp_path, eager, capsys):
    """Between them a terminal has a line that updates, a file the name of what takes long. Neither
    changes the run."""
    with terminal() as written:
        assert run(out_dir=tmp_path / "tty", dataset=dataset, max_iters=30) == 0
    assert run(out_dir=tmp_path / "file", dataset=dataset, max_iters=30) == 0
    out = capsys.readouterr().out
    plain = re.findall(r".*: \d+ s so far\n", out)
    assert {"training", "setting"} <= {line.split()[0].strip(",") for line in plain}
    for line in plain:
        out = out.replace(line, "", 1)
    assert "\r" not in out
    expected = [line.replace("/file", "/tty") for line in shapes(out)]
    assert shapes(*written) == expected
    drawn = [text for text in written[0].split(CLEAR) if text and "\n" not in text]
    assert any(re.fullmatch(r"training, step \d+/30 \|=* *\| loss .* eta .*", x) for x in drawn)
    assert max(map(len, drawn)) < WIDTH
    assert_same_run(tmp_path / "tty", short)
    assert_same_run(tmp_path / "file", short)


def test_an_error_comes_last(dataset, tmp_path, eager, monkeypatch, capsys):
    def fail(*_, **__) -> None:
        time.sleep(0.1)
        raise ValueError("no such data")

    monkeypatch.setattr(train, "load_meta", fail)
    with terminal() as written:
        assert run(out_dir=tmp_path, dataset=dataset) == 1
    last_line = written[0].split("\n")[-1]
    assert "reading the dataset 0 s" in last_line and shapes(last_line) == [""]
    assert capsys.readouterr().err == "error: no such data\n"


def test_a_terminal_that_is_gone_ends_nothing(eager, monkeypatch):
    class Gone(io.StringIO):
        name = "gone"

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Gone())
    shown = Console()
    shown.start()
    with shown.doing("compiling"):
        wait_until(lambda: sys.stdout.name == os.devnull)
    shown.print("compiled")
    shown.closed.set()
    sys.stdout.close()


def test_the_remaining_time_is_that_of_many_readings(monkeypatch):
    """Twenty of them, so that a slow step does not change it much; the reading itself is of the
    last steps."""
    now = [0.0]
    monkeypatch.setattr("nanodnt.run.metrics.time", SimpleNamespace(perf_counter=lambda: now[0]))
    meter = Meter(0, {"tokens_per_s": 8}, 1.0, 0.0, CPU, Clock(began=0.0))
    meter.start(0)
    for step in range(1, 27):
        now[0] += 21 if step == 26 else 1
        reading = meter.read(torch.ones(()), torch.ones(()), {"lr": 0.1}, step)
    line = progress_line(reading, 26, 126)
    assert "  21000 ms  0 tokens/s  eta 0:03:20" in line  # 100 steps of (19 · 1 + 21) / 20 s


def test_words_for_numbers():
    assert [count(n, "process") for n in (0, 1, 2000)] == [
        "0 processes",
        "1 process",
        "2,000 processes",
    ]
    assert [count(2, noun) for noun in ("row", "batch")] == ["2 rows", "2 batches"]
    times = {0: "0:00:00", 59.9: "0:00:59", 86399: "23:59:59", 2 * 86400 + 11650: "2d 03:14:10"}
    assert {seconds: duration(seconds) for seconds in times} == times
