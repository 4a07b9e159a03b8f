"""What a run shows while it goes on, and the table at its end."""

from __future__ import annotations

import math
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fastsync.ppo.metrics import TrainResult, mean

NUM_LINES = 20


class ProgressDisplay:
    """A progress bar with ETA on a terminal; elsewhere a line for every twentieth of the run."""

    def __init__(self, console: Console, *, title: str, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._next_line = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("return {task.fields[mean_return]}"),
            TextColumn("{task.fields[steps_per_second]} steps/s"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=total_steps, mean_return="-", steps_per_second="-")

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, step: int, seconds: float, mean_return: float) -> None:
        """Shows that ``step`` environment steps are done after ``seconds``."""
        return_text = "-" if math.isnan(mean_return) else f"{mean_return:.1f}"
        speed = f"{step / seconds:,.0f}"
        self._bar.update(
            self._task, completed=min(step, self._total_steps), mean_return=return_text, steps_per_second=speed
        )
        if self._bar.disable and step >= self._next_line:
            eta = max(0, self._total_steps - step) * seconds / step
            self._console.print(
                f"step {step:>9,} of {self._total_steps:,}  return {return_text:>6}  {speed} steps/s  ETA {eta:.0f} s",
                highlight=False,
            )
            self._next_line = step + self._total_steps // NUM_LINES


def result_table(result: TrainResult, *, title: str, folder: str) -> Table:
    """The figures of a finished run."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    episodes = len(result.returns)
    table.add_row(
        "return",
        f"{mean(result.returns):.1f}, mean of the last {episodes} episodes" if episodes else "no episode ended",
    )
    table.add_row("environment steps", f"{result.step:,} in {result.seconds:.1f} s")
    table.add_row("steps per second", f"{result.step / result.seconds:,.0f}")
    table.add_row("time in synchronisation, with waiting for other ranks", _share(result.sync.seconds, result.seconds))
    table.add_row("  not hidden by backward", _share(result.sync.exposed_seconds, result.seconds))
    table.add_row("bytes on the wire, per rank", _bytes(result.sync.wire_bytes))
    table.add_row("written to", folder)
    return table


def _share(part: float | None, whole: float) -> str:
    return "not measured" if part is None else f"{part / whole:.1%}"


def _bytes(count: float | None) -> str:
    if count is None:
        return "not measured"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
