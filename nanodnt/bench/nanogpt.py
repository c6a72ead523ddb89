"""nanoGPT's training step, for comparison: the computation of nanoGPT's commit 3adf61e, written
anew.

Two kinds: `nanogpt`, as published; `nanogpt-bf16`, with bf16 autocast on a CPU too, where the
published one is fp32. Only the initial weights are torch's: they do not change the time of a step.
The model takes n_layer, n_head, n_embd, block_size, dropout and bias from the config, and no other
flag.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW, Optimizer

from model import GPTConfig
from nanodnt.settings import TrainConfig

KINDS = ("nanogpt", "nanogpt-bf16")


class Block(nn.Module):
    """Pre-LN: attention, then the FFN. x is (B, T, d)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.n_embd
        bias = config.bias
        self.n_head = config.n_head
        self.p = config.dropout
        self.ln_1 = nn.LayerNorm(d, bias=bias)
        self.ln_2 = nn.LayerNorm(d, bias=bias)
        self.dropout = nn.Dropout(config.dropout)
        self.c_attn = nn.Linear(d, 3 * d, bias)  # q, k and v in one matrix
        self.attn_c_proj = nn.Linear(d, d, bias)
        self.c_fc = nn.Linear(d, 4 * d, bias)
        self.mlp_c_proj = nn.Linear(4 * d, d, bias)

    def attention(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        # (B, n_head, T, head_dim) each
        q, k, v = (
            part.view(B, T, self.n_head, -1).transpose(1, 2)
            for part in self.c_attn(x).split(d, dim=2)
        )
        dropout = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.attn_c_proj(y.transpose(1, 2).contiguous().view(B, T, d))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.ln_1(x)))
        hidden = F.gelu(self.c_fc(self.ln_2(x)))  # the GELU with erf
        return x + self.dropout(self.mlp_c_proj(hidden))


class NanoGPT(nn.Module):
    """idx, targets (B, T) → logits, and the mean cross-entropy over the targets that are not -1."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.n_embd
        vocab = 50304 if config.vocab_size == 50257 else config.vocab_size
        self.wte = nn.Embedding(vocab, d)
        self.wpe = nn.Embedding(config.block_size, d)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(d, bias=config.bias)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def flops_per_token(self) -> int:
        """Training FLOPs per token, counted as in `GPT.flops_per_token`."""
        context, d = self.wpe.weight.shape
        n = self.wte.weight.numel()
        n += sum(p.numel() for p in self.blocks.parameters() if p.ndim > 1)
        return 6 * n + 12 * len(self.blocks) * d * context

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.dropout(self.wte(idx) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        rows = logits.view(-1, logits.shape[-1])
        return logits, F.cross_entropy(rows, targets.view(-1), ignore_index=-1)


def make_optimizer(model: NanoGPT, config: TrainConfig) -> AdamW:
    """AdamW with two groups: tensors of two or more dimensions decay by 0.1, the others do not
    decay."""
    params = list(model.parameters())
    groups = [
        dict(params=[p for p in params if p.ndim >= 2], weight_decay=0.1),
        dict(params=[p for p in params if p.ndim < 2], weight_decay=0.0),
    ]
    fused = True if params[0].is_cuda else None
    return AdamW(groups, betas=(config.beta1, config.beta2), fused=fused)


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Allow algorithms that are not deterministic, as nanoGPT does, while one of its steps runs."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warn_only)


GetBatch = Callable[[], tuple[Tensor, Tensor]]


def make_get_batch(tokens: np.ndarray, rows: int, T: int, device: torch.device) -> GetBatch:
    """get_batch() → inputs and targets (rows, T) on the device, windows drawn at random from
    `tokens`."""

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - T, (rows,)).tolist()
        windows = [tokens[i : i + T + 1].astype(np.int64) for i in starts]
        windows = torch.from_numpy(np.stack(windows))  # (rows, T + 1)
        x = windows[:, :-1].contiguous()
        y = windows[:, 1:].contiguous()
        if device.type == "cuda":
            x = x.pin_memory().to(device, non_blocking=True)
            y = y.pin_memory().to(device, non_blocking=True)
        return x, y

    return get_batch


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    get_batch: GetBatch,
    accumulation: int,
    bf16: bool,
    get_lr: Callable[[int], float],
    device: torch.device,
) -> Callable[..., None]:
    """step(i, on_phase_end): optimizer step i with learning rate get_lr(i).

    `get_batch()` returns x, y on the device; it is called while the GPU still computes. Phases:
    forward, data, backward, clip, optimizer."""
    autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
    batch = get_batch()
    logits = None  # the step holds them until the next forward, as nanoGPT's loop does

    def step(i: int, on_phase_end: Callable[[str], None] = lambda phase: None) -> None:
        nonlocal batch, logits
        with any_algorithm():
            for group in optimizer.param_groups:
                group["lr"] = get_lr(i)
            for _ in range(accumulation):
                with autocast:
                    logits, loss = model(*batch)
                    loss = loss / accumulation
                on_phase_end("forward")
                batch = get_batch()
                on_phase_end("data")
                loss.backward()
                on_phase_end("backward")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            on_phase_end("clip")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            on_phase_end("optimizer")

    return step
