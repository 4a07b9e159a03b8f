"""The console: where a run stands while it goes on, and the table at its end."""

from __future__ import annotations

import math
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fastsync._checks import format_bytes
from fastsync.ppo.runs.metrics import PHASES, Status, TrainResult, mean
from fastsync.ppo.runs.straggler import WaitingTimes

NUM_LINES = 20
MAX_RANKS = 16
"""Ranks that the dashboard has a line for."""


class Lines:
    """Shows where a run stands by a line for every twentieth of it.

    Times are shares since the start, see PhaseTimes, bytes what a rank has sent
    in the update.
    """

    def __init__(self, console: Console, *, total_steps: int, first_step: int = 0) -> None:
        self._console = console
        self._total_steps = total_steps
        self._next_line = first_step

    def start(self) -> None:
        """Begins to show."""

    def stop(self) -> None:
        """Ends. It may be called again."""

    def update(self, status: Status, speed: float, waiting: WaitingTimes) -> None:
        """Shows a new status; the speed is in environment steps per second, over all ranks."""
        if status.step < self._next_line:
            return
        self._next_line = status.step + self._total_steps // NUM_LINES
        returned = f"{status.returns[0]:.1f}" if status.returns else "-"
        policy_loss, value_loss, kl, entropy = (
            f"{status.metrics.get(f'learning/{name}', math.nan):.2g}"
            for name in ("policy_loss", "value_loss", "approx_kl", "entropy")
        )
        total = mean([times.total for times in waiting.times])
        shares = (  # the dashboard also has what reports take; a line is short
            f"{name} {format_share(mean([getattr(times, phase) for times in waiting.times]), total, digits=0)}"
            for name, phase in zip(("env", "policy", "learn", "comm"), PHASES, strict=False)
        )
        self._console.print(
            f"step {status.step:>9,} of {self._total_steps:,}  return {returned:>6}  "
            f"policy loss {policy_loss}  value loss {value_loss}  KL {kl}  entropy {entropy}  {speed:,.0f} steps/s  "
            f"{' '.join(shares)}  sent {format_bytes(_wire_bytes(status))}/update  "
            f"ETA {_duration(_remaining(status.step, self._total_steps, speed))}",
            highlight=False,
            soft_wrap=True,
        )


class Dashboard(Lines):
    """Shows it on a terminal: progress, returns, losses, shares of time, a line for each rank."""

    def __init__(self, console: Console, *, title: str, total_steps: int) -> None:
        super().__init__(console, total_steps=total_steps)
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            expand=True,
            console=console,
        )
        self._task = self._progress.add_task(title, total=total_steps, eta="-")
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def update(self, status: Status, speed: float, waiting: WaitingTimes) -> None:
        eta = _duration(_remaining(status.step, self._total_steps, speed))
        self._progress.update(self._task, completed=min(status.step, self._total_steps), eta=eta)
        self._live.update(self.render(status, speed, waiting))

    def render(self, status: Status, speed: float, waiting: WaitingTimes) -> RenderableType:
        """All that the dashboard holds."""
        columns = Table.grid(padding=(0, 4))
        names = {name: name.removeprefix("learning/").replace("_", " ") for name in status.metrics}
        metrics = {names[name]: f"{value:.4g}" for name, value in status.metrics.items()}
        columns.add_row(_run_figures(status, speed), _two_columns(metrics))
        return Group(self._progress, columns, Text(), _rank_table(status, waiting), Text(straggler_line(waiting)))


def straggler_line(waiting: WaitingTimes) -> str:
    """One sentence about who makes the others wait."""
    if len(waiting.times) == 1:
        return "one rank, which waits for nobody"
    straggler = waiting.straggler
    return str(straggler) if straggler else "no rank makes the others wait for long"


def _run_figures(status: Status, speed: float) -> Table:
    figures = {"steps": f"{status.step:,}", "steps per second": f"{speed:,.0f}"}
    if status.returns:
        average, low, high = status.returns
        figures["return"] = f"{average:.1f}  ({low:.1f} to {high:.1f})"
        figures["episode length"] = f"{mean(status.window.lengths):.1f}"
    else:
        figures["return"] = "no episode has ended"
    figures["sent per update and rank"] = format_bytes(_wire_bytes(status))
    return _two_columns(figures)


def _wire_bytes(status: Status) -> float:
    """Of a rank in an update."""
    return mean([report.wire_bytes for report in status.reports])


def _two_columns(figures: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan")
    table.add_column(justify="right")
    for name, value in figures.items():
        table.add_row(name, value)
    return table


def _rank_table(status: Status, waiting: WaitingTimes) -> Table:
    """Shares of time since the start, and the GPU of each rank where there are any."""
    has_gpus = not all(math.isnan(report.gpu.memory) for report in status.reports)
    table = Table(box=None, pad_edge=False, header_style="cyan")
    table.add_column("rank")
    for name in (*PHASES, "of it waiting", *(("GPU memory", "GPU use") if has_gpus else ())):
        table.add_column(name, justify="right")
    for rank, report in enumerate(status.reports[:MAX_RANKS]):
        times, waited = waiting.times[rank], waiting.waited[rank]
        cells = [format_share(seconds, times.total) for seconds in (*(getattr(times, p) for p in PHASES), waited)]
        if has_gpus:
            cells += [format_bytes(report.gpu.memory), format_share(report.gpu.utilisation, 1.0)]
        table.add_row(str(rank), *cells)
    if len(status.reports) > MAX_RANKS:
        table.add_row("…", f"and {len(status.reports) - MAX_RANKS} more")
    return table


def result_table(
    result: TrainResult, waiting: WaitingTimes, *, title: str, new_steps: int, new_seconds: float
) -> Table:
    """The figures of a run that ended.

    Args:
        result: how it ended.
        waiting: who waited for whom.
        title: stands above.
        new_steps: environment steps since the start, or since the run was resumed.
        new_seconds: wall time of these.
    """
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right", overflow="fold")
    episodes = len(result.returns)
    if result.stopped_by:
        table.add_row("stopped before its end by", result.stopped_by)
    table.add_row(
        "return",
        f"{mean(result.returns):.1f}, mean of the last {episodes} episodes" if episodes else "no episode ended",
    )
    table.add_row("environment steps", f"{result.step:,} in {result.seconds:.1f} s")
    table.add_row("steps per second", f"{new_steps / new_seconds:,.0f}" if new_seconds > 0 else "-")
    total = mean([times.total for times in waiting.times])
    # When gradients travelled and nothing waited for them, so that it is no time in communication.
    hidden = max(0.0, result.sync.seconds - result.sync.exposed_seconds)
    for name in PHASES:
        table.add_row(f"time in {name}", format_share(mean([getattr(times, name) for times in waiting.times]), total))
        if name == "communication":
            table.add_row("  waiting for other ranks", format_share(mean(waiting.waited), total))
            table.add_row("  for gradients", format_share(result.sync.exposed_seconds, total))
            table.add_row("gradients sent while backward went on", format_share(hidden, total))
    if len(waiting.times) > 1:
        table.add_row("slowest rank", straggler_line(waiting))
    table.add_row("bytes on the wire, per rank", format_bytes(result.sync.wire_bytes))
    return table


def format_share(part: float | None, whole: float, digits: int = 1) -> str:
    """Such as "12.5%"; a dash for what was not measured."""
    return "-" if part is None or math.isnan(part) or not whole > 0 else f"{part / whole:.{digits}%}"


def _remaining(step: int, total_steps: int, speed: float) -> float:
    return max(0, total_steps - step) / speed if speed > 0 else math.inf


def _duration(seconds: float) -> str:
    """Such as "42 s" or "1:02:03"."""
    if math.isinf(seconds):
        return "-"
    return f"{seconds:.0f} s" if round(seconds) < 60 else str(timedelta(seconds=round(seconds)))
