"""What a drill has done: rows of the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Row:
    """So many tries of one thing, and a line for each that went wrong."""

    what: str
    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    note: str = ""
    """What a reader has to know, such as why nothing was tried."""

    def add(self, problems: Iterable[str]) -> None:
        """One more try, which nothing is wrong with if there are no problems."""
        self.tried += 1
        self.wrong += problems


def table(rows_of: dict[str, Sequence[Row]]) -> str:
    """Of each drill its rows, and below them what was wrong."""
    lines = [f"{'drill':10} {'what':58} {'tried':>6} {'wrong':>6}"]
    for name, rows in rows_of.items():
        lines += [f"{name:10} {row.what:58} {row.tried:6} {len(row.wrong):6}  {row.note}".rstrip() for row in rows]
    return "\n".join([*lines, *(f"wrong: {line}" for rows in rows_of.values() for row in rows for line in row.wrong)])
