"""Running a benchmark on ranks, so that whatever ends it, the rows it has are kept and no process is left."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from benchmarks.cores import cores
from benchmarks.records import Record, RowFile
from fastsync.launch.torchrun import launch_ranks

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as a shell has it: 128 and the signal's number."""


class RankError(RuntimeError):
    """A rank raised, or died. What it said is on standard error already."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} failed first")
        self.rank = rank


@dataclass(frozen=True)
class Collected:
    records: list[Record]
    notes: list[str]
    """What stands below the tables."""
    status: int
    """Exit status: 0, 1 if a result is wrong or a rank has failed, 130 after Ctrl-C, 143 after SIGTERM."""


def places(nproc: int, cpu: bool = False, share_gpus: bool = False) -> int:
    """How many ranks find a place of their own on this machine where ``nproc`` are to run.

    GPUs if there is one for each or they may be shared, and cores otherwise, as
    ``fastsync.distributed.process_group`` chooses.
    """
    gpus = 0 if cpu else torch.cuda.device_count()
    return gpus if nproc <= gpus or (share_gpus and gpus) else cores()


def check_places(nproc: int, oversubscribe: bool, cpu: bool = False, share_gpus: bool = False) -> None:
    """Refuses more ranks than find a place, unless they may share.

    Raises:
        ValueError: they would share, and may not, or there is no GPU to share.
    """
    if share_gpus and (cpu or torch.cuda.device_count() == 0):
        raise ValueError("share_gpus: torch sees no GPU here, or may not take one: leave it out")
    if nproc > places(nproc, cpu, share_gpus) and not (oversubscribe or share_gpus):
        raise ValueError(
            f"nproc={nproc}: this machine has {cores()} cores, and GPUs for {torch.cuda.device_count()} ranks; "
            "ranks that share one slow each other down: choose fewer, or --oversubscribe, which every table then says"
        )


def collect(
    measure: Callable[[Any, RowFile], list[str]],
    nproc: int,
    options: Any,
    json: Path | None,
    launch: Callable[..., list[Any]] = launch_ranks,
) -> Collected:
    """Calls ``measure(options, rows)`` on ``nproc`` ranks and returns the rows that rank 0 has added, and its notes.

    Args:
        measure: a function at the top level of a module. It returns notes.
        nproc: number of ranks on this machine.
        options: of the command.
        json: the file to keep the rows in, if they are to stay.
        launch: starts the ranks and returns their results, with the signature of ``launch_ranks`` and its errors, or
            RankError for the first of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = RowFile(json or Path(folder) / "rows.json")
        rows.add([])  # or those of an earlier run would be shown where this one ends before it has any
        try:
            notes, status = launch(measure, nproc, options, rows)[0], 0
        except (ChildFailedError, RankError) as error:
            # The launcher has logged the whole traceback already.
            rank = error.rank if isinstance(error, RankError) else error.get_first_failure()[0]
            notes, status = [f"rank {rank} failed first; rows measured before are shown"], 1
        except SignalException as error:
            notes, status = ["interrupted; rows measured before are shown"], 128 + error.sigval
        except KeyboardInterrupt:
            notes, status = ["interrupted; rows measured before are shown"], INTERRUPTED
        records = rows.read()
    wrong = [f"WRONG: {record.way} at {record.settings}" for record in records if not record.correct]
    return Collected(records, [*notes, *wrong], status or int(bool(wrong)))


@contextmanager
def termination_raises() -> Iterator[None]:
    """Makes signals that would end this process at once a SignalException, so that it can tidy up."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number)
        raise SignalException(f"ended by {name.name}", sigval=name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
