"""Environments that EnvPool steps in its own threads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from fastsync import _C
from fastsync._checks import did_you_mean
from fastsync.doctor import install_command
from fastsync.ppo.envs.interface import Array, Bools, Environments, FinishedEpisode, Transition
from fastsync.ppo.envs.resume import seed_from
from fastsync.ppo.envs.spaces import check_spaces
from fastsync.ppo.settings import RunSettings

# What gymnasium's "ALE/..." environments do with an action (Machado et al., 2018); EnvPool's own default is 0.
REPEAT_ACTION_PROBABILITY = 0.25


class EnvPoolEnvironments(Environments):
    """Environments of EnvPool. It keeps their state to itself, so going on means new episodes.

    Args:
        pool: what ``envpool.make`` gave.
        first_index: number of the first of these environments among those of all ranks.
        is_atari: episodes are whole games with their scores; for the policy an episode is a life.
    """

    def __init__(self, pool: Any, *, num_envs: int, first_index: int, is_atari: bool) -> None:
        super().__init__(
            num_envs,
            pool.observation_space,
            pool.action_space,
            same_step=False,
            first_index=first_index,
            reward_threshold=pool.spec.reward_threshold,
            is_restorable=False,
        )
        self._pool = pool
        self._is_atari = is_atari
        self._scores: NDArray[np.float64] = np.zeros(num_envs)
        self._game_lengths: NDArray[np.int64] = np.zeros(num_envs, dtype=np.int64)

    def _reset(self) -> Array:
        self._scores[:], self._game_lengths[:] = 0.0, 0
        observations: Array = self._pool.reset()[0]
        return observations

    def _step(self, actions: Array) -> Transition:
        observations, rewards, terminated, truncated, infos = self._pool.step(actions)
        if self._is_atari:
            self._scores += infos["reward"]
            self._game_lengths += ~self._restarting
        return observations, rewards, terminated, truncated, infos

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[FinishedEpisode]:
        if not self._is_atari:
            return super()._finished_episodes(indices, infos)
        over = [i for i in indices if infos["terminated"][i] or self._was_cut_off(infos, i)]
        games = [FinishedEpisode(i, float(self._scores[i]), int(self._game_lengths[i])) for i in over]
        self._scores[over], self._game_lengths[over] = 0.0, 0
        return games

    def _was_cut_off(self, infos: dict[str, Any], index: int) -> bool:
        return bool(infos["elapsed_step"][index] >= self._pool.spec.config.max_episode_steps)

    def _state(self) -> dict[str, Any]:
        return {}

    def _restore(self, state: dict[str, Any]) -> tuple[Array, Bools]:
        return self._reset(), np.zeros(self.num_envs, dtype=np.bool_)

    def close(self) -> None:
        self._pool.close()


def make_envpool(settings: RunSettings, *, rank: int, restart: int) -> EnvPoolEnvironments:
    """EnvPool's version of an environment. See ``make_environments``.

    Raises:
        ValueError: EnvPool is missing, has no such environment, or the settings ask for what it cannot do.
    """
    if settings.autoreset == "same_step":
        raise ValueError(
            "autoreset='same_step' contradicts vectorization='envpool': EnvPool restarts episodes in a step of their "
            "own; choose vectorization='sync' or 'async'"
        )
    try:
        import envpool
    except ImportError as error:
        raise ValueError(
            f"vectorization='envpool' needs EnvPool ({error}); install it with: {install_command('envpool')}"
        ) from error
    name = settings.env.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if name not in known:
        raise ValueError(
            f"env={settings.env!r} cannot be made: EnvPool has no {name!r}; choose vectorization='sync' or 'async' for "
            f"environments of gymnasium and your own{did_you_mean(name, known)}"
        )
    first = rank * settings.num_envs
    seeds = [seed_from(settings.seed, first + i, restart) for i in range(settings.num_envs)]
    spec = envpool.make_spec(name)
    is_atari = hasattr(spec.config, "episodic_life") and hasattr(spec.config, "reward_clip")
    options: dict[str, Any] = {"episodic_life": True, "reward_clip": True} if is_atari else {}
    if name != settings.env:
        options["repeat_action_probability"] = REPEAT_ACTION_PROBABILITY
    if isinstance(spec.gymnasium_observation_space, spaces.Dict):
        raise ValueError(
            f"env={settings.env!r} of EnvPool has dictionaries of observations, which can only be learnt from with "
            f"vectorization='sync' or 'async', where gymnasium has such an environment"
        )
    check_spaces(settings, spec.gymnasium_observation_space, spec.gymnasium_action_space)
    pool = envpool.make(
        name,
        env_type="gymnasium",
        num_envs=settings.num_envs,
        num_threads=_num_threads(settings.num_envs),
        seed=seeds[0],
        env_seed=seeds,
        **options,
    )
    return EnvPoolEnvironments(pool, num_envs=settings.num_envs, first_index=first, is_atari=is_atari)


def _num_threads(num_envs: int) -> int:
    """This rank's share of the cores, which all ranks of the machine would take otherwise."""
    share = _C.num_usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(share, 1), num_envs)
