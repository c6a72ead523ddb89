"""Other people's weights: a folder or a name of Hugging Face, as a GPTConfig, a state dict and a
tokenizer."""

import re
from pathlib import Path

from interop.huggingface.families import FAMILIES, config_from_theirs, tensors_from_theirs
from interop.huggingface.hub import fetch
from interop.huggingface.tokenizer_files import read_json, read_tokenizer
from nanodnt.run.checkpoints import fingerprint
from nanodnt.weights import Pretrained, empty_model_like

# constants that old versions saved
UNUSED = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")


def read_huggingface(name: str, block_size: int = 0, dropout: float = 0.0) -> Pretrained:
    """The model in the folder `name`, or on the Hub, with a context of at most `block_size` tokens
    (0 = all of its own). ValueError, in one line, if it cannot be fetched or read, or has parts that
    our model lacks."""
    folder = fetch(name)
    try:
        theirs = read_json(folder / "config.json")
        checkpoints = sorted(fingerprint(folder))
        if checkpoints and "model_type" not in theirs:
            problem = f"it is a run: train.py takes {folder / checkpoints[0]}, say"
            raise ValueError(f"{problem}; other commands a run without init_from")
        if (folder / "ckpt.pt").exists() and not theirs:
            raise ValueError(
                "its ckpt.pt is a checkpoint of nanoGPT, which is not read: see docs/from_nanogpt.md"
            )
        if "model_type" not in theirs:
            raise ValueError("it has no config.json of a model")
        if theirs.get("model_type") == "nanodnt":
            weights = {name.removeprefix("network."): t for name, t in read_tensors(folder).items()}
            config = empty_model_like(dict(model_config=theirs["network"], model=weights)).config
        else:
            config = config_from_theirs(theirs)
            prefix = FAMILIES[theirs["model_type"]].prefix
            tensors = {name.removeprefix(prefix): t for name, t in read_tensors(folder).items()}
            if config.tie_weights:
                tensors.pop("lm_head.weight", None)  # the embedding once more
            weights = tensors_from_theirs(tensors, config, theirs["model_type"])
        meta = read_tokenizer(folder)
        if meta and meta["vocab_size"] > config.vocab_size:
            raise ValueError(
                f"its tokenizer has {meta['vocab_size']} tokens, its model only {config.vocab_size}"
            )
    except ValueError as e:
        raise ValueError(f"{name} cannot be used: {e}") from None
    # no version writes such values
    except (KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as e:
        raise ValueError(
            f"{name} cannot be used: one of its .json files is damaged ({e})"
        ) from None
    config.dropout = dropout
    if block_size and block_size < config.block_size:
        config.block_size = block_size
        if "wpe.weight" in weights:
            weights["wpe.weight"] = weights["wpe.weight"][:block_size]
    return Pretrained(config, weights, meta)


def read_tensors(folder: Path) -> dict:
    """{name: tensor} of all safetensors files of a folder. ValueError where one is missing or
    damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    found = {}
    for file in files:
        try:
            found |= load_file(file)
        except FileNotFoundError:
            hint = ".bin files are not read: load and save it once with transformers"
            raise ValueError(f"it has no {file.name} ({hint})") from None
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{file.name} is damaged ({str(e)[:100]})") from None
    return {name: t for name, t in found.items() if not UNUSED.search(name)}
