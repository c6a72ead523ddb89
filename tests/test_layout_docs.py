"""docs/layouts.md says what the code does: its flags build, or are refused; its pictures come from the model."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from configurator import read_arguments, read_knobs
from model import GPT, GPTConfig
from optim import fill_defaults, make_optimizer
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "layouts.md").read_text()
FLAGS = re.compile(r"`(\w+=[^\s`]+(?: \w+=[^\s`]+)*)`")


def tables():
    """Every table of the page: its rows as {column's title: cell}."""
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        titles, line, *rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in block.splitlines()]
        assert all(set(cell) <= set("-:") for cell in line)
        assert {len(row) for row in rows} == {len(titles)}, f"a row of another length under {titles}"
        yield [dict(zip(titles, row, strict=True)) for row in rows]


def in_column(title):
    """All flags (`a=b c=d` in backticks) of the tables' columns of that title."""
    return [text for rows in tables() for row in rows for text in FLAGS.findall(row.get(title, ""))]


REFUSED, NOTED = in_column("refused flags"), in_column("noted flags")
VALID = sorted(set(FLAGS.findall(PAGE)) - set(REFUSED))  # wherever on the page


def load(text):
    """(GPTConfig, TrainConfig) of flags, checked as train.py does: names, types, allowed values."""
    given = read_arguments([f"--{flag}" for flag in text.split()], read_knobs(GPTConfig, TrainConfig))
    values = {"vocab_size": 50257} | {name: value for name, (value, _) in given.items()}
    return [s(**{f: values[f] for f in s.__dataclass_fields__ if f in values}) for s in (GPTConfig, TrainConfig)]


def test_the_flags_are_found():
    assert len(in_column("flags")) > 45 and len(VALID) > 60 and len(REFUSED) > 25 and len(NOTED) > 7


@pytest.mark.parametrize("text", VALID)
def test_flags_build(text):
    config, training = load(text)
    training.check()
    fill_defaults(training)
    with torch.device("meta"):
        network = GPT(config)
    make_optimizer(network, training)


def test_noted_flags_print_a_note_and_the_other_schemes_none():
    silent = [text for text in NOTED if not load(text)[0].notes()]
    loud = [text for text in in_column("flags") if load(text)[0].notes() and text not in NOTED]
    assert silent == [] and loud == []


def test_refused_flags_are_refused_and_every_refusal_is_in_the_table():
    reached = set()
    for text in REFUSED:
        with pytest.raises(ValueError) as caught:
            load(text)[0].check()
        assert len(str(caught.value).splitlines()) == 1
        reached |= {(entry.frame.code.name, entry.lineno + 1) for entry in caught.traceback}
    for check in (GPTConfig._check_norms, GPTConfig._check_scales):
        lines, first = inspect.getsourcelines(check)
        calls = {number: line for number, line in enumerate(lines, first) if "_refuse(" in line}
        missing = {number: line for number, line in calls.items() if (check.__name__, number) not in reached}
        assert calls and missing == {}, "no row of the table is refused by these lines of model.py"


def test_every_layout_flag_is_on_the_page():
    names = [f.name for f in fields(GPTConfig)]
    names = names[names.index("norm") :]
    assert names[-1] == "residual_init"
    missing = [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE)]
    assert missing == []


def test_dnt_settings_are_the_config_files():
    rows = {row["scheme"]: row["flags"] for table in tables() for row in table if "scheme" in row and "flags" in row}
    for scheme, name in {"Pre-LN = S1": "s1", "S2": "s2", "S3": "s3", "S4": "s4", "S5 = **DNT**": "s5"}.items():
        flags = FLAGS.findall(rows[scheme])
        given = read_arguments([str(ROOT / f"config/dnt/{name}.py")], read_knobs(GPTConfig))
        wanted = GPTConfig(vocab_size=50257, **{key: value for key, (value, _) in given.items()})
        assert load(flags[0] if flags else "")[0] == wanted, scheme


def test_every_image_and_link_exists():
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert {"layouts/placement.png", "../model.py"} <= set(links)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    headings = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= headings


def test_the_diagrams_are_drawn(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs" / "draw_layouts.py", tmp_path], check=True, timeout=120)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["depth.png", "normfree.png", "placement.png", "scale_vectors.png"]
    for name in drawn:
        assert f"(layouts/{name})" in PAGE
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert 10_000 < (tmp_path / name).stat().st_size < 150_000
