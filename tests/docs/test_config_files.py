"""Every config file loads, builds and names its command."""

import re

import pytest

from nanodnt.engine import split_batch
from nanodnt.tasks import task_of
from support.pages import CONFIGS, ROOT, complete, load


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_loads_builds_and_names_its_command(path):
    model, config = complete(*load(str(path)))
    task_of(model).network().empty(model)
    text = (ROOT / path).read_text()
    assert re.search(rf"train\.py .*{path}", text.replace("\\\n", " ")), "its launch line"
    assert text.count("\n") <= (75 if model.patch_size else 40)  # recipes for images are long
    if path.parent.name == "config":
        assert config.out_dir == f"out/{path.stem}"
        for gpus in (1, 2, 4, 8) if "small" in path.stem or "large" in path.stem or "xl" in path.stem else (1,):
            split_batch(config.batch_size, config.micro_batch_size, gpus)
