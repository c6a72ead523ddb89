"""Checks that are made on a GPU (`make test-gpu`); on the CPU, at toy size, a few of them try the code of the test."""

import pytest
import torch

from model import GPTConfig
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig

CPU = Env(0, 1, torch.device("cpu"), torch.float32, False)
GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA GPU"))


def on_devices(cases, cpu=()) -> list:
    """Parameters (device, *case) of a test: all cases on a GPU, those in `cpu` on the CPU too."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    cpu = [case if isinstance(case, tuple) else (case,) for case in cpu]
    assert set(cpu) <= set(cases)
    return [pytest.param("cuda", *case, marks=GPU) for case in cases] + [("cpu", *case) for case in cpu]


def bench_setting(env=CPU, **values) -> Setting:
    """The Setting of bench.py with these flags."""
    schemas = dict(flags=GPTConfig, config=TrainConfig, bench=BenchConfig)
    for part, schema in schemas.items():
        schemas[part] = schema(**{k: v for k, v in values.items() if k in schema.__dataclass_fields__})
    return Setting(**schemas, env=env)
