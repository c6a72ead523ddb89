"""Datasets of images, written by the contract of meta.json and not by nanodnt.prepare."""

import io
import json
import struct
import zlib

import numpy as np
from PIL import Image

from nanodnt.data import sha256


def encode(pixels, kind="PNG") -> bytes:
    """PNG or JPEG of uint8 pixels."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, format=kind)
    return file.getvalue()


def noise(*shape, seed=0):
    """Random uint8 pixels of this shape."""
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def bomb() -> bytes:
    """A PNG whose header promises 20,000 × 20,000 pixels."""
    body = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    chunks = (b"IHDR", body), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")
    parts = (
        struct.pack(">I", len(b)) + name + b + struct.pack(">I", zlib.crc32(name + b))
        for name, b in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def write_split(folder, split, images, labels) -> dict:
    """Write the files of a split; `images` are encoded. Returns its entry in meta.json."""
    (folder / f"{split}.bin").write_bytes(b"".join(images))
    offsets = np.cumsum([0, *map(len, images)])
    entry = {"images": len(images), "file": f"{split}.bin", "bytes": int(offsets[-1])}
    entry["sha256"] = sha256(folder / f"{split}.bin")
    for kind, values, dtype in (("offsets", offsets, "<u8"), ("labels", labels, "<u2")):
        np.asarray(values).astype(dtype).tofile(folder / f"{split}_{kind}.bin")
        entry[kind] = {
            "file": f"{split}_{kind}.bin",
            "sha256": sha256(folder / f"{split}_{kind}.bin"),
        }
    return entry


def write_dataset(folder, train, val, classes=4, image_size=8, channels=1, **changes) -> str:
    """A dataset of encoded images, whose labels are 0, 1, ... again and again; returns the folder
    as a name."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "format": 1,
        "dataset": folder.name,
        "kind": "images",
        "source": "test",
        "licence": "none",
    }
    meta |= {
        "image_size": image_size,
        "channels": channels,
        "classes": [f"class {i}" for i in range(classes)],
    }
    meta |= {"mean": [0.25, 0.5, 0.75][:channels], "std": [0.5, 0.25, 0.125][:channels]}
    meta["splits"] = {
        split: write_split(folder, split, images, np.arange(len(images)) % classes)
        for split, images in (("train", train), ("val", val))
    }
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return str(folder)


def change_meta(folder, change) -> None:
    """Rewrite meta.json after change(meta)."""
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
