"""Fixed cases of the drill, how one that fails shrinks, and the drills' table."""

from __future__ import annotations

import importlib
import re
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import SkipTest

import pytest

from tests.drill import __main__, endurance, oracle
from tests.drill.cases import Case
from tests.engine.entry_points import ALL


@pytest.mark.timeout(120)
@pytest.mark.parametrize("entry_point", ALL)
def test_random_cases(entry_point: str) -> None:
    assert [oracle.problem_of(Case(entry_point, seed)) for seed in range(6)] == [None] * 6


@pytest.mark.parametrize("grows", [False, True])
def test_what_grows_is_found(grows: bool) -> None:
    kept: list[bytearray] = []
    with pytest.raises(AssertionError, match="KiB of memory grew") if grows else nullcontext():
        endurance.repeat(lambda _: kept.append(bytearray(b"1") * 2**18) if grows else None, 200)  # type: ignore[func-returns-value]


def test_cases_follow_from_their_seeds_and_have_whatever_may_happen() -> None:
    assert Case("attach", 7).happens == Case("attach", 7).happens != Case("attach", 8).happens
    cases = [Case(entry_point, seed) for entry_point in ALL for seed in range(40)]
    assert {what for case in cases for what in case.happens} == {
        *("parameters", "steps", "transposed", "tied", "frozen", "integer", "complex", "nodes", "sum", "weights"),
        *("accumulates", "fails", "piggybacks", "reduces", "extreme", "group", "join", "memory"),
    }
    assert {case.world_size for case in cases} == {2, 3, 4, 5}


def test_a_failing_case_shrinks_to_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem_of(case: Case) -> str | None:
        return "wrong norm" if any(step.piggybacks for step in case.steps) else None

    monkeypatch.setattr(oracle, "problem_of", problem_of)
    case = next(case for case in (Case("attach", seed) for seed in range(99)) if problem_of(case))
    with pytest.raises(AssertionError, match=r": wrong norm$") as error:
        oracle.check(case, time.monotonic() + 60)
    _, seed, *limits = re.findall(r"oracle (.*):", str(error.value))[0].split()
    smallest = Case("attach", int(seed), **{name: int(number) for name, number in (each.split("=") for each in limits)})
    assert problem_of(smallest)
    assert not any(map(problem_of, smallest.smaller()))
    assert len(smallest.parameters) == 1


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_table_and_the_exit_status(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def average() -> str:
        if is_wrong:
            raise AssertionError("too much")
        return "as told"

    def fill_the_disk() -> None:
        raise SkipTest("only root may mount")

    drilled = SimpleNamespace(
        REPEATS=False, attempts=lambda seed, deadline: [("averages", average), ("full disk", fill_the_disk)]
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: drilled)
    assert __main__.main(["--only", "runs", "hosts", "--seed", "3"]) == is_wrong
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["runs", "averages", "1", str(int(is_wrong)), *([] if is_wrong else ["as", "told"])]
    assert lines[5] == ["hosts", "full", "disk", "0", "0", "only", "root", "may", "mount"]
    assert [" ".join(line) for line in lines[7:]] == ["wrong: averages, --seed 3: too much"] * 2 * is_wrong
