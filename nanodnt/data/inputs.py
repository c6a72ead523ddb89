"""Input that a user names, to prepare a dataset from or to read: files, their texts and records;
and the folder to write to."""

import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanodnt.files import DATA, check_folder, make_printable

LINES = (".jsonl", ".ndjson")  # files with an object a line
RECORDS = (*LINES, ".json", ".parquet")
# Files that are not read as one text, by suffix: their kind, and advice.
A_RECORD_FILE = ("a file of records, not one text", "prepare it, and name the dataset")
A_TABLE = ("a table", "write a .jsonl file, or name it .txt to read all of it")
OTHER_SUFFIXES = {
    **dict.fromkeys(RECORDS, A_RECORD_FILE),
    ".csv": A_TABLE,
    ".tsv": A_TABLE,
    ".ipynb": ("a notebook", "convert it (jupyter nbconvert --to script)"),
}
LFS_POINTER = b"version https://git-lfs"
UNPACK = "unpack or convert it first"


class Notes:
    """Collects remarks on how the input is read, each with the names of its files or records."""

    def __init__(self, skip_bad: bool = False):
        """`skip_bad`: leave out a record that cannot be used; else it is an error."""
        self.skip_bad = skip_bad
        self.names: dict[str, list[str]] = {}  # {remark: names}

    def add(self, remark: str, name: str) -> None:
        """Note a remark on the file or record `name`."""
        self.names.setdefault(remark, []).append(name)

    def leave_out(self, why: str, name: str) -> None:
        """Note that `name` is not read."""
        self.add(f"{why}, so left out", name)

    def leave_out_bad(self, error: ValueError) -> None:
        """Note that the record in the message of `error` is left out. Without `skip_bad`, raise the
        error."""
        if not self.skip_bad:
            raise error
        self.leave_out("bad records", str(error))

    def print(self) -> None:
        """Print a line for each remark, with the first names and their number, and forget them."""
        for remark, names in self.names.items():
            line = f"note: {remark}: {'; '.join(names[:5])}"
            if len(names) > 5:
                line += f" and others, {len(names):,} in all"
            print(make_printable(line), file=sys.stderr)
        self.names = {}


class NotText(ValueError):
    """A file that is no text. `why` is the reason without the file's name."""

    def __init__(self, where: Path | str, why: str, advice: str):
        super().__init__(f"{where} is {why}: {advice}")
        self.why = why


class InputFile(NamedTuple):
    """One input file."""

    name: str  # path inside the folder that the user named
    path: Path


def output_folder(args: Namespace, *flags: str, may_replace: bool = False) -> Path:
    """The folder to write the dataset --name to.

    Raises ValueError where it cannot be that, for a share to hold out that is not between 0 and 1,
    and where an input (`flags` are the names of their flags) is not there or holds the folder. With
    `may_replace` the folder may be that of another script's dataset."""
    out = args.out_dir or DATA / args.name
    if not re.fullmatch(r"\w[\w.-]*", args.name, re.ASCII):
        raise ValueError(
            f"--name={args.name!r}: use letters, digits and '_', after the first also '.' and '-'"
        )
    check_folder(out, "--out_dir")
    if (out / "prepare.py").exists() and not may_replace:
        raise ValueError(f"{out} is the source folder of another dataset: give another --name")
    for flag in ("val_fraction", "val_share"):
        share = getattr(args, flag, None)
        if share is not None and not 0 < share < 1:
            raise ValueError(f"--{flag}={share} must be above 0 and below 1")
    for flag in flags:
        path = getattr(args, flag)
        if not path.exists():
            raise ValueError(f"--{flag}={path} does not exist")
        if out.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{out} lies in --{flag}={path} and would be read too: give another --out_dir"
            )
    return out


def find_files(path: Path, notes: Notes) -> list[InputFile]:
    """The file `path`, or the files below that folder, sorted by name.

    Links are followed. Files that are hidden or cannot be read, and those that would be read twice,
    are left out and noted."""
    if not path.is_dir():
        return [InputFile(path.name, path)]
    files = []
    seen = {_identity(path)}

    def leave_out_unreadable(error: OSError) -> None:
        notes.leave_out(f"cannot be read ({error.strerror})", str(error.filename))

    walk = os.walk(path, onerror=leave_out_unreadable, followlinks=True)
    for folder, folder_names, file_names in walk:
        names = sorted([*folder_names, *file_names])
        folder_names.clear()  # os.walk goes on with those that are put back
        for name in names:
            file = Path(folder, name)
            if name.startswith("."):
                notes.leave_out("hidden", str(file))
                continue
            try:
                identity = _identity(file)
            except OSError as error:  # a link to nothing, or to itself
                leave_out_unreadable(error)
                continue
            if identity in seen:
                notes.leave_out("links to what is read already", str(file))
            elif file.is_dir():
                folder_names.append(name)
            elif file.is_file():
                files.append(InputFile(file.relative_to(path).as_posix(), file))
            else:
                notes.leave_out("neither file nor folder", str(file))
            seen.add(identity)
    return sorted(files)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


# -------------------------------------------------------------------------------------------- texts


def read_text(file: Path) -> str:
    """The text of a file, as `decode_text` gives it. Raises ValueError, one line, where it cannot
    be read."""
    try:
        raw = file.read_bytes()
    except OSError as e:
        raise NotText(file, f"not readable ({e.strerror})", "name a text file") from None
    return decode_text(raw, file)


def read_document(file: Path) -> str:
    """`read_text` of a file that by its name is one text too: no records, no table."""
    suffix = file.suffix.lower()
    if suffix in OTHER_SUFFIXES:
        raise NotText(file, *OTHER_SUFFIXES[suffix])
    return read_text(file)


def decode_text(raw: bytes, where: Path | str) -> str:
    r"""Text in UTF-8 without a byte order mark, with every end of a line (\r\n, \r) as \n. `where`:
    the file's name, for messages.

    Raises ValueError, one line, for other bytes: of another encoding, binary, compressed."""
    if raw.startswith(LFS_POINTER):
        fetch = "fetch the file itself (git lfs pull)"
        raise NotText(where, "a pointer of Git LFS to the file", fetch)
    zero = raw.find(b"\0")
    if zero >= 0:
        raise NotText(where, "binary, no text", f"byte {zero} is 0; {UNPACK}")
    try:
        text = raw.decode("utf-8-sig")  # -sig: without a byte order mark
    except UnicodeDecodeError as e:
        raise NotText(where, "not UTF-8 text", f"byte {e.start} is not; {UNPACK}") from None
    return unify_line_ends(text)


def unify_line_ends(text: str) -> str:
    r"""`text` with every end of a line (\r\n, \r) as \n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ------------------------------------------------------------------------------------------ records


def records(file: Path, notes: Notes, key: str | None = None) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, record) of a file: the lines of a .jsonl or .ndjson but blank ones, the
    elements of the array in a .json, or the rows of a .parquet (only the column `key` if there is
    one).

    Raises ValueError if the file cannot be read. A line that cannot is for
    `notes.leave_out_bad`."""
    kind = file.suffix.lower()
    if kind in LINES:
        yield from _read_lines(file, notes)
    elif kind == ".json":
        hint = "one array is needed; name it .jsonl if it has an object a line"
        array = _parse(read_text(file), file, hint)
        if not isinstance(array, list):
            hint = "write [ … ], or one object a line into a .jsonl file"
            raise NotText(file, "no array of records", hint)
        yield from enumerate(array, 1)
    else:
        yield from enumerate(_read_rows(file, key), 1)


def place(file: Path, number: int) -> str:
    """The place of the record `number` of a file, for a message."""
    unit = "line" if file.suffix.lower() in LINES else "record"
    return f"{file}, {unit} {number}"


def _parse(text: str, where: Path | str, needed: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise NotText(where, f"not JSON ({e})", needed) from None


def _read_lines(file: Path, notes: Notes) -> Iterator[tuple[int, Any]]:
    with open(file, "rb") as f:
        for number, line in enumerate(f, 1):
            where = place(file, number)
            try:
                text = decode_text(line, where).strip()
                if not text:
                    continue
                record = _parse(text, where, "one object a line is needed")
            except ValueError as e:
                notes.leave_out_bad(e)
                continue
            yield number, record


def _read_rows(file: Path, key: str | None) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file)
        columns = [key] if key in table.schema_arrow.names else None
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()
    except ArrowException as e:
        reason = str(e).splitlines()[0]
        raise ValueError(f"{file} is not a parquet file or damaged ({reason})") from None


def hold_out(scores: list[float], fraction: float) -> np.ndarray:
    """The documents to hold out, of two or more: those with a score below `fraction`, but at least
    one and not all; bool (documents,)."""
    held_out = np.array(scores) < fraction
    held_out[np.argmin(scores)] = True
    held_out[np.argmax(scores)] = False
    return held_out
