"""Downloads: single files, and the files of a dataset on the Hugging Face Hub."""

import gzip
import http.client
import json
import re
import shutil
import urllib.request
from pathlib import Path

from nanodnt.data import sha256
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.files import reason_of, write_file


def download(url: str, path: Path, checksum: str | None, digest=sha256) -> Path:
    """Download `url` to `path`, unless it is there. ValueError if the network fails, or if
    digest(path) is not `checksum` (then the file is removed); None: any is."""
    if path.exists() and checksum in (None, digest(path)):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    hint = f"check the network and run again, or put the file at {path} yourself"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            raw = answer.read()
    # URLError, HTTPError, timeouts, resets, half an answer
    except (OSError, http.client.HTTPException) as e:
        raise ValueError(
            f"could not download {url} ({getattr(e, 'reason', None) or e}): {hint}"
        ) from None
    write_file(path, lambda f: f.write(raw))
    if checksum not in (None, found := digest(path)):
        path.unlink()
        raise ValueError(
            f"{url} has {digest.__name__} {found} instead of {checksum} (damaged or changed): {hint}"
        )
    return path


def files(
    args, repo: str, patterns: list, download_gb: float, work_gb: float, tokenizer=True, hint=""
) -> tuple:
    """Download the files of a Hugging Face Hub dataset that match `patterns`; `args` are flags of
    `script.parser`.

    Returns (commit hash, [sorted paths per pattern]). The files go to the Hub's cache (HF_HOME
    moves it), where finished ones are found again. `download_gb` must be free there, less what is
    there already, and `work_gb` in the folder to write to. ValueError if they are not, if the
    network fails (with `hint`), or if GPT-2's vocabulary, which is needed after the download where
    there is a `tokenizer`, cannot be had."""
    import pyarrow.parquet  # noqa: F401  (needed after the download: if it is missing, fail before)
    from huggingface_hub import constants, snapshot_download

    if tokenizer:
        Tokenizer(Tokenizer.meta_for("gpt2"))
    cache = Path(constants.HF_HUB_CACHE)
    here = sum(
        blob.stat().st_size for blob in cache.glob(f"datasets--{repo.replace('/', '--')}/blobs/*")
    )
    check_disk({cache: download_gb * 1e9 - here, args.out_dir: work_gb * 1e9})
    source = f"{repo} at {args.revision}"
    hint += "check the network and --revision, then run again (finished files are kept)"
    try:
        folder = Path(
            snapshot_download(
                repo, repo_type="dataset", revision=args.revision, allow_patterns=patterns
            )
        )
    except Exception as e:  # the HTTP client and the Hub's client raise many kinds
        raise ValueError(
            f"could not download {source} ({type(e).__name__}: {reason_of(e)}): {hint}"
        ) from None
    groups = [sorted(folder.glob(pattern)) for pattern in patterns]
    for pattern, found in zip(patterns, groups, strict=True):
        wanted = re.search(r"-of-(\d+)", found[0].name) if found and "*" in pattern else None
        # offline, the client returns what is in the cache
        if not found or wanted and len(found) != int(wanted[1]):
            raise ValueError(f"{source} gave only {len(found)} of the files {pattern}: {hint}")
    return folder.name, groups


def texts(file: Path):
    """Yield the texts of a parquet file with a column "text", or of a .json.gz with an object a
    line."""
    if file.suffix == ".gz":
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)
    else:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(columns=["text"]):
            yield from batch.column("text").to_pylist()


def check_disk(needs: dict):
    """ValueError unless there is room for `needs`, {folder: bytes}. Needs on one file system are
    added up."""
    disks = {}  # device: a folder on it, and the bytes that it needs
    for folder, size in needs.items():
        existing = next(p for p in [folder.resolve(), *folder.resolve().parents] if p.exists())
        disks.setdefault(existing.stat().st_dev, [existing, 0])[1] += max(0, size)
    for folder, size in disks.values():
        if size > (free := shutil.disk_usage(folder).free):
            hint = "make room, give --out_dir on another disk, or set HF_HOME to move the download"
            raise ValueError(
                f"{folder} has {free / 1e9:.1f} GB free, and this needs {size / 1e9:.1f} GB: {hint}"
            )
