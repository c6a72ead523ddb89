"""What an exported folder carries where `transformers` has no architecture for the network: the
code, and config.json.

`transformers` copies from a folder only files that lie side by side and import each other by
relative imports. So layers/slot.py becomes layers_slot.py, and `from layers.slot import Slot`
becomes `from .layers_slot import Slot`. All else stays: a changed network is carried as it is.
"""

import re
from dataclasses import asdict
from pathlib import Path

from model import GPTConfig

ROOT = Path(__file__).resolve().parents[2]
START = "interop.huggingface.modeling_nanodnt"  # the module that `transformers` imports


def carried_files(root: Path = ROOT) -> dict:
    """{file name: text} of modeling_nanodnt.py and all modules below `root` that it reaches by
    imports. ValueError for an import that cannot be made relative."""
    texts, wanted = {}, [START]
    while wanted:
        module = wanted.pop()
        name = f"{flat_name(module)}.py"
        if name not in texts:
            texts[name], needed = carried_text(module, root)
            wanted += needed
    return texts


def flat_name(module: str) -> str:
    """The name that a module has in the folder."""
    return module.rpartition(".")[2] if module == START else module.replace(".", "_")


def carried_text(module: str, root: Path) -> tuple:
    """(the module's source with relative imports, the modules below `root` that it imports)."""
    source, needed = (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"), []

    def make_relative(found):
        if not (root / f"{found[2].replace('.', '/')}.py").exists():
            return found[0]
        needed.append(found[2])
        return f"{found[1]}from .{flat_name(found[2])} import"

    text = re.sub(r"^( *)from ([\w.]+) import", make_relative, source, flags=re.MULTILINE)
    left = re.search(r"^ *(?:from|import) .*(?<![.\w])(?:layers|model)\b.*", text, re.MULTILINE)
    if left:
        what = f"{module}: `{left[0].strip()}`"
        raise ValueError(
            f"{what} cannot be exported: write `from folder.file import name`, on its own line"
        )
    return text, needed


def network_config(config: GPTConfig) -> dict:
    """The content of config.json, without the ids of special tokens and the dtype of the
    weights."""
    module = flat_name(START)
    classes = {
        "AutoConfig": f"{module}.NanoDNTConfig",
        "AutoModelForCausalLM": f"{module}.NanoDNTForCausalLM",
    }
    return dict(
        architectures=["NanoDNTForCausalLM"],
        auto_map=classes,
        model_type="nanodnt",
        network=asdict(config),
    )
