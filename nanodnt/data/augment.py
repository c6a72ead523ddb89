"""Random changes of training images: crops, flips, RandAugment; and mixup and cutmix of two images.

Pillow makes the changes, from numbers that we draw: each image has a generator of its own.
(Libraries like kornia draw for a whole batch from torch's global one.) The order of the draws is
fixed: another order would change every run.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

if TYPE_CHECKING:  # this import needs torch; preparing images does not
    from nanodnt.settings import TrainConfig

Colour = int | tuple[int, ...]

CUBIC = Image.Resampling.BICUBIC
ASPECT = math.log(4 / 3)  # random crops have widths of 3/4 to 4/3 of their heights
TRIES = 10  # attempts to place a random crop inside the image, before its middle is taken
# Share of the shorter side that validation sees of an image of another size, as in timm.
CENTRE = 0.875


def change(
    image: Image.Image, side: int, config: "TrainConfig", fill: Colour, rng: np.random.Generator
) -> Image.Image:
    """The image at side × side pixels, augmented. Rotations, shears and shifts bring in the colour
    `fill`."""
    if config.crop_area < 1:
        image = crop(image, side, config.crop_area, rng)
    else:
        image = fit(image, side)
    if config.crop_padding:
        padding = config.crop_padding
        x, y = rng.integers(-padding, padding + 1, 2).tolist()
        image = image.crop((x, y, x + side, y + side))  # black outside the image
    if config.flip and rng.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if config.rand_augment:
        image = rand_augment(image, config.rand_augment, config.rand_augment_std, fill, rng)
    return image


def mix_images(
    image: np.ndarray, other: np.ndarray, config: "TrainConfig", rng: np.random.Generator
) -> float:
    """Mix `other` into `image`, both (C, S, S), in place. Returns the share of `image` in the
    result.

    Mixup (Zhang et al. 2018) weights both by λ ~ Beta(α, α); cutmix (Yun et al. 2019) puts a box
    with 1 - λ of the area, which the border may cut, from one into the other. Where both are on,
    each is chosen for half of the images."""
    cuts = config.cutmix > 0 and (config.mixup == 0 or rng.random() < 0.5)
    alpha = config.cutmix if cuts else config.mixup
    share = float(rng.beta(alpha, alpha))
    if not cuts:
        image *= share
        image += (1 - share) * other
        return share
    side = image.shape[-1]
    box = int(side * math.sqrt(1 - share))
    centre = rng.integers(0, side, 2)
    top, left = np.clip(centre - box // 2, 0, side)
    bottom, right = np.clip(centre + box // 2, 0, side)
    image[:, top:bottom, left:right] = other[:, top:bottom, left:right]
    return 1 - float((bottom - top) * (right - left)) / side**2


def crop(image: Image.Image, side: int, least: float, rng: np.random.Generator) -> Image.Image:
    """A random part of the image, of `least` to 1 of its area, resized to side × side (Szegedy et
    al. 2015)."""
    width, height = image.size
    for _ in range(TRIES):
        area = width * height * rng.uniform(least, 1)
        aspect = math.exp(rng.uniform(-ASPECT, ASPECT))
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x = int(rng.integers(width - w + 1))
            y = int(rng.integers(height - h + 1))
            return image.resize((side, side), CUBIC, (x, y, x + w, y + h))
    # The largest part of an allowed aspect, in the middle.
    w = min(width, height * math.exp(ASPECT))
    h = min(height, width * math.exp(ASPECT))
    return resize_middle(image, side, w, h)


def fit(image: Image.Image, side: int) -> Image.Image:
    """The image as it is if it has side × side pixels, else 0.875 of its shorter side, in the
    middle, resized."""
    if image.size == (side, side):
        return image
    part = CENTRE * min(image.size)
    return resize_middle(image, side, part, part)


def resize_middle(image: Image.Image, side: int, w: float, h: float) -> Image.Image:
    """The part of w × h pixels in the middle of the image, resized to side × side."""
    width, height = image.size
    x = (width - w) / 2
    y = (height - h) / 2
    return image.resize((side, side), CUBIC, (x, y, x + w, y + h))


# -------------------------------------------------------------------------------------- RandAugment

COUNT = 2  # operations drawn for an image
CHANCE = 0.5  # probability that a drawn operation is applied
LARGEST = 10  # largest magnitude

# f(image, level from 0 to 1, sign of -1 or 1, colour that comes in from outside)
Operation = Callable[[Image.Image, float, int, Colour], Image.Image]
# f(v from -1 to 1, width, height) → (a, b, c, d, e, f): the pixel at (x, y) comes from
# (a·x + b·y + c, d·x + e·y + f)
Matrix = Callable[[float, int, int], tuple[float, ...]]


def _enhance(kind: type) -> Operation:
    return lambda image, level, sign, fill: kind(image).enhance(max(0.1, 1 + sign * 0.9 * level))


def _affine(matrix: Matrix) -> Operation:
    def transform(image: Image.Image, level: float, sign: int, fill: Colour) -> Image.Image:
        numbers = matrix(sign * level, *image.size)
        return image.transform(image.size, Image.Transform.AFFINE, numbers, CUBIC, fillcolor=fill)

    return transform


def _posterize(image: Image.Image, level: float, sign: int, fill: Colour) -> Image.Image:
    return ImageOps.posterize(image, max(1, 4 - int(4 * level)))


def _solarize(image: Image.Image, level: float, sign: int, fill: Colour) -> Image.Image:
    return ImageOps.solarize(image, 256 - int(256 * level))


def _solarize_add(image: Image.Image, level: float, sign: int, fill: Colour) -> Image.Image:
    """Makes the darker half of the values brighter."""
    values = [i + int(110 * level) if i < 128 else i for i in range(256)]
    return image.point(values * len(image.getbands()))


def _rotate(image: Image.Image, level: float, sign: int, fill: Colour) -> Image.Image:
    return image.rotate(sign * 30 * level, CUBIC, fillcolor=fill)


OPERATIONS: dict[str, Operation] = {
    "auto_contrast": lambda image, *_: ImageOps.autocontrast(image),
    "equalize": lambda image, *_: ImageOps.equalize(image),
    "invert": lambda image, *_: ImageOps.invert(image),
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "rotate": _rotate,
    "shear_x": _affine(lambda v, width, height: (1, 0.3 * v, 0, 0, 1, 0)),
    "shear_y": _affine(lambda v, width, height: (1, 0, 0, 0.3 * v, 1, 0)),
    "shift_x": _affine(lambda v, width, height: (1, 0, 0.45 * v * width, 0, 1, 0)),
    "shift_y": _affine(lambda v, width, height: (1, 0, 0, 0, 1, 0.45 * v * height)),
}
NAMES = tuple(OPERATIONS)


def rand_augment(
    image: Image.Image, magnitude: float, std: float, fill: Colour, rng: np.random.Generator
) -> Image.Image:
    """The image after two operations, drawn with replacement, each with a magnitude from
    N(magnitude, std), 0 to 10 (Cubuk et al. 2019).

    Operations, ranges, noise and the chance of each to be left out are those of timm's
    `rand-m9-mstd0.5-inc1`, whose strength grows with the magnitude ("inc"): our choice. The DNT
    paper has (9, 0.5) in Table 4, and augments like Xie et al. 2024 (sec. 4). Rotations, shears and
    shifts are bicubic, where timm also draws between that and bilinear; and posterize leaves one
    bit at least, where timm takes that too at magnitude 10."""
    for _ in range(COUNT):
        name = NAMES[rng.integers(len(NAMES))]
        left_out = rng.random() >= CHANCE
        level = min(1, max(0, rng.normal(magnitude, std) / LARGEST))
        sign = 2 * int(rng.integers(2)) - 1
        if not left_out:
            image = OPERATIONS[name](image, level, sign, fill)
    return image
