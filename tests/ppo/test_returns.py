"""CartPole is learnt by whoever sets nothing. ``make test-slow``: presets learn what they are published for, and
CartPole is learnt with every compression, from every seed. Two ranks.

As published returns are: of what was learnt in the end, over episodes not trained on, by the likeliest actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from unittest import mock

import pytest
import torch

from fastsync import Compression, attach
from fastsync.ppo.evaluate import find_checkpoint, make_environment, restore_policy
from fastsync.ppo.evaluation import play
from fastsync.ppo.ppo import Settings, train
from fastsync.ppo.settings import load_settings
from tests.engine.test_convergence import COMPRESSIONS
from tests.ranks import run_ranks


def train_each(rank: int, world_size: int, runs: Sequence[Settings], compression: Compression) -> None:
    # The settings know compressions by their names alone.
    with mock.patch("fastsync.ppo.ppo.attach", lambda policy, _, **options: attach(policy, compression, **options)):
        for settings in runs:
            train(settings, torch.device("cpu"))


def returns_of(folder: Path, settings: Settings, seeds: Sequence[int], compression: Compression) -> list[float]:
    runs = [replace(settings, runs_dir=str(folder), run_name=str(seed), seed=seed) for seed in seeds]
    run_ranks(train_each, 2, runs, compression, timeout=1700)
    returns = []
    for seed in seeds:
        file, checkpoint = find_checkpoint(folder / str(seed), newest=True)
        assert checkpoint.world_size == 2
        with make_environment(checkpoint, file, seed=0) as environment:
            policy = restore_policy(checkpoint, file, environment)
            returns.append(mean(each.episode_return for each in play(policy, environment, 50)))
    return returns


@pytest.mark.end_to_end
@pytest.mark.timeout(600)
def test_cart_pole_is_learnt(tmp_path: Path):
    assert min(returns_of(tmp_path, Settings(), [1], Compression())) >= 475


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("preset", "least"),
    [("CartPole-v1", 475), ("Acrobot-v1", -100), ("Pendulum-v1", -250), ("LunarLander-v3", 200)],
)
def test_a_preset_learns(tmp_path: Path, preset: str, least: float):
    assert min(returns_of(tmp_path, load_settings(preset, Settings, 2), [1], Compression())) >= least


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_cart_pole_is_learnt_with_every_compression(tmp_path: Path, name: str):
    returns = returns_of(tmp_path, load_settings("CartPole-v1", Settings), range(5), COMPRESSIONS[name])
    print(f"\nCartPole-v1, {name}: returns of each seed {', '.join(f'{value:.1f}' for value in returns)}")
    if name != "int8":  # without error feedback it is shown, whatever it gives
        assert min(returns) >= 475
