"""Tasks of lm-evaluation-harness: our model for it against the harness's own for transformers, and what is refused.

A GPT with random weights is evaluated as it is in memory, and its export by HFLM, the harness's own model."""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from interop.evaluation.settings import EvaluateConfig
from interop.huggingface.write import write_pretrained
from model import GPT, GPTConfig
from nanodnt.data.tokenizer import Tokenizer, json_meta
from nanodnt.run.environment import Env
from nanodnt.weights import Trained, load_trained
from support.evaluation import (
    CONTEXTS,
    HEAD,
    ROLLING,
    TEXT,
    assert_refused,
    call,
    command,
    keep_caches,
    make_runs,
    read,
    values,
    write_tasks,
)
from support.runs import ROOT

MISSING = [name for name in ("lm_eval", "transformers", "accelerate") if not importlib.util.find_spec(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: make install-eval")
METRICS = {
    "local_choices": ["acc", "acc_norm"],
    "local_rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
    "local_texts": ["exact_match"],
}
NAMES = list(METRICS)


@pytest.fixture(scope="module")
def ours():
    """A GPT with random weights, large ones, so that texts differ: with this seed some end with end of text, and some
    repeat a letter."""
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257, init_std=0.4)
    return GPT(GPTConfig(**sizes, norm="layernorm", norm_eps=1e-5, bias=True), seed=2).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory, ours):
    """Its export, loaded by `transformers`: (model, tokenizer)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("export") / "it"
    assert write_pretrained(ours, Tokenizer.meta_for("bytes"), folder, check=False)[0] == "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(TEXT) == list(TEXT.encode()) and tokenizer.eos_token_id == 256
    return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


@pytest.fixture(scope="module")
def greedy(exported) -> dict:
    """{context: what transformers' model writes, greedily, after it: 12 token ids}, for many contexts of 4 bytes."""
    letters = "abcdefghijklmnopq"
    contexts = [f"<{a}{b}>" for a in letters for b in letters]
    idx = torch.tensor([list(context.encode()) for context in contexts])
    out = exported[0].generate(idx, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=256)
    return dict(zip(contexts, out[:, 4:].tolist(), strict=True))


@pytest.fixture(scope="module")
def until(greedy):
    """A character that stands in the middle of a text."""
    return next(chr(ids[5]) for ids in greedy.values() if 97 <= ids[5] <= 122 and ids[5] not in ids[:5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, greedy, until):
    """A folder with tasks; their data is cached beside it. Some answers are what the model writes, some texts end with
    end of text, some with `until`."""
    folder = tmp_path_factory.mktemp("harness")
    written = {context: ids for context, ids in greedy.items() if max(ids[:2]) < 128}
    pairs = product((1, 2), list(written.items())[:2])
    choices = [dict(context=c, choices=["a", bytes(ids[:n]).decode()], label=1) for n, (c, ids) in pairs]
    ends = [c for c, ids in greedy.items() if 256 in ids[2:] and set(ids[ids.index(256) :]) != {256}][:3]
    ends += [context for context, ids in greedy.items() if ord(until) in ids[2:8]][:3]
    texts = [dict(context=c, answer=bytes(i for i in greedy[c] if i < 256).decode(errors="replace")) for c in ends]
    with pytest.MonkeyPatch.context() as patch:
        keep_caches(patch, folder)
        yield write_tasks(folder / "tasks", [until], choices, texts)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def runs(made):
    """Two runs, without results of the test before."""
    for file in made.glob("*/evaluation.json"):
        file.unlink()
    return made


ENV = Env(0, 1, torch.device("cpu"), torch.float32, distributed=False)


@cache
def harness():
    """The module with our part, which imports lm_eval."""
    return command("import_harness")()


def harness_model(ours, meta=None, batch_size=3):
    """Our model of the harness, around `ours`."""
    meta = meta or Tokenizer.meta_for("bytes")
    return harness().HarnessModel(Trained(ours, Tokenizer(meta), meta, "a test", 0), ENV, batch_size)


def evaluate(lm, folder, **how) -> dict:
    """What the harness finds with a model on the tasks in `folder`."""
    tasks = [task for _, task in harness().load_tasks(NAMES, EvaluateConfig(task_folder=str(folder)), ENV)]
    with harness().quiet():
        manager = harness().TaskManager(include_defaults=False)
        return harness().simple_evaluate(lm, tasks=tasks, task_manager=manager, **how)


def answers(found) -> dict:
    """{(task, document): [the model's answer to each of its requests]}."""
    return {
        (task, sample["doc_id"]): [answer for (answer,) in sample["resps"]]
        for task, samples in found["samples"].items()
        for sample in samples
    }


@pytest.fixture(scope="module")
def expected(folder, exported):
    """What the harness finds with its own model."""
    return evaluate(harness().HFLM(pretrained=exported[0], tokenizer=exported[1], batch_size=1, device="cpu"), folder)


@pytest.mark.parametrize("batch_size", [3, 16])
def test_every_answer_is_the_hf_model_s(batch_size, folder, ours, expected):
    """Log-probabilities, whether the text is the greedy one, and what is written; and so the metrics."""
    found = evaluate(harness_model(ours, batch_size=batch_size), folder)
    expected_answers, answered = answers(expected), answers(found)
    assert expected_answers.keys() == answered.keys() and len(answered) == 14 + 6 + 14
    for key, theirs in expected_answers.items():
        for one, other in zip(theirs, answered[key], strict=True):
            if key[0] == "local_choices":
                assert other == (pytest.approx(one[0], rel=1e-6, abs=1e-4), one[1]), key
            else:
                assert other == (one if key[0] == "local_texts" else pytest.approx(one, rel=1e-6, abs=1e-4)), key
    for task, theirs in expected["results"].items():
        ours, theirs = harness().metrics_of(found["results"][task]), harness().metrics_of(theirs)
        assert list(ours) == list(theirs) == METRICS[task]
        for name in theirs:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (task, name)


def test_the_cases_are_of_every_kind(expected, until):
    """Both values of is_greedy; texts that end before 12 tokens, and of 12."""
    found = answers(expected)
    assert {is_greedy for key, a in found.items() if key[0] == "local_choices" for _, is_greedy in a} == {True, False}
    texts = [sample["resps"][0][0] for sample in expected["samples"]["local_texts"]]
    lengths = [len(text.encode(errors="replace")) for text in texts]
    assert min(lengths) < 12 <= max(lengths) and until not in "".join(texts)


# ------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_what_the_harness_finds(runs, folder, capsys):
    trained = load_trained(runs / "a", "best.pt")
    direct = evaluate(harness_model(trained.model, batch_size=4), folder, limit=5)["results"]
    capsys.readouterr()
    flags = dict(tasks="text,local_texts, local_rolling,local_choices", input=runs / "text.txt", limit=5, batch_size=3)
    assert call(out_dir=f"{runs / 'a'},{runs / 'b'}", task_folder=folder, **flags) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no bars, notes or warnings of the harness
    entries = read(runs / "a")
    assert set(entries) == {f"text {runs / 'text.txt'}", *NAMES}
    for name in NAMES:
        wanted = {metric: direct[name][f"{metric},none"] for metric in METRICS[name]}
        assert values(runs / "a", name) == pytest.approx(wanted, rel=1e-5)
    entry = entries["local_choices"]
    assert (entry["documents"], entry["num_fewshot"], entry["settings"]["limit"]) == (5, 0, 5)
    assert entry["metrics"]["acc"]["stderr"] == pytest.approx(direct["local_choices"]["acc_stderr,none"])
    assert entry["lm_eval"] == "0.4.13" and entries["local_rolling"]["metrics"]["bits_per_byte"]["stderr"] is None
    (row,) = (line for line in out.splitlines() if line.startswith("local_rolling, first 5  bits_per_byte"))
    assert row.split()[-2:] == [f"{values(runs / name, 'local_rolling')['bits_per_byte']:,.4f}" for name in "ab"]
    assert call(out_dir=runs / "a", tasks="local_choices", task_folder=folder, num_fewshot=2) == 0
    again = read(runs / "a")
    assert (again["local_choices"]["num_fewshot"], again["local_choices"]["documents"]) == (2, 14)
    assert again["local_rolling"] == entries["local_rolling"]

    assert call(out_dir=runs / "a", tasks=",".join(NAMES), task_folder=folder, limit=5, without_block=2) == 0
    with torch.no_grad():
        trained.model.blocks[1].attn.f.o.weight.zero_()
        trained.model.blocks[1].mlp.f.down.weight.zero_()
    direct = evaluate(harness_model(trained.model, batch_size=4), folder, limit=5)["results"]
    for name in NAMES:
        wanted = {metric: direct[name][f"{metric},none"] for metric in METRICS[name]}
        assert values(runs / "a", f"{name} without block 2") == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("template", [True, False])
def test_texts_begin_as_the_tokenizer_says(ours, template):
    """With <s> where its template has it; a text without context follows the <s> that it names in any case."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, []))
    made.add_special_tokens(["<s>", "</s>"])
    if template:
        made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    lm = harness_model(ours, json_meta(made.to_str(), "</s>", "<s>"))
    assert lm.tok_encode("ab") == [0] * template + [2, 3] and lm.tok_encode("ab", add_special_tokens=False) == [2, 3]
    assert (lm.prefix_token_id, lm.eot_token_id) == (0, 1)


def test_settings_of_generation(ours):
    """Greedy, or drawn from torch's seed; as long as asked for, half of the context where nothing is asked for."""
    lm = harness_model(ours)

    def texts(seed=1, **gen_kwargs) -> list:
        torch.manual_seed(seed)
        given = dict(until=["zzz"], max_gen_toks=8, do_sample=False) | gen_kwargs
        return lm.generate_until([SimpleNamespace(args=(context, given)) for context in CONTEXTS[:3]])

    greedy, drawn = texts(), dict(do_sample=True, temperature=3.0)
    assert texts(**drawn) == texts(**drawn) != greedy and texts(seed=2, **drawn) != texts(**drawn)
    assert texts(top_k=1, **drawn) == greedy
    assert {len(text) for text in texts(max_gen_toks=1)} == {1}
    assert lm.max_gen_toks == 16 and texts(max_gen_toks=None) == texts(max_gen_toks=16)
    with pytest.raises(ValueError, match="the task generates 32 tokens, and block_size=32 has no room"):
        texts(max_gen_toks=32)


def test_a_tokenizer_without_begin_and_end(ours):
    with pytest.raises(ValueError, match="a test .chars. has no token that begins or ends a text"):
        harness_model(ours, Tokenizer.meta_for("chars", ["a", "\n"]))


# --------------------------------------------------------------------------------------------------- what can go wrong


def test_the_package_evaluate_is_not_our_command(monkeypatch):
    """Although the root comes first, as under `python evaluate.py`. Files of ours are found as before."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)  # another test may have imported our command
    assert importlib.util.find_spec("evaluate").origin == str(ROOT / "evaluate.py")
    command("import_harness")()
    assert importlib.util.find_spec("evaluate").origin.endswith("site-packages/evaluate/__init__.py")
    assert importlib.util.find_spec("model").origin == str(ROOT / "model.py")


BAD_TASKS = {  # (the YAML of a task that is added, what the one line says); TASKS is the folder
    "hub": ("task: hub\ndataset_path: nobody/nothing", "task hub: its data could not be fetched ("),
    "gone": ((HEAD + ROLLING).format(name="gone", file="/no.jsonl"), "task gone could not be loaded (FileNotFoundErr"),
    "broken": ("task: broken\ntest_split: [}", "there is no task 'broken'"),
    "local_choice": ("", "there is no task 'local_choice': did you mean local_choices?"),
    "xylophone": ("", "there is no task 'xylophone': lm-evaluation-harness lists them: lm_eval ls tasks"),
    "nowhere": (None, "there is no folder TASKS: task_folder holds YAML files"),
}


@pytest.mark.parametrize("name", BAD_TASKS)
def test_bad_tasks_are_refused_in_one_line(name, runs, folder, tmp_path, monkeypatch, capsys):
    class OwnTasks(harness().TaskManager):
        """Without the harness's 14,000 files, which take seconds to read."""

        def __init__(self, include_path=None, include_defaults=True):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(harness(), "TaskManager", OwnTasks)
    yaml, message = BAD_TASKS[name]
    tasks = tmp_path / "tasks"
    if yaml is not None:
        shutil.copytree(folder, tasks)
        (tasks / "bad.yaml").write_text(yaml or "task: another\n")
    flags = dict(out_dir=runs / "a", tasks=f"text,{name}", input=runs / "text.txt", task_folder=tasks)
    assert_refused(capsys, runs, message.replace("TASKS", str(tasks)), **flags)


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(answers, monkeypatch, capsys):
    import datasets
    import huggingface_hub

    asked = []

    def head(url, timeout):
        asked.append(url)
        if not answers:
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: SimpleNamespace(head=head))
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    for _ in range(2):
        harness().go_offline_if_cut_off(ENV)
    assert datasets.config.HF_HUB_OFFLINE == huggingface_hub.constants.HF_HUB_OFFLINE == (not answers)
    assert len(asked) == 1 + answers
    assert capsys.readouterr().out.count("does not answer") == (not answers)


def test_too_few_documents_for_the_processes(folder):
    env = Env(0, 7, torch.device("cpu"), torch.float32, distributed=False)
    with pytest.raises(ValueError, match="task local_rolling: 6 documents are too few for 7 processes"):
        harness().load_tasks(["local_rolling"], EvaluateConfig(task_folder=str(folder)), env)


@pytest.mark.deep
def test_python_evaluate_py(runs, folder, tmp_path):
    """As typed, in the root: a task whose code imports the package `evaluate`."""
    task = (folder / "local_texts.yaml").read_text().replace("local_texts\n", "measured\n")
    (tmp_path / "measured.yaml").write_text(task + "process_results: !function code.measure\n")
    (tmp_path / "code.py").write_text(
        "import evaluate\n\n\ndef measure(doc, results):\n"
        "    return {'exact_match': float(callable(evaluate.load) and hasattr(evaluate, '__path__'))}\n"
    )
    env = os.environ | dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    argv = [sys.executable, "evaluate.py", "--device=cpu", f"--out_dir={runs / 'a'}", "--tasks=measured"]
    argv.append(f"--task_folder={tmp_path}")
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and values(runs / "a", "measured") == {"exact_match": 1.0}
