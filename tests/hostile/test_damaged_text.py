"""Damaged and hostile text, drawn by hypothesis: meta.json and command lines (config files:
tests/unit/test_configurator.py). Each is read as it was meant or refused in one line; no code in it
runs, and a refusal leaves an earlier run as it was."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import GPTConfig
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.data.windows import PreparedText
from nanodnt.plan.__main__ import main as plan
from nanodnt.settings import TrainConfig
from support.hostile import holders, refused_as_none, works
from support.hypotheses import JSON, drawn

pytestmark = pytest.mark.usefixtures("quick")

# ---------------------------------------------------------------------------------------- meta.json

NAMES = ["uint32", "uint16", "bytes", "gpt2", "chars", "val.bin", "train.bin", "meta.json"]
NAMES += ["../../x", "/etc/passwd", "..", "", "a\0b"]


def changed_json(draw, tree):
    """The text of a JSON tree, changed in its values, its keys or its letters."""
    tree = deepcopy(tree)
    for _ in range(draw(st.integers(0, 2))):
        holder = draw(st.sampled_from([h for h in holders(tree) if h]))
        key = draw(
            st.sampled_from(
                list(holder) if isinstance(holder, dict) else range(min(3, len(holder)))
            )
        )
        match draw(st.sampled_from(["json", "near", "name", "drop"])):
            case "json":
                holder[key] = draw(JSON)
            case "near" if type(holder[key]) is int:
                holder[key] += draw(st.sampled_from([-1, 1, 0.0]))
            case "name" if isinstance(holder[key], str):
                holder[key] = draw(st.sampled_from(NAMES))
            case _:
                del holder[key]
    text = json.dumps(tree, ensure_ascii=draw(st.booleans()))
    match draw(st.sampled_from(["whole"] * 4 + ["cut", "deep", "letters", "encoding"])):
        case "cut":
            text = text[: draw(st.integers(0, len(text)))]
        case "deep":
            text = text.replace("null", "[" * 100_000 + "]" * 100_000, 1)
        case "letters":
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(st.text(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
        case "encoding":
            return text.encode(draw(st.sampled_from(["utf-8-sig", "utf-16", "cp037"])), "replace")
    return text.encode("utf-8", "surrogatepass")


@drawn(fast=50, deep=250)
@given(data=st.data())
def test_meta_json(earlier, scratch, data):
    """A meta.json that is accepted gives the same tokens as before, and a tokenizer for as many."""
    folder = scratch / "data"
    if not folder.exists():
        shutil.copytree(earlier.data, folder)
    meta = json.loads((earlier.data / "meta.json").read_text())
    (folder / "meta.json").write_bytes(changed_json(data.draw, meta))
    found = refused_as_none(PreparedText, str(folder), 16, names=folder)
    if found is not None:
        whole = PreparedText(str(earlier.data), 16)
        assert np.array_equal(found.batch(0, 4), whole.batch(0, 4))
        assert np.array_equal(
            found.val_batch(found.validation(128), 8), whole.val_batch(whole.validation(128), 8)
        )
        tokenizer = Tokenizer(found.meta)
        assert tokenizer.vocab_size == {"chars": 50, "bytes": 257, "gpt2": 50257}[tokenizer.kind]
        assert tokenizer.eot is None or 0 <= tokenizer.eot < tokenizer.vocab_size
        text = tokenizer.decode(range(tokenizer.vocab_size))
        if tokenizer.kind == "chars":
            assert tokenizer.encode(text) == list(range(50))


# ------------------------------------------------------------------------------------ command lines

FLAGS = sorted(GPTConfig.__dataclass_fields__ | TrainConfig.__dataclass_fields__)
ODD = [
    "",
    "=",
    "none",
    "None",
    "True",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "0x1",
    "1_0",
    " 1",
    "１",
    "-1",
    "0",
    "1",
    "3",
]
EVIL = [
    "$(touch marker)",
    "`touch marker`",
    "__import__('os').mkdir('marker')",
    "../../x",
    "\0",
    "\n",
    "\x1b[31m",
]
NUMBERS = st.integers(-10, 300).map(str), st.floats().map(str)
WORDS = st.one_of(st.sampled_from(ODD), st.sampled_from(EVIL), *NUMBERS, st.text(max_size=10))


@drawn(fast=33, deep=200)
@given(
    given_=st.lists(
        st.tuples(st.sampled_from(["--", "--", "--", "-", ""]), st.sampled_from(FLAGS), WORDS),
        max_size=4,
    ),
    loose=st.lists(st.one_of(WORDS, WORDS.map(lambda w: f"--{w}")), max_size=1),
)
def test_command_lines(scratch, given_, loose):
    flags = [f"{dashes}{name}={value}" for dashes, name, value in given_]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(scratch)
        works(None, plan, *flags, *loose)
        assert not Path("marker").exists()


@pytest.mark.parametrize("name", ["n_embd", "n_head", "n_ff", "block_size", "vocab_size"])
@pytest.mark.parametrize("size", [10**12, 2**63 - 1])
def test_sizes_that_no_machine_has(name, size):
    works(None, plan, **dict(n_layer=1, vocab_size=300) | {name: size})
