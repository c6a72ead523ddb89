"""A GPT as a plain Pre-LN model, with every factor that can be moved into a neighbouring matrix or
norm moved there.

`transformers` knows pre norms with one gain each, and nothing else. LNS's constants, the gains of
q, k, v, gate and up, magnitude times direction, LayerScale, σReparam and an embedding's scale can
all be written like that, exactly. So can those of a router and of stacks of experts, whose matrices
share them.
"""

import torch

from interop.huggingface.families import ACTIVATIONS, FAMILIES
from layers.linear import Linear
from layers.slot import Slot
from model import GPT, GPTConfig


class NotPlain(ValueError):
    """The layout has a part that a plain Pre-LN model lacks. The message names it."""


# What no architecture has unless its flags say so. In this order refusals name them.
PLAIN = dict(
    norm="rmsnorm",
    pos="rope",
    pre_norm="both",
    mid_norm="none",
    post_norm="none",
    post_norm_blocks=0,
)
PLAIN |= dict(input_norm=False, qk_norm=False, norm_groups=1)
PLAIN |= dict(n_expert=0, n_expert_shared=0, router="softmax", router_scale=1.0)


def misfits(config: GPTConfig, kind: str) -> list:
    """The settings of `config` that architecture `kind` does not have, whatever the weights are,
    each with the value it has there: "qk_norm=True (False there)"."""
    c, family = config, FAMILIES[kind]
    wanted = PLAIN | family.flags
    del wanted["residual_init"]  # of fresh weights only
    if kind == "gpt2":
        del wanted["bias"]  # its biases may be 0
        wanted |= {} if c.mlp in ACTIVATIONS.values() else dict(mlp="gelu")
        wanted |= {} if c.n_kv_head == c.n_head else dict(n_kv_head=0)
        wanted |= {} if c.head_dim * c.n_head == c.n_embd else dict(head_size=0)
    if "n_expert" in family.sizes:
        wanted |= dict(n_expert=c.n_expert or "some")
        # that bias is a part of the choice
        wanted |= dict(balance="loss") if c.balance == "bias" else {}
    values = ((name, getattr(c, name), value) for name, value in wanted.items())
    return [f"{name}={found} ({value} there)" for name, found, value in values if found != value]


@torch.no_grad()
def plain_model(model: GPT, kind: str) -> tuple:
    """(config, weights) of the same function as a plain Pre-LN model of architecture `kind`: fp32
    weights under our names. NotPlain, which says what does not fit, where there is none."""
    if wrong := misfits(model.config, kind):
        raise NotPlain(", ".join(wrong))
    c = model.config
    kept = {name: getattr(c, name) for name in (*FAMILIES[kind].sizes, "mlp", "rope_theta")}
    config = GPTConfig(**FAMILIES[kind].flags | kept | dict(bias=c.bias or kind == "gpt2"))
    affine(model.input_norm, "a norm on the embedding (input_norm)")
    scale, _ = affine(model.embed_scale)
    if model.head is None and c.scales_embedding:
        raise NotPlain(
            "embed_scale cannot move into a table that is the output head too (tie_weights)"
        )
    tables = {"wte.weight": model.wte, "wpe.weight": model.wpe}
    parts = [
        {name: table.weight.double() * scale for name, table in tables.items() if table is not None}
    ]
    parts.append(norm(model.final_norm, "final_norm", c.norm))
    for i, block in enumerate(model.blocks):
        parts += [
            sublayer(block.attn, f"blocks.{i}.attn", c.norm),
            sublayer(block.mlp, f"blocks.{i}.mlp", c.norm),
        ]
    if model.head is not None:
        parts.append({"head.weight": model.head.effective_weight()})
    found = {name: t.float() for part in parts for name, t in part.items()}
    wanted = GPT.empty(config).state_dict()
    if extra := sorted(found.keys() - wanted.keys()):
        raise NotPlain(f"{kind} has no {extra[0]}")
    found |= {
        name: torch.zeros(t.shape)
        for name, t in wanted.items()
        if name.endswith("bias") and name not in found
    }
    return config, {name: found[name].expand(t.shape).contiguous() for name, t in wanted.items()}


def sublayer(residual, where: str, kind: str) -> dict:
    """The tensors of one residual sub-layer, whose name in the model is `where`; its pre norm is a
    `kind`."""
    scale, shift = affine(residual.mid, "a norm on a branch's output (mid_norm)")
    for slot, what in (
        (residual.post, "after the sum (post_norm, lns=residual)"),
        (residual.skip, "on the stream"),
    ):
        factor, bias = affine(slot, f"a norm {what}")
        if torch.is_tensor(factor) or factor != 1.0 or bias is not None:
            raise NotPlain(f"a factor {what} has no place there")
    found = norm(residual.pre, f"{where}.pre", kind)
    for name, module in residual.f.named_modules():
        if isinstance(module, Linear):  # x ↦ rows · (W (columns · x) + b), or a stack of such
            columns, before = affine(module.pre, "a norm before a matrix")
            rows, after = affine(
                module.out, "a norm on the outputs of q, k, v, gate, up (gain_out=norm)"
            )
            if before is not None or after is not None:
                raise NotPlain("a bias in the slot of a matrix (fixup) has no place there")
            ends = name.split(".")[-1] in ("o", "down")  # the branch's last
            rows = rows * scale if ends else rows
            if name == "q" and residual.f.q_norm.norm == "none":  # a constant on q
                rows = rows * affine(residual.f.q_norm)[0]
            bias = [] if module.bias is None else [module.bias.double() * rows]
            bias += [shift] if ends and shift is not None else []
            by_row = rows[:, None] if torch.is_tensor(rows) else rows
            found[f"{where}.f.{name}.weight"] = (
                module.effective_weight().double() * columns * by_row
            )
            found |= {f"{where}.f.{name}.bias": sum(bias)} if bias else {}
        # QK-norm: of a matrix's own norm we know by now
        elif isinstance(module, Slot) and module.norm != "none":
            found |= norm(module, f"{where}.f.{name}", "rmsnorm")
    return found


def norm(slot: Slot, where: str, kind: str) -> dict:
    """The gain, and the bias if it has one, of a norm: its gain and constants are one vector."""
    if slot.norm == "none":
        raise NotPlain(
            f"a norm is needed at {where}, where this layout has none (pre_norm, post_norm)"
        )
    gain, bias = affine(slot, f"{slot.norm} at {where}", kind)
    gain = torch.as_tensor(gain, dtype=torch.float64)
    return {f"{where}.gain": gain} | ({} if bias is None else {f"{where}.bias": bias})


def affine(slot: Slot, what: str = "", kind: str = "none") -> tuple:
    """(scale, bias) of a slot y = scale · normalise(x) + bias, in fp64; 1.0 and None where there is
    none. NotPlain, which names `what`, where the norm is not `kind`, or where a factor stands
    before it."""
    if slot.norm != kind or slot.factor_in is not None:
        raise NotPlain(
            f"{what if slot.norm != kind else 'a factor before a norm (lns=input)'} has no place there"
        )
    gain, factor = slot.gain_vector(), 1.0 if slot.factor is None else slot.const
    scale = factor if gain is None else factor * gain.double()
    return scale, None if slot.bias is None else factor * slot.bias.double()
