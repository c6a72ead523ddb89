"""This process: its rank, device and precision, what it settles with the other processes, and when
it is to stop."""

import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from layers import cores
from nanodnt.run import signals
from nanodnt.run.hardware import keep_freed_memory, unusable_gpu

# what torchrun tells its processes
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Env:
    """One process of a run."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of the matrix multiplications
    distributed: bool
    timeout: timedelta | None = None  # a process that has waited this long for another gives up
    control: object = None  # gloo group for messages between hosts, which do not wait for a GPU
    parallel: str = "none"  # none, ddp, fsdp: see `possible_parallel`
    closing: list = field(default_factory=list)  # functions to call before the process group is
    #   destroyed
    began: float = field(default_factory=time.perf_counter)
    trained: float = 0.0  # seconds of training since then
    asked: tuple | None = None  # the answer and the message of the last `any_rank_before`

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, *args) -> None:
        """Print on rank 0. If stdout is closed (the terminal is gone, or `| head`), the run
        continues silently."""
        if self.is_main:
            try:
                # in one piece, even if unbuffered
                print(" ".join(map(str, args)) + "\n", end="", flush=True)
            except OSError:
                sys.stdout = open(os.devnull, "w", encoding="utf-8")  # for the rest of the process

    def any_rank(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any. All ranks must call it."""
        if not self.distributed:
            return flag
        value = torch.tensor(float(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return value.item() > 0

    def any_rank_before(self, flag: bool) -> bool:
        """`any_rank` of the call before, which has arrived meanwhile, so that nobody waits; of the
        first call, False. Without other processes, `flag`. All ranks must call it."""
        if not self.distributed:
            return flag
        before, value = self.asked, torch.tensor(float(flag))
        self.asked = (
            value,
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control, async_op=True),
        )
        if before is None:
            return False
        before[1].wait()
        return before[0].item() > 0

    def barrier(self) -> None:
        """Wait until all ranks are here. All ranks must call it."""
        self.any_rank(False)

    def gather(self, value) -> list:
        """`value` of each rank. All ranks must call it."""
        if not self.distributed:
            return [value]
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, value, group=self.control)
        return everyone

    def check_same(self, settings: dict) -> None:
        """ValueError, naming what differs, unless `settings` are the same on every rank. All ranks
        must call it."""
        everyone = self.gather(settings)
        different = [
            name
            for name, value in settings.items()
            if any(other[name] != value for other in everyone)
        ]
        if different:
            raise ValueError(
                f"processes have different {', '.join(different)}: start all of them with one command"
            )

    def set_matmul_precision(self) -> bool:
        """Multiply fp32 matrices in TF32 if the run's dtype is float32, on GPUs that have it
        (Ampere and newer). A bf16 run keeps fp32 for what it computes in fp32.
        NVIDIA_TF32_OVERRIDE=0 forbids it. Returns whether it is on."""
        tf32 = self.device.type == "cuda" and self.dtype == torch.float32
        tf32 = tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
        tf32 = tf32 and torch.cuda.get_device_capability(self.device) >= (8, 0)
        # not by fp32_precision: after that get_float32_matmul_precision raises
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        return tf32

    def pin(self, *arrays) -> tuple:
        """NumPy arrays as tensors on the host, in pinned memory where the device is a GPU."""
        # one layout: no recompilation
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        return tuple(t.pin_memory() if self.device.type == "cuda" else t for t in tensors)

    def put(self, *tensors) -> tuple:
        """Tensors on the device. The host does not wait for a copy from pinned memory to a GPU."""
        return tuple(t.to(self.device, non_blocking=self.device.type == "cuda") for t in tensors)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of `value` over ranks, in place. All ranks must call it."""
        if self.distributed:
            dist.all_reduce(value)
        return value


class Split(NamedTuple):
    """How a run is split over its processes."""

    parallel: str  # none, ddp, fsdp
    keep: bool  # FSDP: every process keeps full weights and gradients during a step
    micro: int  # sequences, or images, of one micro batch
    accumulation: int  # micro batches of a step, in each process
    reason: str  # for the log: why this micro batch


def choose_device(name: str, local_rank: int = 0) -> tuple:
    """(torch.device, reason) for `auto`, `cpu`, `cuda`, `cuda:N`, `mps`. ValueError where the
    machine lacks it."""
    found = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    reason, unusable = "as asked", name.startswith(("auto", "cuda")) and unusable_gpu()
    if unusable:
        raise ValueError(unusable)
    if name == "auto":
        name = next(kind for kind in found if found[kind])
        reason = "auto: no GPU found" if name == "cpu" else "auto: found"
    kind, _, index = name.partition(":")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r} is unknown: allowed are auto, cpu, cuda, cuda:N, mps")
    if not found[kind]:
        raise ValueError(
            f"device={name} was asked for, but this machine has none: use --device=auto or cpu"
        )
    if kind != "cuda":
        return torch.device(kind), reason
    index = int(index or local_rank)
    if index >= torch.cuda.device_count():
        wanted = f"process {local_rank} wants cuda:{index}, but there are {torch.cuda.device_count()} GPUs"
        raise ValueError(f"{wanted}: lower --nproc_per_node, or choose another --device")
    return torch.device("cuda", index), reason


def choose_dtype(name: str, device: torch.device) -> tuple:
    """(torch.dtype, reason) of the matrix multiplications. auto is bf16 where the hardware has it
    (emulation does not count), else fp16 with loss scaling on a GPU, else fp32."""
    if name != "auto":
        return getattr(torch, name), "as asked"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "auto: the GPU has it"
        return torch.float16, "auto: the GPU has no bf16; losses are scaled"
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
            return torch.bfloat16, "auto: the CPU has it"
        return torch.float32, "auto: the CPU has no bf16"
    return torch.float32, f"auto on {device.type}"


def possible_parallel(setting: str, env) -> list[str]:
    """What a run can be under `parallel`: of none, ddp, fsdp, the one with the fewest messages
    first. ValueError for a setting that does not fit how the processes were started."""
    if env.distributed and setting == "none" and env.world_size > 1:
        raise ValueError(
            f"parallel=none, but torchrun started {env.world_size} processes: use --parallel=auto"
        )
    if not env.distributed and setting in ("ddp", "fsdp"):
        raise ValueError(
            f"parallel={setting} needs torchrun: torchrun --standalone --nproc_per_node=N train.py …"
        )
    if setting == "fsdp" and env.dtype == torch.float16:
        raise ValueError(
            "parallel=fsdp has no loss scaling, which fp16 needs: use --dtype=bfloat16 or float32, or ddp"
        )
    if setting != "auto":
        return [setting]
    if not env.distributed:
        return ["none"]
    return ["ddp"] if env.world_size == 1 or env.dtype == torch.float16 else ["ddp", "fsdp"]


@contextmanager
def environment(device: str, dtype: str, timeout_s: int):
    """The Env of this process: device, precision and, under torchrun, the process group, which is
    destroyed at the end, but not after an exception: see `end_with`."""
    group = find_group()
    distributed = group is not None
    rank, world_size, local_rank = group or (0, 1, 0)
    chosen, reason = choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # before everything else that asks for the current device
    compute, dtype_reason = choose_dtype(dtype, chosen)
    env = Env(rank, world_size, chosen, compute, distributed)
    # free there, and compiled runs repeat bit by bit (no atomic additions in random order)
    if chosen.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        keep_freed_memory()
    try:
        if distributed:
            join_processes(env, timeout_s)
        name = (
            torch.cuda.get_device_name(chosen)
            if chosen.type == "cuda"
            else f"{torch.get_num_threads()} threads"
        )
        dtype_reason += "; products in TF32" if env.set_matmul_precision() else ""
        env.print(
            f"device {chosen} ({name}; {reason}), dtype {str(compute).removeprefix('torch.')} ({dtype_reason})"
        )
        yield env
    except BaseException:
        distributed = False  # other processes may be gone: destroying the group would wait for them
        raise
    finally:
        for close in env.closing:
            close()
        if distributed and dist.is_initialized():
            dist.destroy_process_group()


def join_processes(env: Env, timeout_s: int) -> None:
    """Make the process group that torchrun's environment variables describe, and `env.control`."""
    env.timeout = timedelta(seconds=timeout_s)
    cores.processes_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    cuda = env.device.type == "cuda"
    options = None
    if cuda:  # messages first where products fill the GPU; groups that are split off inherit it
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = env.timeout  # torch warns where it is another
    # device_id: NCCL connects now, and not in the first step; a barrier or a new group need not
    # guess the device
    how = dict(timeout=env.timeout, device_id=env.device if cuda else None, pg_options=options)
    dist.init_process_group("nccl" if cuda else "gloo", **how)
    env.control = dist.new_group(backend="gloo", timeout=env.timeout)


def find_group() -> tuple[int, int, int] | None:
    """(rank, world size, rank on this machine) of this process in a process group, from the
    environment variables that torchrun sets. None where they describe no group. ValueError where
    only some of them are set, as by a SLURM script that exports WORLD_SIZE, or where they
    contradict each other. An empty variable counts as not set, as in torch."""
    given = {name: os.environ[name] for name in GROUP if os.environ.get(name)}
    place = [
        given.get(name, default)
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    ]
    found = f"the environment has {', '.join(f'{name}={value}' for name, value in given.items())}"
    fix = "start with torchrun, which sets them all, or unset them for a single process"
    try:
        rank, world_size, local_rank = map(int, place)
        int(given.get("MASTER_PORT", 0))
    except ValueError:
        raise ValueError(f"{found}, of which some is no number: {fix}") from None
    if len(given) < len(GROUP) and (rank, world_size) == (0, 1):
        return None
    missing = [name for name in GROUP if name not in given]
    if missing:
        raise ValueError(f"{found}, but not {', '.join(missing)}: {fix}")
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise ValueError(f"{found}, where a rank is not from 0 to WORLD_SIZE - 1: {fix}")
    return rank, world_size, local_rank


class Stop:
    """What asks the run to end: a signal that means "end soon", or the death of torchrun, which its
    processes survive.

    While there is nothing to lose, a signal ends the process at once; after that the run saves
    first. A thread answers signals, because Python's own handlers wait until a function of torch
    returns: another process may never come, and a step may take minutes. Without torchrun (it
    passes Ctrl-C on, so that all get it twice) a second Ctrl-C ends the run at once."""

    def __init__(self):
        self.signal, self.stopped, self.interrupts = 0, False, 0
        self.nothing_to_lose = True  # no step was made since the start, and no checkpoint begun
        # torchrun's process
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def __enter__(self):
        self.previous = {number: signal.signal(number, self._handle) for number in signals.heeded()}
        self.received, self.sent = socket.socketpair()
        self.sent.setblocking(False)
        self.previous_fd = signal.set_wakeup_fd(self.sent.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._answer, daemon=True).start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.previous_fd)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.sent.close()  # which ends the thread

    def _handle(self, number, frame):
        self.signal = self.signal or number
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1 and not dist.is_initialized():
            raise KeyboardInterrupt

    def _answer(self):
        """In a thread: answer the first signal as soon as it comes."""
        answered = False
        with self.received:
            while numbers := self.received.recv(64):  # b"" when the other end is closed
                asked = [number for number in numbers if number in self.previous]
                if not asked or self.stopped:  # then it has been said, and is being saved
                    continue
                if self.nothing_to_lose:
                    signals.end_at_once(asked[0])
                if not answered:
                    name = signal.Signals(asked[0]).name
                    signals.say(f"{name} received: ending as soon as everything is saved", file=1)
                answered = True

    def nothing_is_lost(self) -> None:
        """From now on, until the first step or save, a signal ends the process at once, also one
        that has come."""
        self.nothing_to_lose = True
        if self.signal:
            signals.end_at_once(self.signal)

    def agreed(self, env) -> bool:
        """Whether any rank was asked to stop, with several processes before its last call. All
        ranks must call it at the same point."""
        if env.distributed and self.agent not in (None, os.getppid()):
            self.signal = self.signal or signal.SIGTERM
        if not self.stopped and env.any_rank_before(bool(self.signal)):
            self.stopped = True
            env.print(f"{signal.Signals(self.signal or signal.SIGTERM).name}: saving, then exiting")
        return self.stopped

    def exit_code(self) -> int:
        """0, or 128 + the signal's number as shells report it."""
        return 128 + (self.signal or signal.SIGTERM) if self.stopped else 0


# A forked process has the pipe of its parent: its own signals must not be taken for the parent's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
