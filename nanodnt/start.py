"""The start of a run: where model, weights, optimizer state and progress come from, as `init_from` says."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from interop.huggingface.hub import NAMES, is_pretrained
from interop.huggingface.read import read_pretrained
from layers import rules
from model import GPT, GPTConfig, Transformer
from nanodnt.engine import split_batch
from nanodnt.guard import RollBack
from nanodnt.optim import describe_groups, fill_defaults, load_optimizer, lr_at, notes, state_bytes
from nanodnt.run.checkpoints import fingerprint, load_checkpoint, load_latest
from nanodnt.run.compilation import can_use_flex, choose_compile, compile_model
from nanodnt.run.hardware import attention_backend
from nanodnt.run.parallel import choose_kept, choose_parallel, shard_model
from nanodnt.settings import TrainConfig
from nanodnt.state import RunState
from nanodnt.tasks import meant, open_data, task_of, task_of_data
from nanodnt.weights import empty_model_like, load_weights, profile_admin

NOT_PRINTED = ("init_from", "overwrite", "out_dir", "vocab_size")  # settings whose changes are not worth a line


def start_model(config, model_config: GPTConfig, meta: dict, env) -> tuple:
    """(empty model, weights or None: to be drawn, checkpoint to resume from or None), as init_from says.

    Prints what it took from where. ValueError where there is nothing to resume, where checkpoints of another run would
    be overwritten, where weights, vocabulary and dataset do not fit each other, or where the batch cannot be split."""
    split_batch(config.batch_size, config.micro_batch_size, env.world_size)
    out_dir, (resumes, source) = Path(config.out_dir), read_init_from(config.init_from)
    checkpoint = load_latest(out_dir, env.print) if resumes else None
    if checkpoint is None:
        check_out_dir(config, out_dir)
    elif change := data_change(config.dataset, meta, checkpoint):
        if source not in ("resume", "scratch"):
            raise ValueError(
                f"{out_dir} holds a run on {change}: give another --out_dir to start one from {source}, or continue "
                "that run with --init_from=resume"
            )
        env.print(f"note: the run goes on, but was on {change}")
    weights = saved_meta = None
    fresh = checkpoint is None and source == "scratch"
    if fresh or task_of(model_config).reads == task_of_data(meta).reads:
        task_of(model_config).fit(model_config, meta, config.dataset)
    if fresh:
        model = task_of(model_config).network().empty(model_config)
        if model_config.admin:
            weights = admin_weights(config, model_config, meta)
            env.print("admin: profiled on the first batch")
    elif checkpoint is None and is_pretrained(source):
        found = read_pretrained(source, model_config.block_size, model_config.dropout)
        model, weights = choose_balance(GPT.empty(found.config), found.weights, model_config, env)
        saved_meta = found.meta
        print_changes("model of the weights, not of the flags", asdict(model_config), asdict(model.config), env)
        env.print(f"weights: {source}")
        if not saved_meta:
            env.print(f"note: {source} has no tokenizer.json; its tokens are taken to be those of {config.dataset}")
    else:
        if checkpoint is None and not Path(source).is_file():
            allowed = ", ".join(("scratch", "resume", "auto", "auto:SOURCE", *NAMES))
            raise ValueError(
                f"init_from={config.init_from!r} names neither a run directory or a checkpoint file, nor a folder or a "
                f"name (OWNER/MODEL) of Hugging Face, nor is it one of {allowed}"
            )
        found = checkpoint or load_checkpoint(Path(source))
        # the architecture comes from the checkpoint alone; what has no parameters may change
        may_change = {name: getattr(model_config, name) for name in ("dropout", "drop_path")}
        model, weights = empty_model_like(found, **may_change), found["model"]
        if not checkpoint:
            model, weights = choose_balance(model, weights, model_config, env)
        saved_meta = found["meta"]
        given, saved = meant(asdict(model_config)), meant(asdict(model.config))
        print_changes("model of the checkpoint, not of the flags", given, saved, env)
        if checkpoint:
            resolved = {name: value for name, value in asdict(config).items() if value is not None}
            print_changes("changed on resume", checkpoint["train_config"], resolved, env)
        env.print(f"weights: {out_dir if checkpoint else source}, step {found['step']}")
    check_data(config.dataset, meta, saved_meta, model)
    return model, weights, checkpoint


def choose_balance(model: Transformer, weights: dict, flags: GPTConfig, env) -> tuple:
    """(empty model, weights) of a new run, whose experts are balanced as its flags say, not as the weights' run had it.
    Biases start at 0. Weights with biases keep them, because without them the choice would be another."""
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


def data_change(dataset: str, meta: dict, checkpoint: dict) -> str:
    """What a checkpoint was trained on, if that is not this dataset with this content; else ""."""
    before = checkpoint["train_config"]["dataset"]
    if before != dataset:
        return f"the dataset {before}, not {dataset}"
    contents = [[found.get(key) for key in ("splits", "template")] for found in (meta, checkpoint["meta"])]
    return "" if contents[0] == contents[1] else f"another content of the dataset {dataset}, prepared again since"


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


def admin_weights(config, model_config: GPTConfig, meta: dict) -> dict:
    """Fresh weights with Admin's ω set by profiling. On the CPU and the same few sequences everywhere, so that a seed
    means the same weights."""
    model = task_of(model_config).network()(model_config, config.seed)
    batch = open_data(config, model_config, meta).batch(0, config.batch_size, slice(0, 8))
    profile_admin(model, *model.inputs(*map(torch.from_numpy, batch)))
    return model.state_dict()


def materialize(model: Transformer, weights: dict | None, config, env) -> None:
    """Give an empty model storage on its device, sharded under fsdp, and fill it with `weights` or from the seed."""
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


def roll_back(state: RunState, spike: RollBack, config, env) -> dict:
    """Let a state just restored skip the batches up to the spike. Returns the row of metrics.jsonl that tells of it."""
    passed = spike.step - state.step
    state.shift, state.rollbacks = state.shift + passed, state.rollbacks + 1
    env.print(
        f"rolled back to step {state.step}: the loss spiked to {spike.loss:.4f} at step {spike.step}, usually "
        f"{spike.usual:.4f}; the {passed} batches between are skipped ({state.rollbacks} of {config.max_rollbacks})"
    )
    event = dict(rolled_back_from=spike.step, spike_loss=spike.loss, usual_loss=spike.usual)
    return {"step": state.step, "tokens": state.tokens, **event, "rollbacks": state.rollbacks}


def describe_run(run) -> None:
    """Print what is about to be trained: groups, parameters, batch, and what should be known."""
    config, env, model = run.config, run.env, run.raw_model
    env.print(describe_groups(run.optimizer, model))
    counted, rows = model.num_params(positions=False), run.task.rows
    env.print(f"{model.num_params():,} parameters ({counted / 1e6:.1f}M without the position table)")
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
    model, masked = run.raw_model.config, config.doc_mask
    kernel = "flex" if compiled and can_use_flex(model, config, env) else attention_backend(model, env, masked)
    env.print(f"compile {compiled} ({reason}), attention {kernel}")
    if compiled:
        example = env.put(*env.pin(*data.val_batch(data.validation(1), run.micro)))
        run.model = compile_model(run.raw_model, config, example, env)


def warn_of_learning_rate(config, given: dict, env) -> None:
    """A note where the optimizer is from the command line, but its learning rate from a file for another one."""
    optimizer, rate = (given.get(name, (None, ""))[1] for name in ("optimizer", "learning_rate"))
    if optimizer == "command line" and rate not in ("", "command line"):
        env.print(f"note: learning_rate={config.learning_rate:g} is from {rate}; does it suit this optimizer?")
