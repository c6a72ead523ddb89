"""The network as equations, in text. Everything is read from the model that was built, nothing from
its flags."""

import re
from itertools import groupby

import torch

from layers.linear import Linear, SigmaReparam
from layers.network import init_factor
from layers.slot import Slot
from model import GPTConfig, Transformer

NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
LEGEND = {  # symbol: its meaning; {} = its initial values
    "γ": "learned vector, {} at first",
    "λ": "learned vector, {} at first",
    "ω": "learned vector, set by a profiling forward when training starts (Admin)",
    "β·û": "learned magnitude β, {} at first; û = a/rms(a), a learned direction, all ones at first",
    "exp(β)·û": "learned log-magnitude, exp(β) = {} at first; û = a/rms(a), a learned direction, all ones at first",
    "s": "learned scalar, {} at first",
    "b": "learned bias, {} at first",
    "bₑ": "bias on the choice of experts, {} at first; no loss trains it, it follows the experts' load",
    "α": "learned scalar of DyT, {} at first",
    "g": "learned scalar of σReparam, σ(W) at first; σ(W) = W's largest singular value, estimated",
}
# equations mark their constants, so that blocks can be compared without them
CONSTANT = r"«([^»]*)»"


def symbol(slot: Slot) -> str | None:
    """The symbol of the slot's gain, or None if it has no gain."""
    if slot.direction is not None:
        return "exp(β)·û" if slot.param == "expmagdir" else "β·û"
    if slot.gain is None:
        return None
    return "s" if slot.param_roles["gain"] == "scalar" else "γ" if slot.init_gain == 1 else "λ"


def equation(slot: Slot, x: str, is_sum: bool = False) -> str:
    """The slot applied to `x`, as text. Every constant is marked, «0.7071», also those that are
    1."""
    x = f"({x})" if is_sum else f"«{slot.const_in:.4g}»{x}"
    if slot.norm == "dyt":
        alpha = "α" if isinstance(slot.alpha, torch.nn.Parameter) else f"{slot.alpha:.4g}"
        x = f"{'' if slot.squash == 'identity' else slot.squash}({alpha} {x})"
    elif slot.norm != "none":
        groups = f"[{slot.groups} groups]" if slot.groups > 1 else ""
        x = NORMS[slot.norm] + groups + (x if is_sum else f"({x})")
    if symbol(slot):
        x = f"{symbol(slot)}·{x}"
    if slot.bias is not None:
        x = f"({x} + b)"
    return f"«{slot.const:.4g}»{x}"


def linear_equation(linear: Linear, name: str, x: str) -> str:
    """out( W pre(x) + b ) as text; `name` is the matrix's symbol."""
    y = (
        f"g·{name}/σ({name})" if isinstance(linear, SigmaReparam) else name
    ) + f" {equation(linear.pre, x)}"
    return equation(
        linear.out, y + " + b" * (linear.bias is not None), is_sum=linear.bias is not None
    )


def mlp_equation(config: GPTConfig, mlp, e: str = "") -> str:
    """An FFN of u as text; `e` marks its matrices as those of one expert."""
    hidden = linear_equation(mlp.up, f"Wup{e}", "u")
    if mlp.gate is None:
        hidden = f"{config.mlp}({hidden})"
    else:
        hidden = f"(silu({linear_equation(mlp.gate, f'Wgate{e}', 'u')}) ⊙ {hidden})"
    return linear_equation(mlp.down, f"Wdown{e}", hidden)


def mixture_equations(config: GPTConfig, moe) -> list:
    """The lines of a mixture of experts, the last without its left side."""
    router, n = moe.router, moe.router.out_features
    chosen_by = "rₑ + bₑ" if router.choice_bias is not None else "rₑ"
    share = "rₑ / Σ r over S" if router.normalise else "rₑ"
    lines = [
        f"r = {router.score}({linear_equation(router, 'Wrouter', 'u')})",
        f"S = the {router.active} of {n} experts with the largest {chosen_by}",
        f"wₑ = «{router.scale:.4g}»{share}",
        f"expertₑ(u) = {mlp_equation(config, moe.experts, 'ₑ')}",
    ]
    if moe.shared is not None:
        lines.append(f"shared(u) = {mlp_equation(config, moe.shared)}")
    return [*lines, "Σ wₑ expertₑ(u) over S" + " + shared(u)" * (moe.shared is not None)]


def block_equations(config: GPTConfig, block) -> list:
    """The lines of one block, constants still marked."""
    head, mlp = block.attn.f, block.mlp.f
    rotated = (" per head" if config.qk_norm else "") + (
        ", rotated (RoPE)" if config.pos == "rope" else ""
    )
    q = equation(head.q_norm, linear_equation(head.q, "Wq", "u")) + rotated
    k = equation(head.k_norm, linear_equation(head.k, "Wk", "u")) + rotated
    v = linear_equation(head.v, "Wv", "u")
    scores = f"(softmax(q kᵀ/√{config.head_dim}{' + causal mask' * config.causal}) v)"
    attention = [f"q = {q}", f"k = {k}", f"v = {v}", linear_equation(head.o, "Wo", scores)]
    ffn = mixture_equations(config, mlp) if config.n_expert else [mlp_equation(config, mlp)]
    lines = []
    for residual, name, steps in ((block.attn, "attention", attention), (block.mlp, "ffn", ffn)):
        branch = equation(residual.mid, f"{name}({equation(residual.pre, 'x')})")
        total = equation(
            residual.post,
            f"{equation(residual.skip, 'x').replace('γ', 'ω')} + {branch}",
            is_sum=True,
        )
        lines += [
            f"x ← {total}",
            *(f"    {step}" for step in steps[:-1]),
            f"    {name}(u) = {steps[-1]}",
        ]
    return lines


def simplify(line: str) -> str:
    """Leave out constants that are 1, and parentheses around the whole right side."""
    line = re.sub(CONSTANT, lambda m: "" if m[1] == "1" else f"{m[1]}·", line)
    line = re.sub(r"\(\(([^()]*)\)\)", r"(\1)", line)
    return re.sub(r"^(x ← )\((.*)\)$", r"\1\2", line)


def describe_blocks(config: GPTConfig, blocks) -> list:
    """Lines for all blocks. Neighbours that differ only in constants are written once, with the
    constants listed."""
    lines, numbered = (
        [],
        [(i + 1, block_equations(config, block)) for i, block in enumerate(blocks)],
    )
    for _, group in groupby(
        numbered, key=lambda pair: [re.sub(CONSTANT, "«»", line) for line in pair[1]]
    ):
        numbers, versions = zip(*group, strict=True)
        lines.append(
            f"block {numbers[0]}:"
            if len(numbers) == 1
            else f"blocks {numbers[0]} to {numbers[-1]}:"
        )
        names = {}  # of constants that change from block to block: values → name
        for same_line in zip(*versions, strict=True):
            columns = list(zip(*(re.findall(CONSTANT, line) for line in same_line), strict=True))
            for values in columns:
                if len(set(values)) > 1:
                    names.setdefault(values, f"c{len(names) + 1}")
            constants = iter([names.get(values, values[0]) for values in columns])
            lines.append(
                "    "
                + simplify(re.sub(CONSTANT, lambda _, c=constants: f"«{next(c)}»", same_line[0]))
            )
        lines += [
            f"    {name} = {', '.join(values)}, block by block" for values, name in names.items()
        ]
    return lines


def describe_network(model: Transformer) -> list:
    """The network from token ids, or patches, to logits, an equation a line; then its symbols and
    initial weights."""
    x, last = "wte[token]", equation(model.final_norm, "x")
    if not model.config.causal:  # patches see each other
        x, pooled = linear_equation(model.patch, "Wpatch", "patch"), "mean over patches"
        if model.cls is not None:
            x, pooled = f"[class token; {x}]", "class token"
        last = f"({pooled} of {last})"
    x += " + wpe[position]" if model.wpe is not None else ""
    for slot in (model.embed_scale, model.input_norm):
        if slot.norm != "none" or slot.gain is not None:
            x = equation(slot, x, is_sum=" + " in x)
    logits = f"Wte {last}" if model.head is None else linear_equation(model.head, "Whead", last)
    lines = [
        f"x ← {simplify(x)}",
        *describe_blocks(model.config, model.blocks),
        simplify(f"logits = {logits}"),
    ]
    return [*lines, *describe_symbols(model), *describe_init(model)]


def number_range(numbers) -> str:
    """Numbers as text: the only one, or "smallest to largest"."""
    texts = list(dict.fromkeys(f"{x:.4g}" for x in (min(numbers), max(numbers))))
    return " to ".join(texts)


def initial_values(model: Transformer):
    """Pairs: the symbol of each learned gain, scalar and bias, and its initial value."""
    skips = {residual.skip for block in model.blocks for residual in (block.attn, block.mlp)}
    for module in model.modules():
        if isinstance(module, Slot):
            if symbol(module):
                yield ("ω" if module in skips else symbol(module)), module.init_gain
            if isinstance(module.alpha, torch.nn.Parameter):
                yield "α", module.init_alpha
        if isinstance(module, SigmaReparam):
            yield "g", 1
        if getattr(module, "bias", None) is not None:
            yield "b", 0
        if getattr(module, "choice_bias", None) is not None:
            yield "bₑ", 0


def describe_symbols(model: Transformer) -> list:
    """A line for each kind of learned gain, scalar and bias, with its initial values."""
    found = {}
    for name, value in initial_values(model):
        found.setdefault(name, set()).add(value)
    return [
        f"{name}: {text.format(number_range(found[name]))}"
        for name, text in LEGEND.items()
        if name in found
    ]


def describe_init(model: Transformer) -> list:
    """A line on the initial values of the matrices."""
    c = model.config
    scales = {}  # of each matrix of a block
    for name, module in model.named_modules():
        factor = init_factor(c, module) if isinstance(module, Linear) else 1
        if factor != 1:
            scales.setdefault(f"W{name.split('.')[-1]}", set()).add(factor)
    kind = f"N(0, {c.init_std:g}²)"
    if c.init != "normal":
        cut = " cut off at 2σ" if c.init == "xavier_cut" else ""
        kind = f"Xavier normal{cut}, embeddings {kind}"
    texts = {name: number_range(factors) for name, factors in scales.items()}
    for text in dict.fromkeys(texts.values()):
        kind += f"; {', '.join(name for name in texts if texts[name] == text)} times {text}"
    return [f"initial weights: {kind}"]
