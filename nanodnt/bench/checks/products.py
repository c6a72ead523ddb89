"""The product of all experts on this device, however many tokens each of them gets; and a model of them."""

import torch

from layers.moe import Routes, grouped
from nanodnt.bench.checks.numerics import (
    LIMITS,
    NOT_DRAWN,
    allowed_errors,
    compare,
    exact_loss_and_gradients,
    exact_products,
    loss_and_gradients,
)
from nanodnt.bench.checks.verdict import verdict, worst
from nanodnt.bench.settings import Setting
from nanodnt.engine import prepare_model
from nanodnt.run.compilation import compile_model

SPREADS = {  # tokens of each expert
    "even": [64] * 8,
    "uneven": [1, 317, 64, 5, 200, 13, 399, 1],
    "most have none": [0, 500, 0, 1, 0, 499, 0, 0],
    "one has all": [0, 0, 0, 777, 0, 0, 0, 0],
}
ALLOWED_PRODUCT = {torch.float32: 1e-5, torch.bfloat16: 0.01}  # relative; what goes in is rounded before


def product(x, weight, bias, ends, dy) -> tuple:
    """y of `grouped`, and the gradients of x, weight and bias (if there is one) for the gradient dy of y."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    x, weight, bias = (*inputs, None)[:3]
    y = grouped(x, weight, bias, Routes(None, None, ends))
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def wanted_product(x, weight, bias, ends, dy) -> tuple:
    """`product`, expert by expert in float64 on the CPU."""
    inputs = [t.cpu().double().requires_grad_() for t in (x, weight, bias) if t is not None]
    sizes = torch.diff(ends.cpu(), prepend=torch.zeros(1)).int().tolist()
    parts = [rows @ w.T for rows, w in zip(inputs[0].split(sizes), inputs[1], strict=True)]
    if bias is not None:
        parts = [part + b for part, b in zip(parts, inputs[2], strict=True)]
    y = torch.cat(parts)
    return y.detach(), *torch.autograd.grad(y, inputs, dy.cpu().double())


def soil(tensors: list) -> None:
    """Fill these tensors with NaN. A GPU gives their memory to the next ones of their size: what a kernel leaves
    unwritten there shows."""
    for t in tensors:
        t.fill_(torch.nan)


def compare_products(setting: Setting) -> list:
    """A line for each dtype and each spread of tokens: the worst error of an output or a gradient, with and without
    biases, also where rows are of no multiple of 16 bytes."""
    lines, device = [], setting.env.device
    generator = torch.Generator().manual_seed(setting.config.seed)
    n_in, hidden = setting.flags.n_embd, setting.flags.hidden
    for dtype, allowed in ALLOWED_PRODUCT.items():
        for name, sizes in SPREADS.items():
            ends, errors = torch.tensor(sizes).cumsum(0).int().to(device), {}
            for n_out, with_bias in ((hidden, False), (hidden, True), (hidden + 1, False)):
                shapes = [(sum(sizes), n_in), (len(sizes), n_out, n_in), (len(sizes), n_out), (sum(sizes), n_out)]
                x, weight, bias, dy = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
                given = x, weight, bias if with_bias else None, ends, dy
                wanted = wanted_product(*given)
                soil([w.to(dy) for w in wanted])
                with exact_products():
                    found = product(*given)
                for what, a, b in zip(("output", "x", "weight", "bias"), found, wanted, strict=False):
                    errors[f"{what}, {n_in} × {n_out}"] = ((a.cpu().double() - b).norm() / b.norm()).item()
            error, where = worst(errors)
            lines.append(verdict(f"product, {str(dtype).removeprefix('torch.')}, {name}", error, allowed, where))
    return lines


def check_products(setting: Setting) -> dict:
    """The product of all experts against float64; loss and gradients of the model in fp32, eager and compiled, too.

    In bf16 a token may go to another expert for its rounding alone: a model of which all experts are active is among
    those of --verify=precision and compiled."""
    if not setting.flags.n_expert:
        raise ValueError("verify=products checks a mixture of experts: set n_expert, 8 for example")
    lines, env, config = compare_products(setting), setting.env, setting.config
    setting = setting.replace(**NOT_DRAWN)
    setting.open_dataset()
    batch = setting.first_micro_batch()
    wanted = exact_loss_and_gradients(setting, batch)
    model = prepare_model(setting.new_model(), config, env).set_runtime(compute_dtype=torch.float32)
    with exact_products():
        for way in setting.compile_modes():
            call = compile_model(model, config, batch, env) if way == "compiled" else model
            found, allowed = loss_and_gradients(call, model, batch), allowed_errors(setting, torch.float32)
            lines += compare(f"model, float32, {way}", found, wanted, allowed)
    return dict(checks=lines, why=f"relative to float64; of models {LIMITS}")
