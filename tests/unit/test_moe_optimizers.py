"""Optimizers on mixtures of experts: the parts' roles and groups, updates of stacks against formulas in float64, the
biases on the choice, and what the gradient's norm counts."""

import math
import re

import pytest
import torch

from layers.moe import Router
from layers.runtime import Runtime
from nanodnt.optim import Optimizer, lr_at, make_optimizer
from nanodnt.optim.orthogonal import newton_schulz
from support import reference
from support.models import error
from support.moe import batch_of, excess, mixture, take_step
from support.optimizers import NAMES, drive, gradients, settings, tiny, values

pytestmark = pytest.mark.usefixtures("one_thread")

MIXED = dict(mlp="swiglu", bias=True, n_ff=24, n_expert=3, n_expert_shared=1, balance="bias", router="sigmoid")
MIXED |= dict(gain="branch", gain_out="scale")
FFN = r"blocks\.0\.mlp\.f\."
ROLES = {
    FFN + r"(experts|shared)\.(gate|up|down)\.weight": "ffn",
    FFN + r"router\.weight": "router",
    FFN + r"router\.choice_bias": "balance",
    FFN + r"(router|(experts|shared)\.(gate|up))\.pre\.gain": "gain_in",
    FFN + r"(experts|shared)\.(gate|up)\.out\.gain": "gain_out",
    FFN + r"(experts|shared)\.(gate|up|down)\.bias": "bias",
}
DECAYED = {"emb", "pos", "qk", "vo", "ffn", "router"}
BALANCED = "blocks.0.mlp.f.router.choice_bias"


def parts(model) -> dict:
    """{name: parameter} of the mixture."""
    return {name: p for name, p in model.named_parameters() if re.match(FFN, name)}


# ---------------------------------------------------------------------------------------------------- roles and groups


def test_roles_and_block_types_are_the_table():
    model = tiny(**MIXED)
    roles, types = model.roles(), model.block_types()
    assert len(parts(model)) == 6 + 2 + 5 + 4 + 6
    for name in parts(model):
        assert [roles[name]] == [role for pattern, role in ROLES.items() if re.fullmatch(pattern, name)], name
        matrix = "router" if ".router." in name else "ffn"
        assert types[name] == ("norm" if name.endswith(".gain") else matrix), name
    magdir = tiny(**MIXED, gain_param="magdir").roles()
    assert (
        magdir["blocks.0.mlp.f.router.pre.magnitude"] == magdir["blocks.0.mlp.f.experts.up.pre.magnitude"] == "gain_in"
    )
    assert (
        magdir["blocks.0.mlp.f.router.pre.direction"] == magdir["blocks.0.mlp.f.experts.up.out.direction"] == "gain_dir"
    )


def group_of(model, **changes) -> dict:
    """{parameter name: its group}."""
    groups = make_optimizer(model, settings(**changes)).param_groups
    return {name: group for group in groups for name in group["param_names"]}


@pytest.mark.parametrize("name", NAMES)
def test_groups_by_role(name):
    """Under muon the matrices of the experts are muon's; the router goes to AdamW, as all that reads the stream but no
    branch. The biases on the choice have a rule, a rate and no decay of their own, whatever is decayed."""
    model = tiny(**MIXED)
    groups = group_of(model, optimizer=name, weight_decay=0.1, balance_rate=0.02, decay_gains="all", decay_scalars=True)
    rest = "adamw" if name == "muon" else name
    for key, role in model.roles().items():
        group = groups[key]
        assert group["role"] == role
        expected = "balance" if role == "balance" else name if role in ("qk", "vo", "ffn") else rest
        assert group["rule"] == expected, key
        assert group["weight_decay"] == (0.0 if role == "balance" else 0.1), key
    balance = groups[BALANCED]
    assert balance["label"] == "balance" and balance["param_names"] == [BALANCED]
    assert balance["base_lr"] == 0.02


def test_blockwise_ratios():
    model = tiny(**MIXED)
    groups, types = group_of(model, blockwise_lr=True, lr_ratio_router=3.0, lr_ratio_ffn=5.0), model.block_types()
    for name in parts(model):
        ratio = {"router": 3.0, "ffn": 5.0, "norm": 1.0}[types[name]]
        assert groups[name]["lr_ratio"] == (1.0 if name == BALANCED else ratio), name
    router = "blocks.0.mlp.f.router.weight"
    assert group_of(model, blockwise_lr=True)[router]["lr_ratio"] == 1.0
    assert group_of(model)[router]["lr_ratio"] == 1.0
    assert group_of(model, blockwise_lr=True)["blocks.0.mlp.f.experts.up.bias"]["lr_ratio"] == 6.0


@pytest.mark.parametrize("schedule", ("cosine", "wsd", "dyt"))
def test_the_balance_rate_is_constant(schedule):
    """Through warm-up and decay, and whatever the blockwise ratios."""
    changes = dict(schedule=schedule, warmup_iters=4, lr_decay_iters=10, max_iters=12, balance_rate=0.02)
    config, model = settings(**changes, blockwise_lr=True, lr_ratio_router=3.0), tiny(**MIXED)
    groups = {group["label"]: group for group in make_optimizer(model, config).param_groups}
    assert {lr_at(step, config, groups["balance"]) for step in range(14)} == {0.02}
    assert len({lr_at(step, config, groups["router"]) for step in range(14)}) > 5


# ------------------------------------------------------------------------------------------------------------- updates


def plain_iteration(x, steps=5):
    """Muon's: X ← aX + (bA + cA²)X, A = XXᵀ, from X/‖X‖_F, of which very small ones count as 1e-7."""
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        A = x @ x.T
        x = 3.4445 * x + (-4.7750 * A + 2.0315 * A @ A) @ x
    return x


class Formula:
    """The updates of one parameter in float64: of a stack, expert by expert."""

    def __init__(self, w, role, head_dim=8):
        self.w, self.role, self.t, self.head_dim = w.clone(), role, 0, head_dim
        self.m, self.v = torch.zeros_like(w), torch.zeros_like(w)

    def decay(self, lr):
        self.t += 1
        self.w *= 1 - lr * (0.3 if self.role in DECAYED else 0.0)

    def msgdw(self, g, lr):
        self.decay(lr)
        self.m = g.clone() if self.t == 1 else 0.9 * self.m + g
        self.w -= lr * self.m

    def adamw(self, g, lr, square=lambda g: g**2):
        self.decay(lr)
        self.m, self.v = 0.8 * self.m + 0.2 * g, 0.9 * self.v + 0.1 * square(g)
        m, v = self.m / (1 - 0.8**self.t), self.v / (1 - 0.9**self.t)
        self.w -= lr * m / (v.sqrt() + 1e-8)

    def adam_mini(self, g, lr):
        self.adamw(g, lr, self.block_mean)

    def block_mean(self, g):
        """Mean of g² over a head of q or k, a row of another matrix, each expert's by itself, or the tensor."""
        out = torch.empty_like(g)
        for e in range(len(g)) if g.ndim == 3 else (...,):
            rows = {"qk": self.head_dim}.get(self.role, 1) if self.role in DECAYED else len(g)
            for i in range(0, len(g[e]), rows):
                out[e][i : i + rows] = (g[e][i : i + rows] ** 2).mean()
        return out

    def muon(self, g, lr):
        if self.role not in ("qk", "vo", "ffn"):
            return self.adamw(g, lr)
        self.decay(lr)
        self.m = 0.9 * self.m + 0.1 * g
        u = 0.9 * self.m + 0.1 * g
        for w, x in zip(self.w, u, strict=True) if g.ndim == 3 else ((self.w, u),):
            w -= lr * 0.2 * math.sqrt(max(x.shape)) * plain_iteration(x)

    def balance(self, g, lr):
        self.w -= lr * g.sign()


@pytest.mark.parametrize("name", ("adamw", "msgdw", "adam_mini", "muon"))
def test_every_rule_is_its_formula_on_experts(name):
    model, steps = tiny(**MIXED), 4
    changes = {} if name == "msgdw" else dict(beta1=0.8, beta2=0.9)
    changes |= dict(momentum=0.9) if name in ("msgdw", "muon") else {}
    optimizer, roles = make_optimizer(model, settings(optimizer=name, **changes)), model.roles()
    formulas = {key: Formula(w, roles[key]) for key, w in values(model).items()}
    grads = gradients(model, steps)
    rates = drive(model, optimizer, grads)
    for key, formula in formulas.items():
        for t, lr in enumerate(rates[key]):
            getattr(formula, "balance" if roles[key] == "balance" else name)(grads[t][key], lr)
    for key, p in model.named_parameters():
        assert error(p.detach(), formulas[key].w) < (2e-5 if name == "muon" else 2e-6), key
    stack = dict(model.named_parameters())["blocks.0.mlp.f.experts.up.weight"]
    if name == "adam_mini":
        found = optimizer.state[stack]["block_sq"]
        wanted = formulas["blocks.0.mlp.f.experts.up.weight"].v[:, :, 0].flatten()
        assert found.shape == (3 * 24,) and error(found, wanted) < 1e-5
    assert optimizer.state[dict(model.named_parameters())[BALANCED]] == {}


@pytest.mark.parametrize("changes", (dict(), dict(muon_adjust_lr="original", nesterov=False)), ids=str)
@pytest.mark.parametrize("shape", ((3, 24, 16), (4, 8, 40), (2, 16, 16)), ids=str)
def test_muon_on_a_stack_is_muon_on_each_matrix(shape, changes):
    """Bit by bit: in fp32, in the same order."""
    g = torch.Generator().manual_seed(0)
    model = tiny(**MIXED)
    group = group_of(model, optimizer="muon", **changes)["blocks.0.mlp.f.experts.up.weight"]
    stack = torch.randn(*shape, generator=g)
    single = [torch.nn.Parameter(w.clone()) for w in stack]
    stack = torch.nn.Parameter(stack)
    optimizers = [Optimizer([group | dict(params=ps, lr=0.1, param_names=None)]) for ps in ([stack], single)]
    for _ in range(3):
        stack.grad = torch.randn(*shape, generator=g) * torch.logspace(-3, 1, shape[0])[:, None, None]
        for w, grad in zip(single, stack.grad, strict=True):
            w.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stack, torch.stack(single))


def test_a_stack_beyond_the_bound_is_orthogonalised_in_parts(monkeypatch):
    sizes, iterate = [], newton_schulz.newton_schulz

    def note(x, *args, **how):
        sizes.append(len(x))
        return iterate(x, *args, **how)

    stack = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0))
    whole = newton_schulz.orthogonalize(stack, 5)
    monkeypatch.setattr(newton_schulz, "newton_schulz", note)
    for bound, parts in ((2 * 24, [2, 2, 1]), (7, [1] * 5), (5 * 24, [5])):
        monkeypatch.setattr(newton_schulz, "STACK_ENTRIES", bound)
        assert torch.equal(newton_schulz.orthogonalize(stack, 5), whole) and sizes == parts
        sizes.clear()


# ------------------------------------------------------------------------------------------------- biases on the choice

RATE = 0.0625


@pytest.mark.parametrize("optimizer", NAMES)
def test_the_biases_move_by_the_rate_against_the_load_of_the_whole_batch(optimizer):
    """However it is split into micro batches."""
    model, net = mixture("softmax, shared, bias, HG, DP" if optimizer == "adamw" else "sigmoid, shared, bias, llama")
    data, start, before = batch_of(4), model.state_dict(), values(model)
    start = {key: t.clone() for key, t in start.items()}
    with torch.no_grad():
        reference.forward(net, before, data[0], routed=(routed := []))
    for micro in (1, 2, 4):
        model.load_state_dict(start)
        take_step(model, micro, data=data, lr=1e-3, optimizer=optimizer, balance_rate=RATE)
        for (_, _, choices), (key, router) in zip(routed, model.routers().items(), strict=True):
            sign = torch.tensor(excess(choices, net.experts), dtype=torch.float64).sign()
            assert sign.abs().sum() > 1 and torch.equal(router.choice_bias, before[f"{key}.choice_bias"] - RATE * sign)


@pytest.mark.parametrize("parts", (1, 2, 3, 6))
def test_an_even_load_moves_no_bias(parts):
    """Exactly even over the batch, though not in its micro batches, whose mean loads are no fp32 numbers."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        order = (torch.arange(42) % 3)[torch.randperm(42, generator=g)]
        router = Router(3, 3, 1, balance="bias")
        with torch.no_grad():
            router.weight.copy_(torch.eye(3))
            router.choice_bias.zero_()
        router.runtime = Runtime(loss_scale=torch.ones(()) / parts)
        for part in torch.nn.functional.one_hot(order, 3).float().view(parts, 1, -1, 3):
            router(part)[0].sum().backward()
        assert not router.choice_bias.grad.count_nonzero()


def test_the_default_rate_and_repeated_steps_even_the_load():
    """0.001 a step, from 0: after n steps each bias is a multiple of it."""
    model, _ = mixture("sigmoid, shared, bias, llama", 1)
    (router,) = model.routers().values()
    with torch.no_grad():
        router.choice_bias.zero_()
    for seed in range(3):
        take_step(model, 4, data=batch_of(4, seed=seed))
    steps = router.choice_bias / 1e-3
    torch.testing.assert_close(steps, steps.round(), rtol=0.0, atol=1e-6)
    assert steps.abs().max().round() in (1, 2, 3)
    shares = []
    for _ in range(60):
        chosen = router_loads(model, batch_of(4)[0])
        shares.append(max(chosen) / sum(chosen))
        take_step(model, 4, data=batch_of(4), balance_rate=0.02)
    assert max(shares[-5:]) < 0.3 < 0.35 < shares[0]  # of four experts


def router_loads(model, idx) -> list:
    """The choices of each expert of the first block in a batch."""
    found = []
    (router,) = model.routers().values()
    hook = router.register_forward_hook(lambda _, args, out: found.extend(out[1].flatten().tolist()))
    with torch.no_grad():
        model(idx)
    hook.remove()
    return [found.count(e) for e in range(router.out_features)]


@pytest.mark.parametrize("optimizer", NAMES)
def test_a_step_that_is_skipped_moves_nothing(optimizer):
    model, _ = mixture("sigmoid, shared, bias, llama", 1)
    weight = model.blocks[0].mlp.f.experts.up.weight
    hook = weight.register_hook(lambda grad: grad * math.nan)
    before = values(model)
    result, grads, made = take_step(model, 2, lr=1e-2, optimizer=optimizer, balance_rate=RATE)
    assert result.found_inf and grads[BALANCED].count_nonzero()
    assert all(torch.equal(p.double(), before[key]) for key, p in model.named_parameters())
    hook.remove()
    result, _, _ = take_step(model, 2, lr=1e-2, optimizer=optimizer, balance_rate=RATE)
    assert not result.found_inf and not torch.equal(values(model)[BALANCED], before[BALANCED])


# ------------------------------------------------------------------------------------------------------------ clipping


@pytest.mark.parametrize("optimizer", NAMES)
def test_the_norm_is_that_of_all_but_the_loads_and_clipping_is_torchs(optimizer):
    """Parameters and gradients are those of torch's clip_grad_norm_ over all other parameters."""

    def step(grad_clip, at=lambda phase: None):
        model, _ = mixture("sigmoid, shared, bias, llama", 1)
        seen = {}

        def note(phase):
            if phase == "clip":
                seen.update({key: p.grad.clone() for key, p in model.named_parameters()})
                at(model)

        changes = dict(optimizer=optimizer, balance_rate=RATE, z_coef=0.1, grad_clip=grad_clip, lr=1e-2)
        result, grads, _ = take_step(model, 2, at=note, **changes)
        others = [grad for key, grad in seen.items() if key != BALANCED]
        assert error(result.grad_norm, torch.nn.utils.get_total_norm(others)) < 1e-6
        assert torch.equal(grads[BALANCED], seen[BALANCED])
        return values(model), grads, result.grad_norm

    def clip(model):
        others = [p for key, p in model.named_parameters() if key != BALANCED]
        torch.nn.utils.clip_grad_norm_(others, 0.05)

    ours, our_grads, norm = step(0.05)
    theirs, grads, their_norm = step(0.0, clip)
    assert norm == their_norm > 0.05
    for key in ours:
        assert error(ours[key], theirs[key], floor=1e-3) < 1e-6 and error(our_grads[key], grads[key], floor=1e-3) < 1e-6
