"""The network as equations, in text, read from the modules that were built. How a block joins its
slots is compared with its own forward."""

import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import groupby

import torch
import torch.nn as nn
from torch import Tensor

from layers.linear import Linear, SigmaReparam
from layers.network import init_factor
from layers.ops import GATES
from layers.slot import PositiveSlot, RestSlot, Slot
from model import GPTConfig, Transformer

NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
LEGEND = {  # {symbol: meaning}, in which {} stands for the initial values
    "γ": "learned vector, {} at first",
    "λ": "learned vector, {} at first",
    "|λ|": "absolute value of a learned vector λ, {} at first",
    "ω": "learned vector, set by a profiling forward when training starts (Admin)",
    "β·û": "learned magnitude β, {} at first; û = a/rms(a), a learned direction, all ones at first",
    "exp(β)·û": "learned log-magnitude, exp(β) = {} at first; "
    "û = a/rms(a), a learned direction, all ones at first",
    "s": "learned scalar, {} at first",
    "b": "learned bias, {} at first",
    "bₑ": "bias on the choice of experts, {} at first; "
    "no loss trains it, it follows the experts' load",
    "α": "learned scalar of DyT, {} at first",
    "δ": "learned shift of Derf (its s), {} at first",
    "shrink": "shrink(x) = x − silu(h) x, whose gradient passes to x without the factor; "
    "h is a learned scalar, {} at first (GPAS)",
    "g": "learned scalar of σReparam, σ(W) at first; σ(W) = W's largest singular value, estimated",
}
# constants in equations are marked «like this», so that blocks can be compared without them
CONSTANT = r"«([^»]*)»"
# Names of the parameters that the equations show. A new module in a branch needs a place here and
# in the equations of that branch; `describe_hidden` names parameters without one.
SHOWN = re.compile(
    r"(blocks\.\d+\.(attn|mlp)\.(pre|mid|post|skip|f\.([qkv]_norm|qk_scale)"
    r"|f\.((experts|shared)\.)?(q|k|v|o|router|gate|up|down)(\.pre|\.out)?)"
    r"|wte|wpe|patch|cls|embed_scale|input_norm|final_norm|head|logits_scale)"
    r"\.(weight|sigma|gain|magnitude|direction|alpha|shift|gate|bias|choice_bias)"
)


def symbol(slot: Slot) -> str | None:
    """The symbol of the slot's gain, or None if it has no gain."""
    if isinstance(slot, PositiveSlot):
        return "|λ|"
    if slot.direction is not None:
        return "exp(β)·û" if slot.gain_param == "expmagdir" else "β·û"
    if slot.gain is None:
        return None
    if slot.param_roles["gain"] == "scalar":
        return "s"
    return "γ" if slot.init_gain == 1 else "λ"


def equation(slot: Slot, x: str, is_sum: bool = False) -> str:
    """The slot applied to `x`, as text. Every constant is marked, «0.7071», even a 1."""
    if slot.gate is not None:
        x = f"shrink({x})"
        is_sum = False
    x = f"({x})" if is_sum else f"«{slot.const_in:.4g}»{x}"
    if slot.norm_kind == "dyt":
        x = dyt_equation(slot, x)
    elif slot.norm_kind != "none":
        name = NORMS[slot.norm_kind]
        if slot.groups > 1:
            name += f"[{slot.groups} groups]"
        x = f"{name}{x}" if is_sum else f"{name}({x})"
    if symbol(slot):
        x = f"{symbol(slot)}·{x}"
    if slot.bias is not None:
        x = f"({x} + b)"
    return f"«{slot.const:.4g}»{x}"


def dyt_equation(slot: Slot, x: str) -> str:
    alpha = "α" if isinstance(slot.alpha, nn.Parameter) else f"{slot.alpha:.4g}"
    squash = "" if slot.squash == "identity" else slot.squash
    shift = "" if slot.shift is None else " + δ"
    return f"{squash}({alpha} {x}{shift})"


def linear_equation(linear: Linear, name: str, x: str) -> str:
    """out( W pre(x) + b ) as text; `name` is the matrix's symbol."""
    if isinstance(linear, SigmaReparam):
        name = f"g·{name}/σ({name})"
    y = f"{name} {equation(linear.pre, x)}"
    has_bias = linear.bias is not None
    if has_bias:
        y += " + b"
    return equation(linear.out, y, is_sum=has_bias)


def mlp_equation(config: GPTConfig, mlp: nn.Module, e: str = "") -> str:
    """An FFN of u as text; `e` marks its matrices as those of one expert."""
    hidden = linear_equation(mlp.up, f"Wup{e}", "u")
    if mlp.gate is None:
        hidden = f"{config.mlp}({hidden})"
    else:
        hidden = f"({GATES[config.mlp]}({linear_equation(mlp.gate, f'Wgate{e}', 'u')}) ⊙ {hidden})"
    return linear_equation(mlp.down, f"Wdown{e}", hidden)


def mixture_equations(config: GPTConfig, moe: nn.Module) -> list[str]:
    """The lines of a mixture of experts, the last without its left side."""
    router = moe.router
    n = router.out_features
    chosen_by = "rₑ + bₑ" if router.choice_bias is not None else "rₑ"
    share = "rₑ / Σ r over S" if router.normalise else "rₑ"
    lines = [
        f"r = {router.score}({linear_equation(router, 'Wrouter', 'u')})",
        f"S = the {router.active} of {n} experts with the largest {chosen_by}",
        f"wₑ = «{router.scale:.4g}»{share}",
        f"expertₑ(u) = {mlp_equation(config, moe.experts, 'ₑ')}",
    ]
    result = "Σ wₑ expertₑ(u) over S"
    if moe.shared is not None:
        lines.append(f"shared(u) = {mlp_equation(config, moe.shared)}")
        result += " + shared(u)"
    return [*lines, result]


def head_equation(slot: Slot, linear: Linear, name: str) -> str:
    """q, k or v of u as text: a matrix and the slot on each head of its output."""
    y = equation(slot, linear_equation(linear, name, "u"))
    if slot.norm_kind == "none":
        return y
    return f"{y} per head"


def attention_equations(config: GPTConfig, attention: nn.Module) -> list[str]:
    """The lines of attention, the last without its left side."""
    q = head_equation(attention.q_norm, attention.q, "Wq")
    k = head_equation(attention.k_norm, attention.k, "Wk")
    v = head_equation(attention.v_norm, attention.v, "Wv")
    remark = ", rotated (RoPE)" if config.pos == "rope" else ""
    scale = attention.qk_scale
    logits = f"{equation(scale, equation(scale, 'q'))} kᵀ/√{config.head_dim}"
    if config.causal:
        logits += " + causal mask"
    result = linear_equation(attention.o, "Wo", f"(softmax({logits}) v)")
    return [f"q = {q}{remark}", f"k = {k}{remark}", f"v = {v}", result]


def residual_equations(residual: nn.Module, branch: str, lines: list[str]) -> list[str]:
    """The lines of one sub-layer; `lines` are those of its branch, the last without its left
    side."""
    skip = equation(residual.skip, "x").replace("γ", "ω")
    if isinstance(residual.skip, RestSlot):
        skip = f"(1 − «{residual.mid.const:.4g}»|λ|)·x"
    u = equation(residual.pre, "x")
    change = equation(residual.mid, f"{branch}({u})")
    total = equation(residual.post, f"{skip} + {change}", is_sum=True)
    *steps, result = lines
    return [
        f"x ← {total}",
        *(f"    {step}" for step in steps),
        f"    {branch}(u) = {result}",
    ]


def block_equations(config: GPTConfig, block: nn.Module) -> list[str]:
    """The lines of one block, constants still marked."""
    attention = attention_equations(config, block.attn.f)
    if config.n_expert:
        ffn = mixture_equations(config, block.mlp.f)
    else:
        ffn = [mlp_equation(config, block.mlp.f)]
    return [
        *residual_equations(block.attn, "attention", attention),
        *residual_equations(block.mlp, "ffn", ffn),
    ]


def simplify(line: str) -> str:
    """Leave out constants that are 1, and parentheses around the whole right side."""
    line = re.sub("«1»", "", line)
    line = re.sub(CONSTANT, r"\1·", line)
    line = re.sub(r"\(\(([^()]*)\)\)", r"(\1)", line)
    return re.sub(r"^(x ← )\((.*)\)$", r"\1\2", line)


def describe_blocks(config: GPTConfig, blocks: Iterable[nn.Module]) -> list[str]:
    """Lines for all blocks. Neighbours that differ only in constants are written once, with the
    constants listed."""
    lines = []
    first = 1
    equations = [block_equations(config, block) for block in blocks]
    for _, group in groupby(equations, key=without_constants):
        versions = list(group)  # the lines of each block
        last = first + len(versions) - 1
        title = f"block {first}:" if first == last else f"blocks {first} to {last}:"
        lines += [title, *(f"    {line}" for line in merge_blocks(versions))]
        first = last + 1
    return lines


def without_constants(lines: list[str]) -> list[str]:
    return [re.sub(CONSTANT, "«»", line) for line in lines]


def merge_blocks(versions: list[list[str]]) -> list[str]:
    """The lines of several blocks that differ only in constants, written once. A constant that
    changes from block to block gets a name, and a line with its values."""
    lines = []
    names = {}  # {values of a constant, block by block: its name}
    for same_line in zip(*versions, strict=True):
        constants = []
        for values in zip(*(re.findall(CONSTANT, line) for line in same_line), strict=True):
            if len(set(values)) > 1:
                constants.append(names.setdefault(values, f"c{len(names) + 1}"))
            else:
                constants.append(values[0])
        lines.append(simplify(replace_constants(same_line[0], constants)))
    for values, name in names.items():
        lines.append(f"{name} = {', '.join(values)}, block by block")
    return lines


def replace_constants(line: str, constants: list[str]) -> str:
    """The line with these constants in place of its own."""
    remaining = iter(constants)
    return re.sub(CONSTANT, lambda _: f"«{next(remaining)}»", line)


def describe_network(model: Transformer) -> list[str]:
    """The network from token ids, or patches, to logits, an equation a line; then its symbols and
    initial weights."""
    x = "wte[token]"
    last = equation(model.final_norm, "x")
    if not model.config.causal:  # a network of images
        x = linear_equation(model.patch, "Wpatch", "patch")
        pooled = "mean over patches"
        if model.cls is not None:
            x = f"[class token; {x}]"
            pooled = "class token"
        last = f"({pooled} of {last})"
    if model.wpe is not None:
        x += " + wpe[position]"
    for slot in (model.embed_scale, model.input_norm):
        if slot.norm_kind != "none" or slot.gain is not None:
            x = equation(slot, x, is_sum=" + " in x)
    logits = f"Wte {last}" if model.head is None else linear_equation(model.head, "Whead", last)
    if model.config.causal:
        logits = equation(model.logits_scale, logits)
    return [
        f"x ← {simplify(x)}",
        *describe_blocks(model.config, model.blocks),
        simplify(f"logits = {logits}"),
        *describe_symbols(model),
        *describe_hidden(model),
        describe_code(model),
        describe_init(model),
    ]


def number_range(numbers: Iterable[float]) -> str:
    """Numbers as text: the only one, or "smallest to largest"."""
    low = f"{min(numbers):.4g}"
    high = f"{max(numbers):.4g}"
    return low if low == high else f"{low} to {high}"


def initial_values(model: Transformer) -> Iterator[tuple[str, float]]:
    """The symbol of each learned gain, scalar and bias, and its initial value."""
    skips = {residual.skip for block in model.blocks for residual in (block.attn, block.mlp)}
    for module in model.modules():
        if isinstance(module, Slot):
            name = symbol(module)
            if name:
                yield "ω" if module in skips else name, module.init_gain
            if isinstance(module.alpha, nn.Parameter):
                yield "α", module.init_alpha
            if module.shift is not None:
                yield "δ", 0
            if module.gate is not None:
                yield "shrink", 0
        if isinstance(module, SigmaReparam):
            yield "g", 1
        if getattr(module, "bias", None) is not None:
            yield "b", 0
        if getattr(module, "choice_bias", None) is not None:
            yield "bₑ", 0


def describe_symbols(model: Transformer) -> list[str]:
    """A line for each kind of learned gain, scalar and bias, with its initial values."""
    values_of = {}  # {symbol: initial values}
    for name, value in initial_values(model):
        values_of.setdefault(name, set()).add(value)
    lines = []
    for name, meaning in LEGEND.items():
        if name in values_of:
            lines.append(f"{name}: {meaning.format(number_range(values_of[name]))}")
    return lines


def describe_hidden(model: Transformer) -> list[str]:
    """A line with the parameters that no equation shows, block numbers left out; or no line."""
    hidden = {}  # a dict keeps the order
    for name, _ in model.named_parameters():
        if not SHOWN.fullmatch(name):
            hidden[re.sub(r"\.\d+\.", ".*.", name)] = None
    if not hidden:
        return []
    return [f"not in these equations (nanodnt/plan/equations.py): {', '.join(hidden)}"]


def describe_code(model: Transformer) -> str:
    """A line on how far these are the equations of the code."""
    if all(joins_slots_as_written(block, model.config.n_embd) for block in model.blocks):
        return (
            "compared with the code: the lines x ← … of the blocks. All other lines are read from "
            "the modules, and do not show a change in a forward"
        )
    return (
        "NOT THE EQUATIONS OF THIS CODE: the forward of Block or Residual was changed, and "
        "computes something else than the lines x ← …"
    )


@torch.no_grad()
def joins_slots_as_written(block: nn.Module, n_embd: int) -> bool:
    """Whether x ← post( skip(x) + mid( f( pre(x) ) ) ), first for attention, then for the FFN, is
    what `block` computes: for random x and parameters, with a sine for both f."""
    block = deepcopy(block)
    residuals = block.attn, block.mlp
    for residual in residuals:
        del residual.f
        residual.f = sine
    block.to_empty(device="cpu").eval()
    draws = torch.Generator().manual_seed(0)
    for p in block.parameters():
        p.normal_(generator=draws)
    x = torch.randn(2, 3, n_embd, generator=draws)
    y = x
    for residual in residuals:
        u = residual.pre(y)
        change = residual.mid(sine(u, residual.pre.factor_for_weight()))
        y = residual.post(residual.skip(y) + change)
    try:
        return torch.allclose(block(x), y, atol=1e-4)
    except Exception:  # a forward with other arguments, or another kind of result
        return False


def sine(u: Tensor, in_scale: Tensor | None = None, *_: Tensor) -> Tensor:
    """A function in place of attention or the FFN, with their arguments."""
    if in_scale is not None:
        u = u * in_scale
    return u.sin()


def describe_init(model: Transformer) -> str:
    """A line on the initial values of the matrices."""
    config = model.config
    if config.unit_rows:
        return "initial weights: rows, columns of o and down, of length 1, as after each step"
    kind = f"N(0, {config.init_std:g}²)"
    if config.init != "normal":
        cut = " cut off at 2σ" if config.init == "xavier_cut" else ""
        kind = f"Xavier normal{cut}, embeddings {kind}"
    factors_of = {}  # {matrix of a block: factors on its standard deviation}
    for name, module in model.named_modules():
        factor = init_factor(config, module) if isinstance(module, Linear) else 1
        if factor != 1:
            matrix = f"W{name.split('.')[-1]}"
            factors_of.setdefault(matrix, set()).add(factor)
    matrices_of = {}  # {factors as text: matrices that have them}
    for matrix, factors in factors_of.items():
        matrices_of.setdefault(number_range(factors), []).append(matrix)
    for text, matrices in matrices_of.items():
        kind += f"; {', '.join(matrices)} times {text}"
    return f"initial weights: {kind}"
