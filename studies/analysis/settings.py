"""The flags of `analyze.py`."""

from dataclasses import dataclass

from studies.analysis import gradients, norms, streams, tracked  # noqa: F401  # they fill FIGURES
from studies.analysis.figure import FIGURES


@dataclass
class AnalyzeConfig:
    # --- what to draw ---
    figures: str = "all"  # all, or a comma list of gradients, sharpness, norms, alpha, scatter, gains, variance,
    #   angular, removal, jacobian, logits, experts, tracking
    out: str = ""  # folder for the results; empty = RUN/analysis, for several runs out/analysis
    report: bool = False  # for a single run too, put its losses and all figures on one page, report.md
    baseline: str = ""  # name of the run that the others are compared with; empty = the first
    smooth: float = 0.05  # training losses are averaged over a window of this share of the run
    # --- what to measure on ---
    dataset: str = ""  # its validation windows, or images, are read; empty = the run's own dataset
    tokens: int | None = None  # how many each figure reads, in whole windows or images, whose tokens are patches;
    #   None = few, for a CPU: gradients 65,536, removal 32,768, alpha, variance, angular, logits 8,192, sharpness
    #   4,096, jacobian 2,048, scatter 128 (these two read 128 of a window). Published: angular 256K, sharpness 1,024
    #   tokens or sequences; of the others none. More tokens take more time, not more memory
    draws: int = 8  # sampled gradients that sharpness is averaged over
    snapshots: int = 6  # most checkpoints, evenly spread, for a figure over training
    seed: int = 1337  # of sampled labels, positions and points
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps

    def __post_init__(self):
        names = [name.strip() for name in self.figures.split(",") if name.strip()]
        self.figure_names = list(FIGURES) if names == ["all"] else list(dict.fromkeys(names))  # each once
        unknown = [name for name in self.figure_names if name not in FIGURES]
        if unknown or not names:
            allowed = ", ".join(FIGURES)
            raise ValueError(f"figures={self.figures!r} has {unknown or 'none'}: allowed are all, {allowed}")
        for name in ("tokens", "draws", "snapshots"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must not be negative")
