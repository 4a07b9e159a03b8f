"""Breaks things on purpose, for as long as it is told, and prints a table. Exits with 1 if anything was wrong.

A drill is a module with ``attempts(seed, deadline)``, which yields ``Attempts``, and tells whether it ``REPEATS``: then
it goes on with other seeds until the deadline, which is of ``time.monotonic()``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

from tests.drill.attempts import Row
from tests.engine.test_shared_memory_limits import own_mounts

DRILLS = ("pytorch", "oracle", "hosts", "runs", "endurance")


def rows_of(drill: Any, seed: int, deadline: float) -> dict[str, Row]:
    """Each row at least once."""
    rows: dict[str, Row] = defaultdict(Row)
    for number in count(seed):
        for what, attempt in drill.attempts(number, deadline):
            rows[what].add(attempt, f"{what}, --seed {number}")
        if not drill.REPEATS or time.monotonic() >= deadline:
            break
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Drills, prints the table, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.drill")
    parser.add_argument("--minutes", type=float, default=30.0, help="shared by the drills; each tries everything once")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each has the next one")
    parser.add_argument("--only", nargs="+", choices=DRILLS, default=DRILLS, metavar="NAME", help=", ".join(DRILLS))
    arguments = parser.parse_args(words)
    end, wrong = time.monotonic() + 60 * arguments.minutes, []
    print(f"{'drill':10} {'what':58} {'tried':>6} {'wrong':>6}")
    for index, name in enumerate(arguments.only):
        began = time.monotonic()
        share = max(0.0, end - began) / (len(arguments.only) - index)
        rows = rows_of(importlib.import_module(f"tests.drill.{name}"), arguments.seed, began + share)
        for what, row in rows.items():
            print(f"{name:10} {what:58} {row.tried:6} {len(row.wrong):6}  {row.note}")
            wrong += row.wrong
        print(f"{name:10} {time.monotonic() - began:.0f} s", flush=True)
    for line in wrong:
        print(f"wrong: {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    if os.geteuid() == 0:
        own_mounts()  # what drills mount, only they see, and what they start
    sys.exit(main())
