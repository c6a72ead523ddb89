"""RandAugment (Cubuk et al. 2019): two random operations on a Pillow image, of mode L or RGB.

Operations, ranges, noise and the chance of each to be left out are those of timm's `rand-m9-mstd0.5-inc1`, whose
strength grows with the magnitude ("inc"). [I] The DNT paper writes "RandAug (9, 0.5)" and no more. Rotations, shears
and shifts are bicubic, where timm also draws between that and bilinear.
"""

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

COUNT = 2  # operations an image
CHANCE = 0.5  # that one that was drawn is done
LARGEST = 10  # magnitude
CUBIC = Image.Resampling.BICUBIC


def _affine(image, matrix, fill):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, CUBIC, fillcolor=fill)


def _enhance(kind):
    return lambda image, level, sign, fill: kind(image).enhance(max(0.1, 1 + sign * 0.9 * level))


def _brighten_dark(image, amount):
    return image.point([i + amount if i < 128 else i for i in range(256)] * len(image.getbands()))


OPERATIONS = {  # name: f(image, level from 0 to 1, sign of -1 or 1, colour that comes in from outside)
    "auto_contrast": lambda image, level, sign, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, level, sign, fill: ImageOps.equalize(image),
    "invert": lambda image, level, sign, fill: ImageOps.invert(image),
    "posterize": lambda image, level, sign, fill: ImageOps.posterize(image, 4 - int(4 * level)),  # to so many bits
    "solarize": lambda image, level, sign, fill: ImageOps.solarize(image, 256 - int(256 * level)),
    "solarize_add": lambda image, level, sign, fill: _brighten_dark(image, int(110 * level)),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "rotate": lambda image, level, sign, fill: image.rotate(sign * 30 * level, CUBIC, fillcolor=fill),  # degrees
    "shear_x": lambda image, level, sign, fill: _affine(image, (1, sign * 0.3 * level, 0, 0, 1, 0), fill),
    "shear_y": lambda image, level, sign, fill: _affine(image, (1, 0, 0, sign * 0.3 * level, 1, 0), fill),
    "shift_x": lambda image, level, sign, fill: _affine(
        image, (1, 0, sign * 0.45 * level * image.width, 0, 1, 0), fill
    ),
    "shift_y": lambda image, level, sign, fill: _affine(
        image, (1, 0, 0, 0, 1, sign * 0.45 * level * image.height), fill
    ),
}
NAMES = tuple(OPERATIONS)


def rand_augment(image, magnitude: float, std: float, fill, rng: np.random.Generator):
    """`image` after two operations, drawn with replacement, each with a magnitude from N(magnitude, std), 0 to 10."""
    for _ in range(COUNT):
        name, left_out = NAMES[rng.integers(len(NAMES))], rng.random() >= CHANCE
        level, sign = np.clip(rng.normal(magnitude, std), 0, LARGEST) / LARGEST, rng.choice((-1, 1))
        image = image if left_out else OPERATIONS[name](image, float(level), int(sign), fill)
    return image
