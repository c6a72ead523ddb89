"""From encoded images to a prepared dataset.

Each split is three files: train.bin has the images as they came, PNG or JPEG, one behind the other; train_offsets.bin
says where each begins, and where the last one ends (little-endian uint64); train_labels.bin has their classes
(little-endian uint16). meta.json describes them; nanodnt/data/images.py reads them.
"""

import hashlib
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from nanodnt.data.images import open_image
from nanodnt.data.meta import MAX_CLASSES, sha256
from nanodnt.prepare import hub, script

MEASURED = 10_000  # training images, at most, that give mean and standard deviation
AHEAD = 256  # images that may wait for their check: they take memory


def build(
    out_dir,
    source: str,
    licence: str,
    classes: list,
    splits: dict,
    *,
    image_size: int | None,
    channels: int,
    name: str | None = None,
    totals: dict | None = None,
    train: str | None = None,
) -> dict:
    """Write images, offsets and labels of both splits, and meta.json, to `out_dir`. Returns the content of meta.json.

    classes     their names; labels count them from 0
    splits      {"train": images, "val": images}, each an iterable of (where it is from, encoded bytes, label)
    image_size  width and height of all images, whose mode is then L (1 channel) or RGB (3); None: they have several
                sizes, and are converted when they are read
    totals      {split: number of images}, for the progress bar
    train       the command to print at the end, if it is a special one

    Every image is decoded once. ValueError for one that cannot be or does not fit, for a label that no class has, and
    for an empty split; then an earlier dataset in `out_dir` is unchanged.
    """
    out_dir, classes = Path(out_dir), [str(name) for name in classes]
    if not 2 <= len(classes) <= MAX_CLASSES:
        found = ", ".join(map(repr, classes[:3])) + f" and others, {len(classes):,}" * (len(classes) > 3)
        found = f"the classes are {found}" if found else "there are no classes"
        raise ValueError(f"{found}, and 2 to {MAX_CLASSES:,} are needed")
    with script.staging(out_dir, json.dumps([source, len(classes)])) as parts:
        found = {}
        for split, images in splits.items():
            images = _checked(images, len(classes), image_size, channels)
            found[split] = _write_split(parts, split, images, (totals or {}).get(split))
        mean, std = _measure(parts, found["train"]["images"], image_size, channels)
        meta = {"format": 1, "dataset": name or out_dir.resolve().name, "kind": "images", "source": source}
        meta |= {"licence": licence, "image_size": image_size, "channels": channels, "classes": classes}
        meta |= {"mean": mean, "std": std, "splits": found}
        script.publish(parts, out_dir, meta)
    _print_summary(meta, out_dir, train)
    return meta


def _checked(images, classes, image_size, channels):
    """Yield (bytes, label) of images in their order, after threads have decoded each."""

    def check(where, raw, label):
        try:
            open_image(raw, channels, image_size)
        except ValueError as e:
            raise ValueError(f"{where} {e}: repair it or leave it out") from None
        if not 0 <= label < classes:
            raise ValueError(f"{where} has label {label}, and there are {classes:,} classes (from 0)")
        return raw, label

    with ThreadPoolExecutor(script.cpus()) as pool:
        yield from script.in_order(pool, check, images, AHEAD)


def _write_split(parts, split, images, total):
    """Write the three files of a split to `parts`; returns its entry in meta.json."""
    offsets, labels, digest = [0], [], hashlib.sha256()
    bar = tqdm(total=total, desc=split, unit=" images", disable=None)  # None: shown only on a terminal
    with open(parts / f"{split}.bin", "wb") as f:
        for raw, label in images:
            f.write(raw)
            digest.update(raw)
            offsets.append(offsets[-1] + len(raw))
            labels.append(label)
            bar.update(1)
        f.flush()
        os.fsync(f.fileno())
    bar.close()
    if not labels:
        raise ValueError(f"there is no image for {split}.bin")
    entry = {"images": len(labels), "file": f"{split}.bin", "bytes": offsets[-1], "sha256": digest.hexdigest()}
    for kind, values, dtype in (("offsets", offsets, "<u8"), ("labels", labels, "<u2")):
        file = parts / f"{split}_{kind}.bin"
        script.write(file, np.array(values, dtype).tobytes())
        entry[kind] = {"file": file.name, "sha256": sha256(file)}
    return entry


def _measure(parts, n, image_size, channels):
    """Mean and standard deviation of each channel, of values from 0 to 1, over evenly spaced training images."""
    offsets = np.fromfile(parts / "train_offsets.bin", "<u8").tolist()
    counts = np.zeros((channels, 256), np.int64)  # how often each value occurs: exact, and small for any image
    with open(parts / "train.bin", "rb") as f:
        for i in range(min(n, MEASURED)):
            number = i * n // min(n, MEASURED)
            f.seek(offsets[number])
            image = open_image(f.read(offsets[number + 1] - offsets[number]), channels, image_size)
            counts += np.reshape(image.histogram(), counts.shape)
    shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ values
    std = np.sqrt(np.maximum(shares @ values**2 - mean**2, 0))
    if (std < 1e-6).any():
        raise ValueError("all training images have one and the same value in a channel: there is nothing to learn")
    return [round(value, 6) for value in mean.tolist()], [round(value, 6) for value in std.tolist()]


def _print_summary(meta, out_dir, train):
    parts = meta["splits"].values()
    counts = ", ".join(f"{split} {part['images']:,} images" for split, part in meta["splits"].items())
    side = "several sizes" if meta["image_size"] is None else f"{meta['image_size']} × {meta['image_size']}"
    color = "gray" if meta["channels"] == 1 else "colour"
    print(f"{meta['dataset']}: {counts}; {side}, {color}, {len(meta['classes']):,} classes; licence: {meta['licence']}")
    files = [out_dir / e["file"] for part in parts for e in (part, part["offsets"], part["labels"])]
    print(f"{sum(f.stat().st_size for f in files):,} bytes in {out_dir}")
    flags = f"{script.dataset_flag(out_dir)} {fitting_flags(meta['image_size'])}"
    print(f"next: {train or f'python train.py {flags}'}")


def fitting_flags(side: int | None) -> str:
    """Flags of train.py for images of `side` pixels, or of several sizes; the configs in config/vdnt/ say more."""
    if side is None:
        return "--image_size=224 --patch_size=16"
    return f"--patch_size={next(patch for patch in range(min(16, max(1, side // 7)), 0, -1) if side % patch == 0)}"


def encode_png(pixels: np.ndarray) -> bytes:
    """PNG of uint8 pixels (height, width), gray, or (height, width, 3)."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


# ---------------------------------------------------------------------------------------------- the Hugging Face Hub


class HubImages(NamedTuple):
    """A dataset of images on the Hugging Face Hub, as parquet files with a column of images and one of classes."""

    name: str  # of the prepared dataset
    repo: str
    revision: str  # commit
    patterns: list  # of the files to train on, and of those held out
    columns: tuple  # of images and of labels
    image_size: int | None
    licence: str
    gb: float  # to download, and to write
    hint: str = "check the network and --revision"


def build_from_hub(source: HubImages, doc: str, argv: list | None) -> None:
    """A prepare script: `doc` is its --help. ValueError as in `build` and in `hub.hub_files`."""
    args = script.parser(doc, source.name, source.revision, workers=False).parse_args(argv)
    import datasets  # noqa: F401  (needed after the download: if it is missing, fail before)

    place = (source.repo, args.revision, source.patterns, args.out_dir, source.gb, source.gb)
    commit, groups = hub.hub_files(*place, tokenizer=None, hint=source.hint)
    files = dict(zip(("train", "val"), groups, strict=True))
    classes, images = {}, {}
    for split in files:
        classes[split], images[split] = hub_images(files[split], *source.columns)
    check_classes(classes["train"], classes["val"])
    build(
        args.out_dir,
        f"{source.repo} at {commit}",
        source.licence,
        classes["train"],
        images,
        image_size=source.image_size,
        channels=3,
        name=source.name,
        totals={split: sum(map(hub.parquet_rows, files[split])) for split in files},
    )


def hub_images(files: list, image: str, label: str) -> tuple:
    """The names of the classes, and an iterable of (where it is from, encoded bytes, label), of parquet files with
    these columns. ValueError where they do not have them."""
    import datasets

    data = datasets.load_dataset("parquet", data_files=[str(f) for f in files], split="train", streaming=True)
    kinds = {name: type(feature).__name__ for name, feature in (data.features or {}).items()}
    if (kinds.get(image), kinds.get(label)) != ("Image", "ClassLabel"):
        raise ValueError(
            f"{files[0].name} needs a column {image!r} of images and a column {label!r} of classes, and has {kinds}: "
            "check --revision"
        )
    rows = data.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))  # the bytes as they are
    name = files[0].name.split("-")[0]
    return data.features[label].names, (
        (f"image {i:,} of {name}", (row[image] or {}).get("bytes") or b"", -1 if row[label] is None else row[label])
        for i, row in enumerate(rows)
    )


def check_classes(train: list, val: list) -> None:
    """ValueError unless both splits have the same classes."""
    different = sorted(set(train) ^ set(val))
    if different or train != val:
        names = ", ".join(map(repr, different[:5])) or "their order"
        raise ValueError(f"the classes of train and val differ: {names}")
