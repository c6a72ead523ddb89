"""The code and config.json of an exported folder whose network is no architecture of
`transformers`.

`transformers` copies from a folder only files that lie side by side and import each other by
relative imports. So layers/slot.py becomes layers_slot.py, and `from layers.slot import Slot`
becomes `from .layers_slot import Slot`. The rest of the code does not change: a changed network is
carried as it is.
"""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from model import GPTConfig

ROOT = Path(__file__).resolve().parents[2]
START = "interop.huggingface.modeling_nanodnt"  # the module that `transformers` imports


class CarriedModule(NamedTuple):
    text: str  # the source with relative imports
    imports: list[str]  # modules of this repository that it imports


def carried_files(root: Path = ROOT) -> dict[str, str]:
    """{file name: text} of modeling_nanodnt.py and all modules below `root` that it reaches by
    imports. ValueError for an import that cannot be made relative."""
    texts = {}
    waiting = [START]
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name not in texts:
            carried = carried_text(module, root)
            texts[name] = carried.text
            waiting += carried.imports
    return texts


def path_of(module: str, root: Path) -> Path:
    return root / f"{module.replace('.', '/')}.py"


def flat_name(module: str) -> str:
    """The name of a module in the folder."""
    if module == START:
        return module.rpartition(".")[2]
    return module.replace(".", "_")


def carried_text(module: str, root: Path) -> CarriedModule:
    """A module for the folder. ValueError for an import that cannot be made relative."""
    source = path_of(module, root).read_text(encoding="utf-8")
    imports = []

    def make_relative(match: re.Match) -> str:
        indent, imported = match.groups()
        if not path_of(imported, root).exists():
            return match[0]
        imports.append(imported)
        return f"{indent}from .{flat_name(imported)} import"

    text = re.sub(r"^( *)from ([\w.]+) import", make_relative, source, flags=re.MULTILINE)
    left = re.search(r"^ *(?:from|import) .*(?<![.\w])(?:layers|model)\b.*", text, re.MULTILINE)
    if left:
        raise ValueError(
            f"{module}: `{left[0].strip()}` cannot be exported: write `from folder.file import "
            "name`, on its own line"
        )
    return CarriedModule(text, imports)


def network_config(config: GPTConfig) -> dict[str, Any]:
    """The content of config.json, without the ids of special tokens and the dtype of the
    weights."""
    module = flat_name(START)
    return {
        "architectures": ["NanoDNTForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.NanoDNTConfig",
            "AutoModelForCausalLM": f"{module}.NanoDNTForCausalLM",
        },
        "model_type": "nanodnt",
        "network": asdict(config),
    }
