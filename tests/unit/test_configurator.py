"""configurator.py: which flags and files it accepts, which it refuses and in which words; that it
runs no file; --help and the description of a run."""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configurator import (
    ADVICE,
    ALLOWED,
    VERSION,
    ConfigError,
    configure,
    flush_output,
    prepare_streams,
    read_arguments,
    read_flags,
)
from model import GPTConfig
from support.depth import examples
from support.runs import ROOT
from support.schemas import Model, Train, load, refused, write_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file into the working directory, which is empty; returns its name."""
    monkeypatch.chdir(tmp_path)
    return write_config


# ------------------------------------------------------------------------------ accepted values

VALUES = {  # what is written after --KEY= and what it means
    "n_layer": {"3": 3, "-3": -3, "1e2": 100, "1": 1},
    "seed": {"9223372036854775807": 2**63 - 1},  # no detour through float
    "dropout": {"1": 1.0, ".5": 0.5},
    "learning_rate": {"6e-4": 6e-4, "None": None, "none": None},
    "bias": {"True": True, "true": True, "1": True, "False": False, "0": False},
    "norm": {"none": "none"},
    "compile": {"auto": "auto", "1": True, "false": False},
    "level": {"2": 2},
    "either": {"none": "none", "None": None, "2": 2.0},
    "out_dir": {"a b=c/'d'": "a b=c/'d'", "1": "1", "none": "none", "True": "True"},
    "note": {"": "", "none": None, "1": "1"},
}


@pytest.mark.parametrize(
    "name, text", [(name, text) for name, texts in VALUES.items() for text in texts]
)
def test_flag_values(name, text):
    (values, where), expected = load(f"--{name}={text}"), VALUES[name][text]
    assert values[name] == expected and type(values[name]) is type(expected)
    assert where == {name: (expected, "command line")}


def test_a_bool_flag_alone_means_true():
    (model,), _ = configure(GPTConfig, argv=["--bias", "--dyt_bias"])  # the second is bool | None
    assert model.bias is True and model.dyt_bias is True and GPTConfig().dyt_bias is None


def test_precedence(config):
    """Files from left to right; a flag wins over every file, wherever it stands."""
    a = config("n_layer = 1\nn_head = 1\nseed = 1\n", "a.py")
    b = config("\nn_head = 2\nseed = 2", "b.py")
    expected = {"n_layer": (1, "a.py:1"), "n_head": (2, "b.py:2"), "seed": (3, "command line")}
    for argv in (["--seed=3", a, b], [a, "--seed=3", b], [a, b, "--seed=3"]):
        assert load(*argv)[1] == expected
    assert load(b, a)[1]["n_head"] == (1, "a.py:2")
    # given, though it is the default
    assert load("--n_layer=12")[1] == {"n_layer": (12, "command line")}


# ---------------------------------------------------------------------------- refused command lines

CANNOT_BE = {  # (key, what it takes): values that it refuses
    ("n_layer", "int"): ["abc", "1.5", "", "True", "inf", "1e19"],
    ("seed", "int"): ["9223372036854775808"],
    ("dropout", "float"): ["nan", "9" * 309, "false"],
    ("learning_rate", "float | None"): ["fast"],
    ("bias", "True | False"): ["TRUE", "1.0"],
    ("norm", "rmsnorm | none"): ["RMSNorm", "None"],
    ("level", "1 | 2"): ["3"],
}
REFUSED = {  # a command line: its message
    "--n_layr=3": "unknown flag --n_layr (did you mean --n_layer?)",
    "--zzz=3": "unknown flag --zzz (--help lists them all)",
    # of nanoGPT, but this is no command that trains
    "--backend=nccl": "unknown flag --backend (--help lists them all)",
    "--": "unknown flag -- (--help lists them all)",
    "--chat": f"unknown flag --chat ({ADVICE['chat']})",
    "--compile": "--compile has no value: write --compile=VALUE (auto | True | False)",
    "-n_layer=3": "-n_layer=3: write --n_layer=3",
    "n_layer=3": "n_layer=3: write --n_layer=3",
    "missing.py": "cannot read config file 'missing.py': No such file or directory; docs/runs.md "
    "lists the configs",
    # one line, whatever was typed
    "--no\nsuch=1": "unknown flag --no such (--help lists them all)",
}
for (name, kinds), values in CANNOT_BE.items():
    for value in values:
        REFUSED[f"--{name}={value}"] = (
            f"command line: --{name} cannot be {value!r}: it takes {kinds}"
        )


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:40])
def test_refused_command_lines(capsys, config, line):
    assert refused(capsys, *line.split(" ")) == REFUSED[line]


def test_a_value_error_of_a_dataclass_is_refused_in_the_same_way(capsys):
    @dataclass
    class Checked:
        n_embd: int = 8  # width

        def __post_init__(self):
            if self.n_embd % 2:
                raise ValueError(f"n_embd={self.n_embd} must be even:\nuse 8")

    assert configure(Checked, argv=["--n_embd=6"])[0] == [Checked(6)]
    with pytest.raises(SystemExit) as stop:
        configure(Checked, argv=["--n_embd=7"])
    assert (
        stop.value.code == 2 and capsys.readouterr().err == "error: n_embd=7 must be even: use 8\n"
    )


# ----------------------------------------------------------------------------------- accepted files

FILE_VALUES = {  # a line of a file: the value that it sets
    "n_layer = 1e2": 100,
    "n_layer = 7 // 2 + 2 ** 3 % 5 - 1": 5,
    "n_layer = (\n  1 +\n  -2)": -1,
    "dropout = 3 / 4": 0.75,
    "learning_rate = None": None,
    "bias = True": True,
    "compile = False": False,
    "either = 'none'": "none",
    "out_dir = 'out/' 'x'": "out/x",
    "start = '''two\nlines'''": "two\nlines",
}


@pytest.mark.parametrize("line", FILE_VALUES)
def test_file_values(config, line):
    name, expected = line.partition(" ")[0], FILE_VALUES[line]
    values, where = load(config(f'"""A docstring."""\n# a comment\n\n{line}\n'))
    assert values[name] == expected and type(values[name]) is type(expected)
    assert where == {name: (expected, "c.py:4")}


@pytest.mark.parametrize("text", ["", '"""Only a docstring."""', "_helper = 3\n"])
def test_file_that_sets_nothing(config, text):
    assert load(config(text)) == load()


def test_names_of_a_file(capsys, config):
    """Helpers are no keys, keys can be used further down, and no other file sees either."""
    _, where = load(config("_d = 3\nn_layer = _d * 4 \nn_head = n_layer / 2\n"))
    assert where == {"n_layer": (12, "c.py:2"), "n_head": (6, "c.py:3")}
    second = config("# one\nn_head = _d", "second.py")
    message = "second.py:2: `n_head = _d`: _d is not assigned above (a string needs quotes)"
    assert refused(capsys, "c.py", second) == message


@pytest.mark.parametrize("text", [b"\xef\xbb\xbfn_layer = 3\n", b"# \xce\xb3\r\nn_layer = 3\r\n"])
def test_file_encodings(config, text):
    assert load(config(text))[0]["n_layer"] == 3


def test_a_base_stands_in_place_of_its_line(config):
    """From the file's own folder; every value has its own origin, and helpers are known."""
    Path("sizes").mkdir()
    config("_d = 2\nn_layer = 1\nn_head = 1\nseed = 1", "root.py")
    config('"""Doc."""\nbase = "../root.py"\nn_head = _d\nseed = 2', "sizes/middle.py")
    config("base = 'middle.py'\n\nseed = n_layer + 2", "sizes/top.py")
    expected = {
        "n_layer": (1, "root.py:2"),
        "n_head": (2, "sizes/middle.py:3"),
        "seed": (3, "sizes/top.py:3"),
    }
    assert load("sizes/top.py")[1] == expected


BASES = {  # lines of c.py, which a.py names as its base: the message
    "base = 'no.py'": "c.py:1: base = 'no.py': no.py is no file",
    "base = 'c.py'": "c.py:1: base = 'c.py': c.py leads back to itself",
    "base = 'a.py'": "c.py:1: base = 'a.py': a.py leads back to itself",
    "seed = 1\nbase = 'b.py'": "c.py:2: `base = 'b.py'`: base names a file, in the first line",
    "base = 3": "c.py:1: `base = 3`: base names a file, in the first line",
    "seed = 1 / 0": "c.py:1: `seed = 1 / 0`: division by zero",
    "n_layr = 3": "c.py:1: unknown key n_layr (did you mean n_layer?)",
    "norm = 'x'": "c.py:1: norm cannot be 'x': it takes rmsnorm | none",
}


@pytest.mark.parametrize("text", BASES)
def test_what_is_wrong_with_a_base_is_said_with_its_place(config, capsys, text):
    config("base = 'c.py'", "a.py")
    config("", "b.py")
    config(text)
    assert refused(capsys, "a.py") == BASES[text]


# ------------------------------------------------------------------------------------ refused files

# a line that sets a key to what it does not take: the value, and what the key takes
NOT_OF_KEYS = {
    "n_layer = '3'": ("'3'", "int"),
    "n_layer = True": ("True", "int"),
    "bias = 1": ("1", "True | False"),
    "norm = None": ("None", "rmsnorm | none"),
    "level = True": ("True", "1 | 2"),
    "out_dir = 3": ("3", "str"),
}
REASONS = {  # a line: why it is refused
    "seed = 1; seed = 1": "seed is already set at c.py:3: keep one",
    "out_dir = out": "out is not assigned above (a string needs quotes)",
    "seed = 1 / 0": "division by zero",
    "seed = 10 ** 300 * 10 ** 300": "the number is out of range",
    "_x = 1e999 - 1e999": "the number is out of range",
    "seed = -True": "arithmetic is for numbers only",
    "out_dir = 'a' * 3": "arithmetic is for numbers only",
}
STATEMENTS = "import os | seed += 1 | seed: int = 1 | seed = n_head = 1 | seed, n_head = 1, 2"
STATEMENTS += " | Model.seed = 1 | 'a second docstring' | if True: seed = 1 | def f(): pass"
EXPRESSIONS = (
    "int('1') | (1).real | [1] | [1][0] | 1 if True else 2 | (x := 1) | lambda: 1 | 1 < 2 | 1 << 2"
)
EXPRESSIONS += " | ~1 | True and True | f'{1}' | b'x' | 1j"
NO_DATA = [
    *STATEMENTS.split(" | "),
    *(f"seed = {expression}" for expression in EXPRESSIONS.split(" | ")),
]
REFUSED_LINES = {"seed = (": "'(' was never closed", "seed 3": "invalid syntax"}
for line, (value, kinds) in NOT_OF_KEYS.items():
    REFUSED_LINES[line] = f"{line.split()[0]} cannot be {value}: it takes {kinds}"
REFUSED_LINES |= {line: f"`{line}`: {reason}" for line, reason in REASONS.items()}
REFUSED_LINES |= {line: f"`{line}`: not allowed; {ALLOWED}" for line in NO_DATA}
# the words are Python's, or the value is complex
REFUSED_LINES |= dict.fromkeys(
    ["dropout = (-8) ** 0.5", "seed = 9 ** 9 ** 9", "seed = 0x" + "f" * 5000]
)


@pytest.mark.parametrize("line", REFUSED_LINES, ids=lambda line: line[:40])
def test_refused_files(capsys, config, line):
    """Every refusal names file and line, in readable words, whatever the file holds."""
    text = refused(capsys, config(f'"""Docstring."""\n\n{line}\n'))
    assert text.startswith("c.py:3: ") and len("c.py:3: ") < len(text) < 300
    assert "34" not in text  # an error's number
    assert REFUSED_LINES[line] in (None, text.removeprefix("c.py:3: "))


def test_all_unknown_names_and_lines_that_are_no_data_are_listed_at_once(config, capsys):
    """In the order of files and lines. An unknown name needs no value that is data."""
    text = "import os\n_help = os.sep\nsystem = os.name\nseed = _help\nsead = 1\nnorm = 'x'"
    message = f"""6 changes are needed:
  c.py:1: `import os`: not allowed; {ALLOWED}
  c.py:2: `_help = os.sep`: not allowed; {ALLOWED}
  c.py:3: unknown key system ({ADVICE["system"]})
  c.py:5: unknown key sead (did you mean seed?)
  unknown flag --sea d (did you mean --seed?)
  unknown flag --zzz (--help lists them all)"""
    argv = ("--sea\nd", config(text), "--seed=2", "--zzz")
    assert refused(capsys, *argv, lines=7) == message
    many = config("".join(f"key_{i} = 1\n" for i in range(45)))
    assert refused(capsys, many, lines=42).endswith(
        "c.py:40: unknown key key_39 (--help lists them all)\n  and 5 more"
    )


def test_of_a_flag_that_is_given_twice_the_last_value_is_taken(config, capsys, monkeypatch):
    """One of several processes says so."""
    argv = "--bias=False", "--seed=1", config("seed = 4"), "--bias", "--seed=3"
    values, _ = load(*argv)
    assert (values["seed"], values["bias"]) == (3, True)
    notes = "note: --bias is given twice: 'False', then 'True', which is taken\n"
    notes += "note: --seed is given twice: '1', then '3', which is taken\n"
    assert capsys.readouterr() == ("", notes)
    monkeypatch.setenv("RANK", "1")
    load(*argv)
    assert capsys.readouterr() == ("", "")


UNREADABLE = {
    "latin-1": "n_layer = 3 # é".encode("latin-1"),
    "long": b"# " + b"x" * 100_000 + b"\nn_layer = 3",
    "minuses": b"n_layer = " + b"-" * 90_000 + b"1",
    "sum": b"n_layer = 1" + b" + 1" * 1500,
    "brackets": b"n_layer = " + b"(" * 50_000,
    "nul": b"n_layer = 3\0",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_unreadable_files(capsys, config, kind):
    """What gives up first depends on the version of Python."""
    line = refused(capsys, config(UNREADABLE[kind]))
    assert line.startswith("c.py:1: ") and len(line) < 300


# ----------------------------------------------------------------------------- nothing is executed

CODE = [  # run as a program, each makes the file X
    "open('X', 'w')",
    "seed = __import__('os').system('touch X')",
    "import os; os.mkdir('X')",
    "out_dir = 'a' + f\"{open('X', 'w')}\"",
    "@open('X', 'w').write\ndef f(): pass",
    "seed: open('X', 'w') = 1",
]


@pytest.mark.parametrize("line", CODE)
def test_code_is_not_run(capsys, config, line):
    with suppress(Exception):
        exec(compile(line, "control", "exec", dont_inherit=True), {})
    # it was made, so what follows can fail
    Path("X").rmdir() if Path("X").is_dir() else Path("X").unlink()
    assert ALLOWED in refused(capsys, config(line))
    assert os.listdir() == ["c.py"]


SCHEMA_FLAGS = read_flags(Model, Train)
WORDS = [
    *SCHEMA_FLAGS,
    "_a",
    "base",
    " = ",
    " = ",
    "\n",
    "\n",
    "0",
    "9",
    "1e308",
    "0.5",
    "None",
    "True",
    "'x'",
    "b''",
]
WORDS += [
    "+",
    "-",
    "*",
    "/",
    "//",
    "**",
    "%",
    "(",
    ")",
    "--",
    "=",
    "f'{1}'",
    "abs",
    "lambda: 0",
    "\ud800",
    *CODE,
]
SENTENCES = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=3)), max_size=12).map(
    "".join
)
KINDS = {
    "n_layer": int,
    "n_head": int,
    "dropout": float,
    "bias": bool,
    "norm": str,
    "seed": int,
    "out_dir": str,
}
KINDS |= {
    "learning_rate": (float, type(None)),
    "start": str,
    "note": (str, type(None)),
    "compile": (str, bool),
}
KINDS |= {
    "to": str,
    "lr_decay_iters": (int, type(None)),
    "level": int,
    "either": (str, float, type(None)),
}


def check_outcome(argv):
    """Either a ConfigError with a message, or values that their flags' types allow, stored as
    exactly those."""
    try:
        loaded = read_arguments(argv, SCHEMA_FLAGS)
    except ConfigError as error:
        assert str(error)
        return
    for name, (value, where) in loaded.items():
        assert isinstance(value, KINDS[name]) and isinstance(value, bool) <= (
            name in ("bias", "compile")
        )
        assert not isinstance(value, float) or abs(value) < float("inf")
        assert where == "command line" or where.rpartition(":")[2].isdigit()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "c.py"


@settings(max_examples=examples(fast=60, deep=2000), deadline=None, database=None)
@given(text=SENTENCES, argv=st.lists(SENTENCES, max_size=3))
@example(text="seed = 9**9**9", argv=["\0"])
@example(text="out_dir = '\\ud800'", argv=["--seed=" + "9" * 5000])
def test_any_file_and_any_command_line_load_or_are_refused(scratch, text, argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scratch.parent)
        scratch.write_bytes(text.encode("utf-8", "replace"))
        check_outcome([str(scratch)])
        check_outcome(argv)
        assert os.listdir() == ["c.py"]


# ------------------------------------------------------------------------------ paths and texts


@pytest.mark.parametrize(
    "text, path", [("~/x", "/home/me/x"), ("./~x", "./~x"), ("out/~", "out/~"), ("", "")]
)
def test_a_home_folder_is_expanded_where_a_path_begins_with_it(text, path, config, monkeypatch):
    """On the command line, in a config file, and among what is not read but listed; not in a
    text."""
    monkeypatch.setenv("HOME", "/home/me")
    values, _ = load(f"--to={text}", f"--start={text}")
    assert (values["to"], values["start"]) == (path, text)
    assert load(config(f"to = {text!r}"))[0]["to"] == path
    assert configure(Model, argv=[text], positional="run")[1]["run"] == ([path], "command line")


def test_a_home_folder_that_is_not_there(config, capsys):
    """A shell would make a folder that is called ~no body."""
    reason = "'~no body/x': there is no user 'no body': write the whole path, "
    reason += "or ./~no body/x for a folder of that name"
    assert refused(capsys, "--to=~no body/x") == f"command line: --to cannot be {reason}"
    assert refused(capsys, "~no body/x") == reason


def test_a_text_that_is_not_utf8_is_refused(config, capsys):
    """A path may be any bytes."""
    assert (
        refused(capsys, "--start=\udcff")
        == "command line: --start cannot be '\\udcff': it is not UTF-8 text"
    )
    assert load("--to=a\udcff")[0]["to"] == "a\udcff"


# ------------------------------------------------------------------- schemas and other arguments


def test_positionals_of_a_tool():
    (model,), where = configure(Model, argv=["out/b", "--n_layer=3", "out/a"], positional="run")
    assert model.n_layer == 3
    assert where == {"run": (["out/b", "out/a"], "command line"), "n_layer": (3, "command line")}


@dataclass
class Lists:
    sizes: list[int] = field(default_factory=list)


@dataclass
class Wrong:
    norm: Literal["a", "b"] = "c"


@dataclass
class Based:
    base: str = ""


@pytest.mark.parametrize(
    "schemas, message",
    [
        ((Train, Train), "Train.learning_rate: another schema"),
        ((Based,), "Based.base: .* that of a file's base"),
        ((Lists,), r"a flag cannot be list\[int\]"),
        ((Wrong,), "default of Wrong.norm cannot be 'c': it takes a | b"),
    ],
)
def test_errors_of_the_programmer_are_raised(schemas, message):
    with pytest.raises(ValueError, match=message):
        configure(*schemas, argv=[])


# ------------------------------------------------------------------------- help and description


def test_comments_and_sections():
    flags = read_flags(Model, Train)
    assert list(flags) == [*vars(Model()), *vars(Train())]
    sections = ["size"] * 2 + ["parts"] * 3 + ["optimizer"] * 3 + ["output"] * 7
    assert [flag.section for flag in flags.values()] == sections
    continued = (
        'peak LR; None = the optimizer\'s default and this line continues it; a "#" stays: C#'
    )
    assert flags["learning_rate"].help == continued
    assert flags["seed"].help == "of everything"
    assert flags["out_dir"].help == "run directory # with a second hash"
    assert flags["norm"].help == "function in a norm slot"  # without the method's comments below it


PROGRAM = '''"""Train it.

More about it."""
from dataclasses import dataclass
from typing import Literal
from configurator import configure, describe

@dataclass
class Config:
    # --- first section ------
    n_layer: int = 12 # blocks
    learning_rate: float | None = None  # peak LR; None = the default of the optimizer, which is
                                        # something else for each of them and therefore takes
                                        # surprisingly well-considered words
    # --- second section ---
    compile: Literal["auto", True, False] = "auto"  # torch.compile the model
    a_knob_with_quite_a_long_name: str = "out/and_a_long_value"  # where

(config,), given = configure(Config, description=__doc__)
config.learning_rate = 0.1
print(describe(config, given=given))
'''
HELP = """\
usage: program.py [config ...] [--key=value ...], or --version

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
small.py: compile=True
command line: n_layer=12
chosen: learning_rate=0.1
"""


def test_help_of_a_package_names_the_package(config):
    Path("package").mkdir()
    config(PROGRAM, "package/__main__.py")
    command = [sys.executable, "-m", "package", "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == HELP.replace("program.py", "python -m package")


def test_as_a_program(config):
    config(PROGRAM, "program.py")
    config("compile = True\na_knob_with_quite_a_long_name = 'out/and_a_long_value'\n", "small.py")

    def run(*argv):
        command = [sys.executable, "program.py", *argv]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert run("missing.py", "-h", "--n_layr=1") == (0, HELP, "")
    assert run("--n_layr=1", "--version") == (
        0,
        f"nanoDNT {VERSION}, torch {torch.__version__}\n",
        "",
    )
    assert run("small.py", "--n_layer=12") == (0, DESCRIPTION, "")
    assert run("--n_layr=1") == (2, "", "error: unknown flag --n_layr (did you mean --n_layer?)\n")


def test_a_stdout_that_the_shell_has_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    prepare_streams()
    print("discarded")
    assert flush_output() == 0
    sys.stdout.close()


def test_help_that_nobody_reads():
    """As in `--help | true`, after `true` has ended: the exit code that shells report for SIGPIPE,
    no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        argv = [sys.executable, "-m", "nanodnt.plan", "--help"]
        done = subprocess.run(argv, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")
