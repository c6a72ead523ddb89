"""The start of a run: where model, weights, optimizer state and progress come from, as `init_from` says."""

import math
from pathlib import Path

import torch

from layers.rules import notes as layout_notes
from model import GPTConfig, Transformer
from nanodnt.optim import describe_groups, load_optimizer, lr_at, notes, state_bytes
from nanodnt.run.checkpoints import RunState, fingerprint, load_latest
from nanodnt.run.environment import choose_parallel
from nanodnt.run.hardware import attention_backend, choose_compile
from nanodnt.tasks import fill_from_dataset, task_of, task_of_data
from nanodnt.weights import load_weights, profile_admin


def find_start(config, model_config: GPTConfig, meta: dict, env, read_pretrained) -> tuple:
    """(the model without storage, its state dict or None: to be drawn from the seed, the checkpoint of the run that
    goes on or None), as init_from says. Prints what it took from where. `meta`: of the dataset.

    `read_pretrained(source, model_config)` reads a model of Hugging Face, or returns None where the source cannot be
    one. ValueError where there is nothing to resume, where checkpoints of another run would be overwritten, or where
    weights, vocabulary and dataset do not fit each other."""
    out_dir = Path(config.out_dir)
    resumes, source = read_init_from(config.init_from)
    checkpoint = load_latest(out_dir, env.print) if resumes else None
    if checkpoint is None:
        check_out_dir(config, out_dir)
    fresh = checkpoint is None and source == "scratch"
    task, there = task_of(model_config), task_of_data(meta)
    # a run that is not fresh only compares its flags with its model, and the model with the dataset
    if fresh or task.reads == there.reads:
        fill_from_dataset(model_config, meta, config.dataset)
    if fresh:
        model, weights, trained_on = task.network().empty(model_config), None, None
    else:
        from nanodnt.sources import check_same_data, load_source

        if checkpoint:
            check_same_data(config.dataset, meta, checkpoint, source, out_dir, env)
        model, weights, trained_on = load_source(checkpoint, source, config, model_config, read_pretrained, env)
    task = task_of(model.config)
    if there.reads != task.reads:
        raise ValueError(
            f"dataset {config.dataset!r} is of {there.reads}, but the model reads {task.reads}: choose another "
            "dataset, or start from scratch"
        )
    task.check_data(config.dataset, meta, trained_on, model.config)
    return model, weights, checkpoint


def read_init_from(setting: str) -> tuple:
    """(whether to resume if there is something to resume, what to start from otherwise). A run directory is replaced by
    the path of its best.pt, or else of its last.pt."""
    first, _, rest = setting.partition(":")
    source = setting if first != "auto" else "scratch" if setting == "auto" else rest
    checkpoints = [path for name in ("best.pt", "last.pt") if source and (path := Path(source) / name).is_file()]
    return first == "auto" or setting == "resume", str(checkpoints[0]) if checkpoints else source


def check_out_dir(config, out_dir: Path) -> None:
    """ValueError if there is no run to resume, or if a new run would overwrite the checkpoints of another."""
    if config.init_from == "resume":
        raise ValueError(
            f"nothing to resume in {out_dir} (no last.pt or prev.pt): use --init_from=scratch or auto, another "
            "--out_dir, or --init_from=CHECKPOINT_FILE for a new run from its weights"
        )
    earlier = sorted(fingerprint(out_dir))
    if earlier and not config.overwrite and not config.eval_only:
        raise ValueError(
            f"{out_dir} holds checkpoints of an earlier run ({', '.join(earlier[:4])}): continue it with "
            "--init_from=resume, choose another --out_dir, or replace it with --overwrite=True"
        )


def fixed_bytes(model: Transformer, config) -> int:
    """What a process holds under DDP before the first activation: fp32 weights, gradients, DDP's copy of these, and the
    optimizer's state."""
    return 12 * model.num_params() + state_bytes(model, config)


def allocate_and_fill(model: Transformer, weights: dict | None, data, config, env) -> None:
    """Give the model storage on its device, sharded under fsdp, and fill it with its weights or from the seed. `data`:
    what Admin's ω are profiled on."""
    if weights is None and model.config.admin:  # on the CPU and the same few rows everywhere: a seed gives one model
        drawn = task_of(model.config).network()(model.config, config.seed)
        profile_admin(drawn, *drawn.inputs(*map(torch.from_numpy, data.batch(0, config.batch_size, slice(0, 8)))))
        weights = drawn.state_dict()
        env.print("admin: profiled on the first batch")
    fixed = fixed_bytes(model, config) if env.distributed else 0
    env.parallel, reason = choose_parallel(config.parallel, env, fixed)
    env.check_same({"parallel": env.parallel, "dtype": env.dtype, "device": env.device.type})
    details = f", shards of {config.fsdp_shard_size}" if config.fsdp_shard_size else ""
    if env.parallel == "fsdp":
        from nanodnt.run.parallel import choose_kept, shard_model

        keep, text = choose_kept(model, config.fsdp_shard_size, env, fixed)
        shard_model(model, config.fsdp_shard_size, env, keep)
        details += f", {text}"
    env.print(f"parallel {env.parallel} ({reason}), {env.world_size} processes{details}")
    model.to_empty(device=env.device)
    if weights is None:
        model.init_weights(config.seed)
    else:
        load_weights(model, weights)


def restore(checkpoint: dict, optimizer, scaler, config, env) -> RunState:
    """Load the optimizer's and the loss scaler's state from a checkpoint; returns how far the run was.

    ValueError where the state does not fit this optimizer on this model."""
    used = checkpoint["train_config"].get("optimizer", config.optimizer)
    if used == config.optimizer:
        load_optimizer(optimizer, checkpoint["optimizer"], checkpoint["step"])
        for group in optimizer.param_groups if checkpoint["step"] else ():
            group["lr"] = lr_at(checkpoint["step"] - 1, config, group)  # if no step follows, this is what is saved
    else:
        env.print(f"optimizer {used} → {config.optimizer}: its state starts fresh")
    if checkpoint["scaler"]:  # empty after a run that needed none
        scaler.load_state_dict(checkpoint["scaler"])
    return RunState.of(checkpoint)


def describe_run(run) -> None:
    """Print what is about to be trained: groups, parameters, batch, and what should be known."""
    config, env, model = run.config, run.env, run.model
    env.print(describe_groups(run.optimizer, model))
    n_params = model.num_params(positions=False)
    env.print(f"{model.num_params():,} parameters ({n_params / 1e6:.1f}M without the position table)")
    env.print(
        f"{config.batch_size} × {run.data.block_size} = {run.step_tokens:,} tokens a step = {env.world_size} processes "
        f"× {run.accumulation} accumulation × {run.micro} {run.task.row_noun}; {run.data.describe()}"
    )
    if config.warmup_iters >= config.max_iters and not config.eval_only:
        env.print(f"note: warm-up ({config.warmup_iters} steps) does not end within max_iters={config.max_iters}")
    experts, shards = model.config.n_expert, config.fsdp_shard_size or env.world_size
    if env.parallel == "fsdp" and experts % shards:
        env.print(
            f"note: {experts} experts do not divide evenly over {shards} processes: some hold "
            f"{math.ceil(experts / shards)}, others fewer or none; with n_expert a multiple of {shards} all hold the "
            "same"
        )
    for note in layout_notes(model.config) + notes(config, model):
        env.print(f"note: {note}")


def compile_run(run) -> None:
    """Compile the model if that is asked for, or worth it; print which, and why."""
    config, env, data = run.config, run.env, run.data
    # by the work of the whole run, not of what is left: a resumed run computes as it did before
    work = 0 if config.eval_only else run.step_flops * config.max_iters / env.world_size
    compiled, reason = choose_compile(config.compile, env.device, work)
    if env.any_rank(not compiled) and compiled:
        compiled, reason = False, "auto: another process cannot"
    kernel = attention_backend(run.model.config, env, config.doc_mask)
    if compiled:
        from nanodnt.run.compilation import can_use_flex, compile_model

        kernel = "flex" if can_use_flex(run.model.config, config, env) else kernel
    env.print(f"compile {compiled} ({reason}), attention {kernel}")
    if compiled:
        example = env.put(*env.pin(*data.val_batch(data.validation(eval_tokens=1), run.micro)))
        run.eval_model = compile_model(run.model, config, example, env)
