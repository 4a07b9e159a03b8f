"""Small environments whose every number can be foretold. Reach them as "tests.toy_envs:Name"."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from pathlib import Path
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


class Wide(Countdown):
    action_space = spaces.Box(
        np.array([-1.0, 0.0, -np.inf, 0.0]), np.array([1.0, 1000.0, np.inf, 1e-3]), dtype=np.float64
    )


class Hundreds(Countdown):
    action_space = spaces.Box(-300.0, 300.0, (2,))


def at_level(index: int, first: int = 0) -> gymnasium.Env[Any, Any]:
    """Observes the level, which is its number plus an argument."""
    env = Countdown()
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen * 0 + index + first, env.observation_space)


class Deadly(Countdown):
    """Sends its process a signal in its 50th step."""

    def __init__(self, number: signal.Signals) -> None:
        self.num_steps, self.number = 0, number

    def step(self, action: Any):
        self.num_steps += 1
        if self.num_steps == 50:
            os.kill(os.getpid(), self.number)
        return super().step(action)


def deadly(index: int, number: str = "SIGKILL") -> gymnasium.Env[Any, Any]:
    """Ends or stops rank 0."""
    return Countdown() if index else Deadly(signal.Signals[number])


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


class Simulated(Countdown):
    """Has a simulator in a process, which ``close`` ends. A file tells its process."""

    def __init__(self, folder: str) -> None:
        self.simulator = subprocess.Popen(["sleep", "1000"])
        Path(folder, str(self.simulator.pid)).touch()

    def close(self) -> None:
        self.simulator.terminate()
        self.simulator.wait()


class SimulatedHangs(Simulated):
    def close(self) -> None:
        if multiprocessing.current_process().daemon:
            time.sleep(1000)
        super().close()


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


class HugeReward(Countdown):
    """Pays what float32 cannot hold."""

    def step(self, action: Any):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, 1e39, terminated, truncated, info


class Clocked(Countdown):
    """Observes the seconds since 1970, and what is left."""

    def look(self) -> Any:
        return np.array([1.7e9 + self.noise, self.remaining, self.length])


class Faulty(Countdown):
    """Is wrong in its second step as the class says."""

    def step(self, action: Any):
        observation, reward, *rest = super().step(action)
        if self.length - self.remaining == 2:
            observation, reward = self.spoil(observation, reward)
        return observation, reward, *rest

    def spoil(self, observation: Any, reward: Any) -> tuple[Any, Any]:
        raise KeyError("of my own")


class WrongShape(Faulty):
    def spoil(self, observation: Any, reward: Any) -> tuple[Any, Any]:
        return observation[:2], reward


class WrongDtype(Faulty):
    def spoil(self, observation: Any, reward: Any) -> tuple[Any, Any]:
        return observation.astype(np.complex64), reward


class NoReward(Faulty):
    def spoil(self, observation: Any, reward: Any) -> tuple[Any, Any]:
        return observation, None


class NanRewardLater(Faulty):
    def spoil(self, observation: Any, reward: Any) -> tuple[Any, Any]:
        return observation, np.float32("nan")


class FaultyReset(Countdown):
    """Is wrong in its third episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        self.past = getattr(self, "past", 0) + 1
        observation, info = super().reset(seed=seed, options=options)
        return (observation if self.past < 3 else [observation, [1]]), info


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


class Seeing(Countdown):
    """Two images, one of them with channels last and in a Dict in the Dict, and other kinds of numbers."""

    observation_space = spaces.Dict(
        near=spaces.Box(0, 255, (2, 36, 40), dtype=np.uint8),
        kind=spaces.Discrete(4),
        far=spaces.Dict(
            camera=spaces.Box(0, 255, (40, 36, 3), dtype=np.uint8), where=spaces.Box(-np.inf, np.inf, (2,), np.float32)
        ),
        small=spaces.Box(0, 255, (1, 2, 3), dtype=np.uint8),
    )

    def look(self) -> Any:
        return {
            "near": np.arange(2 * 36 * 40, dtype=np.uint8).reshape(2, 36, 40),
            "kind": self.length % 4,
            "far": {
                "camera": np.arange(40 * 36 * 3).reshape(40, 36, 3).astype(np.uint8),
                "where": np.array([100 + self.noise, self.remaining], np.float32),
            },
            "small": np.full((1, 2, 3), self.remaining, np.uint8),
        }


class OneForbidden(Countdown):
    """Forbids one action in each step, and fails if it is taken. ``info`` says which."""

    num_choices = 3

    def reset(self, **given: Any):
        observation, _ = super().reset(**given)
        return observation, {"action_mask": self.mask()}

    def step(self, action: Any):
        assert self.mask()[action], f"{action} is forbidden"
        observation, reward, *ended, _ = super().step(action)
        return observation, reward, *ended, {"action_mask": self.mask()} if self.remaining else {}

    def mask(self) -> Any:
        mask = np.ones(self.num_choices, np.int8)
        mask[self.remaining % self.num_choices] = 0
        return mask


class InDict(OneForbidden):
    """The mask is a part of the observation, as PettingZoo has it."""

    observation_space = spaces.Dict(
        observation=Countdown.observation_space, action_mask=spaces.Box(0, 1, (3,), np.int8)
    )

    def step(self, action: Any):
        return *super().step(action)[:4], {}

    def look(self) -> Any:
        return {"observation": super().look(), "action_mask": self.mask()}


class SeveralForbidden(Countdown):
    """Of two choices, each with a mask."""

    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, **given: Any):
        observation, _ = super().reset(**given)
        return observation, {"action_mask": self.mask()}

    def step(self, action: Any):
        assert all(mask[chosen] for mask, chosen in zip(self.mask(), action, strict=True))
        observation, reward, *ended, _ = super().step(action)
        return observation, reward, *ended, {"action_mask": self.mask()}

    def mask(self) -> Any:
        second = np.ones(3, np.int8)
        second[self.remaining % 3] = 0
        return np.array([1, self.remaining % 2], np.int8), second


class SeesAndMayNot(OneForbidden):
    """An image alone, and a mask."""

    observation_space = spaces.Box(0, 255, (1, 36, 36), np.uint8)

    def look(self) -> Any:
        return np.full((1, 36, 36), self.remaining, np.uint8)


class WrongMask(OneForbidden):
    num_choices = 4


class WrongDict(InDict):
    action_space = spaces.Discrete(2)


class ForbidsAll(OneForbidden):
    """Forbids everything when so many steps are left."""

    left = 2

    def mask(self) -> Any:
        return np.full(self.num_choices, self.remaining != self.left, np.int8)


class ForbidsAllAtTheEnd(ForbidsAll):
    """As board games do, in which nobody moves any more."""

    left = 0

    def step(self, action: Any):
        return *super().step(action)[:4], {"action_mask": self.mask()}


class NoSize(Countdown):
    observation_space = spaces.Dict(
        where=Countdown.observation_space, seen=spaces.Tuple([spaces.Discrete(2), spaces.Sequence(spaces.Discrete(3))])
    )


def read_from(file: str) -> gymnasium.Env[Any, Any]:
    """An environment whose size, actions (a number, or bounds) and reward are in a file, which may change meanwhile."""
    size, actions, reward = json.loads(Path(file).read_text(encoding="utf-8"))
    env: Any = Countdown()
    env.observation_space = spaces.Box(-1, 1, (size,), np.float32)
    env.action_space = spaces.Discrete(actions) if isinstance(actions, int) else spaces.Box(*actions, (1,))
    env.look = lambda: np.zeros(size, np.float32)
    return gymnasium.wrappers.TransformReward(env, lambda _: reward)


def masked_cart_pole(**given: Any) -> gymnasium.Env[Any, Any]:
    """Shows where cart and pole are, and not how fast: one observation does not tell what to do."""
    env, seen = gymnasium.make("CartPole-v1", **given), [0, 2]
    space: Any = env.observation_space
    shown = spaces.Box(space.low[seen], space.high[seen], dtype=space.dtype)
    return gymnasium.wrappers.TransformObservation(env, lambda observation: observation[seen], shown)


class Privileged(Countdown):
    """What a camera sees, and what only a simulator knows."""

    observation_space = spaces.Dict(
        seen=spaces.Box(-np.inf, np.inf, (2,), np.float32), state=spaces.Box(-np.inf, np.inf, (3,), np.float32)
    )

    def look(self) -> Any:
        state = np.array([self.remaining, self.length, 7.0], np.float32)
        return {"seen": np.array([self.noise, -self.noise], np.float32), "state": state}


class PrivilegedForbids(OneForbidden):
    """And an image, and a mask."""

    observation_space = spaces.Dict(
        camera=spaces.Box(0, 255, (1, 36, 36), np.uint8), state=spaces.Box(-np.inf, np.inf, (3,), np.float32)
    )

    def look(self) -> Any:
        return {"camera": np.full((1, 36, 36), self.remaining, np.uint8), "state": np.ones(3, np.float32)}


def late() -> gymnasium.Env[Any, Any]:
    """Observes times, of which float32 does not hold what differs."""
    since, env = np.array([1.0, 0.0, 0.0]), Countdown()
    return gymnasium.wrappers.TransformObservation(env, lambda seen: seen * since + 1e9, env.observation_space)
