"""What a network of such parts knows of itself: how it computes, initial weights, roles and sizes
of parameters."""

import torch
import torch.nn as nn

from layers.linear import Draws, Embedding, Linear, SigmaReparam
from layers.roles import BLOCK_ROLES, OPEN_GAINS, ROLES
from layers.runtime import Runtime
from layers.scaling import initial_std
from layers.slot import Slot


class Network(nn.Module):
    """A model as optimizers and the training step see it. Modules say their parameters' roles:
    `param_roles`."""

    def __init__(self):
        super().__init__()
        self.runtime = Runtime()

    def set_runtime(self, **changes) -> "Network":
        """Change these fields of the `Runtime`; returns the network. AttributeError for a field
        that does not exist."""
        for name, value in changes.items():
            setattr(self.runtime, name, value)
        return self

    @classmethod
    def empty(cls, config) -> "Network":
        """A model without storage, on the meta device: to count, to shard, or to move with
        `to_empty` and then fill."""
        with torch.device("meta"):
            return cls(config)

    @torch.no_grad()
    def init_weights(self, seed: int = 1337) -> None:
        """Set every parameter, random ones by `Draws`: a seed means the same weights on every
        device and any number of processes, whatever else draws random numbers. Every module that
        reads a Runtime gets this network's."""
        draws, c = Draws(seed), self.config
        for module in self.modules():
            if hasattr(module, "runtime"):
                module.runtime = self.runtime
            if isinstance(module, Slot):
                module.init()
            elif isinstance(module, (Linear, Embedding)):
                std = initial_std(c, module.param_roles["weight"], *module.weight.shape[-2:])
                is_cut = (
                    c.init == "xavier_cut"
                    and isinstance(module, Linear)
                    and module is not self.head
                )
                module.init(std, draws, *[2.0] * is_cut)

    def routers(self) -> dict:
        """{name: its Router}, in the order of the blocks."""
        return {name: m for name, m in self.named_modules() if name.endswith(".router")}

    def power_iteration(self) -> None:
        """One step of σReparam's power iteration in every matrix that has it. Call it after every
        optimizer step."""
        for module in self.modules() if self.config.sigma_reparam else ():
            if isinstance(module, SigmaReparam):
                module.power_iteration()

    def roles(self, inputs: str = "final") -> dict:
        """{parameter name: role}, each parameter exactly once, in the order of `named_parameters`.
        `inputs`: those of OPEN_GAINS, with commas, that are gain_in; the others are gain_out."""
        roles, chosen = (
            {},
            {gain: "gain_in" if gain in inputs.split(",") else "gain_out" for gain in OPEN_GAINS},
        )
        for full_name, (its, name) in self._owners().items():
            roles[full_name] = chosen.get(its.get(name), its.get(name))
            if roles[full_name] not in ROLES:
                fix = f"give its module param_roles = {{'{name}': role}}"
                raise ValueError(f"parameter {full_name} has role {roles[full_name]}: {fix}")
        return roles

    def block_types(self) -> dict:
        """{parameter name: block type (emb, patch, pos, head, qk, vo, ffn, router or norm)}. A
        bias, or σReparam's γ, has the type of its matrix; gains and all else are "norm"."""
        return {
            full_name: its.get("weight", "norm") for full_name, (its, _) in self._owners().items()
        }

    def _owners(self) -> dict:
        """{parameter name: (its module's param_roles, its name there)}."""
        owner = {}
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                owner[id(p)] = getattr(module, "param_roles", {}), name
        return {full_name: owner[id(p)] for full_name, p in self.named_parameters()}

    def active_numel(self) -> dict:
        """{parameter name: number of its entries that a token meets}: of a stack of experts those
        of its own."""
        k, E = self.config.n_expert_active, self.config.n_expert
        stacked = {
            id(p)
            for m in self.modules()
            if getattr(m, "stack", 0)
            for p in m.parameters(recurse=False)
        }
        return {
            n: p.numel() * k // E if id(p) in stacked else p.numel()
            for n, p in self.named_parameters()
        }

    def active_matrices(self) -> int:
        """Number of entries of the blocks' matrices, routers included, that a token meets."""
        roles = self.roles()
        return sum(
            n for name, n in self.active_numel().items() if roles[name] in (*BLOCK_ROLES, "router")
        )

    def attention_flops(self) -> int:
        """Attention's part of `flops_per_token`."""
        c = self.config
        return 12 * c.n_layer * c.n_head * c.head_dim * c.block_size

    def num_params(self, positions: bool = True, active: bool = False) -> int:
        """Number of parameters, or of those that a token meets; positions=False: as GPT-2's are
        counted."""
        n = (
            sum(self.active_numel().values())
            if active
            else sum(p.numel() for p in self.parameters())
        )
        return n if positions or self.wpe is None else n - self.wpe.weight.numel()
