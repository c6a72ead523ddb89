"""plan.py: what is counted is what a step takes, by hand and by torch's profiler; fits, days and shards by hand."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import plan
import runtime
import summary
from model import GPT, GPTConfig
from optim import fill_defaults, make_optimizer
from plan import Memory, PlanConfig, Timeline, Way, largest, trace
from train import TrainConfig, prepare_model, training_step

SIZE = dict(n_layer=3, n_head=2, n_embd=64, block_size=64, vocab_size=500)
DNT = dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True)
LLAMA = dict(pos="rope", mlp="swiglu", tie_weights=False, residual_init="plain")
LAYOUTS = {
    "DNT, msgdw": (DNT, dict(optimizer="msgdw")),
    "DyT LLaMA, grouped queries": (LLAMA | dict(norm="dyt", embed_scale=True, n_kv_head=1, n_embd=96), {}),
    "Pre-LN, Muon": ({}, dict(optimizer="muon")),
    "GPT-2, checkpointing": (dict(norm="layernorm", bias=True), dict(activation_checkpointing=True)),
    "Mix-LN, Adam-mini": (dict(post_norm_blocks=1), dict(optimizer="adam_mini")),
    "DNP, magnitudes, chunks": (
        dict(gain="branch", gain_out="norm", gain_param="magdir"),
        dict(loss_chunks=3),
    ),
    "sigmaReparam": (dict(sigma_reparam=True), dict(activation_checkpointing=True)),
    "Fixup": (dict(norm="none", fixup=True), {}),
}


def build(flags, config, device="meta", dtype=torch.float32):
    """(model, optimizer, TrainConfig) of changes to SIZE and to TrainConfig's defaults."""
    config = TrainConfig(**config)
    fill_defaults(config)
    config_of_model = GPTConfig(**SIZE | flags)
    model = GPT.empty(config_of_model) if device == "meta" else GPT(config_of_model)
    prepare_model(model, config, runtime.Env(0, 1, torch.device(device), dtype, False))
    return model, make_optimizer(model, config), config


def one(model, optimizer) -> Way:
    """One process that holds everything, but only what a step adds counts."""
    return Way("one", 0, plan.size(model.parameters()), 0)


# --------------------------------------------------------------------------------------------------------- counting


def test_storages_count_from_their_making_to_their_end():
    a = torch.ones(1000)
    with Memory(dry=False) as memory:
        b = a * 2
        assert memory.now == 4000
        c = torch.cat((a, b)).view(2, 1000).T[3:]
        b += 1
        a.mul_(3)
        assert memory.now == 12_000  # a was there before, views and changes in place make nothing
        del b
        assert memory.now == 8000
        d = c.to(torch.bfloat16)
        del c, d
    assert (memory.now, memory.peak) == (0, 12_000)
    assert memory.storages.keys() == {a.untyped_storage()._cdata}


def test_a_graph_by_hand():
    """y = sum(exp(w)²): exp's result is kept; backward makes y's gradient, the square's, exp's."""
    w = torch.nn.Parameter(torch.empty(1000, device="meta"))
    with Memory() as memory:
        w.register_post_accumulate_grad_hook(memory.gradient)
        y = w.exp().square().sum()  # the square itself is gone once it is summed
        assert (memory.now, memory.peak) == (4004, 8004)
        y.backward()
        assert (memory.now, memory.gradients) == (4, 4000)
    assert [row[1] for row in memory.rows][0] == 0 and memory.peak == 4004 + 4 + 3 * 4000


def test_attention_has_no_scores():
    """On the meta device, as on a GPU: the result, and one number a row."""
    q, k = (torch.empty(2, heads, 512, 32, device="meta") for heads in (4, 2))
    with plan.fused_attention(), Memory() as memory:
        y = F.scaled_dot_product_attention(q, k, k, dropout_p=0.0, is_causal=True, enable_gqa=True)
    assert y.shape == q.shape and memory.peak == 2 * 4 * 512 * 32 * 4 + 2 * 4 * 512 * 4
    assert F.scaled_dot_product_attention is not plan.fused_attention
    assert F.scaled_dot_product_attention(torch.ones(1, 1, 2, 2), *[torch.ones(1, 1, 2, 2)] * 2).sum() == 4


def profiled_peak(run, path) -> int:
    """Peak of the bytes that torch's allocator has given out during run(), by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("flags, changes", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("accumulation", (1, 2))
def test_a_step_takes_what_was_predicted(flags, changes, accumulation, tmp_path):
    """The meta device against a real step on the CPU, as its allocator has it. What kernels take inside is not
    predicted: a few percent."""
    model, optimizer, config = build(flags, changes)
    line = Timeline(model, optimizer, config, config.activation_checkpointing)
    predicted = line.peak(8, accumulation > 1, one(model, optimizer)).total
    model, optimizer, config = build(flags, changes, device="cpu")
    x = torch.randint(500, (8 * accumulation, 64), generator=torch.Generator().manual_seed(0))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    measured = profiled_peak(
        lambda: training_step(model, model, optimizer, scaler, x, x, 8, config), tmp_path / "trace.json"
    )
    print(f"predicted {predicted / measured:.3f} of the measured")
    assert 0.93 < predicted / measured < 1.03


@pytest.mark.parametrize("name", ("DNT, msgdw", "GPT-2, checkpointing", "Pre-LN, Muon"))
def test_two_micro_batches_tell_all(name):
    """Peaks of other micro batches, and with accumulation, are those of the step itself, to the byte."""
    flags, changes = LAYOUTS[name]
    model, optimizer, config = build(flags, changes, dtype=torch.bfloat16)
    line, way = Timeline(model, optimizer, config, config.activation_checkpointing), one(model, optimizer)
    for micro in (5, 16):
        for accumulation in (1, 2):
            memory = trace(model, optimizer, config, micro, accumulation)
            found = max(gradients + other for _, gradients, other in memory.rows)
            predicted = line.peak(micro, accumulation > 1, way)
            if predicted.phase != "loss":
                assert predicted.total == pytest.approx(found, abs=64), (micro, accumulation)
            assert predicted.total >= found
    assert (memory.now, memory.gradients) == (pytest.approx(0, abs=64), plan.size(model.parameters()))


# -------------------------------------------------------------------------------------------------- parts and numbers


def test_the_largest_micro_batch_is_the_largest_that_fits():
    """The limit is what a step of 4 was counted to take: 4 fits, a byte less and it is the divisor below."""
    model, optimizer, config = build(DNT, {}, dtype=torch.bfloat16)
    line, way = Timeline(model, optimizer, config, False), one(model, optimizer)
    memory = trace(model, optimizer, config, 4, accumulation=3)
    limit = line.peak(4, True, way).total
    assert limit >= max(gradients + other for _, gradients, other in memory.rows)
    assert [largest(line, way, 12, limit + more) for more in (1, -1)] == [4, 3]
    assert largest(line, way, 8, limit - 1) == 2
    assert largest(line, way, 8, 10 * limit) == 8 and largest(line, way, 8, 0) == 1


def test_shards_are_rows_rounded_up():
    """10 rows of 3 over 4 processes: 3, 3, 3, 1; a vector of 1 is one process's; a number is everyone's."""
    tensors = [torch.empty(10, 3), torch.empty(1), torch.empty(())]
    assert plan.shard_size(tensors, 4) == 4 * (9 + 1 + 1)
    assert plan.shard_size(tensors, 16) == 4 * (3 + 1 + 1)
    assert plan.shard_size([torch.empty(7, 2, dtype=torch.bfloat16)], 2) == 2 * 8


def test_the_ways_hold_what_they_hold():
    """By hand, for a model of 2 blocks: 4 bytes for weights and gradients, 8 of state, and under DDP the buckets."""
    model, optimizer, config = build(dict(n_layer=2), {})
    n, steps = model.num_params(), 4 * len(list(model.parameters()))
    ddp, fsdp = plan.ways(model, optimizer, config, 4)
    assert ddp[1:4] == (4 * n, 4 * n, 8 * n + steps) and set(ddp.extra.values()) == {4 * n}
    d = 64
    block = 12 * d * d + 2 * d  # matrices, two norms
    root = 512 * d + 64 * d + d
    assert n == 2 * block + root
    assert fsdp[1:4] == (n, n, 2 * n + steps)  # every tensor has a multiple of 4 rows
    assert fsdp.extra == dict(
        forward=4 * (root + 3 * block),
        loss=4 * (root + 2 * block),
        backward=4 * (root + 5 * block),
        reduction=4 * 3 * root,
    )
    (alone,) = plan.ways(model, optimizer, config, 1)
    assert alone[1:] == (4 * n, 4 * n, 8 * n + steps, {}, False)
    config.fsdp_shard_size = 2
    assert plan.ways(model, optimizer, config, 4)[1].weights == 2 * n


def test_muons_messages():
    """Two blocks over 4 processes, bf16: of each shape all send one matrix, void or not, and get 4; two shapes."""
    model, optimizer, _ = build(dict(n_layer=2), dict(optimizer="muon"), dtype=torch.bfloat16)
    assert plan.exchanged(optimizer, 4) == 2 * 2 * (4 + 1) * 256 * 64  # up, down
    assert plan.exchanged(build({}, {})[1], 4) == 0


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield runtime.Env(0, 1, torch.device("cpu"), torch.float32, True, parallel="ddp")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("accumulation", (1, 2))
@pytest.mark.parametrize("context", (8, 64))  # the peak at the end of the backward pass, or in the loss
def test_ddp_takes_what_was_predicted(context, accumulation, alone):
    """The real one, as runtime.py makes it: buckets as large as all gradients, and beside them those that wait."""
    flags = DNT | dict(block_size=context)
    model, optimizer, config = build(flags, {})
    ddp = plan.ways(model, optimizer, config, 2)[0]
    predicted = Timeline(model, optimizer, config, False).peak(4, accumulation > 1, ddp._replace(weights=0, state=0))
    model, optimizer, config = build(flags, {}, device="cpu")
    x, scaler = torch.zeros(4 * accumulation, context, dtype=torch.long), torch.amp.GradScaler("cpu", enabled=False)
    with Memory(dry=False) as memory:
        wrapped = runtime.distribute(model, alone)
        assert memory.now == pytest.approx(plan.size(model.parameters()), rel=0.01)
        training_step(wrapped, model, optimizer, scaler, x, x, 4, config)
        memory.peak = 0
        training_step(wrapped, model, optimizer, scaler, x, x, 4, config)  # DDP may sort its buckets anew after one
    assert 0.98 < predicted.total / memory.peak < 1.05


def test_days_by_hand():
    """2 GPUs of 1e12 FLOP/s used to half: 1e12 FLOP/s."""
    model, _, config = build({}, dict(batch_size=8, max_iters=1000, peak_flops=1e12))
    d = 64
    flops = 6 * (3 * 12 * d * d + 512 * d) + 12 * 3 * d * 64  # a token
    seconds = 8 * 64 * flops / 1e12
    work, time = plan.describe_time(model, config, PlanConfig(gpus=2, mfu=0.5), torch.bfloat16)
    assert "1,000 steps of 8 × 64 = 512 tokens" in work and f"{512_000 / 1e9:.4g}e9 tokens" in work
    assert time.startswith(f"{1000 * seconds / 86400:.3g} days, {seconds:.3g} s a step, {1e12 / flops:,.0f} tokens/s")
    config.peak_flops = 0.0
    assert "4 × 989 TFLOP/s" in plan.describe_time(model, config, PlanConfig(gpus=4), torch.bfloat16)[1]
    assert "--peak_flops" in plan.describe_time(model, config, PlanConfig(), torch.float32)[1]


def test_checkpoints_on_disk():
    """Weights and AdamW's two moments, and a step for each tensor; four files, and those that are kept."""
    model, optimizer, config = build({}, dict(max_iters=1000, keep_every=300))
    one_file = 12 * model.num_params() + 4 * len(list(model.parameters()))
    text = plan.describe_disk(model, optimizer, config)
    assert plan.size(model.state_dict().values()) + plan.size(plan.states(optimizer)) == one_file
    assert text.endswith(f"on disk up to 4 and 3 kept ones at a time: {7 * one_file / 1e9:.2f} GB")


def test_every_gpu_has_memory_and_a_peak():
    assert all(gb > 10 and name in runtime.PEAK_FLOPS for gb, name in plan.GPUS.values())
    assert set(plan.NO_BF16) < set(plan.GPUS)


# ------------------------------------------------------------------------------------------------------- the command


def command(monkeypatch, capsys, *argv):
    """`python model.py ARGV` in this process: (exit code, stdout, stderr)."""
    size = SIZE | dict(batch_size=12)
    size = [f"--{name}={value}" for name, value in size.items() if f"--{name}=" not in " ".join(argv)]
    monkeypatch.setattr(sys, "argv", ["model.py", *size, *argv])
    try:
        code = summary.main()
    except SystemExit as e:
        code = e.code
    return code, *capsys.readouterr()


def rows(out) -> dict:
    """{first words: cells} of the printed table."""
    lines = [line.split("  ") for line in out.splitlines()]
    return {line[0]: [cell.strip() for cell in line[1:] if cell.strip()] for line in lines if len(line) > 1}


def test_the_command(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "--plan", "--gpus=3", "--gpu=a800", "--micro_batch_size=2")
    assert (code, err) == (0, "")
    found = rows(out)
    assert found["GB"] == ["DDP", "DDP, checkpointing", "FSDP", "FSDP, checkpointing"]
    assert found["micro_batch_size that fits"] == ["4"] * 4 and found["accumulation"] == ["1"] * 4
    assert "80 GB each" in out and "3 × 312 TFLOP/s are used to 40%" in out and "bfloat16" in out
    assert "peak with micro_batch_size=2" in found
    code, out, _ = command(monkeypatch, capsys, "--plan", "--gpu=t4", "--gpu_mem_gb=0.002")
    assert rows(out)["GB"] == ["one GPU", "one GPU, checkpointing"] and "float16" in out
    assert rows(out)["micro_batch_size that fits"][0] == "none, 1 shown"


def test_parts_add_up_to_the_peak(monkeypatch, capsys):
    _, out, _ = command(monkeypatch, capsys, "--plan", "--gpus=4", "--n_embd=1024", "--vocab_size=50000")
    found = rows(out)
    for column in range(4):
        parts = [float(found[part][column]) for part in plan.PARTS]
        assert sum(parts) == pytest.approx(float(found["peak"][column]), abs=0.04)
        assert min(parts) >= 0 and parts[0] > 0


@pytest.mark.parametrize(
    "argv, code, words",
    [
        (["--plan", "--gpu=h1000"], 2, "h100 | h200"),
        (["--plan", "--gpus=0"], 1, "gpus=0 must be at least 1"),
        (["--plan", "--mfu=1.5"], 1, "mfu=1.5 must be above 0"),
        (["--plan", "--gpu_mem_gb=-1"], 1, "gpu_mem_gb=-1 must not be negative"),
        (["--plan", "--gpus=5"], 1, "cannot be split over 5 processes: use 10 or 15"),
        (
            ["--plan", "--gpus=4", "--parallel=fsdp", "--fsdp_shard_size=3"],
            1,
            "fsdp_shard_size=3 does not divide gpus=4",
        ),
        (["--plan", "--gpu_count=2"], 2, "unknown flag --gpu_count"),
        (["--gpus=4"], 2, "unknown flag --gpus"),
        (["--plan=True"], 2, "--plan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(argv, code, words, monkeypatch, capsys):
    found, _, err = command(monkeypatch, capsys, *argv)
    assert found == code and words in err and len(err.splitlines()) == 1


def test_help_has_the_flags(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "--help")
    assert code == 0 and "--plan --gpus=32" in out
    assert all(f"--{name}=" in out for name in PlanConfig.__dataclass_fields__)
