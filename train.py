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
from nanodnt.data import Prefetch, PreparedData, load_meta
from nanodnt.engine import Trainer, evaluate, prepare_model, seed_step, set_learning_rates, split_batch, training_step
from nanodnt.guard import RollBack, check_skipped, record_loss, roll_back
from nanodnt.optim import Optimizer, fill_defaults, make_optimizer
from nanodnt.run.checkpoints import RunState, Saver, fingerprint, snapshot
from nanodnt.run.environment import Env, Stop, environment
from nanodnt.run.errors import EXPECTED, end_with, report_error
from nanodnt.run.metrics import Meter, Metrics, finite, progress_line, validation_line
from nanodnt.run.parallel import distribute
from nanodnt.settings import TrainConfig
from nanodnt.start import compile_run, describe_run, find_start, materialize, restore, warn_of_learning_rate
from nanodnt.tasks import Task, open_data, task_of_data


@dataclass
class Run:
    """Everything that the loop uses."""

    config: TrainConfig
    env: Env
    stop: Stop
    task: Task
    data: PreparedData
    meta: dict  # of the dataset
    model: Transformer  # what checkpoints hold
    compiled_model: Transformer  # the same, compiled: what is evaluated
    optimizer: Optimizer
    scaler: torch.amp.GradScaler  # of the loss, for fp16
    state: RunState
    micro: int  # rows of one micro batch
    accumulation: int  # micro batches of a step, in this process
    saved_step: int  # of the last checkpoint, -1 = none
    resumed_from: Path | None  # a checkpoint's file
    rollback: dict | None = None  # the row of a roll-back that no checkpoint holds yet
    meter: Meter | None = None
    tracker: object = None  # a Tracker
    saver: Saver | None = None
    log: Metrics | None = None  # of rank 0
    result: tuple | None = None  # of the step just made, a StepResult
    rates: dict | None = None  # its learning rates
    failure: Exception | None = None  # what ends the loop

    @property
    def step_tokens(self) -> int:
        return self.config.batch_size * self.data.block_size

    @property
    def step_flops(self) -> int:
        return self.step_tokens * self.model.flops_per_token()

    @property
    def is_done(self) -> bool:
        return self.state.step >= self.config.max_iters

    @property
    def is_saved(self) -> bool:
        return self.saved_step == self.state.step

    @property
    def rolls_back(self) -> bool:
        return isinstance(self.failure, RollBack) and self.state.rollbacks < self.config.max_rollbacks

    def is_due(self, interval: int) -> bool:
        """Whether something with this interval (0 = never) is due at this step."""
        return interval > 0 and self.state.step % interval == 0


def set_up(config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop) -> Run:
    """Model, optimizer, data and progress of a run, new or resumed."""
    # 1. how a batch is split; the dataset
    micro, accumulation = split_batch(config.batch_size, config.micro_batch_size, env.world_size)
    meta = load_meta(config.dataset, verify=env.main)
    env.check_same({"contents of the dataset": meta})

    # 2. the network without storage, its weights if there are any, and what it reads
    start = find_start(config, model_config, meta, env, read_pretrained)
    model, checkpoint = start.model, start.checkpoint
    data = open_data(config, model.config, meta)

    # 3. storage on the devices, the micro batch that fits them, the optimizer
    materialize(start, data, config, env)
    prepare_model(model, config, env)
    if env.device.type == "cuda" and not config.micro_batch_size:
        from nanodnt.plan.memory import choose_micro_batch

        micro, accumulation = choose_micro_batch(model.config, config, env, micro * accumulation)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)

    # 4. how far the run was
    state = restore(checkpoint, optimizer, scaler, config, env) if checkpoint else RunState()
    if len(set(env.gather(state.step))) > 1:  # also a barrier: now rank 0 may replace the checkpoint
        raise ValueError(f"processes found different checkpoints: {config.out_dir} must be a folder that all share")
    saved, path = (state.step, checkpoint["path"]) if checkpoint else (-1, None)
    parts = task_of_data(meta), data, meta, model, model, optimizer, scaler, state
    return Run(config, env, stop, *parts, micro, accumulation, saved, path)


def read_pretrained(source: str, model_config: GPTConfig):
    """The model of Hugging Face that `source` names (config, weights, meta), or None where it names none."""
    try:
        from interop.huggingface.read import is_pretrained, read_pretrained
    except ModuleNotFoundError as e:
        if Path(source).is_file() or not (e.name or "").startswith("interop"):
            return None
        raise ValueError(f"init_from={source} is no checkpoint, and this copy has no interop/ to read others") from None
    return read_pretrained(source, model_config.block_size, model_config.dropout) if is_pretrained(source) else None


def open_records(run: Run, seen: dict) -> None:
    """Start what watches and writes: tracker, checkpoints, metrics. `seen`: the checkpoints that were there before."""
    config, env, state, out_dir = run.config, run.env, run.state, Path(run.config.out_dir)
    if config.track_interval:
        from nanodnt.run.tracking import Tracker

        run.tracker = Tracker(run.model, run.optimizer, run.data, config, env)
    run.saver = Saver(out_dir)
    env.closing.append(run.saver.close)
    if env.main:
        configs = {"model": asdict(run.model.config), "train": asdict(config)}
        wandb = (config.wandb_project, state.wandb_id) if config.wandb_log else None
        # rows of metrics.jsonl to keep; a pending row and the row of a roll-back are still to be written
        last_step = state.step - 1 if state.pending else state.step
        last_rollback = state.rollbacks - 1 if run.rollback else state.rollbacks
        needed_bytes = 8 * run.model.num_params()  # weights and one momentum at least
        run.log = Metrics(out_dir, run.resumed_from, (last_step, last_rollback), configs, needed_bytes, seen, wandb)
        state.wandb_id = run.log.wandb_id
        if run.rollback:
            run.log.write(run.rollback)


@dataclass
class Due:
    # What is due after a step, in this order.
    log: bool
    track: bool
    evaluate: bool
    save: bool


def what_is_due(run: Run) -> Due:
    """By the intervals. The last step is logged and evaluated in any case."""
    config, trained = run.config, run.result is not None
    return Due(
        log=trained and (run.is_done or run.is_due(config.log_interval)),
        track=trained and run.tracker is not None and run.tracker.due(run.state.step),
        evaluate=run.state.evaluated != run.state.step and (run.is_done or run.is_due(config.eval_interval)),
        save=not run.is_saved
        and (run.rollback is not None or run.is_due(config.save_interval) or run.is_due(config.keep_every)),
    )


def log_step(run: Run, row: dict, due: Due) -> None:
    """Log the step just made. What ends the run is found here: then it is saved, unless the loss spiked."""
    reading, seconds = run.meter.read(run.result, run.state.step)  # blocks until the device is done
    row |= run.meter.row(reading, run.rates, seconds)
    run.env.print(progress_line(row, run.config.max_iters, seconds))
    stuck = check_skipped(reading, run.state, run.model, run.config, run.env)
    run.failure = record_loss(reading.loss, run.state, run.config) or stuck
    if run.failure:
        due.evaluate, due.save = False, not run.is_saved and not isinstance(run.failure, RollBack)


def evaluate_step(run: Run, row: dict) -> bool:
    """Add what the validation gives to `row`. Returns whether it is the best so far.

    If the run is stopped meanwhile, the row stays pending: the resumed run evaluates again, and writes it."""
    state = run.state
    scores = evaluate(run.compiled_model, run.task, run.data, run.config, run.micro, run.env, run.stop)
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
    tensors = snapshot({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, run.env.main)
    run.saved_step, run.rollback, run.state.skipped = run.state.step, None, run.meter.skipped()
    if run.env.main:
        configs = {"model_config": asdict(run.model.config), "train_config": asdict(run.config)}
        rest = {"scaler": run.scaler.state_dict(), "meta": run.meta, **configs}
        run.saver.save(tensors | rest | asdict(run.state), is_best, keep=run.is_due(run.config.keep_every))


def train(run: Run) -> int:
    """The loop. Returns the exit code. Every rank runs this and calls the same collectives.

    RollBack: the loss spiked, set up again from the last checkpoint. ValueError: the run cannot go on."""
    config, env, state, data = run.config, run.env, run.state, run.data
    per_process = run.micro * run.accumulation
    rows = slice(env.rank * per_process, (env.rank + 1) * per_process)  # this process's part of each batch
    next_batch = Prefetch(lambda step: env.pin(*data.batch(step + state.shift, config.batch_size, rows)))
    step_model = distribute(run.compiled_model, env)
    trainer = Trainer(run.model, run.optimizer, run.scaler, run.micro, config.grad_clip, step_model)
    gc.collect()
    gc.freeze()  # the collector need not walk through what is alive now
    run.meter = Meter(state, run.step_tokens, run.step_flops, config, env, run.task.step_rows(config.batch_size))

    while True:
        # 1. what the step before gives: log, track, evaluate, write the row, save
        run.saver.check()  # a write that failed ends the run here
        due, row = what_is_due(run), state.open_row()
        if due.log:
            log_step(run, row, due)
        with run.meter.paused(wait=due.track or due.evaluate or due.save):
            if due.track:
                row["track"] = run.tracker.after(run.result.grad_norm, run.result.found_inf)
            is_best = due.evaluate and evaluate_step(run, row)
            if env.main and row.keys() > {"step", "tokens"} and not state.pending:  # there is something to write
                run.log.write(row | ({"failure": str(run.failure)} if run.failure else {}))
            if run.rolls_back:
                break
            stopping = run.stop.agreed()
            evaluated = due.evaluate and not state.pending
            if due.save or evaluated or (stopping and not run.is_saved and not run.failure):
                save(run, is_best)
        if run.failure or stopping or run.is_done:
            break

        # 2. one optimizer step
        seed_step(config.seed, state.step, env.rank)
        run.rates = set_learning_rates(run.optimizer, state.step, config)
        batch = env.put(*next_batch(state.step))
        if run.tracker and run.tracker.due(state.step + 1):
            run.tracker.before()
        loss_tokens = data.loss_tokens(state.step + state.shift, config.batch_size) / env.world_size
        run.result = training_step(trainer, batch, loss_tokens)
        run.meter.count(run.result.found_inf)
        state.advance(run.step_tokens)

    return finish(run)


def finish(run: Run) -> int:
    """Finish all writes. Returns the exit code, or raises the failure that ended the loop."""
    gc.unfreeze()
    run.saver.finish()
    if run.rolls_back:
        if run.env.main:
            run.log.close()
        run.env.barrier()  # the others wait until rank 0 has written the checkpoint
        raise run.failure
    if run.failure:
        raise ValueError(str(run.failure))
    if run.env.main:
        from nanodnt.run.loss_curve import draw_loss

        run.log.close()
        out_dir = Path(run.config.out_dir)
        draw_loss(out_dir, out_dir.name)
        run.env.print(f"{'stopped' if run.stop.stopped else 'done'} at step {run.state.step}; run directory {out_dir}")
    return run.stop.exit_code()


def run_once(config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop, spike: RollBack | None) -> int:
    """Set up, then train or only evaluate; the exit code. `spike`: what the run is to be rolled back for."""
    seen = fingerprint(config.out_dir)
    run = set_up(config, model_config, env, stop)
    if spike:
        run.rollback, run.saved_step = roll_back(run.state, spike, config, env), -1  # it is still to be saved
    describe_run(run)
    compile_run(run)
    if config.eval_only:
        if scores := evaluate(run.compiled_model, run.task, run.data, config, run.micro, env, stop):
            env.print(f"step {run.state.step}: {validation_line(scores, digits=6)}")
        return stop.exit_code()
    open_records(run, seen)
    return train(run)


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
