"""The flags of analyze.py."""

from dataclasses import dataclass

from configurator import PathName
from nanodnt.run.metrics import read_formats
from studies.analysis.figure import FIGURES


@dataclass
class AnalyzeConfig:
    # --- what to draw ---
    figures: str = "all"  # all, or a comma list of gradients, sharpness, norms, alpha, scatter,
    #   gains, preconditioner, variance, angular, removal, jacobian, conditioning, logits, experts,
    #   tracking
    init_from: PathName = ""  # a model from elsewhere instead of runs: a folder of Hugging Face,
    #   OWNER/MODEL, gpt2, …, nanoGPT's ckpt.pt, or its folder; it is measured on `dataset`
    out: PathName = ""  # folder for the results; empty = RUN/analysis, or out/analysis for several
    #   runs or init_from
    format: str = "png"  # of the figures: png, pdf or svg, or several, such as png,pdf
    baseline: PathName = ""  # name of the run with which the others are compared; empty = the first
    # --- what to measure on ---
    dataset: PathName = ""  # dataset whose validation windows, or images, are read; empty = the
    #   run's own. With init_from a text file (UTF-8), or a prepared dataset with that model's
    #   tokenizer, in windows of at most 1,024 tokens
    tokens: int | None = None  # number of tokens that each figure reads, in whole windows or
    #   images, whose tokens are patches; None = few, for a CPU: gradients 65,536, removal 32,768,
    #   alpha, variance, angular, logits 8,192, sharpness 4,096, jacobian 2,048, conditioning 256,
    #   scatter 128 (these two and jacobian read 128 of a window). More tokens take more time, not
    #   more memory
    draws: int = 8  # number of sampled gradients in the average of sharpness
    snapshots: int = 6  # most checkpoints, evenly spread, of a figure over training
    seed: int = 1337  # seed of sampled labels, positions and points
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps

    def __post_init__(self) -> None:
        names = list(FIGURES) if self.figures == "all" else self.figures.split(",")
        self.figure_names = list(dict.fromkeys(name.strip() for name in names))  # each once
        unknown = [name for name in self.figure_names if name not in FIGURES]
        if unknown:
            raise ValueError(
                f"figures={self.figures!r} has {unknown}: allowed are all, {', '.join(FIGURES)}"
            )
        self.formats = read_formats(self.format)
        for name in ("tokens", "draws", "snapshots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must not be negative")
