"""Environments whose returns tell exactly which actions were taken."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 5


class Payout(gymnasium.Env[Any, Any]):
    """Five steps, each of which pays the action times a power of two. The observation is always the same."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space
        self._row = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._row = 0
        return np.full(2, 0.5, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(np.sum(action)) * 2**self._row
        self._row += 1
        return np.full(2, 0.5, np.float32), reward, self._row == LENGTH, False, {}


def discrete() -> gymnasium.Env[Any, Any]:
    return Payout(spaces.Discrete(2))
