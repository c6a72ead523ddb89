"""Runs on images: they learn digits, in bf16 too; what they log and track is by the equations."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from nanodnt.data.images import PreparedImages
from nanodnt.weights import model_from_checkpoint
from support.reference import Net
from support.runs import column, load, metrics, run
from support.tolerances import LOSS
from support.tracked import SIX_DIGITS
from support.vision import AUGMENTED, TINY, equation, make_digits

pytestmark = pytest.mark.usefixtures("quick")

RANDOM = dict(AUGMENTED, drop_path=0.3, dropout=0.1)
PRE = dict(pre_norm="both", mid_norm="none", input_norm=False)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """240 digits to train on, and 50 to validate. Read only."""
    return make_digits(tmp_path_factory.mktemp("data") / "digits")


def train(out, digits, **changes):
    assert run(**TINY | dict(out_dir=out, dataset=digits) | changes) == 0


def test_each_random_change_changes_the_run(digits, tmp_path):
    """Each setting acts, from the first step on, on the training alone."""
    train(tmp_path / "none", digits, max_iters=1)
    parts = dict(AUGMENTED, crop_padding=2, drop_path=0.5) | dict(dropout=0.3)
    for name, value in parts.items():
        train(tmp_path / name, digits, max_iters=1, **{name: value})
        assert column(tmp_path / name, "train_loss") != column(tmp_path / "none", "train_loss"), (
            name
        )
        for score in ("val_loss", "val_top1", "val_top5"):
            assert column(tmp_path / name, score)[0] == column(tmp_path / "none", score)[0], (
                name,
                score,
            )


def test_what_is_shown_is_of_images(digits, tmp_path, capsys, monkeypatch):
    """Their number per second, and the unit of the losses in loss.png."""
    units = []
    monkeypatch.setattr("train.draw_loss", lambda out_dir, unit, say: units.append(unit))
    train(tmp_path, digits, max_iters=1)
    row = metrics(tmp_path)[-1]
    assert row["images_per_s"] == pytest.approx(row["tokens_per_s"] / 17)
    assert " images/s  eta" in capsys.readouterr().out and units == ["image"]


# ----------------------------------------------------------------------------------------- learning


def test_it_learns_digits(digits, tmp_path, capsys):
    """Of ten classes, from 240 images; the best checkpoint evaluates to what was logged."""
    config = dict(max_iters=120, eval_interval=60, drop_path=0.1, label_smoothing=0.1, pool="mean")
    train(tmp_path, digits, **config, optimizer="muon", learning_rate=1e-2)
    losses, top1 = (column(tmp_path, name) for name in ("train_loss", "val_top1"))
    assert losses[120] < losses[1] - 1 and top1[120] > 0.6 > 0.25 > top1[0]
    assert column(tmp_path, "val_top5")[120] > 0.9
    capsys.readouterr()
    train(tmp_path / "other", digits, eval_only=True, init_from=tmp_path)
    step = load(tmp_path / "best.pt")["step"]
    loss, first, five = (column(tmp_path, f"val_{name}")[step] for name in ("loss", "top1", "top5"))
    line = re.search(r"validation loss (\S+), top-1 (\S+)%, top-5 (\S+)%", capsys.readouterr().out)
    assert [float(x) for x in line.groups()] == pytest.approx(
        [loss, 100 * first, 100 * five], abs=1e-4
    )


def test_validation_is_that_of_the_equations(digits, tmp_path):
    """The model of a checkpoint on the validation split: `val_loss`, top-1 and top-5 from the
    float64 equations."""
    train(tmp_path, digits, max_iters=8, eval_interval=8, pool="mean", **RANDOM)
    found = load(tmp_path / "last.pt")
    parts = dict(
        attn="pre mid", mlp="mid", qk_norm=True, input_norm=True, linear_bias=True, act="gelu_erf"
    )
    net = Net(vocab=10, heads=2, kv_heads=2, blocks=2, eps=1e-6, tied=False, causal=False, **parts)
    data = PreparedImages(digits, 16, image_size=8)
    images, targets = (torch.from_numpy(part) for part in data.val_batch(data.validation(), 50))
    weights = {name: t.double() for name, t in found["model"].items()}
    logits = equation(net, weights, images.double(), 2, "mean")
    row = metrics(tmp_path)[-1]
    assert row["val_loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=LOSS)
    order = logits.argsort(1, descending=True)
    for k in (1, 5):
        assert row[f"val_top{k}"] == pytest.approx(
            (order[:, :k] == targets[:, None]).any(1).double().mean().item()
        )


# ----------------------------------------------------------------------------------------- tracking


def test_the_largest_logit_is_of_all_pairs(digits, tmp_path, monkeypatch):
    """Patches see later ones too."""
    config = dict(PRE, qk_norm=False, norm="dyt", dyt_alpha_attn=0.7, n_kv_head=1)
    train(tmp_path, digits, max_iters=4, track_interval=2, seed=2, **RANDOM | config)
    track = column(tmp_path, "track")[4]
    model = model_from_checkpoint(load(tmp_path / "last.pt")).eval()
    data = PreparedImages(digits, 17, image_size=8)
    logits, attend = [], F.scaled_dot_product_attention

    def note_logits(q, k, v, **how):
        scores = (q @ k.repeat_interleave(2, 1).mT).abs() / math.sqrt(q.shape[-1])
        logits.append((scores.max().item(), scores.tril().max().item()))
        return attend(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note_logits)
    with torch.no_grad():
        model.stream(torch.from_numpy(data.val_batch(data.validation()[:16], 16)[0]))
    assert track["logit_max"] == pytest.approx([whole for whole, _ in logits], rel=SIX_DIGITS)
    assert any(causal < whole for whole, causal in logits)
    assert track["grad_norm"].keys() == {
        "patch",
        "pos",
        "qk",
        "vo",
        "ffn",
        "head",
        "gain_in",
        "bias",
        "scalar",
    }
