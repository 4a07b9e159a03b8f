"""Progress on standard error, and a time limit on each step."""

import faulthandler
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


def progress_bars(shown: bool) -> Progress:
    """Bars that are drawn only when something advances: a thread that draws would disturb what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False, disable=not shown)


def watched_rounds(rounds: Sequence[Sequence[T]], progress: Progress, description: str, timeout: float) -> Iterator[T]:
    """The items of all rounds, with progress shown round by round, and a time limit on each item.

    Not every wait inside of a hook has one.
    """
    for items in progress.track(rounds, description=description):
        for item in items:
            faulthandler.dump_traceback_later(timeout, exit=True)
            yield item
    faulthandler.cancel_dump_traceback_later()
