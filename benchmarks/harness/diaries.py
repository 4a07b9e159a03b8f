"""What ranks begin and end, in files that outlive them; and what a rank's death has cost, as these files tell.

All times are those of ``CLOCK_MONOTONIC``, which is one clock for all processes of a machine.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["begin", "end", "drop"]


class Event(NamedTuple):
    """A line of a diary."""

    time: float
    """Seconds."""
    kind: Kind
    """A step begins; it has ended, and counts; or its gradients are thrown away."""
    step: int
    ranks: int = 0
    """How many have averaged the gradients. These are known at the end."""
    loss: float = 0.0
    digest: int = 0
    """Of the parameters after the step."""


class Author(NamedTuple):
    rank: int
    """Its place as the training began. A process that was started in place of another may have the same."""
    pid: int


Diaries = Mapping[Author, Sequence[Event]]


class Diary:
    """Writes the events of a process. A line is in the file as soon as it is written, however the process ends."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self._file = (folder / f"{rank}.{os.getpid()}.diary").open("w", buffering=1, encoding="utf-8")

    def begin(self, step: int) -> None:
        self._write(Event(time.monotonic(), "begin", step))

    def end(self, step: int, ranks: int, loss: float, digest: Callable[[], int]) -> None:
        self._write(Event(time.monotonic(), "end", step, ranks, loss, digest()))

    def drop(self, step: int) -> None:
        self._write(Event(time.monotonic(), "drop", step))

    def _write(self, event: Event) -> None:
        self._file.write(" ".join(map(repr, event)).replace("'", "") + "\n")


def read_diaries(folder: Path) -> dict[Author, list[Event]]:
    """All diaries in a folder. A line that is not whole yet is left out."""
    diaries = {}
    for file in sorted(folder.glob("*.diary")):
        rank, pid, _ = file.name.split(".")
        whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
        diaries[Author(int(rank), int(pid))] = [_event(line) for line in whole.splitlines()]
    return diaries


def _event(line: str) -> Event:
    moment, kind, step, ranks, loss, digest = line.split()
    return Event(float(moment), kind, int(step), int(ranks), float(loss), int(digest))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Kill:
    time: float
    victim: Author
    before: frozenset[Author]
    """All that had a diary then."""


@dataclass(frozen=True)
class Recovery:
    """What a death has cost."""

    seconds: float
    """From the kill until the last rank has ended its first step without the lost one."""
    repeated: int
    """Steps that a rank has begun more than once."""
    dropped: int
    """Steps whose gradients were thrown away."""
    step: float
    """Median time from one end of a step to the next before the kill, in seconds."""
    correct: bool
    """Whether all that were left had bitwise equal parameters after each step."""


def recovery(diaries: Diaries, kill: Kill, num_ranks: int, restarts: bool) -> Recovery | None:
    """What the kill has cost; None if not all ranks have recovered yet.

    A step counts as the first one if none of the others had ended it before the kill, and if the lost rank had no part
    in it: it was taken by fewer ranks than before, or by processes that were started anew.

    Args:
        diaries: of all processes.
        kill: the only one so far.
        num_ranks: before the kill.
        restarts: whether all ranks are started again, rather than go on.
    """
    left = {author: events for author, events in diaries.items() if author != kill.victim}
    ended = [event.step for events in left.values() for event in events if _is_end(event) and event.time < kill.time]
    firsts = [
        first
        for author, events in left.items()
        if (first := _first_without(events, kill, author not in kill.before, num_ranks, max(ended, default=-1)))
    ]
    if len(firsts) < (num_ranks if restarts else num_ranks - 1):
        return None
    until = max(firsts)
    begun = Counter(
        (author.rank, event.step)
        for author, events in left.items()
        for event in events
        if event.kind == "begin" and event.time <= until
    )
    again = Counter(rank for (rank, _), times in begun.items() if times > 1)
    dropped = [sum(e.kind == "drop" and kill.time < e.time <= until for e in events) for events in left.values()]
    return Recovery(
        seconds=until - kill.time,
        repeated=max(again.values(), default=0),
        dropped=max(dropped, default=0),
        step=_step_before(diaries[kill.victim]),
        correct=are_equal(left),
    )


def _is_end(event: Event) -> bool:
    return event.kind == "end"


def _first_without(events: Sequence[Event], kill: Kill, is_new: bool, num_ranks: int, ended: int) -> float | None:
    """When a rank has ended its first step without the lost one; None if it has not yet."""
    for event in events:
        is_without = is_new or event.ranks < num_ranks
        if _is_end(event) and event.time > kill.time and event.step > ended and is_without:
            return event.time
    return None


def _step_before(events: Sequence[Event]) -> float:
    return float(np.median(np.diff([event.time for event in events if _is_end(event)])))


def are_equal(diaries: Diaries) -> bool:
    """Whether all that have ended a step had the same parameters after it."""
    digests: dict[int, set[int]] = {}
    for events in diaries.values():
        for event in filter(_is_end, events):
            digests.setdefault(event.step, set()).add(event.digest)
    return all(len(each) == 1 for each in digests.values())
