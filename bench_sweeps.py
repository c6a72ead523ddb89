"""What bench.py does beside timing one step: sweeps over layouts, norms, optimizers, micro batches, losses and sizes;
a profile; compile times. Each function takes the configuration's Setting, prints a table and returns it for --json."""

import gc
import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import runtime
from bench import Setting, Variant, at_start, build, ceilings, figures, measure, ours, take_turns
from measure import available_bytes, clock, gigabytes, held_bytes, ms, peak_bytes, seconds_of, wait
from model import GPT, GPTConfig, Slot, linear_cross_entropy
from optim import OPTIMIZERS, RATIOS
from summary import table
from train import prepare_model

# Layouts on top of plain Pre-LN with RMSNorm. A function takes the model's flags.
LAYOUTS = {
    "pre_ln (S1)": dict(),
    "S2": dict(qk_norm=True),
    "S3": dict(qk_norm=True, input_norm=True),
    "S4": dict(qk_norm=True, input_norm=True, mid_norm="both"),
    "S5 (DNT)": dict(qk_norm=True, input_norm=True, mid_norm="both", pre_norm="attn"),
    "lns": dict(lns="norm", residual_init="plain"),
    "dyt": dict(norm="dyt", embed_scale=True),
    "post_ln": dict(pre_norm="none", post_norm="both"),
    "mix_ln": dict(post_norm_blocks=lambda flags: max(1, flags.n_layer // 4)),
    "deepnorm": dict(pre_norm="none", post_norm="both", deepnorm=True, init="xavier", residual_init="plain"),
    "sandwich": dict(mid_norm="both"),
    "layernorm": dict(norm="layernorm"),
    "no norm": dict(norm="none"),
    "layerscale": dict(branch_scale="layerscale"),
    "skipinit": dict(branch_scale="skipinit"),
    "sigma_reparam": dict(norm="none", sigma_reparam=True),
    "hg": dict(gain="branch"),
    "dp": dict(gain_out="scale"),
    "dnp": dict(gain_out="norm"),
    "or_magdir": dict(gain_param="magdir"),
    "unified": dict(gain="branch", gain_out="norm", gain_param="magdir", decay_gains="input"),
}
# what a layout leaves as the config has it
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "pos", "rope_theta", "n_kv_head", "mlp", "n_ff")
SIZES += ("tie_weights", "bias", "dropout", "norm_eps", "init_std")


def plain(flags: GPTConfig) -> dict:
    """Flags that make a config of any layout plain Pre-LN with RMSNorm, at its size."""
    default = GPTConfig()
    return {k: v for k, v in vars(default).items() if k not in SIZES} | dict(decay_gains="none")


def free(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show(setting: Setting, rows: list) -> None:
    setting.env.print("\n".join(table(rows)))


def how(setting: Setting) -> tuple:
    """The ways to run a piece of code: eager, and compiled unless that is off or impossible."""
    can = runtime.choose_compile(setting.config.compile, setting.env.device, math.inf)[0]
    return ("eager", "compiled") if can else ("eager",)


# ---------------------------------------------------------------------------------------------------------- sweeps


def layouts(setting: Setting) -> dict:
    """The price of every layout: its step beside Pre-LN's, one pair after the other."""
    base, device, rows = setting.but(**plain(setting.flags)), setting.env.device, []
    ceiling, start = ceilings(base, [base.env.dtype]), at_start(base)
    reference = build(lambda: ours("pre_ln", base), base, start)
    for name, flags in LAYOUTS.items():
        flags = {k: v(base.flags) if callable(v) else v for k, v in flags.items()}
        try:
            layout = base.but(**flags)
            variant = build(partial(ours, name, layout), layout, start)
        except ValueError as e:  # say, Mix-LN of one block
            setting.env.print(f"{name}: left out ({e})")
            continue
        reference.rounds = []
        measure([reference, variant], base)
        rows.append(figures(variant, reference, layout, ceiling) | dict(flags=flags))
        speed = 1 / rows[-1]["ratio"] - 1
        setting.env.print(f"{name}: {ms(variant.seconds)} ms, {speed:+.1%}")
        del variant, layout
        free(device)
    head = ("layout", "ms/step", "tokens/s", "time against Pre-LN (rounds)", "memory")
    lines = [head]
    for r in rows:
        price = [1 / r[key] - 1 for key in ("ratio", "ratio_max", "ratio_min")]
        line = (r["name"], ms(r["step_s"]), f"{r['tokens_per_s']:,.0f}", "{:+.1%} ({:+.1%}…{:+.1%})".format(*price))
        lines.append((*line, gigabytes(r["peak_mem_bytes"])))
    setting.env.print()
    show(setting, lines)
    return dict(layouts=rows, ceilings_flops_per_s=ceiling)


NORMS = ("rmsnorm", "layernorm", "dyt", "none")  # the first is the reference; none is the identity


def norms(setting: Setting) -> dict:
    """DyT's Table 7: norms as bare layers, and in the model, forward alone and with backward, eager and compiled.

    A bare layer works on the residual stream of one micro batch, fp32. The paper's figure for a layer is the model's
    time less that of the model with the identity: the last columns, for all layers of a model."""
    s, device, d, rows = setting, setting.env.device, setting.flags.n_embd, []
    s.open()
    x, y = s.env.put(*(t[: s.micro] for t in s.fetch(0)))
    stream = torch.randn(s.micro, s.flags.block_size, d, device=device, requires_grad=True)
    upstream = torch.randn_like(stream)
    for way in how(s):
        runs = {}
        for norm in NORMS:
            slot = Slot(norm, gain=d * (norm != "none"), bias=d * (s.flags.bias and norm == "layernorm")).to(device)
            slot.init()
            model = GPT(s.but(**plain(s.flags) | dict(norm=norm)).flags, s.config.seed)
            model.to(device).set_compute_dtype(s.env.dtype)
            layer, net = (torch.compile(m, dynamic=False) if way == "compiled" else m for m in (slot, model))
            runs |= norm_runs(norm, layer, net, model, stream, upstream, x, y)
        times = take_turns(runs, s)
        for (norm, what, passes), t in times.items():
            rows.append(dict(norm=norm, what=what, passes=passes, way=way, rounds_s=t, seconds=middle(t)))
        del runs, layer, net, model
        free(device)
    value = {(r["norm"], r["what"], r["passes"], r["way"]): r["seconds"] for r in rows}
    columns = list(dict.fromkeys(key[1:] for key in value))
    lines = [("ms (× rmsnorm)", *(f"{what}, {passes}, {way}" for what, passes, way in columns))]
    for norm in NORMS:
        name, line = {"none": "identity"}.get(norm, norm), []
        for column in columns:
            t, base = value[(norm, *column)], value[("rmsnorm", *column)]
            line.append(f"{ms(t)} ({t / base:.2f})")
        lines.append((name, *line))
    for norm in NORMS[:-1]:
        less = [value[(norm, *c)] - value[("none", *c)] if c[0] == "model" else None for c in columns]
        lines.append((f"{norm} − identity", *("" if t is None else ms(t) for t in less)))
    for line in transposed(lines):
        s.env.print(line)
    return dict(norms=rows)


def transposed(lines: list) -> list:
    return table(list(zip(*lines, strict=True)))


def norm_runs(norm, layer, net, model, stream, upstream, x, y) -> dict:
    """{(norm, what, passes): a function that does it once}."""

    @torch.no_grad()
    def layer_forward():
        layer(stream)

    def layer_both():
        stream.grad = None
        out = layer(stream)
        out.backward(upstream) if out is not stream else None

    @torch.no_grad()
    def inference():
        if model.training:  # a walk over all modules
            model.eval()
        net(x, y)

    def training():
        if not model.training:
            model.train()
        forward_backward(net, model, x, y)

    runs = {("layer", "forward"): layer_forward, ("layer", "forward+backward"): layer_both}
    runs |= {("model", "inference"): inference, ("model", "training"): training}
    return {(norm, *key): run for key, run in runs.items()}


def middle(rounds: list) -> float:
    """Median of all figures in a list of lists."""
    return sorted(t for some in rounds for t in some)[sum(map(len, rounds)) // 2]


def optimizers(setting: Setting) -> dict:
    """What each optimizer costs: its part of a step, its state, its share of an iteration of the whole batch_size."""
    s, variants, states = setting, [], {}
    start, models = at_start(s), ()
    unset = dict.fromkeys({knob for kind in OPTIMIZERS.values() for knob in kind.defaults})
    unset |= dict.fromkeys(["min_lr", *(f"lr_ratio_{block}" for block in RATIOS)])
    for name in OPTIMIZERS:
        one = s if name == s.config.optimizer else s.but(**unset, optimizer=name)
        variants.append(build(partial(ours, name, one, models), one, start))
        models = variants[-1].models  # all on the weights of the first, compiled once
        tensors = [t for state in variants[-1].optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        states[name] = sum(t.numel() * t.element_size() for t in tensors)
    measure(variants, s)
    ceiling = ceilings(s, [s.env.dtype])
    head = ("optimizer", "optimizer ms", "step ms", f"share at batch_size={s.config.batch_size}", "state", "× adamw")
    lines, rows = [head], []
    for v in variants:
        part = v.parts["optimizer"]
        whole = s.whole / s.accumulation * (v.parts["forward"] + v.parts["backward"] + v.parts["data"])
        row = figures(v, variants[0], s, ceiling)
        row.pop("peak_mem_bytes")  # they share their weights: the first one's would count, the others' not
        row |= dict(optimizer_s=part, share=part / (whole + v.parts["clip"] + part), state_bytes=states[v.name])
        rows.append(row)
        size = f"{states[v.name] / 1e6:,.1f} MB, {states[v.name] / v.parameters:.2f}/parameter"
        lines.append((v.name, ms(part), ms(v.seconds), f"{row['share']:.1%}", size, f"{row['ratio']:.3f}"))
    show(s, lines)
    return dict(optimizers=rows, ceilings_flops_per_s=ceiling)


def measured(setting: Setting, name: str, start) -> Variant:
    """One variant, built and timed by itself."""
    variant = build(partial(ours, name, setting), setting, start)
    measure([variant], setting)
    return variant


class Limits:
    """Whether a next size may be tried: by extrapolation from the sizes so far, (size, step seconds, peak bytes)."""

    def __init__(self, setting: Setting):
        self.setting, self.seen = setting, []

    def refuse(self, size: float) -> str:
        """Why `size` must not be tried, or nothing."""
        if not self.seen:
            return ""
        (a, t_a, m_a), (b, t_b, m_b) = self.seen[-2:] if len(self.seen) > 1 else [(0, 0.0, None), self.seen[-1]]
        t = t_b * max(size / b, (t_b / t_a) if t_a else 0)
        if t > self.setting.bench.max_step_s:
            return f"a step would take about {t:.0f} s, above max_step_s={self.setting.bench.max_step_s:g}"
        free = available_bytes()
        if self.setting.env.device.type != "cpu" or None in (m_a, m_b, free):
            return ""
        peak = m_b + max(0, (m_b - m_a) / (b - a)) * (size - b)
        room = free + held_bytes(self.setting.env.device)
        return f"it would take about {gigabytes(peak)} of {gigabytes(room)}" if peak > 0.9 * room else ""


def attempt(setting: Setting, name: str, size: float, limits: Limits, start):
    """(the variant, "") of one size of a sweep, or (None, why it ends here)."""
    why = limits.refuse(size)
    if why:
        return None, why
    try:
        variant = measured(setting, name, start)
    except (torch.OutOfMemoryError, MemoryError):
        return None, "out of memory"
    except (ValueError, RuntimeError) as e:  # say, a context longer than the dataset, or the CPU's allocator giving up
        if isinstance(e, RuntimeError) and "allocate" not in str(e):
            raise
        return None, str(e).splitlines()[0]
    limits.seen.append((size, variant.seconds, variant.memory))
    return variant, ""


def micro_batch(setting: Setting) -> dict:
    """Micro batches that divide batch_size, each at least twice the one before, as long as they fit."""
    batch, device, rows, limits = setting.config.batch_size, setting.env.device, [], Limits(setting)
    start, size, why = at_start(setting), 1, ""
    lines = [("micro batch", "tokens/s", "ms/step", "memory")]
    while size and not why:
        one = setting.but(micro_batch_size=size, accumulation=1)
        variant, why = attempt(one, str(size), size, limits, start)
        if variant:
            row = dict(micro_batch_size=size, tokens_per_s=variant.tokens_per_s, step_s=variant.seconds)
            rows.append(row | dict(peak_mem_bytes=variant.memory, rounds_s=variant.rounds))
            lines.append((str(size), f"{variant.tokens_per_s:,.0f}", ms(variant.seconds), gigabytes(variant.memory)))
            size = next((m for m in range(2 * size, batch + 1) if batch % m == 0), None)
        del variant
        free(device)
    show(setting, lines)
    if why:
        setting.env.print(f"{size} not timed: {why}")
    best = max(rows, key=lambda row: row["tokens_per_s"])["micro_batch_size"] if rows else None
    setting.env.print(f"fastest that fits: --micro_batch_size={best}")
    return dict(micro_batches=rows, fastest=best, ended_by=why or "batch_size")


def scaling(setting: Setting) -> dict:
    """Speed and memory against width, depth, context and micro batch, each doubled with the others as they are, beside
    what FLOPs per token and the measured ceiling of matrix products promise."""
    s, f, device, rows = setting, setting.flags, setting.env.device, []
    wide = {"n_embd": f.n_embd, "n_head": f.n_head, "n_kv_head": f.n_kv_head, "n_ff": f.n_ff}  # heads stay as large
    axes = {
        "n_embd": wide,
        "n_layer": {"n_layer": f.n_layer},
        "block_size": {"block_size": f.block_size},
        "micro_batch_size": {"micro_batch_size": s.micro, "batch_size": s.micro},
    }
    start, fixed = at_start(s), dict(micro_batch_size=s.micro, batch_size=s.micro, accumulation=1)
    lines = [("axis", "value", "tokens/s", "expected", "of expected", "ms/step", "memory", "FLOPs/token")]
    for axis, sizes in axes.items():
        limits, why = Limits(s), ""
        for k in range(s.bench.doublings + 1):
            changes = {name: value << k for name, value in sizes.items()}
            one = s.but(**fixed | changes)
            variant, why = attempt(one, axis, changes[axis], limits, start)
            if not variant:
                s.env.print(f"{axis}={changes[axis]} not timed: {why}")
                break
            ceiling = ceilings(one, [one.env.dtype])[str(one.env.dtype).removeprefix("torch.")]["ffn"]
            expected = ceiling / variant.flops_per_token
            row = dict(axis=axis, value=changes[axis], tokens_per_s=variant.tokens_per_s, step_s=variant.seconds)
            row |= dict(parameters=variant.parameters, flops_per_token=variant.flops_per_token)
            row |= dict(ceiling_flops_per_s=ceiling)
            row |= dict(expected_tokens_per_s=expected, of_expected=variant.tokens_per_s / expected)
            rows.append(row | dict(peak_mem_bytes=variant.memory, rounds_s=variant.rounds))
            line = (axis, str(changes[axis]), f"{variant.tokens_per_s:,.0f}", f"{expected:,.0f}")
            line += (f"{row['of_expected']:.1%}", ms(variant.seconds), gigabytes(variant.memory))
            lines.append((*line, f"{variant.flops_per_token:,}"))
            del variant
            free(device)
    show(s, lines)
    return dict(scaling=rows)


def per_block(model):
    """Each block, and the final norm with the loss, compiled by themselves."""
    for block in model.blocks:
        block.compile(dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)
    return model


COMPILERS = {  # the first is what train.py does
    "whole model": partial(torch.compile, dynamic=False),
    "per block": per_block,
    "whole, C++ wrapper": partial(torch.compile, dynamic=False, options=dict(cpp_wrapper=True)),
    "whole, max-autotune": partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs"),
    "eager": lambda model: model,
}


def compilers(setting: Setting) -> dict:
    """Ways to compile the model: forward and backward of one micro batch, and the seconds of the first."""
    s, device, runs, first, rows = setting, setting.env.device, {}, {}, []
    s.open()
    x, y = s.env.put(*(t[: s.micro] for t in s.fetch(0)))
    for name, compiled in COMPILERS.items():
        model = prepare_model(GPT(s.flags, s.config.seed), s.config, s.env)
        runs[name] = partial(forward_backward, compiled(model), model, x, y)
        (first[name],) = seconds_of(runs[name], 1, device)
    times = take_turns(runs, s)
    lines = [("compiled", "ms, forward and backward", f"time of {next(iter(runs))}", "first, s")]
    for name, t in times.items():
        seconds, ratio = middle(t), middle(t) / middle(times[next(iter(runs))])
        rows.append(dict(way=name, seconds=seconds, rounds_s=t, first_s=first[name]))
        lines.append((name, ms(seconds), f"{ratio:.3f}", f"{first[name]:.1f}"))
    show(s, lines)
    return dict(compilers=rows)


def forward_backward(call, model, x, y) -> None:
    model.zero_grad(set_to_none=True)
    call(x, y)[1].backward()


# ------------------------------------------------------------------------------------------------------------ loss


def naive(x, weight, targets, dtype, vocab_size):
    """The plain way: all logits, in fp32, then F.cross_entropy."""
    logits = F.linear(x.to(dtype), weight.to(dtype))[..., :vocab_size].float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def torchs(x, weight, targets, dtype, vocab_size):
    """torch's own function, in its memory-saving form."""
    x, weight, options = x.flatten(0, 1).to(dtype), weight[:vocab_size].to(dtype), torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, targets.flatten(), ignore_index=-1, options=options)


LOSSES = {"naive": naive} | {f"{n} chunks": partial(linear_cross_entropy, chunks=n) for n in (1, 2, 4, 8, 16)}
if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
    LOSSES["F.linear_cross_entropy"] = torchs
SAMPLE = 64  # tokens on which the errors are measured


def loss_error(f, x, weight, targets, dtype, vocab_size) -> tuple:
    """Relative errors of loss and gradients (of x and the weight together) against float64."""
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    given = [t.detach().clone().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy((exact[0] @ exact[1].T)[..., :vocab_size].flatten(0, 1), targets.flatten(), ignore_index=-1)
    got = f(*given, targets, dtype, vocab_size)
    want.backward(), got.backward()
    pairs = zip(given, exact, strict=True)
    gradient = math.sqrt(sum((a.grad.double() - b.grad).square().sum().item() for a, b in pairs))
    size = math.sqrt(sum(b.grad.square().sum().item() for b in exact))
    return abs(got.item() - want.item()) / abs(want.item()), gradient / size


def loss(setting: Setting) -> dict:
    """Ways from the final hidden states to the loss: time and memory of forward and backward, and their errors."""
    s, device, c, dtype = setting, setting.env.device, setting.flags, setting.env.dtype
    x = torch.randn(s.micro, c.block_size, c.n_embd, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(c.padded_vocab_size, c.n_embd, device=device)).requires_grad_()
    targets = torch.randint(c.vocab_size, (s.micro, c.block_size), device=device)
    sample = x.flatten(0, 1)[:SAMPLE][None], weight, targets.flatten()[:SAMPLE][None]
    lines, rows = [("loss", "", "ms", "× naive", "memory", "error of loss", "of gradients")], []
    for way in how(s):
        runs, found = {}, {}
        for name, f in LOSSES.items():
            call = torch.compile(f, dynamic=False) if way == "compiled" else f
            run = runs[name] = partial(loss_run, call, x, weight, targets, dtype, c.vocab_size)
            try:
                run()
                x.grad = weight.grad = None  # they belong to what is measured
                held = held_bytes(device)
                peak = peak_bytes(run, device)
                memory = None if None in (held, peak) else peak - held
                found[name] = memory, *loss_error(call, *sample, dtype, c.vocab_size)
            except RuntimeError as e:  # a path that this build of torch lacks
                s.env.print(f"{name}, {way}: left out ({str(e).splitlines()[0][:90]})")
                runs.pop(name)
            x.grad = weight.grad = None
        times = take_turns(runs, s, untimed=0, steps=1)
        for name, t in times.items():
            seconds, (memory, of_loss, of_gradient) = middle(t), found[name]
            row = dict(loss=name, way=way, seconds=seconds, rounds_s=t, peak_mem_bytes=memory, loss_error=of_loss)
            rows.append(row | dict(gradient_error=of_gradient))
            times_naive = f"{seconds / middle(times['naive']):.2f}" if "naive" in times else ""
            errors = (f"{of_loss:.1e}", f"{of_gradient:.1e}")
            lines.append((name, way, ms(seconds), times_naive, gigabytes(memory), *errors))
    sizes = f"{s.micro} × {c.block_size} tokens, {c.n_embd} wide, vocabulary {c.padded_vocab_size}"
    s.env.print(f"{sizes}; errors on {SAMPLE} tokens")
    show(s, lines)
    return dict(losses=rows)


def loss_run(call, x, weight, targets, dtype, vocab_size) -> None:
    x.grad = weight.grad = None
    call(x, weight, targets, dtype, vocab_size).backward()


# ------------------------------------------------------------------------------------------- profile, compile times

PROFILED, TOP = 3, 25  # steps; kernels printed


def profile(setting: Setting) -> dict:
    """A trace of a few steps for chrome://tracing or Perfetto, and the costliest kernels."""
    device = setting.env.device
    variant = build(partial(ours, "ours", setting), setting, None)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        wait(device)
        start = clock()
        for _ in range(PROFILED):
            variant.run()
        wait(device)
        elapsed = clock() - start
    path = Path(setting.bench.trace or Path(setting.config.out_dir) / "bench" / "trace.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    events = profiler.key_averages()
    if device.type == "cuda":  # the kernels themselves; the calls that started them would count twice
        cuda = torch.autograd.DeviceType.CUDA
        events = [e for e in events if e.device_type == cuda and not e.is_user_annotation]
    cost = {e: (e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total) / 1e6 for e in events}
    total, rows = sum(cost.values()), []
    for e in sorted(cost, key=cost.get, reverse=True):
        rows.append(dict(name=e.key, calls=e.count / PROFILED, seconds=cost[e] / PROFILED, share=cost[e] / total))
    lines = [("kernel", "calls/step", "ms/step", "share")]
    for r in rows[:TOP]:
        lines.append((r["name"][:70], f"{r['calls']:.0f}", ms(r["seconds"]), f"{r['share']:.1%}"))
    show(setting, lines)
    idle = 1 - total / elapsed if device.type == "cuda" else None  # kernels of one stream do not overlap
    if idle is not None:
        setting.env.print(f"GPU idle {idle:.1%} of the time, under the profiler")
    setting.env.print(f"written: {path}")
    return dict(kernels=rows, gpu_idle=idle, trace=str(path), steps=PROFILED)


def compile_times(setting: Setting) -> dict:
    """Seconds of compiling and of the first step: with an empty cache on disk, then with that filled."""
    from torch._inductor.utils import clear_caches, fresh_cache

    one, found = setting.but(compile=True), {}
    at_start(one)
    with fresh_cache():
        for name in ("cold", "warm"):
            torch._dynamo.reset()
            clear_caches()  # those in memory
            variant = ours(name, one)
            (first,) = seconds_of(variant.run, 1, setting.env.device)
            found[f"{name}_s"] = variant.compile_s + first
            del variant
            free(setting.env.device)
    setting.env.print("compiled and first step made: cold {cold_s:.1f} s, cache filled {warm_s:.1f} s".format(**found))
    return found


MODES = dict(layouts=layouts, norms=norms, optimizers=optimizers, micro_batch=micro_batch, loss=loss, scaling=scaling)
MODES |= dict(compile=compilers, profile=profile, compile_times=compile_times)
