"""The shape of the code: three rings, arrows that only point down, no circles, files that can be read in one sitting.

    commands → studies/ → interop/ → nanodnt/ and configurator.py → model.py → layers/

Every check gets the sources as data, so that `test_the_checks_can_fail` can give them a made-up tree with the mistakes.
"""

import ast
import os
import re
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from configurator import read_flags
from model import GPTConfig
from nanodnt.settings import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
UPPER = {"analyze.py", "sweep.py", "reproduce.py", "export.py", "evaluate.py"}  # commands of studies/ and interop/
IN_ROOT = UPPER | {"train.py", "sample.py", "bench.py", "model.py", "vision.py", "configurator.py"}
COMMAND = 6  # the highest floor
UPPER_HELPERS = {"support.analysis", "support.claims", "support.evaluation", "support.peers"}
UPPER_TESTS = ("tests/interop/", "tests/studies/", "tests/docs/")  # and pages are about all rings
UPPER_TESTS += tuple(f"tests/support/{name}.py" for name in ("analysis", "claims", "evaluation", "pages", "peers"))
UPPER_TESTS += ("tests/unit/test_house.py", "tests/runs/test_deletion.py")
BY_OTHERS = {"PIL": "pillow", "sklearn": "scikit-learn", "pyarrow": "datasets", "regex": "tiktoken"}
BY_OTHERS |= {"tiktoken_ext": "tiktoken", "lm_eval": "lm-eval"}
FOLDERS = {"layers", "nanodnt", "interop", "studies", "data"}
OWN = {"support", "conftest", *FOLDERS, *(name[:-3] for name in IN_ROOT)}
OPTIONAL = {"wandb", "transformers"}  # in a `try`: a message says what to install
MAX_LINES = {"model.py": 500, "train.py": 320}
MAX_CODE_LINES, MAX_TEST_LINES, MAX_FUNCTION_LINES = 450, 600, 60
# What the whole may come to: lower these when something goes. Flags are those of the model and of training.
MAX_ALL_CODE, MAX_ALL_TESTS, MAX_FLAGS, MAX_REFUSALS = 18_022, 28_951, 148, 347


def read_sources(root: Path) -> dict:
    """{path: source} of every Python file below `root` but configs, docs and what is hidden or installed there."""
    found = {}
    for folder, folders, names in os.walk(root):
        left_out = {name for name in folders if name.startswith(".") or (Path(folder) / name / "pyvenv.cfg").exists()}
        left_out |= {"config", "docs", "out"} if Path(folder) == root else {"__pycache__"}
        folders[:] = set(folders) - left_out
        for path in (Path(folder) / name for name in names if name.endswith(".py")):
            found[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
    return found


def split_tests(sources: dict) -> tuple:
    """(the code, the tests), both {path: source}."""
    tests = {path: source for path, source in sources.items() if path.startswith("tests/")}
    return {path: source for path, source in sources.items() if path not in tests}, tests


parse = cache(ast.parse)


@cache
def imported_names(source: str) -> set:
    """The modules that a file imports, in functions too: absolute names, and ".x" for a relative import. The x of
    `from m import x` may be a module, so both m and m.x are in it."""
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
    return [f"{a} → {b}" for a in graph for b in sorted(graph[a]) if floor(b) > floor(a) or floor(b) == COMMAND]


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
        return "/".join(path.split("/")[:2]) if path.startswith(("nanodnt/", "interop/", "studies/")) else path

    parts = {part(path): set() for path in graph}
    for path, imported in graph.items():
        parts[part(path)] |= {part(other) for other in imported} - {part(path)}
    return parts


def foreign_imports(source: str, allowed: set) -> set:
    return {name.split(".")[0] for name in imported_names(source)} - allowed - sys.stdlib_module_names


def long_functions(code: dict) -> list:
    found = []
    for path, source in code.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                found += [f"{path}:{node.lineno} {node.name}: {lines} lines"] * (lines > MAX_FUNCTION_LINES)
    return found


def long_files(sources: dict, most: int) -> list:
    lines = {path: source.count("\n") for path, source in sources.items()}
    return [f"{path}: {count} lines" for path, count in lines.items() if count > MAX_LINES.get(path, most)]


def importers_of_tests(tests: dict) -> list:
    stems = {Path(path).stem for path in tests if Path(path).name.startswith("test_")}
    return [p for p, source in tests.items() if stems & {w for n in imported_names(source) for w in n.split(".")}]


def core_tests_of_upper_rings(tests: dict) -> list:
    """Tests of the core that import interop/, studies/, their commands or their helpers, or start these commands."""
    upper = {"interop", "studies", *(name[:-3] for name in UPPER), *UPPER_HELPERS}
    found = []
    for path, source in tests.items():
        strings = {node.value for node in ast.walk(parse(source)) if isinstance(node, ast.Constant)} & UPPER
        imported = imported_names(source) | {name.split(".")[0] for name in imported_names(source)}
        found += [f"{path}: {name}" for name in sorted(strings | imported & upper) if not path.startswith(UPPER_TESTS)]
    return found


# ------------------------------------------------------------------------------------------------------ this tree

SOURCES = read_sources(ROOT)
CODE, TESTS = split_tests(SOURCES)
GRAPH = import_graph(CODE)


def test_arrows_point_down():
    assert upward_arrows(GRAPH) == []
    assert [path for path in SOURCES for name in imported_names(SOURCES[path]) if name.startswith(".")] == []


def test_no_import_circles():
    assert circle(GRAPH) == []
    assert circle(folder_graph(GRAPH)) == []


def test_what_lies_in_the_root():
    """A fork may have deleted the upper rings."""
    assert IN_ROOT - UPPER <= {path for path in CODE if "/" not in path} <= IN_ROOT
    folders = {path.split("/")[0] for path in CODE if "/" in path}
    assert {"layers", "nanodnt", "data"} <= folders <= FOLDERS


def test_what_the_network_imports():
    """model.py and layers/ can be copied: torch is all they need; vision.py needs them too. configurator.py needs
    nothing at all."""
    allowed = {p: {"torch", "layers", *(["model"] if p == "vision.py" else [])} for p in CODE if floor(p) <= 2}
    network = {p: foreign_imports(CODE[p], names) for p, names in allowed.items()}
    assert {path: names for path, names in network.items() if names} == {}
    assert foreign_imports(CODE["configurator.py"], set()) == set()


def versions(name: str, relations: str) -> dict[str, tuple]:
    """{package: its version, as numbers} of a requirements file; every line must have one of these relations to it."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [re.fullmatch(rf"([\w-]+)(?:{relations})([\d.]+)", line) for line in lines if line]
    assert all(found)
    return {match[1]: tuple(map(int, match[2].split("."))) for match in found}


def test_what_is_imported_is_required():
    run, extra, develop, evaluation = (
        versions(f"requirements{name}.txt", ">=|==") for name in ("", "-extra", "-dev", "-eval")
    )
    code, tests = (set().union(*(foreign_imports(s, OWN) for s in part.values())) for part in (CODE, TESTS))
    code, tests = ({BY_OTHERS.get(name, name) for name in names} for names in (code, tests))
    assert code - OPTIONAL - set(evaluation) <= set(run) | set(extra)
    assert set(run) | set(extra) <= code or not UPPER <= CODE.keys()  # a fork that has deleted rings needs less
    assert tests <= set(run) | set(extra) | set(develop) | set(evaluation)
    assert not (set(run) | set(extra)) & {*develop, *evaluation} and not set(run) & set(extra)


def test_a_tested_version_is_one_that_is_allowed():
    tested = versions("constraints.txt", "==")
    lowest = {}
    for name in ("", "-extra", "-dev", "-eval"):
        lowest |= versions(f"requirements{name}.txt", ">=|==")
    assert tested.keys() == lowest.keys()
    assert [name for name in tested if tested[name] < lowest[name]] == []
    assert list(tested)[0] == "torch"


def test_lengths():
    assert CODE.keys() >= MAX_LINES.keys()
    assert long_files(CODE, MAX_CODE_LINES) == []
    assert long_files(TESTS, MAX_TEST_LINES) == []
    assert long_functions(CODE) == []


def test_the_sums_do_not_grow():
    """What is new takes the place of something, or the number says that it is worth it."""
    assert sum(source.count("\n") for source in CODE.values()) <= MAX_ALL_CODE
    assert sum(source.count("\n") for source in TESTS.values()) <= MAX_ALL_TESTS
    assert sum(len(read_flags(schema)) for schema in (GPTConfig, TrainConfig)) <= MAX_FLAGS
    assert sum(source.count("raise ValueError") for source in CODE.values()) <= MAX_REFUSALS


def test_what_tests_import():
    """No test imports another; those of the core do without interop/ and studies/."""
    assert importers_of_tests(TESTS) == []
    assert core_tests_of_upper_rings(TESTS) == []


# ------------------------------------------------------------------------------------------------- a made-up tree

GOOD = {
    "train.py": "from nanodnt.run import saving\nimport model\nwhile True:\n    break\n",
    "model.py": "import torch\nimport math\nfrom layers.ops import gelu\n",
    "layers/ops.py": "import torch\n",
    "nanodnt/run/__init__.py": "",
    "nanodnt/run/saving.py": "def save():\n    from nanodnt import files\n",
    "nanodnt/files.py": "from configurator import configure\n",
    "configurator.py": "import ast\n",
    "tests/test_a.py": "from support.runs import run\nimport train\n",
    "tests/support/runs.py": "",
}


def checks(sources: dict) -> set:
    """The names of the checks that find something in made-up sources."""
    code, tests = split_tests(sources)
    graph = import_graph(code)
    found = {
        "upward": upward_arrows(graph),
        "circle": circle(graph),
        "folders": circle(folder_graph(graph)),
        "foreign": foreign_imports(code["model.py"], {"torch", "layers"}),
        "functions": long_functions(code),
        "files": long_files(code, MAX_CODE_LINES),
        "tests": importers_of_tests(tests),
        "core tests": core_tests_of_upper_rings(tests),
    }
    return {name for name, what in found.items() if what}


def test_the_checks_can_fail():
    assert checks(GOOD) == set()
    for path, source, found in (
        ("layers/ops.py", "def f():\n    from nanodnt import files\n", {"upward"}),
        ("nanodnt/files.py", "from train import main\n", {"upward", "circle", "folders"}),
        ("nanodnt/files.py", "import nanodnt.run.saving as s\n", {"circle", "folders"}),
        ("bench.py", "import train\n", {"upward"}),
        ("model.py", "import torch\nimport numpy.linalg\n", {"foreign"}),
        ("nanodnt/x.py", "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES, {"functions"}),
        ("nanodnt/x.py", "\n" * 451, {"files"}),
        ("train.py", "\n" * 321, {"files"}),
        ("tests/test_b.py", "from test_a import x", {"tests"}),
        ("tests/test_b.py", "import tests.test_a", {"tests"}),
        ("tests/runs/test_b.py", "from interop.x import y", {"core tests"}),
        ("tests/runs/test_b.py", "import sweep", {"core tests"}),
        ("tests/runs/test_b.py", 'x = "export.py"', {"core tests"}),
        ("tests/interop/test_b.py", 'x = "export.py"', set()),
    ):
        assert checks(GOOD | {path: source}) == found, (path, source)
