"""`evaluate.py --tasks=answers`: against greedy generation, a plain count in float64 and training's
own loss."""

import math
import shutil

import numpy as np
import pytest
import torch

from interop.conversations.template import TEMPLATES
from interop.evaluation.inputs import open_sources
from interop.evaluation.results import mean_entry
from interop.evaluation.scoring import Example, Source, predict
from interop.evaluation.settings import EvaluateConfig
from nanodnt.generate import generate
from nanodnt.weights import load_trained
from support import examples as made
from support.evaluation import EOT, assert_refused, call, make_byte_dataset, read
from support.runs import column, quick_runs, run
from support.tolerances import LOSS

T = 48  # block_size of the runs
WORDS = [
    "ab",
    "face",
    "d",
    "beef",
    "cab",
    "fade",
    "ebb",
    "acc",
    "bad",
    "efda",
    "ca",
    "fff",
    "deaf",
    "cafe",
    "dab",
    "e",
]
CHATS = [  # turns (prompt, answer): some of two and three turns
    *([(word, word.upper())] for word in WORDS),
    *([(a, a.upper()), (b, b.upper())] for a, b in zip(WORDS, WORDS[3:], strict=False)),
    [(word, word.upper()) for word in ("ab", "dada", "c")],
    [("ab", "wrong"), ("d", "D")],
]


def encode(turns) -> tuple:
    """A chat in the template of made datasets, as (ids, marks)."""
    return made.example(*((f"{chr(10) * bool(i)}{p}\n", r) for i, (p, r) in enumerate(turns)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset, its validation chats as records, and two runs: one that keeps documents apart has
    learned a part, one that does not only little. The third has read a text, so it has no
    template."""
    folder = tmp_path_factory.mktemp("answers")
    train = made.shouts(0, 300, 4) + [encode([(word, word.upper())] * 2) for word in WORDS]
    data = made.write_examples(folder / "data", train=train, val=list(map(encode, CHATS)))
    made.write_records(
        folder / "chats.jsonl", [dict(messages=made.chat(*sum(turns, ()))) for turns in CHATS]
    )
    how = dict(
        dataset=data, block_size=T, batch_size=16, eval_tokens=0, log_interval=120, track_interval=0
    )
    with quick_runs():
        for name, doc_mask, n in (("apart", True, 120), ("together", False, 20)):
            assert (
                run(out_dir=folder / name, doc_mask=doc_mask, max_iters=n, eval_interval=n, **how)
                == 0
            )
        how |= dict(dataset=make_byte_dataset(folder / "texts"), max_iters=2, eval_interval=2)
        assert run(out_dir=folder / "base", **how) == 0
    return folder


@pytest.fixture
def runs(folder, tmp_path):
    """The runs without their results."""
    for name in ("apart", "together", "base"):
        shutil.copytree(
            folder / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("evaluation.json", "prev.pt"),
        )
    for name in ("data", "texts", "chats.jsonl"):
        (tmp_path / name).symlink_to(folder / name)
    return tmp_path


@pytest.fixture(scope="module")
def opened(folder):
    """(the model that kept documents apart, the chats as it reads them, of which answers of 4
    tokens are short)."""
    trained = load_trained(folder / "apart", "last.pt")
    config = EvaluateConfig(tasks="answers", input=str(folder / "data"), max_answer_tokens=4)
    (source,) = open_sources(config, trained)
    return trained.model, source


def answers_of(example) -> list:
    """[(where it begins, where it ends)] of the answers of (ids, marks), found token by token."""
    found, start = [], None
    for i, (token, mark) in enumerate(zip(*example, strict=True)):
        start = i if mark == 1 and start is None else start
        if mark == 1 and token == EOT:
            found, start = [*found, (start, i + 1)], None
    return found


# ------------------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize("name", ["apart", "together"])
def test_the_command_against_generation_and_a_plain_count(name, runs):
    """exact_match is what greedy generation writes; the nats are summed chat by chat, token by
    token, in float64; and, with documents kept apart, they are training's own val_loss."""
    model, right, total, nats, n = load_trained(runs / name, "last.pt").model, 0, 0, 0.0, 0
    for ids, marks in map(encode, CHATS):
        for start, end in answers_of((ids, marks)):
            out = generate(model, torch.tensor([ids[:start]]), end - start, temperature=0, stop=EOT)
            right, total = right + (out[0].tolist() == ids[:end]), total + 1
    model = model.double()
    for ids, marks in map(encode, CHATS):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0][0].double().log_softmax(-1)
        counted = [i for i, mark in enumerate(marks) if mark == 1]
        nats, n = nats - sum(logits[i - 1, ids[i]].item() for i in counted), n + len(counted)
    assert name == "together" or 0.1 * total < right < 0.97 * total  # a part is learned

    assert (
        call(out_dir=runs / name, tasks="answers", input=runs / "data", checkpoint="last.pt") == 0
    )
    entry = read(runs / name)[f"answers {runs / 'data'}"]
    share, found = right / total, entry["metrics"]["nats_per_answer_token"]["value"]
    expected = {"value": share, "stderr": math.sqrt(share * (1 - share) / total)}
    assert entry["metrics"]["exact_match"] == pytest.approx(expected, rel=1e-12)
    assert (entry["answers"], entry["short_answers"], entry["examples"]) == (
        total,
        total,
        len(CHATS),
    )
    assert found == pytest.approx(nats / n, rel=LOSS) and entry["answer_tokens"] == n
    loss = list(column(runs / name, "val_loss").values())[-1]
    assert (
        found == pytest.approx(loss, rel=LOSS)
        if name == "apart"
        else abs(found - loss) > 1e-3 * loss
    )


def test_where_answers_end():
    """One may follow the end of another at once; end of text in a prompt ends nothing."""
    targets = np.array([*b"c", EOT, *b"de", EOT, EOT, *b"x", EOT])  # c·  de·  ·  x·
    example = Example(np.array([EOT, *b"ab", EOT, 5]), np.arange(8), targets)
    assert [len(part) for part in Source("", [], {}, eot=EOT).answers(targets, example)] == [
        2,
        3,
        1,
        2,
    ]


@pytest.mark.parametrize("longest", [1, 4, 0])
def test_short_answers_alone_count_for_exact_match(longest, runs, opened, capsys):
    model, source = opened
    right = counted = 0
    for chat in map(encode, CHATS):
        example = next(e for e in source.examples if e.inputs.tolist() == chat[0][:-1])
        ((_, hits),), start = predict(model, [example], 1), 0
        for a, b in answers_of(chat):
            if not longest or b - a <= longest:
                counted, right = counted + 1, right + bool(hits[start : start + b - a].all())
            start += b - a
    data, flags = runs / "data", dict(max_answer_tokens=longest, checkpoint="last.pt")
    assert call(out_dir=runs / "apart", tasks="answers", input=data, **flags) == 0
    entry, out = read(runs / "apart")[f"answers {data}"], capsys.readouterr().out
    assert entry["short_answers"] == counted and entry["settings"]["max_answer_tokens"] == longest
    if longest == 1:  # an answer has a token and end of text
        assert counted == 0 and "exact_match" not in entry["metrics"]
    else:
        expected = {
            "value": right / counted,
            "stderr": np.sqrt(right * (counted - right) / counted**3),
        }
        assert entry["metrics"]["exact_match"] == pytest.approx(expected)
        assert f"max_answer_tokens={longest}" in out


# -------------------------------------------------------------------------------------------- input


def test_records_are_what_their_prepared_dataset_is(runs):
    """The template is the checkpoint's, or else the flag's."""
    file = runs / "chats.jsonl"
    for name in ("data", "chats.jsonl"):
        assert call(out_dir=runs / "apart", tasks="answers", input=runs / name) == 0
    one, other = (
        read(runs / "apart")[f"answers {runs / name}"] for name in ("data", "chats.jsonl")
    )
    assert (
        one["metrics"] == other["metrics"]
        and one["settings"]["sha256"] != other["settings"]["sha256"]
    )
    assert one["settings"]["template"] == other["settings"]["template"] == made.TEMPLATE
    for name in ("apart", "base"):  # the second has none
        assert call(out_dir=runs / name, tasks="answers", input=file, template="plain") == 0
        assert (
            read(runs / name)[f"answers {file}"]["settings"]["template"]["turn"]
            == TEMPLATES["plain"].turn
        )


def test_a_folder_of_files_and_their_mean(runs, capsys):
    """Files in LLM-Adapters' form."""
    tests, names = runs / "raw" / "test", ("boolq", "piqa", "ARC-Easy")
    for i, name in enumerate(names):
        words = [bytes(ids[1 : ids.index(10)]).decode() for ids, _ in made.shouts(i, 5 + i)]
        records = [dict(instruction=w, input="", output=w.upper(), answer=w.upper()) for w in words]
        made.write_records(tests / f"{name}.json", records, array=True)
    (tests / "README.md").write_text("about")
    assert call(out_dir=f"{runs / 'apart'},{runs / 'together'}", tasks="answers", input=tests) == 0
    entries, single = read(runs / "apart"), [f"answers {tests / name}.json" for name in names]
    assert entries.keys() == {*single, "answers, mean of 3"}
    assert [entries[name]["answers"] for name in single] == [5 + i for i in range(3)]
    exact = [entries[name]["metrics"]["exact_match"] for name in single]
    mean = entries["answers, mean of 3"]["metrics"]["exact_match"]
    assert (
        mean["value"] == pytest.approx(np.mean([one["value"] for one in exact]))
        and 0 < mean["value"] < 1
    )
    assert mean["stderr"] == pytest.approx(
        np.sqrt(np.sum([one["stderr"] ** 2 for one in exact])) / 3
    )
    rows = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("answers, mean of 3  exact_match")
    ]
    assert len(rows) == 1 and rows[0].count("±") == 2  # both runs in one row


def test_a_mean_needs_all_of_them():
    entry = dict(metrics={"exact_match": {"value": 0.5, "stderr": 0.1}}, settings=dict(sha256="a"))
    assert mean_entry({"a": entry}) == mean_entry({"a": entry, "b": entry | dict(metrics={})}) == {}


# ---------------------------------------------------------------------------------------- bad input

BAD = {  # flags → what the one line says; TMP is the folder of the runs
    "no input": (
        dict(input=""),
        "the task answers needs --input=FILE, a dataset of examples, or records",
    ),
    "missing file": (dict(input="TMP/no.jsonl"), "dataset 'TMP/no.jsonl' is not prepared (no "),
    "empty folder": (
        dict(input="TMP/nothing"),
        "input TMP/nothing is no .jsonl, .ndjson, .json, .parquet file",
    ),
    "empty file": (dict(input="TMP/empty.jsonl"), "input TMP/empty.jsonl is empty"),
    "no template": (
        dict(out_dir="TMP/base"),
        "TMP/base/best.pt was trained without a template, which",
    ),
    "template of a dataset": (
        dict(input="TMP/data", template="chat"),
        "template is for files of records: the dataset",
    ),
    "a text": (
        dict(input="TMP/texts"),
        "dataset TMP/texts holds a text, without answers: use --tasks=text",
    ),
    "examples as a text": (
        dict(tasks="text", input="TMP/data"),
        "dataset TMP/data holds examples, whose answers are",
    ),
    "another tokenizer": (
        dict(input="TMP/letters"),
        "dataset TMP/letters has another tokenizer (json, 29 tokens)",
    ),
    "no end of text": (
        dict(out_dir="TMP/walker"),
        "the tokenizer of TMP/walker/best.pt (chars) has no end of text",
    ),
    "too long": (
        dict(input="TMP/long.jsonl"),
        "examples of TMP/long.jsonl are longer than 49 tokens, block_size+1",
    ),
    "both tasks": (dict(tasks="answers,text"), "the tasks text and answers read different inputs"),
    "template of a text": (
        dict(tasks="text", template="chat"),
        "template belongs to the task answers: add it",
    ),
}


@pytest.fixture(scope="module")
def bad(folder, dataset, tmp_path_factory):
    """The inputs of BAD."""
    bad = tmp_path_factory.mktemp("bad")
    (bad / "nothing").mkdir()
    (bad / "empty.jsonl").write_text("\n")
    # [end of text] prompt newline answer [end of text]: 49 tokens fit, 50 do not
    lengths = [*[2] * 15, 46, 47, 60]
    made.write_records(
        bad / "long.jsonl", [dict(prompt="a" * (n - 1), response="A") for n in lengths]
    )
    letters = made.starting_tokenizer()
    made.write_examples(
        bad / "letters", letters, train=[([1, 5, 2], [2, 1, 1])], val=[([1, 5, 2], [2, 1, 1])]
    )
    with quick_runs():
        assert run(out_dir=bad / "walker", dataset=dataset, max_iters=1, eval_interval=1) == 0
    return bad


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name, runs, bad, capsys):
    flags, expected = BAD[name]
    for path in bad.iterdir():
        (runs / path.name).symlink_to(path)
    flags = dict(out_dir="TMP/apart", tasks="answers", input="TMP/chats.jsonl") | flags
    assert_refused(capsys, runs, expected, **flags)
