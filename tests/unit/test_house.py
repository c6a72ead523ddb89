"""The shape of this repository: three rings, arrows that only point down, no circles; light lines,
and no more content than is worth it.

    commands → studies/ → interop/ → nanodnt/ and configurator.py → model.py → layers/

`make house` runs this file, `make test` does not: a fork may have another shape. Only files that
git tracks are read. What measures is in support/house.py; the second half of this file shows, on
made-up sources, that each check finds what it is for.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import read_flags
from model import GPTConfig
from nanodnt.settings import TrainConfig
from support.house import (
    FOLDERS,
    IN_ROOT,
    PARTS,
    UPPER,
    bare_returns,
    count_refusals,
    find_circle,
    floor,
    folder_graph,
    foreign_imports,
    import_graph,
    imported_names,
    importers_of_tests,
    long_functions,
    measure,
    measure_part,
    read_sources,
    select,
    upward_arrows,
    upward_calls,
    uses_of_upper_rings,
)

pytestmark = pytest.mark.house

ROOT = Path(__file__).resolve().parents[2]

# Ceilings. Lower them when something goes. To raise one takes a reason, in the commit.
# Nodes of the syntax tree, which are the content however it is broken into lines.
MAX_NODES = {"core": 79400, "interop": 13900, "studies": 35700, "tests": 177400}
# Of the core: nodes in a line of code, and long lines, statements `a, b = x, y` and expressions
# `x if c else y` in 1000 lines of code.
MAX_NODES_PER_LINE = 7.0
MAX_LONG_LINES, MAX_PAIRS, MAX_CONDITIONALS = 70, 10, 30
MAX_LINES_OF_A_FUNCTION = 60
# Files of ours that a run on text loads.
MAX_IMPORTS_OF_TRAIN = 55
# Flags are those of the model and of training. A refusal is a `raise ValueError` or a call of
# `refuse`: those of layers/rules.py count too.
MAX_FLAGS, MAX_REFUSALS = 164, 390

# The one place where a lower floor calls an upper one: `python model.py` is an alias for
# `python -m nanodnt.plan`.
UPWARD_CALLS = ["model.py → nanodnt.plan"]

# Tests that may use the upper rings, and what only these may import.
UPPER_HELPERS = {"analysis", "claims", "evaluation", "peers"}
UPPER_TESTS = ("tests/interop/", "tests/studies/")
UPPER_TESTS += tuple(f"tests/support/{name}.py" for name in UPPER_HELPERS)
# These are about all rings.
UPPER_TESTS += ("tests/docs/", "tests/support/pages.py", "tests/support/house.py")
UPPER_TESTS += ("tests/unit/test_house.py", "tests/runs/test_deletion.py")

# Packages that are not called like the module that is imported, or come with another package.
BY_OTHERS = {"PIL": "pillow", "sklearn": "scikit-learn", "pyarrow": "datasets", "regex": "tiktoken"}
BY_OTHERS |= {"tiktoken_ext": "tiktoken", "lm_eval": "lm-eval"}
OWN = {"support", "conftest", *FOLDERS, *(name[:-3] for name in IN_ROOT)}
# Imports of the first two stand in a `try`, and a message says what to install. Triton comes with
# torch's builds for CUDA.
OPTIONAL = {"wandb", "transformers", "triton"}

COUNT_IMPORTS = """
import sys
import train
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(sum(file.startswith(sys.argv[1]) and "/.venv/" not in file for file in files))
"""

SOURCES = read_sources(ROOT)
TESTS = select(SOURCES, PARTS["tests"])
CODE = {path: source for path, source in SOURCES.items() if path not in TESTS}
CORE = select(CODE, PARTS["core"])
GRAPH = import_graph(CODE)


# ------------------------------------------------------------------------------- rings and imports


def test_arrows_point_down():
    advice = "move what is needed to the lower ring, or the file that needs it up"
    assert upward_arrows(GRAPH) == [], advice
    relative = []
    for path, source in SOURCES.items():
        if any(name.startswith(".") for name in imported_names(source)):
            relative.append(path)
    assert relative == [], "import by the whole name, as in `from nanodnt.run import signals`"


def test_one_call_points_up():
    """By name, which no import shows."""
    advice = "call it from above; where that cannot be, list it in UPWARD_CALLS with the reason"
    assert upward_calls(CORE) == UPWARD_CALLS, advice


def test_no_import_circles():
    advice = "move what both files need into a third"
    assert find_circle(GRAPH) == [], advice
    assert find_circle(folder_graph(GRAPH)) == [], f"between folders: {advice}"


def test_what_lies_in_the_root():
    """A fork may have deleted the upper rings."""
    in_root = {path for path in CODE if "/" not in path}
    assert IN_ROOT - UPPER <= in_root, "a command is gone: take it out of IN_ROOT"
    assert in_root <= IN_ROOT, "a new file in the root: move it to a ring, or add it to IN_ROOT"
    folders = {path.split("/")[0] for path in CODE if "/" in path}
    advice = "move the new folder to a ring, or add it to FOLDERS"
    assert {"layers", "nanodnt", "data"} <= folders <= FOLDERS, advice


def test_what_the_network_imports():
    """model.py and layers/ can be copied: torch is all they need; vision.py needs them too.
    configurator.py needs nothing at all."""
    wrong = {}
    for path, source in CODE.items():
        allowed = {"torch", "layers"}
        if path == "vision.py":
            allowed.add("model")
        if path.startswith("layers/kernels/"):  # imported by name, and only where Triton is
            allowed.add("triton")
        if floor(path) <= 2 and foreign_imports(source, allowed):
            wrong[path] = foreign_imports(source, allowed)
    advice = "the network can be copied with torch alone: do this elsewhere, or without the import"
    assert wrong == {}, advice
    foreign = foreign_imports(CODE["configurator.py"], set())
    assert foreign == set(), "configurator.py needs no package"


def test_what_train_imports():
    """A run on text, on one device, loads nothing that it does not use."""
    call = [sys.executable, "-c", COUNT_IMPORTS, f"{ROOT}/"]
    files = int(subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert files <= MAX_IMPORTS_OF_TRAIN, "import what only some runs need where they need it"


def test_what_tests_import():
    advice = "no test imports another: move what they share to tests/support/"
    assert importers_of_tests(TESTS) == [], advice
    helpers = {f"support.{name}" for name in UPPER_HELPERS}
    wrong = {}
    for path, source in TESTS.items():
        uses = uses_of_upper_rings(source, helpers)
        if uses and not path.startswith(UPPER_TESTS):
            wrong[path] = uses
    advice = "a test of the core does without interop/ and studies/: move it to their tests"
    assert wrong == {}, advice


# ------------------------------------------------------------------------------ content and density


def test_lines_of_the_core_are_light():
    """As light as those of nanoGPT, nanochat and plainLM, measured the same way."""
    core = measure_part(CODE, "core")
    advice = "give a part of a heavy line its name, or say it with less; do not break it by force"
    assert core.nodes_per_line <= MAX_NODES_PER_LINE, advice
    assert core.per_thousand_lines(core.long_lines) <= MAX_LONG_LINES, advice
    assert core.per_thousand_lines(core.pairs) <= MAX_PAIRS, "one statement, one thought"
    assert core.per_thousand_lines(core.conditionals) <= MAX_CONDITIONALS, "write an if"


@pytest.mark.parametrize("part", PARTS)
def test_content_does_not_grow(part):
    nodes = measure_part(SOURCES, part).nodes
    assert nodes <= MAX_NODES[part], (
        "remove something, or raise MAX_NODES and say in the commit why"
    )


def test_no_function_is_long():
    advice = "a function with two jobs is two functions"
    assert long_functions(CODE, MAX_LINES_OF_A_FUNCTION) == [], advice


def test_the_core_says_what_it_returns():
    advice = "write dict[str, Tensor], list[str]; name the parts of a tuple in a NamedTuple"
    assert bare_returns(CORE) == [], advice


def test_flags_and_refusals_do_not_grow():
    n_flags = sum(len(read_flags(schema)) for schema in (GPTConfig, TrainConfig))
    n_refusals = sum(map(count_refusals, CODE.values()))
    advice = "and say in the commit why it is worth it"
    assert n_flags <= MAX_FLAGS, f"remove a flag, or raise MAX_FLAGS {advice}"
    assert n_refusals <= MAX_REFUSALS, f"remove a refusal, or raise MAX_REFUSALS {advice}"


# ------------------------------------------------------------------------------------ requirements


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


# ------------------------------------------------------- each check finds what it is for


def test_an_upward_arrow_is_found():
    code = {
        "layers/slot.py": "def f():\n    from model import GPT\n",
        "model.py": "import layers\n",
    }
    assert upward_arrows(import_graph(code)) == ["layers/slot.py → model.py"]
    code = {"studies/look.py": "import sweep\n", "sweep.py": "from studies import look\n"}
    assert upward_arrows(import_graph(code)) == ["studies/look.py → sweep.py"]


def test_an_upward_call_is_found():
    plan = {
        "nanodnt/__init__.py": "",
        "nanodnt/plan/__init__.py": "",
        "nanodnt/plan/__main__.py": "",
    }
    for call in (
        "subprocess.call([sys.executable, '-m', 'nanodnt.plan', *sys.argv[1:]])",
        "def f():\n    importlib.import_module('nanodnt.plan')",
        "__import__('nanodnt')",
    ):
        assert len(upward_calls(plan | {"model.py": call})) == 1, call
        assert upward_calls(plan | {"train.py": call}) == []
        assert upward_calls(plan | {"nanodnt/start.py": call}) == []
    for call in ("import runpy", "def f():\n    from runpy import run_path"):
        assert upward_calls({"nanodnt/start.py": call}) == ["nanodnt/start.py → runpy"]


def test_a_circle_is_found():
    code = {"nanodnt/a.py": "from nanodnt import b\n", "nanodnt/b.py": "import nanodnt.a\n"}
    assert set(find_circle(import_graph(code))) == {"nanodnt/a.py", "nanodnt/b.py"}
    code = {
        "nanodnt/run/a.py": "import nanodnt.data.b\n",
        "nanodnt/run/c.py": "",
        "nanodnt/data/b.py": "from nanodnt.run import c\n",
    }
    assert find_circle(import_graph(code)) == []
    assert set(find_circle(folder_graph(import_graph(code)))) == {"nanodnt/run", "nanodnt/data"}


def test_a_foreign_import_is_found():
    source = "import os.path\nimport torch\n\ndef f():\n    from numpy import linalg\n"
    assert foreign_imports(source, {"torch"}) == {"numpy"}
    assert imported_names("from . import x\n") == {".", "..x"}


def test_an_import_of_a_test_and_of_an_upper_ring_is_found():
    tests = {"tests/unit/test_a.py": "", "tests/unit/test_b.py": "from unit.test_a import f\n"}
    assert importers_of_tests(tests) == ["tests/unit/test_b.py"]
    helpers = {"support.claims"}
    assert uses_of_upper_rings("from interop.evaluation import x\n", helpers) == ["interop"]
    assert uses_of_upper_rings("import sweep\n", helpers) == ["sweep"]
    assert uses_of_upper_rings("from support.claims import claim\n", helpers) == ["support.claims"]
    assert uses_of_upper_rings("call('export.py')\n", helpers) == ["export.py"]
    assert uses_of_upper_rings("from support.runs import call\n", helpers) == []


def test_density_by_hand():
    """The nodes: Module; Assign, Tuple, Name, Name, Tuple, Constant, IfExp, Name, Name, Name."""
    source = f'''"""A docstring
of two lines."""

# a comment
a, b = 1, x if c else y  # {"long " * 20}
'''
    density = measure(source)
    assert (density.lines, density.long_lines, density.pairs, density.conditionals) == (1, 1, 1, 1)
    assert density.nodes == measure("a, b = 1, x if c else y").nodes + 2 == 11 + 2
    assert measure("a, b = f(x)\n").pairs == 0 and measure("a = b, c\n").pairs == 0
    # a text of several lines is code, and a broken line weighs less
    assert measure("x = '''\n\n'''\n").lines == 3
    assert measure("f(\n    x)\n").nodes_per_line == measure("f(x)\n").nodes_per_line / 2
    total = measure(source) + measure("a, b = 1, 2\n")
    assert (total.lines, total.pairs) == (2, 2) and total.per_thousand_lines(total.pairs) == 1000


def test_refusals_are_counted():
    source = "if a:\n    raise ValueError('x')\nelse:\n    rules.refuse(x)\nraise KeyError\n"
    assert count_refusals(source) == 2 and count_refusals("def refuse(x): ...\nrefused()\n") == 0


def test_a_long_function_and_a_bare_return_type_are_found():
    long = "class A:\n    def f(self) -> list[int]:\n" + "        pass\n" * 60
    assert long_functions({"a.py": long}, 60) == ["a.py:2 f: 61 lines"]
    assert long_functions({"a.py": long}, 61) == []
    for bare in ("tuple", "dict", "list", "set", "dict | None"):
        assert bare_returns({"a.py": f"async def f() -> {bare}: ...\n"}) == ["a.py:1 f"]
    for full in ("tuple[int, int]", "dict[str, int] | None", "'A'", "None"):
        assert bare_returns({"a.py": f"def f() -> {full}: ...\n"}) == []


def test_every_mutant_has_its_place():
    """tests/mutants.py replaces a text that stands once in its file."""
    for mutant in json.loads((ROOT / "tests/mutants.json").read_text()):
        if mutant["file"] in SOURCES:  # a fork may have deleted it
            assert SOURCES[mutant["file"]].count(mutant["old"]) == 1, mutant
