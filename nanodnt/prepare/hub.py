"""Downloads: single files, and the files of a dataset on the Hugging Face Hub."""

import argparse
import gzip
import http.client
import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from nanodnt.data import sha256
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.files import reason_of, write_file


class Download(NamedTuple):
    """Files of a dataset on the Hub."""

    commit: str
    files: list[list[Path]]  # the files of each pattern, sorted


def download(
    url: str, path: Path, checksum: str | None, digest: Callable[[Path], str] = sha256
) -> Path:
    """Download `url` to `path`, unless it is there.

    Raises ValueError if the network fails, and if digest(path) is not `checksum` (None: any is
    right); then the file is removed."""
    if path.exists() and checksum in (None, digest(path)):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    hint = f"check the network and run again, or put the file at {path} yourself"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            raw = answer.read()
    # URLError, HTTPError, timeouts, resets, half an answer
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", None) or e
        raise ValueError(f"could not download {url} ({reason}): {hint}") from None
    write_file(path, lambda f: f.write(raw))
    received = digest(path)
    if checksum not in (None, received):
        path.unlink()
        raise ValueError(
            f"{url} has {digest.__name__} {received} instead of {checksum} (damaged or changed): "
            f"{hint}"
        )
    return path


def files(
    args: argparse.Namespace,
    repo: str,
    patterns: list[str],
    download_gb: float,
    work_gb: float,
    tokenizer: bool = True,
    hint: str = "",
) -> Download:
    """Download the files of a Hugging Face Hub dataset that match `patterns`. `args`: flags of
    `script.parser`.

    The files go to the Hub's cache (HF_HOME moves it), where finished ones are found again.
    `download_gb` must be free there, less what is there already, and `work_gb` in the folder to
    write to. Raises ValueError if they are not, if the network fails (with `hint`), and, with
    `tokenizer`, if GPT-2's vocabulary, which is needed after the download, cannot be had."""
    import pyarrow.parquet  # noqa: F401  (needed after the download: if it is missing, fail before)
    from huggingface_hub import constants, snapshot_download

    if tokenizer:
        Tokenizer(Tokenizer.meta_for("gpt2"))
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache.glob(f"datasets--{repo.replace('/', '--')}/blobs/*")
    present = sum(blob.stat().st_size for blob in blobs)
    check_disk({cache: download_gb * 1e9 - present, args.out_dir: work_gb * 1e9})
    source = f"{repo} at {args.revision}"
    hint += "check the network and --revision, then run again (finished files are kept)"
    try:
        snapshot = snapshot_download(
            repo, repo_type="dataset", revision=args.revision, allow_patterns=patterns
        )
    except Exception as e:  # the HTTP client and the Hub's client raise many kinds
        reason = f"{type(e).__name__}: {reason_of(e)}"
        raise ValueError(f"could not download {source} ({reason}): {hint}") from None
    folder = Path(snapshot)
    groups = [sorted(folder.glob(pattern)) for pattern in patterns]
    for pattern, group in zip(patterns, groups, strict=True):
        if not _is_complete(group, pattern):  # offline, the client returns what is in the cache
            raise ValueError(f"{source} gave only {len(group)} of the files {pattern}: {hint}")
    return Download(folder.name, groups)


def _is_complete(group: list[Path], pattern: str) -> bool:
    """Whether files were found, and as many as their names say: train-00000-of-00080.parquet."""
    if not group:
        return False
    number = re.search(r"-of-(\d+)", group[0].name)
    return "*" not in pattern or number is None or len(group) == int(number[1])


def texts(file: Path) -> Iterator[str]:
    """Yield the texts of a parquet file with a column "text", or of a .json.gz with an object a
    line."""
    if file.suffix == ".gz":
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]
    else:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(columns=["text"]):
            yield from batch.column("text").to_pylist()


def check_disk(needs: dict[Path, float]) -> None:
    """ValueError unless there is room for `needs`, {folder: bytes}. Needs on one file system are
    added up."""
    folders = {}  # a folder on each device
    sizes = {}  # bytes needed on each device
    for folder, size in needs.items():
        resolved = folder.resolve()
        existing = next(p for p in (resolved, *resolved.parents) if p.exists())
        device = existing.stat().st_dev
        folders.setdefault(device, existing)
        sizes[device] = sizes.get(device, 0) + max(0, size)
    hint = "make room, or give --out_dir on another disk"
    if len(needs) > 1:
        hint += ", or set HF_HOME to move the download"
    for device, folder in folders.items():
        free = shutil.disk_usage(folder).free
        if sizes[device] > free:
            raise ValueError(
                f"{folder} has {free / 1e9:.1f} GB free, and this needs "
                f"{sizes[device] / 1e9:.1f} GB: {hint}"
            )
