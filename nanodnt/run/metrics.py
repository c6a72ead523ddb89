"""Measurements of a run, the rows of metrics.jsonl, and their lines on the console and in loss.png.

A new number goes into `Meter.read` (at each logged step), `count_scores` of a task (at each
evaluation), or `probe` of tracking.py (from inside the network)."""

import json
import math
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nanodnt.files import make_printable, write_file
from nanodnt.run.checkpoints import RunState, is_metrics_row
from nanodnt.run.environment import Env
from nanodnt.run.hardware import peak_flops, peak_memory_bytes
from nanodnt.tables import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


STALLS = ("tracking_s", "evaluating_s", "saving_s")  # seconds in which no step is made
RECENT = 20  # readings whose mean time of a step gives the remaining time: our choice
# Colors of the curves of all figures: those of Okabe and Ito, which readers with any color vision
# tell apart, without yellow. Markers change too: 35 curves differ.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv"
# In vector files text stays text, and the same figure gives the same bytes.
VECTOR = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "nanodnt"}
# {format of a figure: arguments of savefig: no date, and the resolution of maps in vector files}
FORMATS = {
    "png": {},
    "pdf": {"metadata": {"CreationDate": None}, "dpi": 300},
    "svg": {"metadata": {"Date": None}, "dpi": 300},
}


@dataclass
class Clock:
    """The time of this process, over all its roll-backs."""

    began: float = field(default_factory=time.perf_counter)
    trained_s: float = 0.0  # seconds of training since then


class Reading(NamedTuple):
    """The measurements of a Meter since its last reading."""

    row: dict[str, Any]  # fields of metrics.jsonl
    longest_streak: int  # most steps in a row that were skipped
    step_s: float  # seconds of training per step
    recent_step_s: float  # its mean over the last RECENT readings


class Meter:
    """Counts skipped steps on the device, and time on the host. Between readings nobody waits for
    the device."""

    def __init__(
        self,
        skipped: int,
        counts_per_step: dict[str, int],
        step_flops: float,
        device_flops: float,
        env: Env,
        clock: Clock,
    ) -> None:
        """skipped           steps of the run that were skipped up to now
        counts_per_step   {speed in metrics.jsonl, such as "tokens_per_s": its count in one step}
        step_flops        floating-point operations of one step, on all devices
        device_flops      peak FLOP/s of one device; 0 = by its name"""
        self.env = env
        self.clock = clock
        self.counts_per_step = counts_per_step
        self.step_flops = step_flops
        self.peak_flops = peak_flops(env.device, env.dtype, device_flops)
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds per step, of readings
        # (3,): steps skipped in all, in a row up to now, most in a row since the last reading
        self.counts = torch.tensor([skipped, 0.0, 0.0], device=env.device)

    def start(self, step: int) -> None:
        """Measure from now on, after `step` steps."""
        self.first_step = step
        self.started = time.perf_counter()
        self.not_training_s = 0.0
        self.stalls = dict.fromkeys(STALLS, 0.0)

    def count(self, found_inf: Tensor) -> None:
        """Note whether the step just made was skipped."""
        skipped, streak, longest = self.counts
        streak = (streak + 1) * found_inf
        self.counts = torch.stack((skipped + found_inf, streak, torch.maximum(longest, streak)))

    def skipped_steps(self) -> int:
        """Number of steps skipped in the whole run. Waits for the device."""
        return int(self.counts[0])

    def read(self, loss: Tensor, norm: Tensor, rates: dict[str, float], step: int) -> Reading:
        """Measure the time since the last reading, and `step`, the number of steps now made. `loss`
        of the last one in this process, `norm` of its gradient, learning rates that it had. Waits
        for the device. All ranks must call it."""
        mean_loss = self.env.sum(loss.clone()) / self.env.world_size
        numbers = torch.stack((mean_loss, norm, *self.counts)).tolist()
        train_loss, grad_norm, skipped, _, longest_streak = numbers
        wall_s = time.perf_counter() - self.started
        training_s = wall_s - self.not_training_s
        step_s = training_s / (step - self.first_step)
        self.recent.append(step_s)
        self.clock.trained_s += training_s
        row = {"train_loss": train_loss, **rates}
        row["grad_norm"] = grad_norm
        row["skipped_steps"] = int(skipped)
        for name, count in self.counts_per_step.items():
            row[name] = count / step_s
        row["peak_mem_bytes"] = peak_memory_bytes(self.env.device)
        row["mfu"] = None
        if self.peak_flops:
            row["mfu"] = self.step_flops / step_s / (self.peak_flops * self.env.world_size)
        row.update(self.stalls)
        row["goodput"] = training_s / wall_s
        self.counts[2] = 0.0
        self.start(step)
        return Reading(row, int(longest_streak), step_s, float(np.mean(self.recent)))

    def end(self, reason: str, state: RunState) -> dict[str, Any]:
        """The "end" record of config.json.

        step, tokens, flops and, from metrics.jsonl, training_s count the whole run. wall_s is the
        time of this process, goodput the share of training in it, peak_mem_bytes the largest peak
        memory on any rank. `reason`: why the run ended. All ranks must call it.
        """
        wall_s = time.perf_counter() - self.clock.began
        peaks = self.env.gather(peak_memory_bytes(self.env.device))
        record = dict(
            how=reason,
            ended=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            step=state.step,
            tokens=state.tokens,
            flops=state.tokens * self.step_flops / self.counts_per_step["tokens_per_s"],
            training_s=None,
            wall_s=wall_s,
            goodput=self.clock.trained_s / wall_s,
            peak_mem_bytes=max(peaks),
        )
        return finite(record)

    @contextmanager
    def paused(self, stall: str = "") -> Iterator[None]:
        """Time inside does not count as training, but as that of `stall`, one of STALLS, if it is
        given. Waits for the device first, whose work so far is training."""
        if self.env.device.type == "cuda":
            torch.cuda.synchronize(self.env.device)
        start = time.perf_counter()
        with self.env.console.doing(stall.removesuffix("_s") or "writing"):
            yield
        seconds = time.perf_counter() - start
        self.not_training_s += seconds
        if stall:
            self.stalls[stall] += seconds


def finite(value: Any) -> Any:
    """`value`, nested dicts and lists, with None for NaN and infinity."""

    def none_if_not_finite(x: Any) -> Any:
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return tree_map(none_if_not_finite, value)


def read_metrics(out_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without a last line cut short. ValueError if any other line is not
    a row."""
    path = Path(out_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        reason = type(e).__name__
        raise ValueError(f"{path} cannot be read ({reason}): repair or remove it") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if is_metrics_row(row):
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{path}:{number} is not a metrics row: repair or remove the file")
    return rows


def validation_line(scores: dict[str, float], digits: int = 4) -> str:
    """The console's words for the scores of `evaluate`."""
    words = f"validation loss {scores['val_loss']:.{digits}f}"
    for k in (1, 5):
        if f"val_top{k}" in scores:
            words += f", top-{k} {scores[f'val_top{k}']:.2%}"
    return words


def progress_line(reading: Reading, step: int, max_iters: int) -> str:
    """The console's line for a reading after `step` of `max_iters` steps."""
    row = reading.row
    line = (
        f"step {step}/{max_iters}  loss {row['train_loss']:.4f}  lr {row['lr']:.2e}  "
        f"norm {row['grad_norm']:.2f}  {reading.step_s * 1e3:.0f} ms  "
        f"{row['tokens_per_s']:,.0f} tokens/s"
    )
    if "images_per_s" in row:
        line += f"  {row['images_per_s']:,.0f} images/s"
    if row["mfu"]:
        line += f"  mfu {row['mfu']:.1%}"
    if row["skipped_steps"]:
        line += f"  skipped {row['skipped_steps']}"
    return f"{line}  eta {duration(reading.recent_step_s * (max_iters - step))}"


def end_line(end: dict[str, Any]) -> str:
    """The console's words for the record of `Meter.end`."""
    return (
        f"{end['how']} at step {end['step']}: {end['tokens']:,} tokens, {end['flops']:.2e} FLOPs, "
        f"{end['training_s']:.1f} s of training; since the last start {end['wall_s']:.1f} s, "
        f"goodput {end['goodput']:.0%}, {end['peak_mem_bytes'] / 1e9:.2f} GB at most"
    )


def training_seconds(rows: list[dict[str, Any]]) -> list[float] | None:
    """Seconds of training up to each row, the sum of tokens / tokens_per_s, without compilation,
    evaluation, saving, the time between two sessions, and rolled-back steps; None if no row has a
    tokens_per_s."""
    tokens = [0]
    seconds = [0.0]
    for row in rows:
        if rate := row.get("tokens_per_s"):
            new_tokens = max(0, row["tokens"] - tokens[-1])
            tokens.append(row["tokens"])
            seconds.append(seconds[-1] + new_tokens / rate)
    if len(tokens) == 1:
        return None
    return np.interp([row["tokens"] for row in rows], tokens, seconds).tolist()


def smoothed(values: list[float], share: float) -> list[float]:
    """Moving means over a window of that `share` of the values, shorter at both ends; centred, so
    without a lag."""
    n = len(values)
    half = int(n * share / 2)
    sums = np.cumsum([0.0, *values])
    low = np.maximum(np.arange(n) - half, 0)
    high = np.minimum(np.arange(n) + half + 1, n)
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def curve_style(i: int) -> dict[str, str]:
    """Color and marker of curve i of a figure."""
    return {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)]}


def plot_losses(
    ax: "Axes", x: list[float], rows: list[dict[str, Any]], smooth: float, style: dict[str, str]
) -> "tuple[Line2D, Line2D]":
    """Training losses of metrics rows over x, raw and smoothed, validation losses, dashed; the last
    two lines drawn. `style`: of `curve_style`; the marker is that of an evaluation."""

    def points(key: str) -> tuple[list[float], list[float]]:
        at = [i for i, row in enumerate(rows) if row.get(key) is not None]
        return [x[i] for i in at], [rows[i][key] for i in at]

    color = style["color"]
    steps, losses = points("train_loss")
    ax.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
    (line,) = ax.plot(steps, smoothed(losses, smooth), color=color, linewidth=1.6)
    steps, losses = points("val_loss")
    (dashed,) = ax.plot(steps, losses, "--", **style, markersize=3.5, linewidth=1)
    return line, dashed


def finish_axis(ax: "Axes", rows: list[dict[str, Any]], start: float) -> None:
    """Fit the y axis to the losses from step `start` on: those before fall from ln(vocabulary), and
    flatten it."""
    losses = []
    for row in rows:
        if row["step"] >= start:
            losses += [row.get("train_loss"), row.get("val_loss")]
    losses = [loss for loss in losses if loss is not None]
    if losses:
        margin = 0.05 * (max(losses) - min(losses)) + 1e-3
        ax.set_ylim(min(losses) - margin, max(losses) + margin)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def read_formats(text: str) -> list[str]:
    """The formats in the value of --format, such as "png,pdf". ValueError for another format, or
    none."""
    formats = text.split(",")
    if not FORMATS.keys() >= set(formats):
        raise ValueError(
            f"format={text!r} must be png, pdf or svg, or several of them: --format=png,pdf"
        )
    return formats


def save_figure(figure: "Figure", path: Path, formats: Sequence[str] = ("png",)) -> None:
    """Write a matplotlib figure as `path`, with each format in place of its ending, each file whole
    or not at all, and close it."""
    from matplotlib import pyplot

    with pyplot.rc_context(VECTOR):
        for kind in formats:
            save = partial(figure.savefig, format=kind, **FORMATS[kind])
            write_file(path.with_suffix(f".{kind}"), save)
    pyplot.close(figure)


def draw_loss(out_dir: Path, unit: str, say: Callable[[str], None] = print) -> None:
    """Draw loss.png from metrics.jsonl, or `say` why not: no matplotlib, or no rows. A loss is
    the mean over one `unit`, such as "token"."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("loss.png is not drawn: matplotlib is not installed")
        return
    rows = read_metrics(out_dir)
    if not rows:  # stopped before the first
        say("loss.png is not drawn: metrics.jsonl has no rows yet")
        return
    fig = Figure(figsize=(6.4, 4), dpi=160, layout="constrained")
    ax = fig.subplots()
    steps = [row["step"] for row in rows]
    line, dashed = plot_losses(ax, steps, rows, 0.05, curve_style(0))
    line.set_label("training, smoothed")
    val = dashed.get_ydata()
    if len(val):
        dashed.set(label=f"held-out, {val[-1]:.3f} at the end", color=PALETTE[1])
    ax.set(xlabel="step", ylabel=f"loss (nats per {unit})")
    ax.set_title(textwrap.fill(make_printable(out_dir.name), 60), parse_math=False)
    finish_axis(ax, rows, 0.05 * steps[-1])
    fig.legend(loc="outside lower center", ncols=2, frameon=False)
    save_figure(fig, out_dir / "loss.png")
