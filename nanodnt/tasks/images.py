"""A ViT on images and their classes. Its tokens are the patches of an image, and a class token."""

from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from model import GPTConfig, Transformer
from nanodnt.data import PreparedData
from nanodnt.data.meta import Meta
from nanodnt.settings import TrainConfig
from nanodnt.tasks.task import Placeholder, Scores, Task

IMAGENET = {"image_size": 224, "channels": 3, "n_class": 1000}
SIZES = tuple(IMAGENET)  # fields of GPTConfig that a dataset decides


class ImageTask(Task):
    kind = "images"
    row_noun = "image"
    counted_row = "image"
    other_matrices = "patches and head"
    loss_unit = "image"

    def network(self) -> type[Transformer]:
        from vision import ViT

        return ViT

    def fill_from_dataset(self, config: GPTConfig, meta: Meta, dataset: str) -> None:
        sizes = dataset_sizes(meta)
        for name in SIZES:
            given = getattr(config, name)
            size = sizes[name]
            if given and size and given != size:
                raise ValueError(
                    f"{name}={given} does not fit dataset {dataset!r}, which has {size}: "
                    "leave it out"
                )
            if not given and not size:
                raise ValueError(
                    f"the images of {dataset!r} have several sizes: set image_size, as "
                    "config/vdnt/ does"
                )
            setattr(config, name, given or size)
        if config.block_size == GPTConfig.block_size:
            config.block_size = config.image_tokens

    def left_to_dataset(self, config: GPTConfig) -> list[str]:
        names = [name for name in SIZES if not getattr(config, name)]
        if config.block_size == GPTConfig.block_size:
            names.append("block_size")
        return names

    def placeholder_meta(self, config: GPTConfig) -> Placeholder:
        sizes = {name: getattr(config, name) or IMAGENET[name] for name in SIZES}
        owner = ""
        if not all(getattr(config, name) for name in SIZES):
            owner = "ImageNet-1k's"
        meta = dict(
            kind="images",
            image_size=sizes["image_size"],
            channels=sizes["channels"],
            classes=range(sizes["n_class"]),
        )
        return Placeholder(meta, owner)

    def meaning_of_none(self, uses_dyt: bool) -> dict[str, Any]:
        return dict(dyt_bias=uses_dyt, embed_scale=False)

    def describe_size(self, config: GPTConfig) -> tuple[str, str]:
        side = config.image_size
        patch = config.patch_size
        channels = "1 channel" if config.channels == 1 else f"{config.channels} channels"
        images = f"images of {side} × {side} pixels, {channels}, patches of {patch} × {patch}"
        return f"{config.block_size} tokens an image", f"{images}, {config.n_class} classes"

    def check_trained_meta(self, meta: Meta, path: str) -> None:
        if not isinstance(meta.get("classes"), list):
            raise ValueError(f"{path} is damaged: its images have no list of classes")

    def check_data(
        self, dataset: str, meta: Meta, saved_meta: Meta | None, config: GPTConfig
    ) -> None:
        expected = {name: getattr(config, name) for name in SIZES}
        sizes = dataset_sizes(meta)
        sizes["image_size"] = sizes["image_size"] or config.image_size
        same_classes = saved_meta is None or saved_meta["classes"] == meta["classes"]
        if sizes == expected and same_classes:
            return
        words = "size {image_size}, channels {channels}, classes {n_class}"
        data = words.format(**sizes)
        if sizes == expected:
            data += " of other names"
        raise ValueError(
            f"the images of {dataset!r} ({data}) do not fit the model "
            f"({words.format(**expected)}): choose another dataset, or start from scratch"
        )

    def open_data(self, meta: Meta, config: TrainConfig, model_config: GPTConfig) -> PreparedData:
        from nanodnt.data.images import PreparedImages

        return PreparedImages(
            config.dataset,
            model_config.block_size,
            config.seed,
            meta,
            image_size=model_config.image_size,
            config=config,
            workers=config.data_workers,
        )

    def random_batch(
        self, config: TrainConfig, model_config: GPTConfig, rows: int, step: int
    ) -> tuple[np.ndarray, ...]:
        """Labels of this step, and images that are the same in every step, since drawing them takes
        long."""
        random = np.random.default_rng(step)
        side = model_config.image_size
        images = normal_numbers(rows, model_config.channels, side, side)
        labels, others = random.integers(model_config.n_class, size=(2, rows))
        if not config.mixes_images:
            return images, labels
        return images, labels, others, random.random(rows, np.float32)

    def step_counts(self, batch_size: int) -> dict[str, int]:
        return {"images_per_s": batch_size}

    def count_scores(self, logits: Tensor, loss: Tensor, targets: Tensor) -> Scores:
        """Adds val_top1 and val_top5: images whose class has one of the highest k logits."""
        scores = super().count_scores(logits, loss, targets)
        for k in (1, 5):
            highest = logits.topk(min(k, logits.shape[1])).indices  # (rows, k)
            scores.sums[f"val_top{k}"] = (highest == targets[:, None]).sum()
        return scores


def dataset_sizes(meta: Meta) -> dict[str, int | None]:
    """The fields SIZES of a dataset; image_size is None where its images have several sizes."""
    return {
        "image_size": meta["image_size"],
        "channels": meta["channels"],
        "n_class": len(meta["classes"]),
    }


@lru_cache(maxsize=1)
def normal_numbers(*shape: int) -> np.ndarray:
    """Random normal numbers of this shape, float32, always the same."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)
