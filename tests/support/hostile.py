"""Programs under bad input: called in this process, with little memory and time, and judged by what
they leave.

A program that refuses its input says so in one line on stderr, ends with exit code 1 or 2, and
changes nothing on disk.
"""

import contextlib
import io
import re
import resource
import shlex
import shutil
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support import runs
from support.runs import contents

TRAIN = runs.TINY | dict(n_layer=1, n_embd=16, block_size=16, batch_size=4, overwrite=True)
TRAIN |= dict(max_iters=3, eval_interval=1, eval_tokens=64)
SAMPLE = dict(start="AB", max_new_tokens=4, num_samples=2, device="cpu", dtype="float32")
CHECKPOINTS = ("last.pt", "prev.pt", "best.pt")
# address space that a program under test may take beside what is mapped already
ROOM_BYTES = 2 << 30
PATIENCE_S = 60  # a program without an answer by then hangs
RESUME = "--init_from=resume"
# a new run from the weights of the earlier one, which it overwrites
WEIGHTS = "--init_from={run}/best.pt"


# ----------------------------------------------------------------------------------- a run to spoil


@dataclass
class World:
    """A folder to spoil, and the means to spoil the machine."""

    tmp: Path  # it holds:
    run: Path  # a run of 3 steps
    data: Path  # its dataset
    patch: pytest.MonkeyPatch | None = None


@contextlib.contextmanager
def copy(world: World):
    """A copy of a World, to spoil; it is the working directory meanwhile."""
    tmp = world.tmp.with_name("copy")
    shutil.copytree(world.tmp, tmp)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp)
            yield World(tmp, tmp / "run", tmp / "data", patch)
    finally:
        shutil.rmtree(tmp)


# ----------------------------------------------------------------------------------------- programs


@contextlib.contextmanager
def limits():
    """Little memory and time: a file of some kilobytes is no reason to take gigabytes or
    minutes."""
    mapped = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)

    def give_up(*_):
        # not an Exception, which a program would report
        pytest.fail(f"no answer in {PATIENCE_S} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def call(main, *argv, **flags) -> Outcome:
    """A program's `main` in this process, as `python PROGRAM.py ARGV` runs it. Whatever it raises
    would be a traceback, and is raised here; a warning would be printed on stderr, and fails."""
    out, err = io.StringIO(), io.StringIO()
    with limits(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = runs.call(main, *argv, *(f"--{name}={value}" for name, value in flags.items()))
    assert not [
        w for w in shown if issubclass(w.category, (UserWarning, RuntimeWarning, FutureWarning))
    ], shown[0]
    return Outcome(code, out.getvalue(), err.getvalue())


def assert_one_line(text: str) -> None:
    assert text.strip() and len(text.strip().splitlines()) == 1 and len(text) < 5000, text


def assert_refused(outcome: Outcome, words=()) -> None:
    """Exit code 1 or 2, one line on stderr that has these words in it, no traceback anywhere."""
    code, out, err = outcome
    assert code in (1, 2), (code, out[-500:])
    assert "Traceback" not in out + err
    assert re.fullmatch(r"(\[rank \d\] )?error: [^\n]+\n", err), err
    assert_one_line(err)
    assert [word for word in words if str(word) not in err] == [], err


def refusal(capsys, code: int, *words) -> None:
    """Check that a run ended with exit code 1 and one line on stderr that has these words in it."""
    err = capsys.readouterr().err
    assert code == 1
    assert_refused(Outcome(code, "", err), words)


def works(folder: Path | None, main, *argv, **flags) -> bool:
    """Whether a program works; if not, one line says why, and nothing has changed in `folder`."""
    before = folder and contents(folder)
    outcome = call(main, *argv, **flags)
    repeated = r"note: --\w+ is given twice: [^\n]*\n"
    outcome = outcome._replace(err=re.sub(repeated, "", outcome.err))
    if outcome.code == 0:
        assert outcome.err == ""
        return True
    assert_refused(outcome)
    # small files ask for too much: say what is wrong with them
    assert "out of memory" not in outcome.err, outcome.err
    assert (folder and contents(folder)) == before
    return False


def resume(world: World, **flags) -> bool:
    """Whether train.py goes on with the run, checked as above."""
    import train

    flags = TRAIN | dict(init_from="resume", out_dir=world.run, dataset=world.data) | flags
    return works(world.run, train.main, **flags)


def speak(world: World) -> bool:
    """Whether sample.py takes the checkpoint last.pt, checked as above."""
    import sample

    return works(world.run, sample.main, **SAMPLE | dict(out_dir=world.run, checkpoint="last.pt"))


# -------------------------------------------------------------------------------------- checkpoints


def plain(value):
    """`value` with every tensor as (kind, dtype, shape, bytes) and every float by its bits: == then
    means the same."""
    if isinstance(value, torch.Tensor):
        return (
            str(value.device),
            value.layout,
            value.dtype,
            tuple(value.shape),
            value.detach().numpy().tobytes(),
        )
    if isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return type(value).__name__, [(plain(k), plain(v)) for k, v in pairs]
    return type(value).__name__, value.hex() if isinstance(value, float) else value


def changes(loaded: dict, original: dict) -> list:
    """Names of what a checkpoint does not hold exactly as it was saved. (Loading adds what older
    versions did not save.)"""
    return [
        key for key in original if key not in loaded or plain(loaded[key]) != plain(original[key])
    ]


def refused_as_none(function, *args, names=""):
    """What `function` returns under `limits`, or None where it refuses in one line, a ValueError
    with `names` in it."""
    try:
        with limits(), warnings.catch_warnings():
            warnings.simplefilter("error")
            return function(*args)
    except ValueError as e:
        assert_one_line(" ".join(str(e).split()))  # as report_error prints it
        assert str(names) in str(e)


def load(path: Path) -> dict | None:
    """The checkpoint as load_checkpoint reads it, or None where it refuses, naming the file."""
    from nanodnt.run.checkpoints import load_checkpoint

    return refused_as_none(load_checkpoint, path, names=path)


def save(path: Path, content) -> bool:
    """Save anything as a checkpoint; False where torch.save cannot."""
    path.unlink(missing_ok=True)  # last.pt and best.pt may be one file
    try:
        torch.save(content, path)
    except Exception:
        return False
    return True


def holders(value):
    """Every dict and list in a tree, the tree itself first."""
    if isinstance(value, (dict, list)):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from holders(part)


# ------------------------------------------------------------------------------- tables of mistakes


class Case(NamedTuple):
    name: str
    argv: str  # beside the flags that work; {tmp} {run} {data} are filled in
    words: list  # what the message must contain
    spoil: Any = None  # called with the World before the program
    kept: str = "**/*"  # files that must stay the same


def cases(*rows):
    """Parameters of a test from the rows of a table; a row may end with a mark."""
    params = []
    for row in rows:
        marks = [part for part in row if isinstance(part, pytest.MarkDecorator)]
        case = Case(*(part for part in row if part not in marks))
        params.append(pytest.param(case, id=case.name, marks=marks))
    return pytest.mark.parametrize("case", params)


def command_line(world: World, program, argv: str = "") -> list:
    """The flags that work for train or sample (modules), but for those that `argv` sets, then
    `argv`."""
    words = shlex.split(argv.format(tmp=world.tmp, run=world.run, data=world.data))
    flags = {"train": TRAIN | dict(dataset=world.data), "sample": SAMPLE}[program.__name__] | dict(
        out_dir=world.run
    )
    given = {word.lstrip("-").partition("=")[0] for word in words}
    return [f"--{name}={value}" for name, value in flags.items() if name not in given] + words


def start(world: World, program, argv: str = "") -> Outcome:
    """Run train or sample (modules) in this process on flags that work and `argv`."""
    return call(program.main, *command_line(world, program, argv))


def refuse(world: World, program, case: Case) -> None:
    """Spoil the world as the case says, and check that the program refuses it and leaves every file
    as it was."""
    if case.spoil:
        case.spoil(world)
    before = contents(world.tmp, case.kept)
    outcome = start(world, program, case.argv)
    assert_refused(outcome, case.words)
    after = contents(world.tmp, case.kept)
    changed = [path for path in before | after if before.get(path, ()) != after.get(path, ())]
    assert not changed, f"changed, new or gone: {changed}"
