"""Folders that cannot be written to, and an error's message as one line."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanodnt.files import all_of, check_folder, make_folder
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


WRONG = {
    "dead": "FOLDER/dead is a link to FOLDER/nowhere, which is not there",
    "dead/run": "FOLDER/dead is a link to FOLDER/nowhere, which is not there",
    "loop": "FOLDER/loop is a link to loop, which is not there",
    "file": "FOLDER/file is a file, not a folder",
    "file/a/b": "FOLDER/file is a file, not a folder",
    "closed": "there is no permission to write to FOLDER/closed",
    "closed/run": "there is no permission to write to FOLDER/closed",
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
        why = WRONG[name].replace("FOLDER", str(folder))
        assert str(error.value) == f"cannot write to {folder / name} ({why}): choose another --out_dir"
    assert contents(folder) == before and not (folder / "nowhere").exists()


def test_all_of_an_error_is_one_line():
    assert all_of(ValueError("first\n  second\n\nlast")) == "first second last"
    assert all_of(KeyError()) == "KeyError"
    assert all_of(ValueError("x" * 20 + "the end"), most=7) == "… the end"
