"""Atari games with the usual preprocessing (Mnih et al., 2015; Machado et al., 2018, section 5)."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation


class LifeByLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An episode is a life, and rewards are clipped to 1, 0 or -1.

    The end of a life is a termination, and the next reset continues the same game. FIRE is pressed if the game needs
    it. ``info["game"]`` of a game's last step has its ``score`` and its ``length`` in steps of the policy.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.resets_go_on = False
        """Whether the game is not over, so that a reset without a seed continues it."""
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None
        self._lives = 0
        self._score = 0.0
        self._length = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None and self.resets_go_on:
            observation, info, over = self._press(0)  # a no-op: the next frame after the life was lost
        else:
            over = True
        if over:
            observation, info = self._new_game(seed, options)
        if self._fire is not None:
            observation, info, over = self._press(self._fire)
            if over:
                observation, info = self._new_game(None, options)
        self._lives = self._lives_left()
        self.resets_go_on = False
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._score += float(reward)
        self._length += 1
        lives = self._lives_left()
        if terminated or truncated:
            info["game"] = {"score": self._score, "length": self._length}
            self.resets_go_on = False
        elif 0 < lives < self._lives:
            terminated = self.resets_go_on = True
        self._lives = lives
        return observation, float(np.sign(float(reward))), terminated, truncated, info

    def _lives_left(self) -> int:
        return int(self.env.unwrapped.ale.lives())  # type: ignore[attr-defined]

    def _new_game(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        self._score, self._length = 0.0, 0
        return self.env.reset(seed=seed, options=options)

    def _press(self, action: int) -> tuple[Any, dict[str, Any], bool]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._score += float(reward)
        return observation, info, terminated or truncated


def wrap_atari(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Wraps a game: up to 30 no-ops at the start, each action 4 times, the maximum of the last two frames, 84x84 grey,
    ``LifeByLife``, and the last 4 frames stacked. Observations are uint8 [4, 84, 84].

    Args:
        env: a game made with ``frameskip=1``.

    Raises:
        gymnasium.error.DependencyNotInstalled: OpenCV is missing.
    """
    env = AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)
    return FrameStackObservation(LifeByLife(env), 4)
