"""A GPT as a plain model: factors are moved into a neighbouring matrix or norm.

The architectures of `transformers` have norms with one gain each, and nothing else. LNS's
constants, the gains of q, k, v, gate and up, magnitude times direction, LayerScale, σReparam and an
embedding's scale can all be written like that, exactly. So can those of a router and of stacks of
experts, whose matrices share them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from interop.huggingface.families import FAMILIES, embedding_constant
from layers.linear import Linear
from layers.slot import Slot
from model import GPT, GPTConfig, Residual


class NotPlain(ValueError):
    """The layout has a part that the architecture lacks. The message names it."""


# Values in every architecture whose own flags have no others. Refusals name flags in this order. A
# new flag that changes what the network computes belongs here, unless `sublayer` moves its factor
# into a weight. Parameters that it adds to a block are refused anyway.
PLAIN = dict(
    norm="rmsnorm",
    pos="rope",
    pre_norm="both",
    mid_norm="none",
    post_norm="none",
    post_norm_blocks=0,
    pre_norm_sublayers=0,
    input_norm=False,
    qk_norm=False,
    gpas=False,
    qk_norm_over="head",
    v_norm=False,
    skip_scale=1.0,
    norm_groups=1,
    n_expert=0,
    n_expert_shared=0,
    router="softmax",
    router_scale=1.0,
)

Tensors = dict[str, Tensor]


class PlainModel(NamedTuple):
    config: GPTConfig
    weights: Tensors  # tensors in fp32, under our names


class Affine(NamedTuple):
    """A slot as scale · normalise(x) + bias, in fp64."""

    scale: Tensor | float  # 1.0 without a gain and constants
    bias: Tensor | None


def misfits(config: GPTConfig, kind: str) -> list[str]:
    """The settings of `config` that architecture `kind` does not have, whatever the weights are,
    each with the value it has there: "qk_norm=True (False there)"."""
    family = FAMILIES[kind]
    wanted = PLAIN | family.flags
    del wanted["residual_init"]  # concerns fresh weights only
    wanted.pop("embed_scale", None)  # a scalar moves into the table
    if config.mlp not in family.activations.values():
        wanted["mlp"] = " or ".join(dict.fromkeys(family.activations.values()))
    if config.gain_out != "scale":  # those vectors move into the matrices
        wanted["gain_out"] = "none"
    if kind == "gpt2":
        del wanted["bias"]  # the biases may be 0
        if config.n_kv_head != config.n_head:
            wanted["n_kv_head"] = 0
        if config.head_dim * config.n_head != config.n_embd:
            wanted["head_size"] = 0
    if "n_expert" in family.sizes:
        wanted["n_expert"] = config.n_expert or "some"
        if config.balance == "bias":  # this bias is a part of the choice of experts
            wanted["balance"] = "loss"
    lines = []
    for name, value in wanted.items():
        own = getattr(config, name)
        if own != value:
            lines.append(f"{name}={own} ({value} there)")
    return lines


@torch.no_grad()
def plain_model(model: GPT, kind: str) -> PlainModel:
    """A plain model of architecture `kind` that computes the same as `model`. NotPlain, with
    the parts that do not fit, where there is none."""
    wrong = misfits(model.config, kind)
    if wrong:
        raise NotPlain(", ".join(wrong))
    config = plain_config(model.config, kind)
    affine(model.input_norm, "a norm on the embedding (input_norm)")
    scale = affine(model.embed_scale).scale
    weights = {}
    if config.embed_scale:
        weights["embed_scale.gain"] = embedding_constant(config)
        scale = scale / weights["embed_scale.gain"].double()
    weights["wte.weight"] = model.wte.weight.double() * scale
    if model.wpe is not None:
        weights["wpe.weight"] = model.wpe.weight.double() * scale
    final = norm(model.final_norm, "final_norm", model.config.norm)
    if model.head is None:  # the table is the output head too
        final = {name: t / scale for name, t in final.items()}
    weights |= final
    for i, block in enumerate(model.blocks):
        weights |= sublayer(block.attn, f"blocks.{i}.attn", model.config.norm)
        weights |= sublayer(block.mlp, f"blocks.{i}.mlp", model.config.norm)
    if model.head is not None:
        weights["head.weight"] = model.head.effective_weight()
    return PlainModel(config, as_wanted(weights, GPT.empty(config).state_dict(), kind))


def plain_config(config: GPTConfig, kind: str) -> GPTConfig:
    """The configuration of the plain model for a model of this one."""
    family = FAMILIES[kind]
    kept = {name: getattr(config, name) for name in (*family.sizes, "mlp", "rope_theta")}
    flags = family.flags | kept
    flags["bias"] = config.bias or kind == "gpt2"
    return GPTConfig(**flags)


def as_wanted(weights: Tensors, wanted: Tensors, kind: str) -> Tensors:
    """The weights in fp32, in the order and the shapes of `wanted`; missing biases are 0."""
    extra = sorted(weights.keys() - wanted.keys())
    if extra:
        raise NotPlain(f"{kind} has no {extra[0]}")
    plain = {}
    for name, target in wanted.items():
        if name in weights:
            plain[name] = weights[name].float().expand(target.shape).contiguous()
        elif name.endswith("bias"):
            plain[name] = torch.zeros(target.shape)
        else:
            raise NotPlain(f"{name} is needed, which this layout lacks (pre_norm, post_norm)")
    return plain


def sublayer(residual: Residual, where: str, kind: str) -> Tensors:
    """The tensors of one residual sub-layer, whose name in the model is `where`, with norms of the
    kind `kind`. NotPlain for parts that a plain sub-layer lacks."""
    refuse_factor(residual.post, "after the sum (post_norm, lns=residual)")
    refuse_factor(residual.skip, "on the stream")
    tensors = {}
    if residual.pre.norm_kind == "none":
        refuse_factor(residual.pre, "before a branch")
    else:
        tensors |= norm(residual.pre, f"{where}.pre", kind)
    mid = Affine(1.0, None)
    if residual.mid.norm_kind == "none":
        mid = affine(residual.mid)  # moves into the last matrix
    else:
        tensors |= norm(residual.mid, f"{where}.mid", kind)
    used = set()  # modules inside f whose parameters and constants are in the tensors
    for name, module in residual.f.named_modules():
        place = f"{where}.f.{name}"
        if isinstance(module, Linear):
            is_last = name.split(".")[-1] in ("o", "down")
            end = mid if is_last else Affine(1.0, None)
            if name == "q" and residual.f.q_norm.norm_kind == "none":  # a constant on q, or none
                end = affine(residual.f.q_norm)
                used.add(residual.f.q_norm)
            tensors |= matrix(module, place, end)
            used |= {module, module.pre, module.out}
        elif module in used:
            continue
        elif isinstance(module, Slot) and module.norm_kind != "none":  # QK-norm
            tensors |= norm(module, place, "rmsnorm")
        elif isinstance(module, Slot):
            refuse_factor(module, f"at {place}")
        elif list(module.parameters(recurse=False)):
            raise NotPlain(f"the parameters of {place} have no place there")
    return tensors


def refuse_factor(slot: Slot, place: str) -> None:
    """NotPlain unless the slot changes nothing."""
    factor, bias = affine(slot, f"a norm {place}")
    if torch.is_tensor(factor) or factor != 1.0 or bias is not None:
        raise NotPlain(f"a factor {place} has no place there")


def matrix(linear: Linear, where: str, end: Affine) -> Tensors:
    """The weight and the bias of a matrix, or of a stack of matrices, with its own slots and the
    slot `end` after it: x ↦ end(rows · (W (columns · x) + b)). Of a matrix with a norm on its
    output, QK-norm over all of q or k, also that norm's gain: rows and `end` move into it."""
    columns, before = affine(linear.pre, "a norm before a matrix")
    kind = "none"
    if linear.out.norm_kind != "none":
        kind = "rmsnorm"
    rows, after = affine(linear.out, "a norm other than RMSNorm after a matrix", kind)
    if before is not None or after is not None:
        raise NotPlain("a bias in the slot of a matrix (fixup) has no place there")
    rows = rows * end.scale
    tensors = {}
    if kind == "rmsnorm":
        tensors[f"{where}.out.gain"] = torch.as_tensor(rows, dtype=torch.float64)
        rows = 1.0
    by_row = rows[:, None] if torch.is_tensor(rows) else rows
    tensors[f"{where}.weight"] = linear.effective_weight().double() * columns * by_row
    if linear.bias is not None:
        tensors[f"{where}.bias"] = linear.bias.double() * rows
    if end.bias is not None:
        tensors[f"{where}.bias"] = tensors.get(f"{where}.bias", 0.0) + end.bias
    return tensors


def norm(slot: Slot, where: str, kind: str) -> Tensors:
    """The gain of a norm, one vector with its constants, and the bias if it has one."""
    scale, bias = affine(slot, f"{slot.norm_kind} at {where}", kind)
    tensors = {f"{where}.gain": torch.as_tensor(scale, dtype=torch.float64)}
    if bias is not None:
        tensors[f"{where}.bias"] = bias
    return tensors


def affine(slot: Slot, name: str = "", kind: str = "none") -> Affine:
    """A slot as scale and bias. NotPlain, with the `name`, if its norm is not `kind`, or if a
    factor stands before the norm."""
    if slot.norm_kind != kind:
        raise NotPlain(f"{name} has no place there")
    if slot.factor_in is not None:
        raise NotPlain("a factor before a norm (lns=input) has no place there")
    factor = 1.0 if slot.factor is None else slot.const
    gain = slot.gain_vector()
    scale = factor if gain is None else factor * gain.double()
    bias = None if slot.bias is None else factor * slot.bias.double()
    return Affine(scale, bias)
