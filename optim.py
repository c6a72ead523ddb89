"""Optimizers and schedules. Parameter groups come from the model's roles; one table says what happens to each.

`make_optimizer` puts every parameter into exactly one group, by its role: which update rule it gets, its learning rate
relative to the others' and its weight decay. `Optimizer.step` hands the groups to their rules. A rule is three
functions (options, state, step) in a class that only names them, and a row in `RULES`; an optimizer is a row in
`OPTIMIZERS`.

Rules get `bad`, a boolean tensor, whether the gradients are not finite (None: they are), and then leave parameters and
state as they are, on the device, without a host sync. Under FSDP2 parameters, gradients and state are sharded by rows
(DTensor): what goes entry by entry takes what is `local`, and where processes must meet, the rule says how. State is
made before the first step, so it is the same on all ranks, in every checkpoint, and on the meta device.

`python optim.py --plot CONFIG` draws the learning rate of each role. docs/optimizers.md has recipes and sources. Marks:
[I] our inference or choice, [U] not published where we could read it.
"""

import math
import sys
from dataclasses import dataclass, field
from functools import cache, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from model import assign, is_sharded, local

# ------------------------------------------------------------------------------------------------------ update rules


def shard_group(t):
    """The processes that t's rows are spread over; None where t is whole."""
    return t.device_mesh.get_group(t.device_mesh.ndim - 1) if is_sharded(t) else None


def my_rows(n: int, group) -> range:
    """Which of n rows this process has, where `group` shares them out: as many each, the last ones fewer or none."""
    return shares(n, dist.get_world_size(group))[dist.get_rank(group)] if group else range(n)


def shares(n: int, world: int) -> list:
    """The rows of each process, as FSDP2 splits n of them."""
    size = -(-n // world)
    return [range(min(rank * size, n), min((rank + 1) * size, n)) for rank in range(world)]


def unless(bad, new, old):
    """`new`, or `old` on a bad step. Averaging `old` with itself changes no bit of it."""
    return new if bad is None else torch.where(bad, old, new)


def good(bad):
    """1 on a good step, 0 on a bad one: a factor for what is added."""
    return 1.0 if bad is None else (~bad).float()


class AdamW:
    """torch's fused AdamW:  w ← w (1 − ηλ);  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²;  w ← w − η m̂ / (√v̂ + ε).

    State: 8 bytes a parameter. betas 0.9 and 0.95 by default, ε = 1e-8.
    """

    def options(config, role, model):
        return dict(betas=(config.beta1, config.beta2), eps=1e-8)

    def state(p, group):
        return dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    def step(work, bad):
        for group, params, grads, states in work:
            m, v, steps = ([local(s[key]) for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            params, grads, (beta1, beta2) = list(map(local, params)), list(map(local, grads)), group["betas"]
            numbers = dict(lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])
            numbers |= dict(eps=group["eps"], amsgrad=False, maximize=False)
            adamw(params, grads, m, v, [], steps, fused=True, found_inf=None if bad is None else bad.float(), **numbers)


class SGDW:
    """mSGDW, momentum SGD with decoupled weight decay (DNT; the order and the first step are timm's sgdw):

        w ← w (1 − ηλ);   m ← g at first, then μ m + (1 − dampening) g;   w ← w − η m,  or − η (g + μ m) with Nesterov

    State: 4 bytes a parameter. A tensor whose gradients were exactly zero so far has not begun (matters to dampening).
    """

    def options(config, role, model):
        return dict(momentum=config.momentum, dampening=config.dampening, nesterov=config.nesterov)

    def state(p, group):
        return dict(momentum_buffer=torch.zeros_like(p))

    def step(work, bad):
        for group, params, grads, states in work:
            shards, buffers = shard_group(params[0]), [local(s["momentum_buffer"]) for s in states]
            params, grads = list(map(local, params)), list(map(local, grads))
            if group["weight_decay"]:
                shrink = 1 - group["lr"] * group["weight_decay"]
                torch._foreach_mul_(params, shrink if bad is None else torch.where(bad, 1.0, shrink))
            if group["dampening"]:
                begun = torch.stack([buffer.any() for buffer in buffers]).float()
                if shards:
                    dist.all_reduce(begun, dist.ReduceOp.MAX, shards)
                grads = [g * (1 - group["dampening"] * b) for g, b in zip(grads, begun, strict=True)]
            numbers = dict(lr=group["lr"], momentum=group["momentum"], nesterov=group["nesterov"], dampening=0.0)
            numbers |= dict(weight_decay=0.0, maximize=False)  # torch's decay is coupled: added to the gradient
            sgd(params, grads, buffers, fused=True, found_inf=None if bad is None else bad.float(), **numbers)


class AdamMini:
    """Adam-mini 1.1.0: AdamW with one second moment a block of the parameter instead of one an entry.

        w ← w (1 − ηλ);   m ← β₁ m + (1 − β₁) g;   v ← β₂ v + (1 − β₂) mean(g² over the block);   w ← w − η m̂ / (√v̂ + ε)

    Blocks: the rows of one head for q and k; each row (an output neuron, a token) for the other matrices and the
    embeddings, positions too [I]; the whole tensor for all else. State: 4 bytes a parameter and 4 a block.
    """

    def options(config, role, model):
        rows = model.config.head_dim if role == "qk" else 1 if role in MATRICES else 0  # in one block; 0: all
        return dict(betas=(config.beta1, config.beta2), eps=1e-8, block_rows=rows)

    def state(p, group):
        rows = group["block_rows"] or len(p)
        if len(p) % rows:
            raise ValueError(f"Adam-mini: a tensor of {len(p)} rows does not divide into blocks of {rows}")
        v = torch.zeros(len(p) // rows, dtype=p.dtype, device=p.device)
        return dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p), block_sq=v)

    def step(work, bad):
        for group, params, grads, states in work:
            (beta1, beta2), lr = group["betas"], group["lr"]
            m, v, steps = ([local(s[key]) for s in states] for key in ("exp_avg", "block_sq", "step"))
            shards, grads = shard_group(params[0]), list(map(local, grads))
            for g, mean in zip(grads, m, strict=True):
                mean.lerp_(unless(bad, g, mean), 1 - beta1)
            squares = AdamMini.squares(params, grads, v, shards)
            torch._foreach_lerp_(v, [unless(bad, a, b) for a, b in zip(squares, v, strict=True)], 1 - beta2)
            torch._foreach_add_(steps, 1.0 if bad is None else [good(bad)] * len(steps))  # a lone tensor is waited for
            t = torch.stack(steps).clamp(min=1)  # 0 if the first step was bad
            sizes = torch._foreach_div(v, (1 - beta2**t).unbind())  # in the end η / ((1 − β₁ᵗ) (√v̂ + ε)), one a block
            torch._foreach_sqrt_(sizes)
            torch._foreach_add_(sizes, group["eps"])
            torch._foreach_mul_(sizes, (1 - beta1**t).unbind())
            torch._foreach_reciprocal_(sizes)
            torch._foreach_mul_(sizes, lr * good(bad))
            if group["weight_decay"]:
                torch._foreach_mul_(list(map(local, params)), 1 - lr * group["weight_decay"] * good(bad))
            for p, mean, size in zip(params, m, sizes, strict=True):
                if shards:
                    size = size[AdamMini.blocks(p, len(size), shards)]  # one a row
                shape = len(size), p.numel() // (len(p) if shards else len(size))
                local(p).view(shape).addcmul_(mean.view(shape), size[:, None], value=-1)

    def squares(params, grads, v, shards):
        """The mean of g² over each block, one tensor a parameter. Shards may cut through blocks: their sums are added
        up over the processes, in one message."""
        norm, sums = torch.linalg.vector_norm, []
        if not shards:
            blocks = [g.reshape(len(s), -1) for g, s in zip(grads, v, strict=True)]
            return [norm(g, dim=1).square() / g.shape[1] for g in blocks]
        for p, g, s in zip(params, grads, v, strict=True):
            rows = norm(g.reshape(len(g), p.numel() // len(p)), dim=1).square()
            mine, block = my_rows(len(p), shards), len(p) // len(s)
            before, after = mine.start % block, -mine.stop % block  # rows of this process's first and last block
            part = F.pad(rows, (before, after)).view(-1, block).sum(1)  # in a fixed order, on a GPU too
            sums.append(F.pad(part, (mine.start // block, len(s) - mine.start // block - len(part))))
        flat = torch.cat(sums)
        dist.all_reduce(flat, group=shards)
        parts = flat.split([len(s) for s in v])
        return [part * (len(part) / p.numel()) for part, p in zip(parts, params, strict=True)]

    def blocks(p, n: int, shards):
        """Which of the n blocks of p each row of this process is in."""
        rows = my_rows(len(p), shards)
        return torch.arange(rows.start, rows.stop, device=p.device) // (len(p) // n)


class Muon:
    """Momentum whose matrices are orthogonalised (Keller Jordan's Muon, as torch.optim.Muon):

        m ← μ m + (1 − μ) g;   u = μ m + (1 − μ) g with Nesterov, else m;   w ← w (1 − ηλ) − η s NS(u)

    with s = √max(1, rows/columns) (`original`) or 0.2 √max(rows, columns) (`match_rms_adamw`: updates as large as
    AdamW's, whose LR and decay then carry over). The direction of u is the same as with m ← μ m + g, since NS does not
    depend on its argument's scale. Every matrix by itself: q, k, v, gate, up; a parameter of three dimensions is a
    stack of matrices. State: 4 bytes a parameter.

    Under torchrun every rank orthogonalises its share of the matrices. Under DDP it sends it to the others, while the
    next ones are computed; gradients are the same everywhere already, and momentum is kept everywhere. Under FSDP2 it
    gets their rows from the others first, and sends rows back. So the bits are the same, whatever the number of ranks.
    Not compiled: it is products of matrices nearly all through.
    """

    def options(config, role, model):
        dtype = "bfloat16" if model.compute_dtype == torch.bfloat16 else "float32"
        numbers = dict(momentum=config.momentum, nesterov=config.nesterov, ns_steps=config.muon_steps)
        return numbers | dict(adjust_lr=config.muon_adjust_lr, ns_dtype=dtype)

    def state(p, group):
        if p.ndim < 2:
            raise ValueError(f"Muon is for matrices, not for a tensor of shape {tuple(p.shape)}: give it another rule")
        return dict(momentum_buffer=torch.zeros_like(p))

    def step(work, bad):
        shards = shard_group(work[0][1][0])
        together = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(shards), dist.get_world_size(shards)) if together else (0, 1)
        owners = iter(share_out(tuple(tuple(p.shape) for _, params, _, _ in work for p in params), world))
        arriving = []
        for group, params, grads, states in work:
            stacks = {}  # shape: (owner, parameter, gradient, momentum) …
            for p, g, s in zip(params, grads, states, strict=True):
                g, m = local(g), local(s["momentum_buffer"])
                m.lerp_(unless(bad, g, m), 1 - group["momentum"])
                stacks.setdefault(p.shape, []).append((next(owners), p, g, m))
            for same in stacks.values():
                if shards:
                    Muon.step_sharded(group, same, shards, bad)
                    continue
                mine = [item for owner, *item in same if owner == rank]
                updates = ((some, Muon.update(group, Muon.directions(group, some, bad))) for some in batches(mine))
                if world == 1:
                    for some, update in updates:
                        Muon.apply(group, some[0][0].shape, [p for p, _, _ in some], update, bad)
                    continue
                arriving.append((group, same, *exchange(same, [u for _, u in updates], group["ns_dtype"], world)))
                if len(arriving) > 1:  # two shapes under way at most, to bound the memory
                    Muon.receive(*arriving.pop(0), bad)
        for one in arriving:
            Muon.receive(*one, bad)

    def receive(group, same, received, sent, arrival, bad):
        """Wait for the updates of one shape and apply them. `sent` is here to live until they have arrived."""
        arrival.wait()
        place = [0] * len(received)
        for owner, p, _, _ in same:
            Muon.apply(group, p.shape, [p], received[owner, place[owner], None], bad)
            place[owner] += 1

    def step_sharded(group, same, shards, bad):
        """The rows of u go to the owners of the matrices, and the rows of the updates come back."""
        u = Muon.directions(group, [item for _, *item in same], bad)
        owned = rows_to_owners(same, u, shards)
        updates = [Muon.update(group, [u for (u,) in some]) for some in batches([(u,) for u in owned])]
        updates = rows_from_owners(same, torch.cat(updates) if updates else owned, shards)
        Muon.apply(group, same[0][1].shape, [local(p) for _, p, _, _ in same], updates, bad)

    def directions(group, items, bad):
        """u of each (parameter, gradient, momentum), in the dtype of the iteration."""
        mu, dtype = group["momentum"], getattr(torch, group["ns_dtype"])
        return [unless(bad, g.lerp(m, mu) if group["nesterov"] else m, m).to(dtype) for _, g, m in items]

    def update(group, u):
        """NS(u) of a list of tensors of one shape, stacked."""
        stack = torch.stack(u)
        matrices = stack.view(-1, *stack.shape[-2:])
        return newton_schulz(matrices, group["ns_steps"], triangular=one_at_a_time(matrices)).view_as(stack)

    def apply(group, shape, params, updates, bad):
        rows, columns = shape[-2:]
        size = 0.2 * max(rows, columns) ** 0.5
        if group["adjust_lr"] == "original":
            size = max(1, rows / columns) ** 0.5
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * good(bad))
        for p, u in zip(params, updates, strict=True):
            p.add_(u if bad is None else u * good(bad), alpha=-group["lr"] * size)


NS = (3.4445, -4.7750, 2.0315)  # a, b, c
BLOCK = 256  # rows of a triangular product computed at once; measured


def newton_schulz(x, steps: int = 5, triangular: bool = False):
    """Orthogonalise a stack of matrices: x (S, m, n) → the same shape, U diag(s) Vᵀ for x = U diag(σ) Vᵀ.

    A step is X ← aX + (bA + cA²)X with A = XXᵀ, from X = x/‖x‖_F, coefficients Keller Jordan's. After five, s lies
    in [0.68, 1.21] where σ is at least 0.002 ‖x‖_F (exact arithmetic; bf16 blurs it) and falls to 0 with smaller σ. A
    matrix of zeros stays zero. Tall matrices are transposed, so that A is small.

    Wide ones (n ≥ 2m ≥ 128) take two steps at once at first, from A alone, since products with X are the dear ones:
    X₂ = a²X + (a(P + P₂) + P₂P) X, where P = bA + cA², A₂ = a²A + (2aP + P²)A, P₂ = bA₂ + cA₂². All of these are
    symmetric and commute, and multiples of the identity are kept out of what is rounded. Later steps in pairs would
    cost accuracy in bf16, as would vectors. `triangular`: see `symmetric`.
    """
    a, b, c = NS
    product = partial(symmetric, triangular=triangular)
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    in_pairs, left = x.shape[2] >= 2 * x.shape[1] >= 128 and steps > 1, steps
    while left:
        A = product(x, x.mT)
        P, keep = product(A, A, A, b, c), a
        if in_pairs:
            A = product(product(P, P, P, 2 * a), A, A, a * a)
            P2 = product(A, A, A, b, c)
            P, keep, in_pairs, left = product(P2, P, P + P2, a), a * a, False, left - 1
        x = torch.baddbmm(x, P, x, beta=keep)
        left -= 1
    return x.mT if tall else x


def symmetric(x, y, base=None, beta: float = 1.0, alpha: float = 1.0, triangular: bool = False):
    """α x y + β base of stacks (S, m, k), (S, k, m), (S, m, m), where that is known to be symmetric.

    `triangular`: blocks of rows are computed up to the diagonal and mirrored, matrix after matrix. On a CPU that saves
    a quarter to a third; a GPU prefers one product of stacks."""
    if not triangular:
        return torch.bmm(x, y) if base is None else torch.baddbmm(base, x, y, beta=beta, alpha=alpha)
    (S, m, k), out = x.shape, x.new_empty(len(x), x.shape[1], x.shape[1])
    block = BLOCK if k < 2 * m else BLOCK // 2
    for s in range(S):
        for i in range(0, m, block):
            rows, columns = slice(i, i + block), slice(0, i + block)
            part = x[s, rows], y[s, :, columns]
            if base is None:
                torch.mm(*part, out=out[s, rows, columns])
            else:
                torch.addmm(base[s, rows, columns], *part, beta=beta, alpha=alpha, out=out[s, rows, columns])
            out[s, :i, rows] = out[s, rows, :i].mT
    return out


def one_at_a_time(x) -> bool:
    """Whether matrices like x (…, m, n) go through Newton-Schulz singly, by triangles: on a CPU, if there is more than
    one block of rows; but not on those with AMX, which gain more from stacks."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return x.device.type == "cpu" and min(x.shape[-2:]) > BLOCK and not amx()


def batches(items: list) -> list:
    """`items` (parameter, …) of one shape in lists of up to 64M entries, to bound the memory of a stack."""
    if not items:
        return []
    p = items[0][0]
    size = 1 if one_at_a_time(p) else max(1, 2**26 // p.numel())
    return [items[i : i + size] for i in range(0, len(items), size)]


@cache
def share_out(shapes: tuple, world: int) -> list:
    """The rank that orthogonalises each parameter: the costliest first, each to the rank with the least so far.

    Shapes of one cost in turn, not mixed: each is spread over all ranks, and `exchange` pads little."""
    costs = []
    for *stack, rows, columns in shapes:
        m, n = sorted((rows, columns))
        costs.append(math.prod(stack) * (2 * m * m * n + m**3))  # of a step of the iteration, in multiplications
    load, owners = [0] * world, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], shapes[i])):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


def exchange(same: list, updates: list, dtype: str, world: int) -> tuple:
    """Begin to give every rank the updates of all: (what arrives (world, most a rank has, *shape), what is sent, a
    handle to wait for). All send as much as the rank that owns most, void at the end: any number of ranks will do."""
    owners, p = [owner for owner, *_ in same], same[0][1]
    most = max(owners.count(rank) for rank in range(world))
    sent = torch.empty(most, *p.shape, dtype=getattr(torch, dtype), device=p.device)
    if updates:
        torch.cat(updates, out=sent[: sum(map(len, updates))])
    received = sent.new_empty(world, *sent.shape)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return received, sent, gather(received.flatten(0, 1), sent, async_op=True)


def rows_to_owners(same: list, u: list, shards) -> torch.Tensor:
    """Give every process all rows of the matrices that it owns: u, its rows of each → (how many it owns, *shape)."""
    shape, rows, counts, rank = shard_counts(same, shards)
    size, mine = math.prod(shape[1:]), counts[rank]
    sent = torch.cat([u[i].flatten() for i in by_owner(same)])
    received, arriving = sent.new_empty(mine * shape[0] * size), [mine * r * size for r in rows]
    dist.all_to_all_single(received, sent, arriving, [n * rows[rank] * size for n in counts], group=shards)
    parts = [part.view(mine, r, *shape[1:]) for part, r in zip(received.split(arriving), rows, strict=True)]
    return torch.cat(parts, dim=1)


def rows_from_owners(same: list, updates, shards) -> list:
    """The way back: updates (how many it owns, *shape) of every process → this one's rows of each of `same`."""
    shape, rows, counts, rank = shard_counts(same, shards)
    size, mine = math.prod(shape[1:]), counts[rank]
    sent = torch.cat([part.flatten() for part in updates.split(rows, dim=1)])
    received = sent.new_empty(len(same), rows[rank], *shape[1:])
    arriving, leaving = [n * rows[rank] * size for n in counts], [mine * r * size for r in rows]
    dist.all_to_all_single(received.view(-1), sent, arriving, leaving, group=shards)
    place = {i: place for place, i in enumerate(by_owner(same))}
    return [received[place[i]] for i in range(len(same))]


def shard_counts(same: list, shards) -> tuple:
    """(shape, rows of it at each process, how many of `same` each process owns, this process)."""
    owners, shape, world = [owner for owner, *_ in same], same[0][1].shape, dist.get_world_size(shards)
    counts = [owners.count(rank) for rank in range(world)]
    return shape, [len(rows) for rows in shares(shape[0], world)], counts, dist.get_rank(shards)


def by_owner(same: list) -> list:
    return sorted(range(len(same)), key=lambda i: same[i][0])


RULES = {"adamw": AdamW, "msgdw": SGDW, "adam_mini": AdamMini, "muon": Muon}


class Optimizer(torch.optim.Optimizer):
    """All parameter groups, each updated by the rule that its `rule` names, with options from `RULES[rule].options`."""

    found_inf = None  # set by the training loop: 1 where the gradients of this step are not finite, else 0

    def __init__(self, groups):
        super().__init__(groups, dict(lr=0.0, weight_decay=0.0))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = RULES[group["rule"]].state(p, group)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient; the others, and their state, are left alone."""
        work = {}
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                lists = group, params, [p.grad for p in params], [self.state[p] for p in params]
                work.setdefault(group["rule"], []).append(lists)
        bad = None if self.found_inf is None else self.found_inf > 0
        for rule, groups in work.items():
            RULES[rule].step(groups, bad)


# ---------------------------------------------------------------------------------------------- role → rule, LR, decay

MATRICES = ("emb", "pos", "head", "qk", "vo", "ffn")  # roles of these
HIDDEN = ("qk", "vo", "ffn")
DECAYED_GAINS = {"none": (), "all": ("gain_in", "gain_out"), "input": ("gain_in",), "output": ("gain_out",)}

# Blockwise LR: a block's LR is ratio · learning_rate. The paper's ratios for AdamW, and for Adam-mini; 1 for norms,
# learned positions and an untied head, as in the authors' code. Other scale vectors and scalars go with norms [I].
RATIOS = {"emb": 10.0, "qk": 8.0, "ffn": 6.0, "vo": 4.0, "norm": 1.0, "head": 1.0, "pos": 1.0}
ADAM_MINI_RATIOS = RATIOS | {"emb": 4.0, "qk": 1.0, "ffn": 4.0}


@dataclass
class Kind:
    """One optimizer."""

    rule: str  # of the hidden matrices
    defaults: dict  # what it takes where the configuration says None; knobs that are not here have no use to it
    rest: str | None = None  # the rule of everything else, where that is another
    ratios: dict = field(default_factory=lambda: RATIOS)


# LR and decay: the DNT paper's language models (Table 5); for Adam-mini AdamW's, and for Muon too, whose updates
# match_rms_adamw makes as large [I] (the DNT paper has 1e-4 for Muon's matrices, their scale unstated [U]). `original`
# has those of Keller Jordan's examples.
ADAM = dict(learning_rate=6e-4, weight_decay=0.1)
MUON = ADAM | dict(momentum=0.95, nesterov=True, muon_steps=5, muon_adjust_lr="match_rms_adamw")
MUON |= dict(adamw_learning_rate=None, adamw_weight_decay=None)  # of the rest: Muon's, or ADAM's with `original`
MUON_ORIGINAL = dict(learning_rate=0.02, weight_decay=0.01)
OPTIMIZERS = {
    "adamw": Kind("adamw", ADAM),
    "msgdw": Kind("msgdw", dict(learning_rate=1.0, weight_decay=1e-4, momentum=0.9, dampening=0.0, nesterov=False)),
    "muon": Kind("muon", MUON, rest="adamw"),
    "adam_mini": Kind("adam_mini", ADAM, ratios=ADAM_MINI_RATIOS),
}


def fill_defaults(config) -> None:
    """Fill in what is None; ValueError for values that are impossible, contradict each other or have no effect."""
    kind, name = OPTIMIZERS[config.optimizer], config.optimizer
    defaults = kind.defaults | (MUON_ORIGINAL if config.muon_adjust_lr == "original" else {})
    for knob in {knob: None for k in OPTIMIZERS.values() for knob in k.defaults}:
        value, users = getattr(config, knob), [n for n, k in OPTIMIZERS.items() if knob in k.defaults]
        if value is None:
            setattr(config, knob, defaults.get(knob))
        elif knob not in kind.defaults:
            raise ValueError(f"{knob}={value} has no effect on {name}: leave it out, or choose {' or '.join(users)}")
    for knob, default in ADAM.items() if kind.rest else ():
        if getattr(config, f"adamw_{knob}") is None:
            same = config.muon_adjust_lr == "match_rms_adamw"
            setattr(config, f"adamw_{knob}", getattr(config, knob) if same else default)
    if config.min_lr is None:
        config.min_lr = config.learning_rate / 10
    if config.lr_decay_iters is None:
        config.lr_decay_iters = config.max_iters
    _check_numbers(config)
    _check_schedule(config)
    _check_blockwise(config, kind)
    scaled = config.blockwise_lr and config.blockwise_decay == "scaled"
    ratio = max(getattr(config, f"lr_ratio_{block}") for block in RATIOS) if scaled else 1
    for prefix in ("", "adamw_") if kind.rest else ("",):
        lr, decay = getattr(config, f"{prefix}learning_rate"), getattr(config, f"{prefix}weight_decay")
        if ratio * lr * decay >= 0.1:
            raise ValueError(
                f"{prefix}learning_rate·{prefix}weight_decay{'·ratio' * (ratio != 1)} = {ratio * lr * decay:.3g} would "
                f"shrink every matrix by {ratio * lr * decay:.0%} a step: lower {prefix}weight_decay (the default is "
                f"{(ADAM if prefix else defaults)['weight_decay']:g})"
            )


def _check_numbers(config):
    rates = ("learning_rate", "min_lr", "weight_decay", "adamw_learning_rate", "adamw_weight_decay")
    ratios = tuple(f"lr_ratio_{block}" for block in RATIOS)
    for name in (*rates, *ratios, "grad_clip", "warmup_iters", "lr_decay_iters"):
        if (getattr(config, name) or 0) < 0:
            raise ValueError(f"{name}={getattr(config, name)} must not be negative")
    for name in ("beta1", "beta2", "momentum", "dampening"):
        if not 0 <= (getattr(config, name) or 0) < 1:
            raise ValueError(f"{name}={getattr(config, name)} must be at least 0 and below 1")
    if config.muon_steps is not None and not 1 <= config.muon_steps <= 20:
        raise ValueError(f"muon_steps={config.muon_steps} must be between 1 and 20")
    if config.nesterov and (config.dampening or not config.momentum):
        raise ValueError("nesterov needs momentum and no dampening: set nesterov=False, or change those")
    if config.dampening and not config.momentum:
        raise ValueError(f"dampening={config.dampening} has no effect without momentum: set one of them")
    if config.min_lr > config.learning_rate:
        raise ValueError(f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}: lower min_lr")
    decay = "adamw_weight_decay" if OPTIMIZERS[config.optimizer].rest else "weight_decay"  # of gains and scalars
    for name, off in (("decay_gains", "none"), ("decay_scalars", False)):
        if getattr(config, name) != off and not getattr(config, decay):
            raise ValueError(
                f"{name}={getattr(config, name)} decays by {decay}, which is 0: set that, or leave {name} out"
            )


def _check_schedule(config):
    if config.schedule != "wsd":
        for name in ("wsd_decay", "wsd_decay_iters"):
            if getattr(config, name) is not None:
                raise ValueError(f"{name} needs schedule=wsd, but schedule={config.schedule}: leave it out")
        return
    config.wsd_decay = config.wsd_decay or "linear"
    room = config.lr_decay_iters - config.warmup_iters
    if config.wsd_decay_iters is None:
        config.wsd_decay_iters = max(0, min(config.lr_decay_iters // 5, room))
    if not 0 <= config.wsd_decay_iters <= max(room, 0):
        raise ValueError(
            f"wsd_decay_iters={config.wsd_decay_iters} must lie between 0 and the {max(room, 0)} steps after warm-up "
            f"(lr_decay_iters={config.lr_decay_iters}, warmup_iters={config.warmup_iters})"
        )


def _check_blockwise(config, kind):
    names = {f"lr_ratio_{block}": ratio for block, ratio in kind.ratios.items()}
    if not config.blockwise_lr:
        given = [name for name in names if getattr(config, name) is not None]
        usual = dict(blockwise_start="start", blockwise_min_lr="shared", blockwise_decay="scaled")
        given += [name for name, value in usual.items() if getattr(config, name) != value]
        if given:
            raise ValueError(f"{', '.join(given)}: needs blockwise_lr=True")
        return
    for name, ratio in names.items():
        if getattr(config, name) is None:
            setattr(config, name, ratio)
        ends = config.schedule != "constant" and config.blockwise_min_lr == "shared"
        if ends and getattr(config, name) * config.learning_rate < config.min_lr:
            raise ValueError(
                f"{name}={getattr(config, name)} puts the peak below min_lr={config.min_lr}, which all blocks share: "
                "lower min_lr, or set blockwise_min_lr=proportional"
            )


def notes(config, model) -> list:
    """What is allowed but should be known: one line each, for the start of a run. After `fill_defaults`."""
    name, found, roles = config.optimizer, [], set(model.roles().values())
    if config.blockwise_lr and name not in ("adamw", "adam_mini"):
        ratios = ", ".join(f"{block} {getattr(config, f'lr_ratio_{block}'):g}" for block in RATIOS)
        found.append(
            f"blockwise_lr: the paper has ratios for adamw and adam_mini; these for {name} are ours [I]: {ratios}"
        )
    idle = [
        block
        for block in ("head", "pos")
        if block not in roles and getattr(config, f"lr_ratio_{block}") not in (None, 1)
    ]
    found += [f"lr_ratio_{block} has no effect: the model has no {block} of its own" for block in idle]
    if config.decay_gains == "all" and not roles & {"gain_in", "gain_out"}:
        found.append("decay_gains has no effect: the model has no gains")
    if config.decay_scalars and not roles & {"scalar", "bias"}:
        found.append("decay_scalars has no effect: the model has no learned scalars or biases")
    if name == "msgdw" and (config.beta1, config.beta2) != (0.9, 0.95):
        found.append("beta1 and beta2 have no effect on msgdw")
    ends = config.min_lr != config.learning_rate / 10 or config.lr_decay_iters != config.max_iters
    if config.schedule == "constant" and ends:
        found.append("min_lr and lr_decay_iters have no effect with schedule=constant")
    elif config.schedule != "constant" and config.lr_decay_iters < config.warmup_iters < config.max_iters:
        found.append(
            f"warm-up ({config.warmup_iters} steps) outlasts lr_decay_iters={config.lr_decay_iters}: the LR falls from "
            "its peak to min_lr in one step"
        )
    return found


def make_optimizer(model, config) -> Optimizer:
    """The configured optimizer: one group a role; under blockwise_lr biases and scalars go by the matrix they are with.

    A group has, beside what torch gives it (params, param_names, lr, weight_decay, its rule's options): `label`, its
    name in tables and metrics; `role`; `rule`; `base_lr`, the peak LR before `lr_ratio`, the blockwise ratio.
    ValueError where decay_gains names gains that the model does not have, or a parameter fits no rule."""
    kind, roles, kinds = OPTIMIZERS[config.optimizer], model.roles(), model.module_kinds()
    decayed = MATRICES if config.decay_emb else tuple(role for role in MATRICES if role not in ("emb", "pos"))
    gains = DECAYED_GAINS[config.decay_gains]
    if config.decay_gains in ("input", "output") and not any(role in gains for role in roles.values()):
        raise ValueError(
            f"decay_gains={config.decay_gains}, but the model has no such gains ({', '.join(gains)}): set "
            "decay_gains=none, or choose another"
        )
    decayed += gains + (("scalar", "bias") if config.decay_scalars else ())
    groups, trained = {}, {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        role, block = roles[name], kinds[name]
        main = role in HIDDEN or not kind.rest
        rule, prefix = (kind.rule, "") if main else (kind.rest, f"{kind.rest}_")
        label, ratio = role, getattr(config, f"lr_ratio_{block}") if config.blockwise_lr else 1.0
        if config.blockwise_lr and role in ("bias", "scalar") and block != "norm":
            label = f"{role}_{block}"
        decay = getattr(config, f"{prefix}weight_decay") if role in decayed else 0.0
        if config.blockwise_decay == "unscaled":
            decay /= ratio or 1.0
        group = dict(params=[], role=role, label=label, rule=rule, weight_decay=decay, lr_ratio=ratio)
        group |= dict(base_lr=getattr(config, f"{prefix}learning_rate"), **RULES[rule].options(config, role, model))
        groups.setdefault(label, group)["params"].append((name, p))
    optimizer = Optimizer(list(groups.values()))
    grouped = [name for group in optimizer.param_groups for name in group["param_names"]]
    if sorted(grouped) != sorted(trained):
        raise ValueError(f"groups do not hold every parameter once: {sorted(set(grouped) ^ set(trained))}")
    return optimizer


def describe_groups(optimizer, model=None) -> str:
    """A table: role, tensors, parameters, rule, peak LR, weight decay; with `model` its frozen parameters too."""
    rows = [("role", "tensors", "parameters", "optimizer", "peak LR", "decay")]
    for g in optimizer.param_groups:
        count, peak = sum(p.numel() for p in g["params"]), g["base_lr"] * g["lr_ratio"]
        rows.append((g["label"], str(len(g["params"])), f"{count:,}", g["rule"], f"{peak:g}", f"{g['weight_decay']:g}"))
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad] if model else []
    if frozen:
        rows.append(("(frozen)", str(len(frozen)), f"{sum(frozen):,}", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def state_bytes(model, config) -> int:
    """Bytes of optimizer state on `model`, which may be on the meta device: built and counted."""
    states = make_optimizer(model, config).state.values()
    return sum(t.numel() * t.element_size() for state in states for t in state.values() if torch.is_tensor(t))


def load_optimizer(optimizer, saved: dict, step: int) -> None:
    """Load the state dict saved after `step` steps, parameter by parameter. Groups, and with them LR, betas and decay,
    stay as they are: the configuration wins.

    Raises ValueError, before anything is changed, when the state belongs to other parameters or another optimizer."""
    fresh = {
        name: optimizer.state[p]
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
    }
    try:
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        states = {names[i]: state for i, state in saved["state"].items()}
        fits = sorted(names) == sorted(fresh) and (states.keys() == fresh.keys() or not states and step == 0)
        for name, state in states.items() if fits else ():
            kinds = [{k: (t.shape, t.dtype) for k, t in s.items() if torch.is_tensor(t)} for s in (state, fresh[name])]
            fits = fits and kinds[0] == kinds[1]
    except (KeyError, TypeError, AttributeError, IndexError):
        fits = False
    if not fits:
        raise ValueError(
            "the checkpoint's optimizer state does not fit this optimizer on this model, it is damaged or belongs to "
            "other parameters: --init_from=CHECKPOINT_FILE starts a new run from the weights alone"
        )
    for name, state in states.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                assign(fresh[name][key], value)
            else:
                fresh[name][key] = value


# ---------------------------------------------------------------------------------------------------------- schedules

DECAYS = {  # from 1 at q = 0 to 0 at q = 1
    "linear": lambda q: 1 - q,
    "cosine": lambda q: 0.5 * (1 + math.cos(math.pi * q)),
    "sqrt": lambda q: 1 - math.sqrt(q),
}


def lr_at(step: int, config, group: dict | None = None) -> float:
    """LR of update t = `step` + 1 for a parameter group; without one, of a group with learning_rate and ratio 1.

    Warm-up: peak·t/W at t ≤ W = warmup_iters, so the first is not zero. Then to min_lr at T = lr_decay_iters, and
    min_lr after it: by a cosine or a line (`cosine`, `linear`), in the last wsd_decay_iters steps before T (`wsd`), or
    never (`constant`). `dyt` is the recipe of DyT's LLaMA runs: the lesser of peak·(1 − (1 − t/W)²) and a cosine over
    0 … T. The group's peak is lr_ratio · base_lr; in warm-up base_lr with blockwise_start=warmup_end. min_lr is shared
    by all ratios or proportional to them, and to base_lr."""
    base, ratio = (group["base_lr"], group["lr_ratio"]) if group else (config.learning_rate, 1.0)
    t, warmup, end = step + 1, config.warmup_iters, config.lr_decay_iters
    peak, start = base * ratio, base if config.blockwise_start == "warmup_end" else base * ratio
    floor = config.min_lr * (base / config.learning_rate if config.learning_rate else 0.0)
    floor *= ratio if config.blockwise_min_lr == "proportional" else 1.0
    top = start if t <= warmup else peak
    if config.schedule == "dyt":
        rising = 1 - (1 - min(1.0, t / warmup)) ** 2 if warmup else 1.0
        return min(top * rising, floor + (top - floor) * DECAYS["cosine"](min(1.0, t / max(1, end))))
    if t <= warmup:
        return start * t / warmup
    if config.schedule == "constant":
        return peak
    begin = end - config.wsd_decay_iters if config.schedule == "wsd" else warmup
    progress = max(0.0, min(1.0, (t - begin) / max(1, end - begin)))
    decay = DECAYS[config.wsd_decay if config.schedule == "wsd" else config.schedule]
    return floor + decay(progress) * (peak - floor)


if __name__ == "__main__":
    from summary import optimizer_main

    sys.exit(optimizer_main())
