"""The end of a command: exit codes, and one line on stderr for errors that are not defects of the
program."""

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps

import torch
import torch.distributed as dist

from configurator import discard_output, flush_output, prepare_streams, rank_tag
from nanodnt.files import EXTRA, missing_package
from nanodnt.run import signals

EXPECTED = (ValueError, OSError, MemoryError, KeyboardInterrupt, RuntimeError, ModuleNotFoundError)
# Modules that few runs need, imported where they are used
OPTIONAL = ("safetensors", "tokenizers", "huggingface_hub", "tiktoken", *EXTRA)
# Errors of this process. They keep alive what their tracebacks refer to: under torchrun nothing may
# be freed after an error, see `end_with`.
KEPT = []


def reports_errors(main: Callable[[], int | None]) -> Callable[[], int]:
    """Decorator for a command's `main()`: it returns the exit code, also after an error that is
    EXPECTED."""

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
    """Print a user's mistake, a limit of the machine or an interruption in one line, and return the
    exit code. Raise an error that is a defect of the program."""
    if rank_tag():
        KEPT.append(error)
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError):  # the reader of the output has gone, as in `… | head`
        return discard_output()
    message = explain(error)
    if message is None:
        raise error
    print(f"{rank_tag()}error: {message}", file=sys.stderr)
    return 1


def explain(error: BaseException) -> str | None:
    """One line about an error and what to do; None for a defect of the program."""
    line = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        advice = "lower --micro_batch_size (accumulation makes up for it) or --num_samples"
        return f"out of GPU memory: {advice} ({line[:99]})"
    if isinstance(error, MemoryError) or "can't allocate memory" in line or "Storage size" in line:
        return (
            "out of memory: lower --micro_batch_size, or --num_samples of sample.py, "
            "or choose a smaller model"
        )
    if isinstance(error, ModuleNotFoundError):
        module = (error.name or "").split(".")[0]
        return missing_package(module) if module in OPTIONAL else None
    if isinstance(error, dist.DistError) or "gloo" in line:  # gloo raises plain RuntimeErrors
        return f"lost or never met the other processes ({line[:200]})"
    if isinstance(error, RuntimeError):
        return None
    return line


def end_with(main: Callable[[], int]) -> None:
    """Run `main()` and end the process with its exit code. Under torchrun a process with an error
    exits at once and frees nothing: to free the process groups would be to wait for processes that
    are gone."""
    code = 1
    try:
        code = main()
    except SystemExit as e:  # from --help, or from a mistake in the flags
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
