"""A trained model and its tokenizer, to sample from, to evaluate or to export."""

from dataclasses import dataclass
from pathlib import Path

from model import GPT
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.tokenizer import Tokenizer
from nanodnt.weights import model_from_checkpoint


@dataclass
class Trained:
    """`model` on the CPU, in eval mode, in fp32, with the `tokenizer` it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    meta: dict  # of the tokenizer: tokenizer, vocab_size, eot and what else its kind has
    source: str  # where it is from: a checkpoint's path
    step: int  # optimizer steps it has made


def load_trained(out_dir: str, checkpoint: str) -> Trained:
    """What the file `checkpoint` in the run directory `out_dir` holds.

    ValueError, in one line, where there is none, or where it is damaged."""
    path = Path(out_dir) / checkpoint
    if not path.exists():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.pt"))) or "none"
        raise ValueError(f"there is no checkpoint {path}; in {path.parent}: {there} (choose with --checkpoint)")
    found = load_checkpoint(path)
    model = model_from_checkpoint(found).eval()
    return Trained(model, Tokenizer(found["meta"]), found["meta"], str(path), found["step"])
