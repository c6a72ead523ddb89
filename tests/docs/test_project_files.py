"""Makefile, .ci/run, CITATION.cff: both parts of the tests always run; the papers are named."""

import io
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from configurator import VERSION
from support.pages import ROOT, SCHEMAS
from support.runs import call


@pytest.mark.house
@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("index", ["", "https://example.org/cu126"])
def test_torch_comes_first_in_the_tested_version_and_from_the_index_asked_for(index):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    argv = ["make", "-n", "-W", "requirements.txt", f"TORCH_INDEX={index}", "install"]
    printed = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=ROOT).stdout
    first, second = [line.split() for line in printed.splitlines() if "/pip install" in line]
    assert first[-1] == "torch" and second[-2:] == ["-r", "requirements.txt"]
    assert index in first if index else "--index-url" not in first
    assert "--index-url" not in second  # it has torch alone
    assert first[first.index("-c") + 1] == second[second.index("-c") + 1] == "constraints.txt"


@pytest.mark.house
@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("index", ["", "https://example.org/cpu"])
def test_another_index_replaces_the_torch_that_is_installed(index, tmp_path):
    """As after a first start that found the GPU's driver too old for it."""
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / ".venv" / ".torch_index").write_text(
        "https://example.org/cu126\n", encoding="utf-8"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    argv = ["make", "-n", f"TORCH_INDEX={index}", "install"]
    printed = subprocess.run(
        argv, capture_output=True, text=True, env=environment, cwd=tmp_path
    ).stdout
    assert ("--force-reinstall" in printed) == ("/pip install" in printed) == bool(index)


@pytest.mark.house
@pytest.mark.parametrize("failing", ["", "lint", "test-deep"])
def test_ci_runs_everything_and_fails_if_one_part_does(failing, tmp_path):
    """With a make that writes down what it is called with."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = f'echo "$1" >> calls\necho "7 passed in 1.5s"\n[ "$1" != "{failing}" ]\n'
    (tmp_path / "make").write_text(f"#!/bin/sh\n{make}", encoding="utf-8")
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [tmp_path / ".ci" / "run"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == bool(failing)
    targets = ["install-eval", "install-triton", "lint", "house", "test", "test-deep", "test"]
    assert (tmp_path / "calls").read_text(encoding="utf-8").split() == targets
    assert done.stdout.splitlines()[-7:] == ["7 passed in 1.5s"] * 7


@pytest.mark.house
def test_the_citation_names_the_five_papers():
    text = (ROOT / "CITATION.cff").read_text()
    papers = {"2507.17501", "2605.26895", "2502.19002", "2503.10622", "2502.05795"}
    assert (
        set(re.findall(r"arxiv\.org/abs/([\d.]+)", text))
        == set(re.findall(r'"arXiv:([\d.]+)"', text))
        == papers
    )
    assert papers <= set(re.findall(r"arxiv\.org/abs/([\d.]+)", (ROOT / "README.md").read_text()))
    assert (
        f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text()
        and f"\nversion: {VERSION}\n" in text
    )
    assert f"\n## {VERSION} (" in (ROOT / "CHANGELOG.md").read_text()


SCRIPTS = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("data/*/prepare.py"))]
# a fork may have scripts of another kind
SCRIPTS = [
    name for name in SCRIPTS if "nanodnt.prepare" in (ROOT / name).read_text(encoding="utf-8")
]
# model.py is not among them: as a module it needs nothing but torch, and its command is this
COMMANDS = [*SCHEMAS, *SCRIPTS, "-m nanodnt.plan", "-m nanodnt.data"]
COMMANDS.remove("model.py")
START = """
import runpy, sys
sys.path.insert(0, "")
{change}
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    runpy.run_module(sys.argv[1], run_name="__main__")
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
WINDOWS = "sys.platform = 'win32'; sys.modules['fcntl'] = None"
# {a change to the machine: the line with which a command then ends}
MACHINES = {
    WINDOWS: "nanoDNT runs on Linux and macOS; on Windows use WSL2: ",
    "sys.version_info = (3, 9, 18)": "nanoDNT needs Python 3.11 or newer, and this is ",
    # -S: without any package
    "pass": f"numpy is not installed for {sys.executable}: run `make install`, then ",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_machine_that_cannot_run_it_is_told_in_one_line(command):
    """Not by an import that fails."""
    for change, line in MACHINES.items():
        argv = [sys.executable, "-S", "-c", START.format(change=change), *command.split(), "--help"]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1, (
            done.stderr
        )


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_command_says_what_it_is_on_any_terminal(command, monkeypatch):
    """Here in a locale that has no characters but ASCII."""
    main = import_module(
        "nanodnt.plan.__main__" if command == "model.py" else command.removesuffix(".py")
    ).main
    for flag, words in (
        ("--help", "usage: "),
        ("--version", f"nanoDNT {VERSION}, torch "),
    ):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert call(main, flag) in (0, None)
        assert sys.stdout.buffer.getvalue().decode("ascii").startswith(words)
