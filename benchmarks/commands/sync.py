"""``python -m benchmarks sync``: what a step's gradient synchronisation costs, each method against the bare all_reduce.

A sample is the time of one backward with everything that makes its gradients the mean over the ranks: from a barrier to
the moment when the slowest rank has them. Of the bare all_reduce it is the time of that alone. All methods run in the
same processes and take turns, each with a model and a process group of its own.

Sizes are models or bytes of gradients. algbw and busbw are those of nccl-tests.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from rich.progress import Progress

from benchmarks.baselines.methods import METHODS, OVERLAPPING, STEPPING, with_their_limits
from benchmarks.baselines.workloads import SIZES, size_of
from benchmarks.harness.busy import busy_processes
from benchmarks.harness.collect import Collected
from benchmarks.harness.measure import measure, measure_each
from benchmarks.harness.options import RankOptions, check_names, run_on_ranks
from benchmarks.harness.records import Record, RowFile
from benchmarks.report.table import (
    WITHIN_NOISE,
    Columns,
    cost,
    grouped_by,
    milliseconds,
    multiple,
    number,
    print_tables,
    ranks_on,
    spread,
)
from fastsync.messages import check_at_least


@dataclass(frozen=True)
class Sizes:
    sizes: tuple[str, ...] = tuple(SIZES)
    """Models by their number of parameters (5k, 0.5m, 12m), or bytes of float32 gradients (1KiB, 25MiB, 1GiB) in 16
    about equal matrices."""


@dataclass(frozen=True)
class Options(RankOptions, Sizes):
    """Measure what a step's gradient synchronisation costs: fastsync, its baselines and the limit, taking turns."""

    repetitions: int | None = None
    """Samples of each method; by default 300, 100 and 20 for the three models, and for bytes as many as make 1 GiB of
    gradients, between 5 and 300."""
    optimizer: Literal["adamw", "muon"] | None = None
    """In place of methods, measure those that also step: with AdamW after clipping, or matrices with Muon."""
    busy: int = 0
    """Processes that never sleep, beside the ranks, as environment workers and data loaders may be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("methods", self.methods, [name for name in METHODS if name not in OVERLAPPING])
        check_at_least(self, busy=0)
        for size in self.sizes:
            size_of(size)  # which refuses what is none


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status."""
    return run_on_ranks("sync", Options, measure_all, report, arguments)


def measure_all(options: Options, rows: RowFile) -> list[str]:
    """Measures all sizes as one rank, of which rank 0 keeps the rows. Returns notes."""

    def measure_size(size: str, names: Sequence[str], device: torch.device, progress: Progress) -> list[Record]:
        records = measure(size, names, options.sampling(size_of(size).repetitions, device, progress))
        busy = {"busy": options.busy} if options.busy else {}
        return [replace(record, settings=record.settings | busy) for record in records]

    with busy_processes(options.busy if os.environ["RANK"] == "0" else 0):
        sizes = dict.fromkeys(options.sizes)
        methods = tuple(STEPPING[options.optimizer]) if options.optimizer else options.methods
        return measure_each(sizes, with_their_limits(methods), options, rows, measure_size)


def report(options: Options, collected: Collected) -> None:
    """Prints a table for each size, with a row for each method."""
    by_size = grouped_by(collected.records, lambda record: record.settings["size"])
    print_tables(by_size, _title, COLUMNS, (LEGEND, *collected.notes))


def _multiple(record: Record, name: str) -> str:
    value = record.figures[name]
    is_noise = value is not None and (record.figures["over_no_sync"] or 0.0) < 0  # as what it is over may be, too
    return WITHIN_NOISE if is_noise else multiple(value, ".2f")


COLUMNS: Columns = {
    "method": lambda record: record.method,
    "step, ms": lambda record: spread(record.quantiles),
    "over no_sync, ms": lambda record: cost(record.figures["over_no_sync"]),
    "algbw, GB/s": lambda record: number(record.figures["algbw"], "#.3g", 1e9),
    "busbw, GB/s": lambda record: number(record.figures["busbw"], "#.3g", 1e9),
    "× all_reduce": lambda record: _multiple(record, "over_all_reduce"),
    "× ddp": lambda record: _multiple(record, "over_ddp"),
    "× shared sum": lambda record: _multiple(record, "over_shared_sum"),
    "exposed, ms": lambda record: milliseconds(record.figures["exposed_time"]),
    "pack, ms": lambda record: milliseconds(record.figures["pack_time"]),
    "unpack, ms": lambda record: milliseconds(record.figures["unpack_time"]),
    "wire bytes": lambda record: number(record.figures["wire_bytes"], ",.0f"),
    "error": lambda record: number(record.figures["error"], ".1e"),
}
LEGEND = (
    "step: median [p10, p90] of the slowest rank. over no_sync: what the median adds to no_sync's; of the bare "
    "all_reduce, which has no backward, all of it. algbw: bytes of float32 gradients, compressed or not, by over "
    "no_sync; busbw: algbw · 2(n − 1)/n. × all_reduce: over no_sync, over the bare all_reduce of the same dtype; "
    "× ddp: over what DDP adds; × shared sum: over a bare sum in memory that the ranks share. Where an "
    "optimizer steps, both are over what has it, too: DDP, and a copy of the least memory that sum, clip and step "
    "take, or one rank's step of Muon alone. exposed, pack, unpack, wire bytes: per "
    "step and rank, as the engine counts them. error: relative, in the 2-norm, of the last step alone; PowerSGD and "
    "lowrank catch up in later steps with what they leave out of one, and random gradients are their worst case. "
    "They send something else than the gradients. PowerSGD does so in one bucket, as it would mix up two on Gloo, so "
    "that backward hides nothing."
)


def _title(record: Record) -> str:
    settings = record.settings
    return (
        f"{settings['numel']:,} float32 gradients in {settings['num_tensors']} tensors, "
        f"{settings['repetitions']} repetitions, {ranks_on(record)}"
    )
