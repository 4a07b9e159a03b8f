"""A report: the folder with rows.json, a file for each picture, and index.html, one page that loads nothing."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.harness.statistics import RATIO_HOLDS, SURE_FROM
from benchmarks.report.table import OVERSUBSCRIBED, Table

ROWS = "rows.json"


@dataclass(frozen=True)
class Picture:
    name: str
    """Of the file, without its ending."""
    description: str
    """For those who cannot see it."""
    svg: str

    @property
    def base64(self) -> str:
        return base64.b64encode(self.svg.encode()).decode()


@dataclass(frozen=True)
class Section:
    title: str
    table: Table
    text: str = ""
    picture: Picture | None = None


@dataclass(frozen=True)
class Document:
    title: str
    summary: Sequence[str]
    """Sentences to begin with."""
    sections: Sequence[Section]
    kind: Literal["weak", "strong"]
    environment: Mapping[str, str]
    command: str
    notes: Sequence[str] = field(default=())
    """What went wrong, what was left out, what to bear in mind."""


def check_folder(folder: Path) -> None:
    """Checks that a report may go there.

    Raises:
        ValueError: it holds the rows of another, or is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"report={folder} is a file; name a folder, which is made if it is not there")
    if (folder / ROWS).exists():
        raise ValueError(f"report={folder} holds a report already; name another folder, or remove that one")


def write_page(folder: Path, document: Document) -> None:
    """Writes what people read. The rows are in the folder already."""
    for section in document.sections:
        if section.picture:
            (folder / f"{section.picture.name}.svg").write_text(section.picture.svg, encoding="utf-8")
    (folder / "index.html").write_text(to_html(document), encoding="utf-8")


def to_html(document: Document) -> str:
    """Pictures and style are part of the page, and there are no scripts."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    templates.globals |= {"oversubscribed": OVERSUBSCRIBED, "ratio_holds": RATIO_HOLDS, "sure_from": SURE_FROM}
    return templates.get_template("index.html.jinja").render(document=document)
