"""Settings of optimizers and schedules: the defaults of what is None, what is refused, what is noted."""

from nanodnt.optim.registry import OPTIMIZERS, RATIOS


def fill_defaults(config) -> None:
    """Fill in what is None. ValueError for values that are impossible, contradict each other or have no effect."""
    name, entry = config.optimizer, OPTIMIZERS[config.optimizer]
    defaults = entry.defaults | entry.defaults_for(config)
    flags = optimizer_flags()
    for flag in flags:
        value = getattr(config, flag)
        if value is not None and flag not in defaults:
            users = " or ".join(other for other, its in OPTIMIZERS.items() if flag in its.defaults)
            raise ValueError(f"{flag}={value} has no effect on {name}: leave it out, or choose {users}")
    fill(config, {flag: defaults.get(flag) for flag in flags})
    if entry.rest:
        fill(config, {f"{entry.rest}_{flag}": getattr(config, flag) for flag in ("learning_rate", "weight_decay")})
    fill(config, dict(min_lr=config.learning_rate / 10, lr_decay_iters=config.max_iters))
    if config.schedule == "wsd":
        room = max(0, config.lr_decay_iters - config.warmup_iters)
        fill(config, dict(wsd_decay="linear", wsd_decay_iters=min(config.lr_decay_iters // 5, room)))
    if config.blockwise_lr:
        fill(config, {f"lr_ratio_{block_type}": ratio for block_type, ratio in (entry.ratios or RATIOS).items()})
    check_ranges(config)
    check_combinations(config, entry)
    check_schedule(config)
    check_ratios(config, entry)
    check_shrinkage(config, entry)


def fill(config, values: dict) -> None:
    """Give the fields that are None these values."""
    for name, value in values.items():
        if getattr(config, name) is None:
            setattr(config, name, value)


def optimizer_flags() -> list:
    """The flags of all optimizers, each once: fields of TrainConfig whose default is None."""
    return list(dict.fromkeys(flag for entry in OPTIMIZERS.values() for flag in entry.defaults))


def check_ranges(config) -> None:
    rates = [flag for flag in optimizer_flags() if flag.endswith(("learning_rate", "weight_decay"))]
    ratios = [f"lr_ratio_{block_type}" for block_type in RATIOS]
    for name in (*rates, "min_lr", *ratios, "grad_clip", "warmup_iters", "lr_decay_iters"):
        if (value := getattr(config, name) or 0) < 0:
            raise ValueError(f"{name}={value} must not be negative")
    for name in ("beta1", "beta2", "momentum", "dampening"):
        if not 0 <= (value := getattr(config, name) or 0) < 1:
            raise ValueError(f"{name}={value} must be at least 0 and below 1")
    if config.muon_steps is not None and not 1 <= config.muon_steps <= 20:
        raise ValueError(f"muon_steps={config.muon_steps} must be between 1 and 20")


def check_combinations(config, entry) -> None:
    """ValueError for values that contradict each other, or of which one makes another useless."""
    if config.nesterov and (config.dampening or not config.momentum):
        raise ValueError("nesterov needs momentum and no dampening: set nesterov=False, or change those")
    if config.dampening and not config.momentum:
        raise ValueError(f"dampening={config.dampening} has no effect without momentum: set one of them")
    if config.min_lr > config.learning_rate:
        raise ValueError(f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}: lower min_lr")
    decay = f"{entry.rest}_weight_decay" if entry.rest else "weight_decay"  # of gains and scalars
    for name, off in (("decay_gains", "none"), ("decay_scalars", False)):
        if (value := getattr(config, name)) != off and not getattr(config, decay):
            raise ValueError(f"{name}={value} decays by {decay}, which is 0: set that, or leave {name} out")


def check_schedule(config) -> None:
    for name in ("wsd_decay", "wsd_decay_iters"):
        if config.schedule != "wsd" and getattr(config, name) is not None:
            raise ValueError(f"{name} needs schedule=wsd, but schedule={config.schedule}: leave it out")
    room = max(0, config.lr_decay_iters - config.warmup_iters)
    if config.schedule == "wsd" and not 0 <= config.wsd_decay_iters <= room:
        raise ValueError(
            f"wsd_decay_iters={config.wsd_decay_iters} must lie between 0 and the {room} steps after warm-up "
            f"(lr_decay_iters={config.lr_decay_iters}, warmup_iters={config.warmup_iters})"
        )


def check_ratios(config, entry) -> None:
    """ValueError if flags of blockwise_lr are set without it, or if a ratio puts a peak below min_lr."""
    ratios = {name: getattr(config, name) for name in (f"lr_ratio_{block_type}" for block_type in RATIOS)}
    if not config.blockwise_lr:
        usual = dict(blockwise_start="start", blockwise_min_lr="shared", blockwise_decay="scaled")
        usual = dict.fromkeys(ratios) | usual
        if given := [name for name, value in usual.items() if getattr(config, name) != value]:
            raise ValueError(f"{', '.join(given)}: needs blockwise_lr=True")
    elif config.schedule != "constant" and config.blockwise_min_lr == "shared":
        for name, ratio in ratios.items():
            if ratio * config.learning_rate < config.min_lr:
                raise ValueError(
                    f"{name}={ratio} puts the peak below min_lr={config.min_lr}, which all blocks share: lower min_lr, "
                    "or set blockwise_min_lr=proportional"
                )


def check_shrinkage(config, entry) -> None:
    """ValueError if weight decay would shrink a matrix by a tenth or more in one step."""
    scaled = config.blockwise_lr and config.blockwise_decay == "scaled"
    ratio = max(getattr(config, f"lr_ratio_{block_type}") for block_type in RATIOS) if scaled else 1
    usual = {"": (entry.defaults | entry.defaults_for(config))["weight_decay"]}
    if entry.rest:
        usual[f"{entry.rest}_"] = OPTIMIZERS[entry.rest].defaults["weight_decay"]
    for prefix, default in usual.items():
        share = ratio * getattr(config, f"{prefix}learning_rate") * getattr(config, f"{prefix}weight_decay")
        if share >= 0.1:
            raise ValueError(
                f"{prefix}learning_rate·{prefix}weight_decay{'·ratio' * (ratio != 1)} = {share:.3g} would shrink every "
                f"matrix by {share:.0%} a step: lower {prefix}weight_decay (the default is {default:g})"
            )


def notes(config, model) -> list:
    """Notes for the start of a run, one line each: settings that are allowed, but have no effect or an unusual one.
    After `fill_defaults`."""
    name, entry, found, roles = config.optimizer, OPTIMIZERS[config.optimizer], [], set(model.roles().values())
    if config.blockwise_lr and not entry.ratios:
        published = " and ".join(other for other, its in OPTIMIZERS.items() if its.ratios)
        listed = [block_type for block_type in RATIOS if block_type not in ("router", "patch") or block_type in roles]
        ratios = ", ".join(f"{block_type} {getattr(config, f'lr_ratio_{block_type}'):g}" for block_type in listed)
        found.append(f"blockwise_lr: the paper has ratios for {published}; these for {name} are our choice: {ratios}")
    for role in ("head", "pos", "router", "patch"):
        if role not in roles and getattr(config, f"lr_ratio_{role}") not in (None, 1):
            found.append(f"lr_ratio_{role} has no effect: the model has no {role} of its own")
    if config.decay_gains == "all" and not roles & {"gain_in", "gain_out"}:
        found.append("decay_gains has no effect: the model has no gains")
    if config.decay_scalars and not roles & {"scalar", "bias"}:
        found.append("decay_scalars has no effect: the model has no learned scalars or biases")
    if not entry.uses_betas and (config.beta1, config.beta2) != (0.9, 0.95):
        found.append(f"beta1 and beta2 have no effect on {name}")
    end_is_set = config.min_lr != config.learning_rate / 10 or config.lr_decay_iters != config.max_iters
    if config.schedule == "constant" and end_is_set:
        found.append("min_lr and lr_decay_iters have no effect with schedule=constant")
    elif config.schedule != "constant" and config.lr_decay_iters < config.warmup_iters < config.max_iters:
        found.append(
            f"warm-up ({config.warmup_iters} steps) outlasts lr_decay_iters={config.lr_decay_iters}: the LR falls from "
            "its peak to min_lr in one step"
        )
    return found
