"""A trained model and its tokenizer, to sample from, to evaluate or to export."""

from dataclasses import dataclass
from pathlib import Path

from model import GPT
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.tasks import task_of
from nanodnt.weights import model_from_checkpoint


@dataclass
class Trained:
    """`model` on the CPU, in eval mode, in fp32, with the `tokenizer` it was trained with."""

    model: GPT
    tokenizer: Tokenizer
    meta: dict  # of the tokenizer: tokenizer, vocab_size, eot and what else its kind has
    source: str  # where it is from: a checkpoint's path, or a folder or name of Hugging Face
    step: int  # optimizer steps it has made; 0 where that is not known
    doc_mask: bool = False  # whether documents were kept apart in training; False where that is not known


def load_trained(out_dir: str, checkpoint: str) -> Trained:
    """What the file `checkpoint` in the run directory `out_dir` holds.

    ValueError, in one line, where there is none, where it is damaged, or of no text."""
    path = Path(out_dir) / checkpoint
    if not path.exists():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.pt"))) or "none"
        raise ValueError(f"there is no checkpoint {path}; in {path.parent}: {there} (choose with --checkpoint)")
    found = load_checkpoint(path)
    if (reads := task_of(found["model_config"]).reads) != "text":
        raise ValueError(f"{path} is a model of {reads}, which neither reads nor writes text: choose one of text")
    model = model_from_checkpoint(found).eval()
    doc_mask = found["train_config"].get("doc_mask") is True  # checkpoints of earlier versions lack it
    return Trained(model, Tokenizer(found["meta"]), found["meta"], str(path), found["step"], doc_mask)
