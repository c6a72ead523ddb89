"""What ends a run, or takes it back to its last checkpoint: gradients that are not finite, and losses that spike."""

import math
import statistics

from nanodnt.engine import first_bad_tensor

RECENT = 20  # logged losses that a spike is measured against, once there are a quarter of them


class RollBack(Exception):
    """The loss spiked at `step`: the run is to go on from its last checkpoint, without the batches since."""

    def __init__(self, message: str, step: int, loss: float, usual: float):
        super().__init__(message)
        self.step, self.loss, self.usual = step, loss, usual


def check_skipped(reading, state, model, config, env) -> ValueError | None:
    """The error that ends a run after max_skipped steps in a row without a finite gradient. All ranks must call it."""
    if reading.longest_streak < config.max_skipped:
        return None
    bad = first_bad_tensor(model, env)
    return ValueError(  # the parameters are as before those steps, since every one of them was skipped
        f"{int(reading.longest_streak)} steps in a row, up to about step {state.step}, had a gradient that is not "
        f"finite (first bad tensor: {bad}). Nothing of them was kept; resume {config.out_dir} with a lower "
        "learning rate"
    )


def record_loss(loss: float, state, config) -> RollBack | None:
    """Add `loss` to the recent ones. Returns a RollBack if it is more than loss_spike above their median."""
    recent = state.recent
    usual = statistics.median(recent) if len(recent) >= RECENT // 4 else math.inf
    if math.isfinite(loss):
        state.recent = [*recent, loss][-RECENT:]
    if not config.loss_spike or not usual + config.loss_spike < loss < math.inf:
        return None
    message = (
        f"the loss spiked to {loss:.4f} at step {state.step} (usually {usual:.4f}), after {state.rollbacks} "
        f"roll-backs: resume {config.out_dir} with a lower learning rate, or raise max_rollbacks"
    )
    return RollBack(message, state.step, loss, usual)
