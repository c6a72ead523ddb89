"""What FSDP2 needs in a step, by the plan and as it is: process 0 of 16 on the CPU, with torch's fake process group.

    python docs/scripts/compare_fsdp_memory.py    # some seconds

No message is sent, but the memory is real. All storages that exist are added up after each operator. 4 blocks, 128
wide, context 32, AdamW. Prints the table of docs/results/plan.md.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from layers.sharding import local_shard
from model import GPT, GPTConfig
from nanodnt.engine import prepare_model, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.plan.memory import Timeline
from nanodnt.plan.strategies import make_strategy, state_tensors
from nanodnt.run.environment import Env
from nanodnt.run.parallel import shard_model
from nanodnt.settings import TrainConfig

WORLD, SIZE = 16, dict(n_layer=4, n_head=4, n_embd=128, block_size=32)
MODELS = {  # flags, micro batch, activation checkpointing
    "vocabulary 64, micro batch 8": (dict(vocab_size=64), 8, False),
    "vocabulary 2000, micro batch 4, activation checkpointing": (dict(vocab_size=2000), 4, True),
    "16 experts, vocabulary 64, micro batch 8": (dict(n_expert=16, n_ff=128, vocab_size=64), 8, False),
    "6 experts, vocabulary 64, micro batch 8": (dict(n_expert=6, n_ff=128, vocab_size=64), 8, False),
}
STEPS = {"fp32": (torch.float32, 1), "bf16": (torch.bfloat16, 1), "bf16, two micro batches": (torch.bfloat16, 2)}


class Storages(TorchDispatchMode):
    """`peak`: the most bytes in all storages seen so far, of which FSDP resizes some, that exist after an operator."""

    def __init__(self, tensors):
        super().__init__()
        self.seen, self.peak = {}, 0
        self.see(tensors)

    def see(self, tensors) -> None:
        for t in tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                storage = local_shard(t).untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.see((args, kwargs))
        result = func(*args, **kwargs or {})
        self.see(result)
        self.seen = {key: ref for key, ref in self.seen.items() if not ref.expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.seen.values())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result


def predicted(flags, config, dtype, micro: int, accumulates: bool, keep: bool) -> float:
    """Bytes by the plan."""
    model = prepare_model(GPT.empty(flags), config, Env(0, 1, torch.device("meta"), dtype, False))
    optimizer = make_optimizer(model, config)
    strategy = make_strategy("fsdp", model, optimizer, config, WORLD, float("inf") if keep else 1)
    return Timeline(model, optimizer, config, config.activation_checkpointing).peak(micro, accumulates, strategy).total


def measured(flags, config, dtype, micro: int, accumulation: int, keep: bool) -> float:
    """Bytes in the second step of a run."""
    env, model = Env(0, WORLD, torch.device("cpu"), dtype, True, parallel="fsdp"), GPT.empty(flags)
    shard_model(model, 0, env, keep)
    model.to_empty(device="cpu").init_weights()
    optimizer = make_optimizer(prepare_model(model, config, env), config)
    tokens = torch.randint(flags.vocab_size, (micro * accumulation, flags.block_size))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        with Storages([*model.parameters(), *state_tensors(optimizer)]) as found:
            scaler = torch.amp.GradScaler("cpu", enabled=False)
            training_step(model, model, optimizer, scaler, (tokens, tokens), micro, config)
    return found.peak


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    print("| | all kept: predicted | measured | ratio | by blocks: predicted | measured | ratio |\n|" + "---|" * 7)
    for name, (changes, micro, checkpointing) in MODELS.items():
        flags, config = GPTConfig(**SIZE, **changes), TrainConfig(activation_checkpointing=checkpointing)
        fill_defaults(config)
        for step, (dtype, accumulation) in STEPS.items():
            cells = [f"{name}, {step}"]
            for keep in (True, False):
                a = predicted(flags, config, dtype, micro, accumulation > 1, keep)
                b = measured(flags, config, dtype, micro, accumulation, keep)
                cells += [f"{a / 1e6:.1f} MB", f"{b / 1e6:.1f} MB", f"{a / b:.2f}"]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
