"""gpt2_4096, the first tokens of GPT-2's vocabulary, against a plain byte pair encoding written
from its definition."""

import base64
import sys
from itertools import pairwise

import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st

from nanodnt.data import load_meta
from nanodnt.data import meta as data
from nanodnt.data.tokenizer import DATA, GPT2_4096, Tokenizer
from support.prepared import ids_of, load_script

TOKENS = [base64.b64decode(line) for line in GPT2_4096.read_text().split()]
RANK = {token: i for i, token in enumerate(TOKENS)}
# GPT-2's
WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def encode_plainly(text: str) -> list:
    """Join the neighbours whose joint token has the lowest id, word by word, until none can be
    joined."""
    found = []
    for word in WORD.findall(text):
        parts = [bytes([b]) for b in word.encode()]
        while pairs := [
            (RANK[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANK
        ]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [RANK[part] for part in parts]
    return found


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Tokenizer.meta_for("gpt2_4096"))


def test_the_vocabulary_is_a_byte_pair_encoding():
    assert len(TOKENS) == len(RANK) == 4095
    assert sorted(TOKENS[:256]) == [bytes([b]) for b in range(256)]
    # GPT-2's own ids
    assert [TOKENS[i] for i in (256, 257, 258, 262, 286)] == [b" t", b" a", b"he", b" the", b" of"]


def test_meta(tokenizer):
    meta = Tokenizer.meta_for("gpt2_4096")
    assert meta == {
        "tokenizer": "gpt2_4096",
        "vocab_size": 4096,
        "eot": 4095,
        "tokenizer_id": "gpt2_4096",
    }
    with pytest.raises(ValueError, match="the tokenizer gpt2_4096 .vocab_size, eot, .* is damaged"):
        Tokenizer(meta | {"vocab_size": 4095})


@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
    | st.text(alphabet="the in'sll \n09", max_size=60)
)
@example("def f(x):\n    return  x[0]\n")
def test_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == encode_plainly(text) and tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 4095, 5000]) == text  # end of text, and beyond the vocabulary


def test_the_standard_library_in_these_tokens(tmp_path, monkeypatch, tokenizer):
    """Its folder is beside that of the bytes."""
    script, root, made = load_script("pystdlib"), tmp_path / "lib", []
    root.mkdir()
    for i in range(120):
        (root / f"module{i}.py").write_text(f'"""The module number {i}."""\nx = {i}\n')
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    script.main(["--tokenizer=gpt2_4096", f"--out_dir={tmp_path / 'out'}"])
    ids = ids_of(tmp_path / "out", "train").tolist()
    text = tokenizer.decode(ids)
    assert ids.count(4095) == text.count("The module number") > 100 and "x = 17\n" in text
    monkeypatch.setattr(script.text, "build", lambda out_dir, *args, **how: made.append(out_dir))
    for argv in ([], ["--tokenizer=gpt2_4096"]):
        script.main(argv)
    assert made == [DATA / "pystdlib", DATA / "pystdlib_gpt2_4096"]


def test_what_is_not_prepared_names_its_command(monkeypatch, tmp_path):
    (tmp_path / "pystdlib").mkdir()
    (tmp_path / "pystdlib" / "prepare.py").touch()
    monkeypatch.setattr(data, "DATA", tmp_path)
    for name, advice in (
        ("pystdlib", "run `python data/pystdlib/prepare.py`;"),
        ("pystdlib_gpt2_4096", "run `python data/pystdlib/prepare.py --tokenizer=gpt2_4096`;"),
        ("my text", "data/local/prepare.py --input=TEXT --tokenizer=gpt2 --name='my text'`;"),
    ):
        with pytest.raises(ValueError) as error:
            load_meta(name)
        assert advice in str(error.value)


def test_without_tiktoken(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for kind in ("gpt2", "gpt2_4096"):
        with pytest.raises(
            ValueError, match="GPT-2's tokenizers need tiktoken: pip install tiktoken"
        ):
            Tokenizer(Tokenizer.meta_for(kind))
