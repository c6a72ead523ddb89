"""Architectures of `transformers` that a GPT can be: GPT-2, LLaMA, Qwen3. One table, read in both directions.

A family is Pre-LN with one kind of norm, position and FFN. Its configuration and tensors are ours under other names.
"""

from typing import NamedTuple

import torch

from model import GPT, GPTConfig

COMMON = dict(pre_norm="both", residual_init="plain")
GPT2_FLAGS = COMMON | dict(norm="layernorm", pos="learned", bias=True, residual_init="gpt2")
LLAMA_FLAGS = COMMON | dict(norm="rmsnorm", pos="rope", mlp="swiglu")

LLAMA_SIZES = dict(
    n_layer="num_hidden_layers", n_head="num_attention_heads", n_kv_head="num_key_value_heads", n_embd="hidden_size",
    head_size="head_dim", n_ff="intermediate_size", block_size="max_position_embeddings", vocab_size="vocab_size",
    norm_eps="rms_norm_eps", tie_weights="tie_word_embeddings", init_std="initializer_range",
)  # fmt: skip
GPT2_SIZES = dict(
    n_layer="n_layer", n_head="n_head", n_embd="n_embd", n_ff="n_inner", block_size="n_positions",
    vocab_size="vocab_size", norm_eps="layer_norm_epsilon", tie_weights="tie_word_embeddings",
    init_std="initializer_range",
)  # fmt: skip

# {their module: ours}. Of several of ours, theirs has the rows one after the other. "{}" is the block's number from 0.
LLAMA_MODULES = {
    "embed_tokens": ("wte",),
    "layers.{}.input_layernorm": ("blocks.{}.attn.pre",),
    "layers.{}.self_attn.q_proj": ("blocks.{}.attn.f.q",),
    "layers.{}.self_attn.k_proj": ("blocks.{}.attn.f.k",),
    "layers.{}.self_attn.v_proj": ("blocks.{}.attn.f.v",),
    "layers.{}.self_attn.o_proj": ("blocks.{}.attn.f.o",),
    "layers.{}.post_attention_layernorm": ("blocks.{}.mlp.pre",),
    "layers.{}.mlp.gate_proj": ("blocks.{}.mlp.f.gate",),
    "layers.{}.mlp.up_proj": ("blocks.{}.mlp.f.up",),
    "layers.{}.mlp.down_proj": ("blocks.{}.mlp.f.down",),
    "norm": ("final_norm",),
    "lm_head": ("head",),
}
QWEN3_MODULES = LLAMA_MODULES | {
    "layers.{}.self_attn.q_norm": ("blocks.{}.attn.f.q_norm",),
    "layers.{}.self_attn.k_norm": ("blocks.{}.attn.f.k_norm",),
}
GPT2_MODULES = {
    "wte": ("wte",),
    "wpe": ("wpe",),
    "h.{}.ln_1": ("blocks.{}.attn.pre",),
    "h.{}.attn.c_attn": ("blocks.{}.attn.f.q", "blocks.{}.attn.f.k", "blocks.{}.attn.f.v"),
    "h.{}.attn.c_proj": ("blocks.{}.attn.f.o",),
    "h.{}.ln_2": ("blocks.{}.mlp.pre",),
    "h.{}.mlp.c_fc": ("blocks.{}.mlp.f.up",),
    "h.{}.mlp.c_proj": ("blocks.{}.mlp.f.down",),
    "ln_f": ("final_norm",),
    "lm_head": ("head",),
}


class Family(NamedTuple):
    """One architecture: `flags` are the GPTConfig fields that it fixes, `sizes` {our field: their key} those that it
    leaves open, `defaults` the values of keys that a config.json leaves out, `modules` the names of the tensors."""

    architecture: str
    prefix: str  # of all their tensors but the head's
    flags: dict
    sizes: dict
    defaults: dict
    modules: dict
    transposed: bool = False  # their matrices in the blocks are (in, out), ours (out, in)


LLAMA_DEFAULTS = dict(tie_word_embeddings=False, rms_norm_eps=1e-6, initializer_range=0.02, hidden_act="silu")
OPTIONAL = ("num_key_value_heads", "head_dim", "n_inner")  # keys that may be null: then they follow from the others
QWEN3_DEFAULTS = LLAMA_DEFAULTS | dict(head_dim=128)
GPT2_DEFAULTS = dict(tie_word_embeddings=True, layer_norm_epsilon=1e-5, initializer_range=0.02, n_inner=None)
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel", "transformer.", GPT2_FLAGS, GPT2_SIZES, GPT2_DEFAULTS, GPT2_MODULES, transposed=True
    ),
    "llama": Family("LlamaForCausalLM", "model.", LLAMA_FLAGS, LLAMA_SIZES, LLAMA_DEFAULTS, LLAMA_MODULES),
    "qwen3": Family(
        "Qwen3ForCausalLM", "model.", LLAMA_FLAGS | dict(qk_norm=True), LLAMA_SIZES, QWEN3_DEFAULTS, QWEN3_MODULES
    ),
}

ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "relu2": "relu2"}  # GPT-2's, ours

# {their key: the values with which it changes nothing}. With another value it is a part that our model lacks.
NEUTRAL = dict(
    attn_logit_softcapping=(None,), final_logit_softcapping=(None,), partial_rotary_factor=(None, 1.0),
    quantization_config=(None,), add_cross_attention=(None, False), scale_attn_weights=(None, True),
    scale_attn_by_inverse_layer_idx=(None, False), attention_multiplier=(None, 1.0), logit_scaling=(None, 1.0),
    embedding_multiplier=(None, 1.0), residual_multiplier=(None, 1.0), num_experts=(None,), num_local_experts=(None,),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ configuration


def missing_parts(theirs: dict) -> list:
    """What a config.json (`theirs`) asks for that our model lacks, each as "key=value"."""
    found = [f"{key}={theirs[key]!s:.40}" for key, values in NEUTRAL.items() if theirs.get(key) not in values]
    if theirs.get("sliding_window") and theirs.get("use_sliding_window", True):
        found.append(f"sliding_window={theirs['sliding_window']}")
    other = sorted(set(theirs.get("layer_types") or ()) - {"full_attention"})
    found += [f"layer_types with {name}" for name in other]
    rope = rope_of(theirs)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    neutral = {"rope_theta": rope.get("rope_theta"), "type": rope.get("type"), "partial_rotary_factor": 1.0}
    rope = {name: value for name, value in rope.items() if value is not None and neutral.get(name) != value}
    return found + [f"RoPE of type {kind} {rope or ''}".strip()] * (kind != "default" or bool(rope))


def rope_of(theirs: dict) -> dict:
    """The settings of RoPE in a config.json, in the form of any version of `transformers`: a scaling given in the old
    form wins."""
    return {**(theirs.get("rope_parameters") or {}), **(theirs.get("rope_scaling") or {})}


def config_from_theirs(theirs: dict) -> GPTConfig:
    """The GPTConfig of a config.json. ValueError, in one line, for a model that has parts ours lacks."""
    kind, lacking = theirs.get("model_type"), missing_parts(theirs)
    if lacking:
        raise ValueError(f"it ({kind}) has parts that this model lacks: {', '.join(lacking)}")
    if kind not in FAMILIES:
        raise ValueError(f"model_type={kind!r} is not one of {', '.join(FAMILIES)}, nanodnt")
    family = FAMILIES[kind]
    theirs = family.defaults | theirs
    absent = [key for key in family.sizes.values() if theirs.get(key) is None and key not in OPTIONAL]
    if absent:
        raise ValueError(f"its config.json lacks {', '.join(absent)}")
    flags = family.flags | {ours: theirs[key] for ours, key in family.sizes.items() if theirs.get(key) is not None}
    if kind == "gpt2":
        flags["mlp"] = ACTIVATIONS.get(theirs.get("activation_function", "gelu_new"))
        if flags["mlp"] is None:
            raise ValueError(
                f"activation_function={theirs['activation_function']} is not one of {', '.join(ACTIVATIONS)}"
            )
    else:
        biases = {name: bool(theirs.get(name)) for name in ("attention_bias", "mlp_bias")}
        theta = rope_of(theirs).get("rope_theta") or theirs.get("rope_theta") or 10000.0
        flags |= dict(rope_theta=float(theta), bias=all(biases.values()))
        if theirs["hidden_act"] not in ("silu", "swish"):
            raise ValueError(f"hidden_act={theirs['hidden_act']} is not silu")
        if len(set(biases.values())) > 1:
            raise ValueError(
                f"{', '.join(f'{k}={v}' for k, v in biases.items())}: here both have biases, or neither has"
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
        return values | drop | dict(n_inner=config.hidden, activation_function=names[config.mlp])
    rope = dict(rope_theta=config.rope_theta, rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta))
    values |= rope | dict(hidden_act="silu", attention_bias=config.bias, mlp_bias=config.bias)
    n_kv_head = config.n_kv_head or config.n_head
    return values | dict(num_key_value_heads=n_kv_head, head_dim=config.head_dim, intermediate_size=config.hidden)


# ------------------------------------------------------------------------------------------------------------ tensors


def tensor_names(config: GPTConfig, kind: str) -> dict:
    """{name of their tensor: (names of our tensors, whether theirs is the transpose)} of a plain model of `kind`."""
    family, ours = FAMILIES[kind], GPT.empty(config).state_dict()
    found = {}
    for their_module, our_modules in family.modules.items():
        for i in range(config.n_layer if "{}" in their_module else 1):
            theirs, names = their_module.format(i), [name.format(i) for name in our_modules]
            for part in ("weight", "bias"):
                own = "gain" if part == "weight" and f"{names[0]}.gain" in ours else part
                if f"{names[0]}.{own}" in ours:
                    transposed = family.transposed and part == "weight" and ".f." in names[0]
                    found[f"{theirs}.{part}"] = [f"{name}.{own}" for name in names], transposed
    return found


def tensors_from_theirs(tensors: dict, config: GPTConfig, kind: str) -> dict:
    """Our state dict from theirs, {name without the family's prefix: tensor}. Padding rows of the vocabulary are zero.

    ValueError, which names the tensor, where one is missing, of another shape, or not known."""
    wanted, names, found = GPT.empty(config).state_dict(), tensor_names(config, kind), {}
    for theirs, (ours, transposed) in names.items():
        if theirs not in tensors:
            raise ValueError(f"the tensor {theirs} is missing")
        tensor = tensors[theirs].T if transposed else tensors[theirs]
        shapes = [wanted[name].shape for name in ours]
        if theirs in ("embed_tokens.weight", "wte.weight", "lm_head.weight"):
            shapes = [torch.Size((config.vocab_size, config.n_embd))]
        if tensor.shape != torch.Size((sum(s[0] for s in shapes), *shapes[0][1:])):
            raise ValueError(f"the tensor {theirs} is {list(tensors[theirs].shape)}, which config.json does not allow")
        for name, part in zip(ours, tensor.split([s[0] for s in shapes]), strict=True):
            rows = len(wanted[name]) - len(part)
            found[name] = torch.cat((part, part.new_zeros(rows, part.shape[1]))) if rows else part
    if extra := sorted(tensors.keys() - names.keys()):
        raise ValueError(f"the tensor {extra[0]} is unknown")
    return found


def tensors_to_theirs(weights: dict, config: GPTConfig, kind: str) -> dict:
    """Their tensors, with the family's prefix, from our state dict of a plain model; without padding rows."""
    prefix, found = FAMILIES[kind].prefix, {}
    for theirs, (ours, transposed) in tensor_names(config, kind).items():
        tensor = torch.cat([weights[name] for name in ours])
        if ours[0] in ("wte.weight", "head.weight"):
            tensor = tensor[: config.vocab_size].clone()
        name = theirs if theirs.startswith("lm_head") else prefix + theirs
        found[name] = (tensor.T if transposed else tensor).contiguous()
    return found
