"""How a command ends: exit codes, and one line on stderr for errors that are not defects of the
program."""

import os
import sys
import traceback
from functools import wraps

import torch
import torch.distributed as dist

from configurator import discard_output, flush_output, prepare_streams, rank_tag
from nanodnt.files import EXTRA, missing_package
from nanodnt.run import signals

EXPECTED = (ValueError, OSError, MemoryError, KeyboardInterrupt, RuntimeError, ModuleNotFoundError)
# modules that few runs need
WANTED = ("interop", "safetensors", "tokenizers", "huggingface_hub", "tiktoken", *EXTRA)
# errors, and through their tracebacks all objects that were alive: under torchrun nothing may be
# freed
KEPT = []


def reports_errors(main):
    """Decorator of a command's `main()`, which then returns its exit code also after an error that
    is EXPECTED."""

    @wraps(main)
    def run() -> int:
        prepare_streams()
        try:
            signals.start_main()
            code = main() or 0
        except EXPECTED as e:
            code = report_error(e)
        flushed = flush_output()
        return code or flushed

    return run


def report_error(error: BaseException) -> int:
    """Print a user's mistake, a limit of the machine or an interruption in one line; the exit code.
    Raise others."""
    line = " ".join(str(error).split())
    if rank_tag():
        KEPT.append(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError):  # the reader of the output has gone, as in `… | head`
        return discard_output()
    if isinstance(error, torch.OutOfMemoryError):
        advice = "lower --micro_batch_size (accumulation makes up for it) or --num_samples"
        line = f"out of GPU memory: {advice} ({line[:99]})"
    elif (
        isinstance(error, MemoryError) or "can't allocate memory" in line or "Storage size" in line
    ):
        line = "out of memory: lower --micro_batch_size, or --num_samples of sample.py, or choose a smaller model"
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in WANTED:
        line = missing_package(error.name.split(".")[0])
    # gloo's own errors are plain RuntimeErrors
    elif isinstance(error, dist.DistError) or "gloo" in line:
        line = f"lost or never met the other processes ({line[:200]})"
    elif isinstance(error, (RuntimeError, ModuleNotFoundError)):  # a defect of the program
        raise error
    print(f"{rank_tag()}error: {line}", file=sys.stderr)
    return 1


def end_with(main) -> None:
    """Run `main()` and end the process with its exit code. Under torchrun a process with an error
    exits at once and frees nothing: to free the process groups would be to wait for processes that
    are gone."""
    code = 1
    try:
        code = main()
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
