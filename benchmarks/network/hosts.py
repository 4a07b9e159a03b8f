"""Reads which machines there are, finds this one among them, and places the ranks of a world size on them."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fastsync import _C

_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")


@dataclass(frozen=True)
class Host:
    name: str
    """As the other machines reach it."""
    slots: int
    """Ranks that it takes."""


def read_hostfile(path: Path) -> list[Host]:
    """The machines of a file with a line ``name slots=N`` for each. What stands behind a # is a comment.

    Raises:
        ValueError: a line that is something else, or no machine at all.
    """
    hosts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        words = line.split("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None or int(match["slots"]) < 1:
            raise ValueError(f"{path}, line {number}: {words!r} is no machine; write: name slots=N, with N from 1 on")
        hosts.append(Host(match["name"], int(match["slots"])))
    if not hosts:
        raise ValueError(f"{path} names no machine; write a line for each: name slots=N")
    return hosts


def own_index(hosts: Sequence[Host], names: set[str] | None = None) -> int:
    """Finds this machine among those of the hostfile, by what it calls itself, with its domain and without.

    Raises:
        ValueError: none of them, or several, have a name of this machine.
    """
    names = names or {socket.gethostname(), socket.getfqdn(), socket.gethostname().split(".")[0]}
    own = [index for index, host in enumerate(hosts) if host.name in names]
    if len(own) == 1:
        return own[0]
    found = "several lines" if own else "no line"
    raise ValueError(
        f"{found} of the hostfile have a name of this machine ({', '.join(sorted(names))}); "
        "say which line is this machine's with --node-rank, which counts from 0"
    )


def place(hosts: Sequence[Host], world_size: int) -> list[int]:
    """Places ranks on as few machines machines as can hold them, filled one after the other.

    Raises:
        ValueError: all together have too few slots.
    """
    placed: list[int] = []
    for host in hosts:
        if left := world_size - sum(placed):
            placed.append(min(host.slots, left))
    if sum(placed) < world_size:
        raise ValueError(
            f"world size {world_size} needs {world_size} slots and the hostfile has {sum(placed)}; "
            "leave that world size out, or add machines or slots"
        )
    return placed


@dataclass(frozen=True)
class Capacity:
    """Ranks that a machine can hold so that none shares with another what it computes on."""

    ranks: int
    what: str
    """In words: cores or GPUs."""
    can_be_exceeded: bool
    """Cores can be shared; ranks on the same GPU cannot talk over NCCL."""


def own_capacity(device: str) -> Capacity:
    """This machine's, for ranks on "cpu" or "cuda"."""
    if device == "cuda":
        return Capacity(torch.cuda.device_count(), "GPUs", can_be_exceeded=False)
    return Capacity(_C.num_usable_cores(), "cores that it may use", can_be_exceeded=True)


def check_capacity(name: str, capacity: Capacity, num_ranks: int, world_size: int, oversubscribe: bool) -> bool:
    """Tells whether a machine with that many ranks of a world size is oversubscribed.

    Raises:
        ValueError: it is, and may not be.
    """
    if num_ranks <= capacity.ranks:
        return False
    reason = f"world size {world_size} puts {num_ranks} ranks on {name}, which has {capacity.ranks} {capacity.what}"
    if not capacity.can_be_exceeded:
        raise ValueError(f"{reason}, and NCCL takes one rank a GPU; leave it out, or use --device cpu")
    if not oversubscribe:
        raise ValueError(
            f"{reason}; leave it out, or measure it all the same with --oversubscribe, which marks it in all tables "
            "and pictures"
        )
    return True
