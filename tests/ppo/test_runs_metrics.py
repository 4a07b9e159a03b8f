"""Figures are those of all ranks, on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.runs.metrics import EpisodeWindow, PhaseTimes, RankReport, Status, gather_reports
from fastsync.ppo.sync import Exchange
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# All that a report can hold, with figures that 32 bits could not carry.
FULL = [
    RankReport(
        times=PhaseTimes(0.1, 0.2, 0.3, 0.4),
        wire_bytes=2.0**40 + 1,
        episodes=[Episode(0, -1.1, 10), Episode(70_000, math.inf, 20, row=5)],
        metrics={"loss": 1.0, "entropy": -0.1},
        stop_requested=True,
    ),
    RankReport(
        times=PhaseTimes(1.0, 2.0, 3.0, 4.0, 5.0),
        episodes=[Episode(0, 100.0 + row, 1, row) for row in range(150)],
        metrics={"loss": 2.0, "entropy": math.nan},
        checkpoint_due=True,
    ),
]


def gather(rank: int, world_size: int) -> tuple[list[RankReport], str]:
    exchange = Exchange(CPU)
    reports = gather_reports(FULL[rank], exchange)
    try:
        # Not even as many: nobody hangs, and everybody is told.
        other = {"loss": 0.0} if rank else {"kl": 0.0, "loss": 0.0}
        gather_reports(RankReport(PhaseTimes(), metrics=other), exchange)
    except RuntimeError as error:
        return reports, str(error)
    return reports, "no error"


def test_every_rank_gets_the_reports_of_all():
    first, second = run_ranks(gather, 2, timeout=120)
    # By their text, in which NaN is NaN.
    assert repr(first[0]) == repr(second[0])
    assert repr(first[0]) == repr([FULL[0], replace(FULL[1], episodes=FULL[1].episodes[-100:])])
    for _, said in (first, second):
        assert said.startswith("ranks [1] report other metrics than rank 0")


def reports_of(*ranks: list[Episode]) -> list[RankReport]:
    return [RankReport(PhaseTimes(), episodes=episodes) for episodes in ranks]


def test_the_window_holds_the_last_episodes_of_all_ranks():
    window = EpisodeWindow()
    # In the order of rows and environments, whoever has which.
    window.extend(reports_of([Episode(2, 1.0, 10, 0), Episode(0, 2.0, 20, 5)], [Episode(1, 3.0, 30, 0)]))
    assert window.returns == [3.0, 1.0, 2.0]
    assert window.lengths == [30, 10, 20]
    one_more = [Episode(1, -1.0, 2, row=140)]
    window.extend(reports_of([Episode(0, 100.0 + row, 1, row) for row in range(150)], one_more))
    # The last 100 of 151 episodes: rows 51 to 149 of rank 0, and in row 140 the one of rank 1.
    assert window.returns == [*range(151, 241), -1.0, *range(241, 250)]
    restored = EpisodeWindow(window.to_list())
    assert (restored.returns, restored.lengths) == (window.returns, window.lengths)
    assert restored.to_list() == window.to_list()


def test_means_are_taken_over_ranks_that_know():
    ranks = ({"a": 1.0, "b": 0.0, "c": math.nan}, {"a": 4.0, "b": 1.0, "c": 3.0})
    reports = [RankReport(PhaseTimes(), metrics=metrics) for metrics in ranks]
    scalars = Status(0, 0.0, 0, EpisodeWindow(), reports, 1.0).scalars
    assert [scalars[name] for name in "abc"] == [2.5, 0.5, 3.0]
