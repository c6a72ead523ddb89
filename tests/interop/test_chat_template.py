"""The template of an export: `transformers` makes of messages what we make of them, and we read it back."""

import io
import json
import sys

import pytest

import export
import sample
from interop.conversations.template import TEMPLATES, Template, encode_conversation, encode_prompt, template_of
from interop.huggingface.read import load_pretrained
from interop.huggingface.tokenizer_files import read_tokenizer, tokenizer_files
from nanodnt.data.tokenizer import Tokenizer
from support.examples import TEMPLATE, chat, shouts, starting_tokenizer, write_examples
from support.peers import chatml_tokenizer, save_tokenizer
from support.runs import run

pytestmark = pytest.mark.usefixtures("quick")
METAS = {
    "bytes": Tokenizer.meta_for("bytes"),
    "gpt2_4096": Tokenizer.meta_for("gpt2_4096"),
    "chatml": chatml_tokenizer("gpt2_4096", bos="<|endoftext|>"),
    "a start": starting_tokenizer(),  # <s> <a> before a text
}
ODD = Template("'{system}' \"{{ x }}\"\\n\t☃\n", "{% raw %}{prompt}\r\n'\\'{# no #}\x85é\u2028\U0001f600\n{response}")
CASES = [(name, template) for name in METAS if name != "a start" for template in (*TEMPLATES, "odd")]
CASES += [("a start", "letters")]
KNOWN = TEMPLATES | {"odd": ODD, "letters": Template("b{system}c", "a{prompt}z{response}")}


def exported(folder, meta, template):
    """transformers' tokenizer of the files of a tokenizer with this template, which we read back."""
    import transformers

    texts = {"system": template.system, "turn": template.turn}
    save_tokenizer(meta | {"template": texts}, folder)
    back = read_tokenizer(folder)
    assert back["template"] == texts and "nanodnt_template" not in back.get("json_config", {})
    return transformers.AutoTokenizer.from_pretrained(folder)


def apply(theirs, messages) -> tuple:
    """(text, ids)."""
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return text, ids


@pytest.mark.parametrize("name, template", CASES)
def test_transformers_makes_the_same_of_messages(name, template, tmp_path):
    meta, template = METAS[name], KNOWN[template]
    theirs = exported(tmp_path, meta, template)
    ours, letters = Tokenizer(meta), name == "a start"
    system = None if not template.system else "be" if letters else "Be brief, isn't it?\n"
    contents = [("ab",), ("ab", "cd", "ef"), ("ab", "cd", "ef", "gh", "ij", "k")]
    if not letters:
        contents += [(" Hi {prompt} \n☃ {{ x }}",), ("What?", "No, not \n\n so. ", "\tWhy\n", "So é", "x")]
    for messages in [chat(*texts, system=s) for texts in contents for s in (None, system)]:
        text, ids = apply(theirs, messages)
        encode = encode_prompt if messages[-1]["role"] == "user" else lambda *args: encode_conversation(*args)[0]
        expected = encode(ours, template, messages)
        assert letters or text == theirs.decode(expected, skip_special_tokens=False)
        alone = [m["role"] for m in messages].count("user") == 1
        if alone or letters or name == "bytes" or template.turn.endswith("\n{response}"):
            assert ids == expected  # else a token may span an answer and what stands before it


def test_messages_that_are_no_conversation(tmp_path):
    theirs = exported(tmp_path, METAS["bytes"], TEMPLATES["alpaca"])
    user, assistant = chat("a", "b")
    for messages, words in (
        ([user, user], "user and assistant alternate"),
        ([assistant], "user and assistant alternate"),
        ([user, *chat(system="s")], "user and assistant alternate"),
        (chat("a", system="s"), "this model knows no system message"),
    ):
        with pytest.raises(Exception, match=words):
            apply(theirs, messages)


def test_our_template_replaces_another_and_no_template_changes_nothing(tmp_path):
    theirs = {"eos_token": "<|im_end|>", "chat_template": "theirs"}
    meta = METAS["chatml"] | {"json_config": theirs}
    ours = {"system": "", "turn": "{prompt}{response}"}
    config = json.loads(tokenizer_files(meta | {"template": ours}, 9)["tokenizer_config.json"])
    assert config["nanodnt_template"] == ours and config["chat_template"] != "theirs"
    config = json.loads(tokenizer_files(meta, 9)["tokenizer_config.json"])
    assert "nanodnt_template" not in config and config["chat_template"] == "theirs"
    assert "chat_template" not in tokenizer_files(METAS["bytes"], 9)["tokenizer_config.json"]


def test_the_export_of_a_run(tmp_path, monkeypatch, capsys):
    """A run's checkpoint has the template of its data, and so its export; `generate` ends where an answer does."""
    import transformers

    dataset = write_examples(tmp_path / "data", train=shouts(0, 200), val=shouts(1, 40))
    assert run(out_dir=tmp_path / "run", dataset=dataset, max_iters=2, eval_interval=2) == 0
    argv = ["export.py", f"--out_dir={tmp_path / 'run'}", f"--to={tmp_path / 'it'}", "--compare=False"]
    monkeypatch.setattr(sys, "argv", argv)
    assert export.main() == 0
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "it").eos_token_id == 256
    text, ids = apply(transformers.AutoTokenizer.from_pretrained(tmp_path / "it"), chat("a", system="b"))
    assert text == "<|endoftext|>b\na\n" and ids == [256, *b"b\na\n"]
    assert template_of(load_pretrained(str(tmp_path / "it")).meta) == Template(**TEMPLATE)
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--init_from={tmp_path / 'it'}", "--chat", "--max_new_tokens=3"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\n")))
    capsys.readouterr()
    assert sample.main() == 0 and capsys.readouterr().err in ("", "note: the answer is cut after max_new_tokens=3\n")
