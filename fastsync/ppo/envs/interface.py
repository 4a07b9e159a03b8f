"""Environments that step together: gymnasium's vector environments, with statistics of episodes and a state to save."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from ..._torch_compat import tree_map_only
from .spaces import action_translator

Array = NDArray[Any]
Bools = NDArray[np.bool_]

UNSEEN = 2**31
"""Number of the first environment of evaluations. No training environment has it, so the episodes are new."""


class CopiesDifferError(RuntimeError):
    """Copies of an environment have spaces that do not go together."""


class EnvironmentFailedError(RuntimeError):
    """An environment raised an error, which is the cause of this one, or broke gymnasium's interface. Or its process
    has ended.
    """


class Episode(NamedTuple):
    """A finished episode."""

    environment: int  # number of its environment, among those of all ranks
    episode_return: float  # sum of its rewards
    length: int  # number of its steps
    row: int = 0  # row of the rollout in which it ended


class Step(NamedTuple):
    """The result of a step of N environments. The next step may overwrite these arrays."""

    observations: Array  # [N, ...], dtype of the environment
    rewards: Array  # [N]
    terminated: Bools  # [N]: the step led to a terminal state
    truncated: Bools  # [N]: the episode ended for another reason, such as a time limit
    valid: Bools  # [N]: False if this was the restart after an episode that ended in the step before
    episodes: list[Episode]  # the episodes that ended in this step
    infos: dict[str, Any]  # infos of gymnasium's vector environment


class Environments(ABC):
    """N environments of one rank, with statistics of their episodes and a state to save. Use it in a ``with`` block.

    A finished episode restarts in a step of its own, as with gymnasium's ``AutoresetMode.NEXT_STEP``.

    Args:
        vector: the vector environment.
        first_index: number of its first environment, among those of all ranks.
        notes: sentences that the user should read.
    """

    takes_tensors = False
    """Whether ``step`` takes a tensor, and what it returns are tensors."""

    _observations: Array
    _restarting: Bools

    def __init__(self, vector: VectorEnv[Any, Any, Any], *, first_index: int, notes: Sequence[str] = ()) -> None:
        self._vector: Any = vector
        self.num_envs = vector.num_envs
        self.single_observation_space = vector.single_observation_space
        self.single_action_space = vector.single_action_space
        self.first_index, self.notes = first_index, notes
        self._translate = action_translator(vector.single_action_space)
        self._clear_statistics()

    def reset(self) -> Array:
        """Begins new episodes in all environments. Returns the first observations, [N, ...]."""
        self._clear_statistics()
        self._observations = self._reset()
        return self._observations

    def step(self, actions: Array) -> Step:
        """Steps with actions of the policy: int64 [N] or [N, k], counted from 0, or real [N, k], which are clipped to
        the bounds of the action space.
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

    def take_episodes(self) -> list[Episode]:
        """Returns the episodes that have ended since the last call, if ``step`` does not tell them."""
        return []

    def state(self) -> dict[str, Any]:
        """Returns the environments' state, as dicts, lists, numbers, strings and tensors. It shares no memory."""
        statistics = {"returns": self._returns, "lengths": self._lengths, "restarting": self._restarting}
        state: dict[str, Any] = {"observations": self._observations, **statistics, **self._state()}
        # torch.load(weights_only=True) reads tensors, and no arrays.
        saved: dict[str, Any] = tree_map_only(
            (np.ndarray, np.generic), lambda value: torch.from_numpy(np.array(value)), state
        )
        return saved

    def restore(self, state: dict[str, Any]) -> Array | None:
        """Restores a state of N environments.

        Returns:
            The observations to act on, [N, ...]; None if the environments could not be restored exactly. Then they
            must be reset.
        """
        # This copies the tensors. 0-dim tensors become numpy's scalars.
        saved = tree_map_only(torch.Tensor, lambda value: value.numpy().copy()[()], state)
        observations = self._restore(saved)
        if observations is None or not same_values(observations, saved["observations"]):
            return None
        self._observations = observations
        self._returns, self._lengths, self._restarting = (saved[name] for name in ("returns", "lengths", "restarting"))
        return observations

    def close(self) -> None:
        """Closes the environments and ends their processes."""
        self._vector.close()

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _clear_statistics(self) -> None:
        self._restarting = np.zeros(self.num_envs, dtype=np.bool_)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[tuple[int, float, int]]:
        """Returns index, return and length of the episodes that ended in these environments."""
        returns, lengths = self._returns[indices].tolist(), self._lengths[indices].tolist()
        return list(zip(indices, returns, lengths, strict=True))

    def _reset(self) -> Array:
        observations: Array = self._vector.reset()[0]
        return observations

    def _step(self, actions: Array) -> tuple[Array, Array, Bools, Bools, dict[str, Any]]:
        return self._vector.step(actions)  # type: ignore[no-any-return]

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Returns the state of this kind of environments, besides the statistics of episodes."""

    @abstractmethod
    def _restore(self, state: dict[str, Any]) -> Array | None:
        """Restores the state, and returns the observations; None if that is not possible."""


def seed_from(*numbers: int) -> int:
    """Returns a seed in [0, 2^31) that depends only on these numbers. Different numbers give independent streams."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def seed_globals(*numbers: int) -> None:
    """Seeds the generators of numpy and Python that a whole process shares, for environments that draw from them."""
    seed = seed_from(*numbers, 0)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def same_values(left: Any, right: Any) -> bool:
    """Returns whether two arrays are equal. NaN equals NaN."""
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
