"""Base class of a network: runtime, initial weights, roles of parameters, parameter counts."""

from typing import Any, Self

import torch
import torch.nn as nn

from layers.draws import Draws
from layers.linear import Embedding, Linear, SigmaReparam
from layers.roles import BLOCK_ROLES, OPEN_GAINS, ROLES
from layers.runtime import Runtime
from layers.scaling import base, base_layer, growth

INIT_STD_ROLES = ("emb", "pos", "head")  # these have init_std also with init=xavier and xavier_cut
CUT = 2.0  # standard deviations at which init=xavier_cut truncates


class Network(nn.Module):
    """Base class of a model, with the methods that optimizers and the training step call.

    Parameters live in a `Slot`, a `Linear` or an `Embedding`. A learned scalar, for example, is
    Slot(n_gain=1, role="scalar", init_gain=0.5). Any other module with parameters has
    `param_roles`, {name of its parameter: role}, and a method `init()` that sets their initial
    values. `config` is a GPTConfig.
    """

    config: Any

    def __init__(self):
        super().__init__()
        self.runtime = Runtime()

    @classmethod
    def empty(cls, config: Any) -> Self:
        """A model without storage, on the meta device: to count, to shard, or to fill after
        `to_empty`."""
        with torch.device("meta"):
            return cls(config)

    def share_runtime(self) -> None:
        """Make every module that has a `runtime` use this network's. Constructors call it when all
        modules are made."""
        for module in self.modules():
            if hasattr(module, "runtime"):
                module.runtime = self.runtime

    def set_runtime(self, **changes: Any) -> Self:
        """Change these fields of the `Runtime`; returns the network. AttributeError for a field
        that does not exist."""
        for name, value in changes.items():
            setattr(self.runtime, name, value)
        return self

    @torch.no_grad()
    def init_weights(self, seed: int = 1337) -> None:
        """Set every parameter: gains, biases and scalars by their modules, matrices by `Draws`.

        A seed means the same weights on every device and any number of processes, whatever else
        draws random numbers; with `unit_rows` under FSDP2, to rounding. ValueError for a parameter
        whose module cannot set it, and without `share_runtime`.
        """
        draws = Draws(seed)
        for module_name, module in self.named_modules():
            if getattr(module, "runtime", self.runtime) is not self.runtime:
                raise ValueError(f"call share_runtime when all modules are made: {module_name}")
            if isinstance(module, (Linear, Embedding)):
                std = initial_std(self.config, module)
                cut = None
                if self.config.init == "xavier_cut" and role_of(module) not in INIT_STD_ROLES:
                    cut = CUT
                module.init(std, draws, cut)
            elif hasattr(module, "init"):
                module.init()
            else:
                for name, _ in module.named_parameters(module_name, recurse=False):
                    fix = "put it into a Slot, or give its module a method init()"
                    raise ValueError(f"parameter {name} has no initial value: {fix}")
        self.normalise_rows()

    def power_iteration(self) -> None:
        """One step of the power iteration in every σReparam matrix, due after every optimizer
        step."""
        if not self.config.sigma_reparam:
            return
        for module in self.modules():
            if isinstance(module, SigmaReparam):
                module.power_iteration()

    @torch.no_grad()
    def normalise_rows(self, skipped: torch.Tensor | None = None) -> None:
        """With `unit_rows`: divide the vectors of all matrices that lie along the stream by their
        length, due after every optimizer step. Where the bool tensor `skipped` () is true, because
        that step changed nothing, this changes nothing."""
        if not self.config.unit_rows:
            return
        power = 1.0 if skipped is None else ~skipped
        for module in self.modules():
            if isinstance(module, (Linear, Embedding)):
                dim = -2 if getattr(module, "part", "") in ("o", "down") else -1
                module.weight.div_(module.weight.norm(dim=dim, keepdim=True) ** power)

    def routers(self) -> dict[str, nn.Module]:
        """{name: router}, in the order of the blocks."""
        return {name: m for name, m in self.named_modules() if name.endswith(".router")}

    def owner(self, full_name: str) -> nn.Module:
        """The module that holds the parameter of this name, as in `named_parameters`."""
        return self.get_submodule(full_name.rpartition(".")[0])

    def roles(self, input_gains: str = "final") -> dict[str, str]:
        """{parameter name: role}, in the order of `named_parameters`.

        `input_gains`: those of OPEN_GAINS that count as gain_in, separated by commas; the other
        ones count as gain_out. ValueError for a parameter without a role.
        """
        roles = {}
        for full_name, _ in self.named_parameters():
            name = full_name.rpartition(".")[2]
            role = getattr(self.owner(full_name), "param_roles", {}).get(name)
            if role in OPEN_GAINS:
                role = "gain_in" if role in input_gains.split(",") else "gain_out"
            if role not in ROLES:
                fix = f"give its module param_roles = {{'{name}': role}}"
                raise ValueError(f"parameter {full_name} has role {role}: {fix}")
            roles[full_name] = role
        return roles

    def block_types(self) -> dict[str, str]:
        """{parameter name: block type (emb, patch, pos, head, qk, vo, ffn, router or norm)}.

        Biases, and σReparam's γ, have the type of their matrix. The gains, biases and scalars of
        slots are "norm", wherever a slot stands.
        """
        types = {}
        for full_name, _ in self.named_parameters():
            param_roles = getattr(self.owner(full_name), "param_roles", {})
            types[full_name] = param_roles.get("weight", "norm")
        return types

    def active_numel(self) -> dict[str, int]:
        """{parameter name: number of its entries that a token meets}. A token meets
        n_expert_active experts of a stack."""
        numel = {}
        for full_name, p in self.named_parameters():
            numel[full_name] = p.numel()
            if getattr(self.owner(full_name), "stack", 0):
                numel[full_name] = p.numel() * self.config.n_expert_active // self.config.n_expert
        return numel

    def active_matrices(self) -> int:
        """Number of entries, in the blocks' matrices and routers, that a token meets."""
        numel = self.active_numel()
        roles = self.roles()
        return sum(numel[name] for name in numel if roles[name] in (*BLOCK_ROLES, "router"))

    def attention_flops(self) -> int:
        """The part of `flops_per_token` that belongs to attention."""
        config = self.config
        return 12 * config.n_layer * config.n_head * config.head_dim * config.block_size

    def num_params(self, positions: bool = True, active: bool = False) -> int:
        """Number of parameters. positions=False: without the position table, as GPT-2's are
        counted; active=True: those that a token meets."""
        if active:
            n = sum(self.active_numel().values())
        else:
            n = sum(p.numel() for p in self.parameters())
        if not positions and self.wpe is not None:
            n -= self.wpe.weight.numel()
        return n


def role_of(matrix: Linear | Embedding) -> str:
    """The role of its weight."""
    return matrix.param_roles["weight"]


def initial_std(config: Any, matrix: Linear | Embedding) -> float:
    """Standard deviation of the initial weights of a matrix.

    s is init_std with init=normal. With xavier and xavier_cut it is √(2 / (n_in + n_out)), in which
    sizes that grow with the width are those of the base (layers/scaling.py). m is the growth of the
    width over the base, 1 with parametrization=standard. The factor is `init_factor`. By role:

        emb, pos     init_std
        head         init_std · factor
        patch        s
        router       s / m
        qk, vo, ffn  s / √m · factor
    """
    role = role_of(matrix)
    if role in ("emb", "pos"):
        return config.init_std
    m = growth(config).n_embd
    std = config.init_std
    if config.init != "normal" and role not in INIT_STD_ROLES:
        n_out, n_in = matrix.weight.shape[-2:]
        if role != "patch":  # the size of a patch does not grow
            n_in = n_in / m
        if role != "router":  # the number of experts does not grow
            n_out = n_out / m
        std = (2 / (n_in + n_out)) ** 0.5
    if role == "router":
        std *= m**-1
    if role in BLOCK_ROLES:
        std *= m**-0.5
    return std * init_factor(config, matrix)


def init_factor(config: Any, linear: Linear) -> float:
    """Factor on the initial standard deviation, by the place of a matrix in its branch. L is the
    number of blocks, ℓ the number of this block, from 1; both of the base.

                             q, k    v, gate, up    o, down    untied head
        residual_init=gpt2   1       1              1/√(2L)    1
        residual_init=plain  1       1              1          1
        residual_init=depth  1       1              1/√(2ℓ)    1
        deepnorm=True        1       (8L)^-¼        (8L)^-¼    1
        fixup=True           1       (2L)^-½        0          0

    DeepNorm: also on SwiGLU's gate, our choice. Fixup: M^(-1/(2m-2)) for M = 2L branches of m
    matrices, of which the last starts at 0. Attention counts as v and o, m = 2. A product of two
    linear maps, in relu2 and behind a gate, counts as two matrices, m = 3: (2L)^-¼.
    """
    part = linear.part
    if role_of(linear) == "head":
        return 0.0 if config.fixup else 1.0
    if part in ("", "q", "k"):
        return 1.0
    n_layer = base(config).n_layer
    ends_branch = part in ("o", "down")
    if config.deepnorm:
        return (8 * n_layer) ** -0.25
    if config.fixup:
        if ends_branch:
            return 0.0
        if part in ("gate", "up") and (config.is_gated or config.mlp == "relu2"):
            return (2 * n_layer) ** -0.25
        return (2 * n_layer) ** -0.5
    if not ends_branch or config.residual_init == "plain":
        return 1.0
    if config.residual_init == "depth":
        return (2 * base_layer(config, linear.layer)) ** -0.5
    return (2 * n_layer) ** -0.5
