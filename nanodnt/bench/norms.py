"""The time that a model's norms take: DyT's Table 7 (arXiv 2503.10622)."""

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model import Transformer
from nanodnt.bench.measure import take_turns
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, make_table
from nanodnt.engine import prepare_model
from nanodnt.run.compilation import compile_parts

NORMS = ("rmsnorm", "dyt", "none")  # none is the identity
REFERENCE = "rmsnorm"


def time_norms(setting: Setting) -> dict[str, Any]:
    """Time inference and training, without an optimizer, of the model with each norm, eager and,
    unless compile is False, compiled. We read the paper's figure of all layers as the model's time
    less that with the identity, since 14.1 − 2.1 = 13.0 − 1.0 in its table. Returns the figures for
    --json."""
    models = make_models(setting)
    rows = time_models(models, setting, "eager")
    if setting.config.compile is not False:
        models = {norm: compile_parts(model) for norm, model in models.items()}
        rows += time_models(models, setting, "compiled")
    setting.env.print("\n".join(make_table([describe(row) for row in rows])))
    return dict(norms=rows)


def time_models(models: dict[str, Transformer], setting: Setting, way: str) -> list[dict[str, Any]]:
    """The figures of each norm, in inference and in training. `way`: eager or compiled."""
    batch = setting.first_micro_batch()
    rows = []
    for case, run in {"inference": infer, "training": train}.items():
        runs = {norm: partial(run, model, batch) for norm, model in models.items()}
        rounds = take_turns(runs, setting)
        seconds = {norm: statistics.median(rounds[norm]) for norm in NORMS}
        for norm in NORMS:
            rows.append(
                dict(
                    norm=norm,
                    case=case,
                    way=way,
                    rounds_s=rounds[norm],
                    seconds=seconds[norm],
                    beyond_identity_s=seconds[norm] - seconds["none"],
                    ratio=seconds[norm] / seconds[REFERENCE],
                )
            )
    return rows


def describe(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table: {title: text}."""
    return {
        "": f"{row['case']}, {row['way']}: {row['norm']}",
        "ms": format_ms(row["seconds"]),
        "− identity": format_ms(row["beyond_identity_s"]),
        f"× {REFERENCE}": f"{row['ratio']:.2f}",
    }


def make_models(setting: Setting) -> dict[str, Transformer]:
    """{norm: a model with it}. Weights have the dtype of the products, as in the paper. The models
    share their matrices, drawn once: a GPU of 80 GB holds those of a LLaMA 7B and their gradients
    once."""
    env = setting.env
    models = {}
    matrices = {}  # matrices of the first model
    for norm in NORMS:
        own = setting.with_norm(norm)
        model = own.task.network().empty(own.model_config).to(env.dtype)
        storage = {}
        for name, p in model.named_parameters():
            if name not in matrices:
                storage[name] = torch.empty_like(p, device=env.device)
        model.load_state_dict(storage, strict=False, assign=True)
        model.init_weights(own.config.seed)  # draws nothing for parameters on the meta device
        if not matrices:
            matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
        model.load_state_dict(matrices, strict=False, assign=True)
        models[norm] = prepare_model(model, own.config, env)
    return models


@torch.no_grad()
def infer(model: Transformer, batch: tuple[Tensor, ...]) -> None:
    """A forward pass in evaluation mode."""
    model.eval()
    model(*batch)


def train(model: Transformer, batch: tuple[Tensor, ...]) -> None:
    """A forward and a backward pass."""
    model.train()
    _, loss = model(*batch)
    loss.backward()
    model.zero_grad(set_to_none=True)
