"""Slots: the places around and inside a branch where a norm, a gain or a constant may stand."""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from layers.ops import drop_samples, tanh, upcast
from layers.runtime import Runtime


class Normalise(torch.autograd.Function):
    """(y, s): y = s (x − μ) over the last dimension, in `dtype`, and s = 1/√(mean((x − μ)²) + eps), (…, 1); μ is the
    mean of x if `centre`, else 0. It computes in fp32 at least.

    The backward pass works from y, which the next matrix keeps anyway, so x need not be kept. For n channels

        ∂x = s (∂y − [mean(∂y)] − y · mean(y · ∂y)) − ∂s · s² y / n

    s is returned so that this can be differentiated again; otherwise there is no ∂s."""

    @staticmethod
    def forward(ctx, x, eps, centre, dtype):
        x = upcast(x)
        if centre:
            x = x - x.mean(-1, keepdim=True)
        s = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        y = (x * s).to(dtype)
        ctx.save_for_backward(y, s)
        ctx.set_materialize_grads(False)
        if torch.compiler.is_compiling():
            ctx.mark_non_differentiable(s)  # compiled code has no second derivative, and would add zeros
        ctx.centre = centre
        return y, s

    @staticmethod
    def backward(ctx, dy, ds):
        y, s = ctx.saved_tensors
        y = upcast(y)
        dy = torch.zeros_like(y) if dy is None else upcast(dy)
        dx = dy - y * (dy * y).mean(-1, keepdim=True)
        if ctx.centre:
            dx = dx - dy.mean(-1, keepdim=True)
        dx = s * dx
        if ds is not None and not torch.compiler.is_compiling():
            dx = dx - ds * s.square() * y / y.shape[-1]
        return dx, None, None, None


# Norms are functions of (slot, x), x: (…, dim).


def rms_norm(slot, x, centre=False):
    groups = x if slot.groups == 1 else x.unflatten(-1, (slot.groups, -1))
    # what goes into a matrix as it is, is rounded for the product here, and kept like that
    dtype = (slot.runtime.compute_dtype if slot.fold else None) or upcast(x).dtype
    return Normalise.apply(groups, slot.eps, centre, dtype)[0].view_as(x)


def layer_norm(slot, x):
    return rms_norm(slot, x, centre=True)


def dyt(slot, x):
    """squash(αx): with gain and bias γ · tanh(αx) + β (DyT)."""
    return SQUASH[slot.squash](slot.alpha * upcast(x))


NORMALISE = {"none": lambda slot, x: x, "rmsnorm": rms_norm, "layernorm": layer_norm, "dyt": dyt}
SQUASH = {"tanh": tanh, "hardtanh": F.hardtanh, "sigmoid": torch.sigmoid, "identity": lambda x: x}


def factor(value: float):
    """`value` as a tensor () on the CPU."""
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def empty_parameter(n: int):
    """n entries, or None for 0. A scalar has shape (1,): FSDP2 cannot shard a tensor without dimensions."""
    return nn.Parameter(torch.empty(int(n))) if n else None


class Slot(nn.Module):
    """y = drop( const · (gain · normalise(const_in · x) + bias) ), each part optional. x, y: (..., dim).

    A norm computes in fp32 at least. `forward` takes the constants from tensors () on the CPU, which every device can
    multiply by. For Python floats torch.compile would compile each block anew; buffers would be lost in meta-device
    init and broadcast by DDP.

    norm      "none", "rmsnorm", "layernorm" (both over `groups` groups of channels), "dyt": squash(αx)
    n_gain    number of learned gains: 0 (none), 1 (a scalar) or dim; `init` is their initial value
    role      of the gain: `gain_in` where a linear map follows, else `gain_out`; `scalar` for a single learned factor
    param     how the gain is stored: itself (direct), β·α/rms(α) (magdir) or exp(b)·α/rms(α) (expmagdir); a scalar is
              always direct
    n_bias    number of learned biases: 0 (none), 1 or dim
    const     a factor, or None; a factor of 1 is one too
    const_in  the same, on the input; for lns=input only
    drop      rate of stochastic depth: in training y of a whole sample is 0 with this probability; None: off
    fold      leave const and gain to the neighbouring linear map, which takes them from `folded` and multiplies them
              into its weight: that saves a pass over the activations
    """

    runtime = Runtime()

    def __init__(
        self,
        norm="none",
        *,
        n_gain=0,
        role="gain_out",
        param="direct",
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
        self.norm, self.eps, self.groups, self.squash = norm, eps, groups, squash
        self.const, self.const_in = (1.0 if c is None else c for c in (const, const_in))
        self.factor, self.factor_in, self.drop = (None if c is None else factor(c) for c in (const, const_in, drop))
        self.init_gain, self.init_alpha = init, alpha
        self.param = param if n_gain and role != "scalar" else "direct"
        self.fold = fold and not n_bias  # a bias comes after the gain, so the gain cannot move to the next matrix
        split = self.param != "direct"  # the gain is a magnitude times a direction
        self.gain = empty_parameter(0 if split else n_gain)
        self.direction = empty_parameter(n_gain if split else 0)
        self.magnitude = empty_parameter(1 if split else 0)
        self.bias = empty_parameter(n_bias)
        self.alpha = empty_parameter(1) if norm == "dyt" and learn_alpha else alpha
        self.param_roles = {"gain": role, "magnitude": role, "direction": "gain_dir"}
        self.param_roles |= {"bias": "bias", "alpha": "scalar"}

    def forward(self, x):
        x = NORMALISE[self.norm](self, x if self.factor_in is None else self.factor_in * x)
        if self.fold:
            return x
        gain = self.gain_vector()
        if gain is not None:
            x = x * gain
        if self.bias is not None:
            x = x + self.bias
        x = x if self.factor is None else self.factor * x
        return x if self.drop is None or not self.training else drop_samples(x, self.drop)

    def gain_vector(self):
        """The gain by which the slot multiplies, (dim,) or (1,), or None."""
        if self.direction is None:
            return self.gain
        unit = self.direction * torch.rsqrt(self.direction.square().mean())
        return (self.magnitude.exp() if self.param == "expmagdir" else self.magnitude) * unit

    def folded(self):
        """const · gain, which a folding slot leaves to a weight: a vector, a tensor (), or None for nothing."""
        if not self.fold:
            return None
        gain = self.gain_vector()
        if self.factor is None:
            return gain
        return self.factor if gain is None else self.factor * gain

    @torch.no_grad()
    def set_gain(self, value: float):
        """Give every entry of the gain this value."""
        if self.gain is not None:
            self.gain.fill_(value)
        elif self.direction is not None:
            self.direction.fill_(1.0)
            self.magnitude.fill_(math.log(value) if self.param == "expmagdir" else value)

    @torch.no_grad()
    def init(self):
        """Give every parameter its initial value."""
        self.set_gain(self.init_gain)
        if self.bias is not None:
            self.bias.zero_()
        if isinstance(self.alpha, nn.Parameter):
            self.alpha.fill_(self.init_alpha)

    def extra_repr(self):
        drop = "" if self.drop is None else f", dropped with probability {self.drop:.3g}"
        return (self.norm if self.const == 1.0 else f"{self.const:.4g} · {self.norm}") + drop


class Slots(NamedTuple):
    """The four slots of a residual sub-layer: x ← post( skip(x) + mid( f( pre(x) ) ) )."""

    pre: Slot
    mid: Slot
    post: Slot
    skip: Slot
