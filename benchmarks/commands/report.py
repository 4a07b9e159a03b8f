"""``python -m benchmarks report ROWS.json ...``: one report of several runs of ``scaling``."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.harness.records import RowFile, read_json
from benchmarks.report.page import ROWS, check_folder, write_page
from benchmarks.report.scaling import scaling_document

PROG = "python -m benchmarks report"


@dataclass(frozen=True)
class Options:
    """Write one report of several runs of scaling: rows.json, pictures, and index.html."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ROWS.json")]
    """Of their reports."""
    report: Path = Path("report")
    """Folder to write."""


def main(arguments: Sequence[str]) -> int:
    """Writes the report.

    Returns:
        The exit status: 0, or 2 for rows that cannot be read or shown together, and folders that hold another report.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    command = shlex.join(["python", "-m", "benchmarks", "report", *arguments])
    try:
        check_folder(options.report)
        records = [record for path in options.rows for record in read_json(path)]
        document = scaling_document(records, command)
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    options.report.mkdir(parents=True, exist_ok=True)
    RowFile(options.report / ROWS).add(records)
    write_page(options.report, document)
    print(f"Report: {options.report / 'index.html'}")
    return 0
