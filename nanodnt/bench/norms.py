"""What the norms cost, as bare layers and in the model: DyT's Table 7 (arXiv 2503.10622)."""

import statistics
from functools import partial

import torch

from layers.slot import Slot
from nanodnt.bench.measure import free_memory, take_turns
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, make_table
from nanodnt.bench.vary import PLAIN
from nanodnt.engine import prepare_model
from nanodnt.run.compilation import compile_parts

NORMS = ("rmsnorm", "layernorm", "dyt", "none")  # the first is the reference; none is the identity
COLUMNS = {
    "ms": lambda r: format_ms(r["seconds"]),
    "− identity": lambda r: format_ms(r["beyond_identity_s"]),
    f"× {NORMS[0]}": lambda r: f"{r['ratio']:.2f}",
}


def time_norms(setting: Setting) -> dict:
    """Time each norm forward alone and with backward, eager and compiled.

    A bare layer works on the residual stream of one micro batch. The paper's figure is for all layers of a model.
    We read it as the model's time less that with the identity, since 14.1 − 2.1 = 13.0 − 1.0 in its table."""
    models, rows = make_models(setting), []
    for mode in ("eager", "compiled") if setting.choose_compile() else ("eager",):
        calls, found = {}, []
        for norm, model in models.items():
            of_norm = norm_calls(norm, model, mode, setting)
            calls |= {(case, norm): call for case, call in of_norm.items()}
        times, _ = take_turns(calls, setting)
        seconds = {key: statistics.median(sum(rounds, [])) for key, rounds in times.items()}
        for case, norm in sorted(calls, key=lambda key: key[0]):
            row = dict(name=f"{case}, {mode}: {norm}", norm=norm, case=case, way=mode, rounds_s=times[case, norm])
            row |= dict(seconds=seconds[case, norm], ratio=seconds[case, norm] / seconds[case, NORMS[0]])
            found.append(row | dict(beyond_identity_s=seconds[case, norm] - seconds[case, "none"]))
        setting.env.print("\n".join(make_table(found, COLUMNS)))
        rows += found
        del calls
        free_memory(setting.env.device)
    return dict(norms=rows)


def make_models(setting: Setting) -> dict:
    """{norm: a model with it}, whose weights have the dtype of the products, as in the paper. The
    models share their matrices, drawn once: a GPU of 80 GB holds those of a LLaMA 7B and their gradients once."""
    models, matrices, env = {}, {}, setting.env
    for norm in NORMS:
        one = setting.replace(**PLAIN | dict(norm=norm))
        model = one.task.network().empty(one.model_config).to(env.dtype)
        own = {name: p for name, p in model.named_parameters() if name not in matrices}
        own = {name: torch.empty_like(p, device=env.device) for name, p in own.items()}
        model.load_state_dict(own, strict=False, assign=True)
        model.init_weights(one.config.seed)  # nothing is drawn for what is still on the meta device
        matrices = matrices or {name: p for name, p in model.named_parameters() if p.ndim > 1}
        model.load_state_dict(matrices, strict=False, assign=True)
        models[norm] = prepare_model(model, one.config, env)
    return models


def norm_calls(norm: str, model, mode: str, setting: Setting) -> dict:
    """{case: a function that does it once}, in a layer and in the model. With mode="compiled" both
    are compiled here, the model in place if it is compiled in blocks."""
    d, device, batch = setting.model_config.n_embd, setting.env.device, setting.first_micro_batch()
    n_bias = d * (setting.model_config.bias and norm == "layernorm")
    layer = Slot(norm, n_gain=d * (norm != "none"), n_bias=n_bias).to(device, setting.env.dtype)
    layer.init()
    call_layer, call_model = layer, model
    if mode == "compiled":
        call_layer = torch.compile(layer, dynamic=False)
        blocks = setting.config.compile == "blocks"
        call_model = compile_parts(model) if blocks else torch.compile(model, dynamic=False)
    stream = torch.randn(setting.micro, setting.model_config.block_size, d, device=device)
    stream = stream.to(model.runtime.stream_dtype or torch.float32).requires_grad_()
    upstream = torch.randn_like(stream)  # the gradient that the layer is given

    def forward_and_backward():
        stream.grad = None
        out = call_layer(stream)
        if out is not stream:  # the identity has no backward pass
            out.backward(upstream)

    def in_model(training):
        if model.training != training:  # train() walks over all modules, which takes time
            model.train(training)
        loss = call_model(*batch)[1]
        if training:
            loss.backward()
            model.zero_grad(set_to_none=True)

    return {
        "layer, forward": torch.no_grad()(partial(call_layer, stream)),
        "layer, forward+backward": forward_and_backward,
        "model, inference": torch.no_grad()(partial(in_model, False)),
        "model, training": partial(in_model, True),
    }
