"""`evaluate.py`: texts and datasets against a plain loop and training's own loss, its results, and
what it refuses."""

import importlib.util
import json
import math
import shutil

import numpy as np
import pytest
import torch

from interop.evaluation.inputs import windows
from interop.evaluation.results import compare_results, read_results, suite_means, write_results
from interop.evaluation.settings import SUITES, EvaluateConfig
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.weights import load_trained
from support.evaluation import EOT, TEXT, assert_refused, call, make_runs, read, values
from support.examples import write_records
from support.peers import chatml_tokenizer
from support.runs import column, contents, quick_runs, run
from support.tolerances import LOSS

T = 32  # block_size of the runs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("evaluation"))


@pytest.fixture
def runs(made, tmp_path):
    """The runs without their results."""
    for name in ("a", "b"):
        shutil.copytree(
            made / name, tmp_path / name, ignore=shutil.ignore_patterns("evaluation.json")
        )
    shutil.copy(made / "text.txt", tmp_path)
    (tmp_path / "data").symlink_to(made / "data")
    return tmp_path


# -------------------------------------------------------------------------------------------- texts


def plain_loop(model, ids, overlap) -> float:
    """Nats of ids[1:], each token's logarithm taken alone, windows one after another, in
    float64."""
    model, nats, scored, start = model.double(), 0.0, 0, 0
    while scored < len(ids) - 1:
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : start + T]]))[0][0].double()
        for position, row in enumerate(logits, start + 1):
            if scored < position < len(ids):
                nats -= (row[ids[position]] - row.logsumexp(0)).item()
        scored, start = start + T, start + T - overlap
    return nats


@pytest.mark.parametrize("overlap, batch_size", [(0, 16), (5, 3)])
def test_a_text_equals_a_plain_loop(runs, overlap, batch_size):
    file = runs / "text.txt"
    assert (
        call(out_dir=runs / "a", tasks="text", input=file, overlap=overlap, batch_size=batch_size)
        == 0
    )
    ids = [EOT, *file.read_bytes()]
    nats = plain_loop(load_trained(runs / "a", "best.pt").model, ids, overlap)
    found, n = values(runs / "a", f"text {file}"), len(ids) - 1
    assert found["nats_per_token"] == pytest.approx(nats / n, rel=LOSS)
    # a byte is a token
    assert found["bits_per_byte"] == pytest.approx(nats / n / math.log(2), rel=LOSS)
    assert found["perplexity"] == pytest.approx(math.exp(nats / n), rel=LOSS * nats / n)
    assert read(runs / "a")[f"text {file}"]["tokens"] == n


@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_every_token_is_a_target_once(block_size):
    for overlap in range(block_size):
        for n in range(1, 30):
            seen = []
            for i, (inputs, places, targets) in enumerate(
                windows(np.arange(n + 1) + 100, block_size, overlap)
            ):
                assert len(inputs) <= block_size and (inputs[places] == targets - 1).all()
                # the context before the first target is what is repeated
                assert places[0] == (overlap if i else 0)
                seen += targets.tolist()
            assert seen == list(range(101, 101 + n))


def test_a_dataset_has_training_s_loss(runs):
    """With training's doc_mask, and with experts; a file is one document whatever the run was
    trained with."""
    data, file, out = runs / "data", runs / "text.txt", runs / "apart"
    ids = np.fromfile(data / "val.bin", "<u2")
    targets = ids[1 : 1 + (len(ids) - 1) // T * T]
    n_bytes = int((targets != EOT).sum())
    experts = dict(n_expert=4, n_ff=16, mlp="swiglu", balance="bias", n_expert_shared=1)
    with quick_runs():
        how = dict(doc_mask=True, max_iters=12, eval_interval=12, eval_tokens=0)
        assert run(out_dir=out, dataset=data, **how, **experts) == 0
    for folder in (runs / "a", out):
        for name in (data, file):
            assert (
                call(out_dir=folder, tasks="text", input=name, checkpoint="last.pt", batch_size=5)
                == 0
            )
        found, entry = values(folder, f"text {data}"), read(folder)[f"text {data}"]
        assert found["nats_per_token"] == pytest.approx(column(folder, "val_loss")[12], rel=LOSS)
        assert (entry["tokens"], entry["bytes"], entry["step"]) == (len(targets), n_bytes, 12)
        bits = found["nats_per_token"] * len(targets) / math.log(2) / n_bytes
        assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
        nats = plain_loop(load_trained(folder, "last.pt").model, [EOT, *file.read_bytes()], 0)
        assert values(folder, f"text {file}")["nats_per_token"] == pytest.approx(
            nats / file.stat().st_size, rel=LOSS
        )
    assert (
        load_trained(out, "last.pt").doc_mask and not load_trained(runs / "a", "last.pt").doc_mask
    )
    rows = compare_results({folder: read(folder) for folder in (runs / "a", out)})
    assert sum(f"text {data}, doc_mask=True" in row for row in rows) == 3  # rows of their own
    assert sum(f"text {file}  " in row and "-" not in row.split() for row in rows) == 3


@pytest.mark.parametrize("kind", ["bytes", "chars", "gpt2_4096", "json"])
def test_bytes_of_tokens(kind):
    """Of any stretch of whole characters; end of text has none."""
    if kind == "json":
        tokenizer = Tokenizer(chatml_tokenizer())
    else:
        tokenizer = Tokenizer(Tokenizer.meta_for(kind, sorted(set(TEXT))))
    end = [] if tokenizer.eot is None else [tokenizer.eot]
    for text in (TEXT, TEXT[7:50], "ä", ""):
        ids = np.array([*end, *tokenizer.encode(text), *end, *tokenizer.encode(TEXT), *end, *end])
        assert tokenizer.count_bytes(ids) == len((text + TEXT).encode())


# ------------------------------------------------------------------------------------------ results


def test_results_are_added_and_replaced(runs, capsys):
    """Side by side in a table, which is shown again without evaluating."""
    both = f"{runs / 'a'}, {runs / 'b'}"
    text = f"text {runs / 'text.txt'}"
    data = f"text {runs / 'data'}"
    assert call(out_dir=both, tasks="text", input=runs / "text.txt") == 0
    first = {name: values(runs / name, text) for name in ("a", "b")}
    assert first["a"]["nats_per_token"] != first["b"]["nats_per_token"]
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if "bits_per_byte" in line)
    assert row.split()[-2:] == [f"{first[name]['bits_per_byte']:.4f}" for name in ("a", "b")]
    assert call(out_dir=runs / "a", tasks="text", input=runs / "data") == 0
    assert values(runs / "a", text) == first["a"] and set(read(runs / "a")) == {text, data}
    assert call(out_dir=runs / "a", tasks="text", input=runs / "text.txt", overlap=8) == 0
    assert values(runs / "a", text) != first["a"] and set(read(runs / "a")) == {text, data}
    entry = read(runs / "a")[text]
    assert entry["settings"]["overlap"] == 8 and entry["step"] == 12 and entry["device"] == "cpu"
    assert entry.keys() >= {"checkpoint", "versions", "date", "dtype", "batch_size"}
    before = {name: contents(runs / name) for name in ("a", "b")}
    capsys.readouterr()
    assert call(out_dir=both) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "bits_per_byte" in line]
    # overlap 8, data; without overlap
    assert [row.split()[-1] == "-" for row in rows] == [True, True, False]
    assert "overlap=8" in rows[0] or "overlap=8" in rows[1]
    assert {name: contents(runs / name) for name in ("a", "b")} == before


def test_without_a_block_is_a_model_whose_block_adds_nothing(runs):
    """With LNS, where a block that is left keeps its own 1/√ℓ; a text and answers; beside the whole
    model."""
    out, other, records = runs / "a", runs / "zeroed", runs / "records.json"
    write_records(
        records,
        [dict(prompt="π?", response="Zwölf!"), dict(prompt="z", response="a b")],
        array=True,
    )
    checkpoint = torch.load(out / "best.pt")
    checkpoint["model_config"] |= dict(lns="branch")
    torch.save(checkpoint, out / "best.pt")
    work = (
        dict(tasks="text", input=runs / "text.txt"),
        dict(tasks="answers", input=records, template="plain"),
    )
    for flags in work:
        assert call(out_dir=out, **flags) == 0
    whole = read(out)
    for flags in work:
        assert call(out_dir=out, **flags, without_block="all") == 0
    found = read(out)
    assert {task: found[task] for task in whole} == whole
    assert set(found) == {*whole, *(f"{task} without block {i}" for task in whole for i in (1, 2))}
    other.mkdir()
    for name in ("attn.f.o.weight", "mlp.f.down.weight"):
        checkpoint["model"][f"blocks.0.{name}"].zero_()
    torch.save(checkpoint, other / "best.pt")
    for flags, task in zip(work, whole, strict=True):
        assert call(out_dir=other, **flags) == 0
        wanted = values(other, task)
        assert values(out, f"{task} without block 1") == pytest.approx(wanted, rel=LOSS)
        assert abs(list(wanted.values())[0] / list(values(out, task).values())[0] - 1) > 1e-3


def entry_of(value=0.25, metric="acc", step=7, **settings) -> dict:
    found = {metric: {"value": value, "stderr": 0.01}}
    return dict(
        metrics=found,
        settings=dict(num_fewshot=None, limit=0) | settings,
        checkpoint="best.pt",
        step=step,
    )


def test_the_mean_of_a_list_of_tasks():
    suite = SUITES["dyt15"]
    eight = "boolq piqa social_iqa hellaswag winogrande arc_easy arc_challenge openbookqa"
    assert EvaluateConfig(tasks="text, commonsense8,boolq").task_names() == ["text", *eight.split()]
    assert len(suite) == 15 and {task for task, metric in suite.items() if metric != "acc"} == {
        "record"
    }
    tasks = {task: entry_of(i / 100, metric) for i, (task, metric) in enumerate(suite.items())}
    assert suite_means(tasks)["dyt15"]["metrics"]["mean of 15 [I]"]["value"] == pytest.approx(0.07)
    last = compare_results({"a": tasks, "b": {}})[-1]
    assert last.startswith("dyt15  mean of 15 [I]") and last.split()[-2:] == ["0.0700", "-"]
    for other in (entry_of(step=8), entry_of(limit=5), entry_of(metric="f1"), entry_of(None)):
        assert suite_means(tasks | dict(wic=other)) == {}


def test_other_settings_have_a_row_of_their_own():
    runs = {"a": {"wic": entry_of(0.5)}, "b": {"wic": entry_of(0.75, limit=10, num_fewshot=5)}}
    _, one, other = compare_results(runs)
    assert one.split() == ["wic", "acc", "0.5000", "±", "0.0100", "-"]
    assert other.split() == [
        "wic,",
        "num_fewshot=5,",
        "limit=10",
        "acc",
        "-",
        "0.7500",
        "±",
        "0.0100",
    ]
    # the file was changed
    files = {name: {"text f": entry_of(metric="bits_per_byte", sha256=name)} for name in "ab"}
    _, one, other = compare_results(files)
    assert "sha256" in one and "sha256" in other and one.split()[-1] == "-"


def test_what_is_not_finite_is_kept_as_null(tmp_path):
    write_results(
        tmp_path, {"t": entry_of(math.nan)}, "", dict(dtype="float32", step=1, checkpoint="best.pt")
    )
    text = (tmp_path / "evaluation.json").read_text()
    assert "NaN" not in text and json.loads(text)["tasks"]["t"]["metrics"]["acc"]["value"] is None
    assert "not finite" in "".join(compare_results({"a": read_results(tmp_path)}))


# ---------------------------------------------------------------------------------------- bad input

BAD = {  # flags → what the one line says; TMP is the folder of the runs
    "no such run": (dict(out_dir="TMP/none"), "there is no checkpoint TMP/none/best.pt"),
    "a file for results": (
        dict(out_dir="TMP/text.txt/x", init_from="x"),
        "cannot write to TMP/text.txt/x (",
    ),
    "no input": (dict(input=""), "the task text needs --input=FILE"),
    "input without text": (
        dict(tasks="wic"),
        "input belongs to the tasks text and answers: add one",
    ),
    "missing file": (
        dict(input="TMP/no.txt"),
        "input TMP/no.txt is not readable (No such file or directory)",
    ),
    "empty file": (dict(input="TMP/empty.txt"), "input TMP/empty.txt is empty"),
    "records": (
        dict(input="TMP/records.jsonl"),
        "input TMP/records.jsonl is a file of records, not one text: prepare",
    ),
    "another tokenizer": (
        dict(input="TMP/walk"),
        "dataset TMP/walk has another tokenizer (chars, 50 tokens)",
    ),
    "overlap of a dataset": (dict(input="TMP/data", overlap=1), "overlap=1 is for text files"),
    "overlap too large": (
        dict(overlap=32),
        "overlap=32 must be below TMP/a/best.pt's block_size=32",
    ),
    "damaged results": (
        dict(out_dir="TMP/a,TMP/bad"),
        "TMP/bad/evaluation.json is damaged (no tasks: JSON",
    ),
    "wrong results": (
        dict(out_dir="TMP/wrong"),
        "TMP/wrong/evaluation.json is damaged (wic: KeyError)",
    ),
    "init_from, two folders": (
        dict(out_dir="TMP/a,TMP/b", init_from="gpt2"),
        "init_from is one model, so out_dir",
    ),
    "init_from, a run": (
        dict(init_from="gpt2"),
        "TMP/a holds a run of its own: name another --out_dir",
    ),
    "no such block": (
        dict(without_block=0),
        "without_block=0 must be one of the blocks 1 to 2 of TMP/a/best.pt",
    ),
    "a block and no task": (
        dict(tasks="", input="", without_block=1),
        "without_block=1 must be left out where there",
    ),
    "nothing to show": (dict(tasks="", input=""), "nothing was evaluated yet in TMP/a"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name, runs, dataset, capsys):
    flags, expected = BAD[name]
    (runs / "empty.txt").touch()
    (runs / "records.jsonl").write_text('{"text": "a"}')
    (runs / "walk").symlink_to(dataset)
    for folder, content in (
        ("bad", "{"),
        ("wrong", '{"tasks": {"wic": {"metrics": {"acc": 0.5}}}}'),
    ):
        shutil.copytree(runs / "a", runs / folder)
        (runs / folder / "evaluation.json").write_text(content)
    assert_refused(
        capsys, runs, expected, **dict(out_dir="TMP/a", tasks="text", input="TMP/text.txt") | flags
    )


def test_an_alphabet_that_has_nothing_to_begin_with(made, dataset, tmp_path, capsys):
    with quick_runs():
        assert (
            run(
                out_dir=tmp_path / "c", dataset=dataset, max_iters=2, eval_interval=2, eval_tokens=0
            )
            == 0
        )
    assert call(out_dir=tmp_path / "c", tasks="text", input=made / "text.txt") == 1
    assert "neither end of text nor newline" in capsys.readouterr().err


def test_without_the_harness(runs, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a)
    )
    assert call(out_dir=runs / "a", tasks="text,wic", input=runs / "text.txt") == 1
    words = (
        "error: every task but text and answers needs lm-evaluation-harness: make install-eval\n"
    )
    assert capsys.readouterr().err == words
    assert not (runs / "a" / "evaluation.json").exists()


def test_torchrun_is_refused(runs, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = "evaluations run in one process: start evaluate.py with python, not with torchrun"
    assert_refused(capsys, runs, expected, out_dir="TMP/a", tasks="text", input="TMP/text.txt")
