"""Settings of a benchmark: the flags of bench.py, and a configuration made ready to be timed."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from configurator import PathName
from model import GPTConfig, Transformer
from nanodnt.bench.nanogpt import KINDS
from nanodnt.data import PreparedData, load_meta
from nanodnt.engine import split_batch
from nanodnt.files import make_folder
from nanodnt.run.environment import Env, choose_dtype
from nanodnt.run.hardware import choose_compile
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, resolve, task_of


@dataclass
class BenchConfig:
    # --- benchmark: what ---
    vary: str = ""  # variants to time. FLAG=VALUE,VALUE,…: values of a flag, as in
    #   optimizer=adamw,muon; FILE,FILE,…: config files, as in config/dnt/s1.py,config/dnt/s5.py;
    #   norms: the model's norms, as in DyT's Table 7. The first variant is the reference. All
    #   variants are in memory at once
    against: Literal["none", *KINDS] = "none"  # also time nanoGPT's step. nanogpt: as published;
    #   nanogpt-bf16: with bf16 on a CPU too
    only: Literal["ours", *KINDS] = "ours"  # the step to time or profile alone
    profile: bool = False  # write a trace of three steps; print the costliest kernels, and the time
    #   by kind of kernel
    data: Literal["dataset", "random"] = "dataset"  # dataset: batches of the dataset; random:
    #   random batches, so that no dataset is needed. Random tokens are below vocab_size, or GPT-2's
    #   50257; with doc_mask documents have 256 tokens on average. Random images are the same in
    #   every step, and have the size of the flags, or ImageNet's
    accumulation: int = 1  # micro batches in a timed step; 0 = as many as batch_size needs
    # --- benchmark: how ---
    warmup: int = 3  # untimed steps after the first, which compiles
    repeats: int = 5  # number of rounds; in each of them all variants take a turn
    steps: int = 0  # timed steps of a variant in a round, after an untimed one; 0 = 10, on a GPU 20
    # --- benchmark: output ---
    json: PathName = ""  # file for all figures, those of each round too, with versions, command
    #   line and git commit

    def check(self) -> None:
        """Raises ValueError for values that no benchmark can have. Makes the folder of `json`, so
        that a bad path is seen now."""
        for name, least in dict(warmup=1, repeats=1, steps=0, accumulation=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        modes = {
            "--vary": self.vary,
            "--against": self.against != "none",
            "--profile": self.profile,
            "--only": self.only != "ours" and not self.profile,
        }
        given = [flag for flag, is_given in modes.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are different benchmarks: choose one")
        if self.json and Path(self.json).is_dir():
            raise ValueError(f"json={self.json} is a folder: name a file")
        make_folder(Path(self.json).parent, "--json")


@dataclass(kw_only=True)
class Setting:
    """A configuration to be timed, its defaults filled in.

    A timed step has `rows` sequences, or images: `accumulation` micro batches of `micro` rows.
    The whole batch_size would be `full_accumulation` micro batches."""

    model_config: GPTConfig
    config: TrainConfig
    bench: BenchConfig
    env: Env

    def __post_init__(self):
        """Raises ValueError for a missing dataset, unless data=random, and for nanoGPT's step with
        images or documents."""
        config = self.config
        self.task = task_of(self.model_config)
        nanogpt = self.bench.against != "none" or self.bench.only != "ours"
        if nanogpt and (config.doc_mask or self.task.reads != "text"):
            reason = "nanoGPT reads text, not images, and does not keep documents apart"
            raise ValueError(f"{reason}: leave out against and only")
        meta = self.load_meta()
        self.meta, _ = resolve(self.model_config, config, meta)
        if self.bench.data == "dataset":
            self.task.check_data(config.dataset, meta, None, self.model_config)
        dtype, _ = choose_dtype(config.dtype, self.env.device)
        self.env = replace(self.env, dtype=dtype)
        # not the largest that fits: variants are compared at one micro batch, and share the memory
        self.micro, self.full_accumulation = split_batch(
            config.batch_size, config.micro_batch_size, 1
        )
        self.accumulation = self.bench.accumulation or self.full_accumulation
        self.rows = self.micro * self.accumulation
        default_steps = 20 if self.env.device.type == "cuda" else 10
        self.steps = self.bench.steps or default_steps

    def load_meta(self) -> dict[str, Any]:
        """meta.json of the dataset, or the placeholder of random data."""
        if self.bench.data == "random":
            meta, _ = self.task.placeholder_meta(self.model_config)
            return meta
        try:
            return load_meta(self.config.dataset, verify=False)
        except ValueError as e:
            raise ValueError(f"{e}; or time on random {self.task.reads}: --data=random") from None

    def with_norm(self, norm: str) -> "Setting":
        """A copy with another norm, without DyT's settings."""
        if norm == self.model_config.norm:
            return self
        unset = {f.name: f.default for f in fields(GPTConfig) if f.name.startswith("dyt_")}
        model_config = replace(self.model_config, norm=norm, **unset)
        return Setting(
            model_config=model_config, config=self.config, bench=self.bench, env=self.env
        )

    @cached_property
    def dataset(self) -> PreparedData:
        return open_data(self.config, self.model_config, self.meta)

    def new_model(self) -> Transformer:
        """The network with fresh weights, on the CPU."""
        return self.task.network()(self.model_config, self.config.seed)

    def fetch_batch(self, step: int) -> tuple[Tensor, ...]:
        """The batch of a step, on the host, as the dataset gives it."""
        if self.bench.data == "random":
            batch = self.task.random_batch(self.config, self.model_config, self.rows, step)
        else:
            batch = self.dataset.batch(step, self.rows)
        return self.env.pin(*batch)

    def first_micro_batch(self) -> tuple[Tensor, ...]:
        """The first micro batch of the first step, on the device."""
        return self.env.put(*(t[: self.micro] for t in self.fetch_batch(0)))

    def choose_compile(self, flops_per_token: float) -> bool:
        """Whether to compile, chosen as train.py chooses for the whole run."""
        tokens = self.config.batch_size * self.model_config.block_size * self.config.max_iters
        flops = tokens * flops_per_token
        compiles, _ = choose_compile(self.config.compile, self.env.device, flops)
        return compiles
