"""Tasks of lm-evaluation-harness: what evaluate.py finds of a run, and the harness of its export;
what is refused.

The run is a GPT-2, so that its export is computed by `transformers`' own code, and evaluate.py's by
ours."""

import importlib.util
import os
import subprocess
import sys
from itertools import product

import pytest
import torch

from interop.huggingface.write import write_pretrained
from model import GPT, GPTConfig
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.weights import Trained, load_trained
from support.evaluation import (
    call,
    command,
    keep_caches,
    make_byte_dataset,
    read,
    values,
    write_tasks,
)
from support.runs import ROOT, quick_runs, run
from support.tolerances import LOSS

MISSING = [
    name for name in ("lm_eval", "transformers", "accelerate") if not importlib.util.find_spec(name)
]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{', '.join(MISSING)} not installed: make install-eval"
)
METRICS = {
    "local_choices": ["acc", "acc_norm"],
    "local_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "local_texts": ["exact_match"],
}
NAMES = ",".join(METRICS)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A run of a GPT-2 with large random weights, so that texts differ, that have hardly been
    trained."""
    folder = tmp_path_factory.mktemp("harness")
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, init_std=0.4)
    gpt2 = dict(
        norm="layernorm",
        bias=True,
        pre_norm="both",
        mid_norm="none",
        input_norm=False,
        qk_norm=False,
    )
    how = dict(
        dataset=make_byte_dataset(folder / "data"), max_iters=1, learning_rate=1e-9, min_lr=0
    )
    with quick_runs():
        assert run(out_dir=folder / "run", **how, **gpt2, **sizes) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def exported(out):
    """Its export as GPT-2."""
    trained = load_trained(out, "last.pt")
    assert (
        write_pretrained(trained.model, trained.meta, out.parent / "exported", check=False)[0]
        == "gpt2"
    )
    return out.parent / "exported"


@pytest.fixture(scope="module")
def folder(out, exported):
    """A folder with tasks; their data is cached beside it. Some answers are what the model writes,
    greedily."""
    from transformers import AutoModelForCausalLM

    contexts = [f"<{a}{b}>" for a, b in product("abcdefghijklmnopq", repeat=2)]
    idx = torch.tensor([list(context.encode()) for context in contexts])
    drawn = AutoModelForCausalLM.from_pretrained(exported).generate(
        idx, max_new_tokens=12, do_sample=False
    )
    written = {
        c: ids for c, ids in zip(contexts, drawn[:, 4:].tolist(), strict=True) if max(ids[:2]) < 128
    }
    pairs = product((1, 2), list(written.items())[:2])
    choices = [
        dict(context=c, choices=["a", bytes(ids[:n]).decode()], label=1) for n, (c, ids) in pairs
    ]
    whole = [(context, ids) for context, ids in written.items() if 256 not in ids]
    texts = [
        dict(context=context, answer=bytes(ids).decode(errors="replace"))
        for context, ids in whole[:3]
    ]
    with pytest.MonkeyPatch.context() as patch:
        keep_caches(patch, out.parent)
        yield write_tasks(out.parent / "tasks", ["zzz"], choices, texts)


def harness():
    """The module with our part, which imports lm_eval."""
    return command("import_harness")()


def expected(exported, folder, **how) -> dict:
    """{task: {metric: value}} that the harness finds of the export."""
    lm = harness().HFLM(str(exported), batch_size=3, device="cpu", dtype="float32")
    tasks = harness().find_tasks([*METRICS], str(folder))
    found = harness().simple_evaluate(lm, tasks=[*METRICS], task_manager=tasks, **how)["results"]
    return {
        task: {name: found[task][f"{name},none"] for name in names}
        for task, names in METRICS.items()
    }


def test_the_command_finds_what_the_harness_finds_of_the_export(out, exported, folder):
    wanted = expected(exported, folder)
    flags = dict(out_dir=out, checkpoint="last.pt", task_folder=folder, tasks=NAMES, batch_size=3)
    assert call(**flags) == 0
    for task, metrics in wanted.items():
        assert values(out, task) == pytest.approx(metrics, rel=LOSS), task
    assert 0 < wanted["local_choices"]["acc"] < 1 and 0 < wanted["local_texts"]["exact_match"] < 1
    entry = read(out)["local_choices"]
    assert (entry["documents"], entry["num_fewshot"], entry["lm_eval"]) == (14, 0, "0.4.13")
    assert (
        entry["metrics"]["acc"]["stderr"] > 0
        and "stderr" in read(out)["local_rolling"]["metrics"]["bits_per_byte"]
    )
    assert call(**flags | dict(tasks="local_choices", limit=5, num_fewshot=2)) == 0
    again = read(out)
    assert (again["local_choices"]["num_fewshot"], again["local_choices"]["documents"]) == (2, 5)
    assert (
        again["local_rolling"]["metrics"]["bits_per_byte"]["value"]
        == values(out, "local_rolling")["bits_per_byte"]
    )


def test_without_a_block(out, exported, folder):
    """Against an export of which that block adds nothing."""
    trained = load_trained(out, "last.pt")
    with torch.no_grad():
        for name, p in trained.model.blocks[1].named_parameters():
            p.mul_(0.0 if name.startswith(("attn.f.o", "mlp.f.down")) else 1.0)
    other = exported.with_name("without")
    write_pretrained(trained.model, trained.meta, other, check=False)
    wanted = expected(other, folder, limit=5)
    flags = dict(
        out_dir=out, checkpoint="last.pt", task_folder=folder, tasks=NAMES, limit=5, batch_size=3
    )
    assert call(**flags, without_block=2) == 0
    for task, metrics in wanted.items():
        assert values(out, f"{task} without block 2") == pytest.approx(metrics, rel=LOSS), task


def test_a_tokenizer_without_begin_and_end():
    meta = Tokenizer.meta_for("chars", ["a", "\n"])
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=2)).eval()
    with pytest.raises(ValueError, match="a test .chars. has no token that begins or ends a text"):
        harness().load_model(
            Trained(model, Tokenizer(meta), meta, "a test", 0),
            1,
            torch.device("cpu"),
            torch.float32,
        )


BAD_TASKS = {  # flags, and what the one line says
    "no data": (dict(tasks="bad"), "task bad failed (FileNotFoundError: "),
    "no such folder": (
        dict(task_folder="nowhere"),
        "there is no folder nowhere: task_folder holds YAML files",
    ),
    "too long": (
        dict(gen_kwargs="max_gen_toks=32"),
        "task local_texts failed (AssertionError: Invalid configuration",
    ),
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_bad_tasks_are_refused_in_one_line(name, out, folder, capsys):
    flags, message = BAD_TASKS[name]
    text = (
        (folder / "local_rolling.yaml")
        .read_text()
        .replace(f"{folder}/local_rolling.jsonl", "/no.jsonl")
    )
    (folder / "bad.yaml").write_text(text.replace("task: local_rolling", "task: bad"))
    (out / "evaluation.json").unlink(missing_ok=True)
    flags = dict(task_folder=folder, tasks="local_texts") | flags
    assert call(out_dir=out, checkpoint="last.pt", **flags) == 1
    # beside progress bars
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1 and message in errors[0]
    assert not (out / "evaluation.json").exists()


@pytest.mark.deep
def test_python_evaluate_py(out, folder, tmp_path):
    """As typed, in the root: a task whose code imports the package `evaluate`, and one that nobody
    has."""
    task = (folder / "local_texts.yaml").read_text().replace("local_texts\n", "measured\n")
    (tmp_path / "measured.yaml").write_text(task + "process_results: !function code.measure\n")
    (tmp_path / "code.py").write_text(
        "import evaluate\n\n\ndef measure(doc, results):\n"
        "    is_a_package = hasattr(evaluate, '__path__')\n"
        "    return {'exact_match': float(callable(evaluate.load) and is_a_package)}\n"
    )
    env = os.environ | dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    argv = [
        sys.executable,
        "evaluate.py",
        "--device=cpu",
        f"--out_dir={out}",
        f"--task_folder={tmp_path}",
    ]
    argv.append("--checkpoint=last.pt")
    done = subprocess.run(
        [*argv, "--tasks=measured"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and values(out, "measured") == {"exact_match": 1.0}
    done = subprocess.run(
        [*argv, "--tasks=xylophone"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert (
        done.returncode == 1
        and "error: there is no task 'xylophone': `lm_eval ls tasks` lists" in done.stderr
    )
