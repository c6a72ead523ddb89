"""Time a configuration's training step: the one train.py makes, on this machine.

python bench.py config/dnt_small.py                                            # tokens/s, ms, MFU, memory
python bench.py config/dnt_small.py --variant=nanogpt                          # beside nanoGPT's step
python bench.py config/gpt2_small.py --compare config/dnt/s1.py config/dnt/s5.py   # layouts or anything else in files
python bench.py config/dnt_small.py --sweep=layouts                            # norms, optimizers, micro_batch, loss, …
python bench.py config/dnt_small.py --profile                                  # a trace, and the costliest kernels

Files before --compare are the base, each file after it is a variant on that base, and the first one is the reference.
What is compared takes turns in one process, so that a machine that slows down slows all alike: ratios are what counts.
"""

import gc
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import nanogpt
import rundir
import runtime
from configurator import configure
from loader import Dataset, folder_of, load_meta
from measure import (
    Laps,
    busy_cores,
    clock,
    compilations,
    device_name,
    gigabytes,
    held_bytes,
    median_seconds,
    ms,
    or_na,
    peak_bytes,
    seconds_of,
)  # fmt: skip
from model import GPT, GPTConfig
from optim import fill_defaults, lr_at, make_optimizer
from summary import table
from train import TrainConfig, prepare_model, split_batch, training_step

PARTS = ("data", "forward", "backward", "clip", "optimizer")  # of a step; forward includes the loss


@dataclass
class BenchConfig:
    # --- benchmark: what ---
    variant: Literal["none", "nanogpt", "nanogpt-eager", "nanogpt-bf16", "nanogpt-all"] = "none"  # time nanoGPT's step
    #   too: as it ships, not compiled, with bf16 on a CPU too, or all of them
    sweep: Literal["none", "layouts", "norms", "optimizers", "micro_batch", "loss", "compile", "scaling"] = "none"
    #   instead of the one step: every layout against Pre-LN; norms as bare layers and in the model; the optimizers;
    #   micro batches 1, 2, 4, …; ways to compute the loss, to compile; larger width, depth, context, micro batch
    data: Literal["dataset", "random"] = "dataset"  # random: tokens drawn at random, no dataset needed; the vocabulary
    #   is vocab_size, or GPT-2's 50257
    accumulation: int = 1  # micro batches in a timed step; 0 = all that batch_size asks for
    compile_times: bool = False  # also the seconds of a compilation with an empty cache, and with that cache filled
    # --- benchmark: how ---
    warmup: int = 3  # untimed steps after the first, which compiles
    repeats: int = 5  # rounds; in each of them all variants have their turn
    steps: int = 10  # timed steps of a variant in a round, after an untimed one
    max_busy: float | None = None  # CPU cores that other processes may keep busy before the machine counts as busy;
    #   None = 0.25, with a GPU half of all cores
    fail_if_busy: bool = False  # refuse to run on a busy machine, instead of a warning
    doublings: int = 3  # sweep=scaling: how often each size is doubled
    max_step_s: float = 30.0  # sweeps over sizes end before a step that would take longer, by extrapolation
    # --- benchmark: output ---
    json: str = ""  # a file for all figures, each round's too, with versions, command line and git commit
    trace: str = ""  # profile: the trace's file; empty = OUT_DIR/bench/trace.json

    def check(self):
        """ValueError for values that no benchmark could mean."""
        for name, least in dict(warmup=1, repeats=1, steps=1, accumulation=0, doublings=0, max_step_s=0).items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        for name in ("json", "trace"):  # now, not when everything is measured
            path = Path(getattr(self, name))
            if path.is_dir() and getattr(self, name):
                raise ValueError(f"{name}={path} is a folder: name a file")
            path.parent.mkdir(parents=True, exist_ok=True)


# -------------------------------------------------------------------------------------------------------- variants


@dataclass
class Variant:
    """One training step to be timed, and what was measured of it."""

    name: str
    step: Callable  # step(i, lap): makes step i
    tokens: int  # of a step
    flops_per_token: int
    dtype: torch.dtype
    compiled: bool
    parameters: int
    compile_s: float | None = None
    memory: int | None = None  # peak bytes, without what other variants hold
    done: int = 0  # steps
    rounds: list = field(default_factory=list)  # seconds of each timed step, a list a round
    parts: dict = field(default_factory=dict)  # median seconds of each of PARTS
    recompilations: int = 0  # since it was warm
    models: tuple = ()  # (the plain, the compiled) for others to share
    optimizer: object = None

    def run(self, lap=lambda part: None) -> None:
        before = compilations()
        self.step(self.done, lap)
        self.recompilations += compilations() - before
        self.done += 1

    @property
    def seconds(self) -> float:
        """Of a step: the median over all."""
        return statistics.median(itertools.chain(*self.rounds))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Setting:
    """What to build a variant from."""

    flags: GPTConfig
    config: TrainConfig
    bench: BenchConfig
    env: runtime.Env

    def __post_init__(self):
        """Sets dtype and vocabulary; ValueError where there is no dataset and none was given up."""
        self.config.check()
        fill_defaults(self.config)
        if self.bench.data == "random":
            self.flags.vocab_size = self.flags.vocab_size or 50257
        else:
            try:
                vocab_size = load_meta(self.config.dataset, verify=False)["vocab_size"]
            except ValueError as e:
                raise ValueError(f"{e}; or time on random tokens: --data=random") from None
            self.flags.vocab_size = self.flags.vocab_size or vocab_size
            if vocab_size > self.flags.vocab_size:
                raise ValueError(
                    f"vocab_size={self.flags.vocab_size} is below the {vocab_size} tokens of {self.config.dataset!r}: "
                    "leave it out, or use --data=random"
                )
        self.env = replace(self.env, dtype=runtime.choose_dtype(self.config.dtype, self.env.device)[0])
        self.micro, whole = split_batch(self.config.batch_size, self.config.micro_batch_size, 1)
        self.accumulation = self.bench.accumulation or whole
        self.rows, self.whole = self.micro * self.accumulation, whole

    def but(self, **changes) -> "Setting":
        """The same with other flags, of any of the three dataclasses."""
        parts = (self.flags, self.config, self.bench)
        values = [{k: v for k, v in changes.items() if hasattr(part, k)} for part in parts]
        return Setting(*(replace(part, **v) for part, v in zip(parts, values, strict=True)), self.env)

    def fetch(self, step: int) -> tuple:
        """The batch of a step, on the host."""
        if self.bench.data == "random":
            size = (self.rows, self.flags.block_size + 1)
            tokens = np.random.default_rng(step).integers(self.flags.vocab_size, size=size)
            return self.env.pin(tokens[:, :-1], tokens[:, 1:])
        return self.env.pin(*self.dataset.batch(step, self.rows))

    def open(self) -> None:
        if self.bench.data == "dataset":
            self.dataset = Dataset(self.config.dataset, self.flags.block_size, self.config.seed, verify=False)

    def compiles(self, flops_per_token: int) -> tuple:
        """(whether to compile, the reason), as for the whole run in train.py."""
        tokens = self.config.batch_size * self.flags.block_size * self.config.max_iters
        return runtime.choose_compile(self.config.compile, self.env.device, tokens * flops_per_token)


def ours(name: str, setting: Setting, models: tuple = ()) -> Variant:
    """The step of train.py; `models`: of another variant, to train with another optimizer."""
    s, env, config = setting, setting.env, setting.config
    s.open()
    raw_model = models[0] if models else GPT(s.flags, config.seed)
    prepare_model(raw_model, config, env)
    optimizer = make_optimizer(raw_model, config)
    scaler = torch.amp.GradScaler(env.device.type, enabled=env.dtype == torch.float16)
    flops, start = raw_model.flops_per_token(), clock()
    model, compiled = models[1] if models else raw_model, s.compiles(flops)[0]
    if config.cuda_graphs:
        runtime.check_cuda_graphs(compiled, s.accumulation, env)
    if compiled and not models:
        model = runtime.compile_model(raw_model, config, env.put(*(t[: s.micro] for t in s.fetch(0))), env)
    compile_s, next_batch = clock() - start if compiled else None, runtime.Prefetch(s.fetch)

    def step(i, lap):
        torch.manual_seed(config.seed + i)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(i, config, group)
        x, y = env.put(*next_batch(i))
        lap("data")
        training_step(model, raw_model, optimizer, scaler, x, y, s.micro, config, lap)

    tokens = s.rows * s.flags.block_size
    compiled = model is not raw_model  # with compile=auto a failure is no error
    facts = dict(parameters=raw_model.num_params(), models=(raw_model, model), optimizer=optimizer)
    return Variant(name, step, tokens, flops, env.dtype, compiled, compile_s=compile_s if compiled else None, **facts)


def theirs(kind: str, setting: Setting) -> Variant:
    """The step of nanoGPT, of one of nanogpt.KINDS."""
    s, device, T = setting, setting.env.device, setting.flags.block_size
    s.open()
    model = nanogpt.NanoGPT(s.flags).to(device)
    bf16, compiled = device.type == "cuda" or kind == "nanogpt-bf16", kind != "nanogpt-eager"
    call = torch.compile(model) if compiled else model  # at the first step
    if s.bench.data == "random":
        tokens = np.random.default_rng(0).integers(s.flags.vocab_size, size=max(1 << 20, 2 * T), dtype=np.uint32)
    else:
        meta, folder = s.dataset.meta, folder_of(s.config.dataset)
        tokens = folder / Path(meta["splits"]["train"]["file"]).name, np.dtype(meta["dtype"]).newbyteorder("<")
    get_batch = nanogpt.batches(tokens, s.micro, T, device)
    optimizer, dtype = nanogpt.make_optimizer(model, s.config), torch.bfloat16 if bf16 else torch.float32
    step = nanogpt.make_step(call, optimizer, get_batch, s.accumulation, bf16, lambda i: lr_at(i, s.config), device)
    parameters = sum(p.numel() for p in model.parameters())
    facts = dict(parameters=parameters, compile_s=0.0 if compiled else None, optimizer=optimizer)
    return Variant(kind, step, s.rows * T, model.flops_per_token, dtype, compiled, **facts)


# ------------------------------------------------------------------------------------------------------- measuring


def at_start(setting: Setting) -> int | None:
    """Bytes that the process holds before anything is built, the compiler that will be used included."""
    if setting.compiles(math.inf)[0]:
        import torch._inductor.compile_fx  # noqa: F401
    gc.collect()
    gc.freeze()  # as train.py does: what is here now stays, and the collector need not walk through it
    return held_bytes(setting.env.device)


def build(make, setting: Setting, start: int | None) -> Variant:
    """make() → a Variant, compiled, warm, and its memory measured. `start`: held before the first was built."""
    device = setting.env.device
    held = held_bytes(device)
    variant = make()
    (first,) = seconds_of(variant.run, 1, device)
    warm = []
    peak = peak_bytes(lambda: warm.extend(seconds_of(variant.run, setting.bench.warmup, device)), device)
    if variant.compile_s is not None:  # what is compiled at its first call counts too
        variant.compile_s += max(0.0, first - statistics.median(warm))
    variant.recompilations = 0
    variant.memory = None if None in (peak, held, start) else peak - (held - start)
    return variant


def take_turns(runs: dict, setting: Setting, untimed: int = 1, steps: int = 0) -> dict:
    """{name: seconds of each timed call, a list a round}: in each round every function of `runs` has its turn."""
    bench, found = setting.bench, {name: [] for name in runs}
    for i in range(bench.repeats):
        for name, run in list(runs.items())[:: -1 if i % 2 else 1]:  # there and back, so that no one is always last
            for _ in range(untimed):
                run()  # its data, not another's, are in the caches now
            found[name].append(seconds_of(run, steps or bench.steps, setting.env.device))
    return found


def measure(variants: list, setting: Setting) -> None:
    """Whole steps, the variants taking turns; then the parts of their steps."""
    times = take_turns({i: variant.run for i, variant in enumerate(variants)}, setting)
    for i, variant in enumerate(variants):
        variant.rounds, laps = times[i], []
        for _ in range(setting.bench.steps):
            laps.append(Laps(setting.env.device, PARTS))
            variant.run(laps[-1])
        variant.parts = {part: statistics.median(lap.seconds[part] for lap in laps) for part in PARTS}


def ratio(variant: Variant, reference: Variant) -> tuple:
    """tokens/s over the reference's: (median of the rounds, least, largest)."""
    pairs = zip(variant.rounds, reference.rounds, strict=True)
    scale = variant.tokens / reference.tokens
    found = sorted(scale * statistics.median(b) / statistics.median(a) for a, b in pairs)
    return statistics.median(found), found[0], found[-1]


def ceilings(setting: Setting, dtypes) -> dict:
    """Median FLOP/s of plain products at the config's shapes: {dtype: {"ffn": …, "head": …}}.

    ffn: tokens × d × 4d; head: tokens × d × vocabulary. One micro batch's tokens, up to 16384."""
    s, d, found = setting, setting.flags.n_embd, {}
    n = min(s.micro * s.flags.block_size, 16384)  # more change nothing, and need memory
    for dtype in dict.fromkeys(dtypes):
        for part, width in (("ffn", 4 * d), ("head", s.flags.padded_vocab_size)):
            x, w = (torch.randn(rows, d, device=s.env.device).to(dtype) for rows in (n, width))
            seconds = median_seconds(lambda x=x, w=w: x @ w.T, s.env.device)
            found.setdefault(str(dtype).removeprefix("torch."), {})[part] = 2 * n * d * width / seconds
    return found


def check_load(setting: Setting) -> list:
    """Warnings about other work on the machine; ValueError with fail_if_busy."""
    bench, cuda, found = setting.bench, setting.env.device.type == "cuda", []
    cores, limit = busy_cores(), bench.max_busy
    if limit is None:
        limit = 0.5 * (os.cpu_count() or 1) if cuda else 0.25
    if cores is not None and cores > limit:
        found.append(f"other processes keep {cores:.1f} CPU cores busy (max_busy={limit:g}): the figures mean little")
    try:
        use = torch.cuda.utilization(setting.env.device) if cuda else 0
    except Exception:  # whatever the driver's library, which may be missing, raises
        use = 0
        found.append("whether others use the GPU is unknown (pip install nvidia-ml-py)")
    if use > 10:
        found.append(f"the GPU is busy ({use}% used by others): the figures mean little")
    if found and bench.fail_if_busy:
        raise ValueError(f"{'; '.join(found)}; wait, or leave fail_if_busy out")
    return [f"warning: {line}" for line in found]


# -------------------------------------------------------------------------------------------------------- printing


def header(setting: Setting) -> dict:
    """What the figures were measured on, and of what."""
    s, config = setting, setting.config
    name = str(s.env.dtype).removeprefix("torch.")
    facts = {"device": f"{s.env.device}, {device_name(s.env.device)}", "threads": torch.get_num_threads()}
    facts |= {"torch": torch.__version__, "attention": runtime.attention_backend(s.flags, s.env)}
    facts |= {"dtype": name, "compile": config.compile, "optimizer": config.optimizer, "data": s.bench.data}
    whole = "the whole batch_size" if s.accumulation == s.whole else f"batch_size={config.batch_size} needs {s.whole}"
    facts["step"] = f"{s.micro} × {s.flags.block_size} tokens × {s.accumulation} accumulation ({whole})"
    return facts


def figures(variant: Variant, reference: Variant, setting: Setting, ceiling: dict) -> dict:
    """Everything measured of a variant, in plain values."""
    v, flops = variant, variant.flops_per_token * variant.tokens_per_s
    peak = runtime.peak_flops(setting.env.device, v.dtype, setting.config.peak_flops)
    dtype, every = str(v.dtype).removeprefix("torch."), list(itertools.chain(*v.rounds))
    low, high = np.percentile(every, (10, 90)).tolist()
    found = dict(name=v.name, dtype=dtype, compiled=v.compiled, parameters=v.parameters, step_tokens=v.tokens)
    found |= dict(tokens_per_s=v.tokens_per_s, step_s=v.seconds, step_s_p10=low, step_s_p90=high, flops_per_s=flops)
    found |= dict(parts_s=v.parts, mfu=flops / peak if peak else None, of_ceiling=flops / ceiling[dtype]["ffn"])
    found |= dict(peak_mem_bytes=v.memory, compile_s=v.compile_s, recompilations=v.recompilations, rounds_s=v.rounds)
    found |= dict(zip(("ratio", "ratio_min", "ratio_max"), ratio(v, reference), strict=True))
    return found | dict(reference=reference.name)


def describe(rows: list) -> list:
    """The figures of all variants as two tables."""
    reference, several = rows[0]["reference"], len(rows) > 1
    head = ("", "tokens/s", "ms/step", "10%…90%", "MFU", "of ceiling", "memory", "compile s", "recompiled")
    lines = [(*head, f"× {reference} (rounds)") if several else head]
    for r in rows:
        line = [r["name"], f"{r['tokens_per_s']:,.0f}", ms(r["step_s"])]
        line += [f"{ms(r['step_s_p10'])}…{ms(r['step_s_p90'])}", or_na(r["mfu"], "{:.1%}".format)]
        line += [f"{r['of_ceiling']:.1%}", gigabytes(r["peak_mem_bytes"]), or_na(r["compile_s"], "{:.1f}".format)]
        line += [str(r["recompilations"])]
        line += [f"{r['ratio']:.3f} ({r['ratio_min']:.3f}…{r['ratio_max']:.3f})"] if several else []
        lines.append(tuple(line))
    parts = [("ms, waiting after each part", *("forward+loss" if p == "forward" else p for p in PARTS), "sum")]
    for r in rows:
        parts.append((r["name"], *(ms(r["parts_s"][p]) for p in PARTS), ms(sum(r["parts_s"].values()))))
    return [*table(lines), "", *table(parts)]


def describe_ceilings(found: dict) -> list:
    """The ceilings as lines."""
    text = {dtype: ", ".join(f"{part} {x / 1e12:.3g}" for part, x in parts.items()) for dtype, parts in found.items()}
    return [
        "ceiling, TFLOP/s of plain products (ffn: tokens × d × 4d, for “of ceiling”; head: tokens × d × vocabulary): "
        + "; ".join(f"{dtype}: {line}" for dtype, line in text.items())
    ]


# ------------------------------------------------------------------------------------------------------------ modes


def run_variants(makes: list, setting: Setting) -> dict:
    """Build, time and print what `makes` (functions without arguments → Variant) give; the first is the reference."""
    start, variants = at_start(setting), []
    for make in makes:
        variants.append(build(make, setting, start))
    measure(variants, setting)
    ceiling = ceilings(setting, [*(v.dtype for v in variants), setting.env.dtype, torch.float32])
    rows = [figures(v, variants[0], setting, ceiling) for v in variants]
    work = {f"{v.flops_per_token / 1e9:.3g} GFLOPs" for v in variants}
    if max(v.flops_per_token for v in variants) > 1.01 * min(v.flops_per_token for v in variants):
        setting.env.print(f"note: the variants differ in work per token ({', '.join(sorted(work))}): ratios say little")
    setting.env.print("\n".join([*describe(rows), "", *describe_ceilings(ceiling)]))
    return dict(variants=rows, ceilings_flops_per_s=ceiling)


def beside_nanogpt(setting: Setting) -> list:
    """What to time for --variant: nanoGPT's, the reference, and ours."""
    kinds = list(nanogpt.KINDS) if setting.bench.variant == "nanogpt-all" else [setting.bench.variant]
    if setting.env.device.type == "cuda" and "nanogpt-bf16" in kinds:
        setting.env.print("nanogpt-bf16 is nanogpt on a GPU: left out")
        kinds = [kind for kind in kinds if kind != "nanogpt-bf16"] or ["nanogpt"]
    return [*((lambda kind=kind: theirs(kind, setting)) for kind in kinds), lambda: ours("ours", setting)]


def take_words(argv: list) -> tuple:
    """(arguments of the base, files of --compare or None, whether --profile): those two are words without a value."""
    rest, compared, profile = [], None, False
    for arg in argv:
        if arg == "--compare":
            compared = []
        elif arg == "--profile":
            profile = True
        elif compared is not None and not arg.startswith("-"):
            compared.append(arg)
        else:
            rest.append(arg)
    if compared is not None and len(compared) < 2:
        print("error: --compare wants two files or more after it, the first as the reference", file=sys.stderr)
        raise SystemExit(2)
    return rest, compared, profile


def read_settings(argv: list) -> tuple:
    """(settings of the base alone or of each compared file, their names): GPTConfig, TrainConfig, BenchConfig each."""
    base, compared, _ = take_words(argv)
    schemas, files = (GPTConfig, TrainConfig, BenchConfig), compared or [None]
    # flags win over files wherever they stand, so the file can come last
    found = [configure(*schemas, argv=base + ([file] if file else []), description=__doc__)[0] for file in files]
    names = [Path(file).stem if file else "ours" for file in files]
    return found, names if len(set(names)) == len(names) else files


def run(argv: list) -> int:
    found, names = read_settings(argv)
    (_, config, bench), (_, compared, profile) = found[0], take_words(argv)
    modes = ["--compare"] * (compared is not None) + ["--profile"] * profile + ["--compile_times"] * bench.compile_times
    modes += [f"--{name}" for name in ("variant", "sweep") if getattr(bench, name) != "none"]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)} are different benchmarks: choose one")
    bench.check()
    others = {other.device for _, other, _ in found}
    if len(others) > 1:
        raise ValueError(f"--compare needs one device, but the files have {', '.join(sorted(others))}")
    with runtime.environment(config.device, config.dtype, config.timeout_s) as env:
        if env.distributed:
            raise ValueError("bench.py times one process: start it without torchrun")
        torch._dynamo.config.recompile_limit = 10_000  # every variant is another network to the same code
        torch._dynamo.config.accumulated_recompile_limit = 10_000
        settings = [Setting(*one, env) for one in found]
        setting, result = settings[0], rundir.run_record()
        warnings = check_load(setting)
        env.print("\n".join(warnings + [f"{name}: {fact}" for name, fact in header(setting).items()] + [""]))
        result |= dict(header=header(setting), warnings=warnings)
        if bench.sweep != "none" or profile or bench.compile_times:
            import bench_sweeps

            mode = "profile" if profile else "compile_times" if bench.compile_times else bench.sweep
            result |= {"mode": mode} | bench_sweeps.MODES[mode](setting)
        elif bench.variant != "none":
            result |= {"mode": bench.variant} | run_variants(beside_nanogpt(setting), setting)
        else:
            makes = [lambda n=n, s=s: ours(n, s) for n, s in zip(names, settings, strict=True)]
            result |= {"mode": "compare" if compared else "step"} | run_variants(makes, setting)
        for warning in warnings:
            env.print(warning)  # again, where it is seen
        if bench.json:
            Path(bench.json).parent.mkdir(parents=True, exist_ok=True)
            rundir.write_file(Path(bench.json), lambda f: f.write(json.dumps(result, indent=1).encode()))
            env.print(f"written: {bench.json}")
    return 0


def main() -> int:
    try:
        return run(sys.argv[1:])
    except runtime.EXPECTED as e:
        return runtime.report(e)


if __name__ == "__main__":
    import bench

    sys.exit(bench.main())  # the module, not this script: bench_sweeps.py imports it too
