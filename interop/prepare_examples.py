"""From conversations to a prepared dataset of kind "examples": what data/sft and
data/commonsense170k share.

Beside token ids it has train.marks and val.marks, a byte a token: ANSWER (its end of text
included), BEGIN, or 0."""

import argparse
from dataclasses import asdict

import numpy as np
from tqdm import tqdm

from interop.conversations.template import TEMPLATES, encode_all, named_template
from interop.huggingface.tokenizer_files import find_tokenizer
from nanodnt.data.examples import ANSWER
from nanodnt.data.inputs import RECORDS, hold_out
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.prepare import script
from nanodnt.prepare.text import id_dtype


def add_flags(parser: argparse.ArgumentParser, template: str) -> None:
    """The flags that say how conversations become tokens; `template` is the default."""
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


def check_flags(args) -> tuple:
    """(meta of the tokenizer, template). ValueError for flags of `add_flags` that are wrong in
    themselves."""
    template = named_template(args.template)
    tokenizer = find_tokenizer(args.tokenizer)
    if tokenizer["eot"] is None:
        raise ValueError(
            f"--tokenizer={args.tokenizer} names no end of text (eos_token), with which every answer ends"
        )
    return tokenizer, template


def build_examples(
    out_dir, source, args, notes, found, held_out=None, *, name, val_fraction, command
) -> None:
    """Write train.bin, train.marks, val.bin, val.marks and meta.json to `out_dir`.

    args      with the flags of `add_flags`
    notes     what is to be said of them, `Notes`; it is printed
    found     conversations, as `conversations` yields them
    held_out  those of val.bin; None: about `val_fraction` of `found`, by a hash of their names
    command   what to type next, to which --dataset is added

    ValueError, one line, where a conversation does not fit or a split is empty; then nothing in
    `out_dir` has changed. The tokens of all examples are held in memory, 3 to 5 bytes each."""
    tokenizer, template = check_flags(args)
    reader, dtype = Tokenizer(tokenizer), id_dtype(tokenizer)
    train, val = _encode("--input", found, reader, template, dtype, args.max_tokens, notes), None
    if held_out is not None:
        val = _encode("--val_input", held_out, reader, template, dtype, args.max_tokens, notes)
    elif len(train) == 1:
        raise ValueError(
            "there is one example, and both training and validation need one: add more, or --val_input"
        )
    else:
        is_val = hold_out([script.score(name) for name, _, _ in train], val_fraction)
        train, val = (
            [e for e, held in zip(train, is_val, strict=True) if held == wanted]
            for wanted in (False, True)
        )
    source = f"{source} ({len(train) + len(val):,} examples)"
    with script.staging(out_dir) as parts:
        meta = {"format": 1, "kind": "examples", "dataset": name, "source": source, **tokenizer}
        meta |= {"template": asdict(template), "dtype": dtype.name}
        meta["splits"] = {
            "train": _write_split(parts, "train", train),
            "val": _write_split(parts, "val", val),
        }
        found = meta["splits"].values()
        n_tokens, longest = sum(p["tokens"] for p in found), max(p["longest"] for p in found)
        about = (
            f"{n_tokens:,} tokens, {meta['tokenizer']} tokenizer, vocabulary {meta['vocab_size']:,}"
        )
        about += f"\n{sum(p['answer_tokens'] for p in found) / n_tokens:.1%} of the tokens count in the loss"
        about += f"\nthe longest example, of {longest:,} tokens, needs block_size {longest - 1:,}"
        script.publish(parts, out_dir, meta, "examples", about, command)


def _encode(flag, found, tokenizer, template, dtype, max_tokens, notes):
    """[(name, ids, marks)] of conversations, without those of more than max_tokens inputs, which
    are noted."""
    examples = []
    found = tqdm(found, desc="tokenising", unit=" examples", disable=None)
    for name, where, (ids, marks) in encode_all(found, tokenizer, template, notes):
        if max_tokens is not None and len(ids) > max_tokens + 1:
            notes.leave_out(
                f"examples of more than max_tokens+1 = {max_tokens + 1:,} tokens", where
            )
        else:
            examples.append((name, np.array(ids, dtype), np.array(marks, np.uint8)))
    notes.print()
    if not examples:
        raise ValueError(f"{flag} holds no records ({', '.join(RECORDS)}) that can be used")
    return examples


def _write_split(parts, split, examples):
    """Write parts/SPLIT.bin and .marks; returns the split's entry in meta.json."""
    _, ids, marks = zip(*examples, strict=True)
    longest, ids, marks = max(map(len, ids)), np.concatenate(ids), np.concatenate(marks)
    entry = script.write(parts / f"{split}.bin", ids.tobytes())
    beside = {"marks": script.write(parts / f"{split}.marks", marks.tobytes())}
    sizes = {"tokens": len(ids), "max_id": int(ids.max()), "examples": len(examples)}
    sizes |= {"answer_tokens": int((marks == ANSWER).sum()), "longest": longest}
    return entry | sizes | beside
