"""Checkpoints with code in them: no code runs, whatever the file pretends to be."""

import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from support.hostile import load, resume, speak

pytestmark = pytest.mark.usefixtures("quick")


class Evil:
    """Unpickled without care, it makes the file `marker`."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def replace_record(content, path, name: str) -> None:
    """Put the pickled content into a record of the checkpoint at `path`, with a checksum that
    fits."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            is_it = item.filename.endswith(f"/{name}")
            new.writestr(item.filename, pickle.dumps(content) if is_it else old.read(item))
    path.unlink()
    path.write_bytes(out.getvalue())


def as_tar(content, path) -> None:
    raw = pickle.dumps(content)
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


def as_numpy(content, path) -> None:
    with open(path, "wb") as f:
        np.save(f, np.array([content, content], dtype=object), allow_pickle=True)


DISGUISES = {  # functions of (content, path of a checkpoint) that write the file
    "torch.save": torch.save,
    "torch.save, legacy": lambda *args: torch.save(*args, _use_new_zipfile_serialization=False),
    "pickle": lambda content, path: path.write_bytes(pickle.dumps(content)),
    "data.pkl alone": lambda *args: replace_record(*args, "data.pkl"),
    "tar": as_tar,
    "npy": as_numpy,
}
PLACES = {  # where in a checkpoint's content the evil object hides
    "alone": lambda content, evil: evil,
    "beside the model": lambda content, evil: {**content, "extra": evil},
    "a weight": lambda content, evil: {
        **content,
        "model": {**content["model"], "wte.weight": evil},
    },
    "an object array": lambda content, evil: {
        **content,
        "best_val_loss": np.array([evil], dtype=object),
    },
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_no_code_runs(disguise, place, world, original):
    """It is refused, by a run that goes on from it, one that takes its weights, and sampling
    alike."""
    marker, path = world.tmp / "marker", world.run / "last.pt"
    (world.run / "prev.pt").unlink()
    DISGUISES[disguise](PLACES[place](original(), Evil(marker)), path)
    assert load(path) is None
    if place == "alone":
        assert not resume(world) and not speak(world)
        assert not resume(world, init_from=path, out_dir=world.tmp / "new")
    assert not marker.exists()


def test_the_evil_object_is_evil(tmp_path):
    pickle.loads(pickle.dumps(Evil(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()
