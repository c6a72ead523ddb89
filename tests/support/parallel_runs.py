"""The runs that tests/distributed/ looks at: each number of processes is started once, and makes
all of its runs.

A run's folder is named "CASE, LAUNCH WORLD": one1, ddp2, fsdp2, …, hsdp4.

Three experts do not divide over two processes, and of two experts three processes share two: one
has none. Examples give each process another number of targets that count. An image and the one that
it is mixed with may lie on different processes, and 47 validation images divide over none.
"""

from functools import partial

import torch

from nanodnt.data.windows import PreparedText
from nanodnt.run.environment import Split
from nanodnt.run.hardware import Choice
from support.models import NGPT
from support.processes import BAD, play
from support.runs import load
from support.strikes import spoil_gradients
from support.tasks import BIAS, PRE, TASKS, write_all
from support.vision import AUGMENTED

POST = dict(pre_norm="none", mid_norm="none", post_norm="both", input_norm=False)
UNIFIED = dict(
    PRE, qk_norm=False, gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"
)
UNIFIED |= dict(mlp="swiglu", pos="rope", n_kv_head=1, tie_weights=False)
ROWS = dict(optimizer="muon", muon_coefficients="polar", muon_row_norm=True)
NESTEROV = dict(
    track_interval=3, embed_scale=True, optimizer="msgdw", learning_rate=0.1, nesterov=True
)
DYT = dict(PRE, norm="dyt", dyt_bias=True)
DYT_IMAGES = dict(DYT, optimizer="adam_mini", blockwise_lr=True, learning_rate=1e-3)
ONE_OF_TWO = dict(
    BIAS, n_expert=2, n_expert_active=1, router_norm=False, blockwise_lr=True, learning_rate=1e-3
)
MSGDW = dict(optimizer="msgdw", learning_rate=0.5)
MSGDW_IMAGES = dict(
    AUGMENTED,
    optimizer="msgdw",
    learning_rate=0.1,
    n_expert=3,
    n_ff=16,
    mlp="swiglu",
    balance="bias",
)
SHOWN = dict(track_interval=3, sample_interval=3, sample_start="AB")
# name: (task, flags), a DNT (S5) where nothing else is said. Images have QK-norm: without it a bias
# of keys is moved by rounding alone.
CASES = {
    "blockwise, sigmaReparam": (
        "text",
        dict(
            PRE, sigma_reparam=True, qk_norm=False, blockwise_lr=True, learning_rate=2e-3, **SHOWN
        ),
    ),
    "muon, unified": (
        "text",
        dict(UNIFIED, **ROWS, sample_interval=2, sample_start="AB"),
    ),
    "experts": (
        "experts",
        dict(BIAS, n_expert=3, n_expert_shared=1, router="sigmoid", track_interval=3),
    ),
    "examples": ("examples", dict(micro_batch_size=2, track_interval=3)),
    "images": ("images", dict(AUGMENTED, track_interval=3)),
    # deep
    "experts, muon": ("experts", dict(n_expert=3, optimizer="muon", balance_coef=0.1, z_coef=0.01)),
    "msgdw, DNT": ("text", dict(MSGDW, grad_clip=0.5, micro_batch_size=3, track_interval=3)),
    "nesterov, DyT": ("text", DYT | NESTEROV),
    "adam_mini, Admin": ("text", dict(POST, admin=True, optimizer="adam_mini")),
    "experts, adam_mini": (
        "experts",
        dict(BIAS, n_expert=3, optimizer="adam_mini", bias=True, norm="layernorm"),
    ),
    "two experts": ("experts", ONE_OF_TWO),
    "experts, recomputed": ("experts", dict(BIAS, n_expert=3, activation_checkpointing=True)),
    "documents": ("documents", dict(micro_batch_size=2, track_interval=3)),
    "images, adam_mini, DyT": ("images", AUGMENTED | DYT_IMAGES),
    "images, experts": ("images", MSGDW_IMAGES),
}
FAST = [*CASES][:5]
DEEP = [*CASES][5:]
# On three, each process has an image whose neighbour is elsewhere.
CASES["images, odd"] = "images", dict(AUGMENTED, batch_size=9)
# Its bases depend on the rounding of gradients. So it is compared with itself alone.
CASES["soap"] = "experts", dict(optimizer="soap", soap_frequency=2, n_expert=3)
SIGMA = "blockwise, sigmaReparam"
# A third of a whole number is rounded: a load that is even may move its bias on three processes. It
# is not even here.
ON_THREE = dict(
    ddp=["muon, unified", "adam_mini, Admin", "experts", "examples", "images, odd"],
    fsdp=["nesterov, DyT", SIGMA, "experts, muon", "two experts", "documents", "images, odd"],
)
ON_FOUR = dict(
    fsdp=["muon, unified"], hsdp=["experts", "two experts", "documents", "images, experts"]
)
LAUNCHES = dict(
    one={}, ddp={}, fsdp=dict(parallel="fsdp"), hsdp=dict(parallel="fsdp", fsdp_shard_size=2)
)
CHAINS, LONG_CHAINS = ["muon, unified", "experts"], ["adam_mini, Admin", "images"]
# The spike is 0.9 above the usual loss, and no other step is 0.1 above.
SPIKE = dict(loss_spike=0.3, save_interval=4, max_iters=12, lr_decay_iters=12, eval_interval=12)
SPIKE |= dict(learning_rate=0.05, warmup_iters=2)
SHARDED = dict(parallel="fsdp", checkpoint_format="sharded")
# drawn anew by each process: not the run of one
RANDOM = dict(drop_path=0.4, dropout=0.1, track_interval=0)
ONE_BAD = dict(eval_interval=10, save_interval=9, micro_batch_size=2, batch_size=8, block_size=32)
# 15 windows: two ranks have 8 and 7
ONE_BAD |= dict(eval_tokens=15 * 32, max_iters=20, lr_decay_iters=20)
ONE_BAD_STEP = dict(value=torch.nan, bad_steps={14}, name="wte.weight")
NONE = "parallel=none, but torchrun started 2 processes: use --parallel=auto"
FP16 = (
    "parallel=fsdp has no loss scaling, which fp16 needs: use --dtype=bfloat16 or float32, or ddp"
)
THIRDS = "fsdp_shard_size=3 does not divide the 2 processes: use one of 1, 2"
REFUSED = {  # name: (flags, message)
    "none": (dict(parallel="none"), NONE),
    "fp16": (dict(parallel="fsdp", dtype="float16"), FP16),
    "thirds": (dict(parallel="fsdp", fsdp_shard_size=3), THIRDS),
}
IN_BUCKETS = (
    "nanodnt.run.compilation.choose_blocks",
    lambda *_: Choice(True, "in buckets, as asked by a test"),
)
BY_BLOCKS = ("nanodnt.start.Split", lambda parallel, keep, *rest: Split(parallel, False, *rest))


# -------------------------------------------------------------------------------------------- parts


def go(rank, world, folder, case, name, patches=(), **changes):
    """The run of a case on this process, one of `world`, in folder/NAME."""
    task, flags = CASES[case]
    config = (
        TASKS[task].flags | dict(batch_size=12, micro_batch_size=0 if task == "text" else 3) | flags
    )
    play(
        rank,
        world,
        folder / name,
        patches=patches,
        **config | dict(dataset=folder / "data" / task) | changes,
    )


def make_cases(rank, world, folder, launches):
    """The runs of {launch: cases}, with a bad gradient on one process, under DDP on all of them,
    under HSDP on those with the same rows: it is put there after they have averaged.
    (`make_one_bad` puts it on one before.)"""
    for launch, cases in launches.items():
        for case in cases:
            worst = 0 if case == "two experts" else world - 1  # it has some of the experts
            # of the groups that share the rows of one copy
            size = dict(ddp=1, hsdp=2).get(launch, world)
            spoils = [BAD] * (rank % size == worst % size)
            how = LAUNCHES[launch] | (
                dict(micro_batch_size=1) if world > 2 and CASES[case][0] != "text" else {}
            )
            go(rank, world, folder, case, f"{case}, {launch}{world}", spoils=spoils, **how)


def make_chains(rank, world, folder, name, cases, begun, until, **how):
    """Runs that one launch continues from the step that another has saved, with the bad gradient in
    its step."""
    config = dict(init_from="auto", max_iters=until, eval_interval=2, track_interval=0) | how
    for case in cases:
        go(rank, world, folder, case, f"{case}, {name}", spoils=[BAD - begun], **config)


def make_one_bad(rank, world, out, dataset, in_buckets=False, **config):
    """A run whose last process has a bad gradient in one step, before DDP averages."""
    step = ONE_BAD_STEP if rank == world - 1 else ONE_BAD_STEP | dict(bad_steps=())
    how = dict(within=spoil_gradients(**step), patches=[IN_BUCKETS] * in_buckets)
    play(rank, world, out, dataset=dataset, **how, **ONE_BAD | config)


def other_targets(batch):
    """PreparedText.batch whose batch 9 has targets that never follow (steps of the walk are 1, 2
    and 5)."""

    def tampered(self, step, *args):
        x, y = batch(self, step, *args)
        return x, (y + 7) % 50 if step == 9 else y

    return tampered


def make_others(rank, world, folder, launch, **how):
    """Runs with a spike, in bf16, from a file's weights, and one that only evaluates."""
    start = partial(play, rank, world, dataset=folder / "data" / "text", **how)
    start(
        folder / f"spike, {launch}",
        patches=[(PreparedText, "batch", other_targets(PreparedText.batch))],
        **SPIKE,
    )
    start(
        folder / f"bf16, {launch}",
        dtype="bfloat16",
        branch_scale="layerscale",
        max_iters=3,
        micro_batch_size=6,
    )
    begun = dict(init_from=folder / "muon, unified, one1" / "last.pt", max_iters=3)
    start(folder / f"from a file, {launch}", **begun)
    start(folder / f"eval_only, {launch}", eval_only=True, **begun)
    start(folder / f"nGPT, {launch}", max_iters=3, **NGPT)


def make_halves(rank, world, folder, case, name, **how):
    """A run; the same stopped and resumed."""
    go(rank, world, folder, case, f"{name}, whole", **how)
    go(rank, world, folder, case, f"{name}, halves", stop_in=3, **how)
    # by process 0, one late
    assert rank or load(folder / f"{name}, halves" / "last.pt")["step"] == 4
    go(rank, world, folder, case, f"{name}, halves", init_from="resume", **how)


def make_compiled(rank, world, folder, case, name, backend, setting, **how):
    """A run of one layer, eager and compiled."""
    how |= dict(n_layer=1, track_interval=0, max_iters=4)
    go(rank, world, folder, case, f"{name}, eager", **how)
    compile = (torch, "compile", partial(torch.compile, backend=backend))
    go(
        rank,
        world,
        folder,
        case,
        f"{name}, compiled",
        patches=[compile, BY_BLOCKS],
        compile=setting,
        **how,
    )


def make_failures(rank, world, folder):
    """Runs that end with an error: too many bad gradients, on either process; settings that do not
    fit."""
    start = partial(play, rank, world, dataset=folder / "data" / "text")
    for bad in (0, 1):
        start(
            folder / f"bad rank {bad}",
            spoils=[2, 3, 4] * (rank == bad),
            max_skipped=3,
            parallel="fsdp",
        )
    for name, (flags, _) in REFUSED.items():
        start(folder / name, **flags)


# ---------------------------------------------------------------------------- what each world makes


def on_one(folder):
    write_all(folder / "data")
    make_cases(0, 1, folder, dict(one=FAST))
    make_one_bad(0, 1, folder / "one bad, one1", folder / "data" / "text", micro_batch_size=8)
    make_others(0, 1, folder, "one1")
    make_chains(0, 1, folder, "chain", CHAINS, 0, 2)


def on_two(rank, world, folder):
    make_cases(rank, world, folder, dict(ddp=FAST, fsdp=FAST))
    make_one_bad(rank, world, folder / "one bad, ddp2", folder / "data" / "text")
    make_others(rank, world, folder, "fsdp2", parallel="fsdp")
    make_chains(rank, world, folder, "chain", CHAINS, 2, 3, **SHARDED)
    make_chains(rank, world, folder, "chain", CHAINS, 3, 5)
    by_blocks = dict(parallel="fsdp", patches=[BY_BLOCKS], micro_batch_size=3, max_iters=5)
    make_halves(rank, world, folder, "adam_mini, Admin", "by blocks", **by_blocks)
    go(
        rank,
        world,
        folder,
        "adam_mini, Admin",
        "recomputed",
        activation_checkpointing=True,
        **by_blocks,
    )
    make_failures(rank, world, folder)


def on_one_more(folder):
    make_cases(0, 1, folder, dict(one=[*DEEP, "images, odd"]))
    make_chains(0, 1, folder, "long chain", LONG_CHAINS, 0, 2)


def on_two_more(rank, world, folder):
    make_cases(rank, world, folder, dict(ddp=DEEP, fsdp=DEEP))
    make_chains(rank, world, folder, "long chain", LONG_CHAINS, 2, 3, **SHARDED)
    fsdp = dict(parallel="fsdp")
    make_halves(rank, world, folder, "experts", "experts, ddp", **RANDOM)
    make_halves(rank, world, folder, "images", "images, fsdp", **RANDOM, **fsdp)
    make_halves(rank, world, folder, "soap", "soap, ddp")
    make_halves(rank, world, folder, "soap", "soap, shards", **SHARDED)
    make_compiled(rank, world, folder, "adam_mini, Admin", "fsdp", "eager", True, **fsdp)
    make_compiled(rank, world, folder, "experts", "experts", "aot_eager", "blocks")
    spoils = dict(spoils=[BAD] * rank, patches=[BY_BLOCKS])
    go(rank, world, folder, "experts", "experts by blocks", **fsdp | spoils)


def on_three(rank, world, folder):
    make_cases(rank, world, folder, ON_THREE)
    make_chains(rank, world, folder, "long chain", LONG_CHAINS, 3, 4, micro_batch_size=1)


def on_four(rank, world, folder):
    make_cases(rank, world, folder, ON_FOUR)
    make_chains(
        rank,
        world,
        folder,
        "long chain",
        LONG_CHAINS,
        4,
        5,
        **SHARDED,
        fsdp_shard_size=2,
        micro_batch_size=1,
    )
