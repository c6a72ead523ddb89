"""Learning rate schedules. A new form of decay is an entry in DECAYS, and its name in `schedule` or
`wsd_decay` of nanodnt/settings.py; any other schedule is a case in `lr_at`."""

import math

DECAYS = {  # from 1 at q = 0 to 0 at q = 1
    "linear": lambda q: 1 - q,
    "cosine": lambda q: 0.5 * (1 + math.cos(math.pi * q)),
    "sqrt": lambda q: 1 - math.sqrt(q),
}


def lr_at(step: int, config, group: dict | None = None) -> float:
    """The LR of update t = `step` + 1 for a parameter group; without one, for base_lr =
    learning_rate and ratio 1.

    A `constant` group keeps base_lr. The peak of others is base_lr · lr_ratio. Warm-up: peak · t/W
    for t ≤ W = warmup_iters, so the first LR is not zero; with blockwise_start=warmup_end it rises
    to base_lr instead. After it, with T = lr_decay_iters:

        cosine, linear   down to min_lr from W to T
        wsd              peak until T − wsd_decay_iters, then down to min_lr at T
        constant         peak, for ever

    After T the LR stays at min_lr (not with constant). min_lr is multiplied by base_lr /
    learning_rate, and with blockwise_min_lr=proportional by lr_ratio too.

    `dyt` is that of the code of DyT's LLaMA runs: the smaller of peak · (1 − (1 − t/W)²) and a
    cosine from 0 to T."""
    if group and group.get("constant"):
        return group["base_lr"]
    base, ratio = (group["base_lr"], group["lr_ratio"]) if group else (config.learning_rate, 1.0)
    t, warmup, end = step + 1, config.warmup_iters, config.lr_decay_iters
    peak = base * ratio
    warmup_peak = base if config.blockwise_start == "warmup_end" else peak
    floor = config.min_lr * (base / config.learning_rate if config.learning_rate else 0.0)
    floor *= ratio if config.blockwise_min_lr == "proportional" else 1.0
    if config.schedule == "dyt":
        top = warmup_peak if t <= warmup else peak
        rising = 1 - (1 - min(1.0, t / warmup)) ** 2 if warmup else 1.0
        return min(
            top * rising, floor + (top - floor) * DECAYS["cosine"](min(1.0, t / max(1, end)))
        )
    if t <= warmup:
        return warmup_peak * t / warmup
    if config.schedule == "constant":
        return peak
    begin = end - config.wsd_decay_iters if config.schedule == "wsd" else warmup
    progress = max(0.0, min(1.0, (t - begin) / max(1, end - begin)))
    decay = DECAYS[config.wsd_decay if config.schedule == "wsd" else config.schedule]
    return floor + decay(progress) * (peak - floor)
