"""What the programs say to images that are wrong, and where text and images meet: one line that
names the mistake, and nothing changed.

Every case starts from a folder with a run on images, one on text, and a command line that works,
and adds one mistake.
"""

import sys
from shutil import copytree

import numpy as np
import pytest

import sample
import train
from nanodnt.data import sha256
from nanodnt.data.images import PreparedImages
from nanodnt.settings import TrainConfig
from support import runs
from support.hostile import RESUME, TRAIN, World, cases, refuse, start
from support.images import change_meta, encode, noise, write_dataset, write_split
from support.spoil import checkpoint, drop, during, meta, put, truncate

pytestmark = pytest.mark.usefixtures("quick")
IMAGES = dict(patch_size=4, block_size=5, eval_tokens=20)
LONGER = f"{RESUME} --max_iters=6 --eval_interval=100"  # reads every training image
PT = "vit/*.pt"
GRAY = [encode(noise(8, 8, seed=i)) for i in range(12)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, quick):
    """A folder with images, and with a run on them. Read only."""
    folder = tmp_path_factory.mktemp("seen")
    write_dataset(folder / "gray", GRAY[:8], GRAY[8:])
    assert runs.run(**TRAIN | IMAGES, out_dir=folder / "vit", dataset=folder / "gray") == 0
    return folder


@pytest.fixture
def images(world, seen):
    """The World of these images; in {tmp}/run and {tmp}/data are the run on text and its
    dataset."""
    copytree(seen, world.tmp, dirs_exist_ok=True)
    return World(world.tmp, world.tmp / "vit", world.tmp / "gray", world.patch)


def with_flags(case):
    given = {word.lstrip("-").partition("=")[0] for word in case.argv.split()}
    flags = " ".join(f"--{name}={value}" for name, value in IMAGES.items() if name not in given)
    return case._replace(argv=f"{case.argv} {flags}")


def image(raw, split="train", number=7):
    """Put these bytes in place of one image, with checksums and all that fit."""

    def spoil(w):
        encoded = list(GRAY[:8] if split == "train" else GRAY[8:])
        encoded[number] = raw
        entry = write_split(w.data, split, encoded, np.arange(len(encoded)) % 4)
        change_meta(w.data, put("splits", split, entry))

    return spoil


def label(w):
    """Give an image a label that no class has, with a checksum that fits."""
    path = w.data / "train_labels.bin"
    labels = np.fromfile(path, "<u2")
    labels[3] = 4
    labels.tofile(path)
    change_meta(w.data, put("splits", "train", "labels", "sha256", sha256(path)))


def without_pillow(w):
    for module in ("nanodnt.data.images", "nanodnt.data.augment"):  # which import it
        w.patch.delitem(sys.modules, module)
    w.patch.setitem(sys.modules, "PIL", None)


def larger(w):
    large = [encode(noise(12, 12, seed=i)) for i in range(12)]
    write_dataset(w.tmp / "large", large[:8], large[8:], image_size=12)


META = ["meta.json", "prepare"]
DATA = cases(
    ("no classes", "", [*META, "classes"], meta(drop("classes"))),
    ("size 0", "", [*META, "image_size is 0"], meta(put("image_size", 0))),
    ("mean not finite", "", [*META, "mean is [nan]"], meta(put("mean", [float("nan")]))),
    (
        "more images",
        "",
        ["train_offsets.bin", "72", "80", "prepare"],
        meta(put("splits", "train", "images", 9)),
    ),
    ("another kind", "", ["meta.json", "newer version", "videos"], meta(put("kind", "videos"))),
    (
        "hash of labels",
        "",
        ["val_labels.bin", "sha256"],
        meta(put("splits", "val", "labels", "sha256", "0" * 64)),
    ),
    (
        "missing file",
        "",
        ["val_labels.bin", "missing"],
        lambda w: (w.data / "val_labels.bin").unlink(),
    ),
    ("label", "", ["train_labels.bin", "label 4", "4 classes", "prepare"], label),
    ("no Pillow", "", ["package pillow", "make install-extra", "pip install"], without_pillow),
    # what only reading an image shows, in a run that goes on with the earlier one, whose
    # checkpoints must stay
    (
        "not an image",
        LONGER,
        ["image 7", "train.bin", "is neither PNG nor JPEG"],
        image(b"no image"),
        PT,
    ),
    ("a cut image", LONGER, ["image 7", "cannot be decoded"], image(GRAY[7][:-40]), PT),
    (
        "size",
        LONGER,
        ["image 7", "8 × 9 pixels instead of 8 × 8", "prepare"],
        image(encode(noise(9, 8))),
        PT,
    ),
    (
        "in val",
        LONGER,
        ["image 3", "val.bin", "is neither PNG nor JPEG"],
        image(b"no image", "val", 3),
        PT,
    ),
    (
        "cut during the run",
        LONGER,
        ["train.bin", "shorter", "prepare"],
        during(truncate("train")),
        PT,
    ),
)
TEXT = "--dataset={tmp}/data --patch_size=0 --block_size=16"
GPT = "--init_from={tmp}/run/best.pt"
OTHERS = [f"digit {i}" for i in range(4)]
SETTINGS = cases(  # text and images, and what does not fit the dataset or the checkpoint
    ("a text", "--dataset={tmp}/data", ["patch_size=4", "text"]),
    ("images for a GPT", "--patch_size=0", ["images", "patch_size"]),
    ("rope", "--pos=rope", ["pos=rope", "patch_size=4 makes this a model of images"]),
    ("doc_mask", "--doc_mask=True", ["reads images", "are for text: leave out --doc_mask=True"]),
    ("label_smoothing, text", f"{TEXT} --label_smoothing=0.1", ["leave out --label_smoothing=0.1"]),
    (
        "a ViT's weights, text",
        TEXT + " --init_from={run}/best.pt",
        ["is of text, but the model reads images"],
    ),
    ("a GPT's weights, images", GPT, ["is of images, but the model reads text"]),
    ("a ViT resumed on text", f"{TEXT} {RESUME}", ["is of text, but the model reads images"]),
    ("3 does not divide 8", "--patch_size=3", ["image_size=8 must be a multiple of patch_size=3"]),
    ("block_size", "--block_size=16", ["block_size=16", "5 tokens", "leave it out"]),
    (
        "class names",
        RESUME,
        ["classes 4 of other names", "do not fit"],
        meta(put("classes", OTHERS)),
    ),
    ("another size", RESUME + " --dataset={tmp}/large", ["size 12", "size 8"], larger),
    (
        "no class token",
        RESUME,
        ["cls.weight is absent"],
        checkpoint(lambda c: c["model"].pop("cls.weight")),
    ),
    (
        "text in its settings",
        RESUME,
        ["patch_size=0"],
        checkpoint(put("model_config", "patch_size", 0)),
    ),
    ("no names of classes", RESUME, ["classes"], checkpoint(lambda c: c["meta"].pop("classes"))),
)


@DATA
def test_bad_images(images, case):
    refuse(images, train, with_flags(case))


@SETTINGS
def test_text_and_images(images, case):
    refuse(images, train, with_flags(case))


@cases(("a ViT", "", ["best.pt is a model of images", "choose one of text"]))
def test_sample_refuses(images, case):
    refuse(images, sample, case)


@cases(("on images", LONGER, []), ("on text", TEXT + " --out_dir={tmp}/run", []))
def test_the_command_lines_work_without_the_mistake(images, case):
    assert start(images, train, with_flags(case).argv).code == 0


def test_big_photos_of_a_dataset_of_several_sizes(tmp_path):
    """Images of extreme shapes take little memory: only what is wanted of them is resized."""
    shapes = [(1, 50_000, 3), (50_000, 1, 3), (1, 1, 3), (2, 3, 3)]
    name = write_dataset(
        tmp_path, [encode(noise(*s)) for s in shapes], [GRAY[0]], channels=3, image_size=None
    )
    for augment in (None, TrainConfig(crop_area=0.08, rand_augment=9, flip=True)):
        batch = PreparedImages(name, 5, image_size=8, config=augment).batch(0, 4)[0]
        assert batch.shape == (4, 3, 8, 8) and np.isfinite(batch).all()
