"""The kinds of environments that gymnasium steps: copies one by one or in processes, and vectorised by themselves."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from fastsync.ppo.environments import Array, Bools, Environments, FinishedEpisode, Transition
from fastsync.ppo.plain_data import attributes_of, set_attributes


class RecordedEnvironments(Environments):
    """Copies of an environment, each in an ``EpisodeRecorder``. Their state is replayed.

    Args:
        vector: holds them.
        counts_games: episodes are what the environment calls a finished game, not what ends for the policy.
        timeout: seconds to wait for those in processes.
        others: see ``Environments``.
    """

    def __init__(
        self,
        vector: SyncVectorEnv | AsyncVectorEnv,
        *,
        first_index: int,
        counts_games: bool = False,
        timeout: float = 120.0,
        reward_threshold: float | None = None,
        why_not_restorable: str | None = None,
    ) -> None:
        super().__init__(
            num_envs=vector.num_envs,
            observation_space=vector.single_observation_space,
            action_space=vector.single_action_space,
            same_step=vector.autoreset_mode == AutoresetMode.SAME_STEP,
            first_index=first_index,
            reward_threshold=reward_threshold,
            why_not_restorable=why_not_restorable,
        )
        self._vector = vector
        self._counts_games = counts_games
        self._timeout = timeout

    def _reset(self) -> Array:
        observations: Array = self._vector.reset()[0]
        return observations

    def _step(self, actions: Array) -> Transition:
        if isinstance(self._vector, SyncVectorEnv):
            return self._vector.step(actions)
        self._vector.step_async(actions)
        try:
            return self._vector.step_wait(self._timeout)
        except multiprocessing.TimeoutError:
            self._end_processes()
            raise RuntimeError(f"the environments' processes did not answer within {self._timeout:g} s") from None
        except (EOFError, ConnectionError) as error:
            self._end_processes()
            raise RuntimeError(f"a process with an environment has ended: {error!r}") from error

    def _end_processes(self) -> None:
        """In place of close, which would wait for an answer."""
        assert isinstance(self._vector, AsyncVectorEnv)
        for process in self._vector.processes:
            process.kill()
            process.join()
        self._vector.closed = True

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[FinishedEpisode]:
        if not self._counts_games:
            return super()._finished_episodes(indices, infos)
        infos = infos.get("final_info", {}) if self.same_step else infos
        if "game" not in infos:
            return []
        games, ended = infos["game"], infos["_game"]
        return [FinishedEpisode(i, float(games["score"][i]), int(games["length"][i])) for i in indices if ended[i]]

    def _state(self) -> dict[str, Any]:
        return {"episodes": list(self._vector.get_attr("snapshot"))}

    def _restore(self, state: dict[str, Any]) -> tuple[Array, Bools]:
        self._vector.reset()  # else it would restart environments that ended in its last step
        episodes = state["episodes"][: self.num_envs]
        self._vector.set_attr("snapshot", episodes + [None] * (self.num_envs - len(episodes)))
        restored = np.array(self._vector.get_attr("is_restored"), dtype=np.bool_)
        # The recorders only tell again where they stand: this is how the vector environment learns which of them
        # ended in the step before.
        anything = np.zeros_like(self._vector.action_space.sample())
        observations, _, terminated, truncated, _ = self._step(anything)
        if self.same_step:  # saved between an episode and the next, which began just now
            restored &= ~(terminated | truncated)
        return observations, restored

    def _close(self) -> None:
        self._vector.close()


class VectorizedEnvironments(Environments):
    """Environments with a vectorised implementation of their own. Their state is what its attributes hold.

    Args:
        vector: the implementation.
        seed: of its one source of randomness.
        others: see ``Environments``.
    """

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        *,
        seed: int,
        first_index: int,
        reward_threshold: float | None = None,
        why_not_restorable: str | None = None,
    ) -> None:
        super().__init__(
            num_envs=vector.num_envs,
            observation_space=vector.single_observation_space,
            action_space=vector.single_action_space,
            same_step=vector.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP,
            first_index=first_index,
            reward_threshold=reward_threshold,
            why_not_restorable=why_not_restorable,
        )
        self._vector = vector
        self._seed = seed

    def _reset(self) -> Array:
        observations: Array = self._vector.reset(seed=self._seed)[0]
        return observations

    def _step(self, actions: Array) -> Transition:
        return self._vector.step(actions)

    def _state(self) -> dict[str, Any]:
        return {"attributes": attributes_of(self._vector.unwrapped) if self.is_restorable else None}

    def _restore(self, state: dict[str, Any]) -> tuple[Array, Bools]:
        observations = self._reset()
        same = (
            state["attributes"] is not None
            and len(state["observations"]) == self.num_envs
            and state["same_step"] == self.same_step
        )
        if same:
            set_attributes(self._vector.unwrapped, state["attributes"])
            observations = state["observations"]
        return observations, np.full(self.num_envs, same)

    def _close(self) -> None:
        self._vector.close()
