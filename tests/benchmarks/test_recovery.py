"""``python -m benchmarks recovery``: the arithmetic on diaries that are made up, and two kills; nothing about speed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.commands.recovery import at_work, have_warmed_up
from benchmarks.harness.diaries import Author, Diary, Event, Kill, are_equal, read_diaries, recovery
from benchmarks.report.recovery import draw, points, smoothed

A, B, C = (Author(rank, 100 + rank) for rank in range(3))
KILL = Kill(2.5, C, frozenset((A, B, C)))


def step(number: int, begin: float, end: float, ranks: int = 3, digest: int = 7) -> list[Event]:
    """A step that is finished."""
    return [Event(begin, "begin", number), Event(end, "end", number, ranks, 0.5, digest + number)]


BEFORE = [*step(0, 0.0, 1.0), *step(1, 1.0, 2.0)]


def test_a_diary_can_be_read_while_it_is_written(tmp_path: Path):
    diary = Diary(tmp_path, 2)
    diary.begin(0)
    diary.end(0, 3, 0.25, lambda: 12)
    diary.drop(1)
    file = tmp_path / f"2.{os.getpid()}.diary"
    file.write_text(file.read_text() + "17.5 begin")  # not whole yet
    events = read_diaries(tmp_path)[Author(2, os.getpid())]
    assert [event[1:] for event in events] == [("begin", 0, 0, 0.0, 0), ("end", 0, 3, 0.25, 12), ("drop", 1, 0, 0.0, 0)]


def test_those_that_are_left_take_the_interrupted_step_again():
    again = [Event(2.25, "begin", 2), *step(2, 2.75, 3.0, ranks=2)]
    diaries = {A: [*BEFORE, *again], B: [*BEFORE, *again[:2], again[2]._replace(time=3.5)], C: BEFORE}
    found = recovery(diaries, KILL, 3, restarts=False)
    assert found is not None
    assert (found.seconds, found.repeated, found.dropped, found.step, found.correct) == (1.0, 1, 0, 1.0, True)
    assert recovery({A: diaries[A], B: BEFORE, C: BEFORE}, KILL, 3, restarts=False) is None


def test_a_step_that_the_lost_rank_had_its_part_in_is_not_yet_a_recovery():
    last = step(2, 2.0, 2.6)
    first = step(3, 2.6, 4.5, ranks=2)
    found = recovery({A: [*BEFORE, *last, *first], B: [*BEFORE, *last, *first], C: BEFORE}, KILL, 3, restarts=False)
    assert found is not None
    assert (found.seconds, found.repeated) == (2.0, 0)


def test_a_restart_is_over_with_the_first_step_that_is_new():
    new = {Author(rank, 200 + rank): [*step(1, 6.0, 7.0), *step(2, 7.0, 8.0 + rank)] for rank in range(3)}
    begun = [*BEFORE, Event(2.25, "begin", 2)]
    found = recovery({A: begun, B: begun, C: begun, **new}, KILL, 3, restarts=True)
    assert found is not None
    assert (found.seconds, found.repeated, found.correct) == (7.5, 2, True)
    assert recovery({A: begun, B: begun, C: begun}, KILL, 3, restarts=True) is None


def test_dropped_steps_are_counted():
    after = [Event(2.25, "begin", 2), Event(2.75, "drop", 2), *step(3, 2.75, 3.5, ranks=2)]
    found = recovery({A: [*BEFORE, *after], B: [*BEFORE, *after], C: BEFORE}, KILL, 3, restarts=False)
    assert found is not None
    assert (found.seconds, found.repeated, found.dropped) == (1.0, 0, 1)


def test_other_parameters_are_wrong_but_not_those_of_the_lost_rank():
    after = step(2, 2.75, 3.5, ranks=2)
    of_lost = [*BEFORE, *step(2, 2.0, 2.4, digest=1)]  # which no other rank has taken
    assert recovery({A: [*BEFORE, *after], B: [*BEFORE, *after], C: of_lost}, KILL, 3, restarts=False) is not None
    assert are_equal({A: after, B: after})
    assert not are_equal({A: after, B: step(2, 2.75, 3.5, ranks=2, digest=8)})


def test_ranks_have_warmed_up_once_all_have_taken_steps_together():
    many = [Event(float(number), "end", number, 3) for number in range(30)]
    assert have_warmed_up({C: many, A: many, B: many}, 3) == [A, B, C]
    assert have_warmed_up({A: many, B: many, C: many[1:]}, 3) is None
    assert have_warmed_up({A: many, B: many}, 3) is None
    assert at_work({A: many, B: many[:5], C: [*many, Event(29.5, "begin", 30)]}) == [A, C]


def test_the_picture_shows_the_mean_loss_of_each_step(tmp_path: Path):
    diaries = {A: step(0, 0.0, 1.0), B: [Event(1.5, "end", 0, 3, 1.5), *step(1, 1.5, 2.0)]}
    assert points(diaries) == ([1.0, 2.0], [1.0, 0.5])
    assert smoothed([1.0, 3.0]) == [1.0, 2.0]
    assert smoothed([26.0] + [1.0] * 25)[-2:] == [2.0, 1.0]
    curves = {"fastsync.Elastic": diaries, "torchrun": diaries}
    draw(curves, [0.5], 1, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.end_to_end
def test_two_kills(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = ("--nproc", "2", "--numel", "5000", "--repetitions", "2", "--json", str(tmp_path / "rows.json"))
    assert main(["recovery", *options, "--methods", "fastsync.Elastic"]) == 0
    assert "fastsync.Elastic" in capfd.readouterr().out
    elastic, limit = json.loads((tmp_path / "rows.json").read_text())
    assert (elastic["method"], len(elastic["samples"]), len(limit["samples"])) == ("fastsync.Elastic", 2, 2)
    assert elastic["correct"]
    assert elastic["figures"]["dropped"] == 0.0
