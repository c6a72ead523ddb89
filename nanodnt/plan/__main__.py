"""What a configuration comes to: equations, parameters, FLOPs, memory, learning rates. Nothing is
trained.

python model.py config/dnt_small.py
python model.py config/dnt_small.py --lns=norm --residual_init=plain
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=h100     # memory on each GPU, largest micro batch, days, disk
python model.py config/dnt_xl.py --plan --gpus=32 --gpu=a800 --mfu=0.45 --optimizer=msgdw

--plan is a word without a value.
"""

import re
import sys
from collections import Counter

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


def read_command(argv: list, *schemas) -> tuple:
    """Read the command line: (model, optimizer, TrainConfig, a remark on the data), then an
    instance of each further schema. Model and optimizer are on the meta device."""
    (model_config, config, *others), _ = configure(
        GPTConfig, TrainConfig, *schemas, argv=argv, description=__doc__
    )
    _, source = task_of(model_config).placeholder_meta(model_config)
    meta, model = resolve(model_config, config)
    stands_in = source and "splits" not in meta
    remark = (
        f"; {source}, since dataset {config.dataset!r} is not prepared here" if stands_in else ""
    )
    return model, make_optimizer(model, config), config, remark, *others


def describe_size(model: Transformer, remark: str = "") -> list:
    """Two lines: the model's sizes, and its vocabulary or images, followed by the `remark`."""
    c = model.config
    heads = f"{c.n_head} heads of {c.head_dim}" + (
        f", {c.n_kv_head} for k and v" if c.n_kv_head else ""
    )
    ffn = f"FFN {c.ffn_width}"
    if c.n_expert:
        shared = f", {c.n_expert_shared} shared" if c.n_expert_shared else ""
        ffn = f"{c.n_expert} experts of FFN {c.ffn_width} ({c.n_expert_active} active{shared})"
    rows, data = task_of(c).describe_size(c)
    return [f"{c.n_layer} blocks, {c.n_embd} wide, {heads}, {ffn}, {rows}", data + remark]


def describe_parameters(model: Transformer, input_gains: str) -> list:
    """A table: tensors, parameters and their share, by role; with experts also the active ones,
    which a token meets."""
    roles, active, total = model.roles(input_gains), model.active_numel(), model.num_params()
    rows = [("role", "tensors", "parameters", "share", "active")]
    for role in (role for role in ROLES if role in roles.values()):
        of_role = {name: p.numel() for name, p in model.named_parameters() if roles[name] == role}
        n, met = sum(of_role.values()), sum(active[name] for name in of_role)
        rows.append((role, str(len(of_role)), f"{n:,}", f"{n / total:.3%}", f"{met:,}"))
    rows.append(("all", str(len(roles)), f"{total:,}", "", f"{sum(active.values()):,}"))
    return table(rows if model.config.n_expert else [row[:-1] for row in rows])


def describe_memory(model: Transformer) -> list:
    """A table: fp32 weights, gradients and state under each optimizer with its defaults."""
    weights, rows = (
        4 * model.num_params(),
        [("optimizer", "weights", "gradients", "state", "state, bytes/parameter")],
    )
    for name in OPTIMIZERS:
        config = TrainConfig(optimizer=name)
        fill_defaults(config)
        state = state_bytes(model, config)
        sizes = [f"{size / 1e9:.2f} GB" for size in (weights, weights, state)]
        rows.append((name, *sizes, f"{state / model.num_params():.2f}"))
    return table(rows)


def describe_gains(optimizer) -> list:
    """A line for each weight decay of scale vectors: which have it, and how many tensors those are
    in all blocks."""
    found = {}
    for group in optimizer.param_groups:
        if group["role"] in ("gain_in", "gain_out"):
            places = [
                re.sub(r"blocks\.\d+\.|\bf\.|\.\w+$", "", name) for name in group["param_names"]
            ]
            found.setdefault(group["weight_decay"], Counter()).update(places)
    lines = []
    for decay, counts in sorted(found.items()):
        named = ", ".join(f"{place} ({n})" for place, n in counts.items())
        lines.append(f"  gains with decay {decay:g}: {named}")
    return lines


def describe_rates(optimizer, config: TrainConfig) -> list:
    """A table: the learning rate of each group (rows) at the updates where its schedule turns
    (columns)."""
    end, warmup = config.lr_decay_iters, config.warmup_iters
    turns = {1, warmup, warmup + 1, (warmup + end) // 2, end, config.max_iters}
    if config.schedule == "wsd":
        turns |= {end - config.wsd_decay_iters, end - config.wsd_decay_iters // 2}
    turns = sorted(t for t in turns if 1 <= t <= max(config.max_iters, 1))
    rows = [("LR at update", *map(str, turns))]
    for group in optimizer.param_groups:
        rows.append((group["label"], *(f"{lr_at(t - 1, config, group):.3g}" for t in turns)))
    return table(rows)


@reports_errors
def main() -> None:
    """`python model.py …`."""
    given = sys.argv[1:]
    if "--plot" in given:
        raise ValueError("--plot is gone: the last table has the learning rates; leave it out")
    schemas = (PlanConfig,) if {"--plan", "--help", "-h"} & set(given) else ()
    argv = [argument for argument in given if argument != "--plan"]
    model, optimizer, config, remark, *plan = read_command(argv, *schemas)
    lines = [*describe_size(model, remark), *config.source_notes(), ""]
    if "--plan" in given:
        lines += describe_plan(model, config, *plan)
    else:
        lines += describe_all(model, optimizer, config)
    print(*lines, sep="\n", flush=True)


def describe_all(model: Transformer, optimizer, config: TrainConfig) -> list:
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
