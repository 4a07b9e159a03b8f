"""``python -m benchmarks compare BEFORE.json AFTER.json``: what has become slower or faster, beyond noise.

Rows belong together if they measure the same: benchmark, way, and all settings but those that say how often and with
which random numbers. Each launch of the same counts as one sample, its median: its steps have processes, connections
and memory in common, and the next launch has others. So what one launch a side differs by says nothing about a change,
and has no verdict.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, isfinite, nan
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.table import Table

from benchmarks.harness.records import Record, read_json
from benchmarks.harness.statistics import CONFIDENCE, SAMPLES_ARE_LAUNCHES, noise_band, ratio_interval
from benchmarks.report.table import WITHIN_NOISE, console, grouped_by, milliseconds, share, told_apart

PROG = "python -m benchmarks compare"
HOW_OFTEN = ("seed", "launch", "repetitions", "warmup")
"""Settings that do not say what is measured."""
EXPECTED = ("time", "commit", "fastsync")
"""What of the environment is to differ before and after a change."""
FASTER, SLOWER, NOISE, WRONG = "faster", "slower", WITHIN_NOISE, "WRONG RESULT"
UNKNOWN, TOO_FEW, NONE = "between launches: not known", "too few launches", "no samples"

Key = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Options:
    """Compare two runs of the same benchmarks: ratios of medians with their intervals, and which are beyond noise.

    Most commands make one launch a file, and how launches differ takes several: --before B1.json B2.json ... --after
    A1.json A2.json ..., four a side at least, more for many rows. The exit status is 1 if something has become slower
    beyond noise, or gives a wrong result, and 0 otherwise.
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="BEFORE.json AFTER.json")] = ()
    """A file of each run, as --json and reports (rows.json) have them; in place of --before and --after."""
    before: tuple[Path, ...] = ()
    """Files of one run, one or more launches each."""
    after: tuple[Path, ...] = ()
    """Files of another run of the same."""
    threshold: float = 0.01
    """Changes of the median by a smaller part than this are noise, however sure they are."""

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold={self.threshold} must not be negative")
        if len(self.files) not in (0, 2) or bool(self.files) == bool(self.before or self.after):
            raise ValueError("name two files, BEFORE.json AFTER.json, or any number with --before and --after")
        for paths in self.sides:
            if not paths:
                raise ValueError("before and after: name at least one file for each")
            if len({path.resolve() for path in paths}) < len(paths):
                raise ValueError(f"{', '.join(map(str, paths))}: a file that is named twice is no second launch")

    @property
    def sides(self) -> tuple[Sequence[Path], Sequence[Path]]:
        """The files before and after."""
        return (self.files[:1], self.files[1:]) if self.files else (self.before, self.after)


@dataclass(frozen=True)
class Comparison:
    """One thing that both runs have measured. Medians in seconds."""

    benchmark: str
    way: str
    settings: Mapping[str, Any]
    before: float
    after: float
    launches: tuple[int, int]
    """Before and after."""
    noise_before: float
    noise_after: float
    """How far the median of as many launches more may be from this one, as a part of it; of one launch, of as many
    samples more from the same."""
    ratio: float
    """After over before."""
    low: float
    high: float
    """Of the ratio: between launches, or within the only launch of each side."""
    verdict: str


def main(arguments: Sequence[str]) -> int:
    """Compares and prints.

    Returns:
        The exit status: 0; 1 if something is slower beyond noise or wrong; 2 for files that cannot be compared.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    try:
        runs = [[record for path in paths for record in _read(path)] for paths in options.sides]
        before, after = (grouped(run) for run in runs)
        if not before.keys() & after.keys():
            raise ValueError(f"{_names(options.sides[0])} and {_names(options.sides[1])} have no row in common")
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    comparisons = compare(before, after, options.threshold)
    show(comparisons)
    out = console()
    for line in (*differences(*runs), *only_in(before, after, options), LEGEND, summary(comparisons)):
        out.print(line, markup=False)
    return int(any(comparison.verdict in (SLOWER, WRONG) for comparison in comparisons))


def _read(path: Path) -> list[Record]:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return read_json(path)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths))


def grouped(records: Sequence[Record]) -> dict[Key, list[Record]]:
    """The rows that measure the same, by what that is."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        settings = {name: value for name, value in record.settings.items() if name not in HOW_OFTEN}
        key = (record.benchmark, record.way, tuple((name, repr(settings[name])) for name in sorted(settings)))
        groups.setdefault(key, []).append(record)
    return groups


def compare(
    before: Mapping[Key, Sequence[Record]], after: Mapping[Key, Sequence[Record]], threshold: float = 0.0
) -> list[Comparison]:
    """Compares the rows that both runs have, in the order of the second.

    The intervals hold all together with CONFIDENCE, so that many rows do not make one false alarm likely (C. E.
    Bonferroni): each for itself with 1 - (1 - CONFIDENCE) / rows.
    """
    common = [key for key in after if key in before]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(common))
    return [_compare(before[key], after[key], confidence, threshold) for key in common]


def _compare(before: Sequence[Record], after: Sequence[Record], confidence: float, threshold: float) -> Comparison:
    launches = [_launches(rows) for rows in (before, after)]
    medians = [[median(samples) for samples in of_run] for of_run in launches]
    numbers = len(launches[0]), len(launches[1])
    # What is known of each run's noise: between its launches, or within its only one.
    noisy = [launches[side][0] if numbers[side] == 1 else medians[side] for side in (0, 1)]
    if numbers == (1, 1):
        ratio, low, high = ratio_interval(noisy[1], noisy[0], confidence)
    else:
        ratio, low, high = ratio_interval(medians[1], medians[0], confidence)
    middles = [median(of_run) if of_run else nan for of_run in medians]
    settings = {name: value for name, value in after[0].settings.items() if name not in HOW_OFTEN}
    return Comparison(
        after[0].benchmark,
        after[0].way,
        settings,
        *middles,
        numbers,
        *map(noise_band, noisy),
        ratio,
        low,
        high,
        verdict=_verdict([*before, *after], numbers, (ratio, low, high), confidence, threshold),
    )


def _launches(rows: Sequence[Record]) -> list[list[float]]:
    """The samples of each launch."""
    if rows[0].benchmark in SAMPLES_ARE_LAUNCHES:
        return [[sample] for row in rows for sample in row.samples]
    return [list(row.samples) for row in rows if row.samples]


def _verdict(
    rows: Sequence[Record],
    launches: tuple[int, int],
    interval: tuple[float, float, float],
    confidence: float,
    threshold: float,
) -> str:
    ratio, low, high = interval
    if not all(row.correct for row in rows):
        return WRONG
    if min(launches) == 0:
        return NONE
    if min(launches) == 1:
        return UNKNOWN
    # The chance that two such sets lie apart altogether though nothing has changed: no test can do with less.
    if 2 / comb(sum(launches), launches[0]) > 1 - confidence:
        return TOO_FEW
    if low > 1 and ratio > 1 + threshold:
        return SLOWER
    if high < 1 and ratio < 1 - threshold:
        return FASTER
    return NOISE


def differences(before: Sequence[Record], after: Sequence[Record]) -> Iterator[str]:
    """Names what of the environment is not the same in both runs."""
    where = [_environment(run) for run in (before, after)]
    names = dict.fromkeys(name for values in where for name in values if name != "time")
    changed = [name for name in names if where[0].get(name) != where[1].get(name)]
    for name in sorted(changed, key=lambda name: name not in EXPECTED):
        text = f"{name}: {_either(where[0].get(name))} before, {_either(where[1].get(name))} after"
        yield text if name in EXPECTED else f"ANOTHER ENVIRONMENT: {text}"


def _environment(run: Sequence[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in run:
        for name, value in record.environment.items():
            found.setdefault(name, set()).add(str(value))
    return found


def _either(values: set[str] | None) -> str:
    return " or ".join(sorted(values)) if values else "unknown"


def only_in(before: Mapping[Key, Any], after: Mapping[Key, Any], options: Options) -> Iterator[str]:
    """The rows that only one run has."""
    for paths, here, there in ((options.sides[0], before, after), (options.sides[1], after, before)):
        for benchmark, way, settings in here:
            if (benchmark, way, settings) not in there:
                what = ", ".join(f"{name} {value}" for name, value in settings)
                yield f"only in {_names(paths)}: {benchmark} {way}{f' ({what})' if what else ''}"


def summary(comparisons: Sequence[Comparison]) -> str:
    """Counts the rows of each verdict."""
    verdicts = [comparison.verdict for comparison in comparisons]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts)


def show(comparisons: Sequence[Comparison]) -> None:
    """A table for each benchmark."""
    out = console()
    for rows in grouped_by(comparisons, lambda comparison: comparison.benchmark):
        table = Table(title=rows[0].benchmark, title_justify="left")
        headings = (
            "way",
            "settings",
            "launches",
            "before, ms",
            "noise",
            "after, ms",
            "noise",
            "after / before",
            "interval",
            "verdict",
        )
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index > 1 else "left", no_wrap=index < 2)
        for row in rows:
            table.add_row(
                row.way,
                told_apart(row, rows),
                " / ".join(map(str, row.launches)),
                _time(row.before),
                _noise(row.noise_before, row.launches[0]),
                _time(row.after),
                _noise(row.noise_after, row.launches[1]),
                f"{row.ratio:.3f}" if isfinite(row.ratio) else "",
                _interval(row),
                row.verdict,
                style=STYLES.get(row.verdict),
            )
        out.print(table)


VERDICTS = (WRONG, SLOWER, FASTER, NOISE, UNKNOWN, TOO_FEW, NONE)
STYLES = {SLOWER: "bold red", WRONG: "bold red", FASTER: "green", NOISE: "dim", UNKNOWN: "yellow", TOO_FEW: "yellow"}
WITHIN = " within"
LEGEND = (
    "Medians, of launches where there are several. noise: how far the median of as many launches more may lie from "
    "this one by chance, 95 % (bootstrap). interval: of the ratio, between launches, so wide that all rows together "
    "are to hold with 95 %; slower and faster: it leaves out 1. within: of the steps of one launch alone, which does "
    "not tell by how much another launch would differ; a verdict takes several files a side, with --before and "
    "--after. too few launches: sets as small as these lie apart altogether by chance too often; take more."
)


def _noise(noise: float, launches: int) -> str:
    return share(noise) + (WITHIN if launches == 1 and isfinite(noise) else "")


def _interval(row: Comparison) -> str:
    if not (isfinite(row.low) and isfinite(row.high)):
        return "not known"
    return f"[{row.low:.3f}, {row.high:.3f}]" + (WITHIN if row.launches == (1, 1) else "")


def _time(seconds: float) -> str:
    return milliseconds(seconds) if isfinite(seconds) else ""
