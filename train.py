"""Train a GPT or, on images, a ViT.

python train.py config/quickstart.py                                       # CPU or one GPU
torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py      # 8 GPUs
python train.py config/dnt_small.py --optimizer=msgdw --learning_rate=1.0  # any flag overrides
"""

import gc
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

import torch

from configurator import configure, describe
from model import GPTConfig, Transformer
from nanodnt.data import Prefetch, PreparedData, load_meta
from nanodnt.engine import (
    Trainer,
    evaluate,
    prepare_model,
    seed_step,
    set_learning_rates,
    training_step,
)
from nanodnt.guard import RollBack, check_skipped, record_loss, roll_back
from nanodnt.optim import Optimizer, fill_defaults, make_optimizer, rate_notes, state_bytes
from nanodnt.run.checkpoints import RunState, Saver, fingerprint, use_shards
from nanodnt.run.directory import RunDirectory
from nanodnt.run.environment import Env, Stop, environment
from nanodnt.run.errors import end_with, reports_errors
from nanodnt.run.metrics import (
    Meter,
    draw_loss,
    end_line,
    finite,
    make_watchers,
    progress_line,
    validation_line,
)
from nanodnt.settings import TrainConfig
from nanodnt.start import (
    allocate_and_fill,
    compile_run,
    describe_run,
    find_start,
    restore,
    split_run,
)
from nanodnt.tasks import Task, open_data, task_of_data
from nanodnt.weights import read_pretrained

with suppress(ModuleNotFoundError):  # a fork may have deleted it
    import interop  # noqa: F401  # which can read weights of Hugging Face


@dataclass
class Run:
    """Everything that the loop uses."""

    config: TrainConfig
    env: Env
    stop: Stop
    task: Task
    data: PreparedData
    dataset_meta: dict
    model: Transformer  # what checkpoints hold
    compiled: Transformer  # what steps and evaluations call: the same, compiled if that is chosen
    optimizer: Optimizer
    scaler: torch.amp.GradScaler  # of the loss, for fp16
    state: RunState
    micro: int  # sequences, or images, of one micro batch
    accumulation: int  # micro batches of a step, in this process
    saved_step: int  # of the last checkpoint, -1 = none
    resumed_from: Path | None  # a checkpoint's file
    rollback_row: dict | None = None  # of metrics.jsonl: a roll-back that no checkpoint holds yet
    meter: Meter | None = None
    tracker: object = None  # a Tracker
    watcher: object = None  # a Watcher
    saver: Saver | None = None
    directory: RunDirectory | None = None  # of rank 0
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
    def row_offset(self) -> int:
        """Rows by which batches are ahead of `step * batch_size`: 0 unless earlier steps had
        another batch size."""
        return self.state.rows - (self.state.step + self.state.shift) * self.config.batch_size

    @property
    def ending(self) -> str:
        """Why the run ends at this step, in words; "" = it goes on."""
        reached = 0 < self.config.target_val_loss >= self.state.best_val_loss
        return (
            "target_val_loss reached"
            if reached
            else "done" * (self.state.step >= self.config.max_iters)
        )

    @property
    def will_roll_back(self) -> bool:
        """A spike rolls back while roll-backs are left; after that it ends the run like any other
        failure."""
        return (
            isinstance(self.failure, RollBack) and self.state.rollbacks < self.config.max_rollbacks
        )

    def is_due(self, interval: int, ahead: int = 0) -> bool:
        """Whether something with this interval (0 = never) is due at this step, or so many steps
        `ahead`."""
        return interval > 0 and (self.state.step + ahead) % interval == 0


def set_up(config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop) -> Run:
    """Model, optimizer, data and progress of a run, new or resumed."""
    # 1. the dataset
    meta = load_meta(config.dataset, verify=env.is_main)
    env.check_same({"contents of the dataset": meta})

    # 2. the network without storage, its weights if there are any, and what it reads
    model, weights, checkpoint = find_start(config, model_config, meta, env, read_pretrained)
    data = open_data(config, model.config, meta)

    # 3. how the run is split over the devices, storage on them, the optimizer
    split = split_run(model, config, env)
    allocate_and_fill(model, weights, data, config, env, split.keep)
    prepare_model(model, config, env)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)

    # 4. how far the run was
    state = restore(checkpoint, optimizer, scaler, config, env) if checkpoint else RunState()
    # also a barrier: now rank 0 may replace the checkpoint
    if len(set(env.gather(state.step))) > 1:
        raise ValueError(
            f"processes found different checkpoints: {config.out_dir} must be a folder that all share"
        )
    return Run(
        config=config,
        env=env,
        stop=stop,
        task=task_of_data(meta),
        data=data,
        dataset_meta=meta,
        model=model,
        compiled=model,
        optimizer=optimizer,
        scaler=scaler,
        state=state,
        micro=split.micro,
        accumulation=split.accumulation,
        saved_step=state.step if checkpoint else -1,
        resumed_from=checkpoint and checkpoint["path"],
    )


def open_records(run: Run, seen: dict) -> None:
    """Start what watches and writes: tracker, checkpoints, metrics. `seen`: the checkpoints that
    were there before."""
    config, env, state = run.config, run.env, run.state
    run.tracker, run.watcher = make_watchers(run)
    saved_bytes = 4 * run.model.num_params() + state_bytes(run.model, config)
    sharded = use_shards(config.checkpoint_format, env, saved_bytes)
    run.saver = Saver(Path(config.out_dir), env, sharded)
    env.closing.append(run.saver.close)  # which waits for the last write
    if env.is_main:
        run.directory = RunDirectory(Path(config.out_dir))
        # the rows of metrics.jsonl to keep; a pending one and that of a roll-back are still to be
        # written
        last_step = state.step - 1 if state.pending else state.step
        last_rollback = state.rollbacks - 1 if run.rollback_row else state.rollbacks
        state.wandb_id = run.directory.claim(
            resumed=run.resumed_from,
            keep_until=(last_step, last_rollback),
            configs={"model": asdict(run.model.config), "train": asdict(config)},
            needed_bytes=8 * run.model.num_params(),  # weights and one momentum at least
            seen=seen,
            wandb_id=state.wandb_id,
        )
        run.saver.clean()  # what a kill has left
        if run.rollback_row:
            run.directory.write(run.rollback_row)


def what_is_due(run: Run) -> SimpleNamespace:
    """What is due at this step, done in this order. The last step is logged and evaluated in any
    case."""
    config, step, has_trained = run.config, run.state.step, run.result is not None
    return SimpleNamespace(
        log=has_trained
        and (
            bool(run.ending) or run.is_due(config.log_interval) or run.is_due(config.eval_interval)
        ),
        track=has_trained and run.is_due(config.track_interval),
        sample=has_trained and run.is_due(config.sample_interval),
        evaluate=run.state.evaluated != step and (run.ending or run.is_due(config.eval_interval)),
        save=run.saved_step != step
        and (
            run.rollback_row is not None
            or run.is_due(config.save_interval)
            or run.is_due(config.keep_every)
        ),
    )


def log_step(run: Run, metrics_row: dict, due: SimpleNamespace) -> None:
    """Log the step just made. What ends the run is found here: then it is saved, unless the loss
    spiked."""
    # blocks until the device is done
    row, streak, seconds = run.meter.read(run.result, run.rates, run.state.step)
    metrics_row |= row
    run.env.print(progress_line(metrics_row, run.config.max_iters, seconds))
    stuck = check_skipped(streak, run.state, run.model, run.config, run.env)
    run.failure = record_loss(row["train_loss"], run.state, run.config) or stuck
    if run.failure:
        due.evaluate = False
        due.save = run.saved_step != run.state.step and not isinstance(run.failure, RollBack)


def evaluate_step(run: Run, metrics_row: dict) -> bool:
    """Add what the validation gives to `metrics_row`. Returns whether it is the best so far. If the
    run is stopped meanwhile, the row stays pending: the resumed run evaluates again, and writes
    it."""
    state = run.state
    scores = evaluate(run.compiled, run.task, run.data, run.config, run.micro, run.env, run.stop)
    if scores is None:
        state.pending = finite(metrics_row)
        return False
    is_best = scores["val_loss"] < state.best_val_loss
    state.best_val_loss = min(state.best_val_loss, scores["val_loss"])
    state.evaluated = state.step
    metrics_row |= scores
    run.env.print(f"step {state.step}: {validation_line(scores)}{' (best)' if is_best else ''}")
    return is_best


def save(run: Run, is_best: bool) -> None:
    """Copy everything to the host; a thread writes it while training goes on. All ranks must call
    it."""
    run.stop.nothing_to_lose = False
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    tensors = run.saver.copy(state)
    run.saved_step, run.rollback_row = run.state.step, None
    run.state.skipped = int(run.meter.counts[0])
    configs = {"model_config": asdict(run.model.config), "train_config": asdict(run.config)}
    rest = {
        "scaler": run.scaler.state_dict(),
        "meta": run.dataset_meta,
        **configs,
        **asdict(run.state),
    }
    run.saver.save(tensors, rest, is_best, keep=run.is_due(run.config.keep_every))


def read_batches_ahead(run: Run) -> Prefetch:
    """A function of the step: this process's part of the batch, on the host. A thread reads the
    next one meanwhile."""
    per_process = run.micro * run.accumulation
    own_rows = slice(run.env.rank * per_process, (run.env.rank + 1) * per_process)
    shift, offset = run.state.shift, run.row_offset

    def fetch(step: int) -> tuple:
        return run.env.pin(*run.data.batch(step + shift, run.config.batch_size, own_rows, offset))

    return Prefetch(fetch)


def train(run: Run) -> int:
    """The loop. Returns the exit code. Every rank runs this and calls the same collectives.
    RollBack: the loss spiked, set up again from the last checkpoint. ValueError: the run cannot go
    on."""
    config, env, state, data = run.config, run.env, run.state, run.data
    next_batch = read_batches_ahead(run)
    trainer = Trainer(
        run.model, run.optimizer, run.scaler, run.micro, config.grad_clip, run.compiled
    )
    if env.parallel == "ddp":  # under FSDP the model is sharded already
        from nanodnt.run.compilation import choose_blocks
        from nanodnt.run.parallel import averaging, data_parallel

        if choose_blocks(config, run.model, env.parallel, env.world_size)[0]:
            trainer.step_model = data_parallel(run.compiled, env)
        else:
            trainer.average_gradients = averaging(run.model)
    gc.collect()
    gc.freeze()  # the collector need not walk through what is alive now
    run.meter = Meter(
        state, run.step_tokens, run.step_flops, config, env, run.task.step_counts(config.batch_size)
    )

    while True:
        # 1. what the step before gives (of a run that starts: what is due at its step): log, track,
        # evaluate, save
        run.saver.finish(wait=False)  # a write that failed ends the run here
        due, metrics_row = (
            what_is_due(run),
            {"step": state.step, "tokens": state.tokens} | state.pending,
        )
        state.pending = {}
        if due.log:
            log_step(run, metrics_row, due)
        with run.meter.paused(wait=due.track or due.evaluate or due.save or due.sample):
            if due.track:
                with run.meter.stalled("tracking_s"):
                    metrics_row["track"] = run.tracker.after(
                        run.result.grad_norm, run.result.found_inf
                    )
            with run.meter.stalled("evaluating_s"):
                if due.sample:  # before the row may have to wait for an evaluation
                    metrics_row["sample"] = run.watcher(env)
                is_best = due.evaluate and evaluate_step(run, metrics_row)
            # more than step and tokens
            if env.is_main and len(metrics_row) > 2 and not state.pending:
                run.directory.write(
                    metrics_row | ({"failure": str(run.failure)} if run.failure else {})
                )
            if run.will_roll_back:
                break
            stopping = run.stop.agreed(env)
            evaluated = due.evaluate and not state.pending
            if (
                due.save
                or evaluated
                or (stopping and run.saved_step != state.step and not run.failure)
            ):
                with run.meter.stalled("saving_s"):
                    save(run, is_best)
        if run.failure or stopping or run.ending:
            break

        # 2. one optimizer step
        run.stop.nothing_to_lose = False
        seed_step(config.seed, state.step, env.rank)
        run.rates = set_learning_rates(run.optimizer, state.step, config)
        batch = env.put(*next_batch(state.step))
        if run.is_due(config.track_interval, ahead=1):
            run.tracker.before()
        # None: all
        n_targets = data.loss_tokens(state.step + state.shift, config.batch_size, run.row_offset)
        run.result = training_step(trainer, batch, n_targets and n_targets / env.world_size)
        run.meter.count(run.result.found_inf)
        state.step += 1
        state.rows += config.batch_size
        state.tokens += run.step_tokens

    return finish(run)


def finish(run: Run) -> int:
    """Finish all writes. Returns the exit code, or raises the failure that ended the loop."""
    gc.unfreeze()
    run.saver.finish()
    if run.failure:
        if run.env.is_main:
            run.directory.close()
        if not run.will_roll_back:
            raise ValueError(str(run.failure))
        run.saver.close()
        run.env.barrier()  # the others wait until rank 0 has written the checkpoint
        raise run.failure
    end = run.meter.end("stopped" if run.stop.stopped else run.ending, run.state)
    if run.env.is_main:
        draw_loss(run.directory.path, run.task.loss_unit)
        run.directory.close(end, trained=run.result is not None)
        run.env.print(f"{end_line(end)}; run directory {run.directory.path}")
    return run.stop.exit_code()


def run_once(
    config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop, spike: RollBack | None
) -> int:
    """Set up, then train or only evaluate; the exit code. `spike`: what the run is to be rolled
    back for."""
    stop.nothing_is_lost()  # a roll-back has dropped the steps since the last checkpoint
    seen = fingerprint(config.out_dir)
    run = set_up(config, model_config, env, stop)
    if spike:
        # still to be saved
        run.rollback_row, run.saved_step = roll_back(run.state, spike, config, env), -1
    describe_run(run)
    compile_run(run)
    if config.eval_only:
        if scores := evaluate(run.compiled, run.task, run.data, config, run.micro, env, stop):
            env.print(f"step {run.state.step}: {validation_line(scores, digits=6)}")
        return stop.exit_code()
    open_records(run, seen)
    return train(run)


@reports_errors
def main() -> int:
    (model_config, config), given = configure(GPTConfig, TrainConfig, description=__doc__)
    with Stop() as stop, environment(config.device, config.dtype, config.timeout_s) as env:
        config.check()  # in here, so that torchrun stops the other processes at once
        fill_defaults(config)
        # dataset and device may differ between machines; the contents of the dataset are compared
        # later
        env.check_same({**asdict(model_config), **asdict(config), "dataset": None, "device": None})
        env.print(
            "\n".join([describe(model_config, config, given=given), *rate_notes(config, given)])
        )
        spike = None
        while True:
            try:
                return run_once(config, model_config, env, stop, spike)
            except RollBack as e:
                spike = e.with_traceback(None)  # a traceback would keep the old model alive
                config.init_from = "resume"
            gc.collect()


if __name__ == "__main__":
    end_with(main)
