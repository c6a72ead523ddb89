"""Folders and names of Hugging Face, and their files. Without torch, so that it loads fast."""

import re
from collections.abc import Sequence
from pathlib import Path

NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # known without an owner


def is_pretrained(name: str) -> bool:
    """Whether `name` means a folder, or a model on the Hub, OWNER/MODEL, and not a checkpoint of
    ours."""
    if name in NAMES or (name and Path(name).is_dir()):
        return True
    if name.endswith(".pt") or Path(name).parent.exists():
        return False  # a mistyped path is not looked for on the Hub
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name, re.ASCII))


def fetch(name: str, patterns: Sequence[str] = ("*.json", "*.safetensors", "*.jinja")) -> Path:
    """The folder `name`; if it does not exist, a folder with the files `patterns` of the Hub's
    model, downloaded once."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    ignored = ["*/*", "consolidated*"]  # other formats
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=ignored))
    except Exception as e:  # the HTTP client and the Hub's client raise many kinds
        lines = str(e).strip().splitlines() or [""]
        reason = f"{type(e).__name__}: {lines[0][:200]}"
        raise ValueError(
            f"{name} is no folder, and could not be fetched ({reason}): check name and network"
        ) from None
