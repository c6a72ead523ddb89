"""From encoded images to a prepared dataset.

Each split is three files: train.bin has the images as they came, PNG or JPEG, one behind the other;
train_offsets.bin has the position where each begins, and where the last one ends (little-endian
uint64); train_labels.bin has their classes (little-endian uint16). meta.json describes them;
nanodnt/data/images.py reads them.
"""

import argparse
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from layers.cores import own_cores
from nanodnt.data.inputs import Notes
from nanodnt.data.meta import MAX_CLASSES, Meta
from nanodnt.prepare import hub, script

if TYPE_CHECKING:
    from PIL import Image

MEASURED = 10_000  # training images, at most, for mean and standard deviation
AHEAD = 256  # images that may wait for their check: they take memory


class Item(NamedTuple):
    """An image to write. A plain tuple does too."""

    where: str  # place that it is from, for messages
    raw: bytes  # PNG or JPEG
    label: int


class Checked(NamedTuple):
    """An image after its check."""

    raw: bytes
    label: int
    error: ValueError | None


class HubImages(NamedTuple):
    """A split of a dataset of the Hub."""

    classes: list[str]
    items: Iterator[Item]


def build(
    out_dir: Path,
    about: dict[str, Any],
    splits: dict[str, Iterable[Item]],
    command: str | None = None,
    notes: Notes | None = None,
) -> Meta:
    """Write images, offsets and labels of both splits, and meta.json, to `out_dir`. Returns the
    content of meta.json.

    about       entries of meta.json, in this order: dataset (its name), source, licence, image_size
                (width and height of all images, whose mode is then L or RGB; None: they have
                several sizes, and are converted when they are read), channels (1 or 3), classes
                (their names; labels count them from 0)
    splits      {"train": items, "val": items}
    command     printed at the end, with the --dataset; None: a small model that fits
    notes       gets the images that cannot be used; they are an error unless it skips them

    Every image is decoded once. Raises ValueError for one that cannot be or does not fit, for a
    label without a class, and for an empty split; then an earlier dataset in `out_dir` is
    unchanged."""
    from nanodnt.data.images import open_image  # needs Pillow

    out_dir = Path(out_dir)
    classes = [str(name) for name in about["classes"]]
    if not 2 <= len(classes) <= MAX_CLASSES:
        few = "".join(f" {name!r}" for name in classes[:3])
        raise ValueError(
            f"there are {len(classes):,} classes{few}, and 2 to {MAX_CLASSES:,} are needed"
        )
    side = about["image_size"]
    channels = about["channels"]
    read = partial(open_image, channels=channels, side=side)
    notes = notes or Notes()
    with script.staging(out_dir) as parts:
        entries = {}
        for split, items in splits.items():
            entries[split] = _write_split(parts, split, items, len(classes), read, notes)
        mean, std = _measure(parts, entries["train"]["images"], read, channels)
        meta = {"format": 1, "dataset": about["dataset"], "kind": "images", **about}
        meta |= {"classes": classes, "mean": mean, "std": std, "splits": entries}
        words = f"{len(classes):,} classes; licence: {meta['licence']}"
        command = command or _fitting_command(side, out_dir)
        script.publish(parts, out_dir, meta, "images", words, [command])
    return meta


def _fitting_command(side: int | None, out_dir: Path) -> str:
    """A command for a small model with patches that divide the images; config/vdnt/ has more."""
    small = f"python train.py config/vdnt/digits.py {script.run_folder(out_dir)}"
    if side is None:
        return f"{small} --image_size=224 --patch_size=16"
    largest = 4 if side <= 64 else 16
    return f"{small} --patch_size={math.gcd(side, largest)}"


def _write_split(
    parts: Path,
    split: str,
    items: Iterable[Item],
    n_classes: int,
    read: Callable[[bytes], "Image.Image"],
    notes: Notes,
) -> dict[str, Any]:
    """Write the three files of a split to `parts`, after threads have decoded each image. Returns
    its entry in meta.json."""

    def check(where: str, raw: bytes, label: int) -> Checked:
        error = None
        try:
            read(raw)
        except ValueError as e:
            error = ValueError(f"{where} {e}: repair it or leave it out")
        if error is None and not 0 <= label < n_classes:
            error = ValueError(
                f"{where} has label {label}, and there are {n_classes:,} classes (from 0)"
            )
        return Checked(raw, label, error)

    offsets = [0]
    labels = []
    digest = hashlib.sha256()
    bar = tqdm(desc=split, unit=" images", disable=None)  # None: shown only on a terminal
    with bar, ThreadPoolExecutor(own_cores()) as pool, open(parts / f"{split}.bin", "wb") as f:
        for image in script.in_order(pool, check, items, AHEAD):
            if image.error:
                notes.leave_out_bad(image.error)
                continue
            f.write(image.raw)
            digest.update(image.raw)
            offsets.append(offsets[-1] + len(image.raw))
            labels.append(image.label)
            bar.update(1)
        f.flush()
        os.fsync(f.fileno())
    if not labels:
        raise ValueError(f"there is no image for {split}.bin")
    offset_bytes = np.array(offsets, "<u8").tobytes()
    label_bytes = np.array(labels, "<u2").tobytes()
    return {
        "images": len(labels),
        "file": f"{split}.bin",
        "bytes": offsets[-1],
        "sha256": digest.hexdigest(),
        "offsets": script.write(parts / f"{split}_offsets.bin", offset_bytes),
        "labels": script.write(parts / f"{split}_labels.bin", label_bytes),
    }


def _measure(
    parts: Path, n_images: int, read: Callable[[bytes], "Image.Image"], channels: int
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, of values from 0 to 1, over evenly spaced
    training images."""
    offsets = np.fromfile(parts / "train_offsets.bin", "<u8").tolist()
    n_measured = min(n_images, MEASURED)
    # The number of times that each value occurs: exact, and small for any image.
    counts = np.zeros((channels, 256), np.int64)
    with open(parts / "train.bin", "rb") as f:
        for i in range(n_measured):
            number = i * n_images // n_measured
            f.seek(offsets[number])
            image = read(f.read(offsets[number + 1] - offsets[number]))
            counts += np.reshape(image.histogram(), counts.shape)
    shares = counts / counts.sum(1, keepdims=True)
    values = np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt(np.maximum(shares @ values**2 - mean**2, 0))
    if (std < 1e-6).any():
        raise ValueError(
            "all training images have one and the same value in a channel: there is nothing to "
            "learn"
        )
    return [round(x, 6) for x in mean.tolist()], [round(x, 6) for x in std.tolist()]


# ----------------------------------------------------------------------------- the Hugging Face Hub


def build_from_hub(
    args: argparse.Namespace,
    about: dict[str, Any],
    repo: str,
    patterns: list[str],
    columns: tuple[str, str],
    gb: float,
    hint: str = "",
) -> None:
    """`build` a dataset of the Hugging Face Hub, of parquet files.

    args        flags of `script.parser`
    about       dataset, licence, image_size
    patterns    the files to train on, and those to hold out
    columns     names of the columns of images and of classes
    gb          to download, and to write
    hint        as in `hub.files`

    Raises ValueError as `build` and `hub.files` do."""
    import datasets  # noqa: F401  (needed after the download: if it is missing, fail before)

    commit, groups = hub.files(args, repo, patterns, gb, gb, tokenizer=False, hint=hint)
    train, val = (hub_images(group, *columns) for group in groups)
    check_classes(train.classes, val.classes)
    about = {
        "dataset": about["dataset"],
        "source": f"{repo} at {commit}",
        **about,
        "channels": 3,
        "classes": train.classes,
    }
    build(args.out_dir, about, {"train": train.items, "val": val.items})


def hub_images(files: list[Path], image: str, label: str) -> HubImages:
    """The images of parquet files with these two columns. Raises ValueError where they do not have
    them."""
    import datasets

    paths = [str(file) for file in files]
    data = datasets.load_dataset("parquet", data_files=paths, split="train", streaming=True)
    encoded = datasets.Image(decode=False)  # the bytes as they are
    rows = data.select_columns([image, label]).cast_column(image, encoded)
    name = files[0].name.split("-")[0]
    items = (
        Item(f"image {i:,} of {name}", row[image]["bytes"], row[label])
        for i, row in enumerate(rows)
    )
    return HubImages(data.features[label].names, items)


def check_classes(train: list[str], val: list[str]) -> None:
    """ValueError unless both splits have the same classes."""
    if train != val:
        different = sorted(set(train) ^ set(val)) or "their order"
        raise ValueError(f"the classes of train and val differ: {different}")
