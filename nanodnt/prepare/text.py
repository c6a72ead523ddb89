"""From text to a prepared dataset: SPLIT.bin holds token ids, little-endian uint16 or uint32,
nothing else."""

import functools
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from nanodnt.data.tokenizer import PIECE, Tokenizer, pieces
from nanodnt.prepare.script import in_order, publish, staging

# characters that a worker tokenises at a time; it gets longer documents in pieces
JOB_CHARS = PIECE


def build(
    out_dir, source, tokenizer, splits, *, name=None, workers=1, command="python train.py"
) -> dict:
    """Tokenise documents and write train.bin, val.bin and meta.json to `out_dir`. Returns the
    content of meta.json.

    tokenizer   a `Tokenizer.meta_for(...)`; where it has an end of text, that follows every document
    splits      {"train": files, "val": files}, read in this order; a file is an iterable of texts, or an array of ids
    workers     tokenising processes; what is written does not depend on it
    command     to print at the end, with the --dataset

    ValueError if a split is empty. A run that fails leaves nothing, and an earlier dataset in
    `out_dir` unchanged."""
    out_dir, dtype = Path(out_dir), id_dtype(tokenizer)
    with staging(out_dir) as parts, start_pool(workers) as pool:
        entries = {}
        for split, files in splits.items():
            blocks = _encode_files(files, tokenizer, dtype, pool, 2 * workers, split)
            entries[split] = _write_split(parts / f"{split}.bin", blocks, dtype)
        meta = {
            "format": 1,
            "dataset": name or out_dir.resolve().name,
            "source": source,
            **tokenizer,
        }
        meta |= {
            "dtype": dtype.name,
            "val_text_bytes": count_bytes(parts / "val.bin", dtype, tokenizer),
        }
        meta["splits"] = entries
        about = f"{meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']:,}"
        if meta["tokenizer"] == "json" and meta["eot"] is None:
            about += "\nnote: this tokenizer names no end of text (eos_token), so nothing stands between documents"
        publish(parts, out_dir, meta, "tokens", about, command)
    return meta


def count_bytes(path: Path, dtype, tokenizer: dict) -> int:
    """Bytes of the text of a file of ids, for bits per byte. It is read in pieces, but by a
    tokenizer.json, for which the tokens of a document belong together, at once."""
    ids, reader = np.memmap(path, dtype, "r"), Tokenizer(tokenizer)
    piece = len(ids) if reader.kind == "json" else 1 << 24
    return sum(
        reader.count_bytes(ids[i : i + piece].astype(np.int64)) for i in range(0, len(ids), piece)
    )


def build_from_hub(args, name: str, source: str, train: list, val: list) -> None:
    """`build` a dataset of the Hub, in GPT-2 BPE; `args`: flags of `script.parser`, `train`, `val`:
    files of texts."""
    splits = {"train": train, "val": val}
    build(args.out_dir, source, Tokenizer.meta_for("gpt2"), splits, name=name, workers=args.workers)


class NoPool:
    """In place of a pool of one process: it works at once, in this thread, which Ctrl-C can
    stop."""

    def submit(self, function, *args) -> Future:
        """A Future that is done."""
        future = Future()
        future.set_result(function(*args))
        return future


@contextmanager
def start_pool(workers: int):
    """A pool of so many processes, or for one of them a NoPool. An error in the block stops what
    they are doing."""
    if workers == 1:
        yield NoPool()
        return
    # spawn: the same on every system, and safe with the threads of pyarrow
    with ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker
    ) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _start_worker():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()  # if it is killed, idle workers must exit too
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def id_dtype(tokenizer: dict) -> np.dtype:
    """The dtype of the ids of a `Tokenizer.meta_for(...)` on disk."""
    return np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")


def _encode_files(files, tokenizer, dtype, pool, ahead, title):
    """Yield the token ids of the files, as bytes."""
    key, whole = json.dumps(tokenizer), tokenizer["tokenizer"] == "json"
    with tqdm(desc=title, unit=" documents", disable=None) as bar:  # None: shown only on a terminal
        for file in files:
            if isinstance(file, np.ndarray):
                yield file.astype(dtype).tobytes()
                continue
            jobs = ((key, dtype.str, job) for job in _jobs(file, whole))
            for raw, documents in in_order(pool, _encode_job, jobs, ahead):
                yield raw
                bar.update(documents)


def _jobs(texts, whole=False):
    """Yield documents in lists of [(text, whether a document ends here)]. `whole`: documents are
    never cut."""
    job, size = [], 0
    for text in texts:
        for piece, ends in [(text, True)] if whole else pieces(text, JOB_CHARS):
            job.append((piece, ends))
            size += len(piece)
            if size >= JOB_CHARS:
                yield job
                job, size = [], 0
    if job:
        yield job


@functools.lru_cache(maxsize=1)
def _tokenizer(meta):
    return Tokenizer(json.loads(meta))


def _encode_job(meta, dtype, job):
    """(the token ids as bytes, number of documents that end in the job). A tokenizer.json's own
    start (LLaMA's <s>) stands before each text; end of text behind each document, if the tokenizer
    has one."""
    tokenizer, found = _tokenizer(meta), []
    for text, ends in job:
        if tokenizer.kind == "bytes":
            found.append(np.frombuffer(text.encode("utf-8"), np.uint8))
        else:
            found.append(np.array([*tokenizer.start, *tokenizer.encode(text)], np.uint32))
        if ends and tokenizer.eot is not None:
            found.append(np.array([tokenizer.eot], np.uint32))
    return np.concatenate(found).astype(dtype).tobytes(), sum(ends for _, ends in job)


def _write_split(path, blocks, dtype):
    """Write blocks of token ids to `path`. Returns its entry in meta.json. ValueError if there are
    none."""
    tokens, max_id, digest = 0, 0, hashlib.sha256()
    with open(path, "wb") as f:
        for raw in blocks:
            ids = np.frombuffer(raw, dtype)
            tokens += len(ids)
            max_id = max(max_id, int(ids.max(initial=0)))
            digest.update(raw)
            f.write(raw)
        f.flush()
        os.fsync(f.fileno())
    if not tokens:
        raise ValueError(f"there is no text for {path.name}")
    return {"file": path.name, "tokens": tokens, "max_id": max_id, "sha256": digest.hexdigest()}
