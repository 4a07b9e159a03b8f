"""PPO learns CartPole with every compression, from every seed.

Policies act at random, so that one rounding sends a run another way: runs of one seed are no pairs here. What counts is
what was learnt in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from unittest import mock

import pytest
import torch

import fastsync
from fastsync import Compression
from fastsync.ppo.evaluate import find_checkpoint, load_policy, make_environment, play
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.settings import load_settings
from tests.convergence import COMPRESSIONS
from tests.ranks import run_ranks

SOLVED = 475
"""The return from which on CartPole-v1 counts as solved, of 500."""


def _train_each(rank: int, world_size: int, folder: str, compression: Compression, seeds: Sequence[int]) -> None:
    attach = fastsync.attach
    for seed in seeds:
        settings = replace(load_settings("CartPole-v1", Settings), runs_dir=folder, run_name=str(seed), seed=seed)
        # The settings know compressions by their names alone.
        with mock.patch.object(fastsync, "attach", lambda policy, _: attach(policy, compression)):
            train(settings, torch.device("cpu"))


def _return_of(run: Path) -> float:
    checkpoint = find_checkpoint(run)
    with make_environment(checkpoint, seed=0) as environment:
        return mean(play(load_policy(checkpoint, environment), environment, 50).returns)


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_cart_pole_is_learnt(tmp_path: Path, name: str) -> None:
    seeds = range(5)
    run_ranks(_train_each, 2, str(tmp_path), COMPRESSIONS[name], seeds, timeout=550)
    returns = [_return_of(tmp_path / str(seed)) for seed in seeds]
    print(f"\nCartPole-v1, {name}: returns of each seed {', '.join(f'{value:.1f}' for value in returns)}")
    if name != "int8":  # without error feedback it is shown, whatever it gives
        assert min(returns) >= SOLVED
