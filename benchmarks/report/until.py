"""Seconds until trainings are good enough: a table and a picture from the rows of ``ppo --until``."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.collect import Collected
from benchmarks.harness.records import Record
from benchmarks.harness.statistics import (
    Interval,
    Time,
    log_rank,
    median_time,
    paired_ratio,
    probability_of_sooner,
)
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
    "seconds: median over the seeds by the estimator of Kaplan and Meier, with its interval of 95 %. The clock starts "
    "with the training's loop, and stops after the update with which the mean return of the last 100 episodes is high "
    "enough. A training that has not reached it takes longer than it was waited for. An end that is not known for that "
    "is –. × SB3: seconds of Stable-Baselines3's fastest row over these, the median of pairs with one seed, which took "
    "turns. sooner: how probable it is that one of these trainings is sooner than one of that row. log-rank: p-value "
    "of the hypothesis that both take equally long. steps: environment steps until then, median. steps/s: of whole "
    "trainings, median. environments alone: steps/s with random actions. compiling: seconds of JAX's compiler, part of "
    "those above, median."
)


@dataclass(frozen=True)
class Summary:
    """The trainings of a method, one a seed."""

    method: str
    trainer: str
    name: str
    """The method, and of how many cores if its ranks are more than these."""
    times: Mapping[int, Time]
    """Seconds until it was reached, by the seed."""
    step_times: Mapping[int, Time]
    """The same in environment steps."""
    speed: float
    alone: float | None
    """Steps a second of its environments without a training."""
    compiling: float | None

    @property
    def reached(self) -> int:
        return sum(time.arrived for time in self.times.values())

    @property
    def seconds(self) -> Interval:
        return median_time([*self.times.values()])

    @property
    def steps(self) -> Interval:
        return median_time([*self.step_times.values()])

    def paired(self, other: "Summary") -> Interval:
        """The seconds of the other over these, by seeds that both have."""
        seeds = sorted(self.times.keys() & other.times.keys())
        return paired_ratio([(other.times[seed], self.times[seed]) for seed in seeds])

    def sooner(self, other: "Summary") -> Interval:
        return probability_of_sooner([*self.times.values()], [*other.times.values()])

    def log_rank(self, other: "Summary") -> float:
        return log_rank([*self.times.values()], [*other.times.values()])

    def after_fewer_steps(self, other: "Summary") -> Interval:
        return probability_of_sooner([*self.step_times.values()], [*other.step_times.values()])

    def log_rank_of_steps(self, other: "Summary") -> float:
        return log_rank([*self.step_times.values()], [*other.step_times.values()])


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
    first = records[0]
    compiling = [record.figures["compile_seconds"] for record in records]
    known = [seconds for seconds in compiling if seconds is not None]

    def times(ends: Iterable[float]) -> dict[int, Time]:
        return {
            record.settings["seed"]: Time(end, bool(record.figures["reached"]))
            for record, end in zip(records, ends, strict=True)
        }

    crowded = f" on {first.environment['cores']} cores" if first.settings.get(OVERSUBSCRIBED) else ""
    return Summary(
        method=first.method,
        trainer=first.settings["trainer"],
        name=f"{first.method}{crowded}",
        times=times(record.samples[0] for record in records),
        step_times=times(record.figures["steps"] or 0.0 for record in records),
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
            "seconds [95 %]": lambda row: in_brackets(row.seconds, ".1f"),
            "× SB3 [95 %]": lambda row, sb3=sb3: times_of(sb3, row, ".2f"),
            "sooner [95 %]": lambda row, sb3=sb3: _beside(sb3, row, lambda: in_brackets(row.sooner(sb3), ".2f")),
            "log-rank": lambda row, sb3=sb3: _beside(sb3, row, lambda: _figure(row.log_rank(sb3), ".2g")),
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
    return f"{value:{form}}" if math.isfinite(value) else "–"


def in_brackets(interval: Interval, form: str) -> str:
    """The value, and both ends in brackets. What is not known is –."""
    value, low, high = (_figure(each, form) for each in interval)
    return value if low == high == "–" else f"{value} [{low}, {high}]"


def times_of(sb3: Summary | None, row: Summary, form: str) -> str:
    """How many times as fast a row is as Stable-Baselines3; 1 for that itself."""
    if sb3 is not None and row.method == sb3.method:
        return "1"
    return _beside(sb3, row, lambda: in_brackets(row.paired(sb3), form) if sb3 else "")


def _beside(sb3: Summary | None, row: Summary, shown: Callable[[], str]) -> str:
    """Nothing if there is no other row to compare with."""
    return "" if sb3 is None or row.method == sb3.method else shown()


def picture(records: Sequence[Record], file: Path) -> None:
    """Seconds of each training, a row a method and a panel for each environment and whose hyperparameters."""
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
            title = f"{settings['env']} until {settings['until']:g}, hyperparameters: {settings['hyperparameters']}"
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
            axes.set_ylim(len(rows) - 0.5, -0.5)  # from the top down
            axes.margins(x=0.12)  # for the figures
            axes.set_xlim(left=0)
            axes.grid(axis="x")
            axes.set_xlabel("seconds: a point a training, a line at the median", fontsize=9)
        metadata = dict.fromkeys(("Creator", "Date")) if file.suffix == ".svg" else None
        figure.savefig(file, dpi=DPI, metadata=metadata)


def _draw(axes: Axes, place: int, row: Summary) -> None:
    """Each training that arrived is a point, and a line is the median. Words tell of those that have not."""
    look = LOOKS["fastsync.attach/none" if row.trainer == "fastsync" else "ddp"]
    arrived = [time.seconds for time in row.times.values() if time.arrived]
    axes.plot(arrived, [place] * len(arrived), "o", color=look.colour, alpha=0.35, markersize=4)
    value, told = row.seconds.value, [f"{row.reached} of {len(row.times)}"] * (row.reached < len(row.times))
    if math.isfinite(value):
        axes.plot([value], [place], "|", color=look.colour, markersize=16, markeredgewidth=2.5)
        told.insert(0, f"{value:.1f}")
    axes.annotate(
        ", ".join(told), (max(arrived, default=0.0), place), xytext=(7, 0), textcoords="offset points", va="center",
        fontsize=9, color=SOFT,
    )  # fmt: skip
