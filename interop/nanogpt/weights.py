"""Checkpoints of nanoGPT, its ckpt.pt: a GPT-2 with the exact GELU, with or without biases. Its
tensors have GPT-2's names, and its matrices the form of ours."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interop.huggingface.families import GPT2, tensors_from_theirs
from interop.huggingface.read import UNUSED, fit_to_flags
from model import GPTConfig
from nanodnt.data import load_meta
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.files import reason_of
from nanodnt.run.checkpoints import fingerprint, is_count, is_nanogpt, load_file, verify_records
from nanodnt.weights import Pretrained

FAMILY = GPT2._replace(transposed=False)
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
GPT2_VOCABULARIES = (50257, 50304)  # of GPT-2's tokens, and padded as nanoGPT has it from scratch
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # of torch.compile and DDP, before each name
NOT_EVALUATED = 1e9  # best_val_loss before the first evaluation


def read_nanogpt(source: str, block_size: int = 0, dropout: float = 0.0) -> Pretrained | None:
    """The model of the checkpoint `source`, or of ckpt.pt in that folder, with a context of at most
    `block_size` tokens (0 = all of its own). None for everything else, such as a checkpoint of
    ours, whose tensors are not read. ValueError, in one line, for a file that cannot be read, or
    does not fit together."""
    path = Path(source)
    if path.is_dir() and not fingerprint(path) and not (path / "config.json").exists():
        path = path / "ckpt.pt"
    if not path.is_file():
        return None
    values = load_file(path)
    if not is_nanogpt(values):
        return None
    verify_records(path)
    try:
        config = read_config(values["model_args"])
        weights = read_weights(values["model"], config)
        step = values["iter_num"]
        if not is_count(step):
            raise ValueError("its iter_num is no number of steps")
        val_loss = float(values["best_val_loss"])
    except ValueError as e:
        raise ValueError(f"{path} cannot be used: {e}") from None
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as e:
        reason = f"{type(e).__name__}: {reason_of(e)[:100]}"
        raise ValueError(f"{path} cannot be used: it is damaged ({reason})") from None
    about = f", nanoGPT's step {step}"
    if val_loss < NOT_EVALUATED:
        about += f", its validation loss {val_loss:.4f}"
    about += "; the moments of its AdamW are not taken over"
    dataset = name_of_dataset(values)
    pretrained = Pretrained(
        config,
        weights,
        find_tokenizer(config.vocab_size, dataset),
        step,
        about,
        f"has no tokenizer: its {config.vocab_size} tokens are those of nanoGPT's dataset "
        f"{dataset}, which is not prepared here: run `python data/local/prepare.py "
        f"--input=nanoGPT/data/{dataset} --tokenizer=chars --name={dataset}`",
    )
    fit_to_flags(pretrained, block_size, dropout)
    return pretrained


def read_config(model_args: dict[str, Any]) -> GPTConfig:
    """The GPTConfig of nanoGPT's `model_args`. KeyError where one is missing, ValueError where one
    is not allowed."""
    sizes = {name: model_args[name] for name in SIZES}
    flags = FAMILY.flags | sizes | dict(mlp="gelu_erf", norm_eps=1e-5)
    flags["bias"] = model_args.get("bias", True)  # the first versions always had biases
    config = GPTConfig(**flags)
    config.check()
    return config


def read_weights(theirs: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Our state dict from nanoGPT's. ValueError, with its name, for a tensor that is missing, of
    another shape, or unknown, as is a head that is not the embedding."""
    tensors = {}
    for name, tensor in theirs.items():
        name = WRAPPERS.sub("", name).removeprefix(FAMILY.prefix)
        if not UNUSED.search(f".{name}"):
            tensors[name] = tensor
    if torch.equal(tensors["lm_head.weight"], tensors["wte.weight"]):
        del tensors["lm_head.weight"]
    return tensors_from_theirs(tensors, config, FAMILY)


def name_of_dataset(values: dict[str, Any]) -> str:
    """The dataset that a checkpoint was trained on; NAME where it does not say."""
    config = values.get("config")
    name = config.get("dataset") if isinstance(config, dict) else None
    if isinstance(name, str) and re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        return name
    return "NAME"


def find_tokenizer(vocab_size: int, dataset: str) -> dict[str, Any] | None:
    """The meta of the tokenizer of `vocab_size` tokens: GPT-2's by their number, else that of our
    prepared dataset of nanoGPT's name; None where it is not there, or has other tokens."""
    if vocab_size in GPT2_VOCABULARIES:
        return Tokenizer.meta_for("gpt2")
    try:
        meta = load_meta(dataset, verify=False)
    except ValueError:
        return None
    return meta if meta.get("vocab_size") == vocab_size else None
