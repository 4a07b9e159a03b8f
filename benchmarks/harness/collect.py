"""Running a benchmark on ranks, so that whatever ends it, the rows it has are kept and no process is left."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from benchmarks.harness.progress import announce
from benchmarks.harness.records import Record, RowFile
from fastsync.launch.signals import handling
from fastsync.launch.torchrun import launch_ranks


class TrainingError(RuntimeError):
    """A training that runs in a process of its own failed, or has not ended in time."""


ENDINGS = (ChildFailedError, TrainingError, SignalException, KeyboardInterrupt)
"""What may end a run before its time."""


def ending(error: BaseException) -> tuple[int, str]:
    """Returns the exit status and a note for one of ``ENDINGS``."""
    if isinstance(error, ChildFailedError):
        return 1, f"rank {error.get_first_failure()[0]} failed first"  # the launcher has logged its traceback
    if isinstance(error, TrainingError):
        return 1, str(error)
    # As a shell has it.
    return 128 + (error.sigval if isinstance(error, SignalException) else signal.SIGINT), "interrupted"


@dataclass(frozen=True)
class Collected:
    records: list[Record]
    notes: list[str]
    """What stands below the tables."""
    status: int
    """Exit status: 0, 1 if a result is wrong or a rank has failed, 130 after Ctrl-C, 143 after SIGTERM."""


def start_ranks(function: Callable[..., Any], nproc: int, *arguments: Any) -> list[Any]:
    """Calls a function on ranks of this machine, and says so before they start, which takes seconds."""
    announce(f"starting {nproc} rank{'s' if nproc > 1 else ''}")
    return launch_ranks(function, nproc, *arguments)


def collect(
    measure: Callable[[Any, RowFile], list[str]],
    nproc: int,
    options: Any,
    json: Path | None,
    launch: Callable[..., list[Any]] = start_ranks,
) -> Collected:
    """Calls ``measure(options, rows)`` on ``nproc`` ranks and returns the rows that rank 0 has added, and its notes.

    ``json`` is the file to keep the rows in, if they are to stay. ``launch`` starts ranks as ``launch_ranks`` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = RowFile(json or Path(folder) / "rows.json")
        rows.add([])  # or those of an earlier run would be shown where this one ends before it has any
        try:
            notes, status = launch(measure, nproc, options, rows)[0], 0
        except ENDINGS as error:
            status, note = ending(error)
            notes = [f"{note}; rows measured before are shown"]
        records = rows.read()
    wrong = [f"WRONG: {record.method} at {record.settings}" for record in records if not record.correct]
    return Collected(records, [*notes, *wrong], status or int(bool(wrong)))


@contextmanager
def termination_raises() -> Iterator[None]:
    """Makes signals that would end this process at once a SignalException, so that it can tidy up."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number)
        raise SignalException(f"ended by {name.name}", sigval=name)

    with handling(stop, (signal.SIGTERM, signal.SIGHUP)):
        yield
