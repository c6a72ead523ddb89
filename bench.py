"""Time a configuration's training step, the one train.py makes, on this machine.

python bench.py config/dnt_small.py                                            # tokens/s, ms, MFU, memory
python bench.py config/dnt_small.py --against=nanogpt                          # beside nanoGPT's step
python bench.py config/gpt2_small.py --vary=config/dnt/s1.py,config/dnt/s5.py  # any files, the first is the reference
python bench.py config/dnt_small.py --vary=optimizer=adamw,msgdw,muon          # any flag
python bench.py config/dnt_small.py --profile                                  # a trace, and time by kind of kernel
python bench.py config/gpt2_small.py --profile --only=nanogpt                  # of nanoGPT's step

Variants take turns in one process, so a machine that slows down slows all of them alike: trust the
ratios. Is the arithmetic right on a GPU: make test-gpu. Checks and measurements of one GPU in 9
minutes: make gpu-check.
"""

import gc
import json
import sys
from functools import partial
from pathlib import Path

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

import torch

from configurator import configure
from model import GPTConfig
from nanodnt.bench.measure import build, check_load, time_variants
from nanodnt.bench.norms import time_norms
from nanodnt.bench.profiling import profile_steps
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.bench.tables import describe_variants, figures, header
from nanodnt.bench.variants import make_variant
from nanodnt.files import write_file
from nanodnt.run.directory import run_record
from nanodnt.run.environment import environment
from nanodnt.run.errors import reports_errors
from nanodnt.settings import TrainConfig


def read_variants(argv: list) -> dict:
    """{name: (GPTConfig, TrainConfig, BenchConfig)} of the command line, or of each value, or file,
    of --vary."""

    def read(*more):
        return configure(
            GPTConfig, TrainConfig, BenchConfig, argv=[*argv, *more], description=__doc__
        )[0]

    base = read()
    vary = base[-1].vary
    if vary in ("", "norms"):
        return {"ours": base}
    flag, equals, values = vary.rpartition("=")
    values = values.split(",")
    if len(values) < 2:
        examples = "optimizer=adamw,muon or config/dnt/s1.py,config/dnt/s5.py"
        raise ValueError(
            f"vary={vary}: give FLAG=VALUE,VALUE,… or FILE,FILE,…, such as {examples}; or norms"
        )
    if equals:
        return {f"{flag}={value}": read(f"--{flag}={value}") for value in values}
    stems = {Path(file).stem for file in values}
    # flags win over files wherever they stand, so the file can come last
    return {Path(file).stem if len(stems) == len(values) else file: read(file) for file in values}


def measure(settings: dict) -> dict:
    """Time what the flags say and print it; returns the figures for --json."""
    setting = next(iter(settings.values()))
    bench = setting.bench
    if bench.profile:
        return profile_steps(setting)
    if bench.vary == "norms":
        return time_norms(setting)
    if bench.against != "none":
        settings = {bench.against: setting, "ours": setting}
        kinds = {bench.against: bench.against, "ours": "ours"}
    else:
        kinds = dict.fromkeys(settings, bench.only)
    gc.collect()
    gc.freeze()  # as train.py does: the collector need not walk through what is alive now
    makes = {name: partial(make_variant, name, kinds[name], one) for name, one in settings.items()}
    variants = [build(name, make, setting) for name, make in makes.items()]
    time_variants(variants, setting)
    rows = [figures(variant, variants[0]) for variant in variants]
    setting.env.print("\n".join(describe_variants(rows)))
    return dict(variants=rows)


def run(argv: list) -> None:
    """Do what the arguments say."""
    found = read_variants(argv)
    _, config, bench = next(iter(found.values()))
    bench.check()
    devices = {other.device for _, other, _ in found.values()}
    if len(devices) > 1:
        raise ValueError(
            f"--vary needs one device, but the variants have {', '.join(sorted(devices))}"
        )
    with environment(config.device, config.dtype, config.timeout_s) as env:
        if env.distributed:
            raise ValueError("bench.py times one process: start it without torchrun")
        # every variant is another network to the same code
        torch._dynamo.config.recompile_limit = 10_000
        torch._dynamo.config.accumulated_recompile_limit = 10_000
        settings = {
            n: Setting(model_config=f, config=c, bench=b, env=env) for n, (f, c, b) in found.items()
        }
        first = next(iter(settings.values()))
        record, facts = run_record(), header(first)
        warnings = check_load(first) + config.source_notes()
        env.print("\n".join(warnings + [f"{name}: {fact}" for name, fact in facts.items()] + [""]))
        result = record | dict(header=facts, warnings=warnings) | measure(settings)
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
