"""Figures are those of all ranks, on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastsync.ppo.envs.interface import Episode
from fastsync.ppo.exchange import Exchange
from fastsync.ppo.runs.metrics import USAGES, PhaseTimes, RankReport, ended_episodes, gather_reports, scalars_of, spread
from fastsync.ppo.runs.usage import Usage
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


def test_the_spread_of_values():
    figures = spread("x", [float(value) for value in range(100, -1, -1)])
    assert figures == {
        "x": 50.0, "x_std": pytest.approx(np.std(np.arange(101))), "x_min": 0.0, "x_p10": 10.0, "x_p50": 50.0,
        "x_p90": 90.0, "x_max": 100.0,
    }  # fmt: skip
    assert spread("x", [3.0]) == {name: 0.0 if name == "x_std" else 3.0 for name in figures}
    assert all(map(math.isnan, spread("x", []).values()))
    assert spread("x", []).keys() == figures.keys()


def test_what_ranks_use_is_among_the_metrics_where_it_is_known():
    reports = [RankReport(PhaseTimes(), usage=usage) for usage in (Usage(cores=0.5, memory=1e9), Usage(gpu=0.25))]
    scalars = scalars_of(0, 0.0, 1.0, [], reports)
    used = {name: value for name, value in scalars.items() if name.rpartition("/")[2] in USAGES}
    assert used == {"rank0/cores": 0.5, "rank0/memory": 1e9, "rank1/gpu": 0.25}
