"""evaluate.py for tests: tiny runs on bytes, the command in this process or on several, a folder of
harness tasks.

The command is loaded under another name: `evaluate` is also a package, which tasks of the harness
import."""

import json
import runpy
from pathlib import Path

from nanodnt.data.tokenizer import Tokenizer
from support.runs import ROOT, contents, quick_runs, run, write_ids
from support.runs import call as call_main

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. π ≈ 3,14159; 🙂\n"
EOT = 256


def command(name: str):
    """The function of this name in evaluate.py."""
    return runpy.run_path(str(ROOT / "evaluate.py"))[name]


def call(**flags) -> int:
    """The exit code of evaluate.py in this process."""
    flags = dict(device="cpu", dtype="float32") | flags
    return call_main(command("main"), *(f"--{key}={value}" for key, value in flags.items()))


def read(folder) -> dict:
    """{task: entry} of a run's evaluation.json, read without the code under test."""
    return json.loads((Path(folder) / "evaluation.json").read_text(encoding="utf-8"))["tasks"]


def values(folder, task) -> dict:
    """{metric: value} of a task in a run's evaluation.json."""
    return {name: found["value"] for name, found in read(folder)[task]["metrics"].items()}


def assert_refused(capsys, runs: Path, expected: str, **flags) -> None:
    """The command ends with one line that begins with `expected`, and nothing changes below `runs`,
    which TMP stands for."""
    before = contents(runs)
    capsys.readouterr()
    assert call(**{key: str(value).replace("TMP", str(runs)) for key, value in flags.items()}) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("error: " + expected.replace("TMP", str(runs))) and error.count("\n") == 1
    ), error
    assert contents(runs) == before


def make_byte_dataset(folder: Path) -> Path:
    """A prepared dataset of bytes, documents with end of text between them."""
    documents = [[*TEXT[i % 60 :].encode(), EOT] for i in range(40)]
    splits = {"train": sum(documents, []), "val": sum(documents[:9], [])}
    return write_ids(folder, Tokenizer.meta_for("bytes"), splits)


def make_runs(folder: Path) -> Path:
    """A folder with a dataset of bytes, `data`, two runs trained on it, `a` and `b`, and a text,
    text.txt."""
    data = make_byte_dataset(folder / "data")
    with quick_runs():
        for name, seed in (("a", 1), ("b", 2)):
            steps = dict(max_iters=12, eval_interval=12, eval_tokens=0)
            assert run(out_dir=folder / name, dataset=data, seed=seed, **steps) == 0
    (folder / "text.txt").write_text(TEXT * 3, encoding="utf-8", newline="")
    return folder


# ----------------------------------------------------------------------------- tasks of the harness

HEAD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
GENERATING = """
output_type: generate_until
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: {until}, max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
CONTEXTS = [
    "Question: why? Answer:",
    TEXT[:20],
    TEXT[:70],
    "x",
    TEXT,
    "Trailing spaces  ",
    "1 2 3 4 5 6",
    "zz top",
]


def write_tasks(folder: Path, until=("e", "\n"), choices=(), texts=()) -> Path:
    """A folder with tasks of every kind of request: local_choices, local_rolling, local_texts. Some
    contexts and texts are longer than 32 tokens, the model's block_size. `choices`, `texts`:
    further documents."""
    folder.mkdir(parents=True)
    answers = [[" yes", " no"], ["a", "b", "abc"], [" π", "\n"], ["y", " y", "yy"], ["!", "?"]]
    made = [
        dict(context=c, choices=answers[i % 5], label=i % 2)
        for i, c in enumerate([*CONTEXTS, "", ""])
    ]
    rolling = [
        dict(text=text) for text in (TEXT, "short", TEXT[:32], TEXT[:33], TEXT * 2, "a b c d")
    ]
    asked = [dict(context=context, answer=" yes") for context in CONTEXTS]
    for name, yaml, documents in (
        ("local_choices", CHOICES, [*made, *choices]),
        ("local_rolling", ROLLING, rolling),
        ("local_texts", GENERATING, [*asked, *texts]),
    ):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(document) + "\n" for document in documents))
        text = (HEAD + yaml).format(name=name, file=file, until=json.dumps(list(until)))
        (folder / f"{name}.yaml").write_text(text)
    return folder


def keep_caches(patch, folder: Path) -> None:
    """Data of tasks is cached in `folder`, the hub is not asked, and the harness does not describe
    the machine, which takes seconds."""
    import datasets
    import huggingface_hub

    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
