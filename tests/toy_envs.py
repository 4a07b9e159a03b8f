"""Small environments whose every number can be foretold. Reach them as "tests.toy_envs:Name"."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Countdown(gymnasium.Env[Any, Any]):
    """Episodes of 2 to 7 steps, by the seed; even ones terminate, odd ones are truncated. The reward is 1 + action."""

    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (3,), dtype=np.float64)
    action_space: spaces.Space[Any] = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.remaining = self.length = int(self.np_random.integers(2, 8))
        self.noise = self.draw()
        return self.look(), {}

    def step(self, action: Any):
        self.remaining -= 1
        self.noise = self.draw() + float(np.sum(action))
        done = self.remaining == 0
        even = self.length % 2 == 0
        return self.look(), 1.0 + float(np.sum(action)), done and even, done and not even, {}

    def draw(self) -> float:
        return float(self.np_random.random())

    def look(self) -> Any:
        return np.array([self.noise, self.remaining, self.length])


class Unseeded(Countdown):
    """Takes its randomness from elsewhere."""

    def draw(self) -> float:
        return float(np.frombuffer(os.urandom(4), dtype=np.uint32)[0])


class Leaky(Countdown):
    """An episode knows how many there were before."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.past = getattr(self, "past", 0) + 1
        return super().reset(seed=seed, options=options)

    def look(self) -> Any:
        return super().look() + (0.5 * self.past if self.remaining == 1 else 0)


class Continuous(Countdown):
    action_space = spaces.Box(np.array([-1.0, -np.inf]), np.array([np.inf, 2.0]), dtype=np.float64)


class FromFive(Countdown):
    action_space = spaces.Discrete(3, start=5)


class Several(Countdown):
    action_space = spaces.MultiDiscrete([2, 3], start=[0, 10])


class Image(Countdown):
    observation_space = spaces.Box(0, 255, (3, 36, 40), dtype=np.uint8)

    def look(self) -> Any:
        return np.full((3, 36, 40), self.remaining, dtype=np.uint8)


class SmallImage(Countdown):
    observation_space = spaces.Box(0, 255, (3, 35, 40), dtype=np.uint8)


class Named(Countdown):
    """Has a dictionary in a dictionary, and every kind of numbers."""

    observation_space = spaces.Dict(
        noise=spaces.Box(-np.inf, np.inf, (1, 2), dtype=np.float64),
        counts=spaces.Dict(remaining=spaces.Discrete(9, start=-1), both=spaces.MultiDiscrete([8, 9], start=[0, -1])),
        odd=spaces.MultiBinary(2),
    )

    def look(self) -> Any:
        return {
            "noise": np.array([[self.noise, -self.noise]]),
            "counts": {"remaining": np.int64(self.remaining), "both": np.array([self.length, self.remaining])},
            "odd": np.array([self.length % 2, self.remaining % 2], dtype=np.int8),
        }


class Binary(Countdown):
    action_space = spaces.MultiBinary(4)


class HangsInClose(Countdown):
    def close(self) -> None:
        if multiprocessing.current_process().daemon:
            time.sleep(1000)


class Hangs(Countdown):
    """Never answers to an action that nobody takes at random."""

    action_space = spaces.Box(-1e9, 1e9, (1,), dtype=np.float32)

    def step(self, action: Any):
        if action[0] > 1e6:
            time.sleep(1000)
        return super().step(action)


def not_an_environment() -> int:
    return 7


class Payout(gymnasium.Env[Any, Any]):
    """Five steps, each of which pays the action times a power of two: a return tells the actions."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.row = 0
        return np.full(2, 0.5, np.float32), {}

    def step(self, action: Any):
        reward = float(action) * 2**self.row
        self.row += 1
        return np.full(2, 0.5, np.float32), reward, self.row == 5, False, {}


class NanReward(Countdown):
    def step(self, action: Any):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, float("nan"), terminated, truncated, info


class BrokenOnRanks(Countdown):
    """Fails in ranks, and not where it is tried before they start."""

    def step(self, action: Any):
        if "RANK" in os.environ:
            raise OSError("as told")
        return super().step(action)


class OldStep(Countdown):
    """Of gym, as it was before."""

    def step(self, action: Any):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class BlowsUp(gymnasium.Env[Any, Any]):
    """Ten steps, each of which pays the action; then the simulation has failed, as ``last`` says."""

    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)
    last, terminates = np.nan, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.row = 0
        return np.zeros(3, np.float32), {}

    def step(self, action: Any):
        self.row += 1
        over = self.row == 10
        seen = np.full(3, self.last if over else self.row / 10, np.float32)
        return seen, float(np.mean(action)), over and self.terminates, over and not self.terminates, {}


class BlowsUpToInf(BlowsUp):
    last = -np.inf


class BlowsUpToMuch(BlowsUp):
    last = 3e38


class BlowsUpOverReals(BlowsUp):
    action_space = spaces.Box(-1, 1, (2,), np.float32)


class BlowsUpInTime(BlowsUp):
    terminates = False


class OneStep(Countdown):
    """Episodes of one step."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.remaining = self.length = 1
        return self.look(), {}


class Meddling(Payout):
    """Changes its action in place, as one does that scales it."""

    action_space: spaces.Space[Any] = spaces.MultiDiscrete([2, 2])

    def step(self, action: Any):
        result = super().step(action[0])
        action *= 0
        return result


class MeddlingWithReals(Meddling):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Gridded(Countdown):
    """A matrix."""

    observation_space = spaces.Box(-np.inf, np.inf, (4, 3), dtype=np.float32)

    def look(self) -> Any:
        return np.arange(12, dtype=np.float32).reshape(4, 3) + self.remaining


class Single(Countdown):
    """One number."""

    observation_space = spaces.Box(-np.inf, np.inf, (), dtype=np.float32)

    def look(self) -> Any:
        return np.array(self.remaining, np.float32)


class DrawsFromNumpy(Countdown):
    def draw(self) -> float:
        return float(np.random.rand())  # noqa: NPY002


class DrawsFromPython(Countdown):
    def draw(self) -> float:
        return random.random()


class DrawsFromSpaces(Countdown):
    observation_space: spaces.Space[Any] = spaces.Box(-1, 1, (3,), dtype=np.float64)

    def look(self) -> Any:
        return self.observation_space.sample() + self.action_space.sample()


class ForgetsItsSeed(Countdown):
    """Calls no ``super().reset(seed=seed)``."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        return super().reset(seed=None, options=options)


class Endless(Countdown):
    def step(self, action: Any):
        return self.look(), 1.0, False, False, {}
