"""docs/layouts.md says what the code does: its flags build or are refused; its pictures are drawn from the model."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from layers import rules
from model import GPT, GPTConfig
from nanodnt.optim import fill_defaults, make_optimizer
from support.models import refusing_line, rule_lines
from support.pages import FLAGS, ROOT, load, rows_with

PAGE = (ROOT / "docs" / "layouts.md").read_text()
SCRIPT = ROOT / "docs/scripts/draw_layouts.py"
DIAGRAMS = ["depth.png", "normfree.png", "placement.png", "scale_vectors.png"]


def in_column(title):
    """All flags (`a=b c=d` in backticks) of the tables' columns of that title."""
    return [text for row in rows_with(PAGE, title) for text in FLAGS.findall(row[title])]


REFUSED, NOTED, SCHEMES = in_column("refused flags"), in_column("noted flags"), in_column("flags")
ACCEPTED = sorted(set(FLAGS.findall(PAGE)) - set(REFUSED))  # wherever on the page


def configs(text):
    """(GPTConfig, TrainConfig) of flags `a=b c=d`, read as train.py reads them."""
    config, training = load(*(f"--{flag}" for flag in text.split()))
    config.vocab_size = config.vocab_size or 50257
    return config, training


def test_the_flags_are_found():
    assert len(SCHEMES) > 45 and len(ACCEPTED) > 60 and len(REFUSED) > 25 and len(NOTED) > 7


@pytest.mark.parametrize("text", ACCEPTED)
def test_flags_build(text):
    config, training = configs(text)
    if not config.post_norm_blocks:
        config.n_layer = 2  # the others are like these
    training.check()
    fill_defaults(training)
    make_optimizer(GPT.empty(config), training)


def test_noted_flags_print_a_note_and_the_other_schemes_none():
    silent = [text for text in NOTED if not rules.notes(configs(text)[0])]
    loud = [text for text in SCHEMES if rules.notes(configs(text)[0]) and text not in NOTED]
    assert silent == [] and loud == []


def test_refused_flags_are_refused_and_every_refusal_is_in_the_table():
    reached = set()
    for text in REFUSED:
        config = configs(text)[0]
        with pytest.raises(ValueError) as caught:
            config.check()
        assert len(str(caught.value).splitlines()) == 1
        reached.add(refusing_line(config))
    missing = {key: line for key, line in rule_lines(rules.norms, rules.scales).items() if key not in reached}
    assert missing == {}, "no row of the table is refused by these lines of layers/rules.py"


def test_every_layout_flag_is_on_the_page():
    names = [f.name for f in fields(GPTConfig)]
    names = names[names.index("norm") :]
    assert names[-1] == "residual_init"
    missing = [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", PAGE)]
    assert missing == []


def test_dnt_settings_are_the_config_files():
    rows = {row["scheme"]: row["flags"] for row in rows_with(PAGE, "scheme") if "flags" in row}
    for scheme, name in {"Pre-LN = S1": "s1", "S2": "s2", "S3": "s3", "S4": "s4", "S5 = **DNT**": "s5"}.items():
        flags = FLAGS.findall(rows[scheme])
        given = load(str(ROOT / f"config/dnt/{name}.py"))[0]
        given.vocab_size = 50257
        assert configs(flags[0] if flags else "")[0] == given, scheme


def test_a_diagram_is_drawn(tmp_path):
    spec = importlib.util.spec_from_file_location("draw_layouts", SCRIPT)
    spec.loader.exec_module(script := importlib.util.module_from_spec(spec))
    assert sorted(f"{family}.png" for family in script.FAMILIES) == DIAGRAMS
    script.draw("normfree", tmp_path / "normfree.png")
    assert_is_diagram(tmp_path / "normfree.png")


@pytest.mark.deep
def test_the_script_draws_every_diagram_of_the_page(tmp_path):
    subprocess.run([sys.executable, SCRIPT, tmp_path], check=True, timeout=120)
    assert sorted(path.name for path in tmp_path.iterdir()) == DIAGRAMS
    for name in DIAGRAMS:
        assert_is_diagram(tmp_path / name)


def assert_is_diagram(path):
    assert f"(layouts/{path.name})" in PAGE
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert 10_000 < path.stat().st_size < 150_000
