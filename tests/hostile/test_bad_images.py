"""What train.py says to images that are wrong: one line that names them, and nothing changed.

Every case starts from a folder that holds an earlier run on images, and a command line that works, and adds one
mistake."""

import errno
import os
import sys

import numpy as np
import pytest

import train
from nanodnt.data import sha256
from nanodnt.data.images import PreparedImages
from nanodnt.settings import TrainConfig
from support import runs
from support.hostile import RESUME, TRAIN, World, cases, refuse, start
from support.images import bomb, change_meta, encode, noise, write_dataset, write_split
from support.spoil import drop, during, meta, put, truncate

pytestmark = pytest.mark.usefixtures("quick")
IMAGES = dict(patch_size=4, block_size=5, eval_tokens=20)
LONGER = f"{RESUME} --max_iters=6 --eval_interval=100"  # reads every training image
PT = "run/*.pt"
GRAY = [encode(noise(8, 8, seed=i)) for i in range(12)]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A World of images that nobody may change: spoil a copy."""
    tmp = tmp_path_factory.mktemp("images")
    folder = tmp / "data"
    write_dataset(folder, GRAY[:8], GRAY[8:])
    assert runs.run(**TRAIN | IMAGES, out_dir=tmp / "run", dataset=folder) == 0
    return World(tmp, tmp / "run", folder)


def with_flags(case):
    given = {word.lstrip("-").partition("=")[0] for word in case.argv.split()}
    flags = " ".join(f"--{name}={value}" for name, value in IMAGES.items() if name not in given)
    return case._replace(argv=f"{case.argv} {flags}")


def image(raw, split="train", number=7):
    """Put these bytes in place of one image, with checksums and all that fit."""

    def spoil(w):
        images = list(GRAY[:8] if split == "train" else GRAY[8:])
        images[number] = raw
        entry = write_split(w.data, split, images, np.arange(len(images)) % 4)
        change_meta(w.data, put("splits", split, entry))

    return spoil


def values(name, index, value):
    """Change a number in SPLIT_offsets.bin or SPLIT_labels.bin, with a checksum that fits."""

    def spoil(w):
        split, _, kind = name.partition("_")
        path = w.data / f"{name}.bin"
        numbers = np.fromfile(path, {"offsets": "<u8", "labels": "<u2"}[kind])
        numbers[index] = value
        numbers.tofile(path)
        change_meta(w.data, put("splits", split, kind, "sha256", sha256(path)))

    return spoil


def unreadable(w):
    def pread(*_):
        raise OSError(errno.EIO, "Input/output error")

    w.patch.setattr(os, "pread", pread)


def without_pillow(w):
    for module in ("nanodnt.data.images", "nanodnt.data.augment"):  # which import it
        w.patch.delitem(sys.modules, module)
    w.patch.setitem(sys.modules, "PIL", None)


def text(w):
    runs.make_dataset(w.tmp / "text")


META = ["meta.json", "prepare"]
BAD = cases(
    ("no classes", "", [*META, "classes"], meta(drop("classes"))),
    ("one class", "", [*META, "classes is ['a']"], meta(put("classes", ["a"]))),
    ("size 0", "", [*META, "image_size is 0"], meta(put("image_size", 0))),
    ("two channels", "", [*META, "channels is 2"], meta(put("channels", 2))),
    ("mean not finite", "", [*META, "mean is [nan]"], meta(put("mean", [float("nan")]))),
    ("std of 0", "", [*META, "std is [0]"], meta(put("std", [0]))),
    ("no images", "", [*META, "images is 0"], meta(put("splits", "val", "images", 0))),
    ("no offsets", "", [*META, "offsets"], meta(lambda m: m["splits"]["train"].pop("offsets"))),
    ("more images", "", ["train_offsets.bin", "72", "80", "prepare"], meta(put("splits", "train", "images", 9))),
    ("another kind", "", ["meta.json", "newer version", "videos"], meta(put("kind", "videos"))),
    ("hash of labels", "", ["val_labels.bin", "sha256"], meta(put("splits", "val", "labels", "sha256", "0" * 64))),
    ("missing file", "", ["val_labels.bin", "missing"], lambda w: (w.data / "val_labels.bin").unlink()),
    ("label", "", ["train_labels.bin", "label 4", "4 classes", "prepare"], values("train_labels", 3, 4)),
    ("document mask", "--doc_mask=True", ["doc_mask"]),
    ("a text", "--dataset={tmp}/text", ["patch_size=4", "text"], text),
    ("images for a GPT", "--patch_size=0", ["images", "patch_size"]),
    ("no Pillow", "", ["package pillow", "make install-extra", "pip install"], without_pillow),
    # What only reading an image shows, in a run that goes on with the earlier one, whose checkpoints must stay.
    ("not an image", LONGER, ["image 7", "train.bin", "is neither PNG nor JPEG"], image(b"no image"), PT),
    ("a cut image", LONGER, ["image 7", "cannot be decoded"], image(GRAY[7][:-40]), PT),
    ("a flipped bit", LONGER, ["image 7", "cannot be decoded"], image(GRAY[7][:60] + b"\xff" + GRAY[7][61:]), PT),
    ("size", LONGER, ["image 7", "8 × 9 pixels instead of 8 × 8", "prepare"], image(encode(noise(9, 8))), PT),
    ("channels", LONGER, ["image 7", "mode RGB instead of L", "channels=1"], image(encode(noise(8, 8, 3))), PT),
    ("a bomb", LONGER, ["image 7", "cannot be decoded", "Bomb"], image(bomb()), PT),
    ("in val", LONGER, ["image 3", "val.bin", "is neither PNG nor JPEG"], image(b"no image", "val", 3), PT),
    ("cut during the run", LONGER, ["train.bin", "shorter", "prepare"], during(truncate("train")), PT),
    ("cannot be read", LONGER, ["Input/output error"], during(unreadable), PT),
)


@BAD
def test_bad_images(world, case):
    refuse(world, train, with_flags(case))


def test_the_command_line_works_without_the_mistake(world):
    case = with_flags(BAD.args[1][0].values[0]._replace(argv=LONGER))
    assert start(world, train, case.argv).code == 0


def test_big_photos_of_a_dataset_of_several_sizes(tmp_path):
    """Images of extreme shapes take little memory: only what is wanted of them is resized."""
    shapes = [(1, 50_000, 3), (50_000, 1, 3), (1, 1, 3), (2, 3, 3)]
    name = write_dataset(tmp_path, [encode(noise(*s)) for s in shapes], [GRAY[0]], channels=3, image_size=None)
    for augment in (None, TrainConfig(crop_area=0.08, rand_augment=9, flip=True)):
        images = PreparedImages(name, 5, image_size=8, config=augment).batch(0, 4)[0]
        assert images.shape == (4, 3, 8, 8) and np.isfinite(images).all()
