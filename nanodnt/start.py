"""The start of a run: model, weights, optimizer state and progress, as `init_from` says; storage;
compilation."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from configurator import read_path
from layers.rules import notes as layout_notes
from model import GPT, GPTConfig, Transformer
from nanodnt.engine import split_batch
from nanodnt.files import check_folder
from nanodnt.optim import describe_groups, fill_defaults, load_optimizer, lr_at, notes
from nanodnt.run.checkpoints import (
    RunState,
    fingerprint,
    how_to_continue,
    is_count,
    load_checkpoint,
    load_latest,
)
from nanodnt.run.environment import Split, possible_parallel
from nanodnt.run.hardware import attention_backend, available_bytes, choose_compile
from nanodnt.settings import TrainConfig
from nanodnt.tasks import fill_from_dataset, resolve, resolve_none, task_of, task_of_data
from nanodnt.weights import empty_model_like, load_weights, profile_admin

# settings whose changes are not worth a line
NOT_PRINTED = ("init_from", "overwrite", "out_dir", "vocab_size")


def find_start(config, model_config: GPTConfig, meta: dict, env, read_pretrained) -> tuple:
    """(the model without storage, its state dict or None: to be drawn from the seed, the checkpoint
    of the run that goes on or None), as init_from says. `meta`: of the dataset.
    `read_pretrained(source, model_config)` reads a model of Hugging Face, or returns None where the
    source cannot be one. ValueError where out_dir cannot be written to, where there is nothing to
    resume, where checkpoints would be overwritten, or where weights, vocabulary and dataset do not
    fit each other."""
    out_dir = Path(config.out_dir)
    if env.is_main and not config.eval_only:
        check_folder(out_dir, "--out_dir")  # before what takes time
    resumes, source = read_init_from(config.init_from)
    checkpoint = load_latest(out_dir, env.print, env) if resumes else None
    if checkpoint is None:
        check_out_dir(config, out_dir)
    fresh = checkpoint is None and source == "scratch"
    task, data_task = task_of(model_config), task_of_data(meta)
    if fresh:
        _, model = resolve(model_config, config, meta)
        weights = trained_on = None
    else:  # only compares its flags with its model, and the model with the dataset
        if task.reads == data_task.reads:
            fill_from_dataset(model_config, meta, config.dataset)
        if checkpoint:
            check_same_data(config.dataset, meta, checkpoint, source, out_dir, env)
        model, weights, trained_on = load_source(
            checkpoint, source, config, model_config, read_pretrained, env
        )
    task = task_of(model.config)
    if data_task.reads != task.reads:
        found = (
            f"dataset {config.dataset!r} is of {data_task.reads}, but the model reads {task.reads}"
        )
        raise ValueError(f"{found}: choose another dataset, or start from scratch")
    task.check_data(config.dataset, meta, trained_on, model.config)
    return model, weights, checkpoint


def read_init_from(setting: str) -> tuple:
    """(whether to resume if there is a run, what to start from if not: of a run directory its
    best.pt, or last.pt)."""
    first, _, rest = setting.partition(":")
    source = setting if first != "auto" else "scratch" if setting == "auto" else read_path(rest)
    checkpoints = [
        path
        for name in ("best.pt", "last.pt")
        if source and (path := Path(source) / name).is_file()
    ]
    return first == "auto" or setting == "resume", str(checkpoints[0]) if checkpoints else source


def check_out_dir(config, out_dir: Path) -> None:
    """ValueError if there is no run to resume, or if a new run would overwrite the checkpoints of
    another."""
    resumes = config.init_from == "resume"
    earlier = fingerprint(out_dir)
    if resumes and not earlier:
        other = "name another --out_dir, or start a new run there with --init_from=scratch"
        raise ValueError(f"nothing to resume in {out_dir} (no last.pt or prev.pt): {other}")
    if resumes or (earlier and not config.overwrite and not config.eval_only):
        what = f"{out_dir} holds checkpoints of an earlier run ({', '.join(sorted(earlier)[:4])})"
        replaces = "--init_from=auto --overwrite=True" if resumes else "--overwrite=True"
        raise ValueError(
            f"{what}: {how_to_continue(out_dir)}; {replaces} replaces it; or name another --out_dir"
        )


def load_source(
    checkpoint: dict | None, source: str, config, model_config: GPTConfig, read_pretrained, env
) -> tuple:
    """(the empty model, its state dict, meta of the data that it was trained on, if that is known):
    of a run that goes on from its `checkpoint`, or else of a new run from `source`. `model_config`:
    of the flags. ValueError where `source` names nothing, or where weights do not fit this code."""
    resumed = checkpoint is not None
    if not resumed and (pretrained := read_pretrained(source, model_config)):
        theirs, weights, trained_on = pretrained
        model, weights = choose_balance(GPT.empty(theirs), weights, model_config, env)
        print_changes(
            "model of the weights, not of the flags",
            asdict(model_config),
            asdict(model.config),
            env,
        )
        env.print(f"weights: {source}")
        if not trained_on:
            env.print(
                f"note: {source} has no tokenizer.json; its tokens are taken to be those of {config.dataset}"
            )
        return model, weights, trained_on
    if not resumed and not Path(source).is_file():
        models = "a model of Hugging Face (a folder, OWNER/MODEL, gpt2, gpt2-medium, gpt2-large, gpt2-xl)"
        what = f"init_from={config.init_from!r} names neither a run directory or a checkpoint file"
        raise ValueError(f"{what} nor {models}, and is none of scratch, resume, auto, auto:SOURCE")
    checkpoint = checkpoint or load_checkpoint(Path(source), parts=("model",))
    c, weights = model_config, checkpoint["model"]
    # these two have no parameters
    model = empty_model_like(checkpoint, dropout=c.dropout, drop_path=c.drop_path)
    if not resumed:
        model, weights = choose_balance(model, weights, model_config, env)
    given, saved = resolve_none(asdict(model_config)), resolve_none(asdict(model.config))
    print_changes("model of the checkpoint, not of the flags", given, saved, env)
    if resumed:
        given = {name: value for name, value in asdict(config).items() if value is not None}
        print_changes("changed on resume", checkpoint["train_config"], given, env)
    env.print(f"weights: {config.out_dir if resumed else source}, step {checkpoint['step']}")
    return model, weights, checkpoint["meta"]


def choose_balance(model: Transformer, weights: dict, model_config: GPTConfig, env) -> tuple:
    """(empty model, weights) of a new run, whose experts are balanced as its flags say, not as the
    weights' run had it. Biases start at 0. Weights with biases keep them, because without biases
    tokens go to other experts."""
    old, new = model.config.balance, model_config.balance
    if not model.config.n_expert or old in (new, "bias"):
        return model, weights
    env.print(f"balance of experts: {old} in the run of the weights, {new} in this one")
    balanced = type(model).empty(replace(model.config, balance=new))
    biases = balanced.state_dict().keys() - model.state_dict().keys()
    return balanced, weights | {name: torch.zeros(model.config.n_expert) for name in biases}


def check_same_data(
    dataset: str, meta: dict, checkpoint: dict, source: str, out_dir: Path, env
) -> None:
    """Print what a run that goes on was trained on, if that is not this dataset with this content.
    ValueError if init_from=auto:SOURCE could as well mean a new run."""
    before = checkpoint["train_config"]["dataset"]
    contents = [[m.get(key) for key in ("splits", "template")] for m in (meta, checkpoint["meta"])]
    if before != dataset:
        change = f"the dataset {before}, not {dataset}"
    elif contents[0] != contents[1]:
        change = f"another content of the dataset {dataset}, prepared again since"
    else:
        return
    if source not in ("resume", "scratch"):
        new = f"give another --out_dir to start one from {source}"
        raise ValueError(
            f"{out_dir} holds a run on {change}: {new}, or continue that run with --init_from=resume"
        )
    env.print(f"note: the run goes on, but was on {change}")


def print_changes(title: str, old: dict, new: dict, env) -> None:
    """One line with the settings that differ; what older versions did not have counts as its
    default."""
    optimizer = new.get("optimizer", "adamw")
    # a class that is not ours has no default learning rate
    learning_rate = 0.0 if ":" in optimizer else None
    defaults = TrainConfig(optimizer=optimizer, learning_rate=learning_rate)
    fill_defaults(defaults)
    old = {field.name: field.default for field in fields(GPTConfig)} | asdict(defaults) | old
    changed = [
        name for name in new if name in old and old[name] != new[name] and name not in NOT_PRINTED
    ]
    if changed:
        env.print(f"{title}: {', '.join(f'{name} {old[name]} → {new[name]}' for name in changed)}")


def split_run(model: Transformer, config, env) -> Split:
    """How the run of the empty model is split over its processes: on GPUs by what a step needs.
    Sets `env.parallel` and prints what it is, and why. All ranks must call it."""
    kinds = possible_parallel(config.parallel, env)
    if env.device.type == "cuda":
        from nanodnt.plan.split import choose_split

        split = choose_split(model, config, env, min(env.gather(available_bytes(env.device))))
    else:
        micro, accumulation = split_batch(
            config.batch_size, config.micro_batch_size, env.world_size
        )
        split = Split(kinds[0], True, micro, accumulation, "")
    env.parallel = split.parallel
    env.check_same({"parallel": env.parallel, "dtype": env.dtype, "device": env.device.type})
    asked = "auto" if config.parallel == "auto" else "as asked"
    line = f"parallel {split.parallel} ({asked}), {env.world_size} processes"
    if split.parallel == "fsdp":
        shards = config.fsdp_shard_size or env.world_size
        times = "once a step" if split.keep else "by blocks in every micro batch"
        line += f", shards of {shards}, gathered and reduced {times}"
    env.print(line)
    if split.reason:
        env.print(split.reason)
    return split


def allocate_and_fill(
    model: Transformer, weights: dict | None, data, config, env, keep: bool
) -> None:
    """Give the model storage on its device, sharded under fsdp, and weights, or the seed's; Admin's
    ω from `data`. `keep`: that of the run's Split."""
    # on the CPU and the same few rows everywhere: a seed gives one model
    if weights is None and model.config.admin:
        drawn = task_of(model.config).network()(model.config, config.seed)
        profile_admin(
            drawn,
            *drawn.inputs(*map(torch.from_numpy, data.batch(0, config.batch_size, slice(0, 8)))),
        )
        weights = drawn.state_dict()
        env.print("admin: profiled on the first batch")
    if env.parallel == "fsdp":
        from nanodnt.run.parallel import shard_model

        shard_model(model, config.fsdp_shard_size, env, keep)
    model.to_empty(device=env.device)
    if weights is None:
        model.init_weights(config.seed)
    else:
        load_weights(model, weights)


def restore(checkpoint: dict, optimizer, scaler, config, env) -> RunState:
    """Load optimizer and loss scaler from a checkpoint; returns how far the run was. ValueError if
    they do not fit."""
    used = checkpoint["train_config"].get("optimizer", config.optimizer)
    if used == config.optimizer:
        load_optimizer(optimizer, checkpoint["optimizer"], checkpoint["step"])
        for group in optimizer.param_groups if checkpoint["step"] else ():
            # if no step follows, this is what is saved
            group["lr"] = lr_at(checkpoint["step"] - 1, config, group)
    else:
        env.print(f"optimizer {used} → {config.optimizer}: its state starts fresh")
    if checkpoint["scaler"]:  # empty after a run that needed none
        scaler.load_state_dict(checkpoint["scaler"])
    state = RunState(**{f.name: checkpoint[f.name] for f in fields(RunState)})
    if state.rows < 0:  # a checkpoint of an earlier version
        batch_size = checkpoint["train_config"].get("batch_size")
        if not is_count(batch_size):
            raise ValueError(f"{checkpoint['path']} is damaged: its train_config has no batch_size")
        state.rows = (state.step + state.shift) * batch_size
    return state


def describe_run(run) -> None:
    """Print what is about to be trained: groups, parameters, batch, and what should be known."""
    config, env, model = run.config, run.env, run.model
    env.print(describe_groups(run.optimizer, model))
    n_params = model.num_params(positions=False)
    env.print(
        f"{model.num_params():,} parameters ({n_params / 1e6:.1f}M without the position table)"
    )
    step = f"{config.batch_size} × {run.data.block_size} = {run.step_tokens:,} tokens a step"
    split = f"{env.world_size} processes × {run.accumulation} accumulation × {run.micro} {run.task.row_noun}"
    env.print(f"{step} = {split}; {run.data.describe()}")
    if config.warmup_iters >= config.max_iters and not config.eval_only:
        env.print(
            f"note: warm-up ({config.warmup_iters} steps) does not end within max_iters={config.max_iters}"
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
        from nanodnt.run.kernels import choose_kernels

        kernel = "flex" if can_use_flex(run.model.config, config, env) else kernel
    env.print(f"compile {compiled} ({reason}), attention {kernel}")
    if compiled and env.device.type == "cuda":
        env.print(f"kernels: {choose_kernels(config.kernels, env.device, env.dtype)[1]}")
    if compiled:
        example = env.put(*env.pin(*data.val_batch(data.validation(eval_tokens=1), run.micro)))
        run.compiled = compile_model(run.model, config, example, env)
