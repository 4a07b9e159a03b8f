"""Quantities as people write them: bytes and rates of links."""

import re

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
"""As tc writes them."""
SI = {"bit": "bit/s", "kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}


def parse_bytes(text: str) -> int:
    """A number of bytes from text such as 64B, 1KiB or 25MiB.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(BYTES)})", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a number of bytes: write it as 64B, 1KiB, 25MiB or 1GiB")
    return round(float(match[1]) * BYTES[match[2]])


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
