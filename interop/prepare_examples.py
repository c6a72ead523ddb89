"""From conversations to a prepared dataset of kind "examples", for data/sft and
data/commonsense170k.

Beside token ids it has train.marks and val.marks, a byte a token: ANSWER (with the end of text
after the answer), BEGIN, or 0."""

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from interop.conversations.records import Conversation
from interop.conversations.template import TEMPLATES, Template, encode_all, named_template
from interop.huggingface.tokenizer_files import find_tokenizer
from nanodnt.data.examples import ANSWER
from nanodnt.data.inputs import RECORDS, Notes, hold_out
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.prepare import script
from nanodnt.prepare.text import id_dtype


class MarkedExample(NamedTuple):
    name: str
    ids: np.ndarray
    marks: np.ndarray  # a byte for each id


def add_flags(parser: argparse.ArgumentParser, template: str) -> None:
    """Add the flags for making tokens of conversations; `template` is the default of its flag."""
    parser.add_argument(
        "--tokenizer", required=True, help="bytes, gpt2, gpt2_4096, a folder or OWNER/MODEL"
    )
    parser.add_argument(
        "--template", default=template, help=f"{', '.join(TEMPLATES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--max_tokens", type=int, help="the block_size of training: leave out longer examples"
    )
    parser.add_argument(
        "--skip_bad",
        action="store_true",
        help="leave out records that cannot be used, and count them",
    )


def check_flags(args: argparse.Namespace) -> tuple[dict[str, Any], Template]:
    """The meta of the tokenizer, and the template. ValueError for values of the flags of
    `add_flags` that are not allowed."""
    template = named_template(args.template)
    tokenizer = find_tokenizer(args.tokenizer)
    if tokenizer["eot"] is None:
        raise ValueError(
            f"--tokenizer={args.tokenizer} names no end of text (eos_token), with which every "
            "answer ends"
        )
    return tokenizer, template


def build_examples(
    out_dir: Path,
    source: str,
    args: argparse.Namespace,
    notes: Notes,
    train_input: Iterable[Conversation],
    val_input: Iterable[Conversation] | None = None,
    *,
    name: str,
    val_fraction: float,
    command: str,
) -> None:
    """Write train.bin, train.marks, val.bin, val.marks and meta.json to `out_dir`.

    args         the flags of `add_flags`
    notes        notes on the input for the user; they are printed
    train_input  conversations, from `conversations`
    val_input    conversations of val.bin; None: about `val_fraction` of `train_input`, by a hash of
                 their names
    command      the next command for the user, to which --dataset is added

    ValueError, one line, where a conversation does not fit or a split is empty; then nothing in
    `out_dir` has changed. The tokens of all examples are held in memory, 3 to 5 bytes each."""
    tokenizer_meta, template = check_flags(args)
    tokenizer = Tokenizer(tokenizer_meta)
    dtype = id_dtype(tokenizer_meta)

    def encode(flag: str, conversations: Iterable[Conversation]) -> list[MarkedExample]:
        return _encode(flag, conversations, tokenizer, template, dtype, args.max_tokens, notes)

    train = encode("--input", train_input)
    if val_input is not None:
        val = encode("--val_input", val_input)
    elif len(train) == 1:
        raise ValueError(
            "there is one example, and both training and validation need one: add more, or "
            "--val_input"
        )
    else:
        is_val = hold_out([script.score(example.name) for example in train], val_fraction)
        pairs = list(zip(train, is_val, strict=True))
        train = [example for example, held in pairs if not held]
        val = [example for example, held in pairs if held]
    source = f"{source} ({len(train) + len(val):,} examples)"
    with script.staging(out_dir) as parts:
        meta = {"format": 1, "kind": "examples", "dataset": name, "source": source}
        meta |= tokenizer_meta
        meta["template"] = asdict(template)
        meta["dtype"] = dtype.name
        meta["splits"] = {
            "train": _write_split(parts, "train", train),
            "val": _write_split(parts, "val", val),
        }
        script.publish(parts, out_dir, meta, "examples", _summary(meta), [command])


def _summary(meta: dict[str, Any]) -> str:
    """Lines for the console on a dataset."""
    splits = meta["splits"].values()
    n_tokens = sum(split["tokens"] for split in splits)
    n_answer_tokens = sum(split["answer_tokens"] for split in splits)
    longest = max(split["longest"] for split in splits)
    return (
        f"{n_tokens:,} tokens, {meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']:,}\n"
        f"{n_answer_tokens / n_tokens:.1%} of the tokens count in the loss\n"
        f"the longest example, of {longest:,} tokens, needs block_size {longest - 1:,}"
    )


def _encode(
    flag: str,
    conversations: Iterable[Conversation],
    tokenizer: Tokenizer,
    template: Template,
    dtype: np.dtype,
    max_tokens: int | None,
    notes: Notes,
) -> list[MarkedExample]:
    """The examples of conversations, without those of more than max_tokens inputs, which are
    noted."""
    examples = []
    conversations = tqdm(conversations, desc="tokenising", unit=" examples", disable=None)
    for name, place, (ids, marks) in encode_all(conversations, tokenizer, template, notes):
        if max_tokens is not None and len(ids) > max_tokens + 1:
            reason = f"examples of more than max_tokens+1 = {max_tokens + 1:,} tokens"
            notes.leave_out(reason, place)
        else:
            ids = np.array(ids, dtype)
            examples.append(MarkedExample(name, ids, np.array(marks, np.uint8)))
    notes.print()
    if not examples:
        raise ValueError(f"{flag} holds no records ({', '.join(RECORDS)}) that can be used")
    return examples


def _write_split(parts: Path, split: str, examples: list[MarkedExample]) -> dict[str, Any]:
    """Write parts/SPLIT.bin and .marks; returns the split's entry in meta.json."""
    ids = np.concatenate([example.ids for example in examples])
    marks = np.concatenate([example.marks for example in examples])
    return {
        **script.write(parts / f"{split}.bin", ids.tobytes()),
        "tokens": len(ids),
        "max_id": int(ids.max()),
        "examples": len(examples),
        "answer_tokens": int((marks == ANSWER).sum()),
        "longest": max(len(example.ids) for example in examples),
        "marks": script.write(parts / f"{split}.marks", marks.tobytes()),
    }
