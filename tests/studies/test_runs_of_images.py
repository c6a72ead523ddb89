"""analyze.py and sweep.py on runs of images: the figures, their definitions, tables in images and
top-1."""

import json
from types import SimpleNamespace

import pytest
import torch

import analyze
import sweep
from model import GPTConfig
from studies.analysis import gradients, streams
from studies.analysis.compare import (
    compare_runs,
    final_loss_table,
    find_warnings,
    load_records,
    table_cells,
    write_report,
)
from studies.analysis.pipeline import FIGURES, AnalyzeConfig
from studies.analysis.runs import CheckpointedRun
from support import runs as tiny
from support.claims import in_process
from support.images import encode, noise, write_dataset
from vision import ViT

VIT = dict(
    patch_size=4, block_size=5, mlp="gelu_erf", label_smoothing=0.1, crop_padding=1, eval_tokens=0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset, `data`, of 40 + 12 images of 8 × 8 in 4 classes, and a run on it, `vit`."""
    folder = tmp_path_factory.mktemp("images")
    train, val = ([encode(pixels) for pixels in noise(n, 8, 8, seed=n)] for n in (40, 12))
    write_dataset(folder / "data", train, val)
    with tiny.quick_runs():
        assert (
            tiny.run(
                **VIT,
                dataset=folder / "data",
                out_dir=folder / "vit",
                keep_every=10,
                track_interval=10,
            )
            == 0
        )
    return folder


SMALL = ("--tokens=60", "--draws=1", "--snapshots=2", "--device=cpu")


@pytest.mark.parametrize(
    "names", ["removal,scatter,logits,alpha", pytest.param("all", marks=pytest.mark.deep)]
)
def test_figures_are_of_images(folder, names, capsys):
    """All but two of them read images."""
    assert tiny.call(analyze.main, folder / "vit", *SMALL, f"--figures={names}") == 0
    assert "vit: alpha is left out: no DyT\n" in capsys.readouterr().out
    results = folder / "vit" / "analysis"
    drawn = {path.stem for path in results.glob("*.png")}
    assert drawn >= (set(FIGURES) if names == "all" else set(names.split(","))) - {
        "alpha",
        "experts",
    }
    for name in drawn - {"norms", "gains", "preconditioner", "tracking", "jacobian"}:
        measured = json.loads((results / f"{name}.json").read_text())["runs"]["vit"]
        assert all("tokens" not in one and 1 <= one["images"] <= 12 for one in measured), name


def test_two_runs_of_images_compared(folder, tmp_path):
    """Another patch size means another number of tokens, of the same images: the losses are
    comparable."""
    how = VIT | dict(patch_size=2, block_size=17)
    with tiny.quick_runs():
        assert tiny.run(**how, dataset=folder / "data", out_dir=tmp_path / "fine") == 0
    runs = load_records([tmp_path / "fine", folder / "vit"])
    head, *rows = table_cells(final_loss_table(runs))
    assert (
        not find_warnings(runs)
        and head[2] == "images"
        and [cells[2] for cells in rows] == ["160", "160"]
    )
    last = tiny.metrics(folder / "vit")[-1]
    assert head[-1] == "top-1" and rows[1][-1] == f"{last['val_top1']:.2%}"
    page = write_report(
        runs, compare_runs(runs, tmp_path, "", ["png"]), tmp_path, ["loss"], ["png"]
    ).read_text()
    assert "Validation loss in nats per image" in page and "nats per token" not in page


def test_another_dataset_must_have_its_images(folder, tmp_path, dataset, capsys):
    def open_run(data):
        config = AnalyzeConfig(device="cpu", dataset=str(data))
        return CheckpointedRun(folder / "vit", "vit", config, torch.device("cpu"))

    images = [encode(pixels) for pixels in noise(12, 8, 8, seed=3)]
    write_dataset(tmp_path / "five", images, images, classes=5)
    write_dataset(tmp_path / "same", images, images)
    with pytest.raises(
        ValueError, match="classes 5.* do not fit the model .*classes 4.*choose another dataset"
    ):
        open_run(tmp_path / "five")
    with pytest.raises(ValueError, match="is of text, .*vit of images: choose another --dataset"):
        open_run(dataset)
    open_run(tmp_path / "same")
    assert "has another validation split" in capsys.readouterr().out


# ------------------------------------------------------------------ definitions, on a model by hand

NET = dict(
    n_layer=2, n_head=2, n_embd=16, patch_size=4, image_size=8, channels=1, n_class=3, block_size=5
)


def network(**changes) -> ViT:
    """A ViT in float64, whose weights are large enough to matter."""
    return ViT(GPTConfig(**NET | dict(init_std=0.3) | changes)).double().eval()


def images(n=3, seed=0):
    return torch.randn(
        n, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("branch", ["attn", "mlp"])
def test_the_jacobian_of_a_token_that_sees_all(branch):
    """The token's block of the Jacobian of the whole sub-layer, by autograd."""
    model, x, positions = network(mid_norm="both"), images(), [0, 2, 4]
    found = streams.residual_jacobian(model, [(x, None)], positions, 1, branch)
    entering = next(streams.collect_streams(model, [(x, None)]))[1]
    block, wanted = model.blocks[1], 0
    for one, t in zip(entering, positions, strict=True):
        if branch == "mlp":
            with torch.no_grad():
                one = block.attn(one[None])[0]
        jacobian = torch.autograd.functional.jacobian(
            lambda x: getattr(block, branch)(x[None])[0], one
        )
        wanted = wanted + jacobian[t, :, t] / len(positions)
    assert torch.allclose(found, wanted)


def test_the_largest_logit_is_of_all_pairs():
    """By hand; in some batches a pair has it that a causal mask would hide."""
    model, later = network(), 0
    attention = model.blocks[0].attn.f
    for seed in range(6):
        kept = []
        hook = attention.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.append(args[0])
        )
        found = streams.largest_logits(model, [(images(seed=seed), None)])["layers"]
        hook.remove()
        q, k = (m(kept[0]).view(3, 5, 2, 8).transpose(1, 2) for m in (attention.q, attention.k))
        largest, causal = ((x.abs().max() / 8**0.5).item() for x in (q @ k.mT, (q @ k.mT).tril()))
        assert found[0] == pytest.approx(largest)
        later += largest > causal
    assert later


def test_removal_has_top1():
    model, x = network(), images(8)
    targets = model(x)[0].argmax(-1)
    targets[:2] = (targets[:2] + 1) % 3
    found = streams.removal_drop(model, [(x[:5], targets[:5]), (x[5:], targets[5:])])
    assert found["top1"] == pytest.approx(6 / 8) and found["loss"] == pytest.approx(
        model(x, targets)[1].item()
    )
    for block, (drop, fall) in enumerate(zip(found["drop"], found["top1_drop"], strict=True)):
        rest = network()
        rest.blocks = torch.nn.ModuleList([rest.blocks[1 - block]])
        logits, loss = rest(x, targets)
        assert drop == pytest.approx(loss.item() - found["loss"])
        assert fall == pytest.approx(6 / 8 - (logits.argmax(-1) == targets).double().mean().item())


def test_sharpness_counts_images():
    """n g² with n the number of images, and one label for each."""
    model, x = network(n_layer=1), images(4)
    h = gradients.estimate_sharpness(model, [(x, None)], 1, torch.Generator().manual_seed(5))
    labels = gradients.sample_labels(model, model.stream(x), torch.Generator().manual_seed(5))
    assert labels.shape == (4,) and set(labels.tolist()) <= {0, 1, 2}
    for name, g in gradients.compute_gradients(model, [(x, labels)]).items():
        assert torch.allclose(h[name], 4 * g.square()), name
    run = SimpleNamespace(
        config=SimpleNamespace(draws=1), generator=torch.Generator, device="cpu", train_config={}
    )
    assert gradients.measure_sharpness(model, [(x, None)], run)["types"]["head"]["n"] == 3 * 16


def test_a_sweep_of_images(folder, tmp_path):
    words = [
        f"--{name}={value}"
        for name, value in (tiny.TINY | VIT | dict(max_iters=2, warmup_iters=1)).items()
    ]
    words = [word for word in words if not word.startswith(("--learning_rate", "--block_size"))]
    words += [
        f"--dataset={folder / 'data'}",
        "--learning_rate=1e-3,1e-2",
        "--seeds=1",
        "--jobs=1",
        f"--out={tmp_path}",
    ]
    with in_process():
        assert tiny.call(sweep.main, *words) == 0
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert [row["x"] for row in found["curves"]["the config"]] == [1e-3, 1e-2] and not found[
        "missing"
    ]
    assert (tmp_path / "sweep.png").exists()
