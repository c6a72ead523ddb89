"""Random changes of training images: crops, flips, RandAugment; and mixup and cutmix of two of
them.

`config` is a `TrainConfig`. All is done by Pillow, in functions of numbers that we draw: each image
has a generator of its own. (Libraries like kornia draw for a whole batch from torch's global one.)
"""

import math

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

CUBIC = Image.Resampling.BICUBIC
ASPECT = math.log(4 / 3)  # parts of an image have widths of 3/4 to 4/3 of their heights
TRIES = 10  # to place a part that fits into the image, then its middle is taken
# of the shorter side is what validation sees of an image of another size, as in timm
CENTRE = 0.875


def change(image, side: int, config, fill, rng: np.random.Generator):
    """A Pillow image of side × side pixels, changed as `config` says. Rotations bring in the colour
    `fill`."""
    image = crop(image, side, config.crop_area, rng) if config.crop_area < 1 else fit(image, side)
    if config.crop_padding:
        x, y = rng.integers(-config.crop_padding, config.crop_padding + 1, 2).tolist()
        image = image.crop((x, y, x + side, y + side))  # what lies outside is black
    if config.flip and rng.random() < 0.5:
        image = image.transpose(0)  # left to right
    if config.rand_augment:
        image = rand_augment(image, config.rand_augment, config.rand_augment_std, fill, rng)
    return image


def mix_images(image: np.ndarray, other: np.ndarray, config, rng: np.random.Generator) -> float:
    """Mix `other` into `image`, both (C, S, S), in place; the share of `image` in the result.

    Mixup (Zhang et al. 2018) weights both by λ ~ Beta(α, α); cutmix (Yun et al. 2019) puts a box
    with 1 - λ of the area, which the border may cut, from one into the other. Where both are on,
    each has every second image."""
    cuts = config.cutmix > 0 and (config.mixup == 0 or rng.random() < 0.5)
    alpha = config.cutmix if cuts else config.mixup
    share = float(rng.beta(alpha, alpha))
    if not cuts:
        image *= share
        image += (1 - share) * other
        return share
    side = image.shape[-1]
    box, centre = int(side * math.sqrt(1 - share)), rng.integers(0, side, 2)
    (y, x), (y_end, x_end) = (
        np.clip(centre - box // 2, 0, side),
        np.clip(centre + box // 2, 0, side),
    )
    image[:, y:y_end, x:x_end] = other[:, y:y_end, x:x_end]
    return 1 - float((y_end - y) * (x_end - x)) / side**2


def crop(image, side: int, least: float, rng: np.random.Generator):
    """A random part of a Pillow image, of `least` to 1 of its area, resized to side × side (Szegedy
    et al. 2015)."""
    width, height = image.size
    for _ in range(TRIES):
        area, aspect = (
            width * height * rng.uniform(least, 1),
            math.exp(rng.uniform(-ASPECT, ASPECT)),
        )
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            break
    else:  # the largest part of an allowed aspect, in the middle
        w, h = min(width, height * math.exp(ASPECT)), min(height, width * math.exp(ASPECT))
        x, y = (width - w) / 2, (height - h) / 2
    return image.resize((side, side), CUBIC, (x, y, x + w, y + h))


def fit(image, side: int):
    """A Pillow image as it is if it has side × side pixels, else 0.875 of its shorter side, in the
    middle, resized."""
    width, height = image.size
    if (width, height) == (side, side):
        return image
    part = CENTRE * min(width, height)
    x, y = (width - part) / 2, (height - part) / 2
    return image.resize((side, side), CUBIC, (x, y, x + part, y + part))


# ------------------------------------------------------------------------------------------------------- RandAugment

COUNT = 2  # operations an image
CHANCE = 0.5  # that one that was drawn is done
LARGEST = 10  # magnitude


def _enhance(kind):
    return lambda image, level, sign, fill: kind(image).enhance(max(0.1, 1 + sign * 0.9 * level))


def _affine(matrix):
    """`matrix(v, width, height)` says where the pixel (x, y) comes from: a·x + b·y + c, d·x + e·y +
    f. v: -1 to 1."""
    return lambda image, level, sign, fill: image.transform(
        image.size, Image.Transform.AFFINE, matrix(sign * level, *image.size), CUBIC, fillcolor=fill
    )


# name: f(image, level from 0 to 1, sign of -1 or 1, colour that comes in from outside)
OPERATIONS = {
    "auto_contrast": lambda image, *_: ImageOps.autocontrast(image),
    "equalize": lambda image, *_: ImageOps.equalize(image),
    "invert": lambda image, *_: ImageOps.invert(image),
    "posterize": lambda image, level, *_: ImageOps.posterize(image, max(1, 4 - int(4 * level))),
    "solarize": lambda image, level, *_: ImageOps.solarize(image, 256 - int(256 * level)),
    "solarize_add": lambda image, level, *_: image.point(
        [i + int(110 * level) if i < 128 else i for i in range(256)] * len(image.getbands())
    ),
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "rotate": lambda image, level, sign, fill: image.rotate(
        sign * 30 * level, CUBIC, fillcolor=fill
    ),
    "shear_x": _affine(lambda v, width, height: (1, 0.3 * v, 0, 0, 1, 0)),
    "shear_y": _affine(lambda v, width, height: (1, 0, 0, 0.3 * v, 1, 0)),
    "shift_x": _affine(lambda v, width, height: (1, 0, 0.45 * v * width, 0, 1, 0)),
    "shift_y": _affine(lambda v, width, height: (1, 0, 0, 0, 1, 0.45 * v * height)),
}
NAMES = tuple(OPERATIONS)


def rand_augment(image, magnitude: float, std: float, fill, rng: np.random.Generator):
    """`image` after two operations, drawn with replacement, each with a magnitude from N(magnitude,
    std), 0 to 10 (Cubuk et al. 2019).

    Operations, ranges, noise and the chance of each to be left out are those of timm's
    `rand-m9-mstd0.5-inc1`, whose strength grows with the magnitude ("inc"): our choice. The DNT
    paper has (9, 0.5) in Table 4, and augments like Xie et al. 2024 (sec. 4). Rotations, shears and
    shifts are bicubic, where timm also draws between that and bilinear; and posterize leaves one
    bit at least, where timm takes that too at magnitude 10."""
    for _ in range(COUNT):
        name, left_out = NAMES[rng.integers(len(NAMES))], rng.random() >= CHANCE
        level, sign = rng.normal(magnitude, std) / LARGEST, 2 * int(rng.integers(2)) - 1
        image = image if left_out else OPERATIONS[name](image, min(1, max(0, level)), sign, fill)
    return image
