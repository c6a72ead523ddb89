"""A trained model as a folder that `transformers` loads: safetensors, config.json, tokenizer files.

Where `transformers` is installed, its logits are compared with the model's: the comparison finds a
network whose code was changed in a way that no export can express."""

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from interop.huggingface.carry import carried_files, network_config
from interop.huggingface.families import FAMILIES, config_to_theirs, tensors_to_theirs
from interop.huggingface.plain import NotPlain, plain_model
from interop.huggingface.tokenizer_files import tokenizer_files
from model import GPT
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.files import make_folder, reason_of

# Largest relative difference of the logits, from the rounding of the products and of the weights in
# the files.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.05}


class Written(NamedTuple):
    kind: str  # architecture
    checked: bool  # whether the logits of `transformers` were compared


class Converted(NamedTuple):
    kind: str  # architecture
    config: dict[str, Any]  # content of config.json
    tensors: dict[str, Tensor]


def write_pretrained(
    model: GPT,
    meta: dict[str, Any],
    folder: Path,
    target: str = "auto",
    dtype: torch.dtype = torch.float32,
    check: bool = True,
) -> Written:
    """Write `model`, on the CPU in fp32 and eval mode, and the tokenizer of `meta` to the new
    folder `folder`, complete or not at all.

    target "auto" takes an architecture of `transformers` where one computes the same, else
    "nanodnt", the network's own code. `check`: load the folder with `transformers`, where that is
    installed, and compare. ValueError where the folder exists, where the layout has a part that
    `target` lacks, or where the check fails."""
    from huggingface_hub import save_torch_state_dict

    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists already: choose another --to, or remove it")
    kind, config, tensors = convert(model, target)
    tokenizer = Tokenizer(meta)
    # By default OLMo-2 and Gemma 3 have a token for padding, whose embedding they never train.
    ids = dict(bos_token_id=tokenizer.bos, eos_token_id=tokenizer.eot, pad_token_id=None)
    files = tokenizer_files(meta, model.config.block_size)
    if kind == "nanodnt":
        files |= carried_files()
    config |= ids
    config["dtype"] = str(dtype).removeprefix("torch.")
    files["config.json"] = json.dumps(config, indent=2)
    files["generation_config.json"] = json.dumps(ids, indent=2)
    make_folder(folder.parent, "--to")
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            tensors = {name: t.to(dtype).contiguous() for name, t in tensors.items()}
            save_torch_state_dict(tensors, partial, max_shard_size="5GB")
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
            for path in partial.glob("*.safetensors"):
                # the library lets nobody else read them
                shutil.copymode(partial / "config.json", path)
            checked = check and compare_with_transformers(partial, model, kind, dtype)
            partial.rename(folder)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ValueError(f"cannot write {folder} ({reason}): nothing was written") from None
    return Written(kind, checked)


def convert(model: GPT, target: str) -> Converted:
    """A model as the architecture `target`, or as the first that computes the same ("auto")."""
    kinds = list(FAMILIES) if target == "auto" else [target]
    for kind in kinds:
        if kind == "nanodnt":
            continue
        try:
            config, weights = plain_model(model, kind)
        except NotPlain as e:
            reason = str(e)
            continue
        tensors = tensors_to_theirs(weights, config, FAMILIES[kind])
        return Converted(kind, config_to_theirs(config, kind), tensors)
    if target not in ("auto", "nanodnt"):
        raise ValueError(
            f"--target={target} cannot hold this layout: {reason}; use --target=auto or nanodnt"
        )
    tensors = {f"network.{name}": t for name, t in model.state_dict().items()}
    return Converted("nanodnt", network_config(model.config), tensors)


def compare_with_transformers(folder: Path, model: GPT, kind: str, dtype: torch.dtype) -> bool:
    """Load the folder, an export of `model` as `kind` in `dtype`, with `transformers`, and compare
    the logits. False where it is not installed, or experts are rounded, which sends tokens to other
    experts. ValueError where it computes something else, or cannot load the folder."""
    if importlib.util.find_spec("transformers") is None:
        return False
    if model.config.n_expert and dtype != torch.float32:
        return False
    try:
        largest = difference(folder, model)
    except Exception as e:  # transformers raises many kinds
        raise ValueError(
            f"transformers cannot load the export as {kind} ({reason_of(e)[:200]}), nothing was "
            "written: --compare=False leaves the comparison out"
        ) from e
    if not largest <= TOLERANCES[dtype]:
        raise ValueError(
            f"transformers computes something else from the export as {kind}, nothing was written: "
            "was the network changed? Try --target=nanodnt"
        )
    return True


@torch.no_grad()
def difference(folder: Path, model: GPT) -> float:
    """Largest difference between the logits of `model` and of the folder's, relative to the largest
    logit, in fp32, on some random tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, min(model.config.block_size, 64))
    idx = torch.randint(model.config.vocab_size, shape, generator=generator)
    with torch.random.fork_rng(devices=[]):
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32
        )
        ours = model(idx)[0]
        logits = theirs.eval()(idx).logits
    return ((logits - ours).abs().max() / ours.abs().max().clamp(min=1e-30)).item()
