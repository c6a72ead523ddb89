"""Summary of a configuration: equations, parameters, FLOPs, memory, learning rates. Nothing is
trained.

python model.py config/dnt_small.py
python model.py config/dnt_small.py --lns=norm --residual_init=plain
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=h100    # memory, micro batch, days, disk
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=a800 --mfu=0.45 --optimizer=msgdw

`python model.py` is short for `python -m nanodnt.plan`. --plan is a word without a value.
"""

import re
import sys
from collections import Counter
from typing import NamedTuple

from torch.optim import Optimizer

from configurator import configure
from layers import rules
from layers.roles import ROLES
from model import GPTConfig, Transformer
from nanodnt.optim import (
    OPTIMIZERS,
    describe_groups,
    fill_defaults,
    lr_at,
    make_optimizer,
    notes,
    state_bytes,
)
from nanodnt.plan.equations import describe_network
from nanodnt.plan.planning import PlanConfig, describe_flops, describe_plan
from nanodnt.run.errors import reports_errors
from nanodnt.settings import TrainConfig
from nanodnt.tables import table
from nanodnt.tasks import resolve, task_of


class Command(NamedTuple):
    """The configuration of a command line; model and optimizer are on the meta device."""

    model: Transformer
    optimizer: Optimizer
    config: TrainConfig
    plan: PlanConfig | None  # with --plan
    remark: str  # on the source of sizes that no dataset gives, or ""


def read_command(argv: list[str]) -> Command:
    """Read the command line. The flags of PlanConfig are known with --plan or --help only."""
    schemas = [GPTConfig, TrainConfig]
    if {"--plan", "--help", "-h"} & set(argv):
        schemas.append(PlanConfig)
    flags = [argument for argument in argv if argument != "--plan"]
    instances, _ = configure(*schemas, argv=flags, description=__doc__)
    model_config, config, *plans = instances
    _, source = task_of(model_config).placeholder_meta(model_config)
    meta, model = resolve(model_config, config)
    remark = ""
    if source and "splits" not in meta:
        remark = f"; {source}, since dataset {config.dataset!r} is not prepared here"
    plan = plans[0] if plans else None
    return Command(model, make_optimizer(model, config), config, plan, remark)


def describe_size(model: Transformer, remark: str = "") -> list[str]:
    """Two lines: the model's sizes, and its vocabulary or images, followed by the `remark`."""
    config = model.config
    heads = f"{config.n_head} heads of {config.head_dim}"
    if config.n_kv_head:
        heads += f", {config.n_kv_head} for k and v"
    ffn = f"FFN {config.ffn_width}"
    if config.n_expert:
        active = f"{config.n_expert_active} active"
        if config.n_expert_shared:
            active += f", {config.n_expert_shared} shared"
        ffn = f"{config.n_expert} experts of {ffn} ({active})"
    rows, data = task_of(config).describe_size(config)
    sizes = f"{config.n_layer} blocks, {config.n_embd} wide, {heads}, {ffn}, {rows}"
    return [sizes, data + remark]


def describe_parameters(model: Transformer, input_gains: str) -> list[str]:
    """A table: tensors, parameters and their share, by role; with experts also the active ones,
    which a token meets."""
    roles = model.roles(input_gains)
    active = model.active_numel()
    numel = {name: p.numel() for name, p in model.named_parameters()}
    total = sum(numel.values())
    rows = [("role", "tensors", "parameters", "share", "active")]
    for role in ROLES:
        names = [name for name in numel if roles[name] == role]
        if names:
            n = sum(numel[name] for name in names)
            n_active = sum(active[name] for name in names)
            rows.append((role, str(len(names)), f"{n:,}", f"{n / total:.3%}", f"{n_active:,}"))
    rows.append(("all", str(len(roles)), f"{total:,}", "", f"{sum(active.values()):,}"))
    if not model.config.n_expert:
        rows = [row[:-1] for row in rows]
    return table(rows)


def describe_memory(model: Transformer) -> list[str]:
    """A table: fp32 weights, gradients and state under each optimizer with its defaults."""
    n = model.num_params()
    weights = f"{4 * n / 1e9:.2f} GB"
    rows = [("optimizer", "weights", "gradients", "state", "state, bytes/parameter")]
    for name in OPTIMIZERS:
        config = TrainConfig(optimizer=name)
        fill_defaults(config)
        state = state_bytes(model, config)
        rows.append((name, weights, weights, f"{state / 1e9:.2f} GB", f"{state / n:.2f}"))
    return table(rows)


def describe_gains(optimizer: Optimizer) -> list[str]:
    """A line for each weight decay of scale vectors: the gains that have it, each with its number
    of tensors in all blocks."""
    gains_of = {}  # {weight decay: number of tensors of each gain}
    for group in optimizer.param_groups:
        if group["role"] in ("gain_in", "gain_out"):
            counts = gains_of.setdefault(group["weight_decay"], Counter())
            for name in group["param_names"]:
                # "blocks.3.attn.f.q.pre.gain" → "attn.q.pre"
                counts[re.sub(r"blocks\.\d+\.|\bf\.|\.\w+$", "", name)] += 1
    lines = []
    for decay, counts in sorted(gains_of.items()):
        gains = ", ".join(f"{gain} ({n})" for gain, n in counts.items())
        lines.append(f"  gains with decay {decay:g}: {gains}")
    return lines


def describe_rates(optimizer: Optimizer, config: TrainConfig) -> list[str]:
    """A table: the learning rate of each group (rows) at the updates where its schedule turns
    (columns)."""
    warmup = config.warmup_iters
    end = config.lr_decay_iters
    turns = {1, warmup, warmup + 1, (warmup + end) // 2, end, config.max_iters}
    if config.schedule == "wsd":
        turns |= {end - config.wsd_decay_iters, end - config.wsd_decay_iters // 2}
    updates = sorted(n for n in turns if 1 <= n <= max(config.max_iters, 1))
    rows = [("LR at update", *map(str, updates))]
    for group in optimizer.param_groups:
        rates = [f"{lr_at(n - 1, config, group):.3g}" for n in updates]
        rows.append((group["label"], *rates))
    return table(rows)


@reports_errors
def main() -> None:
    given = sys.argv[1:]
    if "--plot" in given:
        raise ValueError("--plot is gone: the last table has the learning rates; leave it out")
    model, optimizer, config, plan, remark = read_command(given)
    lines = [*describe_size(model, remark), *config.init_from_notes(), ""]
    if plan:
        lines += describe_plan(model, config, plan)
    else:
        lines += describe_all(model, optimizer, config)
    print(*lines, sep="\n", flush=True)


def describe_all(model: Transformer, optimizer: Optimizer, config: TrainConfig) -> list[str]:
    """Lines: equations, parameters, FLOPs, memory, groups of the optimizer, learning rates,
    notes."""
    return [
        *describe_network(model),
        *(f"note: {note}" for note in rules.notes(model.config)),
        "",
        *describe_parameters(model, config.input_gains),
        "",
        describe_flops(model),
        "",
        *describe_memory(model),
        "activations come on top: --plan counts them",
        "",
        describe_groups(optimizer, model),
        *describe_gains(optimizer),
        "",
        *describe_rates(optimizer, config),
        *(f"note: {note}" for note in notes(config, model)),
    ]


if __name__ == "__main__":
    sys.exit(main())
