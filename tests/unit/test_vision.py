"""ViTs: against `transformers` and against the equations; their loss, initial weights, validation scores, refusals."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from model import GPTConfig
from nanodnt import engine
from nanodnt.run.environment import Env
from nanodnt.tasks import task_of
from nanodnt.tasks.images import Images
from support.hypotheses import drawn
from support.models import S5, error, gradients
from support.vision import PATCHES, SIZE, build, config_of, cut, labels, pictures, plain_loss
from vision import ViT, patches

pytestmark = pytest.mark.usefixtures("one_thread")

# ---------------------------------------------------------------------------------------------- against transformers

VIT = dict(norm="layernorm", bias=True, norm_eps=1e-12, mlp="gelu_erf")
LAYERSCALE = dict(VIT, norm_eps=1e-6, branch_scale="layerscale")
SHAPES = {  # n_embd, n_head, n_layer, image, patch, channels, classes
    "colour": (16, 4, 2, 6, 2, 3, 7),
    "gray, one block, one patch": (12, 2, 1, 5, 5, 1, 2),
    "wide, four channels": (48, 3, 3, 16, 4, 4, 33),
}
# names of ours: theirs, of `transformers` 5; Dinov2's first where they differ
THEIRS = {
    "patch": r".*\.patch_embeddings\.projection",
    "cls.weight": r".*\.cls_token",
    "wpe.weight": r".*\.position_embeddings",
    "head": "classifier",
    "final_norm.gain": r"\w+\.layernorm\.weight",
    "final_norm.bias": r"\w+\.layernorm\.bias",
    "attn.pre": r"(norm1|layernorm_before)",
    "mlp.pre": r"(norm2|layernorm_after)",
    "attn.f.q": r"attention\.(attention\.query|q_proj)",
    "attn.f.k": r"attention\.(attention\.key|k_proj)",
    "attn.f.v": r"attention\.(attention\.value|v_proj)",
    "attn.f.o": r"attention\.(output\.dense|o_proj)",
    "attn.mid.gain": r"layer_scale1\.lambda1",
    "mlp.mid.gain": r"layer_scale2\.lambda1",
    "mlp.f.up": r"mlp\.fc1",
    "mlp.f.down": r"mlp\.(fc2|weights_out)",
}


def their_name(name: str, known) -> str:
    """The name of a parameter of ours among `known`."""
    block, part, end = "", name, ""
    if found := re.match(r"blocks\.(\d+)\.(.*)", name):
        block, part = rf".*\.layers?\.{found[1]}\.", found[2]
    if part not in THEIRS:
        part, end = part.rsplit(".", 1)
        end = r"\." + {"gain": "weight"}.get(end, end)
    (theirs,) = [key for key in known if re.fullmatch(block + THEIRS[part] + end, key)]
    return theirs


def peer(kind, shape, dtype, **changes):
    """A model of `transformers` with random weights, for images."""
    import transformers

    d, heads, depth, side, patch, channels, classes = SHAPES[shape]
    sizes = dict(hidden_size=d, num_attention_heads=heads, num_hidden_layers=depth, image_size=side, patch_size=patch)
    # their own attention, "eager", has its softmax in fp32 whatever the dtype
    sizes |= dict(num_channels=channels, num_labels=classes, attn_implementation="sdpa")
    sizes |= dict(intermediate_size=4 * d) if kind == "ViT" else dict(layerscale_value=0.3)
    theirs = getattr(transformers, f"{kind}ForImageClassification")(
        getattr(transformers, f"{kind}Config")(**sizes | changes)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            noise = torch.empty(p.shape).normal_(generator=generator)
            is_gain = p.ndim == 1 and not key.endswith("bias")
            p.copy_(1 + 0.3 * noise if is_gain else noise * (0.3 if p.ndim < 2 else p[0].numel() ** -0.5))
    return theirs.to(dtype).eval()


def ours_of(flags, shape, dtype):
    d, heads, depth, side, patch, channels, classes = SHAPES[shape]
    sizes = dict(n_embd=d, n_head=heads, image_size=side, patch_size=patch, channels=channels, n_class=classes)
    return ViT(config_of(sizes | flags, depth)).to(dtype).eval()


def reader(name: str, shape, known):
    """A function of `get`, which gives their tensors by name: what stands for our parameter `name` of this shape."""
    if found := re.match(r"blocks\.(\d+)\.mlp\.f\.(gate|up)\.(\w+)", name):
        merged = re.compile(rf".*\.{found[1]}\.mlp\.weights_in\.{found[3]}")  # SwiGLU: gate and up in one matrix
        if both := [key for key in known if merged.fullmatch(key)]:
            return lambda get: get(both[0]).chunk(2)[found[2] == "up"].reshape(shape)
    theirs = their_name(name, known)
    return lambda get: get(theirs).reshape(shape)


@torch.no_grad()
def take_weights(ours, theirs) -> dict:
    """Copy their weights; {our name: reader}."""
    known = dict(theirs.named_parameters())
    readers = {name: reader(name, p.shape, known) for name, p in ours.named_parameters()}
    for name, p in ours.named_parameters():
        p.copy_(readers[name](known.get))
    return readers


TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_vit_is_that_of_transformers(shape, dtype):
    """The class token's head, LayerNorm with ε = 1e-12, exact GELU, biases everywhere: logits, loss, gradients."""
    theirs, ours = peer("ViT", shape, dtype), ours_of(VIT, shape, dtype)
    readers = take_weights(ours, theirs)
    assert ours.num_params() == theirs.num_parameters()
    c = ours.config
    images, targets = pictures(3, c.channels, c.image_size, dtype=dtype), labels(3, c.n_class)
    expected = theirs(images, labels=targets)
    logits, loss = ours(images, targets)
    assert logits.shape == (3, c.n_class) and error(logits, expected.logits) < TOLERANCES[dtype]
    assert error(loss, expected.loss) < TOLERANCES[dtype]
    expected.loss.backward()
    loss.backward()
    known = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        want = readers[name](lambda key: known[key].grad)
        # the floor: a bias of keys has a gradient of rounding alone, since softmax does not see it
        assert error(p.grad, want, floor=1e-2) < 10 * TOLERANCES[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("swiglu", (False, True), ids=("gelu", "swiglu"))
def test_layerscale_vit_is_dinov2(swiglu, dtype):
    """The stream behind the final norm, of every token. Their head reads the class token and the mean over patches, one
    beside the other: with its half for the mean set to 0, it is ours; else it is added by hand."""
    shape = "wide, four channels"
    theirs = peer("Dinov2", shape, dtype, use_swiglu_ffn=swiglu)
    hidden = (4 * 48 * 2 // 3 + 7) // 8 * 8  # theirs
    ours = ours_of(LAYERSCALE | (dict(mlp="swiglu", n_ff=hidden) if swiglu else dict()), shape, dtype)
    d = ours.config.n_embd
    head = theirs.classifier.weight.detach().clone()
    theirs.classifier.weight.data = head[:, :d]
    take_weights(ours, theirs)
    assert ours.num_params() == theirs.num_parameters() - d  # less a token that stands for masked patches
    theirs.classifier.weight.data = head
    images = pictures(3, 4, 16, dtype=dtype)
    tokens = ours.final_norm(ours.stream(images))
    assert error(tokens, theirs.dinov2(images).last_hidden_state) < TOLERANCES[dtype]
    both = ours(images)[0] + tokens[:, 1:].mean(1) @ head[:, d:].T
    assert error(both, theirs(images).logits) < TOLERANCES[dtype]
    theirs.classifier.weight.data = torch.cat((head[:, :d], torch.zeros_like(head[:, d:])), 1)
    assert error(ours(images)[0], theirs(images).logits) < TOLERANCES[dtype]


# -------------------------------------------------------------------------------------------- patches, and what is fed


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
@drawn(15, 200)
def test_patches_are_rows_of_squares(n, channels, size, across):
    images = pictures(n, channels, size * across)
    assert torch.equal(patches(images, size), cut(images, size))
    rows = torch.randn(5, channels * size * size, dtype=torch.float64)
    convolved = F.conv2d(images, rows.view(5, channels, size, size), stride=size).flatten(2).mT
    assert error(patches(images, size) @ rows.T, convolved) < 1e-12


@pytest.mark.parametrize(
    "shape", ((2, 1, 6, 6), (2, 3, 6, 4), (2, 3, 4, 6), (2, 3, 8, 8), (2, 6, 6), (3, 6, 6), (2, 9))
)
def test_images_of_another_shape_are_refused(shape):
    model = build(dict())
    with pytest.raises(ValueError) as e:
        model(torch.zeros(shape, dtype=torch.float64))
    found = " × ".join(map(str, shape[1:]))
    assert str(e.value).startswith(f"images of {found} (") and str(e.value).endswith("do not fit the model's 3 × 6 × 6")


def test_what_comes_back():
    """(logits, None) without targets; the loss alone in training; both in evaluation. Logits are fp32 at least."""
    model, images, targets = build(dict(), dtype=torch.float32), pictures(dtype=torch.float32), labels()
    for dtype in (None, torch.bfloat16):
        model.set_runtime(compute_dtype=dtype)
        for training in (True, False):
            logits, none = model.train(training)(images)
            assert none is None and logits.shape == (2, 7) and logits.dtype == torch.float32
            kept, loss = model(images, targets)
            assert loss.shape == () and loss.dtype == torch.float32
            assert kept is None if training else torch.equal(kept, logits)


def test_a_batch_is_its_images_one_by_one():
    for flags in (dict(), dict(S5, pool="mean"), dict(n_expert=4)):
        model, images = build(flags), pictures(5)
        single = torch.cat([model(images[i : i + 1])[0] for i in range(5)])
        assert error(model(images)[0], single) < 1e-12


def test_example_and_inputs_fit():
    model = build(dict(), dtype=torch.float32)
    batch = model.example(3)
    assert model(*batch)[0].shape == (3, 7) and [t.shape for t in batch] == [(3, 3, 6, 6), (3,)]
    share = torch.rand(3)
    (images,) = model.inputs(*batch, batch[1], share)
    assert images is batch[0] and model.stream(images).shape == (3, PATCHES + 1, 16)


# --------------------------------------------------------------------------------------------------------------- loss


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
    smoothing = smoothing if training else 0.0
    assert error(loss, plain_loss(logits, targets, smoothing)) < 1e-12
    assert error(loss, F.cross_entropy(logits, targets, ignore_index=-1, label_smoothing=smoothing)) < 1e-12


@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_loss_of_mixed_images_is_that_of_soft_targets(smoothing):
    """Of a pair of labels with these shares, padding rows left out; in value and gradient."""
    model, images = build(dict()).train(), pictures(6)
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
    # a share of 1 is no mixing at all; the same label twice neither
    alone = model(images, own)[1]
    assert error(model(images, own, other, torch.ones(6))[1], alone) < 1e-12
    assert error(model(images, own, own, share)[1], alone) < 1e-12


# ----------------------------------------------------------------------------------------------------- initial weights

WIDE = dict(n_head=4, n_embd=192, image_size=56, patch_size=7, channels=4, n_class=400, norm_eps=1e-6)
TRUNCATED = math.sqrt(1 - 4 * math.exp(-2) / (math.sqrt(2 * math.pi) * math.erf(math.sqrt(2))))  # std of N(0, 1) in ±2


@pytest.mark.parametrize("init", ("normal", "xavier", "xavier_cut"))
def test_fixups_matrices_start_at_zero(init):
    model = ViT(config_of(dict(norm="none", fixup=True, init=init), 2))
    ends = [m.weight for b in model.blocks for m in (b.attn.f.o, b.mlp.f.down)]
    assert not any(weight.any() for weight in [*ends, model.head.weight]) and model.blocks[0].attn.f.q.weight.any()


@pytest.mark.parametrize("init", ("normal", "xavier", "xavier_cut"))
def test_initial_standard_deviations(init):
    """Xavier's σ² = 2 / (n_in + n_out), for patches too, cut off at 2σ; embeddings and head are N(0, init_std)."""
    flags = dict(WIDE, init=init, init_std=0.05, residual_init="plain", bias=True)
    model = ViT(config_of(flags, 2))
    for name, p in model.named_parameters():
        if p.ndim < 2:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name
            continue
        drawn_as = init if name.startswith(("patch", "blocks")) else "normal"
        std = 0.05 if drawn_as == "normal" else math.sqrt(2 / (p.shape[0] + p.shape[1]))
        z, n = p.double() / std, p.numel()
        limit, spread = (2.0, TRUNCATED) if drawn_as == "xavier_cut" else (math.inf, 1.0)
        assert z.abs().max() <= limit * (1 + 1e-6), name
        assert abs(z.mean()) < 5 / n**0.5 and abs(z.std() - spread) < 5 / (2 * n) ** 0.5 + (n < 300) * 0.1, name
        if n > 10_000:
            assert (z.abs().max() > 1.99) and (drawn_as != "xavier_cut" or (z.abs() > 1.9).any()), name
    assert model.patch.weight.shape == (192, 4 * 49) and model.wpe.weight.shape == (65, 192)


def test_the_last_matrices_of_branches_are_scaled_before_the_cut():
    model = ViT(config_of(dict(WIDE, init="xavier_cut"), 2))  # residual_init=gpt2: 1/√(2L)
    for part, shape in (("attn.f.o", 2 * 192), ("mlp.f.down", 5 * 192)):
        weight = model.blocks[1].get_submodule(part).weight
        std = math.sqrt(2 / shape) / 2
        assert 1.99 * std < weight.abs().max() <= 2 * std * (1 + 1e-6)
        assert abs(weight.std() / std - TRUNCATED) < 0.02


# --------------------------------------------------------------------------------------------------------- validation


class Made:
    """In the place of a model and of its dataset: images whose pixels are their logits."""

    def __init__(self, logits, targets, mixes=False):
        self.all_logits, self.targets, self.mixes = logits.astype(np.float32), targets, mixes

    def validation(self, tokens):
        return np.arange(len(self.targets))

    def val_batch(self, chosen, size):
        images = np.zeros((size, *self.all_logits.shape[1:]), np.float32)
        targets = np.full(size, -1, np.int64)
        images[: len(chosen)], targets[: len(chosen)] = self.all_logits[chosen], self.targets[chosen]
        return (images, targets, targets, np.ones(size, np.float32)) if self.mixes else (images, targets)

    def __call__(self, images, targets, *mixed):
        losses = F.cross_entropy(images, targets, ignore_index=-1, reduction="sum")
        return images, losses / (targets != -1).sum().clamp(min=1)

    def eval(self):
        pass

    train = eval


def scores(made, micro):
    env, stop = Env(0, 1, torch.device("cpu"), torch.float32, False), SimpleNamespace(agreed=lambda: False)
    return engine.evaluate(made, Images(), made, SimpleNamespace(eval_tokens=0), micro, env, stop)


@given(st.integers(1, 24), st.integers(2, 9), st.integers(0, 2**31), st.sampled_from((1, 2, 3, 7, 30)), st.booleans())
@drawn(25, 400)
def test_validation_scores_are_numpys(n, classes, seed, micro, mixes):
    """Top-1 and top-5, of fewer than five classes too; any micro batch, so padding rows do not count."""
    random = np.random.default_rng(seed)
    logits = random.permuted(np.tile(np.arange(classes) / 3, (n, 1)), axis=1)  # no two are equal
    targets = random.integers(0, classes, n)
    order = np.argsort(-logits, axis=1)
    expected = {f"val_top{k}": (order[:, :k] == targets[:, None]).any(1).mean() for k in (1, 5)}
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    found = scores(Made(logits, targets, mixes), micro)
    assert found.keys() == {"val_loss", "val_top1", "val_top5"}
    assert found["val_loss"] == pytest.approx(-log_p[np.arange(n), targets].mean(), rel=1e-5)
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-12)
    if classes <= 5:
        assert found["val_top5"] == 1.0


# ------------------------------------------------------------------------------------------- what the dataset says


META = dict(kind="images", image_size=6, channels=3, classes=list("abcdefg"))


def unfitted(**changes):
    """A config that leaves to the dataset what it may."""
    return GPTConfig(**dict(n_layer=1, n_head=2, n_embd=8, patch_size=2) | changes)


@pytest.mark.parametrize("pool, tokens", (("cls", 10), ("mean", 9)))
def test_a_dataset_fills_in_what_a_config_leaves_open(pool, tokens):
    config = unfitted(pool=pool)
    task_of(config).fit(config, META, "pets")
    assert (config.image_size, config.channels, config.n_class, config.block_size) == (6, 3, 7, tokens)
    config.check()
    again = unfitted(pool=pool, image_size=6, channels=3, n_class=7, block_size=tokens)
    task_of(again).fit(again, META, "pets")
    assert again == config
    sizes = unfitted(image_size=8)
    task_of(sizes).fit(sizes, META | dict(image_size=None), "photos")
    assert (sizes.image_size, sizes.block_size) == (8, 17)


@pytest.mark.parametrize(
    "flags, meta, words",
    (
        (dict(image_size=8), {}, "image_size=8 does not fit dataset 'pets', which has 6"),
        (dict(channels=1), {}, "channels=1 does not fit dataset 'pets', which has 3"),
        (dict(n_class=10), {}, "n_class=10 does not fit dataset 'pets', which has 7"),
        (dict(), dict(image_size=None), "several sizes: set image_size"),
        (dict(), dict(kind="text", vocab_size=50), "is for images, but dataset 'pets' is of text"),
        (dict(patch_size=0), {}, "dataset 'pets' is of images, but patch_size=0 is for text: set patch_size"),
    ),
)
def test_a_dataset_that_does_not_fit(flags, meta, words):
    with pytest.raises(ValueError, match=re.escape(words)) as e:
        task_of(unfitted(**flags)).fit(unfitted(**flags), META | meta, "pets")
    assert "\n" not in str(e.value)


REFUSED = {
    "4 does not divide 6": (dict(patch_size=4), "image_size=6 must be a multiple of patch_size=4"),
    "negative": (dict(patch_size=-2), "patch_size=-2 must not be negative"),
    "larger than the image": (dict(patch_size=12), "image_size=6 must be a multiple of patch_size=12"),
    "rope": (dict(pos="rope"), "pos=rope: patch_size=2 makes this a model of images: leave it out"),
    "a vocabulary": (dict(vocab_size=50), "vocab_size=50: patch_size=2 makes this a model of images"),
    "block_size": (dict(block_size=9), "block_size=9: an image of 6 pixels has 10 tokens"),
    "block_size, mean": (dict(block_size=10, pool="mean"), "block_size=10: an image of 6 pixels has 9 tokens"),
    "pool": (dict(pool="max"), "pool='max' is unknown: allowed are cls, mean"),
    "no classes": (dict(n_class=0), "n_class=0: must be at least 1"),
    "huge": (dict(image_size=2**17, block_size=2**32 + 1), "larger than any model has"),
    "drop_path": (dict(drop_path=-0.1), "drop_path=-0.1 must be at least 0 and below 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_contradict_themselves(name):
    changes, words = REFUSED[name]
    flags = dict(SIZE, n_layer=1, block_size=10) | changes
    with pytest.raises(ValueError, match=re.escape(words)) as e:
        ViT(GPTConfig(**flags))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("flag", ("image_size=8", "channels=3", "n_class=5", "pool='mean'"))
def test_flags_of_images_need_patches(flag):
    name, value = flag.split("=")
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, vocab_size=50, **{name: eval(value)})
    with pytest.raises(ValueError, match=f"{name}=.*patch_size=0 makes this a model of text: set patch_size"):
        config.check()
