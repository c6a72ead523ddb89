"""nanoGPT's training step, for comparison: the computation of nanoGPT's commit 3adf61e, written
anew.

Two kinds: `nanogpt`, as published; `nanogpt-bf16`, with bf16 autocast on a CPU too, where the
published one is fp32. Only the initial weights are torch's: they do not change the time of a step.
The model takes n_layer, n_head, n_embd, block_size, dropout and bias from the config, and no other
flag.
"""

from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

KINDS = ("nanogpt", "nanogpt-bf16")


class Block(nn.Module):
    """Pre-LN: attention, then the FFN. x is (B, T, d)."""

    def __init__(self, c):
        super().__init__()
        d, bias, self.n_head, self.p = c.n_embd, c.bias, c.n_head, c.dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(d, bias=bias), nn.LayerNorm(d, bias=bias)
        self.dropout = nn.Dropout(c.dropout)
        # q, k and v in one matrix
        self.c_attn, self.attn_c_proj = nn.Linear(d, 3 * d, bias), nn.Linear(d, d, bias)
        self.c_fc, self.mlp_c_proj = nn.Linear(d, 4 * d, bias), nn.Linear(4 * d, d, bias)

    def attention(self, x):
        B, T, d = x.shape
        heads = (
            w.view(B, T, self.n_head, -1).transpose(1, 2) for w in self.c_attn(x).split(d, dim=2)
        )
        y = F.scaled_dot_product_attention(
            *heads, dropout_p=self.p if self.training else 0.0, is_causal=True
        )
        return self.attn_c_proj(y.transpose(1, 2).contiguous().view(B, T, d))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.ln_1(x)))
        # the GELU with erf
        return x + self.dropout(self.mlp_c_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """idx, targets (B, T) → logits, and the mean cross-entropy over the targets that are not -1."""

    def __init__(self, c):
        super().__init__()
        d, layers, vocab = c.n_embd, c.n_layer, 50304 if c.vocab_size == 50257 else c.vocab_size
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(c.block_size, d)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c) for _ in range(layers))
        self.ln_f = nn.LayerNorm(d, bias=c.bias)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def flops_per_token(self):
        """As GPT's."""
        (context, d), matrices = (
            self.wpe.weight.shape,
            [p for p in self.blocks.parameters() if p.ndim > 1],
        )
        return (
            6 * sum(p.numel() for p in [*matrices, self.wte.weight])
            + 12 * len(self.blocks) * d * context
        )

    def forward(self, idx, targets):
        x = self.dropout(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1
        )


def make_optimizer(model, config):
    """AdamW with two groups: tensors of two or more dimensions decay by 0.1, the others do not
    decay."""
    params = list(model.parameters())
    groups = [
        dict(params=[p for p in params if (p.ndim >= 2) == (wd > 0)], weight_decay=wd)
        for wd in (0.1, 0.0)
    ]
    return torch.optim.AdamW(
        groups, betas=(config.beta1, config.beta2), fused=True if params[0].is_cuda else None
    )


@contextmanager
def any_algorithm():
    """Deterministic algorithms are not asked for, as in nanoGPT, while one of its steps runs."""
    ours = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(ours[0], warn_only=ours[1])


def make_get_batch(tokens, rows: int, T: int, device):
    """get_batch() → inputs and targets (rows, T) on the device, windows drawn at random from the
    array `tokens`."""

    def get_batch():
        windows = [
            tokens[i : i + T + 1].astype(np.int64)
            for i in torch.randint(len(tokens) - T, (rows,)).tolist()
        ]
        windows = torch.from_numpy(np.stack(windows))
        x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if device.type == "cuda":
            return tuple(t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        return x, y

    return get_batch


def make_step(model, optimizer, get_batch, accumulation: int, bf16: bool, get_lr, device):
    """step(i, on_phase_end): optimizer step i with learning rate get_lr(i).

    `get_batch()` returns x, y on the device; it is called while the GPU still computes. Phases:
    forward, data, backward, clip, optimizer."""
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    batch, kept = [get_batch()], [None]

    def step(i: int, on_phase_end=lambda phase: None) -> None:
        with any_algorithm():
            for group in optimizer.param_groups:
                group["lr"] = get_lr(i)
            for _ in range(accumulation):
                with autocast:
                    # nanoGPT's loop, too, holds the logits until the next forward
                    kept[0], loss = model(*batch[0])
                    loss = loss / accumulation
                on_phase_end("forward")
                batch[0] = get_batch()
                on_phase_end("data")
                loss.backward()
                on_phase_end("backward")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            on_phase_end("clip")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            on_phase_end("optimizer")

    return step
