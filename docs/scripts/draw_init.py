"""Write docs/results/init.md's figure and tables from the sweeps in docs/results/init/.

    python docs/scripts/draw_init.py

The sweeps' commands are on the page: each one's sweep.json is kept there as LAYOUT_OPTIMIZER.json.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanodnt.files import write_file  # noqa: E402
from studies.sweep.figure import draw_curves, new_figure, save_figure  # noqa: E402
from studies.sweep.results import by_x, summary_rows  # noqa: E402

RESULTS = ROOT / "docs" / "results"
HIGHEST = 5.3  # nats, the edge of the figure
SWEEPS = {
    "s1_adamw": "Pre-LN (S1), AdamW",
    "s5_adamw": "DNT (S5), AdamW",
    "s1_msgdw": "Pre-LN (S1), mSGDW",
    "s5_msgdw": "DNT (S5), mSGDW",
}


def load(name: str) -> dict:
    """A sweep's results, its curves named after their initialisation."""
    found = json.loads((RESULTS / "init" / f"{name}.json").read_text())
    return found | {"curves": {curve.split("+")[0]: rows for curve, rows in found["curves"].items()}}


def render_table(name: str) -> str:
    """The table of a sweep between its marks, as it stands on the page."""
    found = load(name)
    head, *rows = summary_rows(found)
    lines = [["init", *head[1:]], ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"<!-- {name} -->\n{SWEEPS[name]}:\n\n{table}\n<!-- end of {name} -->"


def fill_page(page: str) -> str:
    """The page with its tables."""
    for name in SWEEPS:
        page = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, n=name: render_table(n), page, flags=re.S)
    return page


def main():
    figure, axes = new_figure(len(SWEEPS), 4.2, 3.8)
    for axis, (name, title) in zip(axes, SWEEPS.items(), strict=True):
        found = load(name)
        draw_curves(axis, {curve: by_x(rows) for curve, rows in found["curves"].items()}, "learning rate")
        axis.set(title=title, ylim=(None, HIGHEST))
    save_figure(figure, RESULTS / "init" / "init.png")
    page = RESULTS / "init.md"
    text = fill_page(page.read_text(encoding="utf-8"))
    write_file(page, lambda f: f.write(text.encode()))
    print(page)


if __name__ == "__main__":
    main()
