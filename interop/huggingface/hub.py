"""Folders and names of Hugging Face: what a name means, and its files. Without torch, so that it
loads fast."""

import re
from pathlib import Path

NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # known without an owner


def is_pretrained(name: str) -> bool:
    """Whether `name` means a folder, or a model on the Hub, OWNER/MODEL, and not a checkpoint of
    ours."""
    if name in NAMES or name and Path(name).is_dir():
        return True
    # a mistyped path is not looked for on the Hub
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name, re.ASCII) and not name.endswith(".pt")
    return bool(on_hub) and not Path(name).parent.exists()


def fetch(name: str, patterns=("*.json", "*.safetensors", "*.jinja")) -> Path:
    """The folder `name`; where there is none, one with the files `patterns` of the Hub's model,
    downloaded once."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    ignored = ["*/*", "consolidated*"]  # other formats
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=ignored))
    except Exception as e:  # the HTTP client and the Hub's client raise many kinds
        why = f"{type(e).__name__}: {(str(e).strip().splitlines() or [''])[0][:200]}"
        raise ValueError(
            f"{name} is no folder, and could not be fetched ({why}): check name and network"
        ) from None
