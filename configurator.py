"""Reads config files and `--key=value` flags into dataclasses, and refuses what it does not know.

    python train.py config/dnt_small.py config/mine.py --learning_rate=1e-3

Files apply from left to right; a flag wins over every file, wherever it stands. A config file has
Python's syntax but is data: it is parsed, never executed. It holds lines `name = expression`; a
`_name` is a helper, not a key. The first line can be `base = "other.py"`, a path from the file's
own folder: that file's lines stand in its place, and the lines below can set the same names again.
A flag is a field of a dataclass: its annotation says what is allowed, the comment beside it is its
text in `--help`. For a bool, `--key` alone means `--key=True`. In a path a leading ~ is the home
folder, as in a shell.
"""

import ast
import difflib
import inspect
import operator
import os
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

VERSION = "1.0.0"  # also in pyproject.toml and CITATION.cff
ASKS = ("--help", "-h", "--version")  # what is answered instead of doing anything

# Flags that do not exist, of nanoGPT or of earlier versions, and what to do instead.
RENAMED = {
    "gradient_accumulation_steps": "derived: set batch_size, the sequences per optimizer step over all devices, "
    "and micro_batch_size, what one device holds at a time",
    "eval_iters": "set eval_tokens, the validation tokens read at each evaluation",
    "decay_lr": "set schedule=constant",
    "always_save_checkpoint": "last.pt is always saved",
    "backend": "chosen from device",
    "wandb_run_name": "the run is named after out_dir",
    "report": "analyze.py writes report.md where several runs are named",
    "smooth": "loss.png averages training losses over 5% of the run",
    "real_data": "data=random, or dataset",
    "chat": "python chat.py talks with a model; it has the flags of sample.py but a prompt's",
    "template": "a flag of python chat.py and of data/sft/prepare.py",
    "system": "a flag of python chat.py",
    "compile": "only train.py and bench.py compile: leave it out",
    "timeout_s": "only runs of train.py wait for other processes: leave it out",
    "prompt_key": "data/sft/prepare.py reads records with such keys: prepare them, then name the dataset",
    "response_key": "data/sft/prepare.py reads records with such keys: prepare them, then name the dataset",
}
ALLOWED = "a config file holds only name = expression of numbers, strings, True, False, None, "
ALLOWED += "names assigned above, + - * / // % **"
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
ARITHMETIC |= {
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
MAX_FILE_CHARS = 100_000  # of a config file
MAX_MISTAKES = 10  # that are named at once
MAX_NUMBER = {int: 2**63 - 1, float: sys.float_info.max}
WORDS = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
WORDS |= {"None": None, "none": None}  # what these mean on the command line


class ConfigError(ValueError):
    """A mistake in the user's input. The message says where it is, what is wrong and what to write
    instead."""


class PathName(str):
    """The annotation of a flag that names a file or folder: its value is what `read_path` gives."""


class Flag(NamedTuple):
    hint: Any  # the field's annotation
    default: Any
    section: str  # the title of the last `# --- title ---` line above it
    help: str  # the comment beside the field


def configure(
    *schemas: type, argv: list | None = None, description: str = "", positional: str = "config"
):
    """Read the command line into one instance of each dataclass in `schemas`; returns (instances,
    given).

    `given` holds what was set explicitly: name → (value, where), with where = "config/x.py:12" or
    "command line". Arguments without dashes are config files. With another `positional`, say "run",
    they are not read but listed: given["run"] = (["out/a", "out/b"], "command line").

    A mistake in the input, or a ValueError from a dataclass, becomes one line on stderr and exit
    code 2. `--help` prints every flag, `--version` VERSION and torch's, and exits with 0.
    ValueError for a mistake in `schemas`: a name in two of them, say."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flags = read_flags(*schemas)
    if asked := [arg for arg in argv if arg in ASKS]:
        text = f"nanoDNT {VERSION}, torch {version('torch')}"
        if asked[0] != "--version":
            text = _help_text(flags, description, positional)
        print(text, flush=True)
        raise SystemExit(0)
    instances = []
    try:
        given = read_arguments(argv, flags, positional)
        for schema in schemas:
            names = {field.name: flag_of(field) for field in fields(schema)}
            values = {name: given[flag][0] for name, flag in names.items() if flag in given}
            instances.append(schema(**values))
    except ValueError as error:
        print(
            f"{rank_tag()}error:",
            "".join(c if c.isprintable() else " " for c in str(error)),
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    return instances, given


def prepare_streams() -> None:
    """Every command begins with this. What is printed may hold any character: one that the encoding
    of stdout lacks becomes an escape, such as \\u2192, where Python would end the program. stderr
    does so anyway."""
    if hasattr(sys.stdout, "reconfigure"):  # not where a notebook took its place
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output() -> int:
    """For a program whose reader has gone: what is still to be printed goes nowhere, because
    Python's flush at exit would fail again. Returns the exit code that shells report for
    SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13


def flush_output() -> int:
    """Print what is still waiting. Returns 0, or the exit code of `discard_output` where the reader
    has gone.

    Without this call Python does so at its end, where an error gives a traceback."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return discard_output()
    except OSError as error:
        print(
            f"{rank_tag()}error: the output cannot be written ({error.strerror})", file=sys.stderr
        )
        discard_output()
        return 1
    return 0


def rank_tag() -> str:
    """What an error message begins with: "[rank 3] " in one of several processes under torchrun,
    else nothing."""
    rank = os.environ.get("RANK")
    several = (os.environ.get("WORLD_SIZE") or "1") != "1"
    return f"[rank {rank}] " if rank and several else ""


def describe(*instances, given: dict | None = None) -> str:
    """The resolved configuration as text: three flags a line, by section. `*` marks what is not the
    default. With `given`, which configure returned, further lines name the flags that each file and
    the command line set."""
    flags = read_flags(*map(type, instances))
    lines = []
    values = {f.name: getattr(x, f.name) for x in instances for f in fields(x)}
    width = max(map(len, flags), default=0)
    for title, names in groupby(flags, key=lambda name: flags[name].section):
        cells = []
        for name in names:
            mark = " " if values[name] == flags[name].default else "*"
            cells.append(f"{mark} {name:<{width}} {_show(values[name])}".ljust(39))
        lines.append(title)
        lines += [" ".join(cells[i : i + 3]).rstrip() for i in range(0, len(cells), 3)]
    sources = {}
    for name, (_, where) in (given or {}).items():
        sources.setdefault(where.rpartition(":")[0] or where, []).append(name)
    sets = [f"{source} sets {', '.join(names)}" for source, names in sources.items()]
    return "\n".join([*lines, "(* = not the default)", *sets])


# ------------------------------------------------------------------------------- the command line and config files


def read_arguments(argv: list, flags: dict, positional: str = "config") -> dict[str, tuple]:
    """What the files and flags in `argv` set: name → (value, where). ConfigError for the first
    mistake, but for all names that are unknown at once: a config of another program has many."""
    given = {}
    typed = {}  # flags: their words
    rest = []
    unknown = []
    for arg in argv:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            if arg.startswith("-") or (equals and name in flags):
                raise ConfigError(f"{arg}: write --{arg.lstrip('-')}")
            rest.append(read_path(arg))
        elif name not in flags:
            unknown.append(f"unknown flag --{name} ({_hint(name, flags, '--')})")
        elif not equals and bool not in (flags[name].hint, *get_args(flags[name].hint)):
            raise ConfigError(
                f"--{name} has no value: write --{name}=VALUE ({_expected(flags[name])})"
            )
        elif name in typed:
            raise ConfigError(
                f"--{name} is given twice, as {typed[name]!r} and {value!r}: keep one"
            )
        else:
            typed[name] = value if equals else "True"
    if positional != "config":
        given[positional] = (rest, "command line")
        rest = []
    keys = [(name, *found) for path in rest for name, found in read_file(path).items()]
    for name, _, where in keys:
        if name not in flags:
            unknown.append(f"{where}: unknown key {name} ({_hint(name, flags)})")
    if len(unknown) > MAX_MISTAKES:
        unknown[MAX_MISTAKES:] = [f"and {len(unknown) - MAX_MISTAKES} more"]
    if unknown:
        raise ConfigError("; ".join(unknown))
    for name, value, where in keys:
        given[name] = (
            _checked([value], flags[name], f"{where}: {name} cannot be {value!r}"),
            where,
        )
    for name, value in typed.items():
        # what the word can mean, for the flag to choose from: "1" is the string, True or the number
        readings = [value]
        if value in WORDS:
            readings.append(WORDS[value])
        for number in (int, float):
            with suppress(ValueError):
                readings.append(number(value))
        what = f"command line: --{name} cannot be {value!r}"
        given[name] = (_checked(readings, flags[name], what), "command line")
    return given


def read_file(path: str) -> dict[str, tuple]:
    """The keys of a config file and its bases, as they say them: name → (value, "path:line").

    ConfigError where one of them is no config file."""
    names = _read_names(path)
    return {name: names[name] for name in names if not name.startswith("_")}


def _read_names(path: str, above=()) -> dict[str, tuple]:
    """What `read_file` returns, and the helpers. `above`: the files that this one is a base of."""
    names = {}
    own = set()
    source, body = _parse(path)
    match body:
        case [
            ast.Assign(targets=[ast.Name(id="base")], value=ast.Constant(value=str(base))) as node,
            *body,
        ]:
            file = os.path.normpath(os.path.join(os.path.dirname(path), base))
            where = f"{path}:{node.lineno}: base = {base!r}: {file}"
            if not os.path.isfile(file):
                raise ConfigError(f"{where} is no file")
            if file in (path, *above):
                raise ConfigError(f"{where} leads back to itself")
            names = _read_names(file, (path, *above))
    for node in body:
        where = f"{path}:{node.lineno}"
        try:
            match node:
                case ast.Assign(targets=[ast.Name(id="base")]):
                    raise ConfigError("base names a file, in the first line")
                case ast.Assign(targets=[ast.Name(id=name)]) if name in own:
                    raise ConfigError(f"{name} is already set at {names[name][1]}")
                case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                    names[name] = (_evaluate(expression, names), where)
                    own.add(name)
                case _:
                    raise ConfigError(f"not allowed; {ALLOWED}")
        except (ConfigError, ArithmeticError, RecursionError) as error:
            code = source.split("\n")[node.lineno - 1].strip()[:60]
            reason = error.args[-1]  # the args of an OverflowError are (errno, text)
            raise ConfigError(f"{where}: `{code}`: {reason}") from None
    return names


def _parse(path: str) -> tuple[str, list]:
    """A config file's source, and its statements without the docstring."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            source = file.read(MAX_FILE_CHARS)
        if len(source) == MAX_FILE_CHARS:
            raise ValueError  # too long: a data file given by mistake, say
        body = ast.parse(source, path).body
    except OSError as error:
        raise ConfigError(f"cannot read config file {path!r}: {error.strerror}") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConfigError(
            f"{path}:1: not a config file: not UTF-8 text, too long, or nested too deeply"
        ) from None
    match body:
        case [ast.Expr(value=ast.Constant(value=str())), *body]:
            pass
    return source, body


def _evaluate(node, names):
    """The value of an expression of constants, `names` and arithmetic. ConfigError for anything
    else, and for a number beyond the range of a float: integers that long could take hours."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            pass
        case ast.Name(id=name) if name in names:
            value, _ = names[name]
        case ast.Name(id=name):
            raise ConfigError(f"{name} is not assigned above (a string needs quotes)")
        case ast.UnaryOp(op=op) | ast.BinOp(op=op) if type(op) in ARITHMETIC:
            parts = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
            numbers = [_evaluate(part, names) for part in parts]
            if not all(type(number) in (int, float) for number in numbers):
                raise ConfigError("arithmetic is for numbers only")
            if isinstance(op, ast.Pow):
                # overflows at once; 9**9**9 in integers would take hours
                float(numbers[0]) ** numbers[1]
            value = ARITHMETIC[type(op)](*numbers)
        case _:
            raise ConfigError(f"not allowed; {ALLOWED}")
    if type(value) in (int, float) and abs(value) > MAX_NUMBER[float]:
        raise ConfigError("the number is out of range")
    return value


# ------------------------------------------------------------------------------------------- values and their types


def _options(hint):
    """The types and constants that an annotation allows: `int | None` is [int, None], `bool` is
    [True, False]."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return [option for part in get_args(hint) for option in _options(part)]
    simple = {int: [int], float: [float], str: [str], bool: [True, False], NoneType: [None]}
    simple |= {PathName: [PathName]}
    if hint not in simple:
        raise ValueError(
            f"a flag cannot be {hint}: use int, float, bool, str, None, Literal and unions of them"
        )
    return simple[hint]


def _checked(readings, flag, what):
    """The first of `readings` that the flag allows, converted to its type. ConfigError beginning
    with `what`."""
    # Strings first, types last: "none" is the string where that is a choice, else None, else a
    # string like any other.
    for option in sorted(
        _options(flag.hint), key=lambda o: (isinstance(o, type), not isinstance(o, str))
    ):
        for value in readings:
            if option in MAX_NUMBER and type(value) in (int, float):
                # no nan, no inf
                if abs(value) <= MAX_NUMBER[option] and (option is float or value == int(value)):
                    return option(value)
            elif option is PathName and type(value) is str:
                return read_path(value, what)
            elif option is str and type(value) is str:
                return decode_argument(value, what)
            # a bool is no int
            elif option is type(value) or (type(option) is type(value) and option == value):
                return value
    raise ConfigError(f"{what}: it takes {_expected(flag)}")


def read_path(text: str, where: str = "") -> str:
    """The path that a user's `text` means: a leading ~ or ~USER is that home folder, as in a shell.

    ConfigError, which begins with `where`, if there is no such home: a shell would make a folder
    that is named ~."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = text.partition("/")[0][1:]
        advice = f"write the whole path, or ./{text} for a folder of that name"
        raise ConfigError(f"{where or repr(text)}: there is no user {user!r}: {advice}")
    return path


def decode_argument(text: str, where: str) -> str:
    """A text from the command line or a terminal. ConfigError, which begins with `where`, if it is
    not UTF-8."""
    try:
        text.encode()
    except UnicodeError:
        raise ConfigError(f"{where}: it is not UTF-8 text") from None
    return text


def _expected(flag):
    return " | ".join(map(_name_option, _options(flag.hint)))


def _name_option(option):
    if option is PathName:
        return "path"
    return option.__name__ if isinstance(option, type) else _show(option)


def _show(value):
    return value if isinstance(value, str) and value and value.isprintable() else repr(value)


def _hint(name, flags, dashes=""):
    close = difflib.get_close_matches(name.lower(), flags, n=1)
    return RENAMED.get(name) or (
        f"did you mean {dashes}{close[0]}?" if close else "--help lists them all"
    )


# -------------------------------------------------------------------------------- flags, from the dataclasses' source


def flag_of(field) -> str:
    """A field's name as a flag: `for_` is --for, which Python reserves."""
    return field.name.removesuffix("_")


@cache
def read_flags(*schemas: type) -> dict[str, Flag]:
    """name → Flag of all fields. ValueError for a name in two schemas, a type that no flag has, a
    wrong default."""
    flags = {}
    for schema in schemas:
        hints, comments = get_type_hints(schema), _comments(schema)
        for field in fields(schema):
            name = f"{schema.__name__}.{field.name}"
            if flag_of(field) in (*flags, "base"):
                raise ValueError(
                    f"{name}: another schema has that name, or it is that of a file's base"
                )
            flag = Flag(
                hints[field.name], field.default, *comments.get(field.name, (schema.__name__, ""))
            )
            _checked([flag.default], flag, f"the default of {name} cannot be {flag.default!r}")
            flags[flag_of(field)] = flag
    return flags


def _comments(schema):
    """name → (section, comment) of a dataclass: the comment beside a field, and those below it up
    to a blank line."""
    found = {}
    section, name = schema.__name__, None
    before_methods = re.split(r"\n +(?:def|@)", inspect.getsource(schema))[0]
    for line in before_methods.splitlines()[1:]:
        field = re.match(r" +(\w+): ", line)
        comment = re.search(r"(?:^|  ) *# *(.*)", line)
        name = field[1] if field else name if line.strip() else None
        if comment and comment[1].startswith("---"):
            name, section = None, comment[1].strip("- ") or section
        elif comment and name:
            found[name] = (
                section,
                f"{found[name][1]} {comment[1]}".strip() if name in found else comment[1],
            )
        elif field:
            found[name] = (section, "")
    return found


def _help_text(flags, description, positional):
    usage = f"usage: {Path(sys.argv[0]).name} [{positional} ...] [--key=value ...], or --version"
    files = (
        "Config files apply from left to right; --key=value wins over them."
        if positional == "config"
        else ""
    )
    blocks = [usage, description.strip(), files]
    for title, names in groupby(flags, key=lambda name: flags[name].section):
        lines = [title]
        for name in names:
            start = f"  --{name}={_show(flags[name].default)}  ".ljust(32)
            if len(start) > 32:  # a long default has a line of its own
                lines, start = [*lines, start.rstrip()], " " * 32
            text = f"{flags[name].help} [{_expected(flags[name])}]".strip()
            lines += textwrap.wrap(
                text, 100, initial_indent=start, subsequent_indent=" " * 32, break_on_hyphens=False
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block)
