"""Makefile, .ci/run, requirements, CITATION.cff: both parts of the tests always run; what is imported is pinned."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT

BY_OTHERS = {"PIL": "matplotlib", "pyarrow": "datasets", "huggingface_hub": "datasets", "regex": "tiktoken"}
OPTIONAL = {"wandb", "transformers", "triton"}  # in a `try`: a message says what to install; triton comes with torch


def pinned(name):
    """{package: version or versions} of a requirements file; every line must be a pin."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    found = [re.fullmatch(r"([\w-]+)==([\d.]+)(; python_version [<>=]+ \"[\d.]+\")?", line) for line in lines if line]
    assert all(found)
    return {package: [m[2] for m in found if m[1] == package] for package in (m[1] for m in found)}


def imported(paths):
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
    found = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    own = {path.stem for path in ROOT.glob("*.py")} | {"layers", "nanodnt", "data", "support", "conftest"}
    return {BY_OTHERS.get(name, name) for name in found - own}


def python_files(*folders):
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def test_what_the_code_imports_is_pinned():
    run, develop = pinned("requirements.txt"), pinned("requirements-dev.txt")
    code = imported([*ROOT.glob("*.py"), *python_files("layers", "nanodnt", "data", "docs")])
    assert code - OPTIONAL <= set(run) and set(run) <= code
    tests = imported(python_files("tests"))
    assert tests <= set(run) | set(develop)
    assert not set(run) & set(develop)
    assert list(run)[0] == "torch" and run["torch"] == ["2.13.0"]


def run_make(tmp_path, target, codes):
    """`make target` with a python that writes its arguments down and exits with `codes`, one after the other."""
    calls = tmp_path / "calls"
    for i, code in enumerate(codes, 1):
        (tmp_path / f"code{i}").write_text(str(code))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexit $(cat {tmp_path}/code$(wc -l < {calls}))\n')
    python.chmod(0o755)
    argv = ["make", "-C", ROOT, f"BIN={tmp_path}", "-o", ".venv/.installed", "-o", ".venv/.installed-dev", target]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    result = subprocess.run(argv, capture_output=True, text=True, env=environment)
    error = re.search(r"\*\*\*.* Error (\d+)", result.stderr)
    assert (result.returncode == 0) == (error is None)
    return int(error[1]) if error else 0, calls.read_text().splitlines()


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("codes, worse", [((0, 0), 0), ((1, 0), 1), ((0, 3), 3), ((2, 1), 2), ((1, 2), 2)])
def test_both_parts_of_the_tests_run_and_the_worse_exit_code_counts(codes, worse, tmp_path):
    code, calls = run_make(tmp_path, "test", codes)
    assert code == worse
    first = "-m pytest -n auto --maxprocesses=8 --dist=loadfile --ignore=tests/distributed"
    assert calls == [first, "-m pytest tests/distributed"]


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_the_deep_suite_is_the_same_with_a_flag(tmp_path):
    code, calls = run_make(tmp_path, "test-deep", (0, 1))
    assert code == 1 and [call.split()[2] for call in calls] == ["--deep", "--deep"] and "distributed" in calls[1]


@pytest.mark.parametrize("failing", ["", "lint", "test", "test-deep"])
def test_ci_runs_everything_and_fails_if_one_part_does(failing, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$1" >> calls\necho "7 passed in 1.5s"\n[ "$1" != "{failing}" ]\n')
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run([tmp_path / ".ci" / "run"], capture_output=True, text=True, env=environment)
    assert result.returncode == bool(failing)
    assert (tmp_path / "calls").read_text().split() == ["lint", "test", "test-deep"]
    assert result.stdout.splitlines()[-3:] == ["7 passed in 1.5s"] * 3


def test_the_citation_names_the_five_papers():
    text = (ROOT / "CITATION.cff").read_text()
    papers = {"2507.17501", "2605.26895", "2502.19002", "2503.10622", "2502.05795"}
    assert set(re.findall(r"arxiv\.org/abs/([\d.]+)", text)) == set(re.findall(r'"arXiv:([\d.]+)"', text)) == papers
    assert papers <= set(re.findall(r"arxiv\.org/abs/([\d.]+)", (ROOT / "README.md").read_text()))
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in text


def test_scripts_are_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert Path(ROOT / ".ci" / "run").read_text().startswith("#!/usr/bin/env bash\n")
