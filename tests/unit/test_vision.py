"""ViTs: against `transformers` and against the equations; their loss, initial weights, validation
scores, refusals."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from model import GPTConfig
from nanodnt.tasks import fill_from_dataset
from nanodnt.tasks.images import ImageTask
from support.hypotheses import drawn
from support.models import error, gradients
from support.reference import mean_loss
from support.vision import build, config_of, cut, labels, pictures
from vision import ViT, patches

# ----------------------------------------------------------------------------- against transformers

VIT = dict(norm="layernorm", bias=True, norm_eps=1e-12, mlp="gelu_erf")
SHAPES = {  # n_embd, n_head, n_layer, image, patch, channels, classes
    "colour": (16, 4, 2, 6, 2, 3, 7),
    "gray, one block, one patch": (12, 2, 1, 5, 5, 1, 2),
}
# names of ours: theirs, of `transformers` 5; gain and bias are theirs' weight and bias
THEIRS = {
    "patch": r".*\.patch_embeddings\.projection",
    "cls": r".*\.cls_token",
    "wpe": r".*\.position_embeddings",
    "head": "classifier",
    "final_norm": r"\w+\.layernorm",
    "attn.pre": "layernorm_before",
    "mlp.pre": "layernorm_after",
    "attn.f.q": r"attention\.(attention\.query|q_proj)",
    "attn.f.k": r"attention\.(attention\.key|k_proj)",
    "attn.f.v": r"attention\.(attention\.value|v_proj)",
    "attn.f.o": r"attention\.(output\.dense|o_proj)",
    "mlp.f.up": r"mlp\.fc1",
    "mlp.f.down": r"mlp\.fc2",
}


def their_name(name: str, known) -> str:
    """The name of a parameter of ours among `known`."""
    block, part = "", name
    if found := re.match(r"blocks\.(\d+)\.(.*)", name):
        block, part = rf".*\.layers?\.{found[1]}\.", found[2]
    part, end = part.rsplit(".", 1)
    pattern = rf"{block}{THEIRS[part]}(\.{'bias' if end == 'bias' else 'weight'})?"
    (theirs,) = [key for key in known if re.fullmatch(pattern, key)]
    return theirs


@pytest.mark.parametrize("shape", SHAPES)
def test_vit_is_that_of_transformers(shape):
    """The class token's head, LayerNorm with ε = 1e-12, exact GELU, biases everywhere: logits,
    loss, gradients."""
    from transformers import ViTConfig, ViTForImageClassification

    d, heads, depth, side, patch, channels, classes = SHAPES[shape]
    sizes = dict(
        hidden_size=d,
        num_attention_heads=heads,
        num_hidden_layers=depth,
        image_size=side,
        patch_size=patch,
    )
    # "eager" has its softmax in fp32 whatever the dtype
    sizes |= dict(
        num_channels=channels,
        num_labels=classes,
        attn_implementation="sdpa",
        intermediate_size=4 * d,
    )
    theirs = ViTForImageClassification(ViTConfig(**sizes))
    generator = torch.Generator().manual_seed(3)
    sizes = dict(
        n_embd=d,
        n_head=heads,
        image_size=side,
        patch_size=patch,
        channels=channels,
        n_class=classes,
    )
    ours = ViT(config_of(sizes | VIT, depth)).double().eval()
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            noise = torch.empty(p.shape).normal_(generator=generator)
            is_gain = p.ndim == 1 and not key.endswith("bias")
            p.copy_(
                1 + 0.3 * noise
                if is_gain
                else noise * (0.3 if p.ndim < 2 else p[0].numel() ** -0.5)
            )
        known = dict(theirs.double().eval().named_parameters())
        names = {name: their_name(name, known) for name, _ in ours.named_parameters()}
        for name, p in ours.named_parameters():
            p.copy_(known[names[name]].reshape(p.shape))
    assert ours.num_params() == theirs.num_parameters()
    images, targets = pictures(3, channels, side), labels(3, classes)
    expected = theirs(images, labels=targets)
    logits, loss = ours(images, targets)
    assert error(logits, expected.logits) < 1e-10 and error(loss, expected.loss) < 1e-10
    expected.loss.backward()
    loss.backward()
    for name, p in ours.named_parameters():
        # the floor: a bias of keys has a gradient of rounding alone, since softmax does not see it
        assert error(p.grad, known[names[name]].grad.reshape(p.shape), floor=1e-2) < 1e-9, name


# ------------------------------------------------------------------------- patches, and what is fed


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@drawn(15, 200)
def test_patches_are_rows_of_squares(n, channels, size, across):
    images = pictures(n, channels, size * across)
    assert torch.equal(patches(images, size), cut(images, size))


def test_what_comes_back():
    """(logits, None) without targets; the loss alone in training; both in evaluation. Logits are
    fp32 at least."""
    model = build(dict(), dtype=torch.float32)
    images = pictures(dtype=torch.float32)
    targets = labels()
    for dtype in (None, torch.bfloat16):
        model.set_runtime(compute_dtype=dtype)
        for training in (True, False):
            logits, none = model.train(training)(images)
            assert none is None and logits.shape == (2, 7) and logits.dtype == torch.float32
            kept, loss = model(images, targets)
            assert loss.shape == () and loss.dtype == torch.float32
            assert kept is None if training else torch.equal(kept, logits)


# --------------------------------------------------------------------------------------------- loss


@given(st.floats(0, 0.99), st.lists(st.integers(-1, 6), min_size=1, max_size=6), st.booleans())
@drawn(15, 200)
def test_loss_is_the_formula(smoothing, targets, training):
    """Label smoothing in training alone; targets of −1 do not count."""
    model, targets = build(dict(pool="mean")).train(training), torch.tensor(targets)
    model.runtime.label_smoothing = smoothing
    images = pictures(len(targets))
    loss, logits = model(images, targets)[1], model(images)[0]
    if (targets < 0).all():
        assert loss == 0
        return
    assert error(loss, mean_loss(logits, targets, smoothing if training else 0.0)) < 1e-12


def test_loss_of_mixed_images_is_that_of_soft_targets():
    """Of a pair of labels with these shares, padding rows left out; in value and gradient."""
    model, images, smoothing = build(dict()).train(), pictures(6), 0.1
    model.runtime.label_smoothing = smoothing
    own, other = torch.tensor([0, 1, 2, 3, -1, 5]), torch.tensor([6, 1, 0, 4, -1, 2])
    share = torch.tensor([0.25, 0.7, 1.0, 0.0, 1.0, 0.5])
    soft = share[:, None].double() * F.one_hot(own.clamp(min=0), 7)
    soft = soft + (1 - share[:, None].double()) * F.one_hot(other.clamp(min=0), 7)
    soft = (1 - smoothing) * soft + smoothing / 7
    rows = -(soft * model(images)[0].log_softmax(-1)).sum(-1)
    expected = rows[own >= 0].sum() / 5
    want = torch.autograd.grad(expected, model.head.weight)[0]
    loss, grads = gradients(model, images, own, other, share)
    assert error(loss, expected) < 1e-12 and error(grads["head.weight"], want) < 1e-12


# ---------------------------------------------------------------------------------- initial weights

WIDE = dict(
    n_head=4, n_embd=192, image_size=56, patch_size=7, channels=4, n_class=400, norm_eps=1e-6
)
# std of N(0, 1) in ±2
TRUNCATED = math.sqrt(1 - 4 * math.exp(-2) / (math.sqrt(2 * math.pi) * math.erf(math.sqrt(2))))


def test_initial_standard_deviations():
    """Xavier's σ² = 2 / (n_in + n_out), cut off at 2σ, of patches too; a branch's last matrix is
    scaled before. The tables and the head are N(0, init_std)."""
    model = ViT(config_of(dict(WIDE, init="xavier_cut", init_std=0.05), 1))
    for weight, scale in ((model.patch.weight, 1.0), (model.blocks[0].attn.f.o.weight, 2**-0.5)):
        z = weight.double() / (scale * math.sqrt(2 / sum(weight.shape)))
        assert (
            z.abs().max() <= 2 * (1 + 1e-6)
            and abs(z.std() - TRUNCATED) < 5 / (2 * z.numel()) ** 0.5
        )
    for weight in (model.wpe.weight, model.head.weight):
        assert abs(weight.std() / 0.05 - 1) < 5 / (2 * weight.numel()) ** 0.5


# --------------------------------------------------------------------------------------- validation


@given(st.integers(1, 24), st.integers(2, 9), st.integers(0, 2**31))
@drawn(25, 400)
def test_scores_are_numpys(n, classes, seed):
    """Top-1 and top-5, of fewer than five classes too; padding rows, whose target is −1, do not
    count."""
    random = np.random.default_rng(seed)
    logits = random.permuted(np.tile(np.arange(classes) / 3, (n, 1)), axis=1)  # no two are equal
    targets = random.integers(-1, classes, n)
    # of each k, from 1: among the first k
    hits = (np.argsort(-logits, axis=1) == targets[:, None]).cumsum(1).sum(0)
    count, sums = ImageTask().count_scores(
        torch.tensor(logits), torch.tensor(0.5), torch.tensor(targets)
    )
    assert count == (targets >= 0).sum()
    assert sums == {
        "val_loss": 0.5 * count,
        "val_top1": hits[0],
        "val_top5": hits[min(5, classes) - 1],
    }


# ---------------------------------------------------------------------------- what the dataset says


META = dict(kind="images", image_size=6, channels=3, classes=list("abcdefg"))


def unfitted(**changes):
    """A config that leaves to the dataset what it may."""
    return GPTConfig(**dict(n_layer=1, n_head=2, n_embd=8, patch_size=2) | changes)


@pytest.mark.parametrize("pool, tokens", (("cls", 10), ("mean", 9)))
def test_a_dataset_fills_in_what_a_config_leaves_open(pool, tokens):
    config = unfitted(pool=pool)
    fill_from_dataset(config, META, "pets")
    assert (config.image_size, config.channels, config.n_class, config.block_size) == (
        6,
        3,
        7,
        tokens,
    )
    config.check()


@pytest.mark.parametrize(
    "flags, meta, words",
    (
        (dict(image_size=8), {}, "image_size=8 does not fit dataset 'pets', which has 6"),
        (dict(), dict(image_size=None), "several sizes: set image_size"),
    ),
)
def test_a_dataset_that_does_not_fit(flags, meta, words):
    with pytest.raises(ValueError, match=re.escape(words)) as e:
        fill_from_dataset(unfitted(**flags), META | meta, "pets")
    assert "\n" not in str(e.value)
