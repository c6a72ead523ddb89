"""Random numbers of initial weights. They depend on the seed and on the order of the weights alone.

Each matrix is cut, row by row, into blocks of BLOCK_SIZE entries. Its last block may be shorter.
Blocks are numbered through the network, and each has a generator of its own:

    first weight, a matrix                second weight, a stack of two matrices
    ┌─────────┬─────────┬─────┐           ┌─────────┬────┐ ┌─────────┬────┐
    │ block 0 │ block 1 │  2  │           │ block 3 │ 4  │ │ block 5 │ 6  │
    └─────────┴─────────┴─────┘           └─────────┴────┘ └─────────┴────┘

    seed of block i's generator = crc32(seed of the run) + i

So threads can draw the blocks in any order. They draw on the CPU, and whole weights: every device
and every sharding gets the same numbers.
"""

import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from layers.cores import own_cores
from layers.sharding import assign

BLOCK_SIZE = 2**18  # our choice; changing it changes the weights of every seed


class Draws:
    """Fills the weights of a network, one after the other, with random numbers."""

    def __init__(self, seed: int):
        self.next_seed = zlib.crc32(str(seed).encode())  # seed of the next block's generator

    @torch.no_grad()
    def fill(self, weight: Tensor, std: float, cut: float | None = None) -> None:
        """Draw `weight` (n_out, n_in), or a stack (n, n_out, n_in), from N(0, std²).

        With `cut` the distribution is truncated at ± cut · std. A weight on the meta device, or
        sharded, takes as many blocks as a whole one.
        """
        matrix_size = weight.shape[-2:].numel()
        n_matrices = weight.numel() // matrix_size
        first_seed = self.next_seed
        self.next_seed += n_matrices * -(-matrix_size // BLOCK_SIZE)
        if weight.is_meta:
            return
        drawn = torch.empty(weight.shape, device="cpu")
        blocks = []
        for matrix in drawn.view(n_matrices, matrix_size):
            blocks += matrix.split(BLOCK_SIZE)
        with ThreadPoolExecutor(own_cores()) as threads:
            results = threads.map(partial(draw, cut=cut), blocks, range(first_seed, self.next_seed))
            list(results)  # raises the error of a thread
        assign(weight, drawn.mul_(std))


def draw(block: Tensor, seed: int, cut: float | None) -> None:
    """Fill `block` from N(0, 1), truncated at ± `cut` if that is given."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    if cut is None:
        block.normal_(generator=generator)
    else:
        nn.init.trunc_normal_(block, 0, 1, -cut, cut, generator)
