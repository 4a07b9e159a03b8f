"""Measures a process group with whole syncs of artificial gradients, for the choice of a compression.

Sizes rise by factors of eight as long as the time allows. So a slow link is measured with small messages, and a fast
one with large messages. Candidates take turns, so that a change on the machine affects all of them alike.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .._checks import check_carries, resolve_group
from ..distributed import device_of
from ..sync.compression import LOSSIER, Auto, Compression
from .choose import SIZES, WIRES, Candidate, GroupProfile, compressions, in_engine, volume

BUDGET = 0.7
"""Seconds that measuring may take, without the time to connect ranks."""
SMALLEST, LARGEST = 2**12, 2**21
"""Numbers of gradient values. Beyond the largest only bandwidth counts, so more sizes tell nothing new."""
FACTOR = 8
"""The factor between one size and the next."""
MIN_TURNS, MAX_TURNS = 3, 15
SHARE = 0.1
"""The fraction of the budget for turns beyond ``MIN_TURNS`` at a size that is not the last one."""
UNUSUAL = 2.0
"""The largest factor by which a candidate's time for a byte may differ from the usual one. More counts as noise."""

_Profiles: TypeAlias = dict[tuple[object, ...], GroupProfile]
_profiles: weakref.WeakKeyDictionary[dist.ProcessGroup, _Profiles] = weakref.WeakKeyDictionary()


def measure_group(
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    wires: Iterable[str] = ("none", "fp16", "bf16"),
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> GroupProfile:
    """Measures what syncs take on a process group, in under a second. Every rank must call it.

    ``compression="auto"`` calls it. On very slow links it takes longer, because each candidate needs two small syncs.

    Args:
        process_group: the group, or a one-dimensional ``DeviceMesh``; None for the default group.
        wires: what to measure, out of ``"none"``, ``"fp16"``, ``"bf16"`` and ``"int8"`` (with error feedback).
        device: where gradients are; by default on the GPU if the group has NCCL, else on the CPU.
        dtype: of the gradients.

    Raises:
        ValueError: an argument is refused, or differs between ranks.
        RuntimeError: another rank did not take part in time, or is lost.
    """
    group, wires = resolve_group(process_group), tuple(wires)
    named = "; ".join(str(each) for each in compressions(wires, group.size()))  # before anything is sent
    where = device_of(group) if device is None else torch.device(device)
    try:
        _C.check_agreement(group, f"measuring {dtype} on {where.type} with {named}", where)
        num_hosts = len(_C.hosts(group)) if where.type == "cpu" else 1
        # The slowest links count: those between hosts, or those between ranks on a single host.
        members = num_hosts if num_hosts > 1 else group.size()
        volumes = {each: volume(each, members, dtype.itemsize) for each in compressions(wires, members)}
        # A single rank sends nothing, so nothing is measured.
        alone = [Candidate(each) for each in volumes]
        measured = alone if group.size() == 1 else Survey(volumes, _Turns(group, where, dtype, volumes)).candidates()
    except RuntimeError as error:
        raise RuntimeError(
            f"fastsync: measuring failed on rank {group.rank()} of {group.size()}; does every rank measure, or is "
            f"compression set to 'auto' on this rank alone? {error}"
        ) from error
    return GroupProfile(tuple(measured))


def candidates_of(
    compression: Compression | Auto,
    group: dist.ProcessGroup,
    named: Mapping[str, Tensor],
    device: torch.device | None = None,
) -> tuple[Candidate, ...]:
    """Returns the candidates for these parameters' gradients. It measures the group if it has not done so yet.

    ``device`` is where gradients are sent; None for the parameters' own.

    Raises:
        ValueError: the compression cannot carry one of the parameters, or nodes do not divide the group.
    """
    if isinstance(compression, Compression):
        check_carries(compression.wire, named)
        return (_given_candidate(compression, group),)
    trained = [parameter for parameter in named.values() if parameter.requires_grad]
    return _auto_candidates(compression, group, trained, device)


def _given_candidate(compression: Compression, group: dist.ProcessGroup) -> Candidate:
    ranks_per_node = compression.ranks_per_node
    if group.size() % ranks_per_node:
        raise ValueError(
            f"compression: ranks_per_node={ranks_per_node} does not divide the process group's {group.size()} ranks; "
            "every node has to have as many"
        )
    # The ranks of a single node do not compress.
    return Candidate(Compression(reduce="fp32") if group.size() == ranks_per_node > 1 else compression)


def _auto_candidates(
    auto: Auto, group: dist.ProcessGroup, trained: Sequence[Tensor], device: torch.device | None
) -> tuple[Candidate, ...]:
    if not trained:
        return (Candidate(Compression()),)
    device = trained[0].device if device is None else device
    wires = tuple(wire for wire in WIRES if wire not in LOSSIER or wire in auto.allow)
    if any(parameter.is_complex() for parameter in trained):
        wires = ("none",)  # no other wire carries complex values
    dtype = max(trained, key=torch.Tensor.numel).dtype.to_real()
    known, case = _profiles.setdefault(group, {}), (wires, device.type, dtype)
    if case not in known:
        known[case] = measure_group(group, wires=wires, device=device, dtype=dtype)
    return known[case].candidates


class _Turns:
    """Times syncs on a process group. It is a ``TakeTurn``."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, measured: Iterable[Compression]
    ) -> None:
        self._group, self._device, self._dtype = group, device, dtype
        self._compressions = list(measured)
        self._parameter = self._gradient = torch.empty(0)
        self._engines: list[_C.Synchronizer] = []
        self._began: float | None = None
        self._num_turns = 0

    def __call__(self, numel: int) -> tuple[list[float], float]:
        if numel != self._parameter.numel():
            self._prepare(numel)
        if self._began is None:
            # Backends connect ranks in their first collective, which does not belong to the time of a sync.
            for engine in self._engines:
                self._time_sync(engine)
            self._began = time.perf_counter()
        # A rank that leaves a sync early waits in the next one, so the order must change.
        first = self._num_turns % len(self._engines)
        self._num_turns += 1
        ready = torch.zeros(1, device=self._device)
        dist.all_reduce(ready, group=self._group)
        ready.item()  # waits for a GPU
        times = torch.zeros(len(self._engines) + 1, dtype=torch.float64, device="cpu")
        for index in (*range(first, len(self._engines)), *range(first)):
            times[index] = self._time_sync(self._engines[index])
        times[-1] = time.perf_counter() - self._began
        # The slowest rank counts, and all ranks have to decide by the same numbers.
        slowest = times.to(self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        *seconds, elapsed = slowest.tolist()
        return seconds, elapsed

    def _prepare(self, numel: int) -> None:
        # Each rank has other values, because engines warn if all ranks have the same gradients in the first step.
        last = 1.0 + self._group.rank() / self._group.size()
        self._gradient = torch.linspace(-1.0, last, numel, dtype=torch.float32, device=self._device).to(self._dtype)
        self._parameter = torch.empty_like(self._gradient).requires_grad_()  # engines do not keep parameters alive
        self._parameter.grad = torch.empty_like(self._gradient)
        self._engines = []
        for compression in self._compressions:
            engine = _C.Synchronizer([self._parameter], ["artificial"], self._group, self._parameter.nbytes)
            engine.set_compressions(in_engine([Candidate(compression)]))
            engine.agree(init_sync=False)
            self._engines.append(engine)

    def _time_sync(self, engine: _C.Synchronizer) -> float:
        """Times one sync. After an engine's first sync the gradients are means already, and change little."""
        if engine.num_steps() == 0:
            self._parameter.grad.copy_(self._gradient)  # type: ignore[union-attr]  # it has one
        start = time.perf_counter()
        engine.synchronize()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


TakeTurn = Callable[[int], tuple[list[float], float]]
"""Syncs a number of values once with each candidate. Returns the seconds of each, and the seconds since measuring
began. All are equal on all ranks."""


class Survey:
    """Measures whole syncs at rising sizes, and extends them by a cost model: a latency, and a time for each byte.

    The first two sizes take at least one turn each, whatever the budget, because the cost model needs them. A later
    size is begun if ``MIN_TURNS`` are expected to fit.

    Args:
        volumes: bytes that a rank sends of each value, with each of the candidates.
        take_turn: times the candidates. Decisions depend on its results alone, so that all ranks decide alike.
    """

    def __init__(self, volumes: Mapping[Compression, float], take_turn: TakeTurn) -> None:
        self._volumes, self._take_turn = volumes, take_turn
        self._spent = 0.0
        self._points: dict[Compression, dict[int, float]] = {compression: {} for compression in volumes}
        self._noise: dict[Compression, dict[int, float]] = {compression: {} for compression in volumes}
        self._samples: list[list[float]] = []
        """The seconds of each candidate in each turn of the newest size."""

    def candidates(self) -> list[Candidate]:
        """Measures the candidates."""
        numel = SMALLEST
        while True:
            self._samples = []
            self._take_turns(numel, min(self._spent + SHARE * BUDGET, BUDGET))
            if numel >= LARGEST or (numel > SMALLEST and not self._fits(FACTOR * numel)):
                break
            numel *= FACTOR
        # The rest of the time goes into the last size, because it decides about all larger ones.
        self._take_turns(numel, BUDGET)
        beyond = self._expected(SIZES[-1])
        return [
            Candidate(
                compression,
                points=(*_steady(points), (SIZES[-1], beyond[compression])),
                noise=tuple(self._noise[compression].items()),
            )
            for compression, points in self._points.items()
        ]

    def _take_turns(self, numel: int, until: float) -> None:
        """Takes at least one turn, ``MIN_TURNS`` if the budget allows, and more until ``until`` seconds are spent."""
        while not self._samples or (
            len(self._samples) < MAX_TURNS
            and self._spent + sum(self._samples[-1]) <= (BUDGET if len(self._samples) < MIN_TURNS else until)
        ):
            seconds, self._spent = self._take_turn(numel)
            self._samples.append(seconds)
        for compression, samples in zip(self._points, zip(*self._samples, strict=True), strict=True):
            self._points[compression][numel], self._noise[compression][numel] = lower_quartile(samples)

    def _fits(self, numel: int) -> bool:
        return self._spent + MIN_TURNS * sum(self._expected(numel).values()) <= BUDGET

    def _expected(self, numel: int) -> dict[Compression, float]:
        """Predicts the seconds of each candidate at a larger size, from its latency and its time for a byte."""
        newest = {compression: _steady(points)[-2:] for compression, points in self._points.items()}
        per_byte = {
            compression: (longer - seconds) / (more - less) / self._volumes[compression]
            for compression, ((less, seconds), (more, longer)) in newest.items()
        }
        usual = median_low([value for value in per_byte.values() if value > 0] or [0.0])
        found = {}
        for compression, (_, (measured, seconds)) in newest.items():
            cost = min(max(per_byte[compression], usual / UNUSUAL), usual * UNUSUAL)
            found[compression] = seconds + (numel - measured) * self._volumes[compression] * cost
        return found


def lower_quartile(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the lower quartile and its relative uncertainty. The quartile is used because disturbances only add time.

    The uncertainty is half the distance between two order statistics. Their ranks are two standard deviations away from
    the quartile's, which makes an interval of some 95 % (H. A. David and H. N. Nagaraja, Order Statistics, 2003,
    section 7.1). The upper one is at most the median, because a few disturbed turns say nothing about the others. For
    one sample it is 0.
    """
    ordered, rank = sorted(samples), (len(samples) - 1) // 4
    distance = max(1, round(2 * math.sqrt(3 * len(samples)) / 4))
    low, high = ordered[max(0, rank - distance)], ordered[min(len(ordered) // 2, rank + distance)]
    return ordered[rank], (high - low) / 2 / ordered[rank]


def _steady(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Lowers times so that fewer values never take longer. A longer time means that the machine was disturbed."""
    return [(numel, min(seconds for size, seconds in points.items() if size >= numel)) for numel in points]
