"""Decisions that need no run: how a batch is split, peak FLOP/s by name, which parallelism, what a signal asks for."""

import re
import signal
from types import SimpleNamespace

import pytest
import torch

from model import GPT, GPTConfig
from nanodnt.engine import seed_step, split_batch
from nanodnt.optim import fill_defaults
from nanodnt.run.environment import Env
from nanodnt.run.hardware import peak_flops
from nanodnt.run.parallel import choose_parallel
from nanodnt.run.stopping import Stop
from nanodnt.settings import TrainConfig
from nanodnt.start import materialize
from support.runs import kill_me


@pytest.mark.parametrize(
    "name, tflops",
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-80GB", 312)]
    + [("NVIDIA A800 80GB PCIe", 312), ("Tesla T4", 65), ("NVIDIA GH200 480GB", 989), ("NVIDIA GeForce RTX 4090", 165)]
    + [("NVIDIA RTX A1000 Laptop GPU", None), ("NVIDIA T400", None), ("Something New", None)],
)
def test_peak_flops_by_name(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda")
    assert peak_flops(device, torch.bfloat16) == (tflops and tflops * 1e12)
    assert peak_flops(device, torch.bfloat16, 5e12) == 5e12  # the flag wins
    assert peak_flops(device, torch.float32) is None


def test_under_torchrun_a_second_ctrl_c_is_the_first():
    """The terminal sends it to every process, and torchrun sends it on."""
    env = Env(0, 1, torch.device("cpu"), torch.float32, distributed=True)
    with Stop(env) as stop:
        try:
            kill_me(signal.SIGINT, signal.SIGINT)
        except KeyboardInterrupt:  # it would end pytest
            pytest.fail("the run was cut off")
        assert stop.signal == signal.SIGINT


def test_dropout_depends_on_seed_step_and_rank_alone():
    def draw(*place):
        seed_step(*place)
        return tuple(torch.rand(4).tolist())

    places = [(seed, step, rank) for seed in (1, 2) for step in (0, 1, 7) for rank in (0, 1, 2)]
    drawn = [draw(*place) for place in places]
    assert len(set(drawn)) == len(places)
    assert [draw(*place) for place in places[::-1]] == drawn[::-1]


SPLITS = [  # batch, micro (0 = choose), processes → (micro, accumulation)
    ((8, 0, 1), (8, 1)),
    ((8, 2, 1), (2, 4)),
    ((8, 2, 2), (2, 2)),
    ((480, 0, 8), (15, 4)),
    ((480, 0, 1), (16, 30)),
    ((17, 0, 1), (1, 17)),
    ((1, 0, 1), (1, 1)),
]


NO_SPLITS = [  # … → words of the message
    ((9, 0, 2), "batch_size=9 cannot be split over 2 processes: use 8 or 10"),
    ((3, 0, 4), "batch_size=3 cannot be split over 4 processes: use 4"),
    ((8, 3, 1), "micro_batch_size=3 does not divide the 8 sequences of each process"),
    ((8, 3, 1), "use 2 or 4"),
    ((8, 16, 2), "micro_batch_size=16 does not divide the 4 sequences of each process"),
]


@pytest.mark.parametrize("case, expected", SPLITS)
def test_split_batch(case, expected):
    assert split_batch(*case) == expected


@pytest.mark.parametrize("case, words", NO_SPLITS)
def test_split_batch_refuses(case, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        split_batch(*case)


GB = 10**9


@pytest.mark.parametrize(
    "setting, device, dtype, world, fixed, chosen",
    [
        ("auto", "cuda", torch.bfloat16, 8, 55 * GB, "ddp"),  # of 80 GB: below 70 %
        ("auto", "cuda", torch.bfloat16, 8, 57 * GB, "fsdp"),
        ("auto", "cuda", torch.float32, 2, 200 * GB, "fsdp"),
        ("auto", "cuda", torch.bfloat16, 1, 57 * GB, "ddp"),  # no other process to share with
        ("auto", "cuda", torch.float16, 8, 57 * GB, "ddp"),
        ("auto", "cpu", torch.float32, 8, 57 * GB, "ddp"),
        ("auto", "cuda", torch.bfloat16, 0, 57 * GB, "none"),  # without torchrun
        ("ddp", "cuda", torch.bfloat16, 8, 57 * GB, "ddp"),
        ("fsdp", "cuda", torch.bfloat16, 8, 1, "fsdp"),
        ("none", "cuda", torch.bfloat16, 1, 1, "none"),
    ],
)
def test_choose_parallel(setting, device, dtype, world, fixed, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GB))
    monkeypatch.setattr(Env, "minimum", lambda self, value: value)  # all have the same GPU
    env = Env(0, max(world, 1), torch.device(device), dtype, distributed=world > 0)
    assert choose_parallel(setting, env, fixed)[0] == chosen


@pytest.mark.parametrize("optimizer, size", [("adamw", 20), ("msgdw", 16)])
def test_what_a_process_holds_is_counted(optimizer, size, monkeypatch):
    """Bytes a parameter: weight, gradient, DDP's copy of the gradient, and one or two moments."""
    seen, config = [], TrainConfig(optimizer=optimizer)
    fill_defaults(config)
    monkeypatch.setattr("nanodnt.start.choose_parallel", lambda setting, env, fixed: seen.append(fixed) or ("none", ""))
    model = GPT.empty(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=31))
    env = Env(0, 1, torch.device("cpu"), torch.float32, distributed=False)
    materialize(model, None, config, env)
    assert seen == [pytest.approx(size * model.num_params(), rel=0.03)]  # AdamW counts steps, for each tensor
