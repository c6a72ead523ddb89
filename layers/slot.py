"""Slots: the places around and inside a branch where a norm, a gain or a constant may stand."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from layers.ops import cast, drop_samples, forbid_second_derivative, tanh, upcast
from layers.runtime import Runtime

SQUASH = {"tanh": tanh, "hardtanh": F.hardtanh, "sigmoid": torch.sigmoid, "identity": lambda x: x}
CENTRES = {"rmsnorm": False, "layernorm": True}  # whether a norm subtracts the mean


class Normalise(torch.autograd.Function):
    """s (x − μ) over the last dimension, in `dtype`: s = 1/√(mean((x − μ)²) + eps), and μ is the
    mean of x if `centre`, else 0. It computes in fp32 at least.

    The backward pass works from the output y, which the next matrix keeps anyway, so x need not be
    kept:

        ∂x = s (∂y − [mean(∂y)] − y · mean(y · ∂y))"""

    @staticmethod
    def forward(ctx, x, eps, centre, dtype):
        x = upcast(x)
        if centre:
            x = x - x.mean(-1, keepdim=True)
        s = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        y = cast(x * s, dtype)
        ctx.save_for_backward(y, s)
        ctx.centre = centre
        return y

    @staticmethod
    def backward(ctx, dy):
        forbid_second_derivative()
        y, s = (upcast(t) for t in ctx.saved_tensors)
        dy = upcast(dy)
        dx = dy - y * (dy * y).mean(-1, keepdim=True)
        if ctx.centre:
            dx = dx - dy.mean(-1, keepdim=True)
        return s * dx, None, None, None


def cpu_scalar(value: float | None):
    """`value` as a tensor () on the CPU, which every device can multiply by, or None. For Python
    floats torch.compile would compile each block anew; buffers would be lost in meta-device init
    and broadcast by DDP."""
    return None if value is None else torch.tensor(value, dtype=torch.float64, device="cpu")


def empty_parameter(n: int):
    """n entries, or None for 0. A scalar has shape (1,): FSDP2 cannot shard a tensor without
    dimensions."""
    return nn.Parameter(torch.empty(int(n))) if n else None


class Slot(nn.Module):
    """y = drop( const · (gain · normalise(const_in · x) + bias) ), each part optional. x, y: (...,
    dim).

    norm      "none", "rmsnorm", "layernorm" (over `groups` groups of channels), "dyt": squash(αx); in fp32 at least
    n_gain    number of learned gains: 0 (none), 1 (a scalar) or dim; `init` is their initial value
    param     how gains are stored, except a scalar: "direct", or as magnitude times direction, "magdir" β · α/rms(α)
              or "expmagdir" exp(b) · α/rms(α)
    role      of the gain: `gain_in` where a linear map follows, else `gain_out`; where that is open, one of OPEN_GAINS;
              `scalar` for a single learned factor
    n_bias    number of learned biases: 0 (none), 1 or dim
    const     a factor, or None; 1.0 still counts as a factor
    const_in  the same, on the input; for lns=input only
    drop      rate of stochastic depth: in training y of a whole sample is 0 with this probability; None: off
    fold      return normalise(const_in · x) alone: the neighbouring linear map takes const · gain from
              `factor_for_weight` and multiplies its weight by it, which saves a pass over the
              activations
    """

    runtime = Runtime()  # replaced by the network's

    def __init__(
        self,
        norm="none",
        *,
        n_gain=0,
        param="direct",
        role="gain_out",
        init=1.0,
        n_bias=0,
        fold=False,
        const=None,
        const_in=None,
        drop=None,
        eps=1e-6,
        groups=1,
        squash="tanh",
        alpha=1.0,
        learn_alpha=True,
    ):
        super().__init__()
        self.norm, self.eps, self.groups, self.squash, self.param = norm, eps, groups, squash, param
        # floats, to be read
        self.const, self.const_in = (1.0 if c is None else c for c in (const, const_in))
        self.factor, self.factor_in, self.drop = map(cpu_scalar, (const, const_in, drop))
        self.init_gain, self.init_alpha = init, alpha
        # a bias comes after the gain, so the gain cannot move to the next matrix
        self.fold = fold and not n_bias
        is_direct = param == "direct" or role == "scalar"
        self.gain = empty_parameter(n_gain if is_direct else 0)
        self.direction = empty_parameter(0 if is_direct else n_gain)
        self.magnitude = None if self.direction is None else empty_parameter(1)
        self.bias = empty_parameter(n_bias)
        self.alpha = empty_parameter(1) if norm == "dyt" and learn_alpha else alpha
        self.param_roles = {
            "gain": role,
            "magnitude": role,
            "direction": "gain_dir",
            "bias": "bias",
            "alpha": "scalar",
        }

    def gain_vector(self):
        """The gain by which the slot multiplies, (dim,) or (1,), or None."""
        if self.direction is None:
            return self.gain
        unit = self.direction * torch.rsqrt(self.direction.square().mean())
        return (self.magnitude.exp() if self.param == "expmagdir" else self.magnitude) * unit

    def factor_for_weight(self):
        """const · gain, by which a folding slot has a weight multiplied: a vector, a tensor (), or
        None for nothing."""
        if not self.fold:
            return None
        gain = self.gain_vector()
        if self.factor is None:
            return gain
        return self.factor if gain is None else self.factor * gain

    def normalise(self, x):
        if self.norm == "none":
            return x
        if self.norm == "dyt":
            return SQUASH[self.squash](self.alpha * upcast(x))
        groups = x if self.groups == 1 else x.unflatten(-1, (self.groups, -1))
        # what goes into a matrix as it is, is rounded for the product here, and kept like that
        dtype = (self.runtime.compute_dtype if self.fold else None) or upcast(x).dtype
        return Normalise.apply(groups, self.eps, CENTRES[self.norm], dtype).view_as(x)

    def forward(self, x):
        x = self.normalise(x if self.factor_in is None else self.factor_in * x)
        if self.fold:
            return x
        gain = self.gain_vector()
        if gain is not None:
            x = x * gain
        if self.bias is not None:
            x = x + self.bias
        x = x if self.factor is None else self.factor * x
        return x if self.drop is None or not self.training else drop_samples(x, self.drop)

    @torch.no_grad()
    def set_gain(self, value: float):
        """Give every entry of the gain this value."""
        if self.direction is not None:
            self.direction.fill_(1.0)
            self.magnitude.fill_(math.log(value) if self.param == "expmagdir" else value)
        elif self.gain is not None:
            self.gain.fill_(value)

    @torch.no_grad()
    def init(self):
        """Give every parameter its initial value."""
        self.set_gain(self.init_gain)
        if self.bias is not None:
            self.bias.zero_()
        if isinstance(self.alpha, nn.Parameter):
            self.alpha.fill_(self.init_alpha)
