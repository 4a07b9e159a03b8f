"""Calls that end with an error of a class, whose text names what it is about."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refused(call: Callable[[], object], *named: str, kind: type[Exception] = ValueError) -> str:
    """Calls it, and returns the error's text. Of an argument that is refused, ``named`` is its name and a colon."""
    with pytest.raises(kind) as raised:
        call()
    text = str(raised.value)
    assert all(each in text for each in named), f"{named} are not all in: {text}"
    return text
