"""From text to a prepared dataset: what the scripts data/*/prepare.py share.

A prepared dataset is a folder with train.bin and val.bin (token ids, little-endian uint16 or uint32, nothing else) and
meta.json, which describes them and is written last: a folder without it is not prepared. nanodnt.data reads them.
A dataset of examples has marks besides, and is written by interop/conversations/build.py.
"""

import argparse
import contextlib
import functools
import hashlib
import http.client
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import urllib.request
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from nanodnt.data import sha256
from nanodnt.data.tokenizer import DATA, Tokenizer
from nanodnt.files import write_file

try:
    from tqdm import tqdm
except ImportError:

    class tqdm:  # without tqdm there is no progress bar; so the embedded dataset needs only numpy
        __init__ = update = close = lambda self, *args, **kwargs: None


PART_CHARS = 1 << 23  # characters of a part: workers tokenise one at a time, and a restart keeps the finished ones
PIECE_CHARS = 1 << 20  # longer documents are tokenised in pieces, to bound memory and to use every core
BESIDE = (".marks", "_offsets.bin", "_labels.bin")  # what a split of examples or images has beside SPLIT.bin
# GPT-2's pre-tokenizer always cuts around a lone newline between visible characters, so cutting there changes no token.
PIECE_END = re.compile(r"(?<=\S\n)(?=\S)")


def parser(doc: str, name: str, revision: str | None = None) -> argparse.ArgumentParser:
    """The flags of a prepare script. `doc` is its --help, `name` its folder in data/, and `revision`, for datasets of
    the Hugging Face Hub, the commit to download."""
    flags = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument("--out_dir", type=Path, default=DATA / name, help=f"folder to write to (default: data/{name})")
    if revision:
        flags.add_argument("--workers", type=int, default=cpus(), help="tokenising processes (default: all cores)")
        flags.add_argument("--revision", default=revision, help="commit or branch of the source (default: %(default)s)")
    return flags


def run(main):
    """Call `main()`. An error that the user can do something about ends with one line on stderr and exit code 1."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: run the same command again")
    except BrokenProcessPool:
        sys.exit("error: a worker was killed (out of memory?): run the same command again with fewer --workers")
    except ImportError as e:
        if e.name == "interop":
            sys.exit("error: this needs the folder interop/ (tokenizers of Hugging Face), which is not here")
        sys.exit(f"error: the package {e.name} is missing: pip install -r requirements.txt")
    except (ValueError, OSError) as e:
        sys.exit(f"error: {e}")


def cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def score(name: str) -> float:
    """A pseudorandom number in [0, 1) that depends only on a document's name. Documents with a score below a fraction
    are held out for validation."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48


# ------------------------------------------------------------------------------------------------ tokens to files


def build(out_dir, source, tokenizer, splits, *, name=None, workers=1, resume=False, totals=None, train=None) -> dict:
    """Tokenise documents and write train.bin, val.bin and meta.json to `out_dir`. Returns the content of meta.json.

    tokenizer   a `Tokenizer.meta_for(...)`; where it has an end of text, that follows every document
    splits      {"train": documents, "val": documents}, read in this order: an iterable of texts, or a `datasets`
                dataset with a column "text"
    workers     tokenising processes; the files do not depend on it
    resume      if this run dies, its finished parts stay in `out_dir`/parts, and the next one with the same `source`
                and `tokenizer` uses them; otherwise a failed run leaves nothing
    totals      {split: number of documents}, for the progress bar
    train       the command to print at the end

    ValueError if a split is empty; then an earlier dataset in `out_dir` is unchanged.
    """
    out_dir, dtype = Path(out_dir), id_dtype(tokenizer)
    with staging(out_dir, json.dumps([source, tokenizer, PART_CHARS, PIECE_CHARS]), resume) as parts:
        found = _build_splits(parts, splits, tokenizer, dtype, workers, totals or {})
        meta = {"format": 1, "dataset": name or out_dir.resolve().name, "source": source, **tokenizer}
        meta |= {"dtype": dtype.name, "splits": found}
        publish(parts, out_dir, meta)
    _print_summary(meta, out_dir, train)
    return meta


def id_dtype(tokenizer: dict) -> np.dtype:
    """The dtype of the ids of a `Tokenizer.meta_for(...)` on disk."""
    return np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")


@contextlib.contextmanager
def staging(out_dir: Path, plan: str, resume: bool = False):
    """The folder `out_dir`/parts, for files that `publish` moves. Afterwards it is gone, also where the block fails.

    With `resume` it stays then, and the files are there again for the next block with the same `plan`."""
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"{out_dir} is a file: give another --out_dir")
    parts = out_dir / "parts"
    new = [folder for folder in (parts, out_dir) if not folder.exists()]
    parts.mkdir(parents=True, exist_ok=True)
    if not (resume and (parts / "plan.json").is_file() and (parts / "plan.json").read_text("utf-8") == plan):
        _clear(parts)  # parts of another text or tokenizer
        write(parts / "plan.json", plan.encode())
    try:
        yield parts
    except BaseException:
        if not resume:
            _clear(parts)
            for folder in new:
                with contextlib.suppress(OSError):  # not empty, or not there
                    folder.rmdir()
        raise
    _clear(parts)
    with contextlib.suppress(OSError):
        parts.rmdir()


def publish(parts: Path, out_dir: Path, meta: dict) -> None:
    """Make the files in `parts` that `meta` names, and `meta`, the dataset in `out_dir`."""
    entries = [e for part in meta["splits"].values() for e in (part, *part.values()) if isinstance(e, dict)]
    files = [entry["file"] for entry in entries]
    write(parts / "meta.json", json.dumps(meta, indent=1).encode())
    (out_dir / "meta.json").unlink(missing_ok=True)  # from here until the last file the folder is "not prepared"
    for file in {f"{split}{end}" for split in meta["splits"] for end in BESIDE} - set(files):
        (out_dir / file).unlink(missing_ok=True)  # of examples or images that were here
    for file in (*files, "meta.json"):
        os.replace(parts / file, out_dir / file)


def _build_splits(parts, splits, tokenizer, dtype, workers, totals):
    """Write parts/train.bin and parts/val.bin; returns {split: its entry in meta.json}."""
    found = {}
    with contextlib.ExitStack() as stack:
        pool = None
        if workers > 1:  # spawn: the same on every system, and safe with the threads of pyarrow
            pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
            stack.callback(pool.shutdown, cancel_futures=True)
        for split, texts in splits.items():
            paths = _tokenise(parts, split, texts, json.dumps(tokenizer), dtype, pool, 2 * workers, totals.get(split))
            found[split] = {"file": f"{split}.bin"} | _join(paths, parts / f"{split}.bin", dtype)
            if not found[split]["tokens"]:
                raise ValueError(f"there is no text for {split}.bin")
    return found


def _print_summary(meta, out_dir, train):
    counts = ", ".join(f"{split} {part['tokens']:,} tokens" for split, part in meta["splits"].items())
    print(f"{meta['dataset']}: {counts}; {meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']:,}")
    if meta["tokenizer"] == "json" and meta["eot"] is None:
        print("note: this tokenizer names no end of text (eos_token), so nothing stands between documents")
    size = sum((out_dir / part["file"]).stat().st_size for part in meta["splits"].values())
    print(f"{size:,} bytes in {out_dir}\nnext: {train or f'python train.py {dataset_flag(out_dir)}'}")


def dataset_flag(out_dir: Path) -> str:
    """The flag of train.py for the dataset in this folder."""
    return f"--dataset={out_dir.name if out_dir.resolve().parent == DATA else out_dir.resolve()}"


def encode(tokenizer: Tokenizer, text: str, ends: bool = True) -> np.ndarray:
    """Token ids of a text, (tokens,) uint32, with end of text if the document `ends` here and the tokenizer has one.

    A tokenizer.json's own start (LLaMA's <s>) stands before the text, which is then a whole document."""
    if tokenizer.kind == "bytes":
        ids = np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32)
    else:
        ids = np.array([*tokenizer.start, *tokenizer.encode(text)], np.uint32)
    return np.append(ids, np.uint32(tokenizer.eot)) if ends and tokenizer.eot is not None else ids


def _tokenise(parts, split, texts, tokenizer, dtype, pool, ahead, total):
    """Write parts/<split>-NNNNNN.bin, except those that exist already; returns the paths of all, in order."""
    paths, pending = [], deque()
    bar = tqdm(total=total, desc=split, unit=" documents", disable=None)  # None: shown only on a terminal
    for documents, pieces in _jobs(texts, whole=json.loads(tokenizer)["tokenizer"] == "json"):
        path = parts / f"{split}-{len(paths):06d}.bin"
        paths.append(path)
        if path.exists():
            bar.update(documents)
        elif pool is None:
            _write_part(path, pieces, tokenizer, dtype)
            bar.update(documents)
        else:
            pending.append((documents, pool.submit(_write_part, path, pieces, tokenizer, dtype)))
        while len(pending) > ahead:  # texts that wait for a worker take memory: stop reading
            _wait(pending, bar)
    while pending:
        _wait(pending, bar)
    bar.close()
    return paths


def _wait(pending, bar):
    documents, future = pending.popleft()
    future.result()
    bar.update(documents)


def _jobs(texts, whole=False):
    """Group documents into parts: yields (number of documents that end in the part, [(text, a document ends here)]).
    `whole`: documents are never cut."""
    documents, size, pieces = 0, 0, []
    for text in rows(texts):
        for piece, ends in [(text, True)] if whole else _pieces(text):
            pieces.append((piece, ends))
            documents, size = documents + ends, size + len(piece)
            if size >= PART_CHARS:
                yield documents, pieces
                documents, size, pieces = 0, 0, []
    if pieces:
        yield documents, pieces


def _pieces(text):
    start = 0
    while cut := PIECE_END.search(text, start + PIECE_CHARS):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True


def rows(texts):
    """Yield the texts of an iterable of texts or of a `datasets` dataset with a column "text"."""
    if not hasattr(texts, "iter"):
        yield from texts
    else:  # batches are faster
        for batch in texts.iter(batch_size=1000):
            yield from batch["text"]


@functools.lru_cache(maxsize=1)
def _tokenizer(meta):
    return Tokenizer(json.loads(meta))


def _write_part(path, pieces, tokenizer, dtype):
    ids = [encode(_tokenizer(tokenizer), text, ends) for text, ends in pieces]
    write(path, np.concatenate(ids).astype(dtype).tobytes())


def _start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()  # if it is killed, idle workers must exit too
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _join(paths, target, dtype):
    """Concatenate parts into `target`. Returns its token count, largest id and sha256."""
    tokens, max_id, digest = 0, 0, hashlib.sha256()
    with open(target, "wb") as f:
        for path in paths:
            raw = path.read_bytes()
            ids = np.frombuffer(raw, dtype)
            tokens, max_id = tokens + len(ids), max(max_id, int(ids.max(initial=0)))
            digest.update(raw)
            f.write(raw)
        f.flush()
        os.fsync(f.fileno())
    return {"tokens": tokens, "max_id": max_id, "sha256": digest.hexdigest()}


def write(path: Path, raw: bytes) -> None:
    """Make `raw` the file `path`, which is complete or not there."""
    write_file(path, lambda f: f.write(raw))


def _clear(parts):
    """Remove what `build` writes to `parts`, but nothing else: a download may be there."""
    for pattern in ("train*.bin*", "val*.bin*", "*.marks*", "meta.json*", "plan.json*"):
        for path in parts.glob(pattern):
            path.unlink()


# ------------------------------------------------------------------------------------------------------ downloads


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
            bar = tqdm(total=size, initial=have, desc=path.name, unit="B", unit_scale=True, disable=None)
            with open(partial, "ab" if have else "wb") as f:
                while block := answer.read(1 << 16):
                    have += f.write(block)
                    bar.update(len(block))
            bar.close()
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


def hub_files(
    repo: str,
    revision: str,
    patterns: list,
    out_dir: Path,
    download_gb: float,
    work_gb: float,
    tokenizer: str | None = "gpt2",
    hint: str = "check the network and --revision",
) -> tuple:
    """Download the files of a Hugging Face Hub dataset that match `patterns`.

    Returns (commit hash, [sorted paths per pattern]). The files go to the Hub's cache (HF_HOME moves it), where
    finished ones are found again. `download_gb` must be free there and `work_gb` in `out_dir`, less what is there
    already. ValueError if they are not, if the network fails (with `hint`), if a file does not have the Hub's sha256,
    or if the `tokenizer` that comes after the download cannot be had.
    """
    import datasets  # noqa: F401  (needed after the download: if it is missing, fail before)
    from huggingface_hub import constants, snapshot_download

    if tokenizer:
        Tokenizer(Tokenizer.meta_for(tokenizer))  # needed after the download too
    cache = Path(constants.HF_HUB_CACHE)
    here = _size(cache / f"datasets--{repo.replace('/', '--')}" / "blobs")
    check_disk({cache: download_gb * 1e9 - here, out_dir: work_gb * 1e9 - _size(out_dir / "parts")})
    hint += ", then run again (finished files are kept)"
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except Exception as e:  # the HTTP client and the Hub's client raise many kinds
        reason = (str(e).strip().splitlines() or [""])[0]
        raise ValueError(f"could not download {repo} at {revision} ({type(e).__name__}: {reason}): {hint}") from None
    groups = [sorted(folder.glob(pattern)) for pattern in patterns]
    for pattern, files in zip(patterns, groups, strict=True):
        wanted = re.search(r"-of-(\d+)", files[0].name) if files and "*" in pattern else None
        if not files or wanted and len(files) != int(wanted[1]):  # offline, the client returns what is in the cache
            raise ValueError(f"{repo} at {revision} gave only {len(files)} of the files {pattern}: {hint}")
    for file in tqdm([f for files in groups for f in files], desc="checking sha256", unit=" files", disable=None):
        blob = file.resolve()  # in the cache the name of a large file is its sha256
        if re.fullmatch("[0-9a-f]{64}", blob.name) and sha256(blob) != blob.name:
            blob.unlink()
            raise ValueError(f"{file.name} was damaged and has been removed from the cache: run again to download it")
    return folder.name, groups


def hub_texts(kind: str, files: list):
    """The texts of `parquet` or `json` files (which may be compressed), streamed by `datasets`."""
    import datasets

    data = datasets.load_dataset(kind, data_files=[str(f) for f in files], split="train", streaming=True)
    return data.select_columns("text")


def parquet_rows(files: list) -> int:
    """Number of rows of parquet files, from their footers."""
    import pyarrow.parquet

    return sum(pyarrow.parquet.read_metadata(f).num_rows for f in files)


def check_disk(needs: dict):
    """ValueError unless there is room for `needs`, {folder: bytes}. Needs on one file system are added up."""
    wanted, folders = Counter(), {}
    for folder, size in needs.items():
        existing = next(p for p in [folder.resolve(), *folder.resolve().parents] if p.exists())
        folders[existing.stat().st_dev] = existing
        wanted[existing.stat().st_dev] += max(0, int(size))
    for device, size in wanted.items():
        if size > (free := shutil.disk_usage(folders[device]).free):
            raise ValueError(
                f"{folders[device]} has {free / 1e9:.1f} GB free, and this needs {size / 1e9:.1f} GB: make room, give "
                "--out_dir on another disk, or set HF_HOME to move the download"
            )


def _size(folder):
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
