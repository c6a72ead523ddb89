"""Whether `transformers` computes from an exported folder what the model computes. Catches a network whose code was
changed in a way that the export does not see."""

import importlib.util
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from model import GPT

# Largest relative difference of the logits: the rounding of the products, and that of the weights in the files.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


def compare_with_transformers(folder: Path, model: GPT, kind: str, dtype: torch.dtype) -> bool:
    """Load the folder, an export of `model` as `kind` in `dtype`, with `transformers`, and compare the logits.

    False where `transformers` is not installed. ValueError where it computes something else, or cannot load it."""
    if importlib.util.find_spec("transformers") is None:
        return False
    try:
        found = difference(folder, model, typical=model.config.n_expert > 0 and dtype != torch.float32)
    except Exception as e:  # transformers raises many kinds
        reason = (str(e).strip().splitlines() or [""])[0][:200]
        raise ValueError(
            f"transformers cannot load the export as {kind} ({type(e).__name__}: {reason}), nothing was written: "
            "--compare=False leaves the comparison out"
        ) from e
    if not found <= TOLERANCES[dtype]:
        raise ValueError(
            f"transformers computes something else from the export as {kind} (logits differ by {found:.1e} of the "
            "largest), nothing was written: was the network's code changed? Try --target=nanodnt"
        )
    return True


@torch.no_grad()
def difference(folder: Path, model: GPT, typical: bool = False) -> float:
    """Largest difference between the logits of `model` and of the folder's, relative to the largest logit, in fp32, on
    some random tokens. `typical`: of the median token, not of the worst: weights that are rounded send some tokens to
    other experts, and their logits are then others."""
    c = model.config
    idx = torch.randint(c.vocab_size, (2, min(c.block_size, 64)), generator=torch.Generator().manual_seed(1))
    with code_cache(), torch.random.fork_rng(devices=[]):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        ours, found = model(idx)[0], theirs.eval()(idx).logits
    errors = (found - ours).abs().amax(-1) / ours.abs().max().clamp(min=1e-30)
    return (errors.median() if typical else errors.max()).item()


@contextmanager
def code_cache():
    """A folder of its own for the copies of code that `transformers` makes, which are forgotten at the end."""
    from transformers import dynamic_module_utils as code

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    kept, path = code.HF_MODULES_CACHE, list(sys.path)
    with tempfile.TemporaryDirectory() as cache:
        forget()
        code.HF_MODULES_CACHE = cache
        try:
            yield
        finally:
            code.HF_MODULES_CACHE, sys.path[:] = kept, path
            forget()
