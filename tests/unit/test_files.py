"""Folders that cannot be written to."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanodnt.files import check_folder, make_folder
from support.runs import contents


@contextmanager
def no_superuser():
    """Root may write anywhere, so the process is somebody else meanwhile."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def folder():
    """An empty folder that everybody may enter. (pytest's are closed to others.)"""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_folder_is_made_with_those_above_it(folder):
    (folder / "link").symlink_to(folder / "target")
    (folder / "target").mkdir()
    for name in ("", "a", "a/b/c", "link", "link/d"):
        check_folder(folder / name, "--out")
        make_folder(folder / name, "--out")
        assert (folder / name).is_dir()
    assert (folder / "target" / "d").is_dir()


WRONG = {  # a folder: what is in its way
    "dead/run": "dead",
    "loop": "loop",
    "file": "file",
    "file/a/b": "file",
    "closed/run": "closed",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_in_the_way_is_named_and_nothing_made(name, folder):
    (folder / "dead").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "file").touch()
    (folder / "closed").mkdir(mode=0o555)
    before = contents(folder)
    for function in (check_folder, make_folder):
        with no_superuser(), pytest.raises(ValueError) as error:
            function(folder / name, "--out_dir")
        why = f"{folder / WRONG[name]} is no folder to write to"
        assert (
            str(error.value) == f"cannot write to {folder / name} ({why}): choose another --out_dir"
        )
    assert contents(folder) == before and not (folder / "nowhere").exists()
