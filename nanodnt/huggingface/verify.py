"""Whether `transformers` computes from an exported folder what the model computes. Catches a network whose code was
changed in a way that the export does not see."""

import os
from pathlib import Path

import torch

from model import GPT

# Largest relative difference of the logits: the rounding of the products, and that of the weights in the files.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


@torch.no_grad()
def difference(folder: Path, model: GPT) -> float:
    """Largest difference between the logits of `model` and of the folder's, relative to the largest logit, in fp32, on
    some random tokens. ImportError without `transformers`."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    c = model.config
    idx = torch.randint(c.vocab_size, (2, min(c.block_size, 64)), generator=torch.Generator().manual_seed(1))
    ours = model(idx)[0]
    return ((theirs(idx).logits - ours).abs().max() / ours.abs().max().clamp(min=1e-30)).item()
