"""What a benchmark measures and how: the flags of bench.py, and a configuration made ready to be timed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from model import GPTConfig
from nanodnt.data import load_meta, open_dataset
from nanodnt.data.windows import document_positions
from nanodnt.engine import split_batch
from nanodnt.optim import fill_defaults
from nanodnt.run.compilation import choose_compile
from nanodnt.run.environment import Env, choose_dtype
from nanodnt.settings import TrainConfig

RANDOM_DOCUMENT = 256  # tokens of a random document, on average
LEAST = dict(warmup=1, repeats=1, steps=1, accumulation=0, first_micro_batch=1, doublings=0, max_step_s=0)
LEAST |= dict(report_minutes=0)  # the least value of each number


@dataclass
class BenchConfig:
    # --- benchmark: what ---
    variant: Literal["none", "nanogpt", "nanogpt-eager", "nanogpt-bf16", "nanogpt-all"] = "none"  # also time nanoGPT's
    #   step: as published, not compiled, with bf16 on a CPU too, or all of them
    sweep: Literal[
        "none", "layouts", "experts", "norms", "stream", "optimizers", "micro_batch", "loss", "compile", "scaling"
    ] = "none"  # instead of the one step: every layout against Pre-LN; experts beside the dense model of as many active
    #   parameters; norms as bare layers and in the model; the residual stream in fp32 and bf16; the optimizers; micro
    #   batches 1, 2, 4, …; ways to compute the loss; uses of torch.compile; larger width, depth, context, micro batch
    verify: Literal["none", "precision", "compiled", "products", "updates", "resume", "devices", "sampling"] = "none"
    #   is the arithmetic right on this device? Loss and gradients against float64; compiled against eager code; the
    #   product of all experts against float64; each optimizer's updates against float64; a run killed and resumed; a
    #   checkpoint moved to the CPU and back; samples
    report: str = ""  # a folder for gpu.md and gpu.json: every check and measurement of a GPU, one after the other.
    #   --report alone means --report=out/report. Given again, it goes on with what is missing there or has failed
    report_minutes: float = 25.0  # begin nothing there that would not be finished by then; name what was left out
    report_size: Literal["gpu", "toy"] = "gpu"  # toy: every part with a tiny model, to try it on a CPU
    data: Literal["dataset", "random"] = "dataset"  # random: tokens drawn at random, no dataset needed; the vocabulary
    #   is vocab_size, or GPT-2's 50257; with doc_mask in documents of 256 tokens on average
    accumulation: int = 1  # micro batches in a timed step; 0 = all that batch_size asks for
    compile_times: bool = False  # also the seconds of a compilation with an empty cache, and with that cache filled
    # --- benchmark: how ---
    warmup: int = 3  # untimed steps after the first, which compiles
    repeats: int = 5  # rounds; in each of them all variants take a turn
    steps: int = 10  # timed steps of a variant in a round, after an untimed one
    max_busy: float | None = None  # CPU cores that other processes may keep busy before the machine counts as busy;
    #   None = 0.25, with a GPU half of all cores
    fail_if_busy: bool = False  # refuse to run on a busy machine, instead of a warning
    first_micro_batch: int = 1  # sweep=micro_batch: the first of them
    doublings: int = 3  # sweep=scaling: how often each size is doubled
    max_step_s: float = 30.0  # sweeps over sizes end before a step that would take longer, by extrapolation
    # --- benchmark: output ---
    json: str = ""  # a file for all figures, each round's too, with versions, command line and git commit
    trace: str = ""  # profile: the trace's file; empty = OUT_DIR/bench/trace.json

    def check(self):
        """ValueError for values that no benchmark can have. Makes the folders of the output files, so that a bad path
        is refused before anything is measured."""
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("json", "trace"):
            path = Path(getattr(self, name))
            if path.is_dir() and getattr(self, name):
                raise ValueError(f"{name}={path} is a folder: name a file")
            path.parent.mkdir(parents=True, exist_ok=True)


@dataclass
class Setting:
    """A configuration to be timed, its defaults filled in. The batch of a timed step:

    `micro` sequences at a time, `accumulation` of these, `sequences` in all. `full_accumulation` is what the whole
    batch_size would need."""

    flags: GPTConfig
    config: TrainConfig
    bench: BenchConfig
    env: Env

    def __post_init__(self):
        """Choose dtype, vocabulary and batch. ValueError for a missing dataset, unless data=random."""
        self.config.check()
        if self.config.doc_mask and self.bench.variant != "none":
            raise ValueError("nanoGPT does not keep documents apart: leave out doc_mask, or the variant")
        fill_defaults(self.config)
        self.flags.vocab_size = self._choose_vocab_size()
        self.env = replace(self.env, dtype=choose_dtype(self.config.dtype, self.env.device)[0])
        # not the largest that fits: variants are compared at one micro batch, and share the memory
        self.micro, self.full_accumulation = split_batch(self.config.batch_size, self.config.micro_batch_size, 1)
        self.accumulation = self.bench.accumulation or self.full_accumulation
        self.sequences = self.micro * self.accumulation

    def _choose_vocab_size(self) -> int:
        """vocab_size of the flags, or the dataset's, or for random tokens GPT-2's."""
        given = self.flags.vocab_size
        if self.bench.data == "random":
            return given or 50257
        try:
            vocab_size = load_meta(self.config.dataset, verify=False)["vocab_size"]
        except ValueError as e:
            raise ValueError(f"{e}; or time on random tokens: --data=random") from None
        if given and vocab_size > given:
            raise ValueError(
                f"vocab_size={given} is below the {vocab_size} tokens of {self.config.dataset!r}: "
                "leave it out, or use --data=random"
            )
        return given or vocab_size

    def replace(self, **changes) -> "Setting":
        """A copy with other flags, of any of the three dataclasses."""
        parts = (self.flags, self.config, self.bench)
        values = [{k: v for k, v in changes.items() if hasattr(part, k)} for part in parts]
        return Setting(*(replace(part, **v) for part, v in zip(parts, values, strict=True)), self.env)

    def open_dataset(self) -> None:
        """Open the dataset, if there is one; `fetch_batch` needs it."""
        if self.bench.data == "dataset":
            name, block_size, seed = self.config.dataset, self.flags.block_size, self.config.seed
            self.dataset = open_dataset(name, block_size, seed, verify=False, doc_mask=self.config.doc_mask)

    def fetch_batch(self, step: int) -> tuple:
        """Inputs and targets (sequences, T) of a step, on the host; with doc_mask, positions too."""
        if self.bench.data == "random":
            size, random = (self.sequences, self.flags.block_size + 1), np.random.default_rng(step)
            tokens = random.integers(self.flags.vocab_size, size=size)
            batch = tokens[:, :-1], tokens[:, 1:]
            if self.config.doc_mask:
                opens = random.random(batch[0].shape) < 1 / RANDOM_DOCUMENT
                batch += (document_positions(opens, True),)
            return self.env.pin(*batch)
        return self.env.pin(*self.dataset.batch(step, self.sequences))

    def first_micro_batch(self) -> tuple:
        """Inputs and targets (micro, T) of the first micro batch of the first step, on the device."""
        return self.env.put(*(t[: self.micro] for t in self.fetch_batch(0)))

    def choose_compile(self, flops_per_token: float) -> bool:
        """Whether to compile, chosen as train.py chooses for the whole run."""
        tokens = self.config.batch_size * self.flags.block_size * self.config.max_iters
        return choose_compile(self.config.compile, self.env.device, tokens * flops_per_token)[0]

    def compile_modes(self) -> tuple:
        """How to time a piece of code: eager, and compiled unless that is off or impossible."""
        return ("eager", "compiled") if self.choose_compile(float("inf")) else ("eager",)
