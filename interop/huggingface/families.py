"""Architectures of `transformers` that a GPT can be: GPT-2, LLaMA, Qwen2, Qwen3, Mixtral,
Qwen3-MoE.

A family is Pre-LN with one kind of norm, position and FFN. Its configuration and tensors are ours
under other names.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig


class Family(NamedTuple):
    """One architecture, as rows of tables that are read in both directions."""

    architecture: str
    prefix: str  # of all their tensors but the head's
    flags: dict  # the GPTConfig fields that it fixes
    sizes: dict  # {our field: their key} of those that it leaves open
    defaults: dict  # of keys that a config.json leaves out
    # {their module: ours}. Of several of ours, theirs has the rows one after the other. "{}" is the
    # block's number from 0, a second one in theirs the expert's: each expert has a matrix of its
    # own there, and ours is the stack of them.
    modules: dict
    transposed: bool = False  # their matrices in the blocks are (in, out), ours (out, in)
    absent: tuple = ()  # how tensors are named that theirs lack, and that are 0 here


GPT2 = Family(
    "GPT2LMHeadModel",
    "transformer.",
    dict(pre_norm="both", norm="layernorm", pos="learned", bias=True, residual_init="gpt2"),
    dict(
        n_layer="n_layer", n_head="n_head", n_embd="n_embd", n_ff="n_inner", block_size="n_positions",
        vocab_size="vocab_size", norm_eps="layer_norm_epsilon", tie_weights="tie_word_embeddings",
        init_std="initializer_range",
    ),
    dict(tie_word_embeddings=True, layer_norm_epsilon=1e-5, initializer_range=0.02, n_inner=None),
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
    transposed=True,
)  # fmt: skip
ATTENTION = {
    "embed_tokens": "wte",
    "layers.{}.input_layernorm": "blocks.{}.attn.pre",
    **{f"layers.{{}}.self_attn.{x}_proj": f"blocks.{{}}.attn.f.{x}" for x in "qkvo"},
    "layers.{}.post_attention_layernorm": "blocks.{}.mlp.pre",
    "norm": "final_norm",
    "lm_head": "head",
}
QK_NORM = {f"layers.{{}}.self_attn.{x}_norm": f"blocks.{{}}.attn.f.{x}_norm" for x in "qk"}
GATE_UP_DOWN = "gate_proj up_proj down_proj"


def swiglu(theirs: str, names: str, ours: str) -> dict:
    """The modules of a SwiGLU; theirs have these names."""
    parts = zip(names.split(), ("gate", "up", "down"), strict=True)
    return {f"layers.{{}}.{theirs}.{name}": f"blocks.{{}}.{ours}.{part}" for name, part in parts}


LLAMA = Family(
    "LlamaForCausalLM",
    "model.",
    dict(pre_norm="both", residual_init="plain", norm="rmsnorm", pos="rope", mlp="swiglu"),
    dict(
        n_layer="num_hidden_layers", n_head="num_attention_heads", n_kv_head="num_key_value_heads",
        n_embd="hidden_size", head_size="head_dim", n_ff="intermediate_size", block_size="max_position_embeddings",
        vocab_size="vocab_size", norm_eps="rms_norm_eps", tie_weights="tie_word_embeddings",
        init_std="initializer_range",
    ),
    dict(tie_word_embeddings=False, rms_norm_eps=1e-6, initializer_range=0.02, hidden_act="silu"),
    ATTENTION | swiglu("mlp", GATE_UP_DOWN, "mlp.f"),
)  # fmt: skip
QWEN2 = LLAMA._replace(  # it is read only: LLaMA, with all biases, holds what it holds
    architecture="Qwen2ForCausalLM",
    flags=LLAMA.flags | dict(bias=True),
    # what no config.json of it says
    defaults=LLAMA.defaults | dict(attention_bias=True, mlp_bias=True),
    absent=("o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias"),
)
QWEN3 = LLAMA._replace(
    architecture="Qwen3ForCausalLM",
    flags=LLAMA.flags | dict(qk_norm=True, bias=False),
    defaults=LLAMA.defaults | dict(head_dim=128),
    modules=LLAMA.modules | QK_NORM,
)
MIXTRAL = LLAMA._replace(
    architecture="MixtralForCausalLM",
    flags=LLAMA.flags | dict(bias=False, router_norm=True),
    sizes=LLAMA.sizes | dict(n_expert="num_local_experts", n_expert_active="num_experts_per_tok"),
    defaults=LLAMA.defaults | dict(rms_norm_eps=1e-5, rope_theta=1e6),
    modules=ATTENTION
    | {"layers.{}.block_sparse_moe.gate": "blocks.{}.mlp.f.router"}
    | swiglu("block_sparse_moe.experts.{}", "w1 w3 w2", "mlp.f.experts"),
)
QWEN3_MOE = MIXTRAL._replace(
    architecture="Qwen3MoeForCausalLM",
    flags=QWEN3.flags,
    sizes=MIXTRAL.sizes | dict(n_ff="moe_intermediate_size", router_norm="norm_topk_prob"),
    defaults=LLAMA.defaults | dict(norm_topk_prob=False),
    modules=ATTENTION
    | QK_NORM
    | {"layers.{}.mlp.gate": "blocks.{}.mlp.f.router"}
    | swiglu("mlp.experts.{}", GATE_UP_DOWN, "mlp.f.experts"),
)
FAMILIES = dict(
    gpt2=GPT2, llama=LLAMA, qwen2=QWEN2, qwen3=QWEN3, mixtral=MIXTRAL, qwen3_moe=QWEN3_MOE
)
# keys that may be null: then they follow from the others
OPTIONAL = ("num_key_value_heads", "head_dim", "n_inner")
# {key: its name in version 4's Qwen3-MoE}; both are written
SAME_KEYS = {"num_local_experts": "num_experts"}

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}  # GPT-2's, ours
ACTIVATIONS |= {"relu": "relu", "relu2": "relu2"}

# {their key: the value with which it changes nothing, as None does}. With another it is a part that
# our model lacks.
NEUTRAL = dict(quantization_config=None, add_cross_attention=False, scale_attn_weights=True)
NEUTRAL |= dict(
    scale_attn_by_inverse_layer_idx=False, partial_rotary_factor=1.0, decoder_sparse_step=1
)
NEUTRAL |= dict(mlp_only_layers=[], rope_type="default", type="default")  # the last two are of RoPE


def missing_parts(theirs: dict, rope: dict) -> list:
    """What a config.json (`theirs`), with these settings of RoPE, asks for that our model lacks, as
    "key=value"."""
    found = [
        f"{key}={theirs[key]!s:.40}"
        for key in NEUTRAL
        if theirs.get(key) not in (None, NEUTRAL[key])
    ]
    if theirs.get("sliding_window") and theirs.get("use_sliding_window", True):
        found.append(f"sliding_window={theirs['sliding_window']}")
    found += [
        f"layer_types with {name}"
        for name in theirs.get("layer_types") or ()
        if name != "full_attention"
    ]
    own = {
        key: rope[key]
        for key in rope.keys() - {"rope_theta"}
        if rope[key] not in (None, NEUTRAL.get(key))
    }
    return found + [f"RoPE with {own}"] * bool(own)


def config_from_theirs(theirs: dict) -> GPTConfig:
    """The GPTConfig of a config.json. ValueError, in one line, for a model that has parts ours
    lacks."""
    kind = theirs.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not one of {', '.join(FAMILIES)}, nanodnt")
    # in the form of any version of `transformers`: a scaling given in the old form wins
    rope = {**(theirs.get("rope_parameters") or {}), **(theirs.get("rope_scaling") or {})}
    if lacking := missing_parts(theirs, rope):
        raise ValueError(f"it ({kind}) has parts that this model lacks: {', '.join(lacking)}")
    family = FAMILIES[kind]
    theirs = (
        family.defaults
        | {key: theirs[other] for key, other in SAME_KEYS.items() if other in theirs}
        | theirs
    )
    if absent := [
        key for key in family.sizes.values() if theirs.get(key) is None and key not in OPTIONAL
    ]:
        raise ValueError(f"its config.json lacks {', '.join(absent)}")
    flags = family.flags | {
        ours: theirs[key] for ours, key in family.sizes.items() if theirs.get(key) is not None
    }
    if kind == "gpt2":
        function = theirs.get("activation_function", "gelu_new")
        if function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function={function} is not one of {', '.join(ACTIVATIONS)}"
            )
        flags["mlp"] = ACTIVATIONS[function]
    else:
        attention, mlp = (bool(theirs.get(name)) for name in ("attention_bias", "mlp_bias"))
        theta = rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0
        flags |= dict(rope_theta=float(theta), bias=attention)
        if theirs["hidden_act"] not in ("silu", "swish"):
            raise ValueError(f"hidden_act={theirs['hidden_act']} is not silu")
        if attention != mlp:
            raise ValueError(
                f"attention_bias={attention}, mlp_bias={mlp}: here both have biases, or neither has"
            )
    config = GPTConfig(**flags)
    config.check()
    if config.head_size * config.n_head == config.n_embd:
        config.head_size = 0
    if config.n_kv_head == config.n_head:
        config.n_kv_head = 0
    return config


def config_to_theirs(config: GPTConfig, kind: str) -> dict:
    """config.json of a plain `config` (its flags are the family's) as architecture `kind`."""
    family = FAMILIES[kind]
    values = {key: getattr(config, ours) for ours, key in family.sizes.items()}
    values |= {"architectures": [family.architecture], "model_type": kind}
    if kind == "gpt2":
        names = {ours: key for key, ours in reversed(ACTIVATIONS.items())}
        drop = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return values | drop | dict(n_inner=config.ffn_width, activation_function=names[config.mlp])
    rope = dict(
        rope_theta=config.rope_theta,
        rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta),
    )
    values |= rope | dict(hidden_act="silu", attention_bias=config.bias, mlp_bias=config.bias)
    values |= {other: values[key] for key, other in SAME_KEYS.items() if key in values}
    values |= dict(num_key_value_heads=config.n_kv_head or config.n_head, head_dim=config.head_dim)
    return values | {"intermediate_size": config.ffn_width, family.sizes["n_ff"]: config.ffn_width}


def matches(config: GPTConfig, kind: str) -> list:
    """[(names of theirs, names of ours, whether theirs are transposed)] of the tensors of a plain
    model of `kind`: one of theirs has the rows of all of ours one after the other, or one of ours
    is the stack of all of theirs."""
    family, ours, found = FAMILIES[kind], GPT.empty(config).state_dict(), []
    for their_module, our_modules in family.modules.items():
        numbers = their_module.count("{}")
        for i in range(config.n_layer if numbers else 1):
            theirs = [
                their_module.format(i, e) for e in range(config.n_expert if numbers == 2 else 1)
            ]
            modules = our_modules.format(*[i] * 3).split()
            for part in ("weight", "bias"):
                own = "gain" if part == "weight" and f"{modules[0]}.gain" in ours else part
                if f"{modules[0]}.{own}" in ours:
                    names = (
                        [f"{module}.{part}" for module in theirs],
                        [f"{module}.{own}" for module in modules],
                    )
                    found.append(
                        (*names, family.transposed and part == "weight" and ".f." in modules[0])
                    )
    return found


def tensors_from_theirs(tensors: dict, config: GPTConfig, kind: str) -> dict:
    """Our state dict from theirs, {name without the family's prefix: tensor}. Padding rows of the
    vocabulary are zero. ValueError, which names the tensor, where one is missing, of another shape,
    or not known."""
    wanted, found, left = GPT.empty(config).state_dict(), {}, dict(tensors)
    for theirs, ours, transposed in matches(config, kind):
        if missing := [name for name in theirs if name not in left]:
            if not missing[0].endswith(FAMILIES[kind].absent):
                raise ValueError(f"the tensor {missing[0]} is missing")
            found[ours[0]] = torch.zeros(wanted[ours[0]].shape)
            continue
        parts = [left.pop(name) for name in theirs]
        whole = torch.stack(parts) if wanted[ours[0]].ndim == 3 else parts[0]
        for name, part in zip(
            ours, (whole.T if transposed else whole).chunk(len(ours)), strict=True
        ):
            length = (
                config.vocab_size if name in ("wte.weight", "head.weight") else len(wanted[name])
            )
            if part.shape != (length, *wanted[name].shape[1:]):
                raise ValueError(
                    f"the tensor {theirs[0]} is {list(whole.shape)}, which config.json does not allow"
                )
            rows = len(wanted[name]) - length
            found[name] = F.pad(part, (0, 0, 0, rows)) if rows else part
    if left:
        raise ValueError(f"the tensor {min(left)} is unknown")
    return found


def tensors_to_theirs(weights: dict, config: GPTConfig, kind: str) -> dict:
    """Their tensors, with the family's prefix, from our state dict of a plain model; without
    padding rows."""
    prefix, found = FAMILIES[kind].prefix, {}
    for theirs, ours, transposed in matches(config, kind):
        tensor = torch.cat([weights[name] for name in ours])
        if ours[0] in ("wte.weight", "head.weight"):
            tensor = tensor[: config.vocab_size].clone()
        parts = [t.clone() for t in tensor] if tensor.ndim == 3 else [tensor]  # files hold no views
        for name, part in zip(theirs, parts, strict=True):
            name = name if name.startswith("lm_head") else prefix + name
            found[name] = (part.T if transposed else part).contiguous()
    return found
