"""``python -m benchmarks link``: the other benchmarks between hosts whose network has a known rate.

Every host, of one rank or several, is a network namespace with real TCP to the others, over links that carry no more
than the rate each way. So a network that is slower than loopback can be measured on one machine, and each time be
compared with what the link itself needs. Needs Linux, root, iproute2, and
util-linux.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import tyro
from torch.distributed.elastic.multiprocessing import SignalException

from benchmarks.baselines.compressions import WIRE_BYTES, algorithm
from benchmarks.baselines.training_steps import NO_DDP, NO_SYNC
from benchmarks.baselines.ways import BY_DEFAULT, DTYPES, WAYS
from benchmarks.commands import ddp, sync
from benchmarks.harness.collect import Collected, collect, ending, termination_raises
from benchmarks.harness.options import RankOptions
from benchmarks.harness.records import Record, RowFile, quantiles
from benchmarks.network.launch import run_in_namespaces
from benchmarks.network.namespaces import CONGESTION_CONTROL, Network, NetworkError, burst, why_not
from benchmarks.network.raw_tcp import ring_rate
from benchmarks.report.choices import against_the_best
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
CHECK_SECONDS = 0.5
"""How long the transfer takes that shows what the links carry."""
CHECK_PORT = 29400
"""Free in a namespace that is new."""
CHECK_TIMEOUT = 120.0
"""Seconds that ranks wait for each other in the check: not all are done importing at once."""
FULL = 0.85
"""Of its rate, what a link has to carry while all are busy, or it is the machine that is measured. TCP can have 0.94:
a frame of 1,514 bytes holds 1,448 of data, and with every second one goes an acknowledgement of 66 of what came."""
BAD_OPTIONS = 2
"""Exit status, as of a wrong option: what was asked for cannot be had here."""
DEFAULT_WAYS = (
    "ddp",
    "ddp/fp16_compress_hook",
    "ddp/powerSGD_hook",
    *(name for name in BY_DEFAULT if name.startswith(("fastsync.register_comm_hook/", "fastsync.attach/"))),
)


@dataclass(frozen=True)
class Options:
    """Measure over links of a known rate, between network namespaces on this machine. Linux, as root.

    All other options are those of the benchmark: see `sync --help` and `ddp --help`. By default sync measures the sizes
    0.5m and 12m, and ddp the models resnet50 and gpt2.
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
        shared = {"ways": DEFAULT_WAYS, "repetitions": 10, "warmup": 2, "timeout": 600.0, **fixed}
        default: RankOptions = sync.Options(sizes=("0.5m", "12m"), **shared)
        if self.benchmark == "ddp":
            default = ddp.Options(models=("resnet50", "gpt2"), **shared)
        prog = f"{PROG} --benchmark {self.benchmark}"
        return replace(tyro.cli(type(default), prog=prog, args=arguments, default=default), **fixed)


def main(arguments: Sequence[str]) -> int:
    """Measures and reports.

    Returns:
        The exit status: 0; 1 if a way gave a wrong result or a rank failed; 2 if this machine cannot do it; 130 after
        Ctrl-C, 143 after SIGTERM.
    """
    options, others = tyro.cli(Options, prog=PROG, args=arguments, return_unknown_args=True)
    measured = options.of_benchmark(others)
    measure_all = sync.measure_all if options.benchmark == "sync" else ddp.measure_all
    # For the ranks: GPUs of one machine would find each other past the links, and c10d would warn that these addresses
    # have no host names.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    launch = partial(_launch, [parse_rate(rate) for rate in dict.fromkeys(options.rate)], options.ranks_per_host)
    try:
        with termination_raises():
            if reason := why_not():
                raise NetworkError(reason)
            collected = collect(measure_all, options.ranks, measured, measured.json, launch)
    except NetworkError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return BAD_OPTIONS
    except (KeyboardInterrupt, SignalException) as error:
        # Before there were ranks, or while what they ran in was removed.
        status, note = ending(error)
        print(f"{PROG}: {note}", file=sys.stderr)
        return status
    report(collected)
    return collected.status


def _launch(
    rates: Sequence[int],
    ranks_per_host: int,
    measure_all: Callable[..., list[str]],
    nproc: int,
    options: Any,
    rows: RowFile,
) -> list[list[str]]:
    """Runs the benchmark at each rate, on new ranks. Returns rank 0's notes of the last."""
    notes: list[list[str]] = []
    for rate in rates:
        with Network(nproc // ranks_per_host, rate) as network:
            links = Links(tuple(network.addresses), rate, ranks_per_host)
            try:
                notes = run_in_namespaces(network, ranks_per_host, measure_rank, measure_all, options, rows, links)
            finally:
                rows.reload()
    return notes


@dataclass(frozen=True)
class Links:
    """The network between hosts."""

    addresses: tuple[str, ...]
    """Of the hosts."""
    rate: int
    """Of each host's link, each way, in bit/s."""
    ranks_per_host: int


def measure_rank(measure_all: Callable[..., list[str]], options: Any, rows: RowFile, links: Links) -> list[str]:
    """Takes part in the benchmark as one rank in its namespace, after the first of its host has checked the links."""
    host, place = divmod(int(os.environ["RANK"]), links.ranks_per_host)
    if place > 0:
        return measure_all(options, rows)  # rank 0 alone has rows to add
    raw_rate = ring_rate(host, links.addresses, CHECK_PORT, links.rate, CHECK_SECONDS, CHECK_TIMEOUT)
    return measure_all(options, LinkRows(rows, links, raw_rate))


class LinkRows:
    """Adds rows to a file, with what there is to say of the link."""

    def __init__(self, rows: RowFile, links: Links, raw_rate: float) -> None:
        self._rows, self._links, self._raw_rate = rows, links, raw_rate

    def add(self, records: Iterable[Record]) -> None:
        self._rows.add(with_link(list(records), self._links.rate, self._raw_rate, self._links.ranks_per_host))


def with_link(records: Sequence[Record], rate: int, raw_rate: float, ranks_per_host: int = 1) -> Iterator[Record]:
    """Rows of ways that ran in turns, with the link's rate as a setting, and in the figures what follows from it."""
    medians = {record.way: quantiles(record.samples)["median"] for record in records if record.samples}
    for record in records:
        num_bytes = sent_bytes(record, ranks_per_host)
        synchronises = record.way not in (NO_DDP, NO_SYNC)
        settings = {**record.settings, "link": rate, "link_burst": burst(rate)}
        if ranks_per_host > 1:
            settings["ranks_per_host"] = ranks_per_host
        if record.settings["world_size"] > record.environment["cores"]:
            settings[OVERSUBSCRIBED] = True
        figures = {
            **record.figures,
            **link_figures(num_bytes, medians.get(record.way), rate, raw_rate),
            "ddp_over_this": _ratio(medians.get("ddp"), medians.get(record.way)) if synchronises else None,
            "raw_rate_ring": raw_rate,
        }
        environment = {**record.environment, "congestion_control": CONGESTION_CONTROL}
        yield replace(record, settings=settings, figures=figures, environment=environment)


def sent_bytes(record: Record, ranks_per_host: int = 1) -> float | None:
    """Counts the bytes of gradients that each host has to send, at the wire's width.

    2(n − 1)/n of them in a ring all_reduce and in two_shot, half of that in a reduce-scatter, n − 1 times all of them
    in one_shot: n are the ranks, or the hosts, as fastsync adds in memory inside them. None where nothing travels, for
    ways that send something else than the gradients, and where the wire is chosen by measurement.
    """
    wire, members = record.settings["wire"], record.settings["world_size"]
    if wire is None or (WAYS[record.way].approximate and not WAYS[record.way].scatters):
        return None
    compression = WAYS[record.way].compression
    if compression is not None:
        members //= ranks_per_host
    one_shot = compression is not None and algorithm(compression, members) == "one_shot"
    volume = members - 1 if one_shot else 2 * (members - 1) / members
    if WAYS[record.way].scatters:
        volume = (members - 1) / members
    return volume * record.settings["numel"] * _WIDTHS[wire]


_WIDTHS: Mapping[str, float] = {str(dtype).removeprefix("torch."): WIRE_BYTES[name] for name, dtype in DTYPES.items()}


def link_figures(num_bytes: float | None, median: float | None, rate: int, raw_rate: float) -> dict[str, float | None]:
    """The time that a link needs for so many bytes, and a step's as a multiple of it, and of that of plain TCP."""
    limit = None if num_bytes is None else 8 * num_bytes / rate
    raw_limit = None if num_bytes is None else 8 * num_bytes / raw_rate
    return {
        "sent_bytes": num_bytes,
        "link_limit": limit,
        "over_link_limit": _ratio(median, limit),
        "over_raw_tcp": _ratio(median, raw_limit),
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def report(collected: Collected) -> None:
    """Prints a table for each rate and size or model."""
    groups = grouped_by(collected.records, lambda record: (record.settings["link"], _subject(record)))
    below = (LEGEND, *collected.notes, *slow_links(collected.records))
    print_tables(groups, _title, COLUMNS, below, against_the_best)


def slow_links(records: Sequence[Record]) -> list[str]:
    """A warning for each rate that plain TCP did not come near: this machine's cores were the limit."""
    rings = {record.settings["link"]: record.figures["raw_rate_ring"] for record in records}
    return [
        f"At {format_rate(rate)} plain TCP carried {ring / rate:.0%} of it while all ranks were busy: this machine is "
        "slower than the links, and what was measured is that. Choose a lower rate, fewer ranks, or a quiet machine."
        for rate, ring in rings.items()
        if ring < FULL * rate
    ]


COLUMNS: Columns = {
    "way": lambda record: record.way,
    "step, ms": lambda record: spread(record.quantiles),
    "exposed, ms": lambda record: cost(record.figures[_EXPOSED[record.benchmark]]),
    "sent, MB": lambda record: number(record.figures["sent_bytes"], ",.2f", 1e6),
    "link's limit, ms": lambda record: milliseconds(record.figures["link_limit"]),
    "× limit": lambda record: multiple(record.figures["over_link_limit"], ".3f"),
    "× plain TCP": lambda record: multiple(record.figures["over_raw_tcp"], ".3f"),
    "DDP's time ÷ this": lambda record: multiple(record.figures["ddp_over_this"], ".2f"),
    "error": lambda record: number(record.figures["error"], ".1e"),
}
_EXPOSED = {"sync": "over_no_sync", "ddp": "exposed"}
LEGEND = (
    "step: median [p10, p90] of the slowest rank. exposed: what it adds to the step without communication. sent: what "
    "a host has to send at least, at the wire's width: 2(n − 1)/n of the gradients, in a reduce-scatter half of that, "
    "in one_shot all of them to each of the n − 1 others. link's limit: that, by the link's rate; TCP cannot do better "
    "than 1.05 of it one way and 1.07 both ways at once, for headers and acknowledgements, and an idle link lets 1 ms "
    "of its rate through at once, so that a step may save that. plain TCP: the same bytes at the rate that sockets "
    "alone reached between the same ranks just before, all sending to the next one."
)


def _subject(record: Record) -> str:
    return record.settings["size"] if record.benchmark == "sync" else record.settings["model"]


def _title(record: Record) -> str:
    settings, where, figures = record.settings, record.environment, record.figures
    crowded = f", OVERSUBSCRIBED: {where['cores']} cores" if settings.get(OVERSUBSCRIBED) else ""
    work = f"{settings['numel']:,} gradients in {settings['num_tensors']} tensors"
    subject = work if record.benchmark == "sync" else f"{settings['model']} ({settings['scale']}), {work}"
    shared = settings.get("ranks_per_host", 1)
    ranks = f"{settings['backend']} ranks" + (f", {shared} on a host," if shared > 1 else "")
    return (
        f"{subject}, {settings['world_size']} {ranks} on links of {format_rate(settings['link'])}"
        f"{crowded}, {settings['repetitions']} repetitions\n"
        f"plain TCP: {format_rate(figures['raw_rate_ring'])} on the slowest link with all busy\n"
        f"{measured_on(record)}"
    )
