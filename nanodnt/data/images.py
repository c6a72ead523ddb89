"""Batches of images with labels: decoded and augmented by threads, and still a function of the
step."""

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from layers.cores import own_cores
from nanodnt.data.augment import change, fit, mix_images
from nanodnt.data.prepared import ALL, Batch, PreparedData, mix
from nanodnt.tables import count

if TYPE_CHECKING:  # this import needs torch; preparing images does not
    from nanodnt.settings import TrainConfig

# Pillow's modes with more than 8 bits begin so: converting them would cut values off.
WIDE = ("I", "F")
# Purposes of random numbers: each has a generator of its own.
PIXELS = 0
MIXING = 1


class PreparedImages(PreparedData):
    """A prepared dataset of images, read as float32 (rows, C, S, S) with their labels; S is
    `image_size`.

    In every epoch each image comes once, in another order. The random numbers of an image (crop,
    flip, ...) depend only on the seed, the step and its index in the whole batch. So a batch is the
    same for any number of threads and processes, resumed or not."""

    def __init__(
        self,
        *args: Any,
        image_size: int,
        config: "TrainConfig | None" = None,
        workers: int = 0,
        **settings: Any,
    ):
        """`block_size` is the number of tokens that the network makes of an image. `config` has the
        augmentation of training images; None: none. `workers`: threads; 0 = the cores that this
        process may use. Raises ValueError where files do not fit."""
        super().__init__(*args, **settings)
        self.channels = self.meta["channels"]
        self.size = image_size
        self.config = config
        self.augments = config is not None and config.augments_images
        self.mixes = config is not None and config.mixes_images
        if config and config.crop_padding >= image_size:
            raise ValueError(
                f"crop_padding={config.crop_padding} must be below image_size={image_size}"
            )
        self.offsets = {split: self._read_offsets(split) for split in self.splits}
        self.labels = {split: self._read_labels(split) for split in self.splits}
        self.n_train = len(self.labels["train"])
        self.n_val = len(self.labels["val"])
        # Normalised pixels are pixels · scale - shift = (pixels / 255 - mean) / std.
        mean = np.reshape(self.meta["mean"], (self.channels, 1, 1))
        std = np.reshape(self.meta["std"], (self.channels, 1, 1))
        self.scale = (1 / (255 * std)).astype(np.float32)
        self.shift = (mean / std).astype(np.float32)
        # The colour that rotations, shears and shifts bring in from outside.
        fill = tuple(round(255 * value) for value in self.meta["mean"])
        self.fill = fill if self.channels == 3 else fill[0]
        self.workers = workers or own_cores()
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="images")

    def describe(self) -> str:
        images = count(self.n_train, "image")
        return f"{images} an epoch, of {count(len(self.meta['classes']), 'class')}"

    def batch(self, step: int, batch_size: int, rows: slice = ALL, offset: int = 0) -> Batch:
        """Rows `rows` of the batch of `step` (from 0): images float32 (rows, C, S, S), normalised
        by the dataset's mean and standard deviation, and labels int64 (rows,). `offset`: see
        `_draw`.

        With mixup or cutmix an image is mixed with its neighbour in the whole batch, even where
        another process has that. Then there are also the neighbours' labels int64 (rows,), and the
        share of the own label, float32 (rows,)."""
        index = np.arange(batch_size, dtype=np.int64)[rows]
        if not self.mixes:
            return self._decode("train", self._draw(step, batch_size, rows, offset), step, index)
        partner = np.where((index ^ 1) < batch_size, index ^ 1, index)
        needed, at = np.unique([index, partner], return_inverse=True)
        own, other = at.reshape(2, -1)
        chosen = self._draw(step, batch_size, offset=offset)[needed]
        images, labels = self._decode("train", chosen, step, needed)
        mixed = images[own]
        share = np.ones(len(index), np.float32)

        def mix_one(row: int) -> None:
            if own[row] != other[row]:
                rng = self._generator(step, index[row], MIXING)
                share[row] = mix_images(mixed[row], images[other[row]], self.config, rng)

        self._for_each(len(index), mix_one)
        return mixed, labels[own], labels[other], share

    def val_batch(self, chosen: np.ndarray, size: int) -> Batch:
        """A batch of `size` rows: the images of `chosen`, a part of `validation`, never augmented,
        then zeros with label -1. It has the parts of `batch`."""
        images = np.zeros((size, self.channels, self.size, self.size), np.float32)
        labels = np.full(size, -1, np.int64)
        n = len(chosen)
        images[:n], labels[:n] = self._decode("val", chosen)
        if not self.mixes:
            return images, labels
        return images, labels, labels, np.ones(size, np.float32)

    def _generator(self, step: int, index: int, purpose: int) -> np.random.Generator:
        seed = np.random.SeedSequence([mix(self.seed), step, int(index), purpose])
        return np.random.Generator(np.random.PCG64(seed))

    def _decode(
        self,
        split: str,
        chosen: np.ndarray,
        step: int | None = None,
        index: np.ndarray | None = None,
    ) -> Batch:
        """Images float32 (n, C, S, S) and labels int64 (n,) of a split. With a step they are
        augmented, by their `index` in the batch."""
        images = np.empty((len(chosen), self.channels, self.size, self.size), np.float32)

        def read(row: int) -> None:
            image = self._image(split, int(chosen[row]))
            if self.augments and step is not None:
                rng = self._generator(step, index[row], PIXELS)
                image = change(image, self.size, self.config, self.fill, rng)
            else:
                image = fit(image, self.size)
            pixels = np.asarray(image).reshape(self.size, self.size, self.channels)
            np.multiply(pixels.transpose(2, 0, 1), self.scale, out=images[row])
            images[row] -= self.shift

        self._for_each(len(chosen), read)
        return images, self.labels[split][chosen]

    def _for_each(self, count: int, work: Callable[[int], None]) -> None:
        """Call work(row) for each row, in all threads. An exception in it is raised here."""
        # Several parts a thread, since images take unequal time; not one an image, since handing
        # over takes time too.
        n_parts = min(count, 4 * self.workers) or 1
        parts = np.array_split(np.arange(count), n_parts)
        list(self.pool.map(lambda part: [work(row) for row in part.tolist()], parts))

    def _image(self, split: str, number: int) -> Image.Image:
        start, end = self.offsets[split][number : number + 2].tolist()
        file = self.files[split]
        raw = os.pread(file.fileno(), end - start, start)  # not seek and read: threads share it
        self._check_length(file, raw, end - start)
        try:
            return open_image(raw, self.channels, self.meta["image_size"])
        except ValueError as e:
            where = f"image {number:,} of {file.name}"
            raise ValueError(f"{where} {e}: prepare {self.name!r} again") from None

    def _read_offsets(self, split: str) -> np.ndarray:
        """The positions in a split's file where its images begin, and where the last one ends,
        int64 (n + 1,)."""
        entry = self.splits[split]
        with self._open(entry["offsets"]["file"]) as file:
            return self._read_values(file, "<u8", 0, entry["images"] + 1).astype(np.int64)

    def _read_labels(self, split: str) -> np.ndarray:
        """The labels of a split, int64 (n,)."""
        entry = self.splits[split]
        n_classes = len(self.meta["classes"])
        with self._open(entry["labels"]["file"]) as file:
            labels = self._read_values(file, "<u2", 0, entry["images"])
        if labels.max() >= n_classes:
            raise ValueError(
                f"{file.name} holds label {labels.max()}, and there are {n_classes:,} classes "
                f"(from 0): prepare {self.name!r} again"
            )
        return labels.astype(np.int64)


def open_image(raw: bytes, channels: int, side: int | None) -> Image.Image:
    """The image in PNG or JPEG bytes, in mode L (1 channel) or RGB (3).

    With a `side` it must have this width, height and mode; without one it is converted to the mode.
    Raises ValueError, to be read after the name of the image, where it cannot be decoded or does
    not fit."""
    mode = "L" if channels == 1 else "RGB"
    try:
        image = Image.open(io.BytesIO(raw), formats=("PNG", "JPEG"))
        fits = side is None or image.size == (side, side)
        if fits:
            image.load()
    except UnidentifiedImageError:
        raise ValueError("is neither PNG nor JPEG") from None
    # Pillow raises many kinds; among them one for an image that is a decompression bomb.
    except Exception as e:
        problem = f"{type(e).__name__}: {str(e)[:100]}".replace("\n", " ")
        raise ValueError(f"cannot be decoded ({problem})") from None
    if not fits:
        width, height = image.size
        raise ValueError(f"has {width} × {height} pixels instead of {side} × {side}")
    if side is not None and image.mode != mode or image.mode.startswith(WIDE):
        raise ValueError(
            f"is of mode {image.mode} instead of {mode} (channels={channels}, of 8 bits)"
        )
    return image.convert(mode)
