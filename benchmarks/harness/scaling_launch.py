"""Measures as one rank of a launch: training steps with each way to synchronise and without, and all_reduces.

A step is that of ``ddp``: forward, backward with what makes the gradients the mean over the ranks, and the optimizer's
step. The ways, the plain model without communication and an empty step take turns, each time from a barrier.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.baselines.models import Scale
from benchmarks.baselines.training_steps import NO_DDP
from benchmarks.baselines.ways import LIMITS, BareAllReduce
from benchmarks.harness.measure import (
    Measurement,
    all_gather,
    bandwidths,
    measure_training,
    overhead,
    settings_of_ranks,
)
from benchmarks.harness.records import Record, environment
from benchmarks.harness.timing import TIMEOUT, Sampling, slowest_rank, time_turns
from fastsync.distributed import process_group

COMPUTE = NO_DDP
"""The step without communication."""
SWEPT = LIMITS[torch.float32]
SWEEP_WARMUP = 3


@dataclass(frozen=True)
class Launch:
    """The work of one launch."""

    model: str
    scale: Scale
    ways: tuple[str, ...]
    batch_size: int
    """Samples of a rank in a step."""
    steps: int
    warmup: int
    sweep: tuple[int, ...]
    """Bytes that all_reduces sum."""
    sweep_repetitions: int
    seed: int
    timeout: float = TIMEOUT
    """Seconds that a step may take and that ranks wait for each other."""


def measure_rank(launch: Launch) -> list[Record]:
    """Measures as one rank. Every rank returns the same rows."""
    with process_group(launch.timeout) as device:
        where = all_gather(environment(device))[0]
        return [*_train(launch, device), *_sweep(launch, device, where)]


def _train(launch: Launch, device: torch.device) -> list[Record]:
    """A row for the step without communication and for each way."""
    sampling = Sampling(launch.warmup, launch.steps, launch.seed, launch.timeout, device)

    def figures(of_rank: Sequence[Mapping[str, Measurement]], *_: object) -> dict[str, float | None]:
        return {**compute_figures([rank[COMPUTE].samples for rank in of_rank]), "overhead": overhead(of_rank)}

    return measure_training("scaling", launch.model, launch.scale, launch.batch_size, launch.ways, sampling, figures)


def compute_figures(of_rank: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Medians over the steps of what the ranks' steps without communication show; None where there are no steps.

    Args:
        of_rank: each rank's seconds, a sample a step.

    Returns:
        compute: the mean over the ranks. stragglers: what the slowest rank takes beyond that mean.
    """
    times = np.array(of_rank)
    if not times.size:
        return {"compute": None, "stragglers": None}
    mean = times.mean(axis=0)
    return {"compute": float(np.median(mean)), "stragglers": float(np.median(times.max(axis=0) - mean))}


@dataclass(frozen=True)
class Equal:
    """Work whose mean over the ranks needs no working out: every rank has the same gradients."""

    flat_grads: torch.Tensor
    world_size: int


def _sweep(launch: Launch, device: torch.device, where: Mapping[str, Any]) -> Iterator[Record]:
    """A row for each size of the bare all_reduce. One rank has nobody to talk to, and none."""
    world_size = dist.get_world_size()
    for num_bytes in launch.sweep if world_size > 1 else ():
        # Of ones, once they are divided.
        work = Equal(torch.full((num_bytes // 4,), float(world_size), device=device), world_size)
        baseline = BareAllReduce(work, dist.group.WORLD, torch.float32)
        time_turns({"": baseline}, [""] * SWEEP_WARMUP, device)
        samples = time_turns({"": baseline}, [""] * launch.sweep_repetitions, device)[""]
        slowest = slowest_rank(all_gather(samples))
        yield Record(
            benchmark="scaling",
            way=SWEPT,
            settings={
                "size": num_bytes,
                "numel": work.flat_grads.numel(),
                "num_tensors": 1,
                "wire": "float32",
                **settings_of_ranks(Sampling(SWEEP_WARMUP, launch.sweep_repetitions, launch.seed)),
            },
            figures=bandwidths(SWEPT, {SWEPT: float(np.median(slowest))}, work.flat_grads.numel(), world_size),
            correct=all(all_gather(bool((baseline.result() == world_size).all()))),
            samples=slowest,
            environment=where,
        )
