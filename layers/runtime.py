"""How a network computes: what is neither in its architecture nor in its weights, and in no
checkpoint."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)  # so that a misspelt field is an error
class Runtime:
    """One object for a network and all of its modules: a change acts on all of them. See
    `Network.set_runtime`."""

    compute_dtype: torch.dtype | None = None  # of the matrix products; None: the parameters' own
    stream_dtype: torch.dtype | None = None  # of the residual stream between sub-layers; None:
    #   fp32. Sums are fp32
    checkpointing: bool = False  # keep only the stream between blocks; the backward pass computes
    #   the rest again
    loss_chunks: int = 0  # chunks that the loss splits the tokens into; 0 = by the limits of
    #   layers/loss.py
    kernels: tuple[str, ...] = ()  # faster ways to compute, by name, that compiled code takes: see
    #   layers/kernels/
    flex_attention: bool = False  # keep documents apart with FlexAttention: compiled, on a GPU;
    #   else with a mask
    label_smoothing: float = 0.0  # of images, in training: this share of each target is spread over
    #   all classes
    balance_coef: float = 0.01  # factor on the balance loss of routers, minimised beside the
    #   cross-entropy
    z_coef: float = 0.0  # factor on their z-loss
    loss_scale: torch.Tensor | None = None  # (): factor on the routers' losses: fp16's loss scale
    #   over the number of micro batches; None: 1. A tensor from the first step on, because going
    #   from None to one would recompile
