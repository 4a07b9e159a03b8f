"""Progress on standard error, from the first second on, and a time limit on each step."""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

T = TypeVar("T")
DRAWN_EVERY = 1.0
"""Seconds, at least, between two drawings of a bar: they would disturb what is measured."""
SAID_EVERY = 5.0
"""Seconds, at least, between two lines about the same work where there are no bars."""


def announce(what: str) -> None:
    """Says at once what begins, such as ranks that take seconds to start."""
    print(what, file=sys.stderr, flush=True)


def progress_bars(shown: bool) -> Progress:
    """Bars that are drawn only when something advances: a thread that draws would disturb what is measured.

    Where standard error is no terminal, they are lines.
    """
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return Lines(console=console, auto_refresh=False, disable=not shown)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, auto_refresh=False, disable=not shown)


class Lines(Progress):
    """Lines for files and pipes, where rich draws nothing before the end: what runs now, and how much is done."""

    def __init__(self, **options: Any) -> None:
        self._said: dict[TaskID, tuple[str, float, float]] = {}
        super().__init__(**options)

    def start(self) -> None:
        """Nothing is drawn that would have to be begun, or drawn a last time by ``stop``."""

    def stop(self) -> None: ...

    def refresh(self) -> None:
        """A line for each task that is new or done, has another name, or has gone on for some seconds."""
        for task in () if self.disable else self.tasks:
            now, (name, done, since) = time.monotonic(), self._said.get(task.id, ("", 0.0, 0.0))
            has_gone_on = task.completed != done and (task.finished or now - since >= SAID_EVERY)
            if task.description != name or has_gone_on:
                self._said[task.id] = task.description, task.completed, now
                announce(f"[{task.completed:.0f} of {task.total or 0:.0f}] {task.description}")


def named(progress: Progress, items: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
    """The items one after the other, with the name of the one that is at work, and how many are done."""
    task = progress.add_task(name(items[0]), total=len(items))
    for done, item in enumerate(items):
        progress.update(task, description=name(item), completed=done, refresh=True)
        yield item
    progress.update(task, completed=len(items), refresh=True)


def watched_rounds(rounds: Sequence[Sequence[T]], progress: Progress, description: str, timeout: float) -> Iterator[T]:
    """The items of all rounds, with progress shown, and a time limit on each item.

    Not every wait inside of a hook has one.
    """
    task, drawn = progress.add_task(description, total=sum(map(len, rounds))), time.monotonic()
    for items in rounds:
        for item in items:
            faulthandler.dump_traceback_later(timeout, exit=True)
            yield item
            is_due = time.monotonic() - drawn >= DRAWN_EVERY
            progress.update(task, advance=1, refresh=is_due)
            drawn = time.monotonic() if is_due else drawn
    faulthandler.cancel_dump_traceback_later()
    progress.refresh()
