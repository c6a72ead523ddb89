"""Runs of mixtures of experts: their balance, bad steps skipped and rolled back, fine-tuned,
sampled from."""

import math

import pytest
import torch

from support.runs import column, different, load, run
from support.strikes import spoil_gradients

pytestmark = pytest.mark.usefixtures("quick")

EXPERTS = dict(n_expert=4, n_ff=16, mlp="swiglu")
BIAS = dict(EXPERTS, balance="bias", balance_rate=0.01)


def biases(checkpoint: dict) -> dict:
    return {name: t for name, t in checkpoint["model"].items() if name.endswith("choice_bias")}


def test_fp16_with_loss_scaling(dataset, tmp_path):
    """An overflow halves the scale; the biases move by the load, not by its scale."""
    config = dict(dataset=dataset, **BIAS, max_iters=10)
    with spoil_gradients(math.inf, {3}, "blocks.1.mlp.f.experts.down.weight"):
        assert run(out_dir=tmp_path / "fp16", dtype="float16", **config) == 0
    last = load(tmp_path / "fp16" / "last.pt")
    assert (
        last["scaler"]["scale"] == 2.0**15 and column(tmp_path / "fp16", "skipped_steps")[10] == 1
    )
    moved = torch.cat([*biases(last).values()]) / 0.01
    assert torch.allclose(moved, moved.round(), atol=1e-3) and 0 < moved.abs().max() <= 9


# ---------------------------------------------------------------------------------- what is trained


@pytest.fixture(scope="module")
def trained(dataset, quick, tmp_path_factory):
    """A run of 40 steps. Read only."""
    out = tmp_path_factory.mktemp("trained")
    assert (
        run(out_dir=out, dataset=dataset, max_iters=40, eval_interval=20, n_expert_shared=1, **BIAS)
        == 0
    )
    return out


def test_fine_tuning_from_a_run(trained, dataset, tmp_path, capsys):
    """Weights and biases of the choice are taken over; the flags of the run may leave out that it
    has experts."""
    for source in (trained, trained / "last.pt"):
        assert (
            run(
                out_dir=tmp_path / "tuned",
                dataset=dataset,
                init_from=source,
                max_iters=0,
                overwrite=True,
            )
            == 0
        )
        printed = capsys.readouterr().out
        name = "last" if str(source).endswith("last.pt") else "best"
        start = load(trained / f"{name}.pt")["model"]
        assert (
            "model of the checkpoint, not of the flags:" in printed and "n_expert 0 → 4" in printed
        )
        assert different(load(tmp_path / "tuned" / "last.pt")["model"], start) == []


@pytest.mark.parametrize(
    "old, new, found",
    [("none", "bias", "bias"), ("loss", "none", "none"), ("bias", "loss", "bias")],
)
def test_a_new_run_from_weights_chooses_its_balance(old, new, found, dataset, tmp_path, capsys):
    """Biases start at 0. Weights that have biases keep them. A line says which it is. Resuming
    changes no balance."""
    rate = dict(balance_rate=0.01) if found == "bias" else {}
    assert run(out_dir=tmp_path / "old", dataset=dataset, max_iters=3, **EXPERTS, balance=old) == 0
    flags = dict(out_dir=tmp_path / "new", dataset=dataset, init_from=tmp_path / "old" / "last.pt")
    capsys.readouterr()
    assert run(**flags, max_iters=0, **EXPERTS, balance=new, **rate) == 0
    printed = capsys.readouterr().out
    assert (f"balance {new} → {found}" in printed) == (new != found)
    changed = f"balance of experts: {old} in the run of the weights, {new} in this one\n"
    assert (changed in printed) == ("balance of experts:" in printed) == (old != found)
    before, start = load(tmp_path / "old" / "last.pt"), load(tmp_path / "new" / "last.pt")
    assert start["model_config"] == before["model_config"] | dict(balance=found)
    assert (
        start["model"].keys() - before["model"].keys()
        == biases(start).keys() - biases(before).keys()
    )
    assert len(biases(start)) == (2 if found == "bias" else 0)
    assert (
        different({name: start["model"][name] for name in before["model"]}, before["model"]) == []
    )
    if old != "bias":
        assert not any(t.any() for t in biases(start).values())
    assert run(**flags | dict(init_from="resume"), max_iters=2, **EXPERTS, balance=old, **rate) == 0
    after = load(tmp_path / "new" / "last.pt")
    assert after["model_config"] == start["model_config"]
    if found == "bias":
        assert different(biases(after), biases(start))
