"""What a rank's death costs, as a table and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.harness.collect import Collected
from benchmarks.harness.diaries import Diaries
from benchmarks.harness.records import Record
from benchmarks.report.looks import LOOKS
from benchmarks.report.pictures import DPI, SOFT, STYLE, WIDTH
from benchmarks.report.table import Columns, milliseconds, number, print_tables, ranks_on, spread

SMOOTHED = 25
"""Steps whose mean loss is drawn."""
COLUMNS: Columns = {
    "method": lambda record: record.method,
    "next step, s": lambda record: spread(record.quantiles, lambda seconds: f"{seconds:.3g}"),
    "done again": lambda record: number(record.figures["repeated"], ".2f"),
    "dropped": lambda record: number(record.figures["dropped"], ".2f"),
    "step, ms": lambda record: milliseconds(record.figures["step"]),
}
LEGEND = (
    "next step: from kill -9 of a rank until the last rank has ended its first step without it, median [p10, p90]. A "
    "restart is over when it ends the first step that had not been ended before. done again: steps that were begun "
    "more than once, per kill. dropped: steps whose gradients were thrown away, per kill. step: one step before the "
    "kill. limit: until another process's connection to the killed one has ended."
)


def print_report(collected: Collected) -> None:
    """Prints a table."""
    below = [LEGEND, *map(_how, collected.records), *collected.notes] if collected.records else collected.notes
    print_tables([collected.records] if collected.records else [], _title, COLUMNS, [line for line in below if line])


def _title(record: Record) -> str:
    settings = record.settings
    hosts = "" if settings["hosts"] == 1 else f" on {settings['hosts']} simulated hosts"
    return (
        f"a rank of {settings['world_size']}{hosts} is killed, {len(record.samples)} times, {settings['numel']:,} "
        f"parameters\n{ranks_on(record)}"
    )


def _how(record: Record) -> str:
    """What a method was told."""
    settings = record.settings
    if every := settings.get("checkpoint_every"):
        return f"{record.method}: restarts from a checkpoint, saved every {_steps(every)}"
    if "join_timeout_ms" in settings:
        stragglers, heartbeat = settings["join_timeout_ms"], settings["heartbeat_timeout_ms"]
        return (
            f"{record.method}: version {record.environment['torchft']}. Its lighthouse waits {stragglers} ms for "
            f"stragglers, and {heartbeat} ms for a heartbeat. Its DDP's hook is repaired: as released, it ends the "
            "other ranks if one is lost within an all-reduce"
        )
    return ""


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def points(diaries: Diaries) -> tuple[list[float], list[float]]:
    """When a step was first ended by a rank, and the mean loss over all ranks that have ended it."""
    ended: dict[int, tuple[float, list[float]]] = {}
    for events in diaries.values():
        for event in events:
            if event.kind == "end":
                first, losses = ended.get(event.step, (event.time, []))
                ended[event.step] = min(first, event.time), [*losses, event.loss]
    of_time = sorted((moment, float(np.mean(losses))) for moment, losses in ended.values())
    return [moment for moment, _ in of_time], [loss for _, loss in of_time]


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and those before it."""
    sums = np.cumsum([0.0, *losses])
    first = np.maximum(np.arange(1, len(sums)) - SMOOTHED, 0)
    means: list[float] = ((sums[1:] - sums[first]) / (np.arange(1, len(sums)) - first)).tolist()
    return means


def draw(curves: Mapping[str, Diaries], kills: Sequence[float], checkpoint_every: int, picture: Path) -> None:
    """Draws the loss over time, a line for each method, and where a rank was killed."""
    labels = {"torchrun": f"torchrun's restart, a checkpoint every {_steps(checkpoint_every)}"}
    looks = (LOOKS["fastsync.attach/none"], LOOKS["ddp"])
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 3.6))
        axes = figure.subplots()
        for moment in kills:
            axes.axvline(
                moment, color="#D55E00", linestyle="--", linewidth=1, label="a rank is killed" * (moment == kills[0])
            )
        for (name, diaries), look in zip(curves.items(), looks, strict=True):
            times, losses = points(diaries)
            axes.plot(times, smoothed(losses), label=labels.get(name, name), color=look.colour)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("seconds")
        axes.set_ylabel("loss")
        axes.set_xlim(0)
        figure.legend(loc="outside upper left", fontsize=9)
        caption = f"Mean loss of {SMOOTHED} steps. In smooth, flat parts no step ended.\nKilled ranks are replaced."
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=9, color=SOFT)
        figure.savefig(picture, dpi=DPI)
