"""Rows as tables of text, and such tables in the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape

from benchmarks.harness.records import Record
from benchmarks.harness.statistics import Interval

T = TypeVar("T")
Columns = Mapping[str, Callable[[Record], str]]
WIDTH_IN_FILES = 180
WITHIN_NOISE = "within noise"
OVERSUBSCRIBED = "oversubscribed"
"""The setting of what had more ranks than cores or GPUs, and its mark wherever that is shown."""


@dataclass(frozen=True)
class Table:
    """Cells as text. The first column holds names, the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def make_table(columns: Mapping[str, Callable[[T], str]], rows: Iterable[T]) -> Table:
    """One line a row; ``columns`` maps each heading to what stands under it."""
    return Table(tuple(columns), [tuple(cell(row) for cell in columns.values()) for row in rows])


def console() -> Console:
    """Standard output; wide where it is no terminal, which would say how wide it is."""
    out = Console()
    if not out.is_terminal:
        out.width = WIDTH_IN_FILES
    return out


def print_table(title: str, table: Table, styles: Sequence[str | None] | None = None) -> None:
    """Prints a table in the terminal; ``styles`` are those of its rows, as rich names them."""
    shown = rich_table.Table(title=escape(title), title_justify="left")
    for index, heading in enumerate(table.headings):
        shown.add_column(heading, justify="right" if index else "left", no_wrap=index == 0)
    for row, style in zip(table.rows, styles or [None] * len(table.rows), strict=True):
        shown.add_row(*map(escape, row), style=style)
    console().print(shown)


def print_tables(
    groups: Iterable[Sequence[Record]],
    title: Callable[[Record], str],
    columns: Columns,
    below: Iterable[str],
) -> None:
    """Prints a table for each group of rows, and lines below all. What is wrong is red."""
    for rows in groups:
        print_table(title(rows[0]), make_table(columns, rows), [None if row.correct else "red" for row in rows])
    print_lines(below)


def print_lines(lines: Iterable[str]) -> None:
    """Prints text as wide as tables are."""
    out = console()
    for line in lines:
        out.print(line, markup=False)


def milliseconds(seconds: float | None) -> str:
    return number(seconds, ".3f", 1e-3)


def number(value: float | None, form: str, scale: float = 1) -> str:
    """In units of ``scale``; empty where there is none."""
    return "" if value is None else format(value / scale, form)


def cost(seconds: float | None) -> str:
    """A difference of two times, in milliseconds, of something that can only take time: less than none is noise."""
    return multiple(seconds, ".3f", 1e-3)


def multiple(value: float | None, form: str, scale: float = 1) -> str:
    """Such a difference by something else, likewise."""
    return WITHIN_NOISE if value is not None and value < 0 else number(value, form, scale)


def ends(interval: Interval, factor: float = 1.0, form: str = ".3f", unit: str = "") -> str:
    """Of an interval, as text; "not known" where one sample has to do."""
    if not interval.is_known:
        return "not known"
    return f"[{interval.low * factor:{form}}{unit}, {interval.high * factor:{form}}{unit}]"


def spread(quantiles: Mapping[str, float], show: Callable[[float], str] = milliseconds) -> str:
    """Median [p10, p90]; empty where there are none."""
    shown = {name: show(value) for name, value in quantiles.items()}
    return "{median} [{p10}, {p90}]".format(**shown) if shown else ""


def measured_on(record: Record) -> str:
    """Describes the machine, and which part of each sample measuring itself takes, where that is known."""
    where, overhead = record.environment, record.figures.get("overhead")
    own_time = "" if overhead is None else f", {overhead * 1e6:.1f} µs of each sample are the harness's"
    return (
        f"{where['gpu'] or where['cpu']}, {where['cores']} cores, torch {where['torch']}, fastsync {where['commit']}"
        f"{own_time}"
    )


def ranks_on(record: Record) -> str:
    """Describes the ranks and the machine."""
    settings = record.settings
    crowded = ", OVERSUBSCRIBED" if settings.get(OVERSUBSCRIBED) else ""
    crowded += f", {settings['busy']} busy processes beside them" if "busy" in settings else ""
    return f"{settings['world_size']} {settings['backend']} ranks{crowded}\n{measured_on(record)}"


def grouped_by(rows: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """The rows with the same ``key`` together, in the order in which the keys come first."""
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())
