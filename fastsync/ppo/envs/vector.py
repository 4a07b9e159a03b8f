"""The kinds of environments that gymnasium steps: copies one by one or in processes, and vectorised by themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from fastsync.ppo.envs.interface import Array, Bools, Environments, FinishedEpisode, Transition
from fastsync.ppo.envs.resume import same_values

MAX_BYTES = 16 << 20
"""Of the actions of environments that are vectorised by themselves: 16 million steps of CartPole."""


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
    """Environments with a vectorised implementation of their own: all their episodes are one, of one seed.

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
        self._next_seed = self._seed = seed
        space = self.single_action_space
        few = isinstance(space, Discrete) and space.start == 0 and space.n <= 256
        self._kept_dtype: Any = np.uint8 if few else space.dtype
        self._actions = bytearray()

    def _reset(self) -> Array:
        return self._begin(self._next_seed)

    def _begin(self, seed: int) -> Array:
        self._seed, self._actions = seed, bytearray()
        observations: Array = self._vector.reset(seed=seed)[0]
        return observations

    def _step(self, actions: Array) -> Transition:
        if self.is_restorable and len(self._actions) <= MAX_BYTES:
            self._actions += actions.astype(self._kept_dtype).tobytes()
            if len(self._actions) > MAX_BYTES:
                warnings.warn(
                    f"the environments have taken so many steps that their actions, more than {MAX_BYTES:,} bytes, are "
                    f"no longer kept: if the run is resumed, they begin new episodes; those of vectorization='sync' "
                    f"can go on in runs of any length",
                    stacklevel=2,
                )
        return self._vector.step(actions)

    def _state(self) -> dict[str, Any]:
        if not self.is_restorable or len(self._actions) > MAX_BYTES:
            return {}
        return {"seed": self._seed, "actions": np.frombuffer(bytes(self._actions), np.uint8)}

    def _restore(self, state: dict[str, Any]) -> tuple[Array, Bools]:
        if self.is_restorable and "actions" in state and len(state["returns"]) == self.num_envs:
            observations = self._begin(state["seed"])
            shape = (-1, self.num_envs, *self.single_action_space.shape)  # type: ignore[misc]
            actions = np.frombuffer(state["actions"].tobytes(), self._kept_dtype).reshape(shape)
            for row in actions.astype(self.single_action_space.dtype):
                observations = self._step(row)[0]
            if same_values(observations, state["observations"]):
                return observations, np.ones(self.num_envs, dtype=np.bool_)
        return self._reset(), np.zeros(self.num_envs, dtype=np.bool_)

    def close(self) -> None:
        self._vector.close()
