"""Checks and times methods to synchronise in turns, and joins what the ranks found.

Every method has a model, gradients and a process group of its own, so that none shares another's buffers, connections
or threads; only the values of the weights, which nobody changes, are shared.
"""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress

from benchmarks.baselines.gradients import Gradients
from benchmarks.baselines.methods import BARE, METHODS, OPTIMIZER_LIMITS, SHARED_SUM, Method, is_right, left_out
from benchmarks.baselines.models import TRAININGS, ModelGradients, Scale
from benchmarks.baselines.training_steps import whole_steps
from benchmarks.baselines.workloads import Workload, size_of
from benchmarks.harness.options import RankOptions
from benchmarks.harness.progress import progress_bars, watched_rounds
from benchmarks.harness.records import Record, RowFile, environment, quantiles
from benchmarks.harness.timing import Sampling, Timed, rounds, slowest_rank, time_turns
from fastsync.distributed import process_group
from fastsync.sync.stats import SyncStats

T = TypeVar("T")

EMPTY = "empty"
COSTS = ("exposed_time", "pack_time", "collective_time", "unpack_time", "wire_bytes")
"""What is taken over from SyncStats."""


@dataclass(frozen=True)
class Measurement:
    """One rank's findings about one method."""

    correct: bool
    error: float | None
    """Relative error of the newest gradients, in the 2-norm; None where they are not to be the mean."""
    samples: list[float]
    cost: dict[str, float]
    """A step's share of SyncStats; empty where the method does not tell."""


def measure_each(
    subjects: Iterable[T],
    names: Sequence[str],
    options: RankOptions,
    rows: RowFile,
    measure: Callable[[T, Sequence[str], torch.device, Progress], list[Record]],
) -> list[str]:
    """Measures subjects one after the other, as one rank, of which rank 0 keeps the rows. Returns notes.

    ``measure`` makes the rows of a subject and of these methods, but for those that the backend lacks: on every rank
    the same, by a collective call.
    """
    if options.share_gpus:  # which NCCL refuses before 2.30, unless ranks look as if they were on different hosts
        host = f"rank-{os.environ['RANK']}"
        os.environ.update(NCCL_HOSTID=host, NCCL_SOCKET_IFNAME="lo", NCCL_MULTI_RANK_GPU_ENABLE="1")
    with process_group(options.timeout, backend=backend_of_rivals()) as device:
        excluded = left_out(names, dist.get_backend())
        names = [name for name in names if name not in excluded]
        with progress_bars(shown=dist.get_rank() == 0) as progress:
            for subject in subjects:
                records = measure(subject, names, device, progress)
                if options.crowded:
                    records = [replace(row, settings={**row.settings, "oversubscribed": True}) for row in records]
                if dist.get_rank() == 0:
                    rows.add(records)
    return [f"{name} is left out: {reason}" for name, reason in excluded.items()]


def backend_of_rivals() -> Literal["gloo"] | None:
    """Gloo on CPUs: what PyTorch's users have. None if rank 0 may choose, because there are GPUs."""
    return None if torch.cuda.device_count() else "gloo"


def settings_of_ranks(sampling: Sampling) -> dict[str, Any]:
    """Describes the ranks and how often they measure, for a row."""
    return {"world_size": dist.get_world_size(), "backend": dist.get_backend(), **sampling.settings}


def measure(size: str, names: Sequence[str], sampling: Sampling) -> list[Record]:
    """Checks and times these methods at one size. A collective call; every rank gets the same rows."""
    methods = {name: METHODS[name] for name in names}
    shapes, numel = size_of(size).shapes, size_of(size).numel
    of_rank = measure_methods(Workload(size_of(size), sampling.device, sampling.seed), methods, sampling, size)
    settings = {"size": size, "numel": numel, "num_tensors": len(shapes), **settings_of_ranks(sampling)}

    def figures(name: str, medians: Mapping[str, float]) -> dict[str, float | None]:
        return {
            **ratios(name, medians),
            **bandwidths(name, medians, numel, len(of_rank)),
            **measured_figures(name, of_rank),
        }

    return to_records("sync", of_rank, methods, settings, figures, sampling.device)


def measure_training(
    benchmark: str,
    model: str,
    scale: Scale,
    batch_size: int,
    names: Sequence[str],
    sampling: Sampling,
    figures: Callable[[Sequence[Mapping[str, Measurement]], str, Mapping[str, float]], Mapping[str, Any]],
) -> list[Record]:
    """Checks and times training steps without DDP and with these methods. A collective call; all get the same rows.

    ``figures`` makes those of a row from what the ranks found, the method's name, and the medians of all methods.
    """
    training = TRAININGS[model][scale]
    gradients = ModelGradients(training, batch_size, sampling.device, sampling.seed)
    methods = whole_steps(names, training)
    of_rank = measure_methods(gradients, methods, sampling, model)
    settings = {
        "model": model,
        "scale": scale,
        **training.dimensions,
        "batch_size": batch_size,
        "numel": gradients.flat_grads.numel(),
        "num_tensors": len(gradients.shapes),
        **settings_of_ranks(sampling),
    }
    return to_records(benchmark, of_rank, methods, settings, partial(figures, of_rank), sampling.device)


def measure_methods(
    workload: Gradients, methods: Mapping[str, Method], sampling: Sampling, title: str
) -> list[dict[str, Measurement]]:
    """Checks and times methods of the same work. A collective call; every rank gets what all have found, in rank order.

    With the methods an empty step takes its turns, under the name EMPTY.
    """
    limit = timedelta(seconds=sampling.timeout)
    groups = {name: dist.new_group(timeout=limit) for name in methods}
    here = _measure_here(workload, methods, groups, sampling, title)
    gc.collect()  # DDP is part of reference cycles and holds its group
    for group in groups.values():
        dist.destroy_process_group(group)
    return all_gather(here)


def _measure_here(
    workload: Gradients,
    methods: Mapping[str, Method],
    groups: Mapping[str, dist.ProcessGroup],
    sampling: Sampling,
    title: str,
) -> dict[str, Measurement]:
    """Measures on this rank. Its models end with this function, before their groups do."""

    def watched(rounds: Sequence[Sequence[T]], what: str) -> Iterator[T]:
        return watched_rounds(rounds, sampling.progress, f"{title}: {what}", sampling.timeout)

    steps = {name: method.build(workload, groups[name]) for name, method in methods.items()}
    for step in watched([[step] for step in steps.values()], "check"):
        step.prepare()
        step.run()
    right = {name: is_right(method, steps[name], workload) for name, method in methods.items()}
    # What is wrong on one rank is timed on none, or the others would wait for it.
    timed = {name: steps[name] for name in steps if all(other[name] for other in all_gather(right))}
    subjects: dict[str, Timed] = {**timed, EMPTY: EmptyStep()}
    order = list(rounds(subjects, sampling.warmup + sampling.repetitions, sampling.seed))
    time_turns(subjects, watched(order[: sampling.warmup], "warm-up"), sampling.device)
    before = {name: step.stats() for name, step in timed.items()}
    samples = time_turns(subjects, watched(order[sampling.warmup :], "timed"), sampling.device)
    of_methods = {
        name: Measurement(
            # Once more, on what the last repetition has left.
            correct=name in timed and is_right(method, steps[name], workload),
            error=workload.relative_error(steps[name].result()) if method.averages else None,
            samples=samples.get(name, []),
            cost=cost_per_step(before.get(name), steps[name].stats()),
        )
        for name, method in methods.items()
    }
    return {**of_methods, EMPTY: Measurement(correct=True, error=None, samples=samples[EMPTY], cost={})}


class EmptyStep:
    """Does nothing: its time is what measuring costs."""

    def prepare(self) -> None: ...

    def run(self) -> None: ...


def overhead(of_rank: Sequence[Mapping[str, Measurement]]) -> float:
    """Returns the seconds that measuring adds to a sample: the median of an empty step's, of the slowest rank."""
    return quantiles(slowest_rank([rank[EMPTY].samples for rank in of_rank]))["median"]


def cost_per_step(before: SyncStats | None, after: SyncStats | None) -> dict[str, float]:
    """Averages over the steps between two readings: seconds, and bytes on the wire. Empty where there are none."""
    if before is None or after is None:
        return {}
    num_steps = after.num_steps - before.num_steps
    return {name: (getattr(after, name) - getattr(before, name)) / num_steps for name in COSTS}


def to_records(
    benchmark: str,
    of_rank: Sequence[Mapping[str, Measurement]],
    methods: Mapping[str, Method],
    settings: Mapping[str, Any],
    figures: Callable[[str, Mapping[str, float]], Mapping[str, Any]],
    device: torch.device,
) -> list[Record]:
    """A row for each method, with the slowest rank's samples. A collective call.

    ``figures`` takes its name and all medians.
    """
    samples = {name: slowest_rank([rank[name].samples for rank in of_rank]) for name in methods}
    medians = {name: quantiles(values)["median"] for name, values in samples.items() if values}
    where = all_gather(environment(device))[0]
    return [
        Record(
            benchmark=benchmark,
            method=name,
            settings={**settings, "wire": method.wire and str(method.wire).removeprefix("torch.")},
            figures=figures(name, medians),
            correct=all(rank[name].correct for rank in of_rank),
            samples=samples[name],
            environment=where,
        )
        for name, method in methods.items()
    ]


def measured_figures(name: str, of_rank: Sequence[Mapping[str, Measurement]]) -> dict[str, float | None]:
    """Joins what was measured besides the time: of the errors the largest, of the costs the mean over the ranks."""
    return {
        "error": over_ranks(np.max, [rank[name].error for rank in of_rank]),
        **{cost: over_ranks(np.mean, [rank[name].cost.get(cost) for rank in of_rank]) for cost in COSTS},
        "overhead": overhead(of_rank),
    }


def ratios(name: str, medians: Mapping[str, float]) -> dict[str, float | None]:
    """Derives what a method adds to the step without sync, also as a multiple of the bare all_reduce of what it sends.

    The bare all_reduce has no backward in it: what it adds is all of it. The multiple is not given where something else
    travels than the gradients. What it adds is given as a multiple of what DDP adds, too, and of the bare sum in memory
    that the ranks share. With an optimizer it is compared to DDP with it, and to what ``OPTIMIZER_LIMITS`` has.
    """
    names = ("over_no_sync", "over_all_reduce", "over_ddp", "over_shared_sum")
    figures: dict[str, float | None] = dict.fromkeys(names)
    is_bare = name in BARE
    if not METHODS[name].averages or name not in medians or not (is_bare or "no_sync" in medians):
        return figures
    over_no_sync = medians[name] - (0.0 if is_bare else medians["no_sync"])
    figures["over_no_sync"] = over_no_sync
    _, _, optimizer = name.partition("+")
    limit = OPTIMIZER_LIMITS.get(optimizer)
    if (bare := METHODS[name].limit) in medians and limit is None:
        figures["over_all_reduce"] = over_no_sync / medians[bare]
    if {ddp := f"ddp+{optimizer}" if limit else "ddp", "no_sync"} <= medians.keys():
        figures["over_ddp"] = over_no_sync / (medians[ddp] - medians["no_sync"])
    if (bare := limit or SHARED_SUM) in medians:
        figures["over_shared_sum"] = over_no_sync / medians[bare]
    return figures


def bandwidths(name: str, medians: Mapping[str, float], numel: int, world_size: int) -> dict[str, float | None]:
    """Bytes per second as nccl-tests defines them (its doc/PERFORMANCE.md), of float32 gradients before compression.

    algbw is bytes by time; busbw is algbw · 2(n − 1)/n, the rate at which each of n ranks has to send at least where
    nothing is compressed, and so comparable to a link's rate and between numbers of ranks. The time is what a method
    adds to the step without sync; where that is not positive, because it hides behind backward or in the noise, there
    is no rate.
    """
    seconds = ratios(name, medians)["over_no_sync"]
    if seconds is None or seconds <= 0:
        return {"algbw": None, "busbw": None}
    algbw = 4 * numel / seconds
    return {"algbw": algbw, "busbw": algbw * 2 * (world_size - 1) / world_size}


def over_ranks(reduce: Callable[[Sequence[float]], float], values: Sequence[float | None]) -> float | None:
    return None if None in values else float(reduce(values))


def all_gather(value: Any) -> list[Any]:
    of_rank = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, value)
    return of_rank
