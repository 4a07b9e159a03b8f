"""Measuring a process group with whole syncs of artificial gradients, and what the engine follows from it.

Sizes rise by factors of eight for as long as the time allows, so that a slow link is measured with small messages and a
fast one with large ones. Candidates take turns, so that what changes on the machine meanwhile meets all of them alike.
"""

from __future__ import annotations

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
from ..compression import LOSSIER, Auto, Compression
from ..distributed import device_of
from .choose import WIRES, Candidate, GroupProfile, compressions, in_engine, volume

BUDGET = 0.7
"""Seconds that measuring may take, connecting the ranks not counted."""
SMALLEST, LARGEST = 2**12, 2**21
"""Gradient values. More than the largest would tell nothing new: all is bandwidth there."""
FACTOR = 8
"""From one size to the next."""
GROWTH = 10.0
"""No sync of ``FACTOR`` times as many values is taken to last longer than this, compared to the one before."""
MIN_TURNS, MAX_TURNS = 3, 15
SHARE = 0.1
"""Of the budget, for more than ``MIN_TURNS`` of a size that is not the last one."""
UNUSUAL = 2.0
"""Beyond the measured sizes, bytes of all candidates cost alike but for this factor each way: more is noise."""

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

    ``compression="auto"`` does so by itself. On links of a very high latency it takes as long as one small sync with
    each candidate.

    Args:
        process_group: the group, or a one-dimensional ``DeviceMesh``; None for the default group.
        wires: what to measure, out of ``"none"``, ``"fp16"``, ``"bf16"`` and ``"int8"`` (with error feedback).
        device: where gradients are; by default on the GPU if the group has NCCL, else on the CPU.
        dtype: of the gradients.

    Raises:
        ValueError: an argument is refused, or differs between ranks.
        RuntimeError: another rank did not take part in time, or is lost.
    """
    group = resolve_group(process_group)
    named = "; ".join(str(each) for each in compressions(wires, group.size()))  # before anything is sent
    where = device_of(group) if device is None else torch.device(device)
    try:
        _C.check_agreement(group, f"measuring {dtype} on {where.type} with {named}", where)
        num_hosts = len(_C.hosts(group)) if where.type == "cpu" else 1
        # Hosts add over the slowest links; ranks do where there is one host.
        members = num_hosts if num_hosts > 1 else group.size()
        volumes = {each: volume(each, members, dtype.itemsize) for each in compressions(wires, members)}
        # Alone nothing travels, so nothing can be gained.
        alone = [Candidate(each) for each in volumes]
        measured = alone if group.size() == 1 else Survey(volumes, _Turns(group, where, dtype)).candidates()
    except RuntimeError as error:
        raise RuntimeError(
            f"fastsync: measuring failed on rank {group.rank()} of {group.size()}; does every rank measure, or is "
            f"compression set to 'auto' on this rank alone? {error}"
        ) from error
    return GroupProfile(tuple(measured))


def candidates_of(
    compression: Compression | Auto, group: dist.ProcessGroup, named: Mapping[str, Tensor]
) -> tuple[Candidate, ...]:
    """Returns what these parameters' gradients may travel with. Measures the group if that is needed and not done yet.

    Raises:
        ValueError: the compression cannot carry one of the parameters, or nodes do not divide the group.
    """
    if isinstance(compression, Compression):
        check_carries(compression.wire, named)
        return (_given(compression, group),)
    return _allowed(compression, group, [parameter for parameter in named.values() if parameter.requires_grad])


def _given(compression: Compression, group: dist.ProcessGroup) -> Candidate:
    ranks_per_node = compression.ranks_per_node or 1
    if group.size() % ranks_per_node:
        raise ValueError(
            f"compression: ranks_per_node={ranks_per_node} does not divide the process group's {group.size()} ranks; "
            "every node has to have as many"
        )
    # The ranks of a single node do not compress.
    return Candidate(Compression(reduce="fp32") if group.size() == ranks_per_node > 1 else compression)


def _allowed(auto: Auto, group: dist.ProcessGroup, trained: Sequence[Tensor]) -> tuple[Candidate, ...]:
    if not trained:
        return (Candidate(Compression()),)
    device = trained[0].device
    wires = tuple(wire for wire in WIRES if wire not in LOSSIER or wire in auto.allow)
    if any(parameter.is_complex() for parameter in trained):
        wires = ("none",)  # nothing else carries them
    dtype = max(trained, key=torch.Tensor.numel).dtype.to_real()
    known, case = _profiles.setdefault(group, {}), (wires, device.type, dtype)
    if case not in known:
        known[case] = measure_group(group, wires=wires, device=device, dtype=dtype)
    return known[case].candidates


class _Turns:
    """``TakeTurn`` on a process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        self._group, self._device, self._dtype = group, device, dtype
        self._parameter = torch.empty(0)
        self._engines: dict[Compression, _C.Synchronizer] = {}
        self._began: float | None = None
        self._num_turns = 0

    def __call__(self, active: Sequence[Compression], numel: int) -> tuple[list[float], float]:
        if numel != self._parameter.numel():
            self._prepare(active, numel)
        if self._began is None:
            # Backends connect ranks when they first talk to each other: a part of starting, not of a sync.
            for compression in active:
                self._sync(compression)
            self._began = time.perf_counter()
        # A rank that leaves a sync early waits in the next one, so the order must change.
        first = self._num_turns % len(active)
        self._num_turns += 1
        ready = torch.zeros(1, device=self._device)
        dist.all_reduce(ready, group=self._group)
        ready.item()  # waits for a GPU
        of_each = {compression: self._sync(compression) for compression in (*active[first:], *active[:first])}
        elapsed = time.perf_counter() - self._began
        # The slowest rank counts, and all ranks have to decide by the same numbers.
        joined = torch.tensor([*map(of_each.__getitem__, active), elapsed], dtype=torch.float64).to(self._device)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=self._group)
        *seconds, elapsed = joined.tolist()
        return seconds, elapsed

    def _prepare(self, active: Sequence[Compression], numel: int) -> None:
        # Equal on all ranks, so that averaging changes little from one turn to the next. Engines do not keep it alive.
        gradient = torch.linspace(-1.0, 1.0, numel).to(self._device, self._dtype)
        self._parameter = torch.empty_like(gradient).requires_grad_()
        self._parameter.grad = gradient
        for compression in active:
            engine = _C.Synchronizer([self._parameter], ["artificial"], self._group, self._parameter.nbytes)
            engine.set_compressions(in_engine([Candidate(compression)]))
            engine.agree()
            self._engines[compression] = engine

    def _sync(self, compression: Compression) -> float:
        start = time.perf_counter()
        self._engines[compression].synchronize()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


TakeTurn = Callable[[Sequence[Compression], int], tuple[list[float], float]]
"""Syncs so many values once with each. Seconds of each, and since measuring began: the same on all ranks."""


class Survey:
    """Measures whole syncs at rising sizes, and extends them by a cost model: a latency, and a time for each byte.

    Where not even the second size fits for all, only the candidate that sends least is measured, and its time for a
    byte goes for all.

    Args:
        volumes: bytes that a rank sends of each value, with each of the candidates.
        take_turn: what measures. Nothing else decides, so that all ranks decide alike.
        budget: seconds. A size is begun if a turn fits in even if it takes ``GROWTH`` times as long.
    """

    def __init__(self, volumes: Mapping[Compression, float], take_turn: TakeTurn, budget: float = BUDGET) -> None:
        self._volumes, self._take_turn, self._budget = volumes, take_turn, budget
        self._spent = 0.0
        self._active = list(volumes)
        self._points: dict[Compression, dict[int, float]] = {compression: {} for compression in volumes}
        self._samples: list[list[float]] = []
        """Of the newest size, for each turn the seconds of each that is active."""

    def candidates(self) -> list[Candidate]:
        """Measures them."""
        numel = SMALLEST
        while True:
            self._samples = []
            self._take_turns(numel, min(self._spent + SHARE * self._budget, self._budget))
            if numel >= LARGEST or not self._prepare_next():
                break
            numel *= FACTOR
        # The time that is left goes into the size that decides about all larger ones.
        self._take_turns(numel, self._budget)
        beyond = [(FACTOR * numel, seconds) for seconds in self._expected().values()] if numel > SMALLEST else []
        steady = [_steady(points) for points in self._points.values()]
        extended = [(*points, *beyond[index : index + 1]) for index, points in enumerate(steady)]
        return [Candidate(*each) for each in zip(self._volumes, extended, strict=True)]

    def _take_turns(self, numel: int, until: float) -> None:
        """Until so much time is spent, but ``MIN_TURNS`` if the budget allows it."""
        while not self._samples or (
            len(self._samples) < MAX_TURNS
            and self._spent + sum(self._samples[-1]) <= (self._budget if len(self._samples) < MIN_TURNS else until)
        ):
            seconds, self._spent = self._take_turn(self._active, numel)
            self._samples.append(seconds)
        for compression, of_turns in zip(self._active, zip(*self._samples, strict=True), strict=True):
            # The lower quartile: what disturbs a turn only ever adds to it.
            self._points[compression][numel] = sorted(of_turns)[(len(of_turns) - 1) // 4]
        for compression in self._points.keys() - self._active:
            (alone,) = self._active
            rise = max(0.0, self._points[alone][numel] - self._points[alone][numel // FACTOR])
            further = rise * self._volumes[compression] / self._volumes[alone]
            self._points[compression][numel] = self._points[compression][numel // FACTOR] + further

    def _prepare_next(self) -> bool:
        """Decides who is measured at the next size; False where the time is too short for anybody."""
        if len(self._points[self._active[0]]) > 1:
            expected = self._expected()
            often = MIN_TURNS * sum(expected[compression] for compression in self._active)
            return self._fits(self._active) and self._spent + often <= self._budget
        # Nothing is known about larger sizes yet, so it is enough if one turn fits.
        for chosen in (self._active, [min(self._active, key=self._volumes.__getitem__)]):
            if self._fits(chosen):
                self._active = chosen
                return True
        return False

    def _fits(self, chosen: Sequence[Compression]) -> bool:
        newest = sum(list(self._points[compression].values())[-1] for compression in chosen)
        return self._spent + GROWTH * newest <= self._budget

    def _expected(self) -> dict[Compression, float]:
        """Seconds of each at the next size, by its latency and what its bytes cost."""
        newest = {compression: _steady(points)[-2:] for compression, points in self._points.items()}
        per_byte = {
            compression: (longer - seconds) / (more - less) / self._volumes[compression]
            for compression, ((less, seconds), (more, longer)) in newest.items()
        }
        usual = median_low([value for value in per_byte.values() if value > 0] or [0.0])
        found = {}
        for compression, (_, (numel, seconds)) in newest.items():
            cost = min(max(per_byte[compression], usual / UNUSUAL), usual * UNUSUAL)
            found[compression] = seconds + (FACTOR - 1) * numel * self._volumes[compression] * cost
        return found


def _steady(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Fewer values never take longer: where they seemed to, something else was in the way."""
    return [(numel, min(seconds for size, seconds in points.items() if size >= numel)) for numel in points]
