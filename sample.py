"""Text from a checkpoint, or a conversation with it.

python sample.py --out_dir=out/dnt_small --start="The"
python sample.py --out_dir=out/dnt_small --start_file=prompt.txt --num_samples=3 --temperature=0.8 --top_p=0.95
python sample.py --out_dir=out/dnt_small --start=FILE:prompt.txt                 # the same file, as nanoGPT has it
python sample.py --init_from=gpt2 --start="The"                                 # weights of Hugging Face
echo "def main(" | python sample.py --out_dir=out/quickstart --start_file=-

python sample.py --out_dir=out/sft --chat                                       # talk; Ctrl-D ends it
python sample.py --out_dir=out/sft --chat --system="Be brief." < prompts.txt > answers.txt

In a chat each line of standard input is a prompt. The template is the one of the data that the
model was fine-tuned on.
"""

import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

import torch

from configurator import PathName, configure, read_path
from nanodnt.data.inputs import decode_text, read_text
from nanodnt.generate import continue_text
from nanodnt.run.environment import choose_device, choose_dtype
from nanodnt.run.errors import reports_errors
from nanodnt.weights import Trained, load_pretrained, load_trained

with suppress(ModuleNotFoundError):  # a fork may have deleted it
    import interop  # noqa: F401  # which can read weights of Hugging Face

NOT_IN_CHAT = ("start", "start_file", "num_samples")


@dataclass
class SampleConfig:
    # --- what to sample from ---
    out_dir: PathName = "out/quickstart"  # a run directory
    checkpoint: PathName = "best.pt"  # a checkpoint in it: best.pt, last.pt, prev.pt
    start: str = ""  # the prompt; empty = a new document; FILE:prompt.txt = what this file holds
    start_file: PathName = ""  # a file that holds the prompt; - = standard input
    init_from: PathName = ""  # instead of a run's checkpoint: a folder of Hugging Face,
    #   OWNER/MODEL, gpt2, …
    # --- a conversation ---
    chat: bool = False  # answer the lines of standard input, one after another
    template: str = ""  # chat, alpaca, chatml, plain; empty = the checkpoint's
    system: str = ""  # a system message, which stands before the first prompt
    # --- how ---
    num_samples: int = 5  # samples, drawn in one batch
    max_new_tokens: int = 500  # longest continuation, or answer, in tokens; end of text ends it
    #   earlier
    temperature: float = 0.8  # divides the logits; 0 = always the most likely token
    top_k: int = 200  # only the k most likely tokens; 0 = off
    top_p: float = 1.0  # only the most likely tokens that together reach this probability; 1 = off
    seed: int = 1337  # of the draws
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matrix
    #   multiplications

    def check(self, given=()):
        """ValueError for values that mean nothing. `given` has the names of the flags that were
        set."""
        for name, ok, allowed in (
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or 1e-4 <= self.temperature < math.inf,
                "0, or at least 0.0001",
            ),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)} must be {allowed}")
        if self.start and self.start_file:
            raise ValueError("start and start_file both give a prompt: keep one")
        for name in NOT_IN_CHAT if self.chat else ():
            if name in given:
                raise ValueError(
                    f"{name} is not for a chat, which answers line by line: leave out --chat or --{name}"
                )
        if (self.template or self.system) and not self.chat:
            raise ValueError("template and system are for a chat: add --chat, or leave them out")


@reports_errors
def main() -> None:
    (config,), given = configure(SampleConfig, description=__doc__)
    config.check(given)
    text = read_prompt(config)
    device, _ = choose_device(config.device)
    dtype, _ = choose_dtype(config.dtype, device)
    if config.init_from:
        trained = load_pretrained(config.init_from)
    else:
        trained = load_trained(config.out_dir, config.checkpoint)
    trained.model.to(device).set_runtime(compute_dtype=dtype)
    top = dict(top_k=config.top_k or None, top_p=config.top_p if config.top_p < 1 else None)
    drawing = (
        dict(
            temperature=config.temperature,
            generator=torch.Generator(device).manual_seed(config.seed),
        )
        | top
    )
    if config.chat:
        from interop.conversations.chat import chat_with

        chat_with(trained, config.template, config.system, config.max_new_tokens, drawing)
    else:
        draw_samples(config, trained, text, drawing)


def read_prompt(config: SampleConfig) -> str:
    """The prompt's text, from the flag, a file or standard input (without a final newline)."""
    if config.start.startswith("FILE:"):
        name, flag = read_path(config.start.removeprefix("FILE:")), f"start={config.start}"
    elif config.start_file:
        name, flag = config.start_file, f"start_file={config.start_file}"
    else:
        return config.start
    try:
        text = (
            decode_text(sys.stdin.buffer.read(), "standard input")
            if name == "-"
            else read_text(Path(name))
        )
    except ValueError as e:
        raise ValueError(f"{flag}: {e}") from None
    return text.removesuffix("\n")


def draw_samples(config: SampleConfig, trained: Trained, text: str, drawing: dict) -> None:
    """Print samples that continue `text`; `drawing`: how `generate` draws."""
    for remark in trained.tokenizer.remarks(text):
        print(f"note: the prompt: {remark}", file=sys.stderr)
    how = drawing | dict(stop=trained.tokenizer.eot)
    texts = continue_text(
        trained.model, trained.tokenizer, text, config.max_new_tokens, config.num_samples, **how
    )
    for found in texts:
        print(found, "-" * 80, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
