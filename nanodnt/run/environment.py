"""This process: its rank, device and precision, its messages to other processes, and requests to
stop."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from layers.cores import share_cores
from nanodnt.run import signals
from nanodnt.run.console import Console
from nanodnt.run.hardware import Choice, keep_freed_memory, unusable_gpu
from nanodnt.tables import count

# the environment variables that torchrun sets
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Asked(NamedTuple):
    """A question to all processes whose answer is on its way."""

    answer: Tensor  # (), above 0 if any process says yes; valid once the message has arrived
    message: "dist.Work"


@dataclass
class Env:
    """One process of a run."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # dtype of the matrix products
    distributed: bool
    timeout: timedelta | None = None  # how long a process waits for another before it gives up
    # gloo group for messages between hosts, which do not wait for a GPU
    control: "dist.ProcessGroup | None" = None
    parallel: str = "none"  # none, ddp, fsdp: see `possible_parallel`
    # functions that are called before the process group is destroyed, the last one first
    closing: ExitStack = field(default_factory=ExitStack)
    asked: Asked | None = None  # the question of the last call of `any_rank_before`
    console: Console = field(default_factory=Console)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def print(self, line: str) -> None:
        """Print a line on rank 0."""
        if self.is_main:
            self.console.print(line)

    def note(self, line: str) -> None:
        """Print this line on rank 0 later: before compiling, when all is set up, or at the end of
        the process."""
        if self.is_main:
            self.console.notes.append(line)

    def any_rank(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any. All ranks must call it."""
        if not self.distributed:
            return flag
        answer = torch.tensor(float(flag))
        dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self.control)
        return answer.item() > 0

    def any_rank_before(self, flag: bool) -> bool:
        """`any_rank` of the previous call, whose answer has arrived meanwhile, so that nobody
        waits; False in the first call. Without other processes, `flag`. All ranks must call it."""
        if not self.distributed:
            return flag
        previous = self.asked
        answer = torch.tensor(float(flag))
        message = dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=self.control, async_op=True)
        self.asked = Asked(answer, message)
        if previous is None:
            return False
        previous.message.wait()
        return previous.answer.item() > 0

    def barrier(self) -> None:
        """Wait until all ranks are here. All ranks must call it."""
        self.any_rank(False)

    def gather(self, value: Any) -> list[Any]:
        """`value` of each rank. All ranks must call it."""
        if not self.distributed:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def check_same(self, settings: dict[str, Any]) -> None:
        """ValueError, naming what differs, unless `settings` are the same on every rank. All ranks
        must call it."""
        settings_of_ranks = self.gather(settings)
        different = []
        for name, value in settings.items():
            if any(other[name] != value for other in settings_of_ranks):
                different.append(name)
        if different:
            names = ", ".join(different)
            raise ValueError(
                f"processes have different {names}: start all of them with one command"
            )

    def set_matmul_precision(self) -> bool:
        """Multiply fp32 matrices in TF32 if the run's dtype is float32, on GPUs that have it
        (Ampere and newer). A bf16 run keeps full precision for its products in fp32.
        NVIDIA_TF32_OVERRIDE=0 forbids TF32. Returns whether it is on."""
        tf32 = self.device.type == "cuda" and self.dtype == torch.float32
        tf32 = tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
        tf32 = tf32 and torch.cuda.get_device_capability(self.device) >= (8, 0)
        # not by fp32_precision: after that get_float32_matmul_precision raises
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        return tf32

    def pin(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        """NumPy arrays as tensors on the host, in pinned memory where the device is a GPU."""
        # contiguous: another layout would recompile
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        if self.device.type == "cuda":
            tensors = [t.pin_memory() for t in tensors]
        return tuple(tensors)

    def put(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors on the device. The host does not wait for a copy from pinned memory to a GPU."""
        on_gpu = self.device.type == "cuda"
        return tuple(t.to(self.device, non_blocking=on_gpu) for t in tensors)

    def sum(self, value: Tensor) -> Tensor:
        """Sum of `value` over ranks, in place. All ranks must call it."""
        if self.distributed:
            dist.all_reduce(value)
        return value


class Split(NamedTuple):
    """The split of a run over its processes."""

    parallel: str  # none, ddp, fsdp
    keep: bool  # FSDP: every process keeps full weights and gradients during a step
    micro: int  # sequences, or images, of one micro batch
    accumulation: int  # micro batches of a step, in each process
    reason: str  # for the log: why this micro batch


def choose_device(name: str, local_rank: int = 0) -> Choice:
    """The torch.device for `auto`, `cpu`, `cuda`, `cuda:N`, `mps`. ValueError where the
    machine lacks it."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name.startswith(("auto", "cuda")) and (problem := unusable_gpu()):
        raise ValueError(problem)
    reason = "as asked"
    if name == "auto":
        name = next(kind for kind in available if available[kind])
        reason = "auto: no GPU found" if name == "cpu" else "auto: found"
    kind, _, given_index = name.partition(":")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise ValueError(f"device={name!r} is unknown: allowed are auto, cpu, cuda, cuda:N, mps")
    if not available[kind]:
        raise ValueError(
            f"device={name} was asked for, but this machine has none: use --device=auto or cpu"
        )
    if kind != "cuda":
        return Choice(torch.device(kind), reason)
    index = int(given_index or local_rank)
    n_gpus = torch.cuda.device_count()
    if index >= n_gpus:
        problem = f"process {local_rank} wants cuda:{index}, but this machine has "
        problem += count(n_gpus, "GPU")
        raise ValueError(f"{problem}: lower --nproc_per_node, or choose another --device")
    return Choice(torch.device("cuda", index), reason)


def cpu_has_bf16() -> bool:
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def choose_dtype(name: str, device: torch.device) -> Choice:
    """The torch.dtype of the matrix multiplications. auto is bf16 where the hardware has it
    (emulation does not count), else fp16 with loss scaling on a GPU, else fp32."""
    if name == "float16" and device.type == "cpu":
        return Choice(torch.float16, "as asked; slow on most CPUs, auto is not")
    if name == "bfloat16" and device.type == "cpu" and not cpu_has_bf16():
        return Choice(torch.bfloat16, "as asked; auto is float32 on this CPU")
    if name != "auto":
        return Choice(getattr(torch, name), "as asked")
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice(torch.bfloat16, "auto: the GPU has it")
        return Choice(torch.float16, "auto: the GPU has no bf16; losses are scaled")
    if device.type == "cpu":
        if cpu_has_bf16():
            return Choice(torch.bfloat16, "auto: the CPU has it")
        return Choice(torch.float32, "auto: the CPU has no bf16")
    return Choice(torch.float32, f"auto on {device.type}")


def possible_parallel(setting: str, env: Env) -> list[str]:
    """The values, of none, ddp, fsdp, that a run can have under the flag `parallel`, the one with
    the fewest messages first. ValueError for a setting that does not fit how the processes were
    started."""
    if env.distributed and setting == "none" and env.world_size > 1:
        raise ValueError(
            f"parallel=none, but torchrun started {env.world_size} processes: use --parallel=auto"
        )
    if not env.distributed and setting in ("ddp", "fsdp"):
        launch = "torchrun --standalone --nproc_per_node=N train.py …"
        raise ValueError(f"parallel={setting} needs torchrun: {launch}")
    if setting == "fsdp" and env.dtype == torch.float16:
        problem = "parallel=fsdp has no loss scaling, which fp16 needs"
        raise ValueError(f"{problem}: use --dtype=bfloat16 or float32, or ddp")
    if setting != "auto":
        return [setting]
    if not env.distributed:
        return ["none"]
    if env.world_size == 1 or env.dtype == torch.float16:
        return ["ddp"]
    return ["ddp", "fsdp"]


@contextmanager
def environment(device: str, dtype: str, timeout_s: int) -> Iterator[Env]:
    """The Env of this process: device, precision and, under torchrun, the process group. It is
    destroyed at the end, but not after an exception: see `end_with`."""
    group = find_group()
    distributed = group is not None
    rank, world_size, local_rank = group or (0, 1, 0)
    chosen, reason = choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # before everything else that asks for the current device
    compute, dtype_reason = choose_dtype(dtype, chosen)
    env = Env(rank, world_size, chosen, compute, distributed)
    if chosen.type == "cpu":
        # costs nothing there, and compiled runs repeat bit by bit (no additions in random order)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        keep_freed_memory()
    if env.is_main:
        env.console.start()
        env.closing.callback(env.console.close)
    try:
        if distributed:
            with env.console.doing("waiting for the other processes"):
                join_processes(env, timeout_s)
        if env.set_matmul_precision():
            dtype_reason += "; products in TF32"
        name = count(torch.get_num_threads(), "thread")
        if chosen.type == "cuda":
            name = torch.cuda.get_device_name(chosen)
        dtype_name = str(compute).removeprefix("torch.")
        env.print(f"device {chosen} ({name}; {reason}), dtype {dtype_name} ({dtype_reason})")
        yield env
    except BaseException:
        distributed = False  # other processes may be gone: destroying the group would wait for them
        raise
    finally:
        env.closing.close()
        if distributed and dist.is_initialized():
            dist.destroy_process_group()


def join_processes(env: Env, timeout_s: int) -> None:
    """Make the process group that torchrun's environment variables describe, and `env.control`."""
    env.timeout = timedelta(seconds=timeout_s)
    share_cores(int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    backend = "gloo"
    device = None
    options = None
    if env.device.type == "cuda":
        backend = "nccl"
        device = env.device  # NCCL connects now, and a barrier or a new group need not guess it
        # messages come first where products fill the GPU; groups that are split off inherit it
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = env.timeout  # torch warns if it differs from the group's
    dist.init_process_group(backend, timeout=env.timeout, device_id=device, pg_options=options)
    env.control = dist.new_group(backend="gloo", timeout=env.timeout)


class Ranks(NamedTuple):
    """The place of a process in its group."""

    rank: int
    world_size: int
    local_rank: int  # on this machine


def find_group() -> Ranks | None:
    """The ranks of this process, from the environment variables that torchrun sets. None where
    they describe no group. ValueError where only some of them are set, as by a SLURM script that
    exports WORLD_SIZE, or where they contradict each other. An empty variable counts as not set, as
    in torch."""
    given = {name: os.environ[name] for name in GROUP if os.environ.get(name)}
    variables = ", ".join(f"{name}={value}" for name, value in given.items())
    problem = f"the environment has {variables}"
    fix = "start with torchrun, which sets them all, or unset them for a single process"
    try:
        rank = int(given.get("RANK", 0))
        world_size = int(given.get("WORLD_SIZE", 1))
        local_rank = int(given.get("LOCAL_RANK", 0))
        int(given.get("MASTER_PORT", 0))
    except ValueError:
        raise ValueError(f"{problem}, of which some is no number: {fix}") from None
    if len(given) < len(GROUP) and (rank, world_size) == (0, 1):
        return None
    missing = [name for name in GROUP if name not in given]
    if missing:
        raise ValueError(f"{problem}, but not {', '.join(missing)}: {fix}")
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise ValueError(f"{problem}, where a rank is not from 0 to WORLD_SIZE - 1: {fix}")
    return Ranks(rank, world_size, local_rank)


class Stop:
    """Requests to end the run: a signal that means "end soon", or the death of torchrun, which its
    processes survive.

    While there is nothing to lose, a signal ends the process at once; after that the run saves
    first. A thread answers signals, because Python's own handlers wait until a function of torch
    returns: another process may never come, and a step may take minutes. Without torchrun (it
    passes Ctrl-C on, so that all get it twice) a second Ctrl-C ends the run at once."""

    def __init__(self) -> None:
        self.signal = 0  # the first one received; 0 = none
        self.stopped = False  # all ranks have agreed to stop
        self.interrupts = 0  # SIGINTs received
        self.nothing_to_lose = True  # no step was made since the start, and no checkpoint begun
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self.agent = os.getppid() if under_torchrun else None  # torchrun's process

    def __enter__(self) -> "Stop":
        self.previous = {number: signal.signal(number, self._handle) for number in signals.heeded()}
        self.received, self.sent = socket.socketpair()
        self.sent.setblocking(False)
        self.previous_fd = signal.set_wakeup_fd(self.sent.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._answer, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self.previous_fd)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.sent.close()  # this ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1 and not dist.is_initialized():
            raise KeyboardInterrupt

    def _answer(self) -> None:
        """In a thread: answer the first signal as soon as it comes."""
        answered = False
        with self.received:
            while numbers := self.received.recv(64):  # b"" when the other end is closed
                asked = [number for number in numbers if number in self.previous]
                if not asked or self.stopped:  # if stopped, the run is already being saved
                    continue
                if self.nothing_to_lose:
                    signals.end_at_once(asked[0])
                if not answered:
                    name = signal.Signals(asked[0]).name
                    signals.say(f"{name} received: ending as soon as everything is saved", file=1)
                answered = True

    def allow_end_at_once(self) -> None:
        """From now on, until the first step or save, a signal ends the process at once, also one
        that was received before."""
        self.nothing_to_lose = True
        if self.signal:
            signals.end_at_once(self.signal)

    def agreed(self, env: Env) -> bool:
        """Whether any rank was asked to stop; with several processes, before the previous call. All
        ranks must call it at the same point."""
        if env.distributed and self.agent not in (None, os.getppid()):
            self.signal = self.signal or signal.SIGTERM
        if not self.stopped and env.any_rank_before(bool(self.signal)):
            self.stopped = True
            env.print(f"{signal.Signals(self.signal or signal.SIGTERM).name}: saving, then exiting")
        return self.stopped

    def exit_code(self) -> int:
        """0, or 128 + the signal's number as shells report it."""
        if not self.stopped:
            return 0
        return 128 + (self.signal or signal.SIGTERM)


# A forked process has the pipe of its parent: its own signals must not be taken for the parent's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
