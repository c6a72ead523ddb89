"""The start of a run: where its weights come from, how it is split over the devices, storage,
compilation, and the progress of the run that it resumes."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configurator import read_path
from layers.rules import notes as layout_notes
from model import GPT, GPTConfig, Transformer
from nanodnt.data import PreparedData
from nanodnt.engine import split_batch
from nanodnt.files import check_folder
from nanodnt.optim import (
    Optimizer,
    describe_groups,
    fill_defaults,
    is_class_path,
    load_optimizer,
)
from nanodnt.run.checkpoints import (
    RunState,
    fingerprint,
    how_to_continue,
    is_count,
    load_checkpoint,
    load_latest,
)
from nanodnt.run.environment import Env, Split, possible_parallel
from nanodnt.run.hardware import (
    attention_backend,
    available_bytes,
    choose_compile,
    training_flops,
)
from nanodnt.settings import TrainConfig
from nanodnt.tables import count
from nanodnt.tasks import fill_from_dataset, resolve_none, task_of, task_of_data
from nanodnt.weights import (
    Pretrained,
    empty_model_like,
    load_weights,
    profile_admin,
    read_pretrained,
)

# settings whose changes are not worth a line
NOT_PRINTED = ("init_from", "overwrite", "out_dir", "vocab_size")

# days from which a note says how long a run takes: our choice
LONG_DAYS = 7

# ---------------------------------------------------------------------- where the weights come from


class Start(NamedTuple):
    """What a run starts with."""

    model: Transformer  # without storage
    weights: dict[str, Tensor] | None = None  # a state dict; None = draw them from the seed
    # meta.json of the data that the weights were trained on; None = unknown
    meta: dict[str, Any] | None = None
    checkpoint: dict[str, Any] | None = None  # of the run that is resumed; None = a new run


def find_start(
    config: TrainConfig, model_config: GPTConfig, meta: dict[str, Any], env: Env
) -> Start:
    """The start that init_from asks for. `meta`: meta.json of the dataset. ValueError where out_dir
    cannot be written to, where there is nothing to resume, where checkpoints would be overwritten,
    or where weights, vocabulary and dataset do not fit each other."""
    out_dir = Path(config.out_dir)
    if env.is_main and not config.eval_only:
        check_folder(out_dir, "--out_dir")  # before what takes time
    resumes, source = read_init_from(config.init_from)
    checkpoint = load_latest(out_dir, env.note, env) if resumes else None
    if checkpoint is None:
        check_out_dir(out_dir, config.init_from, config.overwrite, config.eval_only)

    if checkpoint is not None:
        fill_if_readable(model_config, meta, config.dataset)
        check_same_data(config.dataset, meta, checkpoint, source, out_dir, env)
        start = resume(checkpoint, asdict(config), model_config, env)
    elif source == "scratch":
        start = start_fresh(model_config, meta, config.dataset)
    else:
        fill_if_readable(model_config, meta, config.dataset)
        pretrained = read_pretrained(source, model_config)
        if pretrained is not None:
            start = start_from_pretrained(pretrained, source, model_config, config.dataset, env)
        else:
            start = start_from_checkpoint(source, config.init_from, model_config, env)

    check_data(start, meta, config.dataset)
    return start


class InitFrom(NamedTuple):
    """The meaning of the flag init_from."""

    resumes: bool  # whether to resume the run in out_dir, if there is one
    # what a new run starts from: scratch, a checkpoint, or a model from elsewhere; resume for
    # init_from=resume, which starts none
    source: str


def read_init_from(setting: str) -> InitFrom:
    """Read the flag init_from. A run directory as source means its best.pt, or its last.pt."""
    first, _, given_source = setting.partition(":")
    if setting == "auto":
        source = "scratch"
    elif first == "auto":
        source = read_path(given_source)
    else:
        source = setting
    for name in ("best.pt", "last.pt"):
        if source and (Path(source) / name).is_file():
            source = str(Path(source) / name)
            break
    resumes = first == "auto" or setting == "resume"
    return InitFrom(resumes=resumes, source=source)


def check_out_dir(out_dir: Path, init_from: str, overwrite: bool, eval_only: bool) -> None:
    """ValueError if there is no run to resume, or if a new run would overwrite the checkpoints of
    another."""
    resumes = init_from == "resume"
    earlier = fingerprint(out_dir)
    if resumes and not earlier:
        other = "name another --out_dir, or start a new run there with --init_from=scratch"
        raise ValueError(f"nothing to resume in {out_dir} (no last.pt or prev.pt): {other}")
    if not resumes and (not earlier or overwrite or eval_only):
        return
    names = ", ".join(sorted(earlier)[:4])
    replaces = "--overwrite=True"
    if resumes:
        replaces = "--init_from=auto --overwrite=True"
    raise ValueError(
        f"{out_dir} holds checkpoints of an earlier run ({names}): {how_to_continue(out_dir)}; "
        f"{replaces} replaces it; or name another --out_dir"
    )


def fill_if_readable(model_config: GPTConfig, meta: dict[str, Any], dataset: str) -> None:
    """`fill_from_dataset`, if the network of the flags reads what the dataset has. A run with
    weights only compares these flags with its model."""
    if task_of(model_config).reads == task_of_data(meta).reads:
        fill_from_dataset(model_config, meta, dataset)


def start_fresh(model_config: GPTConfig, meta: dict[str, Any], dataset: str) -> Start:
    """A new run with weights from the seed. ValueError where flags and dataset do not fit."""
    fill_from_dataset(model_config, meta, dataset)
    return Start(task_of(model_config).network().empty(model_config))


def resume(
    checkpoint: dict[str, Any], settings: dict[str, Any], model_config: GPTConfig, env: Env
) -> Start:
    """The run of `checkpoint` continues, with these `settings` of training; those that differ are
    printed. ValueError where its weights do not fit this code."""
    model = empty_model(checkpoint, model_config)
    print_model_changes(model_config, model.config, env)
    given = {name: value for name, value in settings.items() if value is not None}
    print_changes("changed on resume", checkpoint["train_config"], given, env)
    env.print(f"weights: {settings['out_dir']}, step {checkpoint['step']}")
    return Start(model, checkpoint["model"], checkpoint["meta"], checkpoint)


def start_from_pretrained(
    pretrained: Pretrained, source: str, model_config: GPTConfig, dataset: str, env: Env
) -> Start:
    """A new run from other people's weights."""
    start = Start(GPT.empty(pretrained.config), pretrained.weights, pretrained.meta)
    start = choose_balance(start, model_config, env)
    title = "model of the weights, not of the flags"
    print_changes(title, asdict(model_config), asdict(start.model.config), env)
    env.print(f"weights: {source}{pretrained.about}")
    if not start.meta:
        env.note(
            f"note: {source} has no tokenizer.json; its tokens are taken to be those of {dataset}"
        )
    return start


def start_from_checkpoint(source: str, init_from: str, model_config: GPTConfig, env: Env) -> Start:
    """A new run from the weights of the checkpoint file `source`, which `init_from` names.
    ValueError where there is none, or where its weights do not fit this code."""
    if not Path(source).is_file():
        models = "a folder, OWNER/MODEL, gpt2, gpt2-medium, gpt2-large, gpt2-xl"
        raise ValueError(
            f"init_from={init_from!r} names neither a run directory or a checkpoint file nor a "
            f"model of Hugging Face ({models}), and is none of scratch, resume, auto, auto:SOURCE"
        )
    checkpoint = load_checkpoint(Path(source), parts=("model",))
    start = Start(empty_model(checkpoint, model_config), checkpoint["model"], checkpoint["meta"])
    start = choose_balance(start, model_config, env)
    print_model_changes(model_config, start.model.config, env)
    env.print(f"weights: {source}, step {checkpoint['step']}")
    return start


def empty_model(checkpoint: dict[str, Any], model_config: GPTConfig) -> Transformer:
    """The model of a checkpoint without storage, with the dropout and drop_path of the flags, which
    have no parameters."""
    changeable = dict(dropout=model_config.dropout, drop_path=model_config.drop_path)
    return empty_model_like(checkpoint, **changeable)


def choose_balance(start: Start, model_config: GPTConfig, env: Env) -> Start:
    """Let the flags of a new run choose how experts are balanced, not those of the weights' run.
    Biases start at 0. Weights with biases keep them, because without biases tokens go to other
    experts."""
    config = start.model.config
    new_balance = model_config.balance
    if not config.n_expert or config.balance in (new_balance, "bias"):
        return start
    old = f"{config.balance} in the run of the weights"
    env.print(f"balance of experts: {old}, {new_balance} in this one")
    model = type(start.model).empty(replace(config, balance=new_balance))
    weights = dict(start.weights)
    for name in model.state_dict().keys() - weights.keys():
        weights[name] = torch.zeros(config.n_expert)
    return start._replace(model=model, weights=weights)


def check_same_data(
    dataset: str,
    meta: dict[str, Any],
    checkpoint: dict[str, Any],
    source: str,
    out_dir: Path,
    env: Env,
) -> None:
    """Print the data that a resumed run was trained on, if it differs from this dataset. ValueError
    if init_from=auto:SOURCE could as well mean a new run."""
    old_dataset = checkpoint["train_config"]["dataset"]
    old_meta = checkpoint["meta"]
    same_content = all(meta.get(key) == old_meta.get(key) for key in ("splits", "template"))
    if old_dataset == dataset and same_content:
        return
    change = f"another content of the dataset {dataset}, prepared again since"
    if old_dataset != dataset:
        change = f"the dataset {old_dataset}, not {dataset}"
    if source not in ("resume", "scratch"):
        new = f"give another --out_dir to start one from {source}"
        fix = f"{new}, or continue that run with --init_from=resume"
        raise ValueError(f"{out_dir} holds a run on {change}: {fix}")
    env.note(f"note: the run goes on, but was on {change}")


def check_data(start: Start, meta: dict[str, Any], dataset: str) -> None:
    """ValueError unless the model can read the dataset, and its tokens or classes mean what the
    weights were trained on."""
    task = task_of(start.model.config)
    reads = task_of_data(meta).reads
    if reads != task.reads:
        raise ValueError(
            f"dataset {dataset!r} is of {reads}, but the model reads {task.reads}: "
            "choose another dataset, or start from scratch"
        )
    task.check_data(dataset, meta, start.meta, start.model.config)


def print_model_changes(flags: GPTConfig, used: GPTConfig, env: Env) -> None:
    """One line with the fields in which a checkpoint's model differs from the flags."""
    given = resolve_none(asdict(flags))
    saved = resolve_none(asdict(used))
    print_changes("model of the checkpoint, not of the flags", given, saved, env)


def print_changes(title: str, old: dict[str, Any], new: dict[str, Any], env: Env) -> None:
    """One line with the settings that differ. A setting that an older version did not have counts
    as its default."""
    train_defaults = TrainConfig(optimizer=new.get("optimizer", "adamw"))
    if is_class_path(train_defaults.optimizer):
        # fill_defaults would ask for a rate; the real one is in `old`
        train_defaults.learning_rate = 0.0
    fill_defaults(train_defaults)
    before = {field.name: field.default for field in fields(GPTConfig)}
    before.update(asdict(train_defaults))
    before.update(old)
    changes = []
    for name, value in new.items():
        if name in before and before[name] != value and name not in NOT_PRINTED:
            changes.append(f"{name} {before[name]} → {value}")
    if changes:
        env.print(f"{title}: {', '.join(changes)}")


# --------------------------------------------------------------------------------- onto the devices


def split_run(model: Transformer, config: TrainConfig, env: Env) -> Split:
    """How the run of the empty model is split over its processes: on GPUs by the memory of a step.
    Sets `env.parallel` and prints the split, and why. All ranks must call it."""
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
    reason = "auto" if config.parallel == "auto" else "as asked"
    line = f"parallel {split.parallel} ({reason}), {count(env.world_size, 'process')}"
    if split.parallel == "fsdp":
        shards = config.fsdp_shard_size or env.world_size
        times = "once a step" if split.keep else "by blocks in every micro batch"
        line += f", shards of {shards}, gathered and reduced {times}"
    env.print(line)
    if split.reason.startswith("warning"):
        env.note(split.reason)
    elif split.reason:
        env.print(split.reason)
    return split


def fill_model(
    model: Transformer,
    weights: dict[str, Tensor] | None,
    data: PreparedData,
    batch_size: int,
    seed: int,
    env: Env,
) -> None:
    """Give the empty model storage on its device and `weights`; None: those of the seed, with
    Admin's ω from the first batch of `data`."""
    if weights is None and model.config.admin:
        # on the CPU and the same few rows everywhere: a seed gives one model
        drawn = task_of(model.config).network()(model.config, seed)
        rows = data.batch(0, batch_size, slice(0, 8))
        profile_admin(drawn, *drawn.inputs(*map(torch.from_numpy, rows)))
        weights = drawn.state_dict()
        env.print("admin: profiled on the first batch")
    model.to_empty(device=env.device)
    if weights is None:
        model.init_weights(seed)
    else:
        load_weights(model, weights)


def compile_if_worthwhile(
    model: Transformer, data: PreparedData, micro: int, config: TrainConfig, env: Env
) -> Transformer:
    """The model, compiled if that is asked for, or worth it. Prints which, and why, and then all
    notes, since compiling may take minutes. All ranks must call it."""
    # by the work of the whole run, so that a resumed run computes as it did before
    work = 0
    if not config.eval_only:
        tokens = config.max_iters * config.batch_size * data.block_size
        work = tokens * model.flops_per_token() / env.world_size
    compiled, reason = choose_compile(config.compile, env.device, work)
    if env.any_rank(not compiled) and compiled:
        compiled = False
        reason = "auto: another process cannot"
    kernel = attention_backend(model.config, env, config.doc_mask)
    if not compiled:
        env.print(f"compile False ({reason}), attention {kernel}")
        env.console.print_notes()
        return model

    from nanodnt.run.compilation import can_use_flex, compile_model
    from nanodnt.run.kernels import choose_kernels

    if can_use_flex(model.config, config.doc_mask, env):
        kernel = "flex"
    env.print(f"compile True ({reason}), attention {kernel}")
    if env.device.type == "cuda":
        env.print(f"kernels: {choose_kernels(config.kernels, env.device, env.dtype).reason}")
    env.console.print_notes()
    rows = data.validation(eval_tokens=1)
    example = env.put(*env.pin(*data.val_batch(rows, micro)))
    with env.doing("compiling"):
        return compile_model(model, config, example, env)


# ------------------------------------------------------------------------- what a resumed run loads


def read_progress(checkpoint: dict[str, Any]) -> RunState:
    """The progress of a checkpoint's run. ValueError if it cannot be read."""
    state = RunState(**{field.name: checkpoint[field.name] for field in fields(RunState)})
    if state.rows < 0:  # −1 stands for a key that an earlier version did not save
        batch_size = checkpoint["train_config"].get("batch_size")
        if not is_count(batch_size):
            raise ValueError(f"{checkpoint['path']} is damaged: its train_config has no batch_size")
        state.rows = (state.step + state.shift) * batch_size
    return state


def restore_optimizer(
    checkpoint: dict[str, Any],
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    name: str,
    env: Env,
) -> None:
    """Load the state of optimizer and loss scaler from a checkpoint; `name` is the optimizer's.
    ValueError if they do not fit."""
    saved_name = checkpoint["train_config"].get("optimizer", name)
    if saved_name == name:
        load_optimizer(optimizer, checkpoint["optimizer"], checkpoint["step"])
    else:
        env.print(f"optimizer {saved_name} → {name}: its state starts fresh")
    if checkpoint["scaler"]:  # empty after a run without loss scaling
        scaler.load_state_dict(checkpoint["scaler"])


# --------------------------------------------------------------------------------------- in the log


def describe_run(
    model: Transformer,
    optimizer: Optimizer,
    data: PreparedData,
    split: Split,
    notes: list[str],
    env: Env,
) -> None:
    """Print what is about to be trained: groups, parameters, batch, and `notes` on the settings
    after those on the layout."""
    env.print(describe_groups(optimizer, model))
    n_params = model.num_params(positions=False)
    env.print(
        f"{model.num_params():,} parameters ({n_params / 1e6:.1f}M without the position table)"
    )
    batch_size = env.world_size * split.accumulation * split.micro
    factors = [
        count(env.world_size, "process"),
        count(split.accumulation, "accumulation step"),
        count(split.micro, task_of_data(data.meta).row_noun),
    ]
    env.print(
        f"{batch_size} × {data.block_size} = {batch_size * data.block_size:,} tokens a step = "
        f"{' × '.join(factors)}; {data.describe()}"
    )
    for note in layout_notes(model.config) + notes:
        env.note(f"note: {note}")


def time_notes(model: Transformer, config: TrainConfig, step: int, env: Env) -> list[str]:
    """A note if the rest of the run, after `step` steps, takes longer than a week."""
    steps = config.max_iters - step
    if config.eval_only:
        steps = 0
    flops = steps * config.batch_size * model.config.block_size * model.flops_per_token()
    speed = training_flops(env.device, env.dtype, config.peak_flops) * env.world_size
    days = flops / speed / 86400
    if days <= LONG_DAYS:
        return []
    time = count(round(days), "day")
    if days > 365:
        time = count(round(days / 365), "year")
    device = count(env.world_size, "GPU")
    advice = "use more GPUs, or fewer max_iters"
    if env.device.type == "cpu":
        device = "this CPU"
        advice = "use a GPU, or config/quickstart.py, which takes minutes on a CPU"
    work = f"{flops:.2g} FLOPs at an assumed {speed:.2g} FLOP/s"
    return [f"this run takes about {time} on {device} ({work}): {advice}"]
