"""A GPT whose block layout (norm placement, DyT, LayerNorm Scaling, scale vectors, …) comes from flags.

Every residual sub-layer, attention or FFN, of every scheme is one equation,

    x ← post( skip(x) + mid( f( pre(x) ) ) )

whose four slots are `Slot`s: y = const · gain · normalise(x), each part optional. `layout` reads the flags and fills
the slots; `Residual` is the only code that touches the residual stream. A new scheme is a change in `layout`.
Inside f every matrix is again y = out( W pre(x) ) with two slots, which `projection` fills. docs/layouts.md has the
schemes one by one; `python model.py CONFIG` prints what a configuration comes to.

Papers cited: DNT (arXiv 2507.17501), scale vectors (2605.26895), DyT (2503.10622), LNS (2502.05795). Marks: [I] our
inference or choice, [U] not published where we could read it.
"""

import math
import sys
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCAB_MULTIPLE = 64  # the vocabulary is padded to this multiple: 50257 → 50304, faster matmuls

# Parameter roles (`GPT.roles`): optimizers, weight decay and diagnostics go by these, never by parameter names.
# gain_in: scale vectors followed by a linear map; gain_out: the others; gain_dir: unit directions, which never decay.
ROLES = ("emb", "pos", "head", "qk", "vo", "ffn", "gain_in", "gain_out", "gain_dir", "scalar", "bias")

# DyT α₀ by width, for LLMs: (the norm before attention; the norm before the FFN and the final norm). Other slots take
# the second value, and other widths that of the nearest in the table: our choices [I].
DYT_ALPHA = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}

LNS = Literal["off", "norm", "branch", "residual", "input"]
# sizes: more is a slip of the pen, and would take minutes to be refused for want of memory
MOST = dict(n_layer=10_000, n_head=2**24, n_embd=2**24, block_size=2**24, vocab_size=2**24, n_ff=2**24)
LOGITS_BYTES = 2**30  # of logits that the loss may hold at a time
SIGMA_INIT_ITERATIONS = 30  # of the power iteration, for σReparam's start


@dataclass
class GPTConfig:
    # --- size ---
    n_layer: int = 12  # blocks (one block = attention + FFN)
    n_head: int = 12  # attention heads
    n_embd: int = 768  # model width d, the size of the residual stream
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 0  # entries of the tokenizer, before padding; 0 = the dataset's
    # --- parts ---
    pos: Literal["learned", "rope"] = "learned"  # positions: a learned table on the embedding, or rotary on q and k
    rope_theta: float = 10000.0  # base of the rotary frequencies
    n_kv_head: int = 0  # heads of k and v (grouped-query attention); 0 = n_head
    mlp: Literal["gelu", "relu", "relu2", "swiglu"] = "gelu"  # FFN; gelu is the tanh form of GPT-2
    n_ff: int = 0  # hidden width of the FFN; 0 = 4·n_embd
    tie_weights: bool = True  # the output head is the token embedding
    bias: bool = False  # biases in linear layers, and in LayerNorm
    dropout: float = 0.0  # on the embedding, the attention weights and the branch outputs
    # --- norms: x ← post( skip(x) + mid( f( pre(x) ) ) ) ---
    norm: Literal["rmsnorm", "layernorm", "dyt", "none"] = "rmsnorm"  # function in every norm slot and the final norm
    norm_eps: float = 1e-6  # inside the root of RMSNorm and LayerNorm
    norm_groups: int = 1  # statistics over n_embd/norm_groups channels at a time (Group-LN; defined so by us [I])
    pre_norm: Literal["both", "attn", "mlp", "none"] = "both"  # branches with a norm on their input
    mid_norm: Literal["none", "both", "attn", "mlp"] = "none"  # branches with a norm on their output, before the sum
    post_norm: Literal["none", "both", "attn", "mlp"] = "none"  # branches with a norm on the residual sum (Post-LN)
    post_norm_blocks: int = 0  # Mix-LN: the first n blocks are Post-LN, with post norms instead of pre and mid
    input_norm: bool = False  # norm on the embedding sum (DNT)
    qk_norm: bool = False  # RMSNorm on each head of q and k, before RoPE; gains of size head_dim (DNT eq. 10)
    # --- DyT in place of a norm ---
    dyt_alpha_attn: float | None = None  # DyT α₀ before attention; None = the paper's for the nearest width
    dyt_alpha_other: float | None = None  # DyT α₀ everywhere else; None = the paper's for the nearest width
    dyt_learn_alpha: bool = True  # False: α stays α₀
    dyt_squash: Literal["tanh", "hardtanh", "sigmoid", "identity"] = "tanh"  # DyT's function of αx
    dyt_bias: bool = False  # DyT's β; the paper's LLaMA code has none, its vision models do
    embed_scale: bool = False  # learned scalar on the embedding sum, √n_embd at first (DyT's language models)
    # --- constants and learned scales on branch and stream ---
    lns: LNS = "off"  # LNS: 1/ℓ^lns_power on the pre norm's output (norm, the paper's), on the branch output (branch),
    #   on the residual sum (residual), or on the pre norm's input (input)
    lns_power: float = 0.5  # of the block number ℓ, from 1
    lns_branches: Literal["both", "attn", "mlp"] = "both"  # branches that have the factor
    lns_learn: bool = False  # lns=norm as the start value of the pre norm's gains, not a constant [I]
    deepnorm: bool = False  # stream × (2L)^¼ before each post norm, and DeepNorm's initialisation
    admin: bool = False  # stream × a learned vector before each post norm, set by a profiling forward at the start
    branch_scale: Literal["none", "layerscale", "skipinit"] = "none"  # learned vector, or scalar, on the branch output
    branch_scale_init: float | None = None  # None = LayerScale's by depth, 1/√L for SkipInit
    fixup: bool = False  # Fixup, in place of norms: scalar biases and multipliers, zero-initialised branch ends
    sigma_reparam: bool = False  # σReparam: every matrix in the blocks (no other [I]) is γ W/σ(W), γ a learned scalar
    # --- scale vectors ---
    gain: Literal["shared", "none", "branch"] = "shared"  # a norm's, none, one each for q, k, v, gate, up (HG)
    gain_out: Literal["none", "scale", "norm"] = "none"  # on the outputs of q, k, v, gate, up: a scale vector (DP),
    #   or an RMSNorm with one (DNP): over each head of q and k, over all of v, gate, up [I]; the paper's grouping: [U]
    gain_param: Literal["direct", "magdir", "expmagdir"] = "direct"  # γ, β·α/rms(α) (OR), or exp(b)·α/rms(α) (ER): our
    #   formulas for the paper's words [I]; whether ER exponentiates the direction too: [U]
    # --- initialisation ---
    init: Literal["normal", "xavier"] = "normal"  # matrices: N(0, init_std), or Xavier normal; embeddings: normal
    init_std: float = 0.02  # standard deviation of init=normal, and of the embeddings
    residual_init: Literal["gpt2", "plain", "depth"] = "gpt2"  # branch outputs times 1/√(2L), 1, or 1/√(2ℓ)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        """Hidden width of the FFN."""
        return self.n_ff or 4 * self.n_embd

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def check(self) -> None:
        """ValueError, in one line that says what to change, for values that are wrong or contradict each other."""
        for name, hint in get_type_hints(type(self)).items():
            value, allowed = getattr(self, name), get_args(hint) or (hint,)  # of Literal and unions, or the type itself
            if get_origin(hint) is Literal:
                _refuse(value not in allowed, f"{name}={value!r} is unknown: allowed are {', '.join(allowed)}")
            elif type(value) not in allowed and not (float in allowed and type(value) is int):
                raise ValueError(f"{name}={value!r} must be of type {' or '.join(t.__name__ for t in allowed)}")
            elif isinstance(value, float):
                _refuse(not math.isfinite(value), f"{name}={value} must be a finite number")
        sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        small = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        _refuse(small, f"{', '.join(small)}: must be at least 1")
        large = [f"{name}={getattr(self, name)}" for name in (*sizes, "n_ff") if getattr(self, name) > MOST[name]]
        _refuse(
            large, f"{', '.join(large)}: beyond what any model has ({MOST['n_layer']:,} blocks, {2**24:,} of others)"
        )
        _refuse(self.n_kv_head < 0 or self.n_ff < 0, "n_kv_head and n_ff must not be negative (0 = the default)")
        d, heads, kv = self.n_embd, self.n_head, self.n_kv_head or self.n_head
        _refuse(d % heads, f"n_embd={d} must be a multiple of n_head={heads}")
        _refuse(heads % kv, f"n_head={heads} must be a multiple of n_kv_head={kv}")
        rope = self.pos == "rope"
        _refuse(rope and self.head_dim % 2, f"pos=rope needs an even head size, but n_embd/n_head = {d}/{heads}")
        _refuse(not rope and self.rope_theta != 10000.0, "rope_theta needs pos=rope: set that, or leave rope_theta out")
        _refuse(self.rope_theta <= 0, f"rope_theta={self.rope_theta} must be positive")
        _refuse(not 0 <= self.dropout < 1, f"dropout={self.dropout} must be at least 0 and below 1")
        _refuse(self.norm_eps < 0, f"norm_eps={self.norm_eps} must not be negative")
        _refuse(self.init_std <= 0, f"init_std={self.init_std} must be positive")
        self._check_norms()
        self._check_scales()

    def _check_norms(self):
        norms = ("mid_norm", "post_norm", "input_norm", "post_norm_blocks")
        placed = [f"{name}={getattr(self, name)}" for name in norms if getattr(self, name) not in ("none", False, 0)]
        _refuse(
            self.norm == "none" and placed,
            f"norm=none contradicts {', '.join(placed)}: leave that out, or choose a norm",
        )
        _refuse(
            not 0 <= self.post_norm_blocks <= self.n_layer,
            f"post_norm_blocks={self.post_norm_blocks} must be between 0 and n_layer={self.n_layer}",
        )
        groups = self.norm_groups
        _refuse(
            groups < 1 or self.n_embd % groups, f"norm_groups={groups} must divide n_embd={self.n_embd} (1 = no groups)"
        )
        _refuse(
            groups > 1 and self.norm not in ("rmsnorm", "layernorm"),
            f"norm_groups={groups} needs norm=rmsnorm or layernorm, but norm={self.norm}",
        )
        _refuse(
            self.norm == "layernorm" and groups == self.n_embd,
            f"norm_groups={groups} leaves LayerNorm groups of one channel, which are always 0: lower norm_groups",
        )
        alphas = ("dyt_alpha_attn", "dyt_alpha_other")
        defaults = {f.name: f.default for f in fields(self)}
        dyt = [name for name in defaults if name.startswith("dyt_") and getattr(self, name) != defaults[name]]
        _refuse(self.norm != "dyt" and dyt, f"{', '.join(dyt)}: needs norm=dyt, but norm={self.norm}")
        for name in alphas:
            _refuse(getattr(self, name) == 0, f"{name}=0 would make the slot constant: choose another α₀")
        _refuse(
            self.embed_scale and self.input_norm and self.norm != "dyt",
            "embed_scale has no effect under input_norm, which divides it out again: leave one of them out",
        )
        _refuse(
            self.qk_norm and self.gain_out == "norm",
            "gain_out=norm already normalises each head of q and k: leave qk_norm out",
        )

    def _check_scales(self):
        bare = [n for n in ("deepnorm", "admin") if getattr(self, n)] + ["gain=branch"] * (self.gain == "branch")
        bare += [f"lns={self.lns}"] * (self.lns in ("norm", "input"))
        _refuse(self.norm == "none" and bare, f"{', '.join(bare)}: needs norms to act on, but norm=none: choose a norm")
        pre = self._pre_normed()
        lns = [b for b in pre if self.lns_branches in ("both", b)]
        fewer = f" and post_norm_blocks below n_layer={self.n_layer}" * (self.post_norm_blocks == self.n_layer)
        _refuse(
            self.lns in ("norm", "input") and not lns,
            f"lns={self.lns} needs a pre norm to stand at: set pre_norm=both{fewer}, or lns=branch or residual",
        )
        changed = [n for n, v in (("lns_power", 0.5), ("lns_branches", "both")) if getattr(self, n) != v]
        _refuse(self.lns == "off" and changed, f"{', '.join(changed)}: needs lns, for example lns=norm")
        _refuse(
            self.lns_learn and (self.lns != "norm" or self.gain == "none"),
            "lns_learn needs lns=norm and gains (gain=shared or branch), whose start value it sets",
        )
        for name in ("deepnorm", "admin"):
            _refuse(
                getattr(self, name) and self.post_norm != "both",
                f"{name} scales the stream before post norms: set post_norm=both (and pre_norm=none)",
            )
        _refuse(self.deepnorm and self.admin, "deepnorm and admin both scale the stream: leave one of them out")
        scale, start = self.branch_scale, self.branch_scale_init
        _refuse(
            scale == "none" and start is not None,
            "branch_scale_init needs branch_scale: set branch_scale=layerscale or skipinit",
        )
        _refuse(
            self.fixup and self.norm != "none",
            f"fixup replaces the norms, but norm={self.norm}: set norm=none",
        )
        for name, on in (("branch_scale", scale != "none"), ("sigma_reparam", self.sigma_reparam)):
            _refuse(
                self.fixup and on,
                f"fixup contradicts {name}: it has its own multiplier on the branch, and matrices that start at zero",
            )
        _refuse(
            self.gain == "branch" and not pre,
            f"gain=branch needs a pre norm, whose gains it separates: set pre_norm{fewer}",
        )
        for name, default in (("gain_out", "none"), ("gain_param", "direct")):
            _refuse(
                self.gain == "none" and getattr(self, name) != default,
                f"{name}={getattr(self, name)} contradicts gain=none: choose gain=shared or branch",
            )
        _refuse(
            self.gain_param == "expmagdir" and scale == "layerscale" and start is not None and start <= 0,
            f"gain_param=expmagdir keeps gains positive, but branch_scale_init={start}: choose a positive one",
        )

        vectors = self.norm != "none" or self.qk_norm or self.gain_out != "none" or scale == "layerscale"
        _refuse(
            self.gain_param != "direct" and not vectors,
            f"gain_param={self.gain_param} has no scale vector to act on (norm={self.norm}): leave it out",
        )

    def _pre_normed(self) -> list:
        """The branches that have a pre norm in some block; if any block has it, the last."""
        return [branch for branch in ("attn", "mlp") if "pre" in places(self, self.n_layer, branch)]

    def notes(self) -> list:
        """What is allowed but should be known: one line each, for the start of a run."""
        notes = []
        wanted = ["attn", "mlp"] if self.lns_branches == "both" else [self.lns_branches]
        lns = [branch for branch in wanted if branch in self._pre_normed()]
        if self.lns != "off" and self.residual_init != "plain":
            notes.append(
                f"lns with residual_init={self.residual_init}: the LNS paper removes such scaling of the initial "
                "weights; residual_init=plain is its setting"
            )
        divided = []  # by a norm further on: whose factor has no effect. Not so where a bias stands beside the factor
        if self.lns == "norm" and not self.bias and not self.lns_learn:
            if self.gain_out == "norm":
                divided = lns
            elif "attn" in lns and self.qk_norm and self.mid_norm in ("both", "attn") and self.norm != "dyt":
                divided = ["attn"]
        if divided and divided == lns:
            notes.append("lns has no effect here: norms further on (QK, mid, gain_out=norm) divide its factor out")
        elif divided:
            notes.append("lns has no effect on attention here: QK-norm and the mid norm divide its factor out")
        elif self.lns in ("norm", "input") and lns != wanted:
            notes.append(f"lns={self.lns} acts on the {lns[0]} branch alone: the other has no pre norm")
        if self.lns == "norm" and self.qk_norm and "attn" in lns and not (divided or self.bias or self.lns_learn):
            notes.append("lns acts on attention through v alone: QK-norm divides its factor out of q and k")
        if self.lns == "input" and self.norm in ("rmsnorm", "layernorm"):
            notes.append("lns=input does next to nothing here: the norm divides the factor out again")
        if (self.deepnorm or self.admin) and self.pre_norm != "none":
            notes.append(f"pre_norm={self.pre_norm} beside post norms: DeepNorm and Admin have pre_norm=none")
        for name in ("deepnorm", "fixup"):
            if getattr(self, name) and self.residual_init != "plain":
                notes.append(f"{name} has its own initialisation: residual_init={self.residual_init} is not used")
        size = self.init_std * self.n_embd**0.5
        if self.norm == "dyt" and self.init == "normal" and size < 0.5:
            notes.append(
                f"dyt brings no small signal to size, and init_std·√n_embd = {size:.2f} makes them small; the paper's "
                f"models have 0.6 to 1.8 (std 0.02, 1024 to 8192 wide). init_std={self.n_embd**-0.5:.2g} gives 1 [I]"
            )
        return notes


def _refuse(wrong, message: str) -> None:
    if wrong:
        raise ValueError(message)


# ------------------------------------------------------------------------------------------------- slots and layout


def upcast(x: torch.Tensor) -> torch.Tensor:
    """fp32 for half-precision tensors; fp32 and fp64 stay as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_norm(slot, x):
    x = grouped(upcast(x), slot.groups)
    return ungrouped(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + slot.eps), slot.groups)


def layer_norm(slot, x):
    x = grouped(upcast(x), slot.groups)
    return ungrouped(F.layer_norm(x, x.shape[-1:], eps=slot.eps), slot.groups)


def dyt(slot, x):
    """squash(αx): with gain and bias γ · tanh(αx) + β (DyT)."""
    return SQUASH[slot.squash](slot.alpha * upcast(x))


def grouped(x, groups):
    return x if groups == 1 else x.unflatten(-1, (groups, -1))


def ungrouped(x, groups):
    return x if groups == 1 else x.flatten(-2)


NORMALISE = {"none": lambda slot, x: x, "rmsnorm": rms_norm, "layernorm": layer_norm, "dyt": dyt}
SQUASH = {"tanh": lambda x: tanh(x), "hardtanh": F.hardtanh, "sigmoid": torch.sigmoid, "identity": lambda x: x}


def is_sharded(p) -> bool:
    """Whether p is a DTensor, as FSDP2 makes them. (Its module is not imported here: half a second at every start.)"""
    return hasattr(p, "device_mesh")


@torch.no_grad()
def assign(p, whole):
    """p ← whole, of the same shape. Of a sharded parameter every process keeps its part; no messages."""
    if is_sharded(p):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
    p.copy_(whole)


def local(p):
    """What this process has of p: of a sharded one its rows, which may be none."""
    return p.to_local() if is_sharded(p) else p


def whole(p):
    """All of p; a sharded one is gathered, so that all processes must call this."""
    return p.full_tensor() if is_sharded(p) else p


def _parameter(n: int):
    """n entries, or None for 0. Scalars too have a dimension: FSDP2 cannot shard a tensor without."""
    return nn.Parameter(torch.empty(int(n))) if n else None


class Slot(nn.Module):
    """y = const · (gain · normalise(const_in · x) + bias): a place where a norm may stand, each part optional.

    x: (..., dim). Statistics and result of a norm are at least fp32. The constants are Python floats, so that they
    survive meta-device init and are not sent around by DDP.

    norm      "none", "rmsnorm", "layernorm" (both over `groups` groups of channels), "dyt": squash(αx)
    gain      entries of the gain, 0 = none; `init` is its value at first
    role      of the gain: `gain_in` where a linear map follows, else `gain_out`; `scalar` for a single learned factor
    param     the gain as it is (direct), β·α/rms(α) (magdir), or exp(b)·α/rms(α) (expmagdir); a scalar is direct
    bias      entries of the bias
    fold      const and gain are left to the linear map after or before this slot, which takes them from `folded` and
              multiplies them into its weight: no pass over activations
    """

    def __init__(
        self,
        norm="none",
        *,
        gain=0,
        role="gain_out",
        param="direct",
        init=1.0,
        bias=0,
        fold=False,
        const=1.0,
        const_in=1.0,
        eps=1e-6,
        groups=1,
        squash="tanh",
        alpha=1.0,
        learn_alpha=True,
    ):
        super().__init__()
        self.norm, self.eps, self.groups, self.squash, self.normalise = norm, eps, groups, squash, NORMALISE[norm]
        self.const, self.const_in, self.init_gain, self.init_alpha = const, const_in, init, alpha
        self.param = param if gain and role != "scalar" else "direct"
        self.fold, split = fold and not bias, self.param != "direct"
        self.gain, self.direction = _parameter(0 if split else gain), _parameter(gain if split else 0)
        self.magnitude = _parameter(split)
        self.bias = _parameter(bias)
        self.alpha = _parameter(1) if norm == "dyt" and learn_alpha else alpha
        self.param_roles = {"gain": role, "magnitude": role, "direction": "gain_dir"}
        self.param_roles |= {"bias": "bias", "alpha": "scalar"}

    def forward(self, x):
        x = self.normalise(self, x if self.const_in == 1.0 else self.const_in * x)
        if self.fold:
            return x
        gain = self.gain_vector()
        if gain is not None:
            x = x * gain
        if self.bias is not None:
            x = x + self.bias
        return x if self.const == 1.0 else self.const * x

    def gain_vector(self):
        """The gain as it acts, (dim,) or (1,), or None."""
        if self.direction is None:
            return self.gain
        unit = self.direction * torch.rsqrt(self.direction.square().mean())
        return (self.magnitude.exp() if self.param == "expmagdir" else self.magnitude) * unit

    def folded(self):
        """What this slot leaves to a weight to multiply, const · gain: a vector, a float, or None for nothing."""
        gain = self.gain_vector() if self.fold else None
        if not self.fold or self.const == 1.0:
            return gain
        return self.const if gain is None else self.const * gain

    @torch.no_grad()
    def set_gain(self, value: float):
        """Give every entry of the gain this value."""
        if self.gain is not None:
            self.gain.fill_(value)
        elif self.direction is not None:
            self.direction.fill_(1.0)
            self.magnitude.fill_(math.log(value) if self.param == "expmagdir" else value)

    @torch.no_grad()
    def init(self):
        self.set_gain(self.init_gain)
        if self.bias is not None:
            self.bias.zero_()
        if isinstance(self.alpha, nn.Parameter):
            self.alpha.fill_(self.init_alpha)

    def extra_repr(self):
        return self.norm if self.const == 1.0 else f"{self.const:.4g} · {self.norm}"


class Slots(NamedTuple):
    """The four slots of a residual sub-layer."""

    pre: Slot
    mid: Slot
    post: Slot
    skip: Slot


def norm_slot(config: GPTConfig, role: str = "gain_out", branch: str = "", **changes) -> Slot:
    """A slot of size n_embd with the configured norm; `branch="attn"` gives DyT its α₀ before attention."""
    c = config
    width = min(DYT_ALPHA, key=lambda d: abs(math.log(d / c.n_embd)))  # nearest listed width: our choice [I]
    table = dict(zip(("attn", "other"), DYT_ALPHA[width], strict=True))
    kind = "attn" if branch == "attn" else "other"
    alpha = getattr(c, f"dyt_alpha_{kind}")
    bias = {"layernorm": c.bias, "dyt": c.dyt_bias}.get(c.norm, False)
    gain = c.n_embd if c.norm != "none" and c.gain != "none" else 0
    parts = dict(gain=gain, role=role, param=c.gain_param, bias=c.n_embd * bias, fold=role == "gain_in")
    parts |= dict(eps=c.norm_eps, groups=c.norm_groups, squash=c.dyt_squash, learn_alpha=c.dyt_learn_alpha)
    return Slot(c.norm, **parts | {"alpha": table[kind] if alpha is None else alpha} | changes)


def places(config: GPTConfig, block: int, branch: str) -> set:
    """Which of "pre", "mid", "post" carry a norm in `branch` of block ℓ = `block`, counted from 1."""
    if config.norm == "none":
        return set()
    if block <= config.post_norm_blocks:  # Mix-LN
        return {"post"}
    return {place for place in ("pre", "mid", "post") if getattr(config, f"{place}_norm") in ("both", branch)}


def layout(config: GPTConfig, block: int, branch: str) -> Slots:
    """The four slots of `branch` ("attn" or "mlp") in block ℓ = `block`, counted from 1: the whole block layout."""
    c, d, on = config, config.n_embd, places(config, block, branch)
    factor = {place: lns_factor(c, block, branch) if c.lns == place else 1.0 for place in get_args(LNS)}

    pre = dict(const_in=factor["input"])
    pre["init" if c.lns_learn else "const"] = factor["norm"]
    if c.gain == "branch":  # HG: the matrices after it have the gains
        pre["gain"] = 0

    start = {"none": 1.0, "layerscale": layerscale_init(c.n_layer), "skipinit": c.n_layer**-0.5}[c.branch_scale]
    mid = dict(const=factor["branch"], init=start if c.branch_scale_init is None else c.branch_scale_init)
    if c.branch_scale == "layerscale":  # with a mid norm, its gain
        mid["gain"] = d
    elif c.branch_scale == "skipinit" or c.fixup:  # with a mid norm, in the place of its gain [I]
        mid |= dict(gain=1, role="scalar")
    if c.fixup:
        mid["bias"] = 1

    post = dict(const=factor["residual"])
    if block == c.n_layer and branch == "mlp":  # the head alone follows: the final norm's gain, but here not folded
        post |= dict(role="gain_in", fold=False)

    skip = dict(const=(2 * c.n_layer) ** 0.25 if c.deepnorm else 1.0, gain=d if c.admin else 0)
    return Slots(
        pre=norm_slot(c, "gain_in", branch, **pre) if "pre" in on else Slot(bias=int(c.fixup)),
        mid=norm_slot(c, **mid) if "mid" in on else Slot(param=c.gain_param, **mid),
        post=norm_slot(c, **post) if "post" in on else Slot(const=factor["residual"]),
        skip=Slot(**skip),
    )


def lns_factor(config: GPTConfig, block: int, branch: str) -> float:
    """LNS's 1/ℓ^power in block ℓ = `block`, wherever it stands."""
    return block**-config.lns_power if config.lns_branches in ("both", branch) else 1.0


def layerscale_init(n_layer: int) -> float:
    """LayerScale's λ at first, for 12 to 18, 24 and 36 layers as published by its authors; other depths: [I]."""
    return 0.1 if n_layer <= 18 else 1e-5 if n_layer <= 24 else 1e-6


def init_scale(config: GPTConfig, block: int, part: str) -> float:
    """Factor on the initial std of matrix `part` ("q" … "down") in block ℓ = `block`, from 1."""
    layers, writes = config.n_layer, part in ("o", "down")  # to the residual stream
    if config.deepnorm:  # (8L)^-¼ on v, o and the FFN, of which SwiGLU's gate too [I]
        return 1.0 if part in ("q", "k") else (8 * layers) ** -0.25
    if config.fixup:  # M^(-1/(2m-2)) for M = 2L branches of m matrices, the last zero. m = 2 for v, plain q and k: [I]
        m = 3 if part in ("gate", "up") and config.mlp in ("swiglu", "relu2") else 2  # products count twice [I]
        return 0.0 if writes else 1.0 if part in ("q", "k") else (2 * layers) ** (-1 / (2 * m - 2))
    if not writes:
        return 1.0
    return {"gpt2": (2 * layers) ** -0.5, "plain": 1.0, "depth": (2 * block) ** -0.5}[config.residual_init]


# ---------------------------------------------------------------------------------------------------------- modules


def fold(weight, bias=None, dtype=None, columns=None, rows=None) -> tuple:
    """Weight and bias of x ↦ rows · (W (columns · x) + b), in `dtype`: factors and cast are one pass over them."""
    dtype = dtype or weight.dtype
    weight = weight if columns is None else weight * columns
    if rows is not None:
        weight, bias = weight * rows[:, None], None if bias is None else bias * rows
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def linear(x, weight, bias=None, dtype=None, columns=None, rows=None):
    """rows · (W (columns · x) + b) in `dtype` (None: the weight's own); columns (n_in,), rows (n_out,) or floats.

    The factors are multiplied into the weight; but where one token at a time comes in, into the activations, which are
    then the smaller."""
    dtype = dtype or weight.dtype
    if x.shape[-2] > 1:
        return F.linear(x.to(dtype), *fold(weight, bias, dtype, columns, rows))
    y = F.linear((x if columns is None else x * columns).to(dtype), *fold(weight, bias, dtype))
    return y if rows is None else (y * rows).to(dtype)


class Linear(nn.Linear):
    """out( W pre(x) + b ), computed in `compute_dtype` (None: the weight's own), while the weight stays in fp32.

    The casts are part of the graph: torch.compile fuses them, which costs less than autocast and loses no accuracy.
    Gains of both sides, and what a norm before left to fold (`scale`), are multiplied into the weight in the same pass.
    """

    compute_dtype = None

    def __init__(self, n_in, n_out, role, bias=False, init_scale=1.0, pre=None, out=None):
        super().__init__(n_in, n_out, bias)
        self.init_scale, self.param_roles = init_scale, {"weight": role, "bias": "bias"}
        self.pre, self.out = pre or Slot(), out or Slot()

    def reset_parameters(self):
        pass  # GPT.init_weights sets every parameter

    def effective_weight(self):
        return self.weight

    def factors(self, scale=None) -> tuple:
        """What `fold` and `linear` take: weight, bias, dtype, columns, rows."""
        columns = self.pre.folded()
        if columns is None:
            columns = scale
        elif scale is not None:
            columns = columns * scale
        return self.effective_weight(), self.bias, self.compute_dtype, columns, self.out.folded()

    def forward(self, x, scale=None):
        y = linear(self.pre(x), *self.factors(scale))
        return self.out(y).to(y.dtype)

    def init(self, std: float, generator: torch.Generator):
        draw(self.weight, std * self.init_scale, generator)
        if self.bias is not None:
            self.bias.zero_()


def draw(weight, std: float, generator: torch.Generator) -> None:
    """Fill `weight`, unless it has no storage, from N(0, std²), drawn on the CPU and whole: the same everywhere."""
    if not weight.is_meta:
        assign(weight, torch.empty(weight.shape, device="cpu").normal_(0, std, generator=generator))


def together(matrices, x, scale=None) -> list:
    """[m(x, scale) for m in matrices] in one product: x (B, T, n_in) is read once, and its gradient is one sum.

    For matrices whose `pre` leaves x as it is (a gain to fold, or nothing)."""
    if x.shape[-2] == 1:  # one token: the gains go to x, and each matrix may have its own
        return [m(x, scale) for m in matrices]
    weights, biases = zip(*(fold(*m.factors(scale)) for m in matrices), strict=True)
    bias = None if biases[0] is None else torch.cat(biases)
    y = F.linear(x.to(weights[0].dtype), torch.cat(weights), bias)
    parts = y.split([len(w) for w in weights], dim=-1)
    return [m.out(part).to(part.dtype) for m, part in zip(matrices, parts, strict=True)]


class SigmaReparam(Linear):
    """A matrix γ W/σ(W), with σ = uᵀWv, where `power_iteration` leads u and v to the first singular vectors."""

    def __init__(self, n_in, n_out, *args, **kwargs):
        super().__init__(n_in, n_out, *args, **kwargs)
        self.sigma = nn.Parameter(torch.empty(1))
        self.param_roles["sigma"] = "scalar"
        self.register_buffer("u", torch.empty(n_out))
        self.register_buffer("v", torch.empty(n_in))

    def effective_weight(self):
        return self.weight * (self.sigma / torch.dot(self.u, self.weight @ self.v))

    @torch.no_grad()
    def power_iteration(self, n: int = 1):
        """Move u (n_out,) and v (n_in,) towards the singular vectors of the largest singular value of W."""
        weight = whole(self.weight)
        for _ in range(n):
            self.v.copy_(F.normalize(self.u @ weight, dim=0))
            self.u.copy_(F.normalize(weight @ self.v, dim=0))

    def init(self, std: float, generator: torch.Generator):
        super().init(std, generator)
        if not self.weight.is_meta:  # γ = σ(W) at first, so that the matrix is W, as published
            self.u.fill_(1.0)  # not drawn: the weights of a seed are the same with and without σReparam
            self.power_iteration(SIGMA_INIT_ITERATIONS)
            assign(self.sigma, torch.dot(self.u, whole(self.weight) @ self.v)[None])


def projection(config: GPTConfig, block: int, part: str) -> Linear:
    """Matrix `part` ("q", "k", "v", "o", "gate", "up" or "down") of block ℓ = `block`: its shape, role, slots, init."""
    c, d, kv, hidden = config, config.n_embd, config.head_dim * (config.n_kv_head or config.n_head), config.hidden
    n_in, n_out, role = {
        "q": (d, d, "qk"), "k": (d, kv, "qk"), "v": (d, kv, "vo"), "o": (d, d, "vo"),
        "gate": (d, hidden, "ffn"), "up": (d, hidden, "ffn"), "down": (hidden, d, "ffn"),
    }[part]  # fmt: skip
    writes, branch = part in ("o", "down"), "attn" if part in "qkvo" else "mlp"
    pre, out = {}, {}
    if not writes:  # HG, DP, DNP
        if c.gain == "branch" and "pre" in places(c, block, branch):
            pre = dict(gain=n_in, role="gain_in", param=c.gain_param, fold=True)
            if c.lns_learn:
                pre["init"] = lns_factor(c, block, branch)
        if c.gain_out != "none":
            out = dict(gain=n_out, param=c.gain_param, fold=c.gain_out == "scale")
        if c.gain_out == "norm":  # per head for q and k: QK-norm with a gain for each channel; full for the others [I]
            out |= dict(norm="rmsnorm", eps=c.norm_eps, groups=n_out // c.head_dim if part in ("q", "k") else 1)
    if c.fixup and writes:
        pre = dict(bias=1)
    if c.fixup and part == ("gate" if c.mlp == "swiglu" else "up"):  # before the activation
        out["bias"] = 1
    matrix = SigmaReparam if c.sigma_reparam else Linear
    return matrix(n_in, n_out, role, c.bias, init_scale(c, block, part), Slot(**pre), Slot(**out))


class Embedding(nn.Embedding):
    def __init__(self, n, dim, role):
        super().__init__(n, dim)
        self.param_roles = {"weight": role}

    def reset_parameters(self):
        pass  # GPT.init_weights sets every parameter

    def init(self, std: float, generator: torch.Generator):
        draw(self.weight, std, generator)


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


class KVCache:
    """Keys and values of one layer seen so far, each (B, H_kv, T, head_dim)."""

    def __init__(self):
        self.k = self.v = None

    def __len__(self):
        return 0 if self.k is None else self.k.shape[2]

    def extend(self, k, v):
        self.k, self.v = (k, v) if self.k is None else (torch.cat((self.k, k), 2), torch.cat((self.v, v), 2))
        return self.k, self.v


class Attention(nn.Module):
    """Causal multi-head or grouped-query self-attention: (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPTConfig, block: int):
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.dropout
        self.gqa = config.n_kv_head not in (0, config.n_head)
        self.q, self.k, self.v, self.o = (projection(config, block, part) for part in "qkvo")
        self.q_norm, self.k_norm = qk_slot(config), qk_slot(config)

    def forward(self, u, scale=None, rope=None, cache=None):
        B, T, C = u.shape
        q, k, v = together((self.q, self.k, self.v), u, scale)
        q, k, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in (q, k, v))  # (B, H, T, hd)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        dtype = self.o.compute_dtype or self.o.weight.dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)  # the norms and the rotation are fp32
        if cache is not None:
            k, v = cache.extend(k, v)
        if T < 512 and q.device.type == "cpu":  # the CPU's half-precision attention is many times slower at short T
            q, k, v = upcast(q), upcast(k), upcast(v)
        p = self.dropout if self.training else 0.0
        # one new token sees the whole cache; a full sequence is causal
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=T > 1, enable_gqa=self.gqa)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


def qk_slot(config: GPTConfig) -> Slot:
    """QK-norm: RMSNorm over the channels of a head, one gain for all heads (DNT eq. 10); else nothing."""
    if not config.qk_norm:
        return Slot()
    gain = config.head_dim if config.gain != "none" else 0
    return Slot("rmsnorm", gain=gain, param=config.gain_param, eps=config.norm_eps)


def tanh(x):
    """tanh x; compiled, 2σ(2x) − 1: the same to 2e-7 (absolute, x in fp32), and far quicker on a CPU."""
    return 2 * torch.sigmoid(2 * x) - 1 if torch.compiler.is_compiling() else torch.tanh(x)


def gelu(x):
    """GPT-2's GELU, ½x (1 + tanh z) with z = √(2/π) (x + 0.044715 x³); compiled, x σ(2z), which is the same."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    y = upcast(x)
    return (y * torch.sigmoid((8 / math.pi) ** 0.5 * (y + 0.044715 * y**3))).to(x.dtype)


ACTIVATIONS = {
    "gelu": gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """W2 act(W1 u), or with swiglu W2 (silu(Wg u) ⊙ W1 u): (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPTConfig, block: int):
        super().__init__()
        self.gate = projection(config, block, "gate") if config.mlp == "swiglu" else None
        self.up, self.down = projection(config, block, "up"), projection(config, block, "down")
        self.act = ACTIVATIONS.get(config.mlp)

    def forward(self, u, scale=None):
        if self.gate is None:
            return self.down(self.act(self.up(u, scale)))
        gate, up = together((self.gate, self.up), u, scale)
        return self.down(F.silu(gate) * up)


class Residual(nn.Module):
    """x ← post( skip(x) + mid( f( pre(x) ) ) ). The stream x (B, T, C) stays in fp32 whatever f computes in."""

    def __init__(self, f: nn.Module, slots: Slots, dropout: float = 0.0):
        super().__init__()
        self.f, self.dropout = f, nn.Dropout(dropout)
        self.pre, self.mid, self.post, self.skip = slots

    def forward(self, x, *args):
        u, scale = self.pre(x), self.pre.folded()  # a pre norm's gain is multiplied into the matrices of f
        return self.post(self.skip(x) + self.dropout(self.mid(self.f(u, scale, *args))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig, block: int):
        super().__init__()
        self.attn = Residual(Attention(config, block), layout(config, block, "attn"), config.dropout)
        self.mlp = Residual(MLP(config, block), layout(config, block, "mlp"), config.dropout)

    def forward(self, x, rope=None, cache=None):
        x = self.attn(x, rope, cache)
        x = self.mlp(x)
        return x


# -------------------------------------------------------------------------------------------------------------- GPT


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy of logits x Wᵀ, with its gradients made on the way: a chunk of tokens at a time becomes
    logits, their gradient (softmax − 1 at the target), and that gradient's products with W and x. Logits exist for one
    chunk, in the dtype of the product; no chunk is computed twice.

    x (N, C), weight (V, C), targets (N,), −1 = ignored → loss (), in nats, fp32 at least. The first `vocab_size` rows
    of the weight count. The gradients are constants to autograd, so there is no second derivative: asking for one
    raises RuntimeError.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, vocab_size, rows, training):
        w, total, dx = weight.to(dtype), x.new_zeros(()), []
        dw = torch.zeros_like(weight) if training else None
        for x_part, target in zip(x.to(dtype).split(rows), targets.split(rows), strict=True):
            counts, index = (target != -1)[:, None], target.clamp(min=0)[:, None]
            logits = upcast(x_part @ w.T)  # (n, V); changed in place from here on, so that there is one of them
            logits[:, vocab_size:].fill_(-math.inf)
            log_sum = logits.logsumexp(-1, keepdim=True)
            total = total + ((log_sum - logits.gather(-1, index)) * counts).sum()
            if training:
                grad = logits.sub_(log_sum).exp_()
                grad = grad.add_(torch.arange(len(w), device=x.device) == index, alpha=-1).mul_(counts).to(dtype)
                dx.append(grad @ w)
                if dtype == torch.float16:  # a sum over tokens, which no loss scale keeps from overflow
                    dw = dw + (grad.T @ (x_part * 2**-8)).to(dw.dtype) * 2**8
                else:
                    dw = dw + grad.T @ x_part
                del grad
            del logits  # before the next chunk's are made
        if training:
            ctx.save_for_backward(torch.cat(dx), dw)
        return total

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError("this loss has no second derivative: take that of F.cross_entropy over model(idx)[0]")
        dx, dw = ctx.saved_tensors
        return upcast(dx) * grad, dw * grad, None, None, None, None, None


def linear_cross_entropy(x, weight, targets, dtype, vocab_size: int, chunks: int = 0) -> torch.Tensor:
    """Mean cross-entropy in nats of logits x Wᵀ, computed in `dtype`, over the targets that are not −1; 0 if none is.

    x (B, T, C), weight (V, C), targets (B, T); `chunks`: in how many the tokens are taken, 0 = so that the logits of
    one take about LOGITS_BYTES at most."""
    n = targets.numel()
    rows = -(-n // (chunks or -(-n * len(weight) * dtype.itemsize // LOGITS_BYTES)))
    rows = rows if rows < 128 else -(-rows // 128) * 128  # matrix units like whole tiles
    args = x.flatten(0, 1), weight, targets.flatten(), dtype, vocab_size, rows, torch.is_grad_enabled()
    return LinearCrossEntropy.apply(*args) / (targets != -1).sum().clamp(min=1)


class GPT(nn.Module):
    """The language model. `model(idx)` → (logits, None); `model(idx, targets)` → (None, loss)."""

    compute_dtype = None
    checkpointing = False  # keep only the stream between blocks for the backward pass, which computes the rest again
    loss_chunks = 0  # in which the loss takes its tokens, to bound its memory; 0 = as many as LOGITS_BYTES asks for

    def __init__(self, config: GPTConfig, seed: int = 1337):
        """Raises ValueError for a config whose flags are wrong or contradict each other."""
        super().__init__()
        config.check()
        self.config = config
        d, vocab, last = config.n_embd, config.padded_vocab_size, "post" in places(config, config.n_layer, "mlp")
        self.wte = Embedding(vocab, d, "emb")
        self.wpe = Embedding(config.block_size, d, "pos") if config.pos == "learned" else None
        self.embed_scale = Slot(gain=1, role="scalar", init=d**0.5) if config.embed_scale else Slot()
        self.input_norm = norm_slot(config) if config.input_norm else Slot()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, block) for block in range(1, config.n_layer + 1))
        self.final_norm = Slot() if last else norm_slot(config, "gain_in")  # a last post norm already is one
        # Fixup starts the classifier at zero; a tied one is the embedding and cannot [I]
        self.head = None if config.tie_weights else Linear(d, vocab, "head", init_scale=0.0 if config.fixup else 1.0)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 1337) -> None:
        """Set every parameter. Drawn on the CPU from a generator of its own, so that a seed means the same weights on
        every device and whatever else draws random numbers."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Slot):
                module.init()
            elif isinstance(module, (Linear, Embedding)):
                std = self.config.init_std
                if isinstance(module, Linear) and module is not self.head and self.config.init == "xavier":
                    std = (2 / sum(module.weight.shape)) ** 0.5
                module.init(std, generator)

    def power_iteration(self) -> None:
        """One step of it in every matrix under σReparam, to be called after every optimizer step; else nothing."""
        for module in self.modules() if self.config.sigma_reparam else ():
            if isinstance(module, SigmaReparam):
                module.power_iteration()

    @torch.no_grad()
    def profile_admin(self, idx) -> None:
        """Admin: give each sub-layer's ω its start value, from one forward of idx (B, T). Nothing without `admin`.

        ω₁ = 1 and ωᵢ₊₁² = Var(ωᵢ x) + Var(fᵢ), over all elements, the sub-layers in their order. Each ωᵢ holds before
        sub-layer i is profiled. Meant for fresh weights."""
        if not self.config.admin:
            return
        state = {"omega": 1.0}

        def before(skip, args):
            skip.set_gain(state["omega"])

        def stream(skip, args, y):
            state["stream"] = y.var(correction=0).item()

        def branch(mid, args, y):
            state["omega"] = (state["stream"] + upcast(y).var(correction=0).item()) ** 0.5

        hooks, training = [], [module for module in self.modules() if module.training]
        for residual in (r for block in self.blocks for r in (block.attn, block.mlp)):
            hooks.append(residual.skip.register_forward_pre_hook(before))
            hooks.append(residual.skip.register_forward_hook(stream))
            hooks.append(residual.mid.register_forward_hook(branch))
        try:
            self.eval().stream(idx)
        finally:
            for module in training:
                module.training = True
            for hook in hooks:
                hook.remove()

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids, T ≤ block_size → (logits (B, T, vocab_size), None).

        With targets (B, T), −1 = ignored → (None, loss): cross-entropy in nats, mean over the targets that count, 0 if
        none does. The logits end at vocab_size: padding entries cannot be sampled and take no part in the loss.
        `cache` (one KVCache a block): idx continues the cached sequence; allowed are an empty cache or T = 1.
        """
        x = self.stream(idx, cache)
        return (self.logits(x), None) if targets is None else (None, self.loss(x, targets))

    def logits(self, x):
        """x (B, T, C), the stream after the last block → (B, T, vocab_size), fp32."""
        weight, scale = (self.head or self.wte).weight, self.final_norm.folded()
        logits = linear(self.final_norm(x), weight, dtype=self.compute_dtype, columns=scale)
        return upcast(logits[..., : self.config.vocab_size])

    def loss(self, x, targets):
        """The mean cross-entropy of targets (B, T), −1 = ignored, under `logits(x)`, which it does not keep."""
        weight, scale = (self.head or self.wte).weight, self.final_norm.folded()
        weight, dtype = weight if scale is None else weight * scale, self.compute_dtype or weight.dtype
        x, vocab_size = self.final_norm(x), self.config.vocab_size
        return linear_cross_entropy(x, weight, targets, dtype, vocab_size, self.loss_chunks)

    def stream(self, idx, cache=None):
        """The residual stream after the last block, before the final norm: idx (B, T) → (B, T, C), fp32."""
        T, start = idx.shape[1], len(cache[0]) if cache else 0
        if start + T > self.config.block_size:
            raise ValueError(f"a sequence of {start + T} tokens does not fit block_size={self.config.block_size}")
        if start and T > 1:
            raise ValueError(f"{T} tokens after a cache of {start}: continue a cache one token at a time")
        positions = torch.arange(start, start + T, device=idx.device)
        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        c = self.config
        rope = rotary(positions, c.head_dim, c.rope_theta) if c.pos == "rope" else None
        x = self.dropout(self.input_norm(self.embed_scale(x)))
        for i, block in enumerate(self.blocks):
            if self.checkpointing and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope, cache[i] if cache else None)
        return x

    def set_compute_dtype(self, dtype: torch.dtype | None) -> "GPT":
        """Multiply matrices in `dtype` (None: the parameters' own); parameters and residual stream are untouched."""
        for module in self.modules():
            if hasattr(module, "compute_dtype"):
                module.compute_dtype = dtype
        return self

    def roles(self) -> dict:
        """{parameter name: role}, each parameter exactly once, in the order of `named_parameters`."""
        roles = {}
        for full_name, (module, name) in self._owners().items():
            role = getattr(module, "param_roles", {}).get(name)
            if role not in ROLES:
                raise ValueError(
                    f"parameter {full_name} has role {role}: give its module param_roles = {{'{name}': role}}"
                )
            roles[full_name] = role
        return roles

    def module_kinds(self) -> dict:
        """{parameter name: kind of module it is in}: the role of the module's matrix (emb, pos, head, qk, vo, ffn), and
        "norm" where there is none. So a bias is with its matrix, and so is σReparam's γ; the rest is with the norms."""
        return {
            full_name: getattr(module, "param_roles", {}).get("weight", "norm")
            for full_name, (module, _) in self._owners().items()
        }

    def _owners(self) -> dict:
        """{parameter name: (module, its name there)}."""
        owner = {id(p): (m, name) for m in self.modules() for name, p in m.named_parameters(recurse=False)}
        return {full_name: owner[id(p)] for full_name, p in self.named_parameters()}

    def num_params(self, positions: bool = True) -> int:
        """Number of parameters; with `positions=False` without the learned position table, as GPT-2's are counted."""
        n = sum(p.numel() for p in self.parameters())
        return n if positions or self.wpe is None else n - self.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Training FLOPs per token: 6 per matrix parameter (head included, embedding look-up not), plus 12·L·d·T for
        attention (PaLM, app. B: no credit for causality)."""
        c, roles = self.config, self.roles()
        matrices = sum(p.numel() for n, p in self.named_parameters() if roles[n] in ("qk", "vo", "ffn"))
        return 6 * (matrices + c.padded_vocab_size * c.n_embd) + 12 * c.n_layer * c.n_embd * c.block_size

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, stop=None, generator=None):
        """Continue each row of idx (B, T ≥ 1): (B, T + new), new ≤ max_new_tokens.

        temperature 0 takes the most likely token. top_k keeps the k most likely, top_p the fewest that reach
        probability p. A row that has produced `stop` repeats it; all rows stopped ends early. A sequence that outgrows
        block_size goes on from its last block_size/2 tokens. In training mode dropout is on: call `eval()` first.
        """
        limit, cache, new = self.config.block_size, None, idx
        done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
        for _ in range(max_new_tokens):
            if cache is None or len(cache[0]) + new.shape[1] > limit:
                cache = [KVCache() for _ in self.blocks]
                new = idx if idx.shape[1] <= limit else idx[:, -max(1, limit // 2) :]
            logits = self(new, cache=cache)[0][:, -1]  # (B, V)
            new = sample_token(logits, temperature, top_k, top_p, generator)
            if stop is not None:
                new = new.masked_fill(done[:, None], stop)
                done |= new[:, 0] == stop
            idx = torch.cat((idx, new), dim=1)
            if stop is not None and done.all():
                break
        return idx

    @classmethod
    def empty(cls, config: GPTConfig) -> "GPT":
        """A model without storage, on the meta device: to count, to shard, or to move with `to_empty` and then fill."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def from_checkpoint(cls, checkpoint: dict, **overrides) -> "GPT":
        """The model of a checkpoint, with its weights, on the CPU; `overrides` and ValueError: see `shaped_like`."""
        return cls.shaped_like(checkpoint, **overrides).to_empty(device="cpu").load_weights(checkpoint["model"])

    @classmethod
    def shaped_like(cls, checkpoint: dict, **overrides) -> "GPT":
        """The model of a checkpoint, `empty`; `overrides`: fields that change no shape (dropout).

        Raises ValueError, naming the first field or tensor, where architecture and weights do not fit this code."""
        values, weights = {**checkpoint["model_config"], **overrides}, checkpoint["model"]
        unknown = values.keys() - {f.name for f in fields(GPTConfig)}
        if unknown:
            raise ValueError(f"the checkpoint's model_config has {sorted(map(str, unknown))}, unknown to this version")
        config = GPTConfig(**values)
        config.check()
        fits = "the checkpoint's weights do not fit its model_config"
        if config.n_layer > len(weights):  # before so many are built
            raise ValueError(f"{fits}: {config.n_layer} blocks, but {len(weights)} tensors")
        model = cls.empty(config)
        wanted = model.state_dict()
        for name in [*wanted, *weights]:
            a, b = (d[name].shape if torch.is_tensor(d.get(name)) else "absent" for d in (wanted, weights))
            if a != b:
                raise ValueError(f"{fits}: {name} is {b}, not {a}")
        return model

    def load_weights(self, weights: dict) -> "GPT":
        """Copy whole tensors, as in a state dict, into a model that may be sharded."""
        for name, t in self.state_dict().items():
            assign(t, weights[name])
        return self

    @classmethod
    def from_pretrained(cls, name: str, dropout: float = 0.0) -> "GPT":
        """OpenAI's GPT-2 (`gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`, or a local folder) through `transformers`.

        Raises ValueError where transformers or the weights are not to be had, or are of another kind than GPT-2's.
        """
        try:
            from transformers import GPT2LMHeadModel

            hf = GPT2LMHeadModel.from_pretrained(name)
        except ImportError:
            raise ValueError(f"init_from={name} needs transformers: pip install transformers") from None
        except Exception as e:
            raise ValueError(
                f"{name} could not be fetched ({type(e).__name__}): check the name and the network"
            ) from None
        h = hf.config
        usual = dict(activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
        usual |= dict(tie_word_embeddings=True)
        unusual = [key for key, value in usual.items() if getattr(h, key) != value]
        if unusual:
            raise ValueError(f"{name} is a variant of GPT-2 that this model has no flags for: {', '.join(unusual)}")
        sizes = dict(n_layer=h.n_layer, n_head=h.n_head, n_embd=h.n_embd, block_size=h.n_positions, n_ff=h.n_inner or 0)
        parts = dict(vocab_size=h.vocab_size, norm="layernorm", norm_eps=h.layer_norm_epsilon, bias=True)
        model = cls(GPTConfig(**sizes, **parts, dropout=dropout))
        model.load_gpt2(hf.state_dict())
        return model

    @torch.no_grad()
    def load_gpt2(self, weights: dict) -> None:
        """Copy the state dict of a `transformers` GPT2LMHeadModel of the same shape."""
        theirs = {name.removeprefix("transformer."): w.T if w.ndim == 2 else w for name, w in weights.items()}
        names = {"attn.pre": "ln_1", "attn.f.o": "attn.c_proj", "mlp.pre": "ln_2"}
        names |= {"mlp.f.up": "mlp.c_fc", "mlp.f.down": "mlp.c_proj"}
        source = {"final_norm": "ln_f"}
        for i in range(self.config.n_layer):
            source |= {f"blocks.{i}.{a}": f"h.{i}.{b}" for a, b in names.items()}
            for j, part in enumerate("qkv"):  # one matrix there, three here
                source[f"blocks.{i}.attn.f.{part}"] = f"h.{i}.qkv{j}"
                for kind in ("weight", "bias"):
                    theirs[f"h.{i}.qkv{j}.{kind}"] = theirs[f"h.{i}.attn.c_attn.{kind}"].chunk(3)[j]
        for ours, name in source.items():  # matrices are transposed above: theirs are (in, out)
            module = self.get_submodule(ours)
            (module.gain if isinstance(module, Slot) else module.weight).copy_(theirs[f"{name}.weight"])
            module.bias.copy_(theirs[f"{name}.bias"])
        for name in ("wte", "wpe"):
            table = theirs[f"{name}.weight"].T
            self.get_submodule(name).weight[: len(table)].copy_(table)  # the rows after them are padding


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Draw one token a row: logits (B, V) → (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ordered, order = probs.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond[:, 0] = False  # the first token always stays
        ordered[beyond] = 0
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return torch.multinomial(probs, 1, generator=generator)


if __name__ == "__main__":
    from summary import main

    sys.exit(main())
