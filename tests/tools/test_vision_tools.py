"""The commands on a run of images: what they read of its checkpoints, print and draw, and what they refuse."""

import sys

import pytest
import torch

import evaluate
import export
import sample
from nanodnt.run.checkpoints import load_checkpoint
from support import runs as tiny
from support.images import encode, noise, write_dataset

pytestmark = pytest.mark.usefixtures("one_thread")
VIT = dict(patch_size=4, block_size=5, mlp="gelu_erf", label_smoothing=0.1, crop_padding=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dataset, `data`, of 40 + 12 images of 8 × 8 in 4 classes, and a run on it, `vit`."""
    folder = tmp_path_factory.mktemp("images")
    train, val = ([encode(pixels) for pixels in noise(n, 8, 8, seed=n)] for n in (40, 12))
    write_dataset(folder / "data", train, val)
    assert tiny.run(**VIT, dataset=folder / "data", out_dir=folder / "vit", keep_every=10, track_interval=10) == 0
    return folder


def call(command, *argv):
    """The exit code of a command's main() for this command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [command.__name__, *map(str, argv)])
        try:
            return command.main()
        except SystemExit as e:
            return e.code


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_of_images_has_their_classes(folder, tmp_path):
    checkpoint = torch.load(folder / "vit" / "last.pt", weights_only=True)
    assert load_checkpoint(folder / "vit" / "last.pt")["meta"]["classes"] == [f"class {i}" for i in range(4)]
    del checkpoint["meta"]["classes"]
    torch.save(checkpoint, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="its images have no list of classes"):
        load_checkpoint(tmp_path / "last.pt")


@pytest.mark.parametrize("command, words", [(sample, []), (export, ["--to=nowhere"]), (evaluate, ["--tasks=dyt15"])])
def test_commands_for_text_refuse_it(folder, command, words, capsys):
    assert call(command, f"--out_dir={folder / 'vit'}", "--checkpoint=last.pt", *words) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "is a model of images" in said and said.count("\n") == 1
