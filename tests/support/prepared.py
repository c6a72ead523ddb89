"""The prepare scripts as modules, a stand-in for GPT-2's vocabulary, and what a prepared folder
holds."""

import importlib.util
import json
import os
import re
import shlex
import tempfile
from pathlib import Path

import numpy as np
import pytest

from configurator import configure
from model import GPTConfig
from nanodnt.data import inputs, meta, tokenizer
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.prepare import hub, script, text
from nanodnt.settings import TrainConfig
from nanodnt.tasks import open_data, resolve
from support.runs import ROOT, contents


def load_script(name):
    """The module data/NAME/prepare.py."""
    spec = importlib.util.spec_from_file_location(
        f"prepare_{name}", ROOT / "data" / name / "prepare.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_prepared(name, block_size, **settings):
    """The prepared dataset `name`, with these settings of a TrainConfig."""
    return open_data(TrainConfig(dataset=str(name), **settings), GPTConfig(block_size=block_size))


def open_as_suggested(printed):
    """The commands that a prepare script printed at the end; what each reads must be there, fit
    its model, and be enough for a batch and an evaluation."""
    commands = re.findall(r"^(?:next|or): (.*)$", printed, re.MULTILINE)
    for command in commands:
        argv = command.partition(" train.py ")[2]
        (model_config, config), _ = configure(GPTConfig, TrainConfig, argv=shlex.split(argv))
        resolve(model_config, config)
        data = open_data(config, model_config)
        data.batch(0, 2)
        data.val_batch(data.validation(config.eval_tokens)[:2], 2)
    return commands


def use_other_home(folder, monkeypatch):
    """Make `folder` the data/ folder that prepare scripts for own data write to; returns it."""
    for place in (script, inputs, meta):
        monkeypatch.setattr(place, "DATA", folder)
    return folder


def gpt2_is_here():
    # Where tiktoken looks before it downloads; the names are sha1 of the two addresses.
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache")
    names = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    return all((folder / name).is_file() for name in names)


needs_gpt2 = pytest.mark.skipif(
    not gpt2_is_here(), reason="GPT-2's vocabulary is not in tiktoken's cache"
)


class FakeBPE:
    """Stands in for GPT-2's BPE, whose vocabulary is a download: one token per UTF-8 byte, ids 1000
    to 1255."""

    def encode_ordinary(self, text):
        return [1000 + b for b in text.encode()]

    def decode(self, ids):
        return bytes(i - 1000 for i in ids).decode()

    def decode_single_token_bytes(self, i):
        return bytes([i - 1000]) if 1000 <= i < 1256 else b"??"


COMMIT = "0123456789abcdef0123456789abcdef01234567"  # of every dataset of a made Hub


def use_fake_hub(monkeypatch, folder, of_repo=lambda repo: repo):
    """Downloads from the Hugging Face Hub find their files in FOLDER/hub/REPO/COMMIT; any disk has
    room for them."""
    import huggingface_hub

    def snapshot_download(repo, repo_type, revision, allow_patterns):
        assert repo_type == "dataset" and "*" not in revision
        return str(folder / "hub" / of_repo(repo) / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(hub, "check_disk", lambda needs: None)


def use_failing_hub(monkeypatch, message):
    """Downloads from the Hugging Face Hub fail."""
    import huggingface_hub

    def snapshot_download(*args, **how):
        raise ConnectionError(message)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def use_fake_bpe(monkeypatch):
    """Make FakeBPE the tokenizer gpt2."""
    monkeypatch.setattr(tokenizer, "load_bpe", lambda kind: FakeBPE())
    monkeypatch.setattr(text, "_tokenizer", text._tokenizer.__wrapped__)  # which keeps no tokenizer


def ids_of(folder, split):
    """The token ids in a .bin file."""
    dtype = json.loads((folder / "meta.json").read_text())["dtype"]
    return np.fromfile(folder / f"{split}.bin", np.dtype(dtype).newbyteorder("<"))


def documents_of(folder, split):
    """The texts in a .bin file, cut at end of text."""
    tokenizer = Tokenizer(json.loads((folder / "meta.json").read_text()))
    ids = ids_of(folder, split)
    assert ids[-1] == tokenizer.eot
    return [
        tokenizer.decode(part[:-1])
        for part in np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)[:-1]
    ]


def texts_of(folder):
    """The documents of train.bin and those of val.bin."""
    return documents_of(folder, "train"), documents_of(folder, "val")


def error_of(main, *argv):
    """The line that a script ends with; it must be an error, and one line."""
    with pytest.raises(SystemExit) as e:
        script.run(lambda: main(list(argv)))
    assert (
        isinstance(e.value.code, str)
        and e.value.code.startswith("error: ")
        and "\n" not in e.value.code
    )
    return e.value.code


def assert_refused(main, home, flags, words):
    """A script for own data refuses these flags in a line with these words, whether its dataset is
    there or not, and leaves no trace."""
    (home / "digits").mkdir()
    (home / "digits" / "prepare.py").touch()
    before = contents(home.parent)
    for name in ("mine", "new"):
        line = error_of(
            main, *(f"--{key}={value}" for key, value in ({"name": name} | flags).items())
        )
        assert words in line and contents(home.parent) == before
    assert not any(path.name in ("new", "parts") for path in home.parent.rglob("*"))


def list_files_backwards(monkeypatch):
    """Another file system lists files in another order."""
    walk = os.walk

    def walk_backwards(*args, **how):
        for folder, folders, files in walk(*args, **how):
            folders.sort(reverse=True)
            yield folder, folders, sorted(files, reverse=True)

    monkeypatch.setattr(os, "walk", walk_backwards)
