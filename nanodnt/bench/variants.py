"""The steps that can be timed: the training step of train.py, and nanoGPT's."""

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

PhaseEnd = Callable[[str], None]  # is called with the name of each phase of a step, at its end


@dataclass
class Variant:
    """A training step to be timed, and its measurements."""

    name: str
    setting: Setting
    step: Callable[[int, PhaseEnd], None]  # step(i, on_phase_end) makes step i
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    dtype: torch.dtype
    compile_s: float | None = None  # None = it is not compiled
    memory: int | None = None  # peak bytes of tensors, without other variants' (CUDA)
    steps_done: int = 0
    rounds: list[float] = field(default_factory=list)  # seconds of a step in each round
    parts: dict[str, float] = field(default_factory=dict)  # {part of measure.PARTS: median seconds}

    def run(self, on_phase_end: PhaseEnd = lambda phase: None) -> None:
        """Make the next step."""
        self.step(self.steps_done, on_phase_end)
        self.steps_done += 1

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.setting.rows * self.setting.model_config.block_size


def make_variant(name: str, kind: str, setting: Setting) -> Variant:
    """A step of this kind: ours, or one of nanogpt.KINDS."""
    if kind == "ours":
        return our_variant(name, setting)
    return nanogpt_variant(name, kind, setting)


def our_variant(name: str, setting: Setting) -> Variant:
    """The step of train.py."""
    env = setting.env
    config = setting.config
    env.set_matmul_precision()
    model = prepare_model(setting.new_model(), config, env)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    step_model = model
    start = time.perf_counter()
    if setting.choose_compile(model.flops_per_token()):
        step_model = compile_model(model, config, setting.first_micro_batch(), env)
    compile_s = time.perf_counter() - start
    trainer = Trainer(model, optimizer, scaler, setting.micro, config.grad_clip, step_model)
    next_batch = Prefetch(setting.fetch_batch)

    def step(i: int, on_phase_end: PhaseEnd) -> None:
        env.set_matmul_precision()  # other variants may have another dtype
        torch.manual_seed(config.seed + i)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(i, config, group)
        batch = env.put(*next_batch(i))
        on_phase_end("data")
        trainer.on_phase_end = on_phase_end
        training_step(trainer, batch)

    # with compile=auto, compilation may have failed
    is_compiled = hasattr(step_model, "_orig_mod") or "loss" in vars(step_model)
    if not is_compiled:
        compile_s = None
    return Variant(name, setting, step, model, optimizer, env.dtype, compile_s)


def nanogpt_variant(name: str, kind: str, setting: Setting) -> Variant:
    """The step of nanoGPT; `kind` is one of nanogpt.KINDS. Compiled, as published, unless compile
    is False."""
    device = setting.env.device
    config = setting.config
    model = nanogpt.NanoGPT(setting.model_config).to(device)
    step_model = model
    compile_s = None
    if config.compile is not False:
        step_model = torch.compile(model)  # compiles at the first step
        compile_s = 0.0
    bf16 = device.type == "cuda" or kind == "nanogpt-bf16"
    optimizer = nanogpt.make_optimizer(model, config)
    tokens = find_tokens(setting)
    context = setting.model_config.block_size
    step = nanogpt.make_step(
        step_model,
        optimizer,
        nanogpt.make_get_batch(tokens, setting.micro, context, device),
        setting.accumulation,
        bf16,
        partial(lr_at, config=config),
        device,
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    return Variant(name, setting, step, model, optimizer, dtype, compile_s)


def find_tokens(setting: Setting) -> np.ndarray:
    """The tokens that nanoGPT reads: those of the dataset, or random ones."""
    if setting.bench.data == "random":
        config = setting.model_config
        n = max(1 << 20, 2 * config.block_size)
        return np.random.default_rng(0).integers(config.vocab_size, size=n, dtype=np.uint32)
    file = Path(setting.meta["splits"]["train"]["file"]).name
    dtype = np.dtype(setting.meta["dtype"]).newbyteorder("<")
    return np.memmap(folder_of(setting.config.dataset) / file, dtype, mode="r")
