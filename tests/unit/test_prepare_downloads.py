"""Datasets that are downloaded: splits, kills, and what a missing network, package or disk gets
told."""

import gzip
import hashlib
import http.client
import io
import json
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from nanodnt.data import load_meta
from nanodnt.prepare import hub as downloads
from support import prepared
from support.runs import contents

SCRIPTS = "shakespeare_char", "openwebtext", "minipile", "c4", "fineweb", "local"
shakespeare, openwebtext, minipile, c4, fineweb, local = map(prepared.load_script, SCRIPTS)
CHECK_DISK = downloads.check_disk
PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 7


def test_shakespeare_is_downloaded_checked_and_split_as_in_nanogpt(tmp_path, monkeypatch):
    out, source = tmp_path / "out", tmp_path / "input.txt"
    source.write_text(PLAY)
    monkeypatch.setattr(shakespeare, "URL", source.as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(PLAY.encode()).hexdigest())
    shakespeare.main([f"--out_dir={out}"])
    ids = {c: i for i, c in enumerate(sorted(set(PLAY)))}
    cut = int(len(PLAY) * 0.9)
    assert prepared.ids_of(out, "train").tolist() == [ids[c] for c in PLAY[:cut]]
    assert prepared.ids_of(out, "val").tolist() == [ids[c] for c in PLAY[cut:]]

    source.write_text("changed")
    shakespeare.main([f"--out_dir={out}"])  # what was downloaded is still there
    before = contents(out)
    (out / "parts" / "input.txt").write_text("damaged")
    line = prepared.error_of(shakespeare.main, f"--out_dir={out}")
    assert hashlib.sha256(b"changed").hexdigest() in line and shakespeare.SHA256 in line
    source.unlink()
    assert "could not download" in prepared.error_of(shakespeare.main, f"--out_dir={out}")
    assert (out / "train.bin").read_bytes() == before["train.bin"] and load_meta(str(out))


def test_half_an_answer_is_no_file(tmp_path, monkeypatch):
    class Half(io.BytesIO):
        def read(self):
            raise http.client.IncompleteRead(b"half", 4)

    monkeypatch.setattr(downloads.urllib.request, "urlopen", lambda url, timeout: Half())
    with pytest.raises(ValueError, match="could not download .*4 bytes read"):
        downloads.download("http://example.invalid/x", tmp_path / "x", None)
    assert not (tmp_path / "x").exists()


# ----------------------------------------------------------------------------- the Hugging Face Hub

FILES = {  # dataset: {pattern of names: their number}
    "openwebtext": {"plain_text/train-{:05d}-of-00003.parquet": 3},
    "minipile": {
        "data/train-{:05d}-of-00002.parquet": 2,
        "data/validation-{:05d}-of-00001.parquet": 1,
        "data/test-{:05d}-of-00001.parquet": 1,
    },
    "c4": {
        "en/c4-train.{:05d}-of-01024.json.gz": 3,
        "en/c4-validation.{:05d}-of-00008.json.gz": 8,
    },
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of three small datasets, as its cache looks after a download: {dataset: {file:
    texts}}."""
    made = {}
    for dataset, patterns in FILES.items():
        for name in (p.format(i) for p, count in patterns.items() for i in range(count)):
            texts = [f"{name} {i} ü\n" for i in range(900 if dataset == "openwebtext" else 5)]
            made.setdefault(dataset, {})[name] = texts
            rows = [{"text": text, "url": "u"} for text in texts]
            path = tmp_path / "hub" / dataset / prepared.COMMIT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".gz"):
                path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
            else:
                parquet.write_table(pa.Table.from_pylist(rows), path)
    prepared.use_fake_hub(monkeypatch, tmp_path, lambda repo: repo.split("/")[1])
    prepared.use_fake_bpe(monkeypatch)
    return made


def made_by(script, out, *flags):
    script.main([f"--out_dir={out}", "--workers=1", *flags])
    meta = load_meta(str(out))
    assert meta["tokenizer"] == "gpt2" and prepared.COMMIT in meta["source"]
    assert not (out / "parts").exists()
    return prepared.texts_of(out)


def texts_in(files, part):
    return [text for name, texts in files.items() if part in name for text in texts]


def test_openwebtext_is_split_as_in_nanogpt(hub, tmp_path):
    import datasets

    texts = texts_in(hub["openwebtext"], "train")
    every = datasets.Dataset.from_dict({"text": texts})
    split = every.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    train, val = made_by(openwebtext, tmp_path / "owt")
    assert len(val) == 2 and val == list(split["test"]["text"])
    assert train == [text for text in texts if text not in val]


def test_minipile_and_c4_keep_their_splits(hub, tmp_path):
    files = hub["minipile"]
    wanted = texts_in(files, "train"), texts_in(files, "validation")
    assert made_by(minipile, tmp_path / "m") == wanted
    files = hub["c4"]
    wanted = texts_in(files, "train.00000") + texts_in(files, "train.00001"), texts_in(files, "val")
    assert made_by(c4, tmp_path / "c", "--shards=2") == wanted
    assert "2 of 1024" in load_meta(str(tmp_path / "c"))["source"]


def test_no_network_no_package_no_room(hub, tmp_path, monkeypatch):
    out = f"--out_dir={tmp_path / 'out'}"
    with monkeypatch.context() as patch:
        prepared.use_failing_hub(patch, "name resolution failed\nand more")
        line = prepared.error_of(minipile.main, out)
        assert "could not download" in line and minipile.REVISION in line
        assert "name resolution failed" in line
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        line = prepared.error_of(minipile.main, out)
        assert "the package pyarrow is missing: make install" in line
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "check_disk", CHECK_DISK)
        patch.setattr(downloads.shutil, "disk_usage", lambda path: type("", (), {"free": 5e9}))
        assert "has 5.0 GB free, and this needs 6.7" in prepared.error_of(minipile.main, out)
    next((tmp_path / "hub" / "minipile").rglob("train-00001*")).unlink()
    assert "gave only 1 of the files data/train-*" in prepared.error_of(minipile.main, out)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ token ids that others have made


def write_shard(file, ids, head=(20240520, 1), tokens=None):
    """A file in llm.c's form."""
    header = np.zeros(256, "<i4")
    header[:3] = *head, len(ids) if tokens is None else tokens
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())


FIRST, SECOND, HELD_OUT = [50256, *range(49)], [50256, *range(100, 149)], [50256, 7, 50256, 8]


def test_fineweb(tmp_path, monkeypatch):
    prepared.use_fake_hub(monkeypatch, tmp_path, lambda repo: repo.split("/")[1])
    prepared.use_fake_bpe(monkeypatch)
    folder, out = tmp_path / "hub" / "finewebedu10B-gpt2" / prepared.COMMIT, tmp_path / "out"
    for name, ids in (("train_000001", FIRST), ("train_000002", SECOND), ("val_000000", HELD_OUT)):
        write_shard(folder / f"finewebedu_{name}.bin", ids)
    fineweb.main(["--shards=2", "--edu", f"--out_dir={out}"])
    assert prepared.ids_of(out, "train").tolist() == FIRST + SECOND
    assert prepared.ids_of(out, "val").tolist() == HELD_OUT
    assert f"finewebedu10B-gpt2 at {prepared.COMMIT}, 2 of" in load_meta(str(out))["source"]
    assert "has 1 to" in prepared.error_of(fineweb.main, "--shards=104", f"--out_dir={out}")


def test_a_folder_of_shards(tmp_path, monkeypatch):
    prepared.use_fake_bpe(monkeypatch)
    home = prepared.use_other_home(tmp_path / "data", monkeypatch)
    folder = tmp_path / "in"
    for name, ids in (("train_1", FIRST), ("train_2", SECOND), ("val_0", HELD_OUT)):
        write_shard(folder / f"a_{name}.bin", ids)
    how = [f"--input={folder}", "--name=mine", "--tokenizer=gpt2"]
    (folder / "README.md").write_text("of the shards")  # it makes no folder of texts of it
    local.main(how)
    assert prepared.ids_of(home / "mine", "train").tolist() == FIRST + SECOND
    assert prepared.ids_of(home / "mine", "val").tolist() == HELD_OUT
    (folder / "a_val_0.bin").unlink()
    local.main([*how, "--val_fraction=0.6"])  # the end of all: a part of the first, and the second
    assert prepared.ids_of(home / "mine", "train").tolist() == FIRST[:40]
    assert prepared.ids_of(home / "mine", "val").tolist() == FIRST[40:] + SECOND

    before = contents(home)
    for words, change in (
        ("b.bin does not begin as llm.c's files", dict(head=(20240801, 1))),
        ("b.bin is of version 7 of llm.c's files", dict(head=(20240520, 7))),
        ("b.bin holds 6 bytes of ids, where its header says 4 tokens", dict(tokens=4)),
        ("b.bin holds token id 50257, beyond the vocabulary", dict(ids=[1, 50257, 3])),
    ):
        write_shard(folder / "b.bin", **{"ids": [1, 2, 3]} | change)
        assert words in prepared.error_of(local.main, *how)
        assert contents(home) == before
    line = prepared.error_of(local.main, *how[:2], "--tokenizer=bytes")
    assert "are GPT-2's, --tokenizer=gpt2" in line
