"""Watching what torch does: which operators run, how much memory their results take, what is saved
for backward."""

from collections import Counter
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.models import error, tokens

# operators that wait for a GPU
HOST_SYNCS = ("_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero")
# positions of ignored targets, of the 14 targets of a batch of 2 × 7
IGNORED = {
    "none": [],
    "some": [3, 7],
    "a whole chunk": list(range(7)),
    "all but one": [*range(5), *range(6, 14)],
}


class Watch(TorchDispatchMode):
    """Sees every operator: `calls` counts them, `shapes` has the shapes of their results,
    `multiplied` the dtypes that matrix products have read, and `peak` is the largest number of
    bytes of results that were alive at the same time."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.shapes = set()
        self.multiplied = set()
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.calls[name := func.overloadpacket.__name__] += 1
        self.multiplied |= {t.dtype for t in args} if name in ("mm", "addmm", "bmm") else set()
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                self.shapes.add(t.shape)
                storage = t.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {
            key: (ref, size) for key, (ref, size) in self.live.items() if not ref.expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


class NoWaiting(Watch):
    """Fails where the host would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in HOST_SYNCS, func
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def fresh_compiler():
    """Nothing compiled before; a graph break or a second compilation is an error. Also a decorator
    of tests."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compiled_and_kept(module) -> tuple:
    """(the module compiled as inductor would split it into a forward and a backward pass; the
    tensors that the forward pass makes for the backward pass, known after a call)."""
    kept = []

    def source(node):
        """What a view is one of."""
        return source(node.args[0]) if getattr(node.target, "is_view", False) else node

    def forward(graph, _):
        _, *saved = graph.graph.output_node().args[0]  # the result is none of them
        made = {source(node) for node in saved if node is not None}
        kept.extend(
            t
            for node in made
            if node.op != "placeholder" and torch.is_tensor(t := node.meta["val"])
        )
        return make_boxed_func(graph)

    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    how = dict(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=partition,
    )
    backend = aot_autograd(**how, decompositions=select_decomp_table())
    return torch.compile(module, backend=backend, fullgraph=True, dynamic=False), kept


def saved_for_backward(f) -> list:
    """Number of entries of each tensor that f() saves for the backward pass."""
    sizes = []

    def note(t):
        sizes.append(t.numel())
        return t

    with saved_tensors_hooks(note, lambda t: t):
        f()
    return sizes


# --------------------------------------------------------------------------- the loss the plain way


def plain_loss(logits, targets):
    """Mean over the targets that count, 0 if none does, from all logits, by torch's
    cross-entropy."""
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    return total / (targets != -1).sum().clamp(min=1)


def with_plain_loss(model):
    """The model, but its loss computed from all logits."""
    return standing_for(model, lambda idx, targets: (None, plain_loss(model(idx)[0], targets)))


def standing_for(model, f):
    """f, with the two attributes that `support.models.gradients` needs of a model."""
    call = partial(f)
    call.zero_grad, call.named_parameters = model.zero_grad, model.named_parameters
    return call


def batch_ignoring(positions):
    """idx and targets (2, 7); the targets at these positions are ignored."""
    idx, targets = tokens(2, 7), tokens(2, 7, seed=2)
    targets.view(-1)[positions] = -1
    return idx, targets


def assert_same_gradients(ours, theirs, tolerance):
    """(loss, gradients) of two models: each tensor relative to its largest entry; a tiny one, to
    1e-3 of the largest of all."""
    assert error(ours[0], theirs[0]) <= tolerance
    assert ours[1].keys() == theirs[1].keys()
    largest = max(g.abs().max().item() for g in theirs[1].values())
    for name, grad in ours[1].items():
        assert error(grad, theirs[1][name], floor=1e-3 * largest) <= tolerance, name
