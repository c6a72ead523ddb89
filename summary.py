"""What a configuration comes to: the network as equations, its parameters, FLOPs and memory. Nothing is trained.

python model.py config/dnt_small.py
python model.py config/dnt_small.py --lns=norm --residual_init=plain
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=h100     # memory on each GPU, largest micro batch, days, disk
"""

import re
import sys
from itertools import groupby
from pathlib import Path

import torch

import rundir
import runtime
from configurator import configure
from loader import folder_of, load_meta
from model import GPT, ROLES, GPTConfig, Linear, SigmaReparam, Slot
from optim import OPTIMIZERS, describe_groups, fill_defaults, lr_at, make_optimizer, notes, state_bytes
from train import TrainConfig

NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
LEGEND = {  # symbol: what it is; {} = its values at first
    "γ": "learned vector, {} at first",
    "λ": "learned vector, {} at first",
    "ω": "learned vector, set by a profiling forward when training starts (Admin)",
    "β·û": "learned magnitude β, {} at first; û = a/rms(a), a learned direction, all ones at first",
    "exp(β)·û": "learned log-magnitude, exp(β) = {} at first; û = a/rms(a), a learned direction, all ones at first",
    "s": "learned scalar, {} at first",
    "b": "learned bias, {} at first",
    "α": "learned scalar of DyT, {} at first",
    "g": "learned scalar of σReparam, σ(W) at first; σ(W) = W's largest singular value, estimated",
}


def symbol(slot: Slot):
    """What stands for the slot's gain in an equation, or None."""
    if slot.direction is not None:
        return "exp(β)·û" if slot.param == "expmagdir" else "β·û"
    if slot.gain is None:
        return None
    return "s" if slot.param_roles["gain"] == "scalar" else "γ" if slot.init_gain == 1 else "λ"


def equation(slot: Slot, x: str, is_sum: bool = False) -> str:
    """The slot applied to `x`, as text. Constants stand in «»: «0.7071», and are there even when they are 1."""
    x = x if is_sum else f"«{slot.const_in:.4g}»{x}"
    if slot.norm == "dyt":
        alpha = "α" if isinstance(slot.alpha, torch.nn.Parameter) else f"{slot.alpha:.4g}"
        squash = "" if slot.squash == "identity" else slot.squash
        x = f"{squash}({alpha} ({x}))" if is_sum else f"{squash}({alpha} {x})"
    elif slot.norm != "none":
        x = NORMS[slot.norm] + (f"[{slot.groups} groups]" if slot.groups > 1 else "") + f"({x})"
    elif is_sum:
        x = f"({x})"
    if symbol(slot):
        x = f"{symbol(slot)}·{x}"
    if slot.bias is not None:
        x = f"({x} + b)"
    return f"«{slot.const:.4g}»{x}"


def matrix(linear: Linear, name: str, x: str) -> str:
    """out( W pre(x) + b ) as text."""
    y = (f"g·{name}/σ({name})" if isinstance(linear, SigmaReparam) else name) + f" {equation(linear.pre, x)}"
    return equation(linear.out, y + " + b" * (linear.bias is not None), is_sum=linear.bias is not None)


def block_equations(config: GPTConfig, block) -> list:
    """The lines of one block."""
    head, mlp = block.attn.f, block.mlp.f
    rotated = (" per head" if config.qk_norm else "") + (", rotated (RoPE)" if config.pos == "rope" else "")
    q = equation(head.q_norm, matrix(head.q, "Wq", "u")) + rotated
    k = equation(head.k_norm, matrix(head.k, "Wk", "u")) + rotated
    scores = f"(softmax(q kᵀ/√{config.head_dim} + causal mask) v)"
    up = matrix(mlp.up, "Wup", "u")
    hidden = f"{config.mlp}({up})" if mlp.gate is None else f"(silu({matrix(mlp.gate, 'Wgate', 'u')}) ⊙ {up})"
    inside = {
        "attention": [f"q = {q}", f"k = {k}", f"v = {matrix(head.v, 'Wv', 'u')}", matrix(head.o, "Wo", scores)],
        "ffn": [matrix(mlp.down, "Wdown", hidden)],
    }
    lines = []
    for residual, (name, steps) in zip((block.attn, block.mlp), inside.items(), strict=True):
        branch = equation(residual.mid, f"{name}({equation(residual.pre, 'x')})")
        total = equation(residual.post, f"{equation(residual.skip, 'x').replace('γ', 'ω')} + {branch}", is_sum=True)
        lines += [f"x ← {total}", *(f"    {step}" for step in steps[:-1]), f"    {name}(u) = {steps[-1]}"]
    return lines


CONSTANT = r"«([^»]*)»"


def tidy(line: str) -> str:
    """Leave out constants that are 1, and parentheses around the whole right side."""
    line = re.sub(CONSTANT, lambda m: "" if m[1] == "1" else f"{m[1]}·", line)
    line = re.sub(r"\(\(([^()]*)\)\)", r"(\1)", line)
    return re.sub(r"^(x ← )\((.*)\)$", r"\1\2", line)


def describe_blocks(config: GPTConfig, blocks) -> list:
    """Lines for all blocks; neighbours that differ in constants alone are one, with the constants listed."""
    lines, numbered = [], [(i + 1, block_equations(config, block)) for i, block in enumerate(blocks)]
    for _, group in groupby(numbered, key=lambda pair: [re.sub(CONSTANT, "«»", line) for line in pair[1]]):
        numbers, versions = zip(*group, strict=True)
        lines.append(f"block {numbers[0]}:" if len(numbers) == 1 else f"blocks {numbers[0]} to {numbers[-1]}:")
        names = {}  # of constants that change from block to block: values → name
        for same_line in zip(*versions, strict=True):
            columns = list(zip(*(re.findall(CONSTANT, line) for line in same_line), strict=True))
            for values in columns:
                if len(set(values)) > 1:
                    names.setdefault(values, f"c{len(names) + 1}")
            constants = iter([names.get(values, values[0]) for values in columns])
            lines.append("    " + tidy(re.sub(CONSTANT, lambda _, c=constants: f"«{next(c)}»", same_line[0])))
        lines += [f"    {name} = {', '.join(values)}, block by block" for values, name in names.items()]
    return lines


def describe_network(model: GPT) -> list:
    """The network from token ids to logits, one equation a line."""
    x = "wte[token]" + (" + wpe[position]" if model.wpe is not None else "")
    for slot in (model.embed_scale, model.input_norm):
        if slot.norm != "none" or slot.gain is not None:
            x = equation(slot, x, is_sum=" + " in x)
    head = "Wte" if model.head is None else "Whead"
    lines = [f"x ← {tidy(x)}", *describe_blocks(model.config, model.blocks)]
    lines.append(tidy(f"logits = {head} {equation(model.final_norm, 'x')}"))
    return [*lines, *describe_symbols(model), *describe_init(model)]


def values(numbers) -> str:
    """Numbers as text: one, or the range they span."""
    numbers = sorted(set(numbers), key=float)
    return " to ".join(f"{x:.4g}" for x in (numbers[0], numbers[-1])[: len(numbers)])


def describe_symbols(model: GPT) -> list:
    """A line for each kind of learned gain, scalar and bias, with its values at first."""
    start, admin = {}, [r.skip for block in model.blocks for r in (block.attn, block.mlp) if r.skip.gain is not None]
    for module in model.modules():
        if isinstance(module, Slot):
            name = "ω" if any(module is slot for slot in admin) else symbol(module)
            start.setdefault(name, []).append(module.init_gain)
            if isinstance(module.alpha, torch.nn.Parameter):
                start.setdefault("α", []).append(module.init_alpha)
        if getattr(module, "bias", None) is not None:
            start.setdefault("b", []).append(0)
        if isinstance(module, SigmaReparam):
            start.setdefault("g", []).append(1)
    return [f"{name}: {meaning.format(values(start[name]))}" for name, meaning in LEGEND.items() if name in start]


def describe_init(model: GPT) -> list:
    """How the matrices start."""
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.init_scale != 1:
            factors.setdefault(name.split(".")[-1], []).append(module.init_scale)
    parts = {}
    for part, scales in factors.items():
        parts.setdefault(values(scales), []).append(part)
    c = model.config
    kind = f"N(0, {c.init_std:g}²)" if c.init == "normal" else f"Xavier normal, embeddings N(0, {c.init_std:g}²)"
    return [f"initial weights: {kind}" + "".join(f"; W{', W'.join(p)} times {scale}" for scale, p in parts.items())]


def table(rows: list) -> list:
    """Rows of texts as aligned lines, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def describe_parameters(model: GPT) -> list:
    roles, rows, total = model.roles(), [("role", "tensors", "parameters", "share")], model.num_params()
    for role in ROLES:
        sizes = [p.numel() for name, p in model.named_parameters() if roles[name] == role]
        if sizes:
            rows.append((role, str(len(sizes)), f"{sum(sizes):,}", f"{sum(sizes) / total:.3%}"))
    return table([*rows, ("all", str(len(roles)), f"{total:,}", "")])


def describe_flops(model: GPT) -> str:
    c, total = model.config, model.flops_per_token()
    attention, head = 12 * c.n_layer * c.n_embd * c.block_size, 6 * c.padded_vocab_size * c.n_embd
    shares = (
        f"blocks {(total - attention - head) / total:.0%}, head {head / total:.0%}, attention {attention / total:.0%}"
    )
    return f"{total / 1e9:.3f} GFLOPs per token, forward and backward ({shares})"


def describe_memory(model: GPT) -> list:
    """Weights and gradients are fp32; the state is that of a real optimizer on this model without storage."""
    fixed, rows = 4 * model.num_params(), [("optimizer", "weights", "gradients", "state", "state, bytes/parameter")]
    for name in OPTIMIZERS:
        config = TrainConfig(optimizer=name)
        fill_defaults(config)
        state = state_bytes(model, config)
        sizes = [f"{size / 1e9:.2f} GB" for size in (fixed, fixed, state)]
        rows.append((name, *sizes, f"{state / model.num_params():.2f}"))
    return table(rows)


def describe_rates(optimizer, config: TrainConfig) -> list:
    """LR of each group where its schedule turns: rows are groups, columns updates."""
    end, warmup = config.lr_decay_iters, config.warmup_iters
    turns = {1, warmup, warmup + 1, (warmup + end) // 2, end, config.max_iters}
    if config.schedule == "wsd":
        turns |= {end - config.wsd_decay_iters, end - config.wsd_decay_iters // 2}
    turns = sorted(t for t in turns if 1 <= t <= max(config.max_iters, 1))
    rows = [("LR at update", *map(str, turns))]
    for group in optimizer.param_groups:
        rows.append((group["label"], *(f"{lr_at(t - 1, config, group):.3g}" for t in turns)))
    return table(rows)


def draw_rates(optimizer, config: TrainConfig, path: Path) -> None:
    """Draw the LR of each group over all steps, groups with the same LR as one line. ValueError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    updates = sorted({1 + i * (config.max_iters - 1) // 1000 for i in range(1001)})
    lines = {}
    for group in optimizer.param_groups:
        lines.setdefault(tuple(lr_at(t - 1, config, group) for t in updates), []).append(group["label"])
    figure, axis = plt.subplots(figsize=(7.6, 4), dpi=160)
    for rates, labels in sorted(lines.items(), key=lambda line: -max(line[0])):
        axis.plot(updates, rates, label=", ".join(labels), linewidth=1.4)
    axis.set(xlabel="update", ylabel="learning rate", title=f"{config.optimizer}, {config.schedule}")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    rundir.write_file(path, lambda f: figure.savefig(f, format="png"))
    plt.close(figure)


def resolve(description: str, *schemas) -> tuple:
    """(model, optimizer, both on the meta device, TrainConfig, a word on the vocabulary) of this command line, and an
    instance of each further schema."""
    (flags, config, *others), _ = configure(GPTConfig, TrainConfig, *schemas, description=description)
    config.check()
    fill_defaults(config)
    vocabulary = ""
    if not flags.vocab_size:
        if (folder_of(config.dataset) / "meta.json").exists():
            flags.vocab_size = load_meta(config.dataset, verify=False)["vocab_size"]
        else:
            flags.vocab_size = 50257
            vocabulary = f"; GPT-2's, since dataset {config.dataset!r} is not prepared here"
    model = GPT.empty(flags)
    return model, make_optimizer(model, config), config, vocabulary, *others


def main() -> int:
    from plan import PlanConfig, describe_plan  # which takes its tables from here

    try:
        plan = "--plan" in sys.argv
        schemas = (PlanConfig,) if plan or {"--help", "-h"} & set(sys.argv) else ()
        sys.argv = [argument for argument in sys.argv if argument != "--plan"]
        model, _, config, vocabulary, *others = resolve(__doc__, *schemas)
        c = model.config
        heads = f"{c.n_head} heads of {c.head_dim}" + (f", {c.n_kv_head} for k and v" if c.n_kv_head else "")
        print(f"{c.n_layer} blocks, {c.n_embd} wide, {heads}, FFN {c.hidden}, context {c.block_size}")
        print(f"vocabulary {c.vocab_size}, padded to {c.padded_vocab_size}{vocabulary}\n")
        if plan:
            print(*describe_plan(model, config, *others), sep="\n", flush=True)
            return 0
        print(*describe_network(model), *(f"note: {note}" for note in c.notes()), "", sep="\n")
        print(*describe_parameters(model), "", describe_flops(model), "", sep="\n")
        print(
            *describe_memory(model),
            "activations come on top: --plan counts them",
            sep="\n",
            flush=True,
        )
    except runtime.EXPECTED as e:
        return runtime.report(e)
    return 0


SCHEDULE_HELP = """What a configuration trains with: parameter groups, and the learning rate of each over the run.

python optim.py config/blockwise/gpt2_124m.py config/blockwise/blockwise.py
python optim.py --plot config/dnt_small.py --schedule=wsd       # also draws OUT_DIR/lr.png
"""


def optimizer_main() -> int:
    try:
        plot = "--plot" in sys.argv
        sys.argv = [argument for argument in sys.argv if argument != "--plot"]
        model, optimizer, config, _ = resolve(SCHEDULE_HELP)
        print(describe_groups(optimizer, model), "", *describe_rates(optimizer, config), sep="\n")
        for note in notes(config, model):
            print(f"note: {note}")
        if plot:
            path = Path(config.out_dir) / "lr.png"
            draw_rates(optimizer, config, path)
            print(f"drawn: {path}", flush=True)
    except runtime.EXPECTED as e:
        return runtime.report(e)
    return 0
