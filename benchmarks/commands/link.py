"""``python -m benchmarks link``: the other benchmarks between hosts whose network has a known rate.

Every host, of one rank or several, is a network namespace with real TCP to the others, over links that carry no more
than the rate each way. So a network that is slower than loopback can be measured on one machine, and each time be
compared with what the link itself needs. Needs Linux, root, iproute2, and
util-linux.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import tyro

from benchmarks.baselines.compressions import WIRE_BYTES, algorithm
from benchmarks.baselines.methods import BARE, DTYPES, METHODS
from benchmarks.baselines.training_steps import NO_DDP, NO_SYNC
from benchmarks.commands import ddp, sync
from benchmarks.harness.collect import Collected
from benchmarks.harness.options import RankOptions
from benchmarks.harness.records import Record, RowFile, quantiles
from benchmarks.network.launch import measure_over_links
from benchmarks.network.namespaces import CONGESTION_CONTROL, burst
from benchmarks.report.table import (
    OVERSUBSCRIBED,
    Columns,
    cost,
    grouped_by,
    measured_on,
    milliseconds,
    multiple,
    number,
    print_tables,
    spread,
)
from benchmarks.units import format_rate, parse_rate

PROG = "python -m benchmarks link"
MIN_RANKS, MAX_RANKS = 2, 16
SLOW = 1.18
"""From this multiple of the link's limit on, it is the machine that is measured. TCP can do 1.07: a frame of 1,514
bytes holds 1,448 of data, and with every second one goes an acknowledgement of 66 of what came."""
LONG = 0.05
"""Seconds of sending from which on latency is no great part of it."""


@dataclass(frozen=True)
class Options:
    """Measure over links of a known rate, between network namespaces on this machine. Linux, as root.

    All other options are those of the benchmark: see `sync --help` and `ddp --help`. By default sync measures the sizes
    0.5m and 12m, and ddp the model gpt2.
    """

    rate: tuple[str, ...] = ("1gbit",)
    """Of each host's link, each way, as tc writes it: 100mbit, 1gbit, 10gbit. One after the other."""
    ranks: int = 4
    """Number of ranks, from 2 to 16: each a process."""
    ranks_per_host: int = 1
    """How many of them share a host, which is a namespace of its own, and its link. Divides their number."""
    benchmark: Literal["sync", "ddp"] = "sync"
    """What is measured: a step's synchronisation alone, or whole training steps."""

    def __post_init__(self) -> None:
        if not self.rate:
            raise ValueError("rate: name at least one, such as 1gbit")
        for rate in self.rate:
            parse_rate(rate)
        if not MIN_RANKS <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks={self.ranks} must be from {MIN_RANKS} to {MAX_RANKS}")
        if not 1 <= self.ranks_per_host < self.ranks or self.ranks % self.ranks_per_host:
            raise ValueError(
                f"ranks_per_host={self.ranks_per_host} must divide ranks={self.ranks}, and leave two hosts at least"
            )

    def of_benchmark(self, arguments: Sequence[str]) -> RankOptions:
        """Parses the options of the benchmark that runs in the namespaces."""
        fixed: dict[str, Any] = {
            "nproc": self.ranks,
            "device": "cpu",  # GPUs of one machine would find each other past the links
            "oversubscribe": True,
        }
        shared = {"methods": ddp.DEFAULT_METHODS, "repetitions": 10, "warmup": 2, "timeout": 600.0, **fixed}
        default: RankOptions = sync.Options(sizes=("0.5m", "12m"), **shared)
        if self.benchmark == "ddp":
            default = ddp.Options(models=("gpt2",), **shared)
        prog = f"{PROG} --benchmark {self.benchmark}"
        return replace(tyro.cli(type(default), prog=prog, args=arguments, default=default), **fixed)


def main(arguments: Sequence[str]) -> int:
    """Measures and reports. Returns the exit status, as ``measure_over_links``."""
    options, others = tyro.cli(Options, prog=PROG, args=arguments, return_unknown_args=True)
    measure_all = sync.measure_all if options.benchmark == "sync" else ddp.measure_all
    measure = partial(measure_rank, measure_all, options.ranks_per_host)
    hosts = options.ranks // options.ranks_per_host
    networks = [(hosts, parse_rate(rate)) for rate in dict.fromkeys(options.rate)]
    return measure_over_links(PROG, measure, options.of_benchmark(others), networks, options.ranks_per_host, report)


def measure_rank(
    measure_all: Callable[..., list[str]], ranks_per_host: int, options: Any, rows: RowFile, rate: int
) -> list[str]:
    """Takes part in the benchmark as one rank in its namespace."""
    return measure_all(options, LinkRows(rows, rate, ranks_per_host))


class LinkRows:
    """Adds rows to a file, with what there is to say of the link."""

    def __init__(self, rows: RowFile, rate: int, ranks_per_host: int) -> None:
        self._rows, self._rate, self._ranks_per_host = rows, rate, ranks_per_host

    def add(self, records: Iterable[Record]) -> None:
        self._rows.add(with_link(list(records), self._rate, self._ranks_per_host))


def with_link(records: Sequence[Record], rate: int, ranks_per_host: int = 1) -> Iterator[Record]:
    """Rows of methods that ran in turns, with the link's rate as a setting, and in the figures what follows from it.

    link_limit: the seconds that the link needs for the bytes that a host has to send. over_link_limit: the step's as a
    multiple of it.
    """
    medians = {record.method: quantiles(record.samples)["median"] for record in records if record.samples}
    for record in records:
        num_bytes, median = sent_bytes(record, ranks_per_host), medians.get(record.method)
        limit = None if num_bytes is None else 8 * num_bytes / rate
        synchronises = record.method not in (NO_DDP, NO_SYNC)
        settings = {**record.settings, "link": rate, "link_burst": burst(rate)}
        if ranks_per_host > 1:
            settings["ranks_per_host"] = ranks_per_host
        if record.settings["world_size"] > record.environment["cores"]:
            settings[OVERSUBSCRIBED] = True
        figures = {
            **record.figures,
            "sent_bytes": num_bytes,
            "link_limit": limit,
            "over_link_limit": _ratio(median, limit),
            "ddp_over_this": _ratio(medians.get("ddp"), median) if synchronises else None,
        }
        environment = {**record.environment, "congestion_control": CONGESTION_CONTROL}
        yield replace(record, settings=settings, figures=figures, environment=environment)


def sent_bytes(record: Record, ranks_per_host: int = 1) -> float | None:
    """Counts the bytes of gradients that each host has to send, at the wire's width.

    2(n − 1)/n of them in a ring all_reduce and in two_shot, half of that in a reduce-scatter, n − 1 times all of them
    in one_shot: n are the ranks, or the hosts, as fastsync adds in memory inside them. None where nothing travels, for
    methods that send something else than the gradients, and where the wire is chosen by measurement.
    """
    wire, members = record.settings["wire"], record.settings["world_size"]
    if wire is None or (METHODS[record.method].approximate and not METHODS[record.method].scatters):
        return None
    compression = METHODS[record.method].compression
    if compression is not None:
        members //= ranks_per_host
    one_shot = compression is not None and algorithm(compression, members) == "one_shot"
    volume = members - 1 if one_shot else 2 * (members - 1) / members
    if METHODS[record.method].scatters:
        volume = (members - 1) / members
    return volume * record.settings["numel"] * _WIDTHS[wire]


_WIDTHS: Mapping[str, float] = {str(dtype).removeprefix("torch."): WIRE_BYTES[name] for name, dtype in DTYPES.items()}


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def report(collected: Collected) -> None:
    """Prints a table for each rate and size or model."""
    groups = grouped_by(collected.records, lambda record: (record.settings["link"], _subject(record)))
    below = (LEGEND, *collected.notes, *slow_links(collected.records))
    print_tables(groups, _title, COLUMNS, below)


def slow_links(records: Sequence[Record]) -> list[str]:
    """A warning for each rate that not even the bare all_reduce came near: this machine's cores were the limit."""
    nearest: dict[int, float] = {}
    for record in records:
        if record.method in BARE and (record.figures["link_limit"] or 0.0) >= LONG and record.samples:
            rate, times = record.settings["link"], record.figures["over_link_limit"]
            nearest[rate] = min(times, nearest.get(rate, times))
    return [
        f"At {format_rate(rate)} the bare all_reduce took {times:.2f} × the link's limit: this machine is slower than "
        "the links, and what was measured is that. Choose a lower rate, fewer ranks, or a quiet machine."
        for rate, times in nearest.items()
        if times > SLOW
    ]


COLUMNS: Columns = {
    "method": lambda record: record.method,
    "step, ms": lambda record: spread(record.quantiles),
    "exposed, ms": lambda record: cost(record.figures[_EXPOSED[record.benchmark]]),
    "sent, MB": lambda record: number(record.figures["sent_bytes"], ",.2f", 1e6),
    "link's limit, ms": lambda record: milliseconds(record.figures["link_limit"]),
    "× limit": lambda record: multiple(record.figures["over_link_limit"], ".3f"),
    "DDP's time ÷ this": lambda record: multiple(record.figures["ddp_over_this"], ".2f"),
    "error": lambda record: number(record.figures["error"], ".1e"),
}
_EXPOSED = {"sync": "over_no_sync", "ddp": "exposed"}
LEGEND = (
    "Hosts are simulated: network namespaces on this machine, with links that are shaped to a rate. "
    "step: median [p10, p90] of the slowest rank. exposed: what it adds to the step without communication. sent: what "
    "a host has to send at least, at the wire's width: 2(n − 1)/n of the gradients, in a reduce-scatter half of that, "
    "in one_shot all of them to each of the n − 1 others. link's limit: that, by the link's rate; TCP cannot do better "
    "than 1.05 of it one way and 1.07 both ways at once, for headers and acknowledgements, and an idle link lets 1 ms "
    "of its rate through at once, so that a step may save that."
)


def _subject(record: Record) -> str:
    return record.settings["size"] if record.benchmark == "sync" else record.settings["model"]


def _title(record: Record) -> str:
    settings, where = record.settings, record.environment
    crowded = f", OVERSUBSCRIBED: {where['cores']} cores" if settings.get(OVERSUBSCRIBED) else ""
    work = f"{settings['numel']:,} gradients in {settings['num_tensors']} tensors"
    subject = work if record.benchmark == "sync" else f"{settings['model']} ({settings['scale']}), {work}"
    shared = settings.get("ranks_per_host", 1)
    ranks = f"{settings['backend']} ranks" + (f", {shared} on a host," if shared > 1 else "")
    return (
        f"{subject}, {settings['world_size']} {ranks} on simulated links of {format_rate(settings['link'])}"
        f"{crowded}, {settings['repetitions']} repetitions\n"
        f"{measured_on(record)}"
    )
