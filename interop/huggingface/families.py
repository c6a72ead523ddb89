"""Architectures of `transformers` that a GPT can be: GPT-2, LLaMA, Qwen2, Qwen3, OLMo-2, Gemma 3,
Mixtral, Qwen3-MoE.

A family has norms in fixed places, and one kind of norm, position and FFN. Its configuration and
tensors are ours under other names.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, GPTConfig

# {their name of the activation of the FFN, without and with a gate: ours}. Where theirs has several
# names, the first is written.
ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_erf",
    "relu": "relu",
    "relu2": "relu2",
}
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}


def llama_keys(config: GPTConfig) -> dict[str, Any]:
    """Also those of the families that are LLaMAs but for some of their parts."""
    theta = config.rope_theta
    return dict(
        rope_theta=theta,
        rope_parameters=dict(rope_type="default", rope_theta=theta),
        attention_bias=config.bias,
        mlp_bias=config.bias,
        num_key_value_heads=config.n_kv_head or config.n_head,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_width,
    )


def gemma3_keys(config: GPTConfig) -> dict[str, Any]:
    """With attention to all earlier tokens in every layer. No layer uses the settings of sliding
    windows, but `transformers` wants them."""
    keys = llama_keys(config)
    rope = keys["rope_parameters"]
    return keys | dict(
        rope_parameters=dict(full_attention=rope, sliding_attention=rope),
        rope_local_base_freq=config.rope_theta,
        layer_types=["full_attention"] * config.n_layer,
        sliding_window=config.block_size,
        query_pre_attn_scalar=config.head_dim,
    )


class Family(NamedTuple):
    """One architecture, as rows of tables that are read in both directions."""

    architecture: str
    prefix: str  # prefix of the names of all their tensors but the head's
    flags: dict[str, Any]  # GPTConfig fields with a fixed value
    sizes: dict[str, str]  # {our field: their key} of the fields that may have any value
    defaults: dict[str, Any]  # {their key: its value where config.json lacks it}
    # {their module: ours}. Where several of ours are named, theirs has their rows one after the
    # other. "{}" is the number of the block from 0; a second "{}" in theirs is the number of the
    # expert: each expert has a matrix of its own there, and ours is the stack of them.
    modules: dict[str, str]
    # further keys of config.json
    own_keys: Callable[[GPTConfig], dict[str, Any]] = llama_keys
    activation: str = "hidden_act"  # their key of the FFN's activation
    activations: dict[str, str] = GATED  # {value of that key: ours}
    gain_offset: float = 0.0  # gain of a norm minus its weight in the file
    transposed: bool = False  # their matrices in the blocks are (in, out), ours (out, in)
    absent: tuple[str, ...] = ()  # endings of the names of tensors that they lack, and that are 0
    #   here


class Match(NamedTuple):
    """Tensors with the same values: one of theirs has the rows of all of ours one after the other,
    or one of ours is the stack of all of theirs."""

    theirs: list[str]
    ours: list[str]
    transposed: bool  # whether theirs is (in, out)
    offset: float  # ours minus theirs


GPT2 = Family(
    "GPT2LMHeadModel",
    "transformer.",
    dict(pre_norm="both", norm="layernorm", pos="learned", bias=True, residual_init="gpt2"),
    dict(
        n_layer="n_layer",
        n_head="n_head",
        n_embd="n_embd",
        n_ff="n_inner",
        block_size="n_positions",
        vocab_size="vocab_size",
        norm_eps="layer_norm_epsilon",
        tie_weights="tie_word_embeddings",
        init_std="initializer_range",
    ),
    dict(
        tie_word_embeddings=True,
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
        activation_function="gelu_new",
    ),
    {
        "wte": "wte",
        "wpe": "wpe",
        "h.{}.ln_1": "blocks.{}.attn.pre",
        "h.{}.attn.c_attn": "blocks.{}.attn.f.q blocks.{}.attn.f.k blocks.{}.attn.f.v",
        "h.{}.attn.c_proj": "blocks.{}.attn.f.o",
        "h.{}.ln_2": "blocks.{}.mlp.pre",
        "h.{}.mlp.c_fc": "blocks.{}.mlp.f.up",
        "h.{}.mlp.c_proj": "blocks.{}.mlp.f.down",
        "ln_f": "final_norm",
        "lm_head": "head",
    },
    lambda config: dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "activation_function",
    ACTIVATIONS,
    transposed=True,
)
ATTENTION = {
    "embed_tokens": "wte",
    **{f"layers.{{}}.self_attn.{x}_proj": f"blocks.{{}}.attn.f.{x}" for x in "qkvo"},
    "norm": "final_norm",
    "lm_head": "head",
}
PRE_LN = ATTENTION | {
    "layers.{}.input_layernorm": "blocks.{}.attn.pre",
    "layers.{}.post_attention_layernorm": "blocks.{}.mlp.pre",
}
MID_NORMS = {
    "layers.{}.post_attention_layernorm": "blocks.{}.attn.mid",
    "layers.{}.post_feedforward_layernorm": "blocks.{}.mlp.mid",
}
QK_NORM = {f"layers.{{}}.self_attn.{x}_norm": f"blocks.{{}}.attn.f.{x}_norm" for x in "qk"}
QK_NORM_OVER_ALL = {name: ours.replace("_norm", ".out") for name, ours in QK_NORM.items()}
GATE_UP_DOWN = "gate_proj up_proj down_proj"


def gated(theirs: str, names: str, ours: str) -> dict[str, str]:
    """The modules of an FFN with a gate in a table of modules; `names` are theirs of gate, up and
    down."""
    modules = {}
    for name, part in zip(names.split(), ("gate", "up", "down"), strict=True):
        modules[f"layers.{{}}.{theirs}.{name}"] = f"blocks.{{}}.{ours}.{part}"
    return modules


FFN = gated("mlp", GATE_UP_DOWN, "mlp.f")
LLAMA = Family(
    "LlamaForCausalLM",
    "model.",
    dict(pre_norm="both", residual_init="plain", norm="rmsnorm", pos="rope"),
    dict(
        n_layer="num_hidden_layers",
        n_head="num_attention_heads",
        n_kv_head="num_key_value_heads",
        n_embd="hidden_size",
        head_size="head_dim",
        n_ff="intermediate_size",
        block_size="max_position_embeddings",
        vocab_size="vocab_size",
        norm_eps="rms_norm_eps",
        tie_weights="tie_word_embeddings",
        init_std="initializer_range",
    ),
    dict(tie_word_embeddings=False, rms_norm_eps=1e-6, initializer_range=0.02, hidden_act="silu"),
    PRE_LN | FFN,
)
QWEN2 = LLAMA._replace(  # only read: exports are LLaMA with all biases instead
    architecture="Qwen2ForCausalLM",
    flags=LLAMA.flags | dict(bias=True),
    # its config.json lacks these keys
    defaults=LLAMA.defaults | dict(attention_bias=True, mlp_bias=True),
    absent=("o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias"),
)
QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    flags=LLAMA.flags | dict(qk_norm=True, bias=False),
    defaults=LLAMA.defaults | dict(head_dim=128),
    modules=LLAMA.modules | QK_NORM,
)
OLMO2 = LLAMA._replace(
    architecture="Olmo2ForCausalLM",
    flags=QWEN3.flags | dict(pre_norm="none", mid_norm="both", qk_norm_over="full"),
    defaults=LLAMA.defaults | dict(rms_norm_eps=1e-5),
    modules=ATTENTION | FFN | MID_NORMS | QK_NORM_OVER_ALL,
)
GEMMA3 = LLAMA._replace(
    architecture="Gemma3ForCausalLM",
    flags=QWEN3.flags | dict(mid_norm="both", embed_scale=True),
    defaults=LLAMA.defaults
    | dict(
        tie_word_embeddings=True,
        hidden_activation="gelu_pytorch_tanh",
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        rope_theta=1e6,
        use_sliding_window=False,  # not a key of theirs: their layer_types alone say it
        layer_types=["sliding_attention"],  # of most layers
    ),
    modules=QWEN3.modules
    | MID_NORMS
    | {"layers.{}.pre_feedforward_layernorm": "blocks.{}.mlp.pre"},
    own_keys=gemma3_keys,
    activation="hidden_activation",
    gain_offset=1.0,
)
MIXTRAL = LLAMA._replace(
    architecture="MixtralForCausalLM",
    flags=LLAMA.flags | dict(bias=False, router_norm=True),
    sizes=LLAMA.sizes | dict(n_expert="num_local_experts", n_expert_active="num_experts_per_tok"),
    defaults=LLAMA.defaults | dict(rms_norm_eps=1e-5, rope_theta=1e6),
    modules=PRE_LN
    | {"layers.{}.block_sparse_moe.gate": "blocks.{}.mlp.f.router"}
    | gated("block_sparse_moe.experts.{}", "w1 w3 w2", "mlp.f.experts"),
)
QWEN3_MOE = MIXTRAL._replace(
    architecture="Qwen3MoeForCausalLM",
    flags=QWEN3.flags,
    sizes=MIXTRAL.sizes | dict(n_ff="moe_intermediate_size", router_norm="norm_topk_prob"),
    defaults=LLAMA.defaults | dict(norm_topk_prob=False),
    modules=PRE_LN
    | QK_NORM
    | {"layers.{}.mlp.gate": "blocks.{}.mlp.f.router"}
    | gated("mlp.experts.{}", GATE_UP_DOWN, "mlp.f.experts"),
)
FAMILIES = dict(
    gpt2=GPT2,
    llama=LLAMA,
    qwen2=QWEN2,
    qwen3=QWEN3,
    olmo2=OLMO2,
    gemma3_text=GEMMA3,
    mixtral=MIXTRAL,
    qwen3_moe=QWEN3_MOE,
)
# keys that may be null: then they follow from the others
OPTIONAL = ("num_key_value_heads", "head_dim", "n_inner")
# {key: its name in version 4's Qwen3-MoE}; both are written
SAME_KEYS = {"num_local_experts": "num_experts"}

# {their key: the value with which it changes nothing, as None does}. With another value it is a
# part that our model lacks.
NEUTRAL = dict(
    quantization_config=None,
    add_cross_attention=False,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    partial_rotary_factor=1.0,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    use_bidirectional_attention=False,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    rope_type="default",  # a setting of RoPE, like the next
    type="default",
)


def missing_parts(theirs: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """The parts that our model lacks and a config.json (`theirs`), with these settings of RoPE,
    asks for, as "key=value"."""
    parts = []
    for key, neutral in NEUTRAL.items():
        if theirs.get(key) not in (None, neutral):
            parts.append(f"{key}={theirs[key]!s:.40}")
    if theirs.get("sliding_window") and theirs.get("use_sliding_window", True):
        parts.append(f"sliding_window={theirs['sliding_window']}")
    scalar = theirs.get("query_pre_attn_scalar")  # attention divides by its root
    if scalar not in (None, theirs.get("head_dim")):
        parts.append(f"query_pre_attn_scalar={scalar} beside head_dim={theirs.get('head_dim')}")
    for name in dict.fromkeys(theirs.get("layer_types") or ()):
        if name != "full_attention":
            parts.append(f"layer_types with {name}")
    scaling = {}
    for key, value in rope.items():
        if key != "rope_theta" and value not in (None, NEUTRAL.get(key)):
            scaling[key] = value
    if scaling:
        parts.append(f"RoPE with {scaling}")
    return parts


def config_from_theirs(theirs: dict[str, Any]) -> GPTConfig:
    """The GPTConfig of a config.json. ValueError, in one line, for a model that has parts ours
    lacks."""
    kind = theirs.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not one of {', '.join(FAMILIES)}, nanodnt")
    family = FAMILIES[kind]
    values = dict(family.defaults)
    for key, other in SAME_KEYS.items():
        if other in theirs:
            values[key] = theirs[other]
    values |= {key: value for key, value in theirs.items() if value is not None}
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has one for each type of layer
    # Versions of `transformers` have two forms for this; a scaling in the old form wins.
    rope = {**rope, **(values.get("rope_scaling") or {})}
    missing = missing_parts(values, rope)
    if missing:
        raise ValueError(f"it ({kind}) has parts that this model lacks: {', '.join(missing)}")
    absent = []
    flags = dict(family.flags)
    for ours, key in family.sizes.items():
        if values.get(key) is not None:
            flags[ours] = values[key]
        elif key not in OPTIONAL:
            absent.append(key)
    if absent:
        raise ValueError(f"its config.json lacks {', '.join(absent)}")
    function = values[family.activation]
    if function not in family.activations:
        raise ValueError(
            f"{family.activation}={function} is not one of {', '.join(family.activations)}"
        )
    flags["mlp"] = family.activations[function]
    if flags["pos"] == "rope":
        attention = bool(values.get("attention_bias"))
        mlp = bool(values.get("mlp_bias"))
        if attention != mlp:
            raise ValueError(
                f"attention_bias={attention}, mlp_bias={mlp}: here both have biases, or neither has"
            )
        flags["bias"] = attention
        flags["rope_theta"] = float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0)
    config = GPTConfig(**flags)
    config.check()
    if config.head_size * config.n_head == config.n_embd:
        config.head_size = 0
    if config.n_kv_head == config.n_head:
        config.n_kv_head = 0
    return config


def config_to_theirs(config: GPTConfig, kind: str) -> dict[str, Any]:
    """config.json of a plain `config` (its flags are the family's) as architecture `kind`."""
    family = FAMILIES[kind]
    values = {key: getattr(config, ours) for ours, key in family.sizes.items()}
    values["architectures"] = [family.architecture]
    values["model_type"] = kind
    names = {ours: theirs for theirs, ours in reversed(family.activations.items())}
    values[family.activation] = names[config.mlp]
    values[family.sizes["n_ff"]] = config.ffn_width
    for key, other in SAME_KEYS.items():
        if key in values:
            values[other] = values[key]
    return values | family.own_keys(config)


def embedding_constant(config: GPTConfig) -> Tensor:
    """√n_embd in fp32, (1,): Gemma's constant factor on the embedding, and the initial value of our
    scalar."""
    return torch.tensor([config.n_embd**0.5])


def matches(config: GPTConfig, family: Family) -> list[Match]:
    """All tensors of a plain model of `family`, theirs beside ours."""
    names = GPT.empty(config).state_dict()
    pairs = []
    for their_module, our_modules in family.modules.items():
        n_numbers = their_module.count("{}")
        n_blocks = config.n_layer if n_numbers else 1
        n_experts = config.n_expert if n_numbers == 2 else 1
        for i in range(n_blocks):
            theirs = [their_module.format(i, expert) for expert in range(n_experts)]
            ours = our_modules.replace("{}", str(i)).split()
            for part in ("weight", "bias"):
                our_part = part
                if part == "weight" and f"{ours[0]}.gain" in names:
                    our_part = "gain"
                if f"{ours[0]}.{our_part}" in names:
                    pairs.append(
                        Match(
                            [f"{module}.{part}" for module in theirs],
                            [f"{module}.{our_part}" for module in ours],
                            family.transposed and part == "weight" and ".f." in ours[0],
                            family.gain_offset if our_part == "gain" else 0.0,
                        )
                    )
    return pairs


def tensors_from_theirs(
    tensors: dict[str, Tensor], config: GPTConfig, family: Family
) -> dict[str, Tensor]:
    """Our state dict from theirs, {name without the family's prefix: tensor}. Padding rows of the
    vocabulary are zero. ValueError, which names the tensor, where one is missing, of another shape
    or kind, or not known."""
    if len(tensors) < config.n_layer:  # before building so many layers, which could take minutes
        raise ValueError(f"it has {len(tensors)} tensors, too few for {config.n_layer} layers")
    for name, tensor in tensors.items():
        numbers = tensor.is_floating_point() and tensor.layout == torch.strided
        if not numbers or tensor.is_meta:
            raise ValueError(f"the tensor {name[:100]} is not one of floating-point numbers")
    wanted = GPT.empty(config).state_dict()
    left = dict(tensors)
    weights = {}
    if config.embed_scale:
        weights["embed_scale.gain"] = embedding_constant(config)
    for theirs, ours, transposed, offset in matches(config, family):
        missing = [name for name in theirs if name not in left]
        if missing:
            if not missing[0].endswith(family.absent):
                raise ValueError(f"the tensor {missing[0]} is missing")
            weights[ours[0]] = torch.zeros(wanted[ours[0]].shape)
            continue
        parts = [left.pop(name) for name in theirs]
        tensor = torch.stack(parts) if wanted[ours[0]].ndim == 3 else parts[0]
        if offset:
            tensor = tensor.float() + offset
        rows = tensor.T if transposed else tensor
        for name, part in zip(ours, rows.chunk(len(ours)), strict=True):
            length = len(wanted[name])
            if name in ("wte.weight", "head.weight"):
                length = config.vocab_size
            if part.shape != (length, *wanted[name].shape[1:]):
                raise ValueError(
                    f"the tensor {theirs[0]} is {list(tensor.shape)}, which its configuration "
                    "does not allow"
                )
            n_padding = len(wanted[name]) - length
            weights[name] = F.pad(part, (0, 0, 0, n_padding)) if n_padding else part
    if left:
        raise ValueError(f"the tensor {min(left)[:100]} is unknown")
    return weights


def tensors_to_theirs(
    weights: dict[str, Tensor], config: GPTConfig, family: Family
) -> dict[str, Tensor]:
    """Their tensors, with the family's prefix, from our state dict of a plain model; without
    padding rows."""
    tensors = {}
    for theirs, ours, transposed, offset in matches(config, family):
        tensor = torch.cat([weights[name] for name in ours]) - offset
        if ours[0] in ("wte.weight", "head.weight"):
            tensor = tensor[: config.vocab_size].clone()
        parts = [t.clone() for t in tensor] if tensor.ndim == 3 else [tensor]  # files hold no views
        for name, part in zip(theirs, parts, strict=True):
            if not name.startswith("lm_head"):
                name = family.prefix + name
            if transposed:
                part = part.T
            tensors[name] = part.contiguous()
    return tensors
