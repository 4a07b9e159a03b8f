"""``python -m benchmarks micro_batches``: what the same bits on any number of ranks cost.

A sample is a step's forwards and backwards, until the slowest rank has the mean: by ``attach(micro_batches=)``, and by
as many backwards that accumulate, of which the last one synchronises. Both take turns, in the same processes.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor, nn

import fastsync
from benchmarks.harness.collect import Collected
from benchmarks.harness.measure import all_gather, measure_each, settings_of_ranks
from benchmarks.harness.options import Methods, RankOptions, check_names, run_on_ranks
from benchmarks.harness.progress import watched_rounds
from benchmarks.harness.records import Record, RowFile, environment, quantiles
from benchmarks.harness.timing import Sampling, rounds, slowest_rank, time_turns
from benchmarks.report.table import Columns, multiple, print_tables, ranks_on, spread
from fastsync.messages import check_at_least

ACCUMULATION, MICRO_BATCHES = "accumulation", "micro_batches"
SIZES = {"0.5m": (2, 512), "12m": (12, 1024)}
"""Layers, and their width."""
TOLERANCE = 1e-5
"""Of the sum of values, in the 2-norm: the two add up in different orders."""


@dataclass(frozen=True)
class Options(RankOptions):
    """Measure what the same bits on any number of ranks cost, beside accumulation of as many micro-batches."""

    methods: Methods = (ACCUMULATION, MICRO_BATCHES)
    """What to compare."""
    sizes: tuple[str, ...] = tuple(SIZES)
    """Models by their number of parameters."""
    repetitions: int = 50
    """Samples of each method."""
    micro_batches: int = 8
    """Micro-batches of a step, over all ranks: a power of two."""
    batch_size: int = 32
    """Rows of a micro-batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("methods", self.methods, (ACCUMULATION, MICRO_BATCHES))
        check_names("sizes", self.sizes, SIZES)
        check_at_least(self, batch_size=1)
        if self.micro_batches % self.nproc:
            raise ValueError(f"micro_batches={self.micro_batches} must be a multiple of nproc={self.nproc}")


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("micro_batches", Options, measure_all, report, arguments)


class Step:
    """A step by one of the methods."""

    def __init__(self, method: str, size: str, options: Options, sampling: Sampling, group: dist.ProcessGroup) -> None:
        num_layers, width = SIZES[size]
        torch.manual_seed(options.seed)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))).to(sampling.device)
        self._number, self._is_ours = options.micro_batches, method == MICRO_BATCHES
        given = {"micro_batches": self._number} if self._is_ours else {}
        self._sync = fastsync.attach(self.model, process_group=group, **given)
        generator = torch.Generator().manual_seed(options.seed)
        inputs = torch.randn(self._number, options.batch_size, width, generator=generator)
        self._inputs = inputs.to(sampling.device)

    def prepare(self) -> None:
        self.model.zero_grad()

    def run(self) -> None:
        if self._is_ours:
            for index in self._sync.micro_batches():
                self._loss(index).backward()
            return
        count = self._number // dist.get_world_size()
        first = count * dist.get_rank()
        for index in range(first, first + count):
            with self._sync.no_sync() if index + 1 < first + count else nullcontext():
                (self._loss(index) / count).backward()

    def _loss(self, index: int) -> Tensor:
        return self.model(self._inputs[index]).square().mean()

    def result(self) -> Tensor:
        return torch.cat([parameter.grad.reshape(-1) for parameter in self.model.parameters()])


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""

    def measure_size(size: str, names: Sequence[str], device: torch.device, progress: Progress) -> list[Record]:
        return measure(size, options, options.sampling(options.repetitions, device, progress))

    return measure_each(dict.fromkeys(options.sizes), (), options, rows, measure_size)


def measure(size: str, options: Options, sampling: Sampling) -> list[Record]:
    """Checks and times the methods. A collective call; every rank gets the same rows."""
    groups = {name: dist.new_group(timeout=timedelta(seconds=sampling.timeout)) for name in options.methods}
    own_samples, results = _measure_here(size, options, sampling, groups)
    for group in groups.values():
        dist.destroy_process_group(group)
    of_rank = all_gather(own_samples)
    samples = {name: slowest_rank([each[name] for each in of_rank]) for name in groups}
    medians = {name: quantiles(values)["median"] for name, values in samples.items()}
    expected = results[options.methods[0]]
    where = all_gather(environment(sampling.device))[0]
    settings = {
        "size": size,
        "numel": expected.numel(),
        "micro_batches": options.micro_batches,
        "batch_size": options.batch_size,
        **settings_of_ranks(sampling),
    }
    return [
        Record(
            benchmark="micro_batches",
            method=name,
            settings=settings,
            figures={"over_accumulation": medians[name] / medians[ACCUMULATION] if ACCUMULATION in medians else None},
            correct=bool((results[name] - expected).norm() <= TOLERANCE * expected.norm()),
            samples=samples[name],
            environment=where,
        )
        for name in groups
    ]


def _measure_here(
    size: str, options: Options, sampling: Sampling, groups: Mapping[str, dist.ProcessGroup]
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Returns this rank's samples, and the newest means. The models end with this function, before their groups do."""
    steps = {name: Step(name, size, options, sampling, group) for name, group in groups.items()}
    order = list(rounds(steps, sampling.warmup + sampling.repetitions, sampling.seed))

    def timed(part: Sequence[Sequence[str]], what: str) -> dict[str, list[float]]:
        turns = watched_rounds(part, sampling.progress, f"{size}: {what}", sampling.timeout)
        return time_turns(steps, turns, sampling.device)

    timed(order[: sampling.warmup], "warm-up")
    samples = timed(order[sampling.warmup :], "timed")
    return samples, {name: step.result() for name, step in steps.items()}


def report(options: Options, collected: Collected) -> None:
    """Prints a table for each size."""
    by_size = [[row for row in collected.records if row.settings["size"] == size] for size in options.sizes]
    print_tables([rows for rows in by_size if rows], _title, COLUMNS, (LEGEND, *collected.notes))


COLUMNS: Columns = {
    "method": lambda record: record.method,
    "step, ms": lambda record: spread(record.quantiles),
    "× accumulation": lambda record: multiple(record.figures["over_accumulation"], ".2f"),
}
LEGEND = "step: forwards and backwards of all micro-batches, until the mean is there; median [p10, p90], slowest rank."


def _title(record: Record) -> str:
    settings = record.settings
    return (
        f"{settings['numel']:,} float32 gradients, {settings['micro_batches']} micro-batches of "
        f"{settings['batch_size']} rows, {settings['repetitions']} repetitions, {ranks_on(record)}"
    )
