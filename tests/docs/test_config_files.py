"""Every config file loads, builds and names its command."""

import re

import pytest

from nanodnt.engine import split_batch
from nanodnt.optim import fill_defaults
from nanodnt.tasks import fill_from_dataset, task_of
from support.pages import CONFIGS, ROOT, load


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_config_loads_builds_and_names_its_command(path):
    model, config = load(str(path))
    config.check()
    fill_defaults(config)
    fill_from_dataset(model, task_of(model).placeholder_meta(model)[0], config.dataset)
    task_of(model).network().empty(model)
    text = (ROOT / path).read_text()
    assert re.search(rf"train\.py .*{path}", text.replace("\\\n", " ")), "its launch line"
    assert text.count("\n") <= (75 if model.patch_size else 40)  # recipes for images are long
    if path.parent.name == "config":
        assert config.out_dir == f"out/{path.stem}"
        for gpus in (1, 2, 4, 8) if "small" in path.stem or "large" in path.stem or "xl" in path.stem else (1,):
            split_batch(config.batch_size, config.micro_batch_size, gpus)
