"""Functions of tensors without parameters: precision, activations, rotary positions."""

import math

import torch
import torch.nn.functional as F


def upcast(x: torch.Tensor) -> torch.Tensor:
    """fp32 for half-precision tensors; fp32 and fp64 stay as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def tanh(x):
    """tanh x. When compiled 2σ(2x) − 1, which differs by 2e-7 (absolute, x in fp32) and is far faster on a CPU."""
    return 2 * torch.sigmoid(2 * x) - 1 if torch.compiler.is_compiling() else torch.tanh(x)


def gelu(x):
    """GPT-2's GELU, ½x (1 + tanh z) with z = √(2/π) (x + 0.044715 x³). When compiled x σ(2z): the same function."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    y = upcast(x)
    return (y * torch.sigmoid((8 / math.pi) ** 0.5 * (y + 0.044715 * y**3))).to(x.dtype)


ACTIVATIONS = {
    "gelu": gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple:
    """cos and sin of the rotary angles, each (T, head_dim/2), fp32. Computed, not stored: no buffer can get lost."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = positions[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Rotate channel i against channel i + head_dim/2 (LLaMA's convention). x: (B, H, T, head_dim)."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
