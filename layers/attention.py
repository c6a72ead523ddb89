"""Attention: which keys a query sees, and the kernel that computes it. Causal, with a cache, within
documents, or over all keys.

Documents are given by `positions` (B, T), which restart at 0 where a document begins: token i of a
row belongs to the document that begins at i − positions[i], and sees the keys from there up to
itself.
"""

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from layers.ops import upcast

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # half a second to import


class Cache(Protocol):
    """Keys and values of one layer for the tokens seen so far, such as nanodnt.generate.KVCache."""

    length: int  # number of these tokens

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, (B, H_kv, T, head_dim) each; returns all keys, all values."""


TILE = 128  # queries, and keys, of one tile of FlexAttention


def visible_keys(places: Tensor, positions: Tensor | None, n_keys: int) -> Tensor:
    """(B or 1, 1, T, n_keys) bool: for each query, whether it sees a key. It sees the keys of its
    document up to itself.

    places     (T,): index of each query in the row, or in the cache
    positions  (B, T), position of each query in its document; None: each row is one document"""
    keys = torch.arange(n_keys, device=places.device)
    mask = (keys <= places[:, None])[None]  # (1, T, n_keys)
    if positions is not None:
        begin = places - positions  # (B, T)
        mask = mask & (keys >= begin[..., None])
    return mask[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as numbers that are added to the logits: 0 where it is True, else −∞.

    SDPA would make them itself, but anew in each layer, and autograd would keep all of these
    copies."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def document_blocks(positions: Tensor) -> "BlockMask":
    """`visible_keys` of whole rows, positions (B, T), as FlexAttention's BlockMask: it skips tiles
    of which no query sees a key."""
    from torch.nn.attention.flex_attention import BlockMask

    T = positions.shape[1]
    device = positions.device
    # (B, T): where each token's document begins; never decreases along a row
    begin = torch.arange(T, device=device) - positions
    # (B, tiles): the same for the first and the last query of each tile
    first = begin[:, ::TILE]
    last = torch.cat((begin[:, TILE - 1 :: TILE], begin[:, -1:]), 1)
    n_tiles = first.shape[1]
    first = first[..., None]
    last = last[:, :n_tiles, None]
    query = torch.arange(n_tiles, device=device)[:, None]
    key = query.T
    # (B, tiles of queries, tiles of keys)
    some_seen = (key <= query) & (key >= first // TILE)  # some query sees some key
    all_seen = (key < query) & (key * TILE >= last)  # every query sees every key: no mask needed
    partial_counts, partial_tiles = list_tiles(some_seen & ~all_seen)
    full_counts, full_tiles = list_tiles(all_seen)

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= begin[b, q])

    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_tiles,
        full_counts,
        full_tiles,
        BLOCK_SIZE=TILE,
        mask_mod=is_visible,
        seq_lengths=(T, T),
    )


def list_tiles(is_listed: Tensor) -> tuple[Tensor, Tensor]:
    """The form that BlockMask takes: is_listed (B, tiles of queries, tiles of keys) → for each tile
    of queries the number of listed tiles of keys (B, 1, tiles), and all indices of tiles of keys,
    the listed ones first (B, 1, tiles, tiles)."""
    counts = is_listed.sum(-1)
    indices = is_listed.int().argsort(dim=-1, descending=True, stable=True)
    return counts[:, None].int(), indices[:, None].int()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: "Tensor | BlockMask | None" = None,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """Softmax attention: q (B, H, T, head_dim), k and v (B, H_kv, S, head_dim) → (B, H, T,
    head_dim).

    mask     (B or 1, 1, T, S) from `visible_keys` or `additive`; or a BlockMask, which needs a GPU,
             is fast only when compiled, and allows no dropout: ValueError. None: no mask but
             `causal`
    causal   without a mask, several queries see the keys up to themselves; one query sees all"""
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and not torch.is_tensor(mask):
        return flex_attend(q, k, v, mask, dropout, grouped)
    # the CPU's half-precision attention is many times slower for short sequences
    if q.shape[2] < 512 and q.device.type == "cpu":
        q = upcast(q)
        k = upcast(k)
        v = upcast(v)
    # CUDA's kernels with a mask have no grouped heads
    if grouped and mask is not None and q.device.type == "cuda":
        heads_per_group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(heads_per_group, dim=1)
        v = v.repeat_interleave(heads_per_group, dim=1)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and q.shape[2] > 1,
        enable_gqa=grouped,
    )


def flex_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask", dropout: float, grouped: bool
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if dropout:
        raise ValueError("FlexAttention has no dropout: set flex_attention = False on the model")
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
