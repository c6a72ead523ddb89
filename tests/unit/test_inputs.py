"""How a user's files are read: texts, folders, records; what is refused, and what is left out and said."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shlex
import signal
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nanodnt.data import load_meta
from nanodnt.data.inputs import Notes, decode_text, find_files, read_document, read_text
from nanodnt.data.tokenizer import STRETCH, Tokenizer, call_interruptibly, cut_stretches
from nanodnt.prepare import text
from support import prepared
from support.runs import ROOT

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


# ------------------------------------------------------------------------------------------------------------- texts


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_a_byte_order_mark_make_no_difference(end, mark, tmp_path):
    written = mark + f"é one{end}{end}two\ufeff{end}"
    file = write_tree(tmp_path, {"a.txt": written}) / "a.txt"
    assert read_text(file) == read_document(file) == decode_text(written.encode(), "here") == "é one\n\ntwo\ufeff\n"


@pytest.mark.parametrize("text", ["PAR1 is a receptor of thrombin.\n", "GIF89a is a format of images.\n"])
def test_a_text_may_begin_with_the_letters_of_another_format(text):
    assert decode_text(text.encode(), "here") == text


def make_zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as f:
        f.writestr("a.txt", "text")
    return made.getvalue()


def make_array() -> bytes:
    made = io.BytesIO()
    np.save(made, np.arange(9))
    return made.getvalue()


NO_TEXT = {
    "a.txt.gz": (gzip.compress(b"text"), "compressed by gzip: unpack"),
    "a.txt.bz2": (bz2.compress(b"text"), "compressed by bzip2: unpack"),
    "a.txt.xz": (lzma.compress(b"text"), "compressed by xz: unpack"),
    "a.docx": (make_zip(), "a zip archive, or a document in one: unpack"),
    "a.pdf": (b"%PDF-1.4\n1 0 obj\nendobj\n", "a PDF document: convert"),
    "a.rtf": (b"{\\rtf1 text}", "an RTF document: save"),
    "a.png": (b"\x89PNG\r\n\x1a\n", "an image"),
    "a.jpg": (b"\xff\xd8\xff\xe0", "an image"),
    "a.gif": (b"GIF89a\1\0\1\0", "binary, no text: byte 7 is 0"),
    "pointer.txt": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS to the file: fetch"),
    "utf16.txt": ("text".encode("utf-16"), "UTF-16: convert"),
    "utf16.log": (b"\xfe\xff" + "text".encode("utf-16-be"), "UTF-16: convert"),
    "utf32.txt": ("text".encode("utf-32"), "UTF-32: convert"),
    "a.ps": (b"%!PS-Adobe-3.0\n", "a PostScript document: convert"),
    "unmarked.txt": ("text".encode("utf-16-le"), "binary, no text: byte 1 is 0"),
    "nul.txt": (b"text\0text", "binary, no text: byte 4 is 0"),
    "array.npy": (make_array(), "binary, no text"),
    "latin1.txt": ("caf\xe9".encode("latin-1"), "not UTF-8 text: byte 3 is not; convert"),
    "data.pickle": (pickle.dumps(["text"], protocol=0), "a pickle, which could run code"),
    "table.csv": (b"text\na\n", "a table: write a .jsonl file, or name it .txt"),
    "table.tsv": (b"text\na\n", "a table"),
    "book.ipynb": (b'{"cells": []}', "a notebook: convert"),
    "ids.bin": (b"text", "binary: only token ids in the form of llm.c"),
    "renamed.md": (b"PAR1\x15\4\x15PAR1", "a parquet file: give it the suffix .parquet"),
    "records.jsonl": (b'{"text": "a"}\n', "a file of records, not one text: prepare it"),
    "records.ndjson": (b'{"text": "a"}\n', "a file of records, not one text: prepare it"),
    "records.json": (b'[{"text": "a"}]', "a file of records, not one text: prepare it"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_refused_by_name(name, home, tmp_path, capsys):
    """Alone it is refused in one line with what to do; in a folder it is left out, and this is said."""
    content, words = NO_TEXT[name]
    folder = write_tree(tmp_path / "in", {name: content, "a.txt": "one", "b.txt": "two"})
    with pytest.raises(ValueError) as e:
        read_document(folder / name)
    assert str(e.value).startswith(f"{folder / name} is {words}") and "\n" not in str(e.value)
    if not name.startswith("records"):
        assert words.split(":")[0] in prepared.error_of(
            local.main, f"--input={folder / name}", "--tokenizer=bytes", "--name=x"
        ) or name.endswith(".bin")
        local.main([f"--input={folder}", "--tokenizer=bytes", "--name=x"])
        assert capsys.readouterr().err == f"note: {words.split(':')[0]}, so left out: {folder / name}\n"
        assert made_texts(home / "x") == ["one", "two"]


def test_a_folder_cannot_be_read_as_a_text(tmp_path):
    with pytest.raises(ValueError, match=r"is not readable \(Is a directory\): name a text file"):
        read_document(tmp_path)


# ------------------------------------------------------------------------------------------------------------ folders


def test_links_are_followed_once(tmp_path):
    """Folders and files behind links are read; nothing twice, nothing for ever, and what is left out is noted."""
    inside = write_tree(tmp_path / "in", {"a.txt": "a", "deep/b.txt": "b", ".git/config": "x", ".hidden.txt": "x"})
    outside = write_tree(tmp_path / "out", {"c.txt": "c", "er/d.txt": "d", "e.txt": "e"})
    links = {"far": outside, "one": outside / "e.txt", "deep/again": outside / "er", "dead": tmp_path / "nowhere"}
    links |= {"loop": inside, "deep/up": tmp_path, "also": inside / "deep", "same.txt": inside / "a.txt"}
    links |= {"self": inside / "self"}
    for name, target in links.items():
        (inside / name).symlink_to(target)
    (outside / "back").symlink_to(inside)
    os.mkfifo(inside / "pipe")
    notes = Notes()
    names = [name for name, _ in find_files(inside, notes)]
    assert names == ["a.txt", "deep/again/d.txt", "deep/b.txt", "far/c.txt", "far/e.txt"]
    found = {what: sorted(os.path.relpath(name, inside) for name in names) for what, names in notes.names.items()}
    twice = ["also", "far/er", "one", "same.txt"]
    assert found == {
        "hidden, so left out": [".git", ".hidden.txt"],
        "links to what is read already, so left out": twice,
        "links to a folder that holds the input, so left out": ["deep/up", "far/back", "loop"],
        "neither file nor folder, so left out": ["dead", "pipe", "self"],
    }


def test_half_of_the_corpus_behind_a_link(home, tmp_path, capsys):
    texts = {f"{i}.txt": f"text {i}" for i in range(10)}
    folder = write_tree(tmp_path / "in", dict([*texts.items()][:5]))
    (folder / "more").symlink_to(write_tree(tmp_path / "other", dict([*texts.items()][5:])))
    local.main([f"--input={folder}", "--tokenizer=bytes", "--name=x"])
    assert made_texts(home / "x") == sorted(texts.values()) and capsys.readouterr().err == ""


def test_what_cannot_be_opened_is_said(home, tmp_path, capsys, monkeypatch):
    folder = write_tree(tmp_path / "in", {"a.txt": "a", "b.txt": "b", "c.txt": "c", "shut/d.txt": "d", "empty.md": ""})
    iterdir, read_bytes = Path.iterdir, Path.read_bytes

    def refuse(path, name, then):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return then(path)

    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path, "shut", iterdir))
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path, "b.txt", read_bytes))
    local.main([f"--input={folder}", "--tokenizer=bytes", "--name=x"])
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == [
        f"note: cannot be read (Permission denied), so left out: {folder}/shut",
        f"note: empty, so left out: {folder}/empty.md",
        f"note: not readable (Permission denied), so left out: {folder}/b.txt",
    ]
    monkeypatch.undo()


def test_many_are_counted(capsys):
    notes = Notes()
    for i in range(1234):
        notes.leave_out("odd", f"file\n{i}")
    notes.print()
    notes.print()
    first = "file?0; file?1; file?2; file?3; file?4 and others, 1,234 in all"
    assert capsys.readouterr().err == f"note: odd, so left out: {first}\n"


# ------------------------------------------------------------------------------------------------------------ records


def test_records_of_every_kind(home, tmp_path, capsys):
    lines = "".join(json.dumps({"text": f"line {i}"}) + "\r\n" for i in range(2))
    folder = write_tree(tmp_path / "in", {"a.ndjson": "\ufeff" + lines, "e.jsonl": '"plain"\r{"text": ""}\r'})
    array = [{"text": "first"}, "second", {"text": ""}]
    write_tree(folder, {"b.json": json.dumps(array, indent=1), "c.json": '{"name": "x"}', "d.json": "// no JSON"})
    local.main([f"--input={folder}", "--tokenizer=bytes", "--name=x"])
    assert made_texts(home / "x") == ["first", "line 0", "line 1", "plain", "second"]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"note: empty, so left out: {folder}/b.json, record 3; {folder}/e.jsonl, line 2",
        f"note: no array of records, so left out: {folder}/c.json",
        f"note: not JSON (Expecting value: line 1 column 1 (char 0)), so left out: {folder}/d.json",
    ]
    hint = "write [ … ], or one object a line into a .jsonl file"
    flags = "--tokenizer=bytes", "--name=x"
    assert hint in prepared.error_of(local.main, f"--input={folder}/c.json", *flags)
    assert "name it .jsonl if it has an object a line" in prepared.error_of(
        local.main, f"--input={folder}/d.json", *flags
    )


def test_line_ends_in_records_are_those_of_texts(home, tmp_path):
    """So what a model learns from a record is what evaluate.py reads of the same text in a file."""
    lines = "".join(json.dumps({"text": f"{i}\r\nand\rend\r\n"}) + "\n" for i in range(2))
    file = write_tree(tmp_path, {"a.jsonl": lines}) / "a.jsonl"
    local.main([f"--input={file}", "--tokenizer=bytes", "--name=x"])
    assert made_texts(home / "x") == [f"{i}\nand\nend\n" for i in range(2)]


def test_records_that_are_pointers_of_git_lfs_are_refused(home, tmp_path):
    """All files of a dataset are such pointers after a `git clone` without Git LFS. A folder is refused, too."""
    folder = write_tree(tmp_path / "in", {"a.txt": "one", "b.txt": "two"})
    for name in ("c.parquet", "c.jsonl"):
        write_tree(folder, {name: "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"})
        for path in (folder / name, folder):
            error = prepared.error_of(local.main, f"--input={path}", "--tokenizer=bytes", "--name=x")
            assert f"{folder / name}" in error and "is a pointer of Git LFS to the file: fetch" in error
        (folder / name).unlink()


def test_bad_records_are_left_out_on_request(home, tmp_path, capsys):
    lines = b'{"text": "one"}\n{"text": 2}\n{"body": "x"}\n{"text": "\xe9"}\n{"text": "two"}\n{"text": "cu'
    file = write_tree(tmp_path, {"a.jsonl": lines}) / "a.jsonl"
    flags = f"--input={file}", "--tokenizer=bytes", "--name=x"
    assert "line 2: no UTF-8 text under 'text'" in prepared.error_of(local.main, *flags)
    capsys.readouterr()
    local.main([*flags, "--skip_bad"])
    assert made_texts(home / "x") == ["one", "two"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: bad records, so left out: ")
    assert re.findall(r"line \d", line)[:4] == ["line 2", "line 3", "line 4", "line 6"]


# ------------------------------------------------------------------------------------------------------ nanoGPT's data


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("opened",)


@pytest.fixture
def nanogpt(tmp_path, monkeypatch):
    """A folder as nanoGPT's data/shakespeare_char, whose meta.pkl makes a folder if it is opened."""
    monkeypatch.chdir(tmp_path)
    play = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 20
    ids = {c: i for i, c in enumerate(sorted(set(play)))}
    cut = int(len(play) * 0.9)
    splits = {"train.bin": play[:cut], "val.bin": play[cut:]}
    files = {name: np.array([ids[c] for c in part], "<u2").tobytes() for name, part in splits.items()}
    files |= {"meta.pkl": pickle.dumps(RunsCode()), "input.txt": play, "prepare.py": "import pickle", "readme.md": "x"}
    return write_tree(tmp_path / "old" / "shakespeare", files)


def command_in(message: str) -> list:
    """The arguments of the command that a message names."""
    python, script, *flags = shlex.split(re.search(r"run `(.*)`", message)[1])
    assert (python, script) == ("python", "data/local/prepare.py")
    return flags


@pytest.mark.parametrize("way", ["prepare", "one file", "train"])
def test_nanogpt_s_data_is_known_and_the_advice_works(way, nanogpt, home):
    """Whichever way it is met, the command that the message names prepares it: the same splits, the same ids."""
    if way == "train":
        with pytest.raises(ValueError, match="nanoGPT's form") as e:
            load_meta(str(nanogpt))
        message = str(e.value)
    else:
        source = nanogpt if way == "prepare" else nanogpt / "train.bin"
        message = prepared.error_of(local.main, f"--input={source}", "--tokenizer=chars", "--name=x")
    assert "nanoGPT's form, which are not read" in message and "\n" not in message
    local.main(command_in(message))
    for split in ("train", "val"):
        old = np.fromfile(nanogpt / f"{split}.bin", "<u2")
        assert prepared.ids_of(home / "shakespeare", split).tolist() == old.tolist()
    assert load_meta("shakespeare")["tokenizer"] == "chars"
    assert not Path("opened").exists()


def test_nanogpt_s_data_of_gpt2_tokens(nanogpt, home):
    for name in ("meta.pkl", "input.txt"):
        (nanogpt / name).unlink()
    with pytest.raises(ValueError, match="--input=TEXT --tokenizer=gpt2 .*where TEXT is the text"):
        load_meta(str(nanogpt))
    shards = write_tree(nanogpt.parent / "plain", {"notes.md": "a", "more.md": "b"})
    local.main([f"--input={shards}", "--tokenizer=bytes", "--name=plain"])  # no false alarm
    assert made_texts(home / "plain") == ["a", "b"]


# ---------------------------------------------------------------------------------------------- what tokenizers fear

LONG = {
    "blanks": "a" + " " * 1_200_000 + "b",
    "letters": "ab" * 20_000,
    "digits": "é " + "7" * 12_000,
    "signs": "-=" * 6_000,
    "newlines": "\n" * 11_000,
    "ideographs": "中" * 11_000,
}


@pytest.mark.parametrize("kind", LONG)
def test_long_stretches_are_cut_for_gpt2(kind, home, tmp_path, capsys):
    """The tokenizer gets no word of more than about two stretches; the text is whole, and the document is named."""
    lengths, whole = [], LONG[kind]
    tokenizer, bpe = Tokenizer(GPT2), Tokenizer(GPT2).bpe

    class Watched:
        def encode_ordinary(self, part):
            words = re.findall(r"\s+|\S+", part)
            lengths.append(max(map(len, words), default=0))
            return bpe.encode_ordinary(part)

    tokenizer.bpe = Watched()
    assert bpe.decode(tokenizer.encode(whole)) == whole
    assert max(lengths) <= 2 * STRETCH
    folder = write_tree(tmp_path / "in", {"long.txt": whole, "short.txt": "short"})
    local.main([f"--input={folder}", "--tokenizer=gpt2_4096", "--name=x"])
    assert made_texts(home / "x") == sorted([whole, "short"])
    said = "letters, digits, signs or blanks in a row, so cut for the tokenizer: long.txt\n"
    assert capsys.readouterr().err == f"note: more than {STRETCH:,} {said}"


ORDINARY = {
    "prose": "It was the best of times, it was the worst of times.\n" * 2000,
    "one line": "to be or not to be, that is the question " * 3000,
    "code": (ROOT / "train.py").read_text(encoding="utf-8") * 4,
    "base64": "iVBORw0KGgo/AAAANSUhEUgAA+AUA=" * 3000,
    "minified": "function(a,b){return a.b+1};" * 3000,
    "chinese": "天地玄黃，宇宙洪荒。" * 3000,
    "almost": ("x" * (STRETCH - 1) + " ") * 3,
    "table": ("-" * 200 + "\n") * 300,
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_texts_are_not_cut(kind):
    whole = ORDINARY[kind]
    assert cut_stretches(whole) == [whole]
    tokenizer = Tokenizer(GPT2)
    assert tokenizer.encode(whole) == tokenizer.bpe.encode_ordinary(whole) and tokenizer.remarks(whole) == []


def test_a_special_name_in_a_text_is_said(home, tmp_path, capsys):
    folder = write_tree(tmp_path / "in", {"a.txt": "one<|endoftext|>two", "b.txt": "three"})
    for kind in ("bytes", "gpt2_4096", "chars"):
        local.main([f"--input={folder}", f"--tokenizer={kind}", "--name=x"])
        said = "note: <|endoftext|> is read as ordinary text, not as a token: a.txt\n"
        assert capsys.readouterr().err == said
        if kind != "chars":
            assert made_texts(home / "x") == ["one<|endoftext|>two", "three"]


def test_ctrl_c_ends_a_call_of_a_library():
    """The first one, while the library does not return."""
    released = threading.Event()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(released.wait)
    released.set()
    assert call_interruptibly(sorted, [2, 1], reverse=True) == [2, 1]
    with pytest.raises(ZeroDivisionError):
        call_interruptibly(divmod, 1, 0)


def test_ctrl_c_ends_processes_that_tokenise():
    """They are stopped in the midst of their work: an hour, here."""
    with pytest.raises(KeyboardInterrupt), text.start_pool(2) as pool:
        pool.submit(time.sleep, 3600)
        raise KeyboardInterrupt
