"""What the programs say where text and images meet, and to settings of images that are wrong: one line that names the
mistake, and nothing changed."""

import shutil

import pytest
import torch

import sample
import train
from support import runs
from support.hostile import RESUME, TRAIN, WEIGHTS, assert_refused, call, cases, files, refuse, start
from support.images import change_meta
from support.spoil import checkpoint, put
from support.vision import make_digits

pytestmark = pytest.mark.usefixtures("one_thread", "quick")

SIZE = "--patch_size=2 --block_size=1024"  # 1024, the default: the dataset says how many tokens an image has
DIGITS = " --dataset={tmp}/digits"
IMAGES = SIZE + DIGITS
PATCHES, BLOCK = "--block_size=1024" + DIGITS + " --patch_size=", "--patch_size=2" + DIGITS + " --block_size="
VIT = "--out_dir={tmp}/vit --init_from=resume --max_iters=5"  # go on with the run on digits
FLAGS = dict(patch_size=2, block_size=1024, bias=True)


@pytest.fixture(scope="module")
def seen(tmp_path_factory, quick):
    """A folder with digits, and with a run of 3 steps on them. Read only."""
    folder = tmp_path_factory.mktemp("seen")
    make_digits(folder / "digits", train=40, val=10)
    assert runs.run(**TRAIN | FLAGS | dict(out_dir=folder / "vit", dataset=folder / "digits")) == 0
    return folder


@pytest.fixture
def both(world, seen):
    """The World, with digits and a run on them beside its text."""
    for name in ("digits", "vit"):
        shutil.copytree(seen / name, world.tmp / name)
    return world


def meta(change):
    """Change digits/meta.json."""
    return lambda world: change_meta(world.tmp / "digits", change)


def other_digits(classes):
    """The same digits with other names of classes, in digits2/."""

    def prepare(world):
        shutil.copytree(world.tmp / "digits", world.tmp / "digits2")
        change_meta(world.tmp / "digits2", lambda meta: meta.update(classes=classes))

    return prepare


NAMES = [f"digit {i}" for i in range(10)]
HERE = "--dataset={tmp}/digits2"

MIXED_UP = cases(  # text and images
    ("text for a vision config", SIZE, ["patch_size=2 is for images", "data' is of text", "leave patch_size out"]),
    ("images for a text config", "--dataset={tmp}/digits", ["digits' is of images", "patch_size=0 is for text"]),
    ("rope", IMAGES + " --pos=rope", ["pos=rope", "patch_size=2 makes this a model of images"]),
    ("rope_theta", IMAGES + " --rope_theta=500", ["rope_theta=500.0", "patch_size=2"]),
    ("a vocabulary", IMAGES + " --vocab_size=50", ["vocab_size=50", "patch_size=2"]),
    ("doc_mask", IMAGES + " --doc_mask=True", ["doc_mask=True is for text"]),
    ("image_size, text", "--image_size=8", ["image_size=8", "patch_size=0 makes this a model of text"]),
    ("channels, text", "--channels=1", ["channels=1", "patch_size=0"]),
    ("n_class, text", "--n_class=10", ["n_class=10", "patch_size=0"]),
    ("pool, text", "--pool=mean", ["pool=mean", "patch_size=0"]),
    (
        "label_smoothing, text",
        "--label_smoothing=0.1",
        ["holds a text", "are for images", "leave them out: --label_smoothing=0.1"],
    ),
    ("loss_chunks, images", IMAGES + " --loss_chunks=2", ["loss_chunks=2 is for text", "reads images", "leave it"]),
    ("crop_area, text", "--crop_area=0.5", ["holds a text", "--crop_area=0.5"]),
    ("crop_padding, text", "--crop_padding=1", ["holds a text", "--crop_padding=1"]),
    ("flip, text", "--flip=True", ["holds a text", "--flip=True"]),
    ("rand_augment, text", "--rand_augment=9", ["holds a text", "--rand_augment=9"]),
    ("mixup and cutmix, text", "--mixup=0.8 --cutmix=1", ["holds a text", "--mixup=0.8 --cutmix=1.0"]),
    ("a ViT's weights, text", "--init_from={tmp}/vit/best.pt", ["is of text, but the model reads images"]),
    ("a ViT's weights and flags, text", "--init_from={tmp}/vit " + SIZE, ["is of text, but the model reads images"]),
    ("a GPT's weights, images", IMAGES + f" {WEIGHTS}", ["is of images, but the model reads text"]),
    ("a GPT's weights, images, text flags", f"{WEIGHTS} --dataset={{tmp}}/digits", ["but the model reads text"]),
    ("a GPT resumed on images", f"{RESUME} {IMAGES}", ["is of images, but the model reads text"]),
    ("a ViT resumed on text", VIT, ["is of text, but the model reads images"]),
    ("a ViT resumed on text, as auto", VIT.replace("=resume", "=auto"), ["is of text, but the model reads images"]),
    (
        "a ViT resumed, label_smoothing of text",
        f"{RESUME} --label_smoothing=0.1",
        ["these flags are for images, leave them out: --label_smoothing=0.1"],
    ),
    ("evaluated on text", "--eval_only=True --init_from={tmp}/vit", ["is of text, but the model reads images"]),
)

SETTINGS = cases(  # that do not fit the dataset, or each other
    ("image_size", IMAGES + " --image_size=16", ["image_size=16 does not fit", "which has 8", "leave it out"]),
    ("channels", IMAGES + " --channels=3", ["channels=3 does not fit", "which has 1"]),
    ("n_class", IMAGES + " --n_class=5", ["n_class=5 does not fit", "which has 10"]),
    ("3 does not divide 8", PATCHES + "3", ["image_size=8 must be a multiple of patch_size=3"]),
    ("a patch larger than the image", PATCHES + "16", ["a multiple of patch_size=16"]),
    ("negative patches", PATCHES + "-2", ["patch_size=-2"]),
    ("huge patches", PATCHES + f"{10**9}", [f"patch_size={10**9}"]),
    ("half a patch", PATCHES + "1.5", ["patch_size", "1.5", "int"]),
    ("block_size", BLOCK + "16", ["block_size=16", "17 tokens", "leave it out"]),
    ("block_size, mean", BLOCK + "17 --pool=mean", ["block_size=17", "16 tokens"]),
    ("pool", IMAGES + " --pool=max", ["pool", "max", "cls", "mean"]),
    ("drop_path of 1", IMAGES + " --drop_path=1", ["drop_path=1.0", "below 1"]),
    ("negative drop_path, text", "--drop_path=-0.5", ["drop_path=-0.5", "at least 0"]),
    ("label_smoothing of 1", IMAGES + " --label_smoothing=1", ["label_smoothing=1.0", "below 1"]),
    ("negative label_smoothing", IMAGES + " --label_smoothing=-0.1", ["label_smoothing=-0.1", "at least 0"]),
    ("nan label_smoothing", IMAGES + " --label_smoothing=nan", ["label_smoothing", "nan", "float"]),
    ("crop_area of 0", IMAGES + " --crop_area=0", ["crop_area=0", "above 0"]),
    ("two crops", IMAGES + " --crop_area=0.5 --crop_padding=1", ["crop_area=0.5", "crop_padding=1", "two kinds"]),
    ("padding as large as the image", IMAGES + " --crop_padding=8", ["crop_padding=8", "image_size=8"]),
    ("rand_augment", IMAGES + " --rand_augment=11", ["rand_augment=11", "at most 10"]),
    ("mixup", IMAGES + " --mixup=-1", ["mixup=-1", "α"]),
    ("infinite cutmix", IMAGES + " --cutmix=inf", ["cutmix", "inf"]),
    ("workers", IMAGES + " --data_workers=-1", ["data_workers=-1", "must not be negative"]),
    ("images of several sizes", IMAGES, ["several sizes", "set image_size"], meta(lambda m: m.update(image_size=None))),
    ("another project's name", IMAGES + " --drop_path_rate=0.1", ["--drop_path_rate", "--drop_path"]),
)

OTHER_CLASSES = cases(  # a run goes on, or begins from weights, on other images
    ("class names", f"{VIT} {HERE}", ["classes 10 of other names", "do not fit"], other_digits(NAMES)),
    (
        "class names in another order",
        VIT + DIGITS,
        ["of other names", "do not fit the model"],
        meta(lambda m: m["classes"].reverse()),
    ),
    ("fewer classes", f"{VIT} {HERE}", ["classes 11", "classes 10"], other_digits([str(i) for i in range(11)])),
    (
        "class names, from weights",
        f"--init_from={{tmp}}/vit {SIZE} {HERE}",
        ["of other names", "choose another dataset, or start from scratch"],
        other_digits(NAMES),
    ),
    (
        "another size of images",
        f"{VIT} {HERE}",
        ["size 12", "size 8"],
        lambda world: small_colour(world.tmp / "digits2", image_size=12),
    ),
    (
        "colour",
        f"{VIT} {HERE}",
        ["channels 3", "channels 1"],
        lambda world: small_colour(world.tmp / "digits2", channels=3),
    ),
)


def small_colour(folder, image_size=8, channels=1):
    """Noise of ten classes."""
    from support.images import encode, noise, write_dataset

    shape = (image_size, image_size) + (channels,) * (channels == 3)
    split = [[encode(noise(*shape, seed=i)) for i in range(n)] for n in (40, 10)]
    write_dataset(folder, *split, classes=10, image_size=image_size, channels=channels)


@MIXED_UP
def test_text_and_images(both, case):
    refuse(both, train, case)


@SETTINGS
def test_settings(both, case):
    refuse(both, train, case)


@OTHER_CLASSES
def test_other_images(both, case):
    refuse(both, train, case)


def test_the_flags_that_the_tables_begin_with_work(both):
    """Else they would be refused for another reason than the one that a case is about."""
    for argv in (VIT + DIGITS, IMAGES + " --init_from={tmp}/vit --flip=True"):
        outcome = start(both, train, argv)
        assert (outcome.code, outcome.err) == (0, ""), outcome.err
    assert runs.load(both.tmp / "vit" / "last.pt")["step"] == 5


# ----------------------------------------------------------------------------------------------- programs for text

PROGRAMS = {
    "sample.py": (sample, ["--device=cpu"]),
    "sample.py, chat": (sample, ["--chat=True", "--template=chat"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_for_text_refuse_a_vit(program, both):
    module, argv = PROGRAMS[program]
    before = files(both.tmp)
    outcome = call(module.main, f"--out_dir={both.tmp / 'vit'}", *(word.format(tmp=both.tmp) for word in argv))
    assert_refused(outcome, ["best.pt is a model of images", "choose one of text"])
    assert files(both.tmp) == before


# ---------------------------------------------------------------------------------------------- damaged checkpoints


def vit(change):
    """Change all checkpoints of the ViT's run."""

    def spoil(world):
        world.run, own = world.tmp / "vit", world.run
        checkpoint(change)(world)
        world.run = own

    return spoil


def weight(name, change):
    return vit(lambda c: c["model"].update({name: change(c["model"][name])}))


def setting(name, value):
    return vit(put("model_config", name, value))


GO_ON = VIT + DIGITS
DAMAGED = cases(
    ("patches of another size", GO_ON, ["patch.weight"], weight("patch.weight", lambda w: w[:, :3])),
    ("a class more", GO_ON, ["head.weight"], weight("head.weight", lambda w: torch.cat((w, w[:1])))),
    ("no class token", GO_ON, ["cls.weight is absent"], vit(lambda c: c["model"].pop("cls.weight"))),
    ("a position fewer", GO_ON, ["wpe.weight"], weight("wpe.weight", lambda w: w[1:])),
    ("the mean in its settings", GO_ON, ["block_size=17", "16 tokens"], setting("pool", "mean")),
    ("text in its settings", GO_ON, ["patch_size=0"], setting("patch_size", 0)),
    ("no size", GO_ON, ["image_size=0"], setting("image_size", 0)),
    ("many classes", GO_ON, ["n_class=1000000000"], setting("n_class", 10**9)),
    ("a word for patches", GO_ON, ["patch_size='2'", "int"], setting("patch_size", "2")),
    ("nan classes", GO_ON, ["n_class=nan", "int"], setting("n_class", float("nan"))),
    ("no names of classes", GO_ON, ["classes"], vit(lambda c: c["meta"].pop("classes"))),
    ("names that are a number", GO_ON, ["classes"], vit(put("meta", "classes", 10))),
)


@DAMAGED
def test_damaged_checkpoints(both, case):
    refuse(both, train, case)
