"""Rows of any benchmark as a document: a table for each benchmark, and where they were measured."""

from collections.abc import Sequence

from benchmarks.harness.records import Record
from benchmarks.harness.statistics import CONFIDENCE, SAMPLES_ARE_LAUNCHES, noise_band
from benchmarks.report.document import Document, Section, Table
from benchmarks.report.table import grouped_by, share, spread, told_apart

DEFINITIONS = {
    "median [p10, p90]": "Of a row's samples, in milliseconds: half of them are below the median, a tenth below p10, "
    "nine tenths below p90.",
    "noise": f"How far the median of as many samples more may lie from this one by chance, with {CONFIDENCE:.0%} "
    "(bootstrap). Within the launch: samples of the same processes. Another launch may differ by more, and by how much "
    "one launch cannot tell; compare takes several.",
    "result": "Whether what was timed gave the right result. What was wrong before it was timed has no samples.",
    "oversubscribed": "More ranks than a machine has cores or GPUs: they share them.",
}


def rows_document(records: Sequence[Record], title: str, command: str) -> Document:
    """Says what the rows say, of whatever benchmark they are."""
    names = dict.fromkeys(record.benchmark for record in records)
    sections = [_section(rows) for rows in grouped_by(records, lambda record: record.benchmark)]
    wrong = [f"WRONG: {record.way} at {dict(record.settings)}" for record in records if not record.correct]
    return Document(
        title=title,
        summary=[f"{len(records)} rows of {', '.join(names) or 'no benchmark'}."],
        sections=sections,
        definitions=DEFINITIONS,
        environment=environment_of(records),
        command=command,
        notes=wrong,
    )


def environment_of(records: Sequence[Record]) -> dict[str, str]:
    """Describes where they were measured: what is not the same for all is given as a list."""
    names = dict.fromkeys(name for record in records for name in record.environment)
    found = {name: dict.fromkeys(record.environment.get(name) for record in records) for name in names}
    return {
        name: " … ".join((str(min(map(str, values))), str(max(map(str, values)))))
        if name == "time" and len(values) > 1
        else ", ".join(str(value) for value in values if value is not None)
        for name, values in found.items()
        if any(value is not None for value in values)
    }


def _section(records: Sequence[Record]) -> Section:
    name = records[0].benchmark
    rows = [
        (
            record.way,
            told_apart(record, records),
            spread(record.quantiles),
            share(noise_band(record.samples)),
            str(len(record.samples)),
            "right" if record.correct else "WRONG",
        )
        for record in records
    ]
    noise = "noise between launches" if name in SAMPLES_ARE_LAUNCHES else "noise within the launch"
    headings = ("way", "settings", "median [p10, p90], ms", noise, "samples", "result")
    same = set.intersection(*({(key, str(value)) for key, value in record.settings.items()} for record in records))
    order = [key for key in records[0].settings if (key, str(records[0].settings[key])) in same]
    text = ", ".join(f"{key} {records[0].settings[key]}" for key in order)
    return Section(name, f"All rows: {text}." if text else "", table=Table(headings, rows))
