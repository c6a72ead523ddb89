"""torch.compile: whether it pays, and compiling everything before the run begins."""

import os
import shutil
import time

import torch


def choose_compile(setting, device: torch.device, training_flops: float) -> tuple:
    """(bool, reason) for `auto`, True, False.

    A cold compile takes about a minute. auto compiles on a GPU; on a CPU only where there is a compiler, and where the
    whole run (`training_flops`, those of this process) would take several minutes."""
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


def compile_parts(model) -> None:
    """Compile each block and the loss, in place. The code between them stays eager: there FSDP gathers and frees the
    weights of a block.

    The compiled functions replace the methods inside the modules' hooks, so all parameter names stay as they are."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(model.blocks) + 8)
    for block in model.blocks:  # blocks of one layout share their code; constants such as LNS's need code of their own
        block.forward = torch.compile(block.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)


def compile_model(model, config, example: tuple, env):
    """torch.compile(model), tried on one `example` micro batch (idx, targets) in evaluation and in training mode, so
    that nothing compiles, or fails to, during the run. Under FSDP: the model itself, with compiled parts.

    If it fails with compile=auto, there is one warning and the model runs eagerly, on all processes. With compile=True,
    or under FSDP, it is a ValueError. All ranks must call this."""
    t0 = time.time()
    try:
        if env.parallel == "fsdp":
            compile_parts(compiled := model)
        else:
            compiled = torch.compile(model, dynamic=False)
        model.eval()
        with torch.no_grad():
            compiled(*example)
        model.train()
        if not config.eval_only:
            compiled(*example)[1].backward()
    except Exception as e:  # whatever torch.compile, or the compiler that it calls, raises
        if isinstance(e, torch.OutOfMemoryError) or "out of memory" in str(e).lower():  # eager needs even more
            raise torch.OutOfMemoryError(str(e)) from e
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:200]
        if config.compile != "auto" or env.parallel == "fsdp":  # FSDP's other processes wait for this one's weights
            raise ValueError(f"torch.compile failed ({reason}): use --compile=False") from e
        compiled = model
        print(f"warning: torch.compile failed ({reason}); running eagerly", flush=True)
    finally:
        model.train().zero_grad(set_to_none=True)
    if env.any_rank(compiled is model) and env.parallel != "fsdp":
        return model
    env.print(f"compiled in {time.time() - t0:.0f} s")
    return compiled
