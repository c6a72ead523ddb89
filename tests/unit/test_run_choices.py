"""Decisions that need no run: how a batch is split, peak FLOP/s by name, which parallelism, what a
signal asks for."""

import io
import math
import mmap
import os
import platform
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from configurator import Range, read_flags
from layers import cores
from model import GPTConfig
from nanodnt.engine import seed_step, split_batch
from nanodnt.run import hardware
from nanodnt.run.compilation import choose_blocks
from nanodnt.run.environment import (
    GROUP,
    Env,
    Split,
    Stop,
    choose_device,
    choose_dtype,
    find_group,
    join_processes,
    possible_parallel,
)
from nanodnt.run.errors import reports_errors
from nanodnt.run.hardware import choose_compile, peak_flops
from nanodnt.settings import TrainConfig
from nanodnt.start import split_run
from support.runs import ROOT
from support.strikes import kill_me

PEAKS = {  # a device's name: TFLOP/s
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989,
    "NVIDIA A100-SXM4-80GB": 312,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 4090 D": 147,
    "NVIDIA GB200": 2500,
    "AMD Instinct MI325X": 1307,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    **dict.fromkeys(["NVIDIA T400", "Something New"]),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_flops_by_name(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device, tflops = torch.device("cuda"), PEAKS[name]
    assert peak_flops(device, torch.bfloat16) == (tflops and tflops * 1e12)
    assert peak_flops(device, torch.bfloat16, 5e12) == 5e12  # the flag wins
    assert peak_flops(device, torch.float32) is None


FREED_AND_NEEDED_AGAIN = """
import resource
import torch
from nanodnt.run.environment import environment

def step():
    tensors = [torch.ones(2**18) for _ in range(64)]  # 1 MiB each

with environment("cpu", "float32", 60):
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="another C library decides this by itself"
)
def test_memory_that_a_step_on_a_cpu_frees_stays_for_the_next():
    command = [sys.executable, "-c", FREED_AND_NEEDED_AGAIN]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    page_faults = int(printed.splitlines()[-1])
    assert page_faults < 64 * 2**20 / mmap.PAGESIZE  # less than the pages of one of the ten steps


@pytest.mark.parametrize(
    "variable", ["OTHER=1", "MALLOC_TRIM_THRESHOLD_=1", "GLIBC_TUNABLES=glibc.malloc.check=1"]
)
def test_a_users_setting_of_malloc_stays(variable, monkeypatch):
    """Another C library has none."""
    mallopt = Mock()
    monkeypatch.setenv(*variable.split("=", 1))
    for library in (SimpleNamespace(), SimpleNamespace(mallopt=mallopt)):
        monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name, library=library: library)
        hardware.keep_freed_memory()
    assert mallopt.call_count == (2 if variable == "OTHER=1" else 0)


@pytest.mark.parametrize(
    "encoding, written", [("ascii", b"\\xfc \\u2192"), ("latin-1", b"\xfc \\u2192")]
)
def test_a_terminal_of_another_encoding_ends_no_run(encoding, written, monkeypatch):
    """Whatever is printed, by whom it may be; also the name of a file that is no text."""
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    env = Env(0, 1, torch.device("cpu"), torch.float32, False)

    @reports_errors
    def main():
        print("ü →", end=" ")
        env.print("\udcff")

    assert main() == 0
    assert sys.stdout.buffer.getvalue() == written + b" \\udcff\n"


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  "
DRIVER += "Release Build  (root@host)"


def test_a_gpu_that_torch_cannot_use_is_no_machine_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr("nanodnt.run.hardware.NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_device("auto") == (torch.device("cpu"), "auto: no GPU found")
    (tmp_path / "version").write_text(DRIVER)
    with pytest.raises(
        ValueError,
        match="driver 580.159.04, but torch .* finds no GPU that works: install the build",
    ):
        choose_device("auto")
    assert choose_device("cpu") == (torch.device("cpu"), "as asked")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto") == (torch.device("cpu"), "auto: no GPU found")


@pytest.mark.parametrize("amx", (False, True))
@pytest.mark.parametrize("avx512", (False, True))
def test_the_dtype_of_a_cpu(amx, avx512, monkeypatch):
    """bf16 where one of the two is there."""
    for name, answer in (("_is_amx_tile_supported", amx), ("_is_avx512_bf16_supported", avx512)):
        monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer)
    expected = torch.bfloat16 if amx or avx512 else torch.float32
    reason = "auto: the CPU has it" if amx or avx512 else "auto: the CPU has no bf16"
    assert choose_dtype("auto", torch.device("cpu")) == (expected, reason)
    asked = choose_dtype("float16", torch.device("cpu"))
    assert asked == (torch.float16, "as asked; slow on most CPUs, auto is not")
    reason = "as asked" if amx or avx512 else "as asked; auto is float32 on this CPU"
    assert choose_dtype("bfloat16", torch.device("cpu")) == (torch.bfloat16, reason)


def test_under_torchrun_a_second_ctrl_c_is_the_first(monkeypatch):
    """The terminal sends it to every process, and torchrun sends it on."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with Stop() as stop:
        stop.nothing_to_lose = False
        try:
            kill_me(signal.SIGINT, signal.SIGINT)
        except KeyboardInterrupt:  # it would end pytest
            pytest.fail("the run was cut off")
        assert stop.signal == signal.SIGINT


STOPPED = """
import os, signal, threading
from nanodnt.run.environment import Stop
with Stop() as stop:
    (thread,) = set(threading.enumerate()) - {threading.main_thread()}
    stop.stopped = True
    os.kill(os.getpid(), signal.SIGTERM)
thread.join()
print("saved")
"""


def test_a_run_that_has_said_that_it_saves_is_not_ended_at_once():
    """A signal before the first step, which the loop has seen before the thread."""
    done = subprocess.run([sys.executable, "-c", STOPPED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")


def test_without_a_group_no_process_is_torchruns(monkeypatch):
    """A variable that torchrun has left in a shell: the end of that shell is no reason to stop."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    alone = Env(0, 1, torch.device("cpu"), torch.float32, distributed=False)
    with Stop() as stop:
        monkeypatch.setattr(os, "getppid", lambda: -1)
        assert not stop.agreed(alone)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"LOCAL_RANK": "3", "MASTER_PORT": "1"},
    ],
    ids=str,
)
def test_what_describes_no_group(variables, monkeypatch):
    for name in GROUP:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_group() is None


def test_dropout_depends_on_seed_step_and_rank_alone():
    def draw(*place):
        seed_step(*place)
        return tuple(torch.rand(4).tolist())

    places = [(seed, step, rank) for seed in (1, 2) for step in (0, 1, 7) for rank in (0, 1, 2)]
    drawn = [draw(*place) for place in places]
    assert len(set(drawn)) == len(places)
    assert [draw(*place) for place in places[::-1]] == drawn[::-1]


SPLITS = {  # batch, micro (0 = choose), processes → (micro, accumulation), or words of the refusal
    (8, 0, 1): (8, 1),
    (8, 2, 1): (2, 4),
    (8, 2, 2): (2, 2),
    (480, 0, 8): (15, 4),
    (480, 0, 1): (16, 30),
    (17, 0, 1): (1, 17),
    (1, 0, 1): (1, 1),
    (9, 0, 2): "batch_size=9 cannot be split over 2 processes: use 8 or 10",
    (3, 0, 4): "batch_size=3 cannot be split over 4 processes: use 4",
    (8, 3, 1): r"micro_batch_size=3 does not divide the 8 sequences of each process .*: use 2 or 4",
    (8, 16, 2): "micro_batch_size=16 does not divide the 4 sequences of each process",
}


@pytest.mark.parametrize("case, expected", SPLITS.items())
def test_split_batch(case, expected):
    if isinstance(expected, tuple):
        assert split_batch(*case) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            split_batch(*case)


@pytest.mark.parametrize(
    "setting, dtype, world, possible",
    [
        ("auto", torch.bfloat16, 8, ["ddp", "fsdp"]),
        ("auto", torch.float16, 8, ["ddp"]),  # FSDP has no loss scaling
        ("auto", torch.bfloat16, 1, ["ddp"]),  # no other process to share with
        ("auto", torch.bfloat16, 0, ["none"]),  # without torchrun
        ("fsdp", torch.bfloat16, 8, ["fsdp"]),
        ("none", torch.bfloat16, 1, ["none"]),
    ],
)
def test_what_a_run_can_be(setting, dtype, world, possible):
    env = Env(0, max(world, 1), torch.device("cuda"), dtype, distributed=world > 0)
    assert possible_parallel(setting, env) == possible


@pytest.mark.parametrize("cuda, parallel", [(False, "ddp"), (True, "fsdp")])
def test_a_run_on_a_cpu_counts_no_memory(cuda, parallel, monkeypatch):
    """It is DDP, as large a micro batch as split_batch gives; GPUs get what their least memory can
    hold."""
    asked = []

    def choose_split(model, config, env, limit):
        asked.append(limit)
        return Split("fsdp", False, 3, 4, "counted")

    monkeypatch.setattr("nanodnt.plan.split.choose_split", choose_split)
    monkeypatch.setattr("nanodnt.start.available_bytes", lambda device: 7)
    monkeypatch.setattr(Env, "gather", lambda self, value: [value, value - 1])
    monkeypatch.setattr(Env, "check_same", lambda self, settings: None)
    env = Env(0, 2, torch.device("cuda" if cuda else "cpu"), torch.float32, distributed=True)
    split = split_run(None, TrainConfig(batch_size=24), env)
    assert (env.parallel, split.parallel, asked) == (parallel, parallel, [6] * cuda)
    assert (split.micro, split.accumulation) == ((3, 4) if cuda else (12, 1))


@pytest.mark.parametrize(
    "setting, n_layer, parallel, world, batch_size, blocks",
    [
        ("auto", 35, "none", 1, 480, False),
        ("auto", 36, "none", 1, 480, True),
        (True, 48, "none", 1, 480, False),
        ("blocks", 2, "none", 1, 480, True),
        ("auto", 12, "ddp", 8, 480, False),
        # the gradients leave once a step, blocks cost every micro batch
        ("auto", 12, "ddp", 8, 240, True),
        ("auto", 24, "ddp", 8, 480, True),  # wider
        ("auto", 12, "ddp", 16, 9600, True),  # two machines
        (True, 24, "ddp", 8, 480, False),
        ("blocks", 12, "ddp", 8, 480, True),
        ("auto", 12, "ddp", 1, 1, False),  # no other process to send gradients to
        (True, 12, "fsdp", 1, 480, True),
    ],
)
def test_what_is_compiled_by_blocks(setting, n_layer, parallel, world, batch_size, blocks):
    sizes = GPTConfig(n_layer=n_layer, n_embd=64 * n_layer, block_size=1024)
    model = SimpleNamespace(
        blocks=range(n_layer), config=sizes, num_params=lambda: 12 * n_layer * sizes.n_embd**2
    )
    assert choose_blocks(setting, batch_size, model, parallel, world)[0] == blocks
    assert choose_compile("blocks", torch.device("cpu"), 0) == (True, "as asked")


# device, dtype, compute capability, environment → whether fp32 matrices are multiplied in TF32
TF32 = [
    (("cuda", torch.float32, (9, 0), {}), True),
    (("cuda", torch.float32, (8, 0), {"NVIDIA_TF32_OVERRIDE": "1"}), True),
    (("cuda", torch.float32, (8, 0), {"NVIDIA_TF32_OVERRIDE": "0"}), False),
    (("cuda", torch.float32, (7, 5), {}), False),  # a T4 has none
    (("cuda", torch.bfloat16, (9, 0), {}), False),
    (("cpu", torch.float32, None, {}), False),
]


@pytest.mark.parametrize("case, expected", TF32)
def test_tf32_is_for_runs_in_fp32(case, expected, monkeypatch):
    device, dtype, capability, variables = case
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    try:
        torch.set_float32_matmul_precision("highest" if expected else "high")
        assert Env(0, 1, torch.device(device), dtype, False).set_matmul_precision() is expected
        # all of torch's names for it agree; some raise an error where they do not
        assert torch.get_float32_matmul_precision() == ("high" if expected else "highest")
        assert torch.backends.cuda.matmul.allow_tf32 is expected
        assert (torch.backends.cuda.matmul.fp32_precision == "tf32") is expected
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "device, expected", [("cpu", ("gloo", None)), ("cuda:1", ("nccl", torch.device("cuda", 1)))]
)
def test_nccl_is_told_its_gpu(device, expected, monkeypatch):
    """And to send first; messages between hosts go over gloo."""
    calls = []
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False
    )
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **given: calls.append((backend, given))
    )
    monkeypatch.setattr(dist, "new_group", lambda **given: given)
    env = Env(0, 2, torch.device(device), torch.float32, distributed=True)
    join_processes(env, 60)
    ((backend, given),) = calls
    assert (backend, given["device_id"], given["timeout"].seconds) == (*expected, 60)
    asked = SimpleNamespace(is_high_priority_stream=True, _timeout=env.timeout)
    assert given["pg_options"] == (asked if backend == "nccl" else None)
    assert env.control["backend"] == "gloo"


def test_processes_that_join_share_the_cores_of_their_machine(monkeypatch):
    """As many as torchrun has started there, which is not the size of the group."""
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: None)
    monkeypatch.setattr(dist, "new_group", lambda **given: None)
    monkeypatch.setattr(cores, "processes_here", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    join_processes(Env(0, 6, torch.device("cpu"), torch.float32, distributed=True), 60)
    assert cores.processes_here == 3


SHOW = """
import os, sys

class Finder:
    def find_spec(name, path, target=None):
        if name == "torch":
            names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
            print([os.environ.get(name) for name in names], flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder)
__import__(sys.argv[1])
"""


OURS = "expandable_segments:True"
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
    OURS += ",pinned_max_round_threshold_mb:64"
SETTINGS = [  # what is set: what torch is imported with
    ({}, [OURS, None]),
    ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ["max_split_size_mb:64", None]),
    ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, [None, "backend:native"]),
]


@pytest.mark.parametrize(
    "command",
    ["train", "sample", "bench", "analyze", "reproduce", "sweep", "export", "evaluate", "chat"],
)
def test_torch_is_imported_with_the_allocator_s_settings(command):
    """It reads them at that moment, and a user's own win (shown for one command: all have them from
    one module)."""
    clean = {key: x for key, x in os.environ.items() if not key.endswith("ALLOC_CONF")}
    for given, expected in SETTINGS if command == "train" else SETTINGS[:1]:
        call = [sys.executable, "-c", SHOW, command]
        done = subprocess.run(
            call, env=clean | given, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (done.stdout, done.stderr) == (f"{expected}\n", "")


RANGES = {name: flag.range for name, flag in read_flags(TrainConfig).items() if flag.range}
LEAST_BY_NAME = {"batch_size": 1, "muon_steps": 1, "timeout_s": 1, "beta1": 0, "min_lr": 0}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_at_and_beyond_the_ends_of_their_range(name):
    ends = RANGES[name]
    needed = {"parallel": "fsdp"} if name == "fsdp_shard_size" else {}
    for value in {ends.ge, ends.le} - {-math.inf, math.inf}:
        TrainConfig(**{name: value}, **needed).check()
    for value in (ends.gt, ends.lt, ends.ge - 1, ends.le + 1, math.nan):
        with pytest.raises(ValueError) as error:
            TrainConfig(**{name: value}).check()
        assert str(error.value) == f"{name}={value} must {ends}"


def test_ranges_and_their_words():
    assert {name: RANGES[name].ge for name in LEAST_BY_NAME} == LEAST_BY_NAME
    assert RANGES["batch_size"].le == 2**20 and RANGES["muon_steps"].le == 20
    assert str(Range(ge=1)) == "be at least 1"
    assert str(Range(ge=0)) == "not be negative"
    assert str(Range(ge=0, lt=1)) == "be at least 0 and below 1"
    assert str(Range(gt=0, le=1)) == "be above 0 and at most 1"
    assert str(Range(ge=1, le=20)) == "be between 1 and 20"
