"""The inputs of --input as sources to score: text files, prepared datasets, files of
conversations."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configurator import read_path
from interop.conversations.records import conversations
from interop.conversations.template import (
    TEMPLATES,
    Encoded,
    Template,
    encode_all,
    named_template,
    template_of,
)
from interop.evaluation.scoring import Example, Source
from interop.evaluation.settings import EvaluateConfig
from nanodnt.data import folder_of, load_meta, sha256
from nanodnt.data.examples import ANSWER, PreparedExamples
from nanodnt.data.inputs import RECORDS, Notes, find_files, read_document
from nanodnt.data.tokenizer import same_tokenizer
from nanodnt.data.windows import PreparedText
from nanodnt.tasks import task_of_data
from nanodnt.weights import Trained


class ReadDataset(NamedTuple):
    examples: list[Example]
    meta: dict[str, Any]  # meta.json


def open_sources(config: EvaluateConfig, trained: Trained) -> list[Source]:
    """The sources that a command names, for the model `trained`. ValueError, one line, where one is
    missing, empty, damaged, or does not fit the model, its tokenizer or context."""
    names = config.task_names()
    if "text" in names:
        return [open_text(read_path(config.input), config.overlap, trained)]
    return open_answers(config, trained) if "answers" in names else []


def open_text(name: str, overlap: int, trained: Trained) -> Source:
    """The source of the text file, or the prepared dataset, `name`."""
    block_size = trained.model.config.block_size
    if overlap >= block_size:
        raise ValueError(
            f"overlap={overlap} must be below {trained.source}'s block_size={block_size}"
        )
    is_dataset = folder_of(name).is_dir() or Path(name).is_dir()
    if is_dataset and not Path(name).is_file():
        if overlap:
            raise ValueError(
                f"overlap={overlap} is for text files: {name} is read in the windows of training"
            )
        examples, meta = read_dataset(name, "text", trained)
        # the windows follow each other, so their targets are one stretch of the file
        targets = np.concatenate([example.targets for example in examples])
        settings = dict(overlap=0, sha256=meta["splits"]["val"]["sha256"])
        if trained.doc_mask:
            settings["doc_mask"] = True
        n_bytes = trained.tokenizer.count_bytes(targets)
        return Source(f"text {name}", examples, settings, n_bytes)
    try:
        text = read_document(Path(name))
    except ValueError as e:
        raise ValueError(f"input {e}") from None
    try:
        first = trained.tokenizer.new_document()[-1]
    except ValueError:
        raise ValueError(
            "this model's alphabet has neither end of text nor newline to stand before a text: it "
            "can be evaluated on prepared datasets only"
        ) from None
    ids = np.array([first, *trained.tokenizer.encode(text)], np.int64)
    if len(ids) == 1:
        raise ValueError(
            f"input {name} is empty, or has no tokens in the tokenizer of {trained.source}"
        )
    examples = windows(ids, block_size, overlap)
    settings = dict(overlap=overlap, sha256=sha256(name))
    return Source(f"text {name}", examples, settings, n_bytes=len(text.encode()))


def windows(ids: np.ndarray, block_size: int, overlap: int) -> list[Example]:
    """The windows of a text. ids (1 + N,): the token before the text, and its N tokens. Each of the
    N is a target once: in every window after the first, the first `overlap` inputs are only
    context."""
    examples = []
    for start in range(0, max(1, len(ids) - 1 - overlap), block_size - overlap):
        window = ids[start : start + block_size + 1]
        n_context = overlap if start else 0
        places = np.arange(n_context, len(window) - 1)
        examples.append(Example(window[:-1], places, window[1:][places]))
    return examples


def read_dataset(name: str, kind: str, trained: Trained) -> ReadDataset:
    """The validation split of a prepared dataset; for a text the windows of training with
    eval_tokens=0, and with its doc_mask. ValueError unless it is of this kind, and has the
    tokenizer of the model."""
    meta = load_meta(name)
    reads = task_of_data(meta).reads
    if reads != "text":
        raise ValueError(
            f"dataset {name} is of {reads}, and the model reads text: choose another dataset"
        )
    if meta.get("kind", "text") != kind:
        content = "a text, without answers: use --tasks=text"
        if kind == "text":
            content = "examples, whose answers are evaluated: use --tasks=answers"
        raise ValueError(f"dataset {name} holds {content}")
    if not same_tokenizer(meta, trained.meta):
        theirs, ours = (f"{m['tokenizer']}, {m['vocab_size']} tokens" for m in (meta, trained.meta))
        raise ValueError(
            f"dataset {name} has another tokenizer ({theirs}) than {trained.source} ({ours}): "
            "prepare it with the model's, or name a file"
        )
    block_size = trained.model.config.block_size
    if kind == "text":
        doc_mask = trained.doc_mask
        data = PreparedText(name, block_size, meta=meta, doc_mask=doc_mask)
    else:
        doc_mask = True
        data = PreparedExamples(name, block_size, meta=meta, doc_mask=doc_mask)
    examples = []
    for start in data.validation():
        x, y, *positions = (rows[0] for rows in data.val_batch(start[None], 1))
        begins = np.flatnonzero(positions[0] == 0)[1:] if doc_mask else []
        for inputs, targets in zip(np.split(x, begins), np.split(y, begins), strict=True):
            places = np.flatnonzero(targets >= 0)
            if len(places):  # else it is a row's padding
                examples.append(Example(inputs, places, targets[places]))
    return ReadDataset(examples, meta)


def open_answers(config: EvaluateConfig, trained: Trained) -> list[Source]:
    """The sources of the conversations in `config.input`: a file of records, each such file of a
    folder, or the validation split of a prepared dataset."""
    if trained.tokenizer.eot is None:
        raise ValueError(
            f"the tokenizer of {trained.source} ({trained.tokenizer.kind}) has no end of text, "
            "with which every answer ends: evaluate it with --tasks=text"
        )
    name = read_path(config.input)
    is_folder = Path(name).is_dir() and not (folder_of(name) / "meta.json").is_file()
    if not is_folder and not Path(name).is_file():
        if config.template:
            raise ValueError(f"template is for files of records: the dataset {name} has its own")
        examples, meta = read_dataset(name, "examples", trained)
        digest = meta["splits"]["val"]["sha256"]
        return [as_source(name, examples, meta.get("template"), digest, config, trained)]
    template = choose_template(config, trained)
    notes = Notes()
    sources = []
    for _, file in find_files(Path(name), notes):
        if file.suffix.lower() in RECORDS:
            records = conversations(file, notes=notes)
            encoded = encode_all(records, trained.tokenizer, template, notes)
            examples = [answers_of(conversation) for _, _, conversation in encoded]
            file = str(file)
            source = as_source(file, examples, asdict(template), sha256(file), config, trained)
            sources.append(source)
    if not sources:
        raise ValueError(f"input {name} is no {', '.join(RECORDS)} file, and no folder with one")
    notes.print()
    return sources


def choose_template(config: EvaluateConfig, trained: Trained) -> Template:
    """The template of the flag, or else of the model. ValueError without either."""
    if config.template:
        return named_template(config.template)
    template = template_of(trained.meta)
    if template is None:
        raise ValueError(
            f"{trained.source} was trained without a template, which {config.input} needs: name "
            f"one, --template={', '.join(TEMPLATES)}"
        )
    return template


def answers_of(conversation: Encoded) -> Example:
    """A conversation as an example, whose targets are the answers."""
    ids, marks = map(np.array, conversation)
    places = np.flatnonzero(marks[1:] == ANSWER)
    return Example(ids[:-1], places, ids[1:][places])


def as_source(
    name: str,
    examples: list[Example],
    template: dict[str, str],
    digest: str,
    config: EvaluateConfig,
    trained: Trained,
) -> Source:
    """The source of conversations. ValueError without conversations, or if one is longer than the
    model's context."""
    if not examples:
        raise ValueError(f"input {name} is empty: there are no records in it")
    limit = trained.model.config.block_size
    longest = max(len(example.inputs) for example in examples)
    if longest > limit:
        raise ValueError(
            f"examples of {name} are longer than {limit + 1} tokens, block_size+1 (the longest has "
            f"{longest + 1:,}): leave them out, as data/sft/prepare.py --max_tokens={limit} does"
        )
    settings = dict(max_answer_tokens=config.max_answer_tokens, template=template, sha256=digest)
    return Source(f"answers {name}", examples, settings, eot=trained.tokenizer.eot)
