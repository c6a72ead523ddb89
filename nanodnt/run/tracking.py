"""Measurements inside the network: row["track"] of metrics.jsonl, every `track_interval` steps.

`probe` measures the weights after the step by one forward pass, `Tracker.after` the step itself, by
role. The numbers, with shapes: docs/analysis.md, "While it trains". Tracking changes no bit of a
run, and draws no random number.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from layers.attention import visible_keys
from layers.ops import upcast
from layers.sharding import local_shard, shard_group
from layers.slot import RestSlot, Slot
from model import MLP, Attention, Transformer
from nanodnt.data import PreparedData
from nanodnt.optim import Optimizer
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig

# Most tokens that the probe reads; but at least one sequence, and not more sequences than a step.
TOKENS = 4096
SAMPLE = 2**16  # most entries of a parameter on which its update is measured
# Entries of a gradient, and attention logits, that are worked on at once: bounds memory.
PIECE = 2**24
# {matrix of attention or FFN: its type}; gate and up of SwiGLU are both w1
MATRICES = {"q": "q", "k": "k", "v": "v", "o": "o", "gate": "w1", "up": "w1", "down": "w2"}

# Gets the arguments and the output of a module's forward. Its result, if it is not None, replaces
# the output.
Note = Callable[[tuple, Any], Any]

# -------------------------------------------------------- measures of one tensor, or of the weights


def variance(x: Tensor) -> Tensor:
    """Variance over the channels of a token, mean over tokens: (..., C) → ()."""
    return upcast(x).var(-1, correction=0).mean()


def largest_logit(
    q: Tensor, k: Tensor, documents: Tensor | None = None, causal: bool = True
) -> Tensor:
    """Largest |q·k|/√head_dim over heads and pairs of a query and a key that it sees: q (B, H, T,
    head_dim), k (B, H_kv, T, head_dim) → (). `documents`: positions in them, (B, T); None: one
    document a row. Not `causal`: each query sees all keys."""
    B, H, T, head_dim = q.shape
    q = q.unflatten(1, (k.shape[1], -1))  # (B, H_kv, H / H_kv, T, head_dim)
    k = k[:, :, None]
    positions = torch.arange(T, device=q.device)
    n_queries = max(1, PIECE // (B * H * T))  # queries computed at once
    largest = q.new_zeros(())
    for i in range(0, T, n_queries):
        queries = slice(i, i + n_queries)
        # (B, H_kv, H / H_kv, queries, keys): later keys are not visible, and left out
        logits = q[..., queries, :] @ k[..., : i + n_queries, :].mT
        if causal:
            part = None if documents is None else documents[:, queries]
            logits *= visible_keys(positions[queries], part, logits.shape[-1])[:, :, None]
        largest = torch.maximum(largest, logits.abs_().max())
    return largest / head_dim**0.5


def matrix_types(model: Transformer) -> dict[str, str]:
    """{name of a block's matrix: its type, a value of MATRICES}."""
    types = {}
    for name, module in model.named_modules():
        if not isinstance(module, (Attention, MLP)):
            continue
        for part, matrix_type in MATRICES.items():
            # an MLP has no q, and a gate only under SwiGLU
            if getattr(module, part, None) is not None:
                types[f"{name}.{part}.weight"] = matrix_type
    return types


def gain_vectors(module: nn.Module) -> dict[str, Tensor]:
    """{slot name: its gain, without the constant beside it} of every slot with a learned vector:
    norms, LayerScale, Admin, HG, DP, DNP, nGPT."""
    gains = {}
    for name, slot in module.named_modules():
        if not isinstance(slot, Slot) or isinstance(slot, RestSlot):
            continue
        gain = slot.gain_vector()
        if gain is not None and gain.numel() > 1:
            gains[name] = gain
    return gains


def joint_gain(module: nn.Module) -> Tensor | float:
    """‖γ‖, a tensor (): the L2 norm of all gains in `module` as one vector; the float nan for
    none."""
    gains = list(gain_vectors(module).values())
    if not gains:
        return math.nan
    return torch.linalg.vector_norm(torch.cat(gains))


@torch.no_grad()
def smallest_row(model: Transformer) -> dict[str, Any]:
    """{"rows": d, the size of the vocabulary; "smallest": min ‖w̃‖² over the rows w of the
    embedding, w̃ = w − mean(w); "gain": `joint_gain` of the norm that comes next: the input norm,
    else block 1's first, else all gains of its attention (our choice)}. The paper sets d · smallest
    against ‖γ‖² (Blockwise LR Theorem 4.3, Fig. 6 c). {} for images: no such table."""
    if getattr(model, "wte", None) is None:
        return {}
    rows = model.wte.weight[: model.config.vocab_size]
    smallest = rows.var(1, correction=0).min() * rows.shape[1]
    attention = model.blocks[0].attn
    norm = attention
    for module in (attention.pre, model.input_norm):
        if gain_vectors(module):
            norm = module
    return {"rows": len(rows), "smallest": smallest, "gain": joint_gain(norm)}


# --------------------------------------------------------------------- measures of one forward pass


@contextmanager
def watch(notes: list[tuple[nn.Module, Note]]) -> Iterator[None]:
    """Inside, note(args, output) follows each forward of its module, or changes its output."""

    def hook(note: Note) -> Callable:
        return lambda module, args, output: note(args, output)

    with ExitStack() as hooks:
        for module, note in notes:
            hooks.enter_context(module.register_forward_hook(hook(note)))
        yield


@torch.no_grad()
def probe(model: Transformer, *inputs: Tensor | None) -> dict[str, Any]:
    """Measures of one forward pass over `inputs`, the arguments of `model.stream`: nested dicts and
    lists of tensors (). All ranks of a sharded model must call it."""
    measures = dict(
        stream_var=[], branch_var=dict(attn=[], mlp=[]), logit_max=[], alpha={}, inv_std={}, gain={}
    )
    notes = [*notes_of_stream(model, measures), *notes_of_experts(model, measures)]
    notes.append((model.final_norm, lambda args, y: y[:, :1]))  # the logits are not needed
    note_logits = NoteLogits(measures["logit_max"], model.config.causal, *inputs[1:])
    was_training = model.training
    flex = model.runtime.flex_attention
    try:
        # without the stance FSDP's compiled parts would recompile with the hooks
        with watch(notes), note_logits, torch.compiler.set_stance("force_eager"):
            model.runtime.flex_attention = False  # eager, it would keep all attention weights
            model.eval()(inputs[0], None, *inputs[1:])
    finally:
        model.train(was_training)
        model.runtime.flex_attention = flex
    return measures


def notes_of_stream(
    model: Transformer, measures: dict[str, Any]
) -> Iterator[tuple[nn.Module, Note]]:
    """For `watch`: stream_var, branch_var, alpha, inv_std, gain, the gains of block_norm, and
    embedding."""

    def note_stream(args: tuple, output: Tensor) -> None:
        measures["stream_var"].append(variance(args[0]))

    def note_branch(values: list[Tensor], args: tuple, output: Tensor) -> None:
        values.append(variance(output))

    def note_dyt(name: str, slot: Slot, args: tuple, output: Tensor) -> None:
        alpha = slot.alpha
        measures["alpha"][name] = alpha[0].clone() if torch.is_tensor(alpha) else alpha
        measures["inv_std"][name] = 1 / upcast(args[0]).std(correction=0)

    def note_gains(args: tuple, output: Tensor) -> None:
        for name, gain in gain_vectors(model).items():
            measures["gain"][name] = [gain.square().mean().sqrt(), gain.min(), gain.max()]
        measures["block_norm"] = {
            "attn_gain": [joint_gain(block.attn) for block in model.blocks],
            "mlp_gain": [joint_gain(block.mlp) for block in model.blocks],
        }
        measures["embedding"] = smallest_row(model)

    for block in model.blocks:
        yield block.attn, note_stream
        for branch, values in measures["branch_var"].items():
            yield getattr(block, branch).mid, partial(note_branch, values)
    yield model.final_norm, note_stream
    # here FSDP has all gains and the embedding gathered
    yield model.final_norm, note_gains
    for name, slot in model.named_modules():
        if isinstance(slot, Slot) and slot.norm_kind == "dyt":
            yield slot, partial(note_dyt, name, slot)


class NoteLogits(TorchFunctionMode):
    """Inside, the largest logit of each attention goes into a list."""

    def __init__(self, logits: list[Tensor], causal: bool, documents: Tensor | None = None) -> None:
        super().__init__()
        self.logits = logits
        self.causal = causal
        self.documents = documents

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            q = upcast(args[0])
            k = upcast(args[1])
            self.logits.append(largest_logit(q, k, self.documents, self.causal))
        return func(*args, **(kwargs or {}))


def notes_of_experts(
    model: Transformer, measures: dict[str, Any]
) -> Iterator[tuple[nn.Module, Note]]:
    """For `watch`: load, router_entropy and dropped, of a mixture of experts."""

    def note_entropy(router: nn.Module, args: tuple, output: Any) -> None:
        scores = router.scores(router.logits(*args))
        scores = scores / scores.sum(-1, keepdim=True)
        measures["router_entropy"].append(torch.special.entr(scores).sum(-1).mean())

    def note_load(args: tuple, output: Any) -> None:
        rows, _, product = args
        ends = product.keywords["routes"].ends
        load = torch.diff(ends, prepend=ends.new_zeros(1)) / len(rows)
        measures["load"].append(list(load))
        measures["dropped"].append(len(rows) - ends[-1])

    if not model.config.n_expert:
        return
    measures.update(load=[], router_entropy=[], dropped=[])
    for block in model.blocks:
        router = block.mlp.f.router
        yield router, partial(note_entropy, router)
        yield block.mlp.f.experts, note_load


# ------------------------------------------------------------------------------- measures of a step


def fetch_numbers(tree: Any, dtype: torch.dtype = torch.float64) -> Any:
    """`tree`, nested dicts and lists, with its tensors () as floats of six digits, fetched at once,
    in `dtype`."""
    leaves, spec = tree_flatten(tree)
    tensors = [x.to(dtype) for x in leaves if torch.is_tensor(x)]
    numbers = iter(torch.stack(tensors).tolist())
    for i, x in enumerate(leaves):
        if torch.is_tensor(x):
            leaves[i] = float(f"{next(numbers):.6g}")
    return tree_unflatten(leaves, spec)


def power_sums(t: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """[Σ t², Σ t⁴], added up in `dtype`: fourth powers of small gradients would be 0 in fp32."""
    square = t.new_zeros((), dtype=dtype)
    fourth = square
    for piece in t.flatten().split(PIECE):
        squares = piece.to(dtype).square()
        square = square + squares.sum()
        fourth = fourth + squares.square().sum()
    return [square, fourth]


class Sample(NamedTuple):
    """Every n-th entry of a parameter's rows in this process."""

    entries: Tensor  # a copy
    n: int


def sample(p: Tensor) -> Sample:
    """Sample at most about SAMPLE entries of p. They are equally often of each column, because n
    shares no factor with the row length."""
    n = math.ceil(p.numel() / SAMPLE)
    columns = p.numel() // len(p)
    while math.gcd(n, columns) > 1:
        n += 1
    return Sample(local_shard(p.detach()).flatten()[::n].clone(), n)


class Tracker:
    """Makes row["track"] of a step: called `before` and `after` it. All processes must call all of
    its methods."""

    def __init__(
        self,
        model: Transformer,
        optimizer: Optimizer,
        data: PreparedData,
        config: TrainConfig,
        env: Env,
    ) -> None:
        self.model = model
        self.env = env
        self.grad_clip = config.grad_clip
        self.dtype = torch.float32 if env.device.type == "mps" else torch.float64  # mps has no fp64
        self.roles: dict[str, list[Tensor]] = {}  # {role: its parameters}
        self.names: dict[Tensor, str] = {}  # {parameter: its name}
        self.old: dict[Tensor, Tensor] = {}  # {parameter: entries of its sample before the step}
        # not model.parameters(): FSDP may swap those for gathered ones
        for group in optimizer.param_groups:
            self.names.update(zip(group["params"], group["param_names"], strict=True))
            if group["role"] != "balance":  # no loss has its gradient
                self.roles.setdefault(group["role"], []).extend(group["params"])
        counts = [sum(p.numel() for p in params) for params in self.roles.values()]
        self.counts = torch.tensor(counts, dtype=self.dtype, device=env.device)
        n_rows = min(config.batch_size, max(1, TOKENS // data.block_size))
        rows = data.validation(config.eval_tokens)[:n_rows]
        batch = env.put(*env.pin(*data.val_batch(rows, len(rows))))
        self.inputs = model.inputs(*batch)

    def before(self) -> None:
        """Must be called before a step that is to be tracked."""
        for params in self.roles.values():
            for p in params:
                self.old[p] = sample(p).entries

    @torch.no_grad()
    def after(self, grad_norm: Tensor, found_inf: Tensor) -> dict[str, Any]:
        """row["track"] of the step just made, with these tensors of its StepResult. The host waits
        for the device."""
        sums = torch.stack([self.sums(p) for p in self.old])  # (parameters, 5)
        group = shard_group(next(iter(self.old)))
        if group:  # under HSDP every copy of the model adds its own
            sums = self.env.sum(sums) * (dist.get_world_size(group) / self.env.world_size)
        weight_squares = {self.names[p]: row[2] for p, row in zip(self.old, sums, strict=True)}
        norms = self.block_norms(weight_squares)
        n_params = [len(params) for params in self.roles.values()]
        by_role = torch.stack([part.sum(0) for part in sums.split(n_params)])  # (roles, 5)
        square, fourth, weight, old, change = by_role.unbind(1)
        # NaN, in the row null, for a skipped step
        valid = torch.where(found_inf, math.nan, 1.0).to(self.dtype)
        clipped = 1.0  # factor by which p.grad was scaled
        if self.grad_clip:
            clipped = (self.grad_clip / (grad_norm + 1e-6)).clamp(max=1.0)
        columns = dict(
            grad_norm=valid * square.sqrt() / clipped,
            grad_kurtosis=valid * self.counts * fourth / square.square(),
            update_ratio=valid * (change / old).sqrt(),
            weight_norm=weight.sqrt(),
        )
        self.old = {}
        measures = {}
        for name, column in columns.items():
            measures[name] = dict(zip(self.roles, column.unbind(), strict=True))
        measures.update(probe(self.model, *self.inputs))
        measures["block_norm"].update(norms)
        return fetch_numbers(measures, self.dtype)

    def block_norms(self, squares: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        """{a type of `matrix_types`: [‖W‖ of a block's matrices as one]}, from {name: Σ w² of all
        processes}."""
        types = matrix_types(self.model)
        sums = {}
        for name, square in squares.items():
            if name in types:
                block = int(name.split(".")[1])
                by_block = sums.setdefault(types[name], [0.0] * len(self.model.blocks))
                by_block[block] += square
        norms = {}
        for matrix_type, by_block in sums.items():
            norms[matrix_type] = [square**0.5 for square in by_block]
        return norms

    def sums(self, p: Tensor) -> Tensor:
        """(5,): Σ g², Σ g⁴, Σ w²; from the sample, Σ w² before the step and Σ Δw²: of p's rows in
        this process."""
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        old = self.old[p]
        new, n = sample(p)
        return torch.stack(
            [
                *power_sums(local_shard(gradient), self.dtype),
                self.square_sum(local_shard(p.detach())),
                self.square_sum(old) * n,
                self.square_sum(new - old) * n,
            ]
        )

    def square_sum(self, t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t).to(self.dtype).square()
