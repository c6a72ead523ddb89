"""What can be timed: the training step of train.py, and nanoGPT's."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch._dynamo.utils import counters

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
    rounds: list = field(default_factory=list)  # seconds of each timed step, one list per round
    readings: list = field(default_factory=list)  # of measure.read_sensors, on CUDA
    parts: dict = field(default_factory=dict)  # median seconds of each of measure.PARTS
    recompilations: int = 0  # since the warm-up

    def run(self, on_phase_end=lambda phase: None) -> None:
        """Make the next step."""
        before = counters["frames"]["total"]  # pieces of code that torch.compile has worked on
        self.step(self.steps_done, on_phase_end)
        self.recompilations += counters["frames"]["total"] - before
        self.steps_done += 1

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.setting.rows * self.setting.model_config.block_size


def our_variant(name: str, setting: Setting, **changes) -> Variant:
    """The step of train.py, of the setting with changed flags."""
    setting = setting.replace(**changes)
    env, config = setting.env, setting.config
    env.set_matmul_precision()
    model = prepare_model(setting.new_model(), config, env)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    step_model, start = model, time.perf_counter()
    if setting.choose_compile(model.flops_per_token()):
        step_model = compile_model(model, config, setting.first_micro_batch(), env)
    trainer = Trainer(model, optimizer, scaler, setting.micro, config.grad_clip, step_model)
    compile_s, next_batch = time.perf_counter() - start, Prefetch(setting.fetch_batch)

    def step(i, on_phase_end):
        env.set_matmul_precision()  # of this variant: others may have another dtype
        torch.manual_seed(config.seed + i)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(i, config, group)
        batch = env.put(*next_batch(i))
        on_phase_end("data")
        trainer.on_phase_end = on_phase_end
        training_step(trainer, batch)

    compiled = hasattr(step_model, "_orig_mod") or "loss" in vars(step_model)  # with compile=auto it may have failed
    return Variant(name, setting, step, model, optimizer, env.dtype, compile_s if compiled else None)


def make_variant(name: str, setting: Setting) -> Variant:
    """The step that the flag `only` asks for; `name` is that of ours."""
    if setting.bench.only == "ours":
        return our_variant(name, setting)
    return nanogpt_variant(setting.bench.only, setting)


def variants_beside_nanogpt(setting: Setting) -> dict:
    """{name: function that makes it} for --against: nanoGPT's step, the reference, and ours."""
    kinds = list(nanogpt.KINDS) if setting.bench.against == "nanogpt-all" else [setting.bench.against]
    return {k: partial(nanogpt_variant, k, setting) for k in kinds} | {"ours": partial(our_variant, "ours", setting)}


def nanogpt_variant(kind: str, setting: Setting) -> Variant:
    """The step of nanoGPT; `kind` is one of nanogpt.KINDS."""
    device, context = setting.env.device, setting.model_config.block_size
    model = nanogpt.NanoGPT(setting.model_config).to(device)
    bf16, compiled = device.type == "cuda" or kind == "nanogpt-bf16", kind != "nanogpt-eager"
    call = torch.compile(model) if compiled else model  # compiles at the first step
    if setting.bench.data == "random":
        n = max(1 << 20, 2 * context)
        tokens = np.random.default_rng(0).integers(setting.model_config.vocab_size, size=n, dtype=np.uint32)
    else:
        meta, folder = setting.dataset.meta, folder_of(setting.config.dataset)
        tokens = folder / Path(meta["splits"]["train"]["file"]).name, np.dtype(meta["dtype"]).newbyteorder("<")
    get_batch = nanogpt.make_get_batch(tokens, setting.micro, context, device)
    optimizer = nanogpt.make_optimizer(model, setting.config)
    get_lr = partial(lr_at, config=setting.config)
    step = nanogpt.make_step(call, optimizer, get_batch, setting.accumulation, bf16, get_lr, device)
    dtype = torch.bfloat16 if bf16 else torch.float32
    return Variant(kind, setting, step, model, optimizer, dtype, compile_s=0.0 if compiled else None)
