"""Who makes the others wait, from times that are made up."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from fastsync.ppo.ppo import Settings
from fastsync.ppo.runs.metrics import PhaseTimes
from fastsync.ppo.runs.straggler import REMEDIES, WORK, WaitingTimes


def ranks_that_meet(*work: tuple[float, ...]) -> list[PhaseTimes]:
    """Ranks that work for so long in each phase, and then meet in a collective of 1 s."""
    end = max(sum(phases) for phases in work) + 1.0
    return [PhaseTimes(**dict(zip(WORK, phases, strict=False)), communication=end - sum(phases)) for phases in work]


@pytest.mark.parametrize("phase", WORK)
@pytest.mark.parametrize("slow", [0, 2])
def test_the_rank_that_takes_longer_is_named_with_what_it_does_longer(slow: int, phase: str):
    work = [[1.0, 1.0, 0.5, 0.5] for _ in range(3)]
    work[slow][WORK.index(phase)] += 2.0
    waiting = WaitingTimes(3)
    for _ in range(4):
        assert waiting.add(ranks_that_meet(*map(tuple, work))) == [0.0 if rank == slow else 2.0 for rank in range(3)]
    assert waiting.waited == [0.0 if rank == slow else 8.0 for rank in range(3)]
    straggler = waiting.straggler
    assert straggler is not None
    assert (straggler.rank, straggler.phase, straggler.seconds) == (slow, phase, 8.0)
    assert straggler.share == 8.0 / 24.0
    assert str(straggler) == f"rank {slow} makes the others wait in {phase}: 8.0 s, 33%; {REMEDIES[phase]}"


def test_what_to_do_names_settings_that_there_are():
    named = {word.replace("-", "_") for advice in REMEDIES.values() for word in re.findall(r"--([a-z-]+)", advice)}
    assert named <= {setting.name for setting in fields(Settings)}
    assert REMEDIES.keys() == {*WORK, "communication"}


def test_ranks_that_take_turns_do_not_cancel_out():
    waiting = WaitingTimes(2)
    for update in range(5):
        slow, fast = (5.0, 0.0, 1.0), (1.0, 0.0, 1.0)
        waiting.add(ranks_that_meet(slow, fast) if update % 2 == 0 else ranks_that_meet(fast, slow))
    assert waiting.waited == [8.0, 12.0]
    assert waiting.straggler is not None
    assert (waiting.straggler.rank, waiting.straggler.seconds) == (0, 12.0)


def test_a_rank_that_works_no_longer_must_be_slow_to_reach():
    waiting = WaitingTimes(2)
    waiting.add([PhaseTimes(1.0, 1.0, 1.0, 5.0), PhaseTimes(1.0, 1.0, 1.0, 1.0)])
    assert waiting.straggler is not None
    assert (waiting.straggler.rank, waiting.straggler.phase) == (1, "communication")


def test_little_waiting_is_not_worth_a_word():
    waiting = WaitingTimes(2)
    waiting.add(ranks_that_meet((10.0, 1.0, 1.0), (10.1, 1.0, 1.0)))
    assert waiting.straggler is None


def test_one_rank_waits_for_nobody():
    waiting = WaitingTimes(1)
    waiting.add([PhaseTimes(1.0, 1.0, 1.0, 1.0)])
    assert waiting.straggler is None
    assert waiting.waited == [0.0]
