"""Records as tables in the terminal."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.harness.records import Record

T = TypeVar("T")
Columns = Mapping[str, Callable[[Record], str]]
WIDTH_IN_FILES = 180
WITHIN_NOISE = "within noise"
OVERSUBSCRIBED = "oversubscribed"
"""The setting of what had more ranks than cores or GPUs, and its mark wherever that is shown."""


def console() -> Console:
    """Standard output; wide where it is no terminal, which would say how wide it is."""
    out = Console()
    if not out.is_terminal:
        out.width = WIDTH_IN_FILES
    return out


def table(title: str, columns: Columns, records: Iterable[Record]) -> Table:
    """One row a record; ``columns`` maps each heading to what stands under it. The first column holds names."""
    result = Table(title=title, title_justify="left")
    for index, heading in enumerate(columns):
        result.add_column(heading, justify="right" if index else "left", no_wrap=index == 0)
    for record in records:
        result.add_row(*(cell(record) for cell in columns.values()), style=None if record.correct else "red")
    return result


def milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def cost(seconds: float | None) -> str:
    """A difference of two times, in milliseconds, of something that can only take time: less than none is noise."""
    return WITHIN_NOISE if seconds is not None and seconds < 0 else milliseconds(seconds)


def multiple(value: float | None, form: str) -> str:
    """Such a difference by something else, likewise."""
    return WITHIN_NOISE if value is not None and value < 0 else number(value, form)


def number(value: float | None, form: str, scale: float = 1) -> str:
    """In units of ``scale``; empty where there is none."""
    return "" if value is None else format(value / scale, form)


def spread(quantiles: Mapping[str, float], show: Callable[[float], str] = milliseconds) -> str:
    """Median [p10, p90]."""
    if not quantiles:
        return ""
    return "{} [{}, {}]".format(*(show(quantiles[name]) for name in ("median", "p10", "p90")))


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


def print_tables(
    groups: Iterable[Sequence[Record]],
    title: Callable[[Record], str],
    columns: Columns,
    below: Iterable[str],
    below_each: Callable[[Sequence[Record]], Iterable[str]] = lambda rows: (),
) -> None:
    """Prints a table for each group, with lines below each and below all."""
    out = console()
    for rows in groups:
        out.print(table(title(rows[0]), columns, rows))
        for line in below_each(rows):
            out.print(line, markup=False)
    for line in below:
        out.print(line, markup=False)


def share(noise: float) -> str:
    """A band around a median, as a part of it."""
    return f"± {noise:.1%}" if math.isfinite(noise) else "not known"


class Measured(Protocol):
    """A record, or what was made of some."""

    @property
    def way(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...


def told_apart(row: Measured, rows: Sequence[Measured]) -> str:
    """The settings that tell a row from others of the same way, as few as will do, and the mark of an oversubscribed
    one in any case."""
    others = [other for other in rows if other.way == row.way and other is not row]
    told = []
    for name, value in row.settings.items():
        if name == OVERSUBSCRIBED:
            continue
        left = [other for other in others if other.settings.get(name) == value]
        if len(left) < len(others):
            told.append(f"{name} {value}")
        others = left
    return ", ".join([*told, *([OVERSUBSCRIBED] if row.settings.get(OVERSUBSCRIBED) else [])])
