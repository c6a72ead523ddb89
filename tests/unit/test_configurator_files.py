"""configurator.py: which config files it accepts, which it refuses and in which words, and that it never runs one."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configurator import RENAMED, ConfigError, read_arguments, read_flags
from support.depth import examples
from support.schemas import NOT_DATA, Model, Train, load, refused, write_config


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file into the working directory, which is empty; returns its name."""
    monkeypatch.chdir(tmp_path)
    return write_config


# ---------------------------------------------------------------------------------------------------- accepted files


VALUES = {  # a line of a file: the value that it sets
    "n_layer = 3": 3,
    "n_layer = 4.0": 4,
    "n_layer = 1e2": 100,
    "n_layer = 7 // 2 + 2 ** 3 % 5 - 1": 5,
    "n_layer = -(-3) * 2": 6,
    "n_layer = (\n  1 +\n  2)": 3,
    "n_layer = 0x10": 16,
    "dropout = 1": 1.0,
    "dropout = 3 / 4": 0.75,
    "dropout = 2 ** -1": 0.5,
    "learning_rate = None": None,
    "bias = True": True,
    "norm = 'none'": "none",
    "compile = False": False,
    "compile = 'auto'": "auto",
    "either = 'none'": "none",
    "either = None": None,
    "note = 'none'": "none",
    "out_dir = 'out/' 'x'": "out/x",
    "out_dir = ''": "",
    "start = '''two\nlines'''": "two\nlines",
}


@pytest.mark.parametrize("line", VALUES)
def test_file_values(config, line):
    name, expected = line.partition(" ")[0], VALUES[line]
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


CANNOT_BE = {  # a line that sets a key to what it does not take: the value, and what the key takes
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
    "bias = true": "true is not assigned above (a string needs quotes)",
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
REFUSED = {
    "n_layr = 3": "unknown key n_layr (did you mean n_layer?)",
    "seed = (": "'(' was never closed",
    "seed 3": "invalid syntax",
    **{line: f"{line.split()[0]} cannot be {value}: it takes {kinds}" for line, (value, kinds) in CANNOT_BE.items()},
    **{line: f"`{line}`: {reason}" for line, reason in REASONS.items()},
    **{line: f"`{line}`: {NOT_DATA}" for line in NO_DATA},
    # the words are Python's, or the value is complex
    **dict.fromkeys(["dropout = (-8) ** 0.5", "seed = 1 % 0", "seed = 0 ** -1", "seed = 2.0 ** 9999"]),
    **dict.fromkeys(["seed = 9 ** 9 ** 9", "seed = -9 ** 9 ** 9", "seed = 0x" + "f" * 5000]),
}


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:40])
def test_refused_files(capsys, config, line):
    """Every refusal names file and line, in readable words, whatever the file holds."""
    text = refused(capsys, config(f'"""Docstring."""\n\n{line}\n'))
    assert text.startswith("c.py:3: ") and len("c.py:3: ") < len(text) < 300
    assert "34" not in text  # an error's number
    assert REFUSED[line] in (None, text.removeprefix("c.py:3: "))


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
    types |= {"lr_decay_iters": (int, type(None)), "level": int, "either": (str, float, type(None))}
    for name, (value, where) in loaded.items():
        assert isinstance(value, types[name]) and (value is True or value is False) <= (name in ("bias", "compile"))
        assert not isinstance(value, float) or abs(value) < float("inf")
        assert where == "command line" or where.rpartition(":")[2].isdigit()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "c.py"


@settings(max_examples=examples(fast=60, deep=2000), deadline=None, database=None)
@given(text=st.one_of(TEXTS, PROGRAMS, PROGRAMS))
@example(text=b"seed = 9**9**9")
@example(text=b"n_layer = 3\nlearning_rate = n_layer / 4")
@example(text=b"out_dir = '\\ud800'")
def test_any_file_loads_or_is_refused(scratch, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scratch.parent)
        scratch.write_bytes(text)
        check_outcome([str(scratch)])
        assert os.listdir() == ["c.py"]


@settings(max_examples=examples(fast=60, deep=2000), deadline=None, database=None)
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
