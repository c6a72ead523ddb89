"""meta.json of a prepared dataset: what is in the folder, and whether it still is what it was."""

import hashlib
import json
from pathlib import Path

from nanodnt.tokenizer import DATA, check_tokenizer

KINDS = ("text", "examples")  # of datasets; a meta.json that names none is of a text
HASHED_AT_START = 1 << 30  # files up to this many bytes are hashed at every start (about a second)


def folder_of(name: str) -> Path:
    """data/<name>, or the prepared folder that `name` is a path of."""
    return Path(name) if not (DATA / name).is_dir() and (Path(name) / "meta.json").is_file() else DATA / name


def _advise(name: str) -> str:
    """How to prepare the dataset `name`."""
    if name == "pystdlib_gpt2_4096":
        return "run `python data/pystdlib/prepare.py --tokenizer=gpt2_4096`"
    return f"run `python data/{name}/prepare.py`" if (DATA / name / "prepare.py").exists() else "prepare it again"


def load_meta(name: str, verify: bool = True, max_hashed_bytes: float = HASHED_AT_START) -> dict:
    """Read and check `data/<name>/meta.json` (`name` may also be the path of a prepared folder).

    Kind, sizes, dtype and vocabulary are always checked; with `verify` also the sha256 of every file of at most
    max_hashed_bytes. Raises ValueError with one line that says what is wrong and what to do.
    """
    folder = folder_of(name)
    path = folder / "meta.json"
    advice = _advise(name)
    if not path.is_file():
        ready = sorted(p.parent.name for p in DATA.glob("*/meta.json"))
        raise ValueError(f"dataset {name!r} is not prepared (no {path}): {advice}; prepared: {ready}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        kind = meta.get("kind", "text")
        ids, files = _read_entries(meta, folder) if kind in KINDS else ([], [])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        problem = f"{type(e).__name__}: {e}".replace("\n", " ")
        raise ValueError(f"{path} is damaged ({problem}): {advice}") from None
    if kind not in KINDS:
        raise ValueError(
            f"{path} was prepared by a newer version (kind {str(kind)[:20]!r} is none of {', '.join(KINDS)}): use that "
            f"version, or {advice}"
        )
    if max(ids) >= meta["vocab_size"]:
        raise ValueError(f"{path}: token id {max(ids)} is beyond the vocabulary of {meta['vocab_size']}: {advice}")
    try:
        check_tokenizer(meta, path)
    except ValueError as e:
        raise ValueError(f"{e}: {advice}") from None
    for file, expected, digest in files:
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            problem = "is missing" if size is None else f"has {size} bytes where meta.json says {expected}"
            raise ValueError(f"{file} {problem}: {advice}")
        if verify and size <= max_hashed_bytes and sha256(file) != digest:
            raise ValueError(f"{file} does not match the sha256 in meta.json (damaged or replaced): {advice}")
    return meta


def _read_entries(meta, folder):
    """The ids that must be in the vocabulary, and [(file, bytes, sha256)]. KeyError and others where it is damaged."""
    itemsize, examples = {"uint16": 2, "uint32": 4}[meta["dtype"]], meta.get("kind") == "examples"
    _read_int(meta, "vocab_size")
    ids, files = [0 if meta["eot"] is None and not examples else _read_int(meta, "eot")], []
    for part in (meta["splits"][split] for split in ("train", "val")):
        ids.append(_read_int(part, "max_id"))
        entries = [(part, itemsize)]
        if examples:
            _read_int(part, "examples")
            entries.append((part["marks"], 1))
        for entry, size in entries:
            file = folder / Path(entry["file"]).name
            files.append((file, _read_int(part, "tokens") * size, str(entry["sha256"])))
    return ids, files


def _read_int(values: dict, key: str) -> int:
    if type(values[key]) is not int:
        raise ValueError(f"{key} is {values[key]!r}, not a whole number")
    return values[key]


def sha256(path) -> str:
    """Hex digest of a file, which is read in pieces of 4 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
