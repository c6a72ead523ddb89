"""A ViT on images: their classes, in as many tokens as they have patches."""

from functools import lru_cache

import numpy as np

from model import GPTConfig, Transformer
from nanodnt.tasks.text import Task


class ImageTask(Task):
    reads = row_noun = "images"
    counted_row = loss_unit = "image"
    other_matrices = "patches and head"

    def network(self) -> type[Transformer]:
        from vision import ViT

        return ViT

    def fill_from_dataset(self, config: GPTConfig, meta: dict, dataset: str) -> None:
        """Fill in size, channels and classes of the images, and the tokens that patches make of
        one."""
        found = dict(
            image_size=meta["image_size"], channels=meta["channels"], n_class=len(meta["classes"])
        )
        for name, its in found.items():
            given = getattr(config, name)
            if given and its and given != its:
                raise ValueError(
                    f"{name}={given} does not fit dataset {dataset!r}, which has {its}: leave it out"
                )
            if not given and not its:
                raise ValueError(
                    f"the images of {dataset!r} have several sizes: set image_size, as config/vdnt/ does"
                )
            setattr(config, name, given or its)
        if config.block_size == GPTConfig.block_size:
            config.block_size = config.image_tokens

    def left_to_dataset(self, config: GPTConfig) -> list:
        tokens = ["block_size"] if config.block_size == GPTConfig.block_size else []
        return tokens + [
            name for name in ("image_size", "channels", "n_class") if not getattr(config, name)
        ]

    def placeholder_meta(self, config: GPTConfig) -> tuple:
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

    def check_trained_meta(self, meta: dict, path) -> None:
        if not isinstance(meta.get("classes"), list):
            raise ValueError(f"{path} is damaged: its images have no list of classes")

    def check_data(
        self, dataset: str, meta: dict, saved_meta: dict | None, config: GPTConfig
    ) -> None:
        here = meta["image_size"] or config.image_size, meta["channels"], len(meta["classes"])
        there = config.image_size, config.channels, config.n_class
        if here == there and (saved_meta is None or saved_meta["classes"] == meta["classes"]):
            return
        words = "size {}, channels {}, classes {}".format
        named = " of other names" * (here == there)
        what = f"the images of {dataset!r} ({words(*here)}{named}) do not fit the model ({words(*there)})"
        raise ValueError(f"{what}: choose another dataset, or start from scratch")

    def open_data(self, meta: dict, config, model_config: GPTConfig):
        from nanodnt.data.images import PreparedImages

        sizes = dict(image_size=model_config.image_size, config=config, workers=config.data_workers)
        return PreparedImages(config.dataset, model_config.block_size, config.seed, meta, **sizes)

    def random_batch(self, config, model_config: GPTConfig, rows: int, step: int) -> tuple:
        """Images, the same in every step since drawing them takes long, and labels of this step."""
        c, random = model_config, np.random.default_rng(step)
        images = normal_numbers(rows, c.channels, c.image_size, c.image_size)
        labels, others = random.integers(c.n_class, size=(2, rows))
        return images, labels, *((others, random.random(rows, np.float32)) if config.mixes else ())

    def step_counts(self, batch_size: int) -> dict:
        return {"images_per_s": batch_size}

    def count_scores(self, logits, loss, targets) -> tuple:
        """Besides the loss: the images whose class is the first, or among the first five."""
        count, sums = super().count_scores(logits, loss, targets)
        for k in (1, 5):
            sums[f"val_top{k}"] = (
                logits.topk(min(k, logits.shape[1])).indices == targets[:, None]
            ).sum()
        return count, sums


@lru_cache(maxsize=1)
def normal_numbers(*shape: int) -> np.ndarray:
    """Random normal numbers of this shape, float32, always the same."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)
