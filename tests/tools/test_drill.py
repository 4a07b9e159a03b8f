"""Fixed cases of the drill, how one that fails shrinks, and the drills' table."""

from __future__ import annotations

import importlib
import re
import time
from types import SimpleNamespace

import pytest

from tests.drill import __main__, endurance, oracle
from tests.drill.cases import Case
from tests.drill.rows import Row
from tests.engine.entry_points import ALL


@pytest.mark.timeout(120)
@pytest.mark.parametrize("entry_point", ALL)
def test_random_cases(entry_point: str) -> None:
    assert oracle.run_cases([Case(entry_point, seed) for seed in range(10)]) == {}


@pytest.mark.parametrize("grows", [False, True])
def test_what_grows_is_found(grows: bool) -> None:
    kept: list[bytearray] = []
    problems = endurance.growth(lambda _: kept.append(bytearray(b"1") * 2**18) if grows else None, 200)  # type: ignore[func-returns-value]
    assert [problem.split(" grew")[0] for problem in problems] == ["KiB of memory"] * grows


def test_cases_follow_from_their_seeds_and_have_whatever_may_happen() -> None:
    assert Case("attach", 7).steps == Case("attach", 7).steps != Case("attach", 8).steps
    cases = [Case(entry_point, seed) for entry_point in ALL for seed in range(40)]
    steps = [step for case in cases for step in case.steps]
    for name in vars(steps[0]):
        assert any(getattr(step, name) for step in steps), name
    assert any(case.may_join for case in cases)
    assert {case.world_size for case in cases} == {2, 3, 4, 5}


def test_a_failing_case_shrinks_to_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(cases: list[Case]) -> dict[str, list[str]]:
        return {str(case): ["Traceback\nwrong norm"] for case in cases if any(step.piggybacks for step in case.steps)}

    monkeypatch.setattr(oracle, "run_cases", failing)
    case = next(case for case in (Case("attach", seed) for seed in range(99)) if failing([case]))
    line = oracle.shrunk(case, ["wrong norm"], time.monotonic() + 60)
    assert line.endswith(": wrong norm")
    _, seed, *without = re.findall(r"oracle (.*):", line)[0].split()
    smallest = Case("attach", int(seed), without)
    assert failing([smallest])
    assert not any(failing([smaller]) for smaller in smallest.smaller())
    assert len(smallest.parameters) == 1


@pytest.mark.parametrize("wrong", [[], ["seed 3 is wrong"]])
def test_the_table_and_the_exit_status(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("averages", 12, wrong), Row("full disk", note="only root may mount")]
    drilled = SimpleNamespace(drill=lambda seed, deadline: rows)
    monkeypatch.setattr(importlib, "import_module", lambda name: drilled)
    assert __main__.main(["--only", "runs", "hosts"]) == len(wrong)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["runs", "averages", "12", str(len(wrong))]
    assert lines[4] == ["hosts", "full", "disk", "0", "0", "only", "root", "may", "mount"]
    assert len(lines) == 5 + 2 * len(wrong)
