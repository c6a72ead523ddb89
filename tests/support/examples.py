"""Made datasets of examples, and of texts in documents: written by the contract of meta.json
alone."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
import torch

from nanodnt.data.tokenizer import Tokenizer, json_meta
from support.runs import put_file, write_ids

TEMPLATE = {"system": "{system}\n", "turn": "{prompt}\n{response}"}


def write_examples(folder: Path, tokenizer: dict | None = None, **splits) -> Path:
    """A prepared dataset of examples. Each of `splits` is a list of examples (ids, marks);
    `tokenizer`: the part of meta.json that describes it, or None for bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for split, examples in splits.items():
        ids, marks = ([value for example in examples for value in example[i]] for i in (0, 1))
        entry = put_file(folder / f"{split}.marks", bytes(marks))
        parts[split] = ids, {"marks": entry, "examples": len(examples)}
    return write_ids(
        folder, tokenizer or Tokenizer.meta_for("bytes"), parts, kind="examples", template=TEMPLATE
    )


def chat(*contents, system=None) -> list:
    """Messages: a user's, an assistant's, a user's, …"""
    messages = [{"role": "system", "content": system}] * (system is not None)
    roles = ("user", "assistant") * len(contents)
    return messages + [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]


def write_records(path: Path, records: list, array: bool = False) -> Path:
    """A file of records: one a line, or one array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(records) if array else "".join(json.dumps(r) + "\n" for r in records)
    path.write_text(text, encoding="utf-8")
    return path


def example(*turns, begin=256, eot=256) -> tuple:
    """(ids, marks) of an example: turns are (prompt, response), texts of ASCII characters or lists
    of ids."""
    ids, marks = [begin], [2]
    for prompt, response in turns:
        prompt, response = (
            list(x.encode()) if isinstance(x, str) else list(x) for x in (prompt, response)
        )
        ids += [*prompt, *response, eot]
        marks += [0] * len(prompt) + [1] * (len(response) + 1)
    return ids, marks


def shouts(seed: int, n: int, letters: int = 6) -> list:
    """n examples that are easy to learn: the answer is the prompt's word in capitals."""
    rng = np.random.default_rng(seed)
    words = (
        "".join(map(chr, rng.integers(97, 103, rng.integers(1, letters + 1)))) for _ in range(n)
    )
    return [example((f"{word}\n", word.upper())) for word in words]


def starting_tokenizer(start: bool = True) -> dict:
    """A tokenizer.json of letters with `start` [0, 1], unless start=False, and end of text 2."""
    vocab = {token: i for i, token in enumerate(["<s>", "<a>", "</s>", *map(chr, range(97, 123))])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.add_special_tokens(["<s>", "<a>", "</s>"])
    if start:
        special = [("<s>", 0), ("<a>", 1)]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> <a> $A", special_tokens=special
        )
    return json_meta(made.to_str(), "</s>")


def documents(positions):
    """Yield (row, slice) of each document of rows with these positions (rows, T): one begins at
    each 0."""
    for row, values in enumerate(positions.tolist()):
        starts = [i for i, position in enumerate(values) if position == 0]
        yield from ((row, slice(a, b)) for a, b in pairwise([*starts, len(values)]))


def uneven_examples(seed: int, n: int, low: int = 4, high: int = 33) -> list:
    """n examples of `low` to `high` tokens, in turn with an answer of one token or two and with
    nothing but an answer: rows of them have very different numbers of targets that count."""
    rng, found = np.random.default_rng(seed), []
    for i in range(n):
        # with begin and end of text they are an example
        letters = int(rng.integers(low - 2, high - 1))
        ids = np.cumsum(rng.choice([1, 2, 5], letters)) % 26 + 97
        answer = min(i % 4 // 2, letters) if i % 2 else letters
        found.append(example((ids[: letters - answer].tolist(), ids[letters - answer :].tolist())))
    return found


UNEVEN = dict(train=uneven_examples(0, 150), val=uneven_examples(1, 30))  # no two are the same


def write_documents(folder: Path) -> Path:
    """A prepared text in bytes: documents of 2 to 24 letters, each with end of text behind it."""
    splits = {}
    for split, seed, n in (("train", 0, 300), ("val", 1, 40)):
        documents = (ids[1:] for ids, _ in uneven_examples(seed, n, high=26))
        splits[split] = [token for ids in documents for token in ids]
    return write_ids(folder, Tokenizer.meta_for("bytes"), splits)


def mean_loss(model, documents) -> float:
    """Mean cross-entropy in nats over the counted tokens of documents (ids, marks), each read by
    itself, one by one. A token counts where its mark is 1."""
    losses = []
    for ids, marks in documents:
        logits = model(torch.tensor([ids[:-1]]))[0][0].double().log_softmax(-1)
        losses += [-logits[i - 1, ids[i]].item() for i in range(1, len(ids)) if marks[i] == 1]
    return sum(losses) / len(losses)
