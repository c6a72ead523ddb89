"""docs/results/claims.md (claims_SCALE.md but for mini), its figures and README's summary, all from a scale's record.

The page opens with a forest plot and a table of a row a claim; everything else is folded below.
"""

import textwrap
from collections import Counter
from pathlib import Path

from nanodnt.files import write_file
from studies.claims.arms import ARMS, TUNING_SEED
from studies.claims.claims import Claim
from studies.claims.experiment import Experiment, split_value
from studies.claims.figures import HIGHEST, draw_forest, draw_robustness
from studies.claims.judge import CLASSES, NOT_JUDGED, count_all, judge
from studies.claims.robustness import find_curves, find_rises
from studies.claims.study import write_study
from studies.claims.texts import describe_runs, format_interval, format_number, loss_text, markdown_table
from studies.sweep.runner import ROOT

MARKS = ("<!-- claims: written by reproduce.py -->", "<!-- end of claims -->")
README_ROWS = 6

INTRO = """# The papers' claims, tested here

{machine}

Each claim was written down before its runs, in [claims.py](../../studies/claims/claims.py): one number that decides,
the smallest effect of interest (half of the published one, where there is one, but for equality), and whether this
scale can show it. What was changed after the first results is said with the claim; the rule for “reproduced” was made
stricter then. An earlier round of the claims, on a smaller and badly initialised model, was known. A number is
computed seed by seed; compared runs see the same data in the same order, but may be of different machines. Brackets
are 95% intervals over the seeds (Student's t) at the learning rates given; another tuning seed may choose others.
Marks: [I] our inference or choice, not a paper's word; [U] not published where we could read it.
{note}"""

FOREST = """![Ours beside the papers'](claims/{scale}.png)

In the figure an effect is divided by its smallest effect of interest, and the paper's sign points to the right.
"""

METHOD = """## How it is decided

- **no effect**: the interval lies within ± the smallest effect of interest. This comes first: the interval may
  exclude 0.
- **reproduced**: the paper's sign, and our mean lies between half and twice the published value (of logarithms too,
  where the number is one). For a claim of equality: the interval lies within ± the smallest effect of interest; for
  one of “not above”: below + the smallest effect.
- **direction only**: the paper's sign, but another size, or no published size.
- **contradicted here**: the other sign. For a claim of equality: the interval lies outside ± the smallest effect; for
  one of “not above”: above it.
- **undecided**: none of these, or the scale's regime cannot show the effect.

A sign, an equality and a “not above” count if their p value is below 0.05 after Holm's correction over the primary
numbers of all claims; intervals are not corrected. If all runs of one side diverge and none of the other, p is that of
so extreme a split. Other numbers are shown and decide nothing. A run has diverged if it was ended because its gradients
were not finite, or if it ends worse than it began.

{rates}

```bash
python reproduce.py --scale={scale}                        # trains what is missing; stop and start it as you like
python reproduce.py --scale={scale} --judge_only=True      # this page, from the committed record alone
```
"""


TUNED = f"""Learning rates are tuned with seed {TUNING_SEED}, on a grid of factors of two that grows until the best rate
lies inside, or six doublings from the middle; the claims' numbers are of other seeds. A learning rate decays to a tenth
of itself, in all arms [I]; with blockwise rates all blocks end at a tenth of the base rate."""
OWN = "Rates, and where they end, are those of the papers' own configurations; where we have none, ours [I]."


# ------------------------------------------------------------------------------------------------------- the page


def verdict_rows(found: dict, experiment: Experiment) -> list:
    """A row a claim, grouped by class: paper, claim, published, ours, class."""
    rows = []
    for name in (*CLASSES, NOT_JUDGED):
        for claim in experiment.claims:
            if claim.id in found and found[claim.id]["class"] == name:
                row = found[claim.id]
                ours = format_interval(row["primary"]["values"])
                effect = claim.effect(experiment.config.scale)[0]
                published = claim.expect if claim.expect in ("equal", "not above") else format_number(effect)
                why = f" ({row['why']})" if row["why"] else ""
                beside = [part["values"] for part in row["sides"] if part["number"].says == claim.beside]
                more = "".join(f"; {claim.beside}: {format_interval(values)}" for values in beside)
                verdict = f"**{verdict_text(name, experiment)}**{why}{more}"
                rows.append([claim.paper, claim.statement, published, ours, verdict])
    return rows


def verdict_text(name: str, experiment: Experiment) -> str:
    """A class, with the data that it was found on where that is another kind than the papers'."""
    return " ".join(filter(None, (name, experiment.scale.on)))


HEAD = ["paper", "claim", "paper's", "ours (95% interval)", "verdict"]


def rate_text(name: str, experiment: Experiment) -> str:
    """An arm's learning rate and how it was found."""
    arm, tuned = ARMS[name], experiment.tune(name)
    if arm.of:
        return f"{tuned.lr:g}, {f'{arm.times:g} × ' if arm.times != 1 else ''}that of {arm.of}"
    if not tuned.tried:
        return "the config's" if tuned.lr is None else f"{tuned.lr:g}, given"
    tried = ", ".join(f"{lr:g}: {loss_text(loss)}" for lr, loss in tuned.tried.items())
    more = "".join(f"; `{files or 'as it is'}`: {loss_text(loss)}" for files, loss in tuned.variants.items())
    return f"{tuned.lr:g}, tuned ({tried}{more})"


def claim_section(claim: Claim, row: dict, experiment: Experiment) -> list:
    """The folded lines on a claim: what decides, further numbers, arms with rates and losses by seed."""
    lines = [f'<a id="{claim.id}"></a>', "<details>"]
    verdict = verdict_text(row["class"], experiment)
    lines += [f"<summary><b>{claim.paper}: {claim.statement}</b>: {verdict}</summary>", ""]
    scale = experiment.config.scale
    regime = "can show the effect" if scale in claim.adequate else "cannot show it"
    lines += [f"Published: {claim.published}.", ""]
    p = "" if row["p"] is None else f" Holm's p: {row['p']:.2g}."
    small = f"Smallest effect of interest: {claim.effect(scale)[1]:g}."
    lines += [f"{small} Scale {scale} {regime}: {claim.why}{p}", ""]
    lines += [claim.note, ""] if claim.note else []
    rows = []
    for part in (row["primary"], *row["sides"]):
        number, decides = part["number"], part is row["primary"]
        measure = "" if number.measure == "loss" else f", {number.measure}"
        says = f"**{number.says}**{measure}" if decides else f"{number.says}{measure}"
        by_seed = ", ".join(map(format_number, part["values"]))
        published = claim.effect(experiment.config.scale)[0] if decides else number.published
        rows.append([says, format_number(published), format_interval(part["values"]), by_seed])
    lines += markdown_table(["number (the first decides)", "paper's", "ours (95% interval)", "by seed"], rows)
    shown = [part["number"] for part in row["sides"]]
    waiting = [number.says for number in claim.sides_at(scale) if number not in shown]
    left_out = [number.says for number in claim.sides if scale in number.left_out]
    lines += [f"Not run yet: {'; '.join(waiting)}.", ""] if waiting else []
    lines += [f"Not measured at this scale: {'; '.join(left_out)}.", ""] if left_out else []
    names = [name for part in (row["primary"], *row["sides"]) for _, name in split_value(part["number"].value)]
    rows = []
    for name in dict.fromkeys(names):
        runs = [experiment.reported(name, seed) for seed in experiment.seeds_of(name)]
        losses = [experiment.record.measures(run).get("loss", "–") for run in runs]
        tuned = experiment.tune(name)
        rows.append(
            [name, f"`{tuned.files or 'the base'}`", rate_text(name, experiment), ", ".join(map(loss_text, losses))]
        )
    head = [
        "arm",
        "files and flags" if experiment.scale.own else "after the base",
        f"learning rate (losses with seed {TUNING_SEED})",
        "validation loss by seed",
    ]
    return [*lines, *markdown_table(head, rows), "</details>", ""]


def robustness_section(experiment: Experiment) -> list:
    """The figure and the table of what too high a rate costs."""
    if experiment.scale.smoke or not experiment.robustness:
        return []
    lines, scale = ["## What too high a learning rate costs", ""], experiment.config.scale
    compared = experiment.robustness.items()
    rises = {optimizer: find_rises(optimizer, layouts, experiment) for optimizer, layouts in compared}
    rows = [[optimizer, layout, *cells] for optimizer, found in rises.items() for layout, cells in found.items()]
    if not rows:
        return [*lines, "Not run yet.", ""]
    lines += [
        f"![Loss and rate](claims/{scale}-robustness.png)",
        "",
        f"The rise of the loss from the tuned rate to 4, 8 and 16 times it, all with seed {TUNING_SEED}. That seed "
        "chose the rate too, which makes rises a little too large; a rise below 0 means that tuning stopped at a "
        f"local minimum. S1 is Pre-LN. The figure ends at {HIGHEST:g} nats; a cross there is a run that diverged. A "
        "dash is a run that is missing, or a rate that train.py refuses, since weight decay would take a tenth of "
        "every matrix a step.",
        "",
    ]
    head = ["optimizer", "layout", "tuned rate", "loss there", "× 4", "× 8", "× 16"]
    return lines + markdown_table(head, rows)


def counted_section(experiment: Experiment) -> list:
    """What is arithmetic, all of it about language models."""
    if "gpt" not in experiment.scale.bases:
        return []
    rows = [[what, f"{ours:.2f}", f"{published:g}", where] for what, ours, published, where in count_all()]
    return ["## Counted, not measured", "", *markdown_table(["what", "counted", "paper's", "where"], rows)]


def render_page(found: dict, experiment: Experiment) -> str:
    """The page's text."""
    scale = experiment.config.scale
    note = experiment.scale.note
    note = f"\n{textwrap.fill(note, 120, break_on_hyphens=False)}\n" if note else ""
    lines = [INTRO.format(machine=describe_runs(experiment), note=note)]
    if found:
        lines += [FOREST.format(scale=scale), *markdown_table(HEAD, verdict_rows(found, experiment))]
    missing = [claim.id for claim in experiment.claims if claim.id not in found]
    lines += [f"Not run yet: {', '.join(missing)}.", ""] if missing else []
    lines += robustness_section(experiment) + counted_section(experiment)
    rates = OWN if experiment.scale.own else TUNED
    lines += [METHOD.format(scale=scale, rates=rates), "## Each claim", ""]
    bases = "; ".join(f"{family}: `{files}`" for family, files in experiment.scale.bases.items())
    own = "; the papers' own configurations stand alone" if experiment.scale.own else ""
    lines += [f"An arm's files and flags follow the base of its family{own}. {bases}.", ""]
    for claim in experiment.claims:
        if claim.id in found:
            lines += claim_section(claim, found[claim.id], experiment)
    return "\n".join(lines).rstrip() + "\n"


def page_name(scale: str) -> str:
    return "claims.md" if scale == "mini" else f"claims_{scale}.md"


def write_page(experiment: Experiment) -> Path:
    """Write the page, its figures and, for scale mini's own results, README's summary; returns the page's path."""
    folder, scale = ROOT / experiment.config.results, experiment.config.scale
    (folder / "claims").mkdir(parents=True, exist_ok=True)
    experiment = experiment.reading()
    found = judge(experiment.claims, experiment)
    if found:
        draw_forest(found, scale, folder / "claims" / f"{scale}.png")
    compared = experiment.robustness.items()
    curves = {optimizer: find_curves(optimizer, layouts, experiment) for optimizer, layouts in compared}
    if any(curves.values()):
        draw_robustness(curves, folder / "claims" / f"{scale}-robustness.png")
    if scale == "mini":
        write_study(experiment)
    path, text = folder / page_name(scale), render_page(found, experiment)
    write_file(path, lambda f: f.write(text.encode()))
    readme = ROOT / "README.md"
    if scale == "mini" and folder.resolve() == (ROOT / "docs" / "results").resolve():
        text = fill_readme(readme.read_text(encoding="utf-8"), found, experiment)
        write_file(readme, lambda f: f.write(text.encode()))
    return path


def fill_readme(readme: str, found: dict, experiment: Experiment) -> str:
    """README with its summary of the claims: everything between the two MARKS."""
    before, _, rest = readme.partition(MARKS[0])
    if MARKS[1] not in rest:
        return readme
    rows, counts = verdict_rows(found, experiment), Counter(row["class"] for row in found.values())
    total = ", ".join(f"{counts[name]} {name}" for name in CLASSES if counts[name])
    figure = any(find_rises(optimizer, layouts, experiment) for optimizer, layouts in experiment.robustness.items())
    image = "![What too high a learning rate costs](docs/results/claims/mini-robustness.png)"
    caption = "What too high a learning rate costs: a flat curve forgives it. S1 is Pre-LN, S5 DNT."
    about = textwrap.fill(describe_runs(experiment), 130)
    lines = [MARKS[0], *([image, "", caption, ""] if figure else []), about, ""]
    if found:
        lines += [*markdown_table(HEAD, rows[:README_ROWS]), f"Of {len(experiment.claims)} claims: {total}.", ""]
    else:
        lines += ["No claim is judged yet.", ""]
    return before + "\n".join(lines) + rest[rest.index(MARKS[1]) :]
