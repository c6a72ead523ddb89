"""Tasks of lm-evaluation-harness (the package lm_eval, `make install-eval`): found, loaded with their data, run.

The model is the harness's own for `transformers`, around the network in memory. Only log-likelihoods are computed by
code of ours. The harness's own needs the logits of all positions: of 16 windows of 1,024 tokens with GPT-2's vocabulary
that is 6.6 GB, and twice the time for a small model."""

import difflib
import logging
import os
import sys
import tempfile
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from interop.evaluation.scoring import Example, predict
from interop.evaluation.settings import SUITES, EvaluateConfig
from interop.huggingface.modeling_nanodnt import NanoDNTConfig, NanoDNTForCausalLM
from interop.huggingface.tokenizer_files import tokenizer_files
from nanodnt.generate import find_unused
from nanodnt.weights import Trained


@contextmanager
def quiet():
    """Without the harness's notes, warnings and, but on a terminal, progress bars. Errors that it logs are shown."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("lm_eval").addHandler(handler)
    for name in ("lm_eval", "datasets", "huggingface_hub", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            bars = sys.stderr if sys.stderr.isatty() else nowhere
            with redirect_stderr(bars), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
    finally:
        logging.getLogger("lm_eval").removeHandler(handler)


def go_offline_if_cut_off(env) -> None:
    """Look for data sets in the cache only, if the hub does not answer: each request would be tried six times."""
    if not datasets.config.HF_HUB_OFFLINE:
        try:
            huggingface_hub.utils.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=10)
        except Exception:  # whatever its HTTP client raises
            huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
            env.print("note: the Hugging Face hub does not answer; data is looked for in its cache only")


@contextmanager
def errors_in_one_line(name: str, failed: str = "could not be loaded"):
    """What the harness, a task's code or its data may raise, as a ValueError that names the task."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:  # a task's YAML file, its code and its data can raise anything
        reason = " ".join(str(e).split())[:200]
        if isinstance(e, (ConnectionError, huggingface_hub.errors.HfHubHTTPError)):
            what = "connect once, or point HF_HOME at a folder that has it (HF_DATASETS_OFFLINE=1: look only there)"
            raise ValueError(f"task {name}: its data could not be fetched ({reason}): {what}") from e
        raise ValueError(f"task {name} {failed} ({type(e).__name__}: {reason})") from e


def load_tasks(names: list, config: EvaluateConfig, env) -> list:
    """[(name, the harness's object)] of the tasks and groups `names`, and of the tasks of the tags, with their data.
    ValueError for a task that does not exist, or has no data."""
    env.print("reading the list of tasks")
    if (folder := config.task_folder) and not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}: task_folder holds YAML files of tasks")
    with quiet():
        manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
        if manager is None or not set(names) <= set(manager.all_subtasks):
            manager = TaskManager(include_path=folder or None)  # which reads the harness's 14,000 files
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, [*manager.all_tasks, "text", "answers", *SUITES], n=1)
            hint = f"did you mean {near[0]}?" if near else "lm-evaluation-harness lists them: lm_eval ls tasks"
            raise ValueError(f"there is no task {name!r}: {hint}")
    found = []
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


def run_task(name: str, task, trained: Trained, config: EvaluateConfig, env) -> dict:
    """{task: {"metrics": …, "settings": …, …}} of a task, or of those in a group, on the first process; {} on the
    others. The model is on env's device. All ranks must call it."""
    how = dict(num_fewshot=config.num_fewshot, limit=config.limit or None, gen_kwargs=config.gen_kwargs or None)
    how |= dict(numpy_random_seed=config.seed, torch_random_seed=config.seed, fewshot_random_seed=config.seed)
    with quiet():
        lm = HarnessModel(trained, env, config.batch_size)
    with errors_in_one_line(name, "failed"), quiet():
        manager = TaskManager(include_defaults=False)  # tasks are loaded: the list need not be read again
        found = simple_evaluate(lm, tasks=[task], task_manager=manager, log_samples=False, **how)
    settings = {key: getattr(config, key) for key in ("num_fewshot", "limit", "gen_kwargs", "seed")}
    entries = {}
    for each, values in found["results"].items() if found else ():
        documents = found["n-samples"].get(each, {}).get("effective")
        about = dict(documents=documents, num_fewshot=found["n-shot"].get(each))
        about |= dict(task_version=found["versions"].get(each), lm_eval=version("lm_eval"))
        entries[each] = dict(metrics=metrics_of(values), settings=settings, **about)
    return entries


def metrics_of(values: dict) -> dict:
    """{metric: {"value": …, "stderr": a number or None}} of what the harness reports, {"acc,none": 0.3,
    "acc_stderr,none": "N/A", …}. A filter other than none stays in the name."""
    metrics = {}
    for name, value in values.items():
        metric, comma, way = name.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            stderr = values.get(f"{metric}_stderr,{way}")
            found = dict(value=float(value), stderr=float(stderr) if isinstance(stderr, (int, float)) else None)
            metrics[metric if way == "none" else f"{metric}, {way}"] = found
    return metrics


class HarnessModel(HFLM):
    """`trained`, whose model is on env's device. Each process gets its share of the requests (`rank`, `world_size`),
    and the harness collects the answers. ValueError for a tokenizer without a token that begins or ends a text."""

    def __init__(self, trained: Trained, env, batch_size: int):
        if trained.tokenizer.bos is None:
            what = f"the tokenizer of {trained.source} ({trained.tokenizer.kind})"
            raise ValueError(f"{what} has no token that begins or ends a text, as tasks need: use --tasks=text")
        with torch.device("meta"):
            model = NanoDNTForCausalLM(NanoDNTConfig(network=asdict(trained.model.config)))
        model.network = trained.model  # the same, not a copy
        model.generation_config.eos_token_id = trained.tokenizer.eot
        unused = find_unused(trained.model, trained.tokenizer)
        model.generation_config.suppress_tokens = None if unused is None else unused.tolist()
        with tempfile.TemporaryDirectory() as folder:  # the tokenizer as an export has it
            for name, text in tokenizer_files(trained.meta, trained.model.config.block_size).items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            # a special token's name in a text is ordinary text
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, split_special_tokens=True)
        tokenizer.eos_token = tokenizer.eos_token or tokenizer.bos_token
        tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
        super().__init__(model, tokenizer=tokenizer, batch_size=batch_size, prefix_token_id=trained.tokenizer.bos)
        self.unused = unused
        self.env, self._rank, self._world_size, self.barrier = env, env.rank, env.world_size, env.barrier

    @property
    def max_gen_toks(self) -> int:
        """Of a text where a task does not say it."""
        return min(super().max_gen_toks, self.max_length // 2)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        """(log-probability, whether it is the greedy text) of each request (strings or None, context's ids,
        continuation's ids). What is too long loses its beginning."""
        groups = {}  # requests that differ in their last token only share a forward pass
        for number, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(f"{len(continuation)} tokens to score do not fit block_size={self.max_length}")
            groups.setdefault((*context, *continuation[:-1]), []).append(number)
        examples = []
        for ids, numbers in groups.items():
            inputs, targets = np.array(ids[-self.max_length :]), [requests[number][2] for number in numbers]
            places = [np.arange(len(inputs) - len(part), len(inputs)) for part in targets]
            examples.append(Example(inputs, np.concatenate(places), np.concatenate(targets)))
        answers = [None] * len(requests)
        found = predict(self.model.network, examples, self.batch_size, self.env, self.unused)
        for numbers, (nats, hits) in zip(groups.values(), found, strict=True):
            for number in numbers:
                n = len(requests[number][2])
                answers[number] = -float(nats[:n].sum(dtype=np.float64)), bool(hits[:n].all())
                nats, hits = nats[n:], hits[n:]
        return answers

    def generate_until(self, requests, disable_tqdm: bool = False) -> list:
        """The text that continues each context. ValueError where the context and what is asked for have no room."""
        asked = [normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"] for request in requests]
        if (n_new := max(asked)) >= self.max_length:
            room = f"block_size={self.max_length} has no room for them and a prompt"
            half = f"--gen_kwargs=max_gen_toks={self.max_length // 2}"
            raise ValueError(f"the task generates {n_new} tokens, and {room}: lower it, {half}, say")
        kept, self.batch_size_per_gpu = self.batch_size, 1  # the network has no cache for rows with padding
        found = super().generate_until(requests, disable_tqdm)
        self.batch_size_per_gpu = kept
        return found

    def all_gather(self, tensor):
        return torch.stack(self.gather_object(tensor.cpu())).flatten()

    def gather_object(self, obj, dst: int = 0) -> list:
        return self.env.gather(obj)
