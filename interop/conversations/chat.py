"""A conversation with a model: each line of standard input is a prompt, and its answer follows."""

import sys
from typing import Any

import torch

from interop.conversations.template import (
    TEMPLATES,
    Template,
    encode_conversation,
    named_template,
    template_of,
)
from nanodnt.data.inputs import decode_text
from nanodnt.generate import find_unused, generate
from nanodnt.weights import Trained


def chat_with(
    trained: Trained, template_name: str, system: str, max_new_tokens: int, **draw_options: Any
) -> None:
    """Answer the lines of standard input until they end.

    template_name  a template's name; "" = the checkpoint's template
    system         a system message before the first prompt; "" = none
    draw_options   keyword arguments of `sample_token`

    A conversation longer than block_size loses its beginning, as in `generate`. ValueError, one
    line, if there is no template, or if it has no place for `system`."""
    model = trained.model
    tokenizer = trained.tokenizer
    template = choose_template(trained, template_name)
    messages = []
    if system:
        messages.append({"role": "system", "content": system})
        encode_conversation(tokenizer, template, messages)  # raises if there is no place for it
    device = model.wte.weight.device
    unused = find_unused(model, tokenizer)
    for line in sys.stdin.buffer:
        try:
            prompt = decode_text(line, "this line").removesuffix("\n")
            messages_and_prompt = [*messages, {"role": "user", "content": prompt}]
            ids, _ = encode_conversation(tokenizer, template, messages_and_prompt)
        except ValueError as e:
            print(f"left out: {e}", file=sys.stderr)
            print(flush=True)  # an empty answer: line n of the output stays the answer to line n
            continue
        idx = torch.tensor([ids], device=device)
        out = generate(
            model, idx, max_new_tokens, stop=tokenizer.eot, unused=unused, **draw_options
        )
        answer = tokenizer.decode(out[0, len(ids) :])
        print(answer, flush=True)
        if answer.strip():  # a blank answer is no message, so its turn is forgotten
            messages = [*messages_and_prompt, {"role": "assistant", "content": answer}]


def choose_template(trained: Trained, name: str) -> Template:
    """The template of this name, or the checkpoint's if `name` is empty. ValueError if there is
    none, or if the tokenizer has no end of text."""
    template = named_template(name) if name else template_of(trained.meta)
    if template is None:
        raise ValueError(
            f"{trained.source} has no template, since it was not fine-tuned on conversations "
            f"(data/sft/prepare.py): give --template={'|'.join(TEMPLATES)}"
        )
    if trained.tokenizer.eot is None:
        raise ValueError(
            f"the model's tokenizer ({trained.tokenizer.kind}) has no end of text, with which "
            "every answer ends: a chat needs a model that was trained with one"
        )
    return template
