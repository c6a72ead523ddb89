"""Is the arithmetic right on this device? Loss, gradients, products and optimizer steps against
float64 on the CPU, and compiled against eager code.

The limits are relative: at least 3 times what 4 blocks of 768 channels were found to need on a CPU,
whose code is tested with equations."""

from itertools import product as pairs

import pytest
import torch

from layers.moe import Routes, grouped
from model import GPTConfig
from nanodnt.bench.settings import Setting
from nanodnt.engine import prepare_model
from nanodnt.optim import OPTIMIZERS, lr_at, make_optimizer
from nanodnt.run.compilation import compile_model
from nanodnt.run.environment import Env
from support.devices import bench_setting, on_devices
from support.optimizers import VARIANTS
from support.tolerances import roundings

SIZES = {
    "cuda": dict(n_layer=4, n_head=12, n_embd=768, block_size=512, vocab_size=50257),
    "cpu": dict(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=64),
}
BLOCK_ROLES = {"cuda": 1536, "cpu": 32}  # of an expert
DNT = dict(qk_norm=True, input_norm=True, mid_norm="both", pre_norm="attn")
MODELS = {
    "Pre-LN, RMSNorm": {},
    "Pre-LN, LayerNorm": dict(norm="layernorm"),
    "DNT (S5)": DNT,
    "DyT": dict(norm="dyt"),
    "LNS, RoPE, SwiGLU": dict(lns="norm", residual_init="plain", pos="rope", mlp="swiglu"),
    "Post-LN": dict(pre_norm="none", post_norm="both"),
    # all are active: in bf16 another choice, for its rounding alone, would be another function
    "experts": dict(n_expert=4, n_expert_active=4, n_ff=256, mlp="swiglu"),
    "DNT (S5), images": dict(DNT, patch_size=4, image_size=32, channels=3, n_class=10),
}
# Allowed relative errors of a few blocks: of the loss, whose roundings even out over the tokens,
# and of gradients, in norm.
ALLOWED = {torch.float32: (roundings(8), roundings(80))}
ALLOWED[torch.bfloat16] = roundings(1 / 16, torch.bfloat16), roundings(5, torch.bfloat16)
# times more for the loss of images, a mean of so few that their rounding hardly evens out
OF_FEW = 20


def make_setting(device: str, name="Pre-LN, RMSNorm", dtype=torch.float32, **changes) -> Setting:
    values = SIZES[device] | MODELS[name] | changes
    if "patch_size" in values:
        values |= dict(vocab_size=0, block_size=GPTConfig.block_size)
    values |= dict(
        batch_size=2, micro_batch_size=2, data="random", dtype=str(dtype).removeprefix("torch.")
    )
    return bench_setting(Env(0, 1, torch.device(device), dtype, False), **values)


@pytest.fixture(autouse=True)
def exact_products():
    """Products of fp32 matrices in fp32: without TF32, whose rounding would hide errors of the
    code."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


def by_role(model, tensors: dict) -> dict:
    """{role: one float64 vector on the CPU of all its tensors}; `tensors`: {parameter name:
    tensor}."""
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
    batch = tuple(t.cpu().double() if t.is_floating_point() else t.cpu() for t in batch)
    return loss_and_gradients(model, model, batch)


def relative_error(found, wanted) -> float:
    return ((found.cpu().double() - wanted).norm() / wanted.norm()).item()


def assert_close(found: tuple, wanted: tuple, setting: Setting, dtype) -> None:
    """Two results of `loss_and_gradients` are as close as products in `dtype` can be."""
    allowed_loss, allowed = ALLOWED[dtype]
    error = abs(found[0] - wanted[0]) / abs(wanted[0])
    assert error <= allowed_loss * (1 if setting.model_config.vocab_size else OF_FEW)
    errors = {role: relative_error(found[1][role], want) for role, want in wanted[1].items()}
    # a NaN is not
    assert {role: error for role, error in errors.items() if not error <= allowed} == {}


def compile_here(model, setting: Setting, batch: tuple):
    """The model compiled as train.py compiles it; on the CPU, where that takes long, only
    traced."""
    torch._dynamo.reset()
    if setting.env.device.type == "cpu":
        return torch.compile(model, backend="eager", dynamic=False)
    return compile_model(model, setting.config, batch, setting.env)


# ------------------------------------------------------------------------------- loss and gradients


@pytest.mark.parametrize(
    "device, name", on_devices(MODELS, cpu=("LNS, RoPE, SwiGLU", "DNT (S5), images"))
)
def test_loss_and_gradients_are_those_of_float64(device, name):
    setting = make_setting(device, name)
    batch = setting.first_micro_batch()
    wanted = exact_loss_and_gradients(setting, batch)
    model = prepare_model(setting.new_model(), setting.config, setting.env)
    for dtype in ALLOWED:
        model.set_runtime(compute_dtype=dtype)
        assert_close(loss_and_gradients(model, model, batch), wanted, setting, dtype)


COMPILED = [(name, dtype, {}) for name in MODELS for dtype in ALLOWED]  # model, dtype, settings
COMPILED += [(name, torch.bfloat16, dict(doc_mask=True)) for name in MODELS if "images" not in name]
COMPILED += [(name, torch.bfloat16, dict(compile="blocks")) for name in MODELS]
COMPILED += [
    (name, torch.bfloat16, dict(kernels="all")) for name in ("Pre-LN, LayerNorm", "DNT (S5)")
]
TRACED = ("DNT (S5)", torch.bfloat16, dict(doc_mask=True))


@pytest.mark.parametrize("device, name, dtype, changes", on_devices(COMPILED, deep=[TRACED]))
def test_compiled_code_does_what_eager_code_does(device, name, dtype, changes):
    """As one graph, with documents kept apart too; embedding, blocks and loss by themselves, as DDP
    needs them."""
    setting = make_setting(device, name, dtype, **dict(compile=True, n_layer=2) | changes)
    batch = setting.first_micro_batch()
    model = prepare_model(setting.new_model(), setting.config, setting.env)
    wanted = loss_and_gradients(model, model, batch)
    assert_close(
        loss_and_gradients(compile_here(model, setting, batch), model, batch),
        wanted,
        setting,
        dtype,
    )


# --------------------------------------------------------------------------------------- optimizers

# of the gradients of each step, by which the optimizer divides, as it does to clip them
SCALES = (1.0, 4.0, 2.0)
ALLOWED_UPDATE = 2e-4  # in fp32: the weights' own rounding, next to small updates of gains near 1


def optimizer_steps(model, config, gradients: list, scales=None) -> tuple:
    """Give a model's optimizer these gradients, {name: fp32 tensor on the CPU} a step; with
    `scales` multiplied by one number a step, by which the optimizer is to divide. Returns (the
    optimizer, the sum of all updates by role)."""
    optimizer, parameters = make_optimizer(model, config), dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for i, step in enumerate(gradients):
        for name, p in parameters.items():
            p.grad = step[name].to(p, copy=True) * (scales[i] if scales else 1)
        if scales:
            optimizer.grad_scale = torch.tensor(
                scales[i], device=next(iter(parameters.values())).device
            )
        for group in optimizer.param_groups:
            group["lr"] = lr_at(config.warmup_iters, config, group)  # the highest
        optimizer.step()
    return optimizer, by_role(
        model, {name: p.detach().double() - before[name] for name, p in parameters.items()}
    )


def tensors_of(model, optimizer) -> list:
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [*model.parameters(), *state]


# every optimizer with its defaults, and what takes another path
# not SOAP: its first bases depend on how the first gradient is rounded (docs/optimizers.md)
FORMS = {name: dict(optimizer=name) for name in OPTIMIZERS if name != "soap"}
NEWER = ("adamw_cautious", "muon_2026")
FORMS |= {name: VARIANTS[name] for name in NEWER if name in VARIANTS}


def check_updates(name: str, device, dtype, compiled: bool = False) -> None:
    """The updates of three steps are those of float64, and a step with an infinite gradient changes
    nothing."""
    setting = make_setting(device, "DNT (S5)", dtype, **FORMS[name], n_layer=1, compile=compiled)
    exact, config = setting.new_model().double(), setting.config
    generator = torch.Generator().manual_seed(0)
    shapes = {n: p.shape for n, p in exact.named_parameters()}
    gradients = [
        {n: 1e-3 * torch.randn(s, generator=generator) for n, s in shapes.items()} for _ in SCALES
    ]
    _, wanted = optimizer_steps(exact, config, gradients)
    model = prepare_model(setting.new_model(), config, setting.env)
    optimizer, found = optimizer_steps(model, config, gradients, SCALES)
    # the products of its Newton-Schulz iteration
    rounded = config.optimizer == "muon" and dtype == torch.bfloat16
    for role, want in wanted.items():
        assert relative_error(found[role], want) <= (
            ALLOWED[dtype][1] if rounded else ALLOWED_UPDATE
        ), role
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.inf)
    before = [t.detach().clone() for t in tensors_of(model, optimizer)]
    optimizer.found_inf = torch.ones((), dtype=torch.bool, device=setting.env.device)
    optimizer.step()
    after = tensors_of(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "an infinite gradient changed something"
    )


UPDATES = list(pairs(FORMS, ALLOWED, (False, True)))


@pytest.mark.parametrize(
    "device, name, dtype, compiled", on_devices(UPDATES, cpu=[u for u in UPDATES if not u[2]])
)
def test_updates_are_those_of_float64(device, name, dtype, compiled):
    check_updates(name, device, dtype, compiled)


# ------------------------------------------------------------------------------------------ experts

SPREADS = {  # tokens of each expert
    "even": [64] * 8,
    "uneven": [1, 317, 64, 5, 200, 13, 399, 1],
    "most have none": [0, 500, 0, 1, 0, 499, 0, 0],
    "one has all": [0, 0, 0, 777, 0, 0, 0, 0],
}
# Sums of up to 777 products; in bf16 the result is rounded, what goes in is rounded before.
ALLOWED_PRODUCT = {torch.float32: roundings(80), torch.bfloat16: roundings(1, torch.bfloat16)}


def product(multiply, x, weight, bias, ends, dy) -> tuple:
    """y of multiply(x, weight, bias, Routes), and the gradients of x, weight and bias (if there is
    one) for that of y, dy."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = multiply(*(*inputs, None)[:3], Routes(None, None, ends))
    return y.detach(), *torch.autograd.grad(y, inputs, dy)


def one_by_one(x, weight, bias, routes):
    """`grouped`, expert by expert."""
    sizes = torch.diff(routes.ends, prepend=torch.zeros(1)).int().tolist()
    pieces = zip(x.split(sizes), weight, [0] * len(weight) if bias is None else bias, strict=True)
    return torch.cat([rows @ w.T + b for rows, w, b in pieces])


PRODUCTS = list(pairs(SPREADS, ALLOWED))


@pytest.mark.parametrize(
    "more, has_bias", [(0, False), (0, True), (1, False)], ids=["plain", "bias", "odd rows"]
)
@pytest.mark.parametrize("device, spread, dtype", on_devices(PRODUCTS, cpu=PRODUCTS))
def test_the_product_of_all_experts(device, spread, dtype, more, has_bias):
    """Also where rows are of no multiple of 16 bytes, and where an expert has no token."""
    sizes, n_in, n_out = SPREADS[spread], SIZES[device]["n_embd"], BLOCK_ROLES[device] + more
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(sizes).cumsum(0).int().to(device)
    shapes = [
        (sum(sizes), n_in),
        (len(sizes), n_out, n_in),
        (len(sizes), n_out),
        (sum(sizes), n_out),
    ]
    x, weight, bias, dy = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    given = x, weight, bias if has_bias else None, ends, dy
    wanted = product(one_by_one, *(t if t is None else t.cpu().double() for t in given))
    for t in [w.to(dy) for w in wanted]:
        # a GPU gives this memory to the next tensors: what a kernel leaves unwritten there shows
        t.fill_(torch.nan)
    for name, a, b in zip(
        ("output", "x", "weight", "bias"), product(grouped, *given), wanted, strict=False
    ):
        assert relative_error(a, b) <= ALLOWED_PRODUCT[dtype], name
