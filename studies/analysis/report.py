"""report.md: one page on one or several runs, for the folder with their figures."""

import re
import shlex
from pathlib import Path

from nanodnt.files import write_file
from studies.analysis.compare import DEFINITION, RunRecord, format_table, format_value, make_printable, table_cells
from studies.analysis.settings import FIGURES

LOSS = "Training and validation loss against steps, tokens or images, and hours of training"


def write_report(runs: list, comparison: dict, folder: Path, figures: list) -> Path:
    """Write report.md in `folder`; returns its path. It holds where the runs end, what differs between them, the
    `figures`, names of PNG files in the folder, and each run's command line. `comparison`: of `compare_runs`."""
    table, several = comparison["table"], len(runs) > 1
    page = [f"# {len(runs)} runs compared" if several else f"# Run {plain(runs[0].name)}"]
    page += ["## Where they end", f"Validation loss in nats per {table['unit']}, at the last evaluation."]
    page += [format_table(plain(table_cells(table))), *(f"**Warning:** {plain(line)}" for line in table["warnings"])]
    if several:
        header = ["field", "of", "default", *(run.name for run in runs)]
        rows = [[d["field"], d["section"], d["default"], *d["values"]] for d in comparison["differences"]]
        nothing = "Nothing in their configuration, versions or commit."
        page += [plain(DEFINITION), "## What differs", format_table(plain([header, *rows])) if rows else nothing]
    page.append("## Figures")
    for name in figures:
        shows, after = (FIGURES[name].shows, FIGURES[name].after) if name in FIGURES else (LOSS, "")
        page.append(f"**{name}**: {shows}.{f' After {after}.' if after else ''}\n\n![{shows}]({name}.png)")
    page.append("## How they were made")
    for run in runs:
        page += describe_origin(run)
    path = folder / "report.md"
    write_file(path, lambda f: f.write("\n\n".join([*page, ""]).encode(errors="replace")))
    return path


def plain(text):
    """`text`, or lists of texts, each in one line of Markdown that shows it as it is, without markup."""
    if isinstance(text, list):
        return [plain(part) for part in text]
    return re.sub(r"[\\`*\[\]<&|~$#]|\b_|_\b", r"\\\g<0>", make_printable(text))


def describe_origin(run: RunRecord) -> list:
    """A run's command line, commit and versions as Markdown."""
    facts = [f"{key} {format_value(value)}" for key, value in run.versions().items() if value is not None]
    facts += [f"started {run.config['started']}"] if "started" in run.config else []
    command = " ".join(make_printable(shlex.quote(str(word))) for word in run.config["command"])
    lines = [f"### {plain(run.name)}", f"    {command}", plain(" · ".join(facts))]  # four spaces: no markup in it
    failure = run.rows[-1].get("failure")
    return lines + ([f"**Failed:** {plain(str(failure))}"] if failure is not None else [])
