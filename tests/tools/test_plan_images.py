"""--plan of images: what is counted against a real step, and every line that is of images in it."""

import re
import sys

import pytest
import torch

from model import GPTConfig
from nanodnt.engine import Trainer, prepare_model, training_step
from nanodnt.optim import fill_defaults, make_optimizer
from nanodnt.plan.__main__ import main
from nanodnt.plan.memory import Timeline, trace
from nanodnt.plan.planning import PlanConfig, describe_plan
from nanodnt.plan.strategies import make_strategy, total_bytes
from nanodnt.run.environment import Env
from nanodnt.settings import TrainConfig
from support.profiles import profiled_peak
from vision import ViT

pytestmark = pytest.mark.usefixtures("one_thread")
VIT = dict(n_layer=3, n_head=2, n_embd=64, patch_size=4, image_size=32, channels=3, n_class=10, block_size=65)
VIT |= dict(mlp="gelu_erf", bias=True)
CASES = {
    "ViT": (VIT | dict(norm="layernorm"), {}),
    "V-DNT, stochastic depth": (
        VIT | dict(pre_norm="attn", mid_norm="both", input_norm=True, qk_norm=True, drop_path=0.2),
        dict(optimizer="msgdw", label_smoothing=0.1),
    ),
    "mean, checkpointing": (VIT | dict(pool="mean", block_size=64), dict(activation_checkpointing=True)),
}


def build(flags, changes, device="meta", dtype=torch.float32):
    config = TrainConfig(batch_size=16, **changes)
    fill_defaults(config)
    model = ViT.empty(GPTConfig(**flags)) if device == "meta" else ViT(GPTConfig(**flags))
    prepare_model(model, config, Env(0, 1, torch.device(device), dtype, False))
    return model, make_optimizer(model, config), config


@pytest.mark.parametrize("name, accumulation", [(name, 1 + (name == "ViT")) for name in CASES])
def test_a_step_of_images_takes_what_was_predicted(name, accumulation, tmp_path):
    """Bytes counted on the meta device against the allocator of a real step on the CPU, with its batch."""
    flags, changes = CASES[name]
    model, optimizer, config = build(flags, changes)
    timeline = Timeline(model, optimizer, config, config.activation_checkpointing)
    strategy = make_strategy("none", model, optimizer, config, 1)._replace(weights=0, state=0)
    micro = 16 // accumulation
    predicted = timeline.peak(micro, accumulation > 1, strategy).total
    model, optimizer, config = build(flags, changes, device="cpu")
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step():
        batch = torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)
        training_step(Trainer(model, optimizer, scaler, micro, config.grad_clip), batch)

    measured = profiled_peak(step, tmp_path / "trace.json")
    print(f"predicted {predicted / measured:.3f} of the measured")
    assert 0.98 < predicted / measured < 1.02


def test_two_micro_batches_determine_another():
    model, optimizer, config = build(*CASES["V-DNT, stochastic depth"], dtype=torch.bfloat16)
    strategy = make_strategy("none", model, optimizer, config, 1)._replace(weights=0, state=0)
    predicted = Timeline(model, optimizer, config, False).peak(5, False, strategy)
    memory = trace(model, optimizer, config, 5)
    assert strategy.batch == 16 * (3 * 32 * 32 * 4 + 8)
    found = max(gradients + other for _, gradients, other in memory.rows)
    assert predicted.total == pytest.approx(found + strategy.batch, abs=64)
    assert memory.gradients == total_bytes(model.parameters())


def test_the_plan_of_images():
    """Images, tokens, FLOPs and days agree with each other."""
    model, _, config = build(*CASES["ViT"])
    config.max_iters, flops = 1000, 65 * model.flops_per_token()
    text = "\n".join(describe_plan(model, config, PlanConfig(gpus=2, mfu=0.5)))
    assert f"GFLOPs per token, {flops / 1e9:.4g} per image, " in text
    assert "1,000 steps of 16 images × 65 = 1,040 tokens are 16,000 images, 0.00104e9 tokens, " in text
    assert f"{16_000 * flops:.3g} FLOPs" in text
    assert "not compiled (8 images of a step each)" in text and "sequence" not in text
    rates = re.search(r"([\d,]+) tokens/s, ([\d,]+) images/s", text)
    tokens, images = (int(rate.replace(",", "")) for rate in rates.groups())
    assert tokens == pytest.approx(65 * images, rel=1e-6) and images == pytest.approx(989e12 / flops, rel=1e-3)


@pytest.mark.parametrize("words", [(), ("--plan", "--gpus=4")])
def test_without_a_dataset_it_is_imagenet(words, monkeypatch, capsys):
    flags = ["--dataset=nowhere", "--patch_size=16", "--n_layer=2", "--n_embd=64", "--n_head=2", "--max_iters=10"]
    monkeypatch.setattr(sys, "argv", ["model.py", *flags, *words])
    assert main() == 0
    text = capsys.readouterr().out
    first, second, *_ = text.splitlines()
    assert first.endswith("197 tokens an image")
    sizes = "images of 224 × 224 pixels, 3 channels, patches of 16 × 16, 1000 classes"
    assert second == f"{sizes}; ImageNet-1k's, since dataset 'nowhere' is not prepared here"
    assert "causal" not in text and "vocabulary" not in text
