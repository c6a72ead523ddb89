"""How a user's files are read: texts, folders, records; what is refused, and what is left out and
said."""

import gzip
import json
import os
import pickle
import re
import shlex
import time
from pathlib import Path

import pytest

from nanodnt.data import load_meta
from nanodnt.data.inputs import Notes, decode_text, find_files, read_document, read_text
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.prepare import text
from support import prepared

local = prepared.load_script("local")
GPT2 = Tokenizer.meta_for("gpt2_4096")


@pytest.fixture
def home(tmp_path, monkeypatch):
    return prepared.use_other_home(tmp_path / "data", monkeypatch)


def write_tree(folder: Path, files: dict) -> Path:
    """Write {name: text or bytes} below `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def made_texts(folder: Path) -> list:
    return sorted(sum(prepared.texts_of(folder), []))


# -------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_a_byte_order_mark_make_no_difference(end, mark, tmp_path):
    written = mark + f"é one{end}{end}two\ufeff{end}"
    file = write_tree(tmp_path, {"a.txt": written}) / "a.txt"
    assert (
        read_text(file)
        == read_document(file)
        == decode_text(written.encode(), "here")
        == "é one\n\ntwo\ufeff\n"
    )


NO_TEXT = {
    "a.txt.gz": (gzip.compress(b"text"), "binary, no text: byte 3 is 0; unpack or convert"),
    "pointer.txt": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "a pointer of Git LFS to the file: fetch",
    ),
    "utf16.txt": ("text".encode("utf-16"), "binary, no text: byte 3 is 0; unpack or convert"),
    "nul.txt": (b"text\0text", "binary, no text: byte 4 is 0"),
    "latin1.txt": ("caf\xe9".encode("latin-1"), "not UTF-8 text: byte 3 is not; unpack or convert"),
    "table.csv": (b"text\na\n", "a table: write a .jsonl file, or name it .txt"),
    "book.ipynb": (b'{"cells": []}', "a notebook: convert it"),
    "records.jsonl": (b'{"text": "a"}\n', "a file of records, not one text: prepare it"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused_by_name(name, home, tmp_path, capsys):
    """Alone it is refused in one line with what to do; in a folder it is left out, and this is
    said."""
    content, words = NO_TEXT[name]
    folder = write_tree(tmp_path / "in", {name: content, "a.txt": "one", "b.txt": "two"})
    with pytest.raises(ValueError) as e:
        read_document(folder / name)
    assert str(e.value).startswith(f"{folder / name} is {words}") and "\n" not in str(e.value)
    if not name.startswith("records"):
        why, _, _ = words.partition(":")
        assert why in prepared.error_of(
            local.main, f"--input={folder / name}", "--tokenizer=bytes", "--name=x"
        )
        local.main([f"--input={folder}", "--tokenizer=bytes", "--name=x"])
        assert capsys.readouterr().err == f"note: {why}, so left out: {folder / name}\n"
        assert made_texts(home / "x") == ["one", "two"]


# ------------------------------------------------------------------------------------------ folders


def test_links_are_followed_once(tmp_path):
    """Folders and files behind links are read; nothing twice, nothing for ever, and what is left
    out is noted."""
    inside = write_tree(tmp_path / "in", {"a.txt": "a", "deep/b.txt": "b", ".git/config": "x"})
    outside = write_tree(tmp_path / "out", {"c.txt": "c", "d.txt": "d"})
    links = {"far": outside, "one": outside / "c.txt", "loop": inside, "dead": tmp_path / "nowhere"}
    for name, target in links.items():
        (inside / name).symlink_to(target)
    (inside / "self").symlink_to(inside / "self")
    os.mkfifo(inside / "pipe")
    notes = Notes()
    assert [name for name, _ in find_files(inside, notes)] == [
        "a.txt",
        "deep/b.txt",
        "far/d.txt",
        "one",
    ]
    found = {
        what: sorted(os.path.relpath(name, inside) for name in names)
        for what, names in notes.names.items()
    }
    assert found == {
        "hidden, so left out": [".git"],
        "links to what is read already, so left out": ["far/c.txt", "loop"],
        "cannot be read (No such file or directory), so left out": ["dead"],
        "cannot be read (Too many levels of symbolic links), so left out": ["self"],
        "neither file nor folder, so left out": ["pipe"],
    }


def test_many_are_counted(capsys):
    notes = Notes()
    for i in range(1234):
        notes.leave_out("odd", f"file\n{i}")
    notes.print()
    notes.print()
    first = "file?0; file?1; file?2; file?3; file?4 and others, 1,234 in all"
    assert capsys.readouterr().err == f"note: odd, so left out: {first}\n"


# ------------------------------------------------------------------------------------------ records


def test_records_of_every_kind(home, tmp_path, capsys):
    lines = "".join(json.dumps({"text": f"line {i}\r\nand\rend"}) + "\r\n" for i in range(2))
    folder = write_tree(
        tmp_path / "in", {"a.ndjson": "\ufeff" + lines, "e.jsonl": '"plain"\n\n{"text": ""}\n'}
    )
    array = [{"text": "first"}, "second", {"text": ""}]
    write_tree(
        folder,
        {"b.json": json.dumps(array, indent=1), "c.json": '{"name": "x"}', "d.json": "// no JSON"},
    )
    local.main([f"--input={folder}", "--tokenizer=bytes", "--name=x"])
    assert made_texts(home / "x") == [
        "first",
        "line 0\nand\nend",
        "line 1\nand\nend",
        "plain",
        "second",
    ]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"note: empty, so left out: {folder}/b.json, record 3; {folder}/e.jsonl, line 3",
        f"note: no array of records, so left out: {folder}/c.json",
        f"note: not JSON (Expecting value: line 1 column 1 (char 0)), so left out: {folder}/d.json",
    ]
    flags = "--tokenizer=bytes", "--name=x"
    for file, hint in (
        ("c.json", "write [ … ]"),
        ("d.json", "name it .jsonl if it has an object a line"),
    ):
        assert hint in prepared.error_of(local.main, f"--input={folder / file}", *flags)


def test_records_that_are_no_parquet_are_refused(home, tmp_path):
    """In a folder too: a file of records holds most of it."""
    folder = write_tree(
        tmp_path / "in",
        {"a.txt": "one", "c.parquet": "version https://git-lfs.github.com/spec/v1\n"},
    )
    for path in (folder / "c.parquet", folder):
        error = prepared.error_of(local.main, f"--input={path}", "--tokenizer=bytes", "--name=x")
        assert f"{folder / 'c.parquet'} is not a parquet file or damaged" in error


def test_bad_records_are_left_out_on_request(home, tmp_path, capsys):
    lines = b'{"text": "one"}\n{"text": 2}\n{"body": "x"}\n{"text": "\xe9"}\n'
    lines += b'{"text": "two"}\n{"text": "cu'
    file = write_tree(tmp_path, {"a.jsonl": lines}) / "a.jsonl"
    flags = f"--input={file}", "--tokenizer=bytes", "--name=x"
    assert "line 2: no UTF-8 text under 'text'" in prepared.error_of(local.main, *flags)
    capsys.readouterr()
    local.main([*flags, "--skip_bad"])
    assert made_texts(home / "x") == ["one", "two"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: bad records, so left out: ")
    assert re.findall(r"line \d", line)[:4] == ["line 2", "line 3", "line 4", "line 6"]


# ----------------------------------------------------------------------------------- nanoGPT's data


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("opened",)


@pytest.mark.parametrize("tokenizer", ["chars", "gpt2"])
def test_nanogpt_s_data_is_known(tokenizer, tmp_path, home, monkeypatch):
    """The message names the command that prepares it; meta.pkl, which makes a folder if opened,
    stays shut."""
    monkeypatch.chdir(tmp_path)
    files = {"train.bin": bytes(20), "val.bin": bytes(20), "prepare.py": "import pickle"}
    files |= {"meta.pkl": pickle.dumps(RunsCode())} if tokenizer == "chars" else {}
    for folder, name in ((tmp_path / "old's", "old's"), (home / "old", "my_old")):
        source = shlex.quote(str(write_tree(folder, files)))
        command = f"prepare.py --input={source} --tokenizer={tokenizer} --name={shlex.quote(name)}`"
        with pytest.raises(ValueError) as e:
            load_meta(str(folder))
        assert command in str(e.value) and "\n" not in str(e.value)
    assert not Path("opened").exists()


# ----------------------------------------------------------------------------- what tokenizers fear


def test_blanks_are_cut_for_gpt2():
    """A million of them in a row stop tiktoken. Below 100,000 they are its own tokens."""
    tokenizer, whole = Tokenizer(GPT2), "a" + " " * 1_200_000 + "b"
    assert tokenizer.bpe.decode(tokenizer.encode(whole)) == whole
    for stretch in ("a" + " " * 9_000 + "b", "ab" * 20_000, "é " + "7" * 12_000, "\n" * 11_000):
        assert tokenizer.encode(stretch) == tokenizer.bpe.encode_ordinary(stretch)


def test_ctrl_c_ends_processes_that_tokenise():
    """They are stopped in the midst of their work: an hour, here."""
    with pytest.raises(KeyboardInterrupt), text.start_pool(2) as pool:
        pool.submit(time.sleep, 3600)
        raise KeyboardInterrupt
