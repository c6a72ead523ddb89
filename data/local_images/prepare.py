"""Your own images → data/NAME: a folder of PNG and JPEG files, with a folder for each class.

Either FOLDER/train/CLASS/... and FOLDER/val/CLASS/..., which then have the same classes, or FOLDER/CLASS/...: then
about --val_share of the images, chosen by a hash of their names, are held out for validation. Classes are numbered in
the order of their names. Folders are read recursively, without hidden files and files that are no PNG or JPEG.

The files stay as they are. Images may have several sizes, and are made RGB (--channels=3) or gray (1) when they are
read. With --image_size=N all of them must be N × N, and of that mode.

    python data/local_images/prepare.py --folder=flowers --name=flowers
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt import inputs, prepare, prepare_images
from nanodnt.tokenizer import DATA

SUFFIXES = (".png", ".jpg", ".jpeg")
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
        print(f"skipped {len(skipped)} files that are no PNG or JPEG: {', '.join(skipped[:5])} ...", file=sys.stderr)
    if not classes:
        raise ValueError(f"{folder} holds no images ({', '.join(SUFFIXES)}) in folders of their classes")
    return dict(sorted(classes.items()))


def find_splits(folder: Path, val_share: float | None) -> tuple:
    """Names of the classes, and {split: [(file, label)]}."""
    given = [folder / "train", folder / "val"]
    if all(part.is_dir() for part in given):
        if val_share is not None:
            raise ValueError(f"{folder} has train and val, so leave out --val_share")
        train, val = map(find_images, given)
        prepare_images.check_classes(list(train), list(val))
        return list(train), {
            split: [(file, label) for label, files in enumerate(found.values()) for _, file in files]
            for split, found in (("train", train), ("val", val))
        }
    found = find_images(folder)
    images = [(name, file, label) for label, files in enumerate(found.values()) for name, file in files]
    if len(images) == 1:
        raise ValueError(f"{folder} holds one image, and both training and validation need one")
    held_out = inputs.hold_out([prepare.score(name) for name, _, _ in images], val_share or VAL_SHARE)
    splits = {"train": [], "val": []}
    for (_, file, label), is_val in zip(images, held_out, strict=True):
        splits["val" if is_val else "train"].append((file, label))
    return list(found), splits


def main(argv=None):
    parser = prepare.parser(__doc__, "NAME")
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
    prepare_images.build(
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
    prepare.run(main)
