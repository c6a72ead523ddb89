"""Time a configuration's training step, the one train.py makes, on this machine.

python bench.py config/dnt_small.py                                            # tokens/s, ms, MFU, memory
python bench.py config/dnt_small.py --against=nanogpt                          # beside nanoGPT's step
python bench.py config/gpt2_small.py --vary=config/dnt/s1.py,config/dnt/s5.py  # any files, the first is the reference
python bench.py config/dnt_small.py --vary=micro_batch_size=8,16,32            # any flag
python bench.py config/dnt_small.py --vary=layouts                             # a set: optimizers, experts, norms, …
python bench.py config/dnt_small.py --profile                                  # a trace, and time by kind of kernel
python bench.py config/gpt2_small.py --profile --only=nanogpt                  # of nanoGPT's step

Variants take turns in one process, so a machine that slows down slows all of them alike: trust the ratios.
Is the arithmetic right on a GPU: make test-gpu. Checks and measurements of one GPU in 9 minutes: make gpu-check.
"""

import json
import sys
from functools import partial
from pathlib import Path

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

import torch

from configurator import configure
from model import GPTConfig
from nanodnt.bench.compare import compare_variants
from nanodnt.bench.measure import check_load
from nanodnt.bench.norms import time_norms
from nanodnt.bench.profiling import profile_steps
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.bench.tables import header
from nanodnt.bench.variants import make_variant, our_variant, variants_beside_nanogpt
from nanodnt.bench.vary import SETS
from nanodnt.files import write_file
from nanodnt.run.directory import run_record
from nanodnt.run.environment import environment
from nanodnt.run.errors import reports_errors
from nanodnt.settings import TrainConfig


def read_variants(argv: list) -> dict:
    """{name: (GPTConfig, TrainConfig, BenchConfig)} of the command line, or of each value, or file, of --vary."""

    def read(*more):
        return configure(GPTConfig, TrainConfig, BenchConfig, argv=[*argv, *more], description=__doc__)[0]

    base = read()
    vary = base[-1].vary
    if vary in ("", "norms", *SETS):
        return {"ours": base}
    flag, equals, values = vary.rpartition("=")
    values = values.split(",")
    if len(values) < 2:
        raise ValueError(f"vary={vary}: give FLAG=VALUE,VALUE,… or FILE,FILE,… or one of norms, {', '.join(SETS)}")
    if equals:
        return {f"{flag}={value}": read(f"--{flag}={value}") for value in values}
    stems = {Path(file).stem for file in values}
    # flags win over files wherever they stand, so the file can come last
    return {Path(file).stem if len(stems) == len(values) else file: read(file) for file in values}


def choose_mode(bench: BenchConfig) -> str:
    """The flag that says what to do; "step" if there is none. ValueError if there are several."""
    modes = {"vary": bench.vary, "against": bench.against != "none", "profile": bench.profile}
    modes["only"] = bench.only != "ours" and not bench.profile
    given = [flag for flag, value in modes.items() if value]
    if len(given) > 1:
        raise ValueError(f"--{' and --'.join(given)} are different benchmarks: choose one")
    return given[0] if given else "step"


def measure(mode: str, settings: dict) -> dict:
    """Do what `mode` says and print it; returns the figures for --json."""
    setting = next(iter(settings.values()))
    vary = setting.bench.vary
    if mode == "profile":
        return profile_steps(setting)
    if mode == "against":
        return compare_variants(variants_beside_nanogpt(setting), setting)
    if vary == "norms":
        return time_norms(setting)
    if vary in SETS:
        makes = {n: partial(our_variant, n, setting, **changes) for n, changes in SETS[vary](setting).items()}
        return compare_variants(makes, setting, in_pairs=vary == "layouts")
    return compare_variants({name: partial(make_variant, name, one) for name, one in settings.items()}, setting)


def run(argv: list) -> None:
    """Do what the arguments say."""
    found = read_variants(argv)
    _, config, bench = next(iter(found.values()))
    mode = choose_mode(bench)
    bench.check()
    devices = {other.device for _, other, _ in found.values()}
    if len(devices) > 1:
        raise ValueError(f"--vary needs one device, but the variants have {', '.join(sorted(devices))}")
    with environment(config.device, config.dtype, config.timeout_s) as env:
        if env.distributed:
            raise ValueError("bench.py times one process: start it without torchrun")
        torch._dynamo.config.recompile_limit = 10_000  # every variant is another network to the same code
        torch._dynamo.config.accumulated_recompile_limit = 10_000
        settings = {n: Setting(model_config=f, config=c, bench=b, env=env) for n, (f, c, b) in found.items()}
        first = next(iter(settings.values()))
        record, facts = run_record(), header(first)
        warnings = check_load(first) + config.source_notes()
        env.print("\n".join(warnings + [f"{name}: {fact}" for name, fact in facts.items()] + [""]))
        result = record | dict(header=facts, warnings=warnings, mode=mode) | measure(mode, settings)
        for warning in warnings:
            env.print(warning)  # again, after the tables, where it is seen
        if bench.json:
            write_file(Path(bench.json), lambda f: f.write(json.dumps(result, indent=1).encode()))
            env.print(f"written: {bench.json}")


@reports_errors
def main() -> None:
    run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
