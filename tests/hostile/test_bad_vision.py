"""What the programs say where text and images meet, and to settings of images that are wrong: one line that names the
mistake, and nothing changed."""

import shutil

import pytest

import sample
import train
from support import runs
from support.hostile import RESUME, TRAIN, WEIGHTS, assert_refused, call, cases, refuse, start
from support.images import change_meta
from support.runs import contents
from support.spoil import checkpoint, put
from support.vision import make_digits

pytestmark = pytest.mark.usefixtures("quick")

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

MIXED_UP = cases(  # text and images, and settings that do not fit the dataset
    ("rope", IMAGES + " --pos=rope", ["pos=rope", "patch_size=2 makes this a model of images"]),
    ("doc_mask", IMAGES + " --doc_mask=True", ["reads images", "are for text: leave out --doc_mask=True"]),
    ("label_smoothing, text", "--label_smoothing=0.1 --crop_area=0.5", ["leave out --label_smoothing=0.1 --crop_area"]),
    ("loss_chunks, images", IMAGES + " --loss_chunks=2", ["leave out --loss_chunks=2"]),
    ("a ViT's weights, text", "--init_from={tmp}/vit/best.pt", ["is of text, but the model reads images"]),
    ("a GPT's weights, images", IMAGES + f" {WEIGHTS}", ["is of images, but the model reads text"]),
    ("a GPT resumed on images", f"{RESUME} {IMAGES}", ["is of images, but the model reads text"]),
    ("a ViT resumed on text", VIT, ["is of text, but the model reads images"]),
    ("evaluated on text", "--eval_only=True --init_from={tmp}/vit", ["is of text, but the model reads images"]),
    ("3 does not divide 8", PATCHES + "3", ["image_size=8 must be a multiple of patch_size=3"]),
    ("block_size", BLOCK + "16", ["block_size=16", "17 tokens", "leave it out"]),
)


def noise_images(**size):
    """Noise of ten classes, in digits2/, 8 x 8 and gray where `size` does not say otherwise."""
    from support.images import encode, noise, write_dataset

    size = dict(image_size=8, channels=1) | size
    shape = (size["image_size"],) * 2 + (size["channels"],) * (size["channels"] == 3)
    splits = [[encode(noise(*shape, seed=i)) for i in range(n)] for n in (40, 10)]
    return lambda world: write_dataset(world.tmp / "digits2", *splits, classes=10, **size)


FROM_WEIGHTS = f"--init_from={{tmp}}/vit {SIZE} {HERE}"
SCRATCH = "choose another dataset, or start from scratch"
REVERSED = meta(lambda m: m["classes"].reverse())
OTHER_CLASSES = cases(  # a run goes on, or begins from weights, on other images
    ("class names", f"{VIT} {HERE}", ["classes 10 of other names", "do not fit"], other_digits(NAMES)),
    ("class names in another order", VIT + DIGITS, ["of other names", "do not fit the model"], REVERSED),
    ("class names, from weights", FROM_WEIGHTS, ["of other names", SCRATCH], other_digits(NAMES)),
    ("another size of images", f"{VIT} {HERE}", ["size 12", "size 8"], noise_images(image_size=12)),
    ("colour", f"{VIT} {HERE}", ["channels 3", "channels 1"], noise_images(channels=3)),
)


@MIXED_UP
def test_text_and_images(both, case):
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


PROGRAMS = {"sample.py": (sample, ["--device=cpu"]), "sample.py, chat": (sample, ["--chat=True", "--template=chat"])}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_for_text_refuse_a_vit(program, both):
    module, argv = PROGRAMS[program]
    before = contents(both.tmp)
    outcome = call(module.main, f"--out_dir={both.tmp / 'vit'}", *(word.format(tmp=both.tmp) for word in argv))
    assert_refused(outcome, ["best.pt is a model of images", "choose one of text"])
    assert contents(both.tmp) == before


# ---------------------------------------------------------------------------------------------- damaged checkpoints


def vit(change):
    """Change all checkpoints of the ViT's run."""

    def spoil(world):
        world.run, own = world.tmp / "vit", world.run
        checkpoint(change)(world)
        world.run = own

    return spoil


def setting(name, value):
    return vit(put("model_config", name, value))


GO_ON = VIT + DIGITS
DAMAGED = cases(
    ("no class token", GO_ON, ["cls.weight is absent"], vit(lambda c: c["model"].pop("cls.weight"))),
    ("the mean in its settings", GO_ON, ["block_size=17", "16 tokens"], setting("pool", "mean")),
    ("text in its settings", GO_ON, ["patch_size=0"], setting("patch_size", 0)),
    ("a word for patches", GO_ON, ["patch_size='2'", "int"], setting("patch_size", "2")),
    ("no names of classes", GO_ON, ["classes"], vit(lambda c: c["meta"].pop("classes"))),
)


@DAMAGED
def test_damaged_checkpoints(both, case):
    refuse(both, train, case)
