"""A GPT whose block layout (norm placement, DyT, LayerNorm Scaling, scale vectors, …) comes from
flags.

Every residual sub-layer, attention or FFN, of every scheme is one equation,

    x ← post( skip(x) + mid( f( pre(x) ) ) )

where f is a branch: "attn", the attention, or "mlp", the FFN. The four slots are `Slot`s, y = const
· (gain · normalise(x) + bias), each part optional. `layout` reads the flags and returns the slots.
`Residual` is the only code in a block that changes the residual stream. A new scheme is a change in
`layout`.

To save a pass over the activations, a pre norm (fold=True) returns normalise(x) WITHOUT its gain.
const · gain goes, as the argument `in_gain`, with the next matrices: W (gain · x) = (W diag gain)
x.

Inside f every matrix is again y = out( W pre(x) ) with two slots: `matrix_slots`. docs/layouts.md
has the schemes one by one; `python model.py CONFIG` prints what a configuration comes to.

Papers cited: DNT (arXiv 2507.17501), scale vectors (2605.26895), DyT (2503.10622), LNS
(2502.05795).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from layers.attention import additive, attend, document_blocks, visible_keys
from layers.linear import Embedding, Linear, Lookup, SigmaReparam, fused_linear, has_one_row, linear
from layers.loss import linear_cross_entropy
from layers.network import Network
from layers.ops import ACTIVATIONS, add, rotary, rotate, stored, upcast
from layers.rules import check_config, kind_of
from layers.runtime import Runtime
from layers.scaling import base, base_layer, multiplier
from layers.slot import Slot

VOCAB_MULTIPLE = 64  # the vocabulary is padded to this multiple: 50257 → 50304, faster matmuls

# DyT α₀ of language models by width (Tables 11 and 12): before attention; before the FFN and the
# head. Other slots take the second value, and other widths those of the nearest in the tables: our
# choices.
DYT_ALPHA = {
    1024: (1.0, 1.0),
    2048: (1.0, 0.5),
    4096: (0.8, 0.2),
    5120: (0.6, 0.15),
    8192: (0.2, 0.05),
}
DYT_ALPHA_IMAGES = 0.5  # of all that is no language model (secs. 4 and 7.1)


@dataclass
class GPTConfig:
    # --- size ---
    n_layer: int = 12  # blocks (one block = attention + FFN)
    n_head: int = 12  # attention heads
    n_embd: int = 768  # model width d, the size of the residual stream
    block_size: int = 1024  # context length in tokens; of images it follows from their patches
    vocab_size: int = 0  # entries of the tokenizer, before padding; 0 = the dataset's
    # --- parts ---
    pos: Literal["learned", "rope"] = "learned"  # positions: a learned table on the embedding, or
    #   rotary on q and k
    rope_theta: float = 10000.0  # base of the rotary frequencies
    n_kv_head: int = 0  # heads of k and v (grouped-query attention); 0 = n_head
    head_size: int = 0  # channels of a head; 0 = n_embd/n_head
    mlp: Literal["gelu", "gelu_erf", "relu", "relu2", "swiglu"] = "gelu"  # gelu is GPT-2's tanh
    #   form, gelu_erf exact
    n_ff: int = 0  # hidden width of the FFN, or of one expert; 0 = 4·n_embd
    tie_weights: bool = True  # the output head is the token embedding
    bias: bool = False  # biases in linear layers, and in LayerNorm
    dropout: float = 0.0  # on the embedding, the attention weights and the branch outputs
    drop_path: float = 0.0  # stochastic depth: probability that a sequence, or image, skips a
    #   branch of the last block; 0 in the first block, linear between
    # --- mixture of experts ---
    n_expert: int = 0  # experts of each block, FFNs of width n_ff, beside a router; 0 = one dense
    #   FFN
    n_expert_active: int = 2  # experts that each token goes to
    n_expert_shared: int = 0  # further experts that every token goes to, as one FFN of
    #   n_expert_shared · n_ff
    router: Literal["softmax", "sigmoid"] = "softmax"  # scores of the experts
    router_norm: bool = True  # the scores of the experts that a token goes to are divided by their
    #   sum
    router_scale: float = 1.0  # factor on these weights
    balance: Literal["loss", "bias", "none"] = "loss"  # even load: by a loss of its own, or by
    #   biases on the choice, raised for experts with little load; none: not at all
    # --- images (vision.py): a ViT, whose patches take the place of tokens, without the causal mask ---
    patch_size: int = 0  # pixels of a patch's side; 0 = text, a GPT
    image_size: int = 0  # pixels of an image's side; 0 = the dataset's
    channels: int = 0  # of a pixel; 0 = the dataset's
    n_class: int = 0  # classes; 0 = the dataset's
    pool: Literal["cls", "mean"] = "cls"  # what the head reads: a class token, or the mean over
    #   patches
    # --- norms: x ← post( skip(x) + mid( f( pre(x) ) ) ) ---
    norm: Literal["rmsnorm", "layernorm", "dyt", "none"] = "rmsnorm"  # function in every norm slot
    #   and the final norm
    norm_eps: float = 1e-6  # inside the root of RMSNorm and LayerNorm
    norm_groups: int = 1  # statistics over n_embd/norm_groups channels at a time (Group-LN; our
    #   definition)
    pre_norm: Literal["both", "attn", "mlp", "none"] = "both"  # branches with a norm on their input
    mid_norm: Literal["none", "both", "attn", "mlp"] = "none"  # branches with a norm on their
    #   output, before the sum
    post_norm: Literal["none", "both", "attn", "mlp"] = "none"  # branches with a norm on the
    #   residual sum (Post-LN)
    post_norm_blocks: int = 0  # Mix-LN: the first n blocks are Post-LN, with post norms instead of
    #   pre and mid
    input_norm: bool = False  # norm on the embedding (DNT eq. 2); with learned positions, on the
    #   sum (our choice)
    qk_norm: bool = False  # RMSNorm on each head of q and k, gains of size head_dim (DNT eq. 10);
    #   before RoPE: ours
    # --- DyT in place of a norm ---
    dyt_alpha_attn: float | None = None  # DyT α₀ before attention; None: 0.5 on images, else the
    #   paper's by width
    dyt_alpha_other: float | None = None  # DyT α₀ everywhere else; None = the same
    dyt_learn_alpha: bool = True  # False: α stays α₀
    dyt_squash: Literal["tanh", "hardtanh", "sigmoid", "identity"] = "tanh"  # DyT's function of αx
    dyt_bias: bool | None = None  # DyT's β (eq. 2); None = on images, but not on text, as in its
    #   authors' code
    embed_scale: bool | None = False  # learned scalar on the embedding sum, √n_embd at first; None
    #   = DyT's (App. A): with norm=dyt, but not on images
    # --- constants and learned scales on branch and stream ---
    lns: Literal["off", "norm", "branch", "residual", "input"] = "off"  # LNS: 1/ℓ^lns_power
    #   multiplies the pre norm's output (norm, the paper's) or input (input), the branch output
    #   (branch), or the residual sum (residual)
    lns_power: float = 0.5  # of the block number ℓ, from 1
    lns_branches: Literal["both", "attn", "mlp"] = "both"  # branches that have the factor
    lns_learn: bool = False  # with lns=norm: the factor is where the pre norm's gains start, no
    #   constant (ours)
    deepnorm: bool = False  # stream × (2L)^¼ before each post norm, and DeepNorm's initialisation
    admin: bool = False  # stream × a learned vector before each post norm, set by a profiling
    #   forward at the start
    branch_scale: Literal["none", "layerscale", "skipinit"] = "none"  # learned vector, or scalar,
    #   on the branch output
    branch_scale_init: float | None = None  # initial value; None = LayerScale's by depth,
    #   SkipInit's 1/√L (LNS sec. 6)
    fixup: bool = False  # Fixup, with norm=none: scalar biases and multipliers; the last matrix of
    #   a branch starts at 0
    sigma_reparam: bool = False  # σReparam: matrices of the blocks (our choice: no others) are γ
    #   W/σ(W), γ learned
    # --- scale vectors (HG, DP, DNP, OR and ER are from notes by others: we have the paper's text in part) ---
    gain: Literal["shared", "none", "branch"] = "shared"  # gains: one a norm, none, or for each of
    #   q k v gate up (HG)
    gain_out: Literal["none", "scale", "norm"] = "none"  # after q, k, v, gate, up: a scale vector
    #   (DP), or an RMSNorm with one (DNP), over each head of q and k, over all of v, gate, up: our
    #   choice, not published
    gain_param: Literal["direct", "magdir", "expmagdir"] = "direct"  # γ, β·α/rms(α) (OR), or
    #   exp(b)·α/rms(α) (ER), both formulas ours; whether ER exponentiates the direction too is not
    #   published
    # --- initialisation ---
    init: Literal["normal", "xavier", "xavier_cut"] = "normal"  # matrices: N(0, init_std), Xavier
    #   normal, or the same cut off at 2σ; embeddings and head: normal. DNT says "Xavier": the
    #   normal form, q, k and v apart, is ours
    init_std: float = 0.02  # standard deviation of init=normal, and of the embeddings
    residual_init: Literal["gpt2", "plain", "depth"] = "gpt2"  # factor on the std of a branch's
    #   last matrix (o, down): 1/√(2L), 1, or 1/√(2ℓ). LNS: 1/√(2L) on W0 and W2 of the FFN, 1/√(2ℓ)
    #   on "weight matrices"; o and down: ours
    # --- a model larger than the tuned one (layers/scaling.py) ---
    parametrization: Literal["standard", "mup", "depth_mup", "completep"] = (
        "standard"  # how initial
    )
    #   weights, LRs and multipliers follow the size: mup (μP) the width, depth_mup and completep
    #   (α = ½, 1) the depth too
    base_n_embd: int = 0  # width of the tuned model; 0 = the same as here
    base_n_layer: int = 0  # its blocks, for depth_mup and completep; 0 = the same
    base_head_size: int = 0  # its channels of a head; 0 = the same

    @property
    def head_dim(self) -> int:
        return self.head_size or self.n_embd // self.n_head

    @property
    def ffn_width(self) -> int:
        return self.n_ff or 4 * self.n_embd

    @property
    def scales_embedding(self) -> bool:
        """Whether there is a learned scalar on the embedding sum."""
        return self.norm == "dyt" and self.causal if self.embed_scale is None else self.embed_scale

    @property
    def causal(self) -> bool:
        """Whether this is a language model, whose tokens see only what stands before them; patches
        see each other."""
        return kind_of(self) == "text"

    @property
    def image_tokens(self) -> int:
        """Tokens of an image: its patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "cls")

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def check(self) -> None:
        """ValueError for what layers/rules.py refuses."""
        check_config(self)

    def slots_with_norm(self, layer: int, branch: str) -> set:
        """Which of "pre", "mid", "post" carry a norm in `branch` ("attn" or "mlp") of layer ℓ =
        `layer`, from 1."""
        if self.norm == "none":
            return set()
        if layer <= self.post_norm_blocks:  # Mix-LN
            return {"post"}
        flags = dict(pre=self.pre_norm, mid=self.mid_norm, post=self.post_norm)
        return {slot for slot, branches in flags.items() if branches in ("both", branch)}


def layout(config: GPTConfig, layer: int, branch: str) -> dict:
    """The four slots of `branch` ("attn" or "mlp") in layer ℓ = `layer`, counted from 1: the whole
    block layout."""
    c, d, norms = config, config.n_embd, config.slots_with_norm(layer, branch)

    lns, const_in = (lns_factor(c, layer, branch, where) for where in ("norm", "input"))
    # init: of the gain
    pre = dict(const_in=const_in) | (dict(init=lns or 1.0) if c.lns_learn else dict(const=lns))
    if c.gain == "branch":  # each of the next matrices has its own gain instead: see `own_gain`
        pre["n_gain"] = 0

    L = base(c).n_layer
    init = {"none": 1.0, "layerscale": layerscale_init(L), "skipinit": L**-0.5}[c.branch_scale]
    mid = dict(init=init if c.branch_scale_init is None else c.branch_scale_init)
    mid["const"] = multiplier(c, "branch", lns_factor(c, layer, branch, "branch"))
    mid["drop"] = c.drop_path * (layer - 1) / max(1, c.n_layer - 1) if c.drop_path else None
    if c.branch_scale == "layerscale":  # if there is a mid norm, LayerScale is its gain
        mid["n_gain"] = d
    # if there is a mid norm, this scalar replaces its gain (our choice)
    elif c.branch_scale == "skipinit" or c.fixup:
        mid |= dict(n_gain=1, role="scalar") | (dict(n_bias=1) if c.fixup else {})

    post = dict(const=lns_factor(c, layer, branch, "residual"))
    if layer == c.n_layer and branch == "mlp":
        # the last post norm is the final norm (our choice), and its gain has that role; no matrix
        # follows it
        post |= dict(role="final", fold=False)

    skip = dict(const=(2 * c.n_layer) ** 0.25 if c.deepnorm else None, n_gain=d if c.admin else 0)
    return dict(
        pre=norm_slot(c, "gain_in", branch, **pre) if "pre" in norms else Slot(n_bias=int(c.fixup)),
        mid=norm_slot(c, **mid) if "mid" in norms else Slot(param=c.gain_param, **mid),
        post=norm_slot(c, **post) if "post" in norms else Slot(const=post["const"]),
        skip=Slot(**skip),
    )


def norm_slot(config: GPTConfig, role: str = "gain_out", branch: str = "", **changes) -> Slot:
    """A slot of size n_embd with the configured norm; `branch="attn"` gives DyT its α₀ before
    attention."""
    c = config
    # nearest width: our choice
    listed = min(DYT_ALPHA, key=lambda d: abs(math.log(d / base(c).n_embd)))
    alpha = c.dyt_alpha_attn if branch == "attn" else c.dyt_alpha_other
    if alpha is None:
        alpha = DYT_ALPHA[listed][0 if branch == "attn" else 1] if c.causal else DYT_ALPHA_IMAGES
    bias = {"layernorm": c.bias, "dyt": not c.causal if c.dyt_bias is None else c.dyt_bias}.get(
        c.norm, False
    )
    n_gain = c.n_embd if c.norm != "none" and c.gain != "none" else 0
    parts = dict(
        n_gain=n_gain, role=role, param=c.gain_param, n_bias=c.n_embd * bias, fold=role == "gain_in"
    )
    parts |= dict(
        eps=c.norm_eps, groups=c.norm_groups, squash=c.dyt_squash, learn_alpha=c.dyt_learn_alpha
    )
    return Slot(c.norm, **parts | dict(alpha=alpha) | changes)


def lns_factor(config: GPTConfig, layer: int, branch: str, where: str) -> float | None:
    """1/ℓ^lns_power, ℓ = `layer`, if lns=`where` and this branch has the factor; else None."""
    applies = config.lns == where and config.lns_branches in ("both", branch)
    return base_layer(config, layer) ** -config.lns_power if applies else None


def layerscale_init(n_layer: int) -> float:
    """LayerScale's initial λ: published by its authors for 12 to 18, 24 and 36 layers; other
    depths: our choice."""
    return 0.1 if n_layer <= 18 else 1e-5 if n_layer <= 24 else 1e-6


def projection(
    config: GPTConfig, layer: int, part: str, experts: int = 0, shared: int = 1
) -> Linear:
    """Matrix `part` ("q", "k", "v", "o", "gate", "up" or "down") of layer ℓ = `layer`: its shape,
    role, slots, init. `experts`: a stack of so many; `shared`: an FFN so many times as wide."""
    c, d, hidden = config, config.n_embd, config.ffn_width * shared
    heads, kv = c.n_head * c.head_dim, (c.n_kv_head or c.n_head) * c.head_dim
    n_in, n_out, role = {
        "q": (d, heads, "qk"), "k": (d, kv, "qk"), "v": (d, kv, "vo"), "o": (heads, d, "vo"),
        "gate": (d, hidden, "ffn"), "up": (d, hidden, "ffn"), "down": (hidden, d, "ffn"),
    }[part]  # fmt: skip
    matrix = SigmaReparam if c.sigma_reparam else partial(Linear, stack=experts)
    return matrix(
        n_in, n_out, role, c.bias, init_scale(c, layer, part), *matrix_slots(c, layer, part, n_out)
    )


def matrix_slots(config: GPTConfig, layer: int, part: str, n_out: int) -> tuple:
    """The two slots of matrix `part`, before and after it."""
    c, out = config, {}
    if part in ("o", "down"):  # the last matrix of a branch
        return Slot(n_bias=int(c.fixup)), Slot()
    pre = own_gain(c, layer, "attn" if part in ("q", "k", "v") else "mlp")  # HG
    if c.gain_out != "none":  # DP
        role = part if part == "v" or (part == "up" and c.mlp == "swiglu") else "gain_out"
        out = dict(n_gain=n_out, param=c.gain_param, fold=c.gain_out == "scale", role=role)
    # DNP: over each head of q and k, a gain for each channel; over all of v, gate, up
    if c.gain_out == "norm":
        out |= dict(
            norm="rmsnorm", eps=c.norm_eps, groups=n_out // c.head_dim if part in ("q", "k") else 1
        )
    if c.fixup and part == ("gate" if c.mlp == "swiglu" else "up"):  # before the activation
        out["n_bias"] = 1
    return pre, Slot(**out)


def own_gain(config: GPTConfig, layer: int, branch: str) -> Slot:
    """HG: the slot of a matrix that has its own gain in place of the pre norm's; else empty."""
    c = config
    if c.gain != "branch" or "pre" not in c.slots_with_norm(layer, branch):
        return Slot()
    init = lns_factor(c, layer, branch, "norm") if c.lns_learn else None
    return Slot(n_gain=c.n_embd, role="gain_in", param=c.gain_param, fold=True, init=init or 1.0)


def init_scale(config: GPTConfig, layer: int, part: str) -> float:
    """Factor on the initial std of matrix `part` ("q" … "down") in layer ℓ = `layer`, from 1."""
    L, layer, ends_branch = base(config).n_layer, base_layer(config, layer), part in ("o", "down")
    if config.deepnorm:  # (8L)^-¼ on v, o and the FFN, our choice: SwiGLU's gate too
        return 1.0 if part in ("q", "k") else (8 * L) ** -0.25
    # std × M^(-1/(2m-2)) for M = 2L branches of m matrices, of which the last starts at 0.
    if config.fixup:
        # Attention counts as v and o, m = 2; q and k are not scaled; a product of two linear maps
        # counts as two
        m = 3 if part in ("gate", "up") and config.mlp in ("swiglu", "relu2") else 2
        return 0.0 if ends_branch else 1.0 if part in ("q", "k") else (2 * L) ** (-1 / (2 * m - 2))
    if not ends_branch:
        return 1.0
    return {"gpt2": (2 * L) ** -0.5, "plain": 1.0, "depth": (2 * layer) ** -0.5}[
        config.residual_init
    ]


class Attention(nn.Module):
    """Multi-head or grouped-query attention, causal for text: (B, T, C) → (B, T, C). `in_gain`: the
    pre slot's."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        c, self.head_dim, self.dropout, self.causal = (
            config,
            config.head_dim,
            config.dropout,
            config.causal,
        )
        self.q, self.k, self.v, self.o = (
            projection(c, layer, part) for part in ("q", "k", "v", "o")
        )
        # QK-norm: RMSNorm over the channels of a head (DNT eq. 10); our choice: one gain for all
        # heads
        norm = dict(
            norm="rmsnorm",
            n_gain=c.head_dim * (c.gain != "none"),
            param=c.gain_param,
            eps=c.norm_eps,
        )
        self.q_norm, self.k_norm = (
            Slot(**norm if c.qk_norm else {}, const=multiplier(c, which)) for which in "qk"
        )

    def project(self, u, in_gain, rope):
        """[q, k, v], each (B, T, its channels). With the kernel "qkv" compiled code has one
        product."""
        matrices = self.q, self.k, self.v
        # rotated without a norm, q and k are kept for the backward pass, and v's view would keep
        # all three once more
        keeps_more = rope is not None and self.q_norm.norm == "none"
        if "qkv" in self.q.runtime.kernels and torch.compiler.is_compiling() and not keeps_more:
            return fused_linear(matrices, u, in_gain, joins_gradients=False)
        return [m(u, in_gain) for m in matrices]

    def forward(self, u, in_gain=None, rope=None, cache=None, mask=None):
        B, T, _ = u.shape
        q, k, v = (y.view(B, T, -1, self.head_dim) for y in self.project(u, in_gain, rope))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        # (B, H, T, head_dim); norms and rotation: fp32
        q, k, v = (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))
        if cache is not None:
            k, v = cache.extend(k, v)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, self.causal)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """W2 act(W1 u), or with swiglu W2 (silu(Wg u) ⊙ W1 u): (…, C) → (…, C). `in_gain`: as for
    Attention. `size`: the `experts` or `shared` of `projection`; a stack of experts needs the
    `product` that sends each row to its own."""

    def __init__(self, config: GPTConfig, layer: int, **size):
        super().__init__()
        self.gate = projection(config, layer, "gate", **size) if config.mlp == "swiglu" else None
        self.up, self.down = (projection(config, layer, part, **size) for part in ("up", "down"))
        self.act = ACTIVATIONS.get(config.mlp)

    def fits_kernel(self, u, product) -> bool:
        """Whether layers/ffn.py computes this: in compiled code, GELU and nothing else between two
        matrices, many rows, and a dtype and sizes that its kernels take."""
        up, down = self.up, self.down
        if "ffn" not in up.runtime.kernels or not torch.compiler.is_compiling():
            return False
        from layers.ffn import ALIGNED, DTYPES  # not at the top: most runs do without

        is_known = self.act is ACTIVATIONS["gelu"] and product is F.linear
        nothing_else = up.bias is None and not [*up.out.parameters(), *down.pre.parameters()]
        many_rows = not has_one_row(u, up.weight)
        right_sizes = all(n % ALIGNED == 0 for n in up.weight.shape)
        return (
            is_known
            and nothing_else
            and many_rows
            and right_sizes
            and up.runtime.compute_dtype in DTYPES
        )

    def forward(self, u, in_gain=None, product=F.linear):
        if self.fits_kernel(u, product):
            from layers.ffn import ffn

            return ffn(self.up, self.down, u, in_gain)
        if self.gate is None:
            return self.down(self.act(self.up(u, in_gain, product)), product=product)
        gate, up = fused_linear((self.gate, self.up), u, in_gain, product)
        return self.down(F.silu(gate) * up, product=product)


def mixture(config: GPTConfig, layer: int) -> nn.Module:
    """The FFN of layer ℓ = `layer` with experts."""
    from layers.moe import MoE, Router  # not at the top: most networks have none

    c, pre = config, own_gain(config, layer, "mlp")
    how = c.router, c.router_norm, c.router_scale, c.balance
    router = Router(c.n_embd, c.n_expert, c.n_expert_active, *how, pre)
    shared = MLP(c, layer, shared=c.n_expert_shared) if c.n_expert_shared else None
    return MoE(router, MLP(c, layer, experts=c.n_expert), shared)


class Residual(nn.Module):
    """x ← post( skip(x) + mid( f( pre(x) ) ) ). The stream x (B, T, C) is summed in fp32 whatever f
    computes in."""

    runtime = Runtime()

    def __init__(self, f: nn.Module, dropout: float, pre: Slot, mid: Slot, post: Slot, skip: Slot):
        super().__init__()
        self.f, self.dropout = f, nn.Dropout(dropout)
        self.pre, self.mid, self.post, self.skip = pre, mid, post, skip

    def forward(self, x, *args):
        # which a folding slot leaves to the first matrices of f
        u, in_gain = self.pre(x), self.pre.factor_for_weight()
        x = add(
            self.skip(x),
            self.dropout(self.mid(self.f(u, in_gain, *args))),
            self.runtime.stream_dtype,
        )
        return stored(self.post(x), self.runtime.stream_dtype)


class Block(nn.Module):
    """One attention and one FFN sub-layer: (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = Residual(
            Attention(config, layer), config.dropout, **layout(config, layer, "attn")
        )
        ffn = mixture if config.n_expert else MLP
        self.mlp = Residual(ffn(config, layer), config.dropout, **layout(config, layer, "mlp"))

    def forward(self, x, rope=None, cache=None, mask=None):
        x = self.attn(x, rope, cache, mask)
        x = self.mlp(x)
        return x


class Transformer(Network):
    """What `GPT` below and `ViT` in vision.py share: from an embedding sum to the final norm.

    What another network needs: `wpe` and `head`, or None for them; an __init__(config, seed) that
    ends with `init_weights`; forward(inputs, targets=None, *rest) → (logits or None, loss), whose
    loss is self.loss(x, targets, …); stream(*inputs) → x (B, block_size, C); logits(x), of one
    token too; inputs(*batch), what `stream` takes of a batch; example(rows), two tensors;
    flops_per_token(); unless it is causal, `patch`, the matrix that reads the input, and `cls`, a
    class token or None. Analysis calls `stream` with the first input alone."""

    def __init__(self, config: GPTConfig):
        """ValueError for what layers/rules.py refuses."""
        super().__init__()
        config.check()
        self.config = config

    def add_blocks(self) -> None:
        """Make all that stands between embedding and head. Initial weights are drawn in the order
        of the modules."""
        c, L, const = self.config, self.config.n_layer, multiplier(self.config, "logits")
        self.embed_scale = (
            Slot(n_gain=1, role="scalar", init=base(c).n_embd ** 0.5)
            if c.scales_embedding
            else Slot()
        )
        self.input_norm = norm_slot(c) if c.input_norm else Slot()
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(1, L + 1))
        # Post-LN: then no other, our choice; LNS's code has one
        ends_in_norm = "post" in c.slots_with_norm(L, "mlp")
        self.final_norm = (
            Slot(const=const) if ends_in_norm else norm_slot(c, "final", fold=False, const=const)
        )

    def enter(self, x):
        """The residual stream before the first block; x (B, T, C): the embedding sum."""
        return stored(self.dropout(self.input_norm(self.embed_scale(x))), self.runtime.stream_dtype)

    def through_blocks(self, x, rope=None, cache=None, mask=None):
        """The residual stream after the last block, before the final norm; x (B, T, C): before the
        first."""
        for i, block in enumerate(self.blocks):
            if self.runtime.checkpointing and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, None, mask, use_reentrant=False)
            else:
                x = block(x, rope, cache[i] if cache else None, mask)
        return x


class GPT(Transformer):
    """The language model. `model(idx)` → (logits, None); `model(idx, targets)` → (None, loss)."""

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__(config)
        d, vocab = config.n_embd, config.padded_vocab_size
        self.wte = Embedding(vocab, d, "emb")
        self.wpe = Embedding(config.block_size, d, "pos") if config.pos == "learned" else None
        self.add_blocks()
        # Fixup starts the output head at zero; a tied head is the embedding and cannot
        self.head = (
            None
            if config.tie_weights
            else Linear(d, vocab, "head", init_scale=0.0 if config.fixup else 1.0)
        )
        self.init_weights(seed)

    def forward(self, idx, targets=None, positions=None, cache=None):
        """idx (B, T) token ids, T ≤ block_size → (logits (B, T, vocab_size), None).

        With targets (B, T), −1 = ignored → (None, loss): cross-entropy in nats, mean over the
        targets that count, 0 if none does. The logits end at vocab_size: padding entries cannot be
        sampled and take no part in the loss. `positions` (B, T): they restart at 0 where a document
        begins, and attention stays within the documents. None: each row is one document. `cache`, a
        list with one KVCache per block: idx continues the cached sequence.
        """
        if targets is None:
            return self.logits(self.stream(idx, positions, cache)), None
        x, table = self.stream_and_table(idx, positions, cache, gives_table=self.head is None)
        return None, self.loss(x, targets, table)

    def stream(self, idx, positions=None, cache=None):
        """The residual stream after the last block, before the final norm: idx (B, T) → (B, T,
        C)."""
        return self.stream_and_table(idx, positions, cache)[0]

    def stream_and_table(self, idx, positions=None, cache=None, gives_table=False):
        """(`stream`, the table that `embed` gives)."""
        T, start, c = idx.shape[1], cache[0].length if cache else 0, self.config
        if start + T > c.block_size:
            raise ValueError(
                f"a sequence of {start + T} tokens does not fit block_size={c.block_size}"
            )
        places = start + torch.arange(T, device=idx.device)
        mask, positions = (
            self.mask(places, positions, cache),
            places if positions is None else positions,
        )
        x, table = self.embed(idx, positions, gives_table)
        rope = rotary(positions, c.head_dim, c.rope_theta) if c.pos == "rope" else None
        return self.through_blocks(x, rope, cache, mask), table

    def embed(self, idx, positions, gives_table=False):
        """(the stream before the first block, the table of a `Lookup` for the head, or None): idx
        (B, T), positions (T,) or (B, T). Without a table hooks of `wte` are called."""
        x, table = Lookup.apply(self.wte.weight, idx) if gives_table else (self.wte(idx), None)
        return self.enter(x if self.wpe is None else x + self.wpe(positions)), table

    def mask(self, places, positions, cache):
        """The mask for `attend`, or None where it needs none: places (T,) in the row or cache,
        positions (B, T)."""
        if cache is None and positions is not None and self.runtime.flex_attention:
            return document_blocks(positions)
        T = len(places)
        n_keys = cache[0].length + T if cache else T
        if positions is None and (n_keys == T or T == 1):  # one new token sees all keys
            return None
        return additive(
            visible_keys(places, positions, n_keys),
            self.runtime.compute_dtype or self.wte.weight.dtype,
        )

    def logits(self, x):
        """x (B, T, C), the stream after the last block → (B, T, vocab_size), fp32."""
        logits = linear(
            self.final_norm(x), (self.head or self.wte).weight, dtype=self.runtime.compute_dtype
        )
        return upcast(logits[..., : self.config.vocab_size])

    def loss(self, x, targets, weight=None):
        """Mean cross-entropy in nats of targets (B, T), −1 = ignored, for `logits(x)`, which are
        never kept whole. `weight` (V, C): the head's, or the table of a `Lookup`."""
        weight = (self.head or self.wte).weight if weight is None else weight
        dtype, vocab_size = self.runtime.compute_dtype or weight.dtype, self.config.vocab_size
        chunks, kernels = self.runtime.loss_chunks, self.runtime.kernels
        return linear_cross_entropy(
            self.final_norm(x), weight, targets, dtype, vocab_size, chunks, kernels
        )

    @staticmethod
    def inputs(idx, targets, *positions) -> tuple:
        """What `stream` takes of a batch."""
        return idx, *positions

    def example(self, rows: int) -> tuple:
        """A batch of zeros on the model's device: token ids and targets (rows, T)."""
        idx = torch.zeros(
            rows, self.config.block_size, dtype=torch.long, device=self.wte.weight.device
        )
        return idx, idx

    def flops_per_token(self) -> int:
        """Training FLOPs per token: 6 per matrix parameter that it meets (head included, embedding
        look-up not), plus 12·L·T times the channels of all heads for attention (PaLM, app. B: no
        credit for causality)."""
        c = self.config
        return (
            6 * (self.active_matrices() + c.padded_vocab_size * c.n_embd) + self.attention_flops()
        )


# python model.py CONFIG describes the network; the code for that is in nanodnt/plan/
if __name__ == "__main__":
    import runpy

    runpy.run_module("nanodnt.plan", run_name="__main__")
