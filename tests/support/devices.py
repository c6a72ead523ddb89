"""Checks that are made on a GPU (`make test-gpu`); on the CPU, at toy size, a few of them try the
code of the test."""

import pytest
import torch

from model import GPTConfig
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig

CPU = Env(0, 1, torch.device("cpu"), torch.float32, False)
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU"),
)


def on_devices(cases, cpu=(), deep=()) -> list:
    """Parameters (device, *case) of a test: all cases on a GPU, those in `cpu` and `deep` on the
    CPU too."""
    assert all(case in cases for case in (*cpu, *deep))
    every = [("cuda", case, GPU) for case in cases] + [("cpu", case, ()) for case in cpu]
    every += [("cpu", case, pytest.mark.deep) for case in deep]
    return [
        pytest.param(on, *(c if isinstance(c, tuple) else (c,)), marks=marks)
        for on, c, marks in every
    ]


def bench_setting(env=CPU, **values) -> Setting:
    """The Setting of bench.py with these flags."""
    schemas = dict(model_config=GPTConfig, config=TrainConfig, bench=BenchConfig)
    for part, schema in schemas.items():
        schemas[part] = schema(
            **{k: v for k, v in values.items() if k in schema.__dataclass_fields__}
        )
    return Setting(**schemas, env=env)
