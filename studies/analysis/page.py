"""report.html: one self-contained page on one or several runs, which can be passed on without them."""

import base64
import html
import shlex
from pathlib import Path

from nanodnt.files import write_file
from studies.analysis.compare import (
    DEFINITION,
    RunRecord,
    final_loss_table,
    find_differences,
    format_value,
    make_printable,
    table_cells,
)
from studies.analysis.settings import CAPTIONS

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the browser loads nothing, whatever is inside
PNG = b"\x89PNG\r\n\x1a\n"
STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --dim: #5c5c5c; --page: #fff; --line: #d5d5d5; --shade: #f4f4f4 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --dim: #a6a6a6; --page: #16181a; --line: #3c3f42; --shade: #212427 } }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 68rem; margin: auto; padding: 1rem 1rem 3rem; overflow-wrap: anywhere }
h1 { font-size: 1.6rem; line-height: 1.25 } h2 { font-size: 1.2rem; margin-top: 2.2rem } h3 { font-size: 1rem }
.wide { overflow-x: auto } .wide:focus-visible { outline: 2px solid }
table { border-collapse: collapse; font-size: .875rem; overflow-wrap: normal }
caption, figcaption, .dim { color: var(--dim); font-size: .875rem; text-align: left }
caption { padding-bottom: .4rem }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { max-width: 16rem; overflow-wrap: break-word } thead th { background: var(--shade); vertical-align: bottom }
.ends td, .ends thead th { text-align: right; font-variant-numeric: tabular-nums }
.ends th:first-child, .ends tr :last-child { text-align: left }
.ends :nth-child(7) { min-width: 9rem } .ends td:nth-child(9) { white-space: nowrap }
figure { margin: 1.2rem 0 } img { display: block; width: 100%; min-width: 40rem; background: #fff }
pre span { display: inline-block; max-width: 100% }
pre { white-space: pre-wrap; background: var(--shade); padding: .6rem; font-size: .85rem; margin: .3rem 0 }
.warning { border-left: 4px solid #c77700; padding-left: .7rem }
"""


def html_table(kind: str, caption: str, header: list, *rows) -> str:
    """A table of texts as HTML, each row's first cell its heading, in a box that scrolls on a narrow page."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = [(html.escape(first), "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)) for first, *rest in rows]
    lines = "\n".join(f'<tr><th scope="row">{first}</th>{rest}</tr>' for first, rest in body)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(caption)}"><table class="{kind}">'
        f"<caption>{html.escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>"
    )


def html_figure(path: Path) -> str:
    """A PNG file embedded in HTML. ValueError if it cannot be read or is not a PNG."""
    try:
        content = Path(path).read_bytes()
    except OSError as e:
        raise ValueError(f"cannot read the figure {path} ({e.strerror})") from None
    if not content.startswith(PNG):
        raise ValueError(f"{path} is not a PNG image: draw it again")
    name = Path(path).stem
    shows, source = CAPTIONS.get(name, ("", ""))
    shows, name = html.escape(shows or name), html.escape(name)
    after = f" After {html.escape(source)}." if source else ""
    return (
        f'<figure><div class="wide" role="region" tabindex="0" aria-label="{name}">\n'
        f'<img alt="{shows}" src="data:image/png;base64,{base64.b64encode(content).decode()}"></div>\n'
        f"<figcaption><b>{name}</b>: {shows}.{after}</figcaption></figure>"
    )


def html_origin(run: RunRecord) -> str:
    """A run's command line, commit and versions as HTML."""
    facts = [f"{key} {format_value(value)}" for key, value in run.versions().items() if value is not None]
    facts += [f"started {run.config['started']}"] if "started" in run.config else []
    failure = run.rows[-1].get("failure")
    words = [html.escape(make_printable(shlex.quote(str(word)))) for word in run.config["command"]]
    command = " ".join(f"<span>{word}</span>" for word in words)  # lines break between words
    lines = [f"<h3>{html.escape(run.name)}</h3>", f"<pre><code>{command}</code></pre>"]
    lines += [f'<p class="dim">{html.escape(" · ".join(facts))}</p>']
    lines += [f'<p class="warning">{html.escape(str(failure))}</p>'] if "failure" in run.rows[-1] else []
    return "\n".join(lines)


def write_page(runs: list, out: Path, figures: list, baseline: str = "") -> Path:
    """Write report.html in the folder `out`; returns its path.

    It holds the table of where the runs end, what differs between them, the PNG files `figures` with their captions
    from CAPTIONS, and each run's command line. ValueError for a figure that is not a PNG, and as in
    `final_loss_table`."""
    table, several = final_loss_table(runs, baseline), len(runs) > 1
    title = f"{len(runs)} runs compared" if several else f"Run {runs[0].name}"
    page = [f"<h1>{html.escape(title)}</h1>", "<h2>Where they end</h2>" if several else "<h2>Where it ends</h2>"]
    caption = f"Validation loss in nats per {table['unit']}, at the last evaluation"
    page += [html_table("ends", caption, *table_cells(table))]
    page += [f'<p class="warning">{html.escape(line)}</p>' for line in table["warnings"]]
    if several:
        page += [f'<p class="dim">{html.escape(DEFINITION)}</p>', "<h2>What differs</h2>", html_differences(runs)]
    page += ["<h2>Figures</h2>", *map(html_figure, figures)] if figures else []
    page += ["<h2>How they were made</h2>" if several else "<h2>How it was made</h2>", *map(html_origin, runs)]
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style>",
    ]
    text = "\n".join(["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body><main>", *page])
    path = Path(out) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda f: f.write(f"{text}\n</main></body>\n</html>\n".encode(errors="replace")))
    return path


def html_differences(runs: list) -> str:
    """The settings that differ between the runs as HTML."""
    header = ["field", "of", "default", *(run.name for run in runs)]
    rows = [[line["field"], line["section"], line["default"], *line["values"]] for line in find_differences(runs)]
    if not rows:
        return "<p>Nothing in their configuration, versions or commit.</p>"
    return html_table("fields", "Every setting that differs, except paths", header, *rows)
