"""Failures of a run: gradients that are not finite, and losses that spike, which take it back to
its last checkpoint."""

import math
import statistics
from typing import Any

from layers.sharding import local_shard
from model import Transformer
from nanodnt.run.checkpoints import RunState
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from nanodnt.tables import count

RECENT = 20  # logged losses that a spike is measured against, once a quarter of them is known


class RollBack(Exception):
    """The loss spiked at `step`: the run is to continue from its last checkpoint, without the
    batches since."""

    def __init__(self, message: str, step: int, loss: float, median_loss: float) -> None:
        super().__init__(message)
        self.step = step
        self.loss = loss
        self.median_loss = median_loss


def find_failure(
    loss: float, streak: int, state: RunState, model: Transformer, config: TrainConfig, env: Env
) -> RollBack | ValueError | None:
    """The error that ends the run at this logged step; None = it goes on. `streak`: the longest
    series of skipped steps since the last one. All ranks must call it."""
    stuck = check_skipped(streak, state, model, config, env)
    spike = record_loss(loss, state, config)
    return spike or stuck


def check_skipped(
    streak: int, state: RunState, model: Transformer, config: TrainConfig, env: Env
) -> ValueError | None:
    """The error that ends a run after max_skipped steps in a row without a finite gradient, with
    the name of the first bad tensor on any rank. All ranks must call it."""
    if streak < config.max_skipped:
        return None
    # parameters are as they were before the skipped steps
    names = []
    is_bad = []
    for name, p in model.named_parameters():
        names += [name, f"the gradient of {name}"]
        for t in (p, p.grad):
            is_bad.append(t is not None and not local_shard(t).isfinite().all())
    names.append("none any more")
    is_bad.append(True)
    first_bad = min(env.gather(is_bad.index(True)))
    raised = f"{count(streak, 'step')} in a row, up to about step {state.step}, had a gradient"
    raised += f" that is not finite (first bad tensor: {names[first_bad]}), and were skipped"
    return ValueError(f"{raised}: resume {config.out_dir} with a lower learning rate")


def record_loss(loss: float, state: RunState, config: TrainConfig) -> RollBack | None:
    """Add `loss` to the recent ones. Returns a RollBack if it is more than loss_spike above their
    median."""
    median_loss = math.inf
    if len(state.recent) >= RECENT // 4:
        median_loss = statistics.median(state.recent)
    if math.isfinite(loss):
        state.recent = [*state.recent, loss][-RECENT:]
    if not config.loss_spike or not median_loss + config.loss_spike < loss < math.inf:
        return None
    spike = f"the loss spiked to {loss:.4f} at step {state.step} (usually {median_loss:.4f})"
    advice = f"resume {config.out_dir} with a lower learning rate, or raise max_rollbacks"
    message = f"{spike}, after {count(state.rollbacks, 'roll-back')}: {advice}"
    return RollBack(message, state.step, loss, median_loss)


def roll_back(
    state: RunState, spike: RollBack, batch_size: int, max_rollbacks: int, env: Env
) -> dict[str, Any]:
    """Let a state just restored skip the batches up to the spike. Returns the roll-back's row of
    metrics.jsonl."""
    n_skipped = spike.step - state.step
    state.shift += n_skipped
    state.rows += n_skipped * batch_size
    state.rollbacks += 1
    env.print(
        f"rolled back to step {state.step}: the loss spiked to {spike.loss:.4f} at step "
        f"{spike.step}, usually {spike.median_loss:.4f}; the run skips "
        f"{count(n_skipped, 'batch')} between ({state.rollbacks} of {max_rollbacks})"
    )
    return dict(
        step=state.step,
        tokens=state.tokens,
        rolled_back_from=spike.step,
        spike_loss=spike.loss,
        usual_loss=spike.median_loss,
        rollbacks=state.rollbacks,
    )
