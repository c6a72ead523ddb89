"""RESULTS/NAME.md and its figures: what the record of a study says, first what is decided, in plain words."""

import math
import textwrap
from collections import Counter
from contextlib import suppress
from pathlib import Path

from nanodnt.files import make_folder, write_file
from nanodnt.run.metrics import save_figure
from studies.claims.experiment import SEEDS, TUNING_SEEDS, Experiment
from studies.claims.judge import CLASSES, FEWEST, interval
from studies.claims.study import arms_in, is_same
from studies.sweep.results import COLUMNS, draw_curves, markdown_table, new_figure
from studies.sweep.runner import ROOT, MissingRun, resolve_configs

PALETTE = ("tab:green", "tab:green", "yellowgreen", "tab:gray", "tab:red", "silver", "white")
COLORS = dict(zip(CLASSES, PALETTE, strict=True))
HIGHEST = 2.0  # nats above the lowest loss: the edge of the figure on learning rates
WIDEST = 12.0  # the edge of the figure of effects, in smallest effects that matter
INTRO = """# {title}

{about}

[How claims are judged](../claims.md). Brackets are 95% intervals over the seeds (Student's t) at the learning rates
given; a range is of two seeds.

{note}
"""
EFFECTS = """![Ours beside the papers']({name}/effects.png)

An effect is divided by the smallest that matters, and the claimed sign points to the right.
"""
RATES = """## Loss and learning rate

![Loss and learning rate]({name}/rates.png)

Of the arms that are tuned: mean and range of the tuning seeds. The figure ends {highest:g} nats above its lowest loss;
a cross is a rate at which a run diverged.
"""
EACH = """## Each claim

The first number of a claim decides. An arm's files and flags follow its base: {bases}.
"""


def format_number(x: float | None) -> str:
    """Three decimals with a sign; "diverged" where one side diverged, "–" for nothing."""
    if x is None or math.isnan(x):
        return "–"
    return "diverged" if math.isinf(x) else f"{x:+.3f}".replace("-", "−")


def format_values(values: list, pooled: tuple | None = None) -> str:
    """Mean and 95% interval of values by seed; their range where they are too few for one."""
    if not values:
        return "–"
    if not all(map(math.isfinite, values)):
        return f"diverged with {sum(not math.isfinite(v) for v in values)} of {len(values)} seeds"
    if len(values) < FEWEST:
        return " to ".join(dict.fromkeys(map(format_number, (min(values), max(values)))))
    return "{} ({} to {})".format(*map(format_number, interval(values, pooled)))


def format_loss(loss: float | None) -> str:
    return "diverged" if loss in (None, math.inf) else f"{loss:.3f}"


def format_setting(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_rate(name: str, experiment: Experiment) -> str:
    """An arm's learning rate and how it was found."""
    arm, tuned = experiment.study.arms[name], experiment.tune(name)
    if tuned.lr is None:
        return "the config's"
    if not tuned.tried:
        return f"{tuned.lr:g}, {arm.rate_from}"
    tried = ", ".join(f"{lr:g}: {' / '.join(map(format_loss, losses))}" for lr, losses in tuned.tried.items())
    more = ((files or "as it is", lr, format_loss(loss)) for files, (lr, loss) in tuned.variants.items())
    more = "".join(f"; `{files}`: {loss} at {lr:g}" for files, lr, loss in more)
    return f"{tuned.lr:g}, tuned ({tried}{more})"


def describe_runs(experiment: Experiment) -> str:
    """Scale, hardware, versions, days, seeds and time of the recorded runs."""
    runs = list(experiment.record.runs.values())
    machines = Counter((run["machine"]["hardware"], run["machine"]["torch"]) for run in runs)
    where = ", ".join(f"{hardware} (torch {torch}: {n} runs)" for (hardware, torch), n in machines.most_common())
    days = sorted({run["machine"]["date"] for run in runs})
    hours, when = sum(run["seconds"] for run in runs) / 3600, " to ".join(dict.fromkeys([days[0], days[-1]]))
    seeds = f"seeds {', '.join(map(str, TUNING_SEEDS))} tune and plan, {', '.join(map(str, SEEDS))} are reported"
    counts = f"{len(runs)} runs, {hours:.1f} hours of one run at a time; {seeds}"
    return f"{experiment.study.title}. {counts}; {where}; {when}."


def verdict_rows(rows: list) -> list:
    """The table's rows, head first: one for each claim."""
    table = [["paper", "found here", "ours (95% interval)", "paper's", "verdict"]]
    for row in rows:
        claim, number = row["claim"], row["claim"].number
        published = claim.expect if claim.expect in ("equal", "not above") else format_number(number.published)
        verdict = f"**{row['class']}**" + (f" ({row['why']})" if row["why"] else "")
        ours = format_values(row["values"][number], row["pooled"].get(number))
        words = claim.plain.get(row["class"], claim.statement)  # of the claims file for this class, or the statement
        table.append([claim.paper or "ours", f"[{words}](#{claim.id})", ours, published, verdict])
    return table


def by_class(found: dict) -> list:
    """The verdicts, in the order of their classes."""
    return sorted(found.values(), key=lambda row: CLASSES.index(row["class"]))


def number_tables(row: dict, experiment: Experiment) -> list:
    """The lines of two tables: numbers with their values by seed, and their arms with rates and losses."""
    table = [["number", "paper's", "ours (95% interval)", "by seed"]]
    for number, by_seed in row["values"].items():
        measure = "" if number.measure == "loss" else f", {number.measure}"
        ours = format_values(by_seed, row["pooled"].get(number))
        cells = [number.says + measure, format_number(number.published), ours]
        table.append([*cells, ", ".join(map(format_number, by_seed))])
    arms = [["arm", "files and flags", "learning rate (losses with the tuning seeds)", "validation loss by seed"]]
    for name in arms_in(row["values"]):
        base, files = experiment.study.arms[name].base, experiment.tune(name).files
        runs = [experiment.reported(name, seed) for seed in experiment.seeds_of(name)]
        measures = [experiment.record.measures(run) for run in runs]
        losses = [format_loss(found["loss"]) if "loss" in found else "–" for found in measures]
        arms.append([name, f"{base}: `{files}`" if files else base, format_rate(name, experiment), ", ".join(losses)])
    return markdown_table(table) + markdown_table(arms)


def protocol_table(claim, experiment: Experiment) -> list:
    """The lines of the table of the paper's settings beside ours."""
    rows = [["setting", "paper's", "source", "here", "why"]]
    for name, paper, source, ours, why in experiment.protocol(claim):
        here = " / ".join(map(format_setting, ours))
        why = "kept" if all(is_same(value, paper) for value in ours) else why
        rows.append([name, format_setting(paper), source, here, why])
    return markdown_table(rows) if claim.protocol else []


def claim_section(row: dict, experiment: Experiment) -> list:
    """The folded lines on a claim: its protocol, its numbers, of which the first decides, and their arms."""
    claim = row["claim"]
    p = "" if row["p"] is None else f" Holm's p: {row['p']:.2g}."
    pooled = row["pooled"].get(claim.number)
    pooled = f" The variance is pooled over arms, {pooled[1]} degrees of freedom." if pooled else ""
    waiting = [number.says for number in claim.numbers if number not in row["values"]]
    smallest = f"Smallest effect that matters: {claim.effect:.3g}."
    lines = [
        f'<a id="{claim.id}"></a>\n<details>',
        f"<summary><b>{claim.paper or 'ours'}: {claim.statement}</b>: {row['class']}</summary>\n",
        f"Published: {claim.published}.\n" if claim.published else None,
        f"{smallest} Planned: {row['plan']}.{p}{pooled}\n",
        f"{claim.note}\n" if claim.note else None,
        *protocol_table(claim, experiment),
        *number_tables(row, experiment),
        f"Not run: {'; '.join(waiting)}.\n" if waiting else None,
        "</details>\n",
    ]
    return [line for line in lines if line is not None]


def draw_effects(rows: list, path: Path) -> None:
    """Draw the judged claims: our interval, and the paper's value as a diamond."""
    figure, (axis,) = new_figure(1, 9.0, 0.42 * len(rows) + 1.2)
    axis.axvspan(-1, 1, color="0.93", linewidth=0)
    axis.axvline(0, color="0.5", linewidth=0.8)
    for i, row in enumerate(rows):
        number = row["claim"].number
        unit, color = row["claim"].effect * row["claim"].toward, COLORS[row["class"]]
        values, pooled = row["values"][number], row["pooled"].get(number)
        if not all(map(math.isfinite, values)):
            axis.text(0, i, " diverged", color=color, va="center")
        else:
            ours = interval(values, pooled) if len(values) >= FEWEST else (values[0], min(values), max(values))
            mean, low, high = (min(max(x / unit, -WIDEST), WIDEST) for x in ours)
            mark = {-WIDEST: "<", WIDEST: ">"}.get(mean, "o")  # an arrow: beyond the edge
            axis.plot([low, high], [i, i], color=color, linewidth=2.5)
            axis.plot(mean, i, mark, color=color, markersize=7)
        if number.published is not None:
            axis.plot(number.published / unit, i, "D", color="black", markersize=5, fillstyle="none")
    axis.set_yticks(range(len(rows)), [f"{row['claim'].id}: {row['class']}" for row in rows])
    axis.set(xlim=(-WIDEST - 0.5, WIDEST + 0.5), ylim=(len(rows) - 0.4, -0.6))
    axis.set_xlabel("effect / smallest effect that matters; the claimed sign is to the right")
    axis.plot([], [], "o-", color="0.3", label="ours, 95% interval")
    axis.plot([], [], "D", color="black", fillstyle="none", label="the paper's")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


def find_curves(experiment: Experiment) -> dict:
    """{base and optimizer: {arm: {learning rate: losses of the tuning seeds}}} of the arms that are tuned, and of those
    with the same files at another rate."""
    curves, arms = {}, experiment.study.arms
    for name, arm in arms.items():
        with suppress(MissingRun):
            if tried := dict(experiment.tune(name).tried):
                for other in (other for other, its in arms.items() if its.of and its[:2] == arm[:2]):
                    with suppress(MissingRun):
                        lr = experiment.tune(other).lr
                        tried[lr] = [experiment.measure("loss", experiment.reported(other, s)) for s in TUNING_SEEDS]
                config = resolve_configs(experiment.run_of(name, None, TUNING_SEEDS[0]).args)[1]
                curves.setdefault(f"{arm.base}, {config.optimizer}", {})[name] = dict(sorted(tried.items()))
    return curves


def draw_rates(curves: dict, path: Path) -> None:
    """Draw the losses of `find_curves`, up to HIGHEST above the lowest of all."""
    figure, axes = new_figure(len(curves), 4.2, 3.8)
    every = [losses for arms in curves.values() for its in arms.values() for losses in its.values()]
    lowest = min((loss for losses in every for loss in losses if loss is not None), default=0.0)
    for i, (axis, (what, arms)) in enumerate(zip(axes, curves.items(), strict=True)):
        draw_curves(axis, arms, "learning rate", "" if i % COLUMNS else "validation loss, nats", lowest + HIGHEST)
        axis.set_title(what, fontsize=9)
    axes[0].set_ylim(lowest - 0.05 * HIGHEST, lowest + 1.08 * HIGHEST)  # of all panels
    save_figure(figure, path)


def others_table(others: dict) -> list:
    """The lines on what others found."""
    rows = [["paper", "who and where", "what they found", "for the paper"]]
    rows += [[paper, where, what, sign] for paper, its in others.items() for where, what, sign in its]
    return ["## What others found\n", *markdown_table(rows)] if others else []


def render_page(experiment: Experiment, found: dict, curves: dict) -> str:
    """The page's text, from the verdicts and the curves."""
    study, name = experiment.study, experiment.name
    judged = [row for row in by_class(found) if row["class"] != "cannot judge"]
    title = "The papers' claims, tested here" if any(claim.paper for claim in study.claims) else "Claims, tested"
    lines = [INTRO.format(title=title, about=describe_runs(experiment), note=textwrap.fill(study.note, 120)).rstrip()]
    if judged:
        lines += ["", "## What is decided\n", EFFECTS.format(name=name), *markdown_table(verdict_rows(judged))]
    if missing := [claim.id for claim in study.claims if claim.id not in found]:
        lines += [f"Not run yet: {', '.join(missing)}.\n"]
    if cannot := [row for row in by_class(found) if row["class"] == "cannot judge"]:
        lines += ["## What this scale cannot judge\n"]
        for claim, why in ((row["claim"], row["why"]) for row in cannot):
            lines += [f"- {claim.paper or 'ours'}: [{claim.statement}](#{claim.id}): {why}."]
        lines += [""]
    lines += others_table(study.others)
    if curves:
        lines += [RATES.format(name=name, highest=HIGHEST)]
    bases = "; ".join(f"{base}: `{files}`" for base, files in study.bases.items() if files)
    lines += [EACH.format(bases=bases or "the papers' own configurations stand alone")]
    for row in by_class(found):
        lines += claim_section(row, experiment)
    return "\n".join(lines).rstrip() + "\n"


def write_page(experiment: Experiment) -> Path:
    """Write the page and its figures; returns the page's path."""
    with experiment.only_reading():
        found, curves = experiment.judge(), find_curves(experiment)
        make_folder(experiment.folder, "--results")
        if judged := [row for row in by_class(found) if row["class"] != "cannot judge"]:
            draw_effects(judged, experiment.folder / "effects.png")
        if curves:
            draw_rates(curves, experiment.folder / "rates.png")
        path = ROOT / experiment.config.results / f"{experiment.name}.md"
        write_file(path, lambda f: f.write(render_page(experiment, found, curves).encode()))
    return path
