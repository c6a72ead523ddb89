"""Makefile, .ci/run, CITATION.cff: both parts of the tests always run; the papers are named."""

import os
import re
import shutil
import subprocess
from importlib import import_module

import pytest

from configurator import VERSION
from support.pages import ROOT, SCHEMAS
from support.runs import call


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("target, flag, code", [("test", "", 0), ("test-deep", " --deep", 1)])
def test_a_suite_is_one_call_of_pytest(target, flag, code, tmp_path):
    """With a python that writes its arguments down and exits with `code`."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {code}\n')
    python.chmod(0o755)
    argv = ["make", "-C", ROOT, f"BIN={tmp_path}", "-o", ".venv/.installed", "-o", ".venv/.installed-dev", target]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert bool(result.returncode) == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [
        f"-m pytest{flag} -n auto --maxprocesses=8 --dist=loadgroup --no-loadscope-reorder --max-worker-restart=0"
    ]


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("index", ["", "https://example.org/cu126"])
def test_torch_comes_first_in_the_tested_version_and_from_the_index_asked_for(index, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    argv = ["make", "-n", "-W", "requirements.txt", f"TORCH_INDEX={index}", "install"]
    printed = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=ROOT).stdout
    first, second = [line.split() for line in printed.splitlines() if "/pip install" in line]
    assert first[-1] == "torch" and second[-2:] == ["-r", "requirements.txt"]
    assert ("--index-url" in first) == bool(index) and (not index or index in first)
    assert "--index-url" not in second  # it has torch alone
    for command in (first, second):
        assert command[command.index("-c") + 1] == "constraints.txt"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize(
    ("index", "replaces"), [("", False), ("https://example.org/cu126", False), ("https://example.org/cpu", True)]
)
def test_another_index_replaces_the_torch_that_is_installed(index, replaces, tmp_path):
    """As after a first start that found the GPU's driver too old for it."""
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    (tmp_path / ".venv" / ".torch_index").write_text("https://example.org/cu126\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    argv = ["make", "-n", f"TORCH_INDEX={index}", "install"]
    printed = subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=tmp_path).stdout
    assert (f"--force-reinstall --index-url {index} torch" in printed) == replaces
    assert ("/pip install" in printed) == replaces


@pytest.mark.parametrize("failing", ["", "install-eval", "lint", "test", "test-deep"])
def test_ci_runs_everything_and_fails_if_one_part_does(failing, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$1" >> calls\necho "7 passed in 1.5s"\n[ "$1" != "{failing}" ]\n')
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, env=environment)
    assert result.returncode == bool(failing)
    assert (tmp_path / "calls").read_text().split() == ["install-eval", "lint", "test", "test-deep"]
    assert result.stdout.splitlines()[-4:] == ["7 passed in 1.5s"] * 4


def test_the_citation_names_the_five_papers():
    text = (ROOT / "CITATION.cff").read_text()
    papers = {"2507.17501", "2605.26895", "2502.19002", "2503.10622", "2502.05795"}
    assert set(re.findall(r"arxiv\.org/abs/([\d.]+)", text)) == set(re.findall(r'"arXiv:([\d.]+)"', text)) == papers
    assert papers <= set(re.findall(r"arxiv\.org/abs/([\d.]+)", (ROOT / "README.md").read_text()))
    assert f'\nversion = "{VERSION}"\n' in (ROOT / "pyproject.toml").read_text() and f"\nversion: {VERSION}\n" in text
    assert f"\n## {VERSION} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("command", SCHEMAS)
def test_every_command_says_its_version(command, capsys):
    main = import_module("nanodnt.plan.__main__" if command == "model.py" else command.removesuffix(".py")).main
    assert call(main, "--version") in (0, None)
    assert capsys.readouterr().out.startswith(f"nanoDNT {VERSION}, torch ")
