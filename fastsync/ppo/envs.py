"""Making the environments of a rank, by the settings."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from fastsync.ppo.config import Settings
from fastsync.ppo.env_source import EnvSource, cannot_be_made, find_env
from fastsync.ppo.environments import Environments, FinishedEpisode, Step
from fastsync.ppo.episodes import EpisodeRecorder, seed_from
from fastsync.ppo.spaces import check_spaces
from fastsync.ppo.vector_envs import RecordedEnvironments, VectorizedEnvironments

__all__ = ["Environments", "FinishedEpisode", "Step", "make_environments"]


def make_environments(settings: Settings, *, rank: int, restart: int = 0) -> Environments:
    """The environments of one rank: those numbered from rank * num_envs on among all.

    With vectorization sync and async each depends on the run's seed and its own number only, so that they are the same
    environments however they are spread over ranks.

    Args:
        settings: env, seed, num_envs, vectorization, autoreset and timeout are used.
        rank: this rank.
        restart: a number that differs each time that a run goes on, such as the step: environments which cannot go
            back to their state begin with other episodes then than the last time.

    Raises:
        ValueError: the environment does not exist here, is not of a kind that the trainer can learn, or does not step
            in the way that the settings ask for.
    """
    source = find_env(settings.env)
    kind = settings.vectorization
    if kind == "auto":
        own = source.spec is not None and source.spec.vector_entry_point is not None
        kind = "vector_entry_point" if own and settings.autoreset == "next_step" else "sync"
    if kind == "vector_entry_point":
        return _make_vectorized(settings, source, rank, restart)
    return _make_recorded(settings, source, rank, in_processes=kind == "async")


def _make_recorded(settings: Settings, source: EnvSource, rank: int, *, in_processes: bool) -> Environments:
    specimen = source.make()
    specimen.close()
    check_spaces(settings.env, specimen.observation_space, specimen.action_space)
    first = rank * settings.num_envs
    makers = [partial(_make_recorder, source, seed=settings.seed, index=first + i) for i in range(settings.num_envs)]
    mode = AutoresetMode.SAME_STEP if settings.autoreset == "same_step" else AutoresetMode.NEXT_STEP
    vector: SyncVectorEnv | AsyncVectorEnv
    if in_processes:
        # A server that has no threads and no CUDA context is safe to fork, other than a process that trains.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["fastsync.ppo.episodes"])
        vector = AsyncVectorEnv(makers, autoreset_mode=mode, context="forkserver")
    else:
        vector = SyncVectorEnv(makers, autoreset_mode=mode)
    return RecordedEnvironments(
        vector, first_index=first, timeout=settings.timeout, reward_threshold=source.reward_threshold
    )


def _make_recorder(source: EnvSource, *, seed: int, index: int) -> gymnasium.Env[Any, Any]:
    return EpisodeRecorder(source.make(), seed=seed, index=index)


def _make_vectorized(settings: Settings, source: EnvSource, rank: int, restart: int) -> Environments:
    if source.spec is None or source.spec.vector_entry_point is None:
        raise ValueError(
            f"vectorization='vector_entry_point': env={settings.env!r} has no vectorised implementation of its own; "
            f"choose vectorization='sync' or 'async'"
        )
    try:
        vector = gymnasium.make_vec(source.spec, settings.num_envs, vectorization_mode="vector_entry_point")
    except (gymnasium.error.Error, ImportError) as error:
        raise cannot_be_made(settings.env, error, needed_for=str(source.spec.vector_entry_point)) from error
    mode = vector.metadata.get("autoreset_mode")
    try:
        check_spaces(settings.env, vector.single_observation_space, vector.single_action_space)
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"env={settings.env!r} has metadata['autoreset_mode']={mode!r}; the trainer must know that it is "
                f"{AutoresetMode.NEXT_STEP} or {AutoresetMode.SAME_STEP}: choose vectorization='sync'"
            )
        if settings.autoreset == "same_step" and mode == AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"autoreset='same_step' contradicts vectorization='vector_entry_point': env={settings.env!r} restarts "
                f"its episodes in a step of their own; choose vectorization='sync' or 'async'"
            )
    except ValueError:
        vector.close()
        raise
    first = rank * settings.num_envs
    return VectorizedEnvironments(
        vector,
        seed=seed_from(settings.seed, first, restart),
        first_index=first,
        reward_threshold=source.reward_threshold,
    )
