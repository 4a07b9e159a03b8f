"""Measuring a process group: whole syncs of stand-in gradients, by the engine that will send the real ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fastsync import _C, __version__
from fastsync.autotune.candidates import Candidate, compressions, engine_schedule, volume
from fastsync.autotune.profile import GroupProfile, backend_of, ranks_by_host
from fastsync.autotune.survey import survey
from fastsync.checks import resolve_group
from fastsync.compression import Compression


def measure_group(
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    wires: Iterable[str] = ("none", "fp16", "bf16"),
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> GroupProfile:
    """Measures what syncs take on a process group, in under a second. Every rank must call it.

    ``compression="auto"`` does so by itself. On its own it is for looking at what was found, or for saving it.
    The links should be as idle as they are when a step sends its gradients. On links of so high a latency that one sync
    of a few thousand values with each candidate takes a second, it takes that second.

    Args:
        process_group: the group, or a one-dimensional ``DeviceMesh``; None for the default group.
        wires: what to measure, out of ``"none"``, ``"fp16"``, ``"bf16"`` and ``"int8"`` (with error feedback).
        device: where gradients are; by default on the GPU if the group serves CUDA, by another backend than Gloo, else
            on the CPU.
        dtype: of the gradients.

    Raises:
        ValueError: an argument is not what it should be, or differs between ranks.
        RuntimeError: another rank did not take part in time, or is lost.
    """
    group = resolve_group(process_group)
    candidates = compressions(wires, group.size())  # refuses names that are none before anything is sent
    where = _device_of(group) if device is None else torch.device(device)
    backend = backend_of(group, where)
    described = "; ".join(str(compression) for compression in candidates)
    try:
        _C.check_agreement(group, f"measuring {_name(dtype)} on {where.type} with {described}", where)
        ranks_per_host = ranks_by_host(group, where)
        candidates = compressions(wires, _num_members(group, ranks_per_host))
        measured = _measure(candidates, group, where, dtype, ranks_per_host)
    except RuntimeError as error:
        raise RuntimeError(
            f"fastsync: measuring failed on rank {group.rank()} of {group.size()}; does every rank measure, or is "
            f"compression set to 'auto', or remeasure() called, on this rank alone? {error}"
        ) from error
    return GroupProfile(
        candidates=tuple(measured),
        world_size=group.size(),
        ranks_per_host=ranks_per_host,
        backend=backend,
        device=where.type,
        dtype=_name(dtype),
        torch_version=torch.__version__,
        fastsync_version=__version__,
    )


def _num_members(group: dist.ProcessGroup, ranks_per_host: Sequence[int]) -> int:
    """Counts who adds over the slowest links: hosts where there are several, else ranks."""
    return len(ranks_per_host) if len(ranks_per_host) > 1 else group.size()


def _measure(
    candidates: Sequence[Compression],
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    ranks_per_host: Sequence[int],
) -> list[Candidate]:
    if group.size() == 1:
        return [Candidate(compression) for compression in candidates]  # nothing travels, so nothing can be gained
    members = _num_members(group, ranks_per_host)
    volumes = {candidate: volume(candidate, members, dtype.itemsize) for candidate in candidates}
    return survey(volumes, _Turns(group, device, dtype))


class _Turns:
    """``survey.TakeTurns`` on a process group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        self._group = group
        self._device = device
        self._dtype = dtype
        self._stand_in = torch.empty(0)
        self._engines: dict[Compression, _C.Synchronizer] = {}
        self._began: float | None = None
        self._num_turns = 0

    def __call__(self, active: Sequence[Compression], numel: int) -> tuple[list[float], float]:
        if self._began is None:
            # Backends connect ranks when they first talk to each other: a part of starting, not of a sync.
            self._prepare(active, numel)
            for compression in active:
                self._sync(compression)
            self._began = time.perf_counter()
        elif numel != self._stand_in.numel():
            self._prepare(active, numel)
        # Who leaves a sync early waits in the next one, so that it must not always be the same one.
        first = self._num_turns % len(active)
        self._num_turns += 1
        self._barrier()
        of_each = {compression: self._sync(compression) for compression in (*active[first:], *active[:first])}
        seconds = [of_each[compression] for compression in active]
        elapsed = time.perf_counter() - self._began
        # What counts is the rank that takes longest; and all ranks have to decide by the same numbers.
        joined = torch.tensor([*seconds, elapsed], dtype=torch.float64).to(self._device)
        dist.all_reduce(joined, dist.ReduceOp.MAX, group=self._group)
        *seconds, elapsed = joined.tolist()
        return seconds, elapsed

    def _prepare(self, active: Sequence[Compression], numel: int) -> None:
        # Equal on all ranks, so that averaging changes little from one turn to the next. Engines do not keep it alive.
        gradient = torch.linspace(-1.0, 1.0, numel).to(self._device, self._dtype)
        self._stand_in = torch.empty_like(gradient).requires_grad_()
        self._stand_in.grad = gradient
        self._engines = {compression: self._engine(compression) for compression in active}
        for engine in self._engines.values():
            engine.agree()

    def _engine(self, compression: Compression) -> _C.Synchronizer:
        engine = _C.Synchronizer([self._stand_in], ["stand-in"], self._group, self._stand_in.nbytes)
        engine.set_schedule(engine_schedule([(0, [Candidate(compression)])]))
        return engine

    def _sync(self, compression: Compression) -> float:
        start = time.perf_counter()
        self._engines[compression].synchronize()
        self._finish()
        return time.perf_counter() - start

    def _barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._finish()

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    # Gloo says that it serves CUDA, too, but the engine takes gradients on a GPU to the host for it.
    serves_cuda = "cuda" in {device.type for device in group._device_types}
    if torch.cuda.is_available() and serves_cuda and backend_of(group, torch.device("cuda")) != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
