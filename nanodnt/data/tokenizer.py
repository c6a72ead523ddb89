"""Tokenizers: text ↔ token ids, as the meta.json of a dataset, or the copy of it in a checkpoint,
describes them."""

import base64
import hashlib
import json
import re
from itertools import takewhile

import numpy as np

from nanodnt.files import DATA

END_OF_TEXT = {"bytes": 256, "gpt2": 50256, "gpt2_4096": 4095}  # the last id of their vocabularies
TOKENIZERS = (*END_OF_TEXT, "chars", "json")
EOT = "<|endoftext|>"  # what end of text is called in texts and in exports
PIECE = 1 << 20  # characters that a tokenizer gets at a time, about
# tiktoken fails at a million blanks in a row, so they are cut here
BLANKS = re.compile(r"(\s{100000})")
# its tokens by id, a line each, in base64; from OpenAI's GPT-2 (MIT licence)
GPT2_4096 = DATA / "gpt2_4096.txt"


class Tokenizer:
    """`bytes`: UTF-8 bytes, and end of text is 256. `chars`: the characters of one corpus, without
    end of text. `gpt2`: GPT-2's BPE. `gpt2_4096`: its first 4,095 tokens, and end of text is 4095;
    it needs no download. `json`: any other, described by a tokenizer.json, which the library
    `tokenizers` runs.

    `start` lists the ids that stand before every text (LLaMA's <s>); only `json` has any. `bos` is
    the id that begins a text where none stands before it: the tokenizer's own, else end of text.
    `added` are the tokens, {name: id}, that a tokenizer.json adds to its model's, special ones and
    others."""

    def __init__(self, meta: dict):
        check_tokenizer(meta, "meta.json, or the checkpoint's copy of it")
        self.kind, self.vocab_size, self.eot = (
            meta.get(k) for k in ("tokenizer", "vocab_size", "eot")
        )
        self.start, self.bos, self.added = [], meta.get("bos", self.eot), {}
        special = [EOT]
        if self.kind == "chars":
            self.chars = meta["chars"]
            self.ids = {c: i for i, c in enumerate(self.chars)}
        elif self.kind == "json":
            self.json = parse_json(meta["json"])
            self.start = start_of(self.json)
            added = self.json.get_added_tokens_decoder()
            self.added = {token.content: i for i, token in added.items()}
            special = [
                token.content for token in added.values() if token.special and token.content.strip()
            ]
            self.bos = self.start[-1] if self.start else self.eot if self.bos is None else self.bos
        elif self.kind != "bytes":
            self.bpe = load_bpe(self.kind)
        # (?!) matches nothing
        self.special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    @staticmethod
    def meta_for(kind: str, chars: list | None = None) -> dict:
        """The part of meta.json that describes a tokenizer; `chars` is the sorted alphabet. Of
        `json`: `json_meta`."""
        if kind == "chars":
            meta = {"tokenizer": kind, "vocab_size": len(chars), "eot": None, "chars": list(chars)}
        else:
            meta = {
                "tokenizer": kind,
                "vocab_size": END_OF_TEXT[kind] + 1,
                "eot": END_OF_TEXT[kind],
            }
        return meta | {"tokenizer_id": tokenizer_id(meta)}

    def encode(self, text: str) -> list:
        """Token ids of `text`, without `start` and end of text. A special token's name in it is
        ordinary text.

        ValueError for a character outside a `chars` vocabulary."""
        if self.kind == "bytes":
            return list(text.encode("utf-8"))
        if self.kind == "json":
            try:
                return self.json.encode(text, add_special_tokens=False).ids
            except Exception as e:  # the library raises plain Exception
                raise ValueError(f"the tokenizer cannot encode this text ({e})") from None
        if self.kind != "chars":
            return [i for part in BLANKS.split(text) for i in self.bpe.encode_ordinary(part)]
        unknown = sorted(c for c in set(text) if c not in self.ids)
        if unknown:
            raise ValueError(
                f"characters {unknown[:8]} are not in this dataset's alphabet of {len(self.chars)}"
            )
        return [self.ids[c] for c in text]

    def remarks(self, text: str) -> list:
        """What a user should know of how `encode` reads `text`: names of special tokens in it."""
        names = sorted(set(self.special.findall(text)))
        return [f"{name} is read as ordinary text, not as a token" for name in names]

    def unused_ids(self, vocab_size: int) -> list:
        """The ids below `vocab_size`, a model's, that are no token. A model must not be asked for
        them."""
        used = range(self.vocab_size)
        if self.kind == "json":
            used = set(self.json.get_vocab(with_added_tokens=True).values())
        return [i for i in range(vocab_size) if i not in used]

    def new_document(self) -> list:
        """The ids that a model has seen before a text: `start`, else `bos`, else (`chars`) a
        newline."""
        if self.start or self.bos is not None:
            return self.start or [self.bos]
        try:
            return self.encode("\n")
        except ValueError:
            raise ValueError(
                "this alphabet has neither end of text nor newline to begin after: set --start"
            ) from None

    def decode(self, ids) -> str:
        """Text of token ids. End of text and ids beyond the vocabulary are dropped; invalid UTF-8
        becomes U+FFFD."""
        ids = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i != self.eot]
        if self.kind == "bytes":
            return bytes(ids).decode("utf-8", errors="replace")
        if self.kind == "json":
            return self.json.decode(ids, skip_special_tokens=True)
        return "".join(self.chars[i] for i in ids) if self.kind == "chars" else self.bpe.decode(ids)

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of the text of `ids` in UTF-8. End of text has none."""
        if self.kind == "bytes":
            return int((ids != self.eot).sum())
        if self.kind in ("gpt2", "gpt2_4096"):  # a token may be part of a character
            one = self.bpe.decode_single_token_bytes
            return sum(
                n * len(one(i))
                for i, n in enumerate(np.bincount(ids).tolist())
                if n and i != self.eot
            )
        # the tokens of a tokenizer.json are no bytes: some decoders join, or drop, spaces
        documents = np.split(ids, np.flatnonzero(ids == self.eot) + 1)
        return sum(len(self.decode(document).encode("utf-8")) for document in documents)


def check_tokenizer(meta: dict, where) -> None:
    """ValueError unless `meta`, found in `where`, describes a tokenizer: its kind, vocabulary, end
    of text."""
    kind, size, eot, bos, chars = (
        meta.get(name) for name in ("tokenizer", "vocab_size", "eot", "bos", "chars")
    )
    if kind not in TOKENIZERS:
        raise ValueError(
            f"{where}: unknown tokenizer {kind!r}: allowed are {', '.join(TOKENIZERS)}"
        )
    if kind == "json":
        ids = [i for i in (eot, bos) if i is not None]
        right = (
            type(size) is int
            and all(type(i) is int and 0 <= i < size for i in ids)
            and "json" in meta
        )
    elif kind == "chars":
        right = isinstance(chars, list) and all(isinstance(c, str) and len(c) == 1 for c in chars)
        right = right and size == len(chars) == len(set(chars)) > 0 and eot is None
    else:
        right = (size, eot) == (END_OF_TEXT[kind] + 1, END_OF_TEXT[kind])
    if not right:
        raise ValueError(
            f"{where}: what describes the tokenizer {kind} (vocab_size, eot, bos, chars, json) is damaged"
        )


def same_tokenizer(a: dict, b: dict) -> bool:
    """Whether two metas describe tokenizers with the same ids and the same end of text."""
    a, b = ((m["vocab_size"], m["eot"], m.get("tokenizer_id") or tokenizer_id(m)) for m in (a, b))
    return a == b  # meta.json of earlier versions has no tokenizer_id


def tokenizer_id(meta: dict) -> str:
    """What is equal for tokenizers that give every text the same ids; it is written into
    meta.json."""
    if meta["tokenizer"] == "json":
        return " ".join([hash_json(meta["json"]), *map(str, start_of(parse_json(meta["json"])))])
    if meta["tokenizer"] == "chars":
        return hashlib.sha256("".join(meta["chars"]).encode("utf-8", "surrogatepass")).hexdigest()
    return GPT2_JSON if meta["tokenizer"] == "gpt2" else meta["tokenizer"]


# -------------------------------------------------------------------------------------------------------- long texts

# GPT-2's pre-tokenizer always cuts around a lone newline between visible characters, and before a
# blank between letters or digits, so cutting there changes no token.
PIECE_END = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?= [^\W_])")


def pieces(text: str, size: int = PIECE):
    """Yield (piece, whether the text ends with it). GPT-2's tokenizers give the pieces of a text,
    each a little longer than `size`, the same tokens as the whole."""
    start = 0
    while cut := PIECE_END.search(text, start + size):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True


# ------------------------------------------------------------------------------------------------- a tokenizer.json

# `hash_json` of GPT-2's own tokenizer.json, so that recognising it needs no copy of the vocabulary.
GPT2_JSON = "23877de23abf03ddb10135458a7467d2e6bcb02b8b64e1eb4fa76e867194f171"


def hash_json(text: str) -> str:
    """A hash of what decides the ids of a text in a tokenizer.json: tokens, merges, how a text is
    prepared and split.

    Versions of the library write the same in several ways, and settings for batches (padding,
    truncation) too."""
    found = json.loads(text)
    model, split = dict(found["model"]), dict(found.get("pre_tokenizer") or {})
    merges = [
        pair if isinstance(pair, str) else " ".join(pair)
        for pair in model.pop("merges", None) or ()
    ]
    vocab = model.pop("vocab")
    vocab = sorted(vocab.items()) if isinstance(vocab, dict) else vocab
    rules = {name: value for name, value in model.items() if value and name != "type"}
    split.pop("trim_offsets", None)
    if split.get("type") == "ByteLevel":
        split.setdefault("use_regex", True)
    added = sorted([token["content"], token["id"]] for token in found.get("added_tokens") or ())
    parts = [vocab, merges, rules, split, added, found.get("normalizer")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def parse_json(text: str):
    """The `tokenizers.Tokenizer` that a tokenizer.json's text describes. ValueError where it
    describes none."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the library raises plain Exception
        raise ValueError(
            f"the tokenizer.json is damaged, or from a newer version of tokenizers ({e})"
        ) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # text cannot produce them
    return tokenizer


def json_meta(text: str, eot: str | None, bos: str | None = None) -> dict:
    """The part of meta.json for a tokenizer.json with this text; `eot`, `bos`: the names of its end
    and begin."""
    ids = parse_json(text).get_vocab(with_added_tokens=True)
    for name in (eot, bos):
        if name is not None and name not in ids:
            raise ValueError(
                f"{name!r} ends or begins a text, but is not among the tokens of tokenizer.json"
            )
    meta = {
        "tokenizer": "json",
        "vocab_size": max(ids.values()) + 1,
        "eot": ids.get(eot),
        "bos": ids.get(bos),
    }
    meta["json"] = text
    return meta | {"tokenizer_id": tokenizer_id(meta)}


def start_of(tokenizer) -> list:
    """The special ids that a `tokenizers.Tokenizer` puts before every text."""
    try:
        found = tokenizer.encode("a")
    except Exception:  # an alphabet of characters without this one, which has no start
        return []
    pairs = takewhile(lambda pair: pair[1], zip(found.ids, found.special_tokens_mask, strict=True))
    return [i for i, _ in pairs]


# ------------------------------------------------------------------------------------------------------ GPT-2's BPE


def bpe_ranks(kind: str) -> dict:
    """{token's bytes: id} of gpt2 or gpt2_4096, without end of text."""
    if kind == "gpt2_4096":
        return {
            base64.b64decode(line): i
            for i, line in enumerate(GPT2_4096.read_text(encoding="utf-8").split())
        }
    bpe = load_bpe(kind)
    return {bpe.decode_single_token_bytes(i): i for i in range(END_OF_TEXT[kind])}


def load_bpe(kind: str):
    """The `tiktoken.Encoding` of gpt2 or gpt2_4096. ValueError without tiktoken, or without GPT-2's
    vocabulary."""
    try:
        import tiktoken

        # GPT-2's rule for splitting text into words
        from tiktoken_ext.openai_public import r50k_pat_str as word
    except ImportError:
        raise ValueError("GPT-2's tokenizers need tiktoken: pip install tiktoken") from None
    if kind == "gpt2_4096":
        return tiktoken.Encoding(
            kind, pat_str=word, mergeable_ranks=bpe_ranks(kind), special_tokens={}
        )
    try:
        return tiktoken.get_encoding("gpt2")
    # tiktoken downloads two files once, and raises whatever its HTTP client raises
    except Exception as e:
        hint = "connect once, or point TIKTOKEN_CACHE_DIR to a folder that holds it"
        raise ValueError(
            f"GPT-2's vocabulary could not be fetched ({type(e).__name__}); {hint}"
        ) from None
