"""Episodes that can be gone back to: each is a function of its seed and of the actions taken in it."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

# Of one episode: some memory, and a replay that those who wait for it can wait for. An Atari game has up to 27,000.
MAX_ACTIONS = 100_000


def seed_from(*numbers: int) -> int:
    """A seed in [0, 2^31) that depends on these numbers only. Streams of different numbers are independent."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


class EpisodeRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds every episode of an environment by itself and keeps its actions, so that a snapshot is small and exact.

    Episode k of environment ``index`` begins with ``reset(seed=seed_from(seed, index, k))``, whatever was asked for. A
    snapshot is that seed and the actions since; ``restore`` resets and replays them, which is exact for environments
    whose seeded reset leaves nothing of what was before. The next ``step`` then only tells again what the last one told
    (with reward 0), so that a vector environment learns of it by a step of its own.

    An episode of more than ``MAX_ACTIONS`` steps cannot be restored: a warning says so, and its snapshot holds its
    number only, so that going on from it begins the next one.

    Vector environments reach all by name, in this process and in others: ``call("snapshot")``,
    ``set_attr("restore_from", snapshots)`` and ``call("restore")``.

    Args:
        env: a single environment. Where its attribute ``resets_go_on`` is true, a reset does not begin anew (the next
            life of a game); such resets are replayed as well.
        seed: the run's seed.
        index: number of the environment among those of all ranks.
        keep_actions: False where replaying is known not to be exact: snapshots then hold the number of the episode
            only, and going on from them begins the next one.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, seed: int, index: int, keep_actions: bool = True) -> None:
        super().__init__(env)
        self.restore_from: dict[str, Any] | None = None
        """The snapshot to go back to. With None the first episode begins."""
        self._run_seed = seed
        self._index = index
        self._keep_actions = keep_actions
        self._is_too_long = False
        self._may_go_on = env.has_wrapper_attr("resets_go_on")
        self._episode = -1
        self._episode_seed = 0
        self._actions: list[Any] = []
        self._resets: list[int] = []
        self._last: tuple[Any, Any, bool, bool, dict[str, Any]] | None = None
        self._tell_again = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins the next episode with its own seed. ``seed`` is ignored."""
        if self._may_go_on and self._episode >= 0 and self.env.get_wrapper_attr("resets_go_on"):
            self._resets.append(len(self._actions))
            observation, info = self.env.reset(options=options)
        else:
            observation, info = self._begin_next(options)
        self._last = (observation, 0.0, False, False, {})
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._tell_again:
            assert self._last is not None
            self._tell_again = False
            observation, _, terminated, truncated, _ = self._last
            return observation, 0.0, terminated, truncated, {}
        if self._keep_actions and not self._is_too_long:
            # Vector environments hand out rows of an array that the caller may write to again.
            self._actions.append(action.copy() if isinstance(action, np.ndarray) else action)
            if len(self._actions) > MAX_ACTIONS:
                self._is_too_long = True
                self._actions, self._resets = [], []
                warnings.warn(
                    f"an episode has more than {MAX_ACTIONS:,} steps, so its actions are no longer kept: if the run is "
                    f"resumed within it, this environment begins a new episode",
                    stacklevel=2,
                )
        self._last = self.env.step(action)
        return self._last

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """Record of what it takes to come back here, as numbers and arrays. None before the first reset."""
        if self._last is None:
            return None
        if not self._keep_actions or self._is_too_long:
            return {"episode": self._episode}
        observation, _, terminated, truncated, _ = self._last
        return {
            "episode": self._episode,
            "seed": self._episode_seed,
            "actions": np.array(self._actions),
            "resets": np.array(self._resets, dtype=np.int64),
            "observation": np.array(observation),
            "terminated": bool(terminated),
            "truncated": bool(truncated),
        }

    def restore(self) -> bool:
        """Goes back to ``restore_from``. False if that cannot be done, and the next episode has begun instead."""
        snapshot, self.restore_from = self.restore_from, None
        self._episode = -1 if snapshot is None else int(snapshot["episode"])
        is_restored = False
        if snapshot is not None and self._keep_actions and "actions" in snapshot:
            is_restored = self._replay(snapshot)
        if not is_restored:
            observation, _ = self._begin_next()
            self._last = (observation, 0.0, False, False, {})
        self._tell_again = True
        return is_restored

    def _replay(self, snapshot: dict[str, Any]) -> bool:
        """Resets and repeats the actions. False where this does not lead to where the snapshot was taken."""
        actions, resets = list(np.asarray(snapshot["actions"])), set(np.asarray(snapshot["resets"]).tolist())
        self._episode_seed = int(snapshot["seed"])
        observation, _ = self.env.reset(seed=self._episode_seed)
        terminated = truncated = False
        for number in range(len(actions) + 1):
            if number in resets:
                if not (terminated or truncated):
                    return False
                observation, _ = self.env.reset()
                terminated = truncated = False
            if number < len(actions):
                if terminated or truncated:
                    return False
                observation, _, terminated, truncated, _ = self.env.step(actions[number])
        self._actions, self._resets, self._is_too_long = actions, sorted(resets), False
        self._last = (observation, 0.0, terminated, truncated, {})
        return (
            bool(terminated) == snapshot["terminated"]
            and bool(truncated) == snapshot["truncated"]
            and same_values(np.asarray(observation), np.asarray(snapshot["observation"]))
        )

    def _begin_next(self, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode += 1
        self._episode_seed = seed_from(self._run_seed, self._index, self._episode)
        self._actions, self._resets, self._is_too_long = [], [], False
        return self.env.reset(seed=self._episode_seed, options=options)


def same_values(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Tells whether two arrays are equal, NaN to NaN as well."""
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
