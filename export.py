"""Write a trained model for `transformers`: safetensors, config.json, tokenizer files.

python export.py --out_dir=out/quickstart --to=exported/quickstart
python export.py --out_dir=out/llama --checkpoint=last.pt --to=exported/llama --target=llama
python export.py --init_from=out-owt/ckpt.pt --to=exported/owt  # nanoGPT's, for transformers

A layout that GPT-2, LLaMA, Qwen3, OLMo-2, Gemma 3, Mixtral or Qwen3-MoE can compute becomes that
architecture; constants and gains that it lacks, such as LNS's, are multiplied into the weights.
Every other layout is exported with its modeling code: trust_remote_code=True.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

import torch

from configurator import PathName, configure
from interop.huggingface.write import write_pretrained
from nanodnt.run.errors import reports_errors
from nanodnt.weights import load_pretrained, load_trained


@dataclass
class ExportConfig:
    # --- what to export ---
    out_dir: PathName = "out/quickstart"  # a run directory
    checkpoint: PathName = "best.pt"  # a checkpoint in it: best.pt, last.pt, prev.pt
    init_from: PathName = ""  # weights from elsewhere instead of a run's checkpoint: nanoGPT's
    #   ckpt.pt, or its folder; a folder of Hugging Face, OWNER/MODEL, gpt2, …
    to: PathName = ""  # the folder to write, which must not exist
    target: Literal[
        "auto", "gpt2", "llama", "qwen3", "olmo2", "gemma3_text", "mixtral", "qwen3_moe", "nanodnt"
    ] = "auto"
    #   architecture; auto = the first architecture of transformers that computes the same, else
    #   nanodnt: the network's own code
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # dtype of the weights in the
    #   files
    compare: bool = True  # compare the logits of the folder with the model's, if transformers is
    #   installed


@reports_errors
def main() -> None:
    (config,), _ = configure(ExportConfig, description=__doc__)
    if not config.to:
        raise ValueError("--to=FOLDER is needed: the folder to write, which must not exist")
    if config.init_from:
        trained = load_pretrained(config.init_from)
    else:
        trained = load_trained(config.out_dir, config.checkpoint)
    kind, checked = write_pretrained(
        trained.model,
        trained.meta,
        Path(config.to),
        target=config.target,
        dtype=getattr(torch, config.dtype),
        check=config.compare,
    )
    check = "transformers computes the same" if checked else "not compared"
    code = ", trust_remote_code=True" if kind == "nanodnt" else ""
    print(
        f"{trained.source}, step {trained.step}, as {kind} in {config.dtype}: {config.to} ({check})"
    )
    print(f'next: transformers.AutoModelForCausalLM.from_pretrained("{config.to}"{code})')


if __name__ == "__main__":
    sys.exit(main())
