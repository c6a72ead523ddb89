"""meta.json of a prepared dataset: the content of the folder, and whether it is still the same."""

import hashlib
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nanodnt.files import DATA

MAX_CLASSES = 1 << 16  # labels of images are uint16
HASHED_AT_START = 1 << 30  # largest file in bytes that each start hashes (in about a second)

Meta = dict[str, Any]  # the content of a meta.json


def folder_of(name: str) -> Path:
    """The folder data/<name>, or the prepared folder that `name` is a path of."""
    is_ours = (DATA / name).is_dir()
    if not is_ours and (Path(name) / "meta.json").is_file():
        return Path(name)
    return DATA / name


def _advise(name: str) -> str:
    """How to prepare a dataset."""
    if name == "pystdlib_gpt2_4096":
        return "run `python data/pystdlib/prepare.py --tokenizer=gpt2_4096`"
    if (DATA / name / "prepare.py").exists():
        return f"run `python data/{name}/prepare.py`"
    if not folder_of(name).exists():
        command = "python data/local/prepare.py --input=TEXT --tokenizer=gpt2"
        return f"to make it of a text, run `{command} --name={shlex.quote(Path(name).name)}`"
    return "prepare it again"


def has_nanogpt_ids(folder: Path) -> bool:
    """Whether `folder` holds token ids in nanoGPT's form: train.bin, val.bin and, unless they are
    GPT-2's, meta.pkl."""
    if (folder / "meta.json").exists() or (folder / "parts").exists():
        return False
    return any((folder / name).is_file() for name in ("train.bin", "meta.pkl"))


def check_not_nanogpt(folder: Path) -> None:
    """ValueError, with the command that prepares it, where `folder` holds a dataset of nanoGPT."""
    if not has_nanogpt_ids(folder):
        return
    tokenizer = "chars" if (folder / "meta.pkl").is_file() else "gpt2"
    name = folder.resolve().name
    if folder.resolve().parent == DATA:
        name = f"my_{name}"  # a folder is not prepared into itself
    name = shlex.quote(name)
    source = shlex.quote(str(folder))
    raise ValueError(
        f"dataset {folder} is not prepared (no meta.json): it has token ids in nanoGPT's form: run "
        f"`python data/local/prepare.py --input={source} --tokenizer={tokenizer} --name={name}`, "
        f"then name --dataset={name}"
    )


def load_meta(name: str, verify: bool = True, max_hashed_bytes: float = HASHED_AT_START) -> Meta:
    """Read and check data/<name>/meta.json (`name` may also be the path of a prepared folder).

    Kind, sizes, dtype and vocabulary or classes are always checked; with `verify` also the sha256
    of files of at most max_hashed_bytes. Raises ValueError, one line, with the problem and what to
    do."""
    folder = folder_of(name)
    advice = _advise(name)
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
        files = _list_files(meta)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        problem = str(e) if type(e) is ValueError else f"{type(e).__name__}: {e}"
        problem = problem.replace("\n", " ")
        raise ValueError(
            f"{path} is damaged, or of a newer version ({problem}): {advice}"
        ) from None
    for part in files:
        file = folder / part.name
        damage = _find_damage(file, part, max_hashed_bytes if verify else -1)
        if damage:
            raise ValueError(f"{file} {damage}: {advice}")
    return meta


def _find_damage(path: Path, part: "File", max_hashed_bytes: float) -> str:
    """How a file differs from its entry in meta.json; empty if it does not."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != part.size:
        return f"has {size} bytes where meta.json says {part.size}"
    if size <= max_hashed_bytes and sha256(path) != part.sha256:
        return "does not match the sha256 in meta.json (damaged or replaced)"
    return ""


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ----------------------------------------------------------------------------- the files of a split


class File(NamedTuple):
    """A file of a dataset, as meta.json describes it."""

    name: str
    size: int  # bytes
    sha256: str


def _list_files(meta: Meta) -> list[File]:
    """The files of both splits. Raises an error where meta.json does not fit together."""
    kind = KINDS[meta.get("kind", "text")]
    files = []
    for split in ("train", "val"):
        files += kind.files(meta, meta["splits"][split])
    return files


def _file(entry: dict[str, Any], size: int) -> File:
    return File(Path(entry["file"]).name, size, str(entry["sha256"]))


def _text_files(meta: Meta, split: dict[str, Any]) -> list[File]:
    from nanodnt.data.tokenizer import check_tokenizer

    vocab_size = _read_int(meta, "vocab_size")
    largest = _read_int(split, "max_id")
    if meta["eot"] is not None:
        largest = max(largest, _read_int(meta, "eot"))
    if largest >= vocab_size:
        raise ValueError(f"token id {largest} is beyond the vocabulary of {vocab_size}")
    check_tokenizer(meta, "its tokenizer")
    itemsize = {"uint16": 2, "uint32": 4}[meta["dtype"]]
    return [_file(split, _read_int(split, "tokens") * itemsize)]


def _example_files(meta: Meta, split: dict[str, Any]) -> list[File]:
    _read_int(meta, "eot")
    _read_int(split, "examples")
    check_template(meta.get("template"))
    return [*_text_files(meta, split), _file(split["marks"], split["tokens"])]


def _image_files(meta: Meta, split: dict[str, Any]) -> list[File]:
    side = meta["image_size"]
    channels = meta["channels"]
    n_images = split["images"]
    is_right = {
        "image_size": side is None or side > 0,
        "channels": channels in (1, 3),
        "classes": 2 <= len(meta["classes"]) <= MAX_CLASSES,
        "mean": len(meta["mean"]) == channels and all(map(math.isfinite, meta["mean"])),
        "std": len(meta["std"]) == channels and all(0 < value < math.inf for value in meta["std"]),
        "images": n_images > 0,
    }
    for name in is_right:
        if not is_right[name]:
            value = str((split | meta)[name])[:80]
            raise ValueError(f"{name} is {value}, which no dataset of images has")
    return [
        _file(split, _read_int(split, "bytes")),
        _file(split["offsets"], 8 * (n_images + 1)),
        _file(split["labels"], 2 * n_images),
    ]


class Kind(NamedTuple):
    """A kind of dataset."""

    reads: str  # input of its network: "text" or "images"
    files: Callable[[Meta, dict[str, Any]], list[File]]  # f(meta, entry of a split) → its files
    endings: tuple[str, ...]  # endings of a split's files beside SPLIT.bin
    flags: tuple[str, ...]  # flags of training for this input only


TEXT_FLAGS = ("doc_mask", "loss_chunks", "sample_interval", "sample_start")
IMAGE_FLAGS = (
    "label_smoothing",
    "crop_area",
    "crop_padding",
    "flip",
    "rand_augment",
    "mixup",
    "cutmix",
)
# A meta.json without a kind is of a text.
KINDS = {
    "text": Kind("text", _text_files, (), TEXT_FLAGS),
    "examples": Kind("text", _example_files, (".marks",), TEXT_FLAGS),
    "images": Kind("images", _image_files, ("_offsets.bin", "_labels.bin"), IMAGE_FLAGS),
}


def check_template(template: Any) -> None:
    """ValueError unless a meta's template is None, or has the two texts of
    interop/conversations/template.py."""
    if template is None:
        return
    try:
        system = template["system"]
        turn = template["turn"]
        is_right = (
            system.count("{system}") == bool(system)
            and turn.count("{prompt}") == 1
            and turn.endswith("{response}")
        )
    except (TypeError, KeyError, AttributeError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"the template {str(template)[:60]!r} of this dataset or checkpoint is damaged: "
            "prepare it again"
        )


def _read_int(values: dict[str, Any], key: str) -> int:
    if type(values[key]) is not int:
        raise ValueError(f"{key} is {values[key]!r}, not a whole number")
    return values[key]
