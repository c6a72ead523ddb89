"""A ViT on images: their classes, in as many tokens as they have patches. Its training flags."""

import math
from dataclasses import dataclass, fields

import torch

from model import GPTConfig, Transformer
from nanodnt.tasks.task import Task

# What a model of text is told about images.
ADVICE = "patch_size=0 is for text: set patch_size (see config/vdnt/), or choose a dataset of text"


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

    def image_flags(self) -> list:
        """What is on, as flags of train.py. rand_augment_std and data_workers alone change nothing."""
        on = [f for f in fields(ImageFlags) if getattr(self, f.name) != f.default]
        return [f"--{f.name}={getattr(self, f.name)}" for f in on if f.name not in ("rand_augment_std", "data_workers")]

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


class Images(Task):
    kind = reads = "images"
    rows, loss_unit = "images", "image"

    def network(self) -> type[Transformer]:
        from vision import ViT

        return ViT

    def fit(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in size, channels and classes of the images, and the tokens that patches make of one."""
        if meta.get("kind") != "images":
            raise ValueError(
                f"patch_size={config.patch_size} is for images, but dataset {dataset!r} is of text: choose a dataset "
                "of images, or leave patch_size out"
            )
        found = dict(image_size=meta["image_size"], channels=meta["channels"], n_class=len(meta["classes"]))
        for name, its in found.items():
            given = getattr(config, name)
            if given and its and given != its:
                raise ValueError(f"{name}={given} does not fit dataset {dataset!r}, which has {its}: leave it out")
            if not given and not its:
                raise ValueError(f"the images of {dataset!r} have several sizes: set image_size, as config/vdnt/ does")
            setattr(config, name, given or its)
        if config.block_size == GPTConfig.block_size and config.image_size % config.patch_size == 0:
            config.block_size = config.image_tokens

    def left_to_dataset(self, config: GPTConfig) -> list:
        tokens = ["block_size"] if config.block_size == GPTConfig.block_size else []
        return tokens + [name for name in ("image_size", "channels", "n_class") if not getattr(config, name)]

    def stand_in(self, config: GPTConfig) -> tuple:
        given = config.image_size, config.channels, config.n_class
        size, channels, classes = (a or b for a, b in zip(given, (224, 3, 1000), strict=True))
        meta = dict(kind="images", image_size=size, channels=channels, classes=range(classes))
        return meta, "" if all(given) else "ImageNet-1k's"

    def meaning_of_none(self, uses_dyt: bool) -> dict:
        return dict(dyt_bias=uses_dyt, embed_scale=False)

    def describe_size(self, config: GPTConfig) -> tuple:
        c = config
        words = f"images of {c.image_size} × {c.image_size} pixels, {c.channels} channel{'s' * (c.channels > 1)}, "
        words += f"patches of {c.patch_size} × {c.patch_size}, {c.n_class} classes"
        return f"{c.block_size} tokens an image", words

    def check_data(self, dataset: str, meta: dict, saved_meta: dict | None, config: GPTConfig) -> None:
        here = meta["image_size"] or config.image_size, meta["channels"], len(meta["classes"])
        there = config.image_size, config.channels, config.n_class
        if here == there and (saved_meta is None or saved_meta["classes"] == meta["classes"]):
            return
        words = "size {}, channels {}, classes {}".format
        named = " of other names" * (here == there)
        raise ValueError(
            f"the images of {dataset!r} ({words(*here)}{named}) do not fit the model ({words(*there)}): choose another "
            "dataset, or start from scratch"
        )

    def open_data(self, meta: dict, config, model_config: GPTConfig):
        from nanodnt.data.images import Images

        for name in ("doc_mask", "loss_chunks"):
            if getattr(config, name):
                raise ValueError(
                    f"{name}={getattr(config, name)} is for text, and the model reads images: leave it out"
                )
        return Images(
            config.dataset,
            model_config.block_size,
            config.seed,
            meta,
            image_size=model_config.image_size,
            flags=config,
            workers=config.data_workers,
        )

    def step_rows(self, batch_size: int) -> dict:
        return {"images_per_s": batch_size}

    def count_scores(self, logits, loss, targets) -> tuple:
        """Besides the loss: the images whose class is the first, or among the first five."""
        count, sums = super().count_scores(logits, loss, targets)
        return count, sums | {f"val_top{k}": topk_hits(k, logits, targets) for k in (1, 5)}


def topk_hits(k: int, logits, targets) -> torch.Tensor:
    """(): how many targets (B,), −1 = ignored, are among the `k` largest of logits (B, n_class)."""
    return (logits.topk(min(k, logits.shape[1])).indices == targets[:, None]).sum()
