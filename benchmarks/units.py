"""Quantities as people write them: bytes, rates of links, times."""

import re
from collections.abc import Mapping

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
"""As tc writes them."""
SI = {"bit": "bit/s", "kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_bytes(text: str) -> int:
    """A number of bytes from text such as 64B, 1KiB or 25MiB.

    Raises:
        ValueError: it is none.
    """
    return round(_parse(text, BYTES, "a number of bytes: write it as 64B, 1KiB, 25MiB or 1GiB"))


def format_bytes(nbytes: int) -> str:
    """As ``parse_bytes`` reads it, in the largest unit that leaves a whole number."""
    unit = next(unit for unit in reversed(BYTES) if nbytes % BYTES[unit] == 0)
    return f"{nbytes // BYTES[unit]}{unit}"


def parse_rate(text: str) -> int:
    """Bits per second of a rate as tc writes it: 100mbit, 1gbit, 2.5gbit.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.lower())
    if match is None or (rate := round(float(match[1]) * RATES[match[2]])) < 1:
        raise ValueError(f"rate={text}: expected a number and a unit, such as 100mbit, 1gbit or 10gbit")
    return rate


def format_rate(rate: float) -> str:
    """As people say it: 100 Mbit/s."""
    unit = next((unit for unit in reversed(RATES) if rate >= RATES[unit]), "bit")
    return f"{rate / RATES[unit]:.4g} {SI[unit]}"


def parse_seconds(text: str) -> float:
    """A time from text such as 20us, 1.5ms or 2s.

    Raises:
        ValueError: it is none.
    """
    return _parse(text, SECONDS, "a time: write it as 20us, 1.5ms or 2s")


def format_seconds(seconds: float) -> str:
    """Three digits, in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _parse(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(units)})", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not {what}")
    return float(match[1]) * units[match[2]]
