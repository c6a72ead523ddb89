"""How well a model answers: conversations whose answers are known, scored on the answers' tokens alone.

nats_per_answer_token   mean over all tokens of all answers, the end of text after each included: the val_loss of
                        training on that dataset with doc_mask=True and eval_tokens=0
exact_match             share of the answers of which every token, the end of text included, is the model's most likely
                        one after the true text before it: so what it would write at temperature 0, token for token

An answer counts for exact_match if it has at most `max_answer_tokens` tokens, end of text included. Its standard error
is that of independent answers. Each conversation is read by itself, from its beginning, however the run was trained.

Of LLM-Adapters' eight test sets (data/commonsense170k) this asks for the whole answer [I]. Their own script lets the
model write 32 tokens, with 4 beams, and takes the first option that the text names: its numbers are other ones.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from interop.conversations.records import SUFFIXES, conversations
from interop.conversations.template import TEMPLATES, Template, encode_conversation, named_template, template_of
from interop.evaluation.settings import EvaluateConfig
from interop.evaluation.text import load_dataset_meta
from nanodnt.data import folder_of, sha256
from nanodnt.data.examples import ANSWER, BEGIN
from nanodnt.data.inputs import visible_files
from nanodnt.trained import Trained

MAX_LOGITS = 1 << 26  # that are in memory at a time: 256 MiB


@dataclass
class Answers:
    """Conversations, ready to be scored by one model."""

    name: str  # of the input
    examples: list  # of each conversation (ids, marks), two arrays (tokens,), marks as in a prepared dataset
    eot: int
    template: Template | None
    sha256: str  # of the file; of a prepared dataset: of its val.bin


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


def open_answers(names: list, config: EvaluateConfig, trained: Trained, env) -> list:
    """[`Answers` of each input in `names`] for the model `trained`.

    ValueError, one line, where one is missing, empty or damaged, has no template or another tokenizer, or holds a
    conversation that does not fit the template or the model's context."""
    if trained.tokenizer.eot is None:
        raise ValueError(
            f"the tokenizer of {trained.source} ({trained.tokenizer.kind}) has no end of text, with which every answer "
            "ends: evaluate it with --tasks=text"
        )
    known, found, limit = template_of(trained.meta), [], trained.model.config.block_size
    for name in names:
        is_file = Path(name).is_file()
        answers = read_file(name, config, trained) if is_file else read_dataset(name, config, trained, env.is_main)
        lengths = np.array([len(ids) for ids, _ in answers.examples])
        if long := int((lengths > limit + 1).sum()):
            raise ValueError(
                f"{long:,} of {len(lengths):,} examples of {name} are longer than {limit + 1} tokens, block_size+1 of "
                f"{trained.source} (the longest has {lengths.max():,}): leave them out, as data/sft/prepare.py "
                f"--max_tokens={limit} does, or evaluate a model with a longer context"
            )
        found.append(answers)
        if known and answers.template != known:
            env.print(f"note: {trained.source} was trained with another template than that of {name}")
    return found


def read_file(name: str, config: EvaluateConfig, trained: Trained) -> Answers:
    """The conversations of a file of records."""
    template = named_template(config.template) if config.template else template_of(trained.meta)
    if template is None:
        raise ValueError(
            f"{trained.source} was trained without a template, which {name} needs: name one, --template="
            f"{', '.join(TEMPLATES)}"
        )
    examples = []
    for _, where, messages in conversations(Path(name), config.prompt_key, config.response_key):
        try:
            example = encode_conversation(trained.tokenizer, template, messages)
        except ValueError as e:
            raise ValueError(f"{where}: {e}") from None
        examples.append(tuple(map(np.array, example)))
    if not examples:
        raise ValueError(f"input {name} is empty: there are no records in it")
    return Answers(name, examples, trained.tokenizer.eot, template, sha256(name))


def read_dataset(name: str, config: EvaluateConfig, trained: Trained, verify: bool) -> Answers:
    """The validation split of a prepared dataset of examples. `verify`: check its checksums."""
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
    examples = list(zip(np.split(ids, starts[1:]), np.split(marks, starts[1:]), strict=True))
    return Answers(name, examples, meta["eot"], template_of(meta), part["sha256"])


# ----------------------------------------------------------------------------------------------------------- scoring


def answer_ends(examples: list, eot: int) -> np.ndarray:
    """(answers,) where each answer ends, in the tokens of all answers one after another: behind its end of text."""
    tokens = np.concatenate([ids[marks == ANSWER] for ids, marks in examples])
    return np.flatnonzero(tokens == eot) + 1


@torch.no_grad()
def predict(model, examples: list, env) -> tuple:
    """(nats, hits) of the tokens of the answers, one after another: −log of each one's probability after the true text
    before it, and whether no token is more likely."""
    ids = np.zeros((len(examples), max(len(ids) for ids, _ in examples)), np.int64)  # padded on the right,
    counted = np.zeros(ids.shape, bool)  # where no other token looks
    for row, (own, marks) in enumerate(examples):
        ids[row, : len(own)], counted[row, : len(own)] = own, marks == ANSWER
    counted = counted[:, 1:]
    x, targets, picked = env.put(*env.pin(ids[:, :-1], ids[:, 1:][counted], counted))
    x = model.stream(x)[picked]  # (answer tokens, C)
    rows_of_logits, found = max(1, MAX_LOGITS // model.config.padded_vocab_size), []
    for part, target in zip(x.split(rows_of_logits), targets.split(rows_of_logits), strict=True):
        logits = model.logits(part[None])[0]
        found.append((F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target))
    return tuple(torch.cat(values).cpu().numpy() for values in zip(*found, strict=True))


def score_answers(model, answers: Answers, max_answer_tokens: int, batch_size: int, env) -> dict:
    """What evaluation.json holds of `answers`; the work is split over the processes. All ranks must call it.

    A forward pass has at most batch_size · block_size inputs, or one conversation. Where no answer is short enough for
    exact_match, there is none."""
    longest, total, right = max_answer_tokens or math.inf, 0.0, 0
    # some of about the same length at a time; the longest come first: where memory ends, it ends at once
    mine = sorted(answers.examples, key=lambda example: -len(example[0]))[env.rank :: env.world_size]
    while mine:
        rows = max(1, batch_size * model.config.block_size // (len(mine[0][0]) - 1))
        examples, mine = mine[:rows], mine[rows:]
        nats, hits = predict(model, examples, env)
        total += nats.sum(dtype=np.float64)
        parts = np.split(hits, answer_ends(examples, answers.eot)[:-1])
        right += sum(len(part) <= longest and part.all() for part in parts)
    dtype = torch.float32 if env.device.type == "mps" else torch.float64  # mps has no fp64
    total, right = env.sum(torch.tensor([total, right], dtype=dtype, device=env.device)).tolist()
    ends = answer_ends(answers.examples, answers.eot)
    n_tokens, n_short = int(ends[-1]), int((np.diff(ends, prepend=0) <= longest).sum())
    metrics = {"nats_per_answer_token": {"value": total / n_tokens, "stderr": None}}
    if n_short:
        share = right / n_short
        metrics["exact_match"] = {"value": share, "stderr": math.sqrt(share * (1 - share) / n_short)}
    template = answers.template and asdict(answers.template)
    settings = dict(max_answer_tokens=max_answer_tokens, template=template, sha256=answers.sha256)
    counts = dict(examples=len(answers.examples), answers=len(ends), short_answers=n_short, answer_tokens=n_tokens)
    return dict(metrics=metrics, settings=settings, **counts)


def describe_counts(entry: dict) -> str:
    """How much was scored, in words."""
    limit = entry["settings"]["max_answer_tokens"]
    of_them = f"{entry['short_answers']:,} with at most {limit} tokens" if limit else "all"
    exact = f"exact_match counts {of_them}" if entry["short_answers"] else f"no exact_match: none has at most {limit}"
    return f"{entry['answers']:,} answers in {entry['examples']:,} examples, {entry['answer_tokens']:,} tokens; {exact}"


def mean_entry(entries: dict) -> dict:
    """The entry for the mean of exact_match over several inputs, {name: entry}, each with the same weight; {} where
    there is only one input, or one of them has no exact_match."""
    found = [entry["metrics"].get("exact_match") for entry in entries.values()]
    if len(found) < 2 or None in found:
        return {}
    mean = sum(one["value"] for one in found) / len(found)
    stderr = math.hypot(*(one["stderr"] for one in found)) / len(found)
    settings = {name: dict(entry["settings"]) for name, entry in sorted(entries.items())}
    limit = next(iter(settings.values()))["max_answer_tokens"]
    how = dict(max_answer_tokens=limit, inputs=settings)
    return dict(metrics={"exact_match": {"value": mean, "stderr": stderr}}, settings=how)
