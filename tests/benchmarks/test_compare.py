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


def write(folder: Path, name: str, records: list[Record]) -> list[str]:
    """A file for each launch, as commands write them."""
    paths = []
    for seed in dict.fromkeys(record.settings["seed"] for record in records):
        path = folder / f"{name}-{seed}.json"
        RowFile(path).add(record for record in records if record.settings["seed"] == seed)
        paths.append(str(path))
    return paths


def run(folder: Path, before: list[Record], after: list[Record], *options: str) -> int:
    files = ("--before", *write(folder, "before", before), "--after", *write(folder, "after", after))
    return main(["compare", *files, *options])


def verdicts(before: list[Record], after: list[Record], threshold: float = 0.0) -> dict[str, str]:
    return {found.way: found.verdict for found in compare(grouped(before), grouped(after), threshold)}


def test_verdicts_on_known_changes():
    changes = {"same": 1.0, "slower": 1.3, "faster": 0.7, "a little slower": 1.15}
    before = [record for way in changes for record in launches(way, 1.0)]
    after = [record for way, median in changes.items() for record in launches(way, median, seed=1)]
    for way, number in (("one launch", 1), ("two launches", 2), ("wrong", LAUNCHES), ("was wrong", LAUNCHES)):
        before += launches(way, 1.0)
        after += launches(way, 2.0, seed=1, number=number)
    after = [replace(record, correct=record.way != "wrong") for record in after]
    before = [replace(record, correct=record.way != "was wrong") for record in before]
    before += launches("none", 1.0)
    after.append(replace(row("none", 1.0, seed=1), samples=[]))
    expected = {
        "same": "within noise",
        "slower": "slower",
        "faster": "faster",
        "a little slower": "slower",
        "one launch": "too few launches",
        "two launches": "too few launches",
        "wrong": "WRONG RESULT",
        "was wrong": "WRONG RESULT",
        "none": "no samples",
    }
    assert verdicts(before, after) == expected
    assert verdicts(before, after, threshold=0.25) == expected | {"a little slower": "within noise"}
    (slower,) = (found for found in compare(grouped(before), grouped(after)) if found.way == "slower")
    assert slower.launches == (LAUNCHES, LAUNCHES)
    assert slower.ratio.low < slower.ratio.value < slower.ratio.high
    assert slower.ratio.value == pytest.approx(1.3, rel=0.1)
    assert slower.ratio.value == slower.after / slower.before


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
    assert (found.before, found.after) == (pytest.approx(1.1), pytest.approx(1.45))
    assert found.verdict == "too few launches"
    before = [step_row(2, [1.0 + launch / 100] * 5, launch=launch) for launch in range(6)]
    after = [step_row(2, [1.35 + launch / 100] * 5, launch=launch) for launch in range(6)]
    (found,) = compare(grouped(before), grouped(after))
    assert found.verdict == "slower"
    (found,) = compare(grouped(before), grouped(after[:1]))
    assert (found.verdict, found.launches) == ("too few launches", (6, 1))
    assert not found.ratio.is_known


def test_each_sample_of_a_training_is_a_launch():
    """A training runs in processes of its own."""
    before, after = (
        [replace(row("sb3", median, seed=seed, number=6), benchmark="ppo")] for seed, median in ((0, 1.0), (1, 2.0))
    )
    (found,) = compare(grouped(before), grouped(after))
    assert (found.verdict, found.launches) == ("slower", (6, 6))


def test_what_measures_something_else_is_not_compared():
    before, after = grouped([row("ddp", 1.0, size="5k")]), grouped([row("ddp", 1.0, size="12m", seed=1)])
    assert compare(before, after) == []
    marked = replace(row("ddp", 1.0), settings={**row("ddp", 1.0).settings, "oversubscribed": True})
    assert compare(before, grouped([marked])) == []
    other = row("ddp", 1.0, seed=9, number=20)
    assert len(compare(before, grouped([other]))) == 1
    without = replace(other, settings={**other.settings, "of an older version": None})
    assert len(compare(before, grouped([without]))) == 1


def test_the_exit_status_says_if_something_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = launches("ddp", 1.0)
    same, slower, faster = (launches("ddp", median, seed=1) for median in (1.0, 1.3, 0.7))
    assert run(tmp_path, before, same) == 0
    assert run(tmp_path, before, faster) == 0
    capsys.readouterr()
    assert run(tmp_path, before + launches("cat", 1.0), slower + launches("cat", 1.0, seed=1)) == 1
    assert "1 slower, 1 within noise" in capsys.readouterr().out
    assert run(tmp_path, before, slower, "--threshold", "0.5") == 0
    assert run(tmp_path, before, [replace(same[0], correct=False)]) == 1
    assert run(tmp_path, [replace(before[0], correct=False)], same) == 1


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ("[]", "have no row in common"),
    ],
)
def test_files_that_cannot_be_compared(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    RowFile(good).add([row("ddp", 1.0)])
    if text is not None:
        bad.write_text(text)
    assert main(["compare", "--before", str(good), "--after", str(bad)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
