"""What an exported folder carries where `transformers` has no architecture for the network: the code, and config.json.

`transformers` copies from a folder only files that lie side by side and import each other by relative imports. So
layers/slot.py becomes layers_slot.py, and `from layers.slot import Slot` becomes `from .layers_slot import Slot`. All
else stays: a changed network is carried as it is.
"""

import ast
import re
from dataclasses import asdict
from pathlib import Path

from model import GPTConfig

ROOT = Path(__file__).resolve().parents[2]
START = "interop.huggingface.modeling_nanodnt"  # the module that `transformers` imports


def carried_files(root: Path = ROOT) -> dict:
    """{file name: text} of modeling_nanodnt.py and all modules below `root` that it reaches by imports. ValueError for
    an import that cannot be made relative."""
    texts, wanted = {}, [START]
    while wanted:
        module = wanted.pop()
        if flat_name(module) not in texts:
            texts[flat_name(module)], needed = carried_text(module, root)
            wanted += needed
    return {f"{name}.py": text for name, text in texts.items()}


def flat_name(module: str) -> str:
    """The name that a module has in the folder."""
    return module.rpartition(".")[2] if module == START else module.replace(".", "_")


def carried_text(module: str, root: Path) -> tuple:
    """(the module's source with relative imports, the modules below `root` that it imports)."""
    path = root / f"{module.replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8")
    lines, needed = source.split("\n"), []
    for node in ast.walk(ast.parse(source)):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
        for name in imported:
            top = name.split(".")[0]
            if top and not (root / f"{top}.py").exists() and not (root / top / "__init__.py").exists():
                continue  # a library
            pattern = rf"^(\s*)from\s+{re.escape(name)}\s+import\b"
            line, count = re.subn(pattern, rf"\1from .{flat_name(name)} import", lines[node.lineno - 1])
            if not count or not (root / f"{name.replace('.', '/')}.py").exists():
                what = f"{path.relative_to(root)}, line {node.lineno}: `{lines[node.lineno - 1].strip()}`"
                raise ValueError(f"{what} cannot be exported: write `from folder.file import name`, on its own line")
            lines[node.lineno - 1] = line
            needed.append(name)
    return "\n".join(lines), needed


def network_config(config: GPTConfig) -> dict:
    """The content of config.json, without the ids of special tokens and the dtype of the weights."""
    c, module = config, flat_name(START)
    classes = {"AutoConfig": f"{module}.NanoDNTConfig", "AutoModelForCausalLM": f"{module}.NanoDNTForCausalLM"}
    return {
        **dict(architectures=["NanoDNTForCausalLM"], auto_map=classes, model_type="nanodnt", network=asdict(c)),
        # copies for tools that look for the usual names
        **dict(vocab_size=c.vocab_size, max_position_embeddings=c.block_size, hidden_size=c.n_embd),
        **dict(intermediate_size=c.ffn_width, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head),
        **dict(num_key_value_heads=c.n_kv_head or c.n_head, head_dim=c.head_dim),
        "tie_word_embeddings": False,  # a tied head is not stored: `transformers` has nothing to tie
    }
