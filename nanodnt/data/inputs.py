"""What a user names, to prepare a dataset from or to read: files, their texts and records, a place
to write to."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np

from nanodnt.files import DATA, check_folder, make_printable

LINES = (".jsonl", ".ndjson")  # an object a line
RECORDS = (*LINES, ".json", ".parquet")
# Files that are not read as one text, by their suffix, and what to do.
OTHER_SUFFIXES = dict.fromkeys(
    RECORDS, ("a file of records, not one text", "prepare it, and name the dataset")
)
OTHER_SUFFIXES |= dict.fromkeys(
    (".csv", ".tsv"), ("a table", "write a .jsonl file, or name it .txt to read all of it")
)
OTHER_SUFFIXES[".ipynb"] = ("a notebook", "convert it (jupyter nbconvert --to script)")
LFS_POINTER = b"version https://git-lfs"


class Notes:
    """What a user should know of how the input is read: names of files or records, by what is to be
    said of them."""

    def __init__(self, skip_bad: bool = False):
        self.skip_bad = skip_bad  # whether a record that cannot be used is left out, or is an error
        self.names = {}

    def add(self, what: str, name: str) -> None:
        """Note `what` of the file or record `name`."""
        self.names.setdefault(what, []).append(name)

    def leave_out(self, why: str, name: str) -> None:
        """Note that `name` is not read."""
        self.add(f"{why}, so left out", name)

    def leave_out_bad(self, error: ValueError) -> None:
        """Note that the record that `error` names is left out. Without `skip_bad`, raise the
        error."""
        if not self.skip_bad:
            raise error
        self.leave_out("bad records", str(error))

    def print(self) -> None:
        """Print a line for each thing to say, with the first names and their number, and forget
        them."""
        for what, names in self.names.items():
            more = f" and others, {len(names):,} in all" if len(names) > 5 else ""
            print(make_printable(f"note: {what}: {'; '.join(names[:5])}{more}"), file=sys.stderr)
        self.names = {}


class NotText(ValueError):
    """A file that is no text. `why` is the reason without the file's name."""

    def __init__(self, where, why: str, advice: str):
        super().__init__(f"{where} is {why}: {advice}")
        self.why = why


def output_folder(args, *flags: str) -> Path:
    """The folder to write the dataset --name to. ValueError where it cannot be that, or for a share
    to hold out that is none, or unless the inputs, which `flags` name, are there and do not hold
    the folder."""
    out = args.out_dir or DATA / args.name
    if not re.fullmatch(r"\w[\w.-]*", args.name, re.ASCII):
        raise ValueError(
            f"--name={args.name!r}: use letters, digits and '_', after the first also '.' and '-'"
        )
    check_folder(out, "--out_dir")
    if (out / "prepare.py").exists():
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


def find_files(path: Path, notes: Notes) -> list:
    """[(name, file)] of `path`, or of the files below it, in the order of their names.

    Links are followed. Left out, and noted, is what is hidden or cannot be read, and what would be
    read twice."""
    if not path.is_dir():
        return [(path.name, path)]
    found, seen = {}, {_identity(path)}

    def leave_out_unreadable(error):
        notes.leave_out(f"cannot be read ({error.strerror})", str(error.filename))

    for folder, folders, files in os.walk(path, onerror=leave_out_unreadable, followlinks=True):
        names = sorted([*folders, *files])
        folders.clear()
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
                folders.append(name)
            elif file.is_file():
                found[file.relative_to(path).as_posix()] = file
            else:
                notes.leave_out("neither file nor folder", str(file))
            seen.add(identity)
    return sorted(found.items())


def _identity(path):
    status = path.stat()
    return status.st_dev, status.st_ino


# ------------------------------------------------------------------------------------------------------------- texts


def read_text(file: Path) -> str:
    """The text of a file, as `decode_text` gives it. ValueError, one line, where it cannot be
    read."""
    try:
        raw = file.read_bytes()
    except OSError as e:
        raise NotText(file, f"not readable ({e.strerror})", "name a text file") from None
    return decode_text(raw, file)


def read_document(file: Path) -> str:
    """`read_text` of a file that is one text by its name too: no records, no table."""
    if other := OTHER_SUFFIXES.get(file.suffix.lower()):
        raise NotText(file, *other)
    return read_text(file)


def decode_text(raw: bytes, where) -> str:
    r"""Text in UTF-8 without a byte order mark, with every end of a line (\r\n, \r) as \n. `where`:
    for messages.

    ValueError, one line, where it is no such text: of another encoding, binary, compressed."""
    if raw.startswith(LFS_POINTER):
        raise NotText(
            where, "a pointer of Git LFS to the file", "fetch the file itself (git lfs pull)"
        )
    if (zero := raw.find(b"\0")) >= 0:
        raise NotText(where, "binary, no text", f"byte {zero} is 0; unpack or convert it first")
    try:
        text = raw.decode("utf-8-sig")  # -sig: without a byte order mark
    except UnicodeDecodeError as e:
        raise NotText(
            where, "not UTF-8 text", f"byte {e.start} is not; unpack or convert it first"
        ) from None
    return unify_line_ends(text)


def unify_line_ends(text: str) -> str:
    r"""`text` with every end of a line (\r\n, \r) as \n."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


# ----------------------------------------------------------------------------------------------------------- records


def records(file: Path, notes: Notes, key: str | None = None):
    """Yield (number from 1, record) of a file: the lines of a .jsonl or .ndjson but blank ones, the
    elements of the array in a .json, or the rows of a .parquet (only the column `key` if there is
    one).

    ValueError if the file cannot be read. A line that cannot is for `notes.leave_out_bad`."""
    kind = file.suffix.lower()
    if kind in LINES:
        with open(file, "rb") as f:
            for number, line in enumerate(f, 1):
                where = place(file, number)
                try:
                    text = decode_text(line, where).strip()
                    record = text and _parse(text, where, "one object a line is needed")
                except ValueError as e:
                    notes.leave_out_bad(e)
                    continue
                if text:
                    yield number, record
    elif kind == ".json":
        hint = "one array is needed; name it .jsonl if it has an object a line"
        found = _parse(read_text(file), file, hint)
        if not isinstance(found, list):
            hint = "write [ … ], or one object a line into a .jsonl file"
            raise NotText(file, "no array of records", hint)
        yield from enumerate(found, 1)
    else:
        yield from enumerate(_read_rows(file, key), 1)


def place(file: Path, number: int) -> str:
    """Where the record `number` of a file is, for a message."""
    unit = "line" if file.suffix.lower() in LINES else "record"
    return f"{file}, {unit} {number}"


def _parse(text, where, needed):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise NotText(where, f"not JSON ({e})", needed) from None


def _read_rows(file, key):
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file)
        for batch in table.iter_batches(columns=[key] if key in table.schema_arrow.names else None):
            yield from batch.to_pylist()
    except ArrowException as e:
        raise ValueError(
            f"{file} is not a parquet file or damaged ({str(e).splitlines()[0]})"
        ) from None


def hold_out(scores: list, fraction: float) -> np.ndarray:
    """Which of two documents or more are held out, (documents,) bool: score below fraction; at
    least one, not all."""
    val = np.array(scores) < fraction
    val[np.argmin(scores)], val[np.argmax(scores)] = True, False  # neither split is empty
    return val
