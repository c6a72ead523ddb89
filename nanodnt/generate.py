"""Sampling tokens from a model: `generate` with a cache of keys and values, `sample_token` for one draw."""

import math

import torch

from model import GPT


class KVCache:
    """Keys and values of one layer for the tokens seen so far, each (B, H_kv, T, head_dim)."""

    def __init__(self):
        self.k = self.v = None

    def __len__(self):
        return 0 if self.k is None else self.k.shape[2]

    def extend(self, k, v):
        """Append k and v, each (B, H_kv, T_new, head_dim); returns all keys and all values."""
        self.k, self.v = (k, v) if self.k is None else (torch.cat((self.k, k), 2), torch.cat((self.v, v), 2))
        return self.k, self.v


@torch.no_grad()
def generate(model: GPT, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=None, generator=None):
    """Continue each row of idx, (B, T) token ids with T ≥ 1; returns (B, T + new), new ≤ max_new_tokens.

    temperature   0 takes the most likely token
    top_k         sample among the k most likely tokens only
    top_p         sample among the fewest most likely tokens whose probabilities sum to at least top_p
    stop          a token id: a row that has produced it repeats it, and generation ends when all rows have
    generator     the torch.Generator to draw from; None = torch's global one

    A sequence that outgrows block_size continues from its last block_size/2 tokens. In training mode dropout is on:
    call `model.eval()` first.
    """
    limit, cache, new = model.config.block_size, None, idx
    done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    for _ in range(max_new_tokens):
        if cache is None or len(cache[0]) + new.shape[1] > limit:
            cache = [KVCache() for _ in model.blocks]
            new = idx if idx.shape[1] <= limit else idx[:, -max(1, limit // 2) :]
        logits = model(new, cache=cache)[0][:, -1]  # (B, V)
        new = sample_token(logits, temperature, top_k, top_p, generator)
        if stop is not None:
            new = new.masked_fill(done[:, None], stop)
            done |= new[:, 0] == stop
        idx = torch.cat((idx, new), dim=1)
        if stop is not None and done.all():
            break
    return idx


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one token per row: logits (B, V) → ids (B, 1). The options are those of `generate`."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(descending=True)
        excluded = ordered.cumsum(-1) - ordered >= top_p  # the tokens before them already have top_p
        excluded[:, 0] = False  # the most likely token always stays
        ordered[excluded] = 0
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return torch.multinomial(probs, 1, generator=generator)
