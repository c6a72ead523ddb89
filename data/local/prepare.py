r"""Your own text → data/NAME: plain text or records, one file or a folder of them; or files of
token ids.

A document is a plain text file (.txt, .md, .py, any UTF-8), a line of a .jsonl or .ndjson file, an
element of the array in a .json file, or a row of a .parquet file. Line ends become \n, and a byte
order mark is dropped. Folders are read recursively, also through links. Files that are hidden,
empty or no text are left out, counted and named. A record that cannot be used is refused, or left
out with --skip_bad. End of text follows every document where the tokenizer has one (chars has
none); its name in a text (<|endoftext|>) is ordinary text. About --val_fraction of the documents,
chosen by a hash of their names, is held out for validation; if there is one document, its end is
held out. Tokenizers: bytes (any text), chars (the characters that occur), gpt2 (BPE), gpt2_4096
(its first 4,095 tokens, for small models; needs no download), or one of Hugging Face: a folder with
a tokenizer.json, or OWNER/MODEL. Such a tokenizer reads a document whole: split files of gigabytes
first.

Files of token ids are taken as they are, whatever their size. nanoGPT's: name the folder that holds
its train.bin and val.bin, which stay the splits (or one such file, whose last --val_fraction is
held out), with --tokenizer=gpt2, or with --tokenizer=chars if there is a meta.pkl. Such a folder
may keep its name where a script here has the same (openwebtext, shakespeare_char). llm.c's .bin
files, of GPT-2's ids (--tokenizer=gpt2): those with "val" in their names are held out, or where
there are none the last --val_fraction of all tokens.

    python data/local/prepare.py --input=notes.txt --tokenizer=chars --name=notes
    python data/local/prepare.py --input=corpus/ --tokenizer=gpt2 --name=corpus
    python data/local/prepare.py --input=corpus/ --tokenizer=models/smollm --name=corpus_smollm
    python data/local/prepare.py --input=nanoGPT/data/openwebtext --tokenizer=gpt2 \
        --name=openwebtext
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from layers.cores import own_cores
from nanodnt.data import inputs
from nanodnt.data.meta import Meta, check_not_nanogpt, has_nanogpt_ids
from nanodnt.data.tokenizer import END_OF_TEXT, Tokenizer
from nanodnt.prepare import hub, script, shards, text


class Scan(NamedTuple):
    """A first reading of all documents."""

    scores: list[float]  # a score of each document, for `hold_out`
    size: int  # characters
    alphabet: set[str]
    last: str  # the last document


def documents(path: Path, key: str, notes: inputs.Notes) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every document in `path`, always in the same order, without empty ones.

    Raises ValueError for a file that cannot be read. In a folder it is left out and noted, unless
    it is a file of records."""
    for name, file in inputs.find_files(path, notes):
        kind = file.suffix.lower()
        try:
            if kind in inputs.RECORDS:
                yield from texts_of_records(name, file, key, notes)
                continue
            text = inputs.read_document(file)
        except inputs.NotText as e:
            if not path.is_dir() or kind in (*inputs.LINES, ".parquet"):
                raise
            notes.leave_out(e.why, str(file))
            continue
        if text:
            yield name, text
        else:
            notes.leave_out("empty", str(file))


def texts_of_records(
    name: str, file: Path, key: str, notes: inputs.Notes
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the records of a file, which are texts, or have one under `key`."""
    for number, record in inputs.records(file, notes, key):
        text = record.get(key) if isinstance(record, dict) else record
        if not isinstance(text, str) or re.search("[\ud800-\udfff]", text):
            where = f"{inputs.place(file, number)}: no UTF-8 text under {key!r}"
            error = ValueError(f"{where} in {repr(record)[:60]}... (see --text_key, --skip_bad)")
            notes.leave_out_bad(error)
        elif text:
            yield f"{name}, {number}", inputs.unify_line_ends(text)
        else:
            notes.leave_out("empty", inputs.place(file, number))


def find_shards(path: Path) -> list[Path]:
    """The files of token ids in llm.c's form that --input names, if it names such files."""
    notes = inputs.Notes()
    files = inputs.find_files(path, notes)
    shard_files = shards.token_files([file for _, file in files])
    if not shard_files:
        return []
    for _, file in files:
        if file not in shard_files:
            notes.leave_out("no token ids", str(file))
    notes.print()
    return shard_files


def names_nanogpt_ids(path: Path) -> bool:
    """Whether --input names a folder of token ids in nanoGPT's form, or one file of them."""
    file = path
    if path.is_dir():
        if not has_nanogpt_ids(path):
            return False
        file = path / "train.bin"
    elif path.suffix != ".bin" or (path.parent / "meta.json").exists():
        return False
    return not (file.is_file() and shards.is_shard(file))


def find_token_ids(args: argparse.Namespace) -> tuple[Meta, shards.Splits] | None:
    """The token ids that --input names, after their tokenizer; None where it names texts. Raises
    ValueError where another tokenizer has made them, or a file has another form."""
    if names_nanogpt_ids(args.input):
        from interop.nanogpt.tokens import read

        return read(args.input, args.tokenizer, args.val_fraction)
    if args.input.suffix == ".pkl":
        check_not_nanogpt(args.input.parent)
    shard_files = find_shards(args.input)
    if not shard_files:
        return None
    if args.tokenizer != "gpt2":
        raise ValueError(
            f"--tokenizer={args.tokenizer}: the token ids in .bin files are GPT-2's, "
            "--tokenizer=gpt2"
        )
    tokenizer = find_tokenizer("gpt2")
    return tokenizer, shards.split(shard_files, args.val_fraction, tokenizer["vocab_size"])


def find_tokenizer(name: str) -> Meta | None:
    """The meta of --tokenizer; None for chars, whose alphabet is not known yet. Raises ValueError
    where there is no such tokenizer."""
    if name == "chars":
        return None
    if name in END_OF_TEXT:
        tokenizer = Tokenizer.meta_for(name)
        Tokenizer(tokenizer)  # ValueError if its vocabulary is missing
        return tokenizer
    from interop.huggingface.tokenizer_files import find_tokenizer

    return find_tokenizer(name, others=("chars",))


def scan(path: Path, key: str, notes: inputs.Notes, tokenizer: Meta | None) -> Scan:
    """Read every document, and note its remarks: bad input is found here, before anything is
    written. The alphabet is only read for chars, without a `tokenizer`."""
    reader = Tokenizer(tokenizer or Tokenizer.meta_for("bytes"))  # chars has no special tokens
    scores = []
    size = 0
    alphabet = set()
    document = ""
    for name, document in documents(path, key, notes):
        scores.append(script.score(name))
        size += len(document)
        if tokenizer is None:
            alphabet.update(document)
        for remark in reader.remarks(document):
            notes.add(remark, name)
    notes.print()
    if not scores:
        raise ValueError(f"--input={path} holds no text")
    return Scan(scores, size, alphabet, document)


def split_documents(args: argparse.Namespace, scanned: Scan) -> dict[str, list[Iterable[str]]]:
    """The texts of both splits."""
    if len(scanned.scores) == 1:  # a document alone is cut in two
        end = int(scanned.size * (1 - args.val_fraction))
        train = [scanned.last[:end]] if end > 0 else []
        return {"train": [train], "val": [[scanned.last[end:]]]}
    held_out = inputs.hold_out(scanned.scores, args.val_fraction)

    def split(of_val: bool) -> Iterator[str]:
        again = documents(args.input, args.text_key, inputs.Notes(args.skip_bad))
        for (_, document), is_val in zip(again, held_out, strict=True):
            if is_val == of_val:
                yield document

    return {"train": [split(False)], "val": [split(True)]}


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--input", type=Path, required=True, help="a file or a folder")
    help = "bytes, chars, gpt2, gpt2_4096, a folder or OWNER/MODEL"
    parser.add_argument("--tokenizer", required=True, help=help)
    help = "share to hold out (default: 0.1)"
    parser.add_argument("--val_fraction", type=float, default=0.1, help=help)
    help = "key of a record's text (default: text)"
    parser.add_argument("--text_key", default="text", help=help)
    help = "leave out records that cannot be used, and count them"
    parser.add_argument("--skip_bad", action="store_true", help=help)
    args = parser.parse_args(argv)
    may_replace = names_nanogpt_ids(args.input) and args.input.resolve().name == args.name
    out = inputs.output_folder(args, "input", may_replace=may_replace)
    source = args.input.resolve().name

    if args.input.suffix == ".bin" and args.input.resolve().parent == out.resolve():
        raise ValueError(f"{out} holds --input={args.input}: give another --name or --out_dir")
    token_ids = find_token_ids(args)
    if token_ids is not None:
        tokenizer, splits = token_ids
        n_tokens = sum(len(ids) for files in splits.values() for ids in files)
        hub.check_disk({out: 2 * n_tokens})
        text.build(out, f"{source} (token ids)", tokenizer, splits, name=args.name)
        return

    tokenizer = find_tokenizer(args.tokenizer)
    scanned = scan(args.input, args.text_key, inputs.Notes(args.skip_bad), tokenizer)
    source = f"{source} ({len(scanned.scores):,} documents)"
    tokenizer = tokenizer or Tokenizer.meta_for("chars", sorted(scanned.alphabet))
    workers = 1
    if scanned.size > 2 * text.JOB_CHARS:  # starting processes takes a second
        workers = max(2, own_cores())
    splits = split_documents(args, scanned)
    text.build(out, source, tokenizer, splits, name=args.name, workers=workers)
