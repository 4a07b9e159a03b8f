"""Makes a document of what a scaling run found."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.records import Record
from benchmarks.harness.statistics import RATIO_HOLDS, SURE_FROM
from benchmarks.report.efficiency import Point, overhead, points, reference
from benchmarks.report.page import Document, Section
from benchmarks.report.table import WITHIN_NOISE, cost, ends, make_table, milliseconds, multiple


def scaling_document(records: Sequence[Record], command: str, notes: Sequence[str] = ()) -> Document:
    """Says what rows of ``python -m benchmarks scaling`` say; of one mode, model and batch. There may be none.

    Raises:
        ValueError: the rows are of several.
    """
    from benchmarks.report.pictures import breakdown_picture, efficiency_picture  # slow to import

    found = points(records)
    settings = next((record.settings for record in records if "model" in record.settings), {})
    scaling = settings.get("scaling", "weak")
    sections = []
    if found:
        relative = f"{scaling.capitalize()} efficiency, relative to {reference(records)[0]}, with intervals."
        parts = "Medians in milliseconds; the parts of a step add up to it."
        sections += [
            Section("Efficiency", make_table(EFFICIENCY, found), relative, efficiency_picture(found, scaling)),
            Section("Where the time goes", make_table(BREAKDOWN, found), parts, breakdown_picture(found)),
        ]
    return Document(
        title=_title(settings, scaling),
        summary=list(_summary(records, found, scaling)) or ["Nothing was measured."],
        sections=sections,
        kind=scaling,
        environment=_environment(records) | _job(records, settings),
        command=command,
        notes=[*notes, *_wrong_ones(records), *_caveats(found)],
    )


EFFICIENCY: Mapping[str, Callable[[Point], str]] = {
    "method": lambda point: point.method,
    "ranks": lambda point: point.ranks,
    "step, ms": lambda point: milliseconds(point.step.value),
    "interval, ms": lambda point: ends(point.step, 1e3),
    "efficiency": lambda point: f"{point.efficiency.value:.1%}",
    "interval": lambda point: ends(point.efficiency, 100, ".1f", "%"),
    "launches": lambda point: str(point.launches),
}
BREAKDOWN: Mapping[str, Callable[[Point], str]] = {
    "method": lambda point: point.method,
    "ranks": lambda point: point.ranks,
    "step": lambda point: milliseconds(point.step.value),
    "compute": lambda point: milliseconds(point.compute),
    "contention": lambda point: milliseconds(point.contention) or "not known",
    "stragglers": lambda point: milliseconds(point.stragglers),
    "exposed": lambda point: cost(point.exposed),
    "exposed, of the step": lambda point: multiple(point.exposed / point.step.value, ".0%"),
}


def _title(settings: Mapping[str, Any], scaling: str) -> str:
    if not settings:
        return "Scaling"
    batch = "a rank" if scaling == "weak" else "in all"
    number = settings["batch_size"] * (1 if scaling == "weak" else settings["world_size"])
    scale = f" ({settings['scale']})" if "scale" in settings else ""
    return f"{scaling.capitalize()} scaling of {settings['model']}{scale}, {number} samples {batch}"


def _summary(records: Sequence[Record], found: Sequence[Point], scaling: str) -> Iterator[str]:
    largest = {point.method: point for point in found}  # of each method the last one stays
    if largest:
        name, seconds = reference(records)
        best = min(largest.values(), key=lambda point: (-point.world_size, point.step.value))
        yield (
            f"{best.step.value * 1e3:.1f} ms a step on {best.ranks} with {best.method}, the fastest there; "
            f"{name} takes {seconds * 1e3:.1f} ms."
        )
    for method, last in largest.items():
        exposed = f"{last.exposed * 1e3:.1f} of them exposed communication"
        if last.exposed < 0:
            exposed = f"exposed communication {WITHIN_NOISE}"
        yield (
            f"{method} on {last.ranks}: {last.step.value * 1e3:.1f} ms a step, {exposed}; "
            f"{last.efficiency.value:.1%} {scaling} efficiency, interval {EFFICIENCY['interval'](last)}."
        )
    measuring = overhead(records)
    if measuring is not None:
        yield f"Measuring itself costs {measuring * 1e6:.1f} µs a step (an empty step, timed as the others)."


def _caveats(found: Sequence[Point]) -> Iterator[str]:
    if any(point.oversubscribed for point in found):
        yield "oversubscribed: more ranks than a machine has cores or GPUs; the figures say nothing about more hardware"
    launches = min((point.launches for point in found), default=SURE_FROM)
    if launches == 1:
        yield "one launch of a world size: intervals are over its steps and do not show how launches differ"
    elif launches < SURE_FROM:
        yield (
            f"{launches} launches of a world size: a step's interval is their whole range; an efficiency's held the "
            f"true one in {RATIO_HOLDS[launches]:.0%} of simulated cases; take {SURE_FROM} for 95 %"
        )


def _job(records: Sequence[Record], settings: Mapping[str, Any]) -> dict[str, str]:
    """What was trained, how often and on how many machines."""
    names = ("backend", "model", "scale", "numel", "num_tensors", "repetitions", "warmup")
    facts = {name: str(settings[name]) for name in names if name in settings}
    machines = max((record.settings.get("nodes", 1) for record in records), default=1)
    return facts | {"machines": str(machines)}


def _wrong_ones(records: Sequence[Record]) -> list[str]:
    """Names the rows whose result was wrong."""
    return [f"WRONG: {record.method} at {dict(record.settings)}" for record in records if not record.correct]


def _environment(records: Sequence[Record]) -> dict[str, str]:
    """Describes where they were measured: what is not the same for all is given as a list."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in record.environment.items():
            if value is not None:
                found.setdefault(name, {})[str(value)] = None
    texts = {name: ", ".join(values) for name, values in found.items()}
    if len(times := found.get("time", {})) > 1:
        texts["time"] = f"{min(times)} … {max(times)}"
    return texts
