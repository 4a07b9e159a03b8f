"""Running a benchmark on ranks, so that whatever ends it, the rows it has are kept and no process is left."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from benchmarks.records import Record, RowFile
from fastsync.ranks import launch_ranks

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it: 128 and the signal's number."""


@dataclass(frozen=True)
class Collected:
    records: list[Record]
    notes: list[str]
    """What stands below the tables."""
    status: int
    """Exit status: 0, 1 if a result is wrong or a rank has failed, 130 after Ctrl-C."""


def collect(measure: Callable[[Any, RowFile], list[str]], nproc: int, options: Any, json: Path | None) -> Collected:
    """Calls ``measure(options, rows)`` on ``nproc`` ranks and returns the rows that rank 0 has added, and its notes.

    Args:
        measure: a function at the top level of a module. It returns notes.
        nproc: number of ranks on this machine.
        options: of the command.
        json: the file to keep the rows in, if they are to stay.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = RowFile(json or Path(folder) / "rows.json")
        try:
            notes, status = launch_ranks(measure, nproc, options, rows)[0], 0
        except ChildFailedError as error:
            # The launcher has logged the whole traceback already.
            notes, status = [f"rank {error.get_first_failure()[0]} failed first; rows measured before are shown"], 1
        except (SignalException, KeyboardInterrupt):
            notes, status = ["interrupted; rows measured before are shown"], INTERRUPTED
        records = rows.read()
    wrong = [f"WRONG: {record.way} at {record.settings}" for record in records if not record.correct]
    return Collected(records, [*notes, *wrong], status or int(bool(wrong)))
