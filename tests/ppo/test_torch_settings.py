"""torch's settings for a whole process change nothing in a training, whoever makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastsync.ppo.cli import check_environment
from fastsync.ppo.ppo import Settings, train
from tests.engine.test_torch_settings import SETTINGS
from tests.models import assert_all_bitwise_equal
from tests.ranks import run_ranks
from tests.toy_envs import Countdown

BASE = Settings(env="tests.toy_envs:Countdown", total_steps=256, num_envs=2, num_epochs=2)
KINDS = {
    "normalized": replace(BASE, norm_observations=True, norm_rewards=True),
    "continuous": replace(BASE, env="Pendulum-v1", learning_rate=3e-4),
    "adaptive": replace(BASE, target_kl=0.01, lr_schedule="adaptive", warmup_updates=2),
    "no step": replace(BASE, target_kl=1e-12, num_epochs=1),
    "diloco": replace(BASE, sync="diloco", warmup_updates=2),
    "image": replace(BASE, env="tests.toy_envs:Image", total_steps=64, num_steps=8),
    "fp64": replace(BASE, precision="fp64"),
    "fp16": replace(BASE, precision="fp16"),
}


def sets_float64() -> Countdown:
    """An environment whose module sets what every other module then has."""
    torch.set_default_dtype(torch.float64)
    return Countdown()


def _trained(settings: Settings, folder: Path, name: str) -> list[Tensor]:
    """A run of some updates, and as many after it was resumed."""
    settings = replace(settings, runs_dir=str(folder), run_name=name)
    check_environment(settings)
    train(settings)
    policy, _ = train(replace(settings, total_steps=2 * settings.total_steps, resume="auto"))
    return list(policy.state_dict().values())


def _compare(rank: int, world_size: int, folder: Path, setting: str) -> None:
    expected = {name: _trained(settings, folder, name) for name, settings in KINDS.items()}
    with SETTINGS[setting]():
        for name, settings in KINDS.items():
            assert_all_bitwise_equal(_trained(settings, folder, f"{name} again"), expected[name], name)


@pytest.mark.parametrize(
    "setting", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("float64", "bfloat16")), "meta"]
)
def test_settings_of_torch_change_nothing(tmp_path: Path, setting: str) -> None:
    run_ranks(_compare, 2, tmp_path, setting, timeout=200)


def _compare_with_import(rank: int, world_size: int, folder: Path) -> None:
    expected = _trained(BASE, folder, "plain")
    actual = _trained(replace(BASE, env=f"{__name__}:sets_float64"), folder, "set")
    assert torch.get_default_dtype() == torch.float64  # it is the user's, and stays
    assert_all_bitwise_equal(actual, expected, "tensor")


def test_a_module_that_sets_them_changes_nothing(tmp_path: Path) -> None:
    run_ranks(_compare_with_import, 2, tmp_path)
