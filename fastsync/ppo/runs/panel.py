"""The live panel of a run in a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ...messages import format_bytes
from .figures import duration, format_return, format_share, labelled_metrics, packed
from .metrics import PHASES

INTERVAL = 0.5
"""The least seconds between two drawings. Each takes rank 0 a millisecond or two, while the other ranks wait."""
COLORS = dict(zip(PHASES, ("cyan", "blue", "green", "magenta", "bright_black", "yellow"), strict=True))
NAMES = dict(zip(PHASES, ("env", "policy", "learn", "comm", "report", "eval"), strict=True))
SHORT = {"explained variance": "explained var."}
LABEL_WIDTH = 16  # columns of a metric's label; its value has 8
USAGE = {"cores": "cores", "memory": "memory", "gpu": "GPU", "gpu_memory": "GPU mem"}
BLOCKS = "▁▂▃▄▅▆▇█"


class RunPanel:
    """Shows the progress of a run at the bottom of a terminal. What Python prints meanwhile appears above it.

    No thread draws it, so it changes with an update of the training only.

    Args:
        console: the terminal.
        title: what trains.
        total_steps: steps of the run, over all ranks.
        world_size: number of ranks.
    """

    def __init__(self, console: Console, title: str, total_steps: int, world_size: int) -> None:
        self._total_steps = total_steps
        self.use_ranks(title, world_size)
        self._step = 0
        self._scalars: Mapping[str, float] = {}
        self._seconds: Mapping[str, float] = {}
        self._evaluations: Sequence[str] = ()
        self._curve = Curve()
        self._drawn_at = -math.inf
        own_stderr = sys.stderr.isatty()  # or the user has it written elsewhere, where it stays
        how: dict[str, Any] = {"auto_refresh": False, "transient": True, "vertical_overflow": "crop"}
        self._live = Live(self, console=console, redirect_stderr=own_stderr, **how)
        self._live.start(refresh=True)

    def use_ranks(self, title: str, world_size: int) -> None:
        """Shows another number of ranks from now on."""
        self._title, self._world_size = title, world_size

    def update(
        self, step: int, scalars: Mapping[str, float], seconds: Mapping[str, float], evaluations: Sequence[str]
    ) -> None:
        """Takes the metrics of an update, and draws the panel if that is due.

        Args:
            step: environment steps so far.
            scalars: the metrics, by their names in the logs.
            seconds: sums of the metrics that are seconds, by the same names.
            evaluations: the newest evaluation and the best one, in words.
        """
        self._step, self._scalars, self._seconds, self._evaluations = step, scalars, seconds, evaluations
        self._curve.add(scalars["episodes/return"])
        now = time.monotonic()
        if now - self._drawn_at >= INTERVAL:
            self._drawn_at = now
            self._live.refresh()

    def stop(self) -> None:
        """Removes the panel."""
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.size.height - 2
        lines, metrics, ranks = (list(part(width)) for part in (self._lines, self._metrics, self._ranks))
        if len(lines) + len(ranks) >= height:
            metrics = []  # a low terminal
        room = max(2, height - len(lines) - len(metrics))
        if len(ranks) > room:
            ranks = [*ranks[: room - 1], Text(f"and {len(ranks) - room + 1} more ranks", "dim")]
        for line in [*lines, *metrics, *ranks][: max(1, height)]:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line
        yield Text("")  # where the cursor stays

    def _lines(self, width: int) -> Iterator[Text]:
        yield Text(f"── {self._title} ".ljust(width, "─"), "bold")
        if not self._scalars:
            yield Text("the first update is under way", "dim")
            return
        scalars, speed = self._scalars, self._scalars["speed/steps_per_second"]
        share = min(1.0, self._step / self._total_steps)
        left = duration(max(0, self._total_steps - self._step) / speed if speed > 0 else math.inf)
        times = f" {share:>4.0%}  {duration(scalars['seconds'])}, {left} left"
        yield _bar(share, max(4, width - len(times))).append(times)
        sent = [f"sent {format_bytes(scalars['speed/wire_bytes'])}/update"] if self._world_size > 1 else []
        steps = [f"step {self._step:,} of {self._total_steps:,}", f"{speed:,.0f} steps/s", *sent]
        yield from map(Text, packed(steps, width))
        yield from map(Text, packed([*_spread("return", scalars), self._curve.text()], width))
        if self._evaluations:
            yield from map(Text, packed([f"evaluation {self._evaluations[0]}", *self._evaluations[1:]], width))

    def _metrics(self, width: int) -> Iterator[Text]:
        """Yields the metrics of the last update, as many beside each other as have room."""
        cells = [
            f"{SHORT.get(label, label)[: LABEL_WIDTH - 1]:<{LABEL_WIDTH}}{_number(value):>8}"
            for label, value in labelled_metrics(self._scalars)
            if self._scalars
        ]
        columns = max(1, (width + 3) // (LABEL_WIDTH + 8 + 3))
        for start in range(0, len(cells), columns):
            yield Text("   ".join(cells[start : start + columns]))

    def _ranks(self, width: int) -> Iterator[Text]:
        """Yields a line for each rank: shares of its time since the start, and what it uses of its machine."""
        if not self._scalars:
            return
        phases = [phase for phase in PHASES if self._is_shown(phase)]
        room = width - 5 - 7 * len(phases)
        usages = [name for name in USAGE if f"rank0/{name}" in self._scalars][: max(0, room // 9)]
        room -= 9 * len(usages) + 2
        bar = min(24, room) if room >= 8 else 0
        head = Text("rank ", "dim")
        for phase in phases:
            head.append(f"{NAMES[phase]:>7}", COLORS[phase])
        yield head.append("".join(f"{USAGE[name]:>9}" for name in usages))
        for rank in range(self._world_size):
            seconds = {phase: self._seconds[f"rank{rank}/{phase}_seconds"] for phase in phases}
            total = math.fsum(seconds.values())
            line = Text(f"{rank:<5}")
            line.append("".join(f"{format_share(each, total, 0):>7}" for each in seconds.values()))
            figures = ((name, self._scalars.get(f"rank{rank}/{name}", math.nan)) for name in usages)
            line.append("".join(f"{_usage(name, value):>9}" for name, value in figures)).append("  ")
            for phase, length in _parts(seconds, bar).items():
                line.append("█" * length, COLORS[phase])
            yield line

    def _is_shown(self, phase: str) -> bool:
        if phase == "evaluation":
            return bool(self._evaluations)
        return phase != "communication" or self._world_size > 1


class Curve:
    """A curve of a whole run in a few characters. Points are dropped as more come."""

    MOST = 32

    def __init__(self) -> None:
        self._points: list[float] = []
        self._count, self._stride = 0, 1

    def add(self, value: float) -> None:
        """Adds a point. NaN counts for nothing."""
        if math.isnan(value):
            return
        if self._count % self._stride == 0:
            self._points.append(value)
        self._count += 1
        if len(self._points) == self.MOST:
            self._points, self._stride = self._points[::2], 2 * self._stride

    def text(self) -> str:
        """Returns the curve as blocks of different heights, from the least point to the largest."""
        if len(self._points) < 2:
            return ""
        low, high = min(self._points), max(self._points)
        height = (len(BLOCKS) - 1) / (high - low) if math.isfinite(high - low) and high > low else 0.0
        return "".join(BLOCKS[round((point - low) * height) if height else 0] for point in self._points)


def _bar(share: float, width: int) -> Text:
    done = round(share * width)
    return Text("━" * done, "green").append("━" * (width - done), "bright_black")


def _spread(name: str, scalars: Mapping[str, float]) -> list[str]:
    mean = scalars[f"episodes/{name}"]
    if math.isnan(mean):
        return [f"{name} -, no episode has ended"]
    std, least, most = (scalars[f"episodes/{name}_{each}"] for each in ("std", "min", "max"))
    return [f"{name} {format_return(mean)} ± {format_return(std)}", f"{format_return(least)} to {format_return(most)}"]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _usage(name: str, value: float) -> str:
    if math.isnan(value):
        return "-"
    return {"cores": f"{value:.2f}", "gpu": f"{value:.0%}"}.get(name, format_bytes(value))


def _parts(seconds: Mapping[str, float], width: int) -> dict[str, int]:
    """Divides ``width`` characters among the phases in proportion to their seconds."""
    total, so_far, at, lengths = math.fsum(seconds.values()), 0.0, 0, {}
    for phase, each in seconds.items():
        so_far += each
        end = round(width * so_far / total) if total > 0 else 0
        lengths[phase], at = end - at, end
    return lengths
