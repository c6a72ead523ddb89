"""report.html: whole, loading nothing, and showing what is in the runs as text, whatever that is."""

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imsave

from studies.analysis.compare import load_records
from studies.analysis.page import write_page
from support.analysis import make_run

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """A page read strictly: every element closed in order; `seen`: (tag, attributes) in order; `text`: all text."""

    def __init__(self, source: str):
        super().__init__()
        self.open, self.seen, self.texts = [], [], []
        self.feed(source)
        self.close()
        assert self.open == [], "not closed"
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag
        self.texts.append(" ")

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def attributes(self, tag):
        return [attrs for name, attrs in self.seen if name == tag]


HOSTILE = '<img src=x onerror="alert(1)">&amp;'


def page_of(tmp_path, paths, figures=("loss.png", "gradients.png", "<b>.png")):
    runs = load_records(paths)
    (tmp_path / "out").mkdir()
    for name in figures:
        imsave(tmp_path / "out" / name, [[0.0, 1.0]])
    path = write_page(runs, tmp_path / "out", [tmp_path / "out" / name for name in figures])
    assert path == tmp_path / "out" / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture
def hostile(tmp_path):
    """The page of two runs whose names, commands, settings and records try to be HTML."""
    evil = "</code></pre><script>alert(1)</script>"
    ends = [{"step": 100, "tokens": 9, "val_loss": 2.5, "failure": evil}]
    record = {"git_commit": evil, "started": evil}
    b = make_run(tmp_path / HOSTILE, rows=ends, dataset=evil, command=["train.py", evil, 7], record=record)
    return page_of(tmp_path, [make_run(tmp_path / "a", command=["train.py", "--x=two words"]), b])


def test_the_page_is_whole_and_loads_nothing(hostile, tmp_path):
    source = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert source.startswith("<!doctype html>") and "http://" not in source and "https://" not in source
    tags = {tag for tag, _ in hostile.seen}
    assert {"title", "h1", "h2", "table", "th", "figure", "figcaption"} <= tags
    assert not tags & {"script", "link", "iframe", "object", "base", "form"}
    assert "url(" not in source and "@import" not in source
    images = hostile.attributes("img")
    assert len(images) == 3
    for image in images:
        kind, content = image["src"].split(",")
        assert kind == "data:image/png;base64" and image["alt"]
        assert base64.b64decode(content, validate=True) == (tmp_path / "out/loss.png").read_bytes()
    assert {th["scope"] for th in hostile.attributes("th")} == {"row", "col"}
    policy = {m["http-equiv"]: m["content"] for m in hostile.attributes("meta") if "http-equiv" in m}
    assert policy["Content-Security-Policy"].startswith("default-src 'none'; img-src data:;")


def test_the_page_shows_what_is_in_the_runs_as_text(hostile):
    known = {"charset", "name", "content", "http-equiv", "lang", "class", "role", "tabindex", "aria-label", "scope"}
    assert {key for _, attrs in hostile.seen for key in attrs} == known | {"src", "alt"}
    assert hostile.text.count(HOSTILE) >= 3  # in the table, the differences, the list of commands
    assert "<script>alert(1)</script>" in hostile.text
    assert "train.py '--x=two words'" in hostile.text and "commit c0ffee" in hostile.text
    assert "failed at step 100" in hostile.text and " 150 steps 1.50× " in hostile.text
    assert "losses are not comparable" in hostile.text and "After DNT, Fig. 1." in hostile.text


def test_one_run_alone_has_a_page_without_comparison(tmp_path):
    page = page_of(tmp_path, [make_run(tmp_path / "mine")], ("loss.png",))
    assert "Run mine" in page.text and "2.0000" in page.text
    assert "baseline" not in page.text and "What differs" not in page.text


def test_runs_alike_and_figures_that_are_none(tmp_path):
    paths = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    assert "Nothing in their configuration" in page_of(tmp_path, paths).text
    runs, bad = load_records(paths), tmp_path / "bad.png"
    with pytest.raises(ValueError, match="cannot read the figure .*bad.png .No such file"):
        write_page(runs, tmp_path, [bad])
    bad.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="bad.png is not a PNG image: draw it again"):
        write_page(runs, tmp_path, [bad])
    assert not (Path(tmp_path) / "report.html").exists()
