"""RandAugment (Cubuk et al. 2019): two random operations on a Pillow image, of mode L or RGB.

Operations, ranges, noise and the chance of each to be left out are those of timm's `rand-m9-mstd0.5-inc1`, whose
strength grows with the magnitude ("inc"): our choice. The DNT paper has (9, 0.5) in Table 4, and augments like Xie et
al. 2024 (sec. 4). Rotations, shears and shifts are bicubic, where timm also draws between that and bilinear; and
posterize leaves one bit at least, where timm takes that too at magnitude 10.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

COUNT = 2  # operations an image
CHANCE = 0.5  # that one that was drawn is done
LARGEST = 10  # magnitude
CUBIC = Image.Resampling.BICUBIC


def _plain(change):
    return lambda image, level, sign, fill: change(image)


def _enhance(kind):
    return lambda image, level, sign, fill: kind(image).enhance(max(0.1, 1 + sign * 0.9 * level))


def _affine(matrix):
    """`matrix(v, width, height)` says where the pixel (x, y) comes from: a·x + b·y + c, d·x + e·y + f. v: -1 to 1."""

    def operation(image, level, sign, fill):
        values = matrix(sign * level, *image.size)
        return image.transform(image.size, Image.Transform.AFFINE, values, CUBIC, fillcolor=fill)

    return operation


OPERATIONS = {  # name: f(image, level from 0 to 1, sign of -1 or 1, colour that comes in from outside)
    "auto_contrast": _plain(ImageOps.autocontrast),
    "equalize": _plain(ImageOps.equalize),
    "invert": _plain(ImageOps.invert),
    "posterize": lambda image, level, *_: ImageOps.posterize(image, max(1, 4 - int(4 * level))),
    "solarize": lambda image, level, *_: ImageOps.solarize(image, 256 - int(256 * level)),
    "solarize_add": lambda image, level, *_: image.point(
        [i + int(110 * level) if i < 128 else i for i in range(256)] * len(image.getbands())
    ),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "rotate": lambda image, level, sign, fill: image.rotate(sign * 30 * level, CUBIC, fillcolor=fill),
    "shear_x": _affine(lambda v, width, height: (1, 0.3 * v, 0, 0, 1, 0)),
    "shear_y": _affine(lambda v, width, height: (1, 0, 0, 0.3 * v, 1, 0)),
    "shift_x": _affine(lambda v, width, height: (1, 0, 0.45 * v * width, 0, 1, 0)),
    "shift_y": _affine(lambda v, width, height: (1, 0, 0, 0, 1, 0.45 * v * height)),
}
NAMES = tuple(OPERATIONS)


def rand_augment(image, magnitude: float, std: float, fill, rng: np.random.Generator):
    """`image` after two operations, drawn with replacement, each with a magnitude from N(magnitude, std), 0 to 10."""
    for _ in range(COUNT):
        name, left_out = NAMES[rng.integers(len(NAMES))], rng.random() >= CHANCE
        level, sign = rng.normal(magnitude, std) / LARGEST, 2 * int(rng.integers(2)) - 1
        image = image if left_out else OPERATIONS[name](image, min(1, max(0, level)), sign, fill)
    return image
