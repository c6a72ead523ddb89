"""Talk with a model that was fine-tuned on conversations.

python chat.py --out_dir=out/sft                           # talk; Ctrl-D ends it
python chat.py --out_dir=out/sft --system="Be brief." < prompts.txt > answers.txt

Each line of standard input is a prompt, and its answer is printed after it. The template is that
of the data that the model was fine-tuned on.
"""

import sys
from dataclasses import dataclass

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

from configurator import configure
from interop.conversations.chat import chat_with
from nanodnt.run.errors import reports_errors
from nanodnt.sampling import SamplingConfig


@dataclass
class ChatConfig:
    # --- the conversation ---
    template: str = ""  # template of the conversation: chat, alpaca, chatml, plain; empty = the
    #   checkpoint's
    system: str = ""  # system message, which stands before the first prompt


@reports_errors
def main() -> None:
    (config, sampling), _ = configure(ChatConfig, SamplingConfig, description=__doc__)
    sampling.check()
    trained = sampling.load_model()
    options = sampling.draw_options(trained.model.wte.weight.device)
    chat_with(trained, config.template, config.system, sampling.max_new_tokens, **options)


if __name__ == "__main__":
    sys.exit(main())
