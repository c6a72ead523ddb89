"""Choosing, training, judging and recording claims."""

import json
import math
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import torch

from nanodnt.claims import quantities, report
from nanodnt.claims.claims import ARMS, CLAIMS, Claim
from nanodnt.claims.runner import ROOT, MissingRun, Runner, Stopped, resolve_configs
from nanodnt.claims.statistics import interval, overall_verdict, verdict
from nanodnt.data import load_meta
from nanodnt.files import write_file
from nanodnt.run.hardware import device_name
from nanodnt.run.metrics import run_record


def choose_claims(only: str, scale: str = "tiny") -> list:
    """The claims that `only` names, by id or paper, and that `scale` can test. ValueError for a name that is neither an
    id nor a paper, and for an id that this scale cannot test."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    allowed = {claim.id for claim in CLAIMS} | {claim.paper for claim in CLAIMS}
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"only={unknown[0]} is neither a claim nor a paper: allowed are {', '.join(sorted(allowed))}")
    named = [claim for claim in CLAIMS if not names or claim.id in names or claim.paper in names]
    if untestable := [claim for claim in named if claim.id in names and scale not in claim.scales]:
        raise ValueError(f"{untestable[0].id} cannot be tested at scale {scale}: {untestable[0].note}")
    return [claim for claim in named if scale in claim.scales]


def judge(claim: Claim, runner: Runner) -> dict:
    """The claim's numbers and verdict, for the record; trains what is missing."""
    rows, arms = [], {}
    for row in claim.rows:
        rows.append(judge_row(row, runner))
        for name in [name for name in rows[-1]["parts"] if name in ARMS]:
            lr, tried = runner.search_rate(ARMS[name])
            grid = runner.scale.grids[ARMS[name].grid][0]
            arms[name] = dict(lr=lr, tried=tried, files=ARMS[name].files, lr_of=ARMS[name].lr)
            arms[name]["edge"] = bool(tried) and lr in (grid[0], grid[-1])
    return dict(id=claim.id, verdict=overall_verdict([row["verdict"] for row in rows]), rows=rows, arms=arms)


def judge_row(row, runner: Runner) -> dict:
    """A row's value by seed, its parts, interval and verdict."""
    terms = re.split(r" ([+-]) ", row.value)
    signs = [1] + [1 if sign == "+" else -1 for sign in terms[1::2]]
    parts = {name: runner.measure_seeds(name, row.measure) for name in terms[::2]}
    n = max(map(len, parts.values()))
    columns = [v * (n // len(v)) for v in parts.values()]  # a number counts for every seed
    values = [sum(s * x for s, x in zip(signs, column, strict=True)) for column in zip(*columns, strict=True)]
    mean, low, high = interval(values)
    all_equal = len(columns) > 1 and len({v for column in columns for v in column}) == 1  # all diverged: each is ln V
    one_seed = len(values) == 1 and set(parts) & set(ARMS)  # no spread is known
    if all_equal or one_seed:
        low, high = -math.inf, math.inf
    found = dict(says=row.says, measure=row.measure, value=row.value, expect=row.expect, values=values)
    return found | dict(parts=parts, mean=mean, low=low, high=high, verdict=verdict(low, high, row.expect))


def arms_of(claim: Claim) -> list:
    """The names of the arms that a claim's rows need."""
    names = [name for row in claim.rows for name in re.split(r" [+-] ", row.value)]
    return list(dict.fromkeys(name for name in names if name in ARMS))


def train_all(claims: list, runner: Runner) -> dict:
    """Begin the runs of all claims: {claim id: futures}. Arms that need another arm's learning rate come last."""

    def train_arm(name):
        arm = ARMS[name]
        lr = runner.search_rate(arm)[0]
        for seed in range(1, runner.config.seeds + 1):
            runner.finish(runner.training_run(arm, lr, seed))

    names = list(dict.fromkeys(name for claim in claims for name in arms_of(claim)))
    names.sort(key=lambda name: isinstance(ARMS[name].lr, str))
    futures = {name: runner.pool.submit(train_arm, name) for name in names}
    return {claim.id: [futures[name] for name in arms_of(claim)] for claim in claims}


def check_datasets(claims: list, runner: Runner) -> None:
    """ValueError if a dataset of the claims' runs is not prepared."""
    families = {ARMS[name].family for claim in claims for name in arms_of(claim)}
    for dataset in {resolve_configs(runner.scale.bases[family].split())[1].dataset for family in families}:
        load_meta(dataset)


def reproduce(claims: list, runner: Runner) -> int:
    """Train, measure, judge and record, claim by claim; returns the exit code."""
    config = runner.config
    for name in ("SIGINT", "SIGTERM"):
        signal.signal(getattr(signal, name), runner.stop)
    if not (config.dry_run or config.judge_only):
        check_datasets(claims, runner)
    futures, results, unjudged, failed = train_all(claims, runner), ROOT / config.results, 0, 0
    try:
        for future in [f for some in futures.values() for f in some] if runner.scale.distributed else ():
            future.exception()  # training takes all GPUs, so measure after it
        for claim in claims:
            try:
                for future in futures[claim.id]:
                    future.result()
                found = judge(claim, runner)
            except MissingRun:
                unjudged += 1
                continue
            except ValueError as e:  # the other claims go on
                failed += 1
                print(f"error: {claim.id}: {e}", file=sys.stderr, flush=True)
                continue
            if config.dry_run:
                continue
            record(found, runner, results)
            print(f"{found['verdict']:>13}  {claim.id}: {claim.statement}", flush=True)
    except (Stopped, KeyboardInterrupt):
        print("stopped; the same command goes on from here", flush=True)
        return 130
    finally:
        runner.stop()
        runner.pool.shutdown(cancel_futures=True)
    if config.judge_only and unjudged:
        print(f"{unjudged} of {len(claims)} claims are not judged: they lack runs")
    for run in dict.fromkeys(runner.missing) if config.dry_run else ():
        print(shlex.join([*runner.launcher, "train.py", *run.args, "--init_from=auto", f"--out_dir={run.path}"]))
    return int(failed > 0)


def record(found: dict, runner: Runner, results: Path) -> None:
    """Add a claim's result to those of its scale, draw it, and write claims.md again."""
    folder = results / "claims"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{runner.config.scale}.json"
    kept = report.load_results(results).get(runner.config.scale, {})
    device, origin = quantities.measuring_device(), run_record()
    hardware = f"{os.cpu_count()} CPU cores, {device_name(device)}" if device.type == "cpu" else device_name(device)
    found |= dict(seeds=runner.config.seeds, hardware=hardware, torch=torch.__version__)
    found |= dict(git_commit=origin["git_commit"], judged=origin["started"][:10])
    kept[found["id"]] = found
    write_file(path, lambda f: f.write(json.dumps(kept, indent=1).encode()))
    report.draw_claim(found, folder / f"{runner.config.scale}-{found['id']}.png")
    report.write_page(results)
