"""What a run prints: few lines before the first step, notes last, and what it is doing, in a
terminal on one line that updates."""

import io
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train
from nanodnt.run import console
from nanodnt.run.console import CLEAR, Console
from nanodnt.run.metrics import Clock, Meter, progress_line
from nanodnt.settings import TrainConfig
from nanodnt.start import time_notes
from nanodnt.tables import count, duration
from support.devices import CPU
from support.runs import assert_same_run, call, run
from support.terminals import WIDTH, terminal, text_of

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def eager(monkeypatch):
    """A thread that looks a thousand times a second, and waits for no silence."""
    monkeypatch.setattr(console, "TICK_S", 0.001)
    monkeypatch.setattr(console, "QUIET_S", 0.0)


def shapes(text: str) -> list[str]:
    """The lines that a terminal shows in the end, without numbers."""
    lines = [line.rpartition(CLEAR)[2] for line in text.split("\n")]
    return [re.sub(r"[-+\d.,:]+(e[-+]\d+)?", "#", line) for line in lines]


# ------------------------------------------------------------------------------------ before a step


def test_a_start_is_short_and_its_notes_come_last(dataset, tmp_path, capsys, monkeypatch):
    """Of the 40 lines before the first step, test_configs.py counts those of settings and groups.
    Notes stand before a compilation, which may take minutes."""
    monkeypatch.setattr(
        "nanodnt.run.compilation.compile_model", lambda model, *_: print("compiling") or model
    )
    two_notes = dict(max_iters=3, decay_scalars=True)
    assert run(out_dir=tmp_path, dataset=dataset, compile=True, **two_notes) == 0
    lines = shapes(capsys.readouterr().out.partition("\nstep 1/")[0])
    words = [line.split()[0] for line in lines]
    assert words[-5:] == ["compile", "note#", "note#", "compiling", "step"]
    n_settings = words.index("parallel") - 1
    n_groups = sum("adamw" in line for line in lines) + 1
    assert len(lines) - n_settings - n_groups <= 9, lines


def test_nothing_given_is_refused(capsys):
    assert call(train.main) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(r"error: nothing is set: .*config/quickstart\.py.*--help.*\n", err)
    assert out == ""


def test_a_dataset_that_is_not_named_is_noted(tmp_path, monkeypatch, capsys):
    """Also where the start ends in an error."""
    monkeypatch.setattr("nanodnt.data.meta.DATA", tmp_path)
    assert call(train.main, "--device=cpu", f"--out_dir={tmp_path / 'run'}") == 1
    note = "note: dataset is not set: this run trains on pystdlib,"
    assert capsys.readouterr().out.splitlines()[-1].startswith(note)


ONE_DAY = 86400 * 75e9  # FLOPs of a day of one thread
GPU = dict(device=torch.device("cuda"), dtype=torch.bfloat16)
LONG = [  # steps of a day, those made; changes of the run, of the device; the note, or none
    (7, 0, {}, {}, None),
    (8, 0, {}, {}, "about 8 days here .*more GPUs.*config/quickstart.py"),
    (2000, 0, {}, {}, "about 2,000 days"),
    (20, 12, {}, {}, "about 8 days"),
    (20, 13, {}, {}, None),
    (20, 0, dict(eval_only=True), {}, None),
    (20, 0, {}, dict(world_size=2), "about 10 days"),
    (8, 0, dict(peak_flops=75e9 / 0.4), GPU, "about 8 days"),
    (800, 0, {}, GPU, None),  # of an unknown name
]


@pytest.mark.parametrize("steps, step, changes, device, note", LONG)
def test_a_run_of_more_than_a_week_is_noted(steps, step, changes, device, note, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "unknown")
    config = TrainConfig(max_iters=steps, batch_size=2, **changes)
    sizes = SimpleNamespace(block_size=4)
    model = SimpleNamespace(config=sizes, flops_per_token=lambda: ONE_DAY / 8)
    notes = time_notes(model, config, step, replace(CPU, **device))
    assert [bool(re.search(note or "", text)) for text in notes] == [True] * (note is not None)


# ----------------------------------------------------------------------------------- while it works


def test_a_terminal_and_a_file_show_the_same_lines(short, dataset, tmp_path, eager, capsys):
    """Between them a terminal has a line that updates, a file the name of what takes long. Neither
    changes the run."""
    with terminal() as written:
        assert run(out_dir=tmp_path / "tty", dataset=dataset, max_iters=30) == 0
    assert run(out_dir=tmp_path / "txt", dataset=dataset, max_iters=30) == 0
    out = capsys.readouterr().out
    lines = re.sub(r".* so far.*\n", "", out).replace("/txt", "/tty")
    assert shapes(text_of(written)) == shapes(lines)
    for text in out, text_of(written):
        assert re.search(r"setting up: 0:00:\d\d so far", text)
        assert re.search(r"training, step \d+/30: 0:00:\d\d so far, eta 0:0", text)
    drawn = [text for text in text_of(written).split(CLEAR) if "\n" not in text]
    assert max(map(len, drawn)) == WIDTH and CLEAR not in out  # with its \r
    assert_same_run(tmp_path / "tty", short)
    assert_same_run(tmp_path / "txt", short)


def test_an_error_comes_last(dataset, tmp_path, eager, monkeypatch, capsys):
    def fail(*_, **__) -> None:
        while "reading the dataset: " not in text_of(written):
            time.sleep(0.001)
        raise ValueError("no such data")

    monkeypatch.setattr(train, "load_meta", fail)
    with terminal() as written:
        assert run(out_dir=tmp_path, dataset=dataset) == 1
    assert shapes(text_of(written))[-1] == ""
    assert capsys.readouterr().err == "error: no such data\n"


def test_a_terminal_that_is_gone_ends_nothing(eager, monkeypatch):
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Gone())
    shown = Console()
    shown.start()
    with shown.doing("compiling"):
        while isinstance(sys.stdout, Gone):
            time.sleep(0.001)
    shown.print("compiled")
    shown.close()
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
    assert [count(n, "process") for n in (1, 2000)] == ["1 process", "2,000 processes"]
    assert [count(0, noun) for noun in ("row", "batch")] == ["0 rows", "0 batches"]
    assert [duration(seconds) for seconds in (59.9, 99 * 3600 + 850)] == ["0:00:59", "99:14:10"]
