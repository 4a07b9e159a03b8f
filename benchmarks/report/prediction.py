"""Prints what a cost model predicts: its parameters, efficiencies, where compression pays, and what is assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.cost.fit import Fit
from benchmarks.cost.model import CostModel, Job
from benchmarks.harness.records import Record
from benchmarks.report.table import Columns, console, milliseconds, number, table
from benchmarks.units import format_rate, format_seconds

if TYPE_CHECKING:
    from benchmarks.commands.predict import Options


def report(
    options: Options,
    model: CostModel,
    fitted: Fit | None,
    held_back: Sequence[Record],
    predictions: Sequence[Record],
) -> None:
    """Prints the parameters and what they were checked with, the efficiencies, the crossovers and what is assumed."""
    out = console()
    for line in _parameters(model, fitted):
        out.print(line, markup=False)
    if options.hold_back:
        out.print(table(f"Held back, {fitted.how if fitted else ''}", HELD_BACK_COLUMNS, held_back))
    for way in model.hosts:
        rows = [record for record in predictions if record.way == way]
        out.print(table(_title(way, model, options.job, fitted), COLUMNS, rows))
    for line in (*_crossovers(options, model, fitted), *_assumptions(options)):
        out.print(line, markup=False)


COLUMNS: Columns = {
    "ranks": lambda record: str(record.settings["world_size"]) + ("*" if record.settings["extrapolated"] else ""),
    "exposed, ms": lambda record: milliseconds(record.figures["exposed_time"]),
    "efficiency": lambda record: _percent(record.figures["efficiency"]),
    "with the worst error": lambda record: _range(record),
    "error of a sync, median": lambda record: _percent(record.figures["median_error"]),
    "error of a sync, worst": lambda record: _percent(record.figures["worst_error"]),
}
HELD_BACK_COLUMNS: Columns = {
    "way": lambda record: record.way,
    "parameters": lambda record: f"{record.settings['numel']:,}",
    "ranks": lambda record: (
        f"{record.settings['world_size']}{', OVERSUBSCRIBED' if record.settings.get('oversubscribed') else ''}"
    ),
    "measured, ms": lambda record: milliseconds(record.figures["measured"]),
    "predicted, ms": lambda record: milliseconds(record.figures["predicted"]),
    "error": lambda record: number(record.figures["error"], "+.1%") or "unknown: less than the noise",
}


def _parameters(model: CostModel, fitted: Fit | None) -> Iterator[str]:
    link = model.topology.link
    rate = format_rate(8 * link.bandwidth) if math.isfinite(link.bandwidth) else "no measurable cost a byte"
    yield f"link: {format_seconds(link.latency + link.work)} a step, {rate}"
    for way, host in model.hosts.items():
        local = f"{host.bandwidth / 1e9:.3g} GB/s" if math.isfinite(host.bandwidth) else "no measurable cost a byte"
        yield f"{way}: {format_seconds(host.overhead)} a call, local passes {local}"
    if fitted is None:
        yield "error: unknown, nothing was measured; every figure below is as good as what was given"
        return
    ranks = ", ".join(map(str, sorted({point.num_ranks for point in fitted.points})))
    errors = fitted.errors()
    crowded = fitted.num_oversubscribed
    yield (
        f"error of a sync, without the compute around it: median {_percent(median(errors))}, worst "
        f"{_percent(max(errors))} of {len(errors)} points held back {fitted.how}; beside the figures below, of those "
        f"of about as many bytes. Fitted on {len(fitted.points)} points at {ranks} ranks"
        + (f", {crowded} of them OVERSUBSCRIBED" if crowded else "")
    )


def _crossovers(options: Options, model: CostModel, fitted: Fit | None) -> Iterator[str]:
    """For each compression the link at which it breaks even at the most ranks, and a step's time on both sides.

    The crossing is also given where the errors of the two that are compared are at their worst and opposite.
    """
    plain, num_ranks, job = f"{options.door}/none", max(options.all_sizes), options.job
    if plain not in model.hosts or num_ranks == 1:
        return
    errors = fitted.errors(job.numel / job.num_buckets) if fitted else []
    for way in model.hosts:
        if way == plain:
            continue
        crossover = model.crossover(way, plain, job, num_ranks)
        where = f"{way} at {num_ranks} ranks"
        if math.isinf(crossover):
            found = f"{where}: ahead of {plain} over any link"
        elif crossover == 0:
            found = f"{where}: behind {plain} over every link"
        else:
            below, above = (_both(model.over(crossover * factor), way, plain, job, num_ranks) for factor in (0.5, 2))
            found = (
                f"{where}: pays below {format_rate(8 * crossover)}; exposed against {plain}'s at half of that {below}, "
                f"at twice {above}"
            )
        if not errors:
            yield f"{found} (error unknown)"
            continue
        low, high = model.crossover_range(way, plain, job, num_ranks, max(errors))
        yield (
            f"{found} (with the worst error of a sync, {_percent(max(errors))}, in either direction: "
            f"{_crossing(low)} to {_crossing(high)})"
        )


def _crossing(bandwidth: float) -> str:
    if math.isinf(bandwidth):
        return "ahead over any link"
    return f"pays below {format_rate(8 * bandwidth)}" if bandwidth else "never ahead"


def _both(model: CostModel, way: str, plain: str, job: Job, num_ranks: int) -> str:
    times = (milliseconds(model.exposed_time(name, job, num_ranks)) for name in (way, plain))
    return "{} ms and {} ms".format(*times)


def _assumptions(options: Options) -> Iterator[str]:
    job = options.job
    overlaps = (
        f"{job.num_buckets} equal buckets of up to {options.bucket_mb:g} MiB, each sent behind the one before while "
        f"backward, {job.backward_share:.0%} of the compute, goes on; what the host does hides behind nothing"
        if job.num_buckets > 1
        else "one bucket, which nothing hides"
    )
    yield f"Assumed: {overlaps}. Weak scaling: each rank computes {format_seconds(job.compute_time)} a step."
    if options.algorithm == "tree":
        yield "Assumed: the tree is pipelined, so that its depth costs latency alone."
    if options.algorithm == "two-level":
        yield (
            f"Assumed: the {options.ranks_per_node} ranks of a node share its link to the others; inside of it "
            f"{options.inner_bandwidth} for each and {options.inner_latency} a step."
        )
    if "int8" in options.compression:
        yield "Assumed: int8 is sent from rank to rank: in one_shot between two of them, in two_shot between more."
    yield (
        "*: extrapolated beyond measured ranks or bytes, or with a link, algorithm or passes that were not measured: "
        "the error was seen elsewhere. Nobody else uses the link; no rank is slower than another."
    )


def _title(way: str, model: CostModel, job: Job, fitted: Fit | None) -> str:
    compute = format_seconds(job.compute_time)
    crowded = ", fitted on OVERSUBSCRIBED ranks" if fitted is not None and fitted.num_oversubscribed else ""
    return f"{way}, {model.topology.algorithm}: {job.numel:,} parameters, {compute} of compute a step{crowded}"


def _range(record: Record) -> str:
    low, high = record.figures["low"], record.figures["high"]
    return "" if low is None else f"[{_percent(low)}, {_percent(high)}]"


def _percent(value: float | None) -> str:
    return "unknown" if value is None or math.isinf(value) else f"{value:.1%}"
