"""A conversation with a model: each line of standard input is a prompt, and its answer follows."""

import sys

import torch

from interop.conversations.template import (
    TEMPLATES,
    encode_conversation,
    named_template,
    template_of,
)
from nanodnt.data.inputs import decode_text
from nanodnt.generate import find_unused, generate
from nanodnt.weights import Trained


def chat_with(trained: Trained, name: str, system: str, max_new_tokens: int, how: dict) -> None:
    """Answer the lines of standard input until they end, by the template `name`, or else the
    checkpoint's. `how`: to draw a token. What outgrows block_size is forgotten, as in `generate`.
    ValueError, one line, where there is no template, or it has no place for `system`."""
    template = named_template(name) if name else template_of(trained.meta)
    if template is None:
        why = f"{trained.source} has no template, since it was not fine-tuned on conversations (data/sft/prepare.py)"
        raise ValueError(f"{why}: give --template={'|'.join(TEMPLATES)}")
    if trained.tokenizer.eot is None:
        what = f"the model's tokenizer ({trained.tokenizer.kind}) has no end of text, with which every answer ends"
        raise ValueError(f"{what}: a chat needs a model that was trained with one")
    messages = []
    if system:
        messages.append({"role": "system", "content": system})
        # ValueError where it has no place
        encode_conversation(trained.tokenizer, template, messages)
    unused, device = find_unused(trained.model, trained.tokenizer), trained.model.wte.weight.device
    for line in sys.stdin.buffer:
        try:
            text = decode_text(line, "this line").removesuffix("\n")
            asked = [*messages, {"role": "user", "content": text}]
            ids, _ = encode_conversation(trained.tokenizer, template, asked)
        # its answer is an empty line: the nth line of the output stays the nth answer
        except ValueError as e:
            print(f"left out: {e}", file=sys.stderr)
            print(flush=True)
            continue
        idx = torch.tensor([ids], device=device)
        out = generate(
            trained.model, idx, max_new_tokens, stop=trained.tokenizer.eot, unused=unused, **how
        )
        answer = trained.tokenizer.decode(out[0, len(ids) :])
        print(answer, flush=True)
        if answer.strip():  # a blank one is no message
            messages = [*asked, {"role": "assistant", "content": answer}]
