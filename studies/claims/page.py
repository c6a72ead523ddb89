"""RESULTS/NAME.md and its figure: what the record of a study says, first what is decided, in plain
words."""

import math
import textwrap
from contextlib import suppress
from pathlib import Path

from nanodnt.files import make_folder, write_file
from nanodnt.run.metrics import save_figure
from studies.claims.experiment import SEEDS, TUNING_SEEDS, Experiment, MissingRun
from studies.claims.judge import CLASSES, FEWEST, interval
from studies.claims.study import arms_in, is_same
from studies.sweep.results import draw_curves, markdown_table, new_figure
from studies.sweep.runner import ROOT

HIGHEST = 2.3  # nats: the largest height of the figure on learning rates
INTRO = """# {title}

{about}

[How claims are judged](../claims.md). Brackets are 95% intervals over the seeds (Student's t) at the learning rates
given; a range is of two seeds.

{note}
"""
RATES = """## Loss and learning rate

![Loss and learning rate]({name}/rates.png)

Of the arms that are tuned: mean and range of the tuning seeds. The figure has at most {highest:g} nats; a cross is a
rate at which a run diverged.
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
        return f"{format_number(min(values))} to {format_number(max(values))}"
    mean, low, high = map(format_number, interval(values, pooled))
    return f"{mean} ({low} to {high})"


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
    text = ", ".join(
        f"{lr:g}: {' / '.join(map(format_loss, losses))}" for lr, losses in tuned.tried.items()
    )
    for files, (lr, loss) in tuned.variants.items():
        text += f"; `{files or 'as it is'}`: {format_loss(loss)} at {lr:g}"
    return f"{tuned.lr:g}, tuned ({text})"


def describe_runs(experiment: Experiment) -> str:
    """Scale, hardware, versions, days, seeds and time of the recorded runs."""
    runs = experiment.record.runs.values()
    machines = sorted(
        {f"{run['machine']['hardware']} (torch {run['machine']['torch']})" for run in runs}
    )
    days = sorted({run["machine"]["date"] for run in runs})
    seeds = f"seeds {', '.join(map(str, TUNING_SEEDS))} tune and plan, {', '.join(map(str, SEEDS))} are reported"
    hours = sum(run["seconds"] for run in runs) / 3600
    counts = f"{len(runs)} runs, {hours:.1f} hours of one run at a time; {seeds}"
    return f"{experiment.study.title}. {counts}; {', '.join(machines)}; {days[0]} to {days[-1]}."


def verdict_rows(rows: list) -> list:
    """The table's rows, head first: one for each claim."""
    table = [["paper", "found here", "ours (95% interval)", "paper's", "verdict"]]
    for row in rows:
        claim, number = row["claim"], row["claim"].number
        published = (
            claim.expect
            if claim.expect in ("equal", "not above")
            else format_number(number.published)
        )
        verdict = f"**{row['class']}**" + (f" ({row['why']})" if row["why"] else "")
        ours = format_values(row["values"][number], row["pooled"])
        # of the claims file for this class, or the statement
        words = claim.plain.get(row["class"], claim.statement)
        table.append([claim.paper or "ours", f"[{words}](#{claim.id})", ours, published, verdict])
    return table


def number_table(row: dict) -> list:
    rows = [["number", "paper's", "ours (95% interval)"]]
    for number, by_seed in row["values"].items():
        measure = "" if number.measure == "loss" else f", {number.measure}"
        pooled = row["pooled"] if number == row["claim"].number else None
        ours = format_values(by_seed, pooled)
        rows.append([number.says + measure, format_number(number.published), ours])
    return markdown_table(rows)


def arm_table(names: list, experiment: Experiment) -> list:
    """The lines of the table of arms, with rates and losses."""
    rows = [
        [
            "arm",
            "files and flags",
            "learning rate (losses with the tuning seeds)",
            "validation loss by seed",
        ]
    ]
    for name in names:
        base, files = experiment.study.arms[name].base, experiment.tune(name).files
        runs = experiment.reported(name, experiment.seeds_of(name))
        losses = "–"
        with suppress(MissingRun):
            losses = ", ".join(map(format_loss, experiment.measure("loss", runs)))
        rows.append(
            [name, f"{base}: `{files}`" if files else base, format_rate(name, experiment), losses]
        )
    return markdown_table(rows)


def protocol_table(claim, experiment: Experiment) -> list:
    """The lines of the table of the paper's settings beside ours."""
    rows = [["setting", "paper's", "source", "here", "why"]]
    for name, paper, source, ours, why in experiment.protocol(claim):
        here = " / ".join(map(format_setting, ours))
        why = "kept" if all(is_same(value, paper) for value in ours) else why
        rows.append([name, format_setting(paper), source, here, why])
    return markdown_table(rows) if claim.protocol else []


def claim_section(row: dict, experiment: Experiment) -> list:
    """The folded lines on a claim: its protocol, its numbers, of which the first decides, and their
    arms."""
    claim = row["claim"]
    plan = f"Smallest effect that matters: {claim.effect:.3g}. Planned: {row['plan']}."
    if row["p"] is not None:
        plan += f" Holm's p: {row['p']:.2g}."
    if pooled := row["pooled"]:
        plan += f" The variance is pooled over arms, {pooled[1]} degrees of freedom."
    lines = [f'<a id="{claim.id}"></a>\n<details>']
    lines.append(
        f"<summary><b>{claim.paper or 'ours'}: {claim.statement}</b>: {row['class']}</summary>\n"
    )
    if claim.published:
        lines.append(f"Published: {claim.published}.\n")
    lines.append(f"{plan}\n")
    if claim.note:
        lines.append(f"{claim.note}\n")
    lines += (
        protocol_table(claim, experiment)
        + number_table(row)
        + arm_table(arms_in(row["values"]), experiment)
    )
    if waiting := [number.says for number in claim.numbers if number not in row["values"]]:
        lines.append(f"Not run: {'; '.join(waiting)}.\n")
    return [*lines, "</details>\n"]


def find_curves(experiment: Experiment) -> dict:
    """{base and optimizer: {arm: {learning rate: losses of the tuning seeds}}} of the arms that are
    tuned, and of those with the same files at another rate."""
    curves, arms = {}, experiment.study.arms
    for name, arm in arms.items():
        try:
            tried = dict(experiment.tune(name).tried)
        except MissingRun:
            continue
        if not tried:
            continue
        for other in arms:
            if arms[other].of and arms[other][:2] == arm[:2]:
                with suppress(MissingRun):
                    losses = experiment.measure("loss", experiment.reported(other, TUNING_SEEDS))
                    tried[experiment.tune(other).lr] = losses
        optimizer = experiment.configs_of(name)[1].optimizer
        curves.setdefault(f"{arm.base}, {optimizer}", {})[name] = dict(sorted(tried.items()))
    return curves


def draw_rates(curves: dict, path: Path) -> None:
    """Draw the losses of `find_curves`, up to HIGHEST above the lowest of all."""
    figure, axes = new_figure(len(curves), 4.2, 3.8)
    for axis, (title, arms) in zip(axes, curves.items(), strict=True):
        draw_curves(axis, arms, "learning rate", "validation loss, nats")
        axis.set_title(title, fontsize=9)
    bottom, top = axes[0].get_ylim()  # of all panels
    axes[0].set_ylim(bottom, min(top, bottom + HIGHEST))
    save_figure(figure, path)


def render_page(experiment: Experiment, found: dict, curves: dict) -> str:
    """The page's text, from the verdicts and the curves."""
    study, name = experiment.study, experiment.name
    rows = sorted(found.values(), key=lambda row: CLASSES.index(row["class"]))
    title = (
        "The papers' claims, tested here"
        if any(claim.paper for claim in study.claims)
        else "Claims, tested"
    )
    lines = [
        INTRO.format(
            title=title, about=describe_runs(experiment), note=textwrap.fill(study.note, 120)
        ).rstrip()
    ]
    judged = [row for row in rows if row["class"] != "cannot judge"]
    if judged:
        lines += ["", "## What is decided\n", *markdown_table(verdict_rows(judged))]
    if missing := [claim.id for claim in study.claims if claim.id not in found]:
        lines += [f"Not run yet: {', '.join(missing)}.\n"]
    if len(judged) < len(rows):
        lines += ["## What this scale cannot judge\n"]
        for row in rows[len(judged) :]:
            claim = row["claim"]
            lines += [f"- {claim.paper or 'ours'}: [{claim.statement}](#{claim.id}): {row['why']}."]
        lines += [""]
    if study.others:
        table = [["paper", "who and where", "what they found", "for the paper"]]
        table += [[paper, *cells] for paper, others in study.others.items() for cells in others]
        lines += ["## What others found\n", *markdown_table(table)]
    if curves:
        lines += [RATES.format(name=name, highest=HIGHEST)]
    bases = "; ".join(f"{base}: `{files}`" for base, files in study.bases.items() if files)
    lines += [EACH.format(bases=bases or "the papers' own configurations stand alone")]
    for row in rows:
        lines += claim_section(row, experiment)
    return "\n".join(lines).rstrip() + "\n"


def write_page(experiment: Experiment) -> Path:
    """Write the page and its figure; returns the page's path."""
    curves = find_curves(experiment)
    make_folder(experiment.folder, "--results")
    if curves:
        draw_rates(curves, experiment.folder / "rates.png")
    path = ROOT / experiment.config.results / f"{experiment.name}.md"
    write_file(
        path, lambda f: f.write(render_page(experiment, experiment.judge(), curves).encode())
    )
    return path
