"""What one of 64 processes sends in a step: the table of docs/scale.md. The processes are fake, so
nothing arrives."""

import json
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.run import parallel
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from support.processes import Forked
from support.runs import ROOT

BLOCKS, MICRO_BATCHES, WORLD, WIDTH = 4, 4, 64, 128
KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce",
    "allreduce_": "sum",
    "all_reduce": "sum",
}
SHAPES, GROUPS = 4, 6  # of matrices in Muon's groups: q k, v o, up, down; groups of Adam-mini

ONCE, EACH = BLOCKS + 1, BLOCKS * MICRO_BATCHES + 1  # messages of the blocks and of the root group
FSDP = dict(gather=ONCE, reduce=ONCE, sum=1)  # the sum: the norm of the gradient
BY_BLOCKS = dict(gather=2 * EACH - 1, reduce=EACH, sum=1)
HEAD = dict(tie_weights=False)
# parallel, size of a shard, whether all is kept or (DDP) in buckets, optimizer, flags: how many
# messages of a kind
WAYS = {
    "DDP by blocks": ("ddp", 0, True, "adamw", {}, dict(bucket=7)),
    "DDP, one graph": ("ddp", 0, False, "adamw", {}, dict(sum=1)),
    "DDP, one graph, Muon": ("ddp", 0, False, "muon", {}, dict(sum=1, gather=SHAPES)),
    "FSDP": ("fsdp", 0, True, "adamw", {}, FSDP),
    "FSDP, a head of its own": (
        "fsdp",
        0,
        True,
        "adamw",
        HEAD,
        dict(gather=ONCE + 1, reduce=ONCE + 1, sum=1),
    ),
    "FSDP, Adam-mini": ("fsdp", 0, True, "adam_mini", {}, FSDP | dict(sum=1 + GROUPS)),
    "FSDP, Muon": ("fsdp", 0, True, "muon", {}, FSDP | {"exchange": 2 * SHAPES}),
    "FSDP by blocks": ("fsdp", 0, False, "adamw", {}, BY_BLOCKS),
    "HSDP, 8 × 8": ("fsdp", 8, True, "adamw", {}, FSDP | dict(sum=1 + ONCE)),
    "HSDP, 8 × 8, by blocks": ("fsdp", 8, False, "adamw", {}, BY_BLOCKS | dict(sum=1 + ONCE)),
}


class Note(TorchDispatchMode):
    """Every message and matrix product: (kind, bytes of the whole tensor)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its parts come here too
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves(args) if torch.is_tensor(t)]
        if name in KINDS:
            self.found.append((KINDS[name], max(map(size, tensors))))
        elif "c10d" in func.namespace and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.found.append((name, 0))
        elif name in ("mm", "addmm"):
            self.found.append(("product", 0))
        return func(*args, **kwargs or {})

    def bucket(self, state, bucket):
        """In place of DDP's own message, which cannot be fake."""
        self.found.append(("bucket", size(bucket.buffer())))
        arrived = torch.futures.Future()
        arrived.set_result(bucket.buffer())
        return arrived

    def exchange(self, received, sent, *args, **kwargs):
        """In place of `dist.all_to_all_single`, which takes no fake messages of uneven parts."""
        self.found.append(("exchange", max(size(received), size(sent))))


def size(t: torch.Tensor) -> int:
    return t.numel() * t.element_size()


def count_messages(folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "BUCKET_MB", 0.5)
        found = {name: messages_of(*way[:-1], patch) for name, way in WAYS.items()}
    (folder / "messages.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def messages_of(kind, shard_size, keep, optimizer, flags, patch) -> tuple:
    """(number of parameters, what `Note` finds in the third step: DDP has arranged its buckets
    then)."""
    env = Env(
        0, WORLD, torch.device("cpu"), torch.bfloat16, True, timedelta(seconds=60), parallel=kind
    )
    fill_defaults(config := TrainConfig(optimizer=optimizer))
    sizes = dict(n_layer=BLOCKS, n_head=2, n_embd=WIDTH, block_size=16, vocab_size=1024)
    model = GPT.empty(GPTConfig(**sizes | flags))
    if kind == "fsdp":
        parallel.shard_model(model, shard_size, env, keep)
    with (notes := Note()):
        model.to_empty(device="cpu").init_weights()
    assert notes.found == []
    prepare_model(model, config, env)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    trainer = Trainer(model, make_optimizer(model, config), scaler, 1, 1.0)
    if kind == "ddp" and keep:
        trainer.step_model = parallel.data_parallel(model, env)
        trainer.step_model.register_comm_hook(
            None, lambda state, bucket: notes.bucket(state, bucket)
        )
    elif kind == "ddp":
        trainer.average_gradients = parallel.averaging(model)
    patch.setattr(
        dist, "all_to_all_single", lambda *args, **kwargs: notes.exchange(*args, **kwargs)
    )
    tokens = torch.zeros(MICRO_BATCHES, 16, dtype=torch.long)
    for _ in range(3):
        notes = Note()
        with notes:
            training_step(trainer, (tokens, tokens))
    return model.num_params(), notes.found


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    child = Forked(folder / "log", count_messages, folder)
    child.communicate(timeout=200)
    assert child.returncode == 0, (folder / "log.err").read_text()
    return json.loads((folder / "messages.json").read_text())


@pytest.mark.deep
@pytest.mark.parametrize("name", WAYS)
def test_a_step_sends_no_message_more(name, messages):
    """As many as there are blocks, micro batches, shapes and groups. The page has the same
    numbers."""
    n, found = messages[name]
    kinds = [kind for kind, _ in found]
    counts = {kind: kinds.count(kind) for kind in kinds if kind != "product"}
    assert counts == WAYS[name][-1]
    first, last = kinds.index("product"), len(kinds) - kinds[::-1].index("product")
    parts = found[:first], found[first:last], found[last:]
    before, beside, after = (sum(sent for _, sent in part) / n for part in parts)
    numbers = ", ".join(f"{count} × {kind}" for kind, count in sorted(counts.items()))
    row = f"| {name} | {numbers} | {before:.2f} | {beside:.2f} | {after:.2f} |"
    assert row in (ROOT / "docs" / "scale.md").read_text(), row
