"""Tokenizers: text ↔ token ids, as described in the meta.json of a dataset, or in a checkpoint's
copy of it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nanodnt.files import DATA

if TYPE_CHECKING:  # imported where a tokenizer needs them
    import tiktoken
    import tokenizers

END_OF_TEXT = {"bytes": 256, "gpt2": 50256, "gpt2_4096": 4095}  # last id of each vocabulary
TOKENIZERS = (*END_OF_TEXT, "chars", "json")
EOT = "<|endoftext|>"  # name of end of text in texts and in exports
PIECE = 1 << 20  # characters, about, that a tokenizer gets at a time
# tiktoken fails at a million blanks in a row, so they are cut here.
BLANKS = re.compile(r"(\s{100000})")
NOTHING = "(?!)"  # a pattern that matches nothing
Meta = dict[str, Any]  # the content of a meta.json
# The tokens of gpt2_4096 by id, one a line, in base64; from OpenAI's GPT-2 (MIT licence).
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

    def __init__(self, meta: Meta):
        check_tokenizer(meta, "meta.json, or the checkpoint's copy of it")
        self.kind: str = meta["tokenizer"]
        self.vocab_size: int = meta["vocab_size"]
        self.eot: int | None = meta.get("eot")
        self.bos: int | None = meta.get("bos", self.eot)
        self.start: list[int] = []
        self.added: dict[str, int] = {}
        special = [EOT]
        if self.kind == "chars":
            self.chars = meta["chars"]
            self.ids = {char: i for i, char in enumerate(self.chars)}
        elif self.kind == "json":
            self.json = parse_json(meta["json"])
            self.start = start_of(self.json)
            tokens = self.json.get_added_tokens_decoder()
            self.added = {token.content: i for i, token in tokens.items()}
            special = [t.content for t in tokens.values() if t.special and t.content.strip()]
            if self.start:
                self.bos = self.start[-1]
            elif self.bos is None:
                self.bos = self.eot
        elif self.kind != "bytes":
            self.bpe = load_bpe(self.kind)
        self.special = re.compile("|".join(map(re.escape, special)) or NOTHING)

    @staticmethod
    def meta_for(kind: str, chars: list[str] | None = None) -> Meta:
        """The part of meta.json that describes a tokenizer. `chars`: the sorted alphabet of that
        kind. For the kind `json` see `json_meta`."""
        if kind == "chars":
            meta = {"tokenizer": kind, "vocab_size": len(chars), "eot": None, "chars": list(chars)}
        else:
            eot = END_OF_TEXT[kind]
            meta = {"tokenizer": kind, "vocab_size": eot + 1, "eot": eot}
        meta["tokenizer_id"] = tokenizer_id(meta)
        return meta

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without `start` and end of text. The name of a special token in it
        is ordinary text. Raises ValueError for a character outside a `chars` vocabulary."""
        if self.kind == "bytes":
            return list(text.encode("utf-8"))
        if self.kind == "json":
            try:
                return self.json.encode(text, add_special_tokens=False).ids
            except Exception as e:  # the library raises plain Exception
                raise ValueError(f"the tokenizer cannot encode this text ({e})") from None
        if self.kind == "chars":
            unknown = sorted(set(text) - self.ids.keys())
            if unknown:
                raise ValueError(
                    f"characters {unknown[:8]} are not in this dataset's alphabet of "
                    f"{len(self.chars)}"
                )
            return [self.ids[char] for char in text]
        return [i for part in BLANKS.split(text) for i in self.bpe.encode_ordinary(part)]

    def remarks(self, text: str) -> list[str]:
        """Notes for the user on how `encode` reads `text`: names of special tokens in it."""
        names = sorted(set(self.special.findall(text)))
        return [f"{name} is read as ordinary text, not as a token" for name in names]

    def unused_ids(self, vocab_size: int) -> list[int]:
        """The ids below `vocab_size`, a model's, that are no token. Sampling must exclude them."""
        used = range(self.vocab_size)
        if self.kind == "json":
            used = set(self.json.get_vocab(with_added_tokens=True).values())
        return [i for i in range(vocab_size) if i not in used]

    def new_document(self) -> list[int]:
        """The ids that stand before a text: `start`, else `bos`, else (`chars`) a newline."""
        if self.start:
            return self.start
        if self.bos is not None:
            return [self.bos]
        try:
            return self.encode("\n")
        except ValueError:
            raise ValueError(
                "this alphabet has neither end of text nor newline to begin after: set --start"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids. End of text and ids beyond the vocabulary are dropped; invalid UTF-8
        becomes U+FFFD."""
        ids = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i != self.eot]
        if self.kind == "bytes":
            return bytes(ids).decode("utf-8", errors="replace")
        if self.kind == "json":
            return self.json.decode(ids, skip_special_tokens=True)
        if self.kind == "chars":
            return "".join(self.chars[i] for i in ids)
        return self.bpe.decode(ids)

    def count_bytes(self, ids: np.ndarray) -> int:
        """Bytes of the text of `ids` in UTF-8. End of text has none."""
        if self.kind == "bytes":
            return int((ids != self.eot).sum())
        if self.kind in ("gpt2", "gpt2_4096"):  # a token may be part of a character
            n_bytes = 0
            for i, count in enumerate(np.bincount(ids).tolist()):
                if count and i != self.eot:
                    n_bytes += count * len(self.bpe.decode_single_token_bytes(i))
            return n_bytes
        # The tokens of a tokenizer.json are no bytes: some decoders join, or drop, spaces.
        documents = np.split(ids, np.flatnonzero(ids == self.eot) + 1)
        return sum(len(self.decode(document).encode("utf-8")) for document in documents)


def check_tokenizer(meta: Meta, where: str) -> None:
    """ValueError unless `meta` describes a tokenizer: its kind, vocabulary, end of text. `where`:
    the place of `meta`, for the message."""
    kind = meta.get("tokenizer")
    if kind not in TOKENIZERS:
        raise ValueError(
            f"{where}: unknown tokenizer {kind!r}: allowed are {', '.join(TOKENIZERS)}"
        )
    vocab_size = meta.get("vocab_size")
    eot = meta.get("eot")
    if kind == "json":
        ids = [i for i in (eot, meta.get("bos")) if i is not None]
        is_right = type(vocab_size) is int and "json" in meta
        is_right = is_right and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    elif kind == "chars":
        is_right = _is_alphabet(meta.get("chars"), vocab_size) and eot is None
    else:
        is_right = (vocab_size, eot) == (END_OF_TEXT[kind] + 1, END_OF_TEXT[kind])
    if not is_right:
        raise ValueError(
            f"{where}: what describes the tokenizer {kind} (vocab_size, eot, bos, chars, json) "
            "is damaged"
        )


def _is_alphabet(chars: Any, vocab_size: Any) -> bool:
    """Whether `chars` are `vocab_size` different characters."""
    if not isinstance(chars, list):
        return False
    if not all(isinstance(char, str) and len(char) == 1 for char in chars):
        return False
    return vocab_size == len(chars) == len(set(chars)) > 0


def same_tokenizer(a: Meta, b: Meta) -> bool:
    """Whether two metas describe tokenizers with the same ids and the same end of text."""

    def identity(meta: Meta) -> tuple[int, int | None, str]:
        # A meta.json of an earlier version has no tokenizer_id.
        name = meta.get("tokenizer_id") or tokenizer_id(meta)
        return meta["vocab_size"], meta["eot"], name

    return identity(a) == identity(b)


def tokenizer_id(meta: Meta) -> str:
    """A text that is equal for tokenizers that give every text the same ids; an entry of
    meta.json."""
    kind = meta["tokenizer"]
    if kind == "json":
        start = start_of(parse_json(meta["json"]))
        return " ".join([hash_json(meta["json"]), *map(str, start)])
    if kind == "chars":
        return hashlib.sha256("".join(meta["chars"]).encode("utf-8", "surrogatepass")).hexdigest()
    return GPT2_JSON if kind == "gpt2" else kind


# --------------------------------------------------------------------------------------- long texts

# GPT-2's pre-tokenizer always cuts around a lone newline between visible characters, and before a
# blank between letters or digits, so cutting there changes no token.
PIECE_END = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?= [^\W_])")


def pieces(text: str, size: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Yield (piece, whether the text ends with it). GPT-2's tokenizers give the pieces of a text,
    each a little longer than `size`, the same tokens as the whole."""
    start = 0
    while cut := PIECE_END.search(text, start + size):
        yield text[start : cut.start()], False
        start = cut.start()
    yield text[start:], True


# --------------------------------------------------------------------------------- a tokenizer.json

# `hash_json` of GPT-2's own tokenizer.json, so that recognising it needs no copy of the vocabulary.
GPT2_JSON = "23877de23abf03ddb10135458a7467d2e6bcb02b8b64e1eb4fa76e867194f171"


def hash_json(text: str) -> str:
    """A hash of the parts of a tokenizer.json that decide the ids of a text: tokens, merges, and
    how a text is prepared and split.

    Versions of the library write the same in several ways, and settings for batches (padding,
    truncation) too."""
    content = json.loads(text)
    model = dict(content["model"])
    merges = []
    for pair in model.pop("merges", None) or ():
        merges.append(pair if isinstance(pair, str) else " ".join(pair))
    vocab = model.pop("vocab")
    if isinstance(vocab, dict):
        vocab = sorted(vocab.items())
    rules = {name: value for name, value in model.items() if value and name != "type"}
    split = dict(content.get("pre_tokenizer") or {})
    split.pop("trim_offsets", None)
    if split.get("type") == "ByteLevel":
        split.setdefault("use_regex", True)
    added_tokens = content.get("added_tokens") or ()
    added = sorted([token["content"], token["id"]] for token in added_tokens)
    parts = [vocab, merges, rules, split, added, content.get("normalizer")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def parse_json(text: str) -> "tokenizers.Tokenizer":
    """The tokenizer in the text of a tokenizer.json. Raises ValueError where there is none."""
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


def json_meta(text: str, eot: str | None, bos: str | None = None) -> Meta:
    """The part of meta.json for a tokenizer.json with this text. `eot`, `bos`: the names of its end
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
        "json": text,
    }
    meta["tokenizer_id"] = tokenizer_id(meta)
    return meta


def start_of(tokenizer: "tokenizers.Tokenizer") -> list[int]:
    """The special ids that a tokenizer puts before every text."""
    try:
        encoding = tokenizer.encode("a")
    except Exception:  # an alphabet of characters without this one, which has no start
        return []
    start = []
    for i, is_special in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
        if not is_special:
            break
        start.append(i)
    return start


# -------------------------------------------------------------------------------------- GPT-2's BPE


def bpe_ranks(kind: str) -> dict[bytes, int]:
    """{token's bytes: id} of gpt2 or gpt2_4096, without end of text."""
    if kind == "gpt2_4096":
        lines = GPT2_4096.read_text(encoding="utf-8").split()
        return {base64.b64decode(line): i for i, line in enumerate(lines)}
    bpe = load_bpe(kind)
    return {bpe.decode_single_token_bytes(i): i for i in range(END_OF_TEXT[kind])}


def load_bpe(kind: str) -> "tiktoken.Encoding":
    """The BPE of gpt2 or gpt2_4096. Raises ValueError without tiktoken, or without GPT-2's
    vocabulary."""
    try:
        import tiktoken

        # GPT-2's rule for splitting text into words
        from tiktoken_ext.openai_public import r50k_pat_str as word
    except ImportError:
        raise ValueError("GPT-2's tokenizers need tiktoken: pip install tiktoken") from None
    if kind == "gpt2_4096":
        ranks = bpe_ranks(kind)
        return tiktoken.Encoding(kind, pat_str=word, mergeable_ranks=ranks, special_tokens={})
    try:
        return tiktoken.get_encoding("gpt2")
    # tiktoken downloads two files once, and raises whatever its HTTP client raises.
    except Exception as e:
        hint = "connect once, or point TIKTOKEN_CACHE_DIR to a folder that holds it"
        raise ValueError(
            f"GPT-2's vocabulary could not be fetched ({type(e).__name__}); {hint}"
        ) from None
