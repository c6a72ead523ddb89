"""From text to a prepared dataset: SPLIT.bin holds token ids, little-endian uint16 or uint32,
nothing else."""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nanodnt.data.meta import Meta
from nanodnt.data.tokenizer import PIECE, Tokenizer, pieces
from nanodnt.prepare.script import in_order, publish, run_folder, staging
from nanodnt.prepare.shards import read_pieces

# Characters that a worker tokenises at a time; it gets longer documents in pieces.
JOB_CHARS = PIECE
COUNT_TOKENS = 1 << 24  # tokens whose bytes are counted at a time
SMALL_CONTEXT = 128  # block_size of config/quickstart.py
MANY_TOKENS = 100_000_000  # training tokens from which 124M parameters make sense: our choice

Texts = Iterable[str] | np.ndarray  # the documents of a file, or its token ids
Job = list[tuple[str, bool]]  # pieces of documents, and whether a document ends with each


class Encoded(NamedTuple):
    """A tokenised job."""

    raw: bytes  # the token ids
    documents: int  # number of documents that end in the job


def build(
    out_dir: Path,
    source: str,
    tokenizer: Meta,
    splits: dict[str, Sequence[Texts]],
    *,
    name: str | None = None,
    workers: int = 1,
    command: str | None = None,
) -> Meta:
    """Tokenise documents and write train.bin, val.bin and meta.json to `out_dir`. Returns the
    content of meta.json.

    tokenizer   a `Tokenizer.meta_for(...)`; if it has an end of text, that follows every document
    splits      {"train": files, "val": files}, read in this order
    workers     tokenising processes; they do not change what is written
    command     printed at the end, with the --dataset; None: a small model that fits

    Raises ValueError if a split is empty. A run that fails leaves nothing, and an earlier dataset
    in `out_dir` unchanged."""
    out_dir = Path(out_dir)
    dtype = id_dtype(tokenizer)
    with staging(out_dir) as parts, start_pool(workers) as pool:
        entries = {}
        for split, files in splits.items():
            if any(isinstance(file, np.ndarray) for file in files):
                blocks = (ids.astype(dtype).tobytes() for ids in read_pieces(files, split))
            else:
                blocks = _encode_files(files, tokenizer, dtype, pool, 2 * workers, split)
            entries[split] = _write_split(parts / f"{split}.bin", blocks, dtype)
        meta = {
            "format": 1,
            "dataset": name or out_dir.resolve().name,
            "source": source,
            **tokenizer,
            "dtype": dtype.name,
            "val_text_bytes": count_bytes(parts / "val.bin", dtype, tokenizer),
            "splits": entries,
        }
        about = f"{meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']:,}"
        if meta["tokenizer"] == "json" and meta["eot"] is None:
            about += "\nnote: this tokenizer names no end of text (eos_token), "
            about += "so nothing stands between documents"
        commands = [command] if command else _fitting_commands(meta, out_dir)
        publish(parts, out_dir, meta, "tokens", about, commands)
    return meta


def _fitting_commands(meta: Meta, out_dir: Path) -> list[str]:
    """A command for a CPU and, for many tokens of GPT-2, one for GPUs."""
    n_tokens = [entry["tokens"] for entry in meta["splits"].values()]
    small = f"python train.py config/quickstart.py {run_folder(out_dir)}"
    if min(n_tokens) <= SMALL_CONTEXT:
        small += f" --block_size={min(n_tokens) - 1}"
    commands = [small]
    if meta["tokenizer"] == "gpt2" and n_tokens[0] >= MANY_TOKENS:
        large = "torchrun --standalone --nproc_per_node=8 train.py config/dnt_small.py"
        commands.append(f"{large} {run_folder(out_dir, '_dnt_small')}")
    return commands


def build_from_hub(
    args: argparse.Namespace, name: str, source: str, train: list[Texts], val: list[Texts]
) -> None:
    """`build` a dataset of the Hub, in GPT-2 BPE. `args`: flags of `script.parser`."""
    tokenizer = Tokenizer.meta_for("gpt2")
    splits = {"train": train, "val": val}
    build(args.out_dir, source, tokenizer, splits, name=name, workers=args.workers)


def id_dtype(tokenizer: Meta) -> np.dtype:
    """The dtype of a tokenizer's ids on disk."""
    return np.dtype("<u2" if tokenizer["vocab_size"] <= 1 << 16 else "<u4")


def count_bytes(path: Path, dtype: np.dtype, tokenizer: Meta) -> int:
    """Bytes of the text of a file of ids, for bits per byte.

    The file is read in pieces, but at once for a tokenizer.json: there the tokens of a document
    belong together."""
    ids = np.memmap(path, dtype, "r")
    reader = Tokenizer(tokenizer)
    step = len(ids) if reader.kind == "json" else COUNT_TOKENS
    n_bytes = 0
    for start in range(0, len(ids), step):
        n_bytes += reader.count_bytes(ids[start : start + step].astype(np.int64))
    return n_bytes


# --------------------------------------------------------------------------------- worker processes


class NoPool:
    """A stand-in for a pool of one process. It works at once, in this thread, and Ctrl-C can stop
    it."""

    def submit(self, function: Callable, *args: Any) -> Future:
        """A Future that is done."""
        future = Future()
        future.set_result(function(*args))
        return future


@contextmanager
def start_pool(workers: int) -> Iterator[Executor | NoPool]:
    """A pool of `workers` processes; a NoPool for one. An error in the block stops them."""
    if workers == 1:
        yield NoPool()
        return
    # spawn: the same on every system, and safe with the threads of pyarrow
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        try:
            yield pool
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()  # if it is killed, idle workers must exit too
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode_files(
    files: Sequence[Iterable[str]],
    tokenizer: Meta,
    dtype: np.dtype,
    pool: Executor | NoPool,
    ahead: int,
    title: str,
) -> Iterator[bytes]:
    """Yield the token ids of the files."""
    key = json.dumps(tokenizer)
    cuts = tokenizer["tokenizer"] != "json"
    with tqdm(desc=title, unit=" documents", disable=None) as bar:  # None: shown only on a terminal
        for file in files:
            jobs = ((key, dtype.str, job) for job in _jobs(file, cuts))
            for encoded in in_order(pool, _encode_job, jobs, ahead):
                yield encoded.raw
                bar.update(encoded.documents)


def _jobs(texts: Iterable[str], cuts: bool = True) -> Iterator[Job]:
    """Yield documents in jobs of about JOB_CHARS. `cuts`: whether documents may be cut."""
    job = []
    size = 0
    for text in texts:
        parts = pieces(text, JOB_CHARS) if cuts else [(text, True)]
        for piece, ends in parts:
            job.append((piece, ends))
            size += len(piece)
            if size >= JOB_CHARS:
                yield job
                job = []
                size = 0
    if job:
        yield job


@functools.lru_cache(maxsize=1)
def _tokenizer(meta: str) -> Tokenizer:
    return Tokenizer(json.loads(meta))


def _encode_job(meta: str, dtype: str, job: Job) -> Encoded:
    """Tokenise a job. A tokenizer.json's own start (LLaMA's <s>) stands before each text; end of
    text behind each document, if the tokenizer has one."""
    tokenizer = _tokenizer(meta)
    parts = []
    for text, ends in job:
        if tokenizer.kind == "bytes":
            parts.append(np.frombuffer(text.encode("utf-8"), np.uint8))
        else:
            parts.append(np.array([*tokenizer.start, *tokenizer.encode(text)], np.uint32))
        if ends and tokenizer.eot is not None:
            parts.append(np.array([tokenizer.eot], np.uint32))
    raw = np.concatenate(parts).astype(dtype).tobytes()
    return Encoded(raw, documents=sum(ends for _, ends in job))


def _write_split(path: Path, blocks: Iterable[bytes], dtype: np.dtype) -> dict[str, Any]:
    """Write blocks of token ids to `path`. Returns its entry in meta.json. Raises ValueError if
    there are none."""
    tokens = 0
    max_id = 0
    digest = hashlib.sha256()
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
