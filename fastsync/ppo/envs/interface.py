"""Environments that step together: one interface over gymnasium's vector environments and EnvPool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray

from fastsync.ppo.envs.spaces import action_translator

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Transition = tuple[Array, Array, Bools, Bools, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """An episode that ended in a step."""

    index: int  # of this rank's environment
    episode_return: float
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a step of N environments, which may write to these arrays again in their next step."""

    observations: Array  # [N, ...] in the environment's dtype
    rewards: Array  # [N]
    terminated: Bools  # [N]: the step led to a terminal state
    truncated: Bools  # [N]: the episode ended for another reason, such as a time limit
    valid: Bools  # [N]: False for no step, but the restart of an episode that ended in the step before
    final_observations: dict[int, Array]
    """By environment: the last observation of an episode, where ``observations`` has the first of the next already."""
    episodes: list[FinishedEpisode]
    """Those that ended in this step."""
    infos: dict[str, Any]
    """What the environment says beside, as gymnasium's vector environments have it."""


class Environments(ABC):
    """N environments of one rank, the accounts of their episodes, and their state. Use it in a ``with`` block.

    Args:
        num_envs: N.
        observation_space: of one environment.
        action_space: of one environment.
        same_step: whether an episode restarts in the step that ended the last one, else in a step of its own.
        first_index: number of the first of these environments among those of all ranks.
        reward_threshold: the mean return at which the environment counts as solved, if that is defined.
        is_restorable: whether ``restore`` goes on exactly where ``state`` was taken, as far as is known.
    """

    _restarting: Bools
    _returns: NDArray[np.float64]
    _lengths: NDArray[np.int64]

    def __init__(
        self,
        num_envs: int,
        observation_space: Space[Any],
        action_space: Space[Any],
        *,
        same_step: bool,
        first_index: int,
        reward_threshold: float | None = None,
        is_restorable: bool = True,
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.same_step = same_step
        self.first_index = first_index
        self.reward_threshold = reward_threshold
        self.is_restorable = is_restorable
        self.begun_anew: list[int] = []
        """Environments that the last ``restore`` could not bring back, by their numbers among those of all ranks."""
        self.restored: Bools = np.zeros(num_envs, dtype=np.bool_)
        """[N]: which of them the last ``restore`` brought back exactly; the rest are at the start of an episode."""
        self._translate = action_translator(action_space)
        self._observations: Array | None = None
        self._all = np.ones(num_envs, dtype=np.bool_)
        self._all.flags.writeable = False
        self._clear_accounts()

    def reset(self) -> Array:
        """Begins new episodes everywhere. Returns their first observations, [N, ...]."""
        self._clear_accounts()
        self._observations = self._reset()
        return self._observations

    def step(self, actions: Array) -> Step:
        """Steps with actions as the policy makes them: int64 [N] or [N, k] counted from 0, or real [N, k], which are
        cut off at the bounds of the action space.

        Raises:
            RuntimeError: the environments do not answer, or say nothing of a last observation where they must.
        """
        observations, rewards, terminated, truncated, infos = self._step(self._translate(actions))
        done = terminated | truncated
        if self.same_step:
            valid = self._all
        else:
            valid = ~self._restarting
            self._restarting = done
        self._returns += rewards
        self._lengths += valid
        self._observations = observations
        (ended,) = done.nonzero()
        if not len(ended):
            return Step(observations, rewards, terminated, truncated, valid, {}, [], infos)
        indices = ended.tolist()
        episodes = self._finished_episodes(indices, infos)
        final_observations = {}
        if self.same_step:
            final_observations = {index: _final_observation(infos, index) for index in indices}
        self._returns[ended] = 0.0
        self._lengths[ended] = 0
        return Step(observations, rewards, terminated, truncated, valid, final_observations, episodes, infos)

    def state(self) -> dict[str, Any]:
        """Saves where the environments stand, as dicts, lists, numbers, strings and tensors of their own memory.

        It goes on from there exactly if ``is_restorable``; else it holds what lets new episodes differ from old ones.
        """
        return to_plain(  # type: ignore[no-any-return]
            {
                "kind": type(self).__name__,
                "first_index": self.first_index,
                "observations": self._observations,
                "returns": self._returns,
                "lengths": self._lengths,
                "restarting": self._restarting,
                **self._state(),
            }
        )

    def restore(self, state: dict[str, Any]) -> Array:
        """Goes back to a state, also of fewer environments than these: the others begin their first episodes.

        Returns:
            The observations to act on, [N, ...]. Where these are not what the state says, new episodes have begun, and
            ``begun_anew`` tells where; ``restored`` is False there and in environments that the state does not know.
        """
        state = to_numpy(state)
        if state["kind"] == type(self).__name__:
            observations, restored = self._restore(state)
        else:
            observations, restored = self._reset(), np.zeros(self.num_envs, dtype=np.bool_)
        self._clear_accounts()
        known = np.flatnonzero(restored)
        for account, name in ((self._returns, "returns"), (self._lengths, "lengths"), (self._restarting, "restarting")):
            account[known] = state[name][known]
        num_saved = min(len(state["returns"]), self.num_envs)
        self.restored = restored
        self.begun_anew = [self.first_index + i for i in range(num_saved) if not restored[i]]
        self._observations = observations
        return observations

    @abstractmethod
    def close(self) -> None:
        """Ends the environments and their processes."""

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _clear_accounts(self) -> None:
        self._restarting = np.zeros(self.num_envs, dtype=np.bool_)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[FinishedEpisode]:
        returns, lengths = self._returns[indices].tolist(), self._lengths[indices].tolist()
        return [FinishedEpisode(*account) for account in zip(indices, returns, lengths, strict=True)]

    @abstractmethod
    def _reset(self) -> Array: ...

    @abstractmethod
    def _step(self, actions: Array) -> Transition: ...

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Saves what this kind of environments needs to go on, besides the accounts."""

    @abstractmethod
    def _restore(self, state: dict[str, Any]) -> tuple[Array, Bools]:
        """Goes back; returns the observations and which environments stand where the state says."""


def redistribute(
    states: Sequence[dict[str, Any]], *, rank: int, world_size: int, num_envs: int
) -> tuple[dict[str, Any] | None, str | None]:
    """Picks what a rank restores out of what ``Environments.state`` gave on each rank of the run before.

    In the same world each rank gets its own. In another one environments that are replayed one by one keep their
    numbers among all ranks and go to whoever has these numbers now; a rank that has more than there are begins new
    ones.

    Returns:
        What to restore, or None where this rank begins anew; and what to say, if the world is another one.
    """
    if [len(state["returns"]) for state in states] == [num_envs] * world_size:
        return states[rank], None
    old, new = sum(len(state["returns"]) for state in states), world_size * num_envs
    if not all("episodes" in state for state in states):
        return (
            None,
            f"all {new} environments begin new episodes: those saved can only go on in the same number per rank",
        )
    said = f"the {old} environments go on where they were, and {new - old} new ones begin"
    if new == old:
        said = f"the {old} environments go on where they were, spread over the ranks anew"
    if new < old:
        said = f"{new} of {old} environments go on where they were; the others are dropped"
    ordered = sorted(states, key=lambda state: int(state["first_index"]))
    mine = slice(rank * num_envs, (rank + 1) * num_envs)
    episodes = [episode for state in ordered for episode in state["episodes"]][mine]
    rows = {
        name: torch.cat([state[name] for state in ordered])[mine].clone()
        for name in ("observations", "returns", "lengths", "restarting")
    }
    return ({**ordered[0], "first_index": mine.start, "episodes": episodes, **rows} if episodes else None), said


def begun_anew(indices: Iterable[int]) -> str | None:
    """A sentence about environments that ``restore`` could not bring back, by their numbers; None if there are none."""
    numbers = sorted(indices)
    if not numbers:
        return None
    listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return (
        f"{len(numbers)} environments ({listed}) could not be brought back to exactly where they were, and began new "
        f"episodes: this run is not bitwise what it would have been without the interruption"
    )


def to_plain(value: Any) -> Any:
    """What ``torch.load(weights_only=True)`` reads back: numpy's arrays and scalars become tensors."""
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, list | tuple) else value


def to_numpy(value: Any) -> Any:
    """The way back: tensors become arrays of their own memory, those without a dimension numpy scalars."""
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()[()]
    if isinstance(value, dict):
        return {name: to_numpy(item) for name, item in value.items()}
    return [to_numpy(item) for item in value] if isinstance(value, list) else value


def _final_observation(infos: dict[str, Any], index: int) -> Array:
    if "final_obs" not in infos or infos["final_obs"][index] is None:
        raise RuntimeError(
            f"environment {index} restarted in the step that ended its episode, but its infos hold no 'final_obs' with "
            f"the last observation; truncated episodes cannot be learnt from without it"
        )
    return np.array(infos["final_obs"][index])
