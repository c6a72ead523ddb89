"""Weights into models: from a checkpoint of ours, from OpenAI's GPT-2, and Admin's profiled start values."""

from dataclasses import fields

import torch

from layers.ops import upcast
from layers.sharding import assign
from layers.slot import Slot
from model import GPT, GPTConfig


def model_from_checkpoint(checkpoint: dict, **overrides) -> GPT:
    """The model of a checkpoint, with its weights, on the CPU. Overrides and errors are `empty_model_like`'s."""
    model = empty_model_like(checkpoint, **overrides).to_empty(device="cpu")
    load_weights(model, checkpoint["model"])
    return model


def empty_model_like(checkpoint: dict, **overrides) -> GPT:
    """The model of a checkpoint without storage (`GPT.empty`). `overrides` are config fields that change no shape.

    Raises ValueError if config or weights do not fit this code; the message names the first wrong field or tensor."""
    values, weights = {**checkpoint["model_config"], **overrides}, checkpoint["model"]
    unknown = values.keys() - {f.name for f in fields(GPTConfig)}
    if unknown:
        raise ValueError(f"the checkpoint's model_config has {sorted(map(str, unknown))}, unknown to this version")
    config = GPTConfig(**values)
    config.check()
    mismatch = "the checkpoint's weights do not fit its model_config"
    if config.n_layer > len(weights):  # checked before a damaged config makes us build millions of blocks
        raise ValueError(f"{mismatch}: {config.n_layer} blocks, but {len(weights)} tensors")
    model = GPT.empty(config)
    wanted = model.state_dict()
    for name in [*wanted, *weights]:
        needed, found = (t.shape if torch.is_tensor(t) else "absent" for t in (wanted.get(name), weights.get(name)))
        if needed != found:
            raise ValueError(f"{mismatch}: {name} is {found}, not {needed}")
    return model


def load_weights(model: GPT, weights: dict) -> None:
    """Copy the full tensors of a state dict into a model, which may be sharded."""
    for name, t in model.state_dict().items():
        assign(t, weights[name])


# ----------------------------------------------------------------------------------------------------- OpenAI's GPT-2


def model_from_gpt2(name: str, dropout: float = 0.0) -> GPT:
    """GPT-2 through `transformers`: `gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl`, or a local folder.

    Raises ValueError if `transformers` is missing, the weights cannot be fetched, or the model is a variant of GPT-2
    that GPTConfig has no flags for."""
    try:
        from transformers import GPT2LMHeadModel

        theirs = GPT2LMHeadModel.from_pretrained(name)
    except ImportError:
        raise ValueError(f"init_from={name} needs transformers: pip install transformers") from None
    except Exception as e:
        raise ValueError(f"{name} could not be fetched ({type(e).__name__}): check the name and the network") from None
    c = theirs.config
    usual = dict(activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    usual |= dict(tie_word_embeddings=True)
    unusual = [key for key, value in usual.items() if getattr(c, key) != value]
    if unusual:
        raise ValueError(f"{name} is a variant of GPT-2 that this model has no flags for: {', '.join(unusual)}")
    sizes = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.n_positions, n_ff=c.n_inner or 0)
    parts = dict(vocab_size=c.vocab_size, norm="layernorm", norm_eps=c.layer_norm_epsilon, bias=True)
    model = GPT(GPTConfig(**sizes, **parts, dropout=dropout))
    load_gpt2(model, theirs.state_dict())
    return model


@torch.no_grad()
def load_gpt2(model: GPT, weights: dict) -> None:
    """Copy the state dict of a `transformers` GPT2LMHeadModel of the same shape into `model`."""
    # their matrices are (in, out), ours (out, in)
    theirs = {name.removeprefix("transformer."): w.T if w.ndim == 2 else w for name, w in weights.items()}
    names = {"attn.pre": "ln_1", "attn.f.o": "attn.c_proj", "mlp.pre": "ln_2"}
    names |= {"mlp.f.up": "mlp.c_fc", "mlp.f.down": "mlp.c_proj"}
    source = {"final_norm": "ln_f"}  # our module: their module
    for i in range(model.config.n_layer):
        source |= {f"blocks.{i}.{ours}": f"h.{i}.{name}" for ours, name in names.items()}
        for j, part in enumerate("qkv"):  # one matrix there, three here
            source[f"blocks.{i}.attn.f.{part}"] = f"h.{i}.qkv{j}"
            for kind in ("weight", "bias"):
                theirs[f"h.{i}.qkv{j}.{kind}"] = theirs[f"h.{i}.attn.c_attn.{kind}"].chunk(3)[j]
    for ours, name in source.items():
        module = model.get_submodule(ours)
        (module.gain if isinstance(module, Slot) else module.weight).copy_(theirs[f"{name}.weight"])
        module.bias.copy_(theirs[f"{name}.bias"])
    for name in ("wte", "wpe"):
        table = theirs[f"{name}.weight"].T
        model.get_submodule(name).weight[: len(table)].copy_(table)  # the other rows are padding


# --------------------------------------------------------------------------------------------------------------- Admin


@torch.no_grad()
def profile_admin(model: GPT, idx) -> None:
    """Give Admin's ω of each sub-layer its start value, from one forward pass of idx (B, T). Without `admin`: nothing.

    With the sub-layers in their order, ω₁ = 1 and ωᵢ₊₁² = Var(ωᵢ x) + Var(fᵢ), variances over all elements. Each ωᵢ is
    set before sub-layer i runs. Meant for fresh weights."""
    if not model.config.admin:
        return
    state = {"omega": 1.0}

    def set_omega(skip, args):
        skip.set_gain(state["omega"])

    def note_stream_variance(skip, args, y):
        state["stream"] = y.var(correction=0).item()

    def compute_next_omega(mid, args, y):
        state["omega"] = (state["stream"] + upcast(y).var(correction=0).item()) ** 0.5

    # Residual.forward computes skip(x) before mid(f(…)), so a sub-layer's stream variance is there when mid ends
    hooks, training = [], [module for module in model.modules() if module.training]
    for residual in (r for block in model.blocks for r in (block.attn, block.mlp)):
        hooks.append(residual.skip.register_forward_pre_hook(set_omega))
        hooks.append(residual.skip.register_forward_hook(note_stream_variance))
        hooks.append(residual.mid.register_forward_hook(compute_next_omega))
    try:
        model.eval().stream(idx)
    finally:
        for module in training:
            module.training = True
        for hook in hooks:
            hook.remove()
