"""meta.json of a prepared dataset: what is in the folder, and whether it still is what it was."""

import hashlib
import json
from pathlib import Path

from nanodnt.tokenizer import DATA, check_tokenizer

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

    Sizes, dtype and vocabulary are always checked; with `verify` also the sha256 of every file up to max_hashed_bytes.
    Raises ValueError with one line that says what is wrong and what to do.
    """
    folder = folder_of(name)
    path = folder / "meta.json"
    advice = _advise(name)
    if not path.is_file():
        ready = sorted(p.parent.name for p in DATA.glob("*/meta.json"))
        raise ValueError(f"dataset {name!r} is not prepared (no {path}): {advice}; prepared: {ready}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        itemsize = {"uint16": 2, "uint32": 4}[meta["dtype"]]
        vocab, eot = _read_int(meta, "vocab_size"), meta["eot"]
        parts = {split: meta["splits"][split] for split in ("train", "val")}
        sizes = {split: _read_int(part, "tokens") * itemsize for split, part in parts.items()}
        files = {split: folder / Path(part["file"]).name for split, part in parts.items()}
        ids = [_read_int(part, "max_id") for part in parts.values()] + [0 if eot is None else _read_int(meta, "eot")]
        hashes = {split: str(part["sha256"]) for split, part in parts.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        problem = f"{type(e).__name__}: {e}".replace("\n", " ")
        raise ValueError(f"{path} is damaged ({problem}): {advice}") from None
    if max(ids) >= vocab:
        raise ValueError(f"{path}: token id {max(ids)} is beyond the vocabulary of {vocab}: {advice}")
    try:
        check_tokenizer(meta, path)
    except ValueError as e:
        raise ValueError(f"{e}: {advice}") from None
    for split, file in files.items():
        size = file.stat().st_size if file.is_file() else None
        if size != sizes[split]:
            problem = "is missing" if size is None else f"has {size} bytes where meta.json says {sizes[split]}"
            raise ValueError(f"{file} {problem}: {advice}")
        if verify and size <= max_hashed_bytes and sha256(file) != hashes[split]:
            raise ValueError(f"{file} does not match the sha256 in meta.json (damaged or replaced): {advice}")
    return meta


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
