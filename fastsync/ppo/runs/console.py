"""The console: a line now and then while a run goes on, and the table at its end."""

from __future__ import annotations

import math
from dataclasses import astuple
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from ..._checks import format_bytes
from .metrics import PHASES, PhaseTimes, Status, TrainResult, mean, waiting

NUM_LINES = 20
LABELS = {"policy_loss": "policy loss", "value_loss": "value loss", "approx_kl": "KL", "entropy": "entropy"}


class RunConsole:
    """Shows where a run stands, by a line for every twentieth of it.

    Args:
        title: of the run.
        total_steps: of the environments, over all ranks.
        first_step: where the run goes on.
        world_size: the number of ranks.
    """

    def __init__(self, title: str, total_steps: int, first_step: int, world_size: int) -> None:
        self._console = Console()
        self._title, self._total_steps = title, total_steps
        self._first_step = self._next_line = first_step
        self._first_seconds: float | None = None
        self._times = [PhaseTimes()] * world_size  # of each rank so far
        self._waited = [0.0] * world_size

    def say(self, text: str) -> None:
        """Prints a sentence."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def update(self, status: Status) -> None:
        """Takes in a new status, and shows it if a line is due. Times are shares since the start, see PhaseTimes."""
        self._times = [sum_ + each.times for sum_, each in zip(self._times, status.reports, strict=True)]
        self._waited = [sum_ + new for sum_, new in zip(self._waited, waiting(status.reports), strict=True)]
        if status.step < self._next_line:
            return
        self._next_line = status.step + self._total_steps // NUM_LINES
        scalars = status.scalars
        figures = (f"{LABELS[name]} {scalars.get(f'learning/{name}', math.nan):.2g}" for name in LABELS)
        phases = zip(("env", "policy", "learn", "comm"), PHASES, strict=False)
        shares = (f"{label} {self._share(phase, digits=0)}" for label, phase in phases)
        returned = "-" if math.isnan(scalars["episodes/return"]) else f"{scalars['episodes/return']:.1f}"
        left = max(0, self._total_steps - status.step) / status.speed if status.speed > 0 else math.inf
        self.say(
            f"step {status.step:>9,} of {self._total_steps:,}  return {returned:>6}  {'  '.join(figures)}  "
            f"{status.speed:,.0f} steps/s  {' '.join(shares)}  "
            f"sent {format_bytes(scalars['speed/wire_bytes'])}/update  ETA {_duration(left)}"
        )

    def finish(self, result: TrainResult, speed: float) -> None:
        """Prints the table of a run that ended; ``speed`` in steps per second since it began or went on."""
        table = Table(title=self._title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right", overflow="fold")
        episodes = len(result.returns)
        if result.stopped_by:
            table.add_row("stopped before its end by", result.stopped_by)
        of_last = f"{mean(result.returns):.1f}, mean of the last {episodes} episodes"
        table.add_row("return", of_last if episodes else "no episode ended")
        table.add_row("environment steps", f"{result.step:,} in {result.seconds:.1f} s")
        table.add_row("steps per second", f"{speed:,.0f}")
        for phase in PHASES:
            table.add_row(f"time in {phase}", self._share(phase))
        if len(self._waited) > 1:
            total = self._total()
            table.add_row("  waiting for other ranks", format_share(mean(self._waited), total))
            table.add_row("  waiting for gradients", format_share(result.sync.exposed_time, total))
            table.add_row("  slowest rank", str(self._waited.index(min(self._waited))))
        table.add_row("bytes on the wire, per rank", format_bytes(result.sync.wire_bytes))
        self._console.print(table)

    def _total(self) -> float:
        return mean([math.fsum(astuple(times)) for times in self._times])

    def _share(self, phase: str, digits: int = 1) -> str:
        return format_share(mean([getattr(times, phase) for times in self._times]), self._total(), digits)


def format_share(part: float, whole: float, digits: int = 1) -> str:
    """Such as "12.5%"; a dash for what was not measured."""
    return "-" if math.isnan(part) or not whole > 0 else f"{part / whole:.{digits}%}"


def _duration(seconds: float) -> str:
    """Such as "42 s" or "1:02:03"."""
    if math.isinf(seconds):
        return "-"
    return f"{seconds:.0f} s" if round(seconds) < 60 else str(timedelta(seconds=round(seconds)))
