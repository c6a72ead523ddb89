"""Datasets that are downloaded: splits, restarts, and what a missing network, package or disk gets told."""

import gzip
import hashlib
import io
import json
import random
import sys
import urllib.error

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
    (tmp_path / "input.txt").write_text(PLAY)
    out, checksum = tmp_path / "out", hashlib.sha256(PLAY.encode()).hexdigest()
    monkeypatch.setattr(shakespeare, "URL", (tmp_path / "input.txt").as_uri())
    monkeypatch.setattr(shakespeare, "SHA256", checksum)
    shakespeare.main([f"--out_dir={out}"])
    ids = {c: i for i, c in enumerate(sorted(set(PLAY)))}
    cut = int(len(PLAY) * 0.9)
    assert prepared.ids_of(out, "train").tolist() == [ids[c] for c in PLAY[:cut]]
    assert prepared.ids_of(out, "val").tolist() == [ids[c] for c in PLAY[cut:]]
    assert load_meta(str(out))["source"] == (tmp_path / "input.txt").as_uri()

    (tmp_path / "input.txt").write_text("changed")
    before = contents(out)
    shakespeare.main([f"--out_dir={out}"])  # what was downloaded is still there
    assert contents(out) == before
    (out / "parts" / "input.txt").write_text("damaged")
    line = prepared.error_of(shakespeare.main, f"--out_dir={out}")
    assert hashlib.sha256(b"changed").hexdigest() in line and checksum in line
    assert not (out / "parts" / "input.txt.partial").exists()
    assert (out / "train.bin").read_bytes() == before["train.bin"] and load_meta(str(out))
    (tmp_path / "input.txt").unlink()
    assert "could not download" in prepared.error_of(shakespeare.main, f"--out_dir={out}")


def test_a_broken_download_continues(tmp_path, monkeypatch):
    raw, asked = PLAY.encode(), []

    class Answer(io.BytesIO):
        def __init__(self, start, stop, status):
            super().__init__(raw[start:stop])
            self.status, self.headers = status, {"Content-Length": str(len(raw) - start)}

    def urlopen(request, timeout):
        asked.append(request.get_header("Range"))
        if asked[-1] == "bytes=999-":
            raise urllib.error.HTTPError(request.full_url, 416, "Range Not Satisfiable", {}, None)
        if (tmp_path / "again").exists():
            return Answer(0, None, 200)
        return Answer(100, None, 206) if asked[-1] == "bytes=100-" else Answer(0, 100, 200)

    monkeypatch.setattr(downloads.urllib.request, "urlopen", urlopen)
    arguments = ("http://example.invalid/x", tmp_path / "x", hashlib.sha256(raw).hexdigest())
    with pytest.raises(ValueError, match=f"broke off at 100 of {len(raw)} bytes"):
        downloads.download(*arguments)
    assert downloads.download(*arguments).read_bytes() == raw
    assert asked == [None, "bytes=100-"] and not (tmp_path / "x.partial").exists()

    (tmp_path / "again").touch()
    (tmp_path / "x").rename(tmp_path / "x.partial")
    (tmp_path / "x.partial").write_bytes(b"r" * 999)  # rubbish, longer than the file
    assert downloads.download(*arguments).read_bytes() == raw and asked[2:] == ["bytes=999-", None]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of three small datasets, as its cache looks after a download; returns name → file → texts."""
    random.seed(1)
    names = {
        "openwebtext": [f"plain_text/train-{i:05d}-of-00003.parquet" for i in range(3)],
        "minipile": ["data/train-00000-of-00002-ab.parquet", "data/train-00001-of-00002-cd.parquet"]
        + ["data/validation-00000-of-00001-ef.parquet", "data/test-00000-of-00001-01.parquet"],
        "c4": [f"en/c4-train.{i:05d}-of-01024.json.gz" for i in range(3)]
        + [f"en/c4-validation.{i:05d}-of-00008.json.gz" for i in range(8)],
    }
    made = {dataset: {} for dataset in names}
    for dataset, name in ((d, n) for d in names for n in names[d]):
        count = 900 if dataset == "openwebtext" else 5
        made[dataset][name] = [f"{name} {i} {random.random()} ü\n" for i in range(count)]
        rows = [{"text": t, "url": "u", "timestamp": "2019-04-25T12:57:54Z"} for t in made[dataset][name]]
        if name.endswith(".gz"):
            raw = gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode())
        else:
            parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "made")
            raw = (tmp_path / "made").read_bytes()
        blob, link = tmp_path / hashlib.sha256(raw).hexdigest(), tmp_path / "hub" / dataset / prepared.COMMIT / name
        blob.write_bytes(raw)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    prepared.use_fake_hub(monkeypatch, tmp_path, lambda repo: repo.split("/")[1])
    prepared.use_fake_bpe(monkeypatch)
    return made


def made_by(script, out, *flags):
    script.main([f"--out_dir={out}", "--workers=1", *flags])
    meta = load_meta(str(out))
    assert meta["tokenizer"] == "gpt2" and prepared.COMMIT in meta["source"] and not (out / "parts").exists()
    return prepared.texts_of(out)


def test_openwebtext_is_split_as_in_nanogpt(hub, tmp_path):
    import datasets

    texts = [t for file in hub["openwebtext"].values() for t in file]
    split = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    train, val = made_by(openwebtext, tmp_path / "owt")
    assert len(val) == 2 and val == list(split["test"]["text"])
    assert sorted(train) == sorted(split["train"]["text"]) and train == [t for t in texts if t not in val]


def test_minipile_and_c4_keep_their_splits(hub, tmp_path):
    files = hub["minipile"]
    train, val = made_by(minipile, tmp_path / "m")
    assert [t for name in list(files)[:2] for t in files[name]] == train and val == files[list(files)[2]]
    files = hub["c4"]
    train, val = made_by(c4, tmp_path / "c", "--shards=2")
    assert [t for name in list(files)[:2] for t in files[name]] == train
    assert [t for name in list(files)[3:] for t in files[name]] == val
    assert "2 of 1024" in load_meta(str(tmp_path / "c"))["source"]


def test_what_the_tokenizer_makes_of_a_hub_s_texts_is_said(hub, tmp_path, monkeypatch, capsys):
    texts = {0: ["a", "<|endoftext|> b"], 1: ["x"]}
    monkeypatch.setattr(downloads, "texts", lambda file: texts[int(file.name.split("-")[1])])
    made_by(minipile, tmp_path / "m")
    # file 0 is in both splits here: training's first file and the validation file are numbered 0
    assert capsys.readouterr().err == (
        "note: <|endoftext|> is read as ordinary text, not as a token: "
        "file 1 of train, document 2; file 1 of val, document 2\n"
    )


# ------------------------------------------------------------------------------- token ids that others have made


def write_shard(file, ids, head=(20240520, 1), tokens=None, more=b""):
    """A file in llm.c's form."""
    header = np.zeros(256, "<i4")
    header[:3] = *head, len(ids) if tokens is None else tokens
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes() + more)
    return file


def made_shards(folder, names, tokens=50):
    """{name: ids} of files of documents that begin with end of text."""
    rng, ids = np.random.default_rng(1), {}
    for name in names:
        ids[name] = [50256 if i % 9 == 0 else int(rng.integers(50256)) for i in range(tokens)]
        write_shard(folder / name, ids[name])
    return ids


@pytest.mark.parametrize("flags, kind", [([], "fineweb"), (["--edu"], "finewebedu")])
def test_fineweb(flags, kind, tmp_path, monkeypatch):
    prepared.use_fake_hub(monkeypatch, tmp_path, lambda repo: repo.split("/")[1])
    prepared.use_fake_bpe(monkeypatch)
    names = [f"{kind}_train_{i:06d}.bin" for i in range(1, 4)] + [f"{kind}_val_000000.bin"]
    ids = made_shards(tmp_path / "hub" / f"{kind}10B-gpt2" / prepared.COMMIT, names)
    fineweb.main(["--shards=2", f"--out_dir={tmp_path / 'f'}", *flags])
    assert prepared.ids_of(tmp_path / "f", "train").tolist() == ids[names[0]] + ids[names[1]]
    assert prepared.ids_of(tmp_path / "f", "val").tolist() == ids[names[3]]
    meta = load_meta(str(tmp_path / "f"))
    assert f"kjj0/{kind}10B-gpt2 at {prepared.COMMIT}, 2 of" in meta["source"] and meta["splits"]["val"]["tokens"] == 50
    x, y, positions = prepared.open_prepared(str(tmp_path / "f"), 9, doc_mask=True).batch(0, 4)
    assert (x[:, 1:] == y[:, :-1]).all() and (positions[x == 50256] == 0).all()
    for shards, words in (("0", "has 1 to"), ("104", "has 1 to"), ("5", "gave only 0 of the files")):
        assert words in prepared.error_of(fineweb.main, f"--shards={shards}", f"--out_dir={tmp_path / 'f'}", *flags)


def test_a_folder_of_shards(tmp_path, monkeypatch):
    prepared.use_fake_bpe(monkeypatch)
    home = prepared.use_other_home(tmp_path / "data", monkeypatch)
    names = ["a_train_1.bin", "a_train_2.bin", "a_val_0.bin"]
    ids = made_shards(tmp_path / "in", names)
    how = [f"--input={tmp_path / 'in'}", "--name=mine", "--tokenizer=gpt2"]
    local.main(how)
    assert prepared.ids_of(home / "mine", "train").tolist() == ids[names[0]] + ids[names[1]]
    assert prepared.ids_of(home / "mine", "val").tolist() == ids[names[2]]
    (tmp_path / "in" / "README.md").write_text("of the shards")  # does not make it a folder of texts
    local.main(how)
    assert prepared.ids_of(home / "mine", "val").tolist() == ids[names[2]]
    (tmp_path / "in" / "README.md").unlink()
    (tmp_path / "in" / names[2]).unlink()
    local.main([*how, "--val_fraction=0.6"])  # the end of all: a part of the first, and the second
    together = ids[names[0]] + ids[names[1]]
    assert prepared.ids_of(home / "mine", "train").tolist() == together[:40]
    assert prepared.ids_of(home / "mine", "val").tolist() == together[40:]

    before, bad = contents(home), tmp_path / "in" / "b.bin"
    for words, how_written in (
        ("b.bin does not begin as llm.c's files", dict(head=(20240801, 1))),
        ("b.bin is of version 7 of llm.c's files", dict(head=(20240520, 7))),
        ("b.bin holds 6 bytes of ids, where its header says 4 tokens", dict(tokens=4)),
        ("b.bin holds 7 bytes of ids, where its header says 3 tokens", dict(more=b"x")),
        ("b.bin holds 6 bytes of ids, where its header says -1 tokens", dict(tokens=-1)),
        ("b.bin holds token id 50257, beyond the vocabulary of 50257", dict(ids=[1, 50257, 3])),
    ):
        write_shard(bad, **{"ids": [1, 2, 3]} | how_written)
        assert words in prepared.error_of(local.main, *how)
        assert contents(home) == before
    bad.write_bytes(b"short")
    assert "b.bin does not begin as" in prepared.error_of(local.main, *how)
    assert "are GPT-2's, --tokenizer=gpt2" in prepared.error_of(local.main, *how[:2], "--tokenizer=bytes")


def test_a_killed_hub_dataset_is_continued(hub, tmp_path, monkeypatch):
    made_by(openwebtext, tmp_path / "whole")
    written = prepared.note_parts(monkeypatch, most=3)
    with pytest.raises(KeyboardInterrupt):
        made_by(openwebtext, tmp_path / "again")
    resumed = prepared.note_parts(monkeypatch)
    made_by(openwebtext, tmp_path / "again")
    assert len(written + resumed) == len({*written, *resumed}) == 4  # no part was made twice
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


def test_no_network_no_package_no_room(hub, tmp_path, monkeypatch):
    out = f"--out_dir={tmp_path / 'out'}"
    with monkeypatch.context() as patch:
        prepared.use_failing_hub(patch, "name resolution failed\nand more")
        line = prepared.error_of(minipile.main, out)
        assert "could not download" in line and minipile.REVISION in line and "name resolution failed" in line
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        assert "the package pyarrow is missing: make install" in prepared.error_of(minipile.main, out)
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "check_disk", CHECK_DISK)
        patch.setattr(downloads.shutil, "disk_usage", lambda path: type("", (), {"free": 5_000_000_000}))
        assert "has 5.0 GB free, and this needs" in prepared.error_of(minipile.main, out)
    assert not (tmp_path / "out").exists()


def test_an_incomplete_or_damaged_hub_download(hub, tmp_path):
    folder = tmp_path / "hub" / "minipile" / prepared.COMMIT / "data"
    first, second = sorted(folder.glob("train-*"))
    with open(second.resolve(), "ab") as f:
        f.write(b"x")
    assert f"{second.name} was damaged" in prepared.error_of(minipile.main, f"--out_dir={tmp_path / 'out'}")
    assert first.exists() and not second.exists()  # a dangling link: the next run downloads it again
    second.unlink()
    assert "gave only 1 of the files data/train-*" in prepared.error_of(minipile.main, f"--out_dir={tmp_path / 'out'}")
    error = prepared.error_of(c4.main, f"--out_dir={tmp_path}", "--shards=4")
    assert "gave only 0 of the files en/c4-train.00003" in error


def test_disk_space_counts_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: type("", (), {"free": 100}))
    downloads.check_disk({tmp_path / "not/there": 60, tmp_path: 40})
    downloads.check_disk({tmp_path: 100, tmp_path / "finished": -1000})
    for needs in ({tmp_path / "not/there": 60, tmp_path: 41}, {tmp_path: 101, tmp_path / "finished": -1000}):
        with pytest.raises(ValueError, match="needs"):
            downloads.check_disk(needs)
    assert downloads._size(tmp_path) == 0
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").write_bytes(b"12345")
    assert downloads._size(tmp_path) == 5 and downloads._size(tmp_path / "none") == 0
