"""Parts of messages for people, and errors that several places raise."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


def format_bytes(count: float | None) -> str:
    """Formats a number of bytes, such as "1.5 MB"; a dash for what was not measured."""
    if count is None or math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Asks, at the end of a sentence, for the names most like this one; empty if none is like it."""
    known = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known) or difflib.get_close_matches(
        name.lower(), known, cutoff=0.5
    )
    return f"; did you mean {' or '.join(known[found] for found in near)}?" if near else ""


def check_at_least(options: Any, **least: int) -> None:
    """Raises ValueError for an option below its least; None, where an option has a default of its own, is none."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise ValueError(f"{name}={value} must be at least {lowest}")
