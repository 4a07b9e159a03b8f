"""``python -m benchmarks compare BEFORE.json AFTER.json``: what has become slower or faster, beyond noise.

Rows belong together if they measure the same: benchmark, way, and all settings but those that say how often and with
which random numbers. Several launches of the same are taken together, each as one sample: its median.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb, isfinite
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from rich.table import Table

from benchmarks.records import Record, read_json
from benchmarks.statistics import CONFIDENCE, noise_band, ratio_interval, replicates
from benchmarks.table import console, milliseconds, share, told_apart

PROG = "python -m benchmarks compare"
HOW_OFTEN = ("seed", "launch", "repetitions", "warmup")
"""Settings that do not say what is measured."""
EXPECTED = ("time", "commit", "fastsync")
"""What of the environment is to differ before and after a change."""
FASTER, SLOWER, NOISE, TOO_FEW, WRONG = "faster", "slower", "within noise", "too few samples", "WRONG RESULT"

Key = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Options:
    """Compare two runs of the same benchmarks: ratios of medians with their intervals, and which are beyond noise.

    The exit status is 1 if something has become slower beyond noise, or gives a wrong result, and 0 otherwise.
    """

    before: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="BEFORE.json")]
    """Rows of a run, as --json and reports (rows.json) have them."""
    after: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="AFTER.json")]
    """Rows of another run of the same."""
    threshold: float = 0.01
    """Changes of the median by a smaller part than this are noise, however sure they are."""

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold={self.threshold} must not be negative")


@dataclass(frozen=True)
class Comparison:
    """One thing that both runs have measured. Medians in seconds."""

    benchmark: str
    way: str
    settings: Mapping[str, Any]
    before: float
    after: float
    noise_before: float
    noise_after: float
    """How far a repetition's median may be from this one, as a part of it."""
    ratio: float
    """After over before."""
    low: float
    high: float
    verdict: str


def main(arguments: Sequence[str]) -> int:
    """Compares and prints.

    Returns:
        The exit status: 0; 1 if something is slower beyond noise or wrong; 2 for files that cannot be compared.
    """
    options = tyro.cli(Options, prog=PROG, args=arguments)
    try:
        runs = [_read(path) for path in (options.before, options.after)]
        before, after = (grouped(run) for run in runs)
        if not before.keys() & after.keys():
            raise ValueError(f"{options.before} and {options.after} have no row in common: nothing to compare")
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
    """What both runs have, in the order of the second.

    The intervals hold all together with CONFIDENCE, so that many rows do not make one false alarm likely (C. E.
    Bonferroni): each for itself with 1 - (1 - CONFIDENCE) / rows.
    """
    common = [key for key in after if key in before]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(common))
    return [_compare(before[key], after[key], confidence, threshold) for key in common]


def _compare(before: Sequence[Record], after: Sequence[Record], confidence: float, threshold: float) -> Comparison:
    samples = [replicates([row.samples for row in rows]) for rows in (before, after)]
    ratio, low, high = ratio_interval(samples[1], samples[0], confidence)
    # The chance that two such sets lie apart altogether though nothing has changed: no test can do with less.
    total = sum(len(of_run) for of_run in samples)
    too_few = min(map(len, samples)) < 1 or 2 / comb(total, len(samples[0])) > 1 - confidence
    if not all(row.correct for row in after):
        verdict = WRONG
    elif too_few:
        verdict = TOO_FEW
    elif low > 1 and ratio > 1 + threshold:
        verdict = SLOWER
    elif high < 1 and ratio < 1 - threshold:
        verdict = FASTER
    else:
        verdict = NOISE
    medians = [median(of_run) if of_run else float("nan") for of_run in samples]
    settings = {name: value for name, value in after[0].settings.items() if name not in HOW_OFTEN}
    noise = [noise_band(of_run) for of_run in samples]
    return Comparison(after[0].benchmark, after[0].way, settings, *medians, *noise, ratio, low, high, verdict)


def differences(before: Sequence[Record], after: Sequence[Record]) -> Iterator[str]:
    """What of the environment is not the same in both runs."""
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
    for path, here, there in ((options.before, before, after), (options.after, after, before)):
        for benchmark, way, settings in here:
            if (benchmark, way, settings) not in there:
                what = ", ".join(f"{name} {value}" for name, value in settings)
                yield f"only in {path}: {benchmark} {way}{f' ({what})' if what else ''}"


def summary(comparisons: Sequence[Comparison]) -> str:
    """How many rows have which verdict."""
    verdicts = [comparison.verdict for comparison in comparisons]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts)


def show(comparisons: Sequence[Comparison]) -> None:
    """A table for each benchmark."""
    out = console()
    for benchmark in dict.fromkeys(comparison.benchmark for comparison in comparisons):
        rows = [comparison for comparison in comparisons if comparison.benchmark == benchmark]
        table = Table(title=benchmark, title_justify="left")
        headings = (
            "way",
            "settings",
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
                _time(row.before),
                share(row.noise_before),
                _time(row.after),
                share(row.noise_after),
                f"{row.ratio:.3f}" if isfinite(row.ratio) else "",
                f"[{row.low:.3f}, {row.high:.3f}]" if isfinite(row.low) and isfinite(row.high) else "not known",
                row.verdict,
                style=STYLES.get(row.verdict),
            )
        out.print(table)


VERDICTS = (WRONG, SLOWER, FASTER, NOISE, TOO_FEW)
STYLES = {SLOWER: "bold red", WRONG: "bold red", FASTER: "green", NOISE: "dim", TOO_FEW: "yellow"}
LEGEND = (
    "Medians. noise: how far a repetition's median may lie from this one by chance, 95 % (bootstrap). interval: of the "
    "ratio, so wide that all rows together hold with 95 %; slower and faster: it leaves out 1. too few samples: sets "
    "as small as these lie apart altogether by chance too often; take more repetitions (of scaling: six or more)."
)


def _time(seconds: float) -> str:
    return milliseconds(seconds) if isfinite(seconds) else ""
