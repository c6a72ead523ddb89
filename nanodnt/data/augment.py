"""Random changes of training images: crops, flips, RandAugment; and mixup and cutmix of two of them.

All is done by Pillow, whose operations are those of timm's RandAugment, are pure functions of the numbers that we
draw, and let other threads run meanwhile. Libraries like kornia draw from torch's one global generator for a whole
batch: what an image gets would depend on the batch, the process and the thread. Here each image has its own generator.
"""

import math
from dataclasses import asdict, dataclass, fields

import numpy as np

ASPECT = math.log(4 / 3)  # parts of an image have widths of 3/4 to 4/3 of their heights
TRIES = 10  # to place a part that fits into the image, then its middle is taken
CENTRE = 0.875  # of the shorter side is what validation sees of an image of another size, as in timm


@dataclass(frozen=True)
class Augment:
    """What happens to training images. The defaults are: nothing. TrainConfig has the same fields and explains them."""

    crop_area: float = 1.0
    crop_padding: int = 0
    flip: bool = False
    rand_augment: float = 0.0
    rand_augment_std: float = 0.5
    mixup: float = 0.0
    cutmix: float = 0.0

    @classmethod
    def of(cls, config) -> "Augment":
        """The fields of these names of a TrainConfig."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def changes(self) -> bool:
        """Whether images are changed one by one."""
        return self.crop_area < 1 or self.crop_padding > 0 or self.flip or self.rand_augment > 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup > 0 or self.cutmix > 0

    def flags(self) -> list:
        """What is on, as flags of train.py."""
        nothing = asdict(NONE) | {"rand_augment_std": self.rand_augment_std}  # which alone changes nothing
        return [f"--{name}={value}" for name, value in asdict(self).items() if value != nothing[name]]

    def check(self) -> None:
        """ValueError, one line, for a value out of its range, or crops of both kinds."""
        for name, right, allowed in (
            ("crop_area", 0 < self.crop_area <= 1, "must be above 0 and at most 1, which is off"),
            ("crop_padding", self.crop_padding >= 0, "must be a number of pixels, or 0, which is off"),
            ("rand_augment", 0 <= self.rand_augment <= 10, "must be 0, which is off, or a magnitude of at most 10"),
            ("rand_augment_std", 0 <= self.rand_augment_std <= 10, "must be from 0 to 10"),
            ("mixup", 0 <= self.mixup < math.inf, "must be 0, which is off, or the α of a Beta distribution"),
            ("cutmix", 0 <= self.cutmix < math.inf, "must be 0, which is off, or the α of a Beta distribution"),
        ):
            if not right:
                raise ValueError(f"{name}={getattr(self, name)} {allowed}")
        if self.crop_area < 1 and self.crop_padding:
            raise ValueError(
                f"crop_area={self.crop_area} and crop_padding={self.crop_padding} are two kinds of crops: set "
                "crop_area=1 or crop_padding=0"
            )

    def change(self, image, side: int, fill, rng: np.random.Generator):
        """A Pillow image of side × side pixels, changed at random; `fill` is the colour that rotations bring in."""
        image = crop(image, side, self.crop_area, rng) if self.crop_area < 1 else fit(image, side)
        if self.crop_padding:
            x, y = rng.integers(-self.crop_padding, self.crop_padding + 1, 2).tolist()
            image = image.crop((x, y, x + side, y + side))  # what lies outside is black
        if self.flip and rng.random() < 0.5:
            image = image.transpose(0)  # left to right
        if self.rand_augment:
            from nanodnt.data.rand_augment import rand_augment

            image = rand_augment(image, self.rand_augment, self.rand_augment_std, fill, rng)
        return image

    def mix(self, image: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> float:
        """Mix `other` into `image`, both (C, S, S), in place; the share of `image` in the result.

        Mixup (Zhang et al. 2018) weights both by λ ~ Beta(α, α); cutmix (Yun et al. 2019) puts a box with 1 - λ of the
        area, which the border may cut, from one into the other. Where both are on, each has every second image."""
        cuts = self.cutmix > 0 and (self.mixup == 0 or rng.random() < 0.5)
        alpha = self.cutmix if cuts else self.mixup
        share = float(rng.beta(alpha, alpha))
        if not cuts:
            image *= share
            image += (1 - share) * other
            return share
        side = image.shape[-1]
        box, centre = int(side * math.sqrt(1 - share)), rng.integers(0, side, 2)
        (y, x), (y_end, x_end) = np.clip(centre - box // 2, 0, side), np.clip(centre + box // 2, 0, side)
        image[:, y:y_end, x:x_end] = other[:, y:y_end, x:x_end]
        return 1 - float((y_end - y) * (x_end - x)) / side**2


NONE = Augment()


def crop(image, side: int, least: float, rng: np.random.Generator):
    """A random part of a Pillow image, of `least` to 1 of its area, resized to side × side (Szegedy et al. 2015)."""
    width, height = image.size
    for _ in range(TRIES):
        area, aspect = width * height * rng.uniform(least, 1), math.exp(rng.uniform(-ASPECT, ASPECT))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            break
    else:  # the largest part of an allowed aspect, in the middle
        w, h = min(width, height * math.exp(ASPECT)), min(height, width * math.exp(ASPECT))
        x, y = (width - w) / 2, (height - h) / 2
    return _resize(image, side, (x, y, x + w, y + h))


def fit(image, side: int):
    """A Pillow image as it is if it has side × side pixels, else 0.875 of its shorter side, in the middle, resized."""
    width, height = image.size
    if (width, height) == (side, side):
        return image
    part = CENTRE * min(width, height)
    x, y = (width - part) / 2, (height - part) / 2
    return _resize(image, side, (x, y, x + part, y + part))


def _resize(image, side, box):
    from PIL import Image

    return image.resize((side, side), Image.Resampling.BICUBIC, box)
