"""ViTs for tests: small ones of any layout, their function from the equations, and digits to train
on."""

from dataclasses import replace

import numpy as np
import torch

from layers.rules import KIND_FLAGS
from model import GPTConfig
from nanodnt.data import sha256
from support import reference
from support.images import change_meta, encode, write_dataset
from support.models import depth_of, network, perturb
from vision import ViT

SIZE = dict(n_head=4, n_embd=16, patch_size=2, image_size=6, channels=3, n_class=7, norm_eps=1e-2)
PATCHES = 9
POOLS = ("cls", "mean")


def config_of(flags, n_layer=2) -> GPTConfig:
    """The config of a small ViT; what only text has is left out of the flags."""
    flags = {name: value for name, value in flags.items() if name not in KIND_FLAGS["text"]}
    config = GPTConfig(**{**SIZE, "n_layer": n_layer, **flags})
    config.block_size = config.image_tokens
    return config


def build(flags, n_layer=2, dtype=torch.float64) -> ViT:
    """A small ViT with random weights, in eval mode."""
    return perturb(ViT(config_of(flags, n_layer))).to(dtype).eval()


def scheme(name, pool="cls", n_layer=0) -> tuple:
    """(flags, Net) of a scheme of support.models, for images."""
    flags, net = network(name, n_layer or depth_of(name))
    vit = dict(vocab=SIZE["n_class"], theta=None, tied=False, causal=False)
    vit |= dict(norm_bias=net.norm_bias or net.kind == "dyt")  # on images DyT has its β
    return dict(flags, pool=pool), replace(net, **vit)


def pictures(n=2, channels=3, side=6, seed=1, dtype=torch.float64):
    """Random images (n, channels, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, channels, side, side, generator=generator, dtype=torch.float64).to(dtype)


def labels(n=2, classes=7, seed=2):
    """Random labels (n,)."""
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def cut(images, size: int):
    """(B, channels, S, S) → (B, N, channels · size²), one pixel after the other: patches row by
    row, each as a convolution's weight has it."""
    rows = []
    for image in images:
        rows.append([])
        for top in range(0, image.shape[1], size):
            for left in range(0, image.shape[2], size):
                spots = [
                    (c, top + y, left + x)
                    for c in range(len(image))
                    for y in range(size)
                    for x in range(size)
                ]
                rows[-1].append(torch.stack([image[spot] for spot in spots]))
    return torch.stack([torch.stack(row) for row in rows])


def equation(net: reference.Net, weights: dict, images, size: int, pool: str, seen=None):
    """Logits (B, n_class) of the equations, in plain float64. AssertionError for a weight that they
    do not use."""
    weights = dict(weights)
    x = cut(images, size) @ weights.pop("patch.weight").T + weights.pop("patch.bias", 0)
    if pool == "cls":
        x = torch.cat((weights.pop("cls.weight").expand(len(x), 1, -1), x), dim=1)
    bias = weights.pop("head.bias", 0)
    # the blocks of the reference read token ids: here each token of each image has an id of its own
    idx = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2])
    logits, _ = reference.forward(net, weights | {"wte.weight": x.flatten(0, 1)}, idx, seen=seen)
    return (logits[:, 0] if pool == "cls" else logits.mean(1)) + bias


# ------------------------------------------------------------------------------------------- digits

# A V-DNT (S5) of two layers, a few milliseconds a step: beside the flags of support.runs.TINY.
TINY = dict(
    patch_size=2, mlp="gelu_erf", bias=True, init="xavier_cut", residual_init="plain", init_std=0.1
)
# 1024: the default
TINY |= dict(block_size=1024, eval_tokens=0, batch_size=16, learning_rate=3e-3, data_workers=2)
AUGMENTED = dict(
    crop_area=0.6, flip=True, rand_augment=5, mixup=0.4, cutmix=0.5, label_smoothing=0.1
)


def make_digits(folder, train=240, val=50, **changes) -> str:
    """A prepared dataset of the first digits of scikit-learn, 8 × 8 gray pixels; returns the
    folder."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = [encode(np.clip(15 * pixels, 0, 255)) for pixels in digits.images[: train + val]]
    write_dataset(
        folder, images[:train], images[train:], classes=10, **dict(mean=[0.3], std=[0.35]) | changes
    )
    digests = {}
    for split, part in (("train", slice(0, train)), ("val", slice(train, train + val))):
        path = folder / f"{split}_labels.bin"
        digits.target[part].astype("<u2").tofile(path)
        digests[split] = sha256(path)

    def renew_digests(meta):
        for split, digest in digests.items():
            meta["splits"][split]["labels"]["sha256"] = digest

    change_meta(folder, renew_digests)
    return str(folder)
