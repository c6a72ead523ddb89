"""The knobs of `analyze.py`, and what each figure shows."""

from dataclasses import dataclass

# figure: (what it shows, the paper's figure that it follows)
CAPTIONS = {
    "loss": ("Training and validation loss against steps, tokens or images, and hours of training", ""),
    "gradients": ("Gradient entries by type of matrix: density, and share beyond a size", "DNT, Fig. 1"),
    "sharpness": ("Sharpness by block type and block: average, over training, density", "Blockwise LR, Figs. 1-3, 7"),
    "norms": ("Norms of the parameters: by block, of the embedding's rows, by type", "Blockwise LR, Fig. 6"),
    "alpha": ("DyT's α and 1/std of its input, over training and over the layers", "DyT, Fig. 8"),
    "scatter": ("Inputs and outputs of norms, element by element", "DyT, Figs. 2, 4"),
    "variance": ("Variance of the residual stream after each block, over training", "LNS, Figs. 4, 8, 9"),
    "angular": ("Angular distance between the inputs of blocks ℓ and ℓ + n", "LNS, Figs. 2, 3, 7"),
    "removal": ("Rise of the loss, of images also fall of top-1, when one block is deleted", "LNS, Figs. 2, 3, 7"),
    "jacobian": ("Jacobian of residual sub-layers, averaged over one token of each window", "LNS, Fig. 5"),
    "gains": ("Scale vectors over training", "scale vectors, Fig. 4"),
    "logits": ("Largest attention logit of each block", ""),
    "experts": ("Load of experts and entropy of the router's scores, as logged while training", ""),
    "tracking": ("What the run logged about itself: gradients and updates by role, stream, logits, gains", ""),
}
FIGURE_NAMES = [name for name in CAPTIONS if name != "loss"]  # --figures takes these; loss.png compares runs


@dataclass
class AnalyzeConfig:
    # --- what to draw ---
    figures: str = "all"  # all, or a comma list of gradients, sharpness, norms, alpha, scatter, variance, angular,
    #   removal, jacobian, gains, logits, experts, tracking
    out: str = ""  # folder for the results; empty = RUN/analysis, for several runs out/analysis
    report: bool = False  # for a single run too, put its losses and all figures on one page, report.html
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
        unknown = [name for name in self.figure_names() if name not in FIGURE_NAMES]
        if unknown or not self.figure_names():
            allowed = ", ".join(FIGURE_NAMES)
            raise ValueError(f"figures={self.figures!r} has {unknown or 'none'}: allowed are all, {allowed}")
        for name in ("tokens", "draws", "snapshots"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must not be negative")

    def figure_names(self) -> list:
        """The figures that `figures` asks for, each once."""
        names = [name.strip() for name in self.figures.split(",") if name.strip()]
        return list(FIGURE_NAMES) if names == ["all"] else list(dict.fromkeys(names))
