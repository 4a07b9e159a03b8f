"""A document as one page of HTML that loads nothing: pictures and style are part of it, and there are no scripts."""

import base64
from collections.abc import Iterator
from html import escape

from benchmarks.report.document import Document, Section, Table
from benchmarks.table import OVERSUBSCRIBED

# The policy makes the browser vouch for it.
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
"""
STYLE = """:root { --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --tint: #f6f8fa;
  --accent: #0072b2; --warn: #d55e00; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 3rem 0 0.75rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: 0.5rem 0; max-width: 46rem; }
.summary { border-left: 4px solid var(--accent); padding: 0.25rem 0 0.25rem 1rem; font-size: 1.05rem; }
.notes { border-left: 4px solid var(--warn); padding: 0.25rem 0 0.25rem 1rem; margin: 1rem 0; list-style: none; }
figure { margin: 1rem 0; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
th:first-child, td:first-child, .facts td { text-align: left; }
.facts td { white-space: normal; }
.facts td:first-child { color: var(--soft); white-space: nowrap; }
tbody tr:hover { background: var(--tint); }
tr.oversubscribed td { color: var(--soft); font-style: italic; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.5rem 1.25rem; font-size: 0.93rem; }
dt { font-weight: 600; }
dd { margin: 0; max-width: 44rem; }
pre { background: var(--tint); padding: 0.8rem 1rem; border-radius: 6px; overflow-x: auto; font-size: 0.85rem; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.5rem; } }
@media print { h2 { break-after: avoid; } figure, table { break-inside: avoid; } }"""


def to_html(document: Document) -> str:
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield HEAD.format(title=escape(document.title), style=STYLE)
    yield f"<h1>{escape(document.title)}</h1>"
    yield '<div class="summary">'
    yield from (f"<p>{escape(sentence)}</p>" for sentence in document.summary)
    yield "</div>"
    if document.notes:
        yield '<ul class="notes">'
        yield from (f"<li>{escape(note)}</li>" for note in document.notes)
        yield "</ul>"
    for section in document.sections:
        yield from _section(section)
    yield "<h2>Definitions</h2>\n<dl>"
    for word, meaning in document.definitions.items():
        yield f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>"
    yield "</dl>\n<h2>Where and how</h2>"
    yield from _table(Table(("what", "is"), [*document.environment.items()]), kind="facts")
    yield f"<pre>{escape(document.command)}</pre>\n</main>\n</body>\n</html>"


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    if section.text:
        yield f"<p>{escape(section.text)}</p>"
    if section.picture:
        # As an image, so that the names inside of one picture do not meet those of another.
        data = base64.b64encode(section.picture.svg.encode()).decode()
        description = escape(section.picture.description)
        yield f'<figure><img alt="{description}" src="data:image/svg+xml;base64,{data}"></figure>'
    if section.table:
        yield from _table(section.table)
    yield "</section>"


def _table(table: Table, kind: str = "") -> Iterator[str]:
    yield f'<div class="scroll"><table class="{kind}">' if kind else '<div class="scroll"><table>'
    if not kind:
        yield (
            "<thead><tr>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in table.headings) + "</tr></thead>"
        )
    yield "<tbody>"
    for row in table.rows:
        marked = not kind and any(OVERSUBSCRIBED in cell for cell in row)
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        yield f'<tr class="{OVERSUBSCRIBED}">{cells}</tr>' if marked else f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
