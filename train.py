"""Train a GPT or, on images, a ViT.

python train.py config/quickstart.py                                       # CPU or one GPU
torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py      # 8 GPUs
python train.py config/dnt_small.py --optimizer=msgdw --learning_rate=1.0  # any flag overrides
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# settings that torch reads when it is imported
import nanodnt.run.before_torch  # noqa: F401  # isort: skip

import torch
from torch import Tensor

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
from nanodnt.guard import RollBack, find_failure, roll_back
from nanodnt.optim import (
    fill_defaults,
    make_optimizer,
    rate_notes,
    role_notes,
    setting_notes,
    state_bytes,
)
from nanodnt.run.checkpoints import RunState, Saver, fingerprint, use_shards
from nanodnt.run.console import Activity
from nanodnt.run.directory import RunDirectory
from nanodnt.run.environment import Env, Split, Stop, environment
from nanodnt.run.errors import end_with, reports_errors
from nanodnt.run.metrics import (
    Clock,
    Meter,
    draw_loss,
    end_line,
    finite,
    progress_line,
    validation_line,
)
from nanodnt.settings import TrainConfig
from nanodnt.start import (
    Start,
    compile_if_worthwhile,
    describe_run,
    fill_model,
    find_start,
    read_progress,
    restore_optimizer,
    split_run,
    time_notes,
)
from nanodnt.tasks import Task, open_data, task_of_data

with suppress(ModuleNotFoundError):  # a fork may have deleted it
    import interop  # noqa: F401  # registers the readers of weights from elsewhere

if TYPE_CHECKING:  # loaded only if a flag asks for it
    from nanodnt.run.tracking import Tracker

# ------------------------------------------------------------------------------------------- set-up


@dataclass
class Run:
    """A run that is set up, new or resumed."""

    config: TrainConfig
    env: Env
    stop: Stop
    task: Task
    data: PreparedData
    trainer: Trainer  # with model, optimizer and loss scaler, which checkpoints hold
    eval_model: Transformer  # the model, compiled if that is chosen
    state: RunState  # its progress
    resumed_from: Path | None  # the file of a checkpoint; None = a new run
    rollback_row: dict[str, Any] | None  # of metrics.jsonl, if this start rolls the run back

    def is_over(self) -> bool:
        return self.stop.stopped or why_over(self.config, self.state) != ""


def set_up(
    config: TrainConfig, model_config: GPTConfig, env: Env, stop: Stop, spike: RollBack | None
) -> Run:
    """Data, model, optimizer and progress of a run, new or resumed. `spike`: what the run is to be
    rolled back for."""
    # 1. the dataset
    with env.console.doing("reading the dataset"):
        meta = load_meta(config.dataset, verify=env.is_main)
        env.check_same({"contents of the dataset": meta})

    # 2. the network without storage, its weights if there are any, and the data that it reads
    with env.console.doing("reading weights"):
        start = find_start(config, model_config, meta, env)
    model = start.model
    data = open_data(config, model.config, meta)

    # 3. the progress of the run
    state = RunState()
    resumed_from = None
    if start.checkpoint:
        state = read_progress(start.checkpoint)
        resumed_from = start.checkpoint["path"]
    if len(set(env.gather(state.step))) > 1:
        advice = f"{config.out_dir} must be a folder that all share"
        raise ValueError(f"processes found different checkpoints: {advice}")
    rollback_row = None
    if spike:
        rollback_row = roll_back(state, spike, config.batch_size, config.max_rollbacks, env)

    # 4. how the run is split over the devices, and the model on them
    split = split_run(model, config, env)
    for note in time_notes(model, config, state.step, env):
        env.note(f"note: {note}")
    placed = place(start, data, split, config, env)
    env.barrier()  # now that all have read the checkpoint, rank 0 may replace it
    return Run(
        config=config,
        env=env,
        stop=stop,
        task=task_of_data(meta),
        data=data,
        trainer=placed.trainer,
        eval_model=placed.eval_model,
        state=state,
        resumed_from=resumed_from,
        rollback_row=rollback_row,
    )


class Placed(NamedTuple):
    """A model on its devices, ready to be trained."""

    trainer: Trainer
    eval_model: Transformer  # the model, compiled if that is chosen


def place(start: Start, data: PreparedData, split: Split, config: TrainConfig, env: Env) -> Placed:
    """Bring an empty model onto the devices, and make what trains it, in this order."""
    model = start.model

    # 1. shard: FSDP2 splits parameters that have no storage yet
    if split.parallel == "fsdp":
        from nanodnt.run.parallel import shard_model

        shard_model(model, config.fsdp_shard_size, env, split.keep)

    # 2. storage, and weights in it
    fill_model(model, start.weights, data, config.batch_size, config.seed, env)

    # 3. dtypes and activation checkpointing
    prepare_model(model, config, env)

    # 4. the optimizer, and its state if the run is resumed: before the first forward pass, in which
    # FSDP2 replaces sharded parameters
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    if start.checkpoint:
        restore_optimizer(start.checkpoint, optimizer, scaler, config.optimizer, env)
    # here, because it may take minutes to compile
    describe_run(model, optimizer, data, split, role_notes(config, model), env)

    # 5. compile
    eval_model = compile_if_worthwhile(model, data, split.micro, config, env)
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        micro=split.micro,
        grad_clip=config.grad_clip,
        step_model=eval_model,
    )

    # 6. DDP. A model that is compiled block by block averages gradients in buckets during the
    # backward pass; one that is compiled as a whole, once after it
    if split.parallel == "ddp" and not config.eval_only:
        from nanodnt.run.compilation import choose_blocks
        from nanodnt.run.parallel import averaging, data_parallel

        by_blocks = choose_blocks(
            config.compile, config.batch_size, model, split.parallel, env.world_size
        )
        if by_blocks.value:
            trainer.step_model = data_parallel(eval_model, env)
        else:
            trainer.average_gradients = averaging(model)
    return Placed(trainer, eval_model)


# ------------------------------------------------------------------------------------------ records


@dataclass
class Records:
    """What a run measures, and where it writes that."""

    meter: Meter
    saver: Saver  # of checkpoints
    directory: RunDirectory | None  # None but on rank 0
    tracker: "Tracker | None"  # None if track_interval=0
    sample: Callable[[Env], str] | None  # prints a text and returns it; None if sample_interval=0

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to metrics.jsonl, if it has more than its step and tokens."""
        if self.directory and len(row) > 2:
            with self.meter.paused():
                self.directory.write(row)


def open_records(run: Run, clock: Clock, seen: dict[str, tuple]) -> Records:
    """Open what watches a run and writes its files. `seen`: the fingerprint of the run directory
    before this start read it, by which a second run in the same directory is noticed."""
    config, env, state, model = run.config, run.env, run.state, run.trainer.model
    tracker = None
    if config.track_interval:
        from nanodnt.run.tracking import Tracker

        tracker = Tracker(model, run.trainer.optimizer, run.data, config, env)
    watcher = None
    if config.sample_interval:
        from nanodnt.generate import Watcher

        watcher = Watcher(model, run.data.meta, config.sample_start)
        for remark in watcher.tokenizer.remarks(config.sample_start):
            env.print(f"note: sample_start: {remark}")

    saved_bytes = 4 * model.num_params() + state_bytes(model, config)
    sharded = use_shards(config.checkpoint_format, env, saved_bytes)
    saver = Saver(Path(config.out_dir), env, sharded)
    env.closing.callback(saver.close)  # which waits for the last write

    directory = None
    if env.is_main:
        directory = RunDirectory(Path(config.out_dir))
        # metrics.jsonl keeps its rows up to here: catch_up writes a pending row again, and that of
        # a roll-back follows below
        last_step = state.step - 1 if state.pending else state.step
        last_rollback = state.rollbacks - 1 if run.rollback_row else state.rollbacks
        state.wandb_id = directory.claim(
            resumed=run.resumed_from,
            keep_until=(last_step, last_rollback),
            configs={"model": asdict(model.config), "train": asdict(config)},
            needed_bytes=8 * model.num_params(),  # weights and one momentum at least
            seen=seen,
            wandb_id=state.wandb_id,
        )
        saver.clean()  # shards that a kill has left
        if run.rollback_row:
            directory.write(run.rollback_row)

    step_tokens = config.batch_size * run.data.block_size
    counts = {"tokens_per_s": step_tokens, **run.task.step_counts(config.batch_size)}
    step_flops = step_tokens * model.flops_per_token()
    meter = Meter(state.skipped, counts, step_flops, config.peak_flops, env, clock)
    return Records(meter, saver, directory, tracker, watcher)


# -------------------------------------------------------------------------------------- what is due


def why_over(config: TrainConfig, state: RunState) -> str:
    """Why the run ends at this step, in words; "" = it goes on."""
    if config.target_val_loss > 0 and state.best_val_loss <= config.target_val_loss:
        return "target_val_loss reached"
    if state.step >= config.max_iters:
        return "done"
    return ""


def is_due(interval: int, step: int) -> bool:
    """Whether something with this interval (0 = never) is due after `step` steps."""
    return interval > 0 and step % interval == 0


class Due(NamedTuple):
    """What is due after a step, in this order."""

    log: bool
    track: bool
    sample: bool
    evaluate: bool
    save: bool


def what_is_due(config: TrainConfig, state: RunState) -> Due:
    """The last step is always logged, evaluated and saved; so is each step that is evaluated."""
    step = state.step
    evaluates = is_due(config.eval_interval, step) or why_over(config, state) != ""
    return Due(
        log=evaluates or is_due(config.log_interval, step),
        track=is_due(config.track_interval, step),
        sample=is_due(config.sample_interval, step),
        evaluate=evaluates,
        save=evaluates or is_due(config.save_interval, step) or is_due(config.keep_every, step),
    )


# ----------------------------------------------------------------------------------------- training


class Batch(NamedTuple):
    """This process's part of a batch, on its device."""

    tensors: tuple[Tensor, ...]  # arguments of the model: inputs, targets, …, each (rows, …)
    targets_per_rank: float | None  # targets in the loss / number of processes; None = all count


def read_batches_ahead(
    data: PreparedData, state: RunState, batch_size: int, env: Env
) -> Callable[[int], Batch]:
    """A function of the step, whose batch a thread reads during the step before."""
    rows_per_process = batch_size // env.world_size
    own_rows = slice(env.rank * rows_per_process, (env.rank + 1) * rows_per_process)
    shift = state.shift
    # The first row of a batch is (step + shift) · batch_size + offset. offset is 0 unless
    # batch_size was changed on resume.
    offset = state.rows - (state.step + shift) * batch_size

    def read(step: int) -> tuple[Tensor, ...]:
        return env.pin(*data.batch(step + shift, batch_size, own_rows, offset))

    prefetch = Prefetch(read)

    def next_batch(step: int) -> Batch:
        n_targets = data.loss_tokens(step + shift, batch_size, offset)
        targets_per_rank = None if n_targets is None else n_targets / env.world_size
        return Batch(env.put(*prefetch(step)), targets_per_rank)

    return next_batch


def train(run: Run, records: Records, progress: Activity) -> None:
    """The loop. Every rank runs this and calls the same collectives. `progress`: its steps, as the
    console shows them. RollBack: the loss spiked, set up again from the last checkpoint.
    ValueError: the run cannot go on."""
    config, env, state, trainer = run.config, run.env, run.state, run.trainer
    meter = records.meter
    next_batch = read_batches_ahead(run.data, state, config.batch_size, env)
    step_tokens = config.batch_size * run.data.block_size
    gc.collect()
    gc.freeze()  # the collector need not walk through what is alive now
    meter.start(state.step)

    catch_up(run, records)
    while not run.is_over():
        # 1. one optimizer step
        run.stop.nothing_to_lose = False
        seed_step(config.seed, state.step, env.rank)
        rates = set_learning_rates(trainer.optimizer, state.step, config)
        batch = next_batch(state.step)
        if is_due(config.track_interval, state.step + 1):
            records.tracker.before()
        result = training_step(trainer, batch.tensors, batch.targets_per_rank)
        state.advance(config.batch_size, step_tokens)
        meter.count(result.found_inf)
        progress.done = state.step

        # 2. what is due after it
        due = what_is_due(config, state)
        row = {"step": state.step, "tokens": state.tokens}
        failure = None
        is_best = False
        records.saver.finish(wait=False)  # raises the error of a write that has failed
        if due.log:
            reading = meter.read(result.loss, result.grad_norm, rates, state.step)
            row.update(reading.row)
            progress.part_s = reading.recent_step_s
            env.print(progress_line(reading, state.step, config.max_iters))
            failure = find_failure(
                row["train_loss"], reading.longest_streak, state, trainer.model, config, env
            )
        if due.track:
            with meter.paused("tracking_s"):
                row["track"] = records.tracker.after(result.grad_norm, result.found_inf)
        if due.sample:  # before the row may have to wait for an evaluation
            with meter.paused("evaluating_s"):
                row["sample"] = records.sample(env)
        if failure:
            raise end_failed(run, records, row, failure)
        if due.evaluate:
            with meter.paused("evaluating_s"):
                is_best = evaluate_and_record(run, row)
        if not state.pending:  # it is, if a stop has ended the evaluation
            records.write(row)
        stopping = run.stop.agreed(env)  # all ranks ask after each step
        if due.save or stopping:
            with meter.paused("saving_s"):
                save(run, records, is_best)


def catch_up(run: Run, records: Records) -> None:
    """Do what a start owes before its first step: the evaluation of its step, the row that waits
    for it, and a checkpoint of a new run, or of one that was rolled back."""
    state = run.state
    if state.step:  # a checkpoint saved before the next step must hold the rates of the last one
        set_learning_rates(run.trainer.optimizer, state.step - 1, run.config)
    row = {"step": state.step, "tokens": state.tokens, **state.pending}
    state.pending = {}
    is_best = False
    if what_is_due(run.config, state).evaluate and state.evaluated != state.step:
        with records.meter.paused("evaluating_s"):
            is_best = evaluate_and_record(run, row)
    if not state.pending:
        records.write(row)
    run.stop.agreed(run.env)  # sets stop.stopped, which the loop reads
    is_saved = run.resumed_from is not None and run.rollback_row is None
    if not is_saved or "val_loss" in row:
        with records.meter.paused("saving_s"):
            save(run, records, is_best)


def evaluate_run(run: Run) -> dict[str, float] | None:
    """The validation scores of the run as it is now; None if it is stopped meanwhile."""
    return evaluate(
        run.eval_model,
        run.task,
        run.data,
        run.data.validation(run.config.eval_tokens, run.config.eval_rows),
        run.trainer.micro,
        run.env,
        run.stop,
    )


def evaluate_and_record(run: Run, row: dict[str, Any]) -> bool:
    """Add the validation scores to `row`. Returns whether they are the best so far. If the run is
    stopped meanwhile, the row stays pending: the resumed run evaluates again, and writes it."""
    state = run.state
    scores = evaluate_run(run)
    if scores is None:
        state.pending = finite(row)
        return False
    is_best = scores["val_loss"] < state.best_val_loss
    state.best_val_loss = min(state.best_val_loss, scores["val_loss"])
    state.evaluated = state.step
    row.update(scores)
    best = " (best)" if is_best else ""
    run.env.print(f"step {state.step}: {validation_line(scores)}{best}")
    return is_best


def save(run: Run, records: Records, is_best: bool) -> None:
    """Copy everything to the host; a thread writes it while training goes on. All ranks must call
    it."""
    state = run.state
    trainer = run.trainer
    run.stop.nothing_to_lose = False
    tensors = records.saver.copy(
        {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    )
    state.skipped = records.meter.skipped_steps()
    values = {
        "scaler": trainer.scaler.state_dict(),
        "meta": run.data.meta,
        "model_config": asdict(trainer.model.config),
        "train_config": asdict(run.config),
        **asdict(state),
    }
    keep = is_due(run.config.keep_every, state.step)
    records.saver.save(tensors, values, is_best, keep=keep)


def finish(run: Run, records: Records, has_trained: bool) -> int:
    """Wait for the last checkpoint and complete the run directory. Returns the exit code."""
    gc.unfreeze()
    records.saver.finish()
    reason = "stopped" if run.stop.stopped else why_over(run.config, run.state)
    end = records.meter.end(reason, run.state)
    if records.directory:
        path = records.directory.path
        draw_loss(path, run.task.loss_unit, run.env.print)
        records.directory.close(end, trained=has_trained)
        line = f"{end_line(end)}; run directory {path}"
        if run.stop.stopped:
            line += "; --init_from=resume goes on from here"
        run.env.print(line)
    return run.stop.exit_code()


def end_failed(
    run: Run, records: Records, row: dict[str, Any], failure: RollBack | ValueError
) -> RollBack | ValueError:
    """Write the last row. Returns the error to raise. A spike is not saved: it rolls the run back
    while roll-backs are left, and after that ends it like another failure."""
    records.write({**row, "failure": str(failure)})
    is_spike = isinstance(failure, RollBack)
    if not is_spike:
        save(run, records, is_best=False)
    gc.unfreeze()
    records.saver.finish()
    if records.directory:
        records.directory.close()
    if is_spike and run.state.rollbacks < run.config.max_rollbacks:
        records.saver.close()
        run.env.barrier()  # the others wait until rank 0 has written the checkpoint
        return failure
    return ValueError(str(failure))


# --------------------------------------------------------------------------------------------- main


def run_once(
    config: TrainConfig,
    model_config: GPTConfig,
    env: Env,
    stop: Stop,
    clock: Clock,
    spike: RollBack | None,
) -> int:
    """Set up, then train or only evaluate; the exit code."""
    stop.allow_end_at_once()  # a roll-back has dropped the steps since the last checkpoint
    seen = fingerprint(config.out_dir)
    with env.console.doing("setting up"):
        run = set_up(config, model_config, env, stop, spike)
    env.console.print_notes()
    if config.eval_only:
        scores = evaluate_run(run)
        if scores:
            env.print(f"step {run.state.step}: {validation_line(scores, digits=6)}")
        return stop.exit_code()
    with env.console.doing("opening the run directory"):
        records = open_records(run, clock, seen)
    first_step = run.state.step
    with env.console.doing("training, step", config.max_iters) as progress:
        progress.done = first_step
        train(run, records, progress)
    with env.console.doing("finishing"):
        return finish(run, records, has_trained=run.state.step > first_step)


@reports_errors
def main() -> int:
    (model_config, config), given = configure(GPTConfig, TrainConfig, description=__doc__)
    clock = Clock()
    if not given:
        fix = "name a config, as in train.py config/quickstart.py; train.py --help lists the flags"
        raise ValueError(f"nothing is set: {fix}")
    with Stop() as stop, environment(config.device, config.dtype, config.timeout_s) as env:
        config.check()  # in here, so that torchrun stops the other processes at once
        fill_defaults(config)
        # dataset and device may differ between machines; the contents of the dataset are compared
        # later
        env.check_same({**asdict(model_config), **asdict(config), "dataset": None, "device": None})
        env.print(describe(model_config, config, given=given))
        if "dataset" not in given:
            data = f"{config.dataset}, the bytes of Python's own sources"
            env.note(f"note: dataset is not set: this run trains on {data} (set --dataset=NAME)")
        for note in rate_notes(config, given) + setting_notes(config):
            env.note(f"note: {note}")
        spike = None
        while True:
            try:
                return run_once(config, model_config, env, stop, clock, spike)
            except RollBack as e:
                spike = e.with_traceback(None)  # a traceback would keep the old model alive
                config.init_from = "resume"
            gc.collect()


if __name__ == "__main__":
    end_with(main)
