"""The products of an FFN with the activation in their epilogue, for Hopper: the operators of layers/ffn.py.

TMA moves tiles by descriptors that the host makes. Rows of a matrix must take a multiple of 16 bytes; what lies beyond
its end is read as 0 and is not written."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS = 128, 256  # of a tile of the result
DEPTH = 64  # terms of its sums that one step adds
# Of GELU. In this file numbers stand behind tensors: Triton's interpreter does not take them in front.
SCALE = tl.constexpr((8 / math.pi) ** 0.5)
CUBE = tl.constexpr(0.044715)


@triton.jit
def gelu(h):
    """(GELU in its tanh form, h σ(2z); its derivative)."""
    square = h * h
    sigmoid = 1 / (1 + tl.exp(h * -SCALE * (square * CUBE + 1)))
    y = h * sigmoid
    return y, sigmoid + y * (1 - sigmoid) * (square * (3 * SCALE * CUBE) + SCALE)


@triton.jit
def relu2(h):
    """(relu(h)², its derivative)."""
    positive = tl.maximum(h, 0.0)
    return positive * positive, 2 * positive


ACTIVATIONS = {"gelu": gelu, "relu2": relu2}


@triton.jit
def product_kernel(x, w, y, slope, M, N, K, ACT: tl.constexpr, DEPTH: tl.constexpr):
    """With ACT: y, slope = ACT(x wᵀ), w (N, K). Else: y = (x w) ⊙ slope, w (K, N). x (M, K), y and slope (M, N)."""
    ROWS: tl.constexpr = y.block_shape[0]
    HALF: tl.constexpr = y.block_shape[1]  # a tile has too many numbers for the registers of the epilogue
    across = tl.cdiv(N, 2 * HALF)
    n_tiles = tl.cdiv(M, ROWS) * across
    for tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0), flatten=True):
        row = tile // across * ROWS
        column = tile % across * 2 * HALF
        total = tl.zeros((ROWS, 2 * HALF), tl.float32)
        for k in range(0, K, DEPTH):
            if ACT is None:
                factor = w.load([k, column])
            else:
                factor = w.load([column, k]).T
            total = tl.dot(x.load([row, k]), factor, total)
        halves = tl.split(total.reshape(ROWS, 2, HALF).permute(0, 2, 1))
        for i in tl.static_range(2):
            place = [row, column + i * HALF]
            if ACT is None:
                y.store(place, (halves[i] * slope.load(place)).to(y.dtype))
            else:
                value, derivative = ACT(halves[i])
                y.store(place, value.to(y.dtype))
                slope.store(place, derivative.to(slope.dtype))


def multiply_and_activate(x: Tensor, w: Tensor, act: str) -> tuple[Tensor, Tensor]:
    slope = x.new_empty(len(x), len(w))
    return multiply(x, w, slope, act), slope


def multiply_and_scale(x: Tensor, w: Tensor, slope: Tensor) -> Tensor:
    return multiply(x, w, slope, None)


def multiply(x: Tensor, w: Tensor, slope: Tensor, act: str | None) -> Tensor:
    """Returns y of `product_kernel`. `act`: one of ACTIVATIONS, which fills `slope`, or None."""
    y = torch.empty_like(slope)
    factor_tile = [COLUMNS, DEPTH] if act else [DEPTH, COLUMNS]
    half_tile = [ROWS, COLUMNS // 2]
    tiles = [ROWS, DEPTH], factor_tile, half_tile, half_tile
    matrices = map(TensorDescriptor.from_tensor, (x, w, y, slope), tiles)
    programs = 2  # of Triton's interpreter
    if x.is_cuda:
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    options = dict(ACT=ACTIVATIONS.get(act), DEPTH=DEPTH, num_warps=8, num_stages=3)
    product_kernel[(programs,)](*matrices, *y.shape, x.shape[1], **options)
    return y
