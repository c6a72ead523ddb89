"""The shape of a tree of sources, measured: floors and imports, calls by name, density of lines.

A tree is {path: source} with paths from the root of the repository, so that tests can make up one.
"""

import ast
import io
import sys
import tokenize
from dataclasses import astuple, dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from support.trees import repository_files

# Commands of interop/ and studies/.
UPPER = {"export.py", "evaluate.py", "chat.py", "analyze.py", "sweep.py", "reproduce.py"}
IN_ROOT = UPPER | {"train.py", "sample.py", "bench.py", "model.py", "vision.py", "configurator.py"}
FOLDERS = {"layers", "nanodnt", "interop", "studies", "data"}
COMMAND = 6  # the highest floor

# The parts whose content and density are measured.
PARTS = {
    "core": "model.py vision.py train.py sample.py bench.py configurator.py layers/ nanodnt/",
    "interop": "interop/ export.py evaluate.py chat.py",
    "studies": "studies/ analyze.py sweep.py reproduce.py",
    "tests": "tests/",
}
PARTS = {part: tuple(paths.split()) for part, paths in PARTS.items()}

parse = cache(ast.parse)


def read_sources(root: Path) -> dict[str, str]:
    """Every Python file of the repository at `root`, except configs and docs."""
    sources = {}
    for file in repository_files(root):
        path = file.relative_to(root).as_posix()
        if file.suffix == ".py" and not path.startswith(("config/", "docs/")):
            sources[path] = file.read_text(encoding="utf-8")
    return sources


def select(sources: dict[str, str], paths: tuple[str, ...]) -> dict[str, str]:
    """The sources with these paths, or below them."""
    return {path: source for path, source in sources.items() if path.startswith(paths)}


# ------------------------------------------------------------------------------ floors and imports


@cache
def imported_names(source: str) -> set[str]:
    """The modules that a file imports, in functions too: absolute names, and ".x" for a relative
    import. The x of `from m import x` may be a module, so both m and m.x are in it."""
    names = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def module_paths(code: dict[str, str]) -> dict[str, str]:
    """{name of a module: its path}."""
    return {path[:-3].removesuffix("/__init__").replace("/", "."): path for path in code}


def import_graph(code: dict[str, str]) -> dict[str, set[str]]:
    """{path: paths of the project's files that it imports}."""
    modules = module_paths(code)
    graph = {}
    for path, source in code.items():
        imported = {modules[name] for name in imported_names(source) if name in modules}
        graph[path] = imported - {path}
    return graph


def floor(path: str) -> int:
    """The ring of a file, counted from layers/ = 1 up to the commands."""
    if path.startswith("layers/"):
        return 1
    if path in ("model.py", "vision.py"):
        return 2
    if path == "configurator.py":
        return 3
    return {"nanodnt": 3, "interop": 4, "studies": 5}.get(path.split("/")[0], COMMAND)


def upward_arrows(graph: dict[str, set[str]]) -> list[str]:
    """Imports of a file on a higher floor, or of a command."""
    arrows = []
    for path, imported in graph.items():
        for other in sorted(imported):
            if floor(other) > floor(path) or floor(other) == COMMAND:
                arrows.append(f"{path} → {other}")
    return arrows


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """One import circle; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same arrows between the parts of a ring: a folder, or a file that lies in no folder."""

    def part(path: str) -> str:
        in_a_ring = path.startswith(("nanodnt/", "interop/", "studies/"))
        return "/".join(path.split("/")[:2]) if in_a_ring else path

    parts = {part(path): set() for path in graph}
    for path, imported in graph.items():
        parts[part(path)] |= {part(other) for other in imported} - {part(path)}
    return parts


def foreign_imports(source: str, allowed: set[str]) -> set[str]:
    """Packages that a file imports, besides those allowed and Python's own."""
    packages = {name.split(".")[0] for name in imported_names(source)}
    return packages - allowed - sys.stdlib_module_names


def named_modules(source: str) -> set[str]:
    """Modules that a file runs or imports by a constant name: `import_module("m")`, and "m" after
    "-m". Programs that runpy runs count as the module "runpy", whatever their name."""
    names = {"runpy"} & imported_names(source)
    for node in ast.walk(parse(source)):
        values = []
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.endswith(("import_module", "__import__")):
                values = node.args[:1]
        elif isinstance(node, ast.List | ast.Tuple):
            constants = [getattr(element, "value", None) for element in node.elts]
            if "-m" in constants:
                after = constants.index("-m") + 1
                values = node.elts[after : after + 1]
        names |= {value.value for value in values if isinstance(value, ast.Constant)}
    return names


def upward_calls(code: dict[str, str]) -> list[str]:
    """Modules of higher floors that a file runs or imports by name, and every use of runpy.
    `__main__.py` is a command of its folder: it counts as one where it is called, and may call
    others."""
    modules = module_paths(code)
    calls = []
    for path, source in code.items():
        for name in sorted(named_modules(source)):
            called = modules.get(f"{name}.__main__") or modules.get(name)
            upward = called is not None and floor(called) > floor(path)
            if (upward or name == "runpy") and not path.endswith("/__main__.py"):
                calls.append(f"{path} → {name}")
    return calls


# ------------------------------------------------------------------------------------------- tests


def importers_of_tests(tests: dict[str, str]) -> list[str]:
    """Tests that import another test."""
    stems = {Path(path).stem for path in tests if Path(path).name.startswith("test_")}
    importers = []
    for path, source in tests.items():
        words = {word for name in imported_names(source) for word in name.split(".")}
        if stems & words:
            importers.append(path)
    return importers


def uses_of_upper_rings(source: str, helpers: set[str]) -> list[str]:
    """Upper rings, their commands and these helpers of their tests, as far as a file imports them;
    and their commands, as far as it names them."""
    upper = {"interop", "studies", *helpers, *(name[:-3] for name in UPPER)}
    names = imported_names(source)
    imported = names | {name.split(".")[0] for name in names}
    constants = {node.value for node in ast.walk(parse(source)) if isinstance(node, ast.Constant)}
    return sorted(constants & UPPER | imported & upper)


# ----------------------------------------------------------------------------------------- density

# No content: the context of a name (load, store), and operators, which their expressions stand for.
NOT_COUNTED = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
NO_CODE += (tokenize.ENDMARKER,)
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, *FUNCTION)
LONGEST_LINE = 100


@dataclass
class Density:
    """How much code there is, and how much of it stands in a line. Comments, docstrings and blank
    lines are no code."""

    nodes: int = 0  # of the syntax tree: the content, however it is broken into lines
    lines: int = 0  # of code
    long_lines: int = 0
    pairs: int = 0  # statements `a, b = x, y`
    conditionals: int = 0  # expressions `x if c else y`

    def __add__(self, other: "Density") -> "Density":
        return Density(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def nodes_per_line(self) -> float:
        return self.nodes / max(1, self.lines)

    def per_thousand_lines(self, count: int) -> float:
        return 1000 * count / max(1, self.lines)


def code_lines(source: str) -> set[int]:
    """The numbers of the lines of code."""
    numbers = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            numbers |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            numbers -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return numbers


def is_pair(node: ast.AST) -> bool:
    """Whether it is a statement `a, b = x, y`."""
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def measure(source: str) -> Density:
    nodes = [node for node in ast.walk(parse(source)) if not isinstance(node, NOT_COUNTED)]
    numbers, lines = code_lines(source), source.splitlines()
    return Density(
        nodes=len(nodes),
        lines=len(numbers),
        long_lines=sum(len(lines[number - 1]) > LONGEST_LINE for number in numbers),
        pairs=sum(map(is_pair, nodes)),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
    )


def measure_part(sources: dict[str, str], part: str) -> Density:
    """The sum over the files of one of PARTS."""
    return sum(map(measure, select(sources, PARTS[part]).values()), Density())


def functions(code: dict[str, str]) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """{"path:line name": its syntax tree} of every function and method."""
    return {
        f"{path}:{node.lineno} {node.name}": node
        for path, source in code.items()
        for node in ast.walk(parse(source))
        if isinstance(node, FUNCTION)
    }


def long_functions(code: dict[str, str], longest: int) -> list[str]:
    """Functions with more lines than that, from `def` to their end."""
    length = {name: node.end_lineno - node.lineno + 1 for name, node in functions(code).items()}
    return [f"{name}: {lines} lines" for name, lines in length.items() if lines > longest]


def count_refusals(source: str) -> int:
    """How often a file raises ValueError, by the statement or by a function `refuse`."""
    count = 0
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            count += ast.unparse(node.exc).startswith("ValueError")
        elif isinstance(node, ast.Call):
            count += ast.unparse(node.func).endswith("refuse")
    return count


def bare_returns(code: dict[str, str]) -> list[str]:
    """Functions that return a container, or None, without the types of its elements."""
    bare = {"tuple", "dict", "list", "set"}
    names = []
    for name, node in functions(code).items():
        kinds = ast.unparse(node.returns).split(" | ") if node.returns else []
        if bare & set(kinds):
            names.append(name)
    return names
