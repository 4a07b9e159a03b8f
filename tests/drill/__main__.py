"""Breaks things on purpose, for as long as it is told, and prints a table. The exit status is 1 if anything was wrong.

Each drill is a module with a function ``drill(seed, deadline)``, which returns rows of the table. The deadline is of
``time.monotonic()``: no try begins after it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence

from tests.drill.rows import Row, table

DRILLS = ("oracle", "pytorch", "hosts", "runs", "links", "endurance")


def main(words: Sequence[str] | None = None) -> int:
    """Drills, prints the table, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="shared by the drills; each tries everything once")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn at random follows from it")
    parser.add_argument("--only", nargs="+", choices=DRILLS, default=DRILLS, metavar="NAME", help=", ".join(DRILLS))
    arguments = parser.parse_args(words)
    end = time.monotonic() + 60 * arguments.minutes
    rows_of: dict[str, Sequence[Row]] = {}
    for index, name in enumerate(arguments.only):
        now = time.monotonic()
        deadline = now + max(0.0, end - now) / (len(arguments.only) - index)
        rows_of[name] = importlib.import_module(f"tests.drill.{name}").drill(arguments.seed, deadline)
        print(f"{name}: {time.monotonic() - now:.0f} s", file=sys.stderr)
    print(table(rows_of))
    return int(any(row.wrong for rows in rows_of.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
