"""Figures are those of all ranks, on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.exchange import Exchange
from fastsync.ppo.runs.metrics import PhaseTimes, RankReport, ended_episodes, gather_reports, scalars_of
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


def test_episodes_are_in_the_order_of_rows_and_environments_whoever_has_which():
    ranks = [Episode(2, 1.0, 10, 0), Episode(0, 2.0, 20, 5)], [Episode(1, 3.0, 30, 0)]
    assert [episode.length for episode in ended_episodes(reports_of(*ranks))] == [30, 10, 20]
    assert ended_episodes(reports_of(*ranks[::-1])) == ended_episodes(reports_of(*ranks))


def test_means_are_taken_over_ranks_that_know():
    ranks = ({"a": 1.0, "b": 0.0, "c": math.nan}, {"a": 4.0, "b": 1.0, "c": 3.0})
    reports = [RankReport(PhaseTimes(), metrics=metrics) for metrics in ranks]
    scalars = scalars_of(0, 0.0, 1.0, [], reports)
    assert [scalars[name] for name in "abc"] == [2.5, 0.5, 3.0]
