"""`python model.py CONFIG --plan`: bytes as counted by hand and by torch's profiler; fits, days and
shards by hand."""

import gc
import json
import time
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from layers.ops import rotary
from model import GPT, GPTConfig
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import make_optimizer
from nanodnt.plan.memory import Held, Memory, StepMemory, fused_attention, total_bytes, trace
from nanodnt.plan.planning import GPUS, NO_BF16, PlanConfig, describe_plan, describe_time
from nanodnt.plan.split import (
    COMPILED,
    busy_micro_batch,
    choose_split,
    count_step,
    ddp,
    fsdp,
    least_bytes,
    list_ways,
    message_bytes,
    one_gpu,
    shard_bytes,
)
from nanodnt.run.environment import Env
from nanodnt.run.hardware import PEAK_FLOPS, available_bytes
from nanodnt.run.parallel import averaging, data_parallel
from nanodnt.tasks import task_of
from support.depth import spread
from support.operators import compiled_and_kept, fresh_compiler
from support.optimizers import VARIANTS, filled

SIZE = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=500)
DNT = dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True)
LLAMA = dict(pos="rope", mlp="swiglu", tie_weights=False, residual_init="plain")
VIT = dict(
    patch_size=4,
    image_size=32,
    channels=3,
    n_class=10,
    block_size=65,
    vocab_size=0,
    mlp="gelu_erf",
    bias=True,
)
LAYOUTS = {
    "DNT, msgdw": (DNT, dict(optimizer="msgdw")),
    "DyT LLaMA, grouped queries": (
        LLAMA | dict(norm="dyt", embed_scale=True, n_kv_head=1, n_embd=96),
        {},
    ),
    "Pre-LN, Muon": ({}, dict(optimizer="muon")),
    "GPT-2, checkpointing": (
        dict(norm="layernorm", bias=True),
        dict(activation_checkpointing=True),
    ),
    "Mix-LN, Adam-mini": (dict(post_norm_blocks=1), dict(optimizer="adam_mini")),
    "DNP, magnitudes, chunks": (
        dict(gain="branch", gain_out="norm", gain_param="magdir"),
        dict(loss_chunks=3),
    ),
    "sigmaReparam": (dict(sigma_reparam=True), dict(activation_checkpointing=True)),
    # in bf16 no case for torch's grouped product, since a row of 100 is no multiple of 16 bytes
    "experts, biases, Muon": (
        LLAMA
        | dict(
            n_expert=4, n_expert_shared=1, n_ff=100, bias=True, router="sigmoid", balance="bias"
        ),
        VARIANTS["muon_2026"],
    ),
    "experts, checkpointing": (dict(n_expert=4), dict(activation_checkpointing=True, z_coef=1e-3)),
    "V-DNT, stochastic depth": (
        VIT | DNT | dict(drop_path=0.2),
        dict(optimizer="msgdw", label_smoothing=0.1),
    ),
}


def build(flags, config, device="meta", dtype=torch.float32):
    """(model, optimizer, TrainConfig) of changes to SIZE and to TrainConfig's defaults."""
    config, flags = filled(**config), GPTConfig(**SIZE | flags)
    network = task_of(flags).network()
    model = network.empty(flags) if device == "meta" else network(flags)
    prepare_model(model, config, Env(0, 1, torch.device(device), dtype, False))
    return model, make_optimizer(model, config), config


def count(model, optimizer, config) -> StepMemory:
    return StepMemory(model, optimizer, config.grad_clip, config.activation_checkpointing)


def added(model, optimizer, config, micro: int, accumulation: int, held: Held) -> int:
    """The predicted peak of what a step adds: weights, state and batch, which exist before it,
    count as 0."""
    step = count(model, optimizer, config)
    step.row_bytes = 0
    return step.peak(micro, micro * accumulation, held._replace(weights=0, state=0)).total


# ----------------------------------------------------------------------------------------- counting


def peak(memory: Memory) -> int:
    return max(gradients + other for _, gradients, other in memory.rows)


def test_storages_count_until_they_are_freed():
    a = torch.ones(1000)
    with Memory(dry=False) as memory:
        b = a * 2
        assert memory.now == 4000
        c = torch.cat((a, b)).view(2, 1000).T[3:]
        b += 1
        a.mul_(3)
        assert memory.now == 12_000  # a existed before; views and changes in place add nothing
        del b
        assert memory.now == 8000
        del c
    assert (memory.now, peak(memory)) == (0, 12_000)
    assert memory.storages.keys() == {a.untyped_storage()._cdata}


def test_a_graph_by_hand():
    """y = sum(exp(w)²): exp's result is kept; backward makes y's gradient, the square's, exp's."""
    w = torch.nn.Parameter(torch.empty(1000, device="meta"))
    with Memory() as memory:
        w.register_post_accumulate_grad_hook(memory.count_as_gradient)
        y = w.exp().square().sum()  # the square itself is gone once it is summed
        assert (memory.now, peak(memory)) == (4004, 8004)
        y.backward()
        assert (memory.now, memory.gradients) == (4, 4000)
    assert memory.rows[0][1] == 0 and peak(memory) == 4004 + 4 + 3 * 4000


def test_attention_has_no_scores():
    """On the meta device, as on a GPU, it makes the result and one number a row."""
    q, k = (torch.empty(2, n, 512, 32, device="meta") for n in (4, 2))
    with Memory() as memory:
        y = fused_attention(q, k, k, dropout_p=0.0, is_causal=True, enable_gqa=True)
    assert y.shape == q.shape and peak(memory) == 2 * 4 * 512 * 32 * 4 + 2 * 4 * 512 * 4


FAST = {("DNT, msgdw", 1), ("DyT LLaMA, grouped queries", 2), ("DNP, magnitudes, chunks", 1)}
FAST |= {
    ("experts, biases, Muon", 2),
    ("experts, checkpointing", 1),
    ("V-DNT, stochastic depth", 1),
}


def profiled_peak(run, path) -> int:
    """Peak of the bytes that torch's allocator has given out during run(), by torch's profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("case", spread(list(product(LAYOUTS, (1, 2))), FAST), ids=str)
def test_a_step_takes_what_was_predicted(case, tmp_path):
    """Bytes counted on the meta device against the allocator of a real step on the CPU."""
    (flags, changes), accumulation = LAYOUTS[case[0]], case[1]
    model, optimizer, config = build(flags, changes)
    predicted = added(model, optimizer, config, 8, accumulation, one_gpu(model, optimizer).held)
    model, optimizer, config = build(flags, changes, device="cpu")
    batch, scaler = model.example(8 * accumulation), torch.amp.GradScaler("cpu", enabled=False)
    trainer = Trainer(model, optimizer, scaler, 8, config.grad_clip)
    measured = profiled_peak(lambda: training_step(trainer, batch), tmp_path / "trace.json")
    print(f"predicted {predicted / measured:.3f} of the measured")
    assert 0.98 < predicted / measured < 1.02


COMPILED_LAYOUTS = {"DNT": DNT, "DyT LLaMA": LLAMA | dict(norm="dyt", n_ff=384)}


@pytest.mark.parametrize("name", spread(tuple(COMPILED_LAYOUTS), fast=("DNT",)))
@fresh_compiler()
def test_what_a_compiled_block_keeps(name):
    """Between the share that a start counts with, and what --plan counts."""
    flags = dict(block_size=512, n_embd=128, n_head=2, vocab_size=64) | COMPILED_LAYOUTS[name]
    counted = []
    for n_layer in (1, 2):
        model, optimizer, _ = build(flags | dict(n_layer=n_layer), {}, dtype=torch.bfloat16)
        rows = trace(model, optimizer, 1.0, False, micro=4)
        counted.append(next(other for phase, _, other in rows if phase == "loss"))
    model = GPT(build(flags, {})[0].config).set_runtime(compute_dtype=torch.bfloat16)
    compiled, kept = compiled_and_kept(model.blocks[1])
    rope = rotary(torch.arange(512), 64, 1e4) if model.config.pos == "rope" else None
    compiled(torch.randn(4, 512, 128, requires_grad=True), rope)
    share = sum(t.numel() * t.element_size() for t in kept) / (counted[1] - counted[0])
    assert COMPILED < share <= 1.001


# -------------------------------------------------------------------------------- parts and numbers


def gpus(n: int) -> Env:
    return Env(0, n, torch.device("meta"), torch.bfloat16, distributed=n > 1)


@pytest.mark.parametrize("setting, processes", [("auto", 1), ("ddp", 2)])
def test_a_gpus_micro_batch_is_the_largest_that_fits(setting, processes):
    """Of made-up memory, against a search through all micro batches."""
    changes = dict(batch_size=24 * processes, parallel=setting)
    model, optimizer, config = build(dict(n_layer=1), changes, dtype=torch.bfloat16)
    kind = "none" if setting == "auto" else setting
    way = list_ways(kind, count_step(model, config, gpus(processes)))[0]
    step, valid = count(model, optimizer, config), (1, 2, 3, 4, 6, 8, 12, 24)
    peaks = {micro: step.peak(micro, 24, way.held).total for micro in valid}
    for limit, fits in ((peaks[24], 24), (peaks[6], 6), (peaks[6] - 1, 4)):
        config.must_fit = False
        split = choose_split(model, config, gpus(processes), limit)
        assert (split.parallel, split.micro, split.accumulation) == (kind, fits, 24 // fits)
        assert (
            f"{fits} (auto: the largest that fits; {peaks[fits] / 1e9:.1f} GB counted"
            in split.reason
        )
    split = choose_split(model, config, gpus(processes), peaks[1] / 2)
    assert split.micro == 1 and split.reason.startswith(
        "warning: memory may run out: micro_batch_size 1 ("
    )


def test_the_way_with_the_fewest_messages_that_fits_is_taken():
    """DDP, then FSDP that keeps full weights, then by blocks, as the memory shrinks; a micro batch
    that is set, or the smallest of 4096 tokens."""
    flags = dict(n_layer=8, n_embd=128, block_size=2048, vocab_size=64)
    model, optimizer, config = build(flags, dict(batch_size=64), dtype=torch.bfloat16)
    assert [busy_micro_batch(tokens, 16) for tokens in (2048, 1500, 4096, 16)] == [2, 4, 1, 16]
    step = count(model, optimizer, config)
    for given in (0, 8):
        config = replace(config, micro_batch_size=given, must_fit=False)
        counted = count_step(model, config, gpus(4))
        ways = list_ways("ddp", counted) + list_ways("fsdp", counted)
        needed = [step.peak(given or 2, 16, way.held).total for way in ways]
        assert needed[0] > needed[1] > needed[2]
        wanted = [("ddp", True), ("fsdp", True), ("fsdp", False), ("fsdp", False)]
        for limit, (parallel, keep) in zip((*needed, 1), wanted, strict=True):
            split = choose_split(model, config, gpus(4), limit)
            assert (split.parallel, split.keep) == (parallel, keep)
            assert split.micro == given or limit == 1 or split.micro >= 2
    assert choose_split(model, replace(config, parallel="ddp"), gpus(4), 1).parallel == "ddp"
    half = replace(gpus(4), dtype=torch.float16)  # for which FSDP has no loss scaling
    assert choose_split(model, config, half, 1).parallel == "ddp"


def test_what_does_not_fit_is_refused():
    """Compiled, it may need half of what is kept: so that is tried."""
    model, optimizer, config = build(
        dict(n_layer=4), dict(batch_size=8, compile=False), dtype=torch.bfloat16
    )
    one_row = count(model, optimizer, config).peak(1, 8, one_gpu(model, optimizer).held)
    for changes in ({}, dict(micro_batch_size=8)):
        with pytest.raises(
            ValueError,
            match="does not fit into a GPU with micro_batch_size=.*--must_fit=False tries",
        ):
            choose_split(model, replace(config, **changes), gpus(1), 0.9 * one_row.total)
    compiled = replace(config, compile="auto")
    limit = least_bytes(one_row, may_shrink=True)
    assert choose_split(model, compiled, gpus(1), limit).accumulation == 8
    with pytest.raises(ValueError, match="does not fit"):
        choose_split(model, compiled, gpus(1), limit - 1)
    assert choose_split(model, replace(compiled, must_fit=False), gpus(1), limit - 1).micro == 1


def test_a_gpus_memory_is_what_is_free_or_ours(monkeypatch):
    """Of 80 GB others hold 10 and CUDA 1; our tensors hold 9, the reserve is 4."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * 10**9)
    assert available_bytes(torch.device("cuda", 0)) == 65 * 10**9


def test_counting_sends_no_messages(alone, monkeypatch):
    """A run counts while its process group exists, and Muon would send updates in it."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr("nanodnt.optim.orthogonal.messages.start_exchange", None)
    model, optimizer, config = build({}, dict(optimizer="muon"))
    trace(model, optimizer, 1.0, False, micro=2)
    assert dist.is_initialized()


def test_shards_are_rows_rounded_up():
    """10 rows of 3 over 4 processes: 3, 3, 3, 1 rows. A vector of 1 is on one process, a scalar on
    all."""
    tensors = [torch.empty(10, 3), torch.empty(1), torch.empty(())]
    assert shard_bytes(tensors, 4) == 4 * (9 + 1 + 1)
    assert shard_bytes(tensors, 16) == 4 * (3 + 1 + 1)
    assert shard_bytes([torch.empty(7, 2, dtype=torch.bfloat16)], 2) == 2 * 8


def test_what_each_way_holds_by_hand():
    """2 blocks, bytes per parameter: 4 of weights, 4 of gradients, 8 of state, and under DDP 4 of
    buckets, or of the message that follows the backward pass."""
    model, optimizer, config = build({}, {})
    n, steps, d = model.num_params(), 4 * len(list(model.parameters())), 64
    alone = one_gpu(model, optimizer).held
    assert alone == Held(4 * n, 4 * n, 8 * n + steps)
    assert ddp(model, optimizer, 4, by_blocks=False).held == alone._replace(
        extra=dict(reduction=4 * n, optimizer=0)
    )
    buckets = ddp(model, optimizer, 4, by_blocks=True).held
    assert buckets.gradients == 0 and set(buckets.extra.values()) == {4 * n}
    block = 12 * d * d  # its matrices
    root = 512 * d + 64 * d + 5 * d  # embeddings, norms
    assert n == 2 * block + root
    held = fsdp(model, optimizer, 4, keep=True).held
    assert held[:3] == (n, n, 2 * n + steps)  # every tensor has a multiple of 4 rows
    kept = dict(
        forward=4 * (root + 4 * block), loss=4 * (root + 3 * block), backward=4 * (root + 4 * block)
    )
    assert held.extra == kept | dict(reduction=4 * 3 * root)
    assert held.accumulated == dict.fromkeys(("forward", "loss", "backward"), 4 * n)
    # a head, 512 d, larger than half a block
    untied, untied_optimizer, _ = build(dict(tie_weights=False), {})
    apart = fsdp(untied, untied_optimizer, 4, keep=True).held
    assert apart.extra["forward"] == 4 * (root + 512 * d + 4 * block)
    assert (
        apart.extra["backward"] == kept["backward"] + 4 * 512 * d
        and apart.extra["reduction"] == 4 * 3 * root
    )
    step = count(model, optimizer, config)
    many, few = (step.peak(2, rows, alone).parts["everything else then"] for rows in (480, 4))
    assert many - few == 476 * 64 * 16  # a batch: 8 bytes an input, 8 a target
    assert fsdp(model, optimizer, 2, keep=True).held.weights == 2 * n


def test_what_a_counted_step_has_of_the_settings():
    model, _, config = build({}, {})
    for setting in (True, "blocks"):
        step = count_step(model, replace(config, compile=setting), gpus(4))
        assert step.by_blocks == (setting == "blocks") and step.shard_size == 4
    assert count_step(model, replace(config, fsdp_shard_size=2), gpus(4)).shard_size == 2


def test_fsdp_by_blocks_by_hand():
    """In bf16, of which a block's matrices are 2 bytes a parameter, and 4 where they are
    reduced."""
    model, optimizer, _ = build({}, {}, dtype=torch.bfloat16)
    kept, by_blocks = (fsdp(model, optimizer, 4, keep).held for keep in (True, False))
    d = 64
    block, root = 12 * d * d, 512 * d + 64 * d + 5 * d
    assert kept.extra["backward"] == 4 * root + 2 * 2 * block + (2 + 4) * block
    assert by_blocks.extra["backward"] == 4 * root + (3 * 2 + 2 + 4) * block
    assert by_blocks.accumulated == dict.fromkeys(("forward", "loss", "backward"), 4 * root)


def test_messages_of_muon():
    """Two blocks over 4 processes, bf16: of each shape a process sends one matrix (maybe padding)
    and receives 4."""
    model, optimizer, _ = build({}, dict(optimizer="muon"), dtype=torch.bfloat16)
    assert message_bytes(optimizer, 4) == 2 * 2 * (4 + 1) * 256 * 64  # up, down
    assert message_bytes(build({}, {})[1], 4) == 0
    # fp32; a stack goes as one
    experts = build(dict(n_expert=4, n_ff=32), dict(optimizer="muon"))[1]
    assert message_bytes(experts, 4) == 2 * 4 * (4 + 1) * 4 * 32 * 64


@pytest.fixture
def alone():
    """The environment of a process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Env(0, 1, torch.device("cpu"), torch.float32, True, parallel="ddp")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
# The peak is at the end of the backward pass (context 8), or in the loss (64).
@pytest.mark.parametrize(
    "case",
    spread(list(product((8, 64), (1, 2), ("blocks", True))), [(8, 2, "blocks"), (8, 1, True)]),
    ids=str,
)
def test_ddp_takes_what_was_predicted(case, alone):
    """Real DDP: buckets as large as all gradients, which hold those of earlier micro batches too;
    or one message."""
    context, accumulation, compile = case
    flags = DNT | dict(block_size=context, n_layer=3)
    model, optimizer, config = build(flags, {})
    way = ddp(model, optimizer, 2, by_blocks=compile == "blocks")
    predicted = added(model, optimizer, config, 4, accumulation, way.held)
    model, optimizer, config = build(flags, {}, device="cpu")
    x = torch.zeros(4 * accumulation, context, dtype=torch.long)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with Memory(dry=False) as memory:
        trainer = Trainer(model, optimizer, scaler, 4, config.grad_clip)
        if compile == "blocks":
            trainer.step_model = data_parallel(model, alone)
            weights = pytest.approx(total_bytes(model.parameters()), rel=0.01)
            end = time.monotonic() + 10
            while memory.now != weights and time.monotonic() < end:
                gc.collect()  # gradients that DDP has copied may be freed a moment later
                time.sleep(0.01)
            assert memory.now == weights
        else:
            trainer.average_gradients = averaging(model)
        training_step(trainer, (x, x))
        memory.rows.clear()
        training_step(trainer, (x, x))  # DDP may rearrange its buckets after one
    assert 0.98 < predicted / peak(memory) < 1.05


def test_days_by_hand():
    """2 GPUs of 1e12 FLOP/s at half speed: 1e12 FLOP/s."""
    model, _, config = build({}, dict(batch_size=8, max_iters=1000, peak_flops=1e12))
    d = 64
    flops = 6 * (2 * 12 * d * d + 512 * d) + 12 * 2 * d * 64  # a token
    seconds = 8 * 64 * flops / 1e12
    work, time = describe_time(model, config, PlanConfig(gpus=2, mfu=0.5), torch.bfloat16)
    assert "1,000 steps of 8 × 64 = 512 tokens" in work and f"{512_000 / 1e9:.4g}e9 tokens" in work
    assert time.startswith(
        f"{1000 * seconds / 86400:.3g} days, {seconds:.3g} s a step, {1e12 / flops:,.0f} tokens/s"
    )
    # 2 of 8 experts, and the routers
    active = 6 * (2 * (4 + 2 * 8) * d * d + 2 * 8 * d + 512 * d) + 12 * 2 * d * 64
    work, _ = describe_time(build(dict(n_expert=8), {})[0], config, PlanConfig(), torch.bfloat16)
    assert work.endswith(f", {512_000 * active:.3g} FLOPs")
    config.peak_flops = 0.0
    assert "4 × 989 TFLOP/s" in describe_time(model, config, PlanConfig(gpus=4), torch.bfloat16)[1]
    assert "--peak_flops" in describe_time(model, config, PlanConfig(), torch.float32)[1]


def test_every_gpu_has_memory_and_a_peak():
    assert all(gb > 10 and name in PEAK_FLOPS for gb, name in GPUS.values())
    assert set(NO_BF16) < set(GPUS)


def test_the_plan_of_images():
    """Images, tokens and days agree with each other. Checkpoints: weights, AdamW's two moments, a
    step count for each tensor; four files, and those kept for good."""
    model, _, config = build(
        VIT | dict(n_layer=1, n_ff=4096), dict(batch_size=16, max_iters=1000, keep_every=300)
    )
    one_file = 12 * model.num_params() + 4 * len(list(model.parameters()))
    flops = 65 * model.flops_per_token()
    text = "\n".join(describe_plan(model, config, PlanConfig(gpus=2, mfu=0.5)))
    assert (
        "1,000 steps of 16 images × 65 = 1,040 tokens are 16,000 images, 0.00104e9 tokens, " in text
    )
    assert f"{16_000 * flops:.3g} FLOPs" in text and f", {989e12 / flops:,.0f} images/s" in text
    assert "not compiled (8 images of a step each)" in text
    assert f"a checkpoint: {one_file / 1e9:.2f} GB, and" in text
    assert f"on disk up to 4 and 3 kept ones at a time: {7 * one_file / 1e9:.2f} GB" in text
