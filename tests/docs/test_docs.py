"""The pages, the Makefile and the headers of configs say what the code does: commands start, links
resolve, flags exist, outputs are what is printed, the README's changes apply."""

import ast
import importlib
import importlib.util
import re
import sys
from dataclasses import fields

import pytest

import bench
from configurator import read_flags
from nanodnt.engine import split_batch
from nanodnt.optim import describe_groups, make_optimizer
from nanodnt.plan.__main__ import main, read_command
from nanodnt.plan.planning import PlanConfig
from support.pages import (
    CONFIGS,
    FLAGS,
    PAGES,
    ROOT,
    SCHEMAS,
    STUDIES,
    WORDS,
    anchors,
    commands,
    complete,
    links,
    load,
    outline,
    read_values,
    rows_with,
    shown_outputs,
)
from support.runs import TINY, make_dataset
from support.trees import apply_readme, call, copy_tree

pytestmark = pytest.mark.house
README = (ROOT / "README.md").read_text()
NAMES = {page: page.relative_to(ROOT).as_posix() for page in PAGES}
SOURCES = [ROOT / name for name in ("Makefile", *SCHEMAS, "nanodnt/plan/__main__.py")]
COMMANDS = list(commands([*PAGES, *SOURCES, *(ROOT / path for path in [*CONFIGS, *STUDIES])]))
# tests/interop/test_pages.py has those
OUTPUTS = [shown for shown in shown_outputs(PAGES) if shown[1] != "export.py"]
ADDED_BY_README = ("--branch_factor", "--optimizer=lion")  # tried by test_the_readmes_changes_work


def test_the_readmes_layouts_build():
    found = [text for row in rows_with(README, "flags") for text in FLAGS.findall(row["flags"])]
    assert len(found) >= 9 and "lns=norm residual_init=plain" in found
    for text in found:
        model, config = complete(*load(*(f"--{flag}" for flag in text.split())))
        make_optimizer(outline(model), config)


def test_links_resolve_and_every_page_is_linked():
    missing, linked = [], set()
    for page in PAGES:
        for target, anchor in links(page.read_text()):
            path = (page.parent / target).resolve() if target else page
            there = path.exists() and (not anchor or anchor in anchors(path.read_text()))
            missing += [f"{NAMES[page]}: {target}#{anchor}"] * (not there)
            linked |= {path} - {page}
    assert missing == [] and set(PAGES[1:]) <= linked


def test_the_readmes_file_list():
    """A name stands in the folder below which it is indented, or in the root."""
    block = README.split("## The files")[1].split("```")[1]
    folder, listed = ROOT, set()
    for line in block.splitlines():
        names = re.findall(r"\b\w+(?:\.py|/)", line)
        if names and not line.startswith(" "):
            folder = ROOT / names[0]
        listed |= {folder / name if line.startswith(" ") else ROOT / name for name in names}
    assert [path for path in listed if not path.exists()] == []
    assert set(ROOT.glob("*.py")) <= listed and len(listed) > 30


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_loads_builds_and_names_its_command(path):
    model, config = complete(*load(str(ROOT / path)))
    outline(model)
    text = (ROOT / path).read_text()
    assert re.search(rf"train\.py .*{path}", text.replace("\\\n", " ")), "its launch line"
    if path.parent.name == "config":
        assert config.out_dir == f"out/{path.stem}"
        for gpus in (
            (1, 2, 4, 8)
            if "small" in path.stem or "large" in path.stem or "xl" in path.stem
            else (1,)
        ):
            split_batch(config.batch_size, config.micro_batch_size, gpus)


def test_every_flag_of_every_command_has_a_text_in_its_help():
    flags = {
        name: flag for schemas in SCHEMAS.values() for name, flag in read_flags(*schemas).items()
    }
    assert [name for name, flag in flags.items() if not flag.help] == []


# Flags of other programs, and of data/*/prepare.py and soak.py.
FOREIGN = "standalone nproc_per_node nnodes max_restarts shutdown-timeout rdzv_backend"
FOREIGN += " rdzv_endpoint rdzv_id rdzv_conf kill-on-bad-exit job-name ntasks-per-node"
FOREIGN += " gpus-per-node cpus-per-task time signal requeue open-mode output nodes help key deep"
FOREIGN += " input name tokenizer shards kills seed minutes branch_factor array wrap"
FOREIGN += " version edu skip_bad max_tokens prompt_key response_key folder signals-to-handle tiny"
FOREIGN += " mem wait partition account"


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_flags_and_scripts_that_a_page_names_exist(page):
    text = page.read_text()
    known = {name for schemas in SCHEMAS.values() for name in read_flags(*schemas)}
    known |= {word[2:] for word in WORDS} | set(FOREIGN.split())
    assert set(re.findall(r"(?<![\w-])--([A-Za-z][\w-]*)", text)) - known == set()
    started = re.findall(
        r"(?:python|torchrun [^\n]*?) ((?:\w+/)*\w+\.py)", text.replace("\\\n", " ")
    )
    own = ["check.py"]  # the page has it whole
    assert [path for path in started if path not in own and not (ROOT / path).exists()] == []
    # make install-eval alone has it
    modules = set(re.findall(r"python -m ([\w.]+)", text)) - {"lm_eval"}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_python_on_the_pages_imports_what_exists():
    imported = []
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            try:
                tree = ast.parse(block)
            except SyntaxError:  # what the quickstart's model has written
                assert "class with arguments address be a keyword" in block
                continue
            imported += [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(imported) > 5
    for node in imported:
        # of transformers too, which imports a name when it is got
        known = dir(importlib.import_module(node.module))
        assert {alias.name for alias in node.names} <= {*known}, node.module


def test_messages_on_the_page_about_many_gpus_are_the_codes():
    """Piece by piece, between the numbers; what stands in parentheses comes from torch."""
    sources = "".join(
        path.read_text() for path in [*ROOT.glob("*.py"), *(ROOT / "nanodnt").rglob("*.py")]
    )
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # literals that follow each other
    page = (ROOT / "docs" / "scale.md").read_text()
    messages = [
        m for row in rows_with(page, "message") for m in re.findall(r"`([^`]+)`", row["message"])
    ]
    pieces = [
        piece for m in messages if "exitcode" not in m for piece in re.split(r"\(.*|…|\d[\d, ]*", m)
    ]
    pieces = [piece for piece in pieces if len(piece.strip()) > 8]
    assert len(pieces) >= 3
    assert [piece for piece in pieces if piece.strip() not in sources] == []


def check_training(argv, processes):
    _, config = complete(*load(*argv))
    split_batch(config.batch_size, config.micro_batch_size, processes)


def check_command(command, argv, processes):
    """What the command checks before it reads data: files, flags, their values, the batch over the
    processes."""
    argv = [a for a in argv if not a.startswith(("--help", *ADDED_BY_README))]
    if command == "train.py":
        check_training(argv, processes)
    elif command == "model.py":
        (*_, plan), _ = read_values([a for a in argv if a != "--plan"], SCHEMAS[command])
        plan.check()
        assert "--plan" in argv or plan == PlanConfig()
        names = {f"--{f.name}" for f in fields(PlanConfig)} | {"--plan"}
        check_training([a for a in argv if a.partition("=")[0] not in names], 1)
    elif command == "sweep.py":
        from studies.sweep.grid import SweepConfig, list_points, split_arguments

        own, files, lists = split_arguments(argv)
        (config,), _ = read_values(own, (SweepConfig,))
        # so that no dataset is needed
        assert list_points(config, files, lists | {"vocab_size": ["64"]}, ROOT / "out")
    elif command == "bench.py":
        for *_, config in bench.read_variants(argv).values():
            config.check()
    else:
        configs, _ = read_values(argv, SCHEMAS[command], "run")
        for config in configs:
            if hasattr(config, "check"):
                config.check()


def test_every_command_would_start(monkeypatch):
    monkeypatch.chdir(ROOT)
    failed = []
    for path, command, argv, processes in COMMANDS:
        try:
            check_command(command, argv, processes)
        except (ValueError, AssertionError, SystemExit) as error:
            failed.append(f"{path.relative_to(ROOT)}: {command} {' '.join(argv)}: {error!r}")
    assert failed == []


def test_commands_and_outputs_are_found():
    where, found, _, processes = zip(*COMMANDS, strict=True)
    assert set(found) == set(SCHEMAS) and {1, 4, 8} <= set(processes)
    assert {ROOT / "Makefile", ROOT / "README.md", *(ROOT / path for path in CONFIGS)} <= set(where)
    assert {command for _, command, *_ in OUTPUTS} == {"model.py", "train.py"}


@pytest.mark.parametrize(
    "command, arguments, output",
    [  # a plan of 48 blocks traces four training steps
        pytest.param(
            *shown[1:],
            marks=[pytest.mark.deep] * ("--plan" in shown[2]),
            id=f"{NAMES[shown[0]]}: {shown[2]}",
        )
        for shown in OUTPUTS
    ],
)
def test_output_on_a_page_is_what_is_printed(
    command, arguments, output, tmp_path, monkeypatch, capsys
):
    """Line by line and in order; a line "…" leaves some out, a line that ends so is cut."""
    monkeypatch.chdir(ROOT)
    # as if no dataset were prepared
    monkeypatch.setattr("nanodnt.tasks.folder_of", lambda name: tmp_path)
    if command == "train.py":  # prints the groups, then needs data
        model, optimizer, *_ = read_command(list(arguments))
        printed = describe_groups(optimizer, model)
    else:
        monkeypatch.setattr(sys, "argv", [command, *arguments])
        assert main() == 0
        printed = capsys.readouterr().out
    rest = (line.rstrip() for line in printed.splitlines())
    for line in filter(None, map(str.rstrip, output.splitlines())):
        start = line.removesuffix("…")
        assert any(found == line or line != start and found.startswith(start) for found in rest), (
            line
        )


def write_my_claims(root, flags: dict):
    """The claims file of docs/claims.md, on the model of these flags, without what the claims
    vary."""
    (source,) = re.findall(
        r"the whole of `my_claims.py`:\n\n```python\n(.*?)```",
        (ROOT / "docs" / "claims.md").read_text(),
        re.DOTALL,
    )
    base = "config/claims/mini_gpt.py config/init/xavier.py"
    varied = ("out_dir", "branch_factor", "min_lr", "seed", "optimizer", "weight_decay")
    varied += ("pre_norm", "mid_norm", "input_norm", "qk_norm")  # of DNT
    flags = flags | dict(dataset=str(flags["dataset"]))
    tiny = [f"{key} = {value!r}\n" for key, value in flags.items() if key not in varied]
    (root / "tiny.py").write_text("".join(tiny))
    assert source.count(base) == 1
    (root / "my_claims.py").write_text(source.replace(base, "tiny.py"))


TRAIN_REPRODUCE_TEST = """
import sys
sys.path.append("tests")
import pytest, reproduce, train
from support.claims import in_process
from support.runs import call, quick_runs

with quick_runs():
    call(train.main, *{train})
with in_process():
    assert call(reproduce.main, *{reproduce}) == 0
sys.exit(pytest.main({tests}))
"""


@pytest.mark.deep
def test_the_readmes_changes_work(tmp_path):
    """In a copy of the tree: a run with the new layout and the new optimizer, the claims about it
    of docs/claims.md, on a tiny model, and the layout's row of tests. One process, since starting
    one takes as long as the tests."""
    root = copy_tree(tmp_path / "tree")
    apply_readme(root)
    flags = TINY | dict(
        dataset=make_dataset(root / "data" / "walk"),
        out_dir="out/run",
        max_iters=40,
        eval_interval=20,
    )
    flags |= dict(
        branch_factor=0.5, optimizer="lion", learning_rate=3e-3, min_lr=3e-4, weight_decay=0.1
    )
    pattern, name = re.search(r"^python -m pytest (\S+) -k (\w+)", README, re.MULTILINE).groups()
    tests = [
        "-p",
        "no:cacheprovider",
        "--assert=plain",
        *sorted(map(str, root.glob(pattern))),
        "-k",
        name,
    ]
    write_my_claims(root, flags | dict(learning_rate=1e-2, max_iters=20))
    script = TRAIN_REPRODUCE_TEST.format(
        train=[f"--{key}={value}" for key, value in flags.items()],
        reproduce=["--claims=my_claims.py", "--jobs=1"],
        tests=tests,
    )
    printed = call(root, [sys.executable, "-c", script])
    losses = [
        float(x) for x in re.findall(r"validation loss ([\d.]+)", printed.partition("done at")[0])
    ]
    assert losses[-1] < losses[0] - 1 and "lion" in printed
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 3
    page = (root / "out" / "reproduce" / "my_claims.md").read_text()
    assert "--skip_scale=0.9" in page and '<a id="forgetful"></a>' in page
