"""Mixtures of experts for tests: their flags beside the reference's, and all that a step minimises,
in float64.

The penalties here are loops over sequences, tokens and experts, from the papers' equations;
layers.moe is not used.
"""

import math
from dataclasses import replace

import torch

from nanodnt.engine import Trainer, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.settings import TrainConfig
from support import reference
from support.models import LLAMA_NET, NET, S5, S5_NET, UNIFIED, UNIFIED_NET, build, error

# with learned positions: rotary angles are fp32
LLAMA = dict(n_kv_head=2, mlp="swiglu", n_ff=24, tie_weights=False)

# name: (flags of GPTConfig, the same network as a support.reference.Net)
MIXTURES = {
    "softmax": (dict(n_expert=4), dict(experts=4)),
    "one of three, relu2": (
        dict(n_expert=3, n_expert_active=1, router_norm=False, balance="none", mlp="relu2"),
        dict(experts=3, active=1, normalised=False, act="relu2"),
    ),
    "sigmoid, shared, bias, llama": (
        dict(
            LLAMA, n_expert=4, n_expert_shared=1, router="sigmoid", router_scale=2.5, balance="bias"
        ),
        dict(
            LLAMA_NET | dict(theta=None), experts=4, shared=True, score="sigmoid", weight_scale=2.5
        )
        | dict(choice_bias=True),
    ),
    "not normalised, biases, S5": (
        dict(
            S5,
            bias=True,
            n_expert=5,
            n_expert_active=3,
            n_expert_shared=2,
            router_norm=False,
            router_scale=0.5,
        ),
        dict(
            S5_NET,
            linear_bias=True,
            experts=5,
            active=3,
            shared=True,
            normalised=False,
            weight_scale=0.5,
        ),
    ),
    "sigmoid, not normalised, unified": (
        dict(UNIFIED, mlp="swiglu", bias=True, n_expert=3, router="sigmoid", router_norm=False),
        dict(
            UNIFIED_NET,
            act="swiglu",
            linear_bias=True,
            experts=3,
            score="sigmoid",
            normalised=False,
        ),
    ),
    "softmax, shared, bias, HG, DP": (
        dict(gain="branch", gain_out="scale", n_expert=4, n_expert_shared=1, balance="bias"),
        dict(gains="branch", out="scale", experts=4, shared=True, choice_bias=True),
    ),
}


def mixture(name, n_layer=2, dtype=torch.float64):
    """(a model with random weights, in eval mode, the same network as a support.reference.Net)."""
    flags, parts = MIXTURES[name]
    return build(flags, n_layer, dtype), replace(NET, blocks=n_layer, **parts)


def balance(scores, chosen) -> torch.Tensor:
    """Switch Transformer eq. 4 to 6 in every sequence, mean over the sequences: E Σₑ fₑ Pₑ, where
    fₑ is the share of the sequence's choices that fall on e and Pₑ the mean share of e in a token's
    scores."""
    B, T, E = scores.shape
    total = 0.0
    for row in range(B):
        for e in range(E):
            f = sum(e in experts for experts in chosen[row]) / sum(
                len(experts) for experts in chosen[row]
            )
            P = (
                sum(scores[row, t, e] / sum(scores[row, t, i] for i in range(E)) for t in range(T))
                / T
            )
            total = total + E * f * P / B
    return total


def excess(chosen, E: int) -> list:
    """By how many choices each expert's load is above the mean."""
    found = [sum(e in experts for row in chosen for experts in row) for e in range(E)]
    return [load - sum(found) / E for load in found]


def minimised(model, net, idx, targets, coef=0.0, z_coef=0.0) -> tuple:
    """(cross-entropy, {parameter name: gradient of cross-entropy + coef · balance + z_coef · z, or
    None}, [what each router chose]) of the reference with the weights of `model`."""
    weights = {
        name: t.detach().double().clone().requires_grad_() for name, t in model.state_dict().items()
    }
    routed = []
    loss = reference.forward(net, weights, idx, targets, routed=routed)[1]
    penalties = [coef * balance(s, chosen) for _, s, chosen in routed]
    # ST-MoE eq. 5
    penalties += [z_coef * (z.exp().sum(-1).log() ** 2).mean() for z, _, _ in routed]
    grads = torch.autograd.grad(loss + sum(penalties), weights.values(), allow_unused=True)
    return (
        loss.detach(),
        dict(zip(weights, grads, strict=True)),
        [chosen for _, _, chosen in routed],
    )


def backward(model, idx, targets) -> tuple:
    """(loss, {parameter name: gradient or None}) of a model as it is."""
    model.zero_grad(set_to_none=True)
    loss = model(idx, targets)[1]
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def difference(ours: dict, theirs: dict) -> float:
    """Largest difference of two {name: gradient or None}, each tensor's relative to its largest
    entry; of tiny ones, to 1e-3 of the largest of all. Names of which one has a gradient and the
    other none make it infinite."""
    assert ours.keys() == theirs.keys()
    if [name for name in ours if (ours[name] is None) != (theirs[name] is None)]:
        return math.inf
    theirs = {name: grad for name, grad in theirs.items() if grad is not None}
    largest = max(
        grad.abs().max().item() for name, grad in theirs.items() if not name.endswith("choice_bias")
    )
    return max(error(ours[name], grad, floor=1e-3 * largest) for name, grad in theirs.items())


def take_step(
    model,
    micro,
    lr=0.0,
    targets_per_rank=None,
    data=None,
    scale=None,
    run=None,
    at=lambda _: None,
    **flags,
):
    """(StepResult, {name: gradient}, optimizer) of one training step on 4 sequences, `micro` at a
    time, as train.py takes it. `scale`: a loss scale, as for fp16; `run`: the model compiled."""
    config = TrainConfig(**dict(grad_clip=0.0) | flags)
    fill_defaults(config)
    model.train().set_runtime(balance_coef=config.balance_coef, z_coef=config.z_coef)
    optimizer = make_optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] = config.balance_rate if group["role"] == "balance" else lr
    scaler = torch.amp.GradScaler("cpu", enabled=scale is not None, init_scale=scale or 1.0)
    trainer = Trainer(model, optimizer, scaler, micro, config.grad_clip, run, at)
    result = training_step(trainer, data or batch_of(4), targets_per_rank)
    return result, {name: p.grad for name, p in model.named_parameters()}, optimizer


def batch_of(rows, T=7, seed=1):
    """idx and targets (rows, T), none ignored."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(50, (rows, T), generator=g), torch.randint(50, (rows, T), generator=g)
