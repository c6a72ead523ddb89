"""Other people's weights, from a folder or a name of Hugging Face."""

import re
from pathlib import Path

from torch import Tensor

from interop.huggingface.families import FAMILIES, config_from_theirs, tensors_from_theirs
from interop.huggingface.hub import fetch
from interop.huggingface.tokenizer_files import read_json, read_tokenizer
from model import GPTConfig
from nanodnt.run.checkpoints import fingerprint
from nanodnt.weights import Pretrained, empty_model_like

# Constants that old versions of transformers saved
UNUSED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def read_huggingface(name: str, block_size: int = 0, dropout: float = 0.0) -> Pretrained:
    """The model in the folder `name`, or on the Hub, with a context of at most `block_size` tokens
    (0 = all of its own). ValueError, in one line, if it cannot be fetched or read, or has parts
    that our model lacks."""
    folder = fetch(name)
    try:
        pretrained = read_folder(folder)
    except ValueError as e:
        raise ValueError(f"{name} cannot be used: {e}") from None
    # no version writes such values
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as e:
        raise ValueError(
            f"{name} cannot be used: one of its .json files is damaged ({e})"
        ) from None
    fit_to_flags(pretrained, block_size, dropout)
    return pretrained


def fit_to_flags(pretrained: Pretrained, block_size: int, dropout: float) -> None:
    """Set the dropout, and shorten the context to `block_size` tokens, unless that is 0 or the
    context is shorter already."""
    config = pretrained.config
    weights = pretrained.weights
    config.dropout = dropout
    if block_size and block_size < config.block_size:
        config.block_size = block_size
        if "wpe.weight" in weights:
            weights["wpe.weight"] = weights["wpe.weight"][:block_size]


def read_folder(folder: Path) -> Pretrained:
    """The model in a folder. ValueError if it is not in Hugging Face's format, or has parts that
    our model lacks."""
    theirs = read_json(folder / "config.json")
    if "model_type" not in theirs:
        refuse_folder(folder)
    if theirs["model_type"] == "nanodnt":
        config, weights = read_ours(folder, theirs["network"])
    else:
        config, weights = read_theirs(folder, theirs)
    meta = read_tokenizer(folder)
    if meta and meta["vocab_size"] > config.vocab_size:
        raise ValueError(
            f"its tokenizer has {meta['vocab_size']} tokens, its model only {config.vocab_size}"
        )
    return Pretrained(config, weights, meta)


def refuse_folder(folder: Path) -> None:
    """Raise ValueError, with advice, for a folder whose config.json is not that of a model."""
    if checkpoints := sorted(fingerprint(folder)):
        raise ValueError(
            f"it is a run: train.py takes {folder / checkpoints[0]}, say; "
            "other commands a run without init_from"
        )
    raise ValueError("it has no config.json of a model")


def read_ours(folder: Path, network: dict) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Config and state dict of a folder that carries this project's code."""
    weights = {name.removeprefix("network."): t for name, t in read_tensors(folder).items()}
    model = empty_model_like({"model_config": network, "model": weights})
    return model.config, weights


def read_theirs(folder: Path, theirs: dict) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Config and state dict of a folder of one of FAMILIES, in our names and shapes."""
    config = config_from_theirs(theirs)
    family = FAMILIES[theirs["model_type"]]
    tensors = {name.removeprefix(family.prefix): t for name, t in read_tensors(folder).items()}
    if config.tie_weights:
        tensors.pop("lm_head.weight", None)  # the embedding once more
    return config, tensors_from_theirs(tensors, config, family)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """{name: tensor} of all safetensors files of a folder. ValueError if one is missing or
    damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(read_json(index)["weight_map"].values())
    tensors = {}
    for name in sorted(names):
        try:
            tensors.update(load_file(folder / name))
        except FileNotFoundError:
            hint = ".bin files are not read: load and save it once with transformers"
            raise ValueError(f"it has no {name} ({hint})") from None
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{name} is damaged ({str(e)[:100]})") from None
    return {name: t for name, t in tensors.items() if not UNUSED.search(name)}
