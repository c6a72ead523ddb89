"""Settings of optimizers and schedules: their defaults where a flag is None, refusals, notes."""

from collections.abc import Iterator

from model import Transformer
from nanodnt.optim.registry import OPTIMIZERS, RATIOS, RULES, Rule, is_class_path, refuse
from nanodnt.settings import TrainConfig

RATIO_FLAGS = [f"lr_ratio_{block_type}" for block_type in RATIOS]


def fill_defaults(config: TrainConfig) -> None:
    """Fill in what is None. ValueError for values that contradict each other or have no effect."""
    entry = find_or_register(config)
    check_unused(config, entry)
    fill(config, entry.defaults | entry.defaults_for(config))
    if entry.fallback_rule:
        for flag in ("learning_rate", "weight_decay"):
            fill(config, {f"{entry.fallback_rule}_{flag}": getattr(config, flag)})
    if config.learning_rate is None:
        refuse(f"optimizer={config.optimizer} needs --learning_rate: its class has no default here")
    fill(config, dict(min_lr=config.learning_rate / 10, lr_decay_iters=config.max_iters))
    if config.schedule == "wsd":
        room = max(0, config.lr_decay_iters - config.warmup_iters)
        steps = min(config.lr_decay_iters // 5, room)
        fill(config, dict(wsd_decay="linear", wsd_decay_iters=steps))
    if config.blockwise_lr:
        ratios = entry.ratios or RATIOS
        fill(config, {f"lr_ratio_{block_type}": ratio for block_type, ratio in ratios.items()})
    check_rates(config, entry)
    check_schedule(config)
    check_ratios(config)


def find_or_register(config: TrainConfig) -> Rule:
    """The rule that --optimizer names; MODULE:CLASS is registered here. ValueError for an unknown
    name."""
    name = config.optimizer
    if is_class_path(name):
        from nanodnt.optim.adapter import register_class  # few runs need it

        return register_class(name, config.optimizer_args)
    if name not in OPTIMIZERS:
        allowed = ", ".join(OPTIMIZERS)
        refuse(f"optimizer={name!r} is unknown: allowed are {allowed}, or MODULE:CLASS")
    return OPTIMIZERS[name]


def fill(config: TrainConfig, values: dict) -> None:
    """Give the fields that are None these values."""
    for name, value in values.items():
        if getattr(config, name) is None:
            setattr(config, name, value)


def check_unused(config: TrainConfig, entry: Rule) -> None:
    """ValueError for flags that are for other optimizers."""
    name = config.optimizer
    if config.optimizer_args and not is_class_path(name):
        text = f"optimizer_args={config.optimizer_args} has no effect on {name}"
        refuse(f"{text}: leave it out, or choose MODULE:CLASS")
    flags = [flag for other in OPTIMIZERS.values() for flag in other.defaults]
    for flag in dict.fromkeys(flags):
        value = getattr(config, flag)
        if value is not None and flag not in entry.defaults:
            users = [other for other in OPTIMIZERS if flag in OPTIMIZERS[other].defaults]
            fix = f"leave it out, or choose {' or '.join(users)}"
            if is_class_path(name):
                fix += f", or set optimizer_args={flag}={value}"
            refuse(f"{flag}={value} has no effect on {name}: {fix}")


def rate_notes(config: TrainConfig, given: dict) -> list[str]:
    """A line for a learning rate from a file, with an optimizer from the command line. `given`: see
    `configure`."""
    _, optimizer_from = given.get("optimizer", (None, ""))
    _, rate_from = given.get("learning_rate", (None, ""))
    if optimizer_from != "command line" or rate_from in ("", "command line"):
        return []
    rate = f"learning_rate={config.learning_rate:g}"
    return [f"{rate} is from {rate_from}; does it suit this optimizer?"]


def check_rates(config: TrainConfig, entry: Rule) -> None:
    """ValueError for rates, momenta and decays that contradict each other."""
    if config.nesterov and (config.dampening or not config.momentum):
        refuse("nesterov needs momentum and no dampening: set nesterov=False, or change those")
    if config.min_lr > config.learning_rate and config.schedule != "constant":
        text = f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}"
        refuse(f"{text}: lower min_lr")
    prefixes = [""]
    decay = "weight_decay"  # the flag with the decay of gains and scalars
    if entry.fallback_rule:
        prefixes.append(f"{entry.fallback_rule}_")
        decay = f"{entry.fallback_rule}_weight_decay"
    for name, off in (("decay_gains", "none"), ("decay_scalars", False)):
        value = getattr(config, name)
        if value != off and not getattr(config, decay):
            text = f"{name}={value} decays by {decay}, which is 0"
            refuse(f"{text}: set that, or leave {name} out")
    decays = [getattr(config, f"{prefix}weight_decay") for prefix in prefixes]
    if config.cautious_decay and not any(decays):
        text = "cautious_decay=True decays by weight_decay, which is 0"
        refuse(f"{text}: set that, or leave cautious_decay out")
    if config.input_gains != "final" and config.decay_gains in ("none", "all"):
        text = f"input_gains={config.input_gains} needs decay_gains=input or output"
        refuse(f"{text}, not {config.decay_gains}")
    ratio = 1
    if config.blockwise_lr and config.blockwise_decay == "scaled":
        ratio = max(getattr(config, name) for name in RATIO_FLAGS)
    for prefix in prefixes:
        rate = getattr(config, f"{prefix}learning_rate")
        share = ratio * rate * getattr(config, f"{prefix}weight_decay")
        if share >= 0.1:
            product = f"{prefix}learning_rate·{prefix}weight_decay (times the largest LR ratio)"
            text = f"{product} = {share:.3g} would shrink every matrix by {share:.0%} a step"
            refuse(f"{text}: lower {prefix}weight_decay")


def check_schedule(config: TrainConfig) -> None:
    """ValueError for flags that the schedule has no use or no room for."""
    if config.schedule != "wsd":
        for name in ("wsd_decay", "wsd_decay_iters"):
            if getattr(config, name) is not None:
                text = f"{name} needs schedule=wsd, but schedule={config.schedule}"
                refuse(f"{text}: leave it out")
        return
    room = max(0, config.lr_decay_iters - config.warmup_iters)
    if config.wsd_decay_iters > room:
        text = f"wsd_decay_iters={config.wsd_decay_iters} must be at most the {room} steps"
        iters = f"lr_decay_iters={config.lr_decay_iters}, warmup_iters={config.warmup_iters}"
        refuse(f"{text} after warm-up ({iters})")


def check_ratios(config: TrainConfig) -> None:
    """ValueError for flags of blockwise rates without these, or with a peak below the floor."""
    usual = dict(blockwise_start="start", blockwise_min_lr="shared", blockwise_decay="scaled")
    if not config.blockwise_lr:
        usual = dict.fromkeys(RATIO_FLAGS) | usual
        given = [name for name, value in usual.items() if getattr(config, name) != value]
        if given:
            refuse(f"{', '.join(given)}: needs blockwise_lr=True")
    elif config.schedule != "constant" and config.blockwise_min_lr == "shared":
        for name in RATIO_FLAGS:
            ratio = getattr(config, name)
            if ratio * config.learning_rate < config.min_lr:
                text = f"{name}={ratio} puts the peak below min_lr={config.min_lr}"
                fix = "lower min_lr, or set blockwise_min_lr=proportional"
                refuse(f"{text}, which all blocks share: {fix}")


def notes(config: TrainConfig, model: Transformer) -> list[str]:
    """Lines for the start of a run: what is allowed, but has no effect or an unusual one. After
    `fill_defaults`."""
    return setting_notes(config) + role_notes(config, model)


def setting_notes(config: TrainConfig) -> list[str]:
    """The notes that depend on no model."""
    return [*optimizer_notes(config), *schedule_notes(config)]


def optimizer_notes(config: TrainConfig) -> Iterator[str]:
    name = config.optimizer
    if config.blockwise_lr and not RULES[name].ratios:
        published = " and ".join(other for other in OPTIMIZERS if OPTIMIZERS[other].ratios)
        text = f"blockwise_lr: the paper has ratios for {published}"
        yield f"{text}; those for {name} are our choice"


def schedule_notes(config: TrainConfig) -> Iterator[str]:
    if config.warmup_iters >= config.max_iters and not config.eval_only:
        warmup = f"warm-up ({config.warmup_iters} steps)"
        yield f"{warmup} does not end within max_iters={config.max_iters}"
    if config.schedule == "constant":
        usual = (config.learning_rate / 10, config.max_iters)
        if (config.min_lr, config.lr_decay_iters) != usual:
            yield "min_lr and lr_decay_iters have no effect with schedule=constant"
    elif config.lr_decay_iters < config.warmup_iters < config.max_iters:
        text = f"warm-up ({config.warmup_iters} steps) outlasts lr_decay_iters="
        yield f"{text}{config.lr_decay_iters}: the LR falls from its peak to min_lr in one step"


def uses_betas(config: TrainConfig, model: Transformer) -> bool:
    """Whether beta1 and beta2 have an effect: on the matrices, or on the parameters of a
    fallback rule."""
    rule = RULES[config.optimizer]
    return bool(rule.fallback_rule) or "betas" in rule.options(config, "ffn", model)


def role_notes(config: TrainConfig, model: Transformer) -> list[str]:
    """The notes that depend on the model: on betas, and on flags for roles that it does not
    have."""
    roles = set(model.roles().values())
    lines = []
    if (config.beta1, config.beta2) != (0.9, 0.95) and not uses_betas(config, model):
        lines.append(f"beta1 and beta2 have no effect on {config.optimizer}")
    if config.decay_gains == "all" and not roles & {"gain_in", "gain_out"}:
        lines.append("decay_gains has no effect: the model has no gains")
    if config.decay_scalars and not roles & {"scalar", "bias"}:
        lines.append("decay_scalars has no effect: the model has no learned scalars or biases")
    for role in ("head", "pos", "router", "patch"):
        if role not in roles and getattr(config, f"lr_ratio_{role}") not in (None, 1):
            lines.append(f"lr_ratio_{role} has no effect: the model has no {role} of its own")
    return lines
