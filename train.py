"""Train a GPT or, on images, a ViT.

python train.py config/quickstart.py                                       # CPU or one GPU
torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py      # 8 GPUs
python train.py config/dnt_small.py --optimizer=msgdw --learning_rate=1.0  # any flag overrides
"""

import gc
from dataclasses import asdict, dataclass
from pathlib import Path

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

import torch

from configurator import configure, describe
from model import GPTConfig, Transformer
from nanodnt.data import Prefetch, Prepared, load_meta
from nanodnt.engine import evaluate, prepare_model, seed_step, set_learning_rates, training_step
from nanodnt.guard import RollBack, check_skipped, record_loss
from nanodnt.optim import Optimizer, fill_defaults, make_optimizer
from nanodnt.plan.micro_batch import choose_micro_batch
from nanodnt.run.checkpoints import Saver, fingerprint, snapshot
from nanodnt.run.environment import Env, environment
from nanodnt.run.errors import EXPECTED, end_with, report_error
from nanodnt.run.loss_curve import draw_loss
from nanodnt.run.meter import Meter
from nanodnt.run.metrics import Metrics, finite, progress_line, validation_line
from nanodnt.run.parallel import distribute
from nanodnt.run.stopping import Stop
from nanodnt.run.tracking import Tracker
from nanodnt.settings import TrainConfig
from nanodnt.start import compile_run, describe_run, materialize, restore, roll_back, start_model, warn_of_learning_rate
from nanodnt.state import RunState
from nanodnt.tasks import open_data, task_of_data
from nanodnt.tasks.task import Task


@dataclass
class Run:
    """Everything that the loop uses."""

    config: TrainConfig
    env: Env
    stop: Stop
    raw_model: Transformer  # what checkpoints hold
    model: Transformer  # the same, compiled: what is evaluated
    optimizer: Optimizer
    scaler: torch.amp.GradScaler  # of the loss, for fp16
    task: Task
    data: Prepared
    meta: dict  # of the dataset
    state: RunState
    micro: int  # sequences of one micro batch
    accumulation: int  # micro batches of a step, in this process
    saved_step: int  # of the last checkpoint, -1 = none
    resumed_from: Path | None  # a checkpoint's file
    meter: Meter | None = None
    tracker: Tracker | None = None
    saver: Saver | None = None
    log: Metrics | None = None  # of rank 0

    @property
    def step_tokens(self) -> int:
        return self.config.batch_size * self.data.block_size

    @property
    def step_flops(self) -> int:
        return self.step_tokens * self.raw_model.flops_per_token()

    def is_due(self, interval: int, at_end: bool = False) -> bool:
        """Whether something with this interval (0 = never) is due at this step, or at the last one."""
        step = self.state.step
        return (interval > 0 and step % interval == 0) or (at_end and step >= self.config.max_iters)


def set_up(config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop) -> Run:
    """Model, optimizer, data and progress of a run, new or resumed."""
    meta = load_meta(config.dataset, verify=env.main)
    env.check_same({"contents of the dataset": meta})
    model, weights, checkpoint = start_model(config, model_config, meta, env)
    data, task = open_data(config, model.config, meta), task_of_data(meta)
    materialize(model, weights, config, env)
    prepare_model(model, config, env)
    micro, accumulation = choose_micro_batch(model.config, config, env)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    state = restore(checkpoint, optimizer, scaler, config, env) if checkpoint else RunState()
    if (
        len(set(env.gather(state.step))) > 1
    ):  # also a barrier: all ranks have read the checkpoint, so rank 0 may replace it
        raise ValueError(f"processes found different checkpoints: {config.out_dir} must be a folder that all share")
    saved, path = (state.step, checkpoint["path"]) if checkpoint else (-1, None)
    return Run(
        config, env, stop, model, model, optimizer, scaler, task, data, meta, state, micro, accumulation, saved, path
    )


def open_records(run: Run, seen: dict, event: dict | None) -> None:
    """Start what watches and writes: tracker, checkpoints, metrics. `event`: the row of a roll-back just made."""
    config, env, state, out_dir = run.config, run.env, run.state, Path(run.config.out_dir)
    if config.track_interval:
        run.tracker = Tracker(run.raw_model, run.optimizer, run.data, config, env)
    run.saver = Saver(out_dir)
    env.closing.append(run.saver.close)
    if env.main:
        configs = {"model": asdict(run.raw_model.config), "train": asdict(config)}
        wandb = (config.wandb_project, state.wandb_id) if config.wandb_log else None
        # rows of metrics.jsonl to keep; a pending row and the row of a roll-back are still to be written
        last_step = state.step - 1 if state.pending else state.step
        last_rollback = state.rollbacks - 1 if event else state.rollbacks
        needed_bytes = 8 * run.raw_model.num_params()  # weights and one momentum at least
        run.log = Metrics(out_dir, run.resumed_from, (last_step, last_rollback), configs, needed_bytes, seen, wandb)
        state.wandb_id = run.log.wandb_id
        if event:
            run.log.write(event)


def log_step(run: Run, row: dict, result, rates: dict) -> Exception | None:
    """Log the step just made to `row` and the console. Returns the error that ends the run, if there is one."""
    reading, seconds = run.meter.read(result, run.state.step)  # waits for the device, as few other lines do
    row |= run.meter.row(reading, rates, seconds)
    run.env.print(progress_line(row, run.config.max_iters, seconds))
    stuck = check_skipped(reading, run.state, run.raw_model, run.config, run.env)
    return record_loss(reading.loss, run.state, run.config) or stuck


def evaluate_step(run: Run, row: dict) -> bool:
    """Add what the validation gives to `row`. Returns whether it is the best so far.

    If the run is stopped meanwhile, the row stays pending: the resumed run evaluates again, and writes it."""
    state, scores = run.state, evaluate(run.model, run.task, run.data, run.config, run.micro, run.env, run.stop)
    if scores is None:
        state.pending = finite(row)
        return False
    is_best = scores["val_loss"] < state.best_val_loss
    state.evaluated, state.best_val_loss = state.step, min(state.best_val_loss, scores["val_loss"])
    row |= scores
    run.env.print(f"step {state.step}: {validation_line(scores)}{' (best)' if is_best else ''}")
    return is_best


def save(run: Run, is_best: bool) -> None:
    """Copy everything to the host; a thread writes it while training goes on. All ranks must call it."""
    run.saver.finish()  # before there is a second copy
    tensors = snapshot({"model": run.raw_model.state_dict(), "optimizer": run.optimizer.state_dict()}, run.env.main)
    run.saved_step, run.state.skipped = run.state.step, run.meter.skipped()
    if run.env.main:
        configs = {"model_config": asdict(run.raw_model.config), "train_config": asdict(run.config)}
        rest = {"scaler": run.scaler.state_dict(), "meta": run.meta, **configs}
        run.saver.save(tensors | rest | run.state.as_dict(), is_best, keep=run.is_due(run.config.keep_every))


def train(run: Run, save_first: bool = False) -> int:
    """The loop. Returns the exit code. Every rank runs this and calls the same collectives.

    RollBack: the loss spiked, set up again from the last checkpoint. ValueError: the run cannot go on."""
    config, env, state, stop, tracker = run.config, run.env, run.state, run.stop, run.tracker
    step_model, per_process = distribute(run.model, env), run.micro * run.accumulation
    rows = slice(env.rank * per_process, (env.rank + 1) * per_process)  # this process's part of each batch
    next_batch = Prefetch(lambda step: env.pin(*run.data.batch(step + state.shift, config.batch_size, rows)))
    result = rates = None
    gc.collect()
    gc.freeze()  # the collector need not walk through what is alive now
    images = config.batch_size if run.task.rows == "images" else 0
    run.meter = Meter(state, run.step_tokens, run.step_flops, config, env, images)

    while True:
        run.saver.check()  # a write that failed ends the run here
        row, failure, is_best, trained = state.open_row(), None, False, result is not None
        if trained and run.is_due(config.log_interval, at_end=True):
            failure = log_step(run, row, result, rates)
        spiked = isinstance(failure, RollBack)
        evaluating = state.evaluated != state.step and run.is_due(config.eval_interval, at_end=True) and not failure
        save_due = save_first or run.is_due(config.save_interval) or run.is_due(config.keep_every)
        may_save = run.saved_step != state.step and not spiked
        tracking = trained and tracker is not None and tracker.due(state.step)
        with run.meter.paused(wait=evaluating or (save_due and may_save) or tracking):
            if tracking:
                row["track"] = tracker.after(result.grad_norm, result.found_inf)
            if evaluating:
                is_best = evaluate_step(run, row)
            if env.main and row.keys() > {"step", "tokens"} and not state.pending:  # there is something to write
                run.log.write(row | ({"failure": str(failure)} if failure else {}))
            if spiked and state.rollbacks < config.max_rollbacks:
                break
            stopping = stop.agreed()
            if (may_save and (save_due or stopping or failure)) or (evaluating and not state.pending):
                save(run, is_best)
                save_first = False
        if failure or stopping or state.step >= config.max_iters:
            break

        # one optimizer step
        seed_step(config.seed, state.step, env.rank)
        rates, batch = set_learning_rates(run.optimizer, state.step, config), env.put(*next_batch(state.step))
        if tracker and tracker.due(state.step + 1):
            tracker.before()
        counted = run.data.loss_tokens(state.step + state.shift, config.batch_size) / env.world_size
        parts = step_model, run.raw_model, run.optimizer, run.scaler
        result = training_step(*parts, batch, run.micro, config, counted=counted)
        run.meter.count(result.found_inf)
        state.advance(run.step_tokens)

    return finish(run, failure)


def finish(run: Run, failure: Exception | None) -> int:
    """Finish all writes. Returns the exit code, or raises the failure that ended the loop."""
    gc.unfreeze()
    run.saver.finish()
    if isinstance(failure, RollBack) and run.state.rollbacks < run.config.max_rollbacks:
        if run.env.main:
            run.log.close()
        run.env.barrier()  # the others wait until rank 0 has written the checkpoint
        raise failure
    if failure:
        raise ValueError(str(failure))
    if run.env.main:
        run.log.close()
        out_dir = Path(run.config.out_dir)
        draw_loss(out_dir, out_dir.name)
        run.env.print(f"{'stopped' if run.stop.stopped else 'done'} at step {run.state.step}; run directory {out_dir}")
    return run.stop.exit_code()


def run_once(config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop, spike: RollBack | None) -> int:
    """Set up, then train or only evaluate; the exit code. `spike`: what the run is to be rolled back for."""
    seen = fingerprint(config.out_dir)
    run = set_up(config, model_config, env, stop)
    event = roll_back(run.state, spike, config, env) if spike else None
    if event:
        run.saved_step = -1  # the roll-back itself is still to be saved
    describe_run(run)
    compile_run(run)
    if config.eval_only:
        if scores := evaluate(run.model, run.task, run.data, config, run.micro, env, stop):
            env.print(f"step {run.state.step}: {validation_line(scores, digits=6)}")
        return stop.exit_code()
    open_records(run, seen, event)
    return train(run, save_first=bool(event))


def main() -> int:
    (model_config, config), given = configure(GPTConfig, TrainConfig, description=__doc__)
    try:
        with environment(config.device, config.dtype, config.timeout_s) as env, Stop(env) as stop:
            config.check()  # in here, so that torchrun stops the other processes at once
            fill_defaults(config)
            # dataset and device may differ between machines; the contents of the dataset are compared later
            env.check_same({**asdict(model_config), **asdict(config), "dataset": None, "device": None})
            env.print(describe(model_config, config, given=given))
            warn_of_learning_rate(config, given, env)
            spike = None
            while True:
                try:
                    return run_once(config, model_config, env, stop, spike)
                except RollBack as e:
                    spike = e.with_traceback(None)  # a traceback would keep the old model alive
                    config.init_from = "resume"
                gc.collect()
    except EXPECTED as e:
        return report_error(e)


if __name__ == "__main__":
    end_with(main)
