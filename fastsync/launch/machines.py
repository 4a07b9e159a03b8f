"""A list of machines in YAML, and which of them this one is."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import yaml


def read_machines(path: str) -> list[str]:
    """Reads names or addresses of machines, by which they reach each other, from a YAML list.

    Raises:
        ValueError: there is no such file, or it holds something else, or names a machine twice.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"nodes={path!r} cannot be read: {error}") from None
    if not isinstance(content, list) or not content or not all(isinstance(name, str) for name in content):
        raise ValueError(f"nodes={path!r} must hold a list of names or addresses, a line '- node0' for each machine")
    if len(set(content)) < len(content):
        raise ValueError(f"nodes={path!r} names a machine twice")
    return content


def find_this_machine(machines: list[str], path: str) -> int:
    """Finds the number of this machine among them.

    Raises:
        ValueError: none of them is this one, or several are.
    """
    here = [number for number, name in enumerate(machines) if _is_here(name)]
    if len(here) != 1:
        found = f"{[machines[number] for number in here]} are all this machine" if here else "none is this machine"
        raise ValueError(f"nodes={path!r}: of {machines} {found}; say which one it is with node_rank")
    return here[0]


def _is_here(name: str) -> bool:
    """Only an address of this machine can be bound to. A name may have several, of which not all are in use."""
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, *_, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind(address)
    except OSError:
        return False
    return True
