"""What each rank of one launch measures: training steps with each way to synchronise and without, and all_reduces.

A step is forward, backward, what makes the gradients the mean over the ranks, and the optimizer's step. All ways, the
step without communication and an empty step take turns, from a barrier each.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import TIMEOUT
from benchmarks.records import Record, environment
from benchmarks.small_model import build
from benchmarks.timing import Rival, rounds, slowest_rank, time_rounds
from benchmarks.ways import LIMITS, WAYS, Step
from fastsync.distributed import check_consistency, process_group

COMPUTE, EMPTY = "no_sync", "empty"
"""A step without communication, and one that does nothing: what measuring costs."""
SYNCHRONISED = tuple(name for name in WAYS if name not in {COMPUTE, *LIMITS.values()})
LEARNING_RATE = 1e-4
SLACK = 1e-5
"""Of the largest gradient: kernels may add in another order each time."""


@dataclass(frozen=True)
class Launch:
    """What one launch measures."""

    model: str
    ways: tuple[str, ...]
    batch_size: int
    """Samples of a rank in a step."""
    steps: int
    warmup: int
    sweep: tuple[int, ...]
    """Bytes that all_reduces sum."""
    sweep_repetitions: int
    seed: int


def measure_rank(launch: Launch) -> list[Record]:
    """Measures as one rank. Every rank returns the same rows."""
    with process_group(TIMEOUT) as device:
        where = _all_gather(environment(device))[0]
        common = {"world_size": dist.get_world_size(), "backend": dist.get_backend(), "seed": launch.seed}
        return [*_train(launch, device, common, where), *_sweep(launch, device, common, where)]


class BoundModel(nn.Module):
    """A model and the loss of its next batch in one, as the ways take it."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self) -> Tensor:
        return self._loss(self.model)


class Training:
    """Stands in for a Workload: each way gets a model of its own, with the same weights and the same batches."""

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self._launch, self._device = launch, device
        self._model, _ = build(launch.model, device, 1)
        self.lengths = [parameter.numel() for parameter in self._model.parameters()]
        self.world_size = dist.get_world_size()
        self.flat_grads = torch.empty(sum(self.lengths))  # for its size

    def model(self) -> BoundModel:
        torch.manual_seed(self._launch.seed + 1 + dist.get_rank())
        _, loss = build(self._launch.model, self._device, self._launch.batch_size)
        self.newest = BoundModel(copy.deepcopy(self._model), loss)
        return self.newest


class WholeStep:
    """A way's forward, backward and sync, and the optimizer, all of it timed."""

    def __init__(self, step: Step, model: nn.Module) -> None:
        self.step, self.model = step, model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        self.step.prepare()
        self.step.run()
        self._optimizer.step()


class EmptyStep:
    def prepare(self) -> None:
        pass

    def run(self) -> None:
        pass


def _train(
    launch: Launch, device: torch.device, common: Mapping[str, Any], where: Mapping[str, Any]
) -> Iterator[Record]:
    """A row for each way and for the step without communication."""
    training = Training(launch, device)
    steps: dict[str, WholeStep] = {}
    groups = {name: dist.new_group(timeout=timedelta(seconds=TIMEOUT)) for name in launch.ways}
    for name in (COMPUTE, *launch.ways):
        step = WAYS[name].build(training, groups.get(name))  # type: ignore[arg-type]
        steps[name] = WholeStep(step, training.newest)
    right = {COMPUTE: True} | _right_ways(steps)
    rivals: dict[str, Rival] = {name: step for name, step in steps.items() if right[name]} | {EMPTY: EmptyStep()}
    order = list(rounds(rivals, launch.warmup + launch.steps, launch.seed))
    time_rounds(rivals, order[: launch.warmup], device)
    samples = time_rounds(rivals, order[launch.warmup :], device)
    right |= {name: right[name] and _agree(steps[name].model) for name in launch.ways}
    of_rank = _all_gather(samples)
    figures = {
        **compute_figures([rank[COMPUTE] for rank in of_rank]),
        "overhead": float(np.median(slowest_rank([rank[EMPTY] for rank in of_rank]))),
    }
    settings = {
        "model": launch.model,
        "numel": sum(training.lengths),
        "num_tensors": len(training.lengths),
        "batch_size": launch.batch_size,
        "repetitions": launch.steps,
        "warmup": launch.warmup,
        **common,
    }
    for name in right:
        wire = WAYS[name].wire
        yield Record(
            benchmark="scaling",
            way=name,
            settings={**settings, "wire": str(wire).removeprefix("torch.") if wire else None},
            figures=figures,
            correct=right[name],
            samples=slowest_rank([rank.get(name, []) for rank in of_rank]),
            environment=where,
        )
    steps.clear()
    for group in groups.values():
        dist.destroy_process_group(group)


def compute_figures(of_rank: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians over the steps of what the ranks' steps without communication show.

    Args:
        of_rank: each rank's seconds, a sample a step.

    Returns:
        compute: the mean over the ranks. stragglers: what the slowest rank takes beyond that mean.
    """
    times = np.array(of_rank)
    mean = times.mean(axis=0)
    return {"compute": float(np.median(mean)), "stragglers": float(np.median(times.max(axis=0) - mean))}


def _right_ways(steps: Mapping[str, WholeStep]) -> dict[str, bool]:
    """Which ways leave the mean of all ranks' gradients, on every rank, before any weight has changed."""
    own = _gradients(steps[COMPUTE])
    world_size = dist.get_world_size()
    mean, magnitude = own / world_size, own.abs() / world_size
    dist.all_reduce(mean)
    dist.all_reduce(magnitude)
    found = {
        name: WAYS[name].approximate or is_mean(_gradients(step), mean, magnitude, WAYS[name].wire, world_size)
        for name, step in steps.items()
        if name != COMPUTE
    }
    return {name: all(rank[name] for rank in _all_gather(found)) for name in found}


def is_mean(result: Tensor, mean: Tensor, magnitude: Tensor, wire: torch.dtype | None, world_size: int) -> bool:
    """Whether each value is as near to the mean as roundings to ``wire`` allow; the bound is Workload.is_mean's."""
    assert wire is not None
    info = torch.finfo(wire)
    unit = info.eps / 2
    relative = (1 + unit) ** (world_size + 1) - 1
    bound = magnitude * relative + 2 * world_size * info.smallest_normal * unit + SLACK * magnitude.max()
    return bool(((result - mean).abs() <= bound).all())


def _gradients(step: WholeStep) -> Tensor:
    """What the step leaves on the first batch, float64. The weights stay as they are."""
    step.step.prepare()
    step.step.run()
    return step.step.result().double()


def _agree(model: nn.Module) -> bool:
    """Whether all ranks have trained the same weights. A collective call."""
    try:
        check_consistency(model)
    except RuntimeError:
        return False
    return True


class BareAllReduce:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._ones = torch.ones(max(1, num_bytes // 4), device=device)
        self.flat = torch.empty_like(self._ones)

    def prepare(self) -> None:
        self.flat.copy_(self._ones)

    def run(self) -> None:
        dist.all_reduce(self.flat)


def _sweep(
    launch: Launch, device: torch.device, common: Mapping[str, Any], where: Mapping[str, Any]
) -> Iterator[Record]:
    """A row for each size of the bare all_reduce. One rank has nobody to talk to, and none."""
    world_size = dist.get_world_size()
    for num_bytes in launch.sweep if world_size > 1 else ():
        rival = BareAllReduce(num_bytes, device)
        time_rounds({"all_reduce": rival}, [["all_reduce"]] * 3, device)
        samples = time_rounds({"all_reduce": rival}, [["all_reduce"]] * launch.sweep_repetitions, device)
        slowest = slowest_rank([rank["all_reduce"] for rank in _all_gather(samples)])
        yield Record(
            benchmark="scaling",
            way=LIMITS[torch.float32],
            settings={
                "size": num_bytes,
                "numel": rival.flat.numel(),
                "num_tensors": 1,
                "wire": "float32",
                "repetitions": launch.sweep_repetitions,
                **common,
            },
            figures=bandwidths(rival.flat.nbytes, world_size, float(np.median(slowest))),
            correct=all(_all_gather(bool((rival.flat == world_size).all()))),
            samples=slowest,
            environment=where,
        )


def bandwidths(num_bytes: int, world_size: int, seconds: float) -> dict[str, float]:
    """In bytes per second, as nccl-tests defines them (its PERFORMANCE.md): algbw = bytes / time; busbw is that times
    2 (n - 1) / n, the share of the bytes that has to pass each rank's link, so that it can be held against the link's
    own rate at every world size."""
    algbw = num_bytes / seconds
    return {"algbw": algbw, "busbw": algbw * 2 * (world_size - 1) / world_size}


def _all_gather(value: Any) -> list[Any]:
    of_rank = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, value)
    return of_rank
