"""What --input names, as sources to score: text files, prepared datasets, files of
conversations."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from configurator import read_path
from interop.conversations.records import conversations
from interop.conversations.template import TEMPLATES, encode_all, named_template, template_of
from interop.evaluation.scoring import Example, Source
from interop.evaluation.settings import EvaluateConfig
from nanodnt.data import folder_of, load_meta, sha256
from nanodnt.data.examples import ANSWER, PreparedExamples
from nanodnt.data.inputs import RECORDS, Notes, find_files, read_document
from nanodnt.data.tokenizer import same_tokenizer
from nanodnt.data.windows import PreparedText
from nanodnt.tasks import task_of_data
from nanodnt.weights import Trained


def open_sources(config: EvaluateConfig, trained: Trained) -> list:
    """The sources that a command names, for the model `trained`. ValueError, one line, where one is
    missing, empty, damaged, or does not fit the model, its tokenizer or context."""
    names = config.task_names()
    if "text" in names:
        return [open_text(read_path(config.input), config.overlap, trained)]
    return open_answers(config, trained) if "answers" in names else []


def open_text(name: str, overlap: int, trained: Trained) -> Source:
    """The text file, or the prepared dataset, `name`."""
    block_size = trained.model.config.block_size
    if overlap >= block_size:
        raise ValueError(
            f"overlap={overlap} must be below {trained.source}'s block_size={block_size}"
        )
    if not Path(name).is_file() and (folder_of(name).is_dir() or Path(name).is_dir()):
        if overlap:
            raise ValueError(
                f"overlap={overlap} is for text files: {name} is read in the windows of training"
            )
        examples, meta = read_dataset(name, "text", trained)
        # the windows follow each other, so their targets are one stretch of the file
        n_bytes = trained.tokenizer.count_bytes(
            np.concatenate([example.targets for example in examples])
        )
        settings = dict(overlap=0, sha256=meta["splits"]["val"]["sha256"])
        settings |= {"doc_mask": True} if trained.doc_mask else {}
        return Source(f"text {name}", examples, settings, n_bytes)
    try:
        text = read_document(Path(name))
    except ValueError as e:
        raise ValueError(f"input {e}") from None
    try:
        first = trained.tokenizer.new_document()[-1]
    except ValueError:
        why = "this model's alphabet has neither end of text nor newline to stand before a text"
        raise ValueError(f"{why}: it can be evaluated on prepared datasets only") from None
    ids = np.array([first, *trained.tokenizer.encode(text)], np.int64)
    if len(ids) == 1:
        raise ValueError(
            f"input {name} is empty, or has no tokens in the tokenizer of {trained.source}"
        )
    settings = dict(overlap=overlap, sha256=sha256(name))
    return Source(
        f"text {name}", windows(ids, block_size, overlap), settings, n_bytes=len(text.encode())
    )


def windows(ids: np.ndarray, block_size: int, overlap: int) -> list:
    """A text in windows. ids (1 + N,): a token that stands before it, and its N tokens. Each of
    these is a target once: of every window but the first, the first `overlap` inputs are only
    context."""
    found = []
    for start in range(0, max(1, len(ids) - 1 - overlap), block_size - overlap):
        window = ids[start : start + block_size + 1]
        places = np.arange(overlap if start else 0, len(window) - 1)
        found.append(Example(window[:-1], places, window[1:][places]))
    return found


def read_dataset(name: str, kind: str, trained: Trained) -> tuple:
    """(examples, meta.json) of a prepared dataset's validation split: of a text the windows of
    training with eval_tokens=0, and with its doc_mask. ValueError unless it is of this kind, and
    has the tokenizer of the model."""
    meta = load_meta(name)
    if (reads := task_of_data(meta).reads) != "text":
        raise ValueError(
            f"dataset {name} is of {reads}, and the model reads text: choose another dataset"
        )
    if meta.get("kind", "text") != kind:
        held = {"text": "examples, whose answers are evaluated: use --tasks=answers"}
        raise ValueError(
            f"dataset {name} holds {held.get(kind, 'a text, without answers: use --tasks=text')}"
        )
    if not same_tokenizer(meta, trained.meta):
        theirs, ours = (f"{m['tokenizer']}, {m['vocab_size']} tokens" for m in (meta, trained.meta))
        other = f"has another tokenizer ({theirs}) than {trained.source} ({ours})"
        raise ValueError(f"dataset {name} {other}: prepare it with the model's, or name a file")
    prepared, doc_mask = (
        (PreparedText, trained.doc_mask) if kind == "text" else (PreparedExamples, True)
    )
    data, examples = (
        prepared(name, trained.model.config.block_size, meta=meta, doc_mask=doc_mask),
        [],
    )
    for start in data.validation():
        x, y, *positions = (rows[0] for rows in data.val_batch(start[None], 1))
        begins = np.flatnonzero(positions[0] == 0)[1:] if doc_mask else []
        for inputs, targets in zip(np.split(x, begins), np.split(y, begins), strict=True):
            places = np.flatnonzero(targets >= 0)
            if len(places):  # else it is a row's padding
                examples.append(Example(inputs, places, targets[places]))
    return examples, meta


def open_answers(config: EvaluateConfig, trained: Trained) -> list:
    """The sources of the conversations that `config.input` names: a file of records, each such file
    of a folder, or the validation split of a prepared dataset."""
    if trained.tokenizer.eot is None:
        what = f"the tokenizer of {trained.source} ({trained.tokenizer.kind})"
        raise ValueError(
            f"{what} has no end of text, with which every answer ends: evaluate it with --tasks=text"
        )
    name = read_path(config.input)
    is_folder = Path(name).is_dir() and not (folder_of(name) / "meta.json").is_file()
    if not is_folder and not Path(name).is_file():
        if config.template:
            raise ValueError(f"template is for files of records: the dataset {name} has its own")
        examples, meta = read_dataset(name, "examples", trained)
        return [
            as_source(
                name,
                examples,
                meta.get("template"),
                meta["splits"]["val"]["sha256"],
                config,
                trained,
            )
        ]
    notes = Notes()
    files = [
        str(file) for _, file in find_files(Path(name), notes) if file.suffix.lower() in RECORDS
    ]
    if not files:
        raise ValueError(f"input {name} is no {', '.join(RECORDS)} file, and no folder with one")
    template = named_template(config.template) if config.template else template_of(trained.meta)
    if template is None:
        why = f"{trained.source} was trained without a template, which {name} needs"
        raise ValueError(f"{why}: name one, --template={', '.join(TEMPLATES)}")
    sources = []
    for file in files:
        found = conversations(Path(file), notes=notes)
        examples = [
            answers_of(pair) for *_, pair in encode_all(found, trained.tokenizer, template, notes)
        ]
        sources.append(as_source(file, examples, asdict(template), sha256(file), config, trained))
    notes.print()
    return sources


def answers_of(pair: tuple) -> Example:
    """A conversation's (ids, marks) as an example."""
    ids, marks = map(np.array, pair)
    places = np.flatnonzero(marks[1:] == ANSWER)
    return Example(ids[:-1], places, ids[1:][places])


def as_source(
    name: str, examples: list, template: dict, digest: str, config, trained: Trained
) -> Source:
    """The source of conversations. ValueError where there are none, or one is longer than the
    model's context."""
    if not examples:
        raise ValueError(f"input {name} is empty: there are no records in it")
    limit, longest = (
        trained.model.config.block_size,
        max(len(example.inputs) for example in examples),
    )
    if longest > limit:
        what = f"examples of {name} are longer than {limit + 1} tokens, block_size+1 (the longest has {longest + 1:,})"
        raise ValueError(
            f"{what}: leave them out, as data/sft/prepare.py --max_tokens={limit} does"
        )
    settings = dict(max_answer_tokens=config.max_answer_tokens, template=template, sha256=digest)
    return Source(f"answers {name}", examples, settings, eot=trained.tokenizer.eot)
