"""docs/images.md says what the code does: its flags build or are refused, its configs and numbers are those there."""

import re

import pytest

from configurator import read_file
from layers import rules
from support.models import rule_lines
from support.pages import CONFIGS, FLAGS, ROOT, load, rows_with

PAGE = (ROOT / "docs" / "images.md").read_text()
REFUSED = [text for row in rows_with(PAGE, "refused flags") for text in FLAGS.findall(row["refused flags"])]


@pytest.mark.parametrize("text", REFUSED)
def test_refused_flags_are_refused(text):
    with pytest.raises(ValueError) as caught:
        load(*(f"--{flag}" for flag in text.split()))[0].check()
    assert len(str(caught.value).splitlines()) == 1


def test_every_refusal_of_images_is_in_the_table():
    reached = set()
    for text in REFUSED:
        found = rules.images(load(*(f"--{flag}" for flag in text.split()))[0])
        reached |= {("images", found.gi_frame.f_lineno) for wrong, _ in found if wrong}
    assert rule_lines(rules.images).keys() - reached == set()


def test_every_config_of_images_is_on_the_page():
    linked = {
        str((ROOT / "docs" / target).resolve().relative_to(ROOT)) for target in re.findall(r"\]\((\S+\.py)\)", PAGE)
    }
    vision = {str(path) for path in CONFIGS if "patch_size" in read_file(ROOT / path)}
    overlays = {str(path) for path in CONFIGS if path.parent.name == "vdnt"} | {"config/dyt/vit_dyt.py"}
    shown = linked | set(re.findall(r"config/[\w/]+\.py", PAGE))
    assert {path for path in vision | overlays if not path.startswith("config/claims")} <= shown


def test_the_page_and_the_configs_give_the_same_numbers_of_the_papers():
    """Table 1 of DNT; and what the headers of config/vdnt/ say of it."""
    rows = {row["ImageNet-1k, top-1"]: row for row in rows_with(PAGE, "ImageNet-1k, top-1")}
    for size, column in (("large", "ViT-L"), ("huge", "ViT-H")):
        text = " ".join((ROOT / f"config/vdnt/{size}.py").read_text().split())
        ours = [rows["DNT"][f"{column}, {optimizer}"] for optimizer in ("AdamW", "mSGDW")]
        theirs = [rows["baseline"][f"{column}, {optimizer}"] for optimizer in ("AdamW", "mSGDW")]
        assert f"AdamW {ours[0]}, mSGDW {ours[1]} (ViT-{size.title()}: {theirs[0]} and {theirs[1]})" in text
