"""Your own images → data/NAME: a folder of PNG and JPEG files, with a folder for each class.

The folder holds train/CLASS/... and val/CLASS/..., with the same classes in both, or CLASS/...
alone. In the second case about --val_share of the images, chosen by a hash of their names, are held
out for validation, but never a whole class. Classes are numbered in the order of their names.
Folders are read recursively, also through links. Hidden files, and files that are not PNG or JPEG,
are left out, named and counted.

The files stay as they are. Images may have several sizes, and are made RGB (--channels=3) or gray
(1) when they are read. With --image_size=N all of them must be N × N, and of that mode.

    python data/local_images/prepare.py --folder=flowers --name=flowers
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data import inputs
from nanodnt.prepare import images, script

import numpy as np  # isort: skip, after nanodnt, which says it where numpy is missing

SUFFIXES = (".png", ".jpg", ".jpeg")
# Names of folders that look like splits.
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing", "dev")
VAL_SHARE = 0.1


class Image(NamedTuple):
    """An image of the input."""

    name: str  # its path inside the folder
    path: Path
    label: int


class Images(NamedTuple):
    """The images of a folder of classes, sorted."""

    classes: list[str]
    images: list[Image]


class Splits(NamedTuple):
    """The images to train and to validate on."""

    classes: list[str]
    train: list[Image]
    val: list[Image]


def find_images(folder: Path, notes: inputs.Notes) -> Images:
    """The images in the folders in `folder`. Raises ValueError where there is none, or where one
    lies in no class."""
    by_class = {}
    for name, file in inputs.find_files(folder, notes):
        if file.suffix.lower() not in SUFFIXES:
            notes.leave_out("no PNG or JPEG", str(file))
            continue
        if "/" not in name:
            raise ValueError(
                f"{file} lies in no class: put the images into a folder for each class"
            )
        by_class.setdefault(name.split("/")[0], []).append((name, file))
    if not by_class:
        raise ValueError(
            f"{folder} holds no images ({', '.join(SUFFIXES)}) in folders of their classes"
        )
    noted = {name for names in notes.names.values() for name in names}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in by_class and str(path) not in noted:
            notes.leave_out("without images", str(path))
    classes = sorted(by_class)
    labelled = []
    for label, class_name in enumerate(classes):
        labelled += [Image(name, file, label) for name, file in by_class[class_name]]
    return Images(classes, labelled)


def find_splits(folder: Path, val_share: float | None, notes: inputs.Notes) -> Splits:
    """The images of `folder` by split. Raises ValueError where they are not in folders of classes,
    or too few."""
    given = [folder / "train", folder / "val"]
    if all(part.is_dir() for part in given):
        if val_share is not None:
            raise ValueError(f"{folder} has train and val, so leave out --val_share")
        for path in sorted(folder.iterdir()):
            if path not in given:
                notes.leave_out("neither train nor val", str(path))
        train, val = (find_images(part, notes) for part in given)
        images.check_classes(train.classes, val.classes)
        return Splits(train.classes, train.images, val.images)
    classes, labelled = find_images(folder, notes)
    splits = [name for name in classes if name.lower() in SPLITS]
    if len(splits) > 1:
        raise ValueError(
            f"{folder} has {', '.join(splits)}, which look like splits, not like classes: call two "
            "of them train and val, or name as --folder the one whose folders are the classes"
        )
    if len(labelled) == 1:
        raise ValueError(f"{folder} holds one image, and both training and validation need one")
    held_out = choose_held_out(labelled, val_share or VAL_SHARE)
    train = [image for image, held in zip(labelled, held_out, strict=True) if not held]
    val = [image for image, held in zip(labelled, held_out, strict=True) if held]
    return Splits(classes, train, val)


def choose_held_out(labelled: list[Image], val_share: float) -> np.ndarray:
    """Whether each image is held out, bool (images,): by a hash of its name, but never a whole
    class, which could not be learned."""
    held_out = inputs.hold_out([script.score(image.name) for image in labelled], val_share)
    labels = np.array([image.label for image in labelled])
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        if held_out[of_class].all():
            held_out[of_class[0]] = False
    return held_out


def read_images(labelled: list[Image]) -> Iterator[images.Item]:
    for image in labelled:
        yield images.Item(str(image.path), image.path.read_bytes(), image.label)


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__)
    help = "a folder of folders of images, one for each class"
    parser.add_argument("--folder", type=Path, required=True, help=help)
    help = f"share of the images to hold out (default: {VAL_SHARE})"
    parser.add_argument("--val_share", type=float, help=help)
    help = "width and height of all images (default: they may differ)"
    parser.add_argument("--image_size", type=int, help=help)
    help = "1: gray, 3: colour (the default)"
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help=help)
    help = "licence of the images, for meta.json"
    parser.add_argument("--licence", default="not stated", help=help)
    help = "leave out images that cannot be used, and count them"
    parser.add_argument("--skip_bad", action="store_true", help=help)
    args = parser.parse_args(argv)
    out = inputs.output_folder(args, "folder")
    if args.image_size is not None and args.image_size < 1:
        raise ValueError(f"--image_size={args.image_size} must be 1 or more")
    notes = inputs.Notes(args.skip_bad)
    splits = find_splits(args.folder, args.val_share, notes)
    notes.print()
    about = dict(
        dataset=args.name,
        source=args.folder.resolve().name,
        licence=args.licence,
        image_size=args.image_size,
        channels=args.channels,
        classes=splits.classes,
    )
    items = {"train": read_images(splits.train), "val": read_images(splits.val)}
    images.build(out, about, items, notes=notes)
    notes.print()
