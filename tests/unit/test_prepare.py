"""Text to datasets: splits, formats, tokenizers, kills, and what bad input gets told."""

import io
import json
import math
import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanodnt.data import load_meta
from nanodnt.data.tokenizer import Tokenizer, pieces
from nanodnt.prepare import script, text
from support import prepared
from support.depth import examples
from support.runs import ROOT, contents

local, pystdlib = map(prepared.load_script, ("local", "pystdlib"))
BYTES = Tokenizer.meta_for("bytes")
SMALL = "python train.py config/quickstart.py"
TEXTS = [f"Document {i}: naïve λ → " + "x y\n" * (i % 7) + f"\n\nend {i * i}" for i in range(40)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    return prepared.use_other_home(tmp_path / "data", monkeypatch)


@pytest.mark.parametrize(
    "name", sorted(path.parent.name for path in ROOT.glob("data/*/prepare.py"))
)
def test_every_script_can_print_its_help_on_any_terminal(name, monkeypatch):
    main = prepared.load_script(name).main
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    script.run(lambda: main(["--help"]))
    assert sys.stdout.buffer.getvalue().startswith(b"usage: ")


def test_pystdlib(tmp_path, monkeypatch, capsys):
    """Whole files are held out; neither the place of the library nor its line ends matter."""
    made, out = [], tmp_path / "out"
    names = [f"package{i % 5}/module{i}.py" for i in range(120)]
    for place, end in (("here", "\n"), ("else/where", "\r\n")):
        root = tmp_path / place
        for name in (
            *names,
            "site-packages/a.py",
            "package1/tests/c.py",
            "e.txt",
            "_sysconfigdata_x.py",
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(f"# Größe {name}{end}".encode())
        (root / "latin1.py").write_bytes(b"# \xe9\n")
        paths = {"stdlib": str(root)}
        monkeypatch.setattr(pystdlib.sysconfig, "get_paths", lambda paths=paths: paths)
        pystdlib.main([f"--out_dir={out}"])
        made.append(contents(out))
    assert made[0] == made[1]
    said = capsys.readouterr()
    assert "next: python train.py config/quickstart.py" in said.out
    assert f"cannot be read as UTF-8, so left out: {root}/latin1.py\n" in said.err
    train, val = prepared.texts_of(out)
    assert (
        sorted(train + val) == sorted(f"# Größe {name}\n" for name in names) and 3 < len(val) < 20
    )
    for name in names[:30]:
        (root / name).unlink()
    assert "only 90 source files" in prepared.error_of(pystdlib.main, f"--out_dir={out}")
    assert contents(out) == made[1]


# ---------------------------------------------------------------------------------- your own text


@pytest.mark.parametrize("kind, eot", [("bytes", 256), ("gpt2", 50256)])
def test_local_round_trip(kind, eot, home, tmp_path, capsys, monkeypatch):
    prepared.use_fake_bpe(monkeypatch)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    flags = [f"--tokenizer={kind}", "--name=mine", "--val_fraction=0.2"]
    local.main([f"--input={tmp_path / 'texts.jsonl'}", *flags])
    suggested = f"{SMALL} --out_dir=out/mine --dataset=mine"
    assert prepared.open_as_suggested(capsys.readouterr().out) == [suggested]
    train, val = prepared.texts_of(home / "mine")
    assert sorted(train + val) == sorted(TEXTS) and 3 <= len(val) <= 14
    assert [t for t in TEXTS if t in train] == train  # in the order of the file
    meta = load_meta("mine", max_hashed_bytes=math.inf)
    assert (meta["vocab_size"], meta["eot"], meta["dtype"]) == (eot + 1, eot, "uint16")
    assert meta["val_text_bytes"] == sum(len(t.encode()) for t in val)
    for split, part in meta["splits"].items():
        ids = prepared.ids_of(home / "mine", split)
        assert (part["tokens"], part["max_id"]) == (len(ids), ids.max())
    assert set(contents(home / "mine")) == {"train.bin", "val.bin", "meta.json"}


def test_the_end_of_a_single_text_is_held_out(home, tmp_path):
    text = "To be, or not to be:\nthat is the question — λ.\n" * 9
    (tmp_path / "hamlet.txt").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    flags = ["--tokenizer=chars", "--name=h", "--val_fraction=0.25"]
    local.main([f"--input={tmp_path / 'hamlet.txt'}", *flags])
    meta = load_meta("h")
    assert meta["chars"] == sorted(set(text)) and meta["eot"] is None
    cut = int(len(text) * 0.75)
    for split, expected in (("train", text[:cut]), ("val", text[cut:])):
        assert "".join(meta["chars"][i] for i in prepared.ids_of(home / "h", split)) == expected


def test_ids_have_four_bytes_where_two_do_not_do(tmp_path):
    chars = [chr(i) for i in range(32, 80000) if not 0xD800 <= i < 0xE000][:65537]
    splits = {"train": [["".join(chars)]], "val": [["".join(chars[-2:])]]}
    meta = text.build(tmp_path / "d", "test", Tokenizer.meta_for("chars", chars), splits)
    assert meta["dtype"] == "uint32" and meta["splits"]["val"]["max_id"] == 65536
    assert prepared.ids_of(tmp_path / "d", "train").tolist() == list(range(65537))


def write_inputs(folder):
    """A folder with every kind of input; returns its documents, sorted by path."""
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("plain")
    (folder / "deep/b.py").write_text("print('é')", encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\xff\xfe")
    (folder / "d.jsonl").write_text('{"text": "line 0"}\n{"text": "line 1", "id": 1}\n\n')
    parquet.write_table(
        pa.table({"id": [1, 2], "text": ["row one", "row two"]}), folder / "deep/e.PARQUET"
    )
    return ["plain", "line 0", "line 1", "print('é')", "row one", "row two"]


def test_local_reads_every_kind_of_file(home, tmp_path, capsys, monkeypatch):
    texts = write_inputs(tmp_path / "in")
    flags = [f"--input={tmp_path / 'in'}", "--tokenizer=bytes", "--name=x"]
    local.main(flags)
    train, val = prepared.texts_of(home / "x")
    assert sorted(train + val) == sorted(texts) and train == [
        text for text in texts if text not in val
    ]
    assert "image.png" in capsys.readouterr().err
    made = contents(home / "x")
    prepared.list_files_backwards(monkeypatch)
    local.main(flags)
    assert contents(home / "x") == made


def test_the_commands_that_are_printed_fit(home, tmp_path, capsys, monkeypatch):
    """A text that is too short for the context of the small model; one that is large enough for the
    large one."""
    prepared.use_fake_bpe(monkeypatch)
    monkeypatch.setattr(text, "MANY_TOKENS", 9000)
    (tmp_path / "a.txt").write_text("To be, or not to be: that is the question. " * 5)
    (tmp_path / "b.txt").write_text("To be, or not to be: that is the question. " * 250)
    flags = "--name=x", "--tokenizer=gpt2"
    large = "torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py"
    for file, val_fraction, wanted in (
        ("a", 0.1, [f"{SMALL} --out_dir=out/x --block_size=22 --dataset=x"]),
        (
            "b",
            0.15,
            [
                f"{SMALL} --out_dir=out/x --dataset=x",
                f"{large} --out_dir=out/x_dnt_small --dataset=x",
            ],
        ),
    ):
        local.main([f"--input={tmp_path / file}.txt", *flags, f"--val_fraction={val_fraction}"])
        assert prepared.open_as_suggested(capsys.readouterr().out) == wanted


def test_the_command_that_is_printed_can_be_typed(home, tmp_path, capsys):
    out = tmp_path / "a name, and 'blanks'"
    local.main(["--input=README.md", "--tokenizer=bytes", "--name=x", f"--out_dir={out}"])
    last = capsys.readouterr().out.splitlines()[-1]
    wanted = ["config/quickstart.py", f"--out_dir=out/{out.name}", f"--dataset={out}"]
    assert shlex.split(last)[3:] == wanted


@settings(max_examples=examples(fast=50, deep=2000), deadline=None)
@given(st.text(alphabet="ab1'.! \n\n\n\r\t\u00a0\u2028\x1cé", max_size=80))
def test_long_documents_are_cut_where_gpt2_cuts(document):
    import regex

    gpt2 = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    found = list(pieces(document, 3))
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]
    assert [t for piece, _ in found for t in gpt2.findall(piece)] == gpt2.findall(document)


# ------------------------------------------------------------------------------ processes and kills

FILES = [TEXTS[:15], TEXTS[15:30], TEXTS[30:]]


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_is_one_by_one(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "JOB_CHARS", 20)
    splits = {"train": [*FILES[:2], iter(FILES[2])], "val": [["held out"]]}
    text.build(tmp_path, "test", BYTES, splits, workers=workers)
    wanted = [i for document in TEXTS for i in [*document.encode(), 256]]
    assert prepared.ids_of(tmp_path, "train").tolist() == wanted
    assert prepared.documents_of(tmp_path, "val") == ["held out"]


def killed(texts, how):
    yield texts[0]
    how()
    yield texts[1]


def interrupt():
    raise KeyboardInterrupt


def kill_workers():
    for worker in multiprocessing.active_children():
        worker.kill()


@pytest.mark.parametrize(
    "how, workers, said", [(interrupt, 1, "130"), (kill_workers, 2, "error: a worker was killed")]
)
def test_a_run_that_is_stopped_leaves_nothing(how, workers, said, tmp_path):
    out = tmp_path / "out"
    splits = {"train": [FILES[0], killed(FILES[1], how)], "val": [TEXTS[:3]]}
    with pytest.raises(SystemExit) as stop:
        script.run(lambda: text.build(out, "test", BYTES, splits, workers=workers))
    assert str(stop.value.code).startswith(said) and not out.exists()


def test_what_a_kill_leaves_is_written_anew(tmp_path):
    splits = {"train": FILES, "val": [TEXTS[:3]]}
    text.build(tmp_path / "whole", "test", BYTES, splits, name="same")
    (tmp_path / "out" / "parts").mkdir(parents=True)
    (tmp_path / "out" / "parts" / "train.bin").write_bytes(b"half of it")
    text.build(tmp_path / "out", "test", BYTES, splits, name="same")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_half_replaced_dataset_is_not_prepared(tmp_path, monkeypatch):
    splits = {"train": [["one", "two"]], "val": [["three"]]}
    text.build(tmp_path, "first", BYTES, splits)
    replace = os.replace

    def failing(source, target):
        if Path(target) == tmp_path / "val.bin":
            raise OSError("disk gone")
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk gone"):
        patch.setattr(os, "replace", failing)
        text.build(tmp_path, "second", BYTES, {"train": [["changed"]], "val": [["too"]]})
    with pytest.raises(ValueError, match="not prepared"):
        load_meta(str(tmp_path))
    text.build(tmp_path, "first", BYTES, splits)
    assert prepared.documents_of(tmp_path, "train") == ["one", "two"]


# ---------------------------------------------------------------------------------------- bad input


def bad_inputs(folder):
    """Files for the table below."""
    write_inputs(folder / "in")
    (folder / "empty").mkdir()
    (folder / "latin1.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    (folder / "key.jsonl").write_text('{"text": "ok"}\n\n{"body": "no"}\n')
    (folder / "cut.jsonl").write_text('{"text": "ok"}\n{"text": "o')
    (folder / "fake.parquet").write_text("not parquet")


BAD = [
    ({"input": "missing.txt"}, "missing.txt does not exist"),
    ({"input": "empty"}, "holds no text"),
    ({"input": "latin1.jsonl"}, "latin1.jsonl, line 2 is not UTF-8 text"),
    ({"input": "key.jsonl"}, "key.jsonl, line 3: no UTF-8 text under 'text' in {'body': 'no'}"),
    ({"input": "cut.jsonl"}, "cut.jsonl, line 2 is not JSON"),
    ({"input": "fake.parquet"}, "fake.parquet is not a parquet file"),
    ({"name": "../mine"}, "--name='../mine': use letters"),
    ({"name": "digits"}, "digits is the source folder of another dataset"),
    ({"val_fraction": "nan"}, "--val_fraction=nan must be above 0 and below 1"),
    ({"input": "in/a.txt", "val_fraction": "0.99999"}, "there is no text for train.bin"),
    ({"out_dir": "in/deep"}, "would be read too: give another --out_dir"),
    ({"tokenizer": "gpt2"}, "vocabulary could not be fetched"),
]


@pytest.mark.parametrize("flags, message", BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_one_line_and_leaves_no_trace(flags, message, home, tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)  # there is no network
    bad_inputs(tmp_path)
    local.main([f"--input={tmp_path / 'in'}", "--tokenizer=bytes", "--name=mine"])
    flags = {"input": "in", "tokenizer": "bytes"} | flags
    flags |= {key: tmp_path / flags[key] for key in ("input", "out_dir") if key in flags}
    prepared.assert_refused(local.main, home, flags, message)


@pytest.mark.parametrize("path, why", [("", "it is empty"), ("~no body/x", "there is no user")])
def test_a_path_that_names_no_folder(path, why, home, capsys):
    with pytest.raises(SystemExit) as stop:
        local.main(["--tokenizer=bytes", "--name=x", "--input=README.md", f"--out_dir={path}"])
    assert stop.value.code == 2
    assert "argument --out_dir" in (said := capsys.readouterr().err) and why in said


def test_an_output_on_a_full_disk_gives_no_traceback(tmp_path):
    flags = f"--input=README.md --tokenizer=bytes --name=x --out_dir={tmp_path}/x"
    command = [sys.executable, "data/local/prepare.py", *flags.split()]
    with open("/dev/full", "wb") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert (tmp_path / "x" / "meta.json").exists()


def test_a_script_ends_with_a_line_and_exit_code_1():
    flags = ["--input=/missing", "--tokenizer=bytes", "--name=x"]
    command = [sys.executable, "data/local/prepare.py", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
