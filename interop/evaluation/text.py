"""How well a model predicts a text: nats per token, bits per byte, perplexity."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nanodnt.data import folder_of, load_meta
from nanodnt.data.tokenizer import Tokenizer, same_tokenizer
from nanodnt.data.windows import PreparedText
from nanodnt.engine import evaluate
from nanodnt.tasks import task_of, task_of_data
from nanodnt.trained import Trained


class FileWindows:
    """A tokenized text in windows, with the methods of `PreparedText` that `evaluate` calls.

    ids (1 + N,) is what stands before the text, one token, and its N tokens. Each of them is a target exactly once: of
    every window but the first, the first `overlap` inputs are only context."""

    def __init__(self, ids: np.ndarray, block_size: int, overlap: int):
        self.ids, self.block_size, self.overlap = ids, block_size, overlap

    def validation(self, eval_tokens: int = 0) -> np.ndarray:
        """Where each window begins in `ids`."""
        return np.arange(0, max(1, len(self.ids) - 1 - self.overlap), self.block_size - self.overlap)

    def val_batch(self, starts: np.ndarray, size: int) -> tuple:
        """The windows at `starts`: inputs and targets, int64 arrays (size, T); targets that do not count are -1."""
        x, y = np.zeros((size, self.block_size), np.int64), np.full((size, self.block_size), -1, np.int64)
        for row, start in enumerate(starts.tolist()):
            window = self.ids[start : start + self.block_size + 1]
            known = self.overlap if start else 0
            x[row, : len(window) - 1], y[row, known : len(window) - 1] = window[:-1], window[1 + known :]
        return x, y


@dataclass
class Text:
    """A text, ready to be scored by one model."""

    windows: FileWindows | PreparedText
    n_tokens: int  # that are scored
    n_bytes: int  # of their text in UTF-8
    settings: dict  # as evaluation.json has them; sha256 is that of the file, or of a dataset's val.bin


def open_text(name: str, overlap: int, trained: Trained, verify: bool = True) -> Text:
    """The text file, or the prepared dataset, `name`, for the model `trained`. `verify`: check a dataset's checksums.

    ValueError where it is missing, empty or not UTF-8, and for a dataset of another tokenizer."""
    block_size = trained.model.config.block_size
    if overlap >= block_size:
        raise ValueError(f"overlap={overlap} must be below {trained.source}'s block_size={block_size}")
    if not Path(name).is_file() and folder_of(name).is_dir():
        return open_dataset(name, overlap, trained, verify)
    try:
        raw = Path(name).read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"input {name} is not UTF-8 text (byte {e.start} is not)") from None
    except OSError as e:
        raise ValueError(f"cannot read input {name} ({e.strerror}): name a text file or a prepared dataset") from None
    if not text:
        raise ValueError(f"input {name} is empty: nothing to score")
    ids = np.array([before_text(trained.tokenizer), *trained.tokenizer.encode(text)], dtype=np.int64)
    settings = dict(overlap=overlap, sha256=hashlib.sha256(raw).hexdigest())
    return Text(FileWindows(ids, block_size, overlap), len(ids) - 1, len(raw), settings)


def before_text(tokenizer: Tokenizer) -> int:
    """The token that a model reads before the first of a text. ValueError where its alphabet has none."""
    try:
        return tokenizer.new_document()[-1]
    except ValueError:
        raise ValueError(
            "this model's alphabet has neither end of text nor newline, so nothing can stand before a text: "
            "it can be evaluated on prepared datasets only"
        ) from None


def open_dataset(name: str, overlap: int, trained: Trained, verify: bool) -> Text:
    """The validation windows of a prepared dataset: those of training with eval_tokens=0, and with its doc_mask."""
    if overlap:
        raise ValueError(f"overlap={overlap} is for text files: {name} is read in the windows of training")
    meta = load_dataset_meta(name, "text", trained, verify)
    data = PreparedText(name, trained.model.config.block_size, meta=meta, doc_mask=trained.doc_mask)
    # the windows follow each other, so their targets are one stretch of the file
    targets = np.concatenate([data.val_batch(start[None], 1)[1][0] for start in data.validation()])
    settings = dict(overlap=0, sha256=meta["splits"]["val"]["sha256"]) | ({"doc_mask": True} if data.doc_mask else {})
    return Text(data, targets.size, count_bytes(trained.tokenizer, targets), settings)


OF_THE_OTHER_TASK = {  # by the kind that is wanted
    "text": "examples, whose answers are evaluated: use --tasks=answers",
    "examples": "a text, without answers: use --tasks=text",
}


def load_dataset_meta(name: str, kind: str, trained: Trained, verify: bool) -> dict:
    """meta.json of the dataset `name`. ValueError unless it is of this kind, and has the tokenizer of the model."""
    meta = load_meta(name, verify)
    if (reads := task_of_data(meta).reads) != "text":
        raise ValueError(f"dataset {name} is of {reads}, and the model reads text: choose another dataset")
    if meta.get("kind", "text") != kind:
        raise ValueError(f"dataset {name} holds {OF_THE_OTHER_TASK[kind]}")
    if not same_tokenizer(meta, trained.meta):
        theirs, ours = (f"{m['tokenizer']}, {m['vocab_size']} tokens" for m in (meta, trained.meta))
        other = {"text": "a text file", "examples": "a file of records"}[kind]
        raise ValueError(
            f"dataset {name} has another tokenizer ({theirs}) than {trained.source} ({ours}): prepare it with the "
            f"model's, or name {other}"
        )
    return meta


def count_bytes(tokenizer: Tokenizer, ids: np.ndarray) -> int:
    """Bytes of the text of `ids` in UTF-8. End of text has none."""
    eot = tokenizer.eot
    if tokenizer.kind == "bytes":
        return int((ids != eot).sum())
    if tokenizer.kind in ("gpt2", "gpt2_4096"):  # a token may be part of a character
        one = tokenizer.bpe.decode_single_token_bytes
        return sum(n * len(one(i)) for i, n in enumerate(np.bincount(ids).tolist()) if n and i != eot)
    # the tokens of a tokenizer.json are no bytes: some decoders join, or drop, spaces
    documents = np.split(ids, np.flatnonzero(ids == eot) + 1) if eot is not None else [ids]
    return sum(len(tokenizer.decode(document).encode("utf-8")) for document in documents)


def score_text(model, text: Text, batch_size: int, env) -> dict:
    """What evaluation.json holds of a text; the work is split over the processes. All ranks must call it."""
    go_on = SimpleNamespace(agreed=lambda: False)  # nobody asks it to stop and save
    everything = SimpleNamespace(eval_tokens=0)
    nats = evaluate(model, task_of(model.config), text.windows, everything, batch_size, env, go_on)["val_loss"]
    model.eval()
    found = {
        "nats_per_token": nats,
        "bits_per_byte": nats * text.n_tokens / math.log(2) / text.n_bytes if text.n_bytes else math.nan,
        "perplexity": math.exp(nats) if nats < 700 else math.inf,
    }
    metrics = {name: {"value": value, "stderr": None} for name, value in found.items()}
    return dict(metrics=metrics, settings=text.settings, tokens=text.n_tokens, bytes=text.n_bytes)
