"""What a run measures, the rows of metrics.jsonl, and what the console and loss.png show of them.

A new number goes into `Meter.read` (at each logged step), `count_scores` of a task (at each
evaluation), or `probe` of tracking.py (from inside the network)."""

import json
import math
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_map

from nanodnt.files import make_printable, write_file
from nanodnt.run.checkpoints import is_metrics_row
from nanodnt.run.hardware import peak_flops, peak_memory_bytes


class Meter:
    """Counts skipped steps on the device, and time on the host. Between readings nobody waits for
    the device."""

    def __init__(self, state, step_tokens: int, step_flops: float, config, env, step_counts: dict):
        self.env, self.step_flops = env, step_flops
        self.peak = peak_flops(env.device, env.dtype, config.peak_flops)
        # skipped, streak, longest streak
        self.counts = torch.tensor([state.skipped, 0.0, 0.0], device=env.device)
        self.last_step, self.clock = state.step, time.perf_counter()
        self.start, self.stalls = (
            self.clock,
            dict.fromkeys(("tracking_s", "evaluating_s", "saving_s"), 0.0),
        )
        # {field of metrics.jsonl: what a step has}
        self.step_counts = {"tokens_per_s": step_tokens} | step_counts

    def count(self, found_inf) -> None:
        """Note whether the step just made was skipped."""
        skipped, streak, longest = self.counts
        streak = (streak + 1) * found_inf
        self.counts = torch.stack((skipped + found_inf, streak, torch.maximum(longest, streak)))

    def read(self, result, rates: dict, step: int) -> tuple:
        """(what metrics.jsonl has of the step just made; the longest streak of steps skipped in a
        row, and seconds per step, since the last reading). Waits for the device. All ranks must
        call it."""
        loss = self.env.sum(result.loss.clone()) / self.env.world_size
        loss, norm, skipped, _, longest = torch.stack(
            (loss, result.grad_norm, *self.counts)
        ).tolist()
        seconds = (time.perf_counter() - self.clock) / (step - self.last_step)
        now = time.perf_counter()
        wall, stalls, trained = now - self.start, self.stalls, seconds * (step - self.last_step)
        self.last_step, self.clock, self.start, self.stalls = (
            step,
            now,
            now,
            dict.fromkeys(stalls, 0.0),
        )
        self.counts[2], self.env.trained = 0.0, self.env.trained + trained
        # loss: of all processes
        row = {"train_loss": loss, **rates, "grad_norm": norm, "skipped_steps": int(skipped)}
        row |= {name: count / seconds for name, count in self.step_counts.items()}
        mfu = self.step_flops / seconds / (self.peak * self.env.world_size) if self.peak else None
        row |= {"peak_mem_bytes": peak_memory_bytes(self.env.device), "mfu": mfu}
        row |= stalls | {"goodput": trained / wall}  # both since the last reading
        return row, int(longest), seconds

    def end(self, how: str, state) -> dict:
        """What config.json has of the end of a run, a RunState. Of the whole run steps, tokens,
        FLOPs (and training_s, from metrics.jsonl); since its last start seconds, the share of
        training in them, and the largest peak memory of a process. All ranks must call it."""
        wall = time.perf_counter() - self.env.began
        peaks = self.env.gather(peak_memory_bytes(self.env.device))
        flops = state.tokens * self.step_flops / self.step_counts["tokens_per_s"]
        found = dict(
            how=how,
            ended=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            step=state.step,
            tokens=state.tokens,
        )
        found |= dict(flops=flops, training_s=None, wall_s=wall, goodput=self.env.trained / wall)
        return finite(found | dict(peak_mem_bytes=max(peaks)))

    @contextmanager
    def paused(self, wait: bool):
        """Time inside does not count as training. `wait`: for the device first, whose work so far
        is training."""
        if wait and self.env.device.type == "cuda":
            torch.cuda.synchronize(self.env.device)
        start = time.perf_counter()
        yield
        self.clock += time.perf_counter() - start

    @contextmanager
    def stalled(self, name: str):
        """Counts the time inside as that of this stall. What the device has to do before is not
        waited for."""
        start = time.perf_counter()
        yield
        self.stalls[name] += time.perf_counter() - start


def make_watchers(run) -> tuple:
    """(its Tracker, its Watcher), each None where its interval is 0."""
    config, tracker, watcher = run.config, None, None
    if config.track_interval:
        from nanodnt.run.tracking import Tracker

        tracker = Tracker(run.model, run.optimizer, run.data, config, run.env)
    if config.sample_interval:
        from nanodnt.generate import Watcher

        watcher = Watcher(run.model, run.dataset_meta, config.sample_start)
        for remark in watcher.tokenizer.remarks(config.sample_start):
            run.env.print(f"note: sample_start: {remark}")
    return tracker, watcher


def finite(value):
    """`value`, nested dicts and lists, with None for NaN and infinity."""
    return tree_map(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x, value)


def read_metrics(out_dir: Path) -> list:
    """The rows of metrics.jsonl, without a last line cut short. ValueError if any other line is not
    a row."""
    path, rows = Path(out_dir) / "metrics.jsonl", []
    if not path.exists():
        return rows
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(
            f"{path} cannot be read ({type(e).__name__}): repair or remove it"
        ) from None
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


def validation_line(scores: dict, digits: int = 4) -> str:
    """The console's words for what `evaluate` returns."""
    shares = [f", top-{k} {scores[f'val_top{k}']:.2%}" for k in (1, 5) if f"val_top{k}" in scores]
    return f"validation loss {scores['val_loss']:.{digits}f}" + "".join(shares)


def progress_line(row: dict, max_iters: int, seconds: float) -> str:
    """The console's line for a metrics row; `seconds` per step."""
    left = int(seconds * (max_iters - row["step"]))
    eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    mfu = f"  mfu {row['mfu']:.1%}" if row["mfu"] else ""
    skipped = f"  skipped {row['skipped_steps']}" if row["skipped_steps"] else ""
    images = f"  {row['images_per_s']:,.0f} images/s" if "images_per_s" in row else ""
    return (
        f"step {row['step']}/{max_iters}  loss {row['train_loss']:.4f}  lr {row['lr']:.2e}  "
        f"norm {row['grad_norm']:.2f}  {seconds * 1e3:.0f} ms  {row['tokens_per_s']:,.0f} tokens/s"
        f"{images}{mfu}{skipped}  eta {eta}"
    )


def end_line(end: dict) -> str:
    """The console's words for what `Meter.end` found."""
    words = (
        f"{end['how']} at step {end['step']}: {end['tokens']:,} tokens, {end['flops']:.2e} FLOPs, "
    )
    words += f"{end['training_s']:.1f} s of training; since the last start {end['wall_s']:.1f} s, "
    return words + f"goodput {end['goodput']:.0%}, {end['peak_mem_bytes'] / 1e9:.2f} GB at most"


def training_seconds(rows: list) -> list | None:
    """Seconds of training up to each row, the sum of tokens / tokens_per_s, without compilation,
    evaluation, saving, the time between two sessions, and rolled-back steps; None if no row has a
    tokens_per_s."""
    knots = [(0, 0.0)]
    for row in rows:
        if rate := row.get("tokens_per_s"):
            tokens, seconds = knots[-1]
            knots.append((row["tokens"], seconds + max(0, row["tokens"] - tokens) / rate))
    return (
        np.interp([row["tokens"] for row in rows], *zip(*knots, strict=True)).tolist()
        if knots[1:]
        else None
    )


def smoothed(values: list, share: float) -> list:
    """Moving means over a window of that `share` of the values, shorter at both ends; centred, so
    without a lag."""
    n = len(values)
    half = int(n * share / 2)
    sums = np.cumsum([0.0, *values])
    low = np.maximum(np.arange(n) - half, 0)
    high = np.minimum(np.arange(n) + half + 1, n)
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def plot_losses(ax, x: list, rows: list, smooth: float, color) -> tuple:
    """Training losses of metrics rows over x, raw and smoothed, validation losses, dashed; the last
    two lines drawn."""
    found = []
    for key in ("train_loss", "val_loss"):
        there = [
            (at, row[key]) for at, row in zip(x, rows, strict=True) if row.get(key) is not None
        ]
        found.append(tuple(zip(*there, strict=True)) if there else ((), ()))
    (steps, losses), val = found
    ax.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
    (line,) = ax.plot(steps, smoothed(losses, smooth), color=color, linewidth=1.6)
    (dashed,) = ax.plot(*val, "o--", color=color, markersize=3.5, linewidth=1)
    return line, dashed


def finish_axis(ax, rows: list, start: float) -> None:
    """Fit the y axis to the losses from step `start` on: those before fall from ln(vocabulary), and
    flatten it."""
    late = [
        row.get(key) for row in rows if row["step"] >= start for key in ("train_loss", "val_loss")
    ]
    if points := [loss for loss in late if loss is not None]:
        margin = 0.05 * (max(points) - min(points)) + 1e-3
        ax.set_ylim(min(points) - margin, max(points) + margin)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def save_figure(figure, path: Path) -> None:
    """Write a matplotlib figure as PNG, whole or not at all, and forget it."""
    from matplotlib.pyplot import close

    write_file(path, lambda f: figure.savefig(f, format="png"))
    close(figure)


def draw_loss(out_dir: Path, unit: str) -> None:
    """Draw loss.png from metrics.jsonl, or print why not: no matplotlib, or no rows. `unit`: what a
    loss is the mean over."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("loss.png is not drawn: matplotlib is not installed")
        return
    rows = read_metrics(out_dir)
    if not rows:  # stopped before the first
        print("loss.png is not drawn: metrics.jsonl has no rows yet")
        return
    fig = Figure(figsize=(6.4, 4), dpi=160, layout="constrained")
    ax = fig.subplots()
    line, dashed = plot_losses(ax, [row["step"] for row in rows], rows, 0.05, "tab:blue")
    line.set_label("training, smoothed")
    if len(val := dashed.get_ydata()):
        dashed.set(label=f"held-out, {val[-1]:.3f} at the end", color="tab:orange")
    ax.set(xlabel="step", ylabel=f"loss (nats per {unit})")
    ax.set_title(make_printable(out_dir.name), parse_math=False)
    finish_axis(ax, rows, 0.05 * rows[-1]["step"])
    ax.legend(frameon=False)
    save_figure(fig, out_dir / "loss.png")
