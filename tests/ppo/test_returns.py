"""CartPole is learnt by whoever sets nothing; presets learn what they are published for: ``make test-slow``. Two ranks.

As published returns are: of what was learnt in the end, over episodes not trained on, by the likeliest actions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from fastsync.ppo.evaluate import find_checkpoint, load_policy, make_environment, play
from fastsync.ppo.ppo import Settings
from fastsync.ppo.settings import load_settings
from tests.ppo.test_trainer import train_each
from tests.ranks import run_ranks


def return_of(settings: Settings, folder: Path) -> float:
    run_ranks(train_each, 2, {"run": replace(settings, runs_dir=str(folder))}, timeout=1700)
    checkpoint = find_checkpoint(folder / "run")
    assert checkpoint.world_size == 2
    with make_environment(checkpoint, seed=0) as environment:
        return mean(play(load_policy(checkpoint, environment), environment, 50).returns)


@pytest.mark.timeout(600)
def test_cart_pole_is_learnt(tmp_path: Path):
    assert return_of(Settings(), tmp_path) >= 475


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("preset", "least"),
    [("CartPole-v1", 475), ("Acrobot-v1", -100), ("Pendulum-v1", -250), ("LunarLander-v3", 200)],
)
def test_a_preset_learns(tmp_path: Path, preset: str, least: float):
    assert return_of(load_settings(preset, Settings), tmp_path) >= least
