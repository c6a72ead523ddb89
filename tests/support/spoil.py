"""Ways to spoil a World (see support.hostile): its dataset, its checkpoints, the machine.

Most functions here return a function that is called with the World before the program starts."""

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch

from nanodnt import engine
from nanodnt.data import meta as data_meta
from support import runs
from support.hostile import CHECKPOINTS


def write(name, content):
    """Write a file: text, bytes, or None for a folder."""

    def spoil(w):
        path = Path(name.format(tmp=w.tmp, run=w.run, data=w.data))
        if path.is_file():
            path.unlink()  # checkpoints are hard links of one another
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def meta(change):
    """Change meta.json: `change` gets its content."""

    def spoil(w):
        content = json.loads((w.data / "meta.json").read_text())
        change(content)
        (w.data / "meta.json").write_text(json.dumps(content))

    return spoil


def put(*path_and_value):
    """put("a", "b", 1) → a change that sets x["a"]["b"] = 1."""
    *path, last, value = path_and_value

    def change(x):
        for key in path:
            x = x[key]
        x[last] = value

    return change


def drop(key):
    return lambda x: x.pop(key)


def token(split, value):
    """Set every eighth token of a split to `value`, with a hash that fits."""

    def spoil(w):
        ids = np.fromfile(w.data / f"{split}.bin", "<u2")
        ids[::8] = value
        ids.tofile(w.data / f"{split}.bin")
        meta(put("splits", split, "sha256", hashlib.sha256(ids.tobytes()).hexdigest()))(w)

    return spoil


def checkpoint(change, names=CHECKPOINTS):
    """Change checkpoints: `change` gets the content."""

    def spoil(w):
        for name in names:
            content = runs.load(w.run / name)
            (w.run / name).unlink()
            change(content)
            torch.save(content, w.run / name)

    return spoil


def saved(content):
    """Checkpoints that hold something else, saved by torch."""
    return lambda w: [torch.save(content, w.run / name) for name in CHECKPOINTS]


def cut(*names):
    """Truncate files of the run to half of their size."""

    def spoil(w):
        for name in names:
            raw = (w.run / name).read_bytes()
            write(f"{{run}}/{name}", raw[: len(raw) // 2])(w)

    return spoil


def environ(**values):
    """Set environment variables; those of None stay unset."""
    given = {name: value for name, value in values.items() if value is not None}
    return lambda w: [w.patch.setenv(name, value) for name, value in given.items()]


def missing_package(name):
    return lambda w: w.patch.setitem(sys.modules, name, None)


def during(action, step=4):
    """Do `action` when the run (resumed at step 3) comes to `step`."""

    def spoil(w):
        real, done = engine.lr_at, []

        def lr_at(i, *args):
            if i == step and not done:  # it is called for every group
                done.append(action(w))
            return real(i, *args)

        w.patch.setattr(engine, "lr_at", lr_at)

    return spoil


def truncate(split):
    return lambda w: os.truncate(w.data / f"{split}.bin", 10)


def full_disk(w):
    """It shows at fsync, as on a network file system."""

    def fsync(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    w.patch.setattr(os, "fsync", fsync)
    w.patch.setattr(time, "sleep", lambda s: None)  # before the second attempt


def little_space(w):
    w.patch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    )


def broken_compiler(w):
    def broken(model, **_):
        def call(*_):
            raise RuntimeError("no compiler\nand more lines")

        return call

    w.patch.setattr(torch, "compile", broken)


def named_dataset(w):
    """data/corpus, with its prepare.py, but not prepared."""
    (w.tmp / "corpus").mkdir()
    (w.tmp / "corpus" / "prepare.py").touch()
    w.patch.setattr(data_meta, "DATA", w.tmp)
