"""The contents of a report, whatever it is written as."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Cells as text. The first column holds names, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    name: str
    """Of the file, without its ending."""
    description: str
    """For those who cannot see it."""
    svg: str


@dataclass(frozen=True)
class Section:
    title: str
    text: str = ""
    picture: Picture | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Document:
    title: str
    summary: Sequence[str]
    """Sentences to begin with."""
    sections: Sequence[Section]
    definitions: Mapping[str, str]
    """Of every word that the tables and pictures measure by."""
    environment: Mapping[str, str]
    command: str
    notes: Sequence[str] = field(default=())
    """What went wrong, what was left out, what to bear in mind."""
