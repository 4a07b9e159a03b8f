"""Makes a document of what a scaling run found."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.records import Record
from benchmarks.harness.statistics import RATIO_HOLDS, SURE_FROM, range_holds_median
from benchmarks.report.document import Document, Section, Table
from benchmarks.report.efficiency import DEFINITIONS, Bandwidth, Point, baseline, overhead, points, sweep
from benchmarks.report.rows import environment_of
from benchmarks.report.table import WITHIN_NOISE, cost, milliseconds, multiple
from benchmarks.units import format_bytes


def scaling_document(records: Sequence[Record], command: str, notes: Sequence[str] = ()) -> Document:
    """Says what rows of ``python -m benchmarks scaling`` say; of one mode, model and batch. There may be none.

    Raises:
        ValueError: the rows are of several.
    """
    from benchmarks.report.pictures import bandwidth_picture, breakdown_picture, efficiency_picture  # not for --help

    found, bandwidths = points(records), sweep(records)
    settings = next((record.settings for record in records if "model" in record.settings), {})
    scaling = settings.get("scaling", "weak")
    sections = []
    if found:
        sections += [
            Section(
                "Efficiency", _relative(found, scaling), efficiency_picture(found, scaling), efficiency_table(found)
            ),
            Section(
                "Where the time goes",
                "Medians in milliseconds; the parts of a step add up to it.",
                breakdown_picture(found),
                _table(BREAKDOWN, found),
            ),
        ]
    if bandwidths:
        text = "float32, summed by the process group itself, without fastsync: what the link gives."
        by_size = sorted(bandwidths, key=lambda point: (point.num_bytes, point.world_size))
        table = _table(BANDWIDTHS, by_size)
        sections.append(Section("The bare all_reduce", text, bandwidth_picture(bandwidths), table))
    unused = "strong efficiency" if scaling == "weak" else "weak efficiency"
    return Document(
        title=_title(settings, scaling),
        summary=list(_summary(records, found, scaling)) or ["Nothing was measured."],
        sections=sections,
        definitions={word: meaning for word, meaning in DEFINITIONS.items() if word != unused},
        environment=_environment(records),
        command=command,
        notes=[*notes, *_caveats(found)],
    )


def efficiency_table(found: Sequence[Point]) -> Table:
    """A row for each way and world size."""
    base = baseline(found)
    columns: dict[str, Callable[[Point], str]] = {
        "way": lambda point: point.way,
        "ranks": lambda point: point.ranks,
        "step, ms": lambda point: milliseconds(point.step),
        "interval, ms": lambda point: interval(point.step_low, point.step_high, 1e3),
        "efficiency": lambda point: f"{point.efficiency:.1%}",
        "interval": lambda point: _sureness(point, base),
        "launches": lambda point: str(point.launches),
    }
    return _table(columns, found)


def _sureness(point: Point, base: Point) -> str:
    if point is base:
        return "reference"
    return interval(point.efficiency_low, point.efficiency_high, 100, "%")


BREAKDOWN: dict[str, Callable[[Point], str]] = {
    "way": lambda point: point.way,
    "ranks": lambda point: point.ranks,
    "step": lambda point: milliseconds(point.step),
    "compute": lambda point: milliseconds(point.compute),
    "contention": lambda point: milliseconds(point.contention) or "not known",
    "stragglers": lambda point: milliseconds(point.stragglers),
    "exposed": lambda point: cost(point.exposed),
    "exposed, of the step": lambda point: multiple(point.exposed / point.step, ".0%"),
}
BANDWIDTHS: dict[str, Callable[[Bandwidth], str]] = {
    "bytes": lambda point: format_bytes(point.num_bytes),
    "ranks": lambda point: point.ranks,
    "time, ms": lambda point: milliseconds(point.seconds),
    "algbw, GB/s": lambda point: f"{point.algbw / 1e9:.3g}",
    "busbw, GB/s": lambda point: f"{point.busbw / 1e9:.3g}",
    "interval": lambda point: interval(point.busbw_low / 1e9, point.busbw_high / 1e9, form=".3g"),
}


def _table(columns: Mapping[str, Callable[[Any], str]], found: Iterable[Any]) -> Table:
    """A row for each point."""
    return Table(tuple(columns), [tuple(cell(point) for cell in columns.values()) for point in found])


def interval(low: float, high: float, factor: float = 1.0, unit: str = "", form: str = ".3f") -> str:
    """As text; "not known" where one sample has to do."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "not known"
    form = ".1f" if unit == "%" else form
    return f"[{low * factor:{form}}{unit}, {high * factor:{form}}{unit}]"


def _title(settings: Mapping[str, Any], scaling: str) -> str:
    if not settings:
        return "Scaling"
    batch = "a rank" if scaling == "weak" else "in all"
    number = settings["batch_size"] * (1 if scaling == "weak" else settings["world_size"])
    scale = f" ({settings['scale']})" if "scale" in settings else ""
    return f"{scaling.capitalize()} scaling of {settings['model']}{scale}, {number} samples {batch}"


def _summary(records: Sequence[Record], found: Sequence[Point], scaling: str) -> Iterator[str]:
    for way in dict.fromkeys(point.way for point in found):
        last = [point for point in found if point.way == way][-1]
        exposed = f"{last.exposed * 1e3:.1f} of them exposed communication"
        if last.exposed < 0:
            exposed = f"exposed communication {WITHIN_NOISE}"
        yield (
            f"{way} on {last.ranks}: {last.step * 1e3:.1f} ms a step, {exposed}; "
            f"{last.efficiency:.1%} {scaling} efficiency ({_sureness(last, baseline(found))})."
        )
    measuring = overhead(records)
    if measuring is not None:
        yield f"Measuring itself costs {measuring * 1e6:.1f} µs a step (an empty step, timed the same way)."


def _relative(found: Sequence[Point], scaling: str) -> str:
    base = baseline(found)
    return f"{scaling.capitalize()} efficiency, relative to {base.way} on {base.ranks}, with intervals."


def _caveats(found: Sequence[Point]) -> Iterator[str]:
    if any(point.oversubscribed for point in found):
        yield f"oversubscribed: {DEFINITIONS['oversubscribed'][0].lower()}{DEFINITIONS['oversubscribed'][1:]}"
    launches = min((point.launches for point in found), default=SURE_FROM)
    if launches == 1:
        yield (
            "one launch of a world size: intervals are over its steps and do not show how launches differ; "
            "use --repetitions"
        )
    elif launches < SURE_FROM:
        yield (
            f"{launches} launches of a world size: the interval of a step is their whole range, which holds the median "
            f"with a probability of {range_holds_median(launches):.0%}, and that of an efficiency held the true one in "
            f"{RATIO_HOLDS[launches]:.0%} of simulated cases; with {SURE_FROM} launches those are "
            f"{range_holds_median(SURE_FROM):.0%} and {RATIO_HOLDS[SURE_FROM]:.0%}"
        )


def _environment(records: Sequence[Record]) -> dict[str, str]:
    if not records:
        return {}
    settings = [record.settings for record in records]
    facts: dict[str, Any] = {**environment_of(records)}
    facts["backend"] = ", ".join(dict.fromkeys(str(row["backend"]) for row in settings))
    facts["machines"] = max(row.get("nodes", 1) for row in settings)
    for name in ("model", "scale", "numel", "num_tensors", "repetitions", "warmup", "seed"):
        facts[{"repetitions": "steps a launch"}.get(name, name)] = settings[0].get(name)
    return {name: str(value) for name, value in facts.items() if value is not None}
