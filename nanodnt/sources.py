"""Where a run starts from if not from scratch: its own checkpoint, that of another run, or weights of Hugging Face."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from model import GPT, GPTConfig, Transformer
from nanodnt.optim import fill_defaults
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.settings import TrainConfig
from nanodnt.tasks import resolve_none
from nanodnt.weights import empty_model_like

NOT_PRINTED = ("init_from", "overwrite", "out_dir", "vocab_size")  # settings whose changes are not worth a line


def load_source(checkpoint: dict | None, source: str, config, flags: GPTConfig, read_pretrained, env) -> tuple:
    """(the empty model, its state dict, meta of the data that it was trained on, if that is known): of a run that goes
    on from its `checkpoint`; without one, of a new run from `source`, a checkpoint's file or a model of Hugging Face,
    which `read_pretrained` reads. `flags`: the model of the flags.

    ValueError where `source` names nothing, or where weights do not fit this code."""
    resumed = checkpoint is not None
    if not resumed and (pretrained := read_pretrained(source, flags)):
        model, weights = choose_balance(GPT.empty(pretrained.config), pretrained.weights, flags, env)
        print_changes("model of the weights, not of the flags", asdict(flags), asdict(model.config), env)
        env.print(f"weights: {source}")
        if not pretrained.meta:
            env.print(f"note: {source} has no tokenizer.json; its tokens are taken to be those of {config.dataset}")
        return model, weights, pretrained.meta
    if not resumed and not Path(source).is_file():
        raise ValueError(
            f"init_from={config.init_from!r} names neither a run directory or a checkpoint file, nor a folder or a "
            "name (OWNER/MODEL) of Hugging Face, nor is it one of scratch, resume, auto, auto:SOURCE, gpt2, "
            "gpt2-medium, gpt2-large, gpt2-xl"
        )
    checkpoint = checkpoint or load_checkpoint(Path(source))
    # the checkpoint's architecture, and of the flags what has no parameters
    model, weights = empty_model_like(checkpoint, dropout=flags.dropout, drop_path=flags.drop_path), checkpoint["model"]
    if not resumed:
        model, weights = choose_balance(model, weights, flags, env)
    given, saved = resolve_none(asdict(flags)), resolve_none(asdict(model.config))
    print_changes("model of the checkpoint, not of the flags", given, saved, env)
    if resumed:
        given = {name: value for name, value in asdict(config).items() if value is not None}
        print_changes("changed on resume", checkpoint["train_config"], given, env)
    env.print(f"weights: {config.out_dir if resumed else source}, step {checkpoint['step']}")
    return model, weights, checkpoint["meta"]


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


def check_same_data(dataset: str, meta: dict, checkpoint: dict, source: str, out_dir: Path, env) -> None:
    """Print what a run that goes on was trained on, if that is not this dataset with this content. ValueError if
    init_from=auto:SOURCE could as well mean a new run."""
    before = checkpoint["train_config"]["dataset"]
    contents = [[m.get(key) for key in ("splits", "template")] for m in (meta, checkpoint["meta"])]
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


def print_changes(title: str, old: dict, new: dict, env) -> None:
    """One line with the settings that differ; what older versions did not have counts as its default."""
    defaults = TrainConfig(optimizer=new.get("optimizer", "adamw"))
    fill_defaults(defaults)
    old = {f.name: f.default for f in fields(GPTConfig)} | asdict(defaults) | old
    changed = [k for k in new if k in old and old[k] != new[k] and k not in NOT_PRINTED]
    if changed:
        env.print(f"{title}: {', '.join(f'{k} {old[k]} → {new[k]}' for k in changed)}")
