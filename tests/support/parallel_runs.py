"""The runs that tests/distributed/ looks at: each number of processes is started once, and makes all of its runs.

A run's folder is named "CASE, LAUNCH"; launches are one, ddp2, fsdp2, fsdp3, fsdp4 and others.
"""

import shutil
from functools import partial

import torch

from nanodnt.data.windows import PreparedText
from support.processes import play
from support.runs import spoil_gradients

PRE = dict(pre_norm="both", mid_norm="none", input_norm=False)
POST = dict(pre_norm="none", mid_norm="none", post_norm="both", input_norm=False)
UNIFIED = dict(PRE, qk_norm=False, gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input")
UNIFIED |= dict(mlp="swiglu", pos="rope", n_kv_head=1, tie_weights=False)
CASES = {  # DNT (S5) where nothing else is said
    "adamw, Pre-LN": dict(PRE, norm="layernorm", bias=True),
    "blockwise, sigmaReparam": dict(PRE, sigma_reparam=True, qk_norm=False, blockwise_lr=True, learning_rate=2e-3),
    "msgdw, DNT": dict(optimizer="msgdw", learning_rate=0.5, grad_clip=0.5),
    "nesterov, DyT": dict(
        PRE, norm="dyt", dyt_bias=True, embed_scale=True, optimizer="msgdw", learning_rate=0.1, nesterov=True
    ),
    "dampening, LNS": dict(PRE, lns="norm", optimizer="msgdw", learning_rate=0.5, dampening=0.5),
    "muon, unified": dict(UNIFIED, optimizer="muon"),
    "adam_mini, Admin": dict(POST, admin=True, optimizer="adam_mini"),
    "adamw, unified, sigmaReparam": dict(UNIFIED, sigma_reparam=True, micro_batch_size=2),
}
FAST = ["blockwise, sigmaReparam", "muon, unified"]  # the cases of the fast suite
DEEP = [case for case in CASES if case not in FAST]
ON_THREE, ON_FOUR = ["blockwise, sigmaReparam", "nesterov, DyT"], ["msgdw, DNT", "muon, unified"]
DDP_ON_THREE = ["muon, unified", "adam_mini, Admin", "dampening, LNS", "blockwise, sigmaReparam"]
BAD = 8  # in this step of each of these runs, the gradient is not finite
SPIKE = dict(loss_spike=0.5, save_interval=5)
SHORT = dict(CASES["adam_mini, Admin"], max_iters=8, micro_batch_size=3, parallel="fsdp")
ONE_BAD = dict(eval_interval=10, save_interval=9, micro_batch_size=2, batch_size=8, block_size=32)
ONE_BAD |= dict(eval_tokens=15 * 32)  # 15 windows: two ranks have 8 and 7
ONE_BAD_STEP = dict(value=torch.nan, bad_steps={14}, name="wte.weight")
REFUSED = {
    "none": dict(parallel="none"),
    "fp16": dict(parallel="fsdp", dtype="float16"),
    "thirds": dict(parallel="fsdp", fsdp_shard_size=3),
}


# ------------------------------------------------------------------------------------------------------------ parts


def make_cases(rank, world, folder, launch, names, **config):
    """Runs of CASES in one launch, with a bad gradient on the last process. Under DDP it is on all processes: it is put
    there after DDP has averaged, and is the same everywhere. (`make_one_bad` puts it on one of them before.)"""
    everywhere = rank == world - 1 or launch.startswith("ddp")
    for name in names:
        flags = CASES[name] | config
        if launch == "fsdp2" and name == "msgdw, DNT":
            flags |= dict(micro_batch_size=3)  # with accumulation
        play(rank, world, folder / f"{name}, {launch}", lambda step: everywhere and step == BAD, **flags)


def make_one_bad(rank, world, out, dataset, **config):
    """A run whose last process has a bad gradient in one step, before DDP averages."""
    step = ONE_BAD_STEP if rank == world - 1 else ONE_BAD_STEP | dict(bad_steps=())
    play(rank, world, out, within=spoil_gradients(**step), dataset=dataset, **ONE_BAD | config)


def other_targets(batch):
    """PreparedText.batch whose batch 16 has targets that never follow (steps of the walk are 1, 2 and 5)."""

    def tampered(self, step, *args):
        x, y = batch(self, step, *args)
        return x, (y + 7) % 50 if step == 16 else y

    return tampered


def make_spike(rank, world, folder, launch, **config):
    patch = (PreparedText, "batch", other_targets(PreparedText.batch))
    play(rank, world, folder / f"spike, {launch}", patches=[patch], **SPIKE | config)


def make_others(rank, world, folder, launch, dataset, **config):
    """Runs in bf16, from a file's weights, and one that only evaluates."""
    config = dict(config, dataset=dataset)
    bf16 = dict(dtype="bfloat16", branch_scale="layerscale", max_iters=6, micro_batch_size=6)
    play(rank, world, folder / f"bf16, {launch}", **bf16 | config)
    begun = dict(init_from=folder / "muon, unified, one" / "last.pt", max_iters=4)
    play(rank, world, folder / f"from a file, {launch}", **begun | config)
    play(rank, world, folder / f"eval_only, {launch}", eval_only=True, **begun | config)


def make_chain(rank, world, folder, name, cases, until, **config):
    """Runs that one launch continues from what another has saved."""
    for case in cases:
        play(rank, world, folder / f"{case}, {name}", init_from="auto", max_iters=until, **CASES[case] | config)


def make_stopped(rank, world, folder, dataset):
    """A short FSDP run, that gathers and reduces in every micro batch; the same stopped and resumed, with activation
    checkpointing, and compiled."""
    by_blocks = ("nanodnt.run.parallel.choose_kept", lambda *_: (False, "by blocks, as asked by a test"))
    go = partial(play, rank, world, dataset=dataset, patches=[by_blocks])
    go(folder / "short", **SHORT)
    go(folder / "recomputed", activation_checkpointing=True, **SHORT)
    go(folder / "stopped", stop_in=5, **SHORT)
    if rank == 0:
        shutil.copy(folder / "stopped" / "last.pt", folder / "stopped.pt")
    go(folder / "stopped", init_from="resume", **SHORT)
    compile = (torch, "compile", partial(torch.compile, backend="eager"))
    small = SHORT | dict(n_layer=1, max_iters=2)
    go(folder / "eager", **small)
    go(folder / "compiled", patches=[by_blocks, compile], **small | dict(compile=True))


def make_failures(rank, world, folder, dataset):
    """Runs that end with an error: too many bad gradients, on either process; settings that do not fit."""
    go = partial(play, rank, world, dataset=dataset)
    for bad in (0, 1):
        out = folder / f"bad rank {bad}"
        go(out, lambda step, bad=bad: rank == bad and step > 3, max_skipped=3, parallel="fsdp")
    for name, flags in REFUSED.items():
        go(folder / name, **flags)


# ------------------------------------------------------------------------------------------- what each world makes


def on_one(folder, dataset):
    go = partial(play, 0, 1, dataset=dataset)
    make_cases(0, 1, folder, "one", FAST, dataset=dataset)
    make_one_bad(0, 1, folder / "one bad, one", dataset, micro_batch_size=8)
    make_spike(0, 1, folder, "one", dataset=dataset)
    make_others(0, 1, folder, "one", dataset)
    go(folder / "muon, unified, smooth", **CASES["muon, unified"])
    make_chain(0, 1, folder, "short chain", ["muon, unified"], 4, dataset=dataset)


def on_two(rank, world, folder, dataset):
    config, fsdp = dict(dataset=dataset), dict(dataset=dataset, parallel="fsdp")
    make_cases(rank, world, folder, "ddp2", FAST, **config)
    make_cases(rank, world, folder, "fsdp2", FAST, **fsdp)
    make_one_bad(rank, world, folder / "one bad, ddp2", dataset)
    make_spike(rank, world, folder, "fsdp2", **fsdp)
    make_others(rank, world, folder, "fsdp2", dataset, parallel="fsdp")
    make_chain(rank, world, folder, "short chain", ["muon, unified"], 8, micro_batch_size=2, **fsdp)
    make_chain(rank, world, folder, "short chain", ["muon, unified"], 12, **config)
    make_stopped(rank, world, folder, dataset)
    make_failures(rank, world, folder, dataset)


LONG_CHAIN = ["muon, unified", "adam_mini, Admin"]


def on_one_more(folder, dataset):
    make_cases(0, 1, folder, "one", DEEP, dataset=dataset)
    play(0, 1, folder / "adam_mini, Admin, smooth", dataset=dataset, **CASES["adam_mini, Admin"])
    make_chain(0, 1, folder, "chain", LONG_CHAIN, 4, dataset=dataset)


def on_two_more(rank, world, folder, dataset):
    make_cases(rank, world, folder, "ddp2", DEEP, dataset=dataset)
    make_cases(rank, world, folder, "fsdp2", DEEP, dataset=dataset, parallel="fsdp")
    make_spike(rank, world, folder, "ddp2", dataset=dataset)
    make_chain(rank, world, folder, "chain", LONG_CHAIN, 8, dataset=dataset, parallel="fsdp", micro_batch_size=2)


def on_three(rank, world, folder, dataset):
    make_cases(rank, world, folder, "ddp3", DDP_ON_THREE, dataset=dataset)
    make_cases(rank, world, folder, "fsdp3", ON_THREE, dataset=dataset, parallel="fsdp")
    make_chain(rank, world, folder, "chain", LONG_CHAIN, 12, dataset=dataset)


def on_four(rank, world, folder, dataset):
    make_cases(rank, world, folder, "fsdp4", ON_FOUR, dataset=dataset, parallel="fsdp")
    hsdp = dict(parallel="fsdp", fsdp_shard_size=2, micro_batch_size=1)
    make_chain(rank, world, folder, "chain", LONG_CHAIN, 16, dataset=dataset, **hsdp)
