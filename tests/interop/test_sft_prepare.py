"""Records to datasets of examples: forms, splits, lengths, marks, downloads, and what bad input
gets told."""

import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from interop.conversations.records import conversations, messages_of
from interop.conversations.template import TEMPLATES, template_of
from nanodnt.data import load_meta
from support.examples import starting_tokenizer, write_records
from support.prepared import (
    assert_refused,
    error_of,
    ids_of,
    load_script,
    open_prepared,
    use_other_home,
)
from support.runs import ROOT, contents

sft, commonsense = map(load_script, ("sft", "commonsense170k"))
PAIRS = [(f"What is {i} + {i}?", f"It is {2 * i}.") for i in range(40)]
RECORDS = [{"prompt": prompt, "response": response} for prompt, response in PAIRS]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data/ folder for the scripts to write to."""
    monkeypatch.setattr(commonsense, "DATA", tmp_path / "data")
    return use_other_home(tmp_path / "data", monkeypatch)


def flags(path, *more, tokenizer="bytes", name="mine"):
    return f"--input={path}", f"--tokenizer={tokenizer}", f"--name={name}", *more


def run(path, *more, **values):
    sft.main(flags(path, *more, **values))


def examples_of(folder, split):
    """[(ids, marks)] of the examples in a split."""
    ids, marks = ids_of(folder, split), np.fromfile(folder / f"{split}.marks", np.uint8)
    starts = np.flatnonzero(marks == 2)
    assert len(ids) == len(marks) and starts[0] == 0
    cut = (np.split(values, starts[1:]) for values in (ids, marks))
    return [(i.tolist(), m.tolist()) for i, m in zip(*cut, strict=True)]


def texts_of(folder, split):
    """[(what stands before the first answer, that answer)] of the examples of bytes in a split."""
    found = []
    for ids, marks in examples_of(folder, split):
        first = marks.index(1)
        assert ids[0] == 256 == ids[-1] and 0 not in marks[first:]
        found.append((bytes(ids[1:first]).decode(), bytes(ids[first:-1]).decode()))
    return found


# ---------------------------------------------------------------------------------- what is written


def test_a_dataset_of_examples(home, tmp_path, capsys):
    run(write_records(tmp_path / "pairs.jsonl", RECORDS), "--val_fraction=0.2")
    said, folder = capsys.readouterr().out, home / "mine"
    train, val = texts_of(folder, "train"), texts_of(folder, "val")
    expected = [(f"User: {prompt}\nAssistant:\n", response) for prompt, response in PAIRS]
    digests = [hashlib.sha256(f"pairs.jsonl, {n}".encode()).hexdigest() for n in range(1, 41)]
    held_out = [int(digest[:12], 16) / 16**12 < 0.2 for digest in digests]
    assert train == [e for e, out in zip(expected, held_out, strict=True) if not out]
    assert (
        val == [e for e, out in zip(expected, held_out, strict=True) if out] and 3 <= len(val) <= 14
    )

    meta = load_meta("mine")
    assert (meta["kind"], meta["tokenizer"], meta["dtype"]) == ("examples", "bytes", "uint16")
    assert meta["source"] == "pairs.jsonl (40 examples)" and template_of(meta) == TEMPLATES["chat"]
    tokens = answers = 0
    for split, texts in (("train", train), ("val", val)):
        part, lengths = meta["splits"][split], [1 + len(p) + len(r) + 1 for p, r in texts]
        assert (
            part["tokens"] == sum(lengths)
            and part["examples"] == len(texts)
            and part["max_id"] == 256
        )
        assert part["longest"] == max(lengths) and part["answer_tokens"] == sum(
            len(r) + 1 for _, r in texts
        )
        tokens, answers = tokens + sum(lengths), answers + part["answer_tokens"]
    assert set(contents(folder)) == {
        "train.bin",
        "train.marks",
        "val.bin",
        "val.marks",
        "meta.json",
    }
    assert (
        f"train {len(train)} examples" in said
        and f"{answers / tokens:.1%} of the tokens count in the loss" in said
    )
    train = "python train.py config/sft/example.py --init_from=auto:out/quickstart"
    assert f"next: {train} --out_dir=out/mine --dataset=mine\n" in said


@pytest.mark.parametrize("start", [True, False])
def test_a_tokenizer_of_hugging_face(start, home, tmp_path):
    meta = starting_tokenizer(start)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text(meta["json"])
    (tmp_path / "model/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    path = write_records(tmp_path / "a.jsonl", [{"prompt": "ab", "response": "c"}] * 2)
    run(path, "--template=chatml", tokenizer=tmp_path / "model")
    begin = [0, 1] if start else [2]
    # what this vocabulary has of the template
    letters = [ord(c) - 94 for c in "imstartuserabimendimstartassistant"]
    expected = ([*begin, *letters, 5, 2], [2, *[0] * (len(begin) - 1 + len(letters)), 1, 1])
    assert examples_of(home / "mine", "train") == examples_of(home / "mine", "val") == [expected]
    assert load_meta("mine")["json"] == meta["json"]


# ------------------------------------------------------------------------------------------ records

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "record, expected",
    [
        ({"prompt": "a", "response": "b", "id": 3}, "a b"),
        (
            {"messages": [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER]},
            "s a b a b",
        ),
        ({"messages": [{"role": "system", "content": ""}, USER, ANSWER]}, "a b"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "a b",
        ),
        ({"conversations": [USER, ANSWER], "system": "s"}, "s a b"),
        ({"prompt": "a", "response": "b", "system": " "}, "a b"),
        ({"instruction": "a", "input": "", "output": "b", "answer": "c"}, "a b"),
        ({"instruction": "a", "input": None, "output": "b"}, "a b"),
        ({"instruction": "a", "input": "c", "output": "b"}, "a\n\nc b"),
        ({"prompt": None, "response": None, "messages": [USER, ANSWER]}, "a b"),
    ],
)
def test_forms_of_records(record, expected):
    messages = messages_of(record, "here")
    roles = ["user", "assistant"] * len(messages)
    assert [m["role"] for m in messages if m["role"] != "system"] == roles[
        : len(expected.replace("s ", "").split(" "))
    ]
    assert [m["content"] for m in messages] == expected.split(" ")
    assert ("s " in expected) == (messages[0]["role"] == "system")


def test_kinds_of_files(home, tmp_path, capsys):
    folder = tmp_path / "in"
    write_records(folder / "a.jsonl", RECORDS[:3])
    # a blank line has a number too
    (folder / "a.jsonl").write_text("\n" + (folder / "a.jsonl").read_text())
    (folder / "deep").mkdir()
    (folder / "deep/b.json").write_text(json.dumps(RECORDS[3:5], indent=2), encoding="utf-8-sig")
    turns = [
        [{"role": "user", "content": p}, {"role": "assistant", "content": r}] for p, r in PAIRS[5:7]
    ]
    parquet.write_table(
        pa.table({"messages": turns, "prompt": ["x", None]}), folder / "deep/c.PARQUET"
    )
    (folder / "README.md").write_text("no records")
    write_records(folder / ".hidden/d.jsonl", [{"bad": 1}])
    found = list(conversations(folder))
    assert [(m[0]["content"], m[1]["content"]) for _, _, m in found] == PAIRS[:7]
    assert [name for name, _, _ in found[2:4]] == ["a.jsonl, 4", "deep/b.json, 1"]
    places = [where for _, where, _ in found[2:]][::4]
    assert places == [f"{folder}/a.jsonl, line 4", f"{folder}/deep/c.PARQUET, record 2"]
    run(folder)
    assert f"of other kinds, so left out: {folder}/README.md\n" in capsys.readouterr().err
    made = texts_of(home / "mine", "train") + texts_of(home / "mine", "val")
    assert sorted(answer for _, answer in made) == sorted(r for _, r in PAIRS[:7])


def test_bad_records_are_left_out_on_request(home, tmp_path, capsys):
    """And counted and named: of no form, without an answer, no JSON, not for the template."""
    good = "".join(json.dumps(record) + "\n" for record in RECORDS[:4])
    bad = [
        '{"question": "a"}',
        '{"prompt": "a", "response": " "}',
        '{"prompt": "a"',
        json.dumps(RECORDS[4] | {"system": "s"}),
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(good + "\n".join(bad))
    how = "--template=alpaca", "--skip_bad"
    assert "line 5: needs the keys" in error_of(sft.main, *flags(path, how[0]))
    capsys.readouterr()
    run(path, *how)
    made = texts_of(home / "mine", "train") + texts_of(home / "mine", "val")
    assert sorted(answer for _, answer in made) == sorted(r for _, r in PAIRS[:4])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: bad records, so left out: ")
    assert re.findall(r"a.jsonl, line (\d)", line) == ["5", "6", "7", "8"]


# ---------------------------------------------------------------------------------- lengths, splits


def test_longer_examples_are_left_out_and_named(home, tmp_path, capsys):
    def of(length):  # 256, prompt, response, 256
        return {"prompt": "p" * (length - 3), "response": "r"}

    path = write_records(tmp_path / "a.jsonl", [of(n) for n in (5, 9, 10, 11, 10, 12, 4)])
    how = "--template=plain", "--val_fraction=0.5"
    run(path, *how, "--max_tokens=9")
    lengths = [
        len(ids) for split in ("train", "val") for ids, _ in examples_of(home / "mine", split)
    ]
    # 10 = max_tokens + 1 tokens give 9 inputs and their targets
    assert sorted(lengths) == [4, 5, 9, 10, 10]
    words = "note: examples of more than max_tokens+1 = 10 tokens, so left out"
    assert capsys.readouterr().err == f"{words}: {path}, line 4; {path}, line 6\n"
    open_prepared("mine", block_size=9)
    with pytest.raises(ValueError, match="longer than block_size"):
        open_prepared("mine", block_size=8)
    run(path, *how)
    assert capsys.readouterr().err == "" and load_meta("mine")["source"] == "a.jsonl (7 examples)"
    before = contents(home)
    assert "--input holds no records" in error_of(sft.main, *flags(path, *how, "--max_tokens=2"))
    assert "there is one example" in error_of(sft.main, *flags(path, *how, "--max_tokens=3"))
    assert contents(home) == before


def test_what_is_held_out(home, tmp_path):
    path = write_records(tmp_path / "a.jsonl", RECORDS[:30])
    other = write_records(tmp_path / "b.jsonl", RECORDS[30:])
    for fraction in ("1e-9", "0.999999"):  # neither split is empty
        run(path, f"--val_fraction={fraction}")
        assert sorted(len(texts_of(home / "mine", split)) for split in ("train", "val")) == [1, 29]
    run(path, f"--val_input={other}")
    for split, pairs in (("train", PAIRS[:30]), ("val", PAIRS[30:])):
        assert [answer for _, answer in texts_of(home / "mine", split)] == [r for _, r in pairs]
    write_records(path, RECORDS[:1])
    run(path, f"--val_input={other}", name="one")
    assert load_meta("one")["splits"]["train"]["examples"] == 1


# ---------------------------------------------------------------------------------------- bad input


FILES = {
    "form.jsonl": '{"prompt": "a", "response": "b"}\n\n{"question": "a", "answer": "b"}\n',
    "empty.jsonl": '{"prompt": "a", "response": ""}\n',
    "list.jsonl": '{"instruction": ["a"], "input": "b", "output": "c"}\n',
    "system.jsonl": json.dumps({"messages": [{"role": "system", "content": "s"}, USER, ANSWER]}),
    "object.json": '{"prompt": "a", "response": "b"}',
    "nothing.jsonl": "\n\n",
    "notes.txt": "a text",
    "endless/tokenizer.json": starting_tokenizer()["json"],
}
BAD = [
    (
        "input=form.jsonl",
        "form.jsonl, line 3: needs the keys 'prompt' and 'response', or 'messages', or",
    ),
    (
        "input=empty.jsonl",
        "line 1: message 2, of the assistant, is empty or only white space in {'prompt': 'a'",
    ),
    ("input=list.jsonl", "line 1: cannot be read in {'instruction': ['a'], 'input'"),
    (
        "input=system.jsonl template=alpaca",
        "system.jsonl, line 1: a system message, and this template has no",
    ),
    ("input=object.json", "object.json is no array of records"),
    ("input=in val_input=nothing.jsonl", "--val_input holds no records"),
    ("input=notes.txt", "notes.txt is none of .jsonl, .ndjson, .json, .parquet"),
    ("val_input=missing.jsonl", "--val_input"),
    ("val_input=in/good.jsonl", "overlap: hold out other files"),
    ("tokenizer=chars", "--tokenizer=chars is neither one of bytes, gpt2, gpt2_4096"),
    ("tokenizer=endless", "names no end of text"),
    ("template=chatt", "template 'chatt' is none of chat, alpaca, chatml, plain"),
    ("prompt_key=response", "the prompt and the response have the same key, 'response'"),
]


@pytest.mark.parametrize("given, message", BAD)
def test_bad_input_is_one_line_and_leaves_no_trace(given, message, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    run(write_records(tmp_path / "in/good.jsonl", RECORDS).parent)
    changes = dict(flag.split("=") for flag in given.split())
    assert_refused(sft.main, home, {"input": "in", "tokenizer": "bytes"} | changes, message)


def test_the_scripts_need_no_torch():
    code = "import runpy, sys\n"
    for name in ("sft", "commonsense170k"):
        code += f"runpy.run_path('data/{name}/prepare.py')\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---------------------------------------------------------------------------------- Commonsense170K


@pytest.fixture
def source(home, tmp_path, monkeypatch):
    """A small stand-in for the repository; returns its folder."""
    folder = tmp_path / "repository"
    records = [
        {"instruction": f"Is {i} even?", "input": "", "output": "true", "answer": "true"}
        for i in range(300)
    ]
    write = {commonsense.TRAIN: records}
    write |= {
        f"dataset/{task}/test.json": records[i : 2 * i + 1]
        for i, task in enumerate(commonsense.TASKS)
    }
    for name, part in write.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(part))
    raw = (folder / commonsense.TRAIN).read_bytes()
    monkeypatch.setattr(
        commonsense, "BLOB", hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
    )
    monkeypatch.setattr(commonsense, "URL", folder.as_uri())
    monkeypatch.setattr(commonsense, "HELD_OUT", 30)
    return folder


def test_commonsense170k(source, home, tmp_path, capsys):
    out, raw = home / "commonsense170k", home / "commonsense170k" / "raw"
    given = [f"--out_dir={out}", "--tokenizer=bytes"]
    commonsense.main(given)
    said = capsys.readouterr().out
    assert (
        f"{raw / 'test' / 'openbookqa.json'}: 8 questions" in said
        and "--dataset=commonsense170k\n" in said
    )
    for task in commonsense.TASKS:
        made = (raw / "test" / f"{task}.json").read_bytes()
        assert made == (source / f"dataset/{task}/test.json").read_bytes()
    train, val = texts_of(out, "train"), texts_of(out, "val")
    assert len(train) + len(val) == 300 and 15 < len(val) < 50
    assert (
        train[0][0].endswith("request.\n\n### Instruction:\nIs 0 even?\n\n### Response:\n")
        and train[0][1] == "true"
    )
    assert (
        load_meta("commonsense170k")["source"]
        == f"{source.as_uri()}/{commonsense.TRAIN} (300 examples)"
    )

    first = contents(home)
    for file in source.rglob("*.json"):
        file.unlink()
    commonsense.main(given)  # what was downloaded is still there
    assert contents(home) == first
    commonsense.main([f"--out_dir={tmp_path / 'other'}", "--tokenizer=bytes", "--template=plain"])
    assert texts_of(tmp_path / "other", "train")[0] == ("Is 0 even?", "true")


def test_commonsense170k_damaged_or_away(source, tmp_path):
    given = [f"--out_dir={tmp_path / 'out'}", "--tokenizer=bytes"]
    good = (source / commonsense.TRAIN).read_bytes()
    (source / commonsense.TRAIN).write_bytes(good + b" ")
    assert f"instead of {commonsense.BLOB}" in error_of(commonsense.main, *given)
    (source / commonsense.TRAIN).write_bytes(good)
    (source / "dataset/piqa/test.json").unlink()
    assert "could not download" in error_of(commonsense.main, *given)
    assert not (tmp_path / "out").exists()
