"""bench.py on images: its batches, tables and checks; what is of text alone is refused in one line."""

import json

import pytest
import torch

import bench
from nanodnt.bench import timing
from support.depth import spread
from support.devices import bench_setting
from support.images import encode, noise, write_dataset
from support.runs import call
from vision import ViT

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = dict(n_layer=2, n_head=2, n_embd=32, patch_size=4, image_size=8, channels=1, n_class=4, drop_path=0.2)
TINY |= dict(batch_size=4, label_smoothing=0.1, data="random", device="cpu", dtype="float32", compile=False)
TINY |= dict(repeats=1, steps=1, warmup=1, dataset="nowhere")


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    monkeypatch.setattr(timing, "busy_cores", lambda: 0.0)  # the real one takes a second


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    train, val = ([encode(pixels) for pixels in noise(n, 8, 8, seed=n)] for n in (40, 12))
    return write_dataset(tmp_path_factory.mktemp("data") / "noise", train, val)


def run(**changes) -> int:
    """bench.py in this process; the exit code."""
    return call(bench.main, *(f"--{name}={value}" for name, value in (TINY | changes).items()))


def make_setting(**changes):
    return bench_setting(**TINY | changes)


def test_random_images():
    setting = make_setting()
    images, labels = setting.fetch_batch(7)
    assert images.shape == (4, 1, 8, 8) and images.dtype == torch.float32 and 0.5 < images.std() < 1.5
    assert labels.shape == (4,) and labels.dtype == torch.int64 and set(labels.tolist()) <= set(range(4))
    assert torch.equal(setting.fetch_batch(7)[1], labels) and torch.equal(setting.fetch_batch(8)[0], images)
    assert len({tuple(setting.fetch_batch(step)[1].tolist()) for step in range(8)}) > 1
    *_, others, share = make_setting(mixup=0.2).fetch_batch(7)
    assert others.dtype == torch.int64 and share.dtype == torch.float32 and 0 <= share.min() <= share.max() <= 1


def test_the_size_of_random_images(data):
    """The dataset's, or if there is none ImageNet's."""
    sizes = dict(image_size=0, channels=0, n_class=0)
    flags = make_setting(dataset="nowhere", patch_size=16, **sizes).flags
    assert (flags.image_size, flags.channels, flags.n_class, flags.block_size) == (224, 3, 1000, 197)
    flags = make_setting(dataset=data, **sizes).flags
    assert (flags.image_size, flags.channels, flags.n_class, flags.block_size) == (8, 1, 4, 5)


def test_images_of_a_dataset(data):
    """They are those of the dataset, and decide size, channels and classes."""
    setting = make_setting(data="dataset", dataset=data, image_size=0, channels=0, n_class=0, crop_padding=1)
    assert (setting.flags.image_size, setting.flags.n_class, setting.flags.block_size) == (8, 4, 5)
    for found, wanted in zip(setting.fetch_batch(3), setting.dataset.batch(3, 4), strict=True):
        assert torch.equal(found, torch.from_numpy(wanted))
    assert isinstance(setting.new_model(), ViT)


@pytest.mark.parametrize("changes", [{}, dict(mixup=0.2, accumulation=0, micro_batch_size=2)])
def test_the_step_is_timed(changes, tmp_path, capsys):
    assert run(json=tmp_path / "bench.json", **changes) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    (row,) = found["variants"]
    assert row["step_tokens"] == 20 and row["images_per_s"] == pytest.approx(row["tokens_per_s"] / 5)
    micro, parts = (2, 2) if changes else (4, 1)
    assert found["header"]["step"] == f"{micro} images of 5 tokens × {parts} accumulation (the whole batch_size)"
    assert found["ceilings_flops_per_s"]["float32"].keys() == {"ffn"}
    text = capsys.readouterr().out
    assert "tokens/s  images/s" in text and "vocabulary" not in text


@pytest.mark.parametrize("name", spread(("layouts", "norms", "optimizers", "micro_batch"), ["norms", "micro_batch"]))
def test_sets(name, tmp_path):
    assert run(vary=name, json=tmp_path / "bench.json") == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    if name == "micro_batch":
        assert [row["step_tokens"] for row in found["variants"]] == [5, 10, 20]
        assert all(row["images_per_s"] and row["planned_bytes"] for row in found["variants"])
    if name == "layouts":
        assert len(found["variants"]) == 21


REFUSED = {
    "nanoGPT": (dict(against="nanogpt"), "nanoGPT reads text"),
    "documents": (dict(doc_mask=True), "for text: leave out --doc_mask=True"),
    "chunks": (dict(vary="loss_chunks=1,2", data="dataset"), "for text: leave out --loss_chunks=1"),
    "text": (dict(data="dataset"), "patch_size=4 is for images: leave patch_size out"),
    "nowhere": (dict(data="dataset", dataset="nowhere"), "or time on random images: --data=random"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, dataset, data, capsys):
    changes, words = REFUSED[case]
    datasets = {"text": dict(dataset=dataset), "chunks": dict(dataset=data)}
    assert run(**changes | datasets.get(case, {})) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and words in said.err and said.err.count("\n") == 1
    assert "tokens/s" not in said.out
