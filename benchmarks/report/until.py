"""Seconds until trainings are good enough: a table and a picture from the rows of ``ppo --until``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.collect import Collected
from benchmarks.harness.records import Record
from benchmarks.harness.statistics import Interval, interquartile_mean_interval, interquartile_ratio_interval
from benchmarks.report.looks import LOOKS
from benchmarks.report.pictures import DPI, SOFT, STYLE, WIDTH
from benchmarks.report.table import (
    OVERSUBSCRIBED,
    grouped_by,
    make_table,
    measured_on,
    number,
    print_lines,
    print_table,
)

ALONE = ", environment alone"
SB3 = "stable-baselines3"
LEGEND = (
    "seconds: interquartile mean over the seeds, with 95 % intervals of a stratified bootstrap. The clock starts with "
    "the training's loop, and stops after the update with which the mean return of the last 100 episodes is high "
    "enough. A training that has not reached it counts as infinitely long: up to a quarter of the seeds the mean stays "
    "the same whatever they would have taken, beyond it is ∞. steps: environment steps until then, interquartile mean. "
    "× SB3: seconds of Stable-Baselines3's fastest row over these. steps/s: of whole trainings, median. environments "
    "alone: steps/s with random actions. compiling: seconds of JAX's compiler, part of those above, median."
)


@dataclass(frozen=True)
class Summary:
    """The trainings of a method, one a seed."""

    method: str
    trainer: str
    oversubscribed: bool
    reached: int
    times: Sequence[float]
    """Seconds until it was reached; infinite where it was not."""
    steps: Interval
    speed: float
    alone: float | None
    """Steps a second of its environments without a training."""
    compiling: float | None

    @property
    def seconds(self) -> Interval:
        return interquartile_mean_interval(self.times)

    @property
    def name(self) -> str:
        return f"{self.method}, {OVERSUBSCRIBED.upper()}" if self.oversubscribed else self.method


def summaries(records: Sequence[Record]) -> list[Summary]:
    """Of trainings with the same hyperparameters, in the order of their rows."""
    trainings = [record for record in records if record.figures["reached"] is not None]
    speeds = {
        of_one[0].settings["trainer"]: median(record.figures["steps_per_second"] or 0.0 for record in of_one)
        for of_one in grouped_by(
            (record for record in records if record.figures["reached"] is None), lambda record: record.method
        )
    }
    return [_summary(of_one, speeds) for of_one in grouped_by(trainings, lambda record: record.method)]


def _summary(records: Sequence[Record], alone: dict[str, float]) -> Summary:
    first, hits = records[0], [bool(record.figures["reached"]) for record in records]
    compiling = [record.figures["compile_seconds"] for record in records]
    known = [seconds for seconds in compiling if seconds is not None]
    steps = [record.figures["steps"] if hit else math.inf for record, hit in zip(records, hits, strict=True)]
    return Summary(
        method=first.method,
        trainer=first.settings["trainer"],
        oversubscribed=bool(first.settings.get(OVERSUBSCRIBED)),
        reached=sum(hits),
        times=[record.samples[0] if hit else math.inf for record, hit in zip(records, hits, strict=True)],
        steps=interquartile_mean_interval(steps),
        speed=median(record.figures["steps_per_second"] or 0.0 for record in records),
        alone=alone.get(first.settings["trainer"] + ALONE),
        compiling=median(known) if known else None,
    )


def fastest_of_sb3(rows: Iterable[Summary]) -> Summary | None:
    """What the others are compared with."""
    found = [row for row in rows if row.trainer.startswith(SB3)]
    return min(found, key=lambda row: row.seconds.value, default=None)


def by_hyperparameters(records: Sequence[Record]) -> list[list[Record]]:
    """Rows that can be compared, together."""
    same = ("env", "hyperparameters", "gsde", "until")
    return grouped_by(records, lambda record: tuple(record.settings[name] for name in same))


def print_report(collected: Collected) -> None:
    """Two tables for each environment and whose hyperparameters."""
    for records in by_hyperparameters(collected.records):
        rows = summaries(records)
        if not rows:
            continue
        sb3 = fastest_of_sb3(rows)
        times = {
            "trainer": lambda row: row.name,
            "reached": lambda row: f"{row.reached}/{len(row.times)}",
            "seconds [95 %]": lambda row: _interval(row.seconds, ".1f"),
            "× SB3 [95 %]": lambda row, sb3=sb3: _ratio(sb3, row),
        }
        speeds = {
            "trainer": lambda row: row.name,
            "steps": lambda row: _figure(row.steps.value, ",.0f"),
            "steps/s": lambda row: number(row.speed, ",.0f"),
            "environments alone": lambda row: number(row.alone, ",.0f"),
            "compiling": lambda row: number(row.compiling, ".1f"),
        }
        print_table(_title(records), make_table(times, rows))
        print_table("steps and speed", make_table(speeds, rows))
    print_lines((LEGEND, *collected.notes) if collected.records else collected.notes)


def _title(records: Sequence[Record]) -> str:
    settings = next(record.settings for record in records if record.figures["reached"] is not None)
    return (
        f"{settings['env']} until a mean return of {settings['until']:g}, hyperparameters of "
        f"{settings['hyperparameters']}: {settings['num_envs']} environments × {settings['num_steps']} steps, "
        f"{settings['num_epochs']} epochs of {settings['num_minibatches']} minibatches, "
        f"{'gSDE, ' if settings['gsde'] else ''}at most "
        f"{settings['total_steps']:,} steps\n{measured_on(records[0])}"
    )


def _figure(value: float, form: str) -> str:
    return "∞" if value == math.inf else "" if math.isnan(value) else f"{value:{form}}"


def _interval(interval: Interval, form: str) -> str:
    value, low, high = interval
    ends = "" if low == -math.inf or math.isnan(low) else f" [{_figure(low, form)}, {_figure(high, form)}]"
    return f"{_figure(value, form)}{ends}"


def _ratio(sb3: Summary | None, row: Summary) -> str:
    if sb3 is None or not (math.isfinite(sb3.seconds.value) and math.isfinite(row.seconds.value)):
        return ""
    return "1" if row.method == sb3.method else _interval(interquartile_ratio_interval(sb3.times, row.times), ".2f")


def picture(records: Sequence[Record], file: Path) -> None:
    """Seconds with their intervals, a row a method and a panel for each environment and whose hyperparameters."""
    groups = [(of_group, rows) for of_group in by_hyperparameters(records) if (rows := summaries(of_group))]
    if not groups:
        return
    with mpl.rc_context(STYLE):
        heights = [1 + len(rows) for _, rows in groups]
        figure = Figure((WIDTH + 1.5, 0.7 * len(groups) + 0.3 * sum(heights)))
        panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights).flat
        for axes, (of_group, rows) in zip(panels, groups, strict=True):
            for place, row in enumerate(rows):
                _draw(axes, place, row)
            settings = of_group[0].settings
            title = f"{settings['env']} until {settings['until']:g}, hyperparameters of {settings['hyperparameters']}"
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
            axes.set_ylim(len(rows) - 0.5, -0.5)  # from the top down
            axes.margins(x=0.12)  # for the figures
            axes.set_xlim(left=0)
            axes.grid(axis="x")
            axes.set_xlabel("seconds")
        metadata = dict.fromkeys(("Creator", "Date")) if file.suffix == ".svg" else None
        figure.savefig(file, dpi=DPI, metadata=metadata)


def _draw(axes: Axes, place: int, row: Summary) -> None:
    """The mean and its interval. An arrow ends one that has no right end, and words stand for a mean that is none."""
    look = LOOKS["fastsync.attach/none" if row.trainer == "fastsync" else "ddp"]
    value, low, high = row.seconds
    arrived = [time for time in row.times if math.isfinite(time)]
    if not math.isfinite(value):
        axes.plot(arrived, [place] * len(arrived), alpha=0.0)  # so that the axis goes as far
        axes.annotate(
            f"reached by {row.reached} of {len(row.times)}", (0.02, place), xycoords=("axes fraction", "data"),
            va="center", color=SOFT, fontsize=9,
        )  # fmt: skip
        return
    axes.plot([value], [place], look.marker, color=look.colour)
    right = value
    if math.isfinite(low):
        right = high if math.isfinite(high) else max(arrived)
        axes.hlines(place, low, right, color=look.colour, linewidth=2)
        if not math.isfinite(high):
            axes.plot([right], [place], ">", color=look.colour)
    axes.annotate(
        f"{value:.1f}", (right, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9, color=SOFT
    )
