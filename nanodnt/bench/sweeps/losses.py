"""Implementations of the loss, from the final hidden states: time, memory, and errors."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from layers.loss import linear_cross_entropy
from nanodnt.bench.measure import held_bytes, median_of_rounds, peak_bytes
from nanodnt.bench.settings import Setting
from nanodnt.bench.tables import format_gb, format_ms, print_table
from nanodnt.bench.timing import take_turns


def naive_loss(x, weight, targets, dtype, vocab_size):
    """The plain way: all logits in fp32, then F.cross_entropy."""
    logits = F.linear(x.to(dtype), weight.to(dtype))[..., :vocab_size].float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def torch_loss(x, weight, targets, dtype, vocab_size):
    """torch's own function, in its form that saves memory."""
    x, weight, options = x.flatten(0, 1).to(dtype), weight[:vocab_size].to(dtype), torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(x, weight, targets.flatten(), ignore_index=-1, options=options)


LOSSES = {"naive": naive_loss} | {f"{n} chunks": partial(linear_cross_entropy, chunks=n) for n in (1, 2, 4, 8, 16)}
if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
    LOSSES["F.linear_cross_entropy"] = torch_loss
SAMPLE = 64  # tokens on which the errors are measured


def loss_error(f, x, weight, targets, dtype, vocab_size) -> tuple:
    """Relative errors against float64: of the loss, and of the gradients of x and weight, taken as one vector."""
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    given = [t.detach().clone().requires_grad_() for t in (x, weight)]
    want = F.cross_entropy((exact[0] @ exact[1].T)[..., :vocab_size].flatten(0, 1), targets.flatten(), ignore_index=-1)
    got = f(*given, targets, dtype, vocab_size)
    want.backward(), got.backward()
    pairs = zip(given, exact, strict=True)
    gradient = math.sqrt(sum((a.grad.double() - b.grad).square().sum().item() for a, b in pairs))
    size = math.sqrt(sum(b.grad.square().sum().item() for b in exact))
    return abs(got.item() - want.item()) / abs(want.item()), gradient / size


def run_loss(call, x, weight, targets, dtype, vocab_size) -> None:
    """Forward and backward, once."""
    x.grad = weight.grad = None
    call(x, weight, targets, dtype, vocab_size).backward()


def time_losses(setting: Setting) -> dict:
    """Time forward and backward of each implementation; measure its memory and its errors."""
    env, flags, rows = setting.env, setting.flags, []
    x = torch.randn(setting.micro, flags.block_size, flags.n_embd, device=env.device, requires_grad=True)
    weight = (0.02 * torch.randn(flags.padded_vocab_size, flags.n_embd, device=env.device)).requires_grad_()
    targets = torch.randint(flags.vocab_size, (setting.micro, flags.block_size), device=env.device)
    given = (x, weight, targets, env.dtype, flags.vocab_size)
    for mode in setting.compile_modes():
        runs, measured = {}, {}
        for name, f in LOSSES.items():
            call = torch.compile(f, dynamic=False) if mode == "compiled" else f
            run = partial(run_loss, call, *given)
            try:
                measured[name] = measure_loss(call, run, *given)
                runs[name] = run
            except RuntimeError as e:  # this build of torch lacks something
                env.print(f"{name}, {mode}: left out ({str(e).splitlines()[0][:90]})")
            x.grad = weight.grad = None
        times = take_turns(runs, setting, untimed=0, steps=1)
        naive = median_of_rounds(times["naive"]) if "naive" in times else None
        for name, rounds in times.items():
            row = dict(loss=name, way=mode, seconds=median_of_rounds(rounds), rounds_s=rounds, **measured[name])
            rows.append((row, naive))
    env.print(
        f"{setting.micro} × {flags.block_size} tokens, {flags.n_embd} wide, vocabulary {flags.padded_vocab_size}; "
        f"errors on {SAMPLE} tokens"
    )
    print_table(setting, describe_losses(rows))
    return dict(losses=[row for row, _ in rows])


def measure_loss(call, run, x, weight, targets, dtype, vocab_size) -> dict:
    """Peak bytes of run(), including the gradients, and the errors of `call`."""
    run()
    x.grad = weight.grad = None
    held = held_bytes(x.device)
    peak = peak_bytes(run, x.device)
    sample = x.flatten(0, 1)[:SAMPLE][None], weight, targets.flatten()[:SAMPLE][None]
    of_loss, of_gradient = loss_error(call, *sample, dtype, vocab_size)
    memory = None if None in (held, peak) else peak - held
    return dict(peak_mem_bytes=memory, loss_error=of_loss, gradient_error=of_gradient)


def describe_losses(rows: list) -> list:
    """Rows of the table, from (figures, seconds of the naive loss or None)."""
    lines = [("loss", "", "ms", "× naive", "memory", "error of loss", "of gradients")]
    for r, naive in rows:
        line = (r["loss"], r["way"], format_ms(r["seconds"]), f"{r['seconds'] / naive:.2f}" if naive else "")
        lines.append((*line, format_gb(r["peak_mem_bytes"]), f"{r['loss_error']:.1e}", f"{r['gradient_error']:.1e}"))
    return lines
