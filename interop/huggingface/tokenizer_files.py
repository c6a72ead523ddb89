"""Tokenizers as the files of Hugging Face, tokenizer.json and tokenizer_config.json, and back.

Ours are written so that the library `tokenizers` gives the same ids. Read again, they are
recognised as ours. A template of conversations is written twice: in Jinja, for `transformers`, and
in its own form.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configurator import read_path
from interop.conversations.template import Template, template_of
from interop.huggingface.hub import fetch, is_pretrained
from nanodnt.data.tokenizer import (
    END_OF_TEXT,
    EOT,
    Tokenizer,
    bpe_ranks,
    hash_json,
    json_meta,
    parse_json,
)

Meta = dict[str, Any]  # the tokenizer's part of meta.json

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
    "padding_side": "left",  # as generation needs it
}
# The keys that are kept of a tokenizer_config.json that was read. Its class is not: some classes of
# `transformers` change the tokenizer of tokenizer.json.
KEPT = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "chat_template",
)
# Keys of our own in tokenizer_config.json: the meta of a tokenizer, and the template of
# conversations, beside its Jinja.
OWN_TOKENIZER = "nanodnt_tokenizer"
OWN_TEMPLATE = "nanodnt_template"


def tokenizer_files(meta: Meta, block_size: int) -> dict[str, str]:
    """{file name: text} of a tokenizer, for a model with this context."""
    config = dict(CONFIG)
    if meta["tokenizer"] == "json":
        text = meta["json"]
        for key, value in meta.get("json_config", {}).items():
            if key.endswith("_token") or key in KEPT:
                config[key] = value
        for name, number in (("eos_token", meta["eot"]), ("bos_token", meta.get("bos"))):
            if number is not None:  # it may have been named in another file
                config[name] = parse_json(text).id_to_token(number)
    else:
        text = make_json(meta)
        if meta["eot"] is not None:
            config["bos_token"] = EOT
            config["eos_token"] = EOT
        if meta["tokenizer"] != "gpt2":  # to recognise GPT-2's, we would have to download it
            config[OWN_TOKENIZER] = Tokenizer.meta_for(meta["tokenizer"], meta.get("chars"))
    template = template_of(meta)
    if template and meta["eot"] is not None:
        config["chat_template"] = chat_template(template, Tokenizer(meta))
        config[OWN_TEMPLATE] = meta["template"]
    config["model_max_length"] = block_size
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }


# The prompt of add_generation_prompt is always written. $name becomes a string; a string in Jinja
# has Python's escapes.
CHAT_TEMPLATE = (
    "{{ $begin }}{% set turns = messages %}"
    "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{{ SYSTEM }}{% endif %}{% for message in turns %}"
    "{% if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('after at most one system message, user and assistant alternate') }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + $end }}"
    "{% else %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ $before + message['content'] + $after }}"
    "{% endif %}{% endfor %}"
)


def chat_template(template: Template, tokenizer: Tokenizer) -> str:
    """A template as Jinja, for `apply_chat_template`.

    `transformers` tokenises the whole text at once: ids differ from ours where a token would span
    an answer and the text before it (rare after a newline), and where a message names a special
    token."""
    texts = {"begin": EOT, "end": EOT}
    if tokenizer.kind == "json":
        start = tokenizer.start or [tokenizer.bos]
        texts["begin"] = "".join(map(tokenizer.json.id_to_token, start))
        texts["end"] = tokenizer.json.id_to_token(tokenizer.eot)
    texts["before"], texts["after"] = template.turn.removesuffix("{response}").split("{prompt}")
    system = "raise_exception('this model knows no system message')"
    if template.system:
        system = "$first + messages[0]['content'] + $second"
        texts["first"], texts["second"] = template.system.split("{system}")
    jinja = CHAT_TEMPLATE.replace("SYSTEM", system)
    return re.sub(r"\$(\w+)", lambda name: repr(texts[name[1]]), jinja)


def make_json(meta: Meta) -> str:
    """The text of a tokenizer.json for a tokenizer of ours."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Json

    if meta["tokenizer"] == "chars":
        tokenizer = Json(models.WordLevel({char: i for i, char in enumerate(meta["chars"])}))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return tokenizer.to_str()
    # the library writes a byte as its own character if it is printable, and the n-th byte that is
    # not as the n-th character above 255 of the alphabet
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = (character for character in alphabet if ord(character) > 255)
    byte = [chr(b) if chr(b) in alphabet else next(others) for b in range(256)]
    is_bytes = meta["tokenizer"] == "bytes"
    if is_bytes:
        ranks = {bytes([b]): b for b in range(256)}
    else:
        ranks = bpe_ranks(meta["tokenizer"])
    name = {token: "".join(byte[b] for b in token) for token in ranks}
    vocab = {name[token]: i for token, i in ranks.items()}
    vocab[EOT] = meta["eot"]
    pairs = [(name[a], name[b]) for a, b in find_merges(ranks)]
    tokenizer = Json(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=not is_bytes
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return tokenizer.to_str()


def find_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs whose merging makes each token of {bytes: rank}, in the order of the ranks. A
    token's pair is left when its own bytes are merged, lowest rank first, up to the last step."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            joint = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = joint.index(min(joint))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs


def find_tokenizer(name: str, others: Sequence[str] = ()) -> Meta:
    """The meta of the tokenizer of a flag --tokenizer: bytes, gpt2, gpt2_4096, a folder or
    OWNER/MODEL. ValueError if it does not exist, or its vocabulary is missing; the message allows
    the names `others` too."""
    name = read_path(name)
    if name in END_OF_TEXT:
        meta = Tokenizer.meta_for(name)
    elif is_pretrained(name):
        meta = read_tokenizer(fetch(name, ["*.json", "*.jinja"]))
    else:
        kinds = ", ".join((*END_OF_TEXT, *others))
        raise ValueError(
            f"--tokenizer={name} is neither one of {kinds}, nor a folder, nor OWNER/MODEL on the "
            "Hub; docs/runs.md trains one of your own"
        )
    if meta is None:
        raise ValueError(f"--tokenizer={name} has no tokenizer.json")
    Tokenizer(meta)  # ValueError if its vocabulary is missing
    meta.pop("template", None)  # the template belongs to other data
    return meta


def read_tokenizer(folder: Path) -> Meta | None:
    """The meta of the tokenizer in a folder of Hugging Face; None without tokenizer.json. An export
    of ours can have a template of conversations, too. ValueError where a file is damaged."""
    path = folder / "tokenizer.json"
    template = folder / "chat_template.jinja"
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        config = read_json(folder / "tokenizer_config.json")
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        eos = special_token(folder, text, config, "eos")
        bos = special_token(folder, text, config, "bos")
        meta = json_meta(text, eos, bos)
        own_template = config.pop(OWN_TEMPLATE, None)
        own_tokenizer = config.pop(OWN_TOKENIZER, None)
        is_ours = own_tokenizer is not None
        if is_ours and hash_json(make_json(own_tokenizer)) == meta["tokenizer_id"]:
            meta = own_tokenizer  # tokenizer.json is as we wrote it
        else:
            meta["json_config"] = config
        if own_template is not None:
            meta["template"] = own_template
        return meta
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        OSError,
    ) as e:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({str(e)[:200] or type(e).__name__})"
        ) from None


def special_token(folder: Path, text: str, config: dict[str, Any], name: str) -> str | None:
    """The token "eos" or "bos" of a folder: in tokenizer_config.json (`config`), or by its id in
    config.json; of several ids the first. `text` is that of tokenizer.json."""
    key = f"{name}_token"
    if key in config:
        token = config[key]
        return token.get("content") if isinstance(token, dict) else token
    number = read_json(folder / "config.json").get(f"{key}_id")
    if isinstance(number, list) and number:
        number = number[0]
    return parse_json(text).id_to_token(number) if isinstance(number, int) else None


def read_json(path: Path) -> dict[str, Any]:
    """The dict in a JSON file; {} if the file does not exist. ValueError where it is damaged."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise TypeError("no JSON object")
        return value
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f"its {path.name} is damaged ({e})") from None
