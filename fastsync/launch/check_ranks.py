"""``fastsync doctor --ranks``: ranks meet, compare what they run on, average gradients, and tell how long it takes."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .. import all_reduce_gradients, attach
from ..distributed import process_group
from ..doctor import built_for, num_usable_cores, print_section, version
from ..elastic.peer_watch import own_address
from ..messages import format_bytes
from ..sync.machine import describe_machine
from .environment import this_rank
from .torchrun import launch_ranks

Gathered = TypeVar("Gathered")
TIMEOUT = 30.0
"""Seconds that ranks wait for each other."""
SIZES = {16: 50, 2**20: 8}
"""How many steps are timed with so many float32 values."""
HAVE_TO_AGREE = ("fastsync", "torch")
"""What has to be the same on all ranks. Ranks that differ in it average nothing, because attach may refuse them."""

Facts: TypeAlias = Mapping[str, str]
"""What may differ between ranks, by name."""


@dataclass(frozen=True)
class Measured:
    """What a rank has measured."""

    transport: str
    seconds: Mapping[int, float] = field(default_factory=dict)
    """The median of a step, by the number of values."""
    wrong: str = ""
    """What is wrong with the means; empty if nothing is."""


def check(num_ranks: int | None, timeout: float = TIMEOUT) -> int:
    """Checks the ranks that a launcher has started, of which this process is one, or starts some on this host.

    Args:
        num_ranks: how many; None for as many as the launcher has started, or for 2.
        timeout: seconds that ranks wait for each other.

    Returns:
        0 if every mean is right, and 1 if not, or if ranks are missing or have other versions. Rank 0 prints what was
        found.

    Raises:
        ValueError: the launcher has started another number of ranks.
    """
    this = this_rank()
    if this.launcher is not None and this.world_size > 1:
        if num_ranks not in (None, this.world_size):
            raise ValueError(
                f"--ranks {num_ranks}: {this.launcher} has started {this.world_size}; leave the number out"
            )
        return _as_rank(timeout)
    try:
        statuses: list[int] = launch_ranks(_as_rank, 2 if num_ranks is None else num_ranks, timeout)
    except ChildFailedError:  # the launcher has told of it
        return 1
    return max(statuses)


def _as_rank(timeout: float) -> int:
    begin, this = time.monotonic(), this_rank()
    try:
        with process_group(timeout=timeout) as device:
            places, facts, measured = _meet(device)
    except RuntimeError as error:
        print(f"fastsync doctor: {error}", file=sys.stderr)
        return 1
    obstacles = _obstacles(facts, measured)
    if this.rank == 0:
        print_section("ranks", [("number", str(len(places))), *_by_value(places), ("time-out", f"{timeout:g} s")])
        _print(facts, measured, obstacles, time.monotonic() - begin)
    return 1 if obstacles else 0


def _meet(device: torch.device) -> tuple[list[str], list[Facts], list[Measured]]:
    """Returns where the ranks are, what may differ, and what they measure if they may average."""
    address = own_address(os.environ.get("MASTER_ADDR") or "localhost")
    places = _gathered(f"{socket.gethostname()} ({address})")
    facts = _gathered(_facts(device))
    return places, facts, [] if _obstacles(facts) else _gathered(_measure(device))


def _measure(device: torch.device) -> Measured:
    rank = dist.get_rank()
    parameters = {numel: nn.Parameter(torch.zeros(numel, device=device)) for numel in SIZES}
    transport = _transport(list(parameters.values()), rank)
    seconds = {numel: _seconds(parameter, rank, SIZES[numel]) for numel, parameter in parameters.items()}
    mean, wrong = (dist.get_world_size() + 1) / 2, ""  # exact in float32
    for parameter in parameters.values():
        assert parameter.grad is not None
        if not torch.all(parameter.grad == mean):
            wrong = f"rank {rank} has {parameter.grad[0].item()} where the mean is {mean}"
    return Measured(transport, seconds, wrong)


def _transport(parameters: list[nn.Parameter], rank: int) -> str:
    """Averages gradients in a backward, and returns in words how they got to other ranks."""
    sync = attach(parameters)
    torch.stack([(parameter * (rank + 1)).sum() for parameter in parameters]).sum().backward()
    transport = sync.stats().describe_transport()
    sync.detach()
    return transport


def _seconds(parameter: nn.Parameter, rank: int, count: int) -> float:
    """Returns the median time of averaging a gradient, which becomes the mean of ranks' numbers from 1 on."""
    assert parameter.grad is not None
    times = []
    for _ in range(count):
        parameter.grad.fill_(rank + 1)
        times.append(_timed(lambda: all_reduce_gradients([parameter]), parameter.device))
    return median(times)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    dist.barrier()
    begin = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def _facts(device: torch.device) -> Facts:
    return {
        "fastsync": version() or "not installed",
        "torch": torch.__version__,
        "extension built for": f"torch {built_for()}",
        "python": platform.python_version(),
        "cores": str(num_usable_cores()),
        "computes on": describe_machine([torch.empty(0, device=device)]),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "not set"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "not set"),
    }


def _gathered(own: Gathered) -> list[Gathered]:
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own)
    return of_all


def _by_value(values: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each value once, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    return [(f"rank{'s' * (len(ranks) > 1)} {_span(ranks)}", value) for value, ranks in ranks_of.items()]


def _span(ranks: Sequence[int]) -> str:
    is_whole = list(ranks) == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 2
    return f"{ranks[0]} to {ranks[-1]}" if is_whole else ", ".join(map(str, ranks))


def _differences(facts: Sequence[Facts]) -> dict[str, list[tuple[str, str]]]:
    by_name = {name: _by_value([each.get(name, "unknown") for each in facts]) for name in facts[0]}
    return {name: values for name, values in by_name.items() if len(values) > 1}


def _obstacles(facts: Sequence[Facts], measured: Sequence[Measured] = ()) -> list[str]:
    wrong = [each.wrong for each in measured if each.wrong]
    different = [name for name in _differences(facts) if name in HAVE_TO_AGREE]
    return wrong + [f"{name}: install the same version on every rank" for name in different]


def _print(facts: Sequence[Facts], measured: Sequence[Measured], obstacles: Sequence[str], seconds: float) -> None:
    if measured:
        times = [(f"a mean of {format_bytes(4 * numel)}", _in_words(measured, numel)) for numel in SIZES]
        print_section("gradients", [("way", "; ".join(dict.fromkeys(each.transport for each in measured))), *times])
    for name, values in _differences(facts).items():
        print_section(f"{name} differs", values)
    print("\n".join(["will not work here", *(f"  {line}" for line in obstacles), ""]) if obstacles else "", end="")
    ends = "the ranks do not work together" if obstacles else f"the {len(facts)} ranks average gradients"
    print(f"{ends} (checked in {seconds:.1f} s)", flush=True)


def _in_words(measured: Sequence[Measured], numel: int) -> str:
    seconds = [each.seconds[numel] for each in measured]
    slowest = seconds.index(max(seconds))
    per_second = f", {format_bytes(4 * numel / max(seconds))}/s" if numel > 2**10 else ""
    return f"{max(seconds) * 1e6:,.0f} µs{per_second}, on rank {slowest}, the slowest"
