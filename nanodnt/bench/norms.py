"""What the norms cost, as bare layers and in the model: DyT's Table 7 (arXiv 2503.10622)."""

import statistics
from functools import partial

import torch

from layers.slot import Slot
from nanodnt.bench.measure import free_memory, take_turns
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, make_table
from nanodnt.bench.vary import PLAIN

NORMS = ("rmsnorm", "layernorm", "dyt", "none")  # the first is the reference; none is the identity
COLUMNS = {
    "ms": lambda r: format_ms(r["seconds"]),
    "− identity": lambda r: format_ms(r["beyond_identity_s"]),
    f"× {NORMS[0]}": lambda r: f"{r['ratio']:.2f}",
}


def time_norms(setting: Setting) -> dict:
    """Time each norm forward alone and with backward, eager and compiled.

    A bare layer works on the fp32 residual stream of one micro batch. The paper's figure is for all layers of a model.
    We read it as the model's time less that with the identity, since 14.1 − 2.1 = 13.0 − 1.0 in its table."""
    rows = []
    for mode in ("eager", "compiled") if setting.choose_compile() else ("eager",):
        calls = {(case, norm): call for norm in NORMS for case, call in norm_calls(norm, mode, setting).items()}
        times = take_turns(calls, setting)
        seconds = {key: statistics.median(sum(rounds, [])) for key, rounds in times.items()}
        for case, norm in sorted(calls, key=lambda key: key[0]):
            row = dict(name=f"{case}, {mode}: {norm}", norm=norm, case=case, way=mode, rounds_s=times[case, norm])
            row |= dict(seconds=seconds[case, norm], ratio=seconds[case, norm] / seconds[case, NORMS[0]])
            rows.append(row | dict(beyond_identity_s=seconds[case, norm] - seconds[case, "none"]))
        del calls
        free_memory(setting.env.device)
    setting.env.print("\n".join(make_table(rows, COLUMNS)))
    return dict(norms=rows)


def norm_calls(norm: str, mode: str, setting: Setting) -> dict:
    """{case: a function that does it once}, in a layer and in a model."""
    d, device, batch = setting.model_config.n_embd, setting.env.device, setting.first_micro_batch()
    n_bias = d * (setting.model_config.bias and norm == "layernorm")
    layer = Slot(norm, n_gain=d * (norm != "none"), n_bias=n_bias).to(device)
    layer.init()
    model = setting.replace(**PLAIN | dict(norm=norm)).new_model()
    model.to(device).set_runtime(compute_dtype=setting.env.dtype)
    call_layer, call_model = layer, model
    if mode == "compiled":
        call_layer, call_model = (torch.compile(m, dynamic=False) for m in (layer, model))
    stream = torch.randn(setting.micro, setting.model_config.block_size, d, device=device, requires_grad=True)
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
