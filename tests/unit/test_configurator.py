"""configurator.py: which flags and files it accepts, which it refuses and in which words; that it runs no file; --help
and the description of a run."""

import ast
import importlib
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configurator import RENAMED, VERSION, ConfigError, configure, describe, read_arguments, read_flags
from model import GPTConfig
from support.depth import examples
from support.runs import ROOT
from support.schemas import NOT_DATA, Model, Train, load, refused, undocumented, write_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file into the working directory, which is empty; returns its name."""
    monkeypatch.chdir(tmp_path)
    return write_config


# ---------------------------------------------------------------------------------------------------- accepted values


VALUES = {  # what is written after --KEY= and what it means
    "n_layer": {"3": 3, "-3": -3, "1e2": 100, "4.0": 4, "1": 1},
    "seed": {"9007199254740993": 2**53 + 1, "9223372036854775807": 2**63 - 1},  # no detour through float
    "dropout": {"1": 1.0, ".5": 0.5},
    "learning_rate": {"6e-4": 6e-4, "0": 0.0, "None": None, "none": None},
    "lr_decay_iters": {"5e3": 5000, "None": None},
    "bias": {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False},
    "norm": {"none": "none", "rmsnorm": "rmsnorm"},
    "compile": {"auto": "auto", "1": True, "false": False},
    "level": {"2": 2},
    "either": {"none": "none", "None": None, "2": 2.0},
    "out_dir": {text: text for text in ("a b=c/'d'", "1", "none", "True")},
    "start": {"": "", "--help me": "--help me"},
    "note": {"": "", "none": None, "1": "1"},
}


@pytest.mark.parametrize("name, text", [(name, text) for name, values in VALUES.items() for text in values])
def test_flag_values(name, text):
    (values, where), expected = load(f"--{name}={text}"), VALUES[name][text]
    assert values[name] == expected and type(values[name]) is type(expected)
    assert where == {name: (expected, "command line")}


def test_a_bool_flag_alone_means_true():
    assert load("--bias")[0]["bias"] is True
    (model,), _ = configure(GPTConfig, argv=["--dyt_bias"])  # bool | None
    assert model.dyt_bias is True and GPTConfig().dyt_bias is None


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


# ----------------------------------------------------------------------------------------------------------- refusals


CANNOT_BE = {  # (key, what it takes): values that it refuses
    ("n_layer", "int"): ["abc", "1.5", "", "True", "None", "2**3", "inf", "1e19", "\r\u2028"],
    ("seed", "int"): ["9223372036854775808"],
    ("dropout", "float"): ["nan", "-inf", "1e999", "9" * 309, "", "false"],
    ("learning_rate", "float | None"): ["fast", ""],
    ("bias", "True | False"): ["no", "TRUE", "1.0", ""],
    ("norm", "rmsnorm | none"): ["RMSNorm", "None"],
    ("compile", "auto | True | False"): ["maybe"],
    ("level", "1 | 2"): ["3"],
}
REFUSED = {  # a command line: its message
    "--n_layr=3": "unknown flag --n_layr (did you mean --n_layer?)",
    "--n-layer=3": "unknown flag --n-layer (did you mean --n_layer?)",
    "--zzz=3": "unknown flag --zzz (--help lists them all)",
    "--": "unknown flag -- (--help lists them all)",
    "--size=3": "unknown flag --size (--help lists them all)",
    "--decay_lr=False": "unknown flag --decay_lr (set schedule=constant)",
    "--n_layer 3": "--n_layer has no value: write --n_layer=VALUE (int)",
    "--compile": "--compile has no value: write --compile=VALUE (auto | True | False)",
    "-n_layer=3": "-n_layer=3: write --n_layer=3",
    "---n_layer=3": "---n_layer=3: write --n_layer=3",
    "n_layer=3": "n_layer=3: write --n_layer=3",
    "-v": "-v: write --v=VALUE",
    "--seed=1 --seed=1": "--seed is given twice, as '1' and '1': keep one",
    "missing.py": "cannot read config file 'missing.py': No such file or directory",
    "": "cannot read config file '': No such file or directory",
    ".": "cannot read config file '.': Is a directory",
    "--no\nsuch=1": "unknown flag --no such (--help lists them all)",  # one line, whatever was typed
    "--n\x1b[31m=1": "unknown flag --n [31m (--help lists them all)",
} | {
    f"--{name}={value}": f"command line: --{name} cannot be {value!r}: it takes {kinds}"
    for (name, kinds), values in CANNOT_BE.items()
    for value in values
}


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:40])
def test_refused_command_lines(capsys, config, line):
    assert refused(capsys, *line.split(" ")) == REFUSED[line]


@pytest.mark.parametrize("name", RENAMED)
def test_names_of_nanogpt(capsys, config, name):
    """Each says what to do instead, on the command line and in a file; a schema that has the name simply has it."""
    assert refused(capsys, f"--{name}=1") == f"unknown flag --{name} ({RENAMED[name]})"
    assert refused(capsys, config(f"\n{name} = 1")) == f"c.py:2: unknown key {name} ({RENAMED[name]})"
    schema = dataclass(type("Own", (), {"__annotations__": {name: "int"}, name: 0, "__module__": __name__}))
    assert configure(schema, argv=[f"--{name}=1"])[1] == {name: (1, "command line")}


def test_value_error_of_a_dataclass(capsys):
    """Contradictory flags, found by the dataclass itself, are refused in the same way."""

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


# ---------------------------------------------------------------------------------------------------- accepted files


FILE_VALUES = {  # a line of a file: the value that it sets
    "n_layer = 3": 3,
    "n_layer = 1e2": 100,
    "n_layer = 7 // 2 + 2 ** 3 % 5 - 1": 5,
    "n_layer = -(-3) * 2": 6,
    "n_layer = (\n  1 +\n  2)": 3,
    "dropout = 1": 1.0,
    "dropout = 3 / 4": 0.75,
    "dropout = 2 ** -1": 0.5,
    "learning_rate = None": None,
    "bias = True": True,
    "norm = 'none'": "none",
    "compile = False": False,
    "either = 'none'": "none",
    "either = None": None,
    "note = 'none'": "none",
    "out_dir = 'out/' 'x'": "out/x",
    "out_dir = ''": "",
    "start = '''two\nlines'''": "two\nlines",
}


@pytest.mark.parametrize("line", FILE_VALUES)
def test_file_values(config, line):
    name, expected = line.partition(" ")[0], FILE_VALUES[line]
    values, where = load(config(f'"""A docstring."""\n# a comment\n\n{line}\n'))
    assert values[name] == expected and type(values[name]) is type(expected)
    assert where == {name: (expected, "c.py:4")}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", '"""Only a docstring."""', "_helper = 3\n"])
def test_file_that_sets_nothing(config, text):
    values, where = load(config(text))
    assert where == {} and values == load()[0]


def test_names_of_a_file(capsys, config):
    """Helpers are no keys, keys can be used further down, and no other file sees either; a message names its file."""
    values, where = load(config("_d = 3\nn_layer = _d * 4 \nn_head = n_layer / 2\n"))
    assert (values["n_layer"], values["n_head"]) == (12, 6)
    assert where == {"n_layer": (12, "c.py:2"), "n_head": (6, "c.py:3")}
    message = "second.py:2: `n_head = _d`: _d is not assigned above (a string needs quotes)"
    second = config("# one\nn_head = _d", "second.py")
    assert refused(capsys, "c.py", second) == refused(capsys, second, "c.py", "--n_head=3") == message


@pytest.mark.parametrize("text", [b"\xef\xbb\xbfn_layer = 3\n", b"# \xce\xb3\r\nn_layer = 3\r\n", b"\rn_layer = 3"])
def test_file_encodings(config, text):
    assert load(config(text))[0]["n_layer"] == 3


# -------------------------------------------------------------------------------------------------- refused files


NOT_OF_KEYS = {  # a line that sets a key to what it does not take: the value, and what the key takes
    "n_layer = 3.5": ("3.5", "int"),
    "n_layer = '3'": ("'3'", "int"),
    "n_layer = True": ("True", "int"),
    "n_layer = 2**63": ("9223372036854775808", "int"),
    "dropout = False": ("False", "float"),
    "bias = 1": ("1", "True | False"),
    "bias = 'True'": ("'True'", "True | False"),
    "norm = 'x'": ("'x'", "rmsnorm | none"),
    "norm = None": ("None", "rmsnorm | none"),
    "level = True": ("True", "1 | 2"),
    "compile = 1": ("1", "auto | True | False"),
    "compile = 'True'": ("'True'", "auto | True | False"),
    "out_dir = 3": ("3", "str"),
    "out_dir = None": ("None", "str"),
}
REASONS = {  # a line: why it is refused
    "seed = 1; seed = 1": "seed is already set at c.py:3",
    "_a = 1; _a = 2": "_a is already set at c.py:3",
    "out_dir = out": "out is not assigned above (a string needs quotes)",
    "seed = seed": "seed is not assigned above (a string needs quotes)",
    "seed = __name__": "__name__ is not assigned above (a string needs quotes)",
    "seed = 1 / 0": "division by zero",
    "seed = 10 ** 300 * 10 ** 300": "the number is out of range",
    "seed = 1e300 * 1e300": "the number is out of range",
    "dropout = 1e999": "the number is out of range",
    "_x = 1e999 - 1e999": "the number is out of range",
    "seed = True + 1": "arithmetic is for numbers only",
    "seed = -True": "arithmetic is for numbers only",
    "out_dir = 'a' * 3": "arithmetic is for numbers only",
    "out_dir = 'a' + 'b'": "arithmetic is for numbers only",
    "out_dir = '%9999999999d' % 1": "arithmetic is for numbers only",
}
STATEMENTS = "import os | from os import path | seed += 1 | seed: int = 1 | seed = n_head = 1 | seed, n_head = 1, 2"
STATEMENTS += " | Model.seed = 1 | del seed | 'a second docstring' | 3 | for i in 1, 2: seed = i | if True: seed = 1"
STATEMENTS += " | def f(): pass | class C: pass | pass | print('x')"
EXPRESSIONS = "int('1') | (1).real | [1] | [1][0] | 1, 2 | 1 if True else 2 | (x := 1) | lambda: 1 | 1 < 2 | 1 << 2"
EXPRESSIONS += " | +1 | ~1 | not True | True and True | f'{1}' | b'x' | 1j | ..."
NO_DATA = [*STATEMENTS.split(" | "), *(f"seed = {expression}" for expression in EXPRESSIONS.split(" | "))]
REFUSED_LINES = {
    "n_layr = 3": "unknown key n_layr (did you mean n_layer?)",
    "seed = (": "'(' was never closed",
    "seed 3": "invalid syntax",
    **{line: f"{line.split()[0]} cannot be {value}: it takes {kinds}" for line, (value, kinds) in NOT_OF_KEYS.items()},
    **{line: f"`{line}`: {reason}" for line, reason in REASONS.items()},
    **{line: f"`{line}`: {NOT_DATA}" for line in NO_DATA},
    # the words are Python's, or the value is complex
    **dict.fromkeys(["dropout = (-8) ** 0.5", "seed = 1 % 0", "seed = 0 ** -1", "seed = 2.0 ** 9999"]),
    **dict.fromkeys(["seed = 9 ** 9 ** 9", "seed = -9 ** 9 ** 9", "seed = 0x" + "f" * 5000]),
}


NANOGPT = """\
import time
out_dir = 'out-shakespeare'
eval_iters = 40
wandb_run_name = 'ft-' + str(time.time())
sead = 1
seed = 3
half = len('ab')
n_layer = half * 2
decay_lr = False
"""


def test_all_that_is_unknown_is_named_at_once(config, capsys):
    """A config of nanoGPT: what depends on a line that is wrong is not a mistake of its own."""
    words = "unknown flag --backend (chosen from device)|unknown flag --n_layr (did you mean --n_layer?)|"
    words += "c.py:1: `import time`: not allowed|c.py:4: `wandb_run_name = 'ft-' + str(time.time())`: not allowed|"
    words += "c.py:7: `half = len('ab')`: not allowed|"
    words += f"c.py:3: unknown key eval_iters ({RENAMED['eval_iters']})|"
    words += f"c.py:4: unknown key wandb_run_name ({RENAMED['wandb_run_name']})|"
    words += "c.py:5: unknown key sead (did you mean seed?)|c.py:7: unknown key half (--help lists them all)|"
    words += f"c.py:9: unknown key decay_lr ({RENAMED['decay_lr']}); a config file holds only "
    found = refused(capsys, config(NANOGPT), "--backend=nccl", "--n_layr=2")
    assert found.startswith(words.replace("|", "; ")) and found.endswith(NOT_DATA.partition("; ")[2])
    found = refused(capsys, config("".join(f"key_{i} = 1\n" for i in range(15))))
    assert found.endswith("c.py:10: unknown key key_9 (--help lists them all); and 5 more")


@pytest.mark.parametrize("line", REFUSED_LINES, ids=lambda line: line[:40])
def test_refused_files(capsys, config, line):
    """Every refusal names file and line, in readable words, whatever the file holds."""
    text = refused(capsys, config(f'"""Docstring."""\n\n{line}\n'))
    assert text.startswith("c.py:3: ") and len("c.py:3: ") < len(text) < 300
    assert "34" not in text  # an error's number
    assert REFUSED_LINES[line] in (None, text.removeprefix("c.py:3: "))


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
    line = refused(capsys, config(text))
    assert line.startswith("c.py:1: ") and len(line) < 300
    assert message is None or line == message


# ------------------------------------------------------------------------------------------------ nothing is executed


CODE = [  # run as a program, each makes the file X
    "open('X', 'w')",
    "seed = __import__('os').system('touch X')",
    "import os; os.mkdir('X')",
    "seed = (lambda: open('X', 'w'))()",
    "(seed := open('X', 'w'))",
    "out_dir = 'a' + f\"{open('X', 'w')}\"",
    "with open('X', 'w'): pass",
    "@open('X', 'w').write\ndef f(): pass",
    "class C(open('X', 'w').__class__): pass",
    "seed: open('X', 'w') = 1",
]


@pytest.mark.parametrize("line", CODE)
def test_code_is_not_run(capsys, config, line):
    with suppress(Exception):
        exec(compile(line, "control", "exec", dont_inherit=True), {})
    Path("X").rmdir() if Path("X").is_dir() else Path("X").unlink()  # it was made, so what follows can fail
    assert refused(capsys, config(line)).endswith(NOT_DATA)
    assert os.listdir() == ["c.py"]


SCHEMA_FLAGS = read_flags(Model, Train)
NAMES = st.sampled_from([*SCHEMA_FLAGS, "_a", "_b", "unknown", *RENAMED])
NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, 1, -1, 2, 9, 10**300, 0.5])).map(repr)
ATOMS = st.one_of(NUMBERS, NAMES, st.sampled_from(["True", "None", "'none'", "'x'", "b''", "...", "f'{1}'", "1j"]))
BINARY = st.sampled_from(["+", "-", "*", "/", "//", "%", "**", "<<", "@", " and ", " if "])
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, BINARY, inner).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        inner.map(lambda e: f"-{e}"),
        inner.map(lambda e: f"[{e}]"),
        inner.map(lambda e: f"abs({e})"),
    ),
    max_leaves=6,
)
LINES = st.tuples(NAMES, st.sampled_from([" = ", "=", " += ", ": int = "]), TREES).map("".join)
TEXTS = st.one_of(st.binary(), st.text().map(lambda t: t.encode("utf-8", "surrogatepass")))
PROGRAMS = st.lists(st.one_of(LINES, LINES, st.sampled_from(CODE), st.text()), max_size=4)
PROGRAMS = PROGRAMS.map(lambda lines: "\n".join(lines).encode("utf-8", "replace"))


def check_outcome(argv):
    """Either a ConfigError with a message, or values that their flags' types allow, stored as exactly those."""
    try:
        loaded = read_arguments(argv, SCHEMA_FLAGS)
    except ConfigError as error:
        assert str(error)
        return
    types = {"n_layer": int, "n_head": int, "dropout": float, "bias": bool, "norm": str, "seed": int, "out_dir": str}
    types |= {"learning_rate": (float, type(None)), "start": str, "note": (str, type(None)), "compile": (str, bool)}
    types |= {"to": str, "lr_decay_iters": (int, type(None)), "level": int, "either": (str, float, type(None))}
    for name, (value, where) in loaded.items():
        assert isinstance(value, types[name]) and (value is True or value is False) <= (name in ("bias", "compile"))
        assert not isinstance(value, float) or abs(value) < float("inf")
        assert where == "command line" or where.rpartition(":")[2].isdigit()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "c.py"


ARGUMENTS = st.one_of(
    st.text().map(lambda t: "-" + t),
    st.tuples(st.sampled_from(["--", "-", ""]), NAMES, st.sampled_from(["=", ""]), st.text()).map("".join),
    st.tuples(st.just("--"), NAMES, st.just("="), ATOMS).map("".join),
)


@settings(max_examples=examples(fast=60, deep=2000), deadline=None, database=None)
@given(text=st.one_of(TEXTS, PROGRAMS, PROGRAMS), argv=st.lists(ARGUMENTS, max_size=3))
@example(text=b"seed = 9**9**9", argv=["\0"])
@example(text=b"n_layer = 3\nlearning_rate = n_layer / 4", argv=["--seed=" + "9" * 5000])
@example(text=b"out_dir = '\\ud800'", argv=["--dropout=" + "9" * 400])
def test_any_file_and_any_command_line_load_or_are_refused(scratch, text, argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scratch.parent)
        scratch.write_bytes(text)
        check_outcome([str(scratch)])
        check_outcome(argv)
        assert os.listdir() == ["c.py"]


# ---------------------------------------------------------------------------------------- schemas and other arguments


def test_positionals_of_a_tool():
    (model,), where = configure(Model, argv=["out/b", "--n_layer=3", "out/a"], positional="run")
    assert model.n_layer == 3
    assert where == {"run": (["out/b", "out/a"], "command line"), "n_layer": (3, "command line")}
    assert describe(model, given=where).endswith("\ncommand line sets n_layer")
    assert configure(Model, argv=[], positional="run")[1] == {"run": ([], "command line")}


def schema(name, *field_of_it):
    """A dataclass of one field: (name, type, default)."""
    return make_dataclass(name, [field_of_it])


@pytest.mark.parametrize(
    "schemas, message",
    [
        ((Train, schema("Clash", "seed", int, 0)), "Clash.seed: another schema"),
        ((Train, Train), "Train.learning_rate: another schema"),
        ((schema("ListField", "sizes", list[int], field(default_factory=list)),), r"a flag cannot be list\[int\]"),
        ((schema("Required", "path", str),), "default of Required.path"),
        ((schema("Wrong", "rate", float, None),), "default of Wrong.rate cannot be None: it takes float"),
        ((schema("Wrong", "norm", Literal["a", "b"], "c"),), "default of Wrong.norm cannot be 'c': it takes a | b"),
    ],
)
def test_errors_of_the_programmer_are_raised(schemas, message):
    with pytest.raises(ValueError, match=message):
        configure(*schemas, argv=[])


# ------------------------------------------------------------------------------------------------- help and description


def test_comments_and_sections():
    flags = read_flags(Model, Train)
    assert list(flags) == [*vars(Model()), *vars(Train())]
    sections = ["size"] * 2 + ["parts"] * 3 + ["optimizer"] * 3 + ["output"] * 7
    assert [flag.section for flag in flags.values()] == sections
    continued = 'peak LR; None = the optimizer\'s default and this line continues it; a "#" stays: C#'
    assert flags["learning_rate"].help == continued
    assert flags["seed"].help == "of everything"
    assert flags["out_dir"].help == "run directory # with a second hash"
    assert flags["norm"].help == "function in a norm slot"  # without the method's comments below it


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
    flags = read_flags(Bare)
    assert {flag.section for flag in flags.values()} == {"Bare"}
    assert flags["long"].help == "in brackets and after them" and flags["dedented"].help == "first second third"


def test_schema_without_source(capsys):
    """Typed at a prompt, say: everything works but the comments."""
    space = {"__name__": __name__, "dataclass": dataclass}
    exec("@dataclass\nclass Typed:\n    n: int = 1  # comment", space)
    assert configure(space["Typed"], argv=["--n=2"])[0][0].n == 2
    assert undocumented(space["Typed"]) == ["n"] and "* n 2" in describe(space["Typed"](2))
    with pytest.raises(SystemExit):
        configure(space["Typed"], argv=["-h"])
    assert "--n=1" in capsys.readouterr().out


@pytest.mark.house
def test_every_flag_of_every_program_is_documented():
    """Finds the schemas by reading the programs that are there: every dataclass whose name ends in Config."""
    schemas = []
    folders = ("", "nanodnt/**/", "interop/**/", "studies/**/")
    for path in (path for folder in folders for path in ROOT.glob(f"{folder}*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.decorator_list:
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                schemas.append(getattr(importlib.import_module(module), node.name))
    names = {schema.__name__ for schema in schemas}
    assert names >= {f"{name}Config" for name in ("GPT", "Train", "Sample", "Bench", "Plan")}
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
first section
* n_layer                       100       learning_rate                 None
second section
* compile                       True      a_knob_with_quite_a_long_name out/and_a_long_value
(* = not the default)
small.py sets compile, a_knob_with_quite_a_long_name
command line sets n_layer
"""


ENV = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1"}
ENV.pop("PYTHONUNBUFFERED", None)


def test_as_a_program(config):
    config(PROGRAM, "program.py")
    config("compile = True\nn_layer = 3\na_knob_with_quite_a_long_name = 'out/and_a_long_value'\n", "small.py")

    def run(*argv):
        command = [sys.executable, "program.py", *argv]
        done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    assert run("missing.py", "-h", "--n_layr=1") == (0, HELP, "")
    about = f"nanoDNT {VERSION}, torch {torch.__version__}\n"
    assert run("--n_layr=1", "--version") == (0, about, "")
    assert run("small.py", "--n_layer=100") == (0, DESCRIPTION, "")
    assert run("--n_layr=1") == (2, "", "error: unknown flag --n_layr (did you mean --n_layer?)\n")


@pytest.mark.parametrize("why", ["", "and why " * 10_000], ids=["fits the buffer", "longer"])
def test_help_that_nobody_reads(config, why):
    """As in `--help | true`, after `true` has ended: the exit code that shells report for SIGPIPE, and no traceback,
    neither from print nor from the flush at exit."""
    config(PROGRAM.replace("# where", f"# where {why}"), "program.py")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as pipe:
        argv = [sys.executable, "program.py", "--help"]
        done = subprocess.run(argv, env=ENV, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


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


def test_a_closed_stream_gives_its_number_to_no_file(tmp_path):
    """`train.py >&- 2>&-`: what code in C prints would go into a checkpoint, or into the pipe of the signals."""
    code = "from configurator import prepare_streams as first; import sys; first(); f = open(sys.argv[1], 'w')"
    call = [sys.executable, "-c", f"{code}; f.write(str(f.fileno() > 2))", str(tmp_path / "written")]
    subprocess.run(["bash", "-c", f"exec {shlex.join(call)} <&- >&- 2>&-"], cwd=ROOT, check=True)
    assert (tmp_path / "written").read_text() == "True"
