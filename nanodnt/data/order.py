"""The order of an epoch: a pseudorandom permutation that is a function of a key and is never stored."""

import numpy as np


def permutation(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Where a pseudorandom permutation of range(n) maps `index`; the permutation itself is never stored.

    A Feistel network permutes range(4ᵏ), the next power of four from n on. It is applied until the value is below n:
    that restricts it to a permutation of range(n).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [np.uint64(mix(key + r)) for r in range(1, 9)]

    def encrypt(v):
        left, right = v >> np.uint64(half), v & mask
        for k in keys:
            left, right = right, left ^ (_mix_array(right + k) & mask)
        return left << np.uint64(half) | right

    out = encrypt(np.asarray(index).astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = encrypt(out[outside])
    return out.astype(np.int64)


def _mix_array(x):  # splitmix64's finaliser: every input bit reaches every output bit
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def mix(x: int) -> int:
    return int(_mix_array(np.array([x + 0x9E3779B97F4A7C15 & (1 << 64) - 1], np.uint64))[0])
