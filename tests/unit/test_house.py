"""The shape of this repository: three rings, arrows that only point down, no circles.

    commands → studies/ → interop/ → nanodnt/ and configurator.py → model.py → layers/

`make house` runs this file, `make test` does not: a fork may have another shape. Only files that
git tracks are read.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from configurator import read_flags
from model import GPTConfig
from nanodnt.settings import TrainConfig
from support.trees import repository_files

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parents[2]
# commands of studies/ and interop/
UPPER = {"analyze.py", "sweep.py", "reproduce.py", "export.py", "evaluate.py"}
IN_ROOT = UPPER | {"train.py", "sample.py", "bench.py", "model.py", "vision.py", "configurator.py"}
COMMAND = 6  # the highest floor
UPPER_HELPERS = {"support.analysis", "support.claims", "support.evaluation", "support.peers"}
UPPER_TESTS = ("tests/interop/", "tests/studies/", "tests/docs/")  # and pages are about all rings
UPPER_TESTS += tuple(
    f"tests/support/{name}.py" for name in ("analysis", "claims", "evaluation", "pages", "peers")
)
UPPER_TESTS += ("tests/unit/test_house.py", "tests/runs/test_deletion.py")
BY_OTHERS = {"PIL": "pillow", "sklearn": "scikit-learn", "pyarrow": "datasets", "regex": "tiktoken"}
BY_OTHERS |= {"tiktoken_ext": "tiktoken", "lm_eval": "lm-eval"}
FOLDERS = {"layers", "nanodnt", "interop", "studies", "data"}
OWN = {"support", "conftest", *FOLDERS, *(name[:-3] for name in IN_ROOT)}
# The first two are in a `try`, and a message says what to install; Triton comes with torch's builds
# for CUDA.
OPTIONAL = {"wandb", "transformers", "triton"}
# Lower these when something goes. Flags are those of the model and of training; refusals, `raise
# ValueError`.
MAX_FLAGS, MAX_REFUSALS, MAX_IMPORTS_OF_TRAIN = 149, 299, 54
COUNT_IMPORTS = """
import sys
import train
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(sum(file.startswith(sys.argv[1]) and "/.venv/" not in file for file in files))
"""


def read_sources(root: Path) -> dict:
    """{path: source} of every Python file of the repository at `root` but configs and docs."""
    found = {
        path.relative_to(root).as_posix(): path
        for path in repository_files(root)
        if path.suffix == ".py"
    }
    found = {
        name: path for name, path in found.items() if not name.startswith(("config/", "docs/"))
    }
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def split_tests(sources: dict) -> tuple:
    """(the code, the tests), both {path: source}."""
    tests = {path: source for path, source in sources.items() if path.startswith("tests/")}
    return {path: source for path, source in sources.items() if path not in tests}, tests


parse = cache(ast.parse)


@cache
def imported_names(source: str) -> set:
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


def import_graph(code: dict) -> dict:
    """{path: paths of the project's files that it imports}."""
    modules = {path[:-3].removesuffix("/__init__").replace("/", "."): path for path in code}
    return {
        path: {modules[name] for name in imported_names(source) if name in modules} - {path}
        for path, source in code.items()
    }


def floor(path: str) -> int:
    if path.startswith("layers/"):
        return 1
    if path in ("model.py", "vision.py"):
        return 2
    folders = {"nanodnt": 3, "interop": 4, "studies": 5}
    return 3 if path == "configurator.py" else folders.get(path.split("/")[0], COMMAND)


def upward_arrows(graph: dict) -> list:
    """To a higher floor, or to a command."""
    return [
        f"{a} → {b}"
        for a in graph
        for b in sorted(graph[a])
        if floor(b) > floor(a) or floor(b) == COMMAND
    ]


def circle(graph: dict) -> list:
    """One import circle, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def folder_graph(graph: dict) -> dict:
    """The same arrows between the parts of a ring: a folder, or a file that lies in no folder."""

    def part(path):
        return (
            "/".join(path.split("/")[:2])
            if path.startswith(("nanodnt/", "interop/", "studies/"))
            else path
        )

    parts = {part(path): set() for path in graph}
    for path, imported in graph.items():
        parts[part(path)] |= {part(other) for other in imported} - {part(path)}
    return parts


def foreign_imports(source: str, allowed: set) -> set:
    return (
        {name.split(".")[0] for name in imported_names(source)} - allowed - sys.stdlib_module_names
    )


def importers_of_tests(tests: dict) -> list:
    stems = {Path(path).stem for path in tests if Path(path).name.startswith("test_")}
    return [
        p
        for p, source in tests.items()
        if stems & {w for n in imported_names(source) for w in n.split(".")}
    ]


def core_tests_of_upper_rings(tests: dict) -> list:
    """Tests of the core that import interop/, studies/, their commands or their helpers, or start
    these commands."""
    upper = {"interop", "studies", *(name[:-3] for name in UPPER), *UPPER_HELPERS}
    found = []
    for path, source in tests.items():
        strings = {
            node.value for node in ast.walk(parse(source)) if isinstance(node, ast.Constant)
        } & UPPER
        imported = imported_names(source) | {name.split(".")[0] for name in imported_names(source)}
        found += [
            f"{path}: {name}"
            for name in sorted(strings | imported & upper)
            if not path.startswith(UPPER_TESTS)
        ]
    return found


# ---------------------------------------------------------------------------------------- this tree

SOURCES = read_sources(ROOT)
CODE, TESTS = split_tests(SOURCES)
GRAPH = import_graph(CODE)


def test_arrows_point_down():
    assert upward_arrows(GRAPH) == [], (
        "move what is needed to the lower ring, or the file that needs it up"
    )
    relative = [
        path for path in SOURCES for name in imported_names(SOURCES[path]) if name.startswith(".")
    ]
    assert relative == [], "import by the whole name, as in `from nanodnt.run import signals`"


def test_no_import_circles():
    advice = "move what both files need into a third"
    assert circle(GRAPH) == [], advice
    assert circle(folder_graph(GRAPH)) == [], f"between folders: {advice}"


def test_what_lies_in_the_root():
    """A fork may have deleted the upper rings."""
    in_root = {path for path in CODE if "/" not in path}
    assert IN_ROOT - UPPER <= in_root, "a command is gone: take it out of IN_ROOT above"
    assert in_root <= IN_ROOT, (
        "a new file in the root: move it to a ring, or add it to IN_ROOT above"
    )
    folders = {path.split("/")[0] for path in CODE if "/" in path}
    assert {"layers", "nanodnt", "data"} <= folders <= FOLDERS, (
        "move the new folder to a ring, or add it to FOLDERS"
    )


def test_what_the_network_imports():
    """model.py and layers/ can be copied: torch is all they need; vision.py needs them too.
    configurator.py needs nothing at all."""
    allowed = {
        p: {"torch", "layers", *(["model"] if p == "vision.py" else [])}
        for p in CODE
        if floor(p) <= 2
    }
    # found by name, if at all
    allowed |= {p: {"torch", "triton"} for p in CODE if p.startswith("layers/kernels/")}
    network = {p: foreign_imports(CODE[p], names) for p, names in allowed.items()}
    wrong = {path: names for path, names in network.items() if names}
    assert wrong == {}, (
        "the network can be copied with torch alone: do this elsewhere, or without the import"
    )
    assert foreign_imports(CODE["configurator.py"], set()) == set(), (
        "configurator.py needs no package"
    )


def test_what_train_imports():
    """A run on text, on one device, loads nothing that it does not use."""
    call = [sys.executable, "-c", COUNT_IMPORTS, f"{ROOT}/"]
    files = int(subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert files <= MAX_IMPORTS_OF_TRAIN, "import what only some runs need where they need it"


def versions(name: str, relations: str) -> dict[str, tuple]:
    """{package: its version, as numbers} of a requirements file; every line must have one of these
    relations to it."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [re.fullmatch(rf"([\w-]+)(?:{relations})([\d.]+)", line) for line in lines if line]
    assert all(found), f"{name}: write each line as PACKAGE, one of {relations}, VERSION"
    return {match[1]: tuple(map(int, match[2].split("."))) for match in found}


def test_what_is_imported_is_required():
    run, extra, develop, evaluation = (
        versions(f"requirements{name}.txt", ">=|==") for name in ("", "-extra", "-dev", "-eval")
    )
    code, tests = (
        set().union(*(foreign_imports(s, OWN) for s in part.values())) for part in (CODE, TESTS)
    )
    code, tests = ({BY_OTHERS.get(name, name) for name in names} for names in (code, tests))
    needed = set(run) | set(extra)
    assert code - OPTIONAL - set(evaluation) <= needed, (
        "add the package to requirements.txt or requirements-extra.txt"
    )
    # a fork that has deleted rings needs less
    assert needed <= code or not UPPER <= CODE.keys(), "a package that nothing imports: take it out"
    assert tests <= needed | set(develop) | set(evaluation), (
        "add the package to requirements-dev.txt"
    )
    assert not needed & {*develop, *evaluation} and not set(run) & set(extra), (
        "name each package in one file"
    )


def test_every_package_has_a_tested_version():
    names = set().union(
        *(versions(f"requirements{name}.txt", ">=|==") for name in ("", "-extra", "-dev", "-eval"))
    )
    assert set(versions("constraints.txt", "==")) == names, (
        "give each package its tested version in constraints.txt"
    )


def test_flags_and_refusals_do_not_grow():
    n_flags = sum(len(read_flags(schema)) for schema in (GPTConfig, TrainConfig))
    n_refusals = sum(source.count("raise ValueError") for source in CODE.values())
    assert n_flags <= MAX_FLAGS, (
        "remove a flag, or raise MAX_FLAGS and say in the commit why it is worth it"
    )
    assert n_refusals <= MAX_REFUSALS, (
        "remove a refusal, or raise MAX_REFUSALS and say in the commit why"
    )


def test_what_tests_import():
    assert importers_of_tests(TESTS) == [], (
        "no test imports another: move what they share to tests/support/"
    )
    wrong = core_tests_of_upper_rings(TESTS)
    assert wrong == [], (
        "a test of the core must do without interop/ and studies/: move it to tests/interop or studies"
    )
