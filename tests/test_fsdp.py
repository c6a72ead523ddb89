"""parallel=fsdp on one to seven gloo processes: the run of one process, and of DDP; checkpoints that go from any to any
of them; stopped, spoilt and refused runs; what a process holds; optimizer steps on shards.

All runs of so many processes are made in one go, by `two`, `three` and `four`; the tests look at what they leave.
"""

import io
import multiprocessing
import os
import re
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import partial
from itertools import count, product
from math import inf, nan
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_run, column, different, load, metrics, run, tensors
from test_dist import MATRICES, TOLERANCES, assert_close, meeting, processes
from torch.distributed.tensor import DTensor, distribute_tensor

import loader
import optim
import rundir
import runtime
import sample
import train
from model import GPT, GPTConfig, local

# What the processes start with, since each would import it anew, longer than it takes to do its part.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"]
)

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = dict(batch_size=12, block_size=16, max_iters=30, lr_decay_iters=30, eval_interval=30, eval_tokens=15 * 16)
RUN |= dict(timeout_s=60)
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
}
ON_TWO = CASES | {"msgdw, DNT": dict(CASES["msgdw, DNT"], micro_batch_size=3)}  # with accumulation
ON_THREE = {case: CASES[case] for case in ("blockwise, sigmaReparam", "nesterov, DyT")}
ON_FOUR = {case: CASES[case] for case in ("msgdw, DNT", "muon, unified")}
SPOILT = "blocks.1.mlp.f.up.weight"  # the last entry of the last process's part of its gradient is not a number …
BAD = 8  # … in this step of each of these runs
SPIKE = dict(loss_spike=0.5, save_interval=5, max_iters=20, optimizer="adamw")


# ------------------------------------------------------------------------------------------------------ the processes

turn = count()  # of the runs of this process: all processes have the same


def shards(params) -> dict:
    """A copy of what this process has of each parameter."""
    return {name: local(p.detach()).clone() for name, p in params}


class Watch:
    """A run's model and optimizer as one process sees them. `spoils(step)`: whether to spoil its gradient in that step,
    from 1. `stop_in`: the step after which the process sends itself SIGTERM."""

    def __init__(self, patch, spoils, stop_in):
        self.spoils, self.stop_in, self.step, self.seen = spoils, stop_in, 0, {"frozen": [], "gain": set()}
        self.make, self.norm, self.shard = train.make_optimizer, torch.nn.utils.get_total_norm, runtime.shard
        patch.setattr(train, "make_optimizer", self.make_optimizer)
        patch.setattr(torch.nn.utils, "get_total_norm", self.get_total_norm)
        patch.setattr(runtime, "shard", self.shard_model)

    def shard_model(self, model, *args):
        self.seen["meta"] = [p.is_meta for p in model.parameters()]
        self.shard(model, *args)
        self.seen["meta"] += [p.is_meta for p in model.parameters()]

    def make_optimizer(self, model, config):
        """The optimizer of the run; notes where the run starts."""
        self.model, self.optimizer = model, self.make(model, config)
        self.seen["start"] = shards(model.named_parameters())
        self.seen["bytes"] = {name: local(p).untyped_storage().nbytes() for name, p in model.named_parameters()}
        self.seen["sharded"] = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        self.seen["state_sizes"] = [local(t).numel() for s in self.optimizer.state.values() for t in s.values()]
        self.optimizer.register_step_pre_hook(self.before)
        self.optimizer.register_step_post_hook(self.after)
        if model.final_norm.gain is not None:
            model.final_norm.register_forward_pre_hook(lambda slot, x: self.seen["gain"].add(slot.gain.dtype))
        return self.optimizer

    def get_total_norm(self, grads):
        self.step += 1
        named = dict(self.model.named_parameters())
        if self.spoils(self.step):
            local(named[SPOILT].grad).view(-1)[-1] = nan
        self.seen["grads"] = {name: (p.dtype, p.grad.dtype) for name, p in named.items()}
        return self.norm(grads)

    def before(self, *_):
        self.old = [*shards(self.model.named_parameters()).values(), *map(torch.clone, self.state())]

    def after(self, *_):
        new = [*shards(self.model.named_parameters()).values(), *self.state()]
        if all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(self.old, new, strict=True)):
            self.seen["frozen"].append(self.step)
        if self.step == self.stop_in:
            os.kill(os.getpid(), signal.SIGTERM)

    def state(self) -> list:
        return [local(t) for state in self.optimizer.state.values() for t in state.values()]


def play(rank, world, out, spoils=lambda step: False, stop_in=0, torchrun=None, patches=(), **config):
    """train.py on this process, one of `world`; `patches`: arguments of setattr. Leaves exit code, output, and what
    `Watch` saw in a file next to `out`."""
    torch.set_num_threads(1)
    said, torchrun = io.StringIO(), world > 1 if torchrun is None else torchrun
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rundir, "draw_loss", lambda *_: None)
        for args in patches:
            patch.setattr(*args)
        watch = Watch(patch, spoils, stop_in if rank == world - 1 else 0)
        if torchrun:
            for name, value in dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="file").items():
                patch.setenv(name, str(value))
            meet = meeting(rank, world, f"{out}.{world}.{next(turn)}")
            patch.setattr(dist, "init_process_group", partial(dist.init_process_group, **meet))
        with redirect_stdout(said), redirect_stderr(said):
            code = run(out_dir=out, **RUN | config)
    if dist.is_initialized():  # after an error, which leaves that to the end of the process
        dist.destroy_process_group()
    left = dict(watch.seen, code=code, said=said.getvalue())
    if "start" in left:
        left["end"] = shards(watch.model.named_parameters())
    torch.save(left, f"{out}.rank{rank}")


def left(out, world, code=0) -> list:
    """What each process left of a run that was to end with this exit code."""
    found = [torch.load(f"{out}.rank{rank}", weights_only=False) for rank in range(world)]
    assert [f["code"] for f in found] == [code] * world, found[0]["said"][-3000:]
    return found


def put_together(parts: list) -> dict:
    """Whole parameters from the rows that each process has, in the order of the processes."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def other_targets(batch):
    """Dataset.batch whose batch 16 has targets that never follow (steps of the walk are 1, 2 and 5)."""

    def tampered(self, step, *args):
        x, y = batch(self, step, *args)
        return x, (y + 7) % 50 if step == 16 else y

    return tampered


def like_gpt2(name, dropout):
    """In the place of OpenAI's weights: GPT-2's layout, small."""
    sizes = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=50)
    return GPT(GPTConfig(**sizes, norm="layernorm", bias=True, dropout=dropout), seed=5)


def gpt2_patches(dataset):
    meta = loader.load_meta(str(dataset))
    return (GPT, "from_pretrained", like_gpt2), (train, "Tokenizer", SimpleNamespace(meta_for=lambda name: meta))


def every_case(rank, world, folder, name, cases, **config):
    """Under DDP it is spoilt on all: it is the same there. (test_dist.py has a bad one on one, before they meet.)"""
    here = rank == world - 1 or name.startswith("ddp")
    for case in cases:
        out = folder / f"{case}, {name}"
        play(rank, world, out, lambda step: here and step == BAD, **cases[case] | config)


def shared_runs(rank, world, folder, name, dataset, **config):
    """Runs that are the same on one process and on two."""
    spike = (loader.Dataset, "batch", other_targets(loader.Dataset.batch))
    play(rank, world, folder / f"spike, {name}", patches=[spike], dataset=dataset, **SPIKE | config)
    bf16 = dict(dtype="bfloat16", branch_scale="layerscale", max_iters=6, micro_batch_size=6)
    play(rank, world, folder / f"bf16, {name}", dataset=dataset, **bf16 | config)
    begun = dict(init_from=folder / "msgdw, DNT, one" / "last.pt", dataset=dataset, max_iters=4)
    play(rank, world, folder / f"from a file, {name}", **begun | config)
    play(rank, world, folder / f"eval_only, {name}", eval_only=True, **begun | config)
    gpt2 = dict(patches=gpt2_patches(dataset), dataset=dataset, init_from="gpt2", max_iters=4)
    play(rank, world, folder / f"gpt2, {name}", **gpt2 | config)


def chain(rank, world, folder, until, dataset, **config):
    """Runs that one world passes on to the next."""
    for case in ("muon, unified", "adam_mini, Admin"):
        out = folder / f"{case}, chain"
        play(rank, world, out, init_from="auto", max_iters=until, dataset=dataset, **CASES[case] | config)


def on_one(folder, dataset):
    every_case(0, 1, folder, "one", CASES, dataset=dataset)
    shared_runs(0, 1, folder, "one", dataset)
    for case in ("muon, unified", "adam_mini, Admin"):
        play(0, 1, folder / f"{case}, smooth", dataset=dataset, **CASES[case])
    chain(0, 1, folder, 6, dataset)


def on_two(rank, world, folder, dataset):
    go, fsdp = partial(play, rank, world, dataset=dataset), dict(parallel="fsdp")
    every_case(rank, world, folder, "ddp2", CASES, dataset=dataset)
    every_case(rank, world, folder, "fsdp2", ON_TWO, dataset=dataset, **fsdp)
    shared_runs(rank, world, folder, "fsdp2", dataset, **fsdp)
    spike = (loader.Dataset, "batch", other_targets(loader.Dataset.batch))
    go(folder / "spike, ddp2", patches=[spike], **SPIKE)
    chain(rank, world, folder, 12, dataset, micro_batch_size=2, **fsdp)
    short = dict(CASES["adam_mini, Admin"], max_iters=8, micro_batch_size=3, **fsdp)
    go(folder / "short", **short)
    go(folder / "recomputed", activation_checkpointing=True, **short)
    go(folder / "stopped", stop_in=5, **short)
    if rank == 0:
        shutil.copy(folder / "stopped" / "last.pt", folder / "stopped.pt")
    go(folder / "stopped", init_from="resume", **short)
    compile = (torch, "compile", partial(torch.compile, backend="eager"))
    go(folder / "compiled", patches=[compile], **short | dict(compile=True, max_iters=4))
    for bad in (0, 1):
        go(folder / f"bad rank {bad}", lambda step, bad=bad: rank == bad and step > 3, max_skipped=3, **fsdp)
    for name, flags in REFUSED.items():
        go(folder / name, **flags)


def on_three(rank, world, folder, dataset):
    every_case(rank, world, folder, "fsdp3", ON_THREE, dataset=dataset, parallel="fsdp")
    chain(rank, world, folder, 18, dataset)


def on_four(rank, world, folder, dataset):
    every_case(rank, world, folder, "fsdp4", ON_FOUR, dataset=dataset, parallel="fsdp")
    chain(rank, world, folder, 24, dataset, parallel="fsdp", fsdp_shard_size=2, micro_batch_size=1)


@pytest.fixture(scope="module")
def one(dataset, tmp_path_factory):
    """A folder with runs of one process; those of the others come into it."""
    on_one(folder := tmp_path_factory.mktemp("fsdp"), dataset)
    return folder


@pytest.fixture(scope="module")
def two(one, dataset):
    processes(2, on_two, one, dataset)
    return one


@pytest.fixture(scope="module")
def three(two, dataset):
    processes(3, on_three, two, dataset)
    return two


@pytest.fixture(scope="module")
def four(three, dataset):
    processes(4, on_four, three, dataset)
    return three


# --------------------------------------------------------------------------------------------------------- the same run


def assert_same_values(got, expected):
    for name, rel in TOLERANCES.items():
        assert column(got, name) == pytest.approx(column(expected, name), rel=rel, abs=0), name


def divided_out(case: str, name: str) -> bool:
    """Whether a norm further on divides this parameter out, so that its gradient is nothing but rounding errors."""
    return "unified" in case and name.endswith("pre.magnitude")


def assert_same_ends(case, got, expected, start):
    """Two checkpoints: parameters, next to how far they have come; buffers; optimizer state."""
    pairs = [({}, {}), ({}, {})]
    names = [name for group in expected["optimizer"]["param_groups"] for name in group["param_names"]]
    for checkpoint, (moved, state) in zip((got, expected), pairs, strict=True):
        moved |= {name: checkpoint["model"][name] for name in names if not divided_out(case, name)}
        all_state = checkpoint["optimizer"]["state"]
        state |= tensors({name: all_state[i] for i, name in enumerate(names) if not divided_out(case, name)})
    assert_close(pairs[0][0], pairs[1][0], 5e-4, start)
    assert_close(pairs[0][1], pairs[1][1], 1e-3)
    buffers = [{name: t for name, t in c["model"].items() if name not in names} for c in (got, expected)]
    assert_close(*buffers, 5e-4)


def assert_same_case(folder, case, name, world):
    """To rounding the run of one process: metrics, parameters, optimizer state; in the spoilt step nothing moved."""
    got, expected = folder / f"{case}, {name}", folder / f"{case}, one"
    assert_same_values(got, expected)
    assert column(got, "skipped_steps")[30] == 1 and column(got, "grad_norm")[BAD] is None
    parts, (start,) = left(got, world), left(expected, 1)
    assert [part["frozen"] for part in parts] == [[BAD]] * world
    a, b = load(got / "last.pt"), load(expected / "last.pt")
    assert_same_ends(case, a, b, start["start"])
    return parts, a, b


@pytest.mark.parametrize("case", CASES)
def test_ddp_on_two_processes(case, two):
    assert_same_case(two, case, "ddp2", 2)


@pytest.mark.parametrize(
    "world, case", [(world, case) for world, cases in ((2, ON_TWO), (3, ON_THREE), (4, ON_FOUR)) for case in cases]
)
def test_fsdp(world, case, four):
    """Starts from the same bits, ends the same to rounding, and its processes hold their rows alone."""
    parts, saved, whole = assert_same_case(four, case, f"fsdp{world}", world)
    (single,) = left(four / f"{case}, one", 1)
    assert different(put_together([part["start"] for part in parts]), single["start"]) == []
    for end in ("start", "end"):
        for name, p in single["start"].items():
            size = -(-len(p) // world)
            rows = [min(len(p), (rank + 1) * size) - min(len(p), rank * size) for rank in range(world)]
            assert [len(part[end][name]) for part in parts] == rows, name
    ended = put_together([part["end"] for part in parts])
    assert different(ended, {name: saved["model"][name] for name in ended}) == []
    kinds = [{name: (type(t), t.dtype, t.shape) for name, t in tensors(c).items()} for c in (saved, whole)]
    assert kinds[0] == kinds[1]
    assert saved["optimizer"]["param_groups"] == whole["optimizer"]["param_groups"]


def test_clipping_is_at_work(one):
    norms = [n for n in column(one / "msgdw, DNT, one", "grad_norm").values() if n is not None]
    assert sum(n > CASES["msgdw, DNT"]["grad_clip"] for n in norms) > 10


def test_processes_without_a_row(three):
    """Of a parameter with one entry, DyT's α or σReparam's γ, one process has all."""
    for case, name in (("nesterov, DyT", "final_norm.alpha"), ("blockwise, sigmaReparam", "blocks.0.attn.f.q.sigma")):
        parts, (single,) = left(three / f"{case}, fsdp3", 3), left(three / f"{case}, one", 1)
        assert [part["end"][name].numel() for part in parts] == [1, 0, 0]
        assert (parts[0]["end"][name] - single["start"][name]).abs() > 1e-3  # it is trained there


def test_each_process_holds_a_share_and_never_the_whole(four):
    """Parameters are sharded before they have storage; optimizer state is as large as the parameters' shards."""
    whole = left(four / "msgdw, DNT, one", 1)[0]
    n = sum(p.numel() for p in whole["start"].values())
    for world in (2, 4):
        parts = left(four / f"msgdw, DNT, fsdp{world}", world)
        for part in parts:
            assert part["meta"] and all(part["meta"])
            assert part["sharded"] == whole["start"].keys()
            held = sum(p.numel() for p in part["start"].values())
            assert held == pytest.approx(n / world, rel=0.01)
            assert sum(part["bytes"].values()) == 4 * held
            assert sum(part["state_sizes"]) == held  # momentum
        assert sum(p.numel() for part in parts for p in part["start"].values()) == n
    ddp = left(four / "msgdw, DNT, ddp2", 2)[1]
    assert not ddp["sharded"] and sum(ddp["bytes"].values()) == 4 * n


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_load_anywhere(two, capsys, monkeypatch):
    out = two / "muon, unified, fsdp2"
    idx = torch.arange(12)[None]
    a, b = (
        GPT.from_checkpoint(rundir.load_checkpoint(f / "best.pt"))(idx)[0] for f in (out, two / "muon, unified, one")
    )
    assert torch.allclose(a, b, atol=1e-3) and a.std() > 0.1
    monkeypatch.setattr("sys.argv", ["sample.py", f"--out_dir={out}", "--start=AB", "--device=cpu", "--num_samples=1"])
    assert sample.main() == 0
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize("case", ["muon, unified", "adam_mini, Admin"])
def test_saved_and_resumed_by_different_processes(case, four, dataset):
    """One process; FSDP on two; DDP on three; HSDP on four, with two shards; one again: six steps each."""
    chain(0, 1, four, 30, dataset)
    out, smooth = four / f"{case}, chain", four / f"{case}, smooth"
    assert list(column(out, "train_loss")) == list(range(1, 31))
    for name in ("train_loss", "grad_norm", "lr", "tokens"):
        expected = column(smooth, name)
        got = {step: value for step, value in column(out, name).items() if step in expected}
        assert got == pytest.approx(expected, rel=TOLERANCES[name], abs=0), name
    a, b = load(out / "last.pt"), load(smooth / "last.pt")
    assert_same_ends(case, a, b, left(smooth, 1)[0]["start"])


def test_stopped_and_resumed(two):
    """One of two processes gets SIGTERM, and the run goes on exactly."""
    assert load(two / "stopped.pt")["step"] == 5
    left(two / "stopped", 2)
    assert_same_run(two / "stopped", two / "short")


@pytest.mark.parametrize("name", ["from a file", "gpt2"])
def test_begun_from_weights(name, two):
    weights = load(two / "msgdw, DNT, one" / "best.pt")["model"] if name == "from a file" else None
    weights = weights or like_gpt2("gpt2", 0.0).state_dict()
    start = put_together([part["start"] for part in left(two / f"{name}, fsdp2", 2)])
    assert different(start, weights) == []
    assert_same_values(two / f"{name}, fsdp2", two / f"{name}, one")


def test_eval_only(two):
    """Exits with the loss that the run of the checkpoint had logged."""
    said = left(two / "eval_only, fsdp2", 2)[0]["said"]
    loss = float(re.search(r"step 0: validation loss ([\d.]+)", said)[1])
    assert loss == pytest.approx(column(two / "msgdw, DNT, one", "val_loss")[30], rel=2e-6)
    assert not (two / "eval_only, fsdp2").exists()


# ------------------------------------------------------------------------------------------------------ ways to compute


def test_recomputed_activations_change_nothing(two):
    left(two / "recomputed", 2)
    a, b = load(two / "recomputed" / "last.pt"), load(two / "short" / "last.pt")
    assert different(a["model"], b["model"]) == []
    assert different(a["optimizer"]["state"], b["optimizer"]["state"]) == []
    assert column(two / "recomputed", "train_loss") == column(two / "short", "train_loss")


def test_compiled(two):
    """By dynamo alone, which is quick: on two processes, with hooks between the compiled parts."""
    assert "compiled in" in left(two / "compiled", 2)[0]["said"]
    for name in ("train_loss", "grad_norm"):
        whole = {step: value for step, value in column(two / "short", name).items() if step <= 4}
        assert column(two / "compiled", name) == pytest.approx(whole, rel=TOLERANCES[name], abs=0)
    a, b = load(two / "compiled" / "last.pt")["model"], load(two / "short" / "last.pt")["model"]
    assert a.keys() == b.keys()


def inductor(rank, world, folder, dataset):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name, compile in (("eager", False), ("inductor", True)):
        flags = dict(dataset=dataset, n_layer=1, max_iters=4, parallel="fsdp", torchrun=True, compile=compile)
        play(rank, world, folder / name, **flags)


def test_compiled_by_inductor(dataset, tmp_path):
    """One process under torchrun, to be quick: what is compiled is the same."""
    processes(1, inductor, tmp_path, dataset)
    assert "compiled in" in left(tmp_path / "inductor", 1)[0]["said"]
    assert_same_values(tmp_path / "inductor", tmp_path / "eager")


def test_bfloat16_leaves_gains_in_fp32(two):
    """Gains of 0.1 (LayerScale's), which bf16 does not have: to round them would change the first loss."""
    out, one = two / "bf16, fsdp2", two / "bf16, one"
    assert column(out, "train_loss")[1] == column(one, "train_loss")[1]
    assert column(out, "train_loss") == pytest.approx(column(one, "train_loss"), rel=5e-3)
    for part in left(out, 2):
        assert "dtype bfloat16" in left(out, 2)[0]["said"]
        assert part["gain"] == {torch.float32}
        assert {kind for kinds in part["grads"].values() for kind in kinds} == {torch.float32}


# ------------------------------------------------------------------------------------------------------------ bad turns


def test_too_many_bad_gradients(two):
    """The first bad tensor has the same name, whichever process has it; the checkpoint is of the last good step."""
    for bad in (0, 1):
        out = two / f"bad rank {bad}"
        parts = left(out, 2, code=1)
        for rank, part in enumerate(parts):
            (line,) = [line for line in part["said"].splitlines() if "error" in line]
            assert line.startswith(f"[rank {rank}] error: 3 steps in a row, up to about step 6, had a gradient")
            assert f"(first bad tensor: the gradient of {SPOILT})" in line
            assert part["frozen"] == [4, 5, 6]
        assert load(out / "last.pt")["skipped"] == 3


@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_rolled_back_after_a_spike(name, two):
    """Batch 16 has targets that no one could learn: step 17 shows it, and the run goes on from step 15, without it."""
    out, one = two / f"spike, {name}", two / "spike, one"
    left(out, 2)
    (row,) = [row for row in metrics(out) if "rolled_back_from" in row]
    assert row["step"] == 15 and row["rolled_back_from"] == 17
    assert_same_values(out, one)
    assert load(out / "last.pt")["shift"] == 2


REFUSED = {
    "none": dict(parallel="none"),
    "fp16": dict(parallel="fsdp", dtype="float16"),
    "thirds": dict(parallel="fsdp", fsdp_shard_size=3),
}
REFUSALS = {
    "none": "parallel=none, but torchrun started 2 processes: use --parallel=auto",
    "fp16": "parallel=fsdp has no loss scaling, which fp16 needs: use --dtype=bfloat16 or float32, or ddp",
    "thirds": "fsdp_shard_size=3 does not divide the 2 processes: use one of 1, 2",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_under_torchrun(name, two):
    for rank, part in enumerate(left(two / name, 2, code=1)):
        assert [line for line in part["said"].splitlines() if "rror" in line] == [
            f"[rank {rank}] error: {REFUSALS[name]}"
        ]
        assert "Traceback" not in part["said"]
    assert not (two / name).exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (dict(parallel="fsdp"), "parallel=fsdp needs torchrun: torchrun --standalone --nproc_per_node=N train.py …"),
        (dict(parallel="ddp"), "parallel=ddp needs torchrun: torchrun --standalone --nproc_per_node=N train.py …"),
        (dict(fsdp_shard_size=2), "fsdp_shard_size=2 needs parallel=fsdp: set that, or leave it out"),
        (dict(fsdp_shard_size=-1, parallel="fsdp"), "fsdp_shard_size=-1 must not be negative"),
    ],
)
def test_refused_without_torchrun(flags, message, dataset, tmp_path, capsys):
    assert run(dataset=dataset, out_dir=tmp_path / "run", **flags) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "run").exists()


GB = 10**9


@pytest.mark.parametrize(
    "setting, device, dtype, world, fixed, chosen",
    [
        ("auto", "cuda", torch.bfloat16, 8, 55 * GB, "ddp"),  # of 80 GB: below 70 %
        ("auto", "cuda", torch.bfloat16, 8, 57 * GB, "fsdp"),
        ("auto", "cuda", torch.float32, 2, 200 * GB, "fsdp"),
        ("auto", "cuda", torch.bfloat16, 1, 57 * GB, "ddp"),  # nobody to share with
        ("auto", "cuda", torch.float16, 8, 57 * GB, "ddp"),
        ("auto", "cpu", torch.float32, 8, 57 * GB, "ddp"),
        ("auto", "cuda", torch.bfloat16, 0, 57 * GB, "none"),  # without torchrun
        ("ddp", "cuda", torch.bfloat16, 8, 57 * GB, "ddp"),
        ("fsdp", "cuda", torch.bfloat16, 8, 1, "fsdp"),
        ("none", "cuda", torch.bfloat16, 1, 1, "none"),
    ],
)
def test_choose_parallel(setting, device, dtype, world, fixed, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GB))
    monkeypatch.setattr(runtime.Env, "least", lambda self, value: value)  # all have the same GPU
    env = runtime.Env(0, max(world, 1), torch.device(device), dtype, distributed=world > 0)
    assert runtime.choose_parallel(setting, env, fixed)[0] == chosen


@pytest.mark.parametrize("optimizer, size", [("adamw", 20), ("msgdw", 16)])
def test_what_a_process_holds_is_counted(optimizer, size, monkeypatch):
    """Bytes a parameter: weight, gradient, what DDP may hold of it beside, and one or two moments."""
    seen, config = [], train.TrainConfig(optimizer=optimizer)
    optim.fill_defaults(config)
    monkeypatch.setattr(runtime, "choose_parallel", lambda setting, env, fixed: seen.append(fixed) or ("none", ""))
    model = GPT.empty(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=31))
    env = runtime.Env(0, 1, torch.device("cpu"), torch.float32, distributed=False)
    train.place(model, None, config, env)
    assert seen == [pytest.approx(size * model.num_params(), rel=0.03)]  # AdamW counts steps, for each tensor


def time_outs(rank, world, folder):
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", timeout=limit, **meeting(rank, world, folder / "groups"))
    env = runtime.Env(rank, world, torch.device("cpu"), torch.float32, distributed=True, timeout=limit)
    runtime.shard(model := GPT.empty(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=31)), 2, env)
    groups = model.wte.weight.device_mesh.get_all_groups()
    found = [(g._get_backend(env.device).options._timeout, dist.get_process_group_ranks(g)) for g in groups]
    torch.save([(limit.total_seconds(), ranks) for limit, ranks in found], folder / f"{rank}")
    dist.destroy_process_group()


def test_the_groups_of_hsdp_have_the_time_out_that_was_asked_for(tmp_path):
    processes(4, time_outs, tmp_path)
    found = [load(tmp_path / f"{rank}") for rank in range(4)]
    assert found == [
        [(77.0, [rank % 2, rank % 2 + 2]), (77.0, [rank // 2 * 2, rank // 2 * 2 + 1])] for rank in range(4)
    ]


# -------------------------------------------------------------------------------------------- optimizer steps on shards

SMALL, LARGER = MATRICES.values()
STEPS = {  # optimizer, layout, dtype of Muon's iteration, matrices singly
    "adamw": ("adamw", LARGER, "float32", False),
    "dampening": ("msgdw", LARGER, "float32", False),
    "adam_mini": ("adam_mini", LARGER, "float32", False),
    "muon": ("muon", LARGER, "float32", False),
    "muon, bf16": ("muon", SMALL, "bfloat16", True),
}


def steps(rank, world, folder, shard_sizes=(0,)):
    """Six steps from gradients that are the same everywhere: of the third they are not finite, in the fifth some
    matrices have none. Leaves parameters and optimizer state, put together, and how much of the state is here."""
    torch.set_num_threads(1)
    if world > 1:
        meet = meeting(rank, world, folder / str(world))
        dist.init_process_group("gloo", timeout=timedelta(seconds=60), **meet)
    env, found = runtime.Env(rank, world, torch.device("cpu"), torch.float32, world > 1), {}
    for (case, (name, layout, dtype, singly)), shard_size in product(STEPS.items(), shard_sizes):
        model = GPT.empty(GPTConfig(n_head=2, n_embd=32, block_size=8, vocab_size=31, qk_norm=True, **layout))
        if world > 1:
            runtime.shard(model, shard_size, env)
        model.to_empty(device="cpu").init_weights(1)
        model.set_compute_dtype(getattr(torch, dtype))
        optim.fill_defaults(config := train.TrainConfig(optimizer=name, dampening=0.5 if name == "msgdw" else None))
        optimizer, random = optim.make_optimizer(model, config), torch.Generator().manual_seed(0)
        for step in range(6):
            for key, p in model.named_parameters():
                grad = torch.randn(p.shape, generator=random)
                if step < 2:  # some processes have not begun
                    grad[len(grad) // 2 :] = 0
                if step == 2:
                    grad[0] = inf
                if world > 1:
                    grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
                p.grad = None if step == 4 and key.endswith(("q.weight", "down.weight")) else grad
            for group in optimizer.param_groups:
                group["lr"] = 0.01
            optimizer.found_inf = torch.tensor(float(step == 2))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(optim, "one_at_a_time", lambda device, singly=singly: singly)
                optimizer.step()
        state = optimizer.state_dict()["state"]
        sizes = {key: local(t).numel() for key, t in tensors(state).items()}
        put = rundir.snapshot({"model": model.state_dict(), "state": state})
        found[case, shard_size] = dict(put, sizes=sizes)
    torch.save(found, folder / f"{world}.rank{rank}")
    if world > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize("world, shard_sizes", [(2, (0,)), (3, (0,)), (4, (0, 2)), (7, (0,))])
def test_steps_on_shards(world, shard_sizes, tmp_path):
    """Muon's are the same bits as on whole matrices. The rest, which goes entry by entry, or by Adam-mini's blocks that
    shards cut through, is the same to rounding: a kernel rounds the last few entries of a tensor otherwise."""
    steps(0, 1, tmp_path)
    processes(world, steps, tmp_path, shard_sizes)
    one = torch.load(tmp_path / "1.rank0")
    for rank in range(world):
        for (case, shard_size), got in torch.load(tmp_path / f"{world}.rank{rank}").items():
            expected = one[case, 0]
            for part in ("model", "state"):
                a, b = tensors(got[part]), tensors(expected[part])
                assert_close(a, b, 1e-6)
                exact = [key for key in a if "momentum" in key or ".f." in key] if case.startswith("muon") else []
                assert different([a[key] for key in exact], [b[key] for key in exact]) == [] if exact else True, case
            moments = [key for key in got["sizes"] if key.endswith(("momentum_buffer", "exp_avg", "exp_avg_sq"))]
            held, wholes = (sum(sizes[key] for key in moments) for sizes in (got["sizes"], expected["sizes"]))
            assert held < 1.2 * wholes / (shard_size or world), (case, rank)
