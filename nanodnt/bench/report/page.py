"""gpu.md, from what gpu.json holds. Every table is what the command above it prints."""

from nanodnt.bench.checks import CHECKS
from nanodnt.bench.checks.verdict import describe_checks, failures
from nanodnt.bench.sweeps.compiling import describe_compilation
from nanodnt.bench.sweeps.norms import describe_norms
from nanodnt.bench.sweeps.optimizers import describe_optimizers
from nanodnt.bench.sweeps.sizes import describe_micro_batches
from nanodnt.bench.tables import describe_ceilings, describe_variants

DONE, FAIL, ERROR, NO_MEMORY, NO_TIME, LEFT_OUT = "done", "FAIL", "error", "out of memory", "out of time", "left out"
NOT_RUN = "not yet run"

INTRO = """Each table is what the command above it prints, so each can be repeated alone. What stands in one table took
turns in one process, but for micro batches, which were timed one after the other. MFU: model FLOPs per second (per
token 6 for each parameter of a matrix, and 12·L·d·T for attention, without credit for causality) over the GPU's dense
bf16 peak. Memory: the most that tensors held. "Of ceiling": of what plain products of the model's size reach here."""


def describe_steps(result: dict) -> list:
    """The tables of steps that were timed in turns."""
    return [*describe_variants(result["variants"]), "", describe_ceilings(result["ceilings_flops_per_s"])]


DESCRIBE = dict.fromkeys(CHECKS, describe_checks) | {
    "compare": describe_steps,
    "nanogpt": describe_steps,
    "experts": describe_steps,
    "nanogpt-eager": describe_steps,
    "micro_batch": describe_micro_batches,
    "norms": lambda result: describe_norms(result["norms"]),
    "optimizers": describe_optimizers,
    "compile_times": describe_compilation,
}


def make_page(report: dict) -> str:
    """The text of gpu.md."""
    sections = report["sections"]
    lines = [f"# {report['device']}: checks and speed", "", *describe_state(report), INTRO, ""]
    facts = {name: report[name] for name in ("device", "driver", "torch", "cuda", "python")}
    commits = sorted({describe_commit(s) for s in sections.values() if s["status"] not in (NOT_RUN, LEFT_OUT)})
    facts |= {
        "git commit": ", ".join(commits) or "none",
        "begun": report["started"],
        "command": f"`{report['command']}`",
    }
    lines += [*(f"- {name}: {value}" for name, value in facts.items()), "- figures: [gpu.json](gpu.json)", ""]
    lines += ["| section | | took, s | planned, s |", "|---|---|---|---|"]
    for s in sections.values():
        took = "" if s["seconds"] is None else f"{s['seconds']:.0f}"
        lines.append(f"| {s['title']} | {s['status']} | {took} | {s['planned_s']} |")
    for s in sections.values():
        lines += ["", f"## {s['title']}", "", "```bash", s["command"], "```", ""]
        lines += ["```", *DESCRIBE[s["result"]["mode"]](s["result"]), "```"] if s["result"] else []
        if s["result"] is None:
            lines.append(f"**{s['status']}**{': ' + s['message'] if s['message'] else ''}")
        lines += ["", *s["result"]["warnings"]] if s["result"] and s["result"]["warnings"] else []
    return "\n".join(lines) + "\n"


def describe_commit(section: dict) -> str:
    """The git commit that a section ran at, and how many files were not as that has them."""
    changed = len(section["git_changed_files"])
    return f"{section['git_commit'] or 'unknown'}{f' and {changed} changed files' if changed else ''}"


def describe_state(report: dict) -> list:
    """Lines: what the reader must know first. Toy sizes, failures, and what is missing."""
    sections, lines = report["sections"], []
    if report["size"] == "toy":
        lines += ["**Toy sizes: these figures say nothing about the device.**", ""]
    for s in sections.values():
        for check in failures(s["result"] or {}):
            lines += [
                f"**FAIL**: {s['title']}, {check['what']}: {check['found']:.3g}, allowed {check['allowed']:.3g}",
                "",
            ]
    missing = [f"{s['title']} ({s['status']})" for s in sections.values() if s["result"] is None]
    if missing:
        lines += [f"**Incomplete**: {'; '.join(missing)}. The same command goes on from here.", ""]
    return lines
