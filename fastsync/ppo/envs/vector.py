"""The kinds of environments that gymnasium steps: copies one by one or in processes, and vectorised by themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from fastsync.ppo.envs.interface import Array, Bools, Environments, FinishedEpisode, Transition
from fastsync.ppo.envs.plain_data import attributes_of, set_attributes


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
        counts_games: bool = False,
        timeout: float = 120.0,
        **others: Any,
    ) -> None:
        same_step = vector.autoreset_mode == AutoresetMode.SAME_STEP
        spaces = vector.single_observation_space, vector.single_action_space
        super().__init__(vector.num_envs, *spaces, same_step=same_step, **others)
        self._vector = vector
        self._counts_games = counts_games
        self._timeout = timeout
        self._at_exit: Finalize | None = None
        if isinstance(vector, AsyncVectorEnv):
            # At exit multiprocessing ends processes by a signal that these are deaf to, and waits for them.
            self._at_exit = Finalize(None, self.close, exitpriority=0)

    def _reset(self) -> Array:
        observations: Array = self._ask("a reset", "reset")[0]
        return observations

    def _step(self, actions: Array) -> Transition:
        return self._ask("a step", "step", actions)  # type: ignore[no-any-return]

    def _ask(self, request: str, method: str, *arguments: Any) -> Any:
        """Calls a method of the vector environment that answers."""
        vector = self._vector
        if isinstance(vector, SyncVectorEnv):
            return getattr(vector, method)(*arguments)
        with self._answers_expected(request):
            getattr(vector, f"{method}_async")(*arguments)
            return getattr(vector, f"{method}_wait")(self._timeout)

    @contextlib.contextmanager
    def _answers_expected(self, request: str) -> Iterator[None]:
        """Ends the processes where they do not answer, for a later answer would be taken for another request's."""
        try:
            yield
        except multiprocessing.TimeoutError:
            self._kill_processes()
            raise RuntimeError(
                f"the environments' processes did not answer to {request} within timeout={self._timeout:g} seconds"
            ) from None
        except (EOFError, ConnectionError) as error:
            self._kill_processes()
            raise RuntimeError(
                f"a process with an environment has ended instead of answering to {request}: {error!r}"
            ) from error
        except BaseException:  # of an environment, or Ctrl-C
            self._kill_processes()
            raise

    def _kill_processes(self) -> None:
        """In place of the vector environment's own way, which waits for answers without a limit."""
        if isinstance(self._vector, SyncVectorEnv):
            return
        for process in self._vector.processes:
            process.kill()
        for process in self._vector.processes:
            process.join()
        for pipe in self._vector.parent_pipes:
            if pipe is not None:  # so it is where an environment has raised
                pipe.close()
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
        return {"episodes": list(self._ask("a snapshot", "call", "snapshot"))}

    def _restore(self, state: dict[str, Any]) -> tuple[Array, Bools]:
        self._reset()  # else it would restart environments that ended in its last step
        episodes = state["episodes"][: self.num_envs]
        # There is no waiting for this with a time limit, so it must do nothing yet.
        with self._answers_expected("an attribute"):
            self._vector.set_attr("restore_from", episodes + [None] * (self.num_envs - len(episodes)))
        restored = np.array(self._ask("the replay of saved episodes", "call", "restore"), dtype=np.bool_)
        # The recorders only tell again where they stand: this is how the vector environment learns which of them
        # ended in the step before.
        anything = np.zeros_like(self._vector.action_space.sample())
        observations, _, terminated, truncated, _ = self._step(anything)
        if self.same_step:  # saved between an episode and the next, which began just now
            restored &= ~(terminated | truncated)
        return observations, restored

    def close(self) -> None:
        if self._at_exit is not None:
            self._at_exit.cancel()
        if isinstance(self._vector, SyncVectorEnv):
            self._vector.close()
        elif not self._vector.closed:
            self._close_processes()

    def _close_processes(self) -> None:
        assert isinstance(self._vector, AsyncVectorEnv)
        deadline = time.monotonic() + self._timeout
        for pipe in self._vector.parent_pipes:
            with contextlib.suppress(ConnectionError):  # its process has ended
                pipe.send(("close", None))
        for pipe in self._vector.parent_pipes:
            pipe.poll(max(0.0, deadline - time.monotonic()))
        for process in self._vector.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill_processes()


class VectorizedEnvironments(Environments):
    """Environments with a vectorised implementation of their own. Their state is what its attributes hold.

    Args:
        vector: the implementation.
        seed: of its one source of randomness.
        others: see ``Environments``.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any], *, seed: int, **others: Any) -> None:
        same_step = vector.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        spaces = vector.single_observation_space, vector.single_action_space
        super().__init__(vector.num_envs, *spaces, same_step=same_step, **others)
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

    def close(self) -> None:
        self._vector.close()
