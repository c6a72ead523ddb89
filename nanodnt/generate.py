"""Sampling tokens from a model: `generate`, with a cache of keys and values, and `sample_token`."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT
from nanodnt.data.tokenizer import Tokenizer

WATCHED = 64  # new tokens that a run shows at each sample_interval: our choice


class KVCache:
    """Keys and values of one layer for the tokens seen so far: the first `length` positions of the
    buffers `k` and `v`, (B, H_kv, size, head_dim), which are made when the first tokens come."""

    def __init__(self, size: int, length: int = 0) -> None:
        self.size = size
        self.length = length
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, (B, H_kv, T, head_dim) each; returns all keys, all values."""
        if self.k is None:
            shape = (*k.shape[:2], self.size, k.shape[3])
            self.k = k.new_empty(shape)
            self.v = v.new_empty(shape)
        start = self.length
        self.length += k.shape[2]
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        if start == 0:  # the new tokens are all that there are
            return k, v
        return self.k[:, :, : self.length], self.v[:, :, : self.length]


def attention_kernels(device: torch.device) -> AbstractContextManager:
    """Context for the attention of growing sequences. cuDNN, torch's choice on an H100, builds a
    plan for each new length, so for each token: Flash or the memory-efficient kernel are used
    instead."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


@torch.no_grad()
def generate(
    model: GPT, idx: Tensor, max_new_tokens: int, stop: int | None = None, **draw_options: Any
) -> Tensor:
    """Continue each row of idx, (B, T) token ids with T ≥ 1; returns (B, T + new), new ≤
    max_new_tokens.

    stop          a token id: a row that has produced it repeats it; generation ends when all rows
                  have produced it
    draw_options  keyword arguments of `sample_token`

    A sequence that outgrows block_size continues from its last block_size/2 tokens. In training
    mode dropout is on: call `model.eval()` first. ValueError if logits are not finite.
    """
    limit = model.config.block_size
    size = min(limit, idx.shape[1] + max_new_tokens)
    done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    cached = limit  # tokens in the cache; a full one is made anew, so the prompt makes the first
    with attention_kernels(idx.device):
        for _ in range(max_new_tokens):
            if cached == limit:
                tokens = idx
                if idx.shape[1] > limit:
                    tokens = idx[:, -max(1, limit // 2) :]
                cache = [KVCache(size) for _ in model.blocks]
                cached = 0
            logits = model(tokens, cache=cache)[0][:, -1]
            if not (logits.amax(-1) < math.inf).all():  # also for NaN
                raise ValueError(
                    "the model's logits are not finite (float16 overflows, or weights are not "
                    "finite): use --dtype=float32, another checkpoint"
                )
            cached += tokens.shape[1]
            tokens = sample_token(logits, **draw_options)
            if stop is not None:
                tokens = tokens.masked_fill(done[:, None], stop)
                done |= tokens[:, 0] == stop
            idx = torch.cat((idx, tokens), dim=1)
            if done.all():
                break
    return idx


def sample_token(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    unused: Tensor | None = None,
) -> Tensor:
    """Draw one token per row: logits (B, V) → ids (B, 1).

    temperature   divides the logits; 0 takes the most likely token
    top_k         sample among the k most likely tokens only
    top_p         sample among the fewest most likely tokens whose probabilities sum to at least
                  top_p
    generator     the torch.Generator to draw from; None = torch's global one
    unused        ids that are never drawn, from `find_unused`"""
    if unused is not None:
        logits = logits.index_fill(-1, unused, -math.inf)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(descending=True)
        # the tokens before an excluded one already have top_p
        excluded = ordered.cumsum(-1) - ordered >= top_p
        excluded[:, 0] = False  # the most likely token always stays
        ordered[excluded] = 0
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return torch.multinomial(probs, 1, generator=generator)


def find_unused(model: GPT, tokenizer: Tokenizer) -> Tensor | None:
    """The ids of the model's vocabulary that are no token of the tokenizer; None if there are none.

    A vocabulary made by others can be padded, and such ids have weights like any other."""
    unused = tokenizer.unused_ids(model.config.vocab_size)
    if not unused:
        return None
    return torch.tensor(unused, device=model.wte.weight.device)


def continue_text(
    model: GPT,
    tokenizer: Tokenizer,
    text: str,
    max_new_tokens: int,
    rows: int = 1,
    **options: Any,
) -> list[str]:
    """`rows` continuations of `text`, with the text in front; each ends at end of text.

    A text of no token begins a new document. `options`: keyword arguments of `generate`. ValueError
    if the tokenizer cannot encode the text."""
    prompt = []
    if text:
        prompt = [*tokenizer.start, *tokenizer.encode(text)]
    prompt = prompt or tokenizer.new_document()
    idx = torch.tensor([prompt] * rows, device=model.wte.weight.device)
    unused = find_unused(model, tokenizer)
    out = generate(model, idx, max_new_tokens, unused=unused, **options)
    texts = []
    for ids in out[:, len(prompt) :].tolist():
        if tokenizer.eot in ids:
            ids = ids[: ids.index(tokenizer.eot)]
        # decoded together with the prompt: some tokenizers drop the first space of a text
        prompt_text = tokenizer.decode(prompt)
        new_text = tokenizer.decode(prompt + ids)[len(prompt_text) :]
        texts.append(text + new_text)
    return texts


class Watcher:
    """Shows text that a model in training writes after the prompt `start`. ValueError if the
    dataset's tokenizer cannot encode it."""

    def __init__(self, model: GPT, meta: dict, start: str) -> None:
        self.model = model
        self.tokenizer = Tokenizer(meta)
        self.start = start
        try:
            if start:
                self.tokenizer.encode(start)
            else:
                self.tokenizer.new_document()
        except ValueError as e:
            raise ValueError(f"sample_start={start!r} begins no text: {e}") from None

    def __call__(self, env: Any) -> str:
        """Print the text by `env`, an Env, and return it. Its WATCHED new tokens are the most
        likely ones: no random number is drawn. All ranks of a sharded model must call it; no rank
        ends early, so that all make the same calls."""
        self.model.eval()
        try:
            # compiled code would be compiled again for each length
            with torch.compiler.set_stance("force_eager"):
                (text,) = continue_text(
                    self.model, self.tokenizer, self.start, WATCHED, temperature=0
                )
        except ValueError as e:  # logits that are not finite
            text = f"({e})"
        self.model.train()
        env.print(f"sample: {text!r}")
        return text
