"""The products of an FFN with GELU in their epilogue, for Hopper: the operators of layers/ffn.py.

TMA moves tiles by descriptors that the host makes. Rows of a matrix must take a multiple of 16
bytes; entries beyond its end are read as 0 and are not written."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS = 128  # rows and columns of a tile of the result
COLUMNS = 256
DEPTH = 64  # terms of its sums that one step adds
# In this file numbers stand behind tensors: Triton's interpreter does not take them in front.
SCALE = tl.constexpr((8 / math.pi) ** 0.5)
CUBE = tl.constexpr(0.044715)


@triton.jit
def gelu(h: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """GELU in its tanh form, h σ(2z), and its derivative."""
    square = h * h
    sigmoid = 1 / (1 + tl.exp(h * -SCALE * (square * CUBE + 1)))
    y = h * sigmoid
    return y, sigmoid + y * (1 - sigmoid) * (square * (3 * SCALE * CUBE) + SCALE)


@triton.jit
def product_kernel(
    x: tl.tensor_descriptor,
    w: tl.tensor_descriptor,
    y: tl.tensor_descriptor,
    slope: tl.tensor_descriptor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    GELU: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """With GELU: y, slope = gelu(x wᵀ), w (N, K). Else: y = (x w) ⊙ slope, w (K, N). x (M, K), y
    and slope (M, N)."""
    ROWS: tl.constexpr = y.block_shape[0]
    # a tile has too many numbers for the registers of the epilogue
    HALF: tl.constexpr = y.block_shape[1]
    across = tl.cdiv(N, 2 * HALF)
    n_tiles = tl.cdiv(M, ROWS) * across
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
        row = tile // across * ROWS
        column = tile % across * 2 * HALF
        total = tl.zeros((ROWS, 2 * HALF), tl.float32)
        for k in range(0, K, DEPTH):
            if GELU:
                factor = w.load([column, k]).T
            else:
                factor = w.load([k, column])
            total = tl.dot(x.load([row, k]), factor, total)
        halves = tl.split(total.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        for i in tl.static_range(2):
            place = [row, column + i * HALF]
            if GELU:
                value, derivative = gelu(halves[i])
                y.store(place, value.to(y.dtype))
                slope.store(place, derivative.to(slope.dtype))
            else:
                y.store(place, (halves[i] * slope.load(place)).to(y.dtype))


def multiply_and_activate(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(x wᵀ) and gelu'(x wᵀ): x (M, K), w (N, K) → (M, N) each."""
    slope = x.new_empty(len(x), len(w))
    return multiply(x, w, slope, True), slope


def multiply_and_scale(x: Tensor, w: Tensor, slope: Tensor) -> Tensor:
    """(x w) ⊙ slope: x (M, K), w (K, N), slope (M, N) → (M, N)."""
    return multiply(x, w, slope, False)


def multiply(x: Tensor, w: Tensor, slope: Tensor, with_gelu: bool) -> Tensor:
    """Returns y of `product_kernel`. With GELU it fills `slope`."""
    y = torch.empty_like(slope)
    M, N = y.shape
    K = x.shape[1]
    factor_tile = [COLUMNS, DEPTH] if with_gelu else [DEPTH, COLUMNS]
    half_tile = [ROWS, COLUMNS // 2]
    programs = 2  # number of programs in Triton's interpreter
    if x.is_cuda:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    product_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(w, factor_tile),
        TensorDescriptor.from_tensor(y, half_tile),
        TensorDescriptor.from_tensor(slope, half_tile),
        M,
        N,
        K,
        GELU=with_gelu,
        DEPTH=DEPTH,
        num_warps=8,
        num_stages=3,
    )
    return y
