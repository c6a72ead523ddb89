"""Batches of images with labels: decoded and augmented by threads, and still a function of the
step."""

import io
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import Image, UnidentifiedImageError

from layers.cores import own_cores
from nanodnt.data.augment import change, fit, mix_images
from nanodnt.data.prepared import PreparedData, mix

# Pillow's modes with more than 8 bits begin so: converting them would cut values off
WIDE = ("I", "F")
PIXELS, MIXING = 0, 1  # what a random number is for: each has a generator of its own


class PreparedImages(PreparedData):
    """A prepared dataset of images, read as float32 (rows, C, S, S) with their labels; S is
    `image_size`.

    In every epoch each image comes once, in another order. What is drawn at random for an image
    (crop, flip, ...) depends on the seed, the step and its index in the whole batch alone: so a
    batch is the same for any number of `workers` (threads; 0 = the cores that this process may
    use), processes, and resumed or not.

    `block_size` is the tokens that the network makes of an image. `config` is a `TrainConfig`,
    which says what happens to training images; None: nothing. ValueError where files do not fit."""

    def __init__(self, *args, image_size: int, config=None, workers: int = 0, **settings):
        super().__init__(*args, **settings)
        self.channels, self.size, self.config = self.meta["channels"], image_size, config
        self.changes, self.mixes = (config.changes, config.mixes) if config else (False, False)
        if config and config.crop_padding >= image_size:
            raise ValueError(
                f"crop_padding={config.crop_padding} must be below image_size={image_size}"
            )
        self.offsets, self.labels = {}, {}
        for split in self.splits:
            self.offsets[split], self.labels[split] = self._read_index(split)
        self.n_train, self.n_val = map(len, self.labels.values())
        mean, std = (np.reshape(self.meta[key], (self.channels, 1, 1)) for key in ("mean", "std"))
        self.scale, self.shift = (
            (1 / (255 * std)).astype(np.float32),
            (mean / std).astype(np.float32),
        )
        # what rotations and shifts bring in
        fill = tuple(round(255 * value) for value in self.meta["mean"])
        self.fill = fill if self.channels == 3 else fill[0]
        self.workers = workers or own_cores()
        self.pool = ThreadPoolExecutor(self.workers, thread_name_prefix="images")

    def describe(self) -> str:
        return f"{self.n_train:,} images an epoch, of {len(self.meta['classes']):,} classes"

    def batch(
        self, step: int, batch_size: int, rows: slice = slice(None), offset: int = 0
    ) -> tuple:
        """Rows `rows` of the batch of `step` (from 0): images float32 (rows, C, S, S), normalised
        by the dataset's mean and standard deviation, and labels int64 (rows,). `offset`: see
        `_draw`.

        With mixup or cutmix an image is mixed with its neighbour in the whole batch, also if
        another process has that. Then there are also other labels int64 (rows,), the neighbours',
        and share float32 (rows,), of the own label."""
        index = np.arange(batch_size, dtype=np.int64)[rows]
        if not self.mixes:
            return self._decode("train", self._draw(step, batch_size, rows, offset), step, index)
        partner = np.where((index ^ 1) < batch_size, index ^ 1, index)
        needed, at = np.unique([index, partner], return_inverse=True)
        own, other = at.reshape(2, -1)
        chosen = self._draw(step, batch_size, offset=offset)[needed]
        images, labels = self._decode("train", chosen, step, needed)
        mixed, share = images[own], np.ones(len(index), np.float32)

        def mix_one(row):
            if own[row] != other[row]:
                rng = self._generator(step, index[row], MIXING)
                share[row] = mix_images(mixed[row], images[other[row]], self.config, rng)

        self._for_each(len(index), mix_one)
        return mixed, labels[own], labels[other], share

    def val_batch(self, chosen: np.ndarray, size: int) -> tuple:
        """Some rows of `validation`, never augmented, with the parts of `batch`. Up to `size` come
        zeros, label -1."""
        images = np.zeros((size, self.channels, self.size, self.size), np.float32)
        labels = np.full(size, -1, np.int64)
        images[: len(chosen)], labels[: len(chosen)] = self._decode("val", chosen)
        return (
            (images, labels, labels, np.ones(size, np.float32)) if self.mixes else (images, labels)
        )

    def _generator(self, step, index, purpose):
        seed = np.random.SeedSequence([mix(self.seed), step, int(index), purpose])
        return np.random.Generator(np.random.PCG64(seed))

    def _decode(self, split, chosen, step=None, index=None):
        """Images float32 (n, C, S, S) and labels int64 (n,) of a split; augmented, by `index`, if
        there is a step."""
        images = np.empty((len(chosen), self.channels, self.size, self.size), np.float32)

        def read(row):
            image = self._image(split, int(chosen[row]))
            if self.changes and step is not None:
                image = change(
                    image,
                    self.size,
                    self.config,
                    self.fill,
                    self._generator(step, index[row], PIXELS),
                )
            else:
                image = fit(image, self.size)
            pixels = (
                np.asarray(image).reshape(self.size, self.size, self.channels).transpose(2, 0, 1)
            )
            np.multiply(pixels, self.scale, out=images[row])
            images[row] -= self.shift  # (pixels / 255 - mean) / std

        self._for_each(len(chosen), read)
        return images, self.labels[split][chosen]

    def _for_each(self, count, work):
        """work(row) for each row, by all threads. An exception in it is raised here."""
        # Several parts a thread, since images take unequal time; not one an image, since handing
        # over takes time too.
        parts = np.array_split(np.arange(count), min(count, 4 * self.workers) or 1)
        list(self.pool.map(lambda part: [work(row) for row in part.tolist()], parts))

    def _image(self, split, number):
        start, end = self.offsets[split][number : number + 2].tolist()
        file = self.files[split]
        # not seek and read: threads share the file
        raw = os.pread(file.fileno(), end - start, start)
        self._check_length(file, raw, end - start)
        try:
            return open_image(raw, self.channels, self.meta["image_size"])
        except ValueError as e:
            raise ValueError(
                f"image {number:,} of {file.name} {e}: prepare {self.name!r} again"
            ) from None

    def _read_index(self, split):
        """Where the images of a split begin in its file, and the last one ends, int64 (n + 1,);
        their labels (n,)."""
        part, classes = self.splits[split], len(self.meta["classes"])
        with (
            self._open(part["offsets"]["file"]) as file,
            self._open(part["labels"]["file"]) as beside,
        ):
            offsets = self._read_values(file, "<u8", 0, part["images"] + 1)
            labels = self._read_values(beside, "<u2", 0, part["images"])
        if (most := labels.max()) >= classes:
            what = f"{beside.name} holds label {most}, and there are {classes:,} classes (from 0)"
            raise ValueError(f"{what}: prepare {self.name!r} again")
        return offsets.astype(np.int64), labels.astype(np.int64)


def open_image(raw: bytes, channels: int, side: int | None):
    """The Pillow image that PNG or JPEG bytes hold, in mode L (1 channel) or RGB (3).

    With a `side` it must have this width, height and mode; without one it is converted to the mode.
    ValueError, to be read after the name of the image, where it cannot be decoded or does not
    fit."""
    mode = "L" if channels == 1 else "RGB"
    try:
        image = Image.open(io.BytesIO(raw), formats=("PNG", "JPEG"))
        # else it is refused below, and not worth decoding
        if side is None or image.size == (side, side):
            image.load()
    except UnidentifiedImageError:
        raise ValueError("is neither PNG nor JPEG") from None
    # Pillow raises many kinds; among them one for an image that is a decompression bomb
    except Exception as e:
        raise ValueError(
            f"cannot be decoded ({type(e).__name__}: {str(e)[:100]})".replace("\n", " ")
        ) from None
    if side is not None and image.size != (side, side):
        raise ValueError(f"has {image.size[0]} × {image.size[1]} pixels instead of {side} × {side}")
    if side is not None and image.mode != mode or image.mode.startswith(WIDE):
        raise ValueError(
            f"is of mode {image.mode} instead of {mode} (channels={channels}, of 8 bits)"
        )
    return image.convert(mode)
