"""Writes figures into README and docs, from the rows in benchmarks/results: ``python -m tools.figures``.

A comment behind a figure says where it is from: ``79.7<!-- = sync-headline; ddp; ms .1f -->``. Its parts are the file
of rows, or the beginning of its name if that is enough; the method; settings that choose among rows, such as
``size=12m``; ``vs METHOD`` for what a figure compares with; and last the quantity with its format. ``--check`` changes
nothing, and fails where a page differs. Tables have rows of one clean commit and one machine each.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness.records import Record, read_json
from benchmarks.harness.statistics import median_interval, replicates
from benchmarks.report.until import Summary, fastest_of_sb3, in_brackets, summaries, times_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NUMBER = r"(?:< )?−?\d(?:[\d,.]*\d)?|–"
MARKER = re.compile(
    rf"(?P<figure>\?|(?:{NUMBER})(?: of \d+| \[[^\]]*\])?)(?P<between>\*{{0,2}})<!-- = (?P<source>[^>]*?) -->"
)
EXCEPT = re.compile(r"<!-- figures: [^>]+ -->")
"""Stands above a table that has no figures of ours, and says whose they are."""
KNOWN_AS_DIRTY = {"ops-h200", "sync-h200-1-rank", "sync-h200-2-ranks", "stream-h200"}
"""Rows of the only GPU that was at hand. Their page says that the tree was changed after its commit."""


@dataclass(frozen=True)
class Measured:
    """Rows of a method, one a launch or a seed; those that it is compared with, and all of the file."""

    rows: Sequence[Record]
    against: Sequence[Record]
    file: Sequence[Record]

    @property
    def median(self) -> float:
        return median(self.rows)

    @property
    def training(self) -> Summary:
        (found,) = summaries([*self.rows, *(row for row in self.file if row.figures["reached"] is None)])
        return found

    @property
    def other(self) -> Summary:
        (found,) = summaries(self.against)
        return found

    @property
    def sb3(self) -> Summary:
        found = fastest_of_sb3(summaries(self.file))
        assert found is not None
        return found

    def figure(self, name: str) -> float:
        return float(np.median([row.figures[name] for row in self.rows]))


def median(rows: Sequence[Record]) -> float:
    """The median of the samples, or of the launches' medians."""
    return float(np.median(replicates([row.samples for row in rows])))


def number(value: float, form: str) -> str:
    """With a minus that is one, and – for what is not known."""
    return f"{value:{form}}".replace("-", "−") if math.isfinite(value) else "–"


def times(scale: float) -> Callable[[Measured, str], str]:
    return lambda of, form: number(of.median * scale, form)


def in_words(p_value: float, form: str) -> str:
    return "< 0.001" if p_value < 0.001 else number(p_value, form)


def quantiles(of: Measured, form: str) -> str:
    samples = [sample for row in of.rows for sample in row.samples]
    low, high = (number(float(np.quantile(samples, share)), form) for share in (0.1, 0.9))
    return f"{number(of.median, form)} [{low}, {high}]"


def interval(of: Measured, form: str) -> str:
    found = median_interval(replicates([row.samples for row in of.rows]))
    value, low, high = (number(each * 1e3, form) for each in found)
    return f"{value} [{low}, {high}]"


def rates(of: Measured, form: str) -> str:
    median, slowest, fastest = (of.figure(name) for name in ("steps_per_second", "slowest", "fastest"))
    return f"{number(median, form)} [{number(slowest, form)}, {number(fastest, form)}]"


QUANTITIES: dict[str, Callable[[Measured, str], str]] = {
    "s": times(1.0),
    "ms": times(1e3),
    "us": times(1e6),
    "beyond": lambda of, form: number((of.median - median(of.against)) * 1e3, form),  # ms more than the other
    "times": lambda of, form: number(median(of.against) / of.median, form),  # as fast as the other
    "share": lambda of, form: number(of.median / median(of.against), form),  # of the other's time
    "quantiles": quantiles,  # seconds, with the tenth and the ninetieth percentile
    "interval": interval,  # milliseconds, with the median's interval
    "rates": rates,  # steps a second, with the slowest and the fastest
    "final": lambda of, form: number(np.mean([last_loss(row) for row in of.rows]), form),
    "above": lambda of, form: number(100 * (last_loss(of.rows[0]) / last_loss(of.against[0]) - 1), form),  # %
    # Of ``ppo --until``:
    "reached": lambda of, form: f"{of.training.reached} of {len(of.training.times)}",
    "seconds": lambda of, form: in_brackets(of.training.seconds, form),
    "ratio": lambda of, form: times_of(of.sb3, of.training, form),  # as fast as Stable-Baselines3, paired
    "sooner": lambda of, form: in_brackets(of.training.sooner(of.sb3), form),
    "logrank": lambda of, form: in_words(of.training.log_rank(of.sb3), form),
    "steps": lambda of, form: number(of.training.steps.value, form),
    "steps_interval": lambda of, form: in_brackets(of.training.steps, form),
    # Beside the other trainings, by environment steps, which do not depend on what else the machine did:
    "fewer_steps": lambda of, form: in_brackets(of.training.after_fewer_steps(of.other), form),
    "logrank_steps": lambda of, form: in_words(of.training.log_rank_of_steps(of.other), form),
    "speed": lambda of, form: number(of.training.speed, form),
    "alone": lambda of, form: number(of.training.alone or math.nan, form),
}
"""What a figure can be. Other names are those of figures in the rows, such as ``sent_bytes/1e6``."""


def last_loss(row: Record) -> float:
    """Of training between sites: the loss after the last step."""
    loss = row.figures[str(row.settings["steps"])]
    assert loss is not None
    return loss


@cache
def file_of(name: str) -> Path:
    """The file of rows whose name is this or begins with it.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = [file for file in RESULTS.glob("*.json") if file.stem == name or file.stem.startswith(f"{name}_")]
    if len(found) != 1:
        raise ValueError(f"benchmarks/results has {len(found)} files called {name}_...json")
    return found[0]


rows_of = cache(read_json)


def chosen(rows: Sequence[Record], method: str, settings: Mapping[str, str]) -> list[Record]:
    """The rows of a method with these settings.

    Raises:
        ValueError: there are none.
    """
    found = [
        row
        for row in rows
        if row.method == method and all(str(row.settings.get(name)) == value for name, value in settings.items())
    ]
    if not found:
        raise ValueError(f"no rows of {method!r} with {settings}; there are {sorted({row.method for row in rows})}")
    return found


class Figure(NamedTuple):
    """A figure as the rows have it, and the rows."""

    text: str
    file: str
    rows: Sequence[Record]


@cache
def figure_of(source: str) -> Figure:
    """Works out what a comment asks for.

    Raises:
        ValueError: there are no such rows, or no such quantity.
    """
    name, method, *chooses, quantity = (part.strip() for part in source.split(";"))
    settings, against = dict[str, str](), None
    for part in chooses:
        if part.startswith("vs "):
            against = part.removeprefix("vs ")
        else:
            setting, _, value = part.partition("=")
            settings[setting] = value
    file = rows_of(file_of(name))
    rows = chosen(file, method, settings)
    other = chosen(file, against, settings) if against else []
    kind, form = quantity.split()
    measured = Measured(rows, other, file)
    if kind in QUANTITIES:
        return Figure(QUANTITIES[kind](measured, form), file_of(name).stem, [*rows, *other])
    key, _, divisor = kind.partition("/")
    if key not in rows[0].figures:
        raise ValueError(f"{kind!r} is neither a quantity nor one of the rows' figures, {', '.join(rows[0].figures)}")
    return Figure(number(measured.figure(key) / float(divisor or 1), form), file_of(name).stem, rows)


def written(page: str) -> str:
    """Returns a page with its figures as the rows have them."""

    def renewed(match: re.Match[str]) -> str:
        return f"{figure_of(match['source']).text}{match['between']}<!-- = {match['source']} -->"

    return MARKER.sub(renewed, page)


def tables(page: str) -> Iterator[tuple[str, str]]:
    """Each table, and the line above it."""
    lines, above = page.splitlines(), ""
    table = list[str]()
    for line in [*lines, ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            yield "\n".join(table), above
            table, above = [], ""
        if line.strip():
            above = line


def faults(page: str) -> Iterator[str]:
    """What is wrong with the rows of a page: they are not of a clean commit, or a table mixes commits or machines."""
    for match in MARKER.finditer(page):
        figure = figure_of(match["source"])
        for row in figure.rows:
            commit = row.environment.get("commit")
            if (commit is None or "dirty" in commit) and figure.file.split("_")[0] not in KNOWN_AS_DIRTY:
                yield f"{figure.text}, {match['source']}: measured at commit {commit}"
    if page.count("<!-- =") != len(MARKER.findall(page)):
        yield "a comment has no figure before it"
    for table, above in tables(page):
        found = [row for match in MARKER.finditer(table) for row in figure_of(match["source"]).rows]
        places = {tuple(row.environment.get(key) for key in ("commit", "cpu", "cores", "gpu")) for row in found}
        if len(places) > 1:
            yield f"rows of several commits or machines, {sorted(places, key=str)}, in the table below {above!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the pages, or says where they differ."""
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; the exit status is 1 if a page differs")
    options, wrong = parser.parse_args(arguments), list[str]()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        try:
            new, found = written(text), list(faults(text))
        except ValueError as error:
            new, found = text, [str(error)]
        if new != text and options.check:
            found.append("figures differ from the rows; run python -m tools.figures")
        elif new != text:
            page.write_text(new, encoding="utf-8")
        wrong += [f"{page.relative_to(ROOT)}: {each}" for each in found]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
