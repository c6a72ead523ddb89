"""What a run needs around the loop: processes, device, precision and compile choices, stopping, checkpoints, metrics.

Every choice made here is printed with its reason. User mistakes raise ValueError with one clear line.
"""

import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT_FORMAT = "nanoDNT checkpoint 1"

# Dense bf16/fp16 peak FLOP/s by device name (vendors' data sheets), first match wins.
PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "GH200": 989e12}
PEAK_FLOPS |= {"B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 3090": 71e12}
PEAK_FLOPS |= {"V100": 125e12, "T4": 65e12}

# ----------------------------------------------------------------------------------------------------- environment


@dataclass
class Env:
    """This process among all of them, and what it computes on."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype  # of the matrix multiplications
    distributed: bool
    control: object = None  # gloo group for messages between hosts that must not wait for a GPU

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

    def put(self, *arrays) -> tuple:
        """NumPy arrays as tensors on the device, copied without waiting where it is a GPU."""
        tensors = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]  # one layout: no recompilation
        if self.device.type == "cuda":
            return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in tensors)
        return tuple(t.to(self.device) for t in tensors)

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
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if all(word in name for word in key.split())), None)


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
    compute, why_dtype = choose_dtype(dtype, chosen)
    env = Env(rank, local, world, chosen, compute, distributed)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    try:
        if distributed:
            backend = "nccl" if chosen.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            env.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        name = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else f"{torch.get_num_threads()} threads"
        env.print(f"device {chosen} ({name}; {why}), dtype {str(compute).removeprefix('torch.')} ({why_dtype})")
        yield env
    finally:
        if distributed and dist.is_initialized():
            dist.destroy_process_group()


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
    return minutes > 4, f"auto: about {minutes:.0f} min of eager work"


def compile_model(model, setting, example: tuple, env: Env):
    """torch.compile(model), tried on one `example` micro batch (idx, targets) so that failure shows before the run.

    With compile=auto a failure costs one warning and the model runs eagerly; with compile=True it ends the run."""
    t0 = time.time()
    try:
        compiled = torch.compile(model, dynamic=False)
        compiled(*example)[1].backward()
    except Exception as e:  # whatever the compiler, or the compiler's compiler, raises
        if isinstance(e, torch.OutOfMemoryError):
            raise
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        if setting != "auto":
            raise ValueError(f"torch.compile failed ({reason}): use --compile=False") from e
        env.print(f"warning: torch.compile failed ({reason}); running eagerly")
        return model
    finally:
        model.zero_grad(set_to_none=True)
    env.print(f"compiled in {time.time() - t0:.0f} s")
    return compiled


def distribute(model, env: Env):
    """The model as the training step calls it: under torchrun, wrapped in DistributedDataParallel."""
    if not env.distributed:
        return model
    return DistributedDataParallel(model, device_ids=[env.device.index] if env.device.type == "cuda" else None)


def sync_gradients(model, last: bool):
    """Context of one micro step: gradients are averaged over processes in the last one only."""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


# --------------------------------------------------------------------------------------------------------- stopping


class Stop:
    """SIGINT and SIGTERM ask the run to save and end. Without torchrun a second Ctrl-C ends it at once.

    (torchrun sends the terminal's Ctrl-C on, so that every process gets it twice.)
    """

    def __init__(self, env: Env):
        self.env, self.signal, self.stopped = env, 0, False

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
        if not self.stopped and self.env.agree(bool(self.signal)):
            self.stopped = True
            self.env.print(f"{signal.Signals(self.signal or signal.SIGTERM).name}: saving, then exiting")
        return self.stopped

    def exit_code(self) -> int:
        """0, or 128 + the signal's number as shells have it."""
        return 128 + (self.signal or signal.SIGTERM) if self.stopped else 0


# ------------------------------------------------------------------------------------------------------ checkpoints


def _twice(path: Path, change) -> None:
    """Do `change(tmp)`, which makes the temporary file `tmp` and renames it to `path`. One failure is retried; after a
    second ValueError, with `path` as it was."""
    tmp = path.with_name(path.name + ".tmp")
    for attempt in (1, 2):
        try:
            tmp.unlink(missing_ok=True)
            return change(tmp)
        except (OSError, RuntimeError) as e:  # torch.save turns some I/O errors into RuntimeError
            with suppress(OSError):
                tmp.unlink(missing_ok=True)
            if attempt == 2:
                reason = str(e).splitlines()[0] if str(e) else type(e).__name__
                raise ValueError(f"cannot write {path} ({reason}); earlier files are intact") from e
            time.sleep(1)


def write_file(path: Path, write) -> None:
    """Write through a temporary file, fsync, rename: `path` is the old file or the whole new one, never a part.

    `write(f)` gets the open file. ValueError if it fails twice."""

    def change(tmp):
        with open(tmp, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)

    _twice(path, change)


def link_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source`, or a copy where the file system has no hard links."""

    def change(tmp):
        try:
            os.link(source, tmp)
        except OSError:
            shutil.copyfile(source, tmp)
        os.replace(tmp, target)

    _twice(target, change)


def save_checkpoint(out_dir: Path, state: dict, best: bool) -> None:
    """Write last.pt, keeping the one before as prev.pt; with `best` the same file is best.pt too (a hard link).

    Checkpoints are never changed in place, so links are safe, and at every moment last.pt is whole.
    ValueError for a state that is not finite, or a file that cannot be written: last.pt is untouched then."""
    tensors = dict(state["model"])
    tensors |= {f"optimizer state {i}.{k}": t for i, s in state["optimizer"]["state"].items() for k, t in s.items()}
    finite = torch.stack([t.isfinite().all().cpu() for t in tensors.values()])
    if not finite.all():
        name = list(tensors)[int(finite.logical_not().nonzero()[0])]
        raise ValueError(f"{name} is not finite at step {state['step']}: not saved; earlier checkpoints are intact")
    checkpoint = {"format": CHECKPOINT_FORMAT, **state}
    last, new = out_dir / "last.pt", out_dir / "new.pt"
    write_file(new, lambda f: torch.save(checkpoint, f))
    if last.exists():
        link_file(last, out_dir / "prev.pt")
    if best:
        link_file(new, out_dir / "best.pt")
    _twice(last, lambda tmp: os.replace(new, last))


# What a checkpoint holds: tensors and plain values only.
CHECKPOINT = {"model": dict, "optimizer": dict, "scaler": dict, "step": int, "tokens": int, "skipped": int}
CHECKPOINT |= {"evaluated": int, "pending": dict, "best_val_loss": float, "wandb_id": (str, type(None)), "meta": dict}
CHECKPOINT |= {"model_config": dict, "train_config": dict}


def load_checkpoint(path) -> dict:
    """A checkpoint on the CPU, without running code from it (`weights_only`). ValueError if it cannot be read."""
    if not os.path.exists(path):
        raise ValueError(f"there is no checkpoint {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickles, which are refused here anyway
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged file can raise nearly anything
        raise ValueError(f"{path} cannot be read as a checkpoint, it is damaged or foreign ({type(e).__name__})") from e
    if not isinstance(checkpoint, dict) or checkpoint.get("format") != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this project ({CHECKPOINT_FORMAT!r} expected)")
    wrong = [key for key, kind in CHECKPOINT.items() if not isinstance(checkpoint.get(key, ...), kind)]
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} missing or of a wrong type")
    prefix = "_orig_mod."  # left by code that saves a compiled model
    checkpoint["model"] = {str(name).removeprefix(prefix): p for name, p in checkpoint["model"].items()}
    return {**checkpoint, "path": Path(path)}


def first_bad(model) -> str:
    """Name of the first parameter that is not finite, or whose gradient is not."""
    for name, p in model.named_parameters():
        for what, t in ((name, p), (f"the gradient of {name}", p.grad)):
            if t is not None and not t.isfinite().all():
                return what
    return "no longer to be found"


def load_latest(out_dir: Path) -> dict | None:
    """last.pt, or prev.pt (with a message) where last.pt cannot be read; None where there is neither."""
    found = [p for p in (out_dir / "last.pt", out_dir / "prev.pt") if p.exists()]
    problems = []
    for path in found:
        try:
            checkpoint = load_checkpoint(path)
        except ValueError as e:
            problems.append(str(e))
            continue
        if problems:
            print(f"warning: {problems[0]}; going on from {path}, step {checkpoint['step']}", flush=True)
        return checkpoint
    if problems:
        raise ValueError("; ".join(problems) + ": nothing to resume from")
    return None


# ---------------------------------------------------------------------------------------------------------- records


class Metrics:
    """A run directory's records, written by rank 0: config.json, metrics.jsonl, and wandb where it is on.

    Nothing in `out_dir` changes before everything that can be checked has been. A run resumed from the checkpoint
    `resumed` goes on where that is: later rows of metrics.jsonl, and a row cut short by a kill, are dropped, and if it
    is prev.pt, it replaces the damaged last.pt. A fresh run (None) removes the checkpoints that overwrite=True gave up.
    `wandb`: None, or (project, id of the run to go on with or None).
    """

    def __init__(self, out_dir: Path, resumed: Path | None, step: int, configs: dict, needed_bytes: int, wandb=None):
        self.path, self.wandb, self.wandb_id = out_dir / "metrics.jsonl", None, wandb and wandb[1]
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(out_dir).free
        except OSError as e:
            raise ValueError(f"cannot use out_dir {out_dir} ({e.strerror}): choose another --out_dir") from None
        if free < needed_bytes:
            need = f"{needed_bytes / 1e9:.2f} GB"
            raise ValueError(f"{out_dir} has {free / 1e9:.2f} GB free, a checkpoint needs {need}: make room")
        rows = [row for row in read_metrics(out_dir) if row["step"] <= step] if resumed else []
        if wandb:
            self._start_wandb(*wandb, configs)
        record = json.dumps({**configs, **run_record()}, indent=2)
        write_file(out_dir / "config.json", lambda f: f.write(record.encode()))
        write_file(self.path, lambda f: f.writelines(json.dumps(row).encode() + b"\n" for row in rows))
        if resumed and resumed.name == "prev.pt":
            link_file(resumed, out_dir / "last.pt")
        for path in () if resumed else out_dir.glob("*.pt"):
            path.unlink()

    def _start_wandb(self, project, run_id, configs):
        try:
            import wandb

            folder = self.path.parent
            how = dict(project=project, name=folder.name, dir=folder, id=run_id, resume="allow" if run_id else None)
            self.wandb = wandb.init(**how, config=configs)
        except ImportError:
            raise ValueError("wandb_log=True needs wandb: pip install wandb, or leave it out") from None
        except Exception as e:  # no key, no network, a full disk: wandb's errors share no base class
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise ValueError(f"wandb did not start ({reason}): set WANDB_MODE=offline or --wandb_log=False") from e
        self.wandb_id = self.wandb.id

    def write(self, row: dict) -> None:
        """Append one row to metrics.jsonl. NaN and infinity, which JSON lacks, become null."""
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        except OSError as e:
            raise ValueError(f"cannot write {self.path} ({e.strerror}); earlier files are intact") from e
        if self.wandb:
            self.wandb.log(row, step=row["step"])

    def close(self) -> None:
        if self.wandb:
            self.wandb.finish()


def read_metrics(out_dir: Path) -> list:
    """The rows of metrics.jsonl; a last line cut short is left out. ValueError for anything else that is no row."""
    path, rows = Path(out_dir) / "metrics.jsonl", []
    if not path.exists():
        return rows
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} cannot be read ({type(e).__name__}): repair or remove it") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{path}:{number} is not a metrics row: repair or remove the file")
    return rows


def run_record() -> dict:
    """What config.json holds beside the configuration: command line, versions, git commit, time."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    commit, changes = None, None
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, timeout=10).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        pass  # no git here
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return {
        "command": sys.argv,
        "versions": versions | {"numpy": np.__version__},
        "git_commit": commit or None,
        "git_changed_files": changes.splitlines() if changes else [],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


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


EXPECTED = (ValueError, OSError, MemoryError, KeyboardInterrupt, RuntimeError)  # what `report` is for


def report(error: BaseException) -> int:
    """Print a user's mistake, a machine's limit or an interruption as one line on stderr; the exit code.

    A RuntimeError that is none of these is a defect of the program, and raised again."""
    line = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    elif isinstance(error, torch.OutOfMemoryError):
        line = f"out of GPU memory: lower --micro_batch_size, accumulation makes up for it ({line.split('. ')[0]})"
    elif isinstance(error, MemoryError) or "can't allocate memory" in line or "Storage size" in line:
        line = "out of memory: choose a smaller model or a smaller --micro_batch_size"
    elif isinstance(error, dist.DistError):
        line = f"lost or never met the other processes ({line[:200]})"
    elif isinstance(error, RuntimeError):
        raise error
    rank = f"[rank {os.environ['RANK']}] " if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ else ""
    print(f"{rank}error: {line}", file=sys.stderr)
    return 1


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on this platform
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def draw_loss(out_dir: Path, title: str) -> Path | None:
    """Draw loss.png from metrics.jsonl; None, with a message, where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("loss.png is not drawn: matplotlib is not installed")
        return None
    rows = read_metrics(out_dir)
    train, val = ([(r["step"], r[k]) for r in rows if r.get(k) is not None] for k in ("train_loss", "val_loss"))
    fig, ax = plt.subplots(figsize=(6.4, 4), dpi=160)
    if train:
        steps, losses = zip(*train, strict=True)
        smooth, mean = [], losses[0]
        for loss in losses:
            mean += (loss - mean) * max(0.05, 1 / (len(smooth) + 1))
            smooth.append(mean)
        ax.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
        ax.plot(steps, smooth, color="tab:blue", linewidth=1.6, label="training (smoothed)")
    if val:
        label = f"held-out, last {val[-1][1]:.3f}"
        ax.plot(*zip(*val, strict=True), "o-", color="tab:orange", markersize=3.5, linewidth=1.4, label=label)
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if train or val:
        ax.legend(frameon=False)
    fig.tight_layout()
    path = out_dir / "loss.png"
    write_file(path, lambda f: fig.savefig(f, format="png"))
    plt.close(fig)
    return path
