"""The console: progress about twenty times during a run, and a table at its end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from ..._checks import format_bytes
from .metrics import PHASES, TrainResult, mean

NUM_TIMES = 20
WIDTH = 100  # columns of a line of progress
LABELS = {
    "learning/policy_loss": "policy loss", "learning/value_loss": "value loss", "learning/approx_kl": "KL",
    "learning/entropy": "entropy",
}  # fmt: skip
IN_LOGS_ONLY = {f"learning/{name}" for name in ("clip_fraction", "grad_norm", "optimizer_steps", "learning_rate")}


class RunConsole:
    """Prints the progress of a run, for every twentieth of it. Steps are those of all ranks."""

    def __init__(self, title: str, total_steps: int, first_step: int, world_size: int) -> None:
        self._console = Console()
        self._title, self._total_steps = title, total_steps
        self._next_line = first_step
        self._world_size = world_size
        self._seconds = defaultdict[str, float](float)  # sums over the updates, by the names in the logs

    def say(self, text: str) -> None:
        """Prints a sentence."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the metrics of an update, and prints the progress if that is due. Times are printed as shares since the
        start.

        Metrics of the user's own loss, and those of --log-info, come last, under their own names.
        """
        for name, value in scalars.items():
            if name.endswith("_seconds"):
                self._seconds[name] += value
        if step < self._next_line:
            return
        self._next_line = step + self._total_steps // NUM_TIMES
        own = [name for name in scalars if name.startswith(("learning/", "info/")) and name not in IN_LOGS_ONLY]
        labels = LABELS | {name: name.split("/", 1)[1] for name in own if name not in LABELS}
        figures = (f"{label} {scalars.get(name, math.nan):.2g}" for name, label in labels.items())
        phases = zip(("env", "policy", "learn", "comm"), PHASES, strict=False)
        shares = [f"{label} {self._share(phase, digits=0)}" for label, phase in phases if self._is_shown(phase)]
        returned = "-" if math.isnan(scalars["episodes/return"]) else f"{scalars['episodes/return']:.1f}"
        speed = scalars["speed/steps_per_second"]
        left = max(0, self._total_steps - step) / speed if speed > 0 else math.inf
        sent = [f"sent {format_bytes(scalars['speed/wire_bytes'])}/update"] if self._world_size > 1 else []
        first = [f"step {step:>9,} of {self._total_steps:,}", f"return {returned:>6}", f"{speed:,.0f} steps/s"]
        lines = _packed([*first, *sent, f"ETA {_duration(left)}"]) + _packed([*figures, " ".join(shares)], "  ")
        self.say("\n".join(lines))

    def finish(self, result: TrainResult, speed: float) -> None:
        """Prints the table of a run that ended; ``speed`` in steps per second since it began or resumed."""
        table = Table(title=self._title, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right", overflow="fold")
        episodes = len(result.returns)
        if result.stopped_by:
            table.add_row("stopped early by", result.stopped_by)
        last_return = f"{mean(result.returns):.1f}, mean of the last {episodes} episodes"
        table.add_row("return", last_return if episodes else "no episode ended")
        table.add_row("environment steps", f"{result.step:,} in {result.seconds:.1f} s")
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

    def _is_shown(self, phase: str) -> bool:
        return phase != "communication" or self._world_size > 1

    def _seconds_of_ranks(self, phase: str) -> list[float]:
        return [self._seconds[f"rank{rank}/{phase}_seconds"] for rank in range(self._world_size)]

    def _total(self) -> float:
        return math.fsum(mean(self._seconds_of_ranks(phase)) for phase in PHASES)

    def _share(self, phase: str, digits: int = 1) -> str:
        return format_share(mean(self._seconds_of_ranks(phase)), self._total(), digits)


def _packed(parts: Sequence[str], indent: str = "") -> list[str]:
    """Puts parts into lines of at most ``WIDTH`` columns, unless a part alone is longer."""
    lines: list[str] = []
    for part in parts:
        joined = f"{lines[-1]}  {part}" if lines else ""
        if lines and len(joined) <= WIDTH:
            lines[-1] = joined
        else:
            lines.append(f"{indent}{part}")
    return lines


def format_share(part: float, whole: float, digits: int = 1) -> str:
    """Formats a share such as "12.5%"; a dash if it was not measured."""
    return "-" if math.isnan(part) or not whole > 0 else f"{part / whole:.{digits}%}"


def _duration(seconds: float) -> str:
    """Formats seconds such as "42 s" or "1:02:03"."""
    if math.isinf(seconds):
        return "-"
    return f"{seconds:.0f} s" if round(seconds) < 60 else str(timedelta(seconds=round(seconds)))
