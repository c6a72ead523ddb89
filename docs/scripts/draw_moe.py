"""Write docs/results/moe.md's figure and tables from docs/results/moe/runs.json.

    python docs/scripts/draw_moe.py               # draw again
    python docs/scripts/draw_moe.py out/moe       # take the runs from the sweeps in this folder first

The sweeps' commands are on the page.
"""

import json
import math
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nanodnt.files import write_file  # noqa: E402
from nanodnt.run.metrics import read_metrics  # noqa: E402
from studies.sweep.figure import save_figure  # noqa: E402

RESULTS = ROOT / "docs" / "results"
PAGE, RUNS = RESULTS / "moe.md", RESULTS / "moe" / "runs.json"
# {sweep, a folder of sweep.json and its runs: {a curve there: its name on the page}}
SWEEPS = {
    "rates": {"the config": "experts, balance=loss"},
    "rates_dense": {"the config": "dense, n_ff=256"},
    "balance": {f"balance={name}": f"balance={name}" for name in ("none", "loss", "bias")},
    "dense": {"the config": "n_ff=256"},
    "dense_all": {"the config": "n_ff=1024"},
    "gains": {"unified": "unified"},
    "gains_none": {"the config": "`gain=none`"},
}
DENSE = {"n_ff=256": "dense, `n_ff=256`: equal active parameters", "n_ff=1024": "dense, `n_ff=1024`: equal parameters"}


def collect(folder: Path) -> list:
    """[{sweep, name, learning_rate, seed, outcome, loss, torch, git_commit, date; with experts, by tracked step: steps,
    largest (blocks), entropy (blocks)}] of the finished runs below `folder`. largest: load over the mean load."""
    runs = []
    for sweep, names in SWEEPS.items():
        path = folder / sweep / "sweep.json"
        for curve, rows in json.loads(path.read_text())["curves"].items() if path.exists() else ():
            for row in rows:
                run = folder / sweep / row["run"]
                rate = json.loads((run / "config.json").read_text())["train"]["learning_rate"]
                found = dict(sweep=sweep, name=names[curve], learning_rate=rate)
                found |= {key: row[key] for key in ("seed", "outcome", "loss", "torch", "git_commit", "date")}
                tracked = [r for r in read_metrics(run) if "load" in r.get("track", {})]
                if tracked:
                    found["steps"] = [r["step"] for r in tracked]
                    loads = [[max(block) * len(block) for block in r["track"]["load"]] for r in tracked]
                    found["largest"] = [[round(x, 4) for x in blocks] for blocks in loads]
                    found["entropy"] = [[round(x, 4) for x in r["track"]["router_entropy"]] for r in tracked]
                runs.append(found)
    return runs


def load(sweep: str) -> dict:
    """{name: its runs, by seed} of a sweep."""
    found = {}
    for run in sorted(json.loads(RUNS.read_text()), key=lambda run: (run["learning_rate"], run["seed"])):
        if run["sweep"] == sweep:
            found.setdefault(run["name"], []).append(run)
    return {name: found[name] for name in SWEEPS[sweep].values() if name in found}


def last_quarter(run: dict, key: str) -> list:
    """[mean over the rows of the last quarter] of `largest` or `entropy`, block by block."""
    rows = [row for step, row in zip(run["steps"], run[key], strict=True) if step > 0.75 * run["steps"][-1]]
    return [statistics.mean(block) for block in zip(*rows, strict=True)]


def spread(values: list, digits: int = 3) -> str:
    """The mean and the range of a number over the seeds."""
    low, mean, high = (f"{x:.{digits}f}" for x in (min(values), statistics.mean(values), max(values)))
    return f"{mean} ({low} to {high})"


def losses(runs: list) -> list:
    """The validation losses; ∞ for a run that diverged."""
    return [math.inf if run["loss"] is None else run["loss"] for run in runs]


def table_of_rates() -> list:
    found = load("rates") | load("rates_dense")
    rates = sorted({run["learning_rate"] for runs in found.values() for run in runs})
    rows = [["", *(f"{rate:g}" for rate in rates)]]
    for name, runs in found.items():
        at = dict(zip([run["learning_rate"] for run in runs], losses(runs), strict=True))
        rows.append([name, *(f"{at[rate]:.4f}" if rate in at else "–" for rate in rates)])
    return rows


def table_of_balance() -> list:
    rows = [
        ["", "validation loss, nats per byte", "largest load / mean load", "block by block", "router's entropy, nats"]
    ]
    for name, runs in load("balance").items():
        largest = [last_quarter(run, "largest") for run in runs]
        blocks = " ".join(f"{statistics.mean(block):.2f}" for block in zip(*largest, strict=True))
        entropies = [statistics.mean(last_quarter(run, "entropy")) for run in runs]
        means = spread([statistics.mean(blocks) for blocks in largest], 2)
        rows.append([f"`{name}`", spread(losses(runs)), means, blocks, spread(entropies, 2)])
    for name, runs in (load("dense") | load("dense_all")).items():
        rows.append([DENSE[name], spread(losses(runs)), *["–"] * 3])
    return rows


def table_of_gains() -> list:
    rows = [["scale vectors", "validation loss, nats per byte"]]
    usual = {"`gain=shared`": load("balance")["balance=loss"]}
    for name, runs in (usual | load("gains") | load("gains_none")).items():
        rows.append([name, spread(losses(runs))])
    return rows


TABLES = dict(rates=table_of_rates, balance=table_of_balance, gains=table_of_gains)


def render_table(name: str) -> str:
    """A table between its marks, as it stands on the page."""
    head, *rows = TABLES[name]()
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"<!-- {name} -->\n{table}\n<!-- end of {name} -->"


def fill_page(page: str) -> str:
    """The page with its tables."""
    for name in TABLES:
        page = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, n=name: render_table(n), page, flags=re.S)
    return page


def draw(path: Path) -> None:
    """Largest load and entropy over the steps, mean over the blocks, band over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    labels = dict(largest="largest load / mean load", entropy="router's entropy, nats")
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for name, runs in load("balance").items():
            means = [[statistics.mean(blocks) for blocks in run[key]] for run in runs]
            lines = list(zip(*means, strict=True))  # by step, over the seeds
            (line,) = axis.plot(runs[0]["steps"], [statistics.mean(seeds) for seeds in lines], label=name)
            low, high = ([end(seeds) for seeds in lines] for end in (min, max))
            axis.fill_between(runs[0]["steps"], low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.axhline(1 if key == "largest" else math.log(8), color="grey", linewidth=0.8, linestyle=":")
        axis.set(xlabel="step", ylabel=label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    save_figure(figure, path)


def main():
    if sys.argv[1:]:
        runs = collect(Path(sys.argv[1]))
        text = "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n"
        write_file(RUNS, lambda f: f.write(text.encode()))
    draw(RESULTS / "moe" / "balance.png")
    text = fill_page(PAGE.read_text(encoding="utf-8"))
    write_file(PAGE, lambda f: f.write(text.encode()))
    print(PAGE)


if __name__ == "__main__":
    main()
