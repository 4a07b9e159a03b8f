"""Text for messages: the name that was meant, a number of bytes, an option that is too small."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any


def check_at_least(options: Any, **least: int) -> None:
    """Raises ValueError for an option below its least value. None, which stands for a default, is allowed."""
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise ValueError(f"{name}={value} must be at least {lowest}")


def did_you_mean(name: str, names: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Returns the end of a message, which asks for the most similar names; empty if no name is similar."""
    known = {known.lower(): known for known in names}
    near = difflib.get_close_matches(name.lower(), known, cutoff=cutoff)
    return f"; did you mean {' or '.join(known[found] for found in near)}?" if near else ""


def format_bytes(count: float | None) -> str:
    """Formats a number of bytes, such as "1.5 MB"; a dash if it was not measured."""
    if count is None or math.isnan(count):
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
