"""Exchange with other software: models and tokenizers of Hugging Face, checkpoints of nanoGPT,
evaluation, conversations.

Importing this package adds its readers of weights to READERS."""

from typing import TYPE_CHECKING

from nanodnt import READERS  # this import reports a missing package in one line

if TYPE_CHECKING:  # scripts that prepare data import interop without torch
    from model import GPTConfig
    from nanodnt.weights import Pretrained


def read_if_nanogpt(source: str, model_config: "GPTConfig") -> "Pretrained | None":
    """A `Reader` of nanodnt/weights.py for checkpoints of nanoGPT, and folders that hold one."""
    from interop.nanogpt.weights import read_nanogpt

    return read_nanogpt(source, model_config.block_size, model_config.dropout)


def read_if_huggingface(source: str, model_config: "GPTConfig") -> "Pretrained | None":
    """A `Reader` of nanodnt/weights.py for folders and names of Hugging Face."""
    from interop.huggingface.hub import is_pretrained

    if not is_pretrained(source):
        return None
    from interop.huggingface.read import read_huggingface

    return read_huggingface(source, model_config.block_size, model_config.dropout)


READERS.extend([read_if_nanogpt, read_if_huggingface])
