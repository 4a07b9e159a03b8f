"""Presets learn what they are published for, on two ranks. Minutes each: ``make test-slow``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fastsync.ppo.settings_file import load_settings
from tests.ranks import run_ranks
from tests.test_ppo_trainer import train_each


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("preset", "least"), [("CartPole-v1", 475), ("Acrobot-v1", -100), ("Pendulum-v1", -250)])
def test_a_preset_learns(tmp_path: Path, preset: str, least: float):
    settings = replace(load_settings(preset), runs_dir=str(tmp_path))
    result = run_ranks(train_each, 2, {preset: settings}, timeout=1700)[0][preset][1]
    assert len(result.returns) == 100
    assert result.mean_return >= least
