"""Figures are those of all ranks, on every rank."""

from __future__ import annotations

import math

import torch

from fastsync.ppo.gradient_sync import SyncReport
from fastsync.ppo.metrics import EpisodeWindow, mean, mean_over_ranks, mean_sync_report
from fastsync.ppo.rollout import Episode
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# Of each rank: nothing, a few episodes, and then more than the window holds.
ROLLOUTS = [
    ([], []),
    ([Episode(0, 1.0, 10), Episode(5, 2.0, 20)], [Episode(3, 3.0, 30)]),
    ([Episode(row, 100.0 + row, 1) for row in range(150)], [Episode(140, -1.0, 2)]),
]


def aggregate(rank: int, world_size: int) -> tuple[dict[str, float], SyncReport, list[list[float]], list[int]]:
    window = EpisodeWindow(CPU)
    returns, lengths = [], []
    for of_rank in ROLLOUTS:
        window.extend(of_rank[rank])
        returns.append(window.returns)
        lengths.append(sum(window.lengths))
    metrics = mean_over_ranks({"loss": 1.0 + rank, "entropy": -2.0 * rank}, CPU)
    sync = mean_sync_report(SyncReport(seconds=1.0 + rank, exposed_seconds=None, wire_bytes=4), CPU)
    return metrics, sync, returns, lengths


def test_figures_are_those_of_all_ranks():
    first, second = run_ranks(aggregate, 2, timeout=120)
    assert first == second
    metrics, sync, returns, lengths = first
    assert metrics == {"loss": 1.5, "entropy": -1.0}
    assert sync == SyncReport(seconds=1.5, exposed_seconds=None, wire_bytes=4.0)
    # In the order of their ends, over both ranks.
    assert returns[:2] == [[], [1.0, 3.0, 2.0]]
    # The last 100 of 151 episodes: rows 51 to 149 of rank 0, and after row 140 the one of rank 1.
    assert returns[2] == [*range(151, 241), -1.0, *range(241, 250)]
    assert lengths == [0, 60, 101]


def test_the_mean_of_nothing_is_nan():
    assert math.isnan(mean([]))
    assert mean([1.0, 2.0]) == 1.5
