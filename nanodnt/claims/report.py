"""docs/results/claims.md and its figures, from the results that reproduce.py has kept.

python -m nanodnt.claims.report        # write claims.md again from claims/*.json; print the table of tiny.md
"""

import json
import math
import sys
from itertools import groupby
from pathlib import Path

from nanodnt.claims.claims import CLAIMS, SCALES, Claim
from nanodnt.claims.statistics import limits
from nanodnt.files import write_file

COLORS = {"confirmed": "tab:green", "not confirmed": "tab:red", "inconclusive": "tab:gray"}
UNITS = {"loss": "validation loss, nats a token", "rise": "nats", "state GB": "GB", "removal deep": "nats"}

INTRO = """# The papers' claims, tested here

Each claim is a row of [claims.py](../../nanodnt/claims/claims.py): what a paper says, the runs that test it, the number
that is measured, and the values of it that confirm the claim. `reproduce.py` trains, measures, judges and writes this
page:

```bash
python reproduce.py                       # all claims at scale tiny, on CPU cores; stop and start it as you like
python reproduce.py --only=lns-loss,DyT   # some claims, or those of a paper
python reproduce.py --scale=small         # one GPU; --scale=124m, --scale=paper: the papers' settings
```

**Verdicts.** A number is measured seed by seed: arms that are compared see the same data in the same order. Its mean
over the seeds has a 95% interval (Student's t). *Confirmed*: the interval lies inside the values that the claim asks
for. *Not confirmed*: it lies outside them, so at this scale the opposite holds. *Inconclusive*: it crosses the limit;
more seeds (`--seeds=5`) or a larger scale may decide. A claim with several numbers is confirmed if all of them are, and
not confirmed if one of them is not. Of twenty numbers without any effect, about one gets a verdict by chance.

**Learning rates.** "Searched": the best LR for the first seed on a grid of factors of two. The search goes downhill
from a stated start until both neighbours are worse or the grid ends; the tables show what was tried. The first seed is
also among those reported, a small bias that all arms with a search share. "Of X": the best LR of arm X is used, which
favours X. Every searched or given LR decays to a tenth of itself, whatever the paper does [I]. A run that diverges, or
ends worse than it began, counts as ln V, the loss of a model that knows nothing; if both sides of a number do, the
number is inconclusive.

Marks: [I] our inference or choice, not a paper's word; [U] not published where we could read it.

**What small runs cannot show.** The papers' effects are 0.01 to 0.1 nats after billions of tokens; at scale *tiny*
models of 0.3M parameters see 0.2M bytes. An effect that needs depth, width or length does not appear, and one that
appears may have another cause: a verdict holds for its scale alone.
"""


# ----------------------------------------------------------------------------------------------------------- texts


def format_number(x: float) -> str:
    if not math.isfinite(x):
        return "∞" if x > 0 else "−∞" if x < 0 else "?"
    return f"{x:.4f}" if abs(x) < 100 else f"{x:.4g}"


def format_signed(x: float) -> str:
    return format_number(x) if not math.isfinite(x) or x < 0 else f"+{format_number(x)}"


def markdown_table(head: list, rows: list) -> list:
    """The lines of a table and an empty one; a "|" in a cell becomes "/"."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines] + [""]


def describe_rate(arm: dict) -> str:
    """An arm's learning rate and where it comes from."""
    if isinstance(arm["lr_of"], str):
        return f"{arm['lr']:g}, of {arm['lr_of']}"
    if not arm["tried"]:
        return "the config's" if arm["lr"] is None else f"{arm['lr']:g}, given"
    losses = sorted((float(lr), loss) for lr, loss in arm["tried"].items())
    tried = ", ".join(f"{lr:g}: {format_number(loss)}" for lr, loss in losses)
    edge = ", the edge of the grid" if arm["edge"] else ""
    return f"{arm['lr']:g}, searched{edge} ({tried})"


# ------------------------------------------------------------------------------------------------------- the page


def load_results(results: Path) -> dict:
    """{scale: {claim id: result}} of the scales that have some. ValueError for a damaged file."""
    found = {}
    for scale in SCALES:
        path = results / "claims" / f"{scale}.json"
        if path.exists():
            try:
                found[scale] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                raise ValueError(f"{path} is damaged: restore it from git, or remove it") from None
    return found


def overview(found: dict) -> list:
    """The lines of a table for each paper: its claims and their verdicts at every scale."""
    lines = ["## Overview", ""]
    for paper, claims in groupby(CLAIMS, key=lambda claim: claim.paper):
        rows = []
        for claim in claims:
            cells = []
            for scale in found:
                if scale not in claim.scales:
                    cells.append("–")
                    continue
                result = found[scale].get(claim.id)
                verdicts = [row["verdict"] for row in result["rows"]] if result else []
                yes = f" ({verdicts.count('confirmed')} of {len(verdicts)})" if len(verdicts) > 1 else ""
                cells.append(f"[**{result['verdict']}**{yes}](#{scale}-{claim.id})" if result else "not run")
            rows.append([f"`{claim.id}`", claim.statement, *cells])
        lines += [f"### {paper}", "", *markdown_table(["claim", "what it says", *found], rows)]
    return lines


def verdict_table(found: dict, scale: str) -> list:
    """The lines of a table: the claims of each paper by verdict, at one scale, with links from docs/results."""
    rows = []
    for paper, claims in groupby(CLAIMS, key=lambda claim: claim.paper):
        cells = {verdict: [] for verdict in COLORS}
        for claim in claims:
            if claim.id in found[scale]:
                link = f"[{claim.id}](claims.md#{scale}-{claim.id})"
                cells[found[scale][claim.id]["verdict"]].append(link)
        rows.append([paper, *(", ".join(links) or "–" for links in cells.values())])
    return markdown_table(["paper", *COLORS], rows)


def claim_section(scale: str, claim: Claim, result: dict) -> list:
    """The lines on a claim at one scale: verdict, numbers, arms, figure."""
    seeds = f"seeds 1 to {result['seeds']}"
    lines = [f'<a id="{scale}-{claim.id}"></a>', "", f"### {claim.id}: {result['verdict']}", ""]
    lines += [f"{claim.paper}: {claim.statement}. Published: {claim.published}.", ""]
    lines += [claim.note, ""] if claim.note else []
    rows = []
    for row in result["rows"]:
        mean, low, high = (format_signed(row[key]) for key in ("mean", "low", "high"))
        exact = len(row["values"]) == 1 and math.isfinite(row["low"])
        mean = format_number(row["mean"]) if exact else f"{mean} ({low} to {high})"
        values = "no seeds: counted" if exact else ", ".join(map(format_signed, row["values"]))
        measure = "" if row["measure"] == "loss" else f", {row['measure']}"
        rows.append([f"{row['says']}{measure}", mean, values, row["expect"], row["verdict"]])
    lines += markdown_table(["number", "mean (95% interval)", seeds, "confirmed if", "verdict"], rows)
    losses = {name: v for row in result["rows"] if row["measure"] == "loss" for name, v in row["parts"].items()}
    rows = []
    for name, arm in result["arms"].items():
        by_seed = ", ".join(map(format_number, losses.get(name, [])))
        rows.append([name, f"`{arm['files'] or 'nothing'}`", describe_rate(arm), by_seed])
    head = ["arm", "after the base", "learning rate (loss of seed 1)", "validation loss by seed"]
    lines += markdown_table(head, rows) if rows else []
    return lines + [f"![{claim.id}](claims/{scale}-{claim.id}.png)", ""]


def write_page(results: Path) -> Path:
    """Write claims.md from claims/*.json, both in the folder `results`; returns its path."""
    found = load_results(results)
    lines = [INTRO, *overview(found)]
    for scale, by_id in found.items():
        bases = "; ".join(f"{family}: `{files}`" for family, files in SCALES[scale].bases.items())
        lines += [f"## Scale {scale}", "", f"{SCALES[scale].title}. Bases: {bases}.", ""]
        origins = {
            (r["judged"], r["hardware"], f"torch {r['torch']}", f"commit {str(r['git_commit'])[:7]}")
            for r in by_id.values()
        }
        how = "; ".join(map(", ".join, sorted(origins)))
        lines += [f"Judged {how}. The command: `python reproduce.py --scale={scale}`.", ""]
        for claim in CLAIMS:
            if claim.id in by_id:
                lines += claim_section(scale, claim, by_id[claim.id])
    text = "\n".join(lines).rstrip() + "\n"
    path = results / "claims.md"
    write_file(path, lambda f: f.write(text.encode()))
    return path


# ------------------------------------------------------------------------------------------------------ the figures


def draw_claim(result: dict, path: Path) -> None:
    """Draw a claim's numbers as PNG to `path`; nothing if none of them is finite.

    A panel for each measure, a line for each number: its seeds, mean and interval, over the range that confirms it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if any(map(math.isfinite, row["values"]))]
    if not rows:
        return
    measures = dict.fromkeys(row["measure"] for row in rows)
    panels = [[row for row in rows if row["measure"] == measure] for measure in measures]
    heights = [len(some) + 0.9 for some in panels]
    size = (9, 0.36 * sum(heights) + 0.5 * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, height_ratios=heights, squeeze=False)
    for axis, measure, some in zip(axes.flat, measures, panels, strict=True):
        for i, row in enumerate(some):
            values, color = [v for v in row["values"] if math.isfinite(v)], COLORS[row["verdict"]]
            if math.isfinite(row["low"]):
                axis.plot([row["low"], row["high"]], [i, i], color=color, linewidth=2)
            axis.plot(values, [i] * len(values), "o", color=color, markersize=4, alpha=0.6)
            axis.plot(sum(values) / len(values), i, "|", color=color, markersize=14, markeredgewidth=2)
        low, high = axis.get_xlim()
        for i, row in enumerate(some):
            least, most = (min(max(x, low), high) for x in limits(row["expect"]))
            axis.fill_betweenx([i - 0.45, i + 0.45], least, most, color="tab:green", alpha=0.1, linewidth=0)
        axis.set_xlim(low, high)
        axis.set_ylim(len(some) - 0.5, -0.5)
        axis.set_yticks(range(len(some)), [row["says"] for row in some])
        axis.set_xlabel(UNITS.get(measure, measure))
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right", "left"]].set_visible(False)
    handles = [plt.Line2D([], [], color=color, linewidth=2, label=name) for name, color in COLORS.items()]
    handles.append(plt.Rectangle((0, 0), 1, 1, color="tab:green", alpha=0.1, label="confirms"))
    figure.legend(handles=handles, loc="upper right", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(result["id"], x=0.01, ha="left", fontsize=10)
    figure.tight_layout()
    write_file(path, lambda f: figure.savefig(f, format="png", dpi=100))
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results")
    if not (folder / "claims").is_dir():
        sys.exit(f"error: there is no {folder / 'claims'}: run reproduce.py")
    print(write_page(folder))
    for name in load_results(folder):
        print(f"\n{name}:\n" + "\n".join(verdict_table(load_results(folder), name)))
