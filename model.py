"""A GPT whose block layout (norm placement, DyT, LayerNorm Scaling, scale vectors, …) is a set of
flags.

Every residual sub-layer, attention or FFN, of every layout is one equation,

    x ← post( skip(x) + mid( f( pre(x) ) ) )

where f is a branch: "attn", the attention, or "mlp", the FFN. The four slots are `Slot`s, y = const
· (gain · normalise(x) + bias), each part optional. `layout` reads the flags and returns the slots.
`Residual` is the only code in a block that changes the residual stream. A new layout is a change in
one of the functions that `layout` calls.

To save a pass over the activations, a pre norm (fold=True) returns normalise(x) WITHOUT its gain.
The first matrices of f get const · gain, as `in_scale`, and multiply it into their weight:
W (in_scale · x) = (W diag in_scale) x.

Inside f every matrix is again y = out( W pre(x) ), where pre and out are this matrix's own slots,
not the branch's: `matrix_slots`. docs/layouts.md lists the layouts; `python model.py CONFIG` prints
the equations and sizes of a configuration.

Papers cited in this file: DNT (arXiv 2507.17501), scale vectors (2605.26895), DyT (2503.10622),
Derf (2512.10938), LNS (2502.05795), GPAS (2506.22049), nGPT (2410.01131).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from layers.attention import Cache, additive, attend, document_blocks, visible_keys
from layers.linear import (
    Embedding,
    Linear,
    Lookup,
    ProductFunction,
    SigmaReparam,
    fused_linear,
    has_one_row,
    linear,
)
from layers.loss import linear_cross_entropy
from layers.network import Network
from layers.ops import ACTIVATIONS, GATES, add, rotary, rotate, stored, upcast
from layers.rules import check_config, kind_of
from layers.runtime import Runtime
from layers.scaling import base, base_layer, multiplier
from layers.slot import NO_NORM, Norm, PositiveSlot, RestSlot, Slot, make_slot

VOCAB_MULTIPLE = 64  # the vocabulary is padded to this multiple: 50257 → 50304, faster matmuls

# DyT's α₀ for language models by width (Tables 11 and 12): before attention; before the FFN and the
# head. Our choices: other slots take the second value, other widths the values of the nearest one.
DYT_ALPHA = {
    1024: (1.0, 1.0),
    2048: (1.0, 0.5),
    4096: (0.8, 0.2),
    5120: (0.6, 0.15),
    8192: (0.2, 0.05),
}
DYT_ALPHA_IMAGES = 0.5  # α₀ for anything but language models (secs. 4 and 7.1)

Rope = tuple[Tensor, Tensor]  # cosines and sines: see `rotary`


@dataclass
class GPTConfig:
    """The flags of a network. A comment stands beside its flag or, indented, below it; --help
    prints it."""

    # --- size ---
    n_layer: int = 12  # number of blocks (one block = attention + FFN)
    n_head: int = 12  # number of attention heads
    n_embd: int = 768  # model width d, the size of the residual stream
    block_size: int = 1024  # context length in tokens; for images it follows from their patches
    vocab_size: int = 0  # entries of the tokenizer, before padding; 0 = the dataset's
    # --- parts ---
    pos: Literal["learned", "rope"] = "learned"
    #   positions: a learned table added to the embedding, or rotary on q and k
    rope_theta: float = 10000.0  # base of the rotary frequencies
    n_kv_head: int = 0  # heads of k and v (grouped-query attention); 0 = n_head
    head_size: int = 0  # channels of a head; 0 = n_embd/n_head
    mlp: Literal["gelu", "gelu_erf", "relu", "relu2", "swiglu", "geglu"] = "gelu"
    #   activation of the FFN; gelu is GPT-2's tanh form, gelu_erf is exact; swiglu and geglu have a
    #   gate, through SiLU and through gelu
    n_ff: int = 0  # hidden width of the FFN, or of one expert; 0 = 4·n_embd
    tie_weights: bool = True  # use the token embedding as the output head
    bias: bool = False  # biases in linear layers, and in LayerNorm
    dropout: float = 0.0  # dropout on the embedding, attention weights and branch outputs
    drop_path: float = 0.0
    #   stochastic depth: probability that a sequence, or image, skips a branch of the last block; 0
    #   in the first block, linear between
    # --- mixture of experts ---
    n_expert: int = 0
    #   number of experts in each block, FFNs of width n_ff behind a router; 0 = one dense FFN
    n_expert_active: int = 2  # number of experts that each token goes to
    n_expert_shared: int = 0
    #   number of further experts that every token goes to: one FFN of width n_expert_shared · n_ff
    router: Literal["softmax", "sigmoid"] = "softmax"  # function that scores the experts
    router_norm: bool = True  # divide the scores of a token's experts by their sum
    router_scale: float = 1.0  # factor on the weights of a token's experts
    balance: Literal["loss", "bias", "none"] = "loss"
    #   balancing of the experts' load. loss: a loss on uneven load; bias: biases on the choice,
    #   which rise for experts with little load; none: no balancing
    # --- images (vision.py): a ViT, with patches in place of tokens, without the causal mask ---
    patch_size: int = 0  # side of a patch in pixels; 0 = text, a GPT
    image_size: int = 0  # side of an image in pixels; 0 = the dataset's
    channels: int = 0  # channels of a pixel; 0 = the dataset's
    n_class: int = 0  # number of classes; 0 = the dataset's
    pool: Literal["cls", "mean"] = "cls"  # input of the head: a class token, or the patches' mean
    # --- norms: x ← post( skip(x) + mid( f( pre(x) ) ) ) ---
    norm: Literal["rmsnorm", "layernorm", "dyt", "none"] = "rmsnorm"
    #   function in every norm slot and in the final norm
    norm_eps: float = 1e-6  # added inside the root of RMSNorm and LayerNorm
    norm_groups: int = 1
    #   groups of n_embd/norm_groups channels with separate statistics (Group-LN; our definition)
    pre_norm: Literal["both", "attn", "mlp", "none"] = "both"
    #   branches with a norm on their input
    mid_norm: Literal["none", "both", "attn", "mlp"] = "none"
    #   branches with a norm on their output, before the sum
    post_norm: Literal["none", "both", "attn", "mlp"] = "none"
    #   branches with a norm on the residual sum (Post-LN)
    post_norm_blocks: int = 0
    #   Mix-LN: the first n blocks are Post-LN, with post norms in place of pre and mid norms
    pre_norm_sublayers: int = 0
    #   the first n sub-layers, two in a block, are Pre-LN, with pre norms in place of mid and post
    #   norms. HybridNorm*: 2; Keel: 1
    input_norm: bool = False
    #   norm on the embedding (DNT eq. 2); with learned positions it acts on the sum of both (our
    #   choice)
    qk_norm: bool = False
    #   RMSNorm on each head of q and k, with gains of size head_dim (DNT eq. 10); before RoPE, our
    #   choice
    qk_norm_over: Literal["head", "full"] = "head"
    #   channels of one statistic of QK-norm. head: those of a head; full: all of q and all of k,
    #   with a gain for each (OLMo-2)
    v_norm: bool = False  # RMSNorm on each head of v, with gains of size head_dim (HybridNorm)
    # --- DyT in place of a norm ---
    dyt_alpha_attn: float | None = None
    #   DyT α₀ before attention; None = the paper's by width, on images 0.5
    dyt_alpha_other: float | None = None
    #   DyT α₀ everywhere else; None = the paper's by width, on images 0.5
    dyt_learn_alpha: bool = True  # train α; False: α stays α₀
    dyt_squash: Literal["tanh", "erf", "hardtanh", "sigmoid", "identity"] = "tanh"
    #   DyT's function of αx; erf: Derf's
    dyt_shift: bool = False  # Derf's learned scalar s, initially 0: the function is of αx + s
    dyt_bias: bool | None = None
    #   DyT's β (eq. 2); None = on images, but not on text, as in its authors' code
    embed_scale: bool | None = False
    #   learned scalar on the embedding sum, initially √n_embd; None = True for text with norm=dyt
    #   (DyT, App. A), else False
    # --- constants and learned scales on branch and stream ---
    skip_scale: float = 1.0
    #   constant on the stream beside a branch, in all blocks but the first; 0 = 2·n_layer, the
    #   number of sub-layers (Keel)
    lns: Literal["off", "norm", "branch", "residual", "input"] = "off"
    #   LNS: place of the factor 1/ℓ^lns_power. norm: on the output of pre norms (the paper's);
    #   input: on the input of pre norms; branch: on branch outputs; residual: on the residual sum
    lns_power: float = 0.5  # exponent of the block number ℓ, which counts from 1
    lns_branches: Literal["both", "attn", "mlp"] = "both"  # branches with LNS's factor
    lns_learn: bool = False
    #   with lns=norm: the factor is the initial value of the gains, not a constant (our choice)
    deepnorm: bool = False
    #   stream × (2L)^¼ before each post norm, and DeepNorm's initialisation
    admin: bool = False
    #   stream × a learned vector before each post norm, set by a profiling forward at the start
    gpas: bool = False
    #   GPAS: learned gates shrink the residual sum, under post norms the stream before the sum, but
    #   not its gradient. One for each sub-layer is our choice; its authors' code has one for each
    #   block
    branch_scale: Literal["none", "layerscale", "skipinit"] = "none"
    #   learned factor on the branch output. layerscale: a vector; skipinit: a scalar
    branch_scale_init: float | None = None
    #   initial value of branch_scale; None = LayerScale's by depth, SkipInit's 1/√L (LNS sec. 6)
    tied_skip: bool = False
    #   with branch_scale=layerscale: the branch × |λ|, the stream × 1 − |λ| (nGPT, sec. 2.2)
    fixup: bool = False
    #   Fixup, with norm=none: scalar biases and multipliers; a branch's last matrix starts at 0
    sigma_reparam: bool = False
    #   σReparam: the matrices of the blocks are γ W/σ(W), γ learned (our choice: no other matrices)
    # --- scale vectors (docs/layouts.md) ---
    gain: Literal["shared", "none", "branch"] = "shared"
    #   gains of the norms. shared: one for each norm; none: none at all; branch: one for each of q,
    #   k, v, gate and up (HG). HG, DP, DNP, OR and ER are from others' notes: we have the paper in
    #   part
    gain_out: Literal["none", "scale", "norm", "sphere"] = "none"
    #   slot after q, k, v, gate and up. scale: a scale vector (DP); norm: an RMSNorm with a gain
    #   (DNP), over each head of q and k, and over all of v, gate and up (our choice, not
    #   published); sphere: scale vectors after gate and up, after RoPE, on a GPT's logits (nGPT)
    gain_param: Literal["direct", "magdir", "expmagdir"] = "direct"
    #   form of the gains. direct: γ; magdir: β·α/rms(α) (OR); expmagdir: exp(b)·α/rms(α) (ER). The
    #   formulas of OR and ER are ours; whether ER exponentiates the direction too is not published
    # --- initialisation ---
    init: Literal["normal", "xavier", "xavier_cut"] = "normal"
    #   distribution of the matrices. normal: N(0, init_std²); xavier: Xavier normal; xavier_cut:
    #   the same, cut off at 2σ. Embeddings and head: always normal. DNT says "Xavier": the normal
    #   form, with q, k and v apart, is our choice
    init_std: float = 0.02  # standard deviation with init=normal, and of the embeddings
    residual_init: Literal["gpt2", "plain", "depth"] = "gpt2"
    #   factor on the std of a branch's last matrix (o, down). gpt2: 1/√(2L); plain: 1; depth:
    #   1/√(2ℓ). LNS says 1/√(2L) for W0 and W2 of the FFN, and 1/√(2ℓ) for "weight matrices"; o and
    #   down are our choice
    unit_rows: bool = False
    #   divide rows of matrices and embeddings, columns of o and down, by their length, at the start
    #   and after each step (nGPT, sec. 2.1)
    # --- a model larger than the tuned one (layers/scaling.py) ---
    parametrization: Literal["standard", "mup", "depth_mup", "completep"] = "standard"
    #   sizes that initial weights, learning rates and multipliers follow. standard: none; mup (μP):
    #   the width; depth_mup (α = ½) and completep (α = 1): width and depth
    base_n_embd: int = 0  # width of the tuned model; 0 = n_embd
    base_n_layer: int = 0  # blocks of the tuned model, for depth_mup and completep; 0 = n_layer
    base_head_size: int = 0  # channels of a head of the tuned model; 0 = the same as here

    @property
    def head_dim(self) -> int:
        return self.head_size or self.n_embd // self.n_head

    @property
    def ffn_width(self) -> int:
        return self.n_ff or 4 * self.n_embd

    @property
    def is_gated(self) -> bool:
        """Whether the FFN has a gate, a third matrix."""
        return self.mlp in GATES

    @property
    def n_norm_gains(self) -> int:
        """Number of gains of a norm."""
        if self.norm == "none" or self.gain == "none":
            return 0
        return self.n_embd

    @property
    def n_norm_biases(self) -> int:
        """Number of biases of a norm."""
        has_bias = self.norm == "layernorm" and self.bias
        if self.norm == "dyt":
            has_bias = self.dyt_bias
            if has_bias is None:
                has_bias = not self.causal
        return self.n_embd if has_bias else 0

    @property
    def n_fixup_biases(self) -> int:
        """Number of Fixup's biases in a slot that has one: a scalar, or none without `fixup`."""
        return 1 if self.fixup else 0

    @property
    def scales_embedding(self) -> bool:
        """Whether there is a learned scalar on the embedding sum."""
        if self.embed_scale is None:
            return self.norm == "dyt" and self.causal
        return self.embed_scale

    @property
    def causal(self) -> bool:
        """Whether a token sees only the tokens before it, as in a language model. Patches of an
        image see each other."""
        return kind_of(self) == "text"

    @property
    def image_tokens(self) -> int:
        """Number of tokens of an image: its patches, and the class token."""
        n_patches = (self.image_size // self.patch_size) ** 2
        return n_patches + (self.pool == "cls")

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def check(self) -> None:
        """ValueError if layers/rules.py refuses a value or a combination of values."""
        check_config(self)

    def norm_places(self, layer: int, branch: str) -> set[str]:
        """Those of "pre", "mid" and "post" that have a norm, in `branch` ("attn" or "mlp") of block
        `layer`, which counts from 1."""
        if self.norm == "none":
            return set()
        if layer <= self.post_norm_blocks:  # Mix-LN
            return {"post"}
        sublayer = 2 * layer - (branch == "attn")  # from 1
        if sublayer <= self.pre_norm_sublayers:
            return {"pre"}
        branches = {"pre": self.pre_norm, "mid": self.mid_norm, "post": self.post_norm}
        return {place for place in branches if branches[place] in ("both", branch)}


# --------------------------------------------------------------------------------------- the layout


class Slots(NamedTuple):
    """The slots of a branch: x ← post( skip(x) + mid( f( pre(x) ) ) )."""

    pre: Slot
    mid: Slot
    post: Slot
    skip: Slot


def layout(config: GPTConfig, layer: int, branch: str) -> Slots:
    """The block layout: the slots of `branch` ("attn" or "mlp") in block ℓ = `layer`, from 1."""
    mid = mid_slot(config, layer, branch)
    return Slots(
        pre=pre_slot(config, layer, branch),
        mid=mid,
        post=post_slot(config, layer, branch),
        skip=skip_slot(config, layer, branch, mid),
    )


def pre_slot(config: GPTConfig, layer: int, branch: str) -> Slot:
    """The slot on the input of a branch: pre norm, LNS, Fixup's bias."""
    if "pre" not in config.norm_places(layer, branch):
        return Slot(n_bias=config.n_fixup_biases)
    n_gain = config.n_norm_gains
    if config.gain == "branch":  # each of the next matrices has a gain of its own: `own_gain`
        n_gain = 0
    const = lns_factor(config, layer, branch, place="norm")
    if config.lns_learn:  # the gains start at this factor: `pre_gain_init`
        const = None
    return norm_slot(
        config,
        n_gain,
        input_of=branch,
        role="gain_in",
        init_gain=pre_gain_init(config, layer, branch),
        const=const,
        const_in=lns_factor(config, layer, branch, place="input"),
        fold=True,
    )


def mid_slot(config: GPTConfig, layer: int, branch: str) -> Slot:
    """The slot on the output of a branch: mid norm, LayerScale, SkipInit, Fixup's multiplier and
    bias, LNS, the factor of the parametrization by depth, stochastic depth."""
    norm = NO_NORM
    n_gain = 0
    n_bias = config.n_fixup_biases
    role = "gain_out"
    if "mid" in config.norm_places(layer, branch):
        norm = norm_function(config)
        n_gain = config.n_norm_gains
        n_bias = config.n_norm_biases
    if config.branch_scale == "layerscale":  # LayerScale's vector is the gain of a mid norm
        n_gain = config.n_embd
    elif config.branch_scale == "skipinit" or config.fixup:
        n_gain = 1  # SkipInit's scalar replaces the gain of a mid norm, our choice
        role = "scalar"
    const = multiplier(config, "branch", lns_factor(config, layer, branch, place="branch"))
    start = mid_gain_init(config)
    settings = dict(norm=norm, n_gain=n_gain, n_bias=n_bias, drop=drop_rate(config, layer))
    if config.tied_skip:  # stored at 1/√n_embd, like the gains of `sphere_slot`
        root = base(config).n_embd ** 0.5
        const = (const or 1.0) * start * root
        return PositiveSlot(**settings, init_gain=1 / root, const=const)
    return make_slot(config.gain_param, **settings, role=role, init_gain=start, const=const)


def post_slot(config: GPTConfig, layer: int, branch: str) -> Slot:
    """The slot on the residual sum: post norm, LNS, GPAS without a post norm."""
    const = lns_factor(config, layer, branch, place="residual")
    if "post" not in config.norm_places(layer, branch):
        return Slot(const=const, shrinks=config.gpas)
    role = "gain_out"
    if layer == config.n_layer and branch == "mlp":
        role = "final"  # the last post norm is the final norm, our choice
    return norm_slot(config, config.n_norm_gains, role=role, const=const)


def skip_slot(config: GPTConfig, layer: int, branch: str, mid: Slot) -> Slot:
    """The slot on the stream beside a branch: DeepNorm's constant or `skip_scale`; GPAS under a
    post norm; Admin's vector, which is no gain of a norm and always stored directly, whatever
    `gain_param` is. With `tied_skip`: the share of the sum that `mid` leaves."""
    if config.tied_skip:
        return RestSlot(mid)
    const = None
    if config.deepnorm:
        const = (2 * config.n_layer) ** 0.25
    if config.skip_scale != 1:
        const = config.skip_scale or 2.0 * config.n_layer
        if layer == 1:  # its stream is the embedding
            const = 1.0
    n_gain = config.n_embd if config.admin else 0
    shrinks = config.gpas and "post" in config.norm_places(layer, branch)
    return Slot(n_gain=n_gain, const=const, shrinks=shrinks)


def norm_slot(config: GPTConfig, n_gain: int, input_of: str = "", **settings: Any) -> Slot:
    """A slot with the configured norm and its bias. `settings` are arguments of `make_slot`."""
    norm = norm_function(config, input_of)
    n_bias = config.n_norm_biases
    return make_slot(config.gain_param, norm, n_gain, n_bias=n_bias, **settings)


def norm_function(config: GPTConfig, input_of: str = "") -> Norm:
    """The configured norm. `input_of`: the branch whose input it normalises; "": it stands
    elsewhere. DyT's α₀ depends on that."""
    return Norm(
        config.norm,
        eps=config.norm_eps,
        groups=config.norm_groups,
        squash=config.dyt_squash,
        alpha=dyt_alpha(config, input_of),
        learn_alpha=config.dyt_learn_alpha,
        shift=config.dyt_shift,
    )


def dyt_alpha(config: GPTConfig, input_of: str) -> float:
    """DyT's α₀ on the input of the branch `input_of`, or in all other places if that is ""."""
    alpha = config.dyt_alpha_attn if input_of == "attn" else config.dyt_alpha_other
    if alpha is not None:
        return alpha
    if not config.causal:
        return DYT_ALPHA_IMAGES
    width = base(config).n_embd
    nearest = min(DYT_ALPHA, key=lambda listed: abs(math.log(listed / width)))
    before_attention, elsewhere = DYT_ALPHA[nearest]
    return before_attention if input_of == "attn" else elsewhere


def lns_factor(config: GPTConfig, layer: int, branch: str, place: str) -> float | None:
    """LNS's 1/ℓ^lns_power, ℓ = `layer`, or None if lns is not `place` or leaves out this branch."""
    if config.lns != place or config.lns_branches not in ("both", branch):
        return None
    return base_layer(config, layer) ** -config.lns_power


def pre_gain_init(config: GPTConfig, layer: int, branch: str) -> float:
    """Initial value of the gains of a pre norm: 1, or LNS's factor with `lns_learn`."""
    factor = None
    if config.lns_learn:
        factor = lns_factor(config, layer, branch, place="norm")
    return 1.0 if factor is None else factor


def mid_gain_init(config: GPTConfig) -> float:
    """Initial value of the gain on a branch output, of a mid norm or of `branch_scale`.

    LayerScale's is published by its authors for 12 to 18, 24 and 36 layers; for other depths it is
    our choice.
    """
    n_layer = base(config).n_layer
    if config.branch_scale_init is not None:
        return config.branch_scale_init
    if config.branch_scale == "skipinit":
        return n_layer**-0.5
    if config.branch_scale == "none":
        return 1.0
    if n_layer <= 18:
        return 0.1
    if n_layer <= 24:
        return 1e-5
    return 1e-6


def drop_rate(config: GPTConfig, layer: int) -> float | None:
    """Rate of stochastic depth in block `layer`: 0 in the first, drop_path in the last."""
    if config.drop_path == 0:
        return None
    return config.drop_path * (layer - 1) / max(1, config.n_layer - 1)


# ------------------------------------------------------------------------- the matrices of a block


class MatrixSlots(NamedTuple):
    """The slots of a matrix: y = out( W pre(x) )."""

    pre: Slot
    out: Slot


def matrix_slots(config: GPTConfig, layer: int, part: str, n_out: int) -> MatrixSlots:
    """The slots of matrix `part`: HG's gain or Fixup's bias before it; `out_slot` after it."""
    if part in ("o", "down"):  # the last matrix of a branch
        return MatrixSlots(pre=Slot(n_bias=config.n_fixup_biases), out=Slot())
    branch = "attn" if part in ("q", "k", "v") else "mlp"
    return MatrixSlots(pre=own_gain(config, layer, branch), out=out_slot(config, part, n_out))


def own_gain(config: GPTConfig, layer: int, branch: str) -> Slot:
    """HG: the gain of a single matrix in place of the pre norm's gain; else an empty slot."""
    if config.gain != "branch" or "pre" not in config.norm_places(layer, branch):
        return Slot()
    init_gain = pre_gain_init(config, layer, branch)
    return make_slot(
        config.gain_param, n_gain=config.n_embd, role="gain_in", init_gain=init_gain, fold=True
    )


def out_slot(config: GPTConfig, part: str, n_out: int) -> Slot:
    """The slot after q, k, v, gate or up: QK-norm over all of q or k, DP's gain, nGPT's after gate
    and up, DNP's norm with a gain, Fixup's bias."""
    if part in ("q", "k") and config.qk_norm_over == "full":
        return rms_slot(config, n_out, "gain_out")
    activated = "gate" if config.is_gated else "up"  # the matrix before the activation
    n_bias = config.n_fixup_biases if part == activated else 0
    if config.gain_out == "none" or (config.gain_out == "sphere" and part in ("q", "k", "v")):
        return Slot(n_bias=n_bias)
    role = "gain_out"
    if part == "v" or (part == "up" and config.is_gated):
        role = part  # a flag decides what role these two have: OPEN_GAINS in layers/roles.py
    norm = NO_NORM
    if config.gain_out == "norm":  # over each head of q and k, over all of v, gate and up
        groups = n_out // config.head_dim if part in ("q", "k") else 1
        norm = Norm("rmsnorm", config.norm_eps, groups)
    fold = config.gain_out != "norm"
    n_gain = n_out  # one for each channel
    return make_slot(config.gain_param, norm, n_gain, role, n_bias=n_bias, fold=fold)


def per_head_slot(config: GPTConfig, part: str) -> Slot:
    """The slot on each head of q, k or v: the factor of the parametrization, and a norm over the
    channels of a head (DNT eq. 10; v: HybridNorm, Alg. 1), with one gain for all heads (of q and k
    our choice)."""
    const = multiplier(config, part)
    has_norm = config.qk_norm and config.qk_norm_over == "head"
    role = "gain_out"
    if part == "v":
        has_norm = config.v_norm
        role = "v"
    if not has_norm:
        return Slot(const=const)
    return rms_slot(config, config.head_dim, role, const)


def rms_slot(config: GPTConfig, n: int, role: str, const: float | None = None) -> Slot:
    """A slot with an RMSNorm over n channels and a gain for each, unless gain=none."""
    n_gain = 0 if config.gain == "none" else n
    norm = Norm("rmsnorm", config.norm_eps)
    return make_slot(config.gain_param, norm, n_gain, role, const=const)


def sphere_slot(config: GPTConfig, n_gain: int, const: float | None = None) -> Slot:
    """With gain_out=sphere, a scale vector const · gain. The gain is 1/√n_embd at first: a step of
    Adam moves the product by const times the rate (nGPT, sec. 2.5)."""
    if config.gain_out != "sphere":
        return Slot()
    return Slot(n_gain=n_gain, init_gain=base(config).n_embd ** -0.5, const=const)


class MatrixSize(NamedTuple):
    n_in: int
    n_out: int
    role: str


def matrix_size(config: GPTConfig, part: str, n_shared: int = 1) -> MatrixSize:
    """Shape and role of matrix `part`; `n_shared`: factor on the width of an FFN."""
    d = config.n_embd
    heads = config.n_head * config.head_dim
    kv_heads = (config.n_kv_head or config.n_head) * config.head_dim
    hidden = config.ffn_width * n_shared
    sizes = {
        "q": MatrixSize(d, heads, "qk"),
        "k": MatrixSize(d, kv_heads, "qk"),
        "v": MatrixSize(d, kv_heads, "vo"),
        "o": MatrixSize(heads, d, "vo"),
        "gate": MatrixSize(d, hidden, "ffn"),
        "up": MatrixSize(d, hidden, "ffn"),
        "down": MatrixSize(hidden, d, "ffn"),
    }
    return sizes[part]


def projection(
    config: GPTConfig, layer: int, part: str, n_expert: int = 0, n_shared: int = 1
) -> Linear:
    """Matrix `part` ("q", "k", "v", "o", "gate", "up" or "down") of block `layer`, from 1.

    `n_expert`: number of experts in a stack of matrices; 0: a single matrix. `n_shared`: number of
    shared experts; they form one FFN, `n_shared` times as wide.
    """
    size = matrix_size(config, part, n_shared)
    slots = matrix_slots(config, layer, part, size.n_out)
    matrix = SigmaReparam if config.sigma_reparam else Linear
    return matrix(
        size.n_in,
        size.n_out,
        size.role,
        config.bias,
        layer=layer,
        part=part,
        pre=slots.pre,
        out=slots.out,
        stack=n_expert,
    )


# -------------------------------------------------------------------------------------- the network


class Attention(nn.Module):
    """Multi-head or grouped-query attention, causal for text: u (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.causal = config.causal
        self.q = projection(config, layer, "q")
        self.k = projection(config, layer, "k")
        self.v = projection(config, layer, "v")
        self.o = projection(config, layer, "o")
        self.q_norm = per_head_slot(config, "q")
        self.k_norm = per_head_slot(config, "k")
        self.v_norm = per_head_slot(config, "v")
        self.qk_scale = sphere_slot(config, self.q.out_features, const=base(config).n_embd ** 0.5)

    def project(self, u: Tensor, in_scale: Tensor | None, rope: Rope | None) -> list[Tensor]:
        """[q, k, v], each (B, T, its channels). In compiled code, with "qkv" among the runtime's
        `kernels`, they are one product."""
        matrices = [self.q, self.k, self.v]
        # RoPE without QK-norm keeps q and k for the backward pass. A v from one product is a view
        # of all three, so it would keep q and k a second time.
        keeps_more = rope is not None and self.q_norm.norm_kind == "none"
        if "qkv" in self.q.runtime.kernels and torch.compiler.is_compiling() and not keeps_more:
            return fused_linear(matrices, u, in_scale, joins_gradients=False)
        return [matrix(u, in_scale) for matrix in matrices]

    def forward(
        self,
        u: Tensor,
        in_scale: Tensor | None = None,
        rope: Rope | None = None,
        cache: Cache | None = None,
        mask: Any = None,
    ) -> Tensor:
        """`in_scale`: the pre slot's factor for the weights of q, k and v. `rope`: angles of the
        tokens of u; None: no rotation. `cache`: keys, already rotated, and values of the tokens
        before u. `mask`: see `attend`."""
        B, T, _ = u.shape
        q, k, v = self.project(u, in_scale, rope)
        dtype = v.dtype  # of the products; norms and rotation give fp32
        q = q.view(B, T, -1, self.head_dim)  # (B, T, n_head, head_dim)
        k = k.view(B, T, -1, self.head_dim)  # (B, T, n_kv_head, head_dim)
        v = v.view(B, T, -1, self.head_dim)
        q = self.q_norm(q)
        k = self.k_norm(k)
        v = self.v_norm(v)
        if rope is not None:
            q = rotate(q, rope)
            k = rotate(k, rope)
        # q and k have the same scale: twice on q, so that several heads may share a k
        q = self.qk_scale(self.qk_scale(q.flatten(2))).view_as(q)
        q = q.to(dtype).transpose(1, 2)  # (B, n_head, T, head_dim)
        k = k.to(dtype).transpose(1, 2)
        v = v.to(dtype).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        y = attend(q, k, v, mask, dropout, self.causal)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """down( act( up(u) ) ), or with a gate down( act(gate(u)) ⊙ up(u) ): u (…, C) → (…, C).

    `n_expert` and `n_shared`: see `projection`.
    """

    def __init__(self, config: GPTConfig, layer: int, n_expert: int = 0, n_shared: int = 1):
        super().__init__()
        self.gate = None
        if config.is_gated:
            self.gate = projection(config, layer, "gate", n_expert, n_shared)
        self.up = projection(config, layer, "up", n_expert, n_shared)
        self.down = projection(config, layer, "down", n_expert, n_shared)
        self.act = ACTIVATIONS[GATES.get(config.mlp, config.mlp)]

    def fits_kernel(self, u: Tensor, product: ProductFunction) -> bool:
        """Whether layers/ffn.py computes this FFN: in compiled code, GELU alone between two
        matrices, many rows, and a dtype and sizes that its kernels support."""
        up = self.up
        if "ffn" not in up.runtime.kernels or not torch.compiler.is_compiling():
            return False
        is_gelu = self.gate is None and self.act is ACTIVATIONS["gelu"]
        if not is_gelu or product is not F.linear:
            return False
        if up.bias is not None or [*up.out.parameters(), *self.down.pre.parameters()]:
            return False
        from layers.ffn import ALIGNED, DTYPES  # imported here: few runs need it

        is_aligned = all(n % ALIGNED == 0 for n in up.weight.shape)
        many_rows = not has_one_row(u, up.weight)
        return is_aligned and many_rows and up.runtime.compute_dtype in DTYPES

    def forward(
        self, u: Tensor, in_scale: Tensor | None = None, product: ProductFunction = F.linear
    ) -> Tensor:
        """`in_scale`: the pre slot's factor for the weights of gate and up. `product`: for a stack
        of experts, the function that multiplies each row by the matrix of its expert."""
        if self.fits_kernel(u, product):
            from layers.ffn import ffn

            return ffn(self.up, self.down, u, in_scale)
        if self.gate is None:
            hidden = self.act(self.up(u, in_scale, product))
        else:
            gate, up = fused_linear([self.gate, self.up], u, in_scale, product)
            hidden = self.act(gate) * up
        return self.down(hidden, product=product)


def mixture(config: GPTConfig, layer: int) -> nn.Module:
    """An FFN of experts behind a router, for block `layer`."""
    from layers.moe import MoE, Router  # imported here: few networks have experts

    router = Router(
        config.n_embd,
        config.n_expert,
        config.n_expert_active,
        config.router,
        config.router_norm,
        config.router_scale,
        config.balance,
        own_gain(config, layer, "mlp"),
    )
    shared = None
    if config.n_expert_shared:
        shared = MLP(config, layer, n_shared=config.n_expert_shared)
    return MoE(router, MLP(config, layer, n_expert=config.n_expert), shared)


class Residual(nn.Module):
    """x ← post( skip(x) + mid( f( pre(x) ) ) ): x (B, T, C) → (B, T, C).

    The sum is in fp32, whatever the dtype that f computes in.
    """

    runtime = Runtime()  # `Network.share_runtime` replaces it by the network's

    def __init__(self, f: nn.Module, dropout: float, slots: Slots):
        super().__init__()
        self.f = f
        self.dropout = nn.Dropout(dropout)
        self.pre = slots.pre
        self.mid = slots.mid
        self.post = slots.post
        self.skip = slots.skip

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """`args`: further arguments of f: rope, cache and mask of attention; none of an FFN."""
        dtype = self.runtime.stream_dtype
        u = self.pre(x)
        in_scale = self.pre.factor_for_weight()  # the first matrices of f multiply by it
        skip = self.skip(x)
        y = self.mid(self.f(u, in_scale, *args))
        x = self.post(add(skip, self.dropout(y), dtype))
        return stored(x, dtype)


class Block(nn.Module):
    """One attention and one FFN sub-layer: x (B, T, C) → (B, T, C).

    A block is the unit of checkpointing, compilation and FSDP: what it needs comes in as an
    argument of `forward`, and what it makes leaves as the result.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        attn = Attention(config, layer)
        mlp = mixture(config, layer) if config.n_expert else MLP(config, layer)
        self.attn = Residual(attn, config.dropout, layout(config, layer, "attn"))
        self.mlp = Residual(mlp, config.dropout, layout(config, layer, "mlp"))

    def forward(
        self, x: Tensor, rope: Rope | None = None, cache: Cache | None = None, mask: Any = None
    ) -> Tensor:
        x = self.attn(x, rope, cache, mask)
        x = self.mlp(x)
        return x


class Transformer(Network):
    """Base class of the language model and the ViT: everything from the embedding sum to the final
    norm.

    A network of another kind overrides the methods that raise NotImplementedError. Its constructor
    takes (config, seed), sets `wpe` (position table) and `head` (output head), both perhaps None,
    calls `add_blocks` between them, and ends with `share_runtime` and `init_weights`. If it is not
    causal, it also has `patch`, the matrix that reads the input, and `cls`, a class token or None.
    """

    def __init__(self, config: GPTConfig):
        """ValueError if layers/rules.py refuses the config."""
        super().__init__()
        config.check()
        self.config = config

    def add_blocks(self) -> None:
        """Create the input norm, the blocks and the final norm. Initial weights are drawn in the
        order in which modules are created."""
        config = self.config
        if config.scales_embedding:
            init_gain = base(config).n_embd ** 0.5
            self.embed_scale = Slot(n_gain=1, role="scalar", init_gain=init_gain)
        else:
            self.embed_scale = Slot()
        if config.input_norm:
            self.input_norm = norm_slot(config, config.n_norm_gains)
        else:
            self.input_norm = Slot()
        self.dropout = nn.Dropout(config.dropout)
        layers = range(1, config.n_layer + 1)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in layers)
        const = multiplier(config, "logits")
        if "post" in config.norm_places(config.n_layer, "mlp"):
            # the last post norm is the final norm, our choice; LNS's code has a second one
            self.final_norm = Slot(const=const)
        else:
            self.final_norm = norm_slot(config, config.n_norm_gains, role="final", const=const)

    def enter(self, x: Tensor) -> Tensor:
        """The embedding sum x (B, T, C) → the residual stream before the first block."""
        x = self.input_norm(self.embed_scale(x))
        return stored(self.dropout(x), self.runtime.stream_dtype)

    def through_blocks(
        self,
        x: Tensor,
        rope: Rope | None = None,
        cache: list[Cache] | None = None,
        mask: Any = None,
    ) -> Tensor:
        """The residual stream before the first block → after the last block, before the final norm.

        `cache`: a cache for each block, or None. With activation_checkpointing the backward pass
        computes each block again.
        """
        recompute = self.runtime.checkpointing and cache is None and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            if recompute:  # without a cache
                x = checkpoint(block, x, rope, None, mask, use_reentrant=False)
            else:
                x = block(x, rope, cache[i] if cache else None, mask)
        return x

    def forward(self, *batch: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(logits or None, loss or None) of inputs, or of a whole batch: inputs, targets, …"""
        raise NotImplementedError

    def stream(self, *inputs: Tensor) -> Tensor:
        """The residual stream x (B, block_size, C) before the final norm. Analysis calls it with
        the first input alone."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """The logits, in fp32, of a residual stream x (B, T, C), also of a single token."""
        raise NotImplementedError

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss () of a residual stream x. `forward` passes the targets, and further arguments
        if the loss of this network has any."""
        raise NotImplementedError

    @staticmethod
    def inputs(*batch: Tensor) -> tuple[Tensor, ...]:
        """The arguments of `stream` in a batch."""
        raise NotImplementedError

    def example(self, rows: int) -> tuple[Tensor, Tensor]:
        """A batch (inputs, targets) of `rows` rows of zeros, on the model's device."""
        raise NotImplementedError

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward."""
        raise NotImplementedError


class GPT(Transformer):
    """The language model. `model(idx)` → (logits, None); `model(idx, targets)` → (None, loss):
    unlike nanoGPT's it keeps no logits beside a loss."""

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__(config)
        vocab_size = config.padded_vocab_size
        self.wte = Embedding(vocab_size, config.n_embd, "emb")
        self.wpe = None
        if config.pos == "learned":
            self.wpe = Embedding(config.block_size, config.n_embd, "pos")
        self.add_blocks()
        self.head = None
        if not config.tie_weights:
            self.head = Linear(config.n_embd, vocab_size, "head")
        # nGPT's constant is √n_embd, for a stream of length 1: ours is √n_embd long
        self.logits_scale = sphere_slot(config, vocab_size)
        self.share_runtime()
        self.init_weights(seed)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: list[Cache] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Token ids idx (B, T), T ≤ block_size → (logits (B, T, vocab_size), None).

        With targets (B, T), −1 = ignored → (None, loss): cross-entropy in nats, mean over the
        targets that count, 0 if none does. The logits end at vocab_size: padding entries cannot be
        sampled and take no part in the loss.

        `positions` (B, T) restart at 0 where a document begins, and attention stays within the
        documents. None: each row is one document. `cache`: keys and values of the tokens before
        idx, for each block.
        """
        if targets is None:
            return self.logits(self.stream(idx, positions, cache)), None
        gives_table = self.head is None and self.logits_scale.gain is None
        x, table = self.stream_and_table(idx, positions, cache, gives_table)
        return None, self.loss(x, targets, table)

    def stream(
        self,
        idx: Tensor,
        positions: Tensor | None = None,
        cache: list[Cache] | None = None,
    ) -> Tensor:
        """Token ids idx (B, T) → the residual stream (B, T, C) before the final norm."""
        return self.stream_and_table(idx, positions, cache)[0]

    def stream_and_table(
        self,
        idx: Tensor,
        positions: Tensor | None,
        cache: list[Cache] | None,
        gives_table: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(the residual stream before the final norm, the token embedding as a result of its own
        look-up, or None).

        A tied head multiplies by this second result instead of `wte.weight`. The gradient of the
        rows is then added into the gradient of the head (`Lookup`).
        """
        config = self.config
        T = idx.shape[1]
        start = cache[0].length if cache else 0
        if start + T > config.block_size:
            raise ValueError(
                f"a sequence of {start + T} tokens does not fit block_size={config.block_size}"
            )
        places = start + torch.arange(T, device=idx.device)
        mask = self.attention_mask(places, positions, cache)
        if positions is None:
            positions = places
        x, table = self.embed(idx, positions, gives_table)
        rope = None
        if config.pos == "rope":
            rope = rotary(positions, config.head_dim, config.rope_theta)
        return self.through_blocks(x, rope, cache, mask), table

    def embed(
        self, idx: Tensor, positions: Tensor, gives_table: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(the residual stream before the first block, the table as in `stream_and_table`).

        idx (B, T), positions (T,) or (B, T). Without a table, hooks of `wte` are called.
        """
        table = None
        if gives_table:
            x, table = Lookup.apply(self.wte.weight, idx)
        else:
            x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        return self.enter(x), table

    def attention_mask(
        self, places: Tensor, positions: Tensor | None, cache: list[Cache] | None
    ) -> Any:
        """The mask for `attend`, or None if it needs none.

        `places` (T,): where the tokens stand in the row, or in the cache. `positions`: as in
        `forward`.
        """
        if positions is not None and cache is None and self.runtime.flex_attention:
            return document_blocks(positions)
        T = len(places)
        n_keys = cache[0].length + T if cache else T
        # `attend` by itself is causal in whole rows, and lets a single new token see all keys
        attend_suffices = n_keys == T or T == 1
        if positions is None and attend_suffices:
            return None
        dtype = self.runtime.compute_dtype or self.wte.weight.dtype
        return additive(visible_keys(places, positions, n_keys), dtype)

    def head_weight(self) -> Tensor:
        """The weight (V, C) of the output head, which may be the token embedding, scaled."""
        weight = self.wte.weight if self.head is None else self.head.weight
        scale = self.logits_scale.gain_vector()
        return weight if scale is None else weight * scale[:, None]

    def logits(self, x: Tensor) -> Tensor:
        """The residual stream x (B, T, C) before the final norm → (B, T, vocab_size), fp32."""
        x = self.final_norm(x)
        logits = linear(x, self.head_weight(), dtype=self.runtime.compute_dtype)
        return upcast(logits[..., : self.config.vocab_size])

    def loss(self, x: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats of targets (B, T), −1 = ignored, for `logits(x)`, which are
        never kept whole. `weight` (V, C): the table of a `Lookup`; None: `head_weight`."""
        if weight is None:
            weight = self.head_weight()
        runtime = self.runtime
        return linear_cross_entropy(
            self.final_norm(x),
            weight,
            targets,
            runtime.compute_dtype or weight.dtype,
            self.config.vocab_size,
            runtime.loss_chunks,
            runtime.kernels,
        )

    @staticmethod
    def inputs(idx: Tensor, targets: Tensor, *positions: Tensor) -> tuple[Tensor, ...]:
        return idx, *positions

    def example(self, rows: int) -> tuple[Tensor, Tensor]:
        """A batch of zeros: token ids and targets (rows, block_size)."""
        device = self.wte.weight.device
        idx = torch.zeros(rows, self.config.block_size, dtype=torch.long, device=device)
        return idx, idx

    def flops_per_token(self) -> int:
        """Training FLOPs per token: 6 for each entry of a matrix that it meets (with the head,
        without the embedding look-up), and 12·L·T times the channels of all heads for attention
        (PaLM, app. B: no credit for causality)."""
        head = self.config.padded_vocab_size * self.config.n_embd
        return 6 * (self.active_matrices() + head) + self.attention_flops()


# `python model.py CONFIG` is an alias of `python -m nanodnt.plan CONFIG`, which prints the network.
# The process becomes that command, with the same import path: it may be called in another folder.
if __name__ == "__main__":
    import os
    import sys

    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "nanodnt.plan", *sys.argv[1:]])
