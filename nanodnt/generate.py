"""Sampling tokens from a model: `generate` with a cache of keys and values, `sample_token` for one
draw."""

import math
from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT

WATCHED = 64  # tokens that a run shows at each sample_interval: our choice


class KVCache:
    """Keys and values of one layer for the tokens seen so far: the first `length` positions of the
    buffers `k` and `v`, (B, H_kv, size, head_dim), which are made when the first tokens come."""

    def __init__(self, size: int, length=0):
        self.size, self.length, self.k, self.v = size, length, None, None

    def extend(self, k, v):
        """Append k and v, (B, H_kv, T, head_dim) each; returns all keys, all values."""
        if self.k is None:
            shape = (*k.shape[:2], self.size, k.shape[3])
            self.k, self.v = k.new_empty(shape), v.new_empty(shape)
        start, self.length = self.length, self.length + k.shape[2]
        self.k[:, :, start : self.length], self.v[:, :, start : self.length] = k, v
        return (self.k[:, :, : self.length], self.v[:, :, : self.length]) if start else (k, v)


def attention_kernels(device: torch.device):
    """Context for the attention of growing sequences. cuDNN, torch's choice on an H100, builds a
    plan for each new length, so for each token: Flash or the memory-efficient kernel are used
    instead."""
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels) if device.type == "cuda" else nullcontext()


@torch.no_grad()
def generate(model: GPT, idx, max_new_tokens, stop=None, **how):
    """Continue each row of idx, (B, T) token ids with T ≥ 1; returns (B, T + new), new ≤
    max_new_tokens.

    stop          a token id: a row that has produced it repeats it; generation ends when all rows are done
    how           to draw a token: options of `sample_token`

    A sequence that outgrows block_size continues from its last block_size/2 tokens. In training
    mode dropout is on: call `model.eval()` first.
    """
    limit = model.config.block_size
    size = min(limit, idx.shape[1] + max_new_tokens)
    done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    cached = limit  # as if a cache were full: start with the prompt
    with attention_kernels(idx.device):
        for _ in range(max_new_tokens):
            if cached == limit:
                tokens = idx if idx.shape[1] <= limit else idx[:, -max(1, limit // 2) :]
                cache, cached = [KVCache(size) for _ in model.blocks], 0
            logits = model(tokens, cache=cache)[0][:, -1]
            if not (logits.amax(-1) < math.inf).all():  # so it is for NaN
                why = "float16 overflows, or weights are not finite"
                raise ValueError(
                    f"the model's logits are not finite ({why}): use --dtype=float32, another checkpoint"
                )
            cached += tokens.shape[1]
            tokens = sample_token(logits, **how)
            if stop is not None:
                tokens = tokens.masked_fill(done[:, None], stop)
                done |= tokens[:, 0] == stop
            idx = torch.cat((idx, tokens), dim=1)
            if done.all():
                break
    return idx


def find_unused(model: GPT, tokenizer) -> torch.Tensor | None:
    """The ids of the model's vocabulary that are no token of `tokenizer`, a Tokenizer, or None
    where all are.

    A vocabulary made by others can be padded, and such ids have weights like any other."""
    found = tokenizer.unused_ids(model.config.vocab_size)
    return torch.tensor(found, device=model.wte.weight.device) if found else None


def continue_text(model: GPT, tokenizer, text: str, n: int, rows: int = 1, **how) -> list:
    """`text`, or if that has no token a new document, continued by n tokens or to end of text: so
    many texts of `generate`, which draws as `how` says. `tokenizer`: a Tokenizer. ValueError where
    it cannot encode the text."""
    prompt = (text and [*tokenizer.start, *tokenizer.encode(text)]) or tokenizer.new_document()
    idx = torch.tensor([prompt] * rows, device=model.wte.weight.device)
    how["unused"] = find_unused(model, tokenizer)
    texts = []
    for row in generate(model, idx, n, **how)[:, len(prompt) :].tolist():
        if tokenizer.eot in row:
            row = row[: row.index(tokenizer.eot)]
        # the new tokens' text is read after the prompt's: some tokenizers drop a text's first space
        texts.append(text + tokenizer.decode(prompt + row)[len(tokenizer.decode(prompt)) :])
    return texts


class Watcher:
    """What a model in training writes after `start`. ValueError where the dataset's tokenizer
    cannot encode that."""

    def __init__(self, model: GPT, meta: dict, start: str):
        from nanodnt.data.tokenizer import Tokenizer

        self.model, self.tokenizer, self.start = model, Tokenizer(meta), start
        try:
            self.tokenizer.encode(start) if start else self.tokenizer.new_document()
        except ValueError as e:
            raise ValueError(f"sample_start={start!r} begins no text: {e}") from None

    def __call__(self, env) -> str:
        """The text, of WATCHED new tokens, which is printed too. They are the most likely ones: no
        random number is drawn. All ranks of a sharded model must call it; none ends early, so that
        each makes the same calls."""
        self.model.eval()
        try:
            # compiled code would be compiled for each length
            with torch.compiler.set_stance("force_eager"):
                (text,) = continue_text(
                    self.model, self.tokenizer, self.start, WATCHED, temperature=0
                )
        except ValueError as e:  # logits that are not finite
            text = f"({e})"
        self.model.train()
        env.print(f"it writes: {text!r}")
        return text


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None, unused=None):
    """Draw one token per row: logits (B, V) → ids (B, 1).

    unused        ids that are never drawn, of `find_unused`
    temperature   0 takes the most likely token
    top_k         sample among the k most likely tokens only
    top_p         sample among the fewest most likely tokens whose probabilities sum to at least top_p
    generator     the torch.Generator to draw from; None = torch's global one"""
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
        # the tokens before them already have top_p
        excluded = ordered.cumsum(-1) - ordered >= top_p
        excluded[:, 0] = False  # the most likely token always stays
        ordered[excluded] = 0
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return torch.multinomial(probs, 1, generator=generator)
