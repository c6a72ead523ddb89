"""The prepare scripts: splits, formats, tokenizers, restarts, downloads, and what bad input gets told."""

import hashlib
import importlib
import io
import json
import multiprocessing
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from data import common
from loader import Dataset, Tokenizer, load_meta

ROOT = Path(__file__).resolve().parents[1]
local, pystdlib, shakespeare, openwebtext, minipile, c4 = (
    importlib.import_module(f"data.{name}.prepare")
    for name in ("local", "pystdlib", "shakespeare_char", "openwebtext", "minipile", "c4")
)
BYTES = Tokenizer.meta_for("bytes")
CHECK_DISK = common.check_disk
TEXTS = [f"Document {i}: naïve λ → " + "x y\n" * (i % 7) + f"\n\nend {i * i}" for i in range(40)]


class FakeBPE:
    """Stands in for GPT-2's BPE, whose vocabulary is a download: one token per UTF-8 byte, ids 1000 to 1255."""

    def encode_ordinary(self, text):
        return [1000 + b for b in text.encode()]

    def decode(self, ids):
        return bytes(i - 1000 for i in ids).decode()


@pytest.fixture
def bpe(monkeypatch):
    monkeypatch.setattr(loader, "_gpt2", FakeBPE)
    common._tokenizer.cache_clear()
    yield
    common._tokenizer.cache_clear()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty data/ folder for the scripts to write to."""
    for module in (common, local, loader):
        monkeypatch.setattr(module, "DATA", tmp_path / "data")
    return tmp_path / "data"


def ids_of(folder, split):
    meta = json.loads((folder / "meta.json").read_text())
    return np.fromfile(folder / f"{split}.bin", np.dtype(meta["dtype"]).newbyteorder("<"))


def documents_of(folder, split):
    """The texts in a .bin file, cut at end of text."""
    tokenizer = Tokenizer(json.loads((folder / "meta.json").read_text()))
    ids = ids_of(folder, split)
    assert ids[-1] == tokenizer.eot
    return [tokenizer.decode(part[:-1]) for part in np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)[:-1]]


def contents(folder):
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def error_of(main, *argv):
    """The line a script ends with; it must be an error, and one line."""
    with pytest.raises(SystemExit) as e:
        common.run(lambda: main(list(argv)))
    assert isinstance(e.value.code, str) and e.value.code.startswith("error: ") and "\n" not in e.value.code
    return e.value.code


# ------------------------------------------------------------------------------------------------------- pystdlib


def test_pystdlib_holds_out_whole_files_by_a_hash_of_their_path(tmp_path, capsys):
    pystdlib.main([f"--out_dir={tmp_path / 'a'}"])
    assert "next: python train.py config/quickstart.py" in capsys.readouterr().out
    root, expected = sysconfig.get_paths()["stdlib"], {"train": [], "val": []}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")
            parts = path.split("/")
            if (
                not name.endswith(".py")
                or {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"} & set(parts)
                or any(p.startswith("config-") for p in parts)
                or parts[-1].startswith(("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize"))
            ):
                continue
            try:
                text = open(os.path.join(folder, name), "rb").read().replace(b"\r\n", b"\n")
                text.decode()
            except ValueError:
                continue
            share = int(hashlib.sha256(f"pystdlib/{path}".encode()).hexdigest()[:12], 16) / 16**12
            expected["val" if share < 0.08 else "train"].append((path, text))
    tokens = {}
    for split, files in expected.items():
        ids = ids_of(tmp_path / "a", split)
        tokens[split] = len(ids)
        whole = b"".join(text + b"\xff" for _, text in sorted(files))  # 0xff is no UTF-8: free to stand for 256
        assert np.where(ids == 256, 255, ids).astype(np.uint8).tobytes() == whole
    assert 0.03 < tokens["val"] / sum(tokens.values()) < 0.15
    assert load_meta(str(tmp_path / "a"))["tokenizer"] == "bytes"


def test_pystdlib_does_not_depend_on_the_place_or_the_line_ends(tmp_path, monkeypatch):
    made = []
    for place, end in (("here", "\n"), ("else/where", "\r\n")):
        root = tmp_path / place
        for i in range(120):
            file = root / f"package{i % 5}" / f"module{i}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(f'"""Größe {i}"""{end}x = {i}{end}'.encode())
        for name in ("site-packages/a.py", "test/b.py", "package1/tests/c.py", "_sysconfigdata_x.py", "d.txt"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(f"{place} must not be read")
        (root / "latin1.py").write_bytes(b"# \xe9\n")
        monkeypatch.setattr(pystdlib.sysconfig, "get_paths", lambda root=root: {"stdlib": str(root)})
        pystdlib.main([f"--out_dir={tmp_path / 'out'}"])
        made.append(contents(tmp_path / "out"))
        assert len(documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "val")) == 120
    assert made[0] == made[1]
    for i in range(30):
        (root / f"package{i % 5}" / f"module{i}.py").unlink()
    assert "only 90 source files" in error_of(pystdlib.main, f"--out_dir={tmp_path / 'out'}")
    assert contents(tmp_path / "out") == made[1]


# ---------------------------------------------------------------------------------------------- tokens and formats


@pytest.mark.parametrize("kind", ["bytes", "gpt2"])
def test_local_round_trip(kind, home, tmp_path, bpe, capsys):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    local.main([f"--input={tmp_path / 'texts.jsonl'}", f"--tokenizer={kind}", "--name=mine", "--val_fraction=0.2"])
    assert "next: python train.py --dataset=mine" in capsys.readouterr().out
    train, val = documents_of(home / "mine", "train"), documents_of(home / "mine", "val")
    assert sorted(train + val) == sorted(TEXTS) and 3 <= len(val) <= 14
    assert [t for t in TEXTS if t in train] == train  # in the order of the file
    meta = load_meta("mine")
    assert (meta["vocab_size"], meta["eot"], meta["dtype"]) == {
        "bytes": (257, 256, "uint16"),
        "gpt2": (50257, 50256, "uint16"),
    }[kind]
    for split in ("train", "val"):
        ids, part = ids_of(home / "mine", split), meta["splits"][split]
        assert (part["tokens"], part["max_id"]) == (len(ids), ids.max())
        assert part["sha256"] == hashlib.sha256((home / "mine" / f"{split}.bin").read_bytes()).hexdigest()
    assert set(contents(home / "mine")) == {"train.bin", "val.bin", "meta.json"}
    x, y = Dataset("mine", block_size=8).batch(0, 2)
    assert (x[:, 1:] == y[:, :-1]).all()


@pytest.mark.parametrize("fraction", [0.1, 0.25])
def test_the_end_of_a_single_text_is_held_out(fraction, home, tmp_path):
    text = "To be, or not to be:\nthat is the question — λ.\n" * 9
    (tmp_path / "hamlet.txt").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    arguments = [f"--input={tmp_path / 'hamlet.txt'}", "--tokenizer=chars", "--name=h", f"--val_fraction={fraction}"]
    local.main(arguments)
    meta, first = load_meta("h"), contents(home / "h")
    assert meta["chars"] == sorted(set(text)) and meta["eot"] is None and meta["vocab_size"] == len(set(text))
    cut = int(len(text) * (1 - fraction))
    for split, expected in (("train", text[:cut]), ("val", text[cut:])):
        assert "".join(meta["chars"][i] for i in ids_of(home / "h", split)) == expected
    local.main(arguments)
    assert contents(home / "h") == first


@pytest.mark.parametrize("size, dtype", [(3, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_are_two_bytes_as_long_as_they_fit(size, dtype, tmp_path):
    chars = [chr(i) for i in range(32, 80000) if not 0xD800 <= i < 0xE000][:size]
    splits = {"train": ["".join(chars)], "val": ["".join(chars[-2:])]}
    meta = common.build(tmp_path / "d", "test", Tokenizer.meta_for("chars", chars), splits)
    assert meta["dtype"] == dtype == load_meta(str(tmp_path / "d"))["dtype"]
    assert ids_of(tmp_path / "d", "train").tolist() == list(range(size)) and meta["splits"]["val"]["max_id"] == size - 1
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
    train, val = documents_of(home / "x", "train"), documents_of(home / "x", "val")
    assert sorted(train + val) == sorted(texts) and train == [t for t in texts if t not in val] and train and val
    assert ("image.png" in capsys.readouterr().err) == (part == "")
    made, rglob = contents(home / "x"), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(rglob(self, pattern))))
    local.main([f"--input={tmp_path / 'in' / part}", "--tokenizer=bytes", "--name=x"])
    assert contents(home / "x") == made  # whatever order the file system lists them in


def gpt2_is_here():
    # Where tiktoken looks before it downloads; the names are sha1 of the two addresses.
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache")
    names = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    return all((folder / name).is_file() for name in names)


@pytest.mark.skipif(not gpt2_is_here(), reason="GPT-2's vocabulary is not in tiktoken's cache")
def test_real_gpt2_tokens(tmp_path, monkeypatch):
    import tiktoken

    monkeypatch.setattr(common, "PIECE_CHARS", 50)
    monkeypatch.setattr(common, "PART_CHARS", 300)
    bpe = tiktoken.get_encoding("gpt2")
    assert bpe.encode_ordinary("Hello world") == [15496, 995]
    texts = ["Hello world", Path(local.__file__).read_text(encoding="utf-8") * 3, "a\n\n\n b\nc \n d\n" * 50]
    common.build(tmp_path, "test", Tokenizer.meta_for("gpt2"), {"train": texts, "val": ["x"]})
    assert ids_of(tmp_path, "train").tolist() == [i for t in texts for i in [*bpe.encode_ordinary(t), 50256]]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab1'.! \n\n\n\r\t\u00a0\u2028\x1cé", max_size=80))
def test_long_documents_are_cut_where_gpt2_cuts(text):
    import regex

    gpt2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "PIECE_CHARS", 3)
        pieces = list(common._pieces(text))
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [t for piece, _ in pieces for t in gpt2.findall(piece)] == gpt2.findall(text)


def test_long_documents_are_cut_at_all(monkeypatch):
    monkeypatch.setattr(common, "PIECE_CHARS", 10)
    monkeypatch.setattr(common, "PART_CHARS", 20)
    line = "0123456789\n"
    parts = [(0, [(line, False)] * 2), (2, [(line, True), ("short", True), (line, False)]), (1, [(line, True)])]
    assert list(common._jobs([line * 3, "short", line * 2])) == parts


# ------------------------------------------------------------------------------------------ parallel and restarted


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(common, "PART_CHARS", 200)
    monkeypatch.setattr(common, "PIECE_CHARS", 20)


def one_by_one(texts):
    return [i for text in texts for i in [*text.encode(), 256]]


@pytest.mark.parametrize(
    "kind, workers", [("list", 1), ("generator", 1), ("Dataset", 1), ("IterableDataset", 1), ("list", 2)]
)
def test_parallel_is_one_by_one(kind, workers, small_parts, tmp_path):
    texts = {"list": list, "generator": iter}.get(kind)
    if texts is None:
        import datasets

        data = datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))})
        texts = (lambda _: data) if kind == "Dataset" else (lambda _: data.to_iterable_dataset())
    common.build(tmp_path, "test", BYTES, {"train": texts(TEXTS), "val": ["held out"]}, workers=workers)
    assert ids_of(tmp_path, "train").tolist() == one_by_one(TEXTS)
    assert documents_of(tmp_path, "val") == ["held out"]


def killed(texts, after, how):
    for i, text in enumerate(texts):
        if i == after:
            how()
        yield text


def interrupt():
    raise KeyboardInterrupt


def kill_workers():
    for worker in multiprocessing.active_children():
        worker.kill()


@pytest.mark.parametrize(
    "how, workers, said", [(interrupt, 1, "stopped"), (kill_workers, 2, "error: a worker was killed")]
)
def test_a_restart_uses_finished_parts(how, workers, said, small_parts, tmp_path, monkeypatch):
    out, whole = tmp_path / "out", tmp_path / "whole"
    build = {"workers": workers, "resume": True, "name": "same"}
    common.build(whole, "test", BYTES, {"train": TEXTS, "val": TEXTS[:3]}, name="same")
    with pytest.raises(SystemExit) as e:
        splits = {"train": killed(TEXTS, 30, how), "val": TEXTS[:3]}
        common.run(lambda: common.build(out, "test", BYTES, splits, **build))
    assert e.value.code.startswith(said)
    finished = {p.name for p in (out / "parts").glob("train-*.bin")}
    assert finished and not (out / "meta.json").exists()

    written, write_part = [], common._write_part
    monkeypatch.setattr(common, "_write_part", lambda path, *rest: (written.append(path.name), write_part(path, *rest)))
    common.build(out, "test", BYTES, {"train": TEXTS, "val": TEXTS[:3]}, **{**build, "workers": 1})
    assert finished.isdisjoint(written) and any(name.startswith("train") for name in written)
    assert contents(out) == contents(whole)


@pytest.mark.parametrize("change", ["source", "tokenizer"])
def test_parts_of_something_else_are_not_used(change, small_parts, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        common.build(tmp_path, "one", BYTES, {"train": killed(TEXTS, 30, interrupt), "val": ["v"]}, resume=True)
    assert list((tmp_path / "parts").glob("train-*.bin"))
    other = [text.upper() for text in TEXTS]
    source, tokenizer = "two", BYTES
    if change == "tokenizer":
        source, tokenizer = "one", Tokenizer.meta_for("chars", sorted(set("".join(other) + "v")))
    common.build(tmp_path, source, tokenizer, {"train": other, "val": ["v"]}, resume=True)
    decoded = Tokenizer(tokenizer).decode(ids_of(tmp_path, "train"))
    assert decoded == "".join(other)


def test_a_half_replaced_dataset_is_not_prepared(tmp_path, monkeypatch):
    splits = {"train": ["one", "two"], "val": ["three"]}
    common.build(tmp_path, "first", BYTES, splits)
    replace = os.replace

    def failing(source, target):
        if Path(target) == tmp_path / "val.bin":
            raise OSError("disk gone")
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk gone"):
        patch.setattr(os, "replace", failing)
        common.build(tmp_path, "second", BYTES, {"train": ["changed"], "val": ["too"]})
    with pytest.raises(ValueError, match="not prepared"):
        load_meta(str(tmp_path))
    common.build(tmp_path, "first", BYTES, splits)
    assert documents_of(tmp_path, "train") == ["one", "two"] and load_meta(str(tmp_path))["source"] == "first"


# ------------------------------------------------------------------------------------------------------- bad input


def bad_inputs(folder):
    """Files for the table below."""
    import pyarrow as pa
    from pyarrow import parquet

    write_inputs(folder / "in")
    (folder / "empty").mkdir()
    (folder / "blank.txt").write_text("")
    (folder / "latin1.txt").write_bytes("é".encode("latin-1"))
    (folder / "latin1.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xe9"}\n')
    (folder / "mixed").mkdir()
    (folder / "mixed/latin1.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    (folder / "key.jsonl").write_text('{"text": "ok"}\n\n{"body": "no"}\n')
    (folder / "null.jsonl").write_text('{"text": null}\n')
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (folder / "cut.jsonl").write_text('{"text": "ok"}\n{"text": "o')
    (folder / "fake.parquet").write_text("not parquet")
    parquet.write_table(pa.table({"body": ["a"]}), folder / "key.parquet")
    parquet.write_table(pa.table({"text": [1]}), folder / "number.parquet")


BAD = [
    ({"input": "missing.txt"}, "missing.txt does not exist"),
    ({"input": "empty"}, "holds no text"),
    ({"input": "blank.txt"}, "holds no text"),
    ({"input": "latin1.txt"}, "latin1.txt is not UTF-8 text (byte 0)"),
    ({"input": "latin1.jsonl"}, "latin1.jsonl is not UTF-8 text"),
    ({"input": "mixed"}, "mixed/latin1.jsonl is not UTF-8 text"),
    ({"input": "key.jsonl"}, "key.jsonl, line 3: no UTF-8 text under 'text' in {'body': 'no'}"),
    ({"input": "null.jsonl"}, "line 1: no UTF-8 text under 'text'"),
    ({"input": "list.jsonl"}, "line 1: no UTF-8 text under 'text' in [1, 2]"),
    ({"input": "half.jsonl"}, "line 1: no UTF-8 text"),
    ({"input": "cut.jsonl"}, "cut.jsonl, line 2 is not JSON"),
    ({"input": "in/d.jsonl", "text_key": "content"}, "line 1: no UTF-8 text under 'content'"),
    ({"input": "fake.parquet"}, "fake.parquet is not a parquet file"),
    ({"input": "key.parquet"}, "no UTF-8 text under 'text' in {'body': 'a'}"),
    ({"input": "number.parquet"}, "no UTF-8 text under 'text' in {'text': 1}"),
    ({"name": "../mine"}, "--name='../mine': use letters"),
    ({"name": ".hidden"}, "use letters"),
    ({"name": "a/b"}, "use letters"),
    ({"name": ""}, "use letters"),
    ({"name": "openwebtext"}, "openwebtext is the source folder of another dataset"),
    ({"name": "local"}, "local is the source folder of another dataset"),
    ({"name": "a_file"}, "a_file is a file"),
    ({"val_fraction": "0"}, "--val_fraction=0.0 must be above 0 and below 1"),
    ({"val_fraction": "1"}, "below 1"),
    ({"val_fraction": "nan"}, "below 1"),
    ({"input": "in/a.txt", "val_fraction": "0.99999"}, "there is no text for train.bin"),
    ({"out_dir": "in/deep"}, "would be read too: give another --out_dir"),
    ({"tokenizer": "gpt2"}, "vocabulary could not be fetched"),
]


@pytest.mark.parametrize("flags, message", BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_one_line_and_leaves_no_trace(flags, message, home, tmp_path, monkeypatch):
    import tiktoken

    def unreachable(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    bad_inputs(tmp_path)
    local.main([f"--input={tmp_path / 'in'}", "--tokenizer=bytes", "--name=mine"])
    for name in ("openwebtext", "local"):
        (home / name).mkdir()
        (home / name / "prepare.py").touch()
    (home / "a_file").touch()
    before = contents(tmp_path)
    flags = {"input": "in", "tokenizer": "bytes", "name": "mine"} | flags
    for key in ("input", "out_dir"):
        if key in flags:
            flags[key] = tmp_path / flags[key]
    assert message in error_of(local.main, *(f"--{k}={v}" for k, v in flags.items()))
    assert contents(tmp_path) == before
    error_of(local.main, *(f"--{k}={v}" for k, v in ({"name": "new"} | flags).items()))
    assert not any(p.name in ("new", "parts") for p in tmp_path.rglob("*"))


def test_a_script_ends_with_a_line_and_exit_code_1():
    for name, flags in (("local", ["--input=/missing", "--tokenizer=bytes", "--name=x"]), ("c4", ["--shards=0"])):
        command = [sys.executable, f"data/{name}/prepare.py", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------------------- downloads


PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 7


def test_shakespeare_is_downloaded_checked_and_split_as_in_nanogpt(tmp_path, monkeypatch):
    (tmp_path / "input.txt").write_text(PLAY)
    out, checksum = tmp_path / "out", hashlib.sha256(PLAY.encode()).hexdigest()
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "input.txt").as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", checksum)
    shakespeare.main([f"--out_dir={out}"])
    ids = {c: i for i, c in enumerate(sorted(set(PLAY)))}
    cut = int(len(PLAY) * 0.9)
    assert ids_of(out, "train").tolist() == [ids[c] for c in PLAY[:cut]]
    assert ids_of(out, "val").tolist() == [ids[c] for c in PLAY[cut:]]
    assert load_meta(str(out))["source"] == (tmp_path / "input.txt").as_uri()

    (tmp_path / "input.txt").write_text("changed")
    before = contents(out)
    shakespeare.main([f"--out_dir={out}"])  # what was downloaded is still there
    assert contents(out) == before
    (out / "parts" / "input.txt").write_text("damaged")
    line = error_of(shakespeare.main, f"--out_dir={out}")
    assert hashlib.sha256(b"changed").hexdigest() in line and checksum in line
    assert not (out / "parts" / "input.txt.partial").exists()
    assert (out / "train.bin").read_bytes() == before["train.bin"] and load_meta(str(out))
    (tmp_path / "input.txt").unlink()
    assert "could not download" in error_of(shakespeare.main, f"--out_dir={out}")


def test_a_broken_download_continues(tmp_path, monkeypatch):
    raw, asked = PLAY.encode(), []

    class Answer(io.BytesIO):
        def __init__(self, start, stop, status):
            super().__init__(raw[start:stop])
            self.status, self.headers = status, {"Content-Length": str(len(raw) - start)}

    def urlopen(request, timeout):
        asked.append(request.get_header("Range"))
        if asked[-1] == "bytes=999-":
            raise urllib.error.HTTPError(request.full_url, 416, "Range Not Satisfiable", {}, None)
        if (tmp_path / "again").exists():
            return Answer(0, None, 200)
        return Answer(100, None, 206) if asked[-1] == "bytes=100-" else Answer(0, 100, 200)

    monkeypatch.setattr(common.urllib.request, "urlopen", urlopen)
    arguments = ("http://example.invalid/x", tmp_path / "x", hashlib.sha256(raw).hexdigest())
    with pytest.raises(ValueError, match=f"broke off at 100 of {len(raw)} bytes"):
        common.download(*arguments)
    assert common.download(*arguments).read_bytes() == raw
    assert asked == [None, "bytes=100-"] and not (tmp_path / "x.partial").exists()

    (tmp_path / "again").touch()
    (tmp_path / "x").rename(tmp_path / "x.partial")
    (tmp_path / "x.partial").write_bytes(b"r" * 999)  # rubbish, longer than the file
    assert common.download(*arguments).read_bytes() == raw and asked[2:] == ["bytes=999-", None]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch, bpe):
    """A Hub of three small datasets, as its cache looks after a download; returns name → file → texts."""
    import gzip

    import huggingface_hub
    import pyarrow as pa
    from pyarrow import parquet

    random.seed(1)
    names = {
        "openwebtext": [f"plain_text/train-{i:05d}-of-00003.parquet" for i in range(3)],
        "minipile": ["data/train-00000-of-00002-ab.parquet", "data/train-00001-of-00002-cd.parquet"]
        + ["data/validation-00000-of-00001-ef.parquet", "data/test-00000-of-00001-01.parquet"],
        "c4": [f"en/c4-train.{i:05d}-of-01024.json.gz" for i in range(3)]
        + [f"en/c4-validation.{i:05d}-of-00008.json.gz" for i in range(8)],
    }
    made = {}
    for dataset, files in names.items():
        made[dataset] = {}
        for name in files:
            count = 900 if dataset == "openwebtext" else 5
            texts = made[dataset][name] = [f"{name} {i} {random.random()} ü\n" for i in range(count)]
            rows = [{"text": t, "url": "u", "timestamp": "2019-04-25T12:57:54Z"} for t in texts]
            path = tmp_path / "blobs" / dataset / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".gz"):
                path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
            else:
                parquet.write_table(pa.Table.from_pylist(rows), path)
            blob = path.rename(path.with_name(hashlib.sha256(path.read_bytes()).hexdigest()))
            link = tmp_path / "hub" / dataset / COMMIT / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)

    def snapshot_download(repo, repo_type, revision, allow_patterns):
        assert repo_type == "dataset" and "*" not in revision
        return str(tmp_path / "hub" / repo.split("/")[1] / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(common, "check_disk", lambda needs: None)
    monkeypatch.setattr(common, "PART_CHARS", 20000)
    return made


def prepared(script, out, *flags):
    script.main([f"--out_dir={out}", "--workers=1", *flags])
    meta = load_meta(str(out))
    assert meta["tokenizer"] == "gpt2" and COMMIT in meta["source"] and not (out / "parts").exists()
    return documents_of(out, "train"), documents_of(out, "val")


def test_openwebtext_is_split_as_in_nanogpt(hub, tmp_path):
    import datasets

    texts = [t for file in hub["openwebtext"].values() for t in file]
    split = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    train, val = prepared(openwebtext, tmp_path / "owt")
    assert len(val) == 2 and val == list(split["test"]["text"])
    assert sorted(train) == sorted(split["train"]["text"]) and train == [t for t in texts if t not in val]


def test_minipile_and_c4_keep_their_splits(hub, tmp_path):
    files = hub["minipile"]
    train, val = prepared(minipile, tmp_path / "m")
    assert [t for name in list(files)[:2] for t in files[name]] == train and val == files[list(files)[2]]
    files = hub["c4"]
    train, val = prepared(c4, tmp_path / "c", "--shards=2")
    assert [t for name in list(files)[:2] for t in files[name]] == train
    assert [t for name in list(files)[3:] for t in files[name]] == val
    assert "2 of 1024" in load_meta(str(tmp_path / "c"))["source"]


def test_a_killed_hub_dataset_is_continued(hub, tmp_path, monkeypatch):
    prepared(openwebtext, tmp_path / "whole")
    write_part, written = common._write_part, []

    def dying(path, *rest):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path.name)
        write_part(path, *rest)

    monkeypatch.setattr(common, "_write_part", dying)
    with pytest.raises(KeyboardInterrupt):
        prepared(openwebtext, tmp_path / "again")
    monkeypatch.setattr(common, "_write_part", lambda path, *rest: (written.append(path.name), write_part(path, *rest)))
    prepared(openwebtext, tmp_path / "again")
    assert len(written) == len(set(written)) > 4  # no part was made twice
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


@pytest.mark.parametrize("script", [openwebtext, minipile, c4])
def test_no_network_no_package_no_room(script, hub, tmp_path, monkeypatch):
    import huggingface_hub

    def fails(*args, **kwargs):
        raise ConnectionError("name resolution failed\nand more")

    out = f"--out_dir={tmp_path / 'out'}"
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", fails)
        line = error_of(script.main, out)
        assert "could not download" in line and script.REVISION in line and "name resolution failed" in line
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        assert "the package datasets is missing: pip install" in error_of(script.main, out)
    with monkeypatch.context() as patch:
        patch.setattr(common, "check_disk", CHECK_DISK)
        patch.setattr(common.shutil, "disk_usage", lambda path: type("", (), {"free": 5_000_000_000}))
        assert "has 5.0 GB free, and this needs" in error_of(script.main, out)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_or_damaged_hub_download(hub, tmp_path):
    folder = tmp_path / "hub" / "minipile" / COMMIT / "data"
    first, second = sorted(folder.glob("train-*"))
    with open(second.resolve(), "ab") as f:
        f.write(b"x")
    assert f"{second.name} was damaged" in error_of(minipile.main, f"--out_dir={tmp_path / 'out'}")
    assert first.exists() and not second.exists()  # a dangling link: the next run downloads it again
    second.unlink()
    assert "gave only 1 of the files data/train-*" in error_of(minipile.main, f"--out_dir={tmp_path / 'out'}")
    assert "gave only 0 of the files en/c4-train.00003" in error_of(c4.main, f"--out_dir={tmp_path}", "--shards=4")


def test_disk_space_counts_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(common.shutil, "disk_usage", lambda path: type("", (), {"free": 100}))
    common.check_disk({tmp_path / "not/there": 60, tmp_path: 40})
    common.check_disk({tmp_path: 100, tmp_path / "finished": -1000})
    for needs in ({tmp_path / "not/there": 60, tmp_path: 41}, {tmp_path: 101, tmp_path / "finished": -1000}):
        with pytest.raises(ValueError, match="needs"):
            common.check_disk(needs)
    assert common._size(tmp_path) == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"12345")
    assert common._size(tmp_path) == 5 and common._size(tmp_path / "none") == 0
