"""What all scripts data/*/prepare.py share: flags, errors, held-out documents, and how files become
a dataset.

A prepared dataset is a folder with the files of its splits and meta.json, which describes them and
is written last: a folder without it is not prepared. nanodnt/data reads them.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shlex
from collections import deque
from pathlib import Path

from configurator import ConfigError, read_path
from layers.cores import own_cores
from nanodnt.data.meta import KINDS
from nanodnt.files import DATA, make_folder, write_file
from nanodnt.script import command, run  # noqa: F401  # the scripts use these from here

# what a split of examples or images has beside SPLIT.bin
ENDINGS = [ending for kind in KINDS.values() for ending in kind.endings]


def parser(
    doc: str, name: str | None = None, revision: str | None = None, workers=True
) -> argparse.ArgumentParser:
    """The flags of a prepare script. `doc` is its --help, `name` its folder in data/; None: the
    user gives a --name. Datasets of the Hugging Face Hub have a `revision`, the commit to download,
    and texts of it `workers`."""
    shape, prog = argparse.RawDescriptionHelpFormatter, name and f"python data/{name}/prepare.py"
    flags = argparse.ArgumentParser(
        prog, description=doc, formatter_class=shape, allow_abbrev=False
    )
    flags.register("type", Path, path_flag)  # what type=Path means
    where = f"folder to write to (default: data/{name or 'NAME'})"
    flags.add_argument("--out_dir", type=Path, default=name and DATA / name, help=where)
    if name is None:
        flags.add_argument(
            "--name", required=True, help="of the dataset: train with --dataset=NAME"
        )
    if revision and workers:
        flags.add_argument(
            "--workers",
            type=int,
            default=own_cores(),
            help="tokenising processes (default: all cores)",
        )
    if revision:
        flags.add_argument(
            "--revision",
            default=revision,
            help="commit or branch of the source (default: %(default)s)",
        )
    return flags


def path_flag(text: str) -> Path:
    """The value of a flag that is a path. ArgumentTypeError for an empty one, which Path takes for
    the current folder, and for a home folder that is not there."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or folder")
    try:
        return Path(read_path(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def score(name: str) -> float:
    """A pseudorandom number in [0, 1) that depends only on a name: small ones are held out for
    validation."""
    return (
        int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big")
        / 2**48
    )


def in_order(pool, function, jobs, ahead: int):
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
def staging(out_dir: Path):
    """The folder `out_dir`/parts, for files that `publish` moves. Afterwards it is gone, also where
    the block fails; what a kill leaves there is overwritten by the next run."""
    make_folder(out_dir, "--out_dir")
    parts = out_dir / "parts"
    parts.mkdir(exist_ok=True)
    try:
        yield parts
    finally:
        _clear(parts)
        for folder in (parts, out_dir):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def publish(
    parts: Path, out_dir: Path, meta: dict, unit: str, about: str, next_command: str
) -> None:
    """Make the files in `parts` that `meta` names, and `meta`, the dataset in `out_dir`. Print how
    many of `unit` each split has, more `about` it, its bytes, and what to type next: `next_command`
    with its --dataset."""
    entries = [entry for part in meta["splits"].values() for entry in (part, *part.values())]
    files = [entry["file"] for entry in entries if isinstance(entry, dict)]
    write(parts / "meta.json", json.dumps(meta, indent=1).encode())
    # from here until the last file the folder is "not prepared"
    (out_dir / "meta.json").unlink(missing_ok=True)
    for split, end in itertools.product(meta["splits"], ENDINGS):
        (out_dir / f"{split}{end}").unlink(missing_ok=True)  # of examples or images that were here
    for file in (*files, "meta.json"):
        os.replace(parts / file, out_dir / file)
    counts = ", ".join(f"{split} {part[unit]:,} {unit}" for split, part in meta["splits"].items())
    size = sum((out_dir / file).stat().st_size for file in files)
    name = out_dir.name if out_dir.resolve().parent == DATA else shlex.quote(str(out_dir.resolve()))
    print(
        f"{meta['dataset']}: {counts}; {about}\n{size:,} bytes in {out_dir}\nnext: {next_command} --dataset={name}"
    )


def write(path: Path, raw: bytes) -> dict:
    """Make `raw` the file `path`, which is complete or not there; returns the file's entry in
    meta.json."""
    write_file(path, lambda f: f.write(raw))
    return {"file": path.name, "sha256": hashlib.sha256(raw).hexdigest()}


def _clear(parts):
    """Remove what `build` writes to `parts`, but nothing else: a download may be there."""
    for pattern in ("train*.bin*", "val*.bin*", "*.marks*", "meta.json*"):
        for path in parts.glob(pattern):
            path.unlink()
