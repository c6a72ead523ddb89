"""The config files of the sizes: every file loads, builds and names its command; the DNT paper's sizes and settings."""

import re

import pytest
import torch

from model import GPT
from nanodnt.engine import split_batch
from nanodnt.optim import fill_defaults, make_optimizer
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


@pytest.mark.deep  # 124M parameters: seconds, and 2 GB
def test_dnt_small_takes_a_step_at_full_size():
    flags, config = load("config/dnt_small.py")
    fill_defaults(config)
    flags.vocab_size = 50257
    model = GPT(flags)
    optimizer = make_optimizer(model, config)
    idx = torch.randint(50257, (1, 65), generator=torch.Generator().manual_seed(0))
    before = model.wte.weight[:100].clone()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    loss.backward()
    assert 10 < loss.item() < 12  # ln 50257 = 10.8
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters()) and not torch.equal(before, model.wte.weight[:100])
