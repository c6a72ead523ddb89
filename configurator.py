"""Reads config files and `--key=value` flags into dataclasses, and refuses unknown names.

    python train.py config/dnt_small.py config/mine.py --learning_rate=1e-3

Files apply from left to right; a flag wins over every file, wherever it stands. A config file has
Python's syntax but is data: it is parsed, never executed. It holds lines `name = expression`; a
`_name` is a helper, not a key. The first line can be `base = "other.py"`, a path from the file's
own folder: that file's lines stand in its place, and the lines below can set the same names again.

A flag is a field of a dataclass. Its annotation gives the allowed values: a type, a Literal's
choices, a range (`check_ranges`). The comment beside it is its text in `--help`. For a bool,
`--key` alone means `--key=True`. In a path a leading ~ is the home folder, as in a shell.
"""

import ast
import difflib
import inspect
import math
import operator
import os
import re
import sys
import textwrap
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

VERSION = "1.0.0"  # also in pyproject.toml and CITATION.cff
ASKS = ("--help", "-h", "--version")  # arguments that only print a text
COMMAND_LINE = "command line"
CHOSEN = "chosen"  # what the program sets itself, in `describe`
LAST = {COMMAND_LINE: 1, CHOSEN: 2}  # order of sources in `describe`: files are first

# The module that knows nanoGPT's names. It is loaded for an error message of a command that trains.
NANOGPT_KEYS = "nanodnt.nanogpt_keys"
# Other names that are no flag here, and what to do instead.
ADVICE = {
    "report": "analyze.py writes report.md where several runs are named",
    "smooth": "loss.png averages training losses over 5% of the run",
    "real_data": "data=random, or dataset",
    "chat": "python chat.py talks with a model; it has the flags of sample.py but a prompt's",
    "template": "a flag of python chat.py and of data/sft/prepare.py",
    "system": "a flag of python chat.py",
    "compile": "only train.py and bench.py compile: leave it out",
    "timeout_s": "only runs of train.py wait for other processes: leave it out",
    "prompt_key": "data/sft/prepare.py reads records with such keys: prepare them, then name "
    "the dataset",
    "response_key": "data/sft/prepare.py reads records with such keys: prepare them, then name "
    "the dataset",
}
ALLOWED = (
    "a config file is data, lines name = value of numbers, strings, True, False, None, names above "
    "and arithmetic: remove the line, or write the value"
)
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
# Another reading of a word on the command line; `_choose` picks the one that the flag allows.
WORDS = {
    "True": True,
    "true": True,
    "1": True,
    "False": False,
    "false": False,
    "0": False,
    "None": None,
    "none": None,
}
NUMBERS = {int: 2**63 - 1, float: sys.float_info.max}  # {type: its largest number}
MAX_FILE_CHARS = 100_000  # length of a config file
WRAP = {"width": 100, "break_on_hyphens": False, "break_long_words": False}  # of printed lines
MAX_MISTAKES = 40  # mistakes in one error message

Value = bool | int | float | str | None


class ConfigError(ValueError):
    """Mistakes in the user's input. Each argument is one of them, a line: its place, what is wrong,
    and what to write instead."""

    def __str__(self) -> str:
        if len(self.args) == 1:
            return self.args[0]
        return "\n  ".join([f"{len(self.args)} changes are needed:", *self.args])


# ----------------------------------------------------------------------------- annotations of flags


class PathName(str):
    """A file or folder, with the home folder in place of a leading ~ (`read_path`)."""


@dataclass(frozen=True)
class Range:
    """The numbers x with ge ≤ x ≤ le and gt < x < lt, in `Annotated[int, Range(ge=1)]`."""

    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.ge <= number <= self.le and self.gt < number < self.lt

    def __str__(self) -> str:
        """The end of a sentence "x must …"."""
        if self == Range(ge=0):
            return "not be negative"
        if math.isfinite(self.ge) and math.isfinite(self.le):
            return f"be between {self.ge} and {self.le}"
        limits = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        parts = [f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)]
        return "be " + " and ".join(parts)


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, lt=1)]


def check_ranges(config: Any) -> None:
    """Raise ValueError for the first field of a dataclass whose number is out of its range."""
    for name, flag in read_flags(type(config)).items():
        value = getattr(config, flag.field)
        if flag.range and value is not None and value not in flag.range:
            raise ValueError(f"{name}={value} must {flag.range}")


# ------------------------------------------------------------------- the configuration of a command


class Given(NamedTuple):
    """A value that the user has set."""

    value: Any
    where: str  # "config/x.py:12" or "command line"


class Flag(NamedTuple):
    """A field of a dataclass, as a flag."""

    field: str  # name of the field
    hint: Any  # annotation of the field
    range: Range | None
    default: Value
    section: str  # title of the last `# --- title ---` line above it
    help: str  # comment beside the field


class Configured(NamedTuple):
    """The result of `configure`."""

    instances: list[Any]  # one of each dataclass
    given: dict[str, Given]  # the values that the user has set, by flag


def configure(
    *schemas: type,
    argv: list[str] | None = None,
    description: str = "",
    positional: str = "config",
) -> Configured:
    """Read the command line into one instance of each dataclass in `schemas`.

    Arguments without dashes are config files. With another `positional`, say "run", they are not
    read but listed: given["run"] is (["out/a", "out/b"], "command line").

    A mistake in the input, or a ValueError from a dataclass, becomes one line on stderr and exit
    code 2; all unknown names, and all lines that are no data, become one message. `--help` prints
    every flag, `--version` VERSION and torch's, and both exit with 0.
    Raises ValueError for a mistake in `schemas`, such as a name in two of them."""
    if argv is None:
        argv = sys.argv[1:]
    flags = read_flags(*schemas)
    asked = [arg for arg in argv if arg in ASKS]
    if asked:
        if asked[0] == "--version":
            print(f"nanoDNT {VERSION}, torch {version('torch')}", flush=True)
        else:
            print(_help_text(flags, description, positional), flush=True)
        raise SystemExit(0)
    try:
        given = read_arguments(argv, flags, positional)
        instances = [_make_instance(schema, given) for schema in schemas]
    except ValueError as error:
        lines = error.args if isinstance(error, ConfigError) else [str(error)]
        text = ConfigError(*map(_one_line, lines))
        print(f"{rank_tag()}error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    return Configured(instances, given)


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _make_instance(schema: type, given: dict[str, Given]) -> Any:
    values = {}
    for field in fields(schema):
        flag = flag_of(field)
        if flag in given:
            values[field.name] = given[flag].value
    return schema(**values)


def describe(*instances: Any, given: dict[str, Given]) -> str:
    """The settings that are not at their default, as text, by the file that sets them (`given`, of
    `configure`); then all of the command line; then what the program has chosen."""
    values = {field.name: getattr(x, field.name) for x in instances for field in fields(x)}
    words = {source_of(setting.where): [] for setting in given.values()}
    for name, flag in read_flags(*map(type, instances)).items():
        value = values[flag.field]
        source = source_of(given[name].where) if name in given else CHOSEN
        if value == flag.default and source != COMMAND_LINE:
            continue
        if isinstance(value, float):
            value = f"{value:.10g}"  # 6e-05, and not 5.9999999999999995e-05
        words.setdefault(source, []).append(f"{name}={_show(value)}")
    lines = []
    for source in sorted(words, key=lambda source: LAST.get(source, 0)):
        text = " ".join(words[source]) or "nothing but defaults"
        lines += textwrap.wrap(f"{source}: {text}", subsequent_indent="  ", **WRAP)
    return "\n".join(lines)


# --------------------------------------------------------------------------------- the command line


class Setting(NamedTuple):
    """A line of a config file, or a flag of the command line."""

    name: str | None  # None for a line that sets no flag
    readings: list[Value]  # what its value can mean: first as it is written, a number last
    where: str  # as in `Given`
    problem: str = ""  # why the line is no data


class Arguments(NamedTuple):
    """A command line, taken apart."""

    typed: dict[str, Setting]  # flags, known or not, by name
    positionals: list[str]


def read_arguments(
    argv: list[str], flags: dict[str, Flag], positional: str = "config"
) -> dict[str, Given]:
    """The values that the files and flags in `argv` set. Prints a note where a flag is given twice.

    Raises ConfigError for all unknown names and all lines that are no data, because a config of
    another program has many; else for the first mistake."""
    given = {}
    typed, files = _split_arguments(argv, flags)
    if positional != "config":
        given[positional] = Given(files, COMMAND_LINE)
        files = []
    settings = [setting for path in files for setting in read_settings(path).values()]
    settings += typed.values()
    _check_names(settings, flags)
    for setting in settings:
        if setting.name is not None:
            label = f"--{setting.name}" if setting.where == COMMAND_LINE else setting.name
            refusal = f"{setting.where}: {label} cannot be {setting.readings[0]!r}"
            value = _choose(setting.readings, flags[setting.name], refusal)
            given[setting.name] = Given(value, setting.where)
    return given


def _split_arguments(argv: list[str], flags: dict[str, Flag]) -> Arguments:
    typed = {}
    positionals = []
    for arg in argv:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--"):
            if arg.startswith("-") or (equals and name in flags):
                raise ConfigError(f"{arg}: write --{arg.lstrip('-')}")
            positionals.append(read_path(arg))
            continue
        if not equals and name in flags:
            if not _is_bool(flags[name]):
                allowed = _allowed(flags[name])
                raise ConfigError(f"--{name} has no value: write --{name}=VALUE ({allowed})")
            text = "True"
        # under torchrun all processes read the same
        if name in typed and os.environ.get("RANK", "0") == "0":
            values = f"{typed[name].readings[0]!r}, then {text!r}"
            note = f"--{_one_line(name)} is given twice: {values}, which is taken"
            print(f"note: {note}", file=sys.stderr)
        typed[name] = Setting(name, _readings(text), COMMAND_LINE)
    return Arguments(typed, positionals)


def _check_names(settings: list[Setting], flags: dict[str, Flag]) -> None:
    """Raise ConfigError with all names that are no flag and all lines that are no data."""
    lines = []
    unknown = [s for s in settings if s.name is not None and s.name not in flags]
    advice = {(source_of(s.where), s.name): _hint(s, flags) for s in unknown}
    if unknown and "eval_tokens" in flags:  # a command that trains
        nanogpt = import_module(NANOGPT_KEYS)
        lines += nanogpt.find_base(settings)
        advice |= nanogpt.find_changes(settings)
    for setting in settings:
        kind = "" if setting.name in flags else "unknown "
        label = f"{setting.where}: {kind}key {setting.name}"
        if setting.where == COMMAND_LINE:
            label = f"{kind}flag --{setting.name}"
        if text := advice.get((source_of(setting.where), setting.name)):
            lines.append(f"{label} ({text})")
        elif setting.problem:
            lines.append(setting.problem)
    if len(lines) > MAX_MISTAKES:
        lines[MAX_MISTAKES:] = [f"and {len(lines) - MAX_MISTAKES} more"]
    if lines:
        raise ConfigError(*lines)


def source_of(where: str) -> str:
    """The file in "config/x.py:12"; COMMAND_LINE of itself."""
    return where.rpartition(":")[0] or where


def _readings(text: str) -> list[Value]:
    """The values that a text of the command line can mean: "1" is the string, True, or a number."""
    readings = [text]
    if text in WORDS:
        readings.append(WORDS[text])
    for number in NUMBERS:
        with suppress(ValueError):
            readings.append(number(text))
            break
    return readings


def _hint(setting: Setting, flags: dict[str, Flag]) -> str:
    """Advice for a name that is no flag."""
    name = setting.name
    if name in ADVICE:
        return ADVICE[name]
    close = difflib.get_close_matches(name.lower(), flags, n=1)
    dashes = "--" if setting.where == COMMAND_LINE else ""
    return f"did you mean {dashes}{close[0]}?" if close else "--help lists them all"


# ------------------------------------------------------------------------------------- config files


def read_settings(path: str, above: tuple[str, ...] = ()) -> dict[str, Setting]:
    """The lines of a file and its bases, by the name that they assign, else by their place.
    `above`: the files that this one is a base of."""
    source, body = _parse(path)
    settings = {}
    match body:
        case [ast.Assign(targets=[ast.Name("base")], value=ast.Constant(str())) as line, *body]:
            base = _find_base(line, path, above)
            settings = read_settings(base, (path, *above))
    own = set()
    for node in body:
        where = f"{path}:{node.lineno}"
        name = where
        value = None
        problem = ""
        try:
            match node:
                case ast.Assign(targets=[ast.Name("base")]):
                    raise ConfigError("base names a file, in the first line")
                case ast.Assign(targets=[ast.Name(name)]) if name in own:
                    raise ConfigError(f"{name} is already set at {settings[name].where}: keep one")
                case ast.Assign(targets=[ast.Name(name)], value=expression):
                    value = _evaluate(expression, settings)
                case _:
                    raise ConfigError(f"not allowed; {ALLOWED}")
        except (ConfigError, ArithmeticError, RecursionError) as error:
            code = source.split("\n")[node.lineno - 1].strip()[:60]
            reason = error.args[-1]  # the args of an OverflowError are (errno, text)
            problem = f"{where}: `{code}`: {reason}"
        own.add(name)
        settings.pop(name, None)  # of a base: the order is that of application
        is_key = name != where and not name.startswith("_")
        settings[name] = Setting(name if is_key else None, [value], where, problem)
    return settings


def _find_base(line: ast.Assign, path: str, above: tuple[str, ...]) -> str:
    """The path of the file that the line `base = …` of the file `path` names."""
    base = line.value.value
    file = os.path.normpath(os.path.join(os.path.dirname(path), base))
    where = f"{path}:{line.lineno}: base = {base!r}: {file}"
    if not os.path.isfile(file):
        raise ConfigError(f"{where} is no file")
    if file in (path, *above):
        raise ConfigError(f"{where} leads back to itself")
    return file


def _parse(path: str) -> tuple[str, list[ast.stmt]]:
    """A config file's source, and its statements without the docstring."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            source = file.read(MAX_FILE_CHARS)
        if len(source) == MAX_FILE_CHARS:
            raise ValueError  # too long: perhaps a data file given by mistake
        body = ast.parse(source, path).body
    except OSError as error:
        problem = f"cannot read config file {path!r}: {error.strerror}"
        raise ConfigError(f"{problem}; docs/runs.md lists the configs") from None
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError):
        problem = "not a config file: not UTF-8 text, too long, or nested too deeply"
        raise ConfigError(f"{path}:1: {problem}") from None
    match body:
        case [ast.Expr(ast.Constant(str())), *body]:
            pass
    return source, body


def _evaluate(node: ast.expr, names: dict[str, Setting]) -> Value:
    """The value of an expression of constants, `names` and arithmetic.

    Raises ConfigError for anything else, and for a number beyond the range of a float: integers
    that long could take hours."""
    match node:
        case ast.Constant(None | bool() | int() | float() | str() as value):
            pass
        case ast.Name(name) if name in names:
            value = names[name].readings[0]
        case ast.Name(name):
            raise ConfigError(f"{name} is not assigned above (a string needs quotes)")
        case ast.UnaryOp(op, operand) if type(op) in ARITHMETIC:
            value = _calculate(op, [_evaluate(operand, names)])
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            value = _calculate(op, [_evaluate(left, names), _evaluate(right, names)])
        case _:
            raise ConfigError(f"not allowed; {ALLOWED}")
    if type(value) in NUMBERS and abs(value) > NUMBERS[float]:
        raise ConfigError("the number is out of range")
    return value


def _calculate(op: ast.operator | ast.unaryop, operands: list[Value]) -> Value:
    if not all(type(operand) in NUMBERS for operand in operands):
        raise ConfigError("arithmetic is for numbers only")
    if isinstance(op, ast.Pow):
        base, exponent = operands
        float(base) ** exponent  # overflows at once; 9**9**9 in integers would take hours
    return ARITHMETIC[type(op)](*operands)


# --------------------------------------------------------------------------- values and their types


def _options(hint: Any) -> list[Any]:
    """The types and constants that an annotation allows: `int | None` is [int, None], `bool` is
    [True, False]."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if get_origin(hint) is Annotated:
        return _options(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return [option for part in get_args(hint) for option in _options(part)]
    if hint is bool:
        return [True, False]
    if hint is NoneType:
        return [None]
    if hint in (int, float, str, PathName):
        return [hint]
    raise ValueError(
        f"a flag cannot be {hint}: use int, float, bool, str, None, Literal and unions of them"
    )


def _is_bool(flag: Flag) -> bool:
    return bool in (flag.hint, *get_args(flag.hint))


def _range_of(hint: Any) -> Range | None:
    """The range in an annotation, or in a part of a union."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    ranges = [_range_of(part) for part in get_args(hint)]
    return next(filter(None, ranges), None)


def _choose(readings: list[Value], flag: Flag, refusal: str) -> Value:
    """The first of `readings` that the flag allows, converted to its type.

    Raises ConfigError, beginning with `refusal`, if there is none."""
    for option in sorted(_options(flag.hint), key=_rank):
        for value in readings:
            if not _fits(value, option):
                continue
            if option is PathName:
                return read_path(value, refusal)
            if option is str:
                return decode_argument(value, refusal)
            if option in NUMBERS:
                return option(value)
            return value
    raise ConfigError(f"{refusal}: it takes {_allowed(flag)}")


def _rank(option: Any) -> int:
    """Strings come first, types last: "none" is the string where that is a choice, else None, else
    a string like any other."""
    if isinstance(option, str):
        return 0
    return 2 if isinstance(option, type) else 1


def _fits(value: Value, option: Any) -> bool:
    """Whether a value is of a type, or equal to a constant, both as in `_options`."""
    if option in (str, PathName):
        return type(value) is str
    if option in NUMBERS:
        if type(value) not in NUMBERS or not abs(value) <= NUMBERS[option]:
            return False  # nan and inf too
        return option is float or value == int(value)
    return type(value) is type(option) and value == option  # True is not 1


def read_path(text: str, where: str = "") -> str:
    """The path that a user's `text` means: a leading ~ or ~USER is that home folder, as in a shell.

    Raises ConfigError, beginning with `where`, if there is no such home: a shell would make a
    folder that is named ~."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        user = text.partition("/")[0][1:]
        advice = f"write the whole path, or ./{text} for a folder of that name"
        raise ConfigError(f"{where or repr(text)}: there is no user {user!r}: {advice}")
    return path


def decode_argument(text: str, where: str) -> str:
    """A text from the command line or a terminal. Raises ConfigError, beginning with `where`, if it
    is not UTF-8."""
    try:
        text.encode()
    except UnicodeError:
        raise ConfigError(f"{where}: it is not UTF-8 text") from None
    return text


def _allowed(flag: Flag) -> str:
    return " | ".join(map(_name_option, _options(flag.hint)))


def _name_option(option: Any) -> str:
    if option is PathName:
        return "path"
    return option.__name__ if isinstance(option, type) else _show(option)


def _show(value: Value) -> str:
    return value if isinstance(value, str) and value and value.isprintable() else repr(value)


# -------------------------------------------------------------- flags, from the dataclasses' source


def flag_of(field: Field) -> str:
    """A field's name as a flag. The field `for_` is --for, a word that Python reserves."""
    return field.name.removesuffix("_")


@cache
def read_flags(*schemas: type) -> dict[str, Flag]:
    """All fields as flags, by name.

    Raises ValueError for a name in two schemas, an annotation that no flag can have, and a default
    that its annotation does not allow."""
    flags = {}
    for schema in schemas:
        hints = get_type_hints(schema, include_extras=True)
        comments = _comments(schema)
        for field in fields(schema):
            name = f"{schema.__name__}.{field.name}"
            if flag_of(field) in (*flags, "base"):
                problem = "another schema has that name, or it is that of a file's base"
                raise ValueError(f"{name}: {problem}")
            hint = hints[field.name]
            section, text = comments.get(field.name, (schema.__name__, ""))
            flag = Flag(field.name, hint, _range_of(hint), field.default, section, text)
            _choose([flag.default], flag, f"the default of {name} cannot be {flag.default!r}")
            flags[flag_of(field)] = flag
    return flags


def _comments(schema: type) -> dict[str, tuple[str, str]]:
    """The section and comment of each field of a dataclass. A comment stands beside its field, and
    goes on in the lines below up to a blank line or the next field."""
    comments = {}
    section = schema.__name__
    name = None  # the field that a comment belongs to
    before_methods = re.split(r"\n +(?:def|@)", inspect.getsource(schema))[0]
    for line in before_methods.splitlines()[1:]:
        field = re.match(r" +(\w+): ", line)
        comment = re.search(r"(?:^| )# *(.*)", line)
        if field:
            name = field[1]
            comments[name] = (section, "")
        elif not line.strip():
            name = None
        if comment and comment[1].startswith("---"):
            section = comment[1].strip("- ") or section
            name = None
        elif comment and name:
            _, text = comments[name]
            comments[name] = (section, f"{text} {comment[1]}".strip())
    return comments


def _help_text(flags: dict[str, Flag], description: str, positional: str) -> str:
    blocks = [f"usage: {_program()} [{positional} ...] [--key=value ...], or --version"]
    blocks.append(description.strip())
    if positional == "config":
        blocks.append("Config files apply from left to right; --key=value wins over them.")
    margin = " " * 32
    for title, names in groupby(flags, key=lambda name: flags[name].section):
        lines = [title]
        for name in names:
            start = f"  --{name}={_show(flags[name].default)}  ".ljust(len(margin))
            if len(start) > len(margin):  # a long default has a line of its own
                lines.append(start.rstrip())
                start = margin
            text = f"{flags[name].help} [{_allowed(flags[name])}]".strip()
            lines += textwrap.wrap(text, initial_indent=start, subsequent_indent=margin, **WRAP)
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block)


def _program() -> str:
    """How the user calls this program: "train.py", or "python -m PACKAGE"."""
    name = Path(sys.argv[0]).name
    spec = sys.modules["__main__"].__spec__  # None for a script
    return f"python -m {spec.parent}" if spec and name == "__main__.py" else name


# ------------------------------------------------------------------------ standard output and error


def prepare_streams() -> None:
    """Let stdout be open, and take any character. Every command begins with this.

    A character that the encoding of stdout lacks becomes an escape such as \\u2192, where Python
    would end the program. stderr does so anyway."""
    if sys.stdout is None:  # the shell has closed it, by `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout lacks it
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> int:
    """Write the rest of the output. Returns the exit code: 0, or an error's.

    Without this call Python flushes at its end, where an error gives a traceback."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return discard_output()
    except OSError as error:
        problem = f"the output cannot be written ({error.strerror})"
        print(f"{rank_tag()}error: {problem}", file=sys.stderr)
        discard_output()
        return 1
    return 0


def discard_output() -> int:
    """Discard the rest of the output, because its reader has gone and Python's flush at
    exit would fail again. Returns the exit code that shells report for SIGPIPE."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + 13


def rank_tag() -> str:
    """The beginning of an error message: "[rank 3] " in one of several processes under torchrun,
    else nothing."""
    rank = os.environ.get("RANK")
    several = (os.environ.get("WORLD_SIZE") or "1") != "1"
    return f"[rank {rank}] " if rank and several else ""
