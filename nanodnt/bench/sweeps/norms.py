"""What the norms cost, as bare layers and in the model: DyT's Table 7 (arXiv 2503.10622)."""

import torch

from layers.slot import Slot
from nanodnt.bench.measure import free_memory, median_of_rounds
from nanodnt.bench.settings import Setting
from nanodnt.bench.sweeps.layouts import plain_flags
from nanodnt.bench.tables import format_ms
from nanodnt.bench.timing import take_turns
from nanodnt.bench.variants import forward_backward
from nanodnt.tables import table

NORMS = ("rmsnorm", "layernorm", "dyt", "none")  # the first is the reference; none is the identity


def time_norms(setting: Setting) -> dict:
    """Time each norm forward alone and with backward, eager and compiled.

    A bare layer works on the fp32 residual stream of one micro batch. The paper's figure is for all layers of a model.
    We read it as the model's time less that with the identity [I], since 14.1 − 2.1 = 13.0 − 1.0 in its table: the last
    rows of what is printed."""
    env, bias, rows = setting.env, setting.flags.bias, []
    setting.open_dataset()
    batch = setting.first_micro_batch()
    d = setting.flags.n_embd
    stream = torch.randn(setting.micro, setting.flags.block_size, d, device=env.device, requires_grad=True)
    upstream = torch.randn_like(stream)  # the gradient that the layer is given
    for mode in setting.compile_modes():
        runs = {}
        for norm in NORMS:
            layer = Slot(norm, n_gain=d * (norm != "none"), n_bias=d * (bias and norm == "layernorm")).to(env.device)
            layer.init()
            model = setting.replace(**plain_flags() | dict(norm=norm)).new_model()
            model.to(env.device).set_runtime(compute_dtype=env.dtype)
            call_layer, call_model = layer, model
            if mode == "compiled":
                call_layer, call_model = (torch.compile(m, dynamic=False) for m in (layer, model))
            for key, run in (layer_runs(call_layer, stream, upstream) | model_runs(call_model, model, batch)).items():
                runs[(norm, *key)] = run
        for (norm, what, passes), rounds in take_turns(runs, setting).items():
            row = dict(norm=norm, what=what, passes=passes, way=mode, rounds_s=rounds)
            rows.append(row | dict(seconds=median_of_rounds(rounds)))
        del runs, layer, model, call_layer, call_model
        free_memory(env.device)
    env.print("\n".join(describe_norms(rows)))
    return dict(norms=rows)


def layer_runs(call, stream, upstream) -> dict:
    """{(what, passes): a function that does it once} of a bare layer."""

    @torch.no_grad()
    def forward():
        call(stream)

    def forward_and_backward():
        stream.grad = None
        out = call(stream)
        if out is not stream:  # the identity has no backward pass
            out.backward(upstream)

    return {("layer", "forward"): forward, ("layer", "forward+backward"): forward_and_backward}


def model_runs(call, model, batch: tuple) -> dict:
    """{(what, passes): a function that does it once} of a model; `call` is the model, maybe compiled."""

    @torch.no_grad()
    def inference():
        if model.training:  # eval() walks over all modules, which takes time
            model.eval()
        call(*batch)

    def training():
        if not model.training:
            model.train()
        forward_backward(call, model, *batch)

    return {("model", "inference"): inference, ("model", "training"): training}


def describe_norms(rows: list) -> list:
    """A table: what is timed (rows) by norm (columns), then the norms less the identity."""
    seconds = {(r["norm"], r["what"], r["passes"], r["way"]): r["seconds"] for r in rows}
    cases = list(dict.fromkeys(key[1:] for key in seconds))
    columns = [("ms (× rmsnorm)", *(", ".join(case) for case in cases))]
    for norm in NORMS:
        times = [(seconds[(norm, *case)], seconds[("rmsnorm", *case)]) for case in cases]
        name = {"none": "identity"}.get(norm, norm)
        columns.append((name, *(f"{format_ms(t)} ({t / base:.2f})" for t, base in times)))
    for norm in NORMS[:-1]:
        less = [seconds[(norm, *c)] - seconds[("none", *c)] if c[0] == "model" else None for c in cases]
        columns.append((f"{norm} − identity", *("" if t is None else format_ms(t) for t in less)))
    return table(list(zip(*columns, strict=True)))
