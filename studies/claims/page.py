"""docs/results/claims.md (claims_SCALE.md but for mini) and its figures: tables of what a scale's record says."""

import math
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path

from nanodnt.files import write_file
from nanodnt.run.metrics import save_figure
from studies.claims.arms import ARMS, FACTORS, LAYOUTS, TUNING_SEED
from studies.claims.claims import GAPS
from studies.claims.experiment import Experiment, arms_in
from studies.claims.judge import CLASSES, find_values, interval, judge
from studies.sweep.results import draw_curves, markdown_table, new_figure
from studies.sweep.runner import ROOT, MissingRun

FOREST = "An effect is divided by its smallest effect of interest, and the paper's sign points to the right."
EACH = "The first number of a claim decides. An arm's files and flags follow the base of its family{own}. {bases}.\n"
COLORS = dict(zip(CLASSES, ("tab:green", "yellowgreen", "tab:gray", "tab:red", "silver"), strict=True))
HIGHEST = 2.0  # nats, the edge of the figure on robustness
WIDEST = 12.0  # the forest plot's edge, in smallest effects of interest
INTRO = """# The papers' claims, tested here

{about}

[How claims are judged](../claims.md). Brackets are 95% intervals over the seeds (Student's t) at the learning rates
given; another tuning seed may choose others.

{note}
"""
ROBUSTNESS = f"""## What too high a learning rate costs

![Loss and rate](claims/{{scale}}-robustness.png)

The rise of the loss from the tuned rate to 4, 8 and 16 times it, with seed {TUNING_SEED}, which chose the rate too: so
rises are a little too large. Below 0, tuning stopped at a local minimum. S1 is Pre-LN. The figure ends at
{HIGHEST:g} nats; a cross is a run that diverged, a dash one that is missing, or that train.py refuses for its decay.
"""
STUDY = """## Momentum SGD behind AdamW

The gap is the loss under mSGDW minus the loss under AdamW, each at its own learning rate. One thing is varied at a
time; warm-up, clipping and momentum under mSGDW alone. A gap can be small because AdamW does badly: the second table
has both losses. Under AdamW DNT's loss is so flat that a grid may stop at a local minimum.
"""


def format_number(x: float | None) -> str:
    """Three decimals with a sign; "diverged" where one side diverged, "–" for nothing."""
    if x is None or math.isnan(x):
        return "–"
    return "diverged" if math.isinf(x) else f"{x:+.3f}".replace("-", "−")


def format_interval(values: list) -> str:
    """Mean and 95% interval of values by seed."""
    if not all(map(math.isfinite, values)):
        return f"diverged with {sum(not math.isfinite(v) for v in values)} of {len(values)} seeds"
    if len(values) < 2:
        return format_number(values[0])
    return "{} ({} to {})".format(*map(format_number, interval(values)))


def format_loss(loss: float | str | None) -> str:
    return loss if isinstance(loss, str) else "diverged" if loss is None else f"{loss:.3f}"


def format_rate(name: str, experiment: Experiment) -> str:
    """An arm's learning rate and how it was found."""
    arm, tuned = ARMS[name], experiment.tune(name)
    if tuned.lr is None:
        return "the config's"
    if arm.of:
        return f"{tuned.lr:g}, {f'{arm.times:g} × ' if arm.times != 1 else ''}that of {arm.of}"
    if not tuned.tried:
        return f"{tuned.lr:g}, given"
    tried = ", ".join(f"{lr:g}: {format_loss(loss)}" for lr, loss in tuned.tried.items())
    more = "".join(f"; `{files or 'as it is'}`: {format_loss(loss)}" for files, loss in tuned.variants.items())
    return f"{tuned.lr:g}, tuned ({tried}{more})"


def describe_runs(experiment: Experiment) -> str:
    """Scale, hardware, versions, days, seeds and time of the recorded runs."""
    runs = list(experiment.record.runs.values())
    machines = Counter((run["machine"]["hardware"], run["machine"]["torch"]) for run in runs)
    where = ", ".join(f"{hardware} (torch {torch}: {n} runs)" for (hardware, torch), n in machines.most_common())
    days = sorted({run["machine"]["date"] for run in runs})
    hours = sum(run["seconds"] for run in runs) / 3600
    seeds = sorted({int(word.removeprefix("--seed=")) for run in runs for word in run["args"] if "--seed=" in word})
    scale, when = (
        f"*{experiment.config.scale}*: {experiment.scale.title}",
        " to ".join(dict.fromkeys([days[0], days[-1]])),
    )
    counts = f"{len(runs)} runs, {hours:.1f} hours of one run at a time; seeds {', '.join(map(str, seeds))}"
    return f"Scale {scale}. {counts}; {where}; {when}."


def verdict_rows(found: dict, experiment: Experiment) -> list:
    """The table's rows, head first: one for each claim, grouped by class."""
    rows = [["paper", "claim", "paper's", "ours (95% interval)", "verdict"]]
    for row in by_class(found):
        claim, (published, _) = row["claim"], row["claim"].effect(experiment.config.scale)
        published = claim.expect if claim.expect in ("equal", "not above") else format_number(published)
        verdict = f"**{row['class']}{experiment.scale.on}**" + (f" ({row['why']})" if row["why"] else "")
        beside = [values for number, values in row["values"].items() if number.says == claim.beside]
        verdict += "".join(f"; {claim.beside}: {format_interval(values)}" for values in beside)
        statement = f"[{claim.statement}](#{claim.id})"
        rows.append([claim.paper, statement, published, format_interval(row["primary"]), verdict])
    return rows


def by_class(found: dict) -> list:
    """The verdicts, in the order of their classes."""
    return sorted(found.values(), key=lambda row: CLASSES.index(row["class"]))


def number_tables(values: dict, experiment: Experiment) -> list:
    """The lines of two tables: numbers with their values by seed, and their arms with rates and losses."""
    rows = [["number", "paper's", "ours (95% interval)", "by seed"]]
    for number, by_seed in values.items():
        measure = "" if number.measure == "loss" else f", {number.measure}"
        published, by_seed_text = format_number(number.published), ", ".join(map(format_number, by_seed))
        rows.append([number.says + measure, published, format_interval(by_seed), by_seed_text])
    arms = [["arm", "files and flags", f"learning rate (losses with seed {TUNING_SEED})", "validation loss by seed"]]
    for name in arms_in(values):
        runs = [experiment.reported(name, seed) for seed in experiment.seeds_of(name)]
        losses = [format_loss(experiment.record.measures(run).get("loss", "–")) for run in runs]
        files = experiment.tune(name).files or "the base"
        arms.append([name, f"`{files}`", format_rate(name, experiment), ", ".join(losses)])
    return markdown_table(rows) + markdown_table(arms)


def claim_section(row: dict, experiment: Experiment) -> list:
    """The folded lines on a claim: its numbers, of which the first decides, and their arms."""
    claim, scale, verdict = row["claim"], experiment.config.scale, f"{row['class']}{experiment.scale.on}"
    shows = "can show the effect" if scale in claim.adequate else "cannot show it"
    p = "" if row["p"] is None else f" Holm's p: {row['p']:.2g}."
    waiting = [number.says for number in claim.numbers_at(scale) if number not in row["values"]]
    left_out = [number.says for number in claim.numbers if scale in number.left_out]
    lines = [
        f'<a id="{claim.id}"></a>\n<details>',
        f"<summary><b>{claim.paper}: {claim.statement}</b>: {verdict}</summary>\n",
        f"Published: {claim.published}.\n",
        f"Smallest effect of interest: {claim.effect(scale)[1]:g}. Scale {scale} {shows}: {claim.why}{p}\n",
        f"{claim.note}\n" if claim.note else "",
        *number_tables(row["values"], experiment),
        f"Not run yet: {'; '.join(waiting)}.\n" if waiting else "",
        f"Not measured at this scale: {'; '.join(left_out)}.\n" if left_out else "",
        "</details>\n",
    ]
    return list(filter(None, lines))


def draw_forest(found: dict, experiment: Experiment, path: Path) -> None:
    """Draw every judged claim, grouped by class: our interval, and the paper's value as a diamond."""
    ordered = by_class(found)
    figure, (axis,) = new_figure(1, 9.0, 0.42 * len(ordered) + 1.2)
    axis.axvspan(-1, 1, color="0.93", linewidth=0)
    axis.axvline(0, color="0.5", linewidth=0.8)
    for i, row in enumerate(ordered):
        published, smallest = row["claim"].effect(experiment.config.scale)
        unit = smallest * row["claim"].toward()
        color, values = COLORS[row["class"]], [value / unit for value in row["primary"]]
        if not all(map(math.isfinite, values)):
            axis.text(0, i, " diverged", color=color, va="center")
        else:
            ours = interval(values) if len(values) > 1 else (values[0],) * 3
            mean, low, high = (min(max(x, -WIDEST), WIDEST) for x in ours)
            mark = {-WIDEST: "<", WIDEST: ">"}.get(mean, "o")  # an arrow: beyond the edge
            axis.plot([low, high], [i, i], color=color, linewidth=2.5)
            axis.plot(mean, i, mark, color=color, markersize=7)
        if published is not None:
            axis.plot(published / unit, i, "D", color="black", markersize=5, fillstyle="none")
    axis.set_yticks(range(len(ordered)), [f"{row['claim'].id}: {row['class']}{experiment.scale.on}" for row in ordered])
    axis.set(xlim=(-WIDEST - 0.5, WIDEST + 0.5), ylim=(len(ordered) - 0.4, -0.6))
    axis.set_xlabel("effect / smallest effect of interest; the paper's sign is to the right")
    axis.plot([], [], "o-", color="0.3", label="ours, 95% interval")
    axis.plot([], [], "D", color="black", fillstyle="none", label="the paper's")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


def find_curves(experiment: Experiment) -> dict:
    """{(optimizer, layout): (the tuned rate, its loss with the tuning seed, {rate over the tuned one: how far its loss
    is above that, None where it diverged})} of what is recorded."""
    curves = {}
    for name, where in experiment.curves.items():
        with suppress(MissingRun):
            tuned = experiment.tune(name)
            losses = {lr / tuned.lr: loss for lr, loss in tuned.tried.items()}
            for factor in (factor for factor in FACTORS if f"{name} ×{factor}" in ARMS):
                with suppress(MissingRun):
                    losses[factor] = experiment.measure("loss", experiment.reported(f"{name} ×{factor}", TUNING_SEED))
            rises = {factor: loss if loss is None else loss - losses[1] for factor, loss in sorted(losses.items())}
            curves[where] = tuned.lr, losses[1], rises
    return curves


def robustness_rows(curves: dict) -> list:
    """The table's rows, head first: one for each layout and optimizer."""
    rows = [["optimizer", "layout", "tuned rate", "loss there", *(f"× {factor}" for factor in FACTORS)]]
    for (optimizer, layout), (rate, loss, rises) in curves.items():
        found = [rises.get(factor, math.nan) for factor in FACTORS]
        cells = [format_number(math.inf if rise is None else rise) for rise in found]
        rows.append([optimizer, layout, f"{rate:g}", format_loss(loss), *cells])
    return rows


def draw_robustness(curves: dict, path: Path) -> None:
    """Draw the rises of `find_curves`, up to HIGHEST. A cross at the top is a run that diverged."""
    optimizers = list(dict.fromkeys(optimizer for optimizer, _ in curves))
    figure, axes = new_figure(len(optimizers), 4.0, 3.6)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        found = {layout: curves.get((optimizer, layout), (0, 0, {}))[2] for layout in LAYOUTS}  # each has its color
        rises = {layout: {x: [rise] for x, rise in its.items()} for layout, its in found.items()}
        draw_curves(axis, rises, "learning rate / tuned one", "loss above that at the tuned rate, nats", HIGHEST)
        axis.set_title(optimizer)
    for axis in axes[1:]:
        axis.set_ylabel("")
        axis.get_legend().remove()
    save_figure(figure, path)


def render_page(experiment: Experiment, found: dict, curves: dict) -> str:
    """The page's text, from the verdicts and the curves."""
    scale = experiment.config.scale
    lines = [INTRO.format(about=describe_runs(experiment), note=textwrap.fill(experiment.scale.note, 120))]
    if found:
        lines += [f"![Ours beside the papers'](claims/{scale}.png)\n\n{FOREST}\n"]
        lines += markdown_table(verdict_rows(found, experiment))
    if missing := [claim.id for claim in experiment.claims if claim.id not in found]:
        lines += [f"Not run yet: {', '.join(missing)}.\n"]
    if curves:
        lines += [ROBUSTNESS.format(scale=scale), *markdown_table(robustness_rows(curves))]
    if scale == "mini" and (gaps := find_values(GAPS, experiment)):
        lines += [STUDY, *number_tables(gaps, experiment)]
    bases = "; ".join(f"{family}: `{files}`" for family, files in experiment.scale.bases.items())
    own = "; the papers' own configurations stand alone" if experiment.scale.own else ""
    lines += ["## Each claim\n", EACH.format(own=own, bases=bases)]
    for row in found.values():
        lines += claim_section(row, experiment)
    return "\n".join(lines).rstrip() + "\n"


def write_page(experiment: Experiment) -> Path:
    """Write the page and its figures; returns the page's path."""
    folder, scale = ROOT / experiment.config.results, experiment.config.scale
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    experiment.may_train = False  # from here on it only reads the record
    found, curves = judge(experiment), find_curves(experiment)
    if found:
        draw_forest(found, experiment, folder / "claims" / f"{scale}.png")
    if curves:
        draw_robustness(curves, folder / "claims" / f"{scale}-robustness.png")
    path = folder / ("claims.md" if scale == "mini" else f"claims_{scale}.md")
    write_file(path, lambda f: f.write(render_page(experiment, found, curves).encode()))
    return path
