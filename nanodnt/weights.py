"""Weights into models: from a checkpoint, with the tokenizer if it is asked for; models without a
block; and Admin's profiled start values."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from layers.ops import upcast
from layers.sharding import assign
from model import GPT, GPTConfig, Transformer
from nanodnt import READERS
from nanodnt.run.checkpoints import fingerprint, load_checkpoint
from nanodnt.tasks import task_of


def model_from_checkpoint(checkpoint: dict, **overrides) -> Transformer:
    """The model of a checkpoint, with its weights, on the CPU. Overrides and errors are
    `empty_model_like`'s."""
    model = empty_model_like(checkpoint, **overrides).to_empty(device="cpu")
    load_weights(model, checkpoint["model"])
    return model


def empty_model_like(checkpoint: dict, **overrides) -> Transformer:
    """The model of a checkpoint without storage (`Network.empty`). `overrides` are config fields
    that change no shape. Raises ValueError if config or weights do not fit this code; the message
    names the first wrong field or tensor."""
    values, weights = {**checkpoint["model_config"], **overrides}, checkpoint["model"]
    if unknown := values.keys() - {f.name for f in fields(GPTConfig)}:
        raise ValueError(
            f"the checkpoint's model_config has {sorted(map(str, unknown))}, unknown to this version"
        )
    config = GPTConfig(**values)
    config.check()
    mismatch = "the checkpoint's weights do not fit its model_config"
    # checked before a damaged config makes us build millions of blocks
    if config.n_layer > len(weights):
        raise ValueError(f"{mismatch}: {config.n_layer} blocks, but {len(weights)} tensors")
    model = task_of(config).network().empty(config)
    wanted = model.state_dict()
    for name in [*wanted, *weights]:
        needed, found = (
            t.shape if torch.is_tensor(t) else "absent"
            for t in (wanted.get(name), weights.get(name))
        )
        if needed != found:
            raise ValueError(f"{mismatch}: {name} is {found}, not {needed}")
    return model


def load_weights(model: Transformer, weights: dict) -> None:
    """Copy the full tensors of a state dict into a model, which may be sharded."""
    for name, t in model.state_dict().items():
        assign(t, weights[name])


@contextmanager
def without_block(model: Transformer, number: int | None):
    """In this context `model` lacks block `number`, counted from 1, and the others keep their
    constants: LNS's own ℓ, DeepNorm's depth. None: it lacks none."""
    blocks = model.blocks
    try:
        model.blocks = torch.nn.ModuleList(
            block for i, block in enumerate(blocks, 1) if i != number
        )
        yield
    finally:
        model.blocks = blocks


@dataclass
class Trained:
    """`model` on the CPU, in eval mode, in fp32, with the `tokenizer` it was trained with."""

    model: GPT
    tokenizer: object  # a Tokenizer
    meta: dict  # of the tokenizer: tokenizer, vocab_size, eot and what else its kind has
    source: str  # where it is from: a checkpoint's path, or a folder or name of Hugging Face
    step: int  # optimizer steps it has made; 0 where that is not known
    doc_mask: bool = False  # whether documents were kept apart in training; False where that is not
    #   known


def load_trained(out_dir: str, checkpoint: str) -> Trained:
    """What the file `checkpoint` of a run directory holds. ValueError if it is missing, damaged or
    not of text."""
    from nanodnt.data.tokenizer import Tokenizer  # a run does without

    path = Path(out_dir) / checkpoint
    if not path.exists():
        there = ", ".join(sorted(fingerprint(path.parent)))
        fix = (
            f"in {path.parent}: {there} (choose with --checkpoint)"
            if there
            else "name the --out_dir of a run"
        )
        raise ValueError(f"there is no checkpoint {path}; {fix}")
    found = load_checkpoint(path, parts=("model",))
    if (reads := task_of(found["model_config"]).reads) != "text":
        raise ValueError(
            f"{path} is a model of {reads}, which neither reads nor writes text: choose one of text"
        )
    model = model_from_checkpoint(found).eval()
    # checkpoints of earlier versions lack it
    doc_mask = found["train_config"].get("doc_mask") is True
    return Trained(
        model, Tokenizer(found["meta"]), found["meta"], str(path), found["step"], doc_mask
    )


# ------------------------------------------------------------------------------ other people's weights


class Pretrained(NamedTuple):
    """Weights from elsewhere, converted to our names and shapes."""

    config: GPTConfig
    weights: dict[str, Tensor]  # a state dict, in the precision of the files
    meta: dict | None  # of the tokenizer; None if the source has none


# A reader takes (source, model_config) and returns None if it does not know the source. From
# `model_config` it takes the dropout rate and the longest context (block_size, 0 = no limit).
# It raises ValueError, one line, for a source that it knows and cannot read.
Reader = Callable[[str, GPTConfig], Pretrained | None]


def read_pretrained(source: str, model_config: GPTConfig) -> Pretrained | None:
    """The weights that `source` names, or None if no reader knows it. ValueError if there is no
    reader, because interop/ was deleted, and `source` is no checkpoint file either."""
    if not READERS and not Path(source).is_file():
        raise ValueError(
            f"init_from={source} is no checkpoint, and this copy has no interop/ to read others"
        )
    for reader in READERS:
        pretrained = reader(source, model_config)
        if pretrained is not None:
            return pretrained
    return None


def load_pretrained(source: str, block_size: int = 0) -> Trained:
    """The model and tokenizer that `source` names, with a context of at most `block_size` tokens (0
    = its own). ValueError if no reader knows the source, or if it has no tokenizer."""
    from nanodnt.data.tokenizer import Tokenizer

    pretrained = read_pretrained(source, GPTConfig(block_size=block_size))
    if pretrained is None:
        raise ValueError(
            f"init_from={source} is neither a folder nor a name (OWNER/MODEL) of Hugging Face; "
            "a run is named without init_from"
        )
    config, weights, meta = pretrained
    if meta is None:
        raise ValueError(f"{source} has no tokenizer.json, which is needed to read and write text")
    model = model_from_checkpoint({"model_config": vars(config), "model": weights})
    return Trained(model.eval(), Tokenizer(meta), meta, source, step=0)


@torch.no_grad()
def profile_admin(model: Transformer, *inputs) -> None:
    """Give Admin's ω of each sub-layer its start value, from one forward pass of what `stream`
    takes: ω₁ = 1 and ωᵢ₊₁² = Var(ωᵢ x) + Var(fᵢ), variances over all elements, each set before
    sub-layer i runs. Only with `admin`; the model is in eval mode afterwards."""
    if not model.config.admin:
        return
    state = {"omega": 1.0}

    def set_omega(skip, args):
        skip.set_gain(state["omega"])
        state["stream"] = skip.forward(*args).var(correction=0).item()

    def compute_next_omega(mid, args, y):
        state["omega"] = (state["stream"] + upcast(y).var(correction=0).item()) ** 0.5

    # Residual.forward computes skip(x) before mid(f(…)), so a sub-layer's stream variance is there
    # when mid ends
    with ExitStack() as hooks:
        for residual in (r for block in model.blocks for r in (block.attn, block.mlp)):
            hooks.enter_context(residual.skip.register_forward_pre_hook(set_omega))
            hooks.enter_context(residual.mid.register_forward_hook(compute_next_omega))
        model.eval().stream(*inputs)
