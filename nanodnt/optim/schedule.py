"""Learning rate schedules. A new form of decay is an entry in DECAYS, and its name in `schedule` or
`wsd_decay` of nanodnt/settings.py; any other schedule is a case in `curve`."""

import math

from nanodnt.optim.registry import Group
from nanodnt.settings import TrainConfig

DECAYS = {  # from 1 at q = 0 to 0 at q = 1
    "linear": lambda q: 1 - q,
    "cosine": lambda q: 0.5 * (1 + math.cos(math.pi * q)),
    "sqrt": lambda q: 1 - math.sqrt(q),
}


def lr_at(step: int, config: TrainConfig, group: Group | None = None) -> float:
    """The LR of update t = `step` + 1 for a parameter group. group=None: the base LR.

    A `constant` group keeps base_lr. The peak of others is base_lr · lr_ratio. Warm-up: peak · t/W
    for t ≤ W = warmup_iters, so the first LR is not zero; with blockwise_start=warmup_end it rises
    to base_lr instead. After it the LR is floor + curve · (peak − floor), with floor = min_lr ·
    base_lr / learning_rate, times lr_ratio with blockwise_min_lr=proportional. The schedule dyt has
    another warm-up: see `dyt_warmup`."""
    base = config.learning_rate
    ratio = 1.0
    if group:
        if group.get("constant"):
            return group["base_lr"]
        base = group["base_lr"]
        ratio = group["lr_ratio"]
    t = step + 1
    peak = base * ratio
    warmup_peak = base if config.blockwise_start == "warmup_end" else peak
    floor = 0.0
    if config.learning_rate:
        floor = config.min_lr * (base / config.learning_rate)
    if config.blockwise_min_lr == "proportional":
        floor *= ratio
    if config.schedule == "dyt":
        top = warmup_peak if t <= config.warmup_iters else peak
        return min(top * dyt_warmup(t, config), floor + (top - floor) * curve(t, config))
    if t <= config.warmup_iters:
        return warmup_peak * t / config.warmup_iters
    if config.schedule == "constant":
        return peak
    return floor + curve(t, config) * (peak - floor)


def curve(t: int, config: TrainConfig) -> float:
    """The part of the way from floor to peak that is left at update t, in 0..1. With W =
    warmup_iters and T = lr_decay_iters it falls to 0 at T and stays there:

        dyt              cosine from 1 at 0
        wsd              1 until T − wsd_decay_iters
        cosine, linear   from 1 at W
    """
    end = config.lr_decay_iters
    begin = config.warmup_iters
    form = config.schedule
    if config.schedule == "dyt":
        begin = 0
        form = "cosine"
    elif config.schedule == "wsd":
        begin = end - config.wsd_decay_iters
        form = config.wsd_decay
    progress = max(0.0, min(1.0, (t - begin) / max(1, end - begin)))
    return DECAYS[form](progress)


def dyt_warmup(t: int, config: TrainConfig) -> float:
    """1 − (1 − t/W)², in 0..1: the rise in the code of DyT's LLaMA runs. Their LR is the smaller of
    this and a cosine."""
    if not config.warmup_iters:
        return 1.0
    return 1 - (1 - min(1.0, t / config.warmup_iters)) ** 2
