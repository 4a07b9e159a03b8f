"""``python -m benchmarks compare --before B1.json B2.json ... --after A1.json A2.json ...``: what has changed.

Rows belong together if they measure the same: benchmark, way, and all settings but those that say how often and with
which random numbers. Each launch of the same counts as one sample, its median: its steps have processes, connections
and memory in common, and the next launch has others. So a verdict takes several launches a side.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from benchmarks.harness.records import Record, read_json
from benchmarks.harness.statistics import CONFIDENCE, Interval, ratio_interval
from benchmarks.report.table import (
    WITHIN_NOISE,
    ends,
    grouped_by,
    make_table,
    milliseconds,
    print_lines,
    print_table,
    told_apart,
)

PROG = "python -m benchmarks compare"
HOW_OFTEN = ("seed", "launch", "repetitions", "warmup")
"""Settings that do not say what is measured."""
EXPECTED = ("time", "commit", "fastsync")
"""What of the environment is to differ before and after a change."""
SAMPLES_ARE_LAUNCHES = ("ppo",)
"""Benchmarks of which each sample is a run of new processes. In a row of any other they are steps of one launch."""
FASTER, SLOWER, NOISE, WRONG = "faster", "slower", WITHIN_NOISE, "WRONG RESULT"
TOO_FEW, NONE = "too few launches", "no samples"
STYLES = {SLOWER: "bold red", WRONG: "bold red", FASTER: "green", NOISE: "dim", TOO_FEW: "yellow", NONE: None}

Key = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Options:
    """Compare two runs of the same benchmarks: ratios of medians with their intervals, and which are beyond noise.

    Most commands make one launch a file, and how launches differ takes several: four files a side at least, more for
    many rows. The exit status is 1 if something has become slower beyond noise, or gives a wrong result, else 0.
    """

    before: tuple[Path, ...]
    """Files of one run, as --json and reports (rows.json) have them, of one or more launches each."""
    after: tuple[Path, ...]
    """Files of another run of the same."""
    threshold: float = 0.01
    """Changes of the median by a smaller part than this are noise, however sure they are."""

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold={self.threshold} must not be negative")
        for paths in (self.before, self.after):
            if not paths:
                raise ValueError("before and after: name at least one file for each")
            if len({path.resolve() for path in paths}) < len(paths):
                raise ValueError(f"{', '.join(map(str, paths))}: a file that is named twice is no second launch")


@dataclass(frozen=True)
class Comparison:
    """One thing that both runs have measured. Seconds, medians of launches; None where there are no samples."""

    benchmark: str
    way: str
    settings: Mapping[str, Any]
    launches: tuple[int, int]
    before: float | None
    after: float | None
    ratio: Interval
    """After over before."""
    verdict: str


def main(arguments: Sequence[str]) -> int:
    """Compares and prints.

    Returns:
        The exit status: 0; 1 if something is slower beyond noise or wrong; 2 for files that cannot be compared.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    try:
        runs = [[record for path in paths for record in read_json(path)] for paths in (options.before, options.after)]
        before, after = (grouped(run) for run in runs)
        if not before.keys() & after.keys():
            raise ValueError("the files before and after have no row in common")
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    comparisons = compare(before, after, options.threshold)
    for rows in grouped_by(comparisons, lambda comparison: comparison.benchmark):
        print_table(rows[0].benchmark, make_table(columns(rows), rows), [STYLES[row.verdict] for row in rows])
    verdicts = [comparison.verdict for comparison in comparisons]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in STYLES if verdict in verdicts)
    alone = [*only_in("before", before, after), *only_in("after", after, before)]
    print_lines([*differences(*runs), *alone, LEGEND, counts])
    return int(any(verdict in (SLOWER, WRONG) for verdict in verdicts))


def grouped(records: Sequence[Record]) -> dict[Key, list[Record]]:
    """The rows that measure the same, by what that is."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        settings = _what(record)
        key = (record.benchmark, record.way, tuple((name, repr(settings[name])) for name in sorted(settings)))
        groups.setdefault(key, []).append(record)
    return groups


def _what(record: Record) -> dict[str, Any]:
    """A setting of None is one that another version does not have."""
    return {name: value for name, value in record.settings.items() if name not in HOW_OFTEN and value is not None}


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
    was, is_ = _launches(before), _launches(after)
    ratio, launches = ratio_interval(is_, was, confidence), (len(was), len(is_))
    verdict = WRONG
    if all(row.correct for row in (*before, *after)):
        verdict = _verdict(ratio, launches, confidence, threshold)
    middles = [median(samples) if samples else None for samples in (was, is_)]
    return Comparison(after[0].benchmark, after[0].way, _what(after[0]), launches, *middles, ratio, verdict)


def _launches(rows: Sequence[Record]) -> list[float]:
    """The median of each launch."""
    if rows[0].benchmark in SAMPLES_ARE_LAUNCHES:
        return [sample for row in rows for sample in row.samples]
    return [median(row.samples) for row in rows if row.samples]


def _verdict(ratio: Interval, launches: tuple[int, int], confidence: float, threshold: float) -> str:
    if min(launches) == 0:
        return NONE
    # The chance that two such sets lie apart altogether though nothing has changed: no test can do with less.
    if 2 / comb(sum(launches), launches[0]) > 1 - confidence or not ratio.is_known:
        return TOO_FEW
    if ratio.low > 1 and ratio.value > 1 + threshold:
        return SLOWER
    if ratio.high < 1 and ratio.value < 1 - threshold:
        return FASTER
    return NOISE


def differences(before: Sequence[Record], after: Sequence[Record]) -> Iterator[str]:
    """Names what of the environment is not the same in both runs."""
    where = [_environment(run) for run in (before, after)]
    names = dict.fromkeys(name for values in where for name in values if name != "time")
    changed = [name for name in names if where[0].get(name) != where[1].get(name)]
    for name in sorted(changed, key=lambda name: name not in EXPECTED):
        was, is_ = (" or ".join(sorted(values.get(name, {"unknown"}))) for values in where)
        yield f"{'' if name in EXPECTED else 'ANOTHER ENVIRONMENT: '}{name}: {was} before, {is_} after"


def _environment(run: Sequence[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in run:
        for name, value in record.environment.items():
            found.setdefault(name, set()).add(str(value))
    return found


def only_in(side: str, here: Mapping[Key, Any], there: Mapping[Key, Any]) -> Iterator[str]:
    """The rows that only one run has."""
    for benchmark, way, settings in here:
        if (benchmark, way, settings) not in there:
            what = ", ".join(f"{name} {value}" for name, value in settings)
            yield f"only {side}: {benchmark} {way}{f' ({what})' if what else ''}"


def columns(rows: Sequence[Comparison]) -> Mapping[str, Any]:
    """What the table of a benchmark's rows shows."""
    return {
        "way": lambda row: row.way,
        "settings": lambda row: told_apart(row, rows),
        "launches": lambda row: " / ".join(map(str, row.launches)),
        "before, ms": lambda row: milliseconds(row.before),
        "after, ms": lambda row: milliseconds(row.after),
        "after / before": lambda row: f"{row.ratio.value:.3f}" if isfinite(row.ratio.value) else "",
        "interval": lambda row: ends(row.ratio),
        "verdict": lambda row: row.verdict,
    }


LEGEND = (
    "Medians of launches. interval: of the ratio, between launches, so wide that all rows together are to hold with "
    "95 %; slower and faster: it leaves out 1. too few launches: sets as small as these lie apart altogether by chance "
    "too often; take more files a side."
)
