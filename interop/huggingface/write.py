"""A trained model as a folder that `transformers` loads: safetensors, config.json, tokenizer files."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError

from interop.huggingface.carry import carried_files, network_config
from interop.huggingface.families import FAMILIES, config_to_theirs, tensors_to_theirs
from interop.huggingface.plain import NotPlain, plain_model
from interop.huggingface.tokenizer_files import tokenizer_files
from interop.huggingface.verify import compare_with_transformers
from model import GPT
from nanodnt.data.tokenizer import Tokenizer


def write_pretrained(
    model: GPT, meta: dict, folder: Path, target: str = "auto", dtype: torch.dtype = torch.float32, check: bool = True
) -> tuple:
    """Write `model`, on the CPU in fp32 and eval mode, and the tokenizer that `meta` describes, to the new folder
    `folder`, complete or not at all. Returns (architecture, whether `transformers` was seen to compute the same).

    target "auto" takes an architecture of `transformers` where one computes the same, else "nanodnt", the network's own
    code. `check`: load the folder with `transformers`, where that is installed, and compare.
    ValueError where the folder exists, where the layout has a part that `target` lacks, or where the check fails."""
    from huggingface_hub import save_torch_state_dict

    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists already: choose another --to, or remove it")
    kind, config, tensors = convert(model, target)
    tokenizer = Tokenizer(meta)
    ids = dict(bos_token_id=tokenizer.bos, eos_token_id=tokenizer.eot)
    files = tokenizer_files(meta, model.config.block_size)
    files |= carried_files() if kind == "nanodnt" else {}
    config |= ids | {"dtype": str(dtype).removeprefix("torch.")}
    files |= {"config.json": json.dumps(config, indent=2), "generation_config.json": json.dumps(ids, indent=2)}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            tensors = {name: t.to(dtype).contiguous() for name, t in tensors.items()}
            save_torch_state_dict(tensors, partial, max_shard_size="5GB")
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
            for path in partial.glob("*.safetensors"):
                shutil.copymode(partial / "config.json", path)  # the library lets nobody else read them
            checked = check and compare_with_transformers(partial, model, kind, dtype)
            partial.rename(folder)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or e
        raise ValueError(f"cannot write {folder} ({reason}): nothing was written") from None
    return kind, checked


def convert(model: GPT, target: str) -> tuple:
    """(architecture, its config.json, its tensors) of a model."""
    reasons = []
    for kind in FAMILIES if target == "auto" else {target} & FAMILIES.keys():
        try:
            config, weights = plain_model(model, kind)
            return kind, config_to_theirs(config, kind), tensors_to_theirs(weights, config, kind)
        except NotPlain as e:
            reasons.append(str(e))
    if target not in ("auto", "nanodnt"):
        raise ValueError(f"--target={target} cannot hold this layout: {reasons[0]}; use --target=auto or nanodnt")
    return "nanodnt", network_config(model.config), {f"network.{name}": t for name, t in model.state_dict().items()}
