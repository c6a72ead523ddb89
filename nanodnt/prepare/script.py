"""Shared by all scripts data/*/prepare.py: flags, errors, held-out documents, and the step from
files to a dataset.

A prepared dataset is a folder with the files of its splits and meta.json, which describes them and
is written last: a folder without it is not prepared. nanodnt/data reads them.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from configurator import ConfigError, read_path
from layers.cores import own_cores
from nanodnt.data.meta import KINDS, Meta
from nanodnt.files import DATA, make_folder, write_file
from nanodnt.script import command, run  # noqa: F401  # the scripts use these from here

# Files that `build` of a kind of dataset writes to parts/. A download may lie there too.
WRITTEN = ("train*.bin*", "val*.bin*", "*.marks*", "meta.json*")


def parser(
    doc: str, name: str | None = None, revision: str | None = None, workers: bool = True
) -> argparse.ArgumentParser:
    """The flags of a prepare script.

    `doc`: its --help. `name`: its folder in data/; None: the user gives a --name. `revision`: for a
    dataset of the Hugging Face Hub, the commit to download. `workers`: whether such a dataset is a
    text, which several processes can tokenise."""
    flags = argparse.ArgumentParser(
        prog=name and f"python data/{name}/prepare.py",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.register("type", Path, path_flag)  # a flag with type=Path is read by path_flag
    where = f"folder to write to (default: data/{name or 'NAME'})"
    flags.add_argument("--out_dir", type=Path, default=name and DATA / name, help=where)
    if name is None:
        text = "name of the dataset: train with --dataset=NAME"
        flags.add_argument("--name", required=True, help=text)
    if revision and workers:
        text = "tokenising processes (default: all cores)"
        flags.add_argument("--workers", type=int, default=own_cores(), help=text)
    if revision:
        text = "commit or branch of the source (default: %(default)s)"
        flags.add_argument("--revision", default=revision, help=text)
    return flags


def path_flag(text: str) -> Path:
    """The value of a flag that is a path. Raises ArgumentTypeError for an empty one, which Path
    takes for the current folder, and for a home folder that is not there."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or folder")
    try:
        return Path(read_path(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def score(name: str) -> float:
    """A pseudorandom number in [0, 1) that depends only on a name. Documents with small ones are
    held out for validation."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def in_order(
    pool: Executor, function: Callable, jobs: Iterable[tuple[Any, ...]], ahead: int
) -> Iterator[Any]:
    """Yield function(*job) for each of `jobs`, in their order. At most `ahead` jobs wait: they take
    memory."""
    waiting = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(function, *job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


@contextlib.contextmanager
def staging(out_dir: Path) -> Iterator[Path]:
    """The folder `out_dir`/parts, for files that `publish` moves. Afterwards it is gone, also where
    the block fails. A kill may leave files there, which the next run overwrites."""
    make_folder(out_dir, "--out_dir")
    parts = out_dir / "parts"
    parts.mkdir(exist_ok=True)
    try:
        yield parts
    finally:
        for pattern in WRITTEN:
            for path in parts.glob(pattern):
                path.unlink()
        for folder in (parts, out_dir):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def publish(
    parts: Path, out_dir: Path, meta: Meta, unit: str, about: str, commands: list[str]
) -> None:
    """Move the files in `parts` that `meta` names, and `meta`, to the dataset in `out_dir`.

    Prints the number of `unit` in each split, the text `about`, the bytes, and the one or two
    `commands` to go on with, each with its --dataset."""
    files = _list_files(meta)
    write(parts / "meta.json", json.dumps(meta, indent=1).encode())
    # From here until the last file is moved, the folder is "not prepared".
    (out_dir / "meta.json").unlink(missing_ok=True)
    for split in meta["splits"]:
        for kind in KINDS.values():
            for ending in kind.endings:  # files of the dataset that was here before
                (out_dir / f"{split}{ending}").unlink(missing_ok=True)
    for file in (*files, "meta.json"):
        os.replace(parts / file, out_dir / file)
    counts = ", ".join(f"{split} {entry[unit]:,} {unit}" for split, entry in meta["splits"].items())
    size = sum((out_dir / file).stat().st_size for file in files)
    name = out_dir.name
    if out_dir.resolve().parent != DATA:
        name = shlex.quote(str(out_dir.resolve()))
    print(f"{meta['dataset']}: {counts}; {about}")
    print(f"{size:,} bytes in {out_dir}")
    for label, line in zip(("next", "or"), commands, strict=False):
        print(f"{label}: {line} --dataset={name}")


def run_folder(out_dir: Path, ending: str = "") -> str:
    """The flag for the run directory of a command that trains on the dataset in `out_dir`."""
    return f"--out_dir={shlex.quote(f'out/{out_dir.resolve().name}{ending}')}"


def _list_files(meta: Meta) -> list[str]:
    """The names of the files of all splits: each SPLIT.bin, and those with an entry beside it."""
    files = []
    for split in meta["splits"].values():
        for entry in (split, *split.values()):
            if isinstance(entry, dict):
                files.append(entry["file"])
    return files


def write(path: Path, raw: bytes) -> dict[str, str]:
    """Make `raw` the file `path`, which is complete or not there. Returns the file's entry in
    meta.json."""
    write_file(path, lambda f: f.write(raw))
    return {"file": path.name, "sha256": hashlib.sha256(raw).hexdigest()}
