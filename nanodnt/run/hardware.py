"""Facts about this machine: device name, peak FLOP/s, memory, attention kernel, whether compiling
pays."""

import ctypes
import math
import os
import platform
import re
import resource
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from model import GPTConfig

# Peak FLOP/s of dense bf16/fp16 products that are summed in fp32. The first entry is taken whose
# words are all in the device's name. Sources: the vendors' data sheets of each product (H100, H200
# and NVL, GB200 NVL72, HGX B200 and B300, A100, L20, L40S, V100, T4; AMD Instinct) and NVIDIA's
# white papers of the Ada and Blackwell GeForce cards. Half of the figures given with sparsity.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "V100": 125e12,
    "T4": 65e12,
    "4090 D": 147e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}
# Words of devices that are slower than these: a laptop's, or a part of a GPU
SLOWER = {"Laptop", "MIG"}

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

# Parameters of glibc's mallopt(3), by number, and our values for them: up to 2 GiB of freed memory
# stay in the process. Blocks from 32 MiB on go back to the system at once: the largest threshold
# that glibc chooses by itself.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
MALLOC = {TRIM_THRESHOLD: 2**31 - 1, MMAP_THRESHOLD: 32 * 2**20}

# Fraction of a GPU's memory left for NCCL, workspaces of kernels and gaps between tensors: our
# choice
RESERVE = 0.05

# Assumed share of a GPU's peak FLOP/s that training reaches: our choice
ASSUMED_MFU = 0.4

# FLOP/s that one CPU core reaches in eager training, about
EAGER_FLOPS_PER_CORE = 75e9


class Choice(NamedTuple):
    """The value of a setting that can be `auto`, and the reason, to be printed."""

    value: Any
    reason: str


def peak_flops(device: torch.device, dtype: torch.dtype, override: float = 0.0) -> float | None:
    """Peak FLOP/s of one device, for MFU: the override, or the table's; None if it is unknown."""
    if override:
        return override
    if device.type != "cuda" or dtype == torch.float32:
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device)))
    if words & SLOWER:
        return None
    for name, peak in PEAK_FLOPS.items():
        if words.issuperset(name.split()):
            return peak
    return None


def assumed_flops(device: torch.device, dtype: torch.dtype, peak: float = 0.0) -> float:
    """FLOP/s at which one device trains, assumed; infinity if its peak is unknown. `peak`: as the
    override of `peak_flops`."""
    if device.type == "cpu":
        return EAGER_FLOPS_PER_CORE * torch.get_num_threads()
    return ASSUMED_MFU * (peak_flops(device, dtype, peak) or math.inf)


def unusable_gpu() -> str:
    """Why torch cannot use this machine's NVIDIA GPU, and what to do; "" if there is none, or if it
    is hidden."""
    # an empty value, -1 and Slurm's NoDevFiles hide all GPUs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    is_hidden = not re.match(r"\d|GPU-|MIG-", visible)
    if is_hidden or torch.cuda.is_available() or not NVIDIA_DRIVER.exists():
        return ""
    driver = re.search(r"\d+\.\d+[.\d]*", NVIDIA_DRIVER.read_text(encoding="utf-8"))
    return (
        f"this machine has NVIDIA's driver {driver and driver[0]}, but torch {torch.__version__}, "
        f"built for CUDA {torch.version.cuda}, finds no GPU that works: install the build that "
        "docs/runs.md, Installing, names for it, ask nvidia-smi, or use --device=cpu"
    )


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed CPU tensors for the next step. Does nothing without
    glibc, or if an environment variable configures its malloc.

    By default glibc returns freed memory to the system, and the system clears each page before it
    comes back: up to a third of the time of a small model's step (docs/results/speed.md)."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    for parameter, value in MALLOC.items():
        mallopt(parameter, value)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes(device: torch.device) -> int:
    """Bytes that the tensors of this process can have on a GPU: those it holds and those that are
    free, minus a reserve. Memory of other processes, of the CUDA context and of the driver is not
    free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - int(RESERVE * total)


def device_name(device: torch.device) -> str:
    """The product name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def attention_backend(config: GPTConfig, env: Any, masked: bool = False) -> str:
    """The kernel and dtype that scaled_dot_product_attention uses for a model of this config, such
    as "flash, bfloat16". Kernels are cudnn, flash, efficient, math. `env`: an Env; `masked`: with a
    mask that keeps documents apart."""
    if env.device.type not in ("cpu", "cuda"):
        return f"torch's choice for {env.device.type}"
    T = config.block_size
    n_kv_head = config.n_kv_head or config.n_head
    # on a CPU, attention over few tokens is computed in fp32
    dtype = torch.float32 if env.device.type == "cpu" and T < 512 else env.dtype
    empty = partial(torch.empty, dtype=dtype, device=env.device, requires_grad=True)
    q = empty(1, config.n_head, T, config.head_dim)
    k = empty(1, n_kv_head, T, config.head_dim)
    mask = None
    if masked:
        mask = torch.ones(1, 1, 1, 1, dtype=dtype, device=env.device).expand(1, 1, T, T)
    choice = torch._fused_sdp_choice(
        q,
        k,
        k,
        attn_mask=mask,
        dropout_p=config.dropout,
        is_causal=config.causal and not masked,
        enable_gqa=n_kv_head != config.n_head,
    )
    kernel = SDPBackend(choice).name.removesuffix("_ATTENTION").lower()
    if masked:
        kernel += " with a mask of documents"
    return f"{kernel}, {str(dtype).removeprefix('torch.')}"


def choose_compile(setting: bool | str, device: torch.device, training_flops: float) -> Choice:
    """Whether to compile, for `setting` = auto, True, False or `blocks`.

    A cold compile takes about a minute. auto compiles on a GPU; on a CPU only with a compiler, and
    if the run would take several minutes. `training_flops`: of the whole run in this process."""
    if setting != "auto":
        return Choice(bool(setting), "as asked")
    if device.type == "cuda":
        return Choice(True, "auto")
    if device.type != "cpu":
        return Choice(False, f"auto: not on {device.type}")
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return Choice(False, "auto: no C++ compiler found")
    minutes = training_flops / assumed_flops(device, torch.float32) / 60
    return Choice(minutes > 3, f"auto: about {minutes:.0f} min without it")
