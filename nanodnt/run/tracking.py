"""Measurements inside the network: row["track"] of metrics.jsonl, every `track_interval` steps.

`probe` measures the weights after the step by one forward pass, `Tracker.after` the step itself, by
role. The numbers, with shapes: docs/analysis.md, "While it trains". Tracking changes no bit of a
run, and draws no random number.
"""

import math
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from layers.attention import visible_keys
from layers.ops import upcast
from layers.sharding import local_shard, shard_group
from layers.slot import Slot
from model import MLP, Attention, Transformer

# of the probe, at most; but at least one sequence, and not more sequences than a step has
TOKENS = 4096
SAMPLE = 2**16  # entries of a parameter, at most, on which its update is measured
# entries of a gradient, and attention logits, that are worked on at once: bounds memory
PIECE = 2**24
# and their types
MATRICES = {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "w1", "up": "w1", "down": "w2"}


def variance(x):
    """Variance over the channels of a token, mean over tokens: (..., C) → ()."""
    return upcast(x).var(-1, correction=0).mean()


def largest_logit(q, k, positions=None, causal=True):
    """Largest |q·k|/√head_dim over heads and pairs of a query and a key that it sees: q (B, H, T,
    head_dim), k (B, H_kv, T, head_dim) → (). `positions` (B, T), None: one document a row. Not
    `causal`: all see all."""
    B, H, T, head_dim = q.shape
    q, k = q.unflatten(1, (k.shape[1], -1)), k[:, :, None]
    largest, places = q.new_zeros(()), torch.arange(T, device=q.device)
    queries = max(1, PIECE // (B * H * T))  # at once
    for i in range(0, T, queries):
        # (B, H_kv, H / H_kv, queries, keys)
        logits = q[..., i : i + queries, :] @ k[..., : i + queries, :].mT
        part = None if positions is None else positions[:, i : i + queries]
        if causal:
            logits *= visible_keys(places[i : i + queries], part, logits.shape[-1])[:, :, None]
        largest = torch.maximum(largest, logits.abs_().max())
    return largest / head_dim**0.5


def matrix_types(model: Transformer) -> dict:
    """{name of a block's matrix: its type, a value of MATRICES}: w1 is up and SwiGLU's gate, w2 is
    down."""
    types = {}
    for name, module in model.named_modules():
        for part, kind in MATRICES.items() if isinstance(module, (Attention, MLP)) else ():
            # an MLP has no q, and a gate only under SwiGLU
            if getattr(module, part, None) is not None:
                types[f"{name}.{part}.weight"] = kind
    return types


def gain_vectors(module: torch.nn.Module) -> dict:
    """{slot name: its gain, as it acts} of every slot whose gain is a vector: norms, LayerScale,
    Admin, HG, DP, DNP."""
    gains = {
        name: slot.gain_vector() for name, slot in module.named_modules() if isinstance(slot, Slot)
    }
    return {name: gain for name, gain in gains.items() if gain is not None and gain.numel() > 1}


def joint_gain(module: torch.nn.Module):
    """‖γ‖, a tensor (): the L2 norm of all gains in `module` as one vector; the float nan for
    none."""
    gains = list(gain_vectors(module).values())
    return torch.linalg.vector_norm(torch.cat(gains)) if gains else math.nan


@torch.no_grad()
def smallest_row(model: Transformer) -> dict:
    """{"rows": d, the size of the vocabulary; "smallest": min ‖w̃‖² over the rows w of the
    embedding, w̃ = w − mean(w); "gain": `joint_gain` of the norm that comes next: the input norm,
    else block 1's first, else all gains of its attention [I]}. The paper sets d · smallest against
    ‖γ‖² (Blockwise LR Theorem 4.3, Fig. 6 c). {} for images: no such table."""
    if getattr(model, "wte", None) is None:
        return {}
    rows, attn = model.wte.weight[: model.config.vocab_size], model.blocks[0].attn
    smallest = rows.var(1, correction=0).min() * rows.shape[1]
    gain = next((m for m in (model.input_norm, attn.pre) if gain_vectors(m)), attn)
    return {"rows": len(rows), "smallest": smallest, "gain": joint_gain(gain)}


@contextmanager
def watch(notes: list):
    """Inside, note(args, output) follows each forward of its module, or changes its output; notes:
    [(module, note)]."""
    with ExitStack() as hooks:
        for module, note in notes:
            hooks.enter_context(
                module.register_forward_hook(lambda _, *passed, note=note: note(*passed))
            )
        yield


@torch.no_grad()
def probe(model: Transformer, *inputs) -> dict:
    """What one forward pass of what `stream` takes shows: tensors (). All ranks of a sharded model
    must call it."""
    found = dict(
        stream_var=[], branch_var=dict(attn=[], mlp=[]), logit_max=[], alpha={}, inv_std={}, gain={}
    )
    notes = [*notes_of_stream(model, found), *notes_of_experts(model, found)]
    notes.append((model.final_norm, lambda args, y: y[:, :1]))  # the logits are not needed
    training, flex = model.training, model.runtime.flex_attention
    try:
        # without the stance FSDP's compiled parts would recompile with the hooks
        note_logits = NoteLogits(found["logit_max"], model.config.causal, *inputs[1:])
        with watch(notes), note_logits, torch.compiler.set_stance("force_eager"):
            model.runtime.flex_attention = False  # eager, it would keep all attention weights
            model.eval()(inputs[0], None, *inputs[1:])
    finally:
        model.train(training)
        model.runtime.flex_attention = flex
    return found


def notes_of_stream(model: Transformer, found: dict):
    """For `watch`: stream_var, branch_var, alpha, inv_std, gain, the gains of block_norm, and
    embedding."""

    def note_stream(args, output):
        found["stream_var"].append(variance(args[0]))

    def note_dyt(name, slot, args, output):
        alpha = slot.alpha
        found["alpha"][name] = alpha[0].clone() if torch.is_tensor(alpha) else alpha
        found["inv_std"][name] = 1 / upcast(args[0]).std(correction=0)

    def note_gains(args, output):
        for name, gain in gain_vectors(model).items():
            found["gain"][name] = [gain.square().mean().sqrt(), gain.min(), gain.max()]
        norms = {
            f"{branch}_gain": [joint_gain(getattr(b, branch)) for b in model.blocks]
            for branch in ("attn", "mlp")
        }
        found.update(block_norm=norms, embedding=smallest_row(model))

    for block in model.blocks:
        yield block.attn, note_stream
        for branch, values in found["branch_var"].items():
            yield (
                getattr(block, branch).mid,
                lambda args, y, values=values: values.append(variance(y)),
            )
    yield model.final_norm, note_stream
    # FSDP keeps all gains and the embedding gathered through the forward
    yield model.final_norm, note_gains
    for name, slot in model.named_modules():
        if isinstance(slot, Slot) and slot.norm == "dyt":
            yield slot, partial(note_dyt, name, slot)


class NoteLogits(TorchFunctionMode):
    """Inside, the largest logit of each attention goes into a list."""

    def __init__(self, logits: list, causal: bool, positions=None):
        super().__init__()
        self.logits, self.causal, self.positions = logits, causal, positions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            q, k = upcast(args[0]), upcast(args[1])
            self.logits.append(largest_logit(q, k, self.positions, self.causal))
        return func(*args, **kwargs or {})


def notes_of_experts(model: Transformer, found: dict):
    """For `watch`: load, router_entropy and dropped, of a mixture of experts."""

    def note_entropy(router, args, output):
        scores = router.scores(router.logits(*args))
        scores = scores / scores.sum(-1, keepdim=True)
        found["router_entropy"].append(torch.special.entr(scores).sum(-1).mean())

    def note_load(args, output):
        rows, _, product = args
        ends = product.keywords["routes"].ends
        found["load"].append(list(torch.diff(ends, prepend=ends.new_zeros(1)) / len(rows)))
        found["dropped"].append(len(rows) - ends[-1])

    if model.config.n_expert:
        found |= dict(load=[], router_entropy=[], dropped=[])
        for block in model.blocks:
            yield block.mlp.f.router, partial(note_entropy, block.mlp.f.router)
            yield block.mlp.f.experts, note_load


def fetch_numbers(tree, dtype=torch.float64):
    """`tree`, nested dicts and lists, with its tensors () as floats of six digits, fetched at once,
    in `dtype`."""
    leaves, spec = tree_flatten(tree)
    fetched = iter(torch.stack([x.to(dtype) for x in leaves if torch.is_tensor(x)]).tolist())
    return tree_unflatten(
        [float(f"{next(fetched):.6g}") if torch.is_tensor(x) else x for x in leaves], spec
    )


def power_sums(t, dtype) -> list:
    """[Σ t², Σ t⁴], added up in `dtype`: fourth powers of small gradients would be 0 in fp32."""
    square = fourth = t.new_zeros((), dtype=dtype)
    for piece in t.flatten().split(PIECE):
        squares = piece.to(dtype).square()
        square = square + squares.sum()
        fourth = fourth + squares.square().sum()
    return [square, fourth]


def sample(p) -> tuple:
    """(a copy of every n-th entry of p's rows in this process; n). They are equally often of each
    column, because n shares no factor with the row length."""
    n = math.ceil(p.numel() / SAMPLE)
    columns = p.numel() // len(p)
    while math.gcd(n, columns) > 1:
        n += 1
    return local_shard(p.detach()).flatten()[::n].clone(), n


class Tracker:
    """Makes row["track"] of a step: called `before` and `after` it. All processes must call all of
    its methods."""

    def __init__(self, model: Transformer, optimizer, data, config, env):
        self.model, self.env, self.clip = model, env, config.grad_clip
        self.dtype = torch.float32 if env.device.type == "mps" else torch.float64  # mps has no fp64
        # {role: parameters}, {parameter: old sample}, {parameter: name}
        self.roles, self.old, self.names = {}, {}, {}
        # not model.parameters(): FSDP may swap those for gathered ones
        for group in optimizer.param_groups:
            if group["role"] != "balance":  # no loss has its gradient
                self.roles.setdefault(group["role"], []).extend(group["params"])
            self.names |= zip(group["params"], group["param_names"], strict=True)
        counts = [sum(p.numel() for p in params) for params in self.roles.values()]
        self.counts = torch.tensor(counts, dtype=self.dtype, device=env.device)
        rows = data.validation(config.eval_tokens)[
            : min(config.batch_size, max(1, TOKENS // data.block_size))
        ]
        self.inputs = model.inputs(*env.put(*env.pin(*data.val_batch(rows, len(rows)))))

    def before(self) -> None:
        """Must be called before a step that is to be tracked."""
        self.old = {p: sample(p)[0] for params in self.roles.values() for p in params}

    @torch.no_grad()
    def after(self, grad_norm, found_inf) -> dict:
        """row["track"] of the step just made, whose StepResult has these tensors. The host waits
        for the device."""
        sums = torch.stack([self.sums(p) for params in self.roles.values() for p in params])
        group = shard_group(next(iter(self.old)))
        if group:  # under HSDP every copy of the model adds its own
            sums = self.env.sum(sums) * (dist.get_world_size(group) / self.env.world_size)
        norms = self.block_norms(dict(zip(map(self.names.get, self.old), sums[:, 2], strict=True)))
        sums = torch.stack(
            [part.sum(0) for part in sums.split([len(params) for params in self.roles.values()])]
        )
        square, fourth, weight, old, change = sums.unbind(1)
        # NaN, in the row null, for a skipped step
        valid = torch.where(found_inf, math.nan, 1.0).to(self.dtype)
        # p.grad was scaled by this
        clipped = (self.clip / (grad_norm + 1e-6)).clamp(max=1.0) if self.clip else 1.0
        step = dict(
            grad_norm=valid * square.sqrt() / clipped,
            grad_kurtosis=valid * self.counts * fourth / square.square(),
            update_ratio=valid * (change / old).sqrt(),
            weight_norm=weight.sqrt(),
        )
        self.old = {}
        found = {
            name: dict(zip(self.roles, by_role.unbind(), strict=True))
            for name, by_role in step.items()
        }
        seen = probe(self.model, *self.inputs)
        seen["block_norm"] |= norms
        return fetch_numbers(found | seen, self.dtype)

    def block_norms(self, squares: dict) -> dict:
        """{a type of `matrix_types`: [‖W‖ of a block's matrices as one]}, from {name: Σ w² of all
        processes}."""
        types, norms = matrix_types(self.model), {}
        for name in filter(types.get, squares):
            norms.setdefault(types[name], [0.0] * len(self.model.blocks))[
                int(name.split(".")[1])
            ] += squares[name]
        return {kind: [square**0.5 for square in its] for kind, its in norms.items()}

    def sums(self, p):
        """(5,): Σ g², Σ g⁴, Σ w²; from the sample, Σ w² before the step and Σ Δw²: of p's rows in
        this process."""
        old, (new, n), gradient = (
            self.old[p],
            sample(p),
            torch.zeros_like(p) if p.grad is None else p.grad,
        )
        weights = (local_shard(p.detach()), 1), (old, n), (new - old, n)
        squares = [torch.linalg.vector_norm(w).to(self.dtype).square() * k for w, k in weights]
        return torch.stack([*power_sums(local_shard(gradient), self.dtype), *squares])
