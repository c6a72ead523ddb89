"""Token ids in nanoGPT's form: train.bin and val.bin hold little-endian uint16 ids and nothing
else. They are GPT-2's, or, with a meta.pkl beside them, numbers of the characters that it lists."""

import codecs
import pickle
import pickletools
from pathlib import Path

import numpy as np

from nanodnt.data.meta import Meta
from nanodnt.data.tokenizer import Tokenizer, check_tokenizer
from nanodnt.prepare import shards

MAX_PICKLE = 1 << 22  # bytes of a meta.pkl; all characters of Unicode take less
HEAD = 4096  # bytes that show whether a file is text
NUMPY = b"\x93NUMPY"  # first bytes of a .npy file

# All that the pickle of an alphabet holds: dicts, whole numbers, texts. None of these loads a
# global or calls anything, so no code can run. Without tuples, and without places of its memo
# beyond the file's size, it takes little time and memory.
OPCODES = set("PROTO FRAME STOP MARK EMPTY_DICT SETITEM SETITEMS MEMOIZE BINPUT".split())
OPCODES |= set("LONG_BINPUT BINGET LONG_BINGET BININT BININT1 BININT2".split())
OPCODES |= {"SHORT_BINUNICODE", "BINUNICODE"}


def read(path: Path, tokenizer: str, val_fraction: float) -> tuple[Meta, shards.Splits]:
    """The tokenizer, as in meta.json, and the token ids of a folder, in its own splits; or of one
    file, whose last `val_fraction` is held out, as that of a train.bin without a val.bin.

    `tokenizer`: the name that the user gives. Raises ValueError where another one has made the ids,
    or a file has another form."""
    folder = path if path.is_dir() else path.parent
    pickled = folder / "meta.pkl"
    kind = "chars" if pickled.is_file() else "gpt2"
    if tokenizer != kind:
        reason = "GPT-2's (there is no meta.pkl)"
        if kind == "chars":
            reason = "characters (there is a meta.pkl)"
        raise ValueError(
            f"--tokenizer={tokenizer}: the token ids in {folder} are {reason}: "
            f"--tokenizer={kind}; another tokenizer needs the text itself, --input=TEXT"
        )
    chars = read_alphabet(pickled) if kind == "chars" else None
    meta = Tokenizer.meta_for(kind, chars)
    Tokenizer(meta)  # ValueError if GPT-2's vocabulary is missing
    files = [path]
    if path.is_dir():
        files = [folder / "train.bin", folder / "val.bin"]
        if not files[1].is_file():
            files.pop()
    ids = [read_ids(file, meta["vocab_size"]) for file in files]
    if len(ids) == 2:
        return meta, {"train": ids[:1], "val": ids[1:]}
    return meta, shards.hold_out_end(ids, val_fraction)


def read_ids(file: Path, vocab_size: int) -> np.ndarray:
    """The token ids of a file, mapped; uint16. Raises ValueError, with its name, where it is
    damaged, or of another form."""
    size = file.stat().st_size
    problem = ""
    if size % 2 or not size:
        problem = f"holds {size:,} bytes, where ids take 2 each: it is damaged, or something else"
    elif shards.is_shard(file):
        problem = "is a file of llm.c, with a header: prepare such files by themselves"
    elif kind := _other_kind(file):
        problem = f"is {kind}, not uint16 token ids and nothing else"
    if problem:
        raise ValueError(f"{file} {problem}")
    ids = np.memmap(file, "<u2", "r")
    shards.check_ids(file, ids, vocab_size)
    return ids


def _other_kind(file: Path) -> str:
    """The kind of a .npy file or a text; empty for other files. Among ids of text some are below
    256, and so some bytes 0."""
    with open(file, "rb") as f:
        head = f.read(HEAD)
    if head.startswith(NUMPY):
        return "a .npy file"
    if b"\0" in head:
        return ""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its last character may be cut off
    except UnicodeDecodeError:
        return ""
    return "text"


# ------------------------------------------------------------------------------------- the alphabet


def read_alphabet(file: Path) -> list[str]:
    """The characters of a meta.pkl, by id, in any order. Raises ValueError, one line, for a pickle
    with anything else; nothing of it runs."""
    try:
        if file.stat().st_size > MAX_PICKLE:
            raise ValueError(f"it has more than {MAX_PICKLE:,} bytes")
        raw = file.read_bytes()
        for opcode, value, _ in pickletools.genops(raw):
            is_place = opcode.name.endswith("PUT")
            if opcode.name not in OPCODES or (is_place and value > len(raw)):
                raise ValueError(f"it holds {opcode.name}")
        content = pickle.loads(raw)
        itos = content["itos"]
        chars = [itos[i] for i in range(len(itos))]
        check_tokenizer(Tokenizer.meta_for("chars", chars), "it")
        "".join(chars).encode("utf-8")
        if content.get("vocab_size", len(chars)) != len(chars):
            raise ValueError("its vocab_size is another")
        if content.get("stoi", {}) not in ({}, {char: i for i, char in enumerate(chars)}):
            raise ValueError("its stoi and itos differ")
    except Exception as e:  # a damaged or hostile pickle can raise nearly anything
        reason = str(e) if type(e) is ValueError else type(e).__name__
        raise ValueError(
            f"{file} is damaged, or is no alphabet of single characters with the ids 0, 1, 2, … "
            f"({reason[:100]})"
        ) from None
    return chars
