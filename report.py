"""Runs beside each other: their losses in one figure, a table of where they end, what differs, a page to pass on.

Nothing is computed from weights here: all is read from config.json and metrics.jsonl of the run directories.
`analyze.py` calls this for several runs, and for a page with --report.

Speed-up as in the figures of the Blockwise LR paper (arXiv 2502.19002): the steps that a baseline with a longer
schedule needs to reach a run's terminal validation loss, divided by the run's steps. Between two evaluations of the
baseline we interpolate linearly [I], beyond the last not at all. The baseline is read in the middle of its schedule,
where its learning rate has not decayed yet, which flatters the run: the published figures are read so too.
Datasets are compared by name, tokenizers by the size of their vocabulary: config.json knows no more of them.
"""

import base64
import html
import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from model import GPTConfig
from rundir import is_count, is_number, read_metrics, smoothed, write_file
from train import TrainConfig

# what config.json must hold, to be one
RECORD = {"model": dict, "train": dict, "command": list, "versions": dict, "git_commit": (str, type(None))}
DATA = (("train", "dataset"), ("model", "vocab_size"), ("model", "block_size"), ("train", "eval_tokens"))
WHERE = ("out_dir", "overwrite", "wandb_log", "wandb_project")  # where a run's files go: no difference between runs
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the page loads nothing, whatever it holds
PNG = b"\x89PNG\r\n\x1a\n"
DEFINITION = (
    "Baseline needs: the first step at which the baseline's validation loss is as low as the run's final one, linear "
    "between evaluations [I]. Speed-up: that, divided by the run's steps (Blockwise LR, arXiv 2502.19002, whose "
    "baseline has a longer schedule; its learning rate has not decayed at that step, which flatters the run)."
)

# What a figure of analyze.py, or of this file, shows, and the figure of a paper that it follows.
CAPTIONS = {
    "loss": ("Training and validation loss against steps, tokens and hours of training", ""),
    "gradients": ("Gradient entries by type of matrix: density, and share beyond a size", "DNT, Fig. 1"),
    "sharpness": ("Sharpness by block type: its average, its course, its distribution", "Blockwise LR, Figs. 1-3, 7"),
    "norms": ("Norm of the parameters of each block type over training", "Blockwise LR, Fig. 6"),
    "alpha": ("DyT's α and 1/std of its input, over training and over the layers", "DyT, Figs. 4, 8"),
    "scatter": ("Inputs and outputs of norms, element by element", "DyT, Fig. 2"),
    "variance": ("Variance of the residual stream after each block, over training", "LNS, Figs. 2-5"),
    "angular": ("Angular distance between the residual stream at two depths", "LNS, Figs. 2-5"),
    "removal": ("Rise of the loss when one block is deleted", "LNS, Figs. 2-5"),
    "jacobian": ("Jacobian of residual sub-layers, averaged over tokens", "LNS, Fig. 7"),
    "gains": ("Scale vectors over training", "scale vectors, Fig. 4"),
    "logits": ("Largest attention logit of each block", ""),
    "tracking": ("What the run recorded of itself: gradients and updates by role, stream, logits, gains", ""),
}


# -------------------------------------------------------------------------------------------------------------- runs


@dataclass
class Run:
    """A run directory, read: a name that no other run of the comparison has, its rows, its configuration."""

    name: str
    path: Path
    rows: list  # of metrics.jsonl, at least one
    config: dict  # config.json: {"model", "train", "command", "versions", "git_commit", …}

    @property
    def evaluations(self) -> list:
        """[(step, tokens, validation loss, None where it was not finite)]"""
        return [(row["step"], row["tokens"], row["val_loss"]) for row in self.rows if "val_loss" in row]

    @property
    def max_iters(self) -> int:
        return self.config["train"]["max_iters"]

    def state(self) -> str:
        """What is to know about how it ended; "" where it ran to its end."""
        last, back = self.rows[-1], max(row.get("rollbacks", 0) for row in self.rows)
        said = [f"failed at step {last['step']}"] if "failure" in last else []
        if not said and last["step"] < self.max_iters:
            said = [f"at step {last['step']} of {self.max_iters}"]
        said += ["loss not finite"] * (bool(self.evaluations) and self.evaluations[-1][2] is None)
        said += ["never evaluated"] * (not self.evaluations)
        return ", ".join(said + ([f"{back} roll-backs"] if back else []))


def load_runs(paths) -> list:
    """The run directories `paths` as `Run`s. ValueError, one line, for one that is none, damaged, or given twice."""
    paths = [Path(path) for path in paths]
    return [
        Run(name, path, _rows(path), _config(path)) for name, path in zip(distinct_names(paths), paths, strict=True)
    ]


def distinct_names(paths: list) -> list:
    """Each folder's name, with as many parents in front as tell it apart from the others'."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    names = [_printable(p[-1]) for p in parts]
    for n in range(2, 1 + max(map(len, parts), default=0)):
        clash = [names.count(name) > 1 for name in names]
        longer = [_printable(Path(*p[-n:]).as_posix()) for p in parts]
        names = [there if c else name for name, there, c in zip(names, longer, clash, strict=True)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is given twice: name each run once")
    return names


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _rows(path: Path) -> list:
    if rows := read_metrics(path):
        return rows
    raise ValueError(f"{path} is not the directory of a run: it has no metrics.jsonl, or one without rows")


def _config(path: Path) -> dict:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        wrong = [key for key, kind in RECORD.items() if not isinstance(config[key], kind)]
        if wrong or not is_count(config["train"]["max_iters"]):
            raise ValueError(f"{', '.join(wrong) or 'max_iters'} of a wrong kind")
        return config
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}".replace("\n", " ")
        raise ValueError(f"{file} is missing or damaged ({reason}): restore it, or leave this run out") from None


# ------------------------------------------------------------------------------------------------ where the runs end


def reached(evaluations: list, loss: float | None) -> float | None:
    """The first step at which a validation curve is down at `loss`, linear between evaluations; None if never.

    There is no line to or from an evaluation that was not finite, and no `loss` of None is reached."""
    before = None
    for step, _, value in evaluations if loss is not None else ():
        if value is not None and value <= loss:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = None if value is None else (step, value)
    return None


def terminal_table(runs: list, baseline: str = "") -> dict:
    """Where each run ends, against `baseline`: a run's name or path, "" for the first. ValueError if there is none.

    {"baseline": name, "baseline_steps" (to its last finite evaluation), "baseline_loss", "rows", "warnings": lines}. A
    row: name; step, tokens and loss of the last evaluation; best loss; difference to the baseline's loss;
    baseline_needs and speedup (module docstring); reaches_baseline, the step at which the run first is as low as the
    baseline at its end; state. What does not exist, or was never reached, is None."""
    named = {run.name: run for run in runs} | {os.path.abspath(run.path): run for run in runs}
    base = named.get(baseline, named.get(os.path.abspath(baseline))) if baseline else runs[0]
    if base is None:
        allowed = ", ".join(run.name for run in runs)
        raise ValueError(f"baseline={baseline!r} is none of the runs: choose one of {allowed}")
    ends = {run.name: (run.evaluations or [(run.rows[-1]["step"], run.rows[-1]["tokens"], None)])[-1] for run in runs}
    goal, rows = ends[base.name][2], []
    for run in runs:
        (step, tokens, loss), other = ends[run.name], run is not base
        best = min((value for _, _, value in run.evaluations if value is not None), default=None)
        needs = reached(base.evaluations, loss) if other else None
        row = dict(name=run.name, step=step, tokens=tokens, loss=loss, best=best, state=run.state())
        row |= dict(difference=loss - goal if other and None not in (loss, goal) else None, baseline_needs=needs)
        row |= dict(speedup=needs / step if step and needs is not None else None)
        rows.append(row | dict(reaches_baseline=reached(run.evaluations, goal) if other else None))
    last = max((step for step, _, value in base.evaluations if value is not None), default=None)
    facts = {"baseline": base.name, "baseline_steps": last, "baseline_loss": goal}
    return facts | {"rows": rows, "warnings": _warnings(runs, base, rows)}


def _warnings(runs: list, base: Run, rows: list) -> list:
    """Lines on what makes the figures of the table mean less than they seem to."""
    lines = []
    if different := _apart(runs, base, DATA):
        lines.append(f"losses are not comparable, they are not of the same text: {different}")
    if different := _apart(runs, base, [("train", "batch_size")]):
        lines.append(f"a step is not the same number of tokens everywhere: {different}")
    if len({row["tokens"] for row in rows}) > 1:
        lines.append("the runs end after different numbers of tokens: the differences are not at equal training")
    if any(run.max_iters >= base.max_iters for run in runs if run is not base):
        longer = "published speed-ups read a longer one"
        lines.append(f"the baseline's schedule ({base.max_iters:,} steps) is no longer than another run's: {longer}")
    return lines


def _apart(runs: list, base: Run, names) -> str:
    """Those of the fields `names` in which a run differs from the baseline, and who does; "" where there is none."""
    said = []
    for section, name in names:
        who = {}
        for run in runs:
            who.setdefault(_show(run.config[section].get(name)), []).append(run.name)
        usual = _show(base.config[section].get(name))
        others = [f"{value} ({', '.join(have)})" for value, have in who.items() if value != usual]
        said += [f"{name} is {usual}, but {', '.join(others)}"] if others else []
    return "; ".join(said)


HEADER = ("run", "steps", "tokens", "final loss", "best", "difference", "baseline needs", "speed-up")
HEADER += ("reaches baseline", "state")


def _lines(table: dict) -> list:
    """HEADER and the rows of the table as texts; of a single run without what is about a baseline."""
    lines = [list(HEADER)]
    for row in table["rows"]:
        is_base, loss, last = row["name"] == table["baseline"], row["loss"], table["baseline_steps"]
        needs, reaches = row["baseline_needs"], row["reaches_baseline"]
        need = "–" if is_base or None in (loss, last) else f"> {last:,} steps, needs a longer baseline"
        reach = "–" if is_base or table["baseline_loss"] is None else f"not in {row['step']:,} steps"
        line = [row["name"], f"{row['step']:,}", f"{row['tokens']:,}"]
        line += ["–" if value is None else f"{value:.4f}" for value in (loss, row["best"])]
        line += ["–" if row["difference"] is None else f"{row['difference']:+.4f}"]
        line += [need if needs is None else f"{needs:,.0f} steps"]
        line += ["–" if row["speedup"] is None else f"{row['speedup']:.2f}×"]
        line += [reach if reaches is None else f"at {reaches:,.0f}"]
        lines.append([*line, ", ".join(filter(None, ("baseline" * is_base, row["state"])))])
    return lines if lines[2:] else [line[:5] + [line[-1].removeprefix("baseline").strip(", ")] for line in lines]


def terminal_text(table: dict) -> str:
    """The table of `terminal_table` as aligned lines, its warnings below."""
    columns = []
    for i, column in enumerate(zip(*_lines(table), strict=True)):
        width, left = max(map(len, column)), i == 0 or column[0] == HEADER[-1]  # the rest are numbers
        columns.append([cell.ljust(width) if left else cell.rjust(width) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join(lines + [f"warning: {line}" for line in table["warnings"]])


# ---------------------------------------------------------------------------------------------------- what differs


def _show(value) -> str:
    return value if isinstance(value, str) and value else repr(value)


def differences(runs: list) -> list:
    """[{"section": model, train or versions, "field", "default", "values": one a run}], as text, of every field in
    which runs differ. Fields that one of them lacks are "–" there; those that say where files go are left out."""
    found = []
    for section, schema in (("model", GPTConfig), ("train", TrainConfig), ("versions", None)):
        defaults = asdict(schema()) if schema else {}
        settings = [run.config[section] if schema else _versions(run) for run in runs]
        for field in dict.fromkeys(name for setting in settings for name in setting):
            values = [_show(setting[field]) if field in setting else "–" for setting in settings]
            if len(set(values)) > 1 and field not in WHERE:
                default = _show(defaults[field]) if field in defaults else "–"
                found.append(dict(section=section, field=field, default=default, values=values))
    return found


def _versions(run: Run) -> dict:
    changed = len(run.config.get("git_changed_files") or [])
    commit = (run.config["git_commit"] or "unknown")[:12] + (f", changed files: {changed}" if changed else "")
    return {**run.config["versions"], "commit": commit}


# -------------------------------------------------------------------------------------------------------- the losses


def training_hours(rows: list) -> list | None:
    """Hours of training up to each row, or None without a tokens_per_s: tokens / tokens_per_s, row by row.

    That leaves out compilation, evaluation, saving, the time between two sessions, and steps that were rolled back."""
    knots = [(0, 0.0)]
    for row in rows:
        if is_number(rate := row.get("tokens_per_s")) and rate > 0:
            tokens, hours = knots[-1]
            knots.append((row["tokens"], hours + max(0, row["tokens"] - tokens) / rate / 3600))
    return np.interp([row["tokens"] for row in rows], *zip(*knots, strict=True)).tolist() if knots[1:] else None


def draw_losses(runs: list, path: Path, smooth: float = 0.05) -> None:
    """The losses of the runs over each other, against steps, tokens and hours of training, to the PNG `path`.

    The limits of the y axis are by what comes after a twentieth of the longest run, as in a run's own loss.png."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), dpi=130, sharey=True, layout="constrained")
    colors = plt.colormaps["tab10"].colors if len(runs) <= 10 else plt.colormaps["turbo"](np.linspace(0, 1, len(runs)))
    points, handles, start = [], [], 0.05 * max(run.rows[-1]["step"] for run in runs)
    for run, color in zip(runs, colors, strict=False):
        spans = [[row[key] for row in run.rows] for key in ("step", "tokens")] + [training_hours(run.rows)]
        for axis, x in zip(axes, spans, strict=True):
            for key in ("train_loss", "val_loss") if x else ():
                there = [(at, row[key]) for at, row in zip(x, run.rows, strict=True) if row.get(key) is not None]
                at, losses = zip(*there, strict=True) if there else ((), ())
                if key == "val_loss":
                    axis.plot(at, losses, "o--", color=color, markersize=3.5, linewidth=1)
                    continue
                axis.plot(at, losses, color=color, alpha=0.2, linewidth=0.8)
                axis.plot(at, smoothed(losses, smooth), color=color, linewidth=1.6)
        late = [row for row in run.rows if row["step"] >= start]
        points += [row[key] for row in late for key in ("train_loss", "val_loss") if row.get(key) is not None]
        handles.append(Line2D([], [], color=color, label=run.name if len(run.name) <= 60 else f"…{run.name[-59:]}"))
    if points:
        margin = 0.05 * (max(points) - min(points)) + 1e-3
        axes[0].set_ylim(min(points) - margin, max(points) + margin)
    names = ("step", "tokens", "hours of training (tokens / tokens per s;\nwithout evaluation and saving)")
    for axis, name in zip(axes, names, strict=True):
        axis.set_xlabel(name)
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss (nats per token)")
    kind = f"training, smoothed over {smooth:.0%} of the run" if smooth else "training"
    style = [Line2D([], [], color="gray", label=kind), Line2D([], [], color="gray", linestyle="--", marker="o", ms=3.5)]
    style[1].set_label("validation")
    legend = figure.legend(handles=handles + style, loc="outside lower center", ncols=4, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a "$" in a run's name is a "$"
    write_file(path, lambda f: figure.savefig(f, format="png"))
    plt.close(figure)


def compare(runs: list, out: Path, baseline: str = "", smooth: float = 0.05) -> dict:
    """Draw loss.png and write compare.json in the folder `out`; the content of compare.json:
    {"definition", "smooth", "table": `terminal_table`'s, "differences": `differences`', "figure": "loss.png"}.

    `smooth`: the window that training losses are averaged over, as a share of the run. ValueError as in
    `terminal_table`, and for a `smooth` that is none."""
    if not 0 <= smooth < 1:
        raise ValueError(f"smooth={smooth} must be at least 0 and below 1: it is a share of the run")
    result = {"definition": DEFINITION, "smooth": smooth, "table": terminal_table(runs, baseline)}
    result |= {"differences": differences(runs), "figure": "loss.png"}
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    draw_losses(runs, out / "loss.png", smooth)
    write_file(out / "compare.json", lambda f: f.write(json.dumps(result, indent=2).encode()))
    return result


# ---------------------------------------------------------------------------------------------------------- the page

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --dim: #5c5c5c; --page: #fff; --line: #d5d5d5; --shade: #f4f4f4 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --dim: #a6a6a6; --page: #16181a; --line: #3c3f42; --shade: #212427 } }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: auto; padding: 1rem 1rem 3rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin-top: 2.2rem } h3 { font-size: 1rem }
.wide { overflow-x: auto } .wide:focus-visible { outline: 2px solid }
table { border-collapse: collapse; font-size: .875rem; overflow-wrap: normal }
caption, figcaption, .dim { color: var(--dim); font-size: .875rem; text-align: left }
caption { padding-bottom: .4rem }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { max-width: 16rem; overflow-wrap: break-word } thead th { background: var(--shade); vertical-align: bottom }
.ends td, .ends thead th { text-align: right; font-variant-numeric: tabular-nums }
.ends th:first-child, .ends tr :last-child { text-align: left }
.ends :nth-child(7) { min-width: 9rem } .ends td:nth-child(9) { white-space: nowrap }
figure { margin: 1.2rem 0 } img { display: block; width: 100%; min-width: 40rem; background: #fff }
pre span { display: inline-block; max-width: 100% }
pre { white-space: pre-wrap; background: var(--shade); padding: .6rem; font-size: .85rem; margin: .3rem 0 }
.warning { border-left: 4px solid #c77700; padding-left: .7rem }
"""


def _table(kind: str, caption: str, header: list, *rows) -> str:
    """A table of texts as HTML, a row's first cell its heading; in a box that scrolls where the page is narrow."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = [(html.escape(first), "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)) for first, *rest in rows]
    lines = "\n".join(f'<tr><th scope="row">{first}</th>{rest}</tr>' for first, rest in body)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(caption)}"><table class="{kind}">'
        f"<caption>{html.escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def _figure(path: Path) -> str:
    """A PNG file as HTML that holds it. ValueError if it is none."""
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"cannot read the figure {path} ({e.strerror})") from None
    if not content.startswith(PNG):
        raise ValueError(f"{path} is not a PNG image: draw it again")
    name = Path(path).stem
    shows, source = CAPTIONS.get(name, ("", ""))
    shows, name = html.escape(shows or name), html.escape(name)
    after = f" After {html.escape(source)}." if source else ""
    return (
        f'<figure><div class="wide" role="region" tabindex="0" aria-label="{name}">\n'
        f'<img alt="{shows}" src="data:image/png;base64,{base64.b64encode(content).decode()}"></div>\n'
        f"<figcaption><b>{name}</b>: {shows}.{after}</figcaption></figure>"
    )


def _about(run: Run) -> str:
    """A run's command line, commit and versions as HTML."""
    facts = [f"{key} {_show(value)}" for key, value in _versions(run).items() if value is not None]
    facts += [f"started {run.config['started']}"] if "started" in run.config else []
    failure = (
        [f'<p class="warning">{html.escape(str(run.rows[-1]["failure"]))}</p>'] if "failure" in run.rows[-1] else []
    )
    words = [html.escape(_printable(shlex.quote(str(word)))) for word in run.config["command"]]
    command = " ".join(f"<span>{word}</span>" for word in words)  # lines break between words
    lines = [f"<h3>{html.escape(run.name)}</h3>", f"<pre><code>{command}</code></pre>"]
    return "\n".join([*lines, f'<p class="dim">{html.escape(" · ".join(facts))}</p>', *failure])


def write_report(runs: list, out: Path, figures: list, baseline: str = "") -> Path:
    """Write report.html in the folder `out`: one file with all in it, to be read and passed on without the runs.

    The table of where the runs end, what differs, the PNG files `figures` (`compare`'s loss.png among them, if
    wanted) with what CAPTIONS says of their names, each run's command line. Returns its path. ValueError for a figure
    that is none, and as in `terminal_table`."""
    table, different = terminal_table(runs, baseline), differences(runs)
    title = f"{len(runs)} runs compared" if runs[1:] else f"Run {runs[0].name}"
    page = [f"<h1>{html.escape(title)}</h1>", "<h2>Where they end</h2>" if runs[1:] else "<h2>Where it ends</h2>"]
    page += [_table("ends", "Validation loss in nats per token, at the last evaluation", *_lines(table))]
    page += [f'<p class="warning">{html.escape(line)}</p>' for line in table["warnings"]]
    if runs[1:]:
        page += [f'<p class="dim">{html.escape(DEFINITION)}</p>', "<h2>What differs</h2>"]
        header = ["field", "of", "default", *(run.name for run in runs)]
        rows = [[line["field"], line["section"], line["default"], *line["values"]] for line in different]
        page += [_table("fields", "Every setting in which they differ, but paths", header, *rows)] if rows else []
        page += [] if rows else ["<p>Nothing in their configuration, versions or commit.</p>"]
    page += ["<h2>Figures</h2>", *map(_figure, figures)] if figures else []
    page += ["<h2>How they were made</h2>" if runs[1:] else "<h2>How it was made</h2>", *map(_about, runs)]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    text = "\n".join(["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body><main>", *page])
    path = Path(out) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda f: f.write(f"{text}\n</main></body>\n</html>\n".encode(errors="replace")))
    return path
