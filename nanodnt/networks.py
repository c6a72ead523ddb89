"""Which network a config describes, and what the dataset says of it."""

from model import GPT, GPTConfig, Transformer
from nanodnt.data import open_dataset
from nanodnt.data.augment import Augment
from vision import ViT

# What stands for a dataset that is not prepared, and whose it is.
STAND_INS = {
    "text": (dict(vocab_size=50257), "GPT-2's"),
    "images": (dict(kind="images", image_size=224, channels=3, classes=range(1000)), "ImageNet-1k's"),
}


def network(config: GPTConfig) -> type[Transformer]:
    """The class of network that a config describes."""
    return ViT if config.patch_size else GPT


def kind_of(config: GPTConfig) -> str:
    """What a config's network reads: "text" or "images"."""
    return "images" if config.patch_size else "text"


def kind_of_data(meta: dict) -> str:
    """What a dataset is of: "text" or "images"."""
    return "images" if meta.get("kind") == "images" else "text"


def stand_in(config: GPTConfig) -> tuple:
    """(a meta for `fit` where there is no dataset, whose values these are). What the config says itself, stays."""
    meta, source = STAND_INS[kind_of(config)]
    if config.patch_size:
        given = dict(image_size=config.image_size, channels=config.channels, classes=range(config.n_class))
        return meta | {key: value for key, value in given.items() if value}, "" if all(given.values()) else source
    return meta, "" if config.vocab_size else source


def fit(config: GPTConfig, meta: dict, dataset: str) -> None:
    """Fill in what a config leaves to the dataset, in place: the vocabulary; or size, channels and classes of images.

    ValueError, one line, where the dataset is of another kind, or its images are other ones than the config's."""
    if kind_of(config) != kind_of_data(meta):
        if config.patch_size:
            fix = "choose a dataset of images, or leave patch_size out"
            raise ValueError(f"patch_size={config.patch_size} is for images, but dataset {dataset!r} is of text: {fix}")
        fix = "set patch_size (see config/vdnt/), or choose a dataset of text"
        raise ValueError(f"dataset {dataset!r} is of images, but patch_size=0 is for text: {fix}")
    if not config.patch_size:
        config.vocab_size = config.vocab_size or meta["vocab_size"]
        return
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


def meant(fields: dict) -> dict:
    """The fields of a GPTConfig, with what None means in place of it: then those that older versions wrote compare."""
    dyt, images = fields["norm"] == "dyt", bool(fields.get("patch_size"))
    meaning = {"dyt_bias": dyt and images, "embed_scale": dyt and not images}
    return fields | {name: value for name, value in meaning.items() if fields.get(name) is None}


def left_to_dataset(config: GPTConfig) -> list:
    """The fields that `fit` will fill in."""
    if not config.patch_size:
        return [] if config.vocab_size else ["vocab_size"]
    tokens = ["block_size"] if config.block_size == GPTConfig.block_size else []
    return tokens + [name for name in ("image_size", "channels", "n_class") if not getattr(config, name)]


def open_data(config, model_config: GPTConfig):
    """The dataset of a TrainConfig, cut into what the model reads at once. Its files are not verified again.

    ValueError, one line, for settings that are for a dataset of another kind."""
    read = kind_of(model_config)
    for name, kind in (("label_smoothing", "images"), ("loss_chunks", "text")):
        if getattr(config, name) and kind != read:
            raise ValueError(f"{name}={getattr(config, name)} is for {kind}, and the model reads {read}: leave it out")
    images = dict(image_size=model_config.image_size, augment=Augment.of(config), workers=config.data_workers)
    how = dict(verify=False, doc_mask=config.doc_mask)
    return open_dataset(config.dataset, model_config.block_size, config.seed, **how, **images)
