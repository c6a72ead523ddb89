"""Tasks of lm-evaluation-harness (the package lm_eval, `make install-eval`), by its own model for
`transformers`, which loads a temporary export of the evaluated model: with the network's own code,
so that a block can be left out."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from interop.evaluation.settings import EvaluateConfig
from interop.huggingface.write import write_pretrained
from nanodnt.weights import Trained, without_block

for library in ("lm_eval", "transformers"):
    logging.getLogger(library).setLevel(logging.ERROR)


@contextmanager
def errors_in_one_line(name: str) -> Iterator[None]:
    """Inside, an error of the harness, of a task's code or of its data becomes a ValueError that
    names the task."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a task's YAML file, its code and its data can raise anything
        reason = " ".join(str(e).split())[:200]
        raise ValueError(
            f"task {name} failed ({type(e).__name__}: {reason}); where its data cannot be fetched, "
            "connect once, or set HF_HOME to a folder that has it"
        ) from e


def find_tasks(names: list[str], folder: str) -> TaskManager:
    """The harness's tasks and those in `folder`. ValueError where one of `names` is not among
    them."""
    if folder and not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}: task_folder holds YAML files of tasks")
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder or None)  # reads the harness's 14,000 files
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(
                f"there is no task {name!r}: `lm_eval ls tasks` lists those of "
                "lm-evaluation-harness"
            )
    return manager


def load_model(trained: Trained, batch_size: int, device: torch.device, dtype: torch.dtype) -> HFLM:
    """The harness's model of `trained`, which is on the CPU. ValueError for a tokenizer without a
    token that begins or ends a text."""
    if trained.tokenizer.bos is None:
        raise ValueError(
            f"the tokenizer of {trained.source} ({trained.tokenizer.kind}) has no token that "
            "begins or ends a text, as tasks need: use --tasks=text"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "export"
        write_pretrained(trained.model, trained.meta, folder, target="nanodnt", check=False)
        lm = HFLM(
            str(folder),
            batch_size=batch_size,
            device=str(device),
            dtype="float32",
            trust_remote_code=True,
        )
    lm.model.network.set_runtime(compute_dtype=dtype)
    return lm


def run_task(
    name: str, lm: HFLM, number: int | None, tasks: TaskManager, config: EvaluateConfig
) -> dict[str, dict[str, Any]]:
    """{task: {"metrics": …, "settings": …, …}} of a task, or of the tasks in a group, for the model
    without block `number` (None: with all blocks)."""
    with errors_in_one_line(name), without_block(lm.model.network, number):
        results = simple_evaluate(
            lm,
            tasks=[name],
            task_manager=tasks,
            log_samples=False,
            num_fewshot=config.num_fewshot,
            limit=config.limit or None,
            gen_kwargs=config.gen_kwargs or None,
            numpy_random_seed=config.seed,
            torch_random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
    settings = {key: getattr(config, key) for key in ("num_fewshot", "limit", "gen_kwargs", "seed")}
    entries = {}
    for task, values in results["results"].items():
        entries[task] = {
            "metrics": metrics_of(values),
            "settings": settings,
            "documents": results["n-samples"].get(task, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(task),
            "task_version": results["versions"].get(task),
            "lm_eval": version("lm_eval"),
        }
    return entries


def metrics_of(values: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """{metric: {"value": …, "stderr": a number or None}} from a report of the harness, {"acc,none":
    0.3, "acc_stderr,none": "N/A", …}. A filter other than none stays in the name."""
    metrics = {}
    for name, value in values.items():
        metric, comma, filter_name = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            stderr = values.get(f"{metric}_stderr,{filter_name}")
            stderr = float(stderr) if isinstance(stderr, (int, float)) else None
            title = metric if filter_name == "none" else f"{metric}, {filter_name}"
            metrics[title] = {"value": float(value), "stderr": stderr}
    return metrics
