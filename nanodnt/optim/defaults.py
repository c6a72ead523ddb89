"""Settings of optimizers and schedules: the defaults of what is None, what is refused, what is
noted."""

from nanodnt.optim.registry import OPTIMIZERS, RATIOS

RATIO_FLAGS = [f"lr_ratio_{block_type}" for block_type in RATIOS]


def fill_defaults(config) -> None:
    """Fill in what is None. ValueError for values that are impossible, contradict each other or
    have no effect."""
    name, entry = config.optimizer, OPTIMIZERS[config.optimizer]
    defaults = entry.defaults | entry.defaults_for(config)
    # the flags of all optimizers, each once: fields of TrainConfig whose default is None
    flags = list(dict.fromkeys(flag for other in OPTIMIZERS.values() for flag in other.defaults))
    for flag in flags:
        value = getattr(config, flag)
        if value is not None and flag not in defaults:
            users = " or ".join(other for other, its in OPTIMIZERS.items() if flag in its.defaults)
            raise ValueError(
                f"{flag}={value} has no effect on {name}: leave it out, or choose {users}"
            )
    fill(config, {flag: defaults.get(flag) for flag in flags})
    if entry.rest:
        fill(
            config,
            {
                f"{entry.rest}_{flag}": getattr(config, flag)
                for flag in ("learning_rate", "weight_decay")
            },
        )
    fill(config, dict(min_lr=config.learning_rate / 10, lr_decay_iters=config.max_iters))
    if config.schedule == "wsd":
        room = max(0, config.lr_decay_iters - config.warmup_iters)
        fill(
            config, dict(wsd_decay="linear", wsd_decay_iters=min(config.lr_decay_iters // 5, room))
        )
    if config.blockwise_lr:
        fill(
            config,
            {
                f"lr_ratio_{block_type}": ratio
                for block_type, ratio in (entry.ratios or RATIOS).items()
            },
        )
    for is_so, text in refusals(config, entry, flags):
        if is_so:
            raise ValueError(text)


def rate_notes(config, given: dict) -> list:
    """A line for a learning rate from a file, with an optimizer from the command line. `given`: of
    `configure`."""
    optimizer, rate = (given.get(name, (None, ""))[1] for name in ("optimizer", "learning_rate"))
    if optimizer != "command line" or rate in ("", "command line"):
        return []
    return [
        f"note: learning_rate={config.learning_rate:g} is from {rate}; does it suit this optimizer?"
    ]


def fill(config, values: dict) -> None:
    """Give the fields that are None these values."""
    for name, value in values.items():
        if getattr(config, name) is None:
            setattr(config, name, value)


def refusals(config, entry, flags: list):
    """Yield (whether it is so, what is said then) for values that are impossible, or make others
    useless."""
    rates = [flag for flag in flags if flag.endswith(("learning_rate", "weight_decay"))]
    for name in (*rates, "min_lr", *RATIO_FLAGS, "grad_clip", "warmup_iters", "lr_decay_iters"):
        value = getattr(config, name) or 0
        yield value < 0, f"{name}={value} must not be negative"
    for name in ("beta1", "beta2", "momentum", "dampening"):
        value = getattr(config, name) or 0
        yield not 0 <= value < 1, f"{name}={value} must be at least 0 and below 1"
    steps = config.muon_steps
    yield steps is not None and not 1 <= steps <= 20, f"muon_steps={steps} must be between 1 and 20"
    text = "nesterov needs momentum and no dampening: set nesterov=False, or change those"
    yield config.nesterov and (config.dampening or not config.momentum), text
    text = f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}: lower min_lr"
    yield config.min_lr > config.learning_rate, text
    decay = f"{entry.rest}_weight_decay" if entry.rest else "weight_decay"  # of gains and scalars
    for name, off in (("decay_gains", "none"), ("decay_scalars", False)):
        value = getattr(config, name)
        text = f"{name}={value} decays by {decay}, which is 0: set that, or leave {name} out"
        yield value != off and not getattr(config, decay), text
    text = f"input_gains={config.input_gains} needs decay_gains=input or output, not {config.decay_gains}"
    yield config.input_gains != "final" and config.decay_gains in ("none", "all"), text
    ratios, is_wsd = {name: getattr(config, name) for name in RATIO_FLAGS}, config.schedule == "wsd"
    for name in ("wsd_decay", "wsd_decay_iters"):
        text = f"{name} needs schedule=wsd, but schedule={config.schedule}: leave it out"
        yield not is_wsd and getattr(config, name) is not None, text
    room = max(0, config.lr_decay_iters - config.warmup_iters)
    text = f"wsd_decay_iters={config.wsd_decay_iters} must lie between 0 and the {room} steps after warm-up "
    text += f"(lr_decay_iters={config.lr_decay_iters}, warmup_iters={config.warmup_iters})"
    yield is_wsd and not 0 <= config.wsd_decay_iters <= room, text
    usual = dict.fromkeys(ratios) | dict(
        blockwise_start="start", blockwise_min_lr="shared", blockwise_decay="scaled"
    )
    given = [name for name, value in usual.items() if getattr(config, name) != value]
    yield given and not config.blockwise_lr, f"{', '.join(given)}: needs blockwise_lr=True"
    if (
        config.blockwise_lr
        and config.schedule != "constant"
        and config.blockwise_min_lr == "shared"
    ):
        for name, ratio in ratios.items():
            text = f"{name}={ratio} puts the peak below min_lr={config.min_lr}, which all blocks share: lower min_lr, "
            yield (
                ratio * config.learning_rate < config.min_lr,
                text + "or set blockwise_min_lr=proportional",
            )
    scaled = config.blockwise_lr and config.blockwise_decay == "scaled"
    ratio = max(ratios.values()) if scaled else 1
    for prefix in ("", f"{entry.rest}_") if entry.rest else ("",):
        share = (
            ratio
            * getattr(config, f"{prefix}learning_rate")
            * getattr(config, f"{prefix}weight_decay")
        )
        text = f"{prefix}learning_rate·{prefix}weight_decay (times the largest LR ratio) = {share:.3g} would shrink "
        yield share >= 0.1, text + f"every matrix by {share:.0%} a step: lower {prefix}weight_decay"


def notes(config, model) -> list:
    """Lines for the start of a run: what is allowed, but has no effect or an unusual one. After
    `fill_defaults`."""
    name, entry, roles = config.optimizer, OPTIMIZERS[config.optimizer], set(model.roles().values())
    end_is_set = (
        config.min_lr != config.learning_rate / 10 or config.lr_decay_iters != config.max_iters
    )
    betas_are_set = (config.beta1, config.beta2) != (0.9, 0.95)
    falls, warmup = config.schedule != "constant", config.warmup_iters
    outlasts = f"warm-up ({warmup} steps) outlasts lr_decay_iters={config.lr_decay_iters}: the LR falls from its "
    published = " and ".join(other for other, its in OPTIMIZERS.items() if its.ratios)
    ours = f"blockwise_lr: the paper has ratios for {published}; those for {name} are our choice"
    none = "has no effect: the model has no"
    pairs = [  # whether it is so, and the note
        (config.blockwise_lr and not entry.ratios, ours),
        (
            config.decay_gains == "all" and not roles & {"gain_in", "gain_out"},
            f"decay_gains {none} gains",
        ),
        (
            config.decay_scalars and not roles & {"scalar", "bias"},
            f"decay_scalars {none} learned scalars or biases",
        ),
        (betas_are_set and not entry.uses_betas, f"beta1 and beta2 have no effect on {name}"),
        (
            end_is_set and not falls,
            "min_lr and lr_decay_iters have no effect with schedule=constant",
        ),
        (
            falls and config.lr_decay_iters < warmup < config.max_iters,
            outlasts + "peak to min_lr in one step",
        ),
    ]
    for role in ("head", "pos", "router", "patch"):
        useless = role not in roles and getattr(config, f"lr_ratio_{role}") not in (None, 1)
        pairs.append((useless, f"lr_ratio_{role} {none} {role} of its own"))
    return [note for is_so, note in pairs if is_so]
