"""Environments that step together: gymnasium's vector environments, with accounts of episodes and a state to save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from .spaces import action_translator

Array = NDArray[Any]
Bools = NDArray[np.bool_]


class Episode(NamedTuple):
    """One finished episode."""

    environment: int  # number of the environment it was in, among those of all ranks
    episode_return: float  # sum of its rewards
    length: int  # number of its steps
    row: int = 0  # the row of the rollout in which it ended


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a step of N environments, which may write to these arrays again in their next step."""

    observations: Array  # [N, ...] in the environment's dtype
    rewards: Array  # [N]
    terminated: Bools  # [N]: the step led to a terminal state
    truncated: Bools  # [N]: the episode ended for another reason, such as a time limit
    valid: Bools  # [N]: False for no step, but the restart of an episode that ended in the step before
    episodes: list[Episode]  # those that ended in this step
    infos: dict[str, Any]  # what the environments say beside, as gymnasium's vector environments have it


class Environments(ABC):
    """N environments of one rank, the accounts of their episodes, and their state. Use it in a ``with`` block.

    An episode that ended restarts in a step of its own, as gymnasium's ``AutoresetMode.NEXT_STEP`` has it.

    Args:
        vector: holds them.
        first_index: number of the first of these environments among those of all ranks.
    """

    _observations: Array
    _restarting: Bools

    def __init__(self, vector: VectorEnv[Any, Any, Any], *, first_index: int) -> None:
        self._vector: Any = vector
        self.num_envs = vector.num_envs
        self.single_observation_space = vector.single_observation_space
        self.single_action_space = vector.single_action_space
        self.first_index = first_index
        self._translate = action_translator(vector.single_action_space)
        self._clear_accounts()

    def reset(self) -> Array:
        """Begins new episodes everywhere. Returns their first observations, [N, ...]."""
        self._clear_accounts()
        self._observations = self._reset()
        return self._observations

    def step(self, actions: Array) -> Step:
        """Steps with actions as the policy makes them: int64 [N] or [N, k] counted from 0, or real [N, k], which are
        cut off at the bounds of the action space.
        """
        observations, rewards, terminated, truncated, infos = self._step(self._translate(actions))
        valid, self._restarting = ~self._restarting, terminated | truncated
        self._returns += rewards
        self._lengths += valid
        self._observations = observations
        (ended,) = self._restarting.nonzero()
        episodes = []
        if len(ended):
            finished = self._finished_episodes(ended.tolist(), infos)
            episodes = [Episode(self.first_index + index, total, length) for index, total, length in finished]
            self._returns[ended] = 0.0
            self._lengths[ended] = 0
        return Step(observations, rewards, terminated, truncated, valid, episodes, infos)

    def state(self) -> dict[str, Any]:
        """Saves where the environments stand, as dicts, lists, numbers, strings and tensors of their own memory."""
        accounts = {"returns": self._returns, "lengths": self._lengths, "restarting": self._restarting}
        state: dict[str, Any] = {"observations": self._observations, **accounts, **self._state()}
        # What torch.load(weights_only=True) reads back.
        saved: dict[str, Any] = tree_map_only(
            (np.ndarray, np.generic), lambda value: torch.from_numpy(np.array(value)), state
        )
        return saved

    def restore(self, state: dict[str, Any]) -> Array | None:
        """Goes back to a state of as many environments.

        Returns:
            The observations to act on, [N, ...]; None where the environments do not get to exactly where they were.
            Then they have to be reset.
        """
        # Arrays of their own memory; those without a dimension become numpy's scalars.
        saved = tree_map_only(torch.Tensor, lambda value: value.numpy().copy()[()], state)
        observations = self._restore(saved)
        if observations is None or not same_values(observations, saved["observations"]):
            return None
        self._observations = observations
        self._returns, self._lengths, self._restarting = (saved[name] for name in ("returns", "lengths", "restarting"))
        return observations

    def close(self) -> None:
        """Ends the environments and their processes."""
        self._vector.close()

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _clear_accounts(self) -> None:
        self._restarting = np.zeros(self.num_envs, dtype=np.bool_)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[tuple[int, float, int]]:
        """Index, return and length of those episodes that ended in these environments."""
        returns, lengths = self._returns[indices].tolist(), self._lengths[indices].tolist()
        return list(zip(indices, returns, lengths, strict=True))

    def _reset(self) -> Array:
        observations: Array = self._vector.reset()[0]
        return observations

    def _step(self, actions: Array) -> tuple[Array, Array, Bools, Bools, dict[str, Any]]:
        return self._vector.step(actions)  # type: ignore[no-any-return]

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Saves what this kind of environments needs to go on, besides the accounts."""

    @abstractmethod
    def _restore(self, state: dict[str, Any]) -> Array | None:
        """Goes back, and returns the observations; None where that cannot be done."""


def seed_from(*numbers: int) -> int:
    """A seed in [0, 2^31) that depends on these numbers only. Streams of different numbers are independent."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def same_values(left: Any, right: Any) -> bool:
    """Tells whether two arrays are equal, NaN to NaN as well."""
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
