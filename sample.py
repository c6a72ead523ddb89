"""Sample text from a checkpoint.

python sample.py --out_dir=out/dnt_small --start="The"
python sample.py --out_dir=out/dnt_small --start_file=prompt.txt --num_samples=3 --top_p=0.95
python sample.py --out_dir=out/dnt_small --start=FILE:prompt.txt    # the same, as nanoGPT has it
python sample.py --init_from=gpt2 --start="The"                     # weights of Hugging Face
python sample.py --init_from=out-shakespeare-char                   # nanoGPT's ckpt.pt in a folder
echo "def main(" | python sample.py --out_dir=out/quickstart --start_file=-

chat.py talks with a model that was fine-tuned on conversations.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

from configurator import PathName, configure, read_path
from nanodnt.data.inputs import decode_text, read_text
from nanodnt.generate import continue_text
from nanodnt.run.errors import reports_errors
from nanodnt.sampling import SamplingConfig

with suppress(ModuleNotFoundError):  # a fork may have deleted it
    import interop  # noqa: F401  # it adds the readers of weights from elsewhere


@dataclass
class SampleConfig:
    # --- the text ---
    start: str = ""  # the prompt; empty = a new document; FILE:prompt.txt = the text of this file
    start_file: PathName = ""  # a file with the prompt; - = standard input
    num_samples: int = 5  # number of samples, drawn in one batch

    def check(self) -> None:
        """Raise ValueError for a value out of its range, and for two prompts."""
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples} must be at least 1")
        if self.start and self.start_file:
            raise ValueError("start and start_file both give a prompt: keep one")


@reports_errors
def main() -> None:
    (config, sampling), _ = configure(SampleConfig, SamplingConfig, description=__doc__)
    config.check()
    sampling.check()
    prompt = read_prompt(config)
    trained = sampling.load_model()
    model = trained.model
    tokenizer = trained.tokenizer
    for remark in tokenizer.remarks(prompt):
        print(f"note: the prompt: {remark}", file=sys.stderr)
    texts = continue_text(
        model,
        tokenizer,
        prompt,
        sampling.max_new_tokens,
        config.num_samples,
        stop=tokenizer.eot,
        **sampling.draw_options(model.wte.weight.device),
    )
    for text in texts:
        print(text)
        print("-" * 80)


def read_prompt(config: SampleConfig) -> str:
    """The prompt from the flag, a file or standard input, without a final newline."""
    if config.start.startswith("FILE:"):
        file = read_path(config.start.removeprefix("FILE:"))
        flag = f"start={config.start}"
    elif config.start_file:
        file = config.start_file
        flag = f"start_file={config.start_file}"
    else:
        return config.start
    try:
        if file == "-":
            text = decode_text(sys.stdin.buffer.read(), "standard input")
        else:
            text = read_text(Path(file))
    except ValueError as e:
        raise ValueError(f"{flag}: {e}") from None
    return text.removesuffix("\n")


if __name__ == "__main__":
    sys.exit(main())
