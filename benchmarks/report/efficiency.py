"""From the rows of launches to how well a job scales, and where the time of a step goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.baselines.methods import SYNCHRONISED
from benchmarks.baselines.training_steps import NO_DDP
from benchmarks.harness.records import Record
from benchmarks.harness.statistics import Interval, median_interval, ratio_interval, replicates
from benchmarks.report.table import OVERSUBSCRIBED, grouped_by

PARTS = ("compute", "contention", "stragglers", "exposed")


@dataclass(frozen=True)
class Point:
    """One method at one world size. Times in seconds."""

    method: str
    world_size: int
    oversubscribed: bool
    launches: int
    step: Interval
    efficiency: Interval
    compute: float
    contention: float | None
    """None where world size 1 was not measured."""
    stragglers: float
    exposed: float

    @property
    def ranks(self) -> str:
        """The world size in words, marked where ranks share cores or GPUs."""
        shared = f" ({OVERSUBSCRIBED})" if self.oversubscribed else ""
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''}{shared}"

    @property
    def parts(self) -> dict[str, float]:
        """The parts of a step that are known."""
        return {name: value for name in PARTS if (value := getattr(self, name)) is not None}


def points(records: Sequence[Record]) -> list[Point]:
    """A point for each method and world size that was measured, the methods in the order of the rows.

    Raises:
        ValueError: the rows are of several jobs, of which none can be held against another.
    """
    rows = _right(records)
    jobs = dict.fromkeys(map(_job, rows))
    if len(jobs) > 1:
        raise ValueError(f"the rows are of several jobs, {'; '.join(jobs)}: choose files of one job")
    found = []
    base, cases = _reference(rows), [case for case in _cases(rows) if case[0].method in SYNCHRONISED]
    for of_method in grouped_by(cases, lambda case: case[0].method):
        of_method.sort(key=_world_size)
        alone = of_method[0] if _world_size(of_method[0]) == 1 else None
        found += [_point(base, alone, case) for case in of_method]
    return found


def _world_size(case: Sequence[Record]) -> int:
    return int(case[0].settings["world_size"])


def _right(records: Sequence[Record]) -> list[Record]:
    """Steps that were timed. Earlier versions also have rows of the bare all_reduce, without a model."""
    return [record for record in records if "model" in record.settings and record.samples and record.correct]


def _cases(rows: Sequence[Record]) -> list[list[Record]]:
    """The launches of each method and world size."""
    return grouped_by(rows, lambda row: (row.method, row.settings["world_size"]))


def _reference(rows: Sequence[Record]) -> list[Record]:
    """What all efficiencies are relative to: the step without communication on the smallest world size.

    Without rows of that it is the fastest method there.
    """
    return min(
        _cases(rows),
        key=lambda case: (_world_size(case), case[0].method != NO_DDP, median(_replicates(case))),
        default=[],
    )


def reference(records: Sequence[Record]) -> tuple[str, float]:
    """Its name, and a step's seconds."""
    base = _reference(_right(records))
    what = "a step without communication" if base[0].method == NO_DDP else base[0].method
    ranks = _world_size(base)
    return f"{what} on {ranks} rank{'s' if ranks > 1 else ''}", median(_replicates(base))


def _job(record: Record) -> str:
    """Names what is the same at all world sizes of a job."""
    settings = record.settings
    strong = settings["scaling"] == "strong"
    batch_size = settings["batch_size"] * (settings["world_size"] if strong else 1)
    model = " ".join(str(settings[name]) for name in ("model", "scale") if name in settings)
    return (
        f"{settings['scaling']} scaling of {model} with {settings['numel']:,} parameters and {batch_size} samples "
        f"{'in all' if strong else 'a rank'} over {settings['backend']}"
    )


def _point(base: Sequence[Record], alone: Sequence[Record] | None, rows: Sequence[Record]) -> Point:
    samples, strong = _replicates(rows), rows[0].settings["scaling"] == "strong"
    share = _world_size(rows) / _world_size(base) if strong else 1.0
    efficiency = Interval(*(value / share for value in ratio_interval(_replicates(base), samples)))
    if rows is base:
        efficiency = Interval(1.0, 1.0, 1.0)  # by definition
    step, compute, stragglers = median_interval(samples), _figure(rows, "compute"), _figure(rows, "stragglers")
    contention = None
    if alone is not None:
        fair = _figure(alone, "compute") / (_world_size(rows) if strong else 1)
        compute, contention = fair, compute - fair
    return Point(
        world_size=_world_size(rows),
        oversubscribed=any(row.settings.get(OVERSUBSCRIBED) for row in rows),
        method=rows[0].method,
        launches=len(rows),
        step=step,
        efficiency=efficiency,
        compute=compute,
        contention=contention,
        stragglers=stragglers,
        exposed=step.value - compute - (contention or 0.0) - stragglers,
    )


def _replicates(rows: Sequence[Record]) -> list[float]:
    return replicates([row.samples for row in rows])


def _figure(rows: Sequence[Record], name: str) -> float:
    """The median of the launches."""
    return median(row.figures[name] or 0.0 for row in rows)


def overhead(records: Sequence[Record]) -> float | None:
    """Seconds that an empty step takes, median over all launches; None where none was measured."""
    costs = [cost for record in records if (cost := record.figures.get("overhead")) is not None]
    return median(costs) if costs else None
