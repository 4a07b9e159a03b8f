"""Presets learn what they are published for, on two ranks. All but CartPole take minutes: ``make test-slow``.

As published returns are: of what was learnt in the end, over episodes not trained on, by the likeliest actions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from fastsync.ppo.evaluate import find_checkpoint, load_policy, make_environment, play
from fastsync.ppo.settings_file import load_settings
from tests.ranks import run_ranks
from tests.test_ppo_trainer import train_each


def return_of_a_preset(folder: Path, preset: str) -> float:
    settings = replace(load_settings(preset), runs_dir=str(folder))
    run_ranks(train_each, 2, {preset: settings}, timeout=1700)
    checkpoint = find_checkpoint(folder / preset)
    assert checkpoint.world_size == 2
    with make_environment(checkpoint, seed=0) as environment:
        return mean(play(load_policy(checkpoint, environment), environment, 50).returns)


@pytest.mark.timeout(600)
def test_cart_pole_is_learnt(tmp_path: Path):
    assert return_of_a_preset(tmp_path, "CartPole-v1") >= 475


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("preset", "least"), [("Acrobot-v1", -100), ("Pendulum-v1", -250)])
def test_a_preset_learns(tmp_path: Path, preset: str, least: float):
    assert return_of_a_preset(tmp_path, preset) >= least
