"""Time the training step of a configuration, as train.py makes it, on this machine.

python bench.py config/dnt_small.py                              # tokens/s, ms, MFU, memory
python bench.py config/dnt_small.py --against=nanogpt            # beside nanoGPT's step
python bench.py config/dnt_small.py --vary=optimizer=adamw,msgdw,muon   # by any flag
python bench.py config/dnt_small.py --profile                    # a trace, time by kind of kernel
python bench.py config/gpt2_small.py --profile --only=nanogpt    # the same for nanoGPT's step
# any files, the first is the reference:
python bench.py config/gpt2_small.py --vary=config/dnt/s1.py,config/dnt/s5.py

Variants take turns in one process, so a machine that slows down slows all of them alike: trust the
ratios. `make test-gpu` tests the arithmetic of a GPU, `make gpu-check` checks and measures one in
14 minutes.
"""

import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


class Configs(NamedTuple):
    """The flags of one variant."""

    model: GPTConfig
    train: TrainConfig
    bench: BenchConfig


def read_configs(argv: list[str]) -> Configs:
    schemas = (GPTConfig, TrainConfig, BenchConfig)
    instances, _ = configure(*schemas, argv=argv, description=__doc__)
    return Configs(*instances)


def read_variants(argv: list[str]) -> dict[str, Configs]:
    """{name: flags} of the command line, or of each value, or file, of --vary."""
    base = read_configs(argv)
    vary = base.bench.vary
    if vary in ("", "norms"):
        return {"ours": base}
    flag, equals, listed = vary.rpartition("=")
    values = listed.split(",")
    if len(values) < 2:
        raise ValueError(
            f"vary={vary}: give FLAG=VALUE,VALUE,… or FILE,FILE,…, such as optimizer=adamw,muon "
            "or config/dnt/s1.py,config/dnt/s5.py; or norms"
        )
    if equals:
        return {f"{flag}={value}": read_configs([*argv, f"--{flag}={value}"]) for value in values}
    names = [Path(file).stem for file in values]
    if len(set(names)) < len(names):
        names = values
    # flags win over files wherever they stand, so the file can come last
    return {name: read_configs([*argv, file]) for name, file in zip(names, values, strict=True)}


def measure(settings: dict[str, Setting]) -> dict[str, Any]:
    """Make the measurement that the flags ask for and print it. Returns the figures for --json."""
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
    gc.freeze()  # as in train.py: the collector need not walk through all live objects
    variants = []
    for name, own in settings.items():
        make = partial(make_variant, name, kinds[name], own)
        variants.append(build(name, make, setting))
    time_variants(variants, setting)
    rows = [figures(variant, variants[0]) for variant in variants]
    setting.env.print("\n".join(describe_variants(rows)))
    return dict(variants=rows)


def run(argv: list[str]) -> None:
    """Time the variants of a command line."""
    variants = read_variants(argv)
    first = next(iter(variants.values()))
    first.bench.check()
    devices = {configs.train.device for configs in variants.values()}
    if len(devices) > 1:
        names = ", ".join(sorted(devices))
        raise ValueError(f"--vary needs one device, but the variants have {names}")
    with environment(first.train.device, first.train.dtype, first.train.timeout_s) as env:
        if env.distributed:
            raise ValueError("bench.py times one process: start it without torchrun")
        # every variant is another network to the same code
        torch._dynamo.config.recompile_limit = 10_000
        torch._dynamo.config.accumulated_recompile_limit = 10_000
        settings = {}
        for name, (model_config, config, bench) in variants.items():
            settings[name] = Setting(model_config=model_config, config=config, bench=bench, env=env)
        measure_and_record(settings, first.bench.json)


def measure_and_record(settings: dict[str, Setting], path: str) -> None:
    """Print the machine, the figures and warnings; write them to the file `path`, unless it is
    empty."""
    first = next(iter(settings.values()))
    env = first.env
    record = run_record()
    facts = header(first)
    warnings = check_load(first) + first.config.init_from_notes()
    for warning in warnings:
        env.print(warning)
    for name, fact in facts.items():
        env.print(f"{name}: {fact}")
    env.print("")
    result = {**record, "header": facts, "warnings": warnings, **measure(settings)}
    for warning in warnings:
        env.print(warning)  # again, after the tables, where it is seen
    if path:
        text = json.dumps(result, indent=1)
        write_file(Path(path), lambda f: f.write(text.encode()))
        env.print(f"written: {path}")


@reports_errors
def main() -> None:
    run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
