"""From encoded images to a prepared dataset.

Each split is three files: train.bin has the images as they came, PNG or JPEG, one behind the other;
train_offsets.bin says where each begins, and where the last one ends (little-endian uint64);
train_labels.bin has their classes (little-endian uint16). meta.json describes them;
nanodnt/data/images.py reads them.
"""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from layers.cores import own_cores
from nanodnt.data.inputs import Notes
from nanodnt.data.meta import MAX_CLASSES
from nanodnt.prepare import hub, script

MEASURED = 10_000  # training images, at most, that give mean and standard deviation
AHEAD = 256  # images that may wait for their check: they take memory


def build(out_dir, about: dict, splits: dict, command=None, notes: Notes | None = None) -> dict:
    """Write images, offsets and labels of both splits, and meta.json, to `out_dir`. Returns the
    content of meta.json.

    about       of meta.json, in this order: dataset (its name), source, licence, image_size (width and height of all
                images, whose mode is then L or RGB; None: they have several sizes, and are
                converted when they are read), channels (1 or 3), classes (their names; labels count
                them from 0)
    splits      {"train": images, "val": images}, each an iterable of (where it is from, encoded bytes, label)
    command     to print at the end, with the --dataset; None: train.py with flags that fit
    notes       gets the images that cannot be used; they are an error unless it skips them

    Every image is decoded once. ValueError for one that cannot be or does not fit, for a label that
    no class has, and for an empty split; then an earlier dataset in `out_dir` is unchanged."""
    from nanodnt.data.images import open_image  # needs Pillow

    out_dir, classes, side = (
        Path(out_dir),
        [str(name) for name in about["classes"]],
        about["image_size"],
    )
    if not 2 <= len(classes) <= MAX_CLASSES:
        few = "".join(f" {name!r}" for name in classes[:3])
        raise ValueError(
            f"there are {len(classes):,} classes{few}, and 2 to {MAX_CLASSES:,} are needed"
        )
    read = partial(open_image, channels=about["channels"], side=side)
    with script.staging(out_dir) as parts:
        entries = {}
        for split, images in splits.items():
            entries[split] = _write_split(
                parts, split, images, len(classes), read, notes or Notes()
            )
        mean, std = _measure(parts, entries["train"]["images"], read, about["channels"])
        meta = {"format": 1, "dataset": about["dataset"], "kind": "images"} | about
        meta |= {"classes": classes, "mean": mean, "std": std, "splits": entries}
        words = f"{len(classes):,} classes; licence: {meta['licence']}"
        script.publish(parts, out_dir, meta, "images", words, command or _fitting_command(side))
    return meta


def _fitting_command(side: int | None) -> str:
    """A start with patches that divide the images; config/vdnt/ has more."""
    if side is None:
        return "python train.py --image_size=224 --patch_size=16"
    return f"python train.py --patch_size={math.gcd(side, 4 if side <= 64 else 16)}"


def _write_split(parts, split, images, classes, read, notes):
    """Write the three files of a split to `parts`, after threads have decoded each image; its entry
    in meta.json."""

    def check(where, raw, label):
        try:
            read(raw)
        except ValueError as e:
            return raw, label, ValueError(f"{where} {e}: repair it or leave it out")
        if not 0 <= label < classes:
            return (
                raw,
                label,
                ValueError(
                    f"{where} has label {label}, and there are {classes:,} classes (from 0)"
                ),
            )
        return raw, label, None

    offsets, labels, digest = [0], [], hashlib.sha256()
    bar = tqdm(desc=split, unit=" images", disable=None)  # None: shown only on a terminal
    with bar, ThreadPoolExecutor(own_cores()) as pool, open(parts / f"{split}.bin", "wb") as f:
        for raw, label, error in script.in_order(pool, check, images, AHEAD):
            if error:
                notes.leave_out_bad(error)
                continue
            f.write(raw)
            digest.update(raw)
            offsets.append(offsets[-1] + len(raw))
            labels.append(label)
            bar.update(1)
        f.flush()
        os.fsync(f.fileno())
    if not labels:
        raise ValueError(f"there is no image for {split}.bin")
    entry = {
        "images": len(labels),
        "file": f"{split}.bin",
        "bytes": offsets[-1],
        "sha256": digest.hexdigest(),
    }
    for kind, values, dtype in (("offsets", offsets, "<u8"), ("labels", labels, "<u2")):
        entry[kind] = script.write(parts / f"{split}_{kind}.bin", np.array(values, dtype).tobytes())
    return entry


def _measure(parts, n, read, channels):
    """Mean and standard deviation of each channel, of values from 0 to 1, over evenly spaced
    training images."""
    offsets = np.fromfile(parts / "train_offsets.bin", "<u8").tolist()
    # how often each value occurs: exact, and small for any image
    counts = np.zeros((channels, 256), np.int64)
    with open(parts / "train.bin", "rb") as f:
        for i in range(min(n, MEASURED)):
            number = i * n // min(n, MEASURED)
            f.seek(offsets[number])
            image = read(f.read(offsets[number + 1] - offsets[number]))
            counts += np.reshape(image.histogram(), counts.shape)
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt(np.maximum(shares @ values**2 - mean**2, 0))
    if (std < 1e-6).any():
        raise ValueError(
            "all training images have one and the same value in a channel: there is nothing to learn"
        )
    return [round(value, 6) for value in mean.tolist()], [round(value, 6) for value in std.tolist()]


# ---------------------------------------------------------------------------------------------- the Hugging Face Hub


def build_from_hub(
    args, about: dict, repo: str, patterns: list, columns: tuple, gb: float, hint=""
) -> None:
    """`build` a dataset of the Hugging Face Hub: parquet files with two `columns`, of images and of
    classes.

    `args`: flags of `script.parser`; `about`: dataset, licence, image_size; `patterns`: the files
    to train on, and to hold out; `gb`: to download, and to write; `hint`: of `hub.files`.
    ValueError as in `build` and `hub.files`."""
    import datasets  # noqa: F401  (needed after the download: if it is missing, fail before)

    commit, groups = hub.files(args, repo, patterns, gb, gb, tokenizer=False, hint=hint)
    (classes, train), (val_classes, val) = (hub_images(files, *columns) for files in groups)
    check_classes(classes, val_classes)
    about = (
        dict(dataset=about["dataset"], source=f"{repo} at {commit}")
        | about
        | dict(channels=3, classes=classes)
    )
    build(args.out_dir, about, {"train": train, "val": val})


def hub_images(files: list, image: str, label: str) -> tuple:
    """The names of the classes, and an iterable of (where it is from, encoded bytes, label), of
    parquet files with these columns. ValueError where they do not have them."""
    import datasets

    data = datasets.load_dataset(
        "parquet", data_files=[str(f) for f in files], split="train", streaming=True
    )
    # the bytes as they are
    rows = data.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    name = files[0].name.split("-")[0]
    return data.features[label].names, (
        (f"image {i:,} of {name}", row[image]["bytes"], row[label]) for i, row in enumerate(rows)
    )


def check_classes(train: list, val: list) -> None:
    """ValueError unless both splits have the same classes."""
    if train != val:
        different = sorted(set(train) ^ set(val)) or "their order"
        raise ValueError(f"the classes of train and val differ: {different}")
