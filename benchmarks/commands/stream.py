"""``python -m benchmarks stream``: does a bucket on its way hold up the backward behind it?

The last rank is late: its device sleeps before its backward. So the first bucket of all other ranks waits for it. What
these compute meanwhile needs no bucket, and should go on: the gradients of the first layers. An event on the stream
that computes, between the first bucket and the first layer, tells when it came so far. A sample is the time from the
beginning of rank 0's backward until then. On CPUs, where nothing is queued, it is the time until the thread came there.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.baselines.gradients import Step
from benchmarks.baselines.methods import METHODS, SYNCHRONISED, is_right
from benchmarks.baselines.models import ModelGradients, Training
from benchmarks.baselines.shared_memory import barrier
from benchmarks.harness.collect import Collected
from benchmarks.harness.measure import all_gather, measure_each, settings_of_ranks
from benchmarks.harness.options import Methods, RankOptions, check_names, check_positive, run_on_ranks
from benchmarks.harness.progress import watched_rounds
from benchmarks.harness.records import Record, RowFile, environment
from benchmarks.harness.timing import Sampling
from benchmarks.report.table import Columns, milliseconds, print_tables, ranks_on, spread
from fastsync.messages import check_at_least

NUM_LAYERS, BATCH_SIZE = 12, 64
HELD_UP = 0.5
"""Of the time until the gradients have come: who comes to the event so late has waited for the late rank."""


@dataclass(frozen=True)
class Options(RankOptions):
    """Measure whether a bucket on its way holds up the backward behind it, by a rank whose device sleeps."""

    methods: Methods = (
        "ddp", "fastsync.register_comm_hook/none", "fastsync.register_comm_hook/fp16", "fastsync.attach/none",
        "fastsync.attach/fp16",
    )  # fmt: skip
    """Methods to synchronise. A name that is unknown gives the list of all."""
    repetitions: int = 3
    """Samples of each method, each of which takes as long as a rank sleeps."""
    warmup: int = 3
    """Steps of each method, with nobody asleep, before its samples."""
    sleep: float = 0.5
    """Seconds that the last rank sleeps."""
    width: int = 1024
    """Width of the model's 12 layers. They have to fill more than one bucket, which is 25 MiB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("methods", self.methods, [name for name in SYNCHRONISED if not METHODS[name].scatters])
        check_positive(self, "sleep")
        check_at_least(self, width=1)
        if self.nproc < 2:
            raise ValueError(f"nproc={self.nproc} must be at least 2: one rank waits for another that is late")


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("stream", Options, measure_all, report, arguments)


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all methods as one rank, of which rank 0 keeps the rows. Returns notes."""

    def measure_width(width: int, names: Sequence[str], device: torch.device, progress: Progress) -> list[Record]:
        return measure(width, names, options.sleep, options.sampling(options.repetitions, device, progress))

    return measure_each([options.width], options.methods, options, rows, measure_width)


class Layers(nn.Module):
    """Layers of one width. ``reached`` is called in each backward when it comes to the first layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.others = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS - 1)))
        self.reached: Callable[[], None] = lambda: None

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        features = self.first(inputs)
        features.register_hook(lambda grad: self.reached())
        return F.mse_loss(self.others(features), targets)


def training(width: int) -> Training:
    def batch(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(torch.randn(size, width, generator=generator) for _ in range(2))

    return Training(
        module=lambda: Layers(width),
        batch=batch,
        optimizer=lambda parameters: SGD(parameters, lr=0.0),
        batch_size=BATCH_SIZE,
        repetitions=0,
        dimensions={"layers": NUM_LAYERS, "width": width},
    )


class HostEvent:
    """As ``torch.cuda.Event``, of the thread that computes."""

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: "HostEvent") -> float:
        return (later._seconds - self._seconds) * 1e3


def new_event(device: torch.device) -> Any:
    """An event that the device passes, with the time when it did."""
    return HostEvent() if device.type == "cpu" else torch.cuda.Event(enable_timing=True)


def sleeper(device: torch.device) -> Callable[[float], None]:
    """Returns what makes the device sleep for so many seconds, behind what is queued."""
    if device.type == "cpu":
        return time.sleep
    cycles, milliseconds = 20_000_000, list[float]()
    for _ in range(3):
        begin, end = new_event(device), new_event(device)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return lambda seconds: torch.cuda._sleep(int(cycles * seconds * 1e3 / median(milliseconds)))


@dataclass(frozen=True)
class Times:
    """Seconds since a backward began."""

    reached: float
    """Until the device came to the first layer."""
    host: float
    """Until ``backward()`` returned."""
    gradients: float
    """Until the device had the means."""


@dataclass
class Found:
    """What a rank found out about a method."""

    times: list[Times] = field(default_factory=list)
    correct: bool = True


def measure(width: int, names: Sequence[str], sleep: float, sampling: Sampling) -> list[Record]:
    """Takes each method's steps. A collective call; every rank gets the same rows."""
    of_width = training(width)
    gradients = ModelGradients(of_width, BATCH_SIZE, sampling.device, sampling.seed)
    groups = {name: dist.new_group(timeout=timedelta(seconds=sampling.timeout)) for name in names}
    of_rank = all_gather(_measure_here(gradients, groups, sleep, sampling))
    gc.collect()  # DDP is part of reference cycles and holds its group
    for group in groups.values():
        dist.destroy_process_group(group)
    settings = {
        **of_width.dimensions,
        "sleep": sleep,
        "numel": gradients.flat_grads.numel(),
        "implementation": implementation(sampling.device),
        **settings_of_ranks(sampling),
    }
    where = all_gather(environment(sampling.device))[0]
    return [
        Record(
            benchmark="stream",
            method=name,
            settings=settings,
            figures=figures(of_rank[0][name].times),
            correct=all(rank[name].correct for rank in of_rank),
            samples=[each.reached for each in of_rank[0][name].times],
            environment=where,
        )
        for name in names
    ]


def _measure_here(
    gradients: ModelGradients, groups: Mapping[str, dist.ProcessGroup], sleep: float, sampling: Sampling
) -> dict[str, Found]:
    """Measures on this rank. Its models end with this function, before their groups do."""
    is_late, wait, sleep_for = dist.get_rank() == dist.get_world_size() - 1, barrier(), sleeper(sampling.device)

    def fall_asleep() -> None:
        if is_late:
            sleep_for(sleep)

    steps = {name: METHODS[name].build(gradients, group) for name, group in groups.items()}
    found = {name: Found() for name in steps}
    turns = [[(name, index) for index in range(sampling.warmup + sampling.repetitions)] for name in steps]
    for name, index in watched_rounds(turns, sampling.progress, "steps with a rank that sleeps", sampling.timeout):
        is_timed = index >= sampling.warmup
        times = timed_backward(steps[name], sampling.device, wait, fall_asleep if is_timed else lambda: None)
        found[name].times += [times] * is_timed
        found[name].correct &= is_right(METHODS[name], steps[name], gradients)
    return found


def timed_backward(
    step: Step, device: torch.device, wait: Callable[[], object], fall_asleep: Callable[[], None]
) -> Times:
    """Takes a step."""
    at_begin, at_first, at_end = (new_event(device) for _ in range(3))
    layers = next(module for module in step.model.modules() if isinstance(module, Layers))
    layers.reached = at_first.record
    step.prepare()
    if device.type == "cuda":
        torch.cuda.synchronize()
    wait()
    at_begin.record()
    began = time.perf_counter()
    fall_asleep()
    step.run()
    host = time.perf_counter() - began
    at_end.record()
    at_end.synchronize()
    return Times(at_begin.elapsed_time(at_first) / 1e3, host, at_begin.elapsed_time(at_end) / 1e3)


def implementation(device: torch.device) -> str:
    """The default group's backend as its class calls itself: torch has two for NCCL."""
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(device).name()


def figures(times: Sequence[Times]) -> dict[str, float]:
    """Medians in seconds, and whether the backward was held up: 1 or 0."""
    host, gradients, reached = (
        median(getattr(each, name) for each in times) for name in ("host", "gradients", "reached")
    )
    return {"host": host, "gradients": gradients, "held_up": float(reached > HELD_UP * gradients)}


def report(options: Options, collected: Collected) -> None:
    """Prints a table."""
    print_tables([collected.records] if collected.records else [], _title, COLUMNS, (LEGEND, *collected.notes))


COLUMNS: Columns = {
    "method": lambda record: record.method,
    "held up": lambda record: "yes" if record.figures["held_up"] else "no",
    "first layer, ms": lambda record: spread(record.quantiles),
    "host, ms": lambda record: milliseconds(record.figures["host"]),
    "gradients, ms": lambda record: milliseconds(record.figures["gradients"]),
}
LEGEND = (
    "first layer: from the beginning of rank 0's backward until its device came to the first layer, median [p10, p90]. "
    "host: until backward() returned. gradients: until the means were there, for which the late rank is needed. held "
    "up: the device came to the first layer only after half of that."
)


def _title(record: Record) -> str:
    settings = record.settings
    return (
        f"{settings['layers']} layers of width {settings['width']}, {settings['sleep']:g} s of sleep on the last rank\n"
        f"{settings['repetitions']} repetitions, process group {settings['implementation']}, {ranks_on(record)}"
    )
