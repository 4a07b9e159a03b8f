"""The folder of a report: rows.json, rows.csv, report.md, a file for each picture, index.html."""

import base64
import csv
import io
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.records import QUANTILES, Record
from benchmarks.report.document import Document
from benchmarks.report.table import OVERSUBSCRIBED

ROWS = "rows.json"


def check_folder(folder: Path) -> None:
    """Checks that a report may go there.

    Raises:
        ValueError: it holds the rows of another, or is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"report={folder} is a file; name a folder, which is made if it is not there")
    if (folder / ROWS).exists():
        raise ValueError(f"report={folder} holds a report already; name another folder, or remove that one")


def write_report(folder: Path, document: Document, records: Sequence[Record]) -> None:
    """Writes all that follows from the rows; they themselves are in the folder's rows.json already."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in document.sections:
        if section.picture:
            (folder / f"{section.picture.name}.svg").write_text(section.picture.svg)
    (folder / "rows.csv").write_text(to_csv(records))
    (folder / "report.md").write_text(to_markdown(document))
    (folder / "index.html").write_text(to_html(document))


def to_html(document: Document) -> str:
    """One page that loads nothing: pictures and style are part of it, and there are no scripts."""
    return _render("index.html.jinja", document)


def to_markdown(document: Document) -> str:
    """The same for people who read it where Markdown is shown; pictures are files beside it."""
    return _render("report.md.jinja", document)


def _render(template: str, document: Document) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not needed for --help

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=".html" in template,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"base64": lambda text: base64.b64encode(text.encode()).decode(), "plain": _plain}
    return templates.get_template(template).render(document=document, oversubscribed=OVERSUBSCRIBED)


def _plain(text: str) -> str:
    """Text in which Markdown finds nothing of its own."""
    for character in "\\`*_|<>":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def to_csv(records: Sequence[Record]) -> str:
    """A line a row, and a column for each setting, figure and quantile, and of the environment; the samples are in
    JSON alone."""
    lines = [
        {"benchmark": record.benchmark, "way": record.way}
        | _prefixed("settings", record.settings)
        | {"correct": record.correct, "num_samples": len(record.samples)}
        | {name: record.quantiles.get(name) for name in QUANTILES}
        | _prefixed("figures", record.figures)
        | _prefixed("environment", record.environment)
        for record in records
    ]
    columns = sorted(dict.fromkeys(name for line in lines for name in line), key=_order)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _prefixed(prefix: str, values) -> dict[str, object]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _order(column: str) -> int:
    """Groups of columns stay together, whichever row was the first to have one."""
    groups = ("benchmark", "way", "settings", "correct", "num_samples", *QUANTILES, "figures", "environment")
    return groups.index(column.split(".")[0])
