"""Weights into models: from a checkpoint or from elsewhere, with the tokenizer if it is asked for;
models without a block; Admin's profiled start values."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from layers.ops import upcast
from layers.sharding import assign
from model import GPT, GPTConfig, Transformer
from nanodnt import READERS
from nanodnt.run.checkpoints import fingerprint, load_checkpoint
from nanodnt.tasks import task_of

if TYPE_CHECKING:
    from nanodnt.data.tokenizer import Tokenizer  # a training run loads none


# ------------------------------------------------------------------------------------- checkpoints


def model_from_checkpoint(checkpoint: dict[str, Any], **overrides: Any) -> Transformer:
    """The model of a checkpoint, with its weights, on the CPU, in eval mode: `model.train()` before
    training. Overrides and errors as in `empty_model_like`."""
    model = empty_model_like(checkpoint, **overrides).to_empty(device="cpu")
    load_weights(model, checkpoint["model"])
    return model.eval()


def empty_model_like(checkpoint: dict[str, Any], **overrides: Any) -> Transformer:
    """The model of a checkpoint without storage (`Network.empty`). Of the checkpoint only
    "model_config" and "model" are read.

    overrides  config fields that change no shape

    ValueError if config or weights do not fit this code; the message names the first wrong field or
    tensor."""
    values = {**checkpoint["model_config"], **overrides}
    weights = checkpoint["model"]
    if unknown := values.keys() - {f.name for f in fields(GPTConfig)}:
        names = sorted(map(str, unknown))
        raise ValueError(f"the checkpoint's model_config has {names}, unknown to this version")
    config = GPTConfig(**values)
    config.check()
    mismatch = "the checkpoint's weights do not fit its model_config"
    # checked first, because a damaged config could ask for millions of blocks
    if config.n_layer > len(weights):
        raise ValueError(f"{mismatch}: {config.n_layer} blocks, but {len(weights)} tensors")
    model = task_of(config).network().empty(config)
    expected = model.state_dict()
    for name in [*expected, *weights]:
        needed_shape = shape_of(expected.get(name))
        shape = shape_of(weights.get(name))
        if needed_shape != shape:
            raise ValueError(f"{mismatch}: {name} is {shape}, not {needed_shape}")
    return model


def shape_of(t: Any) -> torch.Size | str:
    """The shape of a tensor; "absent" if `t` is no tensor."""
    return t.shape if torch.is_tensor(t) else "absent"


def load_weights(model: Transformer, weights: dict[str, Tensor]) -> None:
    """Copy the full tensors of a state dict into a model, which may be sharded."""
    for name, t in model.state_dict().items():
        assign(t, weights[name])


@dataclass
class Trained:
    """A trained language model and its tokenizer."""

    model: GPT  # on the CPU, in eval mode, in fp32
    tokenizer: "Tokenizer"
    meta: dict  # meta of the tokenizer: tokenizer, vocab_size, eot and other keys of its kind
    source: str  # a checkpoint's path, or a folder or name of a model from elsewhere
    step: int  # optimizer steps made; 0 = unknown
    doc_mask: bool = False  # whether documents were kept apart in training; False = unknown


def load_trained(out_dir: Path | str, checkpoint: str) -> Trained:
    """The model and tokenizer in the file `checkpoint` of a run directory. ValueError if it is
    missing, damaged or not a language model's."""
    from nanodnt.data.tokenizer import Tokenizer

    path = Path(out_dir) / checkpoint
    if not path.exists():
        fix = "name the --out_dir of a run"
        if names := sorted(fingerprint(path.parent)):
            fix = f"in {path.parent}: {', '.join(names)} (choose with --checkpoint)"
        raise ValueError(f"there is no checkpoint {path}; {fix}")
    content = load_checkpoint(path, parts=("model",))
    reads = task_of(content["model_config"]).reads
    if reads != "text":
        raise ValueError(
            f"{path} is a model of {reads}, which neither reads nor writes text: choose one of text"
        )
    meta = content["meta"]
    return Trained(
        model=model_from_checkpoint(content),
        tokenizer=Tokenizer(meta),
        meta=meta,
        source=str(path),
        step=content["step"],
        # checkpoints of earlier versions lack it
        doc_mask=content["train_config"].get("doc_mask") is True,
    )


# -------------------------------------------------------------------------- weights from elsewhere


class Pretrained(NamedTuple):
    """Weights from elsewhere, converted to our names and shapes."""

    config: GPTConfig
    weights: dict[str, Tensor]  # a state dict, in the precision of the files
    meta: dict | None  # meta of the tokenizer; None if the source has none
    step: int = 0  # optimizer steps made; 0 = unknown
    about: str = ""  # more on the weights, for the line that names their source
    no_meta: str = "has no tokenizer.json, which is needed to read and write text"


# A function in READERS. It takes (source, model_config) and returns None if it does not know the
# source. From `model_config` it takes the dropout rate and the longest context (block_size, 0 = no
# limit). It raises ValueError, one line, for a source that it knows and cannot read.
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
    = its own; a checkpoint of ours always has its own). ValueError if no reader knows the source,
    or if it has no tokenizer."""
    from nanodnt.data.tokenizer import Tokenizer

    pretrained = read_pretrained(source, GPTConfig(block_size=block_size))
    if pretrained is None:
        if Path(source).is_file():
            return load_trained(Path(source).parent, Path(source).name)
        raise ValueError(
            f"init_from={source} is neither a folder nor a name (OWNER/MODEL) of Hugging Face, nor "
            "a checkpoint file; a run is named without init_from"
        )
    meta = pretrained.meta
    if meta is None:
        raise ValueError(f"{source} {pretrained.no_meta}")
    content = {"model_config": vars(pretrained.config), "model": pretrained.weights}
    model = model_from_checkpoint(content)
    return Trained(model.eval(), Tokenizer(meta), meta, source, pretrained.step)


# ------------------------------------------------------------------------------------------ models


@contextmanager
def without_block(model: Transformer, number: int | None) -> Iterator[None]:
    """In this context `model` lacks block `number`, counted from 1; None = it lacks none. The other
    blocks keep their constants, LNS's own ℓ and DeepNorm's depth; their index in `model.blocks`
    changes."""
    blocks = model.blocks
    others = [block for i, block in enumerate(blocks, 1) if i != number]
    try:
        model.blocks = nn.ModuleList(others)
        yield
    finally:
        model.blocks = blocks


@torch.no_grad()
def profile_admin(model: Transformer, *inputs: Tensor) -> None:
    """Give Admin's ω of each sub-layer its start value, from one forward pass of `inputs`, the
    arguments of `stream`.

    ω₁ = 1 and ωᵢ₊₁² = Var(ωᵢ x) + Var(fᵢ), variances over all elements, each set before sub-layer i
    runs. Does nothing without `admin`; else the model is in eval mode afterwards."""
    if not model.config.admin:
        return
    omega = 1.0
    variance = 0.0  # variance of the stream after the skip connection

    def set_omega(skip: nn.Module, args: tuple) -> None:
        nonlocal variance
        skip.set_gain(omega)
        variance = skip.forward(*args).var(correction=0).item()

    def compute_next_omega(mid: nn.Module, args: tuple, y: Tensor) -> None:
        nonlocal omega
        omega = (variance + upcast(y).var(correction=0).item()) ** 0.5

    # Residual.forward computes skip(x) before mid(f(…)): when mid ends, the variance is known
    with ExitStack() as hooks:
        for block in model.blocks:
            for residual in (block.attn, block.mlp):
                hooks.enter_context(residual.skip.register_forward_pre_hook(set_omega))
                hooks.enter_context(residual.mid.register_forward_hook(compute_next_omega))
        model.eval().stream(*inputs)
