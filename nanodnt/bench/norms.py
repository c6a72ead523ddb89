"""What a model's norms cost: DyT's Table 7 (arXiv 2503.10622)."""

import statistics
from functools import partial

import torch

from nanodnt.bench.measure import take_turns
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, make_table
from nanodnt.engine import prepare_model
from nanodnt.run.compilation import compile_parts

NORMS = ("rmsnorm", "dyt", "none")  # the first is the reference; none is the identity


def time_norms(setting: Setting) -> dict:
    """Time inference and training, without an optimizer, of the model with each norm, eager and,
    unless compile is False, compiled. We read the paper's figure of all layers as the model's time
    less that with the identity, since 14.1 − 2.1 = 13.0 − 1.0 in its table. Returns the figures for
    --json."""
    models = make_models(setting)
    batch = setting.first_micro_batch()
    rows = []
    for way in ["eager"] + ["compiled"] * (setting.config.compile is not False):
        if way == "compiled":
            models = {norm: compile_parts(model) for norm, model in models.items()}
        for case, run in {"inference": infer, "training": train}.items():
            times = take_turns(
                {norm: partial(run, model, batch) for norm, model in models.items()}, setting
            )
            seconds = {norm: statistics.median(rounds) for norm, rounds in times.items()}
            for norm in NORMS:
                row = dict(
                    norm=norm, case=case, way=way, rounds_s=times[norm], seconds=seconds[norm]
                )
                row["beyond_identity_s"] = seconds[norm] - seconds["none"]
                row["ratio"] = seconds[norm] / seconds[NORMS[0]]
                rows.append(row)
    setting.env.print("\n".join(make_table([describe(row) for row in rows])))
    return dict(norms=rows)


def describe(row: dict) -> dict:
    """A row of the table: {title: text}."""
    return {
        "": f"{row['case']}, {row['way']}: {row['norm']}",
        "ms": format_ms(row["seconds"]),
        "− identity": format_ms(row["beyond_identity_s"]),
        f"× {NORMS[0]}": f"{row['ratio']:.2f}",
    }


def make_models(setting: Setting) -> dict:
    """{norm: a model with it}, whose weights have the dtype of the products, as in the paper. The
    models share their matrices, drawn once: a GPU of 80 GB holds those of a LLaMA 7B and their
    gradients once."""
    models, matrices, env = {}, {}, setting.env
    for norm in NORMS:
        one = setting.with_norm(norm)
        model = one.task.network().empty(one.model_config).to(env.dtype)
        own = {name: p for name, p in model.named_parameters() if name not in matrices}
        own = {name: torch.empty_like(p, device=env.device) for name, p in own.items()}
        model.load_state_dict(own, strict=False, assign=True)
        model.init_weights(one.config.seed)  # nothing is drawn for what is still on the meta device
        matrices = matrices or {name: p for name, p in model.named_parameters() if p.ndim > 1}
        model.load_state_dict(matrices, strict=False, assign=True)
        models[norm] = prepare_model(model, one.config, env)
    return models


@torch.no_grad()
def infer(model, batch: tuple) -> None:
    """A forward pass in evaluation mode."""
    model.eval()
    model(*batch)


def train(model, batch: tuple) -> None:
    """A forward and a backward pass."""
    model.train()
    model(*batch)[1].backward()
    model.zero_grad(set_to_none=True)
