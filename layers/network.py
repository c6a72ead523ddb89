"""What a network of such parts knows of itself: the role of each parameter, and what all its modules are told."""

import torch
import torch.nn as nn

from layers.linear import SigmaReparam
from layers.moe import Router
from layers.roles import ROLES


class Network(nn.Module):
    """A model as optimizers, diagnostics and the training step see it. Its modules say what role each of their own
    parameters has: `param_roles`, {name: role}."""

    compute_dtype = None  # of the matrix products; None: the parameters' own. See `set_compute_dtype`
    stream_dtype = None  # of the residual stream; None: fp32. See `set_stream_dtype`

    def set_compute_dtype(self, dtype: torch.dtype | None) -> "Network":
        """Multiply matrices in `dtype` (None: the parameters' own); parameters and residual stream stay as they are."""
        for module in self.modules():
            if hasattr(module, "compute_dtype"):
                module.compute_dtype = dtype
        return self

    def set_stream_dtype(self, dtype: torch.dtype | None) -> "Network":
        """Pass the residual stream from sub-layer to sub-layer in `dtype` (None: fp32, the papers'); sums stay fp32."""
        for module in self.modules():
            if hasattr(module, "stream_dtype"):
                module.stream_dtype = dtype
        return self

    def routers(self) -> dict:
        """{name: Router}, in the order of the blocks."""
        return {name: m for name, m in self.named_modules() if isinstance(m, Router)}

    def set_penalties(self, balance_coef: float, z_coef: float) -> "Network":
        """Train the routers for more than the cross-entropy: their balance loss and z-loss, times these."""
        for router in self.routers().values():
            router.balance_coef, router.z_coef = balance_coef, z_coef
        return self

    def set_penalty_unit(self, unit) -> None:
        """How much 1 nat of a micro batch's loss counts in the gradient, a tensor (): penalties count as much."""
        if self.config.n_expert:  # called in every step: a dense model is not searched for routers
            for router in self.routers().values():
                router.unit = unit

    def power_iteration(self) -> None:
        """One step of σReparam's power iteration in every matrix that has it. Call it after every optimizer step."""
        for module in self.modules() if self.config.sigma_reparam else ():
            if isinstance(module, SigmaReparam):
                module.power_iteration()

    def roles(self) -> dict:
        """{parameter name: role}, each parameter exactly once, in the order of `named_parameters`."""
        roles = {}
        for full_name, (module, name) in self._owners().items():
            role = getattr(module, "param_roles", {}).get(name)
            if role not in ROLES:
                fix = f"give its module param_roles = {{'{name}': role}}"
                raise ValueError(f"parameter {full_name} has role {role}: {fix}")
            roles[full_name] = role
        return roles

    def block_types(self) -> dict:
        """{parameter name: block type (emb, pos, head, qk, vo, ffn, router or norm)}. A bias, or σReparam's γ, has the
        type of its matrix; gains and all else are "norm"."""
        return {
            full_name: getattr(module, "param_roles", {}).get("weight", "norm")
            for full_name, (module, _) in self._owners().items()
        }

    def _owners(self) -> dict:
        """{parameter name: (module, its name there)}."""
        owner = {id(p): (m, name) for m in self.modules() for name, p in m.named_parameters(recurse=False)}
        return {full_name: owner[id(p)] for full_name, p in self.named_parameters()}
