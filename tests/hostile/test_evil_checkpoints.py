"""Checkpoints with code in them: no code runs, whatever the file pretends to be."""

import io
import os
import pickle
import tarfile
import zipfile
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanodnt.run.checkpoints import load_latest
from support.hostile import copy, load, resume, speak
from support.hypotheses import drawn

pytestmark = pytest.mark.usefixtures("quick")


class Evil:
    """Unpickled without care, it makes the file `marker`."""

    def __init__(self, marker, how):
        self.call = {
            "system": (os.system, (f"touch {marker}",)),
            "exec": (exec, (f"open({str(marker)!r}, 'w')",)),
            "torch": (torch.save, (1, str(marker))),
            "numpy": (np.save, (str(marker), 1)),
            "reduce": (reduce, (exec, [f"open({str(marker)!r}, 'w')", {}])),
        }[how]

    def __reduce__(self):
        return self.call


HOWS = ["system", "exec", "torch", "numpy", "reduce"]


class Array(np.ndarray):
    pass


def as_jit(content, path, protocol):
    """A TorchScript archive with the evil pickle where its constants are."""
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    replace_records(content, path, protocol, "data.pkl", "constants.pkl")


def replace_records(content, path, protocol, *names):
    """Put the pickled content into records of the zip archive at `path`, with checksums that fit."""
    out, records = io.BytesIO(), dict.fromkeys(names, pickle.dumps(content, protocol))
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for item in old.infolist():
            new.writestr(item.filename, records.get(item.filename.rpartition("/")[2], old.read(item)))
    path.unlink(missing_ok=True)
    path.write_bytes(out.getvalue())


def as_tar(content, path, protocol):
    raw = pickle.dumps(content, protocol)
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle", "data.pkl"):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


def as_numpy(content, path, protocol):
    with open(path, "wb") as f:
        np.save(f, np.array([content, content], dtype=object), allow_pickle=True)


def as_torch(content, path, protocol, zipped=True):
    torch.save(content, path, pickle_protocol=max(2, protocol), _use_new_zipfile_serialization=zipped)


DISGUISES = {  # functions of (content, path of a checkpoint, pickle protocol) that write the file
    "torch.save": as_torch,
    "torch.save, legacy": lambda *args: as_torch(*args, zipped=False),
    "pickle": lambda content, path, protocol: path.write_bytes(pickle.dumps(content, protocol)),
    "pickle of a pickle": lambda content, path, protocol: path.write_bytes(
        pickle.dumps(pickle.dumps(content, protocol))
    ),
    "data.pkl alone": lambda *args: replace_records(*args, "data.pkl"),
    "byteorder": lambda *args: replace_records(*args, "byteorder"),
    "jit": as_jit,
    "tar": as_tar,
    "npy": as_numpy,
}
PLACES = {  # where in a checkpoint's content the evil object hides
    "alone": lambda content, evil: evil,
    "in a list": lambda content, evil: [evil],
    "beside the model": lambda content, evil: {**content, "extra": evil},
    "a weight": lambda content, evil: {**content, "model": {**content["model"], "wte.weight": evil}},
    "a name": lambda content, evil: {**content, "model_config": {evil: 1}},
    "an object array": lambda content, evil: {**content, "best_val_loss": np.array([evil], dtype=object)},
    "a subclass of an array": lambda content, evil: {**content, "pending": {"x": np.ones(3).view(Array), "y": evil}},
    "a parameter's attribute": lambda content, evil: {**content, "extra": attributed(evil)},
}


def attributed(evil):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.hook = evil
    return parameter


@drawn(fast=15, deep=80)
@given(
    how=st.sampled_from(HOWS),
    disguise=st.sampled_from(sorted(DISGUISES)),
    place=st.sampled_from(sorted(PLACES)),
    protocol=st.integers(0, 5),
    program=st.sampled_from(["load_checkpoint", "load_latest", "resume", "weights", "sample"]),
)
def test_no_code_runs(earlier, original, how, disguise, place, protocol, program):
    with copy(earlier) as world:
        marker, path = world.tmp / "marker", world.run / "last.pt"
        for name in ("prev.pt", "best.pt"):
            (world.run / name).unlink()
        content = PLACES[place](original(), Evil(marker, how))
        DISGUISES[disguise](content, path, protocol)
        marker.unlink(missing_ok=True)
        match program:
            case "load_checkpoint":
                refused = load(path) is None
            case "load_latest":
                with pytest.raises(ValueError, match="nothing to resume"):
                    load_latest(world.run)
                refused = True
            case "resume":
                refused = not resume(world)
            case "weights":
                refused = not resume(world, init_from=path, out_dir=world.tmp / "new")
            case "sample":
                refused = not speak(world)
        assert not marker.exists() and not Path(f"{marker}.npy").exists()
        assert refused or disguise == "byteorder"


@pytest.mark.parametrize("how", HOWS)
def test_the_evil_objects_are_evil(tmp_path, how):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        pickle.loads(pickle.dumps(Evil(tmp_path / "marker", how)))
    assert list(tmp_path.iterdir())
