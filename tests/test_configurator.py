"""configurator.py: what it accepts, what it refuses and in which words, and that it never runs what it reads."""

from __future__ import annotations  # annotations as strings, as a schema may have them

import ast
import importlib
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configurator import RENAMED, ConfigError, configure, describe, read_arguments, read_file, read_knobs, undocumented

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Model:
    # --- size ---------------
    n_layer: int = 12  # blocks
    # ------------------------
    n_head: int = 12  # attention heads
    # --- parts ---
    dropout: float = 0.0  # probability
    bias: bool = False  # biases in linear layers
    norm: Literal["rmsnorm", "none"] = "rmsnorm"  # function in a norm slot

    def size(self):  # a method's comment is nobody's help
        # --- nor is this a section ---
        return self.n_layer


@dataclass
class Train:
    # --- optimizer ---
    learning_rate: float | None = None  # peak LR; None = the optimizer's default
    # and this line continues it; a "#" stays: C#
    seed: int = 1337  # of everything

    # this remark stands alone and belongs to no knob
    lr_decay_iters: Optional[int] = None  # noqa: UP045 (the older spelling)
    # --- output ---
    out_dir: str = "out"  # run directory # with a second hash
    start: str = "\n"  # prompt
    note: str | None = None  # free text
    compile: Literal["auto", True, False] = "auto"  # torch.compile the model
    level: Literal[1, 2] = 1  # a choice of integers
    either: float | None | Literal["none", "half"] = "half"  # the string none, None, or a number


def load(*argv):
    """{name: value} over both schemas, and `given`."""
    instances, where = configure(Model, Train, argv=list(argv))
    return {name: value for x in instances for name, value in vars(x).items()}, where


def refusal(capsys, *argv):
    """The message of a refused command line: one line on stderr, nothing on stdout, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        configure(Model, Train, argv=list(argv))
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("error: ") and len(err.splitlines()) == 1 and err.endswith("\n")
    return err[len("error: ") : -1]


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file into the current directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="c.py"):
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


# ---------------------------------------------------------------------------------------------------- accepted values


@pytest.mark.parametrize(
    "flag, expected",
    [
        ("n_layer=3", 3),
        ("n_layer=-3", -3),
        ("n_layer=1e2", 100),
        ("n_layer=4.0", 4),
        ("n_layer=1", 1),
        ("seed=9007199254740993", 9007199254740993),  # 2**53 + 1: no detour through float
        ("seed=9223372036854775807", 2**63 - 1),
        ("dropout=1", 1.0),
        ("dropout=.5", 0.5),
        ("learning_rate=6e-4", 6e-4),
        ("learning_rate=0", 0.0),
        ("learning_rate=None", None),
        ("learning_rate=none", None),
        ("lr_decay_iters=5e3", 5000),
        ("lr_decay_iters=None", None),
        *[(f"bias={text}", True) for text in ("True", "true", "1")],
        *[(f"bias={text}", False) for text in ("False", "false", "0")],
        ("norm=none", "none"),
        ("norm=rmsnorm", "rmsnorm"),
        ("compile=auto", "auto"),
        ("compile=1", True),
        ("compile=false", False),
        ("level=2", 2),
        ("either=none", "none"),
        ("either=None", None),
        ("either=2", 2.0),
        ("out_dir=a b=c/'d'", "a b=c/'d'"),
        ("out_dir=1", "1"),
        ("out_dir=none", "none"),
        ("out_dir=True", "True"),
        ("start=", ""),
        ("note=", ""),
        ("note=none", None),
        ("note=1", "1"),
        ("start=--help me", "--help me"),
    ],
)
def test_flag_values(flag, expected):
    name = flag.partition("=")[0]
    values, where = load("--" + flag)
    assert values[name] == expected and type(values[name]) is type(expected)
    assert where == {name: (expected, "command line")}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("n_layer = 3", 3),
        ("n_layer = 4.0", 4),
        ("n_layer = 1e2", 100),
        ("n_layer = 7 // 2 + 2 ** 3 % 5 - 1", 5),
        ("n_layer = -(-3) * 2", 6),
        ("n_layer = (\n  1 +\n  2)", 3),
        ("n_layer = 0x10", 16),
        ("dropout = 1", 1.0),
        ("dropout = 3 / 4", 0.75),
        ("dropout = 2 ** -1", 0.5),
        ("learning_rate = None", None),
        ("bias = True", True),
        ("norm = 'none'", "none"),
        ("compile = False", False),
        ("compile = 'auto'", "auto"),
        ("either = 'none'", "none"),
        ("either = None", None),
        ("note = 'none'", "none"),
        ("out_dir = 'out/' 'x'", "out/x"),
        ("out_dir = ''", ""),
        ("start = '''two\nlines'''", "two\nlines"),
    ],
)
def test_file_values(config, line, expected):
    name = line.partition(" ")[0]
    values, where = load(config(f'"""A docstring."""\n# a comment\n\n{line}\n'))
    assert values[name] == expected and type(values[name]) is type(expected)
    assert where == {name: (expected, "c.py:4")}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", '"""Only a docstring."""', "_helper = 3\n"])
def test_file_that_sets_nothing(config, text):
    values, where = load(config(text))
    assert where == {} and values == load()[0]


def test_names_of_a_file(config):
    """Helpers are no keys, keys can be used further down, and neither is seen by the next file."""
    values, where = load(config("_d = 3\nn_layer = _d * 4 \nn_head = n_layer / 2\n"))
    assert (values["n_layer"], values["n_head"]) == (12, 6)
    assert where == {"n_layer": (12, "c.py:2"), "n_head": (6, "c.py:3")}
    with pytest.raises(SystemExit):
        load("c.py", config("n_head = _d", "second.py"))


@pytest.mark.parametrize("text", [b"\xef\xbb\xbfn_layer = 3\n", b"# \xce\xb3\r\nn_layer = 3\r\n", b"\rn_layer = 3"])
def test_file_encodings(config, text):
    assert load(config(text))[0]["n_layer"] == 3


def test_precedence(config):
    """Files from left to right; a flag wins over every file, wherever it stands."""
    a, b = config("n_layer = 1\nn_head = 1\nseed = 1\n", "a.py"), config("\nn_head = 2\nseed = 2", "b.py")
    expected = {"n_layer": (1, "a.py:1"), "n_head": (2, "b.py:2"), "seed": (3, "command line")}
    for argv in (["--seed=3", a, b], [a, "--seed=3", b], [a, b, "--seed=3"]):
        values, where = load(*argv)
        assert where == expected
        assert {name: values[name] for name in expected} == {name: value for name, (value, _) in expected.items()}
    assert load(b, a)[1]["n_head"] == (1, "a.py:2")
    assert load("--n_layer=12")[1] == {"n_layer": (12, "command line")}  # given, though it is the default


def test_argv_of_the_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--n_layer=3"])
    (model, train), _ = configure(Model, Train)
    assert model == Model(n_layer=3) and train == Train()


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--n_layr=3"], "unknown flag --n_layr (did you mean --n_layer?)"),
        (["--n-layer=3"], "unknown flag --n-layer (did you mean --n_layer?)"),
        (["--N_LAYER=3"], "unknown flag --N_LAYER (did you mean --n_layer?)"),
        (["--zzz=3"], "unknown flag --zzz (--help lists them all)"),
        (["--zzz"], "unknown flag --zzz (--help lists them all)"),
        (["--"], "unknown flag -- (--help lists them all)"),
        (["--size=3"], "unknown flag --size (--help lists them all)"),
        (["--decay_lr=False"], "unknown flag --decay_lr (set schedule=constant)"),
        (["--n_layer", "3"], "--n_layer has no value: write --n_layer=VALUE (int)"),
        (["--compile"], "--compile has no value: write --compile=VALUE (auto | True | False)"),
        (["-n_layer=3"], "-n_layer=3: write --n_layer=3"),
        (["---n_layer=3"], "---n_layer=3: write --n_layer=3"),
        (["n_layer=3"], "n_layer=3: write --n_layer=3"),
        (["-v"], "-v: write --v=VALUE"),
        (["--seed=1", "--seed=1"], "--seed is given twice, as '1' and '1': keep one"),
        (["--n_layer=abc"], "command line: --n_layer cannot be 'abc': it takes int"),
        (["--n_layer=1.5"], "command line: --n_layer cannot be '1.5': it takes int"),
        (["--n_layer="], "command line: --n_layer cannot be '': it takes int"),
        (["--n_layer=True"], "command line: --n_layer cannot be 'True': it takes int"),
        (["--n_layer=None"], "command line: --n_layer cannot be 'None': it takes int"),
        (["--n_layer=2**3"], "command line: --n_layer cannot be '2**3': it takes int"),
        (["--n_layer=inf"], "command line: --n_layer cannot be 'inf': it takes int"),
        (["--n_layer=1e19"], "command line: --n_layer cannot be '1e19': it takes int"),
        (["--seed=9223372036854775808"], "command line: --seed cannot be '9223372036854775808': it takes int"),
        (["--dropout=nan"], "command line: --dropout cannot be 'nan': it takes float"),
        (["--dropout=-inf"], "command line: --dropout cannot be '-inf': it takes float"),
        (["--dropout=1e999"], "command line: --dropout cannot be '1e999': it takes float"),
        (["--dropout=" + "9" * 309], f"command line: --dropout cannot be '{'9' * 309}': it takes float"),
        (["--dropout="], "command line: --dropout cannot be '': it takes float"),
        (["--dropout=false"], "command line: --dropout cannot be 'false': it takes float"),
        (["--learning_rate=fast"], "command line: --learning_rate cannot be 'fast': it takes float | None"),
        (["--learning_rate="], "command line: --learning_rate cannot be '': it takes float | None"),
        (["--bias=no"], "command line: --bias cannot be 'no': it takes True | False"),
        (["--bias=TRUE"], "command line: --bias cannot be 'TRUE': it takes True | False"),
        (["--bias=1.0"], "command line: --bias cannot be '1.0': it takes True | False"),
        (["--bias="], "command line: --bias cannot be '': it takes True | False"),
        (["--norm=RMSNorm"], "command line: --norm cannot be 'RMSNorm': it takes rmsnorm | none"),
        (["--norm=None"], "command line: --norm cannot be 'None': it takes rmsnorm | none"),
        (["--compile=maybe"], "command line: --compile cannot be 'maybe': it takes auto | True | False"),
        (["--level=3"], "command line: --level cannot be '3': it takes 1 | 2"),
        (["missing.py"], "cannot read config file 'missing.py': No such file or directory"),
        ([""], "cannot read config file '': No such file or directory"),
        (["."], "cannot read config file '.': Is a directory"),
        (["--no\nsuch=1"], "unknown flag --no such (--help lists them all)"),  # one line, whatever was typed
        (["--n\x1b[31m=1"], "unknown flag --n [31m (--help lists them all)"),
        (["--n_layer=\r\u2028"], r"command line: --n_layer cannot be '\r\u2028': it takes int"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_refused_command_lines(capsys, config, argv, message):
    assert refusal(capsys, *argv) == message


@pytest.mark.parametrize("name", RENAMED)
def test_names_of_nanogpt(capsys, config, name):
    """Each says what to do instead, on the command line and in a file; a schema that has the name simply has it."""
    assert refusal(capsys, f"--{name}=1") == f"unknown flag --{name} ({RENAMED[name]})"
    assert refusal(capsys, config(f"\n{name} = 1")) == f"c.py:2: unknown key {name} ({RENAMED[name]})"
    schema = dataclass(type("Own", (), {"__annotations__": {name: "int"}, name: 0, "__module__": __name__}))
    assert configure(schema, argv=[f"--{name}=1"])[1] == {name: (1, "command line")}


NOT_DATA = "not allowed; a config file holds only name = expression of numbers, strings, True, False, None, names "
NOT_DATA += "assigned above, + - * / // % **"


@pytest.mark.parametrize(
    "line, message",
    [
        ("n_layr = 3", "unknown key n_layr (did you mean n_layer?)"),
        ("n_layer = 3.5", "n_layer cannot be 3.5: it takes int"),
        ("n_layer = '3'", "n_layer cannot be '3': it takes int"),
        ("n_layer = True", "n_layer cannot be True: it takes int"),
        ("n_layer = 2**63", "n_layer cannot be 9223372036854775808: it takes int"),
        ("dropout = False", "dropout cannot be False: it takes float"),
        ("dropout = (-8) ** 0.5", None),  # complex
        ("bias = 1", "bias cannot be 1: it takes True | False"),
        ("bias = 'True'", "bias cannot be 'True': it takes True | False"),
        ("norm = 'x'", "norm cannot be 'x': it takes rmsnorm | none"),
        ("norm = None", "norm cannot be None: it takes rmsnorm | none"),
        ("level = True", "level cannot be True: it takes 1 | 2"),
        ("compile = 1", "compile cannot be 1: it takes auto | True | False"),
        ("compile = 'True'", "compile cannot be 'True': it takes auto | True | False"),
        ("out_dir = 3", "out_dir cannot be 3: it takes str"),
        ("out_dir = None", "out_dir cannot be None: it takes str"),
        ("seed = 1; seed = 1", "`seed = 1; seed = 1`: seed is already set at c.py:3"),
        ("_a = 1; _a = 2", "`_a = 1; _a = 2`: _a is already set at c.py:3"),
        ("out_dir = out", "`out_dir = out`: out is not assigned above (a string needs quotes)"),
        ("bias = true", "`bias = true`: true is not assigned above (a string needs quotes)"),
        ("seed = seed", "`seed = seed`: seed is not assigned above (a string needs quotes)"),
        ("seed = __name__", "`seed = __name__`: __name__ is not assigned above (a string needs quotes)"),
        ("seed = 1 / 0", "`seed = 1 / 0`: division by zero"),
        ("seed = 1 % 0", None),
        ("seed = 0 ** -1", None),
        ("seed = 2.0 ** 9999", None),  # says it in words, without the errno
        ("seed = 9 ** 9 ** 9", None),
        ("seed = -9 ** 9 ** 9", None),
        ("seed = 10 ** 300 * 10 ** 300", "`seed = 10 ** 300 * 10 ** 300`: the number is out of range"),
        ("seed = 1e300 * 1e300", "`seed = 1e300 * 1e300`: the number is out of range"),
        ("dropout = 1e999", "`dropout = 1e999`: the number is out of range"),
        ("_x = 1e999 - 1e999", "`_x = 1e999 - 1e999`: the number is out of range"),
        ("seed = 0x" + "f" * 5000, None),
        ("seed = True + 1", "`seed = True + 1`: arithmetic is for numbers only"),
        ("seed = -True", "`seed = -True`: arithmetic is for numbers only"),
        ("out_dir = 'a' * 3", "`out_dir = 'a' * 3`: arithmetic is for numbers only"),
        ("out_dir = 'a' + 'b'", "`out_dir = 'a' + 'b'`: arithmetic is for numbers only"),
        ("out_dir = '%9999999999d' % 1", "`out_dir = '%9999999999d' % 1`: arithmetic is for numbers only"),
        ("seed = (", "'(' was never closed"),
        ("seed 3", "invalid syntax"),
        *[
            (line, f"`{line}`: {NOT_DATA}")
            for line in (
                "import os",
                "from os import path",
                "seed += 1",
                "seed: int = 1",
                "seed = n_head = 1",
                "seed, n_head = 1, 2",
                "Model.seed = 1",
                "del seed",
                "'a second docstring'",
                "3",
                "for i in 1, 2: seed = i",
                "if True: seed = 1",
                "def f(): pass",
                "class C: pass",
                "pass",
                "print('x')",
                "seed = int('1')",
                "seed = (1).real",
                "seed = [1]",
                "seed = [1][0]",
                "seed = 1, 2",
                "seed = 1 if True else 2",
                "seed = (x := 1)",
                "seed = lambda: 1",
                "seed = 1 < 2",
                "seed = 1 << 2",
                "seed = +1",
                "seed = ~1",
                "bias = not True",
                "bias = True and True",
                "out_dir = f'{1}'",
                "out_dir = b'x'",
                "seed = 1j",
                "seed = ...",
            )
        ],
    ],
    ids=lambda x: str(x)[:40],
)
def test_refused_files(capsys, config, line, message):
    """Every refusal names file and line; `message` None: any reason will do, as long as it is one."""
    text = refusal(capsys, config(f'"""Docstring."""\n\n{line}\n'))
    assert text.startswith("c.py:3: ") and len(text) > len("c.py:3: ")
    assert len(text) < 300 and "34" not in text  # readable, whatever the file holds
    assert message is None or text == f"c.py:3: {message}"


UNREADABLE = "c.py:1: not a config file: not UTF-8 text, too long, or nested too deeply"


@pytest.mark.parametrize(
    "text, message",
    [
        (b"\xff\xfe", UNREADABLE),
        ("n_layer = 3 # é".encode("latin-1"), UNREADABLE),
        (b"# " + b"x" * 100_000 + b"\nn_layer = 3", UNREADABLE),
        (b"n_layer = " + b"-" * 90_000 + b"1", UNREADABLE),
        (b"n_layer = 1" + b" + 1" * 20_000, None),  # what gives up first depends on the version of Python
        (b"n_layer = 1" + b" + 1" * 1500, None),
        (b"n_layer = " + b"(" * 50_000, None),
        (b"n_layer = 3\0", None),
    ],
    ids=["utf-16", "latin-1", "long", "minuses", "sum", "shorter sum", "brackets", "nul"],
)
def test_unreadable_files(capsys, config, text, message):
    line = refusal(capsys, config(text))
    assert line.startswith("c.py:1: ") and len(line) < 300
    assert message is None or line == message


def test_second_file_is_named(capsys, config):
    """The message is about the file that is wrong, not the last or the first."""
    config("n_layer = 3", "good.py")
    config("# one\n# two\nn_layer = 'x'", "bad.py")
    for argv in (["good.py", "bad.py"], ["bad.py", "good.py"], ["bad.py", "--n_layer=3"]):
        assert refusal(capsys, *argv) == "bad.py:3: n_layer cannot be 'x': it takes int"


def test_value_error_of_a_dataclass(capsys):
    """Contradictory knobs, found by the dataclass itself, are refused in the same way."""

    @dataclass
    class Checked:
        n_embd: int = 8  # width

        def __post_init__(self):
            if self.n_embd % 2:
                raise ValueError(f"n_embd={self.n_embd} must be even:\nuse 8")

    assert configure(Checked, argv=["--n_embd=6"])[0] == [Checked(6)]
    with pytest.raises(SystemExit) as stop:
        configure(Checked, argv=["--n_embd=7"])
    assert stop.value.code == 2 and capsys.readouterr().err == "error: n_embd=7 must be even: use 8\n"


# ------------------------------------------------------------------------------------------------ nothing is executed


@pytest.mark.parametrize(
    "line",
    [
        "__import__('os').system('touch X')",
        "seed = __import__('os').system('touch X')",
        "_a = open('X', 'w')",
        'out_dir = f\'{open("X", "w")}\'',
        'exec(\'open("X", "w")\')',
        "seed = [open('X', 'w') for _ in (1,)]",
        "@open('X', 'w').write\ndef f(): pass",
        "def f(x=open('X', 'w')): pass",
        "class C(open('X', 'w').__class__): pass",
        "seed: open('X', 'w') = 1",
        "assert open('X', 'w')",
        "try: seed = 1\nfinally: open('X', 'w')",
    ],
)
def test_code_is_not_run(capsys, config, line):
    with suppress(Exception):
        exec(compile(line, "control", "exec", dont_inherit=True), {})
    Path("X").unlink()  # as a program the line does create X, so what follows can fail
    assert refusal(capsys, config(line)).endswith(NOT_DATA)
    assert os.listdir() == ["c.py"]


KNOBS = read_knobs(Model, Train)
NAMES = st.sampled_from([*KNOBS, "_a", "_b", "unknown", *RENAMED])
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2, 9, 10**300, 0.5])).map(repr)
ATOMS = st.one_of(NUMBERS, NAMES, st.sampled_from(["True", "None", "'none'", "'x'", "b''", "...", "f'{1}'", "1j"]))
BINARY = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<<", "@", " and ", " if "])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, BINARY, inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        inner.map(lambda e: f"-{e}"),
        inner.map(lambda e: f"[{e}]"),
        inner.map(lambda e: f"abs({e})"),
    ),
    max_leaves=6,
)
LINES = st.tuples(NAMES, st.sampled_from([" = ", "=", " += ", ": int = "]), EXPRESSIONS).map("".join)
TEXTS = st.one_of(st.binary(), st.text().map(lambda t: t.encode("utf-8", "surrogatepass")))
PROGRAMS = st.lists(st.one_of(LINES, LINES, st.text()), max_size=4)
PROGRAMS = PROGRAMS.map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))


def check_outcome(argv):
    """Either a ConfigError with a message, or values that their knobs' types allow, stored as exactly those."""
    try:
        loaded = read_arguments(argv, KNOBS)
    except ConfigError as error:
        assert str(error)
        return
    types = {"n_layer": int, "n_head": int, "dropout": float, "bias": bool, "norm": str, "seed": int, "out_dir": str}
    types |= {"learning_rate": (float, type(None)), "start": str, "note": (str, type(None)), "compile": (str, bool)}
    types |= {"lr_decay_iters": (int, type(None)), "level": int, "either": (str, float, type(None))}
    for name, (value, where) in loaded.items():
        assert isinstance(value, types[name]) and (value is True or value is False) <= (name in ("bias", "compile"))
        assert not isinstance(value, float) or abs(value) < float("inf")
        assert where == "command line" or where.rpartition(":")[2].isdigit()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "c.py"


@settings(max_examples=200, deadline=None, database=None)
@given(text=st.one_of(TEXTS, PROGRAMS, PROGRAMS))
@example(text=b"seed = 9**9**9")
@example(text=b"n_layer = 3\nlearning_rate = n_layer / 4")
@example(text=b"out_dir = '\\ud800'")
def test_any_file_loads_or_is_refused(scratch, text):
    scratch.write_bytes(text)
    check_outcome([str(scratch)])


@settings(max_examples=200, deadline=None, database=None)
@given(
    argv=st.lists(
        st.one_of(
            st.text().map(lambda t: "-" + t),
            st.tuples(st.sampled_from(["--", "-", ""]), NAMES, st.sampled_from(["=", ""]), st.text()).map("".join),
            st.tuples(st.just("--"), NAMES, st.just("="), ATOMS).map("".join),
        ),
        max_size=3,
    )
)
@example(argv=["\0"])
@example(argv=["--seed=" + "9" * 5000])
@example(argv=["--dropout=" + "9" * 400])
def test_any_command_line_loads_or_is_refused(scratch, argv):
    check_outcome(argv)


def test_a_file_is_read_as_values_only(config):
    """Nothing but plain values comes out, by whatever key: the check against a schema is a second fence."""
    keys = read_file(config("a = 1\nb = 2.5\nc = 'x'\nd = None\ne = True\n_f = 0\n"))
    assert keys == {
        "a": (1, "c.py:1"),
        "b": (2.5, "c.py:2"),
        "c": ("x", "c.py:3"),
        "d": (None, "c.py:4"),
        "e": (True, "c.py:5"),
    }


# ---------------------------------------------------------------------------------------- schemas and other arguments


def test_positionals_of_a_tool():
    (model,), where = configure(Model, argv=["out/b", "--n_layer=3", "out/a"], positional="run")
    assert model.n_layer == 3
    assert where == {"run": (["out/b", "out/a"], "command line"), "n_layer": (3, "command line")}
    assert describe(model, given=where).endswith("\ncommand line sets n_layer")
    assert configure(Model, argv=[], positional="run")[1] == {"run": ([], "command line")}
    with pytest.raises(ValueError, match="positional='n_layer'"):
        configure(Model, argv=[], positional="n_layer")


def test_fields_that_are_no_knobs():
    @dataclass
    class Derived:
        n_layer: int = 2  # blocks
        half: int = field(init=False, default=0)  # computed

        def __post_init__(self):
            self.half = self.n_layer // 2

    (x,), _ = configure(Derived, argv=["--n_layer=8"])
    assert (x.n_layer, x.half) == (8, 4)
    with pytest.raises(SystemExit):
        configure(Derived, argv=["--half=1"])


@dataclass
class Clash:
    seed: int = 0  # in Train as well


@dataclass
class ListField:
    sizes: list[int] = field(default_factory=list)  # no flag can say it


@dataclass
class Required:
    path: str  # has no default


@dataclass
class WrongDefault:
    rate: float = None  # should be float | None


@dataclass
class WrongChoice:
    norm: Literal["a", "b"] = "c"  # not among them


@pytest.mark.parametrize(
    "schemas, message",
    [
        ((Train, Clash), "Clash.seed: another schema"),
        ((Train, Train), "Train.learning_rate: another schema"),
        ((ListField,), r"a knob cannot be list\[int\]"),
        ((Required,), "default of Required.path"),
        ((WrongDefault,), "default of WrongDefault.rate cannot be None: it takes float"),
        ((WrongChoice,), "default of WrongChoice.norm cannot be 'c': it takes a | b"),
    ],
)
def test_errors_of_the_programmer_are_raised(schemas, message):
    with pytest.raises(ValueError, match=message):
        configure(*schemas, argv=[])


# ------------------------------------------------------------------------------------------------- help and description


def test_comments_and_sections():
    knobs = read_knobs(Model, Train)
    assert list(knobs) == [*vars(Model()), *vars(Train())]
    sections = {}
    for name, knob in knobs.items():
        sections.setdefault(knob.section, []).append(name)
    assert sections == {
        "size": ["n_layer", "n_head"],
        "parts": ["dropout", "bias", "norm"],
        "optimizer": ["learning_rate", "seed", "lr_decay_iters"],
        "output": ["out_dir", "start", "note", "compile", "level", "either"],
    }
    continued = 'peak LR; None = the optimizer\'s default and this line continues it; a "#" stays: C#'
    assert knobs["learning_rate"].help == continued
    assert knobs["seed"].help == "of everything"
    assert knobs["out_dir"].help == "run directory # with a second hash"
    assert knobs["norm"].help == "function in a norm slot"  # without the method's comments below it


# fmt: off
@dataclass
class Bare:
    """No sections."""

    with_text: int = 1  # it has one
    without: str = "# this is no comment"
    empty: int = 1  #
    long: Literal["a", "b"] = (  # in brackets
        "a"
    )  # and after them
    dedented: int = 1  # first
                       # second
    # third
    last: int = 1
# fmt: on


def test_undocumented():
    assert undocumented(Bare) == ["without", "empty", "last"]
    knobs = read_knobs(Bare)
    assert {knob.section for knob in knobs.values()} == {"Bare"}
    assert knobs["long"].help == "in brackets and after them" and knobs["dedented"].help == "first second third"


def test_schema_without_source(capsys):
    """Typed at a prompt, say: everything works but the comments."""
    space = {"__name__": __name__, "dataclass": dataclass}
    exec("@dataclass\nclass Typed:\n    n: int = 1  # comment", space)
    assert configure(space["Typed"], argv=["--n=2"])[0][0].n == 2
    assert undocumented(space["Typed"]) == ["n"] and "* n 2" in describe(space["Typed"](2))
    with pytest.raises(SystemExit):
        configure(space["Typed"], argv=["-h"])
    assert "--n=1" in capsys.readouterr().out


def test_every_knob_of_every_program_is_documented():
    """Finds the schemas by reading the programs: whatever is given to configure(...) is checked."""
    schemas = set()
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "configure":
                names = [arg.id for arg in node.args if isinstance(arg, ast.Name)]
                schemas |= {getattr(importlib.import_module(path.stem), name) for name in names}
    assert {"GPTConfig", "TrainConfig"} <= {schema.__name__ for schema in schemas}
    assert {schema.__name__: undocumented(schema) for schema in schemas if undocumented(schema)} == {}


PROGRAM = '''"""Train it.

More about it."""
from dataclasses import dataclass
from typing import Literal
from configurator import configure, describe

@dataclass
class Config:
    # --- first section ------
    n_layer: int = 12  # blocks
    learning_rate: float | None = None  # peak LR; None = the default of the optimizer, which is something else for
                                        # each of them and therefore takes surprisingly well-considered words
    # --- second section ---
    compile: Literal["auto", True, False] = "auto"  # torch.compile the model
    a_knob_with_quite_a_long_name: str = "out/and_a_long_value"  # where

(config,), given = configure(Config, description=__doc__)
print(describe(config, given=given))
'''
HELP = """\
usage: program.py [config ...] [--key=value ...]

Train it.

More about it.

Config files apply from left to right; --key=value wins over them.

first section
  --n_layer=12                  blocks [int]
  --learning_rate=None          peak LR; None = the default of the optimizer, which is something
                                else for each of them and therefore takes surprisingly
                                well-considered words [float | None]

second section
  --compile=auto                torch.compile the model [auto | True | False]
  --a_knob_with_quite_a_long_name=out/and_a_long_value
                                where [str]
"""
DESCRIPTION = """\
first section
* n_layer                       100       learning_rate                 None
second section
* compile                       True      a_knob_with_quite_a_long_name out/and_a_long_value
(* = not the default)
small.py sets compile, a_knob_with_quite_a_long_name
command line sets n_layer
"""


def test_as_a_program(config):
    config(PROGRAM, "program.py")
    config("compile = True\nn_layer = 3\na_knob_with_quite_a_long_name = 'out/and_a_long_value'\n", "small.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*argv):
        done = subprocess.run(
            [sys.executable, "program.py", *argv], env=env, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    assert run("--help") == run("missing.py", "-h", "--n_layr=1") == (0, HELP, "")
    code, out, err = run("small.py", "--n_layer=100")
    assert (code, out, err) == (0, DESCRIPTION, "")
    assert run("--n_layr=1") == (2, "", "error: unknown flag --n_layr (did you mean --n_layer?)\n")


def test_import_is_instant():
    code = "import sys, configurator; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_description(config):
    instances, where = configure(Model, Train, argv=[config("n_layer = 3\nseed = 1337"), "--start=a\tb", "--note="])
    lines = describe(*instances, given=where).splitlines()
    assert [line for line in lines if line.isalpha()] == ["size", "parts", "optimizer", "output"]
    cells = [cell for line in lines for cell in (line[0:39], line[40:79], line[80:119])]
    marked = [cell.rstrip().split(maxsplit=2)[1:] for cell in cells if cell.startswith("* ")]
    assert marked == [["n_layer", "3"], ["start", r"'a\tb'"], ["note", "''"]]  # seed is given, but is the default
    assert lines[-2:] == ["c.py sets n_layer, seed", "command line sets start, note"]
    assert describe(*instances).splitlines()[-1] == "(* = not the default)"
    instances[0].n_layer, instances[1].compile = 12, True  # a value resolved after the start is shown as it is now
    text = describe(*instances)
    assert "* compile" in text and "* n_layer" not in text
