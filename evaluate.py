"""Trained models evaluated: on any text, on answers, and on the tasks of lm-evaluation-harness.

python evaluate.py --out_dir=out/dnt_small --tasks=text --input=README.md     # nats per token, bits per byte
python evaluate.py --out_dir=out/dnt_small --tasks=text --input=openwebtext   # a prepared dataset's validation split
python evaluate.py --out_dir=out/sft --tasks=answers --input=faq.jsonl        # nats per token of answers, exact match
python evaluate.py --out_dir=out/dnt_small --tasks=hellaswag,arc_easy         # needs `make install-eval`, and a network
python evaluate.py --out_dir=out/dnt_small,out/lns_350m --tasks=dyt15         # the DyT paper's 15 tasks, two runs
torchrun --standalone --nproc_per_node=8 evaluate.py --out_dir=out/dnt_small --tasks=hellaswag,text --input=README.md
python evaluate.py --init_from=gpt2 --out_dir=out/gpt2_openai --tasks=dyt15   # a model of Hugging Face
python evaluate.py --out_dir=out/dnt_small,out/lns_350m                       # what was found before, side by side

Results are added to evaluation.json in the run directory; a task that is evaluated again is replaced.
"""

from dataclasses import asdict

import nanodnt.run.allocator  # noqa: F401  # isort: skip, before torch

from configurator import configure
from interop.evaluation.answers import describe_counts, list_inputs, mean_entry, open_answers, score_answers
from interop.evaluation.harness import load_tasks, run_task
from interop.evaluation.results import compare_results, read_results, write_results
from interop.evaluation.settings import EvaluateConfig
from interop.evaluation.text import open_text, score_text
from interop.huggingface.read import load_pretrained
from nanodnt.run.directory import run_record
from nanodnt.run.environment import environment
from nanodnt.run.errors import EXPECTED, end_with, report_error
from nanodnt.trained import load_trained


def evaluate_runs(config: EvaluateConfig, env) -> list:
    """Evaluate every run on every task, and write what is found. Returns the lines of a table with the runs side by
    side; all ranks must call it."""
    folders, names = config.folders(), config.task_names()
    # everything that can be wrong is looked at before the work begins
    for folder in folders:
        read_results(folder)
    inputs = list_inputs(config.input) if "answers" in names else []
    if config.init_from:
        runs = {folders[0]: load_pretrained(config.init_from)}
    else:
        runs = {folder: load_trained(folder, config.checkpoint) for folder in folders}
    texts, asked = {}, {}
    for folder, run in runs.items():
        if "text" in names:
            texts[folder] = open_text(config.input, config.overlap, run, env.is_main)
        asked[folder] = open_answers(inputs, config, run, env) if inputs else []
    env.check_same({"contents of the input": [(one.name, one.sha256) for one in sum(asked.values(), [])]})
    in_harness = [name for name in names if name not in ("text", "answers")]
    tasks = load_tasks(in_harness, config, env) if in_harness else []
    record = run_record()
    about = dict(checkpoint=config.init_from or config.checkpoint, device=str(env.device), processes=env.world_size)
    about |= dict(dtype=str(env.dtype).removeprefix("torch."), batch_size=config.batch_size, date=record["started"])
    about |= {key: record[key] for key in ("command", "versions", "git_commit")}
    shown, evaluated = {}, set()

    def record_results(folder: str, run, found: dict) -> None:
        """Write what a task has found at once: a later one may fail."""
        for entry in found.values():
            entry["settings"]["dtype"] = about["dtype"]
        if env.is_main:
            evaluated.update(found)
            shown[folder] = write_results(folder, {t: entry | about | {"step": run.step} for t, entry in found.items()})

    for folder in folders:
        run = runs.pop(folder)
        env.print(f"evaluating {run.source}, step {run.step}")
        model = run.model.to(env.device).set_runtime(compute_dtype=env.dtype)
        if folder in texts:
            entry = score_text(model, texts[folder], config.batch_size, env)
            record_results(folder, run, {f"text {config.input}": entry})
        entries = {}
        for answers in asked.pop(folder):
            entry = score_answers(model, answers, config.max_answer_tokens, config.batch_size, env)
            env.print(f"{answers.name}: {describe_counts(entry)}")
            entries[f"answers {answers.name}"] = entry
            record_results(folder, run, {f"answers {answers.name}": entry})
        if mean := mean_entry(entries):
            record_results(folder, run, {f"answers, mean of {len(entries)}": mean})
        for name, task in tasks:
            record_results(folder, run, run_task(name, task, run, config, env))
    return compare_results(shown, evaluated)


def main() -> int:
    (config,), _ = configure(EvaluateConfig, description=__doc__)
    try:
        config.check()
        if not config.task_names():
            found = {folder: read_results(folder) for folder in config.folders()}
            if missing := [folder for folder, tasks in found.items() if not tasks]:
                raise ValueError(f"nothing was evaluated yet in {', '.join(missing)}: name tasks, as in --tasks=dyt15")
            print("\n".join(compare_results(found)))
            return 0
        with environment(config.device, config.dtype, config.timeout_s) as env:
            env.check_same({**asdict(config), "device": None})
            env.print("\n".join(evaluate_runs(config, env)))
        return 0
    except EXPECTED as e:
        return report_error(e)


if __name__ == "__main__":
    end_with(main)
