"""Tasks of lm-evaluation-harness (the package lm_eval, `make install-eval`): found, loaded with their data, run."""

import difflib
import importlib.util
import logging
import os
import sys
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path

import torch

from interop.evaluation.settings import SUITES
from nanodnt.trained import Trained

ROOT = Path(__file__).resolve().parents[2]
UNREACHABLE = "connect once, or point HF_HOME at a folder that has it (HF_DATASETS_OFFLINE=1: look only there)"
ANSWER_S = 10  # how long the Hugging Face hub may take to answer


def import_harness() -> None:
    """Make lm_eval importable. ValueError where it is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("every task but text and answers needs lm-evaluation-harness: make install-eval")
    # tasks import the package `evaluate`, which must be found before our command of that name
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != ROOT] + [str(ROOT)]
    for name in ("lm_eval", "datasets", "huggingface_hub", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def quiet():
    """Without the harness's notes and warnings, and, but on a terminal, its progress bars. Errors that it logs are
    shown."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("lm_eval").addHandler(handler)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            bars = sys.stderr if sys.stderr.isatty() else nowhere
            with redirect_stderr(bars), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
    finally:
        logging.getLogger("lm_eval").removeHandler(handler)


def go_offline_if_cut_off(env) -> None:
    """Look for data sets in the cache only, if the hub does not answer: each request would be tried six times."""
    import datasets
    import huggingface_hub

    if datasets.config.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=ANSWER_S)
    except Exception:  # whatever its HTTP client raises
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        env.print("note: the Hugging Face hub does not answer; data is looked for in its cache only")


@contextmanager
def errors_in_one_line(name: str, failed: str = "could not be loaded"):
    """What the harness, a task's code or its data may raise, as a ValueError that names the task."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (ConnectionError, HfHubHTTPError) as e:
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"task {name}: its data could not be fetched ({reason}): {UNREACHABLE}") from e
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a task's YAML file, its code and its data can raise anything
        reason = " ".join(str(e).split())[:200]
        raise ValueError(f"task {name} {failed} ({type(e).__name__}: {reason})") from e


def find_tasks(names: list, folder: str):
    """The harness's TaskManager that knows the tasks `names`. ValueError for one that does not exist."""
    from lm_eval.tasks import TaskManager

    if folder and not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}: task_folder holds YAML files of tasks")
    with quiet():
        if folder:
            manager = TaskManager(include_path=folder, include_defaults=False)
            if set(names) <= set(manager.all_subtasks):
                return manager  # without reading the harness's 14,000 files
        manager = TaskManager(include_path=folder or None)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*manager.all_tasks, "text", "answers", *SUITES], n=1)
            hint = f"did you mean {near[0]}?" if near else "lm-evaluation-harness lists them: lm_eval ls tasks"
            raise ValueError(f"there is no task {name!r}: {hint}")
    return manager


def load_tasks(names: list, config, env) -> list:
    """[(name, the harness's object)] of the tasks and groups `names`, and of the tasks of the tags, with their data."""
    import_harness()
    env.print("reading the list of tasks")
    manager, found = find_tasks(names, config.task_folder), []
    go_offline_if_cut_off(env)
    if not env.is_main:
        env.barrier()  # the first process fetches the data
    for name in names:
        env.print(f"loading {name}")
        with errors_in_one_line(name), quiet():
            loaded = manager.load([name])
        group = loaded["groups"].get(name)
        found += [(name, group)] if group else loaded["tasks"].items()
        for task in loaded["tasks"].values():
            documents = min(config.limit or len(task.eval_docs), len(task.eval_docs))
            if documents < env.world_size:
                raise ValueError(f"task {name}: {documents} documents are too few for {env.world_size} processes")
    if env.is_main:
        env.barrier()
    return found


def run_task(name: str, task, trained: Trained, config, env) -> dict:
    """{task: {"metrics": …, "settings": …, …}} of a task, or of those in a group, on the first process; {} on the
    others. The model is on env's device. All ranks must call it."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from interop.evaluation.harness_model import HarnessModel

    with quiet():
        lm = HarnessModel(trained, env, config.batch_size)
    how = dict(num_fewshot=config.num_fewshot, limit=config.limit or None, gen_kwargs=config.gen_kwargs or None)
    how |= dict(numpy_random_seed=config.seed, torch_random_seed=config.seed, fewshot_random_seed=config.seed)
    with errors_in_one_line(name, "failed"), quiet():
        manager = TaskManager(include_defaults=False)  # tasks are loaded: the list need not be read again
        found = simple_evaluate(lm, tasks=[task], task_manager=manager, log_samples=False, **how)
    if found is None:
        return {}
    settings = dict(num_fewshot=config.num_fewshot, limit=config.limit, gen_kwargs=config.gen_kwargs, seed=config.seed)
    return {
        task: {
            "metrics": read_metrics(values),
            "settings": settings,
            "documents": found["n-samples"].get(task, {}).get("effective"),
            "num_fewshot": found["n-shot"].get(task),
            "task_version": found["versions"].get(task),
            "lm_eval": version("lm_eval"),
        }
        for task, values in found["results"].items()
    }


def read_metrics(values: dict) -> dict:
    """{metric: {"value": …, "stderr": a number or None}} of what the harness reports, {"acc,none": 0.3,
    "acc_stderr,none": "N/A", …}. A filter other than none stays in the name."""
    metrics = {}
    for name, value in values.items():
        metric, comma, way = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            stderr = values.get(f"{metric}_stderr,{way}")
            stderr = float(stderr) if isinstance(stderr, (int, float)) else None
            metrics[metric if way == "none" else f"{metric}, {way}"] = {"value": float(value), "stderr": stderr}
    return metrics
