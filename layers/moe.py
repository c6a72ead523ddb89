"""Mixture of experts: the router, where each token goes, and one product of all experts. No token
is dropped.

B·T = N tokens go to k of E experts each. The N·k pairs of a token and an expert are sorted by
expert, so the tokens of an expert are neighbouring rows; `Routes` holds the order. How many there
are differs from expert to expert and from step to step, but no shape depends on it, and the host
reads it only where there is no grouped product.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from layers.draws import Draws
from layers.linear import Linear, linear
from layers.ops import forbid_second_derivative, namespace_of, store_once, upcast

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)


def grouped(x, weight, bias, routes):
    """Rows of x times the matrix of their expert: x (N·k, n_in), weight (E, n_out, n_in), bias (E,
    n_out) or None → (N·k, n_out). The rows of expert e end at `routes.ends[e]`."""
    if grouped_product(x, weight) is F.grouped_mm:
        weight = store_once(weight)
    y = Grouped.apply(x, weight, routes.ends)
    if bias is None:
        return y
    experts = torch.searchsorted(routes.ends, torch.arange(len(x), device=x.device), right=True)
    # a product, since the gradient of bias[experts] would be summed in no fixed order
    return y + F.one_hot(experts, len(bias)).to(bias.dtype) @ bias


def grouped_product(x, weight):
    """torch's grouped product if it takes these: bf16, and rows of a multiple of 16 bytes; else the
    loop below. It is one kernel on H100, H200 and B200; on other GPUs torch has a loop of its own,
    in which the host waits."""
    aligned = all(n * weight.element_size() % 16 == 0 for n in weight.shape[1:])
    if x.device.type in ("cuda", "meta") and weight.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm
    return OPERATORS.multiply


class Grouped(torch.autograd.Function):
    """`grouped` without a bias. torch's kernel may leave unwritten what it has no rows for: an
    expert that no token goes to gets the gradient 0 here. (torch's own formula gives any numbers on
    a B200: pytorch issue 172439.)"""

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(x, weight, ends)
        return grouped_product(x, weight)(x, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx, dy):
        forbid_second_derivative()
        x, weight, ends = ctx.saved_tensors
        multiply = grouped_product(x, weight)
        dy = dy.contiguous()  # the kernel takes no strides of 0
        is_empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        d_weight = multiply(dy.mT, x, offs=ends).masked_fill_(is_empty[:, None, None], 0)
        return multiply(dy, weight, offs=ends), d_weight, None


# An operator, so that compiled code stays one graph. A copy of this file, from an exported folder,
# uses what is there.
if not hasattr(OPERATORS, "multiply"):

    @torch.library.custom_op(f"{NAMESPACE}::multiply", mutates_args=())
    def _multiply(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """`F.grouped_mm`, expert by expert: a (N·k, n) times b (E, n, m), or a (n, N·k) times b
        (N·k, m)."""
        sizes = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()  # the host waits
        y = empty_product(a, b, offs)
        if b.ndim == 3:
            parts = zip(a.split(sizes), b, y.split(sizes), strict=True)
        else:
            parts = zip(a.split(sizes, 1), b.split(sizes), y, strict=True)
        for left, right, out in parts:
            torch.mm(left, right, out=out)
        return y

    @_multiply.register_fake
    def empty_product(a, b, offs):
        return (
            a.new_empty(len(a), b.shape[2])
            if b.ndim == 3
            else a.new_empty(len(offs), len(a), b.shape[1])
        )


class Gather(torch.autograd.Function):
    """x[index] for x (n, C) and index (m,). The gradient is gathered too, so its sums have a fixed
    order: `places` (n, r) are the r places of m where each row of x has gone."""

    @staticmethod
    def forward(ctx, x, index, places):
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx, dy):
        (places,) = ctx.saved_tensors
        return dy[places].sum(1), None, None


class Routes(NamedTuple):
    """Where N tokens go, each to k of E experts."""

    order: torch.Tensor  # (N·k,) numbers of pairs, token · k + choice, sorted by expert
    places: torch.Tensor  # (N, k) where each pair stands in that order
    ends: torch.Tensor  # (E,) int32, where the pairs of each expert end in it

    @classmethod
    def of(cls, experts, n_expert: int) -> "Routes":
        """The routes of `experts` (..., k), the experts that each token goes to."""
        # a GPU sorts by bytes, and 2 are enough
        order = experts.flatten().to(torch.int16).argsort(stable=True)
        places = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        ends = count(experts.flatten(), n_expert).cumsum(0).int()
        return cls(order, places.view(-1, experts.shape[-1]), ends)

    def send(self, u):
        """u (..., C), the tokens → (N·k, C), a copy for each of their experts, sorted by expert."""
        return Gather.apply(u.flatten(0, -2), self.order // self.places.shape[1], self.places)

    def bring_back(self, y, weights):
        """y (N·k, C) as `send` sorts, weights (..., k) → (..., C), the weighted sum of a token, in
        y's dtype."""
        y = Gather.apply(y, self.places.flatten(), self.order[:, None]).unflatten(0, weights.shape)
        return (weights[..., None] * y).sum(-2).to(y.dtype)


def count(experts, n_expert: int):
    """How often each expert is chosen: experts (..., m) → (..., E), int64."""
    return (experts[..., None] == torch.arange(n_expert, device=experts.device)).sum(-2)


def balance_loss(scores, experts):
    """E Σₑ fₑ Pₑ, mean over the sequences: fₑ is the share of a sequence's choices that expert e
    gets, Pₑ its mean score, scores summing to 1. It is 1 where either is even, and at most E/k.
    scores (B, T, E), experts (B, T, k) → ().

    Switch Transformer (arXiv 2101.03961) eq. 4 within each sequence, as in DeepSeek-V3 (2412.19437)
    eq. 17 to 20: so it does not depend on how a batch is split."""
    chosen = experts.flatten(1)
    shares = count(chosen, scores.shape[-1]).to(scores.dtype) / chosen.shape[1]
    means = (scores / scores.sum(-1, keepdim=True)).mean(1)
    return scores.shape[-1] * (shares * means).sum(-1).mean()


class Penalise(torch.autograd.Function):
    """x as it is, with `penalty` () added to what is minimised. The loss returned stays the
    cross-entropy."""

    @staticmethod
    def forward(ctx, x, penalty):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, dx.new_ones(())


class Router(Linear):
    """The experts of each token, and their weights: u (B, T, C) → (weights (B, T, k), experts (B,
    T, k)).

    Logits W u are computed in fp32 at least, and scored by softmax or sigmoid. The k highest scores
    are the weights; `normalise` divides them by their sum, then they are multiplied by `scale`.

    balance   "loss": `balance_loss` times `balance_coef` is minimised too. "bias": a bias is added to the scores where
              the k are chosen, and nowhere else. Its gradient is made here: the excess load of each
              expert, which the rule nanodnt/optim/balance.py follows (Wang et al., arXiv
              2408.15664). "none": neither

    In evaluation mode nothing but the cross-entropy has a gradient."""

    def __init__(
        self,
        n_in,
        n_expert,
        active,
        score="softmax",
        normalise=True,
        scale=1.0,
        balance="loss",
        pre=None,
    ):
        super().__init__(n_in, n_expert, "router", pre=pre)
        self.active, self.score, self.normalise, self.scale, self.balance = (
            active,
            score,
            normalise,
            scale,
            balance,
        )
        self.choice_bias = nn.Parameter(torch.empty(n_expert)) if balance == "bias" else None
        self.param_roles["choice_bias"] = "balance"

    def logits(self, u, in_scale=None):
        """u (B, T, C) → (B, T, E), fp32 at least, of a model cast to bf16 too."""
        return linear(self.pre(u), upcast(self.weight), scales=self.scales(in_scale))

    def scores(self, logits):
        return logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()

    def forward(self, u, in_scale=None):
        logits = self.logits(u, in_scale)
        scores = self.scores(logits)
        ranked = scores if self.choice_bias is None else scores + self.choice_bias
        experts = ranked.topk(self.active, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.training:  # through the weights all else that is minimised gets its gradient
            weights = Penalise.apply(weights, self.penalty(logits, scores, experts))
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return weights * self.scale, experts

    def penalty(self, logits, scores, experts):
        """What is minimised besides the cross-entropy, (), times the runtime's `loss_scale`."""
        penalty, runtime = logits.new_zeros(()), self.runtime
        if self.balance == "loss" and runtime.balance_coef:
            penalty = penalty + runtime.balance_coef * balance_loss(scores, experts)
        # mean of (log Σₑ exp logitₑ)² over the tokens: ST-MoE (arXiv 2202.08906) eq. 5
        if runtime.z_coef:
            penalty = penalty + runtime.z_coef * logits.logsumexp(-1).square().mean()
        if runtime.loss_scale is not None:
            penalty = penalty * runtime.loss_scale.to(penalty.dtype)
        if self.choice_bias is None:
            return penalty
        # not scaled: the gradient of the biases is E times the load above the mean: whole numbers,
        # which add up exactly
        E = scores.shape[-1]
        excess = E * count(experts.flatten(), E) - experts.numel()
        return penalty + (excess * self.choice_bias).sum()

    def init(self, std: float, draws: Draws, cut: float | None = None):
        super().init(std, draws, cut)
        if self.choice_bias is not None:
            self.choice_bias.zero_()


class MoE(nn.Module):
    """Σ wₑ expertₑ(u) over the k experts of a token, plus the `shared` one: (B, T, C) → (B, T, C).
    `experts`: an FFN whose matrices are stacks. `in_scale`: the pre slot's, if any; router and
    shared expert take it too."""

    def __init__(self, router: Router, experts: nn.Module, shared: nn.Module | None):
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, u, in_scale=None):
        weights, experts = self.router(u, in_scale)
        routes = Routes.of(experts, self.router.out_features)
        y = self.experts(routes.send(u), in_scale, partial(grouped, routes=routes))
        y = routes.bring_back(y, weights)
        return y if self.shared is None else y + self.shared(u, in_scale)
