"""meta.json of a prepared dataset: what is in the folder, and whether it still is what it was."""

import hashlib
import json
import math
from pathlib import Path

from nanodnt.files import DATA

MAX_CLASSES = 1 << 16  # of images: labels are uint16
HASHED_AT_START = 1 << 30  # files up to this many bytes are hashed at every start (about a second)


def folder_of(name: str) -> Path:
    """data/<name>, or the prepared folder that `name` is a path of."""
    return (
        Path(name)
        if not (DATA / name).is_dir() and (Path(name) / "meta.json").is_file()
        else DATA / name
    )


def _advise(name):
    if name == "pystdlib_gpt2_4096":
        return "run `python data/pystdlib/prepare.py --tokenizer=gpt2_4096`"
    return (
        f"run `python data/{name}/prepare.py`"
        if (DATA / name / "prepare.py").exists()
        else "prepare it again"
    )


def check_not_nanogpt(folder: Path) -> None:
    """ValueError, which says what to do, where `folder` holds a dataset of nanoGPT: train.bin,
    val.bin and, unless they are of GPT-2's tokens, meta.pkl. A pickle could run code, so it is
    never opened."""
    pickled = (folder / "meta.pkl").is_file()
    ours = (folder / "meta.json").exists() or (folder / "parts").exists()
    if ours or not (pickled or (folder / "train.bin").is_file()):
        return
    tokenizer = "chars" if pickled else "gpt2"
    command = f"python data/local/prepare.py --input=TEXT --tokenizer={tokenizer} --name=NAME"
    what = f"{folder} is not prepared (no meta.json): it has token ids in nanoGPT's form, which are not read"
    raise ValueError(
        f"dataset {what}: run `{command}`, where TEXT is the text that they were made of (input.txt)"
    )


def load_meta(name: str, verify: bool = True, max_hashed_bytes: float = HASHED_AT_START) -> dict:
    """Read and check `data/<name>/meta.json` (`name` may also be the path of a prepared folder).

    Kind, sizes, dtype and vocabulary or classes are always checked; with `verify` also the sha256
    of files of at most max_hashed_bytes. ValueError, one line, says what is wrong and what to
    do."""
    folder, advice = folder_of(name), _advise(name)
    path = folder / "meta.json"
    if not path.is_file():
        check_not_nanogpt(folder)
        check_not_nanogpt(Path(name))
        ready = sorted(p.parent.name for p in DATA.glob("*/meta.json"))
        raise ValueError(
            f"dataset {name!r} is not prepared (no {path}): {advice}; prepared: {ready}"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        list_files = DATASET_KINDS[meta.get("kind", "text")]
        named = [
            entry for split in ("train", "val") for entry in list_files(meta, meta["splits"][split])
        ]
        files = [
            (folder / Path(entry["file"]).name, size, str(entry["sha256"])) for entry, size in named
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        problem = (str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}").replace(
            "\n", " "
        )
        raise ValueError(
            f"{path} is damaged, or of a newer version ({problem}): {advice}"
        ) from None
    for file, expected, digest in files:
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            problem = (
                "is missing"
                if size is None
                else f"has {size} bytes where meta.json says {expected}"
            )
            raise ValueError(f"{file} {problem}: {advice}")
        if verify and size <= max_hashed_bytes and sha256(file) != digest:
            raise ValueError(
                f"{file} does not match the sha256 in meta.json (damaged or replaced): {advice}"
            )
    return meta


def _text_files(meta, part):
    from nanodnt.data.tokenizer import check_tokenizer

    size, ids = _read_int(meta, "vocab_size"), [_read_int(part, "max_id")]
    if meta["eot"] is not None:
        ids.append(_read_int(meta, "eot"))
    if max(ids) >= size:
        raise ValueError(f"token id {max(ids)} is beyond the vocabulary of {size}")
    check_tokenizer(meta, "its tokenizer")
    return [(part, _read_int(part, "tokens") * {"uint16": 2, "uint32": 4}[meta["dtype"]])]


def _example_files(meta, part):
    _read_int(meta, "eot"), _read_int(part, "examples")
    check_template(meta.get("template"))
    return [*_text_files(meta, part), (part["marks"], part["tokens"])]


def _image_files(meta, part):
    side, channels, classes, n = (
        meta["image_size"],
        meta["channels"],
        meta["classes"],
        part["images"],
    )
    right = {
        "image_size": side is None or side > 0,
        "channels": channels in (1, 3),
        "classes": 2 <= len(classes) <= MAX_CLASSES,
        "mean": len(meta["mean"]) == channels and all(map(math.isfinite, meta["mean"])),
        "std": len(meta["std"]) == channels and all(0 < value < math.inf for value in meta["std"]),
        "images": n > 0,
    }
    for name in right:
        if not right[name]:
            raise ValueError(
                f"{name} is {str((part | meta)[name])[:80]}, which no dataset of images has"
            )
    return [
        (part, _read_int(part, "bytes")),
        (part["offsets"], 8 * (n + 1)),
        (part["labels"], 2 * n),
    ]


# What a split's files are: f(meta, the split's entry) → [(entry with file and sha256, bytes)]. It
# raises an error where meta.json does not fit together. A meta.json that names no kind is of a
# text.
DATASET_KINDS = {"text": _text_files, "examples": _example_files, "images": _image_files}


def check_template(found) -> None:
    """ValueError unless a meta's template is None, or has the two texts of
    interop/conversations/template.py."""
    if found is None:
        return
    try:
        system, turn = found["system"], found["turn"]
        right = (
            system.count("{system}") == bool(system)
            and turn.count("{prompt}") == 1
            and turn.endswith("{response}")
        )
    except (TypeError, KeyError, AttributeError):
        right = False
    if not right:
        raise ValueError(
            f"the template {str(found)[:60]!r} of this dataset or checkpoint is damaged: prepare it again"
        )


def _read_int(values, key):
    if type(values[key]) is not int:
        raise ValueError(f"{key} is {values[key]!r}, not a whole number")
    return values[key]


def sha256(path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
