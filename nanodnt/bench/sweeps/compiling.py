"""Uses of torch.compile: how fast the compiled model is, and how long compiling takes."""

from functools import partial

import torch

from nanodnt.bench.measure import free_memory, median_of_rounds, seconds_of
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_ms, print_table
from nanodnt.bench.timing import bytes_at_start, take_turns
from nanodnt.bench.variants import forward_backward, our_variant
from nanodnt.engine import prepare_model
from nanodnt.run.compilation import choose_blocks, compile_parts

COMPILERS = {  # the first is what train.py does with one process and fewer than DEEP blocks
    "whole model": partial(torch.compile, dynamic=False),
    "per block": compile_parts,
    "whole, C++ wrapper": partial(torch.compile, dynamic=False, options=dict(cpp_wrapper=True)),
    "whole, max-autotune": partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs"),
    "eager": lambda model: model,
}


def time_compilers(setting: Setting) -> dict:
    """Time forward and backward of one micro batch under each use of torch.compile, and the first call by itself."""
    device, runs, first_s, rows = setting.env.device, {}, {}, []
    setting.open_dataset()
    batch = setting.first_micro_batch()
    for name, compile_model in COMPILERS.items():
        model = prepare_model(setting.new_model(), setting.config, setting.env)
        runs[name] = partial(forward_backward, compile_model(model), model, *batch)
        (first_s[name],) = seconds_of(runs[name], 1, device)
    times = take_turns(runs, setting)
    reference = next(iter(runs))
    lines = [("compiled", "ms, forward and backward", f"time of {reference}", "first, s")]
    for name, rounds in times.items():
        seconds = median_of_rounds(rounds)
        rows.append(dict(way=name, seconds=seconds, rounds_s=rounds, first_s=first_s[name]))
        ratio = f"{seconds / median_of_rounds(times[reference]):.3f}"
        lines.append((name, format_ms(seconds), ratio, f"{first_s[name]:.1f}"))
    print_table(setting, lines)
    return dict(compilers=rows)


def time_compilation(setting: Setting) -> dict:
    """Seconds of compiling and of the first step: with an empty cache on disk, then with that cache filled."""
    from torch._inductor.utils import clear_caches, fresh_cache

    blocks, _ = choose_blocks(setting.config.compile, setting.flags.n_layer, setting.env)
    compiled, seconds = setting.replace(compile="blocks" if blocks else True), {}
    bytes_at_start(compiled)  # loads the compiler
    with fresh_cache():
        for name in ("cold", "warm"):
            torch._dynamo.reset()
            clear_caches()  # those in memory
            variant = our_variant(name, compiled)
            (first,) = seconds_of(variant.run, 1, setting.env.device)
            seconds[f"{name}_s"] = variant.compile_s + first
            del variant
            free_memory(setting.env.device)
    setting.env.print(*describe_compilation(seconds))
    return seconds


def describe_compilation(seconds: dict) -> list:
    """The line of `time_compilation`."""
    return ["compiled and first step made: cold {cold_s:.1f} s, cache filled {warm_s:.1f} s".format(**seconds)]
