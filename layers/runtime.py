"""Computation settings of a network. They are neither architecture nor weights, and no checkpoint
holds them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)  # a misspelt field is an error
class Runtime:
    """One object for a network and all of its modules: a change acts on all of them. See
    `Network.set_runtime`."""

    # dtype of the matrix products; None: the parameters' dtype
    compute_dtype: torch.dtype | None = None
    # dtype of the residual stream between sub-layers; None: fp32. Sums are fp32
    stream_dtype: torch.dtype | None = None
    # keep only the stream between blocks; the backward pass computes the rest again
    checkpointing: bool = False
    # number of chunks that the loss splits the tokens into; 0: by the limits of layers/loss.py
    loss_chunks: int = 0
    # names of faster operators that compiled code uses: see layers/kernels/
    kernels: tuple[str, ...] = ()
    # FlexAttention keeps documents apart: compiled, on a GPU; False: a mask does
    flex_attention: bool = False
    # share of each target that is spread over all classes, for images in training
    label_smoothing: float = 0.0
    # factor on the balance loss of routers, which is minimised beside the cross-entropy
    balance_coef: float = 0.01
    # factor on the z-loss of routers
    z_coef: float = 0.0
    # factor () on the losses of routers, fp16's loss scale over the number of micro batches; None:
    # 1. It is a tensor from the first step on: going from None to a tensor would recompile
    loss_scale: Tensor | None = None
