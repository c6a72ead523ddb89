"""What ends a run, or takes it back to its last checkpoint: gradients that are not finite, and
losses that spike."""

import math
import statistics

from layers.sharding import local_shard

RECENT = 20  # logged losses that a spike is measured against, once there are a quarter of them


class RollBack(Exception):
    """The loss spiked at `step`: the run is to go on from its last checkpoint, without the batches
    since."""

    def __init__(self, message: str, step: int, loss: float, median_loss: float):
        super().__init__(message)
        self.step, self.loss, self.median_loss = step, loss, median_loss


def check_skipped(streak: int, state, model, config, env) -> ValueError | None:
    """The error that ends a run after max_skipped steps in a row without a finite gradient. All
    ranks must call it."""
    if streak < config.max_skipped:
        return None
    # the first bad one on any rank is named; parameters are as before those steps, which were
    # skipped
    tensors = []
    for name, p in model.named_parameters():
        tensors += [(name, p), (f"the gradient of {name}", p.grad)]
    finite = [t is None or bool(local_shard(t).isfinite().all()) for _, t in tensors] + [False]
    first = min(env.gather(finite.index(False)))
    bad = tensors[first][0] if first < len(tensors) else "none any more"
    what = (
        f"{streak} steps in a row, up to about step {state.step}, had a gradient that is not finite"
    )
    advice = f"resume {config.out_dir} with a lower learning rate"
    return ValueError(f"{what} (first bad tensor: {bad}), and were skipped: {advice}")


def record_loss(loss: float, state, config) -> RollBack | None:
    """Add `loss` to the recent ones. Returns a RollBack if it is more than loss_spike above their
    median."""
    recent = state.recent
    median_loss = statistics.median(recent) if len(recent) >= RECENT // 4 else math.inf
    if math.isfinite(loss):
        state.recent = [*recent, loss][-RECENT:]
    if not config.loss_spike or not median_loss + config.loss_spike < loss < math.inf:
        return None
    what = f"the loss spiked to {loss:.4f} at step {state.step} (usually {median_loss:.4f})"
    advice = f"resume {config.out_dir} with a lower learning rate, or raise max_rollbacks"
    return RollBack(
        f"{what}, after {state.rollbacks} roll-backs: {advice}", state.step, loss, median_loss
    )


def roll_back(state, spike: RollBack, config, env) -> dict:
    """Let a state just restored skip the batches up to the spike. Returns the row of metrics.jsonl
    that tells of it."""
    passed = spike.step - state.step
    state.shift, state.rollbacks = state.shift + passed, state.rollbacks + 1
    state.rows += passed * config.batch_size
    what = (
        f"the loss spiked to {spike.loss:.4f} at step {spike.step}, usually {spike.median_loss:.4f}"
    )
    skipped = (
        f"the {passed} batches between are skipped ({state.rollbacks} of {config.max_rollbacks})"
    )
    env.print(f"rolled back to step {state.step}: {what}; {skipped}")
    event = dict(rolled_back_from=spike.step, spike_loss=spike.loss, usual_loss=spike.median_loss)
    return {"step": state.step, "tokens": state.tokens, **event, "rollbacks": state.rollbacks}
