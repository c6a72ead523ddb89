"""RESULTS/NAME.md and its figure, from the record of a study: first the decided claims in plain
words, then each claim in full."""

import math
import os
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nanodnt.files import make_folder, write_file
from nanodnt.run.metrics import PALETTE, save_figure
from nanodnt.tasks import task_of
from studies.analysis.figure import STYLE, picture, plt
from studies.claims.experiment import TUNING_SEEDS, Experiment, MissingRun, Tuned, mean_loss
from studies.claims.judge import FEWEST, Losses, Variance, count_seeds_to_decide, interval
from studies.claims.study import CLASSES, Claim, Study, arms_in, is_same
from studies.sweep.results import draw_curves, markdown_table, new_figure
from studies.sweep.runner import ROOT

HIGHEST = 2.3  # nats: the largest height of the figure on learning rates
INTRO = (
    "# {title}\n\n{about}\n\n"
    "[How claims are judged]({docs}). Brackets are 95% intervals over the seeds "
    "(Student's t) at the learning rates\n"
    "given; a range is of two or three seeds.\n\n{note}\n"
)
RATES = (
    "## Loss and learning rate\n\n{picture}\n\n"
    "Of the arms that are tuned: mean and range of the tuning seeds. The figure has at most "
    "{highest:g} nats; a cross is a\n"
    "rate at which a run diverged.\n"
)
DIFFERENCES = (
    "## Differences over the steps\n\n{picture}\n\n"
    "Mean and range over the seeds. Dashed: the paper's difference at the end of its run, which is "
    "longer.\n"
)
LOSSES = (
    "## Losses\n\n{picture}\n\n"
    "A dot for each seed, and a bar at the mean unless one diverged. The table has the mean and "
    "the learning rate that the\n"
    "trials chose.\n"
)
EACH = """## Each claim

The first number of a claim decides. An arm's files and flags follow its base: {bases}.
"""
Row = dict[str, Any]  # a claim and its verdict, of Experiment.judge


class ArmLosses(NamedTuple):
    losses: Losses = [None]  # of the reported seeds; one None if there are none
    words: str = "–"  # of `describe_losses`


def format_number(x: float | None, digits: int = 3) -> str:
    """`digits` decimals with a sign; "diverged" where one side diverged, "–" for nothing."""
    if x is None or math.isnan(x):
        return "–"
    return "diverged" if math.isinf(x) else f"{x:+.{digits}f}".replace("-", "−")


def format_values(values: list[float], pooled: Variance | None = None, digits: int = 3) -> str:
    """Mean and 95% interval of values by seed; their range where they are too few for one."""
    if not values:
        return "–"
    n_diverged = sum(not math.isfinite(v) for v in values)
    if n_diverged:
        return f"diverged with {n_diverged} of {len(values)} seeds"
    if len(values) < FEWEST:
        return f"{format_number(min(values), digits)} to {format_number(max(values), digits)}"
    mean, low, high = (format_number(x, digits) for x in interval(values, pooled))
    return f"{mean} ({low} to {high})"


def format_loss(loss: float | None, digits: int = 3) -> str:
    return "diverged" if loss in (None, math.inf) else f"{loss:.{digits}f}"


def describe_losses(losses: Losses, tuned: Tuned, study: Study) -> str:
    """The mean over seeds, the learning rate, whether it is an end of those tried, and (target −
    mean)·√n if the study has a target."""
    mean = mean_loss(losses)
    text = f"{format_loss(mean, study.digits)} at {tuned.lr:g}"
    rates = sorted(tuned.tried)
    if tuned.lr in rates[:1]:
        text += ", the lowest tried"
    if tuned.lr in rates[-1:]:
        text += ", the highest tried"
    if study.target and None not in losses:
        margin = (study.target - mean) * math.sqrt(len(losses))
        text += f"; (target − mean)·√n = {format_number(margin, study.digits)}"
    return text


def format_setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_rate(name: str, experiment: Experiment) -> str:
    """An arm's learning rate and how it was found."""
    tuned = experiment.tune(name)
    if tuned.lr is None:
        return "the config's"
    if not tuned.tried:
        return f"{tuned.lr:g}, {experiment.study.arms[name].rate_from}"
    digits = experiment.study.digits
    tried = []
    for lr, losses in tuned.tried.items():
        tried.append(f"{lr:g}: {' / '.join(format_loss(loss, digits) for loss in losses)}")
    text = ", ".join(tried)
    for files, (lr, loss) in tuned.variants.items():
        text += f"; `{files or 'as it is'}`: {format_loss(loss, digits)} at {lr:g}"
    return f"{tuned.lr:g}, tuned ({text})"


def describe_runs(experiment: Experiment) -> str:
    """Scale, hardware, versions, days, seeds and time of the recorded runs."""
    runs = experiment.record.runs.values()
    machines = set()
    for run in runs:
        machine = run["machine"]
        dtype = f", {machine['dtype']}" if "dtype" in machine else ""
        machines.add(f"{machine['hardware']} (torch {machine['torch']}{dtype})")
    days = sorted({run["machine"]["date"] for run in runs})
    seeds = {int(arg[7:]) for run in runs for arg in run["args"] if arg.startswith("--seed=")}
    tuning = ", ".join(map(str, sorted(seeds.intersection(TUNING_SEEDS))))
    start = f"seeds {tuning} tune and plan, " if tuning else "seeds "
    reported = ", ".join(map(str, sorted(seeds.difference(TUNING_SEEDS)))) or "none"
    hours = sum(run["seconds"] for run in runs) / 3600
    others = ", ".join(experiment.study.records)
    if others:
        others = f"Further runs, with their machines, are in {others}."
    return (
        f"{experiment.study.title}. {len(runs)} runs, {hours:.1f} hours of one run at a time; "
        f"{start}{reported} are reported; {', '.join(sorted(machines))}; "
        f"{days[0]} to {days[-1]}. {others}"
    ).rstrip()


def verdict_rows(rows: list[Row], digits: int) -> list[list[str]]:
    """The table's rows, head first: one for each claim."""
    table = [["paper", "found here", "ours (95% interval)", "paper's", "verdict"]]
    for row in rows:
        claim = row["claim"]
        published = format_number(claim.number.published, digits)
        if claim.expect in ("equal", "not above"):
            published = claim.expect if published == "–" else f"{published}, {claim.expect}"
        verdict = f"**{row['class']}**"
        if row["why"]:
            verdict += f" ({row['why']})"
        ours = format_values(row["values"].get(claim.number, []), row["pooled"], digits)
        # plain words for this class in the claims file, or else the statement
        words = claim.plain.get(row["class"], claim.statement)
        table.append([claim.paper or "ours", f"[{words}](#{claim.id})", ours, published, verdict])
    return table


def number_table(row: Row, digits: int) -> list[str]:
    """The lines of the table of a claim's numbers."""
    rows = [["number", "paper's", "ours (95% interval)"]]
    for number, by_seed in row["values"].items():
        measure = "" if number.measure == "loss" else f", {number.measure}"
        pooled = row["pooled"] if number == row["claim"].number else None
        ours = format_values(by_seed, pooled, digits)
        rows.append([number.says + measure, format_number(number.published, digits), ours])
    return markdown_table(rows)


def side_by_side(rows: list[Row], study: Study) -> list[str]:
    """The lines of one table of the numbers of all claims: a row for each number, by its name, and
    a column for each claim, by its id."""
    ids = [row["claim"].id for row in rows]
    table = {}  # {name of a number: its cells}
    for row in rows:
        for number, by_seed in row["values"].items():
            published = format_number(number.published, study.digits)
            cells = dict(number=number.says, paper=published) | dict.fromkeys(ids, "–")
            ours = format_values(by_seed, None, study.digits)
            table.setdefault(number.says, cells)[row["claim"].id] = f"{ours}, n = {len(by_seed)}"
    return markdown_table([["number", "paper's", *ids], *(c.values() for c in table.values())])


def arm_table(names: list[str], experiment: Experiment) -> list[str]:
    """The lines of the table of arms, with rates and losses."""
    rate_title = "learning rate (losses with the tuning seeds)"
    rows = [["arm", "files and flags", rate_title, "validation loss by seed"]]
    for name in names:
        words = experiment.study.arms[name].base
        files = experiment.tune(name).files
        if files:
            words += f": `{files}`"
        runs = experiment.reported(name, experiment.seeds_of(name))
        losses = "–"
        with suppress(MissingRun):
            by_seed = experiment.measure("loss", runs)
            losses = ", ".join(format_loss(loss, experiment.study.digits) for loss in by_seed)
        rows.append([name, words, format_rate(name, experiment), losses])
    return markdown_table(rows)


def protocol_table(claim: Claim, experiment: Experiment) -> list[str]:
    """The lines of the table of the paper's settings beside ours. A claim of your own has none if
    it keeps all that its protocol fixes."""
    shown = claim.paper or any(setting.why for setting in claim.protocol)
    if not claim.protocol or not shown:
        return []
    rows = [["setting", "paper's", "source", "here", "why"]]
    for name, paper, source, ours, why in experiment.protocol(claim):
        here = " / ".join(map(format_setting, ours))
        if all(is_same(value, paper) for value in ours):
            why = "kept"
        rows.append([name, format_setting(paper), source, here, why])
    return markdown_table(rows)


def claim_section(row: Row, experiment: Experiment) -> list[str]:
    """The folded lines on a claim: its protocol, its numbers, of which the first decides, and their
    arms."""
    claim = row["claim"]
    plan = f"Smallest effect that matters: {claim.effect:.3g}. Planned: {row['plan']}."
    if row["p"] is not None:
        plan += f" Holm's p: {row['p']:.2g}."
    if row["pooled"]:
        freedom = row["pooled"].freedom
        plan += f" The variance is pooled over arms, {freedom} degrees of freedom."
    lines = [f'<a id="{claim.id}"></a>\n<details>']
    lines.append(
        f"<summary><b>{claim.paper or 'ours'}: {claim.statement}</b>: {row['class']}</summary>\n"
    )
    if claim.published:
        lines.append(f"Published: {claim.published}.\n")
    lines.append(f"{plan}\n")
    if claim.note:
        lines.append(f"{claim.note}\n")
    lines += protocol_table(claim, experiment)
    lines += number_table(row, experiment.study.digits)
    lines += arm_table(arms_in(row["values"]), experiment)
    waiting = [number.says for number in claim.numbers if number not in row["values"]]
    if waiting:
        lines.append(f"Not run: {'; '.join(waiting)}.\n")
    return [*lines, "</details>\n"]


def find_curves(experiment: Experiment) -> dict[str, dict[str, dict[float, Losses]]]:
    """{base and optimizer: {arm: {learning rate: losses of the tuning seeds}}} of the arms that are
    tuned on a grid of their own; arms with the same files at another rate add theirs."""
    curves = {}
    arms = experiment.study.arms
    for name, arm in arms.items():
        try:
            tried = dict(experiment.tune(name).tried)
        except MissingRun:
            continue
        if not tried or experiment.study.trials:
            continue
        for other_name, other in arms.items():
            if other.of and other[:2] == arm[:2]:
                with suppress(MissingRun):
                    runs = experiment.reported(other_name, TUNING_SEEDS)
                    losses = experiment.measure("loss", runs)
                    tried[experiment.tune(other_name).lr] = losses
        title = f"{arm.base}, {experiment.configs_of(name).train.optimizer}"
        curves.setdefault(title, {})[name] = dict(sorted(tried.items()))
    return curves


def draw_rates(curves: dict[str, dict], path: Path, unit: str, formats: Sequence[str]) -> None:
    """Draw the losses of `find_curves`, per `unit`, up to HIGHEST above the lowest loss."""
    with plt.rc_context(STYLE):
        figure, axes = new_figure(len(curves), 4.2, 3.8)
        for axis, (title, arms) in zip(axes, curves.items(), strict=True):
            draw_curves(axis, arms, title, "learning_rate", unit)
        bottom, top = axes[0].get_ylim()  # all panels share it
        axes[0].set_ylim(bottom, min(top, bottom + HIGHEST))
        save_figure(figure, path, formats)


def find_differences(verdicts: dict[str, Row]) -> dict[str, Row]:
    """The verdicts on claims with numbers that are drawn over steps."""
    return {name: row for name, row in verdicts.items() if any(n.steps for n in row["values"])}


def draw_differences(found: dict[str, Row], path: Path, unit: str, formats: Sequence[str]) -> None:
    """Draw the numbers of `find_differences`, per `unit`, over steps: a panel for each claim, a
    line for each sum of arms, through the means, with a bar from the lowest seed to the highest;
    dashed, the paper's value at its end."""
    with plt.rc_context(STYLE):
        figure, axes = new_figure(len(found), 4.2, 3.8)
        for axis, row in zip(axes, found.values(), strict=True):
            curves = {}  # {sum of arms: {steps: values by seed}}
            for number, values in sorted(row["values"].items(), key=lambda item: item[0].steps):
                if number.steps:
                    curves.setdefault(number.value, {})[number.steps] = values
            draw_curves(axis, curves, row["claim"].id, "steps", unit)
            axis.set(ylabel=f"difference of validation losses (nats per {unit})")
            axis.axhline(0, color="0.7")
            published = row["claim"].number.published
            if published is not None:
                axis.axhline(published, color="0.4", linestyle="--")
        save_figure(figure, path, formats)


def find_losses(experiment: Experiment) -> dict[str, dict[str, ArmLosses]]:
    """{arm, "DNT" for "DNT under AdamW": {base: its losses}} of the recorded arms of a study with
    equal trials."""
    study = experiment.study
    found = {}
    for name, arm in study.arms.items():
        with suppress(MissingRun):
            runs = experiment.reported(name, experiment.seeds_of(name))
            if runs and study.trials:
                losses = experiment.measure("loss", runs)
                words = describe_losses(losses, experiment.tune(name), study)
                label = name.removesuffix(f" under {arm.base}")
                row = found.setdefault(label, dict.fromkeys(study.bases, ArmLosses()))
                row[arm.base] = ArmLosses(losses, words)
    return found


def draw_losses(
    found: dict[str, dict[str, ArmLosses]], path: Path, unit: str, formats: Sequence[str]
) -> None:
    """Draw the losses of `find_losses`, per `unit`: a panel for each base, a row for each arm, a
    dot for each seed, a bar at the mean. A run that diverged has no dot."""
    bases = list(next(iter(found.values())))
    with plt.rc_context(STYLE):
        figure, axes = new_figure(len(bases), 3.6, 1.2 + 0.24 * len(found))
        for axis, base in zip(axes, bases, strict=True):
            for row, arms in enumerate(found.values()):
                losses = arms[base].losses
                axis.plot(losses, [row] * len(losses), "o", color=PALETTE[0], alpha=0.6)
                axis.plot(mean_loss(losses), row, "|", color="black", markersize=11)
            axis.set(title=base, xlabel=f"validation loss (nats per {unit})")
        axes[0].set_yticks(range(len(found)), list(found))
        axes[0].invert_yaxis()  # all panels share it
        save_figure(figure, path, formats)


FIGURES = {"differences": draw_differences, "losses": draw_losses, "rates": draw_rates}


def render_page(experiment: Experiment, verdicts: dict[str, Row], drawn: dict[str, dict]) -> str:
    """The page's text, from the verdicts of `judge` and {name of a figure of FIGURES: what it
    shows}."""
    study = experiment.study
    formats = experiment.config.formats
    rows = sorted(verdicts.values(), key=lambda row: CLASSES.index(row["class"]))
    title = "Claims, tested"
    if any(claim.paper for claim in study.claims):
        title = "The papers' claims, tested here"
    about = describe_runs(experiment)
    note = "\n\n".join(textwrap.fill(part, 120) for part in study.note.split("\n\n"))
    docs = os.path.relpath(ROOT / "docs" / "claims.md", experiment.results)
    lines = [INTRO.format(title=title, about=about, note=note, docs=docs).rstrip(), ""]
    if study.side_by_side:
        lines += ["## The numbers of all claims\n", *side_by_side(list(verdicts.values()), study)]
    if drawn.get("differences"):
        shown = picture("Differences over steps", f"{experiment.name}/differences", formats)
        lines.append(DIFFERENCES.format(picture=shown))
    if losses := drawn.get("losses"):
        shown = picture("Validation loss by arm", f"{experiment.name}/losses", formats)
        lines.append(LOSSES.format(picture=shown))
        table = [["", *study.bases]]
        for name, arms in losses.items():
            table.append([name, *(arm.words for arm in arms.values())])
        lines += markdown_table(table)
    judged = [row for row in rows if row["class"] != "cannot be judged"]
    if judged:
        lines += ["## What is decided\n", *markdown_table(verdict_rows(judged, study.digits))]
    missing = [claim.id for claim in study.claims if claim.id not in verdicts]
    if missing:
        lines.append(f"Not run yet: {', '.join(missing)}.\n")
    if len(judged) < len(rows):
        table = verdict_rows(rows[len(judged) :], study.digits)
        table[0][1] = "claim"
        lines += ["## What this scale cannot judge\n", *markdown_table(table)]
    if study.others:
        table = [["paper", "who and where", "what they found", "for the paper"]]
        for paper, others in study.others.items():
            table += [[paper, *cells] for cells in others]
        lines += ["## What others found\n", *markdown_table(table)]
    if drawn.get("rates"):
        shown = picture("Loss and learning rate", f"{experiment.name}/rates", formats)
        lines.append(RATES.format(picture=shown, highest=HIGHEST))
    bases = [f"{base}: `{files}`" for base, files in study.bases.items() if files]
    words = "; ".join(bases) or "the papers' own configurations stand alone"
    lines.append(EACH.format(bases=words))
    for row in rows:
        lines += claim_section(row, experiment)
    return "\n".join(lines).rstrip() + "\n"


def write_page(experiment: Experiment, verdicts: dict[str, Row]) -> list[Path]:
    """Write the page, with the verdicts of `judge`, and its figures: of differences over steps, and
    of the losses by arm if all arms had equal trials, else by learning rate. Returns their
    paths."""
    drawn = {
        "differences": find_differences(verdicts),
        "losses": find_losses(experiment),
        "rates": find_curves(experiment),
    }
    make_folder(experiment.folder, "--results")
    paths = [experiment.results / f"{experiment.name}.md"]
    unit = task_of(experiment.configs_of(next(iter(experiment.study.arms))).model).loss_unit
    for name, draw in FIGURES.items():
        if drawn[name]:
            figure = experiment.folder / f"{name}.png"
            draw(drawn[name], figure, unit, experiment.config.formats)
            paths += [figure.with_suffix(f".{kind}") for kind in experiment.config.formats]
    text = render_page(experiment, verdicts, drawn)
    write_file(paths[0], lambda f: f.write(text.encode()))
    return paths


# -- the last lines of the command


def summarize(experiment: Experiment, verdicts: dict[str, Row]) -> list[str]:
    """The calls that failed, and the verdict on each chosen claim in words and numbers."""
    lines = [f"failed: {failure}" for failure in experiment.runner.failures]
    for claim in experiment.chosen:
        row = verdicts.get(claim.id)
        if row is None:
            lines += ["", f"{claim.id}: no verdict, since not all of its runs are there"]
            continue
        lines += ["", f"{claim.id}: {row['class'].upper()}: {claim.statement}"]
        values = row["values"].get(claim.number, [])
        if values:
            ours = format_values(values, row["pooled"], experiment.study.digits)
            lines.append(f"  {claim.number.says}: {ours}, n = {len(values)}")
        if row["p"] is not None:
            lines[-1] += f", p = {row['p']:.2g}"
        if row["why"]:
            lines.append(f"  {row['why']}")
        has_interval = len(values) >= FEWEST and all(map(math.isfinite, values))
        if row["class"] == "undecided" and has_interval:
            n = count_seeds_to_decide(values, claim, experiment.tests) or "more than 1,000"
            lines.append(f"  {n} seeds would do, if mean and spread stay as they are")
    return [
        *lines,
        "\nbrackets: 95% intervals; n: seeds; p: after Holm's correction",
        "to set the number of seeds: --only=CLAIM --seeds=N, or seeds=N in the Claim",
    ]
