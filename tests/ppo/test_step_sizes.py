"""The learning rate over a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fastsync.ppo.ppo import LearningRate, Settings


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5), fused=True)


def rates(settings: Settings, moments: list[tuple[int, int]], world_size: int = 1) -> list[float]:
    """The learning rate at each (step, update)."""
    stepper = optimizer()
    schedule = LearningRate(settings, world_size, stepper)
    found = []
    for step, update in moments:
        schedule.start_update(remaining=max(0.0, 1 - step / settings.total_steps), update=update)
        found.append(float(stepper.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr_schedule": "constant"}, [1e-3, 1e-3, 1e-3]),
        ({"lr_scaling": "linear"}, [4e-3, 3e-3, 0.0]),
        ({"lr_scaling": "sqrt"}, [2e-3, 1.5e-3, 0.0]),
        ({"warmup_updates": 3, "lr_schedule": "constant"}, [0.25e-3, 0.75e-3, 1e-3]),
    ],
)
def test_the_learning_rate_follows_its_schedule(changes: dict[str, Any], expected: list[float]):
    settings = Settings(total_steps=1000, learning_rate=1e-3, **changes)
    assert rates(settings, [(0, 0), (250, 2), (1100, 9)], world_size=4) == pytest.approx(expected)


def test_the_learning_rate_follows_the_kl_divergence():
    stepper = optimizer()
    schedule = LearningRate(Settings(learning_rate=1e-3, lr_schedule="adaptive", target_kl=0.01), 1, stepper)
    schedule.start_update(remaining=1.0, update=0)
    expected = 1e-3
    for kl, factor in ((0.021, 1 / 1.5), (0.019, 1), (0.006, 1), (0.004, 1.5), (0.0, 1), (math.nan, 1)):
        schedule.adapt(torch.tensor(kl))
        expected *= factor
        assert float(stepper.param_groups[0]["lr"]) == pytest.approx(expected)
    for _ in range(30):
        schedule.adapt(torch.tensor(1e-4))
    assert float(stepper.param_groups[0]["lr"]) == pytest.approx(1e-2)  # which is the limit
    # What was decided holds for the next update, and after a resumption.
    resumed = LearningRate(Settings(learning_rate=1e-3, lr_schedule="adaptive", target_kl=0.01), 1, stepper)
    resumed.load_state_dict(schedule.state_dict())
    resumed.start_update(remaining=1.0, update=1)
    assert float(stepper.param_groups[0]["lr"]) == pytest.approx(1e-2)
    # But not where another learning rate is asked for.
    changed = LearningRate(Settings(learning_rate=2e-3, lr_schedule="adaptive", target_kl=0.01), 1, stepper)
    changed.load_state_dict(schedule.state_dict())
    changed.start_update(remaining=1.0, update=1)
    assert float(stepper.param_groups[0]["lr"]) == pytest.approx(2e-3)
