"""Downloads: single files, and the files of a dataset on the Hugging Face Hub."""

import gzip
import http.client
import json
import os
import re
import shutil
import urllib.request
from pathlib import Path

from tqdm import tqdm

from nanodnt.data import sha256
from nanodnt.data.tokenizer import Tokenizer


def download(url: str, path: Path, checksum: str | None, digest=sha256) -> Path:
    """Download `url` to `path`, unless it is there, with a progress bar. An interrupted download continues.

    ValueError if the network fails, or if digest(path) is not `checksum` (then the download is removed); None: any is.
    """
    if path.exists() and checksum in (None, digest(path)):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    have = partial.stat().st_size if partial.exists() else 0
    hint = f"check the network and run again, or put the file at {path} yourself"
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=60) as answer:
            have = have if getattr(answer, "status", None) == 206 else 0  # 206: the server sends only the rest
            size = have + int(answer.headers.get("Content-Length") or 0)
            shown = dict(total=size, initial=have, desc=path.name, disable=None)
            with open(partial, "ab" if have else "wb") as f, tqdm.wrapattr(f, "write", **shown) as out:
                shutil.copyfileobj(answer, out)
                have = f.tell()
    except (OSError, http.client.HTTPException) as e:  # URLError, HTTPError, timeouts, resets
        if getattr(e, "code", None) == 416:  # the server has no more to send, but the file is not right: start again
            partial.unlink()
            return download(url, path, checksum, digest)
        raise ValueError(f"could not download {url} ({getattr(e, 'reason', None) or e}): {hint}") from None
    if have < size:
        raise ValueError(f"the download of {url} broke off at {have:,} of {size:,} bytes: run again to continue")
    if checksum not in (None, found := digest(partial)):
        partial.unlink()
        raise ValueError(f"{url} has {digest.__name__} {found} instead of {checksum} (damaged or changed): {hint}")
    os.replace(partial, path)
    return path


def files(args, repo: str, patterns: list, download_gb: float, work_gb: float, tokenizer=True, hint="") -> tuple:
    """Download the files of a Hugging Face Hub dataset that match `patterns`; `args` are flags of `script.parser`.

    Returns (commit hash, [sorted paths per pattern]). The files go to the Hub's cache (HF_HOME moves it), where
    finished ones are found again. `download_gb` must be free there and `work_gb` in the folder to write to, less what
    is there already. ValueError if they are not, if the network fails (with `hint`), if a file does not have the Hub's
    sha256, or if GPT-2's vocabulary, which is needed after the download where there is a `tokenizer`, cannot be had."""
    import pyarrow.parquet  # noqa: F401  (needed after the download: if it is missing, fail before)
    from huggingface_hub import constants, snapshot_download

    if tokenizer:
        Tokenizer(Tokenizer.meta_for("gpt2"))
    cache = Path(constants.HF_HUB_CACHE)
    here = _size(cache / f"datasets--{repo.replace('/', '--')}" / "blobs")
    check_disk({cache: download_gb * 1e9 - here, args.out_dir: work_gb * 1e9 - _size(args.out_dir / "parts")})
    source = f"{repo} at {args.revision}"
    hint += "check the network and --revision, then run again (finished files are kept)"
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=args.revision, allow_patterns=patterns))
    except Exception as e:  # the HTTP client and the Hub's client raise many kinds
        reason = (str(e).strip().splitlines() or [""])[0]
        raise ValueError(f"could not download {source} ({type(e).__name__}: {reason}): {hint}") from None
    groups = [sorted(folder.glob(pattern)) for pattern in patterns]
    for pattern, found in zip(patterns, groups, strict=True):
        wanted = re.search(r"-of-(\d+)", found[0].name) if found and "*" in pattern else None
        if not found or wanted and len(found) != int(wanted[1]):  # offline, the client returns what is in the cache
            raise ValueError(f"{source} gave only {len(found)} of the files {pattern}: {hint}")
    for file in tqdm([f for found in groups for f in found], desc="checking sha256", unit=" files", disable=None):
        blob = file.resolve()  # in the cache the name of a large file is its sha256
        if re.fullmatch("[0-9a-f]{64}", blob.name) and sha256(blob) != blob.name:
            blob.unlink()
            raise ValueError(f"{file.name} was damaged and has been removed from the cache: run again to download it")
    return folder.name, groups


def texts(file: Path):
    """Yield the texts of a parquet file with a column "text", or of a .json.gz with an object a line."""
    if file.suffix == ".gz":
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)
    else:
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(columns=["text"]):
            yield from batch.column("text").to_pylist()


def check_disk(needs: dict):
    """ValueError unless there is room for `needs`, {folder: bytes}. Needs on one file system are added up."""
    disks = {}  # device: a folder on it, and the bytes that it needs
    for folder, size in needs.items():
        existing = next(p for p in [folder.resolve(), *folder.resolve().parents] if p.exists())
        disks.setdefault(existing.stat().st_dev, [existing, 0])[1] += max(0, int(size))
    for folder, size in disks.values():
        if size > (free := shutil.disk_usage(folder).free):
            hint = "make room, give --out_dir on another disk, or set HF_HOME to move the download"
            raise ValueError(f"{folder} has {free / 1e9:.1f} GB free, and this needs {size / 1e9:.1f} GB: {hint}")


def _size(folder):
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
