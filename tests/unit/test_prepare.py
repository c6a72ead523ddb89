"""Text to datasets: splits, formats, tokenizers, restarts, and what bad input gets told."""

import hashlib
import io
import json
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
from nanodnt.data.__main__ import main as check_dataset
from nanodnt.data.tokenizer import Tokenizer, pieces
from nanodnt.data.windows import PreparedText
from nanodnt.prepare import script, text
from support import prepared
from support.depth import examples
from support.runs import ROOT, contents

local, pystdlib = map(prepared.load_script, ("local", "pystdlib"))
BYTES = Tokenizer.meta_for("bytes")
TEXTS = [f"Document {i}: naïve λ → " + "x y\n" * (i % 7) + f"\n\nend {i * i}" for i in range(40)]


@pytest.fixture
def home(tmp_path, monkeypatch):
    return prepared.use_other_home(tmp_path / "data", monkeypatch)


# ------------------------------------------------------------------------------------------------------- pystdlib


def test_pystdlib(tmp_path, monkeypatch, capsys):
    """Whole files are held out by a hash of their path; neither the place of the library nor its line ends matter."""
    made, out = [], tmp_path / "out"
    skipped = ["site-packages/a.py", "test/b.py", "package1/tests/c.py", "package2/__pycache__/d.py", "e.txt"]
    skipped += ["_sysconfigdata_x.py", "sitecustomize.py", "config-3.12/f.py"]  # made when Python is built
    names = [f"package{i % 5}/module{i}.py" for i in range(120)]
    for place, end in (("here", "\n"), ("else/where", "\r\n")):
        root = tmp_path / place
        for name in names + skipped:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(f'"""Größe {name if name in names else place}"""{end}'.encode())
        (root / "latin1.py").write_bytes(b"# \xe9\n")
        monkeypatch.setattr(pystdlib.sysconfig, "get_paths", lambda root=root: {"stdlib": str(root)})
        pystdlib.main([f"--out_dir={out}"])
        made.append(contents(out))
    assert made[0] == made[1] and load_meta(str(out))["tokenizer"] == "bytes"
    said = capsys.readouterr()
    assert "next: python train.py config/quickstart.py" in said.out
    assert f"note: cannot be read as UTF-8, so left out: {root}/latin1.py\n" in said.err
    shares = {name: int(hashlib.sha256(f"pystdlib/{name}".encode()).hexdigest()[:12], 16) / 16**12 for name in names}
    val = [f'"""Größe {name}"""\n' for name in sorted(names) if shares[name] < 0.08]
    train = [f'"""Größe {name}"""\n' for name in sorted(names) if shares[name] >= 0.08]
    assert prepared.texts_of(out) == (train, val) and 3 < len(val) < 20
    for name in names[:30]:
        (root / name).unlink()
    assert "only 90 source files" in prepared.error_of(pystdlib.main, f"--out_dir={out}")
    assert contents(out) == made[1]


# ---------------------------------------------------------------------------------------------- tokens and formats


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("data/*/prepare.py")))
def test_every_script_can_print_its_help_on_any_terminal(name, monkeypatch):
    main = prepared.load_script(name).main
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    script.run(lambda: main(["--help"]))
    assert sys.stdout.buffer.getvalue().startswith(b"usage: ")


def test_a_home_folder_is_expanded(home, tmp_path, monkeypatch, capsys):
    """./~ is a folder of that name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for folder in ("", "~"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.txt").write_text(f"the text in {folder or 'home'}", encoding="utf-8")
    for typed, folder, words in (("~", "", "the text in home"), ("./~", "~", "the text in ~")):
        local.main([f"--input={typed}/a.txt", f"--out_dir={typed}/out", "--tokenizer=bytes", "--name=mine"])
        (train,), (val,) = prepared.texts_of(tmp_path / folder / "out")
        assert train + val == words
    check_dataset(["~/out"])
    with pytest.raises(SystemExit) as stop:
        local.main(["--input=~no body/a.txt", "--tokenizer=bytes", "--name=mine"])
    assert stop.value.code == 2 and "argument --input: '~no body/a.txt': there is no user" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bytes", "gpt2"])
def test_local_round_trip(kind, home, tmp_path, capsys, monkeypatch):
    prepared.use_fake_bpe(monkeypatch)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    local.main([f"--input={tmp_path / 'texts.jsonl'}", f"--tokenizer={kind}", "--name=mine", "--val_fraction=0.2"])
    assert "next: python train.py --dataset=mine" in capsys.readouterr().out
    train, val = prepared.texts_of(home / "mine")
    assert sorted(train + val) == sorted(TEXTS) and 3 <= len(val) <= 14
    assert [t for t in TEXTS if t in train] == train  # in the order of the file
    meta, eot = load_meta("mine"), {"bytes": 256, "gpt2": 50256}[kind]
    assert (meta["vocab_size"], meta["eot"], meta["dtype"]) == (eot + 1, eot, "uint16")
    for split in ("train", "val"):
        ids, part = prepared.ids_of(home / "mine", split), meta["splits"][split]
        assert (part["tokens"], part["max_id"]) == (len(ids), ids.max())
        assert part["sha256"] == hashlib.sha256((home / "mine" / f"{split}.bin").read_bytes()).hexdigest()
    assert meta["val_text_bytes"] == sum(len(t.encode()) for t in val)
    assert set(contents(home / "mine")) == {"train.bin", "val.bin", "meta.json"}
    x, y = PreparedText("mine", block_size=8).batch(0, 2)
    assert (x[:, 1:] == y[:, :-1]).all()


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_the_end_of_a_single_text_is_held_out(fraction, home, tmp_path):
    text = "To be, or not to be:\nthat is the question — λ.\n" * 9
    (tmp_path / "hamlet.txt").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    local.main([f"--input={tmp_path / 'hamlet.txt'}", "--tokenizer=chars", "--name=h", f"--val_fraction={fraction}"])
    meta = load_meta("h")
    assert meta["chars"] == sorted(set(text)) and meta["eot"] is None and meta["vocab_size"] == len(set(text))
    cut = int(len(text) * (1 - fraction))
    for split, expected in (("train", text[:cut]), ("val", text[cut:])):
        assert "".join(meta["chars"][i] for i in prepared.ids_of(home / "h", split)) == expected


@pytest.mark.parametrize("size, dtype", [(3, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_are_two_bytes_as_long_as_they_fit(size, dtype, tmp_path):
    chars = [chr(i) for i in range(32, 80000) if not 0xD800 <= i < 0xE000][:size]
    splits = {"train": [["".join(chars)]], "val": [["".join(chars[-2:])]]}
    meta = text.build(tmp_path / "d", "test", Tokenizer.meta_for("chars", chars), splits)
    assert meta["dtype"] == dtype == load_meta(str(tmp_path / "d"))["dtype"]
    assert meta["splits"]["val"]["max_id"] == size - 1
    assert prepared.ids_of(tmp_path / "d", "train").tolist() == list(range(size))
    assert (tmp_path / "d" / "train.bin").stat().st_size == size * int(dtype[4:]) // 8


def write_inputs(folder):
    """A folder with every kind of input; returns its documents, sorted by path."""
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "deep/er").mkdir(parents=True)
    (folder / "a.txt").write_text("plain")
    (folder / "deep/b.md").write_text("# mark\ndown")
    (folder / "deep/er/c.py").write_text("print('é')", encoding="utf-8")
    (folder / "empty.txt").write_text("")
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\xff\xfe")
    (folder / ".hidden").mkdir()
    (folder / ".hidden/secret.txt").write_text("secret")
    rows = [{"text": f"line {i}", "id": i} for i in range(5)]
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    parquet.write_table(pa.table({"id": [1, 2], "text": ["row one", "row two"]}), folder / "deep/e.PARQUET")
    return ["plain", *(r["text"] for r in rows), "# mark\ndown", "row one", "row two", "print('é')"]


@pytest.mark.parametrize(
    "part, expected",
    [("", slice(None)), ("deep", slice(6, None)), ("d.jsonl", slice(1, 6)), ("deep/e.PARQUET", slice(7, 9))],
)
def test_local_reads_files_and_folders(part, expected, home, tmp_path, capsys, monkeypatch):
    texts = write_inputs(tmp_path / "in")[expected]
    local.main([f"--input={tmp_path / 'in' / part}", "--tokenizer=bytes", "--name=x"])
    train, val = prepared.texts_of(home / "x")
    assert sorted(train + val) == sorted(texts) and train == [t for t in texts if t not in val] and train and val
    assert ("image.png" in capsys.readouterr().err) == (part == "")
    made = contents(home / "x")
    prepared.list_files_backwards(monkeypatch)
    local.main([f"--input={tmp_path / 'in' / part}", "--tokenizer=bytes", "--name=x"])
    assert contents(home / "x") == made


@prepared.needs_gpt2
def test_real_gpt2_tokens(tmp_path, monkeypatch):
    import tiktoken

    monkeypatch.setattr(text, "JOB_CHARS", 50)
    bpe = tiktoken.get_encoding("gpt2")
    assert bpe.encode_ordinary("Hello world") == [15496, 995]
    texts = ["Hello world", Path(local.__file__).read_text(encoding="utf-8") * 3, "a\n\n\n b\nc \n d\n" * 50]
    text.build(tmp_path, "test", Tokenizer.meta_for("gpt2"), {"train": [texts], "val": [["x"]]})
    assert prepared.ids_of(tmp_path, "train").tolist() == [i for t in texts for i in [*bpe.encode_ordinary(t), 50256]]


@settings(max_examples=examples(fast=50, deep=2000), deadline=None)
@given(st.text(alphabet="ab1'.! \n\n\n\r\t\u00a0\u2028\x1cé", max_size=80))
def test_long_documents_are_cut_where_gpt2_cuts(document):
    import regex

    gpt2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    found = list(pieces(document, 3))
    assert [ends for _, ends in found] == [False] * (len(found) - 1) + [True]
    assert [t for piece, _ in found for t in gpt2.findall(piece)] == gpt2.findall(document)


def test_long_documents_are_cut_at_all(monkeypatch):
    monkeypatch.setattr(text, "JOB_CHARS", 10)
    line = "0123456789\n"
    jobs = [[(line, False)], [(line, False)], [(line, True)], [("short", True), (line, False)], [(line, True)]]
    assert list(text._jobs([line * 3, "short", line * 2])) == jobs


# ------------------------------------------------------------------------------------------ parallel and restarted

FILES = [TEXTS[:15], TEXTS[15:30], TEXTS[30:]]


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_is_one_by_one(workers, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "JOB_CHARS", 20)
    files = [*FILES[:2], iter(FILES[2])]
    text.build(tmp_path, "test", BYTES, {"train": files, "val": [["held out"]]}, workers=workers)
    assert prepared.ids_of(tmp_path, "train").tolist() == [i for text in TEXTS for i in [*text.encode(), 256]]
    assert prepared.documents_of(tmp_path, "val") == ["held out"]


def killed(texts, how):
    yield texts[0]
    how()
    yield texts[1]


def interrupt():
    raise KeyboardInterrupt


def kill_workers():
    [worker.kill() for worker in multiprocessing.active_children()]


KILLS = [(interrupt, 1, "130"), (kill_workers, 2, "error: a worker was killed")]


@pytest.mark.parametrize("how, workers, said", KILLS)
def test_a_restart_uses_finished_files(how, workers, said, tmp_path, monkeypatch, capsys):
    out, whole, val = tmp_path / "out", tmp_path / "whole", [TEXTS[:3]]
    text.build(whole, "test", BYTES, {"train": FILES, "val": val}, name="same")
    with pytest.raises(SystemExit) as e:
        splits = {"train": [*FILES[:2], killed(FILES[2], how)], "val": val}
        script.run(lambda: text.build(out, "test", BYTES, splits, name="same", workers=workers, resume=True))
    assert str(e.value.code).startswith(said)
    assert ("stopped: run the same command again\n" in capsys.readouterr().err) == (how is interrupt)
    finished = {p.name for p in (out / "parts").glob("train-*.bin")}
    assert finished == {"train-000000.bin", "train-000001.bin"} and not (out / "meta.json").exists()

    written = prepared.note_parts(monkeypatch)
    text.build(out, "test", BYTES, {"train": FILES, "val": val}, name="same", resume=True)
    assert written == ["train-000002.bin", "val-000000.bin"]
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("change", ["source", "tokenizer"])
def test_parts_of_something_else_are_not_used(change, tmp_path):
    splits = {"train": [*FILES[:2], killed(FILES[2], interrupt)], "val": [["v"]]}
    with pytest.raises(KeyboardInterrupt):
        text.build(tmp_path, "one", BYTES, splits, resume=True)
    assert list((tmp_path / "parts").glob("train-*.bin"))
    other = [text.upper() for text in TEXTS]
    chars = Tokenizer.meta_for("chars", sorted(set("".join(other) + "v")))
    source, tokenizer = {"source": ("two", BYTES), "tokenizer": ("one", chars)}[change]
    text.build(tmp_path, source, tokenizer, {"train": [other], "val": [["v"]]}, resume=True)
    assert Tokenizer(tokenizer).decode(prepared.ids_of(tmp_path, "train")) == "".join(other)


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
    assert prepared.documents_of(tmp_path, "train") == ["one", "two"] and load_meta(str(tmp_path))["source"] == "first"


# ------------------------------------------------------------------------------------------------------- bad input


def bad_inputs(folder):
    """Files for the table below."""
    import pyarrow as pa
    from pyarrow import parquet

    write_inputs(folder / "in")
    (folder / "empty").mkdir()
    (folder / "latin1.txt").write_bytes("é".encode("latin-1"))
    (folder / "latin1.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    (folder / "mixed").mkdir()
    (folder / "mixed/latin1.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    (folder / "key.jsonl").write_text('{"text": "ok"}\n\n{"body": "no"}\n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (folder / "cut.jsonl").write_text('{"text": "ok"}\n{"text": "o')
    (folder / "fake.parquet").write_text("not parquet")
    parquet.write_table(pa.table({"body": ["a"]}), folder / "key.parquet")


BAD = [
    ({"input": "missing.txt"}, "missing.txt does not exist"),
    ({"input": "empty"}, "holds no text"),
    ({"input": "latin1.txt"}, "latin1.txt is not UTF-8 text: byte 0 is not"),
    ({"input": "latin1.jsonl"}, "latin1.jsonl, line 2 is not UTF-8 text"),
    ({"input": "mixed"}, "mixed/latin1.jsonl, line 1 is not UTF-8 text"),
    ({"input": "key.jsonl"}, "key.jsonl, line 3: no UTF-8 text under 'text' in {'body': 'no'}"),
    ({"input": "list.jsonl"}, "line 1: no UTF-8 text under 'text' in [1, 2]"),
    ({"input": "half.jsonl"}, "line 1: no UTF-8 text"),
    ({"input": "cut.jsonl"}, "cut.jsonl, line 2 is not JSON"),
    ({"input": "in/d.jsonl", "text_key": "content"}, "line 1: no UTF-8 text under 'content'"),
    ({"input": "fake.parquet"}, "fake.parquet is not a parquet file"),
    ({"input": "key.parquet"}, "no UTF-8 text under 'text' in {'body': 'a'}"),
    ({"name": "../mine"}, "--name='../mine': use letters"),
    ({"name": "digits"}, "digits is the source folder of another dataset"),
    ({"name": "a_file"}, "a_file is a file"),
    ({"val_fraction": "0"}, "--val_fraction=0.0 must be above 0 and below 1"),
    ({"val_fraction": "nan"}, "below 1"),
    ({"input": "in/a.txt", "val_fraction": "0.99999"}, "there is no text for train.bin"),
    ({"out_dir": "in/deep"}, "would be read too: give another --out_dir"),
    ({"tokenizer": "gpt2"}, "vocabulary could not be fetched"),
]


@pytest.mark.parametrize("flags, message", BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_one_line_and_leaves_no_trace(flags, message, home, tmp_path, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)  # there is no network
    bad_inputs(tmp_path)
    local.main([f"--input={tmp_path / 'in'}", "--tokenizer=bytes", "--name=mine"])
    (home / "a_file").touch()
    flags = {"input": "in", "tokenizer": "bytes"} | flags
    flags |= {key: tmp_path / flags[key] for key in ("input", "out_dir") if key in flags}
    prepared.assert_refused(local.main, home, flags, message)


COMMANDS = [
    "data/local/prepare.py --help",
    "data/local/prepare.py --input=README.md --tokenizer=bytes --name=x --out_dir={tmp}/x",
    "data/local/prepare.py --input=/missing --tokenizer=bytes --name=x",
    "-m nanodnt.data {tmp}/made",
    "model.py config/quickstart.py --vocab_size=257",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("full", [False, True])
def test_an_output_that_cannot_be_written_gives_no_traceback(command, full, tmp_path):
    """The reader of the output has gone, as in `… | true`, or the disk is full."""
    text.build(tmp_path / "made", "test", BYTES, {"train": [["a"]], "val": [["b"]]})
    if full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    command = [sys.executable, *command.format(tmp=tmp_path).split()]
    done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    os.close(output)
    refused = "/missing" in command[2]
    expected = (1, 1) if full or refused else (141, 0)  # 128 + SIGPIPE
    if "--help" in command:
        expected = (0, 0)  # argparse passes over the error
    assert (done.returncode, done.stderr.count("\n")) == expected, done.stderr
    assert (tmp_path / "x" / "meta.json").exists() == ("--name=x" in command and not refused)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_stop_nothing(closed, tmp_path):
    flags = f"--input=README.md --tokenizer=bytes --name=x --out_dir={tmp_path}/x"
    command = f"{sys.executable} data/local/prepare.py {flags} {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x" / "meta.json").exists()


def test_the_command_that_is_printed_can_be_typed(home, tmp_path, capsys):
    out = tmp_path / "a name, and 'blanks'"
    local.main(["--input=README.md", "--tokenizer=bytes", "--name=x", f"--out_dir={out}"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last)[1:] == ["python", "train.py", f"--dataset={out}"]


@pytest.mark.parametrize("flag", ["--input", "--out_dir"])
def test_an_empty_path_is_not_the_current_folder(flag, home, capsys):
    flags = {"--input": "README.md", "--out_dir": "x"} | {flag: ""}
    with pytest.raises(SystemExit) as e:
        local.main(["--tokenizer=bytes", "--name=x", *(f"{key}={value}" for key, value in flags.items())])
    assert e.value.code == 2
    assert f"argument {flag}: it is empty: name a file or folder" in capsys.readouterr().err


def test_a_script_ends_with_a_line_and_exit_code_1():
    command = [sys.executable, "data/local/prepare.py", "--input=/missing", "--tokenizer=bytes", "--name=x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
