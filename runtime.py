"""What a run needs around the loop: processes, device, precision and compile choices, stopping, messages.

Every choice made here is printed with its reason. User mistakes raise ValueError with one clear line.
"""

import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel

from configurator import rank_tag
from model import local

# Dense bf16/fp16 peak FLOP/s (vendors' data sheets) of devices whose name has all these words; first match wins.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12}
PEAK_FLOPS |= {"H800": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}
PEAK_FLOPS |= {"RTX 4090": 165e12, "RTX 3090": 71e12, "V100": 125e12, "T4": 65e12}

# ----------------------------------------------------------------------------------------------------- environment


@dataclass
class Env:
    """This process among all of them, and what it computes on."""

    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of the matrix multiplications
    distributed: bool
    timeout: timedelta | None = None  # after which a process waiting for another gives up
    control: object = None  # gloo group for messages between hosts that must not wait for a GPU
    parallel: str = "none"  # none, ddp, fsdp: see `choose_parallel`
    closing: list = field(default_factory=list)  # functions to call before the processes part

    @property
    def main(self) -> bool:
        return self.rank == 0

    def print(self, *args) -> None:
        """Print on rank 0. That nobody reads any more (a closed terminal, `| head`) does not end a run."""
        if self.main:
            try:
                print(*args, flush=True)
            except OSError:
                sys.stdout = open(os.devnull, "w")  # for the rest of the process

    def agree(self, flag: bool) -> bool:
        """True on every rank if `flag` is true on any. All ranks must call it."""
        if not self.distributed:
            return flag
        value = torch.tensor(float(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return value.item() > 0

    def same(self, value: int) -> bool:
        """Whether `value` is the same on every rank. All ranks must call it."""
        if not self.distributed:
            return True
        return self.least(value) == -self.least(-value)

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks. All ranks must call it."""
        if not self.distributed:
            return value
        value = torch.tensor(value)
        dist.all_reduce(value, op=dist.ReduceOp.MIN, group=self.control)
        return value.item()

    def check_same(self, settings: dict) -> None:
        """ValueError, naming what differs, unless `settings` are the same on every rank. All ranks must call it."""
        if not self.distributed:
            return
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, settings, group=self.control)
        different = [name for name, value in everyone[0].items() if any(s[name] != value for s in everyone)]
        if different:
            raise ValueError(f"processes have different {', '.join(different)}: start all of them with one command")

    def synchronize(self) -> None:
        """Wait until the GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def pin(self, *arrays) -> tuple:
        """NumPy arrays as tensors on the host, in pinned memory where the device is a GPU."""
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]  # one layout: no recompilation
        return tuple(t.pin_memory() if self.device.type == "cuda" else t for t in tensors)

    def put(self, *tensors) -> tuple:
        """Tensors on the device; a copy from pinned memory to a GPU is only begun, and what follows there waits."""
        return tuple(t.to(self.device, non_blocking=self.device.type == "cuda") for t in tensors)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of `value` over ranks, in place. All ranks must call it."""
        if self.distributed:
            dist.all_reduce(value)
        return value


def choose_device(name: str, local_rank: int = 0) -> tuple:
    """(torch.device, reason) for `auto`, `cpu`, `cuda`, `cuda:N`, `mps`. ValueError where the machine lacks it."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    kind, reason = name.split(":")[0], "as asked"
    if name == "auto":
        kind = name = "cuda" if cuda else "mps" if mps else "cpu"
        reason = "auto: found" if name != "cpu" else "auto: no GPU found"
    if kind not in ("cpu", "cuda", "mps") or (":" in name and not name.removeprefix("cuda:").isdigit()):
        raise ValueError(f"device={name!r} is unknown: allowed are auto, cpu, cuda, cuda:N, mps")
    if not {"cpu": True, "cuda": cuda, "mps": mps}[kind]:
        raise ValueError(f"device={name} was asked for, but this machine has none: use --device=auto or cpu")
    index = int(name.split(":")[1]) if ":" in name else local_rank
    if kind == "cuda" and index >= torch.cuda.device_count():
        raise ValueError(
            f"process {local_rank} wants cuda:{index}, but there are {torch.cuda.device_count()} GPUs: "
            "lower --nproc_per_node, or choose another --device"
        )
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind), reason


def choose_dtype(name: str, device: torch.device) -> tuple:
    """(torch.dtype, reason) of the matrix multiplications for `auto`, `float32`, `bfloat16`, `float16`.

    auto is bf16 where the hardware has it (emulation does not count), else fp16 with loss scaling on a GPU, else fp32.
    """
    if name != "auto":
        return getattr(torch, name), "as asked"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "auto: the GPU has it"
        return torch.float16, "auto: the GPU has no bf16; losses are scaled"
    if device.type == "cpu":
        has = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        has = has or getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        return (torch.bfloat16, "auto: the CPU has it") if has else (torch.float32, "auto: the CPU has no bf16")
    return torch.float32, f"auto on {device.type}"


def peak_flops(device: torch.device, dtype: torch.dtype, override: float = 0.0) -> float | None:
    """Peak FLOP/s of one device for MFU: the override, the table, or None where it is not known."""
    if override:
        return override
    if device.type != "cuda" or dtype == torch.float32:
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device)))
    return next((peak for key, peak in PEAK_FLOPS.items() if words >= set(key.split())), None)


class Prefetch:
    """fetch(step) of the step asked for, while a thread already works on the next one's.

    What fetch raises, the caller gets when it asks for that step."""

    def __init__(self, fetch):
        self.fetch, self.pool, self.ahead = fetch, ThreadPoolExecutor(1), {}

    def __call__(self, step: int):
        result = self.ahead.pop(step, None) or self.pool.submit(self.fetch, step)
        try:
            return result.result()
        finally:
            self.ahead = {step + 1: self.pool.submit(self.fetch, step + 1)}


def _env_int(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise ValueError(f"{name}={os.environ[name]!r} in the environment is not a number: unset it") from None


@contextmanager
def environment(device: str, dtype: str, timeout_s: int):
    """Set up device, precision and, under torchrun, the process group, which is left again whatever happens."""
    rank, local, world = _env_int("RANK", 0), _env_int("LOCAL_RANK", 0), _env_int("WORLD_SIZE", 1)
    distributed = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    chosen, why = choose_device(device, local)
    if chosen.type == "cuda":
        if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # less memory lost to fragments
        torch.cuda.set_device(chosen)  # first of all: what follows asks the current device
    compute, why_dtype = choose_dtype(dtype, chosen)
    env = Env(rank, world, chosen, compute, distributed)
    if chosen.type == "cpu":  # costs nothing there, and compiled runs repeat bit by bit (no racing atomic additions)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        if distributed:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and _env_int("TORCHELASTIC_MAX_RESTARTS", 0):
                env.print(
                    "note: torchrun's restarts may fail to bring the processes together again: before torchrun, "
                    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
                )
            backend = "nccl" if chosen.type == "cuda" else "gloo"
            env.timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, timeout=env.timeout)
            env.control = dist.new_group(backend="gloo", timeout=env.timeout)
        name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{torch.get_num_threads()} threads"
        env.print(f"device {chosen} ({name}; {why}), dtype {str(compute).removeprefix('torch.')} ({why_dtype})")
        yield env
    except BaseException:
        distributed = False  # others may be gone: to part would be to wait for them. `end_with` does without
        raise
    finally:
        for close in env.closing:
            close()
        if distributed and dist.is_initialized():
            dist.destroy_process_group()


def end_with(main) -> None:
    """Run `main()` and end the process with its exit code; under torchrun, after an error, without freeing anything:
    the process groups would wait for processes that are gone."""
    code = 1
    try:
        code = main()
    except KeyboardInterrupt as e:
        code = report(e)
    except SystemExit as e:  # of --help, or a mistake in the flags
        code = e.code
    except BaseException:
        if not rank_tag():
            raise
        traceback.print_exc()
    if code and rank_tag():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# ---------------------------------------------------------------------------------------------------------- compile


def choose_compile(setting, device: torch.device, training_flops: float) -> tuple:
    """(bool, reason) for `auto`, True, False. A cold compile costs about a minute: auto spends it on a GPU, and on a
    CPU when the whole run (`training_flops`, this process) would take several, and where there is a compiler."""
    if setting != "auto":
        return setting, "as asked"
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return False, "auto: Triton is not installed"
        return True, "auto"
    if device.type != "cpu":
        return False, f"auto: not on {device.type}"
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return False, "auto: no C++ compiler found"
    minutes = training_flops / (75e9 * torch.get_num_threads()) / 60  # eager training reaches about 75 GFLOP/s a core
    return minutes > 3, f"auto: about {minutes:.0f} min of eager work"


def check_cuda_graphs(compiled: bool, accumulation: int, env: Env) -> None:
    """ValueError where cuda_graphs cannot work: a replay overwrites the gradients of the one before."""
    if env.device.type != "cuda" or not compiled or env.world_size > 1:
        raise ValueError("cuda_graphs needs one CUDA GPU and compile=True: leave it out, or change --device, --compile")
    if accumulation > 1:
        raise ValueError(
            f"cuda_graphs needs one micro batch a step, not {accumulation}: raise micro_batch_size to batch_size, or "
            "leave it out"
        )


def attention_backend(config, env: Env) -> str:
    """Which kernel scaled_dot_product_attention takes for a model of this GPTConfig: cudnn, flash, efficient, math."""
    if env.device.type not in ("cpu", "cuda"):
        return f"torch's choice for {env.device.type}"
    dtype = env.dtype if env.device.type != "cpu" or config.block_size >= 512 else torch.float32
    q, k = (
        torch.empty(1, heads, config.block_size, config.head_dim, dtype=dtype, device=env.device, requires_grad=True)
        for heads in (config.n_head, config.n_kv_head or config.n_head)
    )
    gqa = q.shape != k.shape
    choice = torch._fused_sdp_choice(q, k, k, dropout_p=config.dropout, is_causal=True, enable_gqa=gqa)
    return f"{SDPBackend(choice).name.removesuffix('_ATTENTION').lower()}, {str(dtype).removeprefix('torch.')}"


def compile_parts(model) -> None:
    """Compile each block and the loss: what lies between is for FSDP, which gathers and frees a block's weights there.

    The compiled functions stand in for the methods inside the modules' hooks, and leave all names as they are."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(model.blocks) + 8)
    for block in model.blocks:  # those of one layout share their code; constants such as LNS's make another
        block.forward = torch.compile(block.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def compile_model(model, config, example: tuple, env: Env):
    """torch.compile(model), tried on one `example` micro batch (idx, targets), in evaluation and in training, so that
    nothing is left to compile, or to fail, during the run. Under FSDP the model itself, whose parts are compiled.

    With compile=auto a failure costs one warning and the model runs eagerly, on all processes; with compile=True, or
    under FSDP, it ends the run."""
    t0 = time.time()
    try:
        if env.parallel == "fsdp":
            compile_parts(compiled := model)
        else:
            compiled = torch.compile(model, dynamic=False, mode="reduce-overhead" if config.cuda_graphs else None)
        model.eval()
        with torch.no_grad():
            compiled(*example)
        model.train()
        if not config.eval_only:
            compiled(*example)[1].backward()
    except Exception as e:  # whatever the compiler, or the compiler's compiler, raises
        if isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e).lower():  # eager would need more
            raise torch.OutOfMemoryError(str(e)) from e
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        if config.compile != "auto" or env.parallel == "fsdp":  # whose other processes wait for this one's weights
            raise ValueError(f"torch.compile failed ({reason}): use --compile=False") from e
        compiled = model
        print(f"warning: torch.compile failed ({reason}); running eagerly", flush=True)
    finally:
        model.train().zero_grad(set_to_none=True)
    if env.agree(compiled is model) and env.parallel != "fsdp":
        return model
    env.print(f"compiled in {time.time() - t0:.0f} s")
    return compiled


# ------------------------------------------------------------------------------------------------ several processes

FIXED_SHARE = 0.7  # of a GPU's memory, for weights, gradients and optimizer state; activations need the rest


def choose_parallel(setting: str, env: Env, fixed_bytes: int) -> tuple:
    """(none, ddp or fsdp, reason). `fixed_bytes`: what each process holds under DDP before the first activation.

    ValueError for a setting that does not go with how the processes were started."""
    if env.distributed and setting == "none" and env.world_size > 1:
        raise ValueError(f"parallel=none, but torchrun started {env.world_size} processes: use --parallel=auto")
    if not env.distributed and setting in ("ddp", "fsdp"):
        raise ValueError(f"parallel={setting} needs torchrun: torchrun --standalone --nproc_per_node=N train.py …")
    if setting == "fsdp" and env.dtype == torch.float16:
        raise ValueError("parallel=fsdp has no loss scaling, which fp16 needs: use --dtype=bfloat16 or float32, or ddp")
    if setting != "auto":
        return setting, "as asked"
    if not env.distributed:
        return "none", "auto: one process"
    if env.device.type != "cuda" or env.dtype == torch.float16:
        return "ddp", "auto"
    total = env.least(torch.cuda.get_device_properties(env.device).total_memory)
    text = f"auto: ddp's weights, gradients and optimizer state are {fixed_bytes / 1e9:.1f} of {total / 1e9:.0f} GB"
    return "fsdp" if fixed_bytes > FIXED_SHARE * total and env.world_size > 1 else "ddp", text


def shard(model, shard_size: int, env: Env) -> None:
    """FSDP2, in place: every process keeps its rows of each parameter; a block's are gathered while it is computed.

    shard_size 0: over all processes. Less: so many hold one copy of the model, and the copies are kept the same (HSDP).
    Gathered in fp32, since gains stay fp32 and the casts to bf16 are part of the blocks."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # half a second, for this alone
    from torch.distributed.fsdp import fully_shard

    size = shard_size or env.world_size
    if env.world_size % size:
        valid = ", ".join(str(n) for n in range(1, env.world_size + 1) if env.world_size % n == 0)
        raise ValueError(f"fsdp_shard_size={size} does not divide the {env.world_size} processes: use one of {valid}")
    if shard_size:  # groups of our own, since those that init_device_mesh makes have torch's time-outs
        ranks = torch.arange(env.world_size).view(-1, size)
        groups = [my_group(rows, env) for rows in (ranks.T.tolist(), ranks.tolist())]
        mesh = DeviceMesh.from_group(groups, env.device.type, ranks, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(env.device.type, (size,), mesh_dim_names=("shard",))
    for part in (*model.blocks, model):  # the model's own: embeddings, final norm, head
        fully_shard(part, mesh=mesh)


def my_group(groups: list, env: Env):
    """Of process groups of these ranks, all of which all processes make, the one that this process is in."""
    made = [(ranks, dist.new_group(ranks, timeout=env.timeout)) for ranks in groups]
    return next(group for ranks, group in made if env.rank in ranks)


def distribute(model, env: Env):
    """The model as the training step calls it: under DDP wrapped; under FSDP it is already."""
    if env.parallel != "ddp":
        return model
    ids = [env.device.index] if env.device.type == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about broadcast_buffers: all ranks compute the same ones
        return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True)


def sync_gradients(model, last: bool):
    """Context of one micro step: DDP averages gradients over processes in the last one only. (FSDP does in each: to
    wait would mean to hold all of them.)"""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


# --------------------------------------------------------------------------------------------------------- stopping


class Stop:
    """SIGINT and SIGTERM ask the run to save and end, and so does torchrun's death, which its processes outlive.
    Without torchrun a second Ctrl-C ends it at once.

    (torchrun sends the terminal's Ctrl-C on, so that every process gets it twice.)
    """

    def __init__(self, env: Env):
        self.env, self.signal, self.stopped = env, 0, False
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def __enter__(self):
        self.previous = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum, frame):
        if self.signal and signum == signal.SIGINT and not self.env.distributed:
            raise KeyboardInterrupt
        self.signal = signum  # nothing else: a handler may run in the middle of a print

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks must call it at the same point."""
        if self.agent not in (None, os.getppid()):
            self.signal = self.signal or signal.SIGTERM
        if not self.stopped and self.env.agree(bool(self.signal)):
            self.stopped = True
            self.env.print(f"{signal.Signals(self.signal or signal.SIGTERM).name}: saving, then exiting")
        return self.stopped

    def exit_code(self) -> int:
        """0, or 128 + the signal's number as shells have it."""
        return 128 + (self.signal or signal.SIGTERM) if self.stopped else 0


# --------------------------------------------------------------------------------------------------------- messages


def progress(row: dict, max_iters: int, seconds: float) -> str:
    """The console's line for a metrics row; `seconds` per step."""
    left = int(seconds * (max_iters - row["step"]))
    eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
    skipped = f"  skipped {row['skipped_steps']}" if row["skipped_steps"] else ""
    return (
        f"step {row['step']}/{max_iters}  loss {row['train_loss']:.4f}  lr {row['lr']:.2e}  "
        f"norm {row['grad_norm']:.2f}  {seconds * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s"
        f"{mfu}{skipped}  eta {eta}"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on this platform
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def first_bad(model, env: Env) -> str:
    """Name of the first parameter that is not finite, or whose gradient is not, on any rank. All ranks must call it."""
    found = []
    for name, p in model.named_parameters():
        found += [(name, p), (f"the gradient of {name}", p.grad)]
    bad = [i for i, (_, t) in enumerate(found) if t is not None and not local(t).isfinite().all()]
    first = env.least(min(bad, default=len(found)))
    return [*(name for name, _ in found), "none any more"][first]


EXPECTED = (ValueError, OSError, MemoryError, KeyboardInterrupt, RuntimeError)  # what `report` is for


KEPT = []  # errors, with all that was alive when they came: see `end_with`


def report(error: BaseException) -> int:
    """Print a user's mistake, a machine's limit or an interruption as one line on stderr; the exit code.

    A RuntimeError that is none of these is a defect of the program, and raised again."""
    line = " ".join(str(error).split())
    if rank_tag():
        KEPT.append(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    elif isinstance(error, BrokenPipeError):  # whoever read the output has gone, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as shells have it for SIGPIPE
    elif isinstance(error, torch.OutOfMemoryError):
        line = (
            f"out of GPU memory: lower --micro_batch_size (accumulation makes up for it) or --num_samples ({line[:99]})"
        )
    elif isinstance(error, MemoryError) or "can't allocate memory" in line or "Storage size" in line:
        line = "out of memory: choose a smaller model or a smaller --micro_batch_size"
    elif isinstance(error, dist.DistError) or "gloo" in line:  # gloo's own errors are plain RuntimeErrors
        line = f"lost or never met the other processes ({line[:200]})"
    elif isinstance(error, RuntimeError):
        raise error
    print(f"{rank_tag()}error: {line}", file=sys.stderr)
    return 1
