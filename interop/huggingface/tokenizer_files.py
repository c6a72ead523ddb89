"""Tokenizers as the files of Hugging Face, tokenizer.json and tokenizer_config.json, and back.

Ours are written so that the library `tokenizers` gives the same ids. Read again, they are
recognised as ours. A template of conversations goes along twice: in Jinja, for `transformers`, and
as it is.
"""

import json
import re
from pathlib import Path

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

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
# left: to generate
CONFIG |= {"model_input_names": ["input_ids", "attention_mask"], "padding_side": "left"}
# What is kept of a tokenizer_config.json that was read. Not its class: some classes of
# `transformers` change what tokenizer.json says, which is what we go by.
KEPT = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
    "chat_template",
)
# Keys under which our own stand there: the meta of a tokenizer, and the template of conversations,
# beside its Jinja.
OWN_TOKENIZER, OWN_TEMPLATE = "nanodnt_tokenizer", "nanodnt_template"


def tokenizer_files(meta: dict, block_size: int) -> dict:
    """{file name: text} of the tokenizer that `meta` describes, for a model with this context."""
    config, text = dict(CONFIG), meta["json"] if meta["tokenizer"] == "json" else make_json(meta)
    if meta["tokenizer"] == "json":
        config |= {
            k: v
            for k, v in meta.get("json_config", {}).items()
            if k.endswith("_token") or k in KEPT
        }
        for name, number in (("eos_token", meta["eot"]), ("bos_token", meta.get("bos"))):
            if number is not None:  # it may have been named in another file
                config[name] = parse_json(text).id_to_token(number)
    elif meta["eot"] is not None:
        config |= dict.fromkeys(("bos_token", "eos_token"), EOT)
    # to know GPT-2's again, its vocabulary would have to be downloaded
    if meta["tokenizer"] not in ("json", "gpt2"):
        config[OWN_TOKENIZER] = Tokenizer.meta_for(meta["tokenizer"], meta.get("chars"))
    if (template := template_of(meta)) and meta["eot"] is not None:
        config |= {
            "chat_template": chat_template(template, Tokenizer(meta)),
            OWN_TEMPLATE: meta["template"],
        }
    config["model_max_length"] = block_size
    return {
        "tokenizer.json": text,
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }


# What add_generation_prompt adds is always there. $name: a string; a string in Jinja has Python's
# escapes
CHAT_TEMPLATE = (
    "{{ $begin }}{% set turns = messages %}{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
    "{{ SYSTEM }}{% endif %}{% for message in turns %}"
    "{% if message['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('after at most one system message, user and assistant alternate') }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + $end }}"
    "{% else %}{% if not loop.first %}{{ '\\n' }}{% endif %}{{ $before + message['content'] + $after }}"
    "{% endif %}{% endfor %}"
)


def chat_template(template: Template, tokenizer: Tokenizer) -> str:
    """A template as Jinja, for `apply_chat_template`. `transformers` tokenises the text as one: ids
    differ from ours where a token would span an answer and the text before it (rare after a
    newline), and where a message names a special token."""
    system = "$first + messages[0]['content'] + $second"
    if not template.system:
        system = "raise_exception('this model knows no system message')"
    texts = dict(
        zip(("first", "second"), template.system.split("{system}"), strict=False),
        begin=EOT,
        end=EOT,
    )
    texts["before"], texts["after"] = template.turn.removesuffix("{response}").split("{prompt}")
    if tokenizer.kind == "json":
        texts["begin"] = "".join(
            map(tokenizer.json.id_to_token, tokenizer.start or [tokenizer.bos])
        )
        texts["end"] = tokenizer.json.id_to_token(tokenizer.eot)
    return re.sub(
        r"\$(\w+)", lambda name: repr(texts[name[1]]), CHAT_TEMPLATE.replace("SYSTEM", system)
    )


def make_json(meta: dict) -> str:
    """The text of a tokenizer.json for a tokenizer of ours."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Json

    if meta["tokenizer"] == "chars":
        made = Json(models.WordLevel({c: i for i, c in enumerate(meta["chars"])}))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        made.decoder = decoders.Fuse()
        return made.to_str()
    # a printable byte is itself; the n-th other the n-th other
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = (character for character in alphabet if ord(character) > 255)
    byte = [chr(b) if chr(b) in alphabet else next(others) for b in range(256)]
    ranks = (
        {bytes([b]): b for b in range(256)}
        if meta["tokenizer"] == "bytes"
        else bpe_ranks(meta["tokenizer"])
    )
    name = {token: "".join(byte[b] for b in token) for token in ranks}
    pairs = [(name[a], name[b]) for a, b in find_merges(ranks)]
    made = Json(
        models.BPE({name[token]: i for token, i in ranks.items()} | {EOT: meta["eot"]}, pairs)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=meta["tokenizer"] != "bytes"
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return made.to_str()


def find_merges(ranks: dict) -> list:
    """The pairs (bytes, bytes) whose merging makes each token of {bytes: rank}, in the order of the
    ranks. A token's pair is what merging its own bytes, lowest rank first, leaves before the last
    step."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            joint = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = joint.index(min(joint))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        pairs += [tuple(parts)] * (len(parts) == 2)
    return pairs


def find_tokenizer(name: str, others: tuple = ()) -> dict:
    """The meta of the tokenizer that --tokenizer names: bytes, gpt2, gpt2_4096, a folder or
    OWNER/MODEL. ValueError where there is none, or its vocabulary is missing; `others` are names
    that are allowed too."""
    name = read_path(name)
    if name not in END_OF_TEXT and not is_pretrained(name):
        kinds = ", ".join((*END_OF_TEXT, *others))
        raise ValueError(
            f"--tokenizer={name} is neither one of {kinds}, nor a folder, nor OWNER/MODEL on the Hub"
        )
    meta = (
        Tokenizer.meta_for(name)
        if name in END_OF_TEXT
        else read_tokenizer(fetch(name, ["*.json", "*.jinja"]))
    )
    if meta is None:
        raise ValueError(f"--tokenizer={name} has no tokenizer.json")
    Tokenizer(meta)  # ValueError if its vocabulary is missing
    # that one is of other data
    return {key: value for key, value in meta.items() if key != "template"}


def read_tokenizer(folder: Path) -> dict | None:
    """The part of meta.json for the tokenizer of a folder of Hugging Face; None where the folder
    has none. An export of ours can have a template of conversations, too. ValueError where a file
    is damaged."""
    path, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    if not path.is_file():
        return None
    try:
        text, config = path.read_text(encoding="utf-8"), read_json(folder / "tokenizer_config.json")
        if template.is_file():
            config["chat_template"] = template.read_text(encoding="utf-8")
        meta = json_meta(
            text, *(special_token(folder, text, config, name) for name in ("eos", "bos"))
        )
        own = config.pop(OWN_TEMPLATE, None)
        ours = config.pop(OWN_TOKENIZER, None)
        # nobody has changed it
        is_ours = ours is not None and hash_json(make_json(ours)) == meta["tokenizer_id"]
        meta = ours if is_ours else meta | {"json_config": config}
        return meta if own is None else meta | {"template": own}
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


def special_token(folder: Path, text: str, config: dict, name: str) -> str | None:
    """The token "eos" or "bos" of a folder: in tokenizer_config.json (`config`), or by its id in
    config.json; of several ids the first."""
    found = config.get(f"{name}_token")
    if found is None and f"{name}_token" not in config:
        number = read_json(folder / "config.json").get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        found = parse_json(text).id_to_token(number) if isinstance(number, int) else None
    return found.get("content") if isinstance(found, dict) else found


def read_json(path: Path) -> dict:
    """The dict in a JSON file; {} where there is no file. ValueError where it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(value, dict):
            raise TypeError("no JSON object")
        return value
    except (ValueError, TypeError, RecursionError) as e:
        raise ValueError(f"its {path.name} is damaged ({e})") from None
