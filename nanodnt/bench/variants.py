"""What can be timed: the training step of train.py, and nanoGPT's."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from nanodnt.bench import nanogpt
from nanodnt.bench.settings import Setting
from nanodnt.data import Prefetch, folder_of
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import lr_at, make_optimizer
from nanodnt.run.compilation import compile_model


@dataclass
class Variant:
    """One training step to be timed, and what was measured of it."""

    name: str
    setting: Setting
    step: Callable  # step(i, on_phase_end): makes step i
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    compile_s: float | None = None  # None = it is not compiled
    memory: int | None = None  # peak bytes of tensors, without other variants' (CUDA)
    steps_done: int = 0
    rounds: list = field(default_factory=list)  # seconds of a step, by round
    parts: dict = field(default_factory=dict)  # median seconds of each of measure.PARTS

    def run(self, on_phase_end=lambda phase: None) -> None:
        """Make the next step."""
        self.step(self.steps_done, on_phase_end)
        self.steps_done += 1

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.setting.rows * self.setting.model_config.block_size


def make_variant(name: str, kind: str, setting: Setting) -> Variant:
    """A step of this kind: ours, or one of nanogpt.KINDS."""
    return our_variant(name, setting) if kind == "ours" else nanogpt_variant(name, kind, setting)


def our_variant(name: str, setting: Setting) -> Variant:
    """The step of train.py."""
    env, config = setting.env, setting.config
    env.set_matmul_precision()
    model = prepare_model(setting.new_model(), config, env)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    step_model, start = model, time.perf_counter()
    if setting.choose_compile(model.flops_per_token()):
        step_model = compile_model(model, config, setting.first_micro_batch(), env)
    compile_s = time.perf_counter() - start
    trainer = Trainer(model, optimizer, scaler, setting.micro, config.grad_clip, step_model)
    next_batch = Prefetch(setting.fetch_batch)

    def step(i, on_phase_end):
        env.set_matmul_precision()  # of this variant: others may have another dtype
        torch.manual_seed(config.seed + i)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(i, config, group)
        batch = env.put(*next_batch(i))
        on_phase_end("data")
        trainer.on_phase_end = on_phase_end
        training_step(trainer, batch)

    # with compile=auto it may have failed
    compiled = hasattr(step_model, "_orig_mod") or "loss" in vars(step_model)
    return Variant(
        name, setting, step, model, optimizer, env.dtype, compile_s if compiled else None
    )


def nanogpt_variant(name: str, kind: str, setting: Setting) -> Variant:
    """The step of nanoGPT; `kind` is one of nanogpt.KINDS. Compiled, as published, unless compile
    is False."""
    device, config = setting.env.device, setting.config
    model = nanogpt.NanoGPT(setting.model_config).to(device)
    bf16 = device.type == "cuda" or kind == "nanogpt-bf16"
    compiled = config.compile is not False
    optimizer = nanogpt.make_optimizer(model, config)
    step = nanogpt.make_step(
        torch.compile(model) if compiled else model,  # compiles at the first step
        optimizer,
        nanogpt.make_get_batch(
            find_tokens(setting), setting.micro, setting.model_config.block_size, device
        ),
        setting.accumulation,
        bf16,
        partial(lr_at, config=config),
        device,
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    return Variant(
        name, setting, step, model, optimizer, dtype, compile_s=0.0 if compiled else None
    )


def find_tokens(setting: Setting) -> np.ndarray:
    """What nanoGPT reads: the tokens of the dataset, or random ones."""
    if setting.bench.data == "random":
        n = max(1 << 20, 2 * setting.model_config.block_size)
        return np.random.default_rng(0).integers(
            setting.model_config.vocab_size, size=n, dtype=np.uint32
        )
    file = Path(setting.meta["splits"]["train"]["file"]).name
    dtype = np.dtype(setting.meta["dtype"]).newbyteorder("<")
    return np.memmap(folder_of(setting.config.dataset) / file, dtype, mode="r")
