"""What a benchmark measures and how: the flags of bench.py, and a configuration made ready to be timed."""

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from model import GPTConfig
from nanodnt.data import folder_of, load_meta
from nanodnt.data.windows import document_positions
from nanodnt.engine import split_batch
from nanodnt.optim import fill_defaults
from nanodnt.run.environment import Env, choose_dtype
from nanodnt.run.hardware import choose_compile
from nanodnt.settings import TrainConfig
from nanodnt.tasks import check_flags, fill_from_dataset, open_data, task_of, task_of_data

RANDOM_DOCUMENT = 256  # tokens of a random document, on average
LEAST = dict(warmup=1, repeats=1, steps=1, accumulation=0, max_step_s=0)  # the least value of each number


@dataclass
class BenchConfig:
    # --- benchmark: what ---
    vary: str = ""  # time variants: FLAG=VALUE,VALUE,…, say micro_batch_size=8,16,32; or FILE,FILE,…, config files; or
    #   a set: layouts (each against Pre-LN), experts (beside the dense model of as many active parameters), optimizers,
    #   micro_batch (1, 2, 4, …), norms (as bare layers, too). The first variant is the reference. Values of n_layer,
    #   n_embd, block_size and micro_batch_size are timed one after the other, as long as they fit
    against: Literal["none", "nanogpt", "nanogpt-eager", "nanogpt-bf16", "nanogpt-all"] = "none"  # also time nanoGPT's
    #   step: as published, not compiled, with bf16 on a CPU too, or all of them
    profile: bool = False  # write a trace of three steps, and print the kernels that cost the most
    data: Literal["dataset", "random"] = "dataset"  # random: tokens drawn at random, no dataset needed; the vocabulary
    #   is vocab_size, or GPT-2's 50257; with doc_mask in documents of 256 tokens on average. Of images: random
    #   images, the same ones in every step, of the dataset's size, or ImageNet's if it is not prepared, and labels
    accumulation: int = 1  # micro batches in a timed step; 0 = all that batch_size asks for
    # --- benchmark: how ---
    warmup: int = 3  # untimed steps after the first, which compiles
    repeats: int = 5  # rounds; in each of them all variants take a turn
    steps: int = 10  # timed steps of a variant in a round, after an untimed one
    max_step_s: float = 30.0  # of sizes: end before a step that would take longer, by extrapolation
    # --- benchmark: output ---
    json: str = ""  # a file for all figures, each round's too, with versions, command line and git commit

    def check(self):
        """ValueError for values that no benchmark can have. Makes the folder of `json`, so that a bad path is refused
        before anything is measured."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.json and Path(self.json).is_dir():
            raise ValueError(f"json={self.json} is a folder: name a file")
        Path(self.json).parent.mkdir(parents=True, exist_ok=True)


@dataclass
class Setting:
    """A configuration to be timed, its defaults filled in. The batch of a timed step:

    `micro` sequences, or images, at a time, `accumulation` of these, `sequences` in all. `full_accumulation` is what
    the whole batch_size would need."""

    flags: GPTConfig
    config: TrainConfig
    bench: BenchConfig
    env: Env

    def __post_init__(self):
        """Choose dtype, vocabulary or images, and batch. ValueError for a missing dataset, unless data=random, and for
        what is not for a model of images."""
        self.config.check()
        fill_defaults(self.config)
        self.task = task_of(self.flags)
        self.is_text = self.task.reads == "text"
        check_flags(self.task, self.config)
        if self.bench.against != "none" and (self.config.doc_mask or not self.is_text):
            raise ValueError("nanoGPT reads text, not images, and does not keep documents apart: leave out against")
        self._fit()
        self.env = replace(self.env, dtype=choose_dtype(self.config.dtype, self.env.device)[0])
        # not the largest that fits: variants are compared at one micro batch, and share the memory
        self.micro, self.full_accumulation = split_batch(self.config.batch_size, self.config.micro_batch_size, 1)
        self.accumulation = self.bench.accumulation or self.full_accumulation
        self.sequences = self.micro * self.accumulation

    def _fit(self) -> None:
        """Fill in the vocabulary, or size, channels and classes of images: the flags', or the dataset's. For random
        tokens GPT-2's vocabulary; for random images ImageNet's sizes, where no images are prepared."""
        name, random = self.config.dataset, self.bench.data == "random"
        prepared = (folder_of(name) / "meta.json").exists()
        if random and (self.is_text or not prepared or task_of_data(load_meta(name, verify=False)).reads != "images"):
            fill_from_dataset(self.flags, self.task.placeholder_meta(self.flags)[0], "random")
            return
        try:
            meta = load_meta(name, verify=False)
        except ValueError as e:
            what = "tokens" if self.is_text else "images"
            raise ValueError(f"{e}; or time on random {what}: --data=random") from None
        fill_from_dataset(self.flags, meta, name)
        if meta.get("vocab_size", 0) > self.flags.vocab_size:
            raise ValueError(
                f"vocab_size={self.flags.vocab_size} is below the {meta['vocab_size']} tokens of {name!r}: leave it "
                "out, or use --data=random"
            )

    def replace(self, **changes) -> "Setting":
        """A copy with other flags, of any of the three dataclasses."""
        parts = (self.flags, self.config, self.bench)
        values = [{k: v for k, v in changes.items() if hasattr(part, k)} for part in parts]
        return Setting(*(replace(part, **v) for part, v in zip(parts, values, strict=True)), self.env)

    def new_model(self):
        """The network with fresh weights, on the CPU."""
        return self.task.network()(self.flags, self.config.seed)

    def open_dataset(self) -> None:
        """Open the dataset, if there is one; `fetch_batch` needs it."""
        if self.bench.data == "dataset":
            self.dataset = open_data(self.config, self.flags, load_meta(self.config.dataset, verify=False))

    def fetch_batch(self, step: int) -> tuple:
        """The batch of a step, on the host: inputs and targets (sequences, T), with doc_mask positions too; or images
        (sequences, C, S, S) and labels (sequences,), with mixup or cutmix other labels and shares too."""
        if self.bench.data == "dataset":
            return self.env.pin(*self.dataset.batch(step, self.sequences))
        return self.env.pin(*(self.random_text(step) if self.is_text else self.random_images(step)))

    def random_text(self, step: int) -> tuple:
        size, random = (self.sequences, self.flags.block_size + 1), np.random.default_rng(step)
        tokens = random.integers(self.flags.vocab_size, size=size)
        batch = tokens[:, :-1], tokens[:, 1:]
        if self.config.doc_mask:
            opens = random.random(batch[0].shape) < 1 / RANDOM_DOCUMENT
            batch += (document_positions(opens, True),)
        return batch

    def random_images(self, step: int) -> tuple:
        """Images, the same in every step since drawing them takes long, and labels of this step."""
        c, random = self.flags, np.random.default_rng(step)
        images = normal_numbers(self.sequences, c.channels, c.image_size, c.image_size)
        labels, others = random.integers(c.n_class, size=(2, self.sequences))
        mixed = (others, random.random(self.sequences, np.float32)) if self.config.mixes else ()
        return images, labels, *mixed

    def first_micro_batch(self) -> tuple:
        """The first micro batch of the first step, on the device."""
        return self.env.put(*(t[: self.micro] for t in self.fetch_batch(0)))

    def choose_compile(self, flops_per_token: float) -> bool:
        """Whether to compile, chosen as train.py chooses for the whole run."""
        tokens = self.config.batch_size * self.flags.block_size * self.config.max_iters
        return choose_compile(self.config.compile, self.env.device, tokens * flops_per_token)[0]

    def compile_modes(self) -> tuple:
        """How to time a piece of code: eager, and compiled unless that is off or impossible."""
        return ("eager", "compiled") if self.choose_compile(float("inf")) else ("eager",)


@lru_cache(maxsize=1)
def normal_numbers(*shape: int) -> np.ndarray:
    """Random normal numbers of this shape, float32, always the same."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)
