"""``python -m benchmarks report ROWS.json``: the report of rows that were measured before, by whatever command."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.harness.records import Record, RowFile, read_json
from benchmarks.report.document import Document
from benchmarks.report.folder import ROWS, check_folder, write_report
from benchmarks.report.rows import rows_document
from benchmarks.report.scaling import scaling_document

PROG = "python -m benchmarks report"


@dataclass(frozen=True)
class Options:
    """Write the report of rows that were measured before: rows.json, rows.csv, report.md, pictures and index.html."""

    rows: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ROWS.json")]
    """What a command has written with --json, or the rows.json of another report."""
    report: Path = Path("report")
    """Folder to write."""


def main(arguments: Sequence[str]) -> int:
    """Writes the report.

    Returns:
        The exit status: 0, or 2 for rows that cannot be read or shown together, and folders that hold another report.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    try:
        check_folder(options.report)
        if not options.rows.is_file():
            raise ValueError(f"{options.rows}: there is no such file")
        records = read_json(options.rows)
        document = _document(records, options.rows, shlex.join(["python", "-m", "benchmarks", "report", *arguments]))
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    options.report.mkdir(parents=True, exist_ok=True)
    RowFile(options.report / ROWS).add(records)
    write_report(options.report, document, records)
    print(f"Report: {options.report / 'index.html'}")
    return 0


def _document(records: Sequence[Record], path: Path, command: str) -> Document:
    if {record.benchmark for record in records} == {"scaling"}:
        return scaling_document(records, command)
    return rows_document(records, f"Benchmarks of {path.stem}", command)
