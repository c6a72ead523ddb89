"""Your own images → data/NAME: a folder of PNG and JPEG files, with a folder for each class.

Either FOLDER/train/CLASS/... and FOLDER/val/CLASS/..., which then have the same classes, or
FOLDER/CLASS/...: then about --val_share of the images, chosen by a hash of their names, are held
out for validation, but of no class all. Classes are numbered in the order of their names. Folders
are read recursively, also through links, without hidden files and files that are no PNG or JPEG;
what is left out is named and counted.

The files stay as they are. Images may have several sizes, and are made RGB (--channels=3) or gray
(1) when they are read. With --image_size=N all of them must be N × N, and of that mode.

    python data/local_images/prepare.py --folder=flowers --name=flowers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data import inputs
from nanodnt.prepare import images, script

import numpy as np  # isort: skip, after nanodnt, which says it where numpy is missing

SUFFIXES = (".png", ".jpg", ".jpeg")
# names of folders of splits
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing", "dev")
VAL_SHARE = 0.1


def find_images(folder: Path, notes: inputs.Notes) -> tuple:
    """Names of the classes, and [(name, file, label)] of the images in the folders in `folder`,
    sorted.

    ValueError where there is none, or where one lies in no class."""
    found = {}
    for name, file in inputs.find_files(folder, notes):
        if file.suffix.lower() not in SUFFIXES:
            notes.leave_out("no PNG or JPEG", str(file))
        elif "/" not in name:
            raise ValueError(
                f"{file} lies in no class: put the images into a folder for each class"
            )
        else:
            found.setdefault(name.split("/")[0], []).append((name, file))
    if not found:
        raise ValueError(
            f"{folder} holds no images ({', '.join(SUFFIXES)}) in folders of their classes"
        )
    noted = {name for names in notes.names.values() for name in names}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in found and str(path) not in noted:
            notes.leave_out("without images", str(path))
    classes = sorted(found)
    return classes, [(*image, label) for label, name in enumerate(classes) for image in found[name]]


def find_splits(folder: Path, val_share: float | None, notes: inputs.Notes) -> tuple:
    """Names of the classes, and {split: [(name, file, label)]}."""
    given = [folder / "train", folder / "val"]
    if all(part.is_dir() for part in given):
        if val_share is not None:
            raise ValueError(f"{folder} has train and val, so leave out --val_share")
        for path in sorted(folder.iterdir()):
            if path not in given:
                notes.leave_out("neither train nor val", str(path))
        (classes, train), (val_classes, val) = (find_images(part, notes) for part in given)
        images.check_classes(classes, val_classes)
        return classes, {"train": train, "val": val}
    classes, found = find_images(folder, notes)
    splits = [name for name in classes if name.lower() in SPLITS]
    if len(splits) > 1:
        hint = "call two of them train and val, or name as --folder the one whose folders are the classes"
        raise ValueError(
            f"{folder} has {', '.join(splits)}, which look like splits, not like classes: {hint}"
        )
    if len(found) == 1:
        raise ValueError(f"{folder} holds one image, and both training and validation need one")
    held_out = inputs.hold_out([script.score(name) for name, _, _ in found], val_share or VAL_SHARE)
    labels = np.array([label for _, _, label in found])
    for label in range(len(classes)):
        of_class = np.flatnonzero(labels == label)
        if held_out[of_class].all():  # a class that could not be learned
            held_out[of_class[0]] = False
    parts = {"train": np.flatnonzero(~held_out), "val": np.flatnonzero(held_out)}
    return classes, {split: [found[i] for i in numbers] for split, numbers in parts.items()}


@script.command
def main(argv=None):
    parser = script.parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of folders of images, one for each class"
    )
    parser.add_argument(
        "--val_share", type=float, help=f"of the images, to hold out (default: {VAL_SHARE})"
    )
    parser.add_argument(
        "--image_size", type=int, help="width and height of all images (default: they may differ)"
    )
    parser.add_argument(
        "--channels", type=int, choices=(1, 3), default=3, help="1: gray, 3: colour (the default)"
    )
    parser.add_argument("--licence", default="not stated", help="of the images, for meta.json")
    parser.add_argument(
        "--skip_bad",
        action="store_true",
        help="leave out images that cannot be used, and count them",
    )
    args = parser.parse_args(argv)
    out = inputs.output_folder(args, "folder")
    if args.image_size is not None and args.image_size < 1:
        raise ValueError(f"--image_size={args.image_size} must be 1 or more")
    notes = inputs.Notes(args.skip_bad)
    classes, splits = find_splits(args.folder, args.val_share, notes)
    notes.print()
    about = dict(dataset=args.name, source=args.folder.resolve().name)
    about |= dict(licence=args.licence, image_size=args.image_size)
    encoded = {
        part: ((str(f), f.read_bytes(), label) for _, f, label in files)
        for part, files in splits.items()
    }
    images.build(out, about | dict(channels=args.channels, classes=classes), encoded, notes=notes)
    notes.print()
