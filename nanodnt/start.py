"""The start of a run: where model, weights, optimizer state and progress come from, as `init_from` says."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch

from layers import rules
from model import GPT, GPTConfig, Transformer
from nanodnt.optim import describe_groups, fill_defaults, load_optimizer, lr_at, notes, state_bytes
from nanodnt.run.checkpoints import fingerprint, load_checkpoint, load_latest
from nanodnt.run.compilation import can_use_flex, choose_compile, compile_model
from nanodnt.run.hardware import attention_backend
from nanodnt.run.parallel import choose_kept, choose_parallel, shard_model
from nanodnt.settings import TrainConfig
from nanodnt.state import RunState
from nanodnt.tasks import meant, task_of, task_of_data

NOT_PRINTED = ("init_from", "overwrite", "out_dir", "vocab_size")  # settings whose changes are not worth a line


class Start(NamedTuple):
    """Where a run starts from."""

    model: Transformer  # without storage
    weights: dict | None  # its state dict; None: to be drawn from the seed
    meta: dict | None = None  # of the data that the weights were trained on, where that is known
    checkpoint: dict | None = None  # of the run that goes on


def find_start(config, model_config: GPTConfig, meta: dict, env, read_pretrained) -> Start:
    """Where to start from, as init_from says. Prints what it took from where.

    `read_pretrained(source, model_config)` reads a model of Hugging Face, or returns None where the source cannot be
    one. ValueError where there is nothing to resume, where checkpoints of another run would be overwritten, or where
    weights, vocabulary and dataset do not fit each other."""
    out_dir, (resumes, source) = Path(config.out_dir), read_init_from(config.init_from)
    checkpoint = load_latest(out_dir, env.print) if resumes else None
    if checkpoint is None:
        check_out_dir(config, out_dir)
    else:
        check_same_data(config.dataset, meta, checkpoint, source, out_dir, env)
    fresh = checkpoint is None and source == "scratch"
    task = task_of(model_config)
    if fresh or task.reads == task_of_data(meta).reads:
        task.fit(model_config, meta, config.dataset)
    if fresh:
        start = Start(task.network().empty(model_config), None)
    elif checkpoint:
        start = resume(checkpoint, config, model_config, env)
    elif found := read_pretrained(source, model_config):
        start = start_from_pretrained(source, found, config, model_config, env)
    else:
        start = start_from_checkpoint(source, config, model_config, env)
    check_data(config.dataset, meta, start.meta, start.model)
    return start


def resume(checkpoint: dict, config, model_config: GPTConfig, env) -> Start:
    """A run goes on from its checkpoint."""
    model = model_of(checkpoint, model_config)
    print_model_changes(model, model_config, env)
    given = {name: value for name, value in asdict(config).items() if value is not None}
    print_changes("changed on resume", checkpoint["train_config"], given, env)
    env.print(f"weights: {config.out_dir}, step {checkpoint['step']}")
    return Start(model, checkpoint["model"], checkpoint["meta"], checkpoint)


def start_from_checkpoint(source: str, config, model_config: GPTConfig, env) -> Start:
    """A new run from the weights of a checkpoint's file."""
    if not Path(source).is_file():
        raise ValueError(
            f"init_from={config.init_from!r} names neither a run directory or a checkpoint file, nor a folder or a "
            "name (OWNER/MODEL) of Hugging Face, nor is it one of scratch, resume, auto, auto:SOURCE, gpt2, "
            "gpt2-medium, gpt2-large, gpt2-xl"
        )
    checkpoint = load_checkpoint(Path(source))
    model = model_of(checkpoint, model_config)
    start = Start(*choose_balance(model, checkpoint["model"], model_config, env), checkpoint["meta"])
    print_model_changes(start.model, model_config, env)
    env.print(f"weights: {source}, step {checkpoint['step']}")
    return start


def model_of(checkpoint: dict, model_config: GPTConfig) -> Transformer:
    """The empty model of a checkpoint: its architecture, and of the flags what has no parameters."""
    from nanodnt.weights import empty_model_like

    return empty_model_like(checkpoint, dropout=model_config.dropout, drop_path=model_config.drop_path)


def print_model_changes(model: Transformer, model_config: GPTConfig, env) -> None:
    given, saved = meant(asdict(model_config)), meant(asdict(model.config))
    print_changes("model of the checkpoint, not of the flags", given, saved, env)


def start_from_pretrained(source: str, found, config, model_config: GPTConfig, env) -> Start:
    """A new run from the weights of Hugging Face that were `found`."""
    start = Start(*choose_balance(GPT.empty(found.config), found.weights, model_config, env), found.meta)
    print_changes("model of the weights, not of the flags", asdict(model_config), asdict(start.model.config), env)
    env.print(f"weights: {source}")
    if not found.meta:
        env.print(f"note: {source} has no tokenizer.json; its tokens are taken to be those of {config.dataset}")
    return start


def choose_balance(model: Transformer, weights: dict, flags: GPTConfig, env) -> tuple:
    """(empty model, weights) of a new run, whose experts are balanced as its flags say, not as the weights' run had it.
    Biases start at 0. Weights with biases keep them, because without biases tokens go to other experts."""
    old, new = model.config.balance, flags.balance
    if not model.config.n_expert or old in (new, "bias"):
        return model, weights
    env.print(f"balance of experts: {old} in the run of the weights, {new} in this one")
    balanced = type(model).empty(replace(model.config, balance=new))
    biases = balanced.state_dict().keys() - model.state_dict().keys()
    return balanced, weights | {name: torch.zeros(model.config.n_expert) for name in biases}


def read_init_from(setting: str) -> tuple:
    """(whether to resume if there is something to resume, what to start from otherwise). A run directory is replaced by
    the path of its best.pt, or else of its last.pt."""
    first, _, rest = setting.partition(":")
    source = setting if first != "auto" else "scratch" if setting == "auto" else rest
    checkpoints = [path for name in ("best.pt", "last.pt") if source and (path := Path(source) / name).is_file()]
    return first == "auto" or setting == "resume", str(checkpoints[0]) if checkpoints else source


def check_same_data(dataset: str, meta: dict, checkpoint: dict, source: str, out_dir: Path, env) -> None:
    """Print what a run that goes on was trained on, if that is not this dataset with this content. ValueError if
    init_from=auto:SOURCE could as well mean a new run."""
    before = checkpoint["train_config"]["dataset"]
    contents = [[found.get(key) for key in ("splits", "template")] for found in (meta, checkpoint["meta"])]
    if before != dataset:
        change = f"the dataset {before}, not {dataset}"
    elif contents[0] != contents[1]:
        change = f"another content of the dataset {dataset}, prepared again since"
    else:
        return
    if source not in ("resume", "scratch"):
        raise ValueError(
            f"{out_dir} holds a run on {change}: give another --out_dir to start one from {source}, or continue "
            "that run with --init_from=resume"
        )
    env.print(f"note: the run goes on, but was on {change}")


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


def check_data(dataset: str, meta: dict, saved_meta: dict | None, model: Transformer) -> None:
    """ValueError unless the dataset (meta) means what the model was trained on (saved_meta, if it was): the same
    tokens, or the same classes of images of the same size."""
    task, there = task_of(model.config), task_of_data(meta).reads
    if there != task.reads:
        raise ValueError(
            f"dataset {dataset!r} is of {there}, but the model reads {task.reads}: choose another dataset, or start "
            "from scratch"
        )
    task.check_data(dataset, meta, saved_meta, model.config)


def admin_weights(config, model_config: GPTConfig, data) -> dict:
    """Fresh weights with Admin's ω set by profiling. On the CPU and the same few rows everywhere, so that a seed means
    the same weights."""
    from nanodnt.weights import profile_admin

    model = task_of(model_config).network()(model_config, config.seed)
    profile_admin(model, *model.inputs(*map(torch.from_numpy, data.batch(0, config.batch_size, slice(0, 8)))))
    return model.state_dict()


def materialize(start: Start, data, config, env) -> None:
    """Give the model storage on its device, sharded under fsdp, and fill it with its weights or from the seed. `data`:
    what Admin's ω are profiled on."""
    model, weights = start.model, start.weights
    if weights is None and model.config.admin:
        weights = admin_weights(config, model.config, data)
        env.print("admin: profiled on the first batch")
    fixed = 12 * model.num_params() + state_bytes(model, config)  # fp32 weights, gradients, and DDP's copy of these
    env.parallel, reason = choose_parallel(config.parallel, env, fixed)
    env.check_same({"parallel": env.parallel, "dtype": env.dtype, "device": env.device.type})
    how = f", shards of {config.fsdp_shard_size}" if config.fsdp_shard_size else ""
    if env.parallel == "fsdp":
        keep, text = choose_kept(model, config.fsdp_shard_size, env, fixed)
        shard_model(model, config.fsdp_shard_size, env, keep)
        how += f", {text}"
    env.print(f"parallel {env.parallel} ({reason}), {env.world_size} processes{how}")
    model.to_empty(device=env.device)
    if weights is None:
        model.init_weights(config.seed)
    else:
        from nanodnt.weights import load_weights

        load_weights(model, weights)


def print_changes(title: str, old: dict, new: dict, env) -> None:
    """One line with the settings that differ; what older versions did not have counts as its default."""
    defaults = TrainConfig(optimizer=new.get("optimizer", "adamw"))
    fill_defaults(defaults)
    old = {f.name: f.default for f in fields(GPTConfig)} | asdict(defaults) | old
    changed = [k for k in new if k in old and old[k] != new[k] and k not in NOT_PRINTED]
    if changed:
        env.print(f"{title}: {', '.join(f'{k} {old[k]} → {new[k]}' for k in changed)}")


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
    n_params, rows = model.num_params(positions=False), run.task.rows
    env.print(f"{model.num_params():,} parameters ({n_params / 1e6:.1f}M without the position table)")
    env.print(
        f"{config.batch_size} × {run.data.block_size} = {run.step_tokens:,} tokens a step = {env.world_size} processes "
        f"× {run.accumulation} accumulation × {run.micro} {rows}; {run.data.describe()}"
    )
    if config.warmup_iters >= config.max_iters and not config.eval_only:
        env.print(f"note: warm-up ({config.warmup_iters} steps) does not end within max_iters={config.max_iters}")
    experts, shards = model.config.n_expert, config.fsdp_shard_size or env.world_size
    if env.parallel == "fsdp" and experts % shards:
        env.print(
            f"note: {experts} experts do not divide evenly over {shards} processes: some hold {-(-experts // shards)}, "
            f"others fewer or none; with n_expert a multiple of {shards} all hold the same"
        )
    for note in rules.notes(model.config) + notes(config, model):
        env.print(f"note: {note}")


def compile_run(run) -> None:
    """Compile the model if that is asked for, or worth it; print which, and why."""
    config, env, data = run.config, run.env, run.data
    # by the work of the whole run, not of what is left: a resumed run computes as it did before
    work = 0 if config.eval_only else run.step_flops * config.max_iters / env.world_size
    compiled, reason = choose_compile(config.compile, env.device, work)
    if env.any_rank(not compiled) and compiled:
        compiled, reason = False, "auto: another process cannot"
    model, masked = run.model.config, config.doc_mask
    kernel = "flex" if compiled and can_use_flex(model, config, env) else attention_backend(model, env, masked)
    env.print(f"compile {compiled} ({reason}), attention {kernel}")
    if compiled:
        example = env.put(*env.pin(*data.val_batch(data.validation(1), run.micro)))
        run.compiled_model = compile_model(run.model, config, example, env)


def warn_of_learning_rate(config, given: dict, env) -> None:
    """A note where the optimizer is from the command line, but its learning rate from a file for another one."""
    optimizer, rate = (given.get(name, (None, ""))[1] for name in ("optimizer", "learning_rate"))
    if optimizer == "command line" and rate not in ("", "command line"):
        env.print(f"note: learning_rate={config.learning_rate:g} is from {rate}; does it suit this optimizer?")
