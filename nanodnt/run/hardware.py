"""What this machine is and can do: device name, peak FLOP/s, peak memory, attention kernel, whether
compiling pays."""

import ctypes
import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

# Dense bf16/fp16 peak FLOP/s, summed in fp32, of devices whose name has all these words; first
# match wins. Sources: the vendors' data sheets of each product (H100, H200 and NVL, GB200 NVL72,
# HGX B200 and B300, A100, L20, L40S, V100, T4; AMD Instinct) and NVIDIA's white papers of the Ada
# and Blackwell GeForce cards. Half of what is given with sparsity.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
}
PEAK_FLOPS |= {"H800 PCIe": 756e12, "H800": 989e12, "H20": 148e12, "GH200": 989e12}
PEAK_FLOPS |= {"GB200": 2500e12, "GB300": 2500e12, "B200": 2250e12, "B300": 2250e12}
PEAK_FLOPS |= {
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L20": 119.5e12,
    "V100": 125e12,
    "T4": 65e12,
}
PEAK_FLOPS |= {"4090 D": 147e12, "RTX 5090": 209.5e12, "RTX 4090": 165e12, "RTX 3090": 71e12}
PEAK_FLOPS |= {"MI300X": 1307e12, "MI325X": 1307e12}
OTHERS = {"Laptop", "MIG"}  # a part of such a device, or a slower one of its name

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

# Parameters of glibc's mallopt(3), by number, and what we set them to: up to 2 GiB of freed memory
# stay in the process. Blocks from 32 MiB on go back to the system at once: the largest threshold
# that glibc chooses by itself.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
MALLOC = {TRIM_THRESHOLD: 2**31 - 1, MMAP_THRESHOLD: 32 * 2**20}

# of a GPU's memory, for NCCL, workspaces of kernels and gaps between tensors: our choice
RESERVE = 0.05


def peak_flops(device: torch.device, dtype: torch.dtype, override: float = 0.0) -> float | None:
    """Peak FLOP/s of one device for MFU: the override, the table, or None where it is not known."""
    if override:
        return override
    if device.type != "cuda" or dtype == torch.float32:
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", torch.cuda.get_device_name(device)))
    if words & OTHERS:
        return None
    return next((peak for key, peak in PEAK_FLOPS.items() if words >= set(key.split())), None)


def unusable_gpu() -> str:
    """Why torch cannot use this machine's NVIDIA GPU, and what to do; empty if it has none, or if
    it is hidden."""
    # names none if it is empty, -1 or, by Slurm, NoDevFiles
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    if (
        not re.match(r"\d|GPU-|MIG-", visible)
        or torch.cuda.is_available()
        or not NVIDIA_DRIVER.exists()
    ):
        return ""
    driver = re.search(r"\d+\.\d+[.\d]*", NVIDIA_DRIVER.read_text(encoding="utf-8"))
    machine = f"this machine has NVIDIA's driver {driver and driver[0]}"
    build = (
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU that works"
    )
    fix = "install the build that docs/runs.md, Installing, names for it, ask nvidia-smi, or use --device=cpu"
    return f"{machine}, but {build}: {fix}"


def keep_freed_memory() -> None:
    """Let this process keep the memory of freed CPU tensors for the next step: with glibc, if no
    environment variable sets its malloc. Elsewhere do nothing.

    By default glibc returns freed memory to the system, how much depends on what ran before. The
    system clears each page before it comes back: up to a third of the time of a small model's step
    (docs/results/speed.md)."""
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def available_bytes(device: torch.device) -> int:
    """Bytes that the tensors of this process can have on a GPU: what it holds, and what is free,
    less a reserve. Memory of other processes, of the CUDA context and of the driver is not free."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - int(RESERVE * total)


def device_name(device: torch.device) -> str:
    """The product name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def attention_backend(config, env, masked: bool = False) -> str:
    """The kernel and dtype that scaled_dot_product_attention uses for a model of this GPTConfig,
    such as "flash, bfloat16"; kernels are cudnn, flash, efficient, math. `masked`: with a mask of
    documents."""
    if env.device.type not in ("cpu", "cuda"):
        return f"torch's choice for {env.device.type}"
    T, kv = config.block_size, config.n_kv_head or config.n_head
    dtype = env.dtype if env.device.type != "cpu" or T >= 512 else torch.float32
    like = dict(dtype=dtype, device=env.device)
    q, k = (
        torch.empty(1, n, T, config.head_dim, requires_grad=True, **like)
        for n in (config.n_head, kv)
    )
    mask = torch.ones(1, 1, 1, 1, **like).expand(1, 1, T, T) if masked else None
    how = dict(
        dropout_p=config.dropout,
        is_causal=config.causal and not masked,
        enable_gqa=kv != config.n_head,
    )
    kernel = (
        SDPBackend(torch._fused_sdp_choice(q, k, k, attn_mask=mask, **how))
        .name.removesuffix("_ATTENTION")
        .lower()
    )
    return f"{kernel}{' with a mask of documents' * masked}, {str(dtype).removeprefix('torch.')}"


def choose_compile(setting, device: torch.device, training_flops: float) -> tuple:
    """(bool, reason) for `auto`, True, False, `blocks`. A cold compile takes about a minute. auto
    compiles on a GPU; on a CPU only with a compiler, and where the run (`training_flops`, of this
    process) would take several minutes."""
    if setting != "auto":
        return bool(setting), "as asked"
    if device.type == "cuda":
        return True, "auto"
    if device.type != "cpu":
        return False, f"auto: not on {device.type}"
    if not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")):
        return False, "auto: no C++ compiler found"
    # eager training reaches about 75 GFLOP/s a core
    minutes = training_flops / (75e9 * torch.get_num_threads()) / 60
    return minutes > 3, f"auto: about {minutes:.0f} min of eager work"
