"""From encoded images to a prepared dataset: what the scripts data/*/prepare.py of images share.

Each split is three files: train.bin has the images as they came, PNG or JPEG, one behind the other; train_offsets.bin
says where each begins, and where the last one ends (little-endian uint64); train_labels.bin has their classes
(little-endian uint16). meta.json describes them; nanodnt/data/images.py reads them.
"""

import hashlib
import json
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanodnt import prepare
from nanodnt.data.images import open_image
from nanodnt.data.meta import MAX_CLASSES, sha256

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
    train       the command to print at the end

    Every image is decoded once. ValueError for one that cannot be or does not fit, for a label that no class has, and
    for an empty split; then an earlier dataset in `out_dir` is unchanged.
    """
    out_dir, classes = Path(out_dir), [str(name) for name in classes]
    if not 1 <= len(classes) <= MAX_CLASSES:
        raise ValueError(f"there are {len(classes):,} classes, and 1 to {MAX_CLASSES:,} can be stored")
    with prepare.staging(out_dir, json.dumps([source, len(classes)])) as parts:
        found = {}
        for split, images in splits.items():
            images = _checked(images, len(classes), image_size, channels)
            found[split] = _write_split(parts, split, images, (totals or {}).get(split))
        mean, std = _measure(parts, found["train"]["images"], image_size, channels)
        meta = {"format": 1, "dataset": name or out_dir.resolve().name, "kind": "images", "source": source}
        meta |= {"licence": licence, "image_size": image_size, "channels": channels, "classes": classes}
        meta |= {"mean": mean, "std": std, "splits": found}
        prepare.publish(parts, out_dir, meta)
    _print_summary(meta, out_dir, train)
    return meta


def _checked(images, classes, image_size, channels):
    """Yield (bytes, label) of images in their order, after threads have decoded each."""

    def check(where, raw, label):
        try:
            open_image(raw, channels, image_size)
        except ValueError as e:
            raise ValueError(f"{where} {e}") from None
        if not 0 <= label < classes:
            raise ValueError(f"{where} has label {label}, and there are {classes:,} classes (from 0)")
        return raw, label

    with ThreadPoolExecutor(prepare.cpus()) as pool:
        waiting = deque()
        try:
            for image in images:
                waiting.append(pool.submit(check, *image))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _write_split(parts, split, images, total):
    """Write the three files of a split to `parts`; returns its entry in meta.json."""
    offsets, labels, digest = [0], [], hashlib.sha256()
    bar = prepare.tqdm(total=total, desc=split, unit=" images", disable=None)  # None: shown only on a terminal
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
        prepare.write(file, np.array(values, dtype).tobytes())
        entry[kind] = {"file": file.name, "sha256": sha256(file)}
    return entry


def _measure(parts, n, image_size, channels):
    """Mean and standard deviation of each channel, of values from 0 to 1, over evenly spaced training images."""
    offsets = np.fromfile(parts / "train_offsets.bin", "<u8").tolist()
    count, sums, squares = 0, np.zeros(channels, np.int64), np.zeros(channels, np.int64)
    with open(parts / "train.bin", "rb") as f:
        for i in range(min(n, MEASURED)):
            number = i * n // min(n, MEASURED)
            f.seek(offsets[number])
            image = open_image(f.read(offsets[number + 1] - offsets[number]), channels, image_size)
            pixels = np.asarray(image, np.int64).reshape(-1, channels)
            count += len(pixels)
            sums += pixels.sum(0)
            squares += (pixels**2).sum(0)
    mean = sums / count
    std = np.sqrt(squares / count - mean**2)
    if not (std > 0).all():
        raise ValueError("all training images have one and the same value in a channel: there is nothing to learn")
    return [round(value / 255, 6) for value in mean.tolist()], [round(value / 255, 6) for value in std.tolist()]


def _print_summary(meta, out_dir, train):
    parts = meta["splits"].values()
    counts = ", ".join(f"{split} {part['images']:,} images" for split, part in meta["splits"].items())
    side = "several sizes" if meta["image_size"] is None else f"{meta['image_size']} × {meta['image_size']}"
    color = "gray" if meta["channels"] == 1 else "colour"
    print(f"{meta['dataset']}: {counts}; {side}, {color}, {len(meta['classes']):,} classes; licence: {meta['licence']}")
    files = [out_dir / e["file"] for part in parts for e in (part, part["offsets"], part["labels"])]
    print(f"{sum(f.stat().st_size for f in files):,} bytes in {out_dir}")
    print(f"next: {train or f'python train.py {prepare.dataset_flag(out_dir)}'}")


def encode_png(pixels: np.ndarray) -> bytes:
    """PNG of uint8 pixels (height, width), gray, or (height, width, 3)."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()
