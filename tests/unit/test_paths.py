"""configurator.py: what a path means that begins with ~, and texts and paths in locales of another encoding."""

import os
import pwd
import subprocess
import sys

import pytest

from configurator import ConfigError, configure, read_path
from support.runs import ROOT
from support.schemas import Model, load, refused, write_config

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file into the working directory, which is empty; returns its name."""
    monkeypatch.chdir(tmp_path)
    return write_config


# ------------------------------------------------------------------------------------------------------ home folders


OF_ROOT = pwd.getpwnam("root").pw_dir
HOMES = {"~": "/home/me", "~/a b": "/home/me/a b", "~//x": "/home/me//x", "~root": OF_ROOT, "~root/x": f"{OF_ROOT}/x"}
HOMES |= {text: text for text in ("", "./~x", "./~", "a/~", "a~", "/~", "out/~/x", "auto", "OWNER/MODEL", "$HOME/x")}


@pytest.mark.parametrize("text", HOMES)
def test_a_home_folder_is_expanded_where_a_path_begins_with_it(text, config, monkeypatch):
    """On the command line, in a config file, and among what is not read but listed; not in a text."""
    monkeypatch.setenv("HOME", "/home/me")
    values, _ = load(f"--to={text}", f"--start={text}", f"--note={text}")
    assert (values["to"], values["start"], values["note"]) == (HOMES[text], text, text)
    _, given = load(config(f"to = {text!r}\nstart = {text!r}"))
    assert given == {"to": (HOMES[text], "c.py:1"), "start": (text, "c.py:2")}
    _, given = configure(Model, argv=[text], positional="run")
    assert given == {"run": ([HOMES[text]], "command line")}


def test_a_config_file_in_the_home_folder_is_found(config, tmp_path, monkeypatch):
    config("seed = 5", "mine.py")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    assert load("~/mine.py")[0]["seed"] == 5


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_no_folder_is_refused(home, capsys, monkeypatch):
    """A shell would make a folder that is called ~."""
    monkeypatch.setenv("HOME", home)
    advice = "HOME names no folder: write the whole path, or ./~/x for a folder of that name"
    assert refused(capsys, "--to=~/x") == f"command line: --to cannot be '~/x': {advice}"
    with pytest.raises(ConfigError, match="^'~/x': HOME names no folder"):
        read_path("~/x")


def test_a_user_who_is_not_there_is_refused(config, capsys):
    advice = "there is no user 'no body': write the whole path, or ./~no body/x for a folder of that name"
    assert refused(capsys, "--to=~no body/x") == f"command line: --to cannot be '~no body/x': {advice}"
    assert refused(capsys, config("to = '~no body/x'")) == f"c.py:1: to cannot be '~no body/x': {advice}"
    assert refused(capsys, "~no body/x") == f"'~no body/x': {advice}"


def test_without_home_the_systems_list_of_users_says_where_it_is(monkeypatch):
    monkeypatch.delenv("HOME")
    assert load("--to=~/x")[0]["to"] == f"{pwd.getpwuid(os.getuid()).pw_dir}/x"


# ----------------------------------------------------------------------------------------------------------- locales


RAW = {"é": b"\xc3\xa9", "a→b": b"a\xe2\x86\x92b", "ascii": b"ascii"}


@pytest.mark.parametrize("text", RAW)
def test_a_text_is_utf8_in_every_locale(text):
    """In a locale of ASCII Python leaves the other bytes of the command line undecoded."""
    undecoded = RAW[text].decode("ascii", "surrogateescape")
    assert load(f"--start={undecoded}")[0]["start"] == load(f"--start={text}")[0]["start"] == text


PRINT_PATHS = """
import os, sys
from configurator import read_path
print([os.fsencode(read_path(text)) for text in (sys.argv[1], "\\xe9")], sys.getfilesystemencoding())
"""


@pytest.mark.parametrize("name", ["C", "C.utf8"])
def test_a_path_has_the_same_bytes_in_every_locale(name):
    """From the command line and from a config file, which is UTF-8."""
    env = ENV | dict(LC_ALL=name, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run([sys.executable, "-c", PRINT_PATHS, "é"], env=env, capture_output=True, text=True)
    encoding = {"C": "ascii", "C.utf8": "utf-8"}[name]
    assert done.stdout == rf"[b'\xc3\xa9', b'\xc3\xa9'] {encoding}" + "\n", done.stderr


def test_a_text_that_is_not_utf8_is_refused(config, capsys):
    """A path may be any bytes."""
    assert refused(capsys, "--start=\udcff") == "command line: --start cannot be '\\udcff': it is not UTF-8 text"
    assert "start cannot be '\\ud800': it is not UTF-8 text" in refused(capsys, config(r"start = '\ud800'"))
    assert "to cannot be '\\ud800': it is not UTF-8 text" in refused(capsys, config(r"to = '\ud800'"))
    assert load("--to=a\udcff")[0]["to"] == "a\udcff"
