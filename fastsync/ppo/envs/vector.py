"""Environments that gymnasium steps: copies of one environment, and vectorised implementations.

To restore an environment in the middle of an episode, the episode restarts with its seed, and its actions are repeated.
That is exact if an episode depends only on its seed and its actions. A trial checks this.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from .interface import UNSEEN, Array, CopiesDifferError, EnvironmentFailedError, Environments, same_values, seed_from
from .parts import allowed_sample
from .processes import CLOSE_SECONDS, FAILED_CLOSE_SECONDS, EnvironmentProcesses

MAX_ACTIONS = 100_000
"""Largest number of actions of an episode that can be restored. An Atari game has up to 27,000."""
MAX_BYTES = 16 << 20
"""Largest memory for the actions of a vectorised implementation: 16 million steps of CartPole."""
TRIAL_STEPS = 100
"""Steps of the trial episode, which is played twice before an environment is restored."""


class EpisodeRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds every episode of an environment separately, and records its actions.

    Episode k of environment ``index`` begins with ``reset(seed=seed_from(seed, index, k))``, whatever seed the caller
    passes. Its spaces and its ``np_random`` are seeded once, because some environments draw from them and ignore that
    seed. Vector environments, also those in other processes, use ``call("snapshot")``, ``set_attr("restore_from",
    snapshots)`` and ``call("restore")``. The first ``step`` after that only repeats the last result, with reward 0, so
    that the vector environment knows which episodes have ended.

    Args:
        env: a single environment. If its attribute ``resets_go_on`` is true, a reset continues the episode (the next
            life of a game), and is replayed, too.
        seed: the run's seed.
        index: number of the environment, among those of all ranks.
        first_episode: k of the first episode.
        log_info: names of numbers in ``info`` to keep. The rest of it is dropped, because gymnasium cannot join
            everything that environments may put there.

    Raises:
        EnvironmentFailedError: in ``reset`` and ``step``, if the environment raises an error or returns what
            gymnasium's interface does not allow. The message names environment, episode and step.
    """

    restore_from: dict[str, Any]

    def __init__(
        self, env: gymnasium.Env[Any, Any], *, seed: int, index: int, first_episode: int = 0,
        log_info: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(env)
        self._log_info = log_info
        self._stream = (seed, index)
        self._may_go_on = env.has_wrapper_attr("resets_go_on")
        self._episode = first_episode - 1
        self._num_steps = 0
        self._shape: Any = env.observation_space.shape
        self._dtype: Any = env.observation_space.dtype
        self._actions: list[Any] = []
        self._resets: list[int] = []
        self._ended = (False, False)
        self._repeated_observation: Any = None
        unwrapped, space_seed = env.unwrapped, seed_from(*self._stream, first_episode)
        unwrapped.np_random = np.random.default_rng(space_seed)
        unwrapped.action_space.seed(space_seed)
        unwrapped.observation_space.seed(space_seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode with its own seed, and ignores ``seed``."""
        self._ended, self._repeated_observation = (False, False), None
        goes_on = self._may_go_on and self.env.get_wrapper_attr("resets_go_on")
        if goes_on:
            self._resets.append(len(self._actions))
        try:
            observation, _ = self.env.reset(options=options) if goes_on else self._begin(self._episode + 1, options)
            self._check_observation(observation)
        except Exception as error:  # any error of the user's environment
            raise self._named("reset()", error) from error
        return observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._repeated_observation is not None:
            observation, self._repeated_observation = self._repeated_observation, None
            return observation, 0.0, *self._ended, {}
        if len(self._actions) <= MAX_ACTIONS:
            # The action is a row of an array that the caller may overwrite.
            self._actions.append(action.copy() if isinstance(action, np.ndarray) else action)
        self._num_steps += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            self._check_observation(observation)
            _check_reward(reward)
            self._ended = (bool(terminated), bool(truncated))
            return observation, reward, terminated, truncated, self._kept(info)
        except Exception as error:  # any error of the user's environment
            raise self._named(f"step {self._num_steps}", error) from error

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """Returns the state for ``restore``; None if the episode is too long."""
        if len(self._actions) > MAX_ACTIONS:
            return None
        return {"episode": self._episode, "actions": np.array(self._actions), "resets": list(self._resets)}

    def restore(self) -> bool:
        """Restores ``restore_from``. Returns False if the trial or the repeated actions give other results."""
        actions, resets = list(self.restore_from["actions"]), self.restore_from["resets"]
        if not all(map(same_values, self._trial(), self._trial())):
            return False
        observation, _ = self._begin(self.restore_from["episode"])
        ended = [False, False]
        for number in range(len(actions) + 1):
            if number in resets:
                observation, _ = self.env.reset()
                ended = [False, False]
            if any(ended) and number < len(actions):
                return False
            if number < len(actions):
                observation, _, *ended, _ = self.env.step(actions[number])
        self._actions, self._resets, self._num_steps = actions, resets, len(actions)
        self._ended = (bool(ended[0]), bool(ended[1]))
        self._repeated_observation = observation
        return True

    def _trial(self) -> list[Any]:
        """Plays the trial episode, always with the same seed and actions. Returns all results of its steps."""
        space = copy.deepcopy(self.env.action_space)  # the environment may use the generator of its own space
        space.seed(0)
        observation, _ = self._begin(self.restore_from["episode"])
        results: list[Any] = [observation]
        ended: list[Any] = [False]
        while not any(ended) and len(results) < TRIAL_STEPS:
            observation, reward, *ended, _ = self.env.step(allowed_sample(space, self.observation_space, observation))
            results.append(np.array([*np.ravel(observation), reward, *ended], np.float64))
        return results

    def _begin(self, episode: int, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._actions, self._resets, self._num_steps = episode, [], [], 0
        return self.env.reset(seed=seed_from(*self._stream, episode), options=options)

    def _kept(self, info: dict[str, Any]) -> dict[str, Any]:
        kept = {"game": info["game"]} if self._may_go_on and "game" in info else {}
        for name in self._log_info:
            if (value := info.get(name)) is not None:
                if isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape) == 1:
                    value = value.item()
                if not isinstance(value, int | float | np.number | np.bool_):
                    raise ValueError(f"info[{name!r}] is {value!r}; log_info is for numbers")
                kept[name] = float(value)
        return kept

    def _check_observation(self, observation: Any) -> None:
        if getattr(observation, "shape", None) == self._shape and observation.dtype == self._dtype:
            return  # the usual case; it comes at every step
        found = np.asarray(observation)
        if found.shape != self._shape:
            raise ValueError(f"the observation has the shape {found.shape}; observation_space has {self._shape}")
        if not np.can_cast(found.dtype, self._dtype, "same_kind"):
            raise ValueError(f"the observation has the dtype {found.dtype}; observation_space has {self._dtype}")

    def _named(self, call: str, error: Exception) -> EnvironmentFailedError:
        """Returns the error that says where another one was raised."""
        name, (_, index) = type(self.unwrapped).__name__, self._stream
        which = f"environment {index}" if index < UNSEEN else f"environment {index - UNSEEN} of the evaluation"
        where = f"{which} ({name}) failed in {call} of episode {self._episode}"
        return EnvironmentFailedError(f"{where}: {type(error).__name__}: {error}")


def _check_reward(reward: Any) -> None:
    try:
        is_finite = math.isfinite(reward)
    except TypeError:
        raise ValueError(f"the reward is {reward!r}; it must be a number") from None
    if not is_finite:
        raise ValueError(f"the reward is {reward}; it must be finite")


def _side_by_side(makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]], options: Any) -> SyncVectorEnv:
    """Makes copies of an environment that step in turn. Raises CopiesDifferError if they do not go together."""
    try:
        return SyncVectorEnv(makers, **options)
    except RuntimeError as error:  # gymnasium raises no other one, and EnvSource makes ValueErrors of an environment's
        raise CopiesDifferError(str(error)) from error


def join(
    name: str, makers: Sequence[Callable[[], gymnasium.Env[Any, Any]]], space: Space[Any], *,
    first_index: int = 0, in_processes: bool = False,
) -> SyncVectorEnv | EnvironmentProcesses:  # fmt: skip
    """Makes copies of an environment that step together.

    Args:
        name: the user's name of the environment.
        makers: each makes a copy.
        space: the observation space. That of a copy may have other bounds.
        first_index: number of the first copy, among those of all ranks.
        in_processes: whether each copy gets a process.

    Raises:
        ValueError: a copy has observations of another shape or dtype, or other actions.
    """
    # gymnasium sends this to each process, so it is not the joint space.
    options: Any = {"autoreset_mode": AutoresetMode.NEXT_STEP, "observation_mode": (space, space)}
    vector: SyncVectorEnv | EnvironmentProcesses
    try:
        if in_processes:
            vector = EnvironmentProcesses(makers, name=name, first_index=first_index, **options)
        else:
            vector = _side_by_side(makers, options)
    except CopiesDifferError as error:
        raise ValueError(
            f"env={name!r} has copies that differ in more than the bounds of their observations, and cannot learn "
            f"together: {error}"
        ) from error
    vector.observation_space = batch_space(space, len(makers))
    return vector


class RecordedEnvironments(Environments):
    """Copies of an environment, each in an ``EpisodeRecorder``.

    Args:
        vector: the vector environment.
        counts_games: whether statistics are of whole games (``LifeByLife``), and not of the policy's episodes.
        first_index, notes: see ``Environments``.
    """

    def __init__(
        self, vector: SyncVectorEnv | EnvironmentProcesses, *, first_index: int, counts_games: bool = False,
        notes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        super().__init__(vector, first_index=first_index, notes=notes)
        self._counts_games = counts_games
        if isinstance(vector, EnvironmentProcesses):
            # At exit multiprocessing sends a signal that these processes ignore, and waits for them.
            self._at_exit = Finalize(None, self.close, exitpriority=0)

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[tuple[int, float, int]]:
        if not self._counts_games:
            return super()._finished_episodes(indices, infos)
        if "game" not in infos:
            return []
        games, ended = infos["game"], infos["_game"]
        return [(i, float(games["score"][i]), int(games["length"][i])) for i in indices if ended[i]]

    def _state(self) -> dict[str, Any]:
        return {"episodes": list(self._vector.call("snapshot"))}

    def _restore(self, state: dict[str, Any]) -> Array | None:
        episodes = state.get("episodes")  # environments of another vectorization have none
        if episodes is None or None in episodes:
            return None
        self._reset()  # or the next step would restart environments whose episodes have just ended
        self._vector.set_attr("restore_from", state["episodes"])
        if not all(self._vector.call("restore")):
            return None
        observations, _, terminated, truncated, _ = self._step(np.zeros_like(self._vector.action_space.sample()))
        return observations if np.array_equal(terminated | truncated, state["restarting"]) else None

    def close(self) -> None:
        self._end(CLOSE_SECONDS)

    def __exit__(self, *error: object) -> None:
        self._end(CLOSE_SECONDS if error[0] is None else FAILED_CLOSE_SECONDS)

    def _end(self, seconds: float) -> None:
        if isinstance(self._vector, EnvironmentProcesses):
            self._at_exit.cancel()
            self._vector.end(seconds)
        else:
            super().close()


class VectorizedEnvironments(Environments):
    """Environments with a vectorised implementation of their own, which has one seed for all.

    Args:
        vector: the vectorised implementation.
        seed: its seed.
        first_index, notes: see ``Environments``.
    """

    def __init__(
        self, vector: VectorEnv[Any, Any, Any], *, seed: int, first_index: int, notes: Sequence[str] = ()
    ) -> None:
        super().__init__(vector, first_index=first_index, notes=notes)
        self._next_seed = seed
        space = self.single_action_space
        few = isinstance(space, Discrete) and space.start == 0 and space.n <= 256
        self._kept_dtype: Any = np.uint8 if few else space.dtype

    def _reset(self) -> Array:
        return self._begin(self._next_seed)

    def _begin(self, seed: int) -> Array:
        self._seed, self._actions = seed, bytearray()
        observations: Array = self._vector.reset(seed=seed)[0]
        return observations

    def _step(self, actions: Array) -> Any:
        if len(self._actions) <= MAX_BYTES:
            self._actions += actions.astype(self._kept_dtype).tobytes()
        return self._vector.step(actions)

    def _state(self) -> dict[str, Any]:
        is_kept = len(self._actions) <= MAX_BYTES
        return {"seed": self._seed, "actions": np.frombuffer(bytes(self._actions), np.uint8) if is_kept else None}

    def _restore(self, state: dict[str, Any]) -> Array | None:
        if state.get("actions") is None:  # too many to keep, or from environments of another vectorization
            return None
        observations = self._begin(state["seed"])
        shape = (-1, self.num_envs, *self.single_action_space.shape)  # type: ignore[misc]
        for row in np.frombuffer(state["actions"].tobytes(), self._kept_dtype).reshape(shape):
            observations = self._step(row.astype(self.single_action_space.dtype))[0]
        return observations
