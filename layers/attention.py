"""Attention: which keys a query sees, and the kernel that multiplies. Causal, with a cache, within
documents, or all.

Documents are given by `positions` (B, T), which restart at 0 where a document begins: token i of a
row belongs to the document that begins at i − positions[i], and sees the keys from there up to
itself.
"""

import torch
import torch.nn.functional as F

from layers.ops import upcast

BLOCK = 128  # queries, and keys, of one tile of FlexAttention


def visible_keys(places, positions, n_keys: int):
    """(B or 1, 1, T, n_keys) bool: the keys that each query sees, those of its document up to
    itself.

    places (T,): where the queries stand in the row, or in the cache. positions (B, T); None: one
    document."""
    keys = torch.arange(n_keys, device=places.device)
    mask = (keys <= places[:, None])[None]
    if positions is not None:
        mask = mask & (keys >= (places - positions)[..., None])
    return mask[:, None]


def additive(mask, dtype: torch.dtype):
    """A bool mask as numbers that are added to the logits: 0 where it is True, else −∞.

    SDPA would make them itself, but anew in each layer, and autograd would keep all of these
    copies."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def document_blocks(positions):
    """The same for whole rows, positions (B, T), as FlexAttention's BlockMask: it skips tiles that
    nothing sees."""
    from torch.nn.attention.flex_attention import BlockMask  # half a second to import

    T, device = positions.shape[1], positions.device
    # (B, T), where each token's document begins: never decreases
    begin = torch.arange(T, device=device) - positions
    first, last = begin[:, ::BLOCK], torch.cat((begin[:, BLOCK - 1 :: BLOCK], begin[:, -1:]), 1)
    query = torch.arange(first.shape[1], device=device)[:, None]
    key, first, last = query.T, first[..., None], last[:, : first.shape[1], None]
    # (B, tiles of queries, tiles of keys): some pair is visible
    some = (key <= query) & (key >= first // BLOCK)
    every = (key < query) & (key * BLOCK >= last)  # every pair is, so that its tile needs no mask

    def in_order(tiles):
        """Their number for each tile of queries, and their indices, which stand before those of the
        other tiles."""
        counts, indices = tiles.sum(-1), tiles.int().argsort(dim=-1, descending=True, stable=True)
        return counts[:, None].int(), indices[:, None].int()

    def sees(b, h, q, k):
        return (k <= q) & (k >= begin[b, q])

    return BlockMask.from_kv_blocks(
        *in_order(some & ~every),
        *in_order(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(T, T),
    )


def attend(q, k, v, mask=None, dropout: float = 0.0, causal: bool = True):
    """Softmax attention: q (B, H, T, head_dim), k and v (B, H_kv, S, head_dim) → (B, H, T,
    head_dim).

    mask   (B or 1, 1, T, S), as `visible_keys` or `additive` makes it; or a BlockMask, which needs a GPU, is fast only
           when compiled, and knows no dropout: ValueError; None: all keys, or for several queries
           those that `causal` leaves"""
    grouped = q.shape[1] != k.shape[1]
    if mask is not None and not torch.is_tensor(mask):
        from torch.nn.attention.flex_attention import flex_attention

        if dropout:
            raise ValueError(
                "FlexAttention has no dropout: set flex_attention = False on the model"
            )
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    # the CPU's half-precision attention is many times slower there
    if q.shape[2] < 512 and q.device.type == "cpu":
        q, k, v = upcast(q), upcast(k), upcast(v)
    # the kernels with a mask have no grouped heads there
    if grouped and mask is not None and q.device.type == "cuda":
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    causal = causal and mask is None and q.shape[2] > 1
    how = dict(attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, **how)
