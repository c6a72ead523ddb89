"""A GPT whose block layout (Pre/Mid/Post/Input/QK norm, DyT) comes from flags.

Every residual sub-layer, attention or FFN, of every scheme is one equation,

    x ← post( skip(x) + mid( f( pre(x) ) ) )

whose four slots are `Slot`s: y = const · gain · normalise(x), each part optional. `layout` reads the flags and fills
the slots; `Residual` is the only code that touches the residual stream. A new scheme is a change in `layout`.

Papers cited: DNT (arXiv 2507.17501), DyT (arXiv 2503.10622).
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB_MULTIPLE = 64  # the vocabulary is padded to this multiple: 50257 → 50304, faster matmuls

# Parameter roles (`GPT.roles`): optimizers, weight decay and diagnostics go by these, never by parameter names.
ROLES = ("emb", "pos", "head", "qk", "vo", "ffn", "gain_in", "gain_out", "scalar", "bias")

# DyT α₀ by width, for LLMs: (the norm before attention; the norm before the FFN and the final norm). Other slots take
# the second value, and other widths that of the nearest in the table: our choices [I].
DYT_ALPHA = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}


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
    # --- block layout: x ← post( skip(x) + mid( f( pre(x) ) ) ) ---
    norm: Literal["rmsnorm", "layernorm", "dyt", "none"] = "rmsnorm"  # function in every norm slot and the final norm
    norm_eps: float = 1e-6  # inside the root of RMSNorm and LayerNorm
    pre_norm: Literal["both", "attn", "mlp", "none"] = "both"  # branches with a norm on their input
    mid_norm: Literal["none", "both", "attn", "mlp"] = "none"  # branches with a norm on their output, before the sum
    post_norm: Literal["none", "both", "attn", "mlp"] = "none"  # branches with a norm on the residual sum (Post-LN)
    input_norm: bool = False  # norm on the embedding sum (DNT)
    qk_norm: bool = False  # RMSNorm on each head of q and k, before RoPE; gains of size head_dim (DNT eq. 10)
    dyt_alpha_attn: float | None = None  # DyT α₀ before attention; None = the paper's for the nearest width
    dyt_alpha_other: float | None = None  # DyT α₀ everywhere else; None = the paper's for the nearest width
    dyt_bias: bool = False  # DyT's β; the paper's LLaMA code has none, its vision models do
    # --- initialisation ---
    init: Literal["normal", "xavier"] = (
        "normal"  # of the matrices: N(0, init_std), or Xavier normal; embeddings: normal
    )
    init_std: float = 0.02  # standard deviation of init=normal, and of the embeddings
    residual_init: Literal["gpt2", "plain", "depth"] = "gpt2"  # branch outputs times 1/√(2L), 1, or 1/√(2ℓ)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

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
        sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
        small = [f"{name}={getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        _refuse(small, f"{', '.join(small)}: must be at least 1")
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
        placed = self.mid_norm != "none" or self.post_norm != "none" or self.input_norm
        _refuse(
            self.norm == "none" and placed,
            "norm=none contradicts mid_norm, post_norm and input_norm: set those to none/False, or choose a norm",
        )
        alphas = ("dyt_alpha_attn", "dyt_alpha_other")
        dyt = [name for name in alphas if getattr(self, name) is not None] + ["dyt_bias"] * self.dyt_bias
        _refuse(self.norm != "dyt" and dyt, f"{', '.join(dyt)}: needs norm=dyt, but norm={self.norm}")
        for name in alphas:
            _refuse(getattr(self, name) == 0, f"{name}=0 would make the slot constant: choose another α₀")


def _refuse(wrong, message: str) -> None:
    if wrong:
        raise ValueError(message)


# ------------------------------------------------------------------------------------------------- slots and layout


def upcast(x: torch.Tensor) -> torch.Tensor:
    """fp32 for half-precision tensors; fp32 and fp64 stay as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Slot(nn.Module):
    """y = const · (gain · normalise(x) + bias): one place of the network where a norm may stand, each part optional.

    x: (..., dim). Statistics and result are at least fp32. `role` is `gain_in` where a linear map follows, else
    `gain_out`. The constant is a Python float, so that it survives meta-device init and is not sent around by DDP.
    """

    def __init__(self, dim, norm="none", role="gain_out", eps=1e-6, bias=False, alpha=None, const=1.0):
        super().__init__()
        self.norm, self.eps, self.const = norm, eps, const
        self.gain = None if norm == "none" else nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        # shape (1,): FSDP2 cannot shard a tensor without dimensions
        self.alpha, self.alpha_init = (nn.Parameter(torch.empty(1)) if norm == "dyt" else None), alpha
        self.param_roles = {"gain": role, "bias": "bias", "alpha": "scalar"}

    def forward(self, x):
        if self.norm == "rmsnorm":
            x = upcast(x)
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        elif self.norm == "layernorm":
            x = F.layer_norm(upcast(x), x.shape[-1:], eps=self.eps)
        elif self.norm == "dyt":  # γ · tanh(αx) + β (DyT)
            x = torch.tanh(self.alpha * x)
        if self.gain is not None:
            x = x * self.gain
        if self.bias is not None:
            x = x + self.bias
        return x if self.const == 1.0 else self.const * x

    @torch.no_grad()
    def init(self):
        for p, value in ((self.gain, 1.0), (self.bias, 0.0), (self.alpha, self.alpha_init)):
            if p is not None:
                p.fill_(value)

    def extra_repr(self):
        return self.norm if self.const == 1.0 else f"{self.const:.4g} · {self.norm}"


class Slots(NamedTuple):
    """The four slots of a residual sub-layer."""

    pre: Slot
    mid: Slot
    post: Slot
    skip: Slot


def norm_slot(config: GPTConfig, role: str, branch: str = "") -> Slot:
    """A slot of size n_embd with the configured norm; `branch="attn"` gives DyT its α₀ before attention."""
    width = min(DYT_ALPHA, key=lambda d: abs(math.log(d / config.n_embd)))  # nearest listed width: our choice [I]
    table = dict(zip(("attn", "other"), DYT_ALPHA[width], strict=True))
    kind = "attn" if branch == "attn" else "other"
    alpha = getattr(config, f"dyt_alpha_{kind}")
    bias = {"layernorm": config.bias, "dyt": config.dyt_bias}.get(config.norm, False)
    return Slot(config.n_embd, config.norm, role, config.norm_eps, bias, table[kind] if alpha is None else alpha)


def layout(config: GPTConfig, block: int, branch: str) -> Slots:
    """The four slots of `branch` ("attn" or "mlp") in block ℓ = `block`, counted from 1: the whole block layout."""
    on = {place: getattr(config, f"{place}_norm") in ("both", branch) for place in ("pre", "mid", "post")}
    return Slots(
        pre=norm_slot(config, "gain_in", branch) if on["pre"] else Slot(config.n_embd),
        mid=norm_slot(config, "gain_out") if on["mid"] else Slot(config.n_embd),
        post=norm_slot(config, "gain_out") if on["post"] else Slot(config.n_embd),
        skip=Slot(config.n_embd),
    )


def residual_init_scale(config: GPTConfig, block: int) -> float:
    """Factor on the initial std of the matrices that write to the residual stream in block ℓ = `block`, from 1."""
    return {"gpt2": (2 * config.n_layer) ** -0.5, "plain": 1.0, "depth": (2 * block) ** -0.5}[config.residual_init]


# ---------------------------------------------------------------------------------------------------------- modules


class Linear(nn.Linear):
    """x Wᵀ + b computed in `compute_dtype` (None: the weight's own), while the weight stays in fp32.

    The casts are part of the graph: torch.compile fuses them, which costs less than autocast and loses no accuracy.
    """

    compute_dtype = None

    def __init__(self, n_in, n_out, role, bias=False, init_scale=1.0):
        super().__init__(n_in, n_out, bias)
        self.init_scale, self.param_roles = init_scale, {"weight": role, "bias": "bias"}

    def reset_parameters(self):
        pass  # GPT.init_weights sets every parameter

    def forward(self, x):
        return linear(x, self.weight, self.bias, self.compute_dtype)


def linear(x, weight, bias=None, dtype=None):
    dtype = dtype or weight.dtype
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class Embedding(nn.Embedding):
    def __init__(self, n, dim, role):
        super().__init__(n, dim)
        self.init_scale, self.param_roles = 1.0, {"weight": role}

    def reset_parameters(self):
        pass  # GPT.init_weights sets every parameter


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
        d, kv = config.n_embd, config.head_dim * (config.n_kv_head or config.n_head)
        self.head_dim, self.gqa, self.dropout = config.head_dim, kv != d, config.dropout
        self.q = Linear(d, d, "qk", config.bias)
        self.k = Linear(d, kv, "qk", config.bias)
        self.v = Linear(d, kv, "vo", config.bias)
        self.o = Linear(d, d, "vo", config.bias, residual_init_scale(config, block))
        qk_norm = "rmsnorm" if config.qk_norm else "none"
        self.q_norm = Slot(config.head_dim, qk_norm, "gain_out", config.norm_eps)
        self.k_norm = Slot(config.head_dim, qk_norm, "gain_out", config.norm_eps)

    def forward(self, u, rope=None, cache=None):
        B, T, C = u.shape
        q, k, v = (
            w(u).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.q, self.k, self.v)
        )  # (B, H, T, hd)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k = q.to(v.dtype), k.to(v.dtype)  # the norms and the rotation are fp32
        if cache is not None:
            k, v = cache.extend(k, v)
        if T < 512 and q.device.type == "cpu":  # the CPU's half-precision attention is many times slower at short T
            q, k, v = upcast(q), upcast(k), upcast(v)
        p = self.dropout if self.training else 0.0
        # one new token sees the whole cache; a full sequence is causal
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=T > 1, enable_gqa=self.gqa)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class MLP(nn.Module):
    """W2 act(W1 u), or with swiglu W2 (silu(Wg u) ⊙ W1 u): (B, T, C) → (B, T, C)."""

    def __init__(self, config: GPTConfig, block: int):
        super().__init__()
        d, hidden = config.n_embd, config.n_ff or 4 * config.n_embd
        self.gate = Linear(d, hidden, "ffn", config.bias) if config.mlp == "swiglu" else None
        self.up = Linear(d, hidden, "ffn", config.bias)
        self.down = Linear(hidden, d, "ffn", config.bias, residual_init_scale(config, block))
        self.act = ACTIVATIONS.get(config.mlp)

    def forward(self, u):
        h = self.up(u)
        return self.down(self.act(h) if self.gate is None else F.silu(self.gate(u)) * h)


class Residual(nn.Module):
    """x ← post( skip(x) + mid( f( pre(x) ) ) ). The stream x (B, T, C) stays in fp32 whatever f computes in."""

    def __init__(self, f: nn.Module, slots: Slots, dropout: float = 0.0):
        super().__init__()
        self.f, self.dropout = f, nn.Dropout(dropout)
        self.pre, self.mid, self.post, self.skip = slots

    def forward(self, x, *args):
        return self.post(self.skip(x) + self.dropout(self.mid(self.f(self.pre(x), *args))))


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


class GPT(nn.Module):
    """The language model. `model(idx)` → (logits, None); `model(idx, targets)` → (None, loss)."""

    compute_dtype = None

    def __init__(self, config: GPTConfig, seed: int = 1337):
        """Raises ValueError for a config whose flags are wrong or contradict each other."""
        super().__init__()
        config.check()
        self.config = config
        d, vocab, last = config.n_embd, config.padded_vocab_size, config.post_norm in ("both", "mlp")
        self.wte = Embedding(vocab, d, "emb")
        self.wpe = Embedding(config.block_size, d, "pos") if config.pos == "learned" else None
        self.input_norm = norm_slot(config, "gain_out") if config.input_norm else Slot(d)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, block) for block in range(1, config.n_layer + 1))
        self.final_norm = Slot(d) if last else norm_slot(config, "gain_in")  # a last post norm already is one
        self.head = None if config.tie_weights else Linear(d, vocab, "head")
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
                weight, std = module.weight, self.config.init_std
                if isinstance(module, Linear) and module is not self.head and self.config.init == "xavier":
                    std = (2 / sum(weight.shape)) ** 0.5
                if not weight.is_meta:
                    drawn = torch.empty(weight.shape, device="cpu")
                    weight.copy_(drawn.normal_(0, std * module.init_scale, generator=generator))
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) token ids, T ≤ block_size → (logits (B, T, vocab_size), None).

        With targets (B, T), −1 = ignored → (None, loss): cross-entropy in nats, mean over the targets that count, 0 if
        none does. The logits end at vocab_size: padding entries cannot be sampled and take no part in the loss.
        `cache` (one KVCache a block): idx continues the cached sequence; allowed are an empty cache or T = 1.
        """
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
        x = self.dropout(self.input_norm(x))
        for i, block in enumerate(self.blocks):
            x = block(x, rope, cache[i] if cache else None)
        logits = linear(self.final_norm(x), (self.head or self.wte).weight, dtype=self.compute_dtype)
        logits = upcast(logits[..., : self.config.vocab_size])
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return None, loss / (targets != -1).sum().clamp(min=1)

    def set_compute_dtype(self, dtype: torch.dtype | None) -> "GPT":
        """Multiply matrices in `dtype` (None: the parameters' own); parameters and residual stream are untouched."""
        for module in self.modules():
            if hasattr(module, "compute_dtype"):
                module.compute_dtype = dtype
        return self

    def roles(self) -> dict:
        """{parameter name: role}, each parameter exactly once, in the order of `named_parameters`."""
        owner = {id(p): (m, name) for m in self.modules() for name, p in m.named_parameters(recurse=False)}
        roles = {}
        for full_name, p in self.named_parameters():
            module, name = owner[id(p)]
            role = getattr(module, "param_roles", {}).get(name)
            if role not in ROLES:
                raise ValueError(
                    f"parameter {full_name} has role {role}: give its module param_roles = {{'{name}': role}}"
                )
            roles[full_name] = role
        return roles

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
    def from_checkpoint(cls, checkpoint: dict, **overrides) -> "GPT":
        """The model of a checkpoint, with its weights; `overrides`: fields that change no shape (dropout).

        Raises ValueError, naming the first field or tensor, where architecture and weights do not fit this code."""
        values, weights = {**checkpoint["model_config"], **overrides}, checkpoint["model"]
        unknown = values.keys() - {f.name for f in fields(GPTConfig)}
        if unknown:
            raise ValueError(f"the checkpoint's model_config has {sorted(map(str, unknown))}, unknown to this version")
        model = cls(GPTConfig(**values))
        wanted = model.state_dict()
        for name in [*wanted, *weights]:
            a, b = (d[name].shape if torch.is_tensor(d.get(name)) else "absent" for d in (wanted, weights))
            if a != b:
                raise ValueError(f"the checkpoint's weights do not fit its model_config: {name} is {b}, not {a}")
        model.load_state_dict(weights)
        return model

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
