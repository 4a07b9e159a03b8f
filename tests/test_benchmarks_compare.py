"""Two runs side by side: verdicts on rows with a known answer, and what is said about the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.compare import Comparison, compare, differences, grouped
from benchmarks.records import Record, RowFile
from benchmarks.table import told_apart
from tests.benchmark_rows import WHERE, step_row


def row(way: str, median: float, *, number: int = 30, seed: int = 0, size: str = "5k", correct: bool = True) -> Record:
    """Samples around a median, with a few per cent of noise."""
    samples = median * np.random.default_rng([seed, *way.encode()]).lognormal(0.0, 0.05, number)
    settings = {"size": size, "world_size": 2, "seed": seed, "repetitions": number}
    return Record("sync", way, settings, {}, correct, samples.tolist(), WHERE)


def run(folder: Path, before: list[Record], after: list[Record], *options: str) -> int:
    for name, records in (("before", before), ("after", after)):
        RowFile(folder / f"{name}.json").add(records)
    return main(["compare", str(folder / "before.json"), str(folder / "after.json"), *options])


def verdicts(before: list[Record], after: list[Record], threshold: float = 0.0) -> dict[str, str]:
    return {found.way: found.verdict for found in compare(grouped(before), grouped(after), threshold)}


def test_verdicts_on_known_changes():
    before = [row(way, 1.0) for way in ("same", "slower", "faster", "a little slower", "one sample", "wrong", "none")]
    after = [
        row("same", 1.0, seed=1),
        row("slower", 1.2, seed=1),
        row("faster", 0.8, seed=1),
        row("a little slower", 1.06, seed=1),
        row("one sample", 2.0, seed=1, number=1),
        row("wrong", 1.0, seed=1, correct=False),
        replace(row("none", 1.0, seed=1), samples=[]),
    ]
    expected = {
        "same": "within noise",
        "slower": "slower",
        "faster": "faster",
        "a little slower": "slower",
        "one sample": "too few samples",
        "wrong": "WRONG RESULT",
        "none": "too few samples",
    }
    assert verdicts(before, after) == expected
    assert verdicts(before, after, threshold=0.1) == expected | {"a little slower": "within noise"}
    (slower,) = (found for found in compare(grouped(before), grouped(after)) if found.way == "slower")
    assert slower.low < slower.ratio < slower.high
    assert slower.ratio == pytest.approx(1.2, rel=0.05)
    assert slower.ratio == slower.after / slower.before
    assert 0 < slower.noise_before < 0.1


def test_many_rows_without_a_change_give_no_alarm():
    """With 95 % each, 20 rows would raise a false alarm in two of three runs; with 95 % together, one in 20 does."""
    before = [row(f"way {index}", 1.0, number=12) for index in range(20)]
    after = [row(f"way {index}", 1.0, number=12, seed=1) for index in range(20)]
    assert set(verdicts(before, after).values()) == {"within noise"}


def test_launches_are_taken_together_and_each_counts_once():
    """Within a launch all steps are the same: 1000 of them are not 1000 samples."""
    before = [step_row(2, [1.0 + launch / 10] * 1000, launch=launch) for launch in range(3)]
    after = [step_row(2, [1.35 + launch / 10] * 1000, launch=launch) for launch in range(3)]
    (found,) = compare(grouped(before), grouped(after))
    assert (found.before, found.after) == (pytest.approx(1.1), pytest.approx(1.45))
    assert found.verdict == "too few samples"
    before = [step_row(2, [1.0 + launch / 100] * 5, launch=launch) for launch in range(6)]
    after = [step_row(2, [1.35 + launch / 100] * 5, launch=launch) for launch in range(6)]
    (found,) = compare(grouped(before), grouped(after))
    assert found.verdict == "slower"


def test_what_measures_something_else_is_not_compared():
    before, after = grouped([row("ddp", 1.0, size="5k")]), grouped([row("ddp", 1.0, size="12m", seed=1)])
    assert compare(before, after) == []
    marked = replace(row("ddp", 1.0), settings={**row("ddp", 1.0).settings, "oversubscribed": True})
    assert compare(before, grouped([marked])) == []
    other = replace(row("ddp", 1.0, seed=9, number=20), benchmark="sync")
    assert len(compare(before, grouped([other]))) == 1


def test_the_exit_status_says_if_something_is_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    same, slower, faster = row("ddp", 1.0, seed=1), row("ddp", 1.3, seed=1), row("ddp", 0.7, seed=1)
    assert run(tmp_path, [row("ddp", 1.0)], [same]) == 0
    assert run(tmp_path, [row("ddp", 1.0)], [faster]) == 0
    capsys.readouterr()
    assert run(tmp_path, [row("ddp", 1.0), row("cat", 1.0)], [slower, row("cat", 1.0, seed=1)]) == 1
    assert "1 slower, 1 within noise" in capsys.readouterr().out
    assert run(tmp_path, [row("ddp", 1.0)], [slower], "--threshold", "0.5") == 0
    assert run(tmp_path, [row("ddp", 1.0)], [replace(same, correct=False)]) == 1


def test_what_only_one_run_has_and_another_environment_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before = [row("ddp", 1.0), row("gone", 1.0)]
    elsewhere = WHERE | {"torch": "2.14.0", "commit": "abc", "time": "2027-01-01T00:00:00+00:00"}
    after = [replace(row(way, 1.0, seed=1), environment=elsewhere) for way in ("ddp", "new")]
    assert run(tmp_path, before, after) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "before.json: sync gone (size '5k', world_size 2)" in said
    assert "after.json: sync new (size '5k', world_size 2)" in said
    assert list(differences(before, after)) == [
        "commit: unknown before, abc after",
        "ANOTHER ENVIRONMENT: torch: 2.13.0 before, 2.14.0 after",
    ]
    assert "ANOTHER ENVIRONMENT: torch" in said
    assert list(differences(before, before)) == []


def test_rows_are_told_apart_by_no_more_than_that_takes():
    def found(way: str, **settings: object) -> Comparison:
        return Comparison("sync", way, settings, 1.0, 1.0, 0.1, 0.1, 1.0, 0.9, 1.1, "within noise")

    rows = [
        found("ddp", size="5k", numel=5000, world_size=1),
        found("ddp", size="5k", numel=5000, world_size=2),
        found("ddp", size="12m", numel=12_000_000, world_size=2),
        found("cat", size="5k", numel=5000, world_size=2),
    ]
    told = [told_apart(one, rows) for one in rows]
    assert told == ["size 5k, world_size 1", "size 5k, world_size 2", "size 12m", ""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no such file"),
        ('[{"way": 1}]', "holds no rows"),
        ("[]", "have no row in common"),
        ("nonsense", "holds no"),
    ],
)
def test_files_that_cannot_be_compared(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    RowFile(good).add([row("ddp", 1.0)])
    if text is not None:
        bad.write_text(text)
    assert main(["compare", str(good), str(bad)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_help_says_what_the_exit_status_means(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["compare", "--help"])
    assert "exit status is 1 if something has become slower" in " ".join(capsys.readouterr().out.split())
