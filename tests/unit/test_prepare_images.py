"""Images to datasets: the Hub's parquet files, folders of images, and what bad images get told."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nanodnt.data import load_meta
from nanodnt.data.__main__ import main as check_dataset
from nanodnt.data.images import PreparedImages
from nanodnt.data.tokenizer import Tokenizer
from nanodnt.prepare import images as prepare_images
from nanodnt.prepare import text
from support import prepared
from support.images import bomb, encode, noise
from support.runs import contents

cifar10, imagenet1k, local = map(prepared.load_script, ("cifar10", "imagenet1k", "local_images"))


def images_of(folder, split) -> list:
    """[(encoded bytes, label)] of a prepared folder, read by its contract."""
    meta = json.loads((folder / "meta.json").read_text())
    raw = (folder / meta["splits"][split]["file"]).read_bytes()
    offsets = np.fromfile(folder / meta["splits"][split]["offsets"]["file"], "<u8").tolist()
    labels = np.fromfile(folder / meta["splits"][split]["labels"]["file"], "<u2").tolist()
    parts = [raw[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    return list(zip(parts, labels, strict=True))


def make_parquet(path: Path, columns: dict, classes: dict):
    """A parquet file as the Hub has them; `classes` are {column of labels: names}."""
    import datasets

    kinds = {name: datasets.ClassLabel(names=names) for name, names in classes.items()}
    features = datasets.Features({name: kinds.get(name, datasets.Image()) for name in columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns, features=features).to_parquet(path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The file of what is held out of a small CIFAR-10 on a Hub, and {split: [(encoded bytes,
    label)]}."""
    prepared.use_fake_hub(monkeypatch, tmp_path)
    pairs = [(encode(noise(32, 32, 3, seed=i)), (7 * i + 3) % 10) for i in range(9)]
    for part, some in (("train", pairs[:6]), ("test", pairs[6:])):
        file = (
            tmp_path
            / "hub/uoft-cs/cifar10"
            / prepared.COMMIT
            / f"plain_text/{part}-00000-of-00001.parquet"
        )
        encoded = [{"bytes": raw, "path": None} for raw, _ in some]
        columns = {"img": encoded, "label": [label for _, label in some]}
        make_parquet(file, columns, {"label": [f"kind {i}" for i in range(10)]})
    return file, {"train": pairs[:6], "val": pairs[6:]}


def test_images_of_the_hub_are_kept_byte_for_byte(hub, tmp_path, capsys):
    out, made = tmp_path / "out", hub[1]
    cifar10.main([f"--out_dir={out}"])
    meta = load_meta(str(out))
    assert {split: images_of(out, split) for split in ("train", "val")} == made
    assert meta["dataset"] == "cifar10" and prepared.COMMIT in meta["source"]
    assert len(meta["classes"]) == 10 and meta["image_size"] == 32
    small = "python train.py config/vdnt/digits.py --out_dir=out/out"
    suggested = prepared.open_as_suggested(capsys.readouterr().out)
    assert suggested == [f"{small} --patch_size=4 --dataset={out}"]
    check_dataset([str(out)])
    assert "all checksums match" in capsys.readouterr().out
    images, labels = PreparedImages(str(out), 9, image_size=32).val_batch(np.arange(2), 2)
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [
        label for _, label in made["val"][:2]
    ]


def test_no_permission(tmp_path, monkeypatch):
    out = f"--out_dir={tmp_path / 'out'}"
    prepared.use_fake_hub(monkeypatch, tmp_path)
    prepared.use_failing_hub(
        monkeypatch, "403 Client Error: you are not in the authorized list\nand more"
    )
    line = prepared.error_of(imagenet1k.main, out)
    assert "could not download" in line and "49e2ee26f38" in line and "403 Client Error" in line
    assert "accept the terms at https://huggingface.co" in line
    assert not (tmp_path / "out").exists()


def test_other_classes_are_held_out(hub, tmp_path):
    columns = {"img": [{"bytes": encode(noise(32, 32, 3)), "path": None}], "label": [0]}
    make_parquet(hub[0], columns, {"label": ["a", "b"]})
    line = prepared.error_of(cifar10.main, f"--out_dir={tmp_path / 'out'}")
    assert "the classes of train and val differ: ['a', 'b', 'kind 0'" in line
    assert not (tmp_path / "out").exists()


@pytest.fixture
def home(tmp_path, monkeypatch):
    return prepared.use_other_home(tmp_path / "data", monkeypatch)


def write_folder(folder, shape=(9, 9, 3), per_class=4):
    """FOLDER/CLASS/... of two classes; returns {class: bytes of its images}."""
    made = {}
    for c, name in enumerate(("cat", "dog")):
        (folder / name / "deep").mkdir(parents=True)
        for i in range(per_class):
            path = folder / name / ("deep" if i == 1 else ".") / f"{i}.{'jpg' if i % 2 else 'PNG'}"
            path.write_bytes(encode(noise(*shape, seed=10 * c + i), "JPEG" if i % 2 else "PNG"))
            made.setdefault(name, []).append(path.read_bytes())
    (folder / "cat" / "notes.txt").write_text("skipped")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.png").write_bytes(b"skipped")
    return made


def test_a_folder_with_train_and_val(home, tmp_path, capsys):
    made = {split: write_folder(tmp_path / "pets" / split) for split in ("train", "val")}
    local.main([f"--folder={tmp_path / 'pets'}", "--name=pets", "--image_size=9", "--licence=mine"])
    out = capsys.readouterr()
    assert prepared.open_as_suggested(out.out)[0].endswith(" --patch_size=1 --dataset=pets")
    assert "no PNG or JPEG, so left out" in out.err
    meta = load_meta("pets")
    assert (meta["classes"], meta["image_size"], meta["licence"]) == (["cat", "dog"], 9, "mine")
    for split in made:
        wanted = [(raw, i) for i, name in enumerate(("cat", "dog")) for raw in made[split][name]]
        assert sorted(images_of(home / "pets", split)) == sorted(wanted)


def test_a_share_is_held_out_by_a_hash_of_names(home, tmp_path, monkeypatch):
    """Of folders, and of links to folders elsewhere."""
    made = write_folder(tmp_path / "pets", per_class=30)
    (tmp_path / "pets" / "dog").rename(tmp_path / "dogs")
    (tmp_path / "pets" / "dog").symlink_to(tmp_path / "dogs")
    flags = [f"--folder={tmp_path / 'pets'}", "--name=pets", "--val_share=0.3"]
    local.main(flags)
    train, val = (images_of(home / "pets", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(
        (raw, i) for i, name in enumerate(made) for raw in made[name]
    )
    assert 9 <= len(val) <= 27 and load_meta("pets")["image_size"] is None
    before = contents(home / "pets")
    prepared.list_files_backwards(monkeypatch)
    local.main(flags)
    assert contents(home / "pets") == before


def test_no_class_is_held_out_whole(home, tmp_path):
    for c, count in enumerate((1, 2, 40)):
        (tmp_path / "in" / f"class {c}").mkdir(parents=True)
        for i in range(count):
            (tmp_path / "in" / f"class {c}" / f"{i}.png").write_bytes(
                encode(noise(4, 4, 3, seed=100 * c + i))
            )
    local.main([f"--folder={tmp_path / 'in'}", "--name=few", "--val_share=0.9"])
    assert {label for _, label in images_of(home / "few", "train")} == {0, 1, 2}
    assert len(images_of(home / "few", "val")) > 20


def test_mean_and_deviation_are_of_all_pixels_of_training_images(home, tmp_path):
    for split in ("train", "val"):
        write_folder(tmp_path / "pets" / split, shape=(9, 14, 3) if split == "train" else (5, 5, 3))
    local.main([f"--folder={tmp_path / 'pets'}", "--name=pets"])
    images = [Image.open(io.BytesIO(raw)) for raw, _ in images_of(home / "pets", "train")]
    pixels = np.stack(images).reshape(-1, 3) / 255
    assert len(pixels) == 8 * 9 * 14
    np.testing.assert_allclose(load_meta("pets")["mean"], pixels.mean(0), atol=1e-6)
    np.testing.assert_allclose(load_meta("pets")["std"], pixels.std(0), atol=1e-6)


def about(classes):
    return dict(
        dataset="d", source="test", licence="none", image_size=4, channels=1, classes=classes
    )


def test_another_kind_of_dataset_in_the_same_folder_is_replaced_whole(tmp_path):
    images = [("", encode(noise(4, 4, seed=i)), i % 2) for i in range(3)]
    prepare_images.build(tmp_path, about(["a", "b"]), {"train": images, "val": images})
    assert len(contents(tmp_path)) == 7 and load_meta(str(tmp_path))["kind"] == "images"
    (tmp_path / "train.marks").touch()  # as examples have
    text.build(
        tmp_path, "test", Tokenizer.meta_for("bytes"), {"train": [["one"]], "val": [["two"]]}
    )
    assert set(contents(tmp_path)) == {"train.bin", "val.bin", "meta.json"} and load_meta(
        str(tmp_path)
    )


def replace_image(raw):
    """Make the last image of FOLDER/train something else."""
    return lambda folder: (folder / "train" / "dog" / "2.PNG").write_bytes(raw)


def blacken(folder):
    for path in folder.rglob("*.[Pj]*[Gg]"):
        path.write_bytes(BLACK)


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def test_what_is_left_out_is_named(home, tmp_path, capsys):
    """Bad images only on request."""
    made = write_folder(tmp_path / "in")
    (tmp_path / "in" / "empty").mkdir()
    (tmp_path / "in" / "cat" / "9.png").write_bytes(b"GIF89a")
    flags = [f"--folder={tmp_path / 'in'}", "--name=pets"]
    assert "9.png is neither PNG nor JPEG" in prepared.error_of(local.main, *flags)
    capsys.readouterr()
    local.main([*flags, "--skip_bad"])
    found = images_of(home / "pets", "train") + images_of(home / "pets", "val")
    assert sorted(found) == sorted((raw, i) for i, name in enumerate(made) for raw in made[name])
    said = capsys.readouterr().err
    assert f"without images, so left out: {tmp_path}/in/empty\n" in said
    assert f"hidden, so left out: {tmp_path}/in/.hidden\n" in said
    assert f"bad records, so left out: {tmp_path}/in/cat/9.png is neither PNG nor JPEG" in said


BLACK = encode(np.zeros((9, 9, 3)))
BAD = [
    ("", replace_image(encode(noise(9, 8, 3))), "2.PNG has 8 × 9 pixels instead of 9 × 9"),
    ("", replace_image(encode(noise(9, 9))), "2.PNG is of mode L instead of RGB (channels=3"),
    ("", lambda f: halve(f / "train/dog/deep/1.jpg"), "1.jpg cannot be decoded (OSError: "),
    ("", replace_image(bomb()), "cannot be decoded (DecompressionBombError"),
    (
        "",
        lambda f: (f / "val/dog").rename(f / "val/cow"),
        "classes of train and val differ: ['cow', 'dog']",
    ),
    ("", lambda f: (f / "val").rename(f / "test"), "has test, train, which look like splits"),
    ("", lambda f: (f / "val/dog/0.PNG").rename(f / "val/0.png"), "0.png lies in no class"),
    ("", lambda f: blacken(f / "train"), "one and the same value in a channel"),
    ("--image_size=0", None, "--image_size=0 must be 1 or more"),
    ("--val_share=0.1", None, "has train and val, so leave out --val_share"),
    ("--val_share=1", None, "--val_share=1.0 must be above 0 and below 1"),
]


@pytest.mark.parametrize("flag, spoil, words", BAD, ids=[words[:40] for _, _, words in BAD])
def test_bad_images_are_one_line_and_leave_no_trace(flag, spoil, words, home, tmp_path):
    folder = tmp_path / "in"
    for split in ("train", "val"):
        write_folder(folder / split)
    flags = {"folder": folder, "image_size": 9}
    local.main(["--name=mine", *(f"--{key}={value}" for key, value in flags.items())])
    if spoil:
        spoil(folder)
    key, _, value = flag[2:].partition("=")
    flags = {k: v for k, v in (flags | {key: value}).items() if v != ""}
    prepared.assert_refused(local.main, home, flags, words)
    assert load_meta("mine")


def test_labels_and_classes(tmp_path):
    image = encode(noise(4, 4))
    train, val = [("image 7", image, 2)], [("", image, 0)]
    for classes, splits, words in (
        (["a", "b"], {"train": val, "val": ()}, "there is no image for val.bin"),
        (["a", "b"], {"train": train, "val": val}, "^image 7 has label 2, and there are 2 classes"),
        (["a"], {"train": val, "val": val}, "there are 1 classes 'a', and 2 to 65,536 are needed"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare_images.build(tmp_path / "out", about(classes), splits)
        assert not (tmp_path / "out").exists()
