"""How far momentum SGD is behind AdamW under Pre-LN and under DNT, against what may decide it: momentum_sgd.md."""

import math
import statistics
from contextlib import suppress
from pathlib import Path

from nanodnt.files import write_file
from studies.claims.arms import STUDY, study_arm
from studies.claims.claims import Number
from studies.claims.experiment import Experiment, MissingRun
from studies.claims.texts import describe_runs, format_interval, loss_text, markdown_table
from studies.sweep.figure import new_figure, save_figure
from studies.sweep.runner import ROOT

LAYOUTS = {"S1": "Pre-LN (S1)", "S5": "DNT (S5)"}
PAPERS_GAP = 0.039  # of Pre-LN at 124M, Table 1
MOST_TIMES = 1000  # beyond, an extrapolation is not written down

INTRO = """# Does DNT close momentum SGD's gap to AdamW?

In the DNT paper, at 124M and 200K steps, momentum SGD (mSGDW) ends 0.039 nats behind AdamW on a Pre-LN GPT-2 and
0.014 ahead of it on DNT (Table 1). Here the gap, the loss under mSGDW minus the loss under AdamW, is measured for both
layouts while one thing is varied at a time. Every arm is at its own learning rate, tuned with seed 0 on a grid of
factors of two that grows until its lowest loss lies inside; the losses are of other seeds. Under AdamW DNT's loss is so
flat that a grid may stop at a local minimum.

{machine}

Bars are the range over the seeds. The initial weights are named after the std of the embedding, and without Xavier
also of the matrices. Warm-up, clipping and momentum are varied under mSGDW alone, and AdamW is the plain one: its gap
would be another with a β₁ or a warm-up of its own. A gap can be small because AdamW does badly: the table has both
losses.
"""


def gap_number(layout: str, what: str, value: str) -> Number:
    """The gap of a layout with one thing varied."""
    sgd, adam = (study_arm(layout, optimizer, what, value) for optimizer in ("mSGDW", "AdamW"))
    return Number(f"{layout}, {what} {value}", f"{sgd} - {adam}")


def find_gaps(experiment: Experiment) -> dict:
    """{what: {layout: {value: gaps by seed}}} of what is recorded."""
    found = {}
    for what, (values, _) in STUDY.items():
        for layout in LAYOUTS:
            for value in values:
                with suppress(MissingRun):
                    gaps = experiment.values(gap_number(layout, what, value))
                    found.setdefault(what, {}).setdefault(layout, {})[value] = gaps
    return found


def draw_gaps(found: dict, path: Path) -> None:
    figure, axes = new_figure(len(found), 2.6, 3.4)
    for axis, (what, layouts) in zip(axes, found.items(), strict=True):
        places = {value: i for i, value in enumerate(STUDY[what][0])}
        for i, layout in enumerate(LAYOUTS):
            gaps = layouts.get(layout, {})
            means = [statistics.mean(g) for g in gaps.values()]
            below, above = ([abs(end(g) - m) for g, m in zip(gaps.values(), means, strict=True)] for end in (min, max))
            x = [places[value] + 0.08 * i - 0.04 for value in gaps]
            axis.errorbar(x, means, [below, above], fmt="o-", capsize=3, label=LAYOUTS[layout])
        axis.axhline(0, color="0.5", linewidth=0.8)
        axis.set_xticks(list(places.values()), [value.replace(", ", ",\n") for value in places])
        axis.set_xlim(-0.3, len(places) - 0.7)
        axis.set_xlabel(what)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mSGDW minus AdamW, nats")
    axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def summarise(found: dict) -> list:
    """The lines of a list: each layout's smallest gap, what DNT changes (both need two settings), and where the gap
    goes with the steps. Each setting counts once, though the base's value stands under each thing varied."""
    gaps = {layout: {} for layout in LAYOUTS}
    for what, layouts in found.items():
        for layout, values in layouts.items():
            for value, by_seed in values.items():
                if all(map(math.isfinite, by_seed)):
                    name = gap_number(layout, what, value).value.replace(layout, "")
                    setting = f"{what}: {value}" if STUDY[what][0][value] else "the base's values"
                    gaps[layout][name] = (statistics.mean(by_seed), setting, by_seed)
    lines = []
    for layout, settings in gaps.items():
        if len(settings) > 1:
            _, setting, by_seed = min(settings.values())
            lines.append(f"{LAYOUTS[layout]}: the smallest gap is {format_interval(by_seed)}, with {setting}.")
    changes = [gaps["S5"][name][0] - gaps["S1"][name][0] for name in gaps["S1"] if name in gaps["S5"]]
    if len(changes) > 1:
        lines.append(
            f"DNT's gap is the smaller one in {sum(change < 0 for change in changes)} of {len(changes)} settings; "
            f"the change is {min(changes):+.3f} to {max(changes):+.3f} nats."
        )
    lines += [trend for layout in LAYOUTS if (trend := describe_trend(found, layout))]
    return [*("- " + line for line in lines), ""] if lines else []


def describe_trend(found: dict, layout: str) -> str:
    """How the gap changes over three numbers of steps or more, and what it would take to come to the paper's gap of
    Pre-LN if that went on as a power law; "" without such numbers."""
    gaps = found.get("steps", {}).get(layout, {})
    means = {float(value): statistics.mean(by_seed) for value, by_seed in gaps.items()}
    if len(means) < 3 or not all(map(math.isfinite, means.values())):
        return ""
    (first, start), (last, end) = min(means.items()), max(means.items())
    text = f"{LAYOUTS[layout]}: from {first:g} to {last:g} steps the gap goes from {start:+.3f} to {end:+.3f}"
    if min(means.values()) <= 0:
        return text + "."
    logs = [[math.log2(x) for x in numbers] for numbers in (means, means.values())]
    slope = statistics.linear_regression(*logs).slope
    if slope >= 0:
        return text + "; it does not shrink."
    times = (PAPERS_GAP / end) ** (1 / slope)
    text += f", by a factor of {2**slope:.2f} a doubling."
    if times <= MOST_TIMES:
        text += f" If that went on, which nothing here shows, {times:.2g} times as many steps would bring it to the "
        text += f"{PAPERS_GAP} that the paper has for Pre-LN [I]."
    return text


def study_rows(found: dict, experiment: Experiment) -> list:
    rows = []
    for what, layouts in found.items():
        for value in STUDY[what][0]:
            cells = []
            for layout in LAYOUTS:
                gaps = layouts.get(layout, {}).get(value)
                cells.append("–" if gaps is None else format_interval(gaps))
                for optimizer in ("AdamW", "mSGDW"):
                    name = study_arm(layout, optimizer, what, value)
                    tuned = experiment.tune(name) if gaps is not None else None
                    cells.append(f"{tuned.lr:g}: {loss_text(tuned.tried.get(tuned.lr))}" if tuned else "–")
            rows.append([what, value, *cells])
    return rows


def write_study(experiment: Experiment) -> None:
    """Write momentum_sgd.md and its figure, from what is recorded."""
    found = find_gaps(experiment)
    folder, scale = ROOT / experiment.config.results, experiment.config.scale
    lines = [INTRO.format(machine=describe_runs(experiment))]
    if found:
        draw_gaps(found, folder / "claims" / f"{scale}-momentum.png")
        lines += [f"![The gap against what is varied](claims/{scale}-momentum.png)", "", *summarise(found)]
    head = ["varied", "value"]
    for layout in LAYOUTS:
        head += [f"{layout}: gap", "AdamW: tuned rate, loss", "mSGDW: tuned rate, loss"]
    lines += ["Gaps with 95% intervals; rates and losses of the tuning seed.", ""]
    lines += markdown_table(head, study_rows(found, experiment)) if found else ["Not run yet.", ""]
    write_file(folder / "momentum_sgd.md", lambda f: f.write(("\n".join(lines).rstrip() + "\n").encode()))
