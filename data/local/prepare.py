r"""Your own text → data/NAME: plain text or records, one file or a folder of them; or files of
token ids.

A document is a plain text file (.txt, .md, .py, any UTF-8), a line of a .jsonl or .ndjson file, an
element of the array in a .json file, or a row of a .parquet file. Line ends become \n, and a byte
order mark is dropped. Folders are read recursively, also through links; what is left out (hidden,
empty, or no text) is counted and named. A record that cannot be used is refused, or left out with
--skip_bad. End of text follows every document where the tokenizer has one (chars has none); its
name in a text (<|endoftext|>) is ordinary text. About --val_fraction of the documents, chosen by a
hash of their names, is held out for validation; of a single document, its end. Tokenizers: bytes
(any text), chars (the characters that occur), gpt2 (BPE), gpt2_4096 (its first 4,095 tokens, for
small models; needs no download), or a model's of Hugging Face: a folder with a tokenizer.json, or
OWNER/MODEL. Such a tokenizer reads a document whole: split files of gigabytes first.

Files of token ids are .bin files in the form of llm.c, of GPT-2's ids (--tokenizer=gpt2), and
nothing else: those with "val" in their names are held out, or where there are none the last
--val_fraction of all tokens.

    python data/local/prepare.py --input=notes.txt --tokenizer=chars --name=notes
    python data/local/prepare.py --input=corpus/ --tokenizer=gpt2 --name=corpus
    python data/local/prepare.py --input=corpus/ --tokenizer=models/smollm --name=corpus_smollm
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from layers.cores import own_cores
from nanodnt.data import inputs
from nanodnt.data.meta import check_not_nanogpt
from nanodnt.data.tokenizer import END_OF_TEXT, Tokenizer
from nanodnt.prepare import script, shards, text


def documents(path: Path, key: str, notes: inputs.Notes):
    """Yield (name, text) of every document in `path`, always in the same order, without empty ones.

    ValueError for a file that cannot be read. In a folder it is left out and noted, unless it is
    one of records."""
    for name, file in inputs.find_files(path, notes):
        kind = file.suffix.lower()
        try:
            if kind in inputs.RECORDS:
                yield from texts_of_records(name, file, key, notes)
            elif text := inputs.read_document(file):
                yield name, text
            else:
                notes.leave_out("empty", str(file))
        except inputs.NotText as e:
            if not path.is_dir() or kind in (*inputs.LINES, ".parquet"):
                raise
            notes.leave_out(e.why, str(file))


def texts_of_records(name: str, file: Path, key: str, notes: inputs.Notes):
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


def find_token_ids(args) -> list:
    """The files of token ids that --input names, if it names such files. ValueError where they are
    nanoGPT's."""
    notes = inputs.Notes()
    files = inputs.find_files(args.input, notes)
    ids = shards.token_files([file for _, file in files])
    in_binary = args.input.is_dir() or args.input.suffix in (".bin", ".pkl")
    if in_binary and not any(map(shards.is_shard, ids)):
        check_not_nanogpt(args.input if args.input.is_dir() else args.input.parent)
    for _, file in files:
        if ids and file not in ids:
            notes.leave_out("no token ids", str(file))
    if ids:
        notes.print()
    return ids


@script.command
def main(argv=None):
    parser = script.parser(__doc__)
    parser.add_argument("--input", type=Path, required=True, help="a file or a folder")
    parser.add_argument(
        "--tokenizer", required=True, help="bytes, chars, gpt2, gpt2_4096, a folder or OWNER/MODEL"
    )
    parser.add_argument(
        "--val_fraction", type=float, default=0.1, help="to hold out (default: 0.1)"
    )
    parser.add_argument("--text_key", default="text", help="of records (default: text)")
    parser.add_argument(
        "--skip_bad",
        action="store_true",
        help="leave out records that cannot be used, and count them",
    )
    args = parser.parse_args(argv)
    # of chars, whose alphabet is not known yet
    out, tokenizer = inputs.output_folder(args, "input"), None
    if args.tokenizer in END_OF_TEXT:
        # ValueError if its vocabulary is missing
        Tokenizer(tokenizer := Tokenizer.meta_for(args.tokenizer))
    elif args.tokenizer != "chars":
        from interop.huggingface.tokenizer_files import find_tokenizer

        tokenizer = find_tokenizer(args.tokenizer, others=("chars",))

    if ids := find_token_ids(args):
        if args.tokenizer != "gpt2":
            raise ValueError(
                f"--tokenizer={args.tokenizer}: the token ids in .bin files are GPT-2's, --tokenizer=gpt2"
            )
        splits = shards.split(ids, args.val_fraction, tokenizer["vocab_size"])
        text.build(
            out,
            f"{args.input.resolve().name} ({len(ids)} files)",
            tokenizer,
            splits,
            name=args.name,
        )
        return

    # Every document is read twice: bad input is found here, before anything is written.
    scores, size, alphabet, notes = [], 0, set(), inputs.Notes(args.skip_bad)
    # chars has no special tokens either
    reader = Tokenizer(tokenizer or Tokenizer.meta_for("bytes"))
    for name, document in documents(args.input, args.text_key, notes):
        scores.append(script.score(name))
        size += len(document)
        alphabet.update("" if tokenizer else document)
        for remark in reader.remarks(document):
            notes.add(remark, name)
    notes.print()
    if not scores:
        raise ValueError(f"--input={args.input} holds no text")

    if len(scores) == 1:  # a document alone is cut in two
        cut = int(size * (1 - args.val_fraction))
        train, val = [document[:cut]] * (cut > 0), [document[cut:]]
    else:
        held_out = inputs.hold_out(scores, args.val_fraction)

        def split(of_val):
            again = documents(args.input, args.text_key, inputs.Notes(args.skip_bad))
            pairs = zip(again, held_out, strict=True)
            return (document for (_, document), is_val in pairs if is_val == of_val)

        train, val = split(False), split(True)
    source = f"{args.input.resolve().name} ({len(scores):,} documents)"
    tokenizer = tokenizer or Tokenizer.meta_for("chars", sorted(alphabet))
    # starting processes takes a second
    workers = max(2, own_cores()) if size > 2 * text.JOB_CHARS else 1
    text.build(
        out, source, tokenizer, {"train": [train], "val": [val]}, name=args.name, workers=workers
    )
