"""Slots: places around and inside a branch for a norm, a gain, a bias, a constant and a gate."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from layers.ops import cast, drop_samples, forbid_second_derivative, tanh, upcast
from layers.runtime import Runtime

SQUASH = {
    "tanh": tanh,
    "erf": torch.erf,
    "hardtanh": F.hardtanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}
CENTRES = {"rmsnorm": False, "layernorm": True}  # whether a norm subtracts the mean


class Normalise(torch.autograd.Function):
    """s (x − μ) over the last dimension, in `dtype`, computed in fp32 at least.

    s = 1/√(mean((x − μ)²) + eps). μ is the mean of x if `centre`, else 0. The backward pass uses
    the output y, which the next matrix keeps anyway, so x is not kept. The term mean(∂y) is there
    only if `centre`:

        ∂x = s (∂y − mean(∂y) − y · mean(y · ∂y))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, centre: bool, dtype: torch.dtype) -> Tensor:
        x = upcast(x)
        if centre:
            x = x - x.mean(-1, keepdim=True)
        s = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        y = cast(x * s, dtype)
        ctx.save_for_backward(y, s)
        ctx.centre = centre
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        forbid_second_derivative()
        y, s = (upcast(t) for t in ctx.saved_tensors)
        dy = upcast(dy)
        dx = dy - y * (dy * y).mean(-1, keepdim=True)
        if ctx.centre:
            dx = dx - dy.mean(-1, keepdim=True)
        return s * dx, None, None, None


def cpu_scalar(value: float | None) -> Tensor | None:
    """`value` as a tensor () on the CPU, which tensors of every device can be multiplied by. It is
    fp64, but never raises the dtype of the other tensor, since it has no dimension.

    A Python float would make torch.compile compile each block anew. A buffer would be lost in
    meta-device init, and DDP would broadcast it.
    """
    if value is None:
        return None
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def empty_parameter(n: int) -> nn.Parameter | None:
    """A parameter (n,), or None for n = 0. A scalar has shape (1,): FSDP2 cannot shard ()."""
    if n == 0:
        return None
    return nn.Parameter(torch.empty(n))


class Norm(NamedTuple):
    """The function that a slot normalises with, computed in fp32 at least."""

    kind: str = "none"  # "none", "rmsnorm", "layernorm", or "dyt": squash(α x + s)
    eps: float = 1e-6  # added inside the root of RMSNorm and LayerNorm
    groups: int = 1  # groups of channels with separate statistics, for RMSNorm and LayerNorm
    squash: str = "tanh"  # DyT's function: a key of SQUASH
    alpha: float = 1.0  # DyT's initial α
    learn_alpha: bool = True  # whether DyT's α is a parameter
    shift: bool = False  # whether DyT has s, a parameter


NO_NORM = Norm()


class Slot(nn.Module):
    """y = drop( const · (gain · normalise(const_in · shrink(x)) + bias) ), each part optional.

    x and y are (..., dim).

    norm      the function `normalise`
    n_gain    number of learned gains: 0 (none), 1 (a scalar) or dim
    init_gain initial value of the gains
    role      role of the gains: `gain_in` if a linear map follows, else `gain_out`; one of
              OPEN_GAINS (layers/roles.py) where the paper calls them neither; `scalar` for a single
              learned factor
    n_bias    number of learned biases: 0 (none), 1 or dim
    const     constant factor on the output, or None. 1.0 is multiplied too, so that blocks which
              differ in their constants alone share one compiled graph
    const_in  constant factor on the input, or None; only lns=input has one
    shrinks   whether there is a learned gate h, 0 at first, of shrink(x) = x − SiLU(h) x, whose
              gradient passes to x without the factor: GPAS (arXiv 2506.22049)
    drop      rate of stochastic depth, the probability that y of a whole sample is 0 in training;
              None: off
    fold      leave const · gain to the next linear map, which multiplies its weight by
              `factor_for_weight`: that saves a pass over the activations. Without effect beside a
              bias, which is added after the gain
    """

    runtime = Runtime()  # `Network.share_runtime` replaces it by the network's

    def __init__(
        self,
        norm: Norm = NO_NORM,
        *,
        n_gain: int = 0,
        init_gain: float = 1.0,
        role: str = "gain_out",
        n_bias: int = 0,
        const: float | None = None,
        const_in: float | None = None,
        shrinks: bool = False,
        drop: float | None = None,
        fold: bool = False,
    ):
        super().__init__()
        self.norm_kind = norm.kind
        self.eps = norm.eps
        self.groups = norm.groups
        self.squash = norm.squash
        # as numbers, for nanodnt/plan and interop/; `forward` multiplies by the tensors below them
        self.const = 1.0 if const is None else const
        self.const_in = 1.0 if const_in is None else const_in
        self.factor = cpu_scalar(const)
        self.factor_in = cpu_scalar(const_in)
        self.drop = cpu_scalar(drop)
        self.fold = fold and not n_bias
        self.init_gain = init_gain
        self.init_alpha = norm.alpha
        self.param_roles = {"bias": "bias", "alpha": "scalar", "shift": "scalar", "gate": "scalar"}
        self.add_gain(n_gain, role)
        self.bias = empty_parameter(n_bias)
        self.alpha = norm.alpha
        if norm.kind == "dyt" and norm.learn_alpha:
            self.alpha = empty_parameter(1)
        self.shift = empty_parameter(int(norm.shift))
        self.gate = empty_parameter(int(shrinks))

    def add_gain(self, n: int, role: str) -> None:
        """Create the parameters of a gain (n,); n = 0: none. The constructor calls it."""
        self.gain = empty_parameter(n)
        self.direction = None  # only a MagnitudeDirectionSlot has one
        self.param_roles["gain"] = role

    def gain_vector(self) -> Tensor | None:
        """The gain (dim,) or (1,), or None."""
        return self.gain

    def factor_for_weight(self) -> Tensor | None:
        """const · gain for the weight of the next linear map, (dim,) or (), or None.

        None if the slot does not fold, or has neither a constant nor a gain.
        """
        if not self.fold:
            return None
        gain = self.gain_vector()
        if self.factor is None:
            return gain
        if gain is None:
            return self.factor
        return self.factor * gain

    def normalise(self, x: Tensor) -> Tensor:
        if self.norm_kind == "none":
            return x
        if self.norm_kind == "dyt":
            x = self.alpha * upcast(x)
            if self.shift is not None:
                x = x + self.shift
            return SQUASH[self.squash](x)
        if self.fold and self.runtime.compute_dtype is not None:
            # A product follows. Its input is rounded here, and kept rounded for the backward pass.
            dtype = self.runtime.compute_dtype
        else:
            dtype = upcast(x).dtype
        grouped = x
        if self.groups > 1:
            grouped = x.unflatten(-1, (self.groups, -1))
        return Normalise.apply(grouped, self.eps, CENTRES[self.norm_kind], dtype).view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        """y may be fp32 where x is bf16: a caller that needs the dtype of x casts it back."""
        if self.gate is not None:
            x = x - F.silu(self.gate) * x.detach()
        if self.factor_in is not None:
            x = self.factor_in * x
        x = self.normalise(x)
        if self.fold:
            return x
        gain = self.gain_vector()
        if gain is not None:
            x = x * gain
        if self.bias is not None:
            x = x + self.bias
        if self.factor is not None:
            x = self.factor * x
        if self.drop is not None and self.training:
            x = drop_samples(x, self.drop)
        return x

    @torch.no_grad()
    def set_gain(self, value: float) -> None:
        """Set every entry of the gain to `value`."""
        if self.gain is not None:
            self.gain.fill_(value)

    @torch.no_grad()
    def init(self) -> None:
        """Set every parameter to its initial value."""
        self.set_gain(self.init_gain)
        for start_at_zero in (self.bias, self.shift, self.gate):
            if start_at_zero is not None:
                start_at_zero.zero_()
        if isinstance(self.alpha, nn.Parameter):
            self.alpha.fill_(self.init_alpha)


class PositiveSlot(Slot):
    """A slot whose gain is |γ|, γ its parameter."""

    def gain_vector(self) -> Tensor:
        return self.gain.abs()


class RestSlot(Slot):
    """y = (1 − const · gain) x, with const and gain of `other`, whose const is not None."""

    def __init__(self, other: Slot):
        super().__init__()
        self.other = (other,)  # in a tuple: its parameters are not those of this slot

    def gain_vector(self) -> Tensor:
        (other,) = self.other
        return 1 - other.factor * other.gain_vector()


class MagnitudeDirectionSlot(Slot):
    """A slot whose gain is stored as a magnitude and a direction α.

    gain_param  "magdir": magnitude · α/rms(α); "expmagdir": exp(magnitude) · α/rms(α)
    settings    those of `Slot`, with n_gain > 0
    """

    def __init__(self, gain_param: str, **settings: Any):
        super().__init__(**settings)
        self.gain_param = gain_param

    def add_gain(self, n: int, role: str) -> None:
        self.gain = None
        self.direction = empty_parameter(n)
        self.magnitude = empty_parameter(1)
        self.param_roles |= {"magnitude": role, "direction": "gain_dir"}

    def gain_vector(self) -> Tensor:
        unit = self.direction * torch.rsqrt(self.direction.square().mean())
        if self.gain_param == "expmagdir":
            return self.magnitude.exp() * unit
        return self.magnitude * unit

    @torch.no_grad()
    def set_gain(self, value: float) -> None:
        self.direction.fill_(1.0)
        if self.gain_param == "expmagdir":
            value = math.log(value)
        self.magnitude.fill_(value)


def make_slot(
    gain_param: str, norm: Norm = NO_NORM, n_gain: int = 0, role: str = "gain_out", **settings: Any
) -> Slot:
    """A slot whose gains are stored as `gain_param`: "direct", "magdir" or "expmagdir".

    A single learned factor, with the role `scalar`, is always stored directly. `settings` are
    further arguments of `Slot`.
    """
    if gain_param == "direct" or role == "scalar" or n_gain == 0:
        return Slot(norm, n_gain=n_gain, role=role, **settings)
    return MagnitudeDirectionSlot(gain_param, norm=norm, n_gain=n_gain, role=role, **settings)
