"""Rows of any benchmark as a document: a table for each benchmark, and where they were measured."""

from collections.abc import Sequence

from benchmarks.harness.records import Record
from benchmarks.report.page import Document, Section
from benchmarks.report.table import grouped_by, make_table, spread, told_apart


def rows_document(records: Sequence[Record], title: str, command: str) -> Document:
    """Says what the rows say, of whatever benchmark they are."""
    names = dict.fromkeys(record.benchmark for record in records)
    return Document(
        title=title,
        summary=[f"{len(records)} rows of {', '.join(names) or 'no benchmark'}."],
        sections=[_section(rows) for rows in grouped_by(records, lambda record: record.benchmark)],
        kind="rows",
        environment=environment_of(records),
        command=command,
        notes=wrong_ones(records),
    )


def wrong_ones(records: Sequence[Record]) -> list[str]:
    """Names the rows whose result was wrong."""
    return [f"WRONG: {record.way} at {dict(record.settings)}" for record in records if not record.correct]


def environment_of(records: Sequence[Record]) -> dict[str, str]:
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


def _section(records: Sequence[Record]) -> Section:
    columns = {
        "way": lambda record: record.way,
        "settings": lambda record: told_apart(record, records),
        "median [p10, p90], ms": lambda record: spread(record.quantiles),
        "samples": lambda record: str(len(record.samples)),
        "result": lambda record: "right" if record.correct else "WRONG",
    }
    first = records[0].settings
    same = [name for name in first if all(record.settings.get(name) == first[name] for record in records)]
    text = f"All rows: {', '.join(f'{name} {first[name]}' for name in same)}." if same else ""
    return Section(records[0].benchmark, make_table(columns, records), text)
