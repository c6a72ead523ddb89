"""Time a configuration's training step, the one train.py makes, on this machine; or check it.

python bench.py config/dnt_small.py                                            # tokens/s, ms, MFU, memory
python bench.py config/dnt_small.py --variant=nanogpt                          # beside nanoGPT's step
python bench.py config/gpt2_small.py --compare config/dnt/s1.py config/dnt/s5.py   # any files, such as layouts
python bench.py config/dnt_small.py --sweep=layouts                            # norms, optimizers, micro_batch, loss, …
python bench.py config/dnt_small.py --profile                                  # a trace, and the costliest kernels
python bench.py config/gpt2_small.py --verify=precision --data=random          # is the arithmetic right on this device?
python bench.py --report                                                       # all of it on a GPU: out/report/gpu.md

Files before --compare are the base. Each file after it is a variant of that base; the first one is the reference.
Variants take turns in one process, so a machine that slows down slows all of them alike: trust the ratios.
"""

import json
import sys
from functools import partial
from pathlib import Path

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

import torch

from configurator import configure
from model import GPTConfig
from nanodnt.bench.checks import CHECKS
from nanodnt.bench.checks.verdict import describe_checks, failures
from nanodnt.bench.compare import compare_variants, variants_beside_nanogpt
from nanodnt.bench.report.runner import make_report
from nanodnt.bench.settings import BenchConfig, Setting
from nanodnt.bench.sweeps import MODES
from nanodnt.bench.tables import header
from nanodnt.bench.timing import check_load
from nanodnt.bench.variants import our_variant
from nanodnt.files import write_file
from nanodnt.run.environment import environment
from nanodnt.run.errors import EXPECTED, report_error
from nanodnt.run.metrics import run_record
from nanodnt.settings import TrainConfig

REPORT = {"report", "report_minutes", "report_size", "device"}  # the only flags that go with --report


def split_words(argv: list) -> tuple:
    """(arguments of the base, files of --compare or None, whether --profile is given). Those two take no `=`, and
    --report needs none."""
    rest, compared, profile = [], None, False
    for arg in argv:
        if arg == "--compare":
            compared = []
        elif arg == "--profile":
            profile = True
        elif arg == "--report":
            rest.append("--report=out/report")
        elif compared is not None and not arg.startswith("-"):
            compared.append(arg)
        else:
            rest.append(arg)
    if compared is not None and len(compared) < 2:
        print("error: --compare needs two files or more after it; the first is the reference", file=sys.stderr)
        raise SystemExit(2)
    return rest, compared, profile


def read_settings(base: list, compared: list | None) -> tuple:
    """([(GPTConfig, TrainConfig, BenchConfig) of the base or of each compared file], their names). ValueError for flags
    and files beside --report."""
    schemas, files = (GPTConfig, TrainConfig, BenchConfig), compared or [None]
    # flags win over files wherever they stand, so the file can come last
    read = [configure(*schemas, argv=base + ([file] if file else []), description=__doc__) for file in files]
    others = sorted(read[0][1].keys() - REPORT)
    if read[0][0][-1].report and (others or compared):
        raise ValueError(f"--report has configurations of its own: leave out {', '.join(others) or '--compare'}")
    names = [Path(file).stem if file else "ours" for file in files]
    return [settings for settings, _ in read], names if len(set(names)) == len(names) else files


def choose_mode(bench: BenchConfig, compared: list | None, profile: bool) -> str:
    """What to do: step, compare, report, a value of --variant, a name in MODES or CHECKS. ValueError if more than one
    is given."""
    modes = {
        "--compare": "compare" if compared else None,
        "--profile": "profile" if profile else None,
        "--compile_times": "compile_times" if bench.compile_times else None,
        "--variant": bench.variant if bench.variant != "none" else None,
        "--sweep": bench.sweep if bench.sweep != "none" else None,
        "--verify": bench.verify if bench.verify != "none" else None,
        "--report": "report" if bench.report else None,
    }
    given = {flag: mode for flag, mode in modes.items() if mode}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are different benchmarks: choose one")
    return next(iter(given.values()), "step")


def measure(mode: str, settings: list, names: list) -> dict:
    """Do what `mode` says and print it; returns the figures for --json."""
    if mode in MODES:
        return MODES[mode](settings[0])
    if mode in CHECKS:
        result = CHECKS[mode](settings[0])
        settings[0].env.print("\n".join(describe_checks(result)))
        return result
    if mode in ("step", "compare"):
        makes = [partial(our_variant, name, setting) for name, setting in zip(names, settings, strict=True)]
    else:
        makes = variants_beside_nanogpt(settings[0])
    return compare_variants(makes, settings[0])


def run(argv: list) -> int:
    """Do what the arguments say; returns the exit code: 1 if a check has failed."""
    base, compared, profile = split_words(argv)
    found, names = read_settings(base, compared)
    _, config, bench = found[0]
    mode = choose_mode(bench, compared, profile)
    bench.check()
    if mode == "report":
        return make_report(bench.report, bench.report_size, bench.report_minutes, config.device)
    devices = {other.device for _, other, _ in found}
    if len(devices) > 1:
        raise ValueError(f"--compare needs one device, but the files have {', '.join(sorted(devices))}")
    with environment(config.device, config.dtype, config.timeout_s) as env:
        if env.distributed:
            raise ValueError("bench.py times one process: start it without torchrun")
        torch._dynamo.config.recompile_limit = 10_000  # every variant is another network to the same code
        torch._dynamo.config.accumulated_recompile_limit = 10_000
        settings = [Setting(*one, env) for one in found]
        record, facts = run_record(), header(settings[0])
        warnings = check_load(settings[0]) + config.source_notes()
        env.print("\n".join(warnings + [f"{name}: {fact}" for name, fact in facts.items()] + [""]))
        result = record | dict(header=facts, warnings=warnings, mode=mode) | measure(mode, settings, names)
        for warning in warnings:
            env.print(warning)  # again, after the tables, where it is seen
        if bench.json:
            Path(bench.json).parent.mkdir(parents=True, exist_ok=True)
            write_file(Path(bench.json), lambda f: f.write(json.dumps(result, indent=1).encode()))
            env.print(f"written: {bench.json}")
    return 1 if failures(result) else 0


def main() -> int:
    try:
        return run(sys.argv[1:])
    except EXPECTED as e:
        return report_error(e)


if __name__ == "__main__":
    sys.exit(main())
