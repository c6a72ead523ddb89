"""What a user names to prepare a dataset from: files, their records, a place to write to."""

import json
import re
from pathlib import Path

import numpy as np

from nanodnt.files import DATA, check_folder


def output_folder(args, *flags: str) -> Path:
    """The folder to write the dataset --name to. ValueError where it cannot be that, or for a share to hold out that is
    none, or unless the inputs, which `flags` name, are there and do not hold the folder."""
    out = args.out_dir or DATA / args.name
    if not re.fullmatch(r"\w[\w.-]*", args.name, re.ASCII):
        raise ValueError(f"--name={args.name!r}: use letters, digits and '_', after the first also '.' and '-'")
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
            raise ValueError(f"{out} lies in --{flag}={path} and would be read too: give another --out_dir")
    return out


def visible_files(path: Path):
    """Yield (name, file) of `path`, or of the files below it in the order of their names, without hidden ones."""
    files = {f.relative_to(path).as_posix(): f for f in path.rglob("*")} if path.is_dir() else {path.name: path}
    for name, file in sorted(files.items()):
        if file.is_file() and not (path.is_dir() and re.search(r"(^|/)\.", name)):
            yield name, file


def records(file: Path, key: str | None = None):
    """Yield (number from 1, record) of a file: the lines of a .jsonl but blank ones, the elements of the array in a
    .json, or the rows of a .parquet (only the column `key` if there is one). ValueError if it cannot be read."""
    kind = file.suffix.lower()
    try:
        if kind == ".jsonl":
            with open(file, encoding="utf-8-sig") as f:  # -sig: without a byte order mark
                for number, line in enumerate(f, 1):
                    if line.strip():
                        yield number, _parse(line, f"{file}, line {number}", "one object a line is needed")
        elif kind == ".json":
            found = _parse(file.read_text(encoding="utf-8-sig"), file, "one array is needed")
            if not isinstance(found, list):
                hint = "write [ … ], or one object a line into a .jsonl file"
                raise ValueError(f"{file} holds no array of records: {hint}")
            yield from enumerate(found, 1)
        else:
            yield from enumerate(_read_rows(file, key), 1)
    except UnicodeDecodeError as e:
        raise not_utf8(file, e) from None


def place(file: Path, number: int) -> str:
    """Where the record `number` of a file is, for a message."""
    return f"{file}, {'line' if file.suffix.lower() == '.jsonl' else 'record'} {number}"


def not_utf8(file: Path, error: UnicodeDecodeError) -> ValueError:
    """The error for a file that is not UTF-8."""
    return ValueError(f"{file} is not UTF-8 text (byte {error.start}): convert it first")


def _parse(text, where, needed):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} is not JSON ({e}): {needed}") from None


def _read_rows(file, key):
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.ParquetFile(file)
        for batch in table.iter_batches(columns=[key] if key in table.schema_arrow.names else None):
            yield from batch.to_pylist()
    except ArrowException as e:
        raise ValueError(f"{file} is not a parquet file or damaged ({str(e).splitlines()[0]})") from None


def hold_out(scores: list, fraction: float) -> np.ndarray:
    """Which of two documents or more are held out, (documents,) bool: score below fraction; at least one, not all."""
    val = np.array(scores) < fraction
    val[np.argmin(scores)], val[np.argmax(scores)] = True, False  # neither split is empty
    return val
