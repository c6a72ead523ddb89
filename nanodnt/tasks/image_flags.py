"""The training flags of images. Apart from images.py, so that a run on text reads no more than these."""

import math
from dataclasses import dataclass, fields


@dataclass
class ImageFlags:
    """What happens to training images. The defaults are: nothing."""

    # --- images ---
    label_smoothing: float = 0.0  # share of each target that training spreads over all classes
    crop_area: float = 1.0  # training images are random parts of at least this share of the area, resized (ImageNet:
    #   0.08); 1 = whole images, or where their sizes differ the middle, as in validation
    crop_padding: int = 0  # training images are moved by up to this many pixels, black comes in (CIFAR: 4)
    flip: bool = False  # mirror every second training image, left to right
    rand_augment: float = 0.0  # RandAugment: magnitude, up to 10, of two random operations on an image; 0 = off
    rand_augment_std: float = 0.5  # standard deviation of the magnitude
    mixup: float = 0.0  # α: an image is the sum of two, with weights from Beta(α, α); 0 = off
    cutmix: float = 0.0  # α: a box of an image, its share of the area from Beta(α, α), is that of another; 0 = off
    data_workers: int = 0  # threads of a process that decode and augment images; 0 = one a core

    @property
    def changes(self) -> bool:
        """Whether images are changed one by one."""
        return self.crop_area < 1 or self.crop_padding > 0 or self.flip or self.rand_augment > 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others."""
        return self.mixup > 0 or self.cutmix > 0

    def check_images(self) -> None:
        """ValueError, one line, for a value out of its range, or crops of both kinds."""
        for name, right, allowed in (
            ("label_smoothing", 0 <= self.label_smoothing < 1, "must be at least 0 and below 1"),
            ("crop_area", 0 < self.crop_area <= 1, "must be above 0 and at most 1, which is off"),
            ("crop_padding", self.crop_padding >= 0, "must be a number of pixels, or 0, which is off"),
            ("rand_augment", 0 <= self.rand_augment <= 10, "must be 0, which is off, or a magnitude of at most 10"),
            ("rand_augment_std", 0 <= self.rand_augment_std <= 10, "must be from 0 to 10"),
            ("mixup", 0 <= self.mixup < math.inf, "must be 0, which is off, or the α of a Beta distribution"),
            ("cutmix", 0 <= self.cutmix < math.inf, "must be 0, which is off, or the α of a Beta distribution"),
            ("data_workers", self.data_workers >= 0, "must not be negative"),
        ):
            if not right:
                raise ValueError(f"{name}={getattr(self, name)} {allowed}")
        if self.crop_area < 1 and self.crop_padding:
            raise ValueError(
                f"crop_area={self.crop_area} and crop_padding={self.crop_padding} are two kinds of crops: set "
                "crop_area=1 or crop_padding=0"
            )


# rand_augment_std and data_workers change nothing by themselves
FLAGS_OF_IMAGES = tuple(f.name for f in fields(ImageFlags) if f.name not in ("rand_augment_std", "data_workers"))
