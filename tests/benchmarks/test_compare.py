"""Two runs side by side: verdicts on rows with a known answer, and what is said about the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.commands.compare import compare, differences, grouped, only_in
from benchmarks.harness.records import Record, RowFile
from tests.benchmarks.rows import WHERE, step_row

LAUNCHES = 6
LAUNCH_SPREAD = 0.03
"""Of the medians of launches of the same code."""


def row(way: str, median: float, *, number: int = 30, seed: int = 0, size: str = "5k", correct: bool = True) -> Record:
    """One launch: samples around its median, with a few per cent of noise."""
    generator = np.random.default_rng([seed, *way.encode()])
    samples = median * generator.lognormal(0.0, LAUNCH_SPREAD) * generator.lognormal(0.0, 0.05, number)
    settings = {"size": size, "world_size": 2, "seed": seed, "repetitions": number}
    return Record("sync", way, settings, {}, correct, samples.tolist(), WHERE)


def launches(way: str, median: float, *, seed: int = 0, number: int = LAUNCHES) -> list[Record]:
    return [row(way, median, seed=seed * 1000 + launch) for launch in range(number)]


def run(folder: Path, before: list[Record], after: list[Record], *options: str) -> int:
    """With a file for each launch, as commands write them."""
    arguments = []
    for name, records in (("before", before), ("after", after)):
        arguments.append(f"--{name}")
        for seed in dict.fromkeys(record.settings["seed"] for record in records):
            path = folder / f"{name}-{seed}.json"
            RowFile(path).add(record for record in records if record.settings["seed"] == seed)
            arguments.append(str(path))
    return main(["compare", *arguments, *options])


def verdicts(before: list[Record], after: list[Record], threshold: float = 0.0) -> dict[str, str]:
    return {found.way: found.verdict for found in compare(grouped(before), grouped(after), threshold)}


def test_verdicts_on_known_changes():
    changes = {"same": 1.0, "slower": 1.3, "faster": 0.7, "a little slower": 1.15}
    before = [record for way in changes for record in launches(way, 1.0)]
    after = [record for way, median in changes.items() for record in launches(way, median, seed=1)]
    for way, number in (("two launches", 2), ("wrong", LAUNCHES)):
        before += launches(way, 1.0)
        after += launches(way, 2.0, seed=1, number=number)
    after = [replace(record, correct=record.way != "wrong") for record in after]
    expected = {
        "same": "within noise",
        "slower": "slower",
        "faster": "faster",
        "a little slower": "slower",
        "two launches": "too few launches",
        "wrong": "WRONG RESULT",
    }
    assert verdicts(before, after) == expected
    assert verdicts(before, after, threshold=0.25) == expected | {"a little slower": "within noise"}
    (slower,) = (found for found in compare(grouped(before), grouped(after)) if found.way == "slower")
    assert slower.ratio.low < slower.ratio.value < slower.ratio.high
    assert slower.ratio.value == pytest.approx(1.3, rel=0.1)


def test_many_rows_without_a_change_give_no_alarm():
    """With 95 % each, 20 rows would raise a false alarm in two of three runs; with 95 % together, one in 20 does."""
    before = [record for index in range(20) for record in launches(f"way {index}", 1.0)]
    after = [record for index in range(20) for record in launches(f"way {index}", 1.0, seed=1)]
    assert set(verdicts(before, after).values()) == {"within noise"}


def test_launches_of_one_file_count_once_each():
    """Within a launch all steps are the same: 1000 of them are not 1000 samples."""
    before = [step_row(2, [1.0 + launch / 10] * 1000, launch=launch) for launch in range(3)]
    after = [step_row(2, [1.35 + launch / 10] * 1000, launch=launch) for launch in range(3)]
    (found,) = compare(grouped(before), grouped(after))
    assert found.verdict == "too few launches"
    before = [step_row(2, [1.0 + launch / 100] * 5, launch=launch) for launch in range(6)]
    after = [step_row(2, [1.35 + launch / 100] * 5, launch=launch) for launch in range(6)]
    (found,) = compare(grouped(before), grouped(after))
    assert found.verdict == "slower"


def test_what_measures_something_else_is_not_compared():
    before, after = grouped([row("ddp", 1.0, size="5k")]), grouped([row("ddp", 1.0, size="12m", seed=1)])
    assert compare(before, after) == []
    marked = replace(row("ddp", 1.0), settings={**row("ddp", 1.0).settings, "oversubscribed": True})
    assert compare(before, grouped([marked])) == []
    assert len(compare(before, grouped([row("ddp", 1.0, seed=9, number=20)]))) == 1


def test_the_exit_status_says_if_something_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = launches("ddp", 1.0)
    same, slower, faster = (launches("ddp", median, seed=1) for median in (1.0, 1.3, 0.7))
    assert run(tmp_path, before, same) == 0
    assert run(tmp_path, before, faster) == 0
    assert run(tmp_path, before, slower) == 1
    assert run(tmp_path, before, slower, "--threshold", "0.5") == 0
    assert run(tmp_path, before, [replace(same[0], correct=False)]) == 1
    (tmp_path / "empty.json").write_text("[]")
    for other, message in (("nowhere", "there is no such file"), ("empty", "have no row in common")):
        files = ["--before", str(tmp_path / "before-0.json"), "--after", str(tmp_path / f"{other}.json")]
        assert main(["compare", *files]) == 2
        assert message in capsys.readouterr().err


def test_what_only_one_run_has_and_another_environment_are_pointed_out():
    elsewhere = WHERE | {"torch": "2.14.0", "commit": "abc", "time": "2027-01-01T00:00:00+00:00"}
    before, after = [row("ddp", 1.0), row("gone", 1.0)], [replace(row("ddp", 1.0, seed=1), environment=elsewhere)]
    assert list(only_in("before", grouped(before), grouped(after))) == [
        "only before: sync gone (size '5k', world_size 2)"
    ]
    assert list(differences(before, after)) == [
        "commit: unknown before, abc after",
        "ANOTHER ENVIRONMENT: torch: 2.13.0 before, 2.14.0 after",
    ]
    assert list(differences(before, before)) == []
