"""report.md: it shows what is in the runs as text, whatever that is."""

import re

from studies.analysis.compare import compare_runs, load_records, plain, write_report
from support.analysis import make_run

HOSTILE = '<img src=x onerror="alert(1)"> & | `code` **b** [a](b) $x$ \n# head'


def page_of(tmp_path, *paths, figures=("loss", "gradients")):
    runs = load_records(paths)
    path = write_report(runs, compare_runs(runs, tmp_path), tmp_path, figures)
    assert path == tmp_path / "report.md"
    return path.read_text(encoding="utf-8")


def test_the_page_shows_what_is_in_the_runs_as_text(tmp_path):
    """Names, commands, settings and records that would be markup, or end their line."""
    ends = [{"step": 100, "tokens": 9, "val_loss": 2.5, "failure": HOSTILE}]
    how = dict(
        rows=ends, dataset=HOSTILE, command=["train.py", HOSTILE, 7], record={"git_commit": HOSTILE, "started": HOSTILE}
    )
    a = make_run(tmp_path / "a", command=["train.py", "--x=two words"])
    page = page_of(tmp_path, a, make_run(tmp_path / HOSTILE.replace("/", ""), **how))
    assert not {line for line in page.splitlines() if line.startswith("# ")} - {"# 2 runs compared"}
    text = [line for line in page.splitlines() if not line.startswith("    ")]  # indented by four: code
    for mark in ("<", "`", "**b", "[a", "$x"):
        assert all(line[: line.find(mark)].endswith("\\") for line in text if mark in line.replace("![", "")), mark
    assert "\\<img src=x" in page and page.count(plain(HOSTILE)) >= 4
    tables = [line for line in text if line.startswith("|")]
    assert len(tables) == 8  # where they end: 4 lines; the data
    assert {line.replace("\\|", "").count("|") for line in tables} == {6, 11}
    assert "    train.py '--x=two words'\n" in page and "commit c0ffee" in page
    assert "failed at step 100" in page and re.search(r"\| 150 steps +\| 1.50× +\|", page)
    assert "**Warning:** losses are not comparable" in page
    assert "After DNT, Fig. 1.\n\n![Gradient entries" in page and "](gradients.png)" in page and "](loss.png)" in page


def test_one_run_alone_and_runs_alike(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "mine"), figures=["loss"])
    assert page.startswith("# Run mine\n") and "| 2.0000 " in page
    assert "baseline" not in page and "What differs" not in page
    assert "Nothing in their configuration" in page_of(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b"))
