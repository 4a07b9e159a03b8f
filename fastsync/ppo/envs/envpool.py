"""Environments that EnvPool steps in its own threads."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ... import _C
from ..._checks import did_you_mean
from ...doctor import install_command
from ..settings import RunSettings
from .interface import Array, Environments, Transition, seed_from
from .spaces import check_spaces

# What gymnasium's "ALE/..." environments do with an action (Machado et al., 2018); EnvPool's own default is 0.
REPEAT_ACTION_PROBABILITY = 0.25


class EnvPoolEnvironments(Environments):
    """Environments of EnvPool. It keeps their state to itself, so going on means new episodes.

    Args:
        pool: what ``envpool.make`` gave.
        is_atari: episodes are whole games with their scores; for the policy an episode is a life.
        others: see ``Environments``.
    """

    def __init__(self, pool: Any, *, num_envs: int, first_index: int, is_atari: bool) -> None:
        super().__init__(num_envs, pool.observation_space, pool.action_space, first_index=first_index)
        self._pool = pool
        self._is_atari = is_atari
        self._scores = np.zeros(num_envs)
        self._game_lengths = np.zeros(num_envs, dtype=np.int64)

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

    def _finished_episodes(self, indices: list[int], infos: dict[str, Any]) -> list[tuple[int, float, int]]:
        if not self._is_atari:
            return super()._finished_episodes(indices, infos)
        is_over = infos["terminated"].astype(bool) | (infos["elapsed_step"] >= self._pool.spec.config.max_episode_steps)
        over = [index for index in indices if is_over[index]]
        games = [(i, float(self._scores[i]), int(self._game_lengths[i])) for i in over]
        self._scores[over], self._game_lengths[over] = 0.0, 0
        return games

    def _state(self) -> dict[str, Any]:
        return {}

    def _restore(self, state: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        self._pool.close()


def make_envpool(settings: RunSettings, *, rank: int, restart: int) -> EnvPoolEnvironments:
    """EnvPool's version of an environment. See ``make_environments``.

    Raises:
        ValueError: EnvPool is missing, or has no such environment.
    """
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
    check_spaces(settings, spec.gymnasium_observation_space, spec.gymnasium_action_space)
    is_atari = hasattr(spec.config, "episodic_life") and hasattr(spec.config, "reward_clip")
    options: dict[str, Any] = {"episodic_life": True, "reward_clip": True} if is_atari else {}
    if name != settings.env:
        options["repeat_action_probability"] = REPEAT_ACTION_PROBABILITY
    # This rank's share of the cores, which all ranks of the machine would take otherwise.
    num_cores = _C.num_usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_threads = min(max(num_cores, 1), settings.num_envs)
    seeded: dict[str, Any] = {"seed": seeds[0], "env_seed": seeds}
    sizes = {"num_envs": settings.num_envs, "num_threads": num_threads}
    pool = envpool.make(name, env_type="gymnasium", **sizes, **seeded, **options)
    return EnvPoolEnvironments(pool, num_envs=settings.num_envs, first_index=first, is_atari=is_atari)
