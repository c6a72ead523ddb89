"""Your own images → data/NAME: a folder of PNG and JPEG files, with a folder for each class.

Either FOLDER/train/CLASS/... and FOLDER/val/CLASS/..., which then have the same classes, or FOLDER/CLASS/...: then
about --val_share of the images, chosen by a hash of their names, are held out for validation, but of no class all.
Classes are numbered in the order of their names. Folders are read recursively, without links, hidden files and files
that are no PNG or JPEG.

The files stay as they are. Images may have several sizes, and are made RGB (--channels=3) or gray (1) when they are
read. With --image_size=N all of them must be N × N, and of that mode.

    python data/local_images/prepare.py --folder=flowers --name=flowers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.data import inputs
from nanodnt.data.tokenizer import DATA
from nanodnt.prepare import script
from nanodnt.prepare.images import build, check_classes

SUFFIXES = (".png", ".jpg", ".jpeg")
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing", "dev")  # names of folders of splits
VAL_SHARE = 0.1


def find_images(folder: Path) -> dict:
    """{class: [(name, file)]} of the images in the folders in `folder`, sorted.

    ValueError where there is none, or where one lies in no class."""
    classes, skipped = {}, []
    for name, file in inputs.visible_files(folder):
        if file.suffix.lower() not in SUFFIXES:
            skipped.append(name)
        elif "/" not in name:
            raise ValueError(f"{file} lies in no class: put the images into a folder for each class")
        else:
            classes.setdefault(name.split("/")[0], []).append((name, file))
    if skipped:
        print(f"note: no PNG or JPEG, so left out: {list_some(skipped)}", file=sys.stderr)
    if not classes:
        raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)}) in folders of their classes")
    folders = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    if empty := sorted(folders - classes.keys()):
        print(f"note: without images, or links, so left out: {list_some(empty)}", file=sys.stderr)
    return dict(sorted(classes.items()))


def list_some(names: list) -> str:
    """The first of some names, and how many there are."""
    return ", ".join(names[:5]) + f" and others, {len(names):,} in all" * (len(names) > 5)


def find_splits(folder: Path, val_share: float | None) -> tuple:
    """Names of the classes, and {split: [(file, label)]}."""
    given = [folder / "train", folder / "val"]
    if all(part.is_dir() for part in given):
        if val_share is not None:
            raise ValueError(f"{folder} has train and val, so leave out --val_share")
        if others := sorted(path.name for path in folder.iterdir() if path.is_dir() and path not in given):
            print(f"note: neither train nor val, so left out: {list_some(others)}", file=sys.stderr)
        train, val = map(find_images, given)
        check_classes(list(train), list(val))
        return list(train), {
            split: [(file, label) for label, files in enumerate(found.values()) for _, file in files]
            for split, found in (("train", train), ("val", val))
        }
    found = find_images(folder)
    splits = [name for name in found if name.lower() in SPLITS]
    if len(splits) > 1:
        raise ValueError(
            f"{folder} has {', '.join(splits)}, which look like splits, not like classes: call two of them train and "
            "val, or name as --folder the one whose folders are the classes"
        )
    images = [(name, file, label) for label, files in enumerate(found.values()) for name, file in files]
    if len(images) == 1:
        raise ValueError(f"{folder} holds one image, and both training and validation need one")
    held_out = list(inputs.hold_out([script.score(name) for name, _, _ in images], val_share or VAL_SHARE))
    first = {label: i for i, (_, _, label) in reversed(list(enumerate(images)))}  # image of each class
    kept = {label for (_, _, label), is_val in zip(images, held_out, strict=True) if not is_val}
    for label in first.keys() - kept:  # a class that could not be learned
        held_out[first[label]] = False
    splits = {"train": [], "val": []}
    for (_, file, label), is_val in zip(images, held_out, strict=True):
        splits["val" if is_val else "train"].append((file, label))
    return list(found), splits


def main(argv=None):
    parser = script.parser(__doc__, "NAME")
    parser.add_argument("--folder", type=Path, required=True, help="of folders of images, one for each class")
    parser.add_argument("--name", required=True, help="of the dataset: train with --dataset=NAME")
    parser.add_argument("--val_share", type=float, help=f"of the images, to hold out (default: {VAL_SHARE})")
    parser.add_argument("--image_size", type=int, help="width and height of all images (default: they may differ)")
    parser.add_argument("--channels", type=int, choices=(1, 3), default=3, help="1: gray, 3: colour (the default)")
    parser.add_argument("--licence", default="not stated", help="of the images, for meta.json")
    args = parser.parse_args(argv)
    out = DATA / args.name if args.out_dir == DATA / "NAME" else args.out_dir
    inputs.check_name(args.name, out)
    inputs.check_input("folder", args.folder, out)
    if args.val_share is not None and not 0 < args.val_share < 1:
        raise ValueError(f"--val_share={args.val_share} must be above 0 and below 1")
    if args.image_size is not None and args.image_size < 1:
        raise ValueError(f"--image_size={args.image_size} must be 1 or more")
    classes, splits = find_splits(args.folder, args.val_share)
    build(
        out,
        f"{args.folder.resolve().name} ({sum(map(len, splits.values())):,} images)",
        args.licence,
        classes,
        {split: ((str(file), file.read_bytes(), label) for file, label in files) for split, files in splits.items()},
        image_size=args.image_size,
        channels=args.channels,
        name=args.name,
        totals={split: len(files) for split, files in splits.items()},
    )


if __name__ == "__main__":
    script.run(main)
