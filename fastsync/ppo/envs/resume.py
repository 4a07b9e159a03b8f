"""Going on inside an episode: it begins again with its seed, and the actions since are repeated.

That is exact where an episode is a function of its seed and its actions. A trial at the start finds out whether it is;
what cannot be brought back begins a new episode, and the run says so.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from fastsync.ppo.envs.spaces import random_actions

MAX_ACTIONS = 100_000
"""Of one episode: a replay that those who wait for it can wait for. An Atari game has up to 27,000."""

# A trial begins with some episodes of so many steps, as what they leave behind may change later ones: Box2D's
# BipedalWalker shows it only when a walker that was restored in the air touches the ground.
STEPS_BEFORE = (100, 100, 100, 20)
STEPS_AFTER = 300


def seed_from(*numbers: int) -> int:
    """A seed in [0, 2^31) that depends on these numbers only. Streams of different numbers are independent."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)


def same_values(left: Any, right: Any) -> bool:
    """Tells whether two arrays are equal, NaN to NaN as well."""
    left, right = np.asarray(left), np.asarray(right)
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")


class EpisodeRecorder(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds every episode of an environment by itself and keeps its actions.

    Episode k of environment ``index`` begins with ``reset(seed=seed_from(seed, index, k))``, whatever was asked for.
    After ``restore`` the next ``step`` only tells again what the last one told (with reward 0), so that a vector
    environment learns of it by a step of its own. Vector environments reach all by name, also in other processes:
    ``call("snapshot")``, ``set_attr("restore_from", snapshots)`` and ``call("restore")``.

    Args:
        env: a single environment. Where its attribute ``resets_go_on`` is true, a reset does not begin anew (the next
            life of a game); such resets are replayed as well.
        seed: the run's seed.
        index: number of the environment among those of all ranks.
        keep_actions: False where replaying is known not to be exact: going on then begins the next episode.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, seed: int, index: int, keep_actions: bool = True) -> None:
        super().__init__(env)
        self.restore_from: dict[str, Any] | None = None
        """The snapshot to go back to. With None the first episode begins."""
        self._stream = (seed, index)
        self._keeps_actions = keep_actions
        self._may_go_on = env.has_wrapper_attr("resets_go_on")
        self._episode = -1
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
            observation, info = self._begin(self._episode + 1, options)
        self._last = (observation, 0.0, False, False, {})
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._tell_again:
            assert self._last is not None
            self._tell_again = False
            return self._last[0], 0.0, *self._last[2:4], {}
        if self._keeps_actions and len(self._actions) <= MAX_ACTIONS:
            # Vector environments hand out rows of an array that the caller may write to again.
            self._actions.append(action.copy() if isinstance(action, np.ndarray) else action)
            if len(self._actions) > MAX_ACTIONS:
                warnings.warn(
                    f"an episode has more than {MAX_ACTIONS:,} steps, so its actions are no longer kept: if the run is "
                    f"resumed within it, this environment begins a new episode",
                    stacklevel=2,
                )
        self._last = self.env.step(action)
        return self._last

    @property
    def snapshot(self) -> dict[str, Any] | None:
        """What it takes to come back here, as numbers and arrays. None before the first reset."""
        if self._last is None or not self._keeps_actions or len(self._actions) > MAX_ACTIONS:
            return None if self._last is None else {"episode": self._episode}
        return {
            "episode": self._episode,
            "actions": np.array(self._actions),
            "resets": np.array(self._resets, dtype=np.int64),
            "observation": np.array(self._last[0]),
            "ended": [bool(self._last[2]), bool(self._last[3])],
        }

    def restore(self) -> bool:
        """Goes back to ``restore_from``. False if that cannot be done, and the next episode has begun instead."""
        snapshot, self.restore_from = self.restore_from, None
        is_restored = bool(snapshot and self._keeps_actions and "actions" in snapshot and self._replay(snapshot))
        if not is_restored:
            self._last = (self._begin(snapshot["episode"] + 1 if snapshot else 0)[0], 0.0, False, False, {})
        self._tell_again = True
        return is_restored

    def _replay(self, snapshot: dict[str, Any]) -> bool:
        """Repeats the actions. False where this does not lead to where the snapshot was taken."""
        actions, resets = list(np.asarray(snapshot["actions"])), np.asarray(snapshot["resets"]).tolist()
        observation, _ = self._begin(int(snapshot["episode"]))
        ended = [False, False]
        for number in range(len(actions) + 1):
            if number in resets:
                if not any(ended):
                    return False
                observation, _ = self.env.reset()
                ended = [False, False]
            if number < len(actions):
                if any(ended):
                    return False
                observation, _, *ended, _ = self.env.step(actions[number])
        self._actions, self._resets = actions, resets
        self._last = (observation, 0.0, bool(ended[0]), bool(ended[1]), {})
        return list(self._last[2:4]) == snapshot["ended"] and same_values(observation, snapshot["observation"])

    def _begin(self, episode: int, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._actions, self._resets = episode, [], []
        return self.env.reset(seed=seed_from(*self._stream, episode), options=options)


class Trial(NamedTuple):
    """The outcome of a trial of saving and restoring."""

    is_restorable: bool
    """Whether to save what it takes to go back, and to do so. True also where the trial was not long enough."""
    note: str | None = None
    """What to tell the user, in a sentence without an end."""


def try_restoring(make: Callable[[], Any], seconds: float) -> Trial:
    """Tries out whether environments of this kind go on exactly. Raises nothing.

    Some are stepped with random actions through a few episodes and saved; spare ones, which know nothing of that, are
    set to what was saved; then both must do the same for some time. A difference that shows later goes unnoticed.
    """
    try:
        with make() as first, make() as spare:
            difference = _differs_after_restore(first, spare, time.monotonic() + seconds)
    except _OutOfTimeError:
        late = f"{seconds:g} s were not long enough to try out whether the environments can be saved exactly"
        return Trial(True, late)
    except Exception as error:  # whatever the user's environment does in a trial, training may yet work
        difference = f"a trial to save and restore it failed with {error!r}"
    return Trial(difference is None, difference)


class _OutOfTimeError(Exception):
    """The trial takes too long."""


def _differs_after_restore(first: Any, spare: Any, deadline: float) -> str | None:
    generator = np.random.default_rng(0)

    def actions() -> Any:
        if time.monotonic() > deadline:
            raise _OutOfTimeError
        return random_actions(first.single_action_space, first.num_envs, generator)

    for length in STEPS_BEFORE:
        first.reset()
        for _ in range(length):
            observations = first.step(actions()).observations
    observations = np.array(observations)
    restored = spare.restore(first.state())
    if spare.begun_anew or not same_values(observations, restored):
        return "repeating an episode from its seed with its actions leads to other observations"
    for number in range(STEPS_AFTER):
        batch = actions()
        expected, got = first.step(batch.copy()), spare.step(batch)
        for name in ("observations", "rewards", "terminated", "truncated", "valid"):
            if not same_values(getattr(expected, name), getattr(got, name)):
                return f"{name} differ {number + 1} steps after a state was restored"
        if expected.episodes != got.episodes:
            return f"finished episodes differ {number + 1} steps after a state was restored"
    return None
