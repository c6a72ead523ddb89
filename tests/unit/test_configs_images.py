"""The papers' experiments on images: config/vdnt/, and the ViTs of config/dyt/ and config/lns/."""

import pytest
import torch

from configurator import read_file
from layers import rules
from model import GPTConfig
from nanodnt.engine import prepare_model, split_batch, training_step
from nanodnt.networks import fit, stand_in
from nanodnt.optim import fill_defaults, lr_at, make_optimizer, notes
from nanodnt.run.environment import Env
from support.pages import ROOT, load
from vision import ViT

FILES = [*(ROOT / "config/vdnt").glob("*.py"), *(ROOT / "config").glob("*/vit_*.py")]
FILES = {str(path.relative_to(ROOT / "config"))[:-3]: path for path in sorted(FILES)}
KEYS = {name: {k: v for k, (v, _) in read_file(path).items()} for name, path in FILES.items()}
TINY = dict(n_layer=2, n_head=2, n_embd=8, image_size=4, patch_size=2, channels=1, n_class=3, batch_size=4)
TINY |= dict(micro_batch_size=4)

# name: d, heads, depth, side of a patch, tokens of an image, millions of parameters (ViT-S, B, L, H of Dosovitskiy et
# al. and timm: 22.05, 86.57, 304.33, 632.05), stochastic depth
SIZES = {
    "vdnt/digits": (64, 4, 6, 2, 17, 0.302, 0.1),
    "vdnt/large": (1024, 16, 24, 16, 197, 304.3, 0.1),
    "vdnt/huge": (1280, 16, 32, 14, 257, 632.0, 0.5),
    "dyt/vit_b": (768, 12, 12, 16, 197, 86.57, 0.1),
    "dyt/vit_l": (1024, 16, 24, 16, 197, 304.3, 0.4),
    "lns/vit_s": (384, 6, 12, 16, 197, 22.05, 0.1),
}
# LR, min LR, decay, β₂, batch, epochs, epochs of warm-up
SETTINGS = {
    "vdnt/large": (1e-3, 1e-8, 0.1, 0.99, 1024, 150, 60),
    "vdnt/huge": (1e-3, 1e-8, 0.1, 0.99, 1024, 150, 60),
    "dyt/vit_b": (4e-3, 1e-6, 0.05, 0.999, 4096, 300, 20),
    "dyt/vit_l": (4e-3, 1e-6, 0.05, 0.95, 4096, 300, 20),
    "lns/vit_s": (4e-3, 1e-6, 0.05, 0.999, 4096, 300, 20),
}
TRAINING_IMAGES = 1_281_167  # of ImageNet-1k
OVERLAYS = {
    "vdnt/vit": dict(norm="layernorm", norm_eps=1e-6, pre_norm="both", mid_norm="none", post_norm="none")
    | dict(input_norm=False, qk_norm=False),
    "vdnt/large_msgdw": dict(optimizer="msgdw", learning_rate=0.5, min_lr=1e-8, weight_decay=2e-4, momentum=0.9)
    | dict(dampening=0.0, nesterov=False, grad_clip=0.0, beta2=0.95),
    "vdnt/huge_msgdw": dict(optimizer="msgdw", learning_rate=0.1, min_lr=1e-8, weight_decay=1e-3, momentum=0.9)
    | dict(dampening=0.0, nesterov=False, grad_clip=0.0, beta2=0.95),
    "dyt/vit_dyt": dict(norm="dyt", norm_eps=1e-6, dyt_alpha_attn=0.5, dyt_alpha_other=0.5, dyt_learn_alpha=True)
    | dict(dyt_squash="tanh", dyt_bias=True, embed_scale=False),
    "dyt/vit_layernorm": dict(norm="layernorm", norm_eps=1e-6, dyt_alpha_attn=None, dyt_alpha_other=None)
    | dict(dyt_learn_alpha=True, dyt_squash="tanh", dyt_bias=False, embed_scale=False),
}
# pairs that the headers name
TOGETHER = [("vdnt/large", "vdnt/vit"), ("vdnt/large", "vdnt/large_msgdw"), ("vdnt/huge", "vdnt/vit")]
TOGETHER += [("vdnt/huge", "vdnt/huge_msgdw"), ("dyt/vit_b", "dyt/vit_dyt"), ("dyt/vit_l", "dyt/vit_dyt")]
TOGETHER += [("dyt/vit_b", "dyt/vit_layernorm"), ("vdnt/digits", "vdnt/vit"), ("vdnt/digits", "dnt/s1", "dyt/vit_dyt")]
TOGETHER += [(base, f"dnt/s{i}") for base in ("vdnt/digits", "vdnt/huge") for i in range(1, 6)]
TOGETHER += [("vdnt/large", "vdnt/vit", "vdnt/large_msgdw"), ("vdnt/huge", "dnt/s1", "vdnt/huge_msgdw")]
TOGETHER += [(name,) for name in SIZES]


def config(*names, **flags):
    """(GPTConfig, TrainConfig) of config files, by their short names, as train.py completes them."""
    files = [str(ROOT / "config" / f"{name}.py") for name in names]
    model, train = load(*files, *(f"--{k}={v}" for k, v in flags.items()))
    meta = dict(kind="images", image_size=8, channels=1, classes=range(10))  # of the digits
    fit(model, meta if train.dataset == "digits" and not flags else stand_in(model)[0], train.dataset)
    train.check()
    fill_defaults(train)
    return model, train


def test_every_file_is_in_the_tables():
    assert FILES.keys() == SIZES.keys() | OVERLAYS.keys() == SETTINGS.keys() | OVERLAYS.keys() | {"vdnt/digits"}
    assert {name: KEYS[name] for name in OVERLAYS} == OVERLAYS


@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_parameter_counts(name):
    model, _ = config(name)
    d, heads, depth, patch, tokens, millions, drop = SIZES[name]
    assert (model.n_embd, model.n_head, model.n_layer, model.patch_size, model.block_size, model.drop_path) == (
        *(d, heads, depth, patch, tokens, drop),
    )
    assert ViT.empty(model).num_params() / 1e6 == pytest.approx(millions, rel=3e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_recipes(name):
    model, c = config(name)
    epoch = TRAINING_IMAGES // c.batch_size
    epochs = (c.max_iters / epoch, c.warmup_iters / epoch)
    found = (c.learning_rate, c.min_lr, c.weight_decay, c.beta2, c.batch_size, *epochs)
    assert found == SETTINGS[name]
    mixed = (c.rand_augment, c.rand_augment_std, c.mixup, c.cutmix, c.label_smoothing, c.crop_area, c.flip)
    assert mixed == (9.0, 0.5, 0.8, 1.0, 0.1, 0.08, True)
    assert (c.grad_clip, c.schedule, c.decay_emb, model.mlp, model.bias) == (0.0, "cosine", False, "gelu_erf", True)
    for gpus in (1, 2, 4, 8):
        assert split_batch(c.batch_size, c.micro_batch_size, gpus)[0] == c.micro_batch_size
    assert lr_at(c.max_iters - 1, c) == pytest.approx(c.min_lr, rel=1e-3)


def test_lns_on_images_stands_behind_the_branches():
    model = ViT.empty(config("lns/vit_s")[0])
    for i, block in enumerate(model.blocks):
        for slots in (block.attn, block.mlp):
            assert (slots.pre.const, slots.mid.const) == (1.0, pytest.approx((i + 1) ** -0.5))
            assert slots.mid.gain is None


def test_dyt_stands_for_every_norm():
    model = ViT.empty(config("dyt/vit_b", "dyt/vit_dyt")[0])
    slots = [s for b in model.blocks for s in (b.attn.pre, b.mlp.pre)] + [model.final_norm]
    assert [(s.norm, s.init_alpha, s.bias is not None) for s in slots] == [("dyt", 0.5, True)] * 25


@pytest.mark.parametrize("names", TOGETHER, ids="+".join)
def test_they_build_train_and_print_no_notes(names):
    model, train = config(*names)
    assert (rules.notes(model), notes(train, ViT.empty(model))) == ([], [])
    model, train = config(*names, **TINY)
    assert isinstance(model, GPTConfig)
    net, env = ViT(model), Env(0, 1, torch.device("cpu"), torch.float32, False)
    prepare_model(net, train, env)
    optimizer, scaler = make_optimizer(net, train), torch.amp.GradScaler("cpu", enabled=False)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(train.warmup_iters, train, group)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    batch = torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    result = training_step(net, net, optimizer, scaler, batch, 4, train)
    assert result.loss.isfinite() and not result.found_inf
    for name, p in net.named_parameters():
        assert p.isfinite().all() and (not torch.equal(p, before[name]) or not p.grad.any()), name
