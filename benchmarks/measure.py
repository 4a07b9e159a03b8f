"""What a step's synchronisation costs: the ways are checked and timed in turns, and what the ranks found is joined.

Every way has a model, gradients and a process group of its own, so that none shares another's buffers, connections or
threads; only the values of the weights, which nobody changes, are shared.
"""

import faulthandler
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress

from benchmarks.compressions import held_bytes
from benchmarks.gradients import Gradients
from benchmarks.records import Record, environment, quantiles
from benchmarks.timing import Rival, rounds, slowest_rank, time_turns
from benchmarks.ways import BARE, SHARED_SUM, WAYS, Way, is_right
from benchmarks.workloads import Size, Workload, size_of
from fastsync import SyncStats

T = TypeVar("T")

TIMEOUT = 120.0
"""Seconds that a rank waits for the others; a step that takes longer ends the rank, which tells where it stood."""
EMPTY = "empty"
COSTS = ("exposed_time", "pack_time", "collective_time", "unpack_time", "wire_bytes")
"""What is taken over from SyncStats."""


@dataclass(frozen=True)
class Schedule:
    """How often each way runs, and in which order."""

    warmup: int
    repetitions: int
    seed: int
    timeout: float = TIMEOUT
    """Seconds that a step may take."""

    @property
    def settings(self) -> dict[str, int]:
        """What a row tells of it."""
        return {"repetitions": self.repetitions, "warmup": self.warmup, "seed": self.seed}


@dataclass(frozen=True)
class Measurement:
    """What one rank has found out about one way."""

    correct: bool
    error: float | None
    """Relative error of the newest gradients, in the 2-norm; None where they are not to be the mean."""
    samples: list[float]
    cost: dict[str, float]
    """A step's share of SyncStats; empty where the way does not tell."""


def memory_needed(size: Size, names: Sequence[str], num_ranks: int) -> int:
    """Bytes that one rank allocates to measure these ways: at most, as measured in main memory.

    The workload holds weights, own gradients, their mean and its bound; one result at a time is compared in float64. A
    way holds gradients, its buffer, and DDP's buckets where it has them; PowerSGD what it has left out as well, and the
    engine what ranks send each other.
    """
    workload, comparison, way = 6 * size.nbytes, 8 * size.nbytes, 3 * size.nbytes
    compressions = [WAYS[name].compression for name in names]
    held = sum(held_bytes(compression, num_ranks) for compression in compressions if compression is not None)
    return workload + comparison + way * len(names) + math.ceil(held * size.numel)


def measure(
    size: str, names: Sequence[str], schedule: Schedule, device: torch.device, progress: Progress
) -> list[Record]:
    """Checks and times these ways at one size. A collective call; every rank gets the same rows."""
    ways = {name: WAYS[name] for name in names}
    of_rank = measure_ways(Workload(size_of(size), device, schedule.seed), ways, schedule, device, progress, size)
    settings = {
        "size": size,
        "numel": size_of(size).numel,
        "num_tensors": len(size_of(size).shapes),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        **schedule.settings,
    }
    return to_records(of_rank, settings, all_gather(environment(device))[0])


def measure_ways(
    workload: Gradients,
    ways: Mapping[str, Way],
    schedule: Schedule,
    device: torch.device,
    progress: Progress,
    title: str,
) -> list[dict[str, Measurement]]:
    """Checks and times ways of the same work. A collective call; every rank gets what all have found, in rank order.

    With the ways an empty step takes its turns, under the name EMPTY.
    """
    limit = timedelta(seconds=schedule.timeout)
    groups = {name: dist.new_group(timeout=limit) for name in ways}
    here = _measure_here(workload, ways, groups, schedule, device, progress, title)
    gc.collect()  # DDP is part of reference cycles and holds its group
    for group in groups.values():
        dist.destroy_process_group(group)
    return all_gather(here)


def _measure_here(
    workload: Gradients,
    ways: Mapping[str, Way],
    groups: Mapping[str, dist.ProcessGroup],
    schedule: Schedule,
    device: torch.device,
    progress: Progress,
    title: str,
) -> dict[str, Measurement]:
    """What this rank finds out. Its models end with this function, before their groups do."""

    def watched(rounds: Sequence[Sequence[T]], what: str) -> Iterator[T]:
        return watched_rounds(rounds, progress, f"{title}: {what}", schedule.timeout)

    steps = {name: way.build(workload, groups[name]) for name, way in ways.items()}
    for step in watched([[step] for step in steps.values()], "check"):
        step.prepare()
        step.run()
    right = {name: is_right(way, steps[name], workload) for name, way in ways.items()}
    # What is wrong on one rank is timed on none, or the others would wait for it.
    timed = {name: steps[name] for name in steps if all(other[name] for other in all_gather(right))}
    rivals: dict[str, Rival] = {**timed, EMPTY: EmptyStep()}
    order = list(rounds(rivals, schedule.warmup + schedule.repetitions, schedule.seed))
    time_turns(rivals, watched(order[: schedule.warmup], "warm-up"), device)
    before = {name: step.stats() for name, step in timed.items()}
    samples = time_turns(rivals, watched(order[schedule.warmup :], "timed"), device)
    of_ways = {
        name: Measurement(
            # Once more, on what the last repetition has left.
            correct=name in timed and is_right(way, steps[name], workload),
            error=workload.relative_error(steps[name].result()) if way.averages else None,
            samples=samples.get(name, []),
            cost=cost_per_step(before.get(name), steps[name].stats()),
        )
        for name, way in ways.items()
    }
    return {**of_ways, EMPTY: Measurement(correct=True, error=None, samples=samples[EMPTY], cost={})}


class EmptyStep:
    """Does nothing: its time is what measuring costs."""

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        pass


def overhead(of_rank: Sequence[Mapping[str, Measurement]]) -> float:
    """Seconds that measuring adds to a sample: the median of an empty step's, of the slowest rank."""
    return quantiles(slowest_rank([rank[EMPTY].samples for rank in of_rank]))["median"]


def cost_per_step(before: SyncStats | None, after: SyncStats | None) -> dict[str, float]:
    """The mean over the steps between two readings: seconds, and bytes on the wire. Empty where there are none."""
    if before is None or after is None:
        return {}
    num_steps = after.num_steps - before.num_steps
    return {name: (getattr(after, name) - getattr(before, name)) / num_steps for name in COSTS}


def to_records(
    of_rank: Sequence[Mapping[str, Measurement]], settings: Mapping[str, Any], where: Mapping[str, Any]
) -> list[Record]:
    """One row a way: of the samples the slowest rank's, of the errors the largest, of the costs the mean."""
    names = [name for name in of_rank[0] if name != EMPTY]
    samples = {name: slowest_rank([rank[name].samples for rank in of_rank]) for name in names}
    medians = {name: quantiles(values)["median"] for name, values in samples.items() if values}
    return [
        Record(
            benchmark="sync",
            way=name,
            settings={**settings, "wire": wire_name(WAYS[name])},
            figures={
                **ratios(name, medians),
                **bandwidths(name, medians, settings["numel"], len(of_rank)),
                **measured_figures(name, of_rank),
            },
            correct=all(rank[name].correct for rank in of_rank),
            samples=samples[name],
            environment=where,
        )
        for name in names
    ]


def measured_figures(name: str, of_rank: Sequence[Mapping[str, Measurement]]) -> dict[str, float | None]:
    """What was measured of a way besides its time: of the errors the largest, of the costs the mean over the ranks."""
    return {
        "error": over_ranks(np.max, [rank[name].error for rank in of_rank]),
        **{cost: over_ranks(np.mean, [rank[name].cost.get(cost) for rank in of_rank]) for cost in COSTS},
        "overhead": overhead(of_rank),
    }


def ratios(name: str, medians: Mapping[str, float]) -> dict[str, float | None]:
    """What a way adds to the step without sync, and that as a multiple of the bare all_reduce of what it sends.

    The bare all_reduce has no backward in it: what it adds is all of it. A way's own share is the part of the bare
    all_reduce's time that comes on top of it; it is negative where a way hides communication behind backward. Neither
    that nor the multiple is given where something else travels than the gradients. What it adds is given as a multiple
    of what DDP adds, too, and of the bare sum in memory that the ranks share.
    """
    figures: dict[str, float | None] = dict.fromkeys(
        ("over_no_sync", "over_all_reduce", "own_share", "over_ddp", "over_shared_sum")
    )
    is_bare = name in BARE
    if not WAYS[name].averages or name not in medians or not (is_bare or "no_sync" in medians):
        return figures
    over_no_sync = medians[name] - (0.0 if is_bare else medians["no_sync"])
    figures["over_no_sync"] = over_no_sync
    if (limit := WAYS[name].limit) in medians:
        multiple = over_no_sync / medians[limit]
        figures |= {"over_all_reduce": multiple, "own_share": multiple - 1}
    if {"ddp", "no_sync"} <= medians.keys():
        figures["over_ddp"] = over_no_sync / (medians["ddp"] - medians["no_sync"])
    if SHARED_SUM in medians:
        figures["over_shared_sum"] = over_no_sync / medians[SHARED_SUM]
    return figures


def bandwidths(name: str, medians: Mapping[str, float], numel: int, world_size: int) -> dict[str, float | None]:
    """Bytes per second as nccl-tests defines them (its doc/PERFORMANCE.md), of float32 gradients before compression.

    algbw is bytes by time; busbw is algbw · 2(n − 1)/n, the rate at which each of n ranks has to send at least where
    nothing is compressed, and so comparable to a link's rate and between numbers of ranks. Of a way the time is what it
    adds to the step without sync; where that is not positive, because it hides behind backward or in the noise, there
    is no rate.
    """
    seconds = ratios(name, medians)["over_no_sync"]
    if seconds is None or seconds <= 0:
        return {"algbw": None, "busbw": None}
    algbw = 4 * numel / seconds
    return {"algbw": algbw, "busbw": algbw * 2 * (world_size - 1) / world_size}


def wire_name(way: Way) -> str | None:
    """The dtype that the gradients travel as, as rows have it; None where they do not travel."""
    return None if way.wire is None else str(way.wire).removeprefix("torch.")


def over_ranks(reduce: Callable[[Sequence[float]], float], values: Sequence[float | None]) -> float | None:
    return None if None in values else float(reduce(values))


def all_gather(value: Any) -> list[Any]:
    of_rank = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, value)
    return of_rank


def watched_rounds(rounds: Sequence[Sequence[T]], progress: Progress, description: str, timeout: float) -> Iterator[T]:
    """The items of all rounds, with progress shown round by round, and a time limit on each item.

    Not every wait inside of a hook has one.
    """
    for items in progress.track(rounds, description=description):
        for item in items:
            faulthandler.dump_traceback_later(timeout, exit=True)
            yield item
    faulthandler.cancel_dump_traceback_later()
