"""Evaluate trained models on any text, on answers, and on the tasks of lm-evaluation-harness.

Nats per token and bits per byte of a text file, or of a prepared dataset's validation split; nats
per token of answers, and exact match:
    python evaluate.py --out_dir=out/dnt_small --tasks=text --input=README.md
    python evaluate.py --out_dir=out/dnt_small --tasks=text --input=openwebtext
    python evaluate.py --out_dir=out/sft --tasks=answers --input=faq.jsonl
Tasks of the harness, which need `make install-eval` and a network; dyt15 are the DyT paper's 15:
    python evaluate.py --out_dir=out/dnt_small --tasks=hellaswag,arc_easy
    python evaluate.py --out_dir=out/dnt_small,out/lns_350m --tasks=dyt15
A model of Hugging Face; a run without each of its blocks, as in LNS's Fig. 3:
    python evaluate.py --init_from=gpt2 --out_dir=out/gpt2_openai --tasks=dyt15
    python evaluate.py --out_dir=out/lns_350m --tasks=arc_easy --without_block=all
Earlier results, side by side:
    python evaluate.py --out_dir=out/dnt_small,out/lns_350m

Results are added to evaluation.json in the run directory; a task that is evaluated again is
replaced. A run without a block is another task: "arc_easy without block 3". The other blocks keep
their number ℓ (LNS's 1/√ℓ).
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nanodnt.run.before_torch  # noqa: F401  # isort: skip

from configurator import configure
from interop.evaluation.inputs import open_sources
from interop.evaluation.results import compare_results, mean_entry, read_results, write_results
from interop.evaluation.scoring import score
from interop.evaluation.settings import EvaluateConfig
from nanodnt.files import check_folder
from nanodnt.generate import find_unused
from nanodnt.run.directory import run_record
from nanodnt.run.environment import Env, environment
from nanodnt.run.errors import end_with, reports_errors
from nanodnt.weights import load_pretrained, load_trained, without_block

TIMEOUT_S = 60  # for other processes; this command has none


def evaluate_runs(config: EvaluateConfig, env: Env) -> None:
    """Evaluate every run on every task, and write the results, one task or group after the
    other."""
    folders = config.folders()
    # all mistakes of the user are found before the work begins
    for folder in folders:
        read_results(folder)
        check_folder(Path(folder), "--out_dir")
    if config.init_from:
        runs = {folders[0]: load_pretrained(config.init_from)}
    else:
        runs = {folder: load_trained(folder, config.checkpoint) for folder in folders}
    left_out = {}
    sources = {}
    for folder, run in runs.items():
        left_out[folder] = config.left_out(run.model.config.n_layer, run.source)
        sources[folder] = open_sources(config, run)
    names = [name for name in config.task_names() if name not in ("text", "answers")]
    harness = import_harness() if names else None
    tasks = harness.find_tasks(names, config.task_folder) if names else None
    about = describe_evaluation(config, env)

    for folder in folders:
        run = runs.pop(folder)
        lm = harness.load_model(run, config.batch_size, env.device, env.dtype) if names else None
        run.model.to(env.device).set_runtime(compute_dtype=env.dtype)
        unused = find_unused(run.model, run.tokenizer)
        for number in left_out[folder]:
            without = f" without block {number}" if number else ""
            print(f"evaluating {run.source}, step {run.step}{without}", flush=True)
            entries = {}
            with without_block(run.model, number):
                for source in sources[folder]:
                    entries[source.task] = score(run.model, source, config.batch_size, unused)
            if entries:
                entries |= mean_entry(entries)
                write_results(folder, entries, without, about | {"step": run.step})
            for name in names:  # each is written at once: a later one may fail
                entries = harness.run_task(name, lm, number, tasks, config)
                write_results(folder, entries, without, about | {"step": run.step})


def describe_evaluation(config: EvaluateConfig, env: Env) -> dict[str, Any]:
    """The fields that all entries of this command have in common."""
    record = run_record()
    return {
        "checkpoint": config.init_from or config.checkpoint,
        "device": str(env.device),
        "dtype": str(env.dtype).removeprefix("torch."),
        "batch_size": config.batch_size,
        "date": record["started"],
        "command": record["command"],
        "versions": record["versions"],
        "git_commit": record["git_commit"],
    }


def import_harness() -> ModuleType:
    """The module that runs tasks of lm-evaluation-harness. ValueError where the harness is not
    installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "every task but text and answers needs lm-evaluation-harness: make install-eval"
        )
    root = Path(__file__).resolve().parent
    # tasks import the package `evaluate`, which must be found before this command
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != root] + [str(root)]
    from interop.evaluation import harness

    return harness


@reports_errors
def main() -> int:
    (config,), _ = configure(EvaluateConfig, description=__doc__)
    config.check()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ValueError(
            "evaluations run in one process: start evaluate.py with python, not with torchrun"
        )
    if config.task_names():
        with environment(config.device, config.dtype, TIMEOUT_S) as env:
            evaluate_runs(config, env)
    results = {folder: read_results(folder) for folder in config.folders()}
    missing = [folder for folder, tasks in results.items() if not tasks]
    if missing:
        raise ValueError(
            f"nothing was evaluated yet in {', '.join(missing)}: name tasks, as in --tasks=dyt15"
        )
    print("\n".join(compare_results(results)))
    return 0


if __name__ == "__main__":
    end_with(main)
