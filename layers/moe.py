"""Mixture of experts: the router, where each token goes, and one product of all experts. No token
is dropped.

B·T = N tokens go to k of E experts each. The N·k pairs of a token and an expert are sorted by
expert, so the tokens of an expert are neighbouring rows; `Routes` holds the order. The number of
tokens differs from expert to expert and from step to step, but no shape depends on it, and the host
reads it only where there is no grouped product.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from layers.draws import Draws
from layers.linear import Linear, linear
from layers.ops import forbid_second_derivative, namespace_of, store_once, upcast
from layers.slot import Slot

NAMESPACE = namespace_of(__file__)
OPERATORS = getattr(torch.ops, NAMESPACE)


def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, routes: "Routes") -> Tensor:
    """Each row of x times the matrix of its expert: x (N·k, n_in), weight (E, n_out, n_in), bias
    (E, n_out) or None → (N·k, n_out). The rows of expert e end at `routes.ends[e]`."""
    if grouped_product(x, weight) is F.grouped_mm:
        weight = store_once(weight)
    y = Grouped.apply(x, weight, routes.ends)
    if bias is None:
        return y
    row = torch.arange(len(x), device=x.device)
    expert_of_row = torch.searchsorted(routes.ends, row, right=True)
    # a product, since the gradient of bias[expert_of_row] would be summed in no fixed order
    return y + F.one_hot(expert_of_row, len(bias)).to(bias.dtype) @ bias


def grouped_product(x: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """torch's grouped product if it takes these: bf16, and rows of a multiple of 16 bytes; else the
    loop below. It is one kernel on H100, H200 and B200; on other GPUs torch has a loop of its own,
    in which the host waits."""
    aligned = all(n * weight.element_size() % 16 == 0 for n in weight.shape[1:])
    if x.device.type in ("cuda", "meta") and weight.dtype == torch.bfloat16 and aligned:
        return F.grouped_mm
    return OPERATORS.multiply


class Grouped(torch.autograd.Function):
    """`grouped` without a bias. torch's kernel may leave the gradient of an expert without tokens
    unwritten: it is 0 here. (torch's own formula gives any numbers on a B200: pytorch issue
    172439.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        multiply = grouped_product(x, weight)
        return multiply(x, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        forbid_second_derivative()
        x, weight, ends = ctx.saved_tensors
        multiply = grouped_product(x, weight)
        dy = dy.contiguous()  # the kernel takes no strides of 0
        is_empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0  # (E,)
        d_weight = multiply(dy.mT, x, offs=ends)
        d_weight.masked_fill_(is_empty[:, None, None], 0)
        return multiply(dy, weight, offs=ends), d_weight, None


# An operator, so that compiled code stays one graph. A copy of this file, from an exported folder,
# uses the operator that is registered already.
if not hasattr(OPERATORS, "multiply"):

    @torch.library.custom_op(f"{NAMESPACE}::multiply", mutates_args=())
    def _multiply(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
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
    def empty_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        if b.ndim == 3:
            return a.new_empty(len(a), b.shape[2])
        return a.new_empty(len(offs), len(a), b.shape[1])


class Gather(torch.autograd.Function):
    """x[index] for x (n, C) and index (m,). The gradient is gathered too, so its sums have a fixed
    order: `places` (n, r) are the r rows of the result that are copies of each row of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[index]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return dy[places].sum(1), None, None


class Routes(NamedTuple):
    """The routes of N tokens, each to k of E experts."""

    order: Tensor  # (N·k,) numbers of pairs, token · k + choice, sorted by expert
    places: Tensor  # (N, k) index of each pair in `order`
    ends: Tensor  # (E,) int32, index in `order` where the pairs of each expert end

    @classmethod
    def of(cls, experts: Tensor, n_expert: int) -> "Routes":
        """The routes of `experts` (..., k), the experts that each token goes to."""
        pairs = experts.flatten()
        order = pairs.to(torch.int16).argsort(stable=True)  # a GPU sorts by bytes: 2 are enough
        rank = torch.arange(len(order), device=order.device)
        places = torch.empty_like(order).scatter_(0, order, rank)
        ends = count(pairs, n_expert).cumsum(0).int()
        return cls(order, places.view(-1, experts.shape[-1]), ends)

    def send(self, u: Tensor) -> Tensor:
        """u (..., C), the tokens → (N·k, C), a copy for each of their experts, sorted by expert."""
        token = self.order // self.places.shape[1]  # (N·k,)
        return Gather.apply(u.flatten(0, -2), token, self.places)

    def bring_back(self, y: Tensor, weights: Tensor) -> Tensor:
        """y (N·k, C) in the order of `send`, weights (..., k) → (..., C), the weighted sum over the
        experts of each token, in the dtype of y."""
        y = Gather.apply(y, self.places.flatten(), self.order[:, None])
        y = y.unflatten(0, weights.shape)  # (..., k, C)
        return (weights[..., None] * y).sum(-2).to(y.dtype)


def count(experts: Tensor, n_expert: int) -> Tensor:
    """Number of times that each expert is chosen: experts (..., m) → (..., E), int64."""
    is_chosen = experts[..., None] == torch.arange(n_expert, device=experts.device)
    return is_chosen.sum(-2)


def balance_loss(scores: Tensor, experts: Tensor) -> Tensor:
    """E Σₑ fₑ Pₑ, mean over the sequences: fₑ is expert e's share of the choices in a sequence, Pₑ
    its mean score, scores summing to 1. It is 1 where either is even, and at most E/k.
    scores (B, T, E), experts (B, T, k) → ().

    Switch Transformer (arXiv 2101.03961) eq. 4 within each sequence, as in DeepSeek-V3 (2412.19437)
    eq. 17 to 20: so it does not depend on how a batch is split."""
    E = scores.shape[-1]
    chosen = experts.flatten(1)  # (B, T·k)
    shares = count(chosen, E).to(scores.dtype) / chosen.shape[1]  # (B, E)
    means = (scores / scores.sum(-1, keepdim=True)).mean(1)  # (B, E)
    return E * (shares * means).sum(-1).mean()


class Penalise(torch.autograd.Function):
    """Returns x. Backward, `penalty` () gets the gradient 1, as if it were added to the loss; the
    loss that is reported stays the cross-entropy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, dx.new_ones(())


class Router(Linear):
    """The experts of each token, and their weights: u (B, T, C) → (weights (B, T, k), experts (B,
    T, k)).

    Logits W u are computed in fp32 at least, and scored by softmax or sigmoid. The k highest scores
    are the weights; `normalise` divides them by their sum, then they are multiplied by `scale`.

    active    k, number of experts of a token
    balance   "loss": `balance_loss` times `balance_coef` is minimised too. "bias": a bias is added
              to the scores where the k are chosen, and nowhere else. Its gradient is made here: the
              excess load of each expert, for the rule in nanodnt/optim/balance.py (Wang et al.,
              arXiv 2408.15664). "none": neither

    In evaluation mode nothing but the cross-entropy has a gradient."""

    def __init__(
        self,
        n_in: int,
        n_expert: int,
        active: int,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        balance: Literal["loss", "bias", "none"] = "loss",
        pre: Slot | None = None,
    ):
        super().__init__(n_in, n_expert, "router", pre=pre)
        self.active = active
        self.score = score
        self.normalise = normalise
        self.scale = scale
        self.balance = balance
        self.choice_bias = None
        if balance == "bias":
            self.choice_bias = nn.Parameter(torch.empty(n_expert))
        self.param_roles["choice_bias"] = "balance"

    def logits(self, u: Tensor, in_scale: Tensor | None = None) -> Tensor:
        """u (B, T, C) → (B, T, E), fp32 at least, also in a model that is cast to bf16."""
        return linear(self.pre(u), upcast(self.weight), scales=self.scales(in_scale))

    def scores(self, logits: Tensor) -> Tensor:
        if self.score == "softmax":
            return logits.softmax(-1)
        return logits.sigmoid()

    def forward(self, u: Tensor, in_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = self.logits(u, in_scale)  # (B, T, E)
        scores = self.scores(logits)
        ranked = scores
        if self.choice_bias is not None:
            ranked = scores + self.choice_bias
        experts = ranked.topk(self.active, dim=-1).indices  # (B, T, k)
        weights = scores.gather(-1, experts)
        if self.training:  # the penalty gets its gradient through the weights
            weights = Penalise.apply(weights, self.penalty(logits, scores, experts))
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return weights * self.scale, experts

    def penalty(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """The sum of losses that are minimised besides the cross-entropy, (), times the runtime's
        `loss_scale`."""
        runtime = self.runtime
        penalty = logits.new_zeros(())
        if self.balance == "loss" and runtime.balance_coef:
            penalty = penalty + runtime.balance_coef * balance_loss(scores, experts)
        # mean of (log Σₑ exp logitₑ)² over the tokens: ST-MoE (arXiv 2202.08906) eq. 5
        if runtime.z_coef:
            penalty = penalty + runtime.z_coef * logits.logsumexp(-1).square().mean()
        if runtime.loss_scale is not None:
            penalty = penalty * runtime.loss_scale.to(penalty.dtype)
        if self.choice_bias is None:
            return penalty
        # not scaled: the gradient of the biases is E times the load above the mean, in whole
        # numbers, which add up exactly
        E = scores.shape[-1]
        excess = E * count(experts.flatten(), E) - experts.numel()
        return penalty + (excess * self.choice_bias).sum()

    def init(self, std: float, draws: Draws, cut: float | None = None) -> None:
        super().init(std, draws, cut)
        if self.choice_bias is not None:
            self.choice_bias.zero_()


class MoE(nn.Module):
    """Σ wₑ expertₑ(u) over the k experts of a token, plus the `shared` one: (B, T, C) → (B, T, C).
    `experts` is an FFN whose matrices are stacks. `in_scale` is the factor that the pre slot leaves
    to the next matrices, those of the experts, the router and the shared expert."""

    def __init__(self, router: Router, experts: nn.Module, shared: nn.Module | None):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, u: Tensor, in_scale: Tensor | None = None) -> Tensor:
        weights, experts = self.router(u, in_scale)
        routes = Routes.of(experts, self.router.out_features)
        product = partial(grouped, routes=routes)
        y = self.experts(routes.send(u), in_scale, product)
        y = routes.bring_back(y, weights)
        if self.shared is not None:
            y = y + self.shared(u, in_scale)
        return y
