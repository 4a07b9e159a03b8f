"""The console: a live panel in a terminal, lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...messages import format_bytes
from .figures import duration, format_return, format_share, labelled_metrics, packed
from .metrics import PHASES, TrainResult, mean
from .panel import RunPanel

LINES = 20
"""Number of lines of progress in a run, if it is short."""
LINE_SECONDS = 30.0
"""The most seconds between two lines of progress, unless an update takes longer."""

HINTS = {"eval": "plays episodes with the policy", "plot": "draws the learning curve"}


class RunConsole:
    """Prints the progress of a run. Steps are those of all ranks.

    In a terminal it draws a panel. Elsewhere, and in a terminal that cannot move its cursor, it prints a line for every
    twentieth of the run, and every 30 seconds.

    Args:
        title: what trains.
        total_steps: steps of the run.
        first_step: steps that are done already.
        world_size: number of ranks.
        quiet: print warnings only.
    """

    def __init__(
        self, title: str, total_steps: int, first_step: int, world_size: int, *, quiet: bool = False
    ) -> None:  # fmt: skip
        self._console = _Terminal()
        self._title, self._total_steps, self._world_size, self._quiet = title, total_steps, world_size, quiet
        self._next_step, self._next_time = first_step, -math.inf
        self._seconds = defaultdict[str, float](float)  # sums over the updates, by the names in the logs
        self._last: tuple[int, Mapping[str, float]] | None = None  # the last update
        self._evaluations: list[str] = []  # the newest and the best, in words
        self._panel: RunPanel | None = None
        if not quiet and has_panel(self._console):
            self._panel = RunPanel(self._console, title, total_steps, world_size)

    def use_ranks(self, title: str, world_size: int) -> None:
        """Goes on with another number of ranks."""
        self._title, self._world_size = title, world_size
        if self._panel is not None:
            self._panel.use_ranks(title, world_size)

    def say(self, text: str) -> None:
        """Prints a sentence."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Prints a sentence, even if the console is quiet."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the metrics of an update. It draws the panel, or prints a line, if that is due. Times are printed as
        shares since the start.

        Metrics of the user's own loss, and those of --log-info, come last, under their own names.
        """
        self.add_seconds(scalars)
        self._last = step, scalars
        if self._panel is not None:
            self._panel.update(step, scalars, self._seconds, self._evaluations)
            return
        now = time.monotonic()
        if self._quiet or (step < self._next_step and now < self._next_time):
            return
        self._next_step, self._next_time = step + self._total_steps // LINES, now + LINE_SECONDS
        self.say(self._line(step, scalars))

    def add_seconds(self, scalars: Mapping[str, float]) -> None:
        """Adds those that are seconds, such as rank0/evaluation_seconds, to the sums of the table at the end."""
        for name, value in scalars.items():
            if name.endswith("_seconds"):
                self._seconds[name] += value

    def evaluated(self, step: int, scalars: Mapping[str, float], best: float) -> None:
        """Tells the result of an evaluation, and the mean return of the best one so far."""
        mean_return, std = scalars["evaluation/return"], scalars["evaluation/return_std"]
        told = f"{format_return(mean_return)} ± {format_return(std)} at step {step:,}"
        self._evaluations = [told, "the best" if mean_return >= best else f"best {format_return(best)}"]
        if self._panel is None:
            self.say(f"  evaluation {told}, {self._evaluations[1]}")

    def _line(self, step: int, scalars: Mapping[str, float]) -> str:
        figures = (f"{label} {value:.2g}" for label, value in labelled_metrics(scalars))
        phases = zip(("env", "policy", "learn", "comm"), PHASES, strict=False)
        shares = [f"{label} {self._share(phase, digits=0)}" for label, phase in phases if self._is_shown(phase)]
        returned = "-" if math.isnan(scalars["episodes/return"]) else format_return(scalars["episodes/return"])
        speed = scalars["speed/steps_per_second"]
        left = duration(max(0, self._total_steps - step) / speed if speed > 0 else math.inf)
        sent = [f"sent {format_bytes(scalars['speed/wire_bytes'])}/update"] if self._world_size > 1 else []
        total = f"{self._total_steps:,}"
        first = [
            f"step {step:>{len(total)},} of {total}",
            f"return {returned:>6}",
            f"{speed:,.0f} steps/s",
            f"ETA {left}",
        ]
        width = self._console.width
        return "\n".join(packed(first, width) + packed([*figures, " ".join(shares), *sent], width, "  "))

    def finish(self, result: TrainResult, speed: float) -> None:
        """Prints the table of a run that ended; ``speed`` in steps per second since it began or resumed."""
        self._stop_panel()
        if self._quiet:
            return
        table = Table(title=self._title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right", overflow="fold")
        episodes = len(result.returns)
        if result.stopped_by:
            table.add_row("stopped early by", result.stopped_by)
        last_return = f"{format_return(mean(result.returns))}, mean of the last {episodes} episodes"
        table.add_row("return", last_return if episodes else "no episode ended")
        if self._evaluations:
            table.add_row("evaluation", ", ".join(self._evaluations))
        table.add_row("environment steps", f"{result.step:,} in {result.seconds:.1f} s")
        if speed > 0:  # else no step was left to take
            table.add_row("steps per second", f"{speed:,.0f}")
        for phase in filter(self._is_shown, PHASES):
            table.add_row(f"time in {phase}", self._share(phase))
            if phase == "communication":
                for_gradients, others = (self._seconds_of_ranks(part) for part in ("gradients", "communication"))
                rest = mean(others) - mean(for_gradients)
                table.add_row("  for gradients or weights", self._share("gradients"))
                table.add_row("  for everything else", format_share(rest, self._total()))
        if self._world_size > 1:
            waited = self._seconds_of_ranks("waiting")
            table.add_row("slowest rank", str(waited.index(min(waited))))
            table.add_row("communication that waited for it", self._share("waiting"))
            table.add_row("bytes on the wire, per rank", format_bytes(result.sync.wire_bytes))
        self._console.print(table)

    def close(self) -> None:
        """Removes the panel, if the run has not finished. What it showed last stays as a line."""
        if self._stop_panel() and self._last is not None:
            self.say(self._line(*self._last))

    def _stop_panel(self) -> bool:
        """Returns whether there was a panel."""
        panel, self._panel = self._panel, None
        if panel is not None:
            panel.stop()
        return panel is not None

    def _is_shown(self, phase: str) -> bool:
        if phase == "evaluation":
            return bool(self._evaluations)
        return phase != "communication" or self._world_size > 1

    def _seconds_of_ranks(self, phase: str) -> list[float]:
        return [self._seconds[f"rank{rank}/{phase}_seconds"] for rank in range(self._world_size)]

    def _total(self) -> float:
        return math.fsum(mean(self._seconds_of_ranks(phase)) for phase in PHASES)

    def _share(self, phase: str, digits: int = 1) -> str:
        return format_share(mean(self._seconds_of_ranks(phase)), self._total(), digits)


def hints(folder: Path) -> list[str]:
    """Returns commands for what comes after a run, if the trainer's own command has started it, and not a script."""
    command = Path(sys.argv[0])
    if command.name != "fastsync" and command.parts[-2:] != ("fastsync", "train.py"):
        return []
    # As it was typed, in case that it is in an environment that is not activated.
    typed = "fastsync" if command.is_absolute() else sys.argv[0]
    return [f"  {shlex.join([typed, verb, str(folder)])} {does}" for verb, does in HINTS.items()]


class _Terminal(Console):
    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is. A rank that is killed could not show it again."""
        return False


def has_panel(console: Console | None = None) -> bool:
    """Tells whether standard output is a terminal in which a panel can be drawn."""
    return sys.stdout.isatty() and not (console or Console()).is_dumb_terminal
