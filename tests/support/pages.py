"""What the documentation says, as data: its pages, tables, flags and commands, and a command line's
configuration."""

import math
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
from torch.nn import Identity

from configurator import read_arguments, read_flags, read_settings
from model import Block
from nanodnt.optim import fill_defaults
from nanodnt.tasks import fill_from_dataset, task_of
from support.trees import repository_files

ROOT = Path(__file__).resolve().parents[2]
FILES = [path.relative_to(ROOT) for path in repository_files()]
PAGES = [path for path in FILES if path.parts[0] == "docs" and path.suffix == ".md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / path for path in PAGES)]
CONFIGS = [path for path in FILES if path.parts[0] == "config" and path.suffix == ".py"]
# claims files, for reproduce.py
STUDIES = [path for path in FILES if path.parts[:-1] == ("studies",) and path.suffix == ".py"]
FLAGS = re.compile(r"`(\w+=[^\s`]+(?: \w+=[^\s`]+)*)`")  # `a=b c=d` in backticks
RUN = "model.GPTConfig", "nanodnt.settings.TrainConfig"
SCHEMAS = {  # by name: a fork may have deleted interop/ and studies/
    "train.py": RUN,
    "model.py": (*RUN, "nanodnt.plan.planning.PlanConfig"),
    "bench.py": (*RUN, "nanodnt.bench.settings.BenchConfig"),
    "sample.py": ("sample.SampleConfig", "nanodnt.sampling.SamplingConfig"),
    "chat.py": ("chat.ChatConfig", "nanodnt.sampling.SamplingConfig"),
    "analyze.py": ("studies.analysis.pipeline.AnalyzeConfig",),
    "reproduce.py": ("studies.claims.experiment.ReproduceConfig",),
    "export.py": ("export.ExportConfig",),
    "evaluate.py": ("interop.evaluation.settings.EvaluateConfig",),
    "sweep.py": (*RUN, "studies.sweep.grid.SweepConfig"),
}
SCHEMAS = {
    command: tuple(pkgutil.resolve_name(name) for name in names)
    for command, names in SCHEMAS.items()
    if (ROOT / command).exists()
}
ALIASES = {"-m nanodnt.plan": "model.py"}
WORDS = {"--plan"}  # of model.py, without a value


def keys_of(path: Path) -> dict:
    """The keys of a config file and its bases."""
    settings = read_settings(str(path)).values()
    return {s.name: s.readings[0] for s in settings if s.name}


def read_values(argv: list, schemas: tuple, positional: str = "config") -> tuple:
    """(an instance of each schema, {name: (value, where)}) of a command line; ValueError as the
    command itself."""
    given = read_arguments(list(argv), read_flags(*schemas), positional)
    values = {name: value for name, (value, _) in given.items()}
    return [
        s(**{f: values[f] for f in s.__dataclass_fields__ if f in values}) for s in schemas
    ], given


def load(*argv) -> list:
    """[GPTConfig, TrainConfig] of a command line of train.py, its defaults not filled in."""
    return read_values(argv, SCHEMAS["train.py"])[0]


def complete(model, train) -> tuple:
    """A GPTConfig and a TrainConfig, checked and completed as train.py does, without the
    dataset."""
    fill_from_dataset(model, task_of(model).placeholder_meta(model)[0], train.dataset)
    model.check()
    train.check()
    fill_defaults(train)
    return model, train


def config(*names, **flags) -> tuple:
    """The same of files by their names under config/, and flags."""
    files = [str(ROOT / "config" / f"{name}.py") for name in names]
    return complete(*load(*files, *(f"--{k}={v}" for k, v in flags.items())))


def outline(model):
    """The network of a GPTConfig without storage. Of its blocks only the first two and the last are
    made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "model.Block",
            lambda c, layer: Block(c, layer) if layer in (1, 2, c.n_layer) else Identity(),
        )
        return task_of(model).network().empty(model)


def tables(text: str):
    """Every table of a page, as a list of rows {column's title: cell}."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        cells = [re.split(r"(?<!\\)\|", row.strip().strip("|")) for row in block.splitlines()]
        titles, line, *rows = [[cell.strip() for cell in row] for row in cells]
        assert all(set(cell) <= set("-: ") for cell in line), f"no table: {titles}"
        assert {len(row) for row in rows} == {len(titles)}, (
            f"a row of another length under {titles}"
        )
        yield [dict(zip(titles, row, strict=True)) for row in rows]


def rows_with(text: str, title: str) -> list:
    """The rows of all tables of a page that have a column of this title."""
    return [row for rows in tables(text) for row in rows if title in row]


def commands(paths: list):
    """(path, command, arguments, number of processes) of every command line of ours in these
    files. `python -m nanodnt.plan` counts as its alias model.py."""
    pattern = r"(?:^|[\s&`(])(\S*python|torchrun [^\n]*?) (\w+\.py|-m nanodnt\.plan)([^\n`'|)>]*)"
    for path in paths:
        for launcher, command, rest in re.findall(pattern, path.read_text().replace("\\\n", " ")):
            placeholder = re.search(r"CONFIG|RUN|…", rest)  # "python train.py CONFIG": any file
            command = ALIASES.get(command, command)
            if command in SCHEMAS and not placeholder:
                processes = math.prod(
                    map(int, re.findall(r"(?:nproc_per_node|nnodes)=(\d+)", launcher))
                )
                yield path, command, shlex.split(rest, comments=True), processes


def shown_outputs(paths: list):
    """(path, command, arguments, output) of every block that begins with `$ python COMMAND
    ARGUMENTS`."""
    pattern = r"```\n\$ python (\w+\.py|-m nanodnt\.plan) ([^\n]*)\n(.*?)```"
    for path in paths:
        for command, arguments, output in re.findall(pattern, path.read_text(), re.DOTALL):
            yield path, ALIASES.get(command, command), arguments.split(), output


def links(text: str) -> list:
    """(target, anchor or "") of every link and image of a page that stays in the repository."""
    found = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", text)
    return [(target, anchor) for target, anchor in found if "://" not in target]


def anchors(text: str) -> set:
    """The anchors of a page's headings, as GitHub makes them, and those that it sets itself."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    found = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
