"""What --input names, as sources to score: text files, prepared datasets, files of conversations."""

import hashlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from interop.conversations.records import SUFFIXES, conversations
from interop.conversations.template import TEMPLATES, encode_all, named_template, template_of
from interop.evaluation.scoring import Example, Source
from interop.evaluation.settings import EvaluateConfig
from nanodnt.data import folder_of, load_meta, sha256
from nanodnt.data.examples import ANSWER, BEGIN
from nanodnt.data.inputs import visible_files
from nanodnt.data.tokenizer import Tokenizer, same_tokenizer
from nanodnt.data.windows import PreparedText
from nanodnt.tasks import task_of_data
from nanodnt.weights import Trained


def open_sources(config: EvaluateConfig, trained: Trained, env) -> list:
    """The `Source` of the text, or those of the conversations, that a command names, for the model `trained`.

    ValueError, one line, where one is missing, empty, damaged, or does not fit the model, its tokenizer or context."""
    names = config.task_names()
    if "text" in names:
        return [open_text(config.input, config.overlap, trained, env.is_main)]
    return open_answers(config, trained, env) if "answers" in names else []


# -------------------------------------------------------------------------------------------------------------- texts


def open_text(name: str, overlap: int, trained: Trained, verify: bool = True) -> Source:
    """The text file, or the prepared dataset, `name`. `verify`: check a dataset's checksums."""
    block_size = trained.model.config.block_size
    if overlap >= block_size:
        raise ValueError(f"overlap={overlap} must be below {trained.source}'s block_size={block_size}")
    if not Path(name).is_file() and folder_of(name).is_dir():
        return read_windows(name, overlap, trained, verify)
    try:
        raw = Path(name).read_bytes()
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"input {name} is not UTF-8 text (byte {e.start} is not)") from None
    except OSError as e:
        raise ValueError(f"cannot read input {name} ({e.strerror}): name a text file or a prepared dataset") from None
    if not text:
        raise ValueError(f"input {name} is empty: nothing to score")
    try:
        first = trained.tokenizer.new_document()[-1]
    except ValueError:
        why = "this model's alphabet has neither end of text nor newline to stand before a text"
        raise ValueError(f"{why}: it can be evaluated on prepared datasets only") from None
    ids = np.array([first, *trained.tokenizer.encode(text)], np.int64)
    settings = dict(overlap=overlap, sha256=hashlib.sha256(raw).hexdigest())
    return Source(f"text {name}", windows(ids, block_size, overlap), settings, n_bytes=len(raw))


def windows(ids: np.ndarray, block_size: int, overlap: int) -> list:
    """A text in windows. ids (1 + N,): a token that stands before it, and its N tokens. Each of these is a target once:
    of every window but the first, the first `overlap` inputs are only context."""
    found = []
    for start in range(0, max(1, len(ids) - 1 - overlap), block_size - overlap):
        window = ids[start : start + block_size + 1]
        places = np.arange(overlap if start else 0, len(window) - 1)
        found.append(Example(window[:-1], places, window[1:][places]))
    return found


def read_windows(name: str, overlap: int, trained: Trained, verify: bool) -> Source:
    """The validation windows of a prepared dataset: those of training with eval_tokens=0, and with its doc_mask."""
    if overlap:
        raise ValueError(f"overlap={overlap} is for text files: {name} is read in the windows of training")
    meta = load_dataset_meta(name, "text", trained, verify)
    data = PreparedText(name, trained.model.config.block_size, meta=meta, doc_mask=trained.doc_mask)
    examples = []
    for start in data.validation():
        x, y, *positions = (rows[0] for rows in data.val_batch(start[None], 1))
        begins = np.flatnonzero(positions[0] == 0)[1:] if data.doc_mask else []
        for inputs, targets in zip(np.split(x, begins), np.split(y, begins), strict=True):
            examples.append(Example(inputs, np.arange(len(inputs)), targets))
    # the windows follow each other, so their targets are one stretch of the file
    n_bytes = count_bytes(trained.tokenizer, np.concatenate([example.targets for example in examples]))
    settings = dict(overlap=0, sha256=meta["splits"]["val"]["sha256"]) | ({"doc_mask": True} if data.doc_mask else {})
    return Source(f"text {name}", examples, settings, n_bytes)


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


def load_dataset_meta(name: str, kind: str, trained: Trained, verify: bool) -> dict:
    """meta.json of the dataset `name`. ValueError unless it is of this kind, and has the tokenizer of the model."""
    meta = load_meta(name, verify)
    if (reads := task_of_data(meta).reads) != "text":
        raise ValueError(f"dataset {name} is of {reads}, and the model reads text: choose another dataset")
    if meta.get("kind", "text") != kind:
        held = {"text": "examples, whose answers are evaluated: use --tasks=answers"}
        raise ValueError(f"dataset {name} holds {held.get(kind, 'a text, without answers: use --tasks=text')}")
    if not same_tokenizer(meta, trained.meta):
        theirs, ours = (f"{m['tokenizer']}, {m['vocab_size']} tokens" for m in (meta, trained.meta))
        other = f"has another tokenizer ({theirs}) than {trained.source} ({ours})"
        raise ValueError(f"dataset {name} {other}: prepare it with the model's, or name a file")
    return meta


# ------------------------------------------------------------------------------------------------------ conversations


def list_inputs(text: str) -> list:
    """The prepared datasets and the files, each once, that `input` names: one, or several with commas between; of a
    folder, its files of records. ValueError for a name of nothing."""
    names = [text] if Path(text).exists() else [name.strip() for name in text.split(",")]
    found, records = [], ", ".join(SUFFIXES)
    for name in filter(None, names):
        files = [name]
        if Path(name).is_dir() and not (folder_of(name) / "meta.json").is_file():
            files = [str(file) for _, file in visible_files(Path(name)) if file.suffix.lower() in SUFFIXES]
            if not files:
                raise ValueError(f"input {name} holds neither a prepared dataset nor a {records} file")
        elif not Path(name).is_file() and not folder_of(name).is_dir():
            raise ValueError(f"there is no input {name}: name a dataset of examples, or a {records} file")
        found += files
    if not found:
        raise ValueError(f"input={text} names nothing")
    return list(dict.fromkeys(found))


def open_answers(config: EvaluateConfig, trained: Trained, env) -> list:
    """The sources of all conversations that `config.input` names."""
    if trained.tokenizer.eot is None:
        what = f"the tokenizer of {trained.source} ({trained.tokenizer.kind})"
        raise ValueError(f"{what} has no end of text, with which every answer ends: evaluate it with --tasks=text")
    known, found, limit = template_of(trained.meta), [], trained.model.config.block_size
    for name in list_inputs(config.input):
        read = read_file if Path(name).is_file() else read_examples
        pairs, template, digest = read(name, config, trained, env.is_main)
        lengths = np.array([len(ids) for ids, _ in pairs])
        if long := int((lengths > limit + 1).sum()):
            what = f"{long:,} of {len(lengths):,} examples of {name} are longer than {limit + 1} tokens, block_size+1"
            why = f"{what} of {trained.source} (the longest has {lengths.max():,})"
            raise ValueError(f"{why}: leave them out, as data/sft/prepare.py --max_tokens={limit} does")
        places = [np.flatnonzero(marks[1:] == ANSWER) for _, marks in pairs]
        examples = [Example(ids[:-1], at, ids[1:][at]) for (ids, _), at in zip(pairs, places, strict=True)]
        settings = dict(max_answer_tokens=config.max_answer_tokens, template=template and asdict(template))
        settings["sha256"] = digest
        found.append(Source(f"answers {name}", examples, settings, eot=trained.tokenizer.eot))
        if known and template != known:
            env.print(f"note: {trained.source} was trained with another template than that of {name}")
    return found


def read_file(name: str, config: EvaluateConfig, trained: Trained, verify: bool) -> tuple:
    """([(ids, marks) of each conversation], their template, sha256) of a file of records."""
    template = named_template(config.template) if config.template else template_of(trained.meta)
    if template is None:
        why = f"{trained.source} was trained without a template, which {name} needs"
        raise ValueError(f"{why}: name one, --template={', '.join(TEMPLATES)}")
    found = conversations(Path(name), config.prompt_key, config.response_key)
    pairs = [tuple(map(np.array, pair)) for *_, pair in encode_all(found, trained.tokenizer, template)]
    if not pairs:
        raise ValueError(f"input {name} is empty: there are no records in it")
    return pairs, template, sha256(name)


def read_examples(name: str, config: EvaluateConfig, trained: Trained, verify: bool) -> tuple:
    """The same of a prepared dataset's validation split. `verify`: check its checksums."""
    for flag in ("template", "prompt_key", "response_key"):
        if getattr(config, flag) != getattr(EvaluateConfig, flag):
            raise ValueError(f"{flag} is for files of records: the dataset {name} is prepared, with its own template")
    meta = load_dataset_meta(name, "examples", trained, verify)
    part, folder = meta["splits"]["val"], folder_of(name)
    ids = np.fromfile(folder / Path(part["file"]).name, np.dtype(meta["dtype"]).newbyteorder("<"))
    marks = np.fromfile(folder / Path(part["marks"]["file"]).name, np.uint8)
    starts = np.flatnonzero(marks == BEGIN)
    if len(starts) != part["examples"] or starts[:1].any() or not np.logical_or.reduceat(marks == ANSWER, starts).all():
        raise ValueError(f"val.marks of {name!r} does not mark {part['examples']:,} examples: prepare it again")
    pairs = list(zip(np.split(ids, starts[1:]), np.split(marks, starts[1:]), strict=True))
    return pairs, template_of(meta), part["sha256"]
