"""Arithmetic on this device: loss, gradients and optimizer steps, against float64 on the CPU and against eager code."""

from contextlib import contextmanager
from functools import partial

import torch

from nanodnt.bench.checks.verdict import verdict, worst
from nanodnt.bench.settings import Setting
from nanodnt.bench.sweeps.layouts import plain_flags, resolve_layout
from nanodnt.bench.sweeps.optimizers import other_optimizer
from nanodnt.engine import prepare_model
from nanodnt.optim import OPTIMIZERS, lr_at, make_optimizer
from nanodnt.run.compilation import compile_model

LAYOUTS = {  # names in bench.py's sweep of layouts, and further flags
    "Pre-LN, RMSNorm": ("pre_ln (S1)", {}),
    "Pre-LN, LayerNorm": ("layernorm", {}),
    "DNT (S5)": ("S5 (DNT)", {}),
    "DyT": ("dyt", {}),
    "LNS, RoPE, SwiGLU": ("lns", dict(pos="rope", mlp="swiglu")),
    "Post-LN": ("post_ln", {}),
    # all are active: in bf16 another choice, for its rounding alone, would be another function
    "experts": ("pre_ln (S1)", dict(n_expert=4, n_expert_active=4, n_ff=256, mlp="swiglu")),
}
# Allowed relative errors (loss, gradients of a role) of a few blocks. One rounding: at most 2⁻²⁴ in fp32, 2⁻⁸ in bf16.
ALLOWED = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (5e-4, 0.04)}
OF_FEW = 20  # times more for the loss of images, a mean of so few that their rounding hardly evens out
NOT_DRAWN = dict(dropout=0.0, drop_path=0.0)  # devices would draw other random numbers
ALLOWED_UPDATE = 2e-4  # in fp32: the weights' own rounding, next to small updates of gains near 1
LIMITS = (
    "at least 3 times what 4 blocks of 768 channels were found to need on a CPU, whose code is tested with equations"
)
SCALES = (1.0, 4.0, 2.0)  # of the gradients of each step, by which the optimizer divides, as it does to clip them
STEPS = len(SCALES)  # of each optimizer


@contextmanager
def exact_products():
    """Products of fp32 matrices in fp32: without TF32, whose rounding would hide errors of the code."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def layout_settings(setting: Setting) -> dict:
    """{name: the setting with that layout}."""
    base, found = setting.replace(**plain_flags() | NOT_DRAWN), {}
    for name, (layout, others) in LAYOUTS.items():
        if base.flags.patch_size and "pos" in others:  # images have learned positions
            name, others = name.replace("RoPE, ", ""), {k: v for k, v in others.items() if k != "pos"}
        found[name] = base.replace(**resolve_layout(layout, base.flags) | others)
    return found


def allowed_errors(setting: Setting, dtype: torch.dtype) -> tuple:
    """The allowed errors (loss, gradients of a role) of products in `dtype`."""
    loss, gradients = ALLOWED.get(dtype, ALLOWED[torch.bfloat16])
    return loss * (OF_FEW if setting.flags.patch_size else 1), gradients


def by_role(model, tensors: dict) -> dict:
    """{role: one float64 vector on the CPU of all its tensors}; `tensors`: {parameter name: tensor}."""
    roles, found = model.roles(), {}
    for name, t in tensors.items():
        found.setdefault(roles[name], []).append(t.detach().flatten().cpu().double())
    return {role: torch.cat(parts) for role, parts in found.items()}


def loss_and_gradients(call, model, batch: tuple) -> tuple:
    """(loss, {role: gradient as one vector}) of a batch; `call` is the model, maybe compiled."""
    model.zero_grad(set_to_none=True)
    loss = call(*batch)[1]
    loss.backward()
    return loss.item(), by_role(model, {name: p.grad for name, p in model.named_parameters()})


def exact_loss_and_gradients(setting: Setting, batch: tuple) -> tuple:
    """`loss_and_gradients` of fresh weights in float64 on the CPU."""
    model = setting.new_model().double()
    model.set_runtime(label_smoothing=setting.config.label_smoothing)
    batch = tuple(t.cpu().double() if t.is_floating_point() else t.cpu() for t in batch)
    return loss_and_gradients(model, model, batch)


def worst_role(found: dict, wanted: dict) -> tuple:
    """(largest |found − wanted| / |wanted|, its role) of two {role: vector}."""
    errors = {role: ((found[role] - want).norm() / want.norm()).item() for role, want in wanted.items()}
    return worst(errors)


def compare(name: str, found: tuple, wanted: tuple, allowed: tuple) -> list:
    """Two lines: loss and gradients of `loss_and_gradients`, against those that are wanted."""
    error, role = worst_role(found[1], wanted[1])
    return [
        verdict(f"{name}: loss", abs(found[0] - wanted[0]) / abs(wanted[0]), allowed[0]),
        verdict(f"{name}: gradients", error, allowed[1], f"most: {role}"),
    ]


def check_precision(setting: Setting) -> dict:
    """Loss and gradients of fp32 and bf16 products on the device, against float64 on the CPU: the same weights, the
    same batch."""
    lines, env = [], setting.env
    setting.open_dataset()
    for name, one in layout_settings(setting).items():
        batch = setting.first_micro_batch()
        wanted, model = exact_loss_and_gradients(one, batch), prepare_model(one.new_model(), one.config, env)
        for dtype in ALLOWED:
            model.set_runtime(compute_dtype=dtype)
            with exact_products():
                found = loss_and_gradients(model, model, batch)
            title = f"{name}, {str(dtype).removeprefix('torch.')}"
            lines += compare(title, found, wanted, allowed_errors(setting, dtype))
    return dict(checks=lines, why=f"relative to float64; {LIMITS}")


def check_compiled(setting: Setting) -> dict:
    """Loss and gradients of compiled code, as train.py compiles it, against eager code, on the device and in the
    setting's dtype. ValueError where nothing can be compiled."""
    lines, env = [], setting.env
    if "compiled" not in setting.compile_modes():
        raise ValueError(f"verify=compiled needs a compiler, and compile={setting.config.compile} leaves it out")
    if setting.config.compile == "auto":
        setting = setting.replace(compile=True)  # what fails to compile is an error
    allowed = allowed_errors(setting, env.dtype)
    setting.open_dataset()
    for name, one in layout_settings(setting).items():
        model, batch = prepare_model(one.new_model(), one.config, env), setting.first_micro_batch()
        with exact_products():
            wanted = loss_and_gradients(model, model, batch)
            compiled = compile_model(model, one.config, batch, env)
            lines += compare(name, loss_and_gradients(compiled, model, batch), wanted, allowed)
        torch._dynamo.reset()
    return dict(checks=lines, why=f"relative to eager code in the same dtype, both rounded; {LIMITS}")


def optimizer_steps(model, config, gradients: list, scales=None) -> tuple:
    """Give a model's optimizer these gradients, {name: fp32 tensor on the CPU} a step; with `scales` multiplied by one
    number a step, by which the optimizer is to divide. Returns (the optimizer, the sum of all updates by role)."""
    optimizer, parameters = make_optimizer(model, config), dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for i, step in enumerate(gradients):
        for name, p in parameters.items():
            p.grad = step[name].to(p, copy=True) * (scales[i] if scales else 1)
        if scales:
            optimizer.grad_scale = torch.tensor(scales[i], device=next(iter(parameters.values())).device)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(config.warmup_iters, config, group)  # the highest
        optimizer.step()
    return optimizer, by_role(model, {name: p.detach().double() - before[name] for name, p in parameters.items()})


def skipped_step(model, optimizer) -> int:
    """The number of tensors, parameters and state, that a step changes whose gradients are not finite."""
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    tensors = [*model.parameters(), *state]
    before = [t.detach().clone() for t in tensors]
    optimizer.found_inf = torch.ones((), dtype=torch.bool, device=tensors[0].device)
    optimizer.step()
    return sum(not torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def check_updates(setting: Setting) -> dict:
    """The updates of each optimizer's kernels on the device, which divide the gradients by a factor, against the same
    rule in float64 on the CPU; and that a step with an infinite gradient changes nothing."""
    lines, env, generator = [], setting.env, torch.Generator().manual_seed(setting.config.seed)
    names = {name: p.shape for name, p in setting.new_model().named_parameters()}
    draw = partial(torch.randn, generator=generator)
    gradients = [{name: 1e-3 * draw(shape) for name, shape in names.items()} for _ in range(STEPS)]
    for name in OPTIMIZERS:
        config, exact = other_optimizer(setting, name).config, setting.new_model().double()
        _, wanted = optimizer_steps(exact, config, gradients)
        model = prepare_model(setting.new_model(), config, env)
        with exact_products():
            optimizer, found = optimizer_steps(model, config, gradients, SCALES)
        error, role = worst_role(found, wanted)
        rounded = name == "muon" and env.dtype == torch.bfloat16  # the products of its Newton-Schulz iteration
        allowed = ALLOWED[torch.bfloat16][1] if rounded else ALLOWED_UPDATE
        lines.append(verdict(f"{name}: {STEPS} updates{', in bf16' * rounded}", error, allowed, f"most: {role}"))
        lines.append(verdict(f"{name}: tensors changed by an infinite gradient", skipped_step(model, optimizer), 0))
    why = "relative to the same rule in float64 (Newton-Schulz: fp32) on a CPU; at least 4 times what a CPU needs"
    return dict(checks=lines, why=why)
