"""Making the environments of a rank, by the settings."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from fastsync.ppo.config import Settings
from fastsync.ppo.env_source import EnvSource, cannot_be_made, find_env
from fastsync.ppo.env_states import why_not_restorable
from fastsync.ppo.environments import Environments, FinishedEpisode, Step
from fastsync.ppo.envpool_envs import make_envpool
from fastsync.ppo.episodes import EpisodeRecorder, seed_from
from fastsync.ppo.interrupt import STOP_SIGNALS
from fastsync.ppo.spaces import check_spaces
from fastsync.ppo.vector_envs import RecordedEnvironments, VectorizedEnvironments

__all__ = ["Environments", "FinishedEpisode", "Step", "make_environments"]

# How many copies the trial of saving and restoring takes: several find what one may miss, but pictures take long.
TRIED_VECTORS = 6
TRIED_IMAGES = 1


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
    if settings.vectorization == "envpool":
        return make_envpool(settings, rank=rank, restart=restart)
    source = find_env(settings.env)
    kind = settings.vectorization
    if kind == "auto":
        # Of games gymnasium's registry names a vectorised implementation that cannot do what training needs.
        own = source.spec is not None and source.spec.vector_entry_point is not None and not source.is_atari
        kind = "vector_entry_point" if own and settings.autoreset == "next_step" else "sync"
    if kind == "vector_entry_point":
        return _make_vectorized(settings, source, rank, restart)
    return _make_recorded(settings, source, rank, in_processes=kind == "async")


def _make_recorded(settings: Settings, source: EnvSource, rank: int, *, in_processes: bool) -> Environments:
    specimen = source.make()
    specimen.close()
    check_spaces(settings, specimen.observation_space, specimen.action_space)
    first = rank * settings.num_envs
    mode = AutoresetMode.SAME_STEP if settings.autoreset == "same_step" else AutoresetMode.NEXT_STEP

    def wrap(vector: SyncVectorEnv | AsyncVectorEnv, why_not: str | None) -> RecordedEnvironments:
        return RecordedEnvironments(
            vector,
            first_index=first,
            counts_games=source.is_atari,
            timeout=settings.timeout,
            reward_threshold=source.reward_threshold,
            why_not_restorable=why_not,
        )

    def makers(indices: range, *, keep_actions: bool) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
        return [partial(_make_recorder, source, settings.seed, index, keep_actions, os.getpid()) for index in indices]

    # The same trial on every rank, so that all come to the same answer.
    tried = range(TRIED_IMAGES if len(specimen.observation_space.shape or ()) == 3 else TRIED_VECTORS)
    why_not = why_not_restorable(
        lambda: wrap(SyncVectorEnv(makers(tried, keep_actions=True), autoreset_mode=mode), why_not=None)
    )
    functions = makers(range(first, first + settings.num_envs), keep_actions=why_not is None)
    if not in_processes:
        return wrap(SyncVectorEnv(functions, autoreset_mode=mode), why_not)
    # A server without threads and without a CUDA context is safe to fork, other than a process that trains.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fastsync.ppo.env_source"])
    return wrap(AsyncVectorEnv(functions, autoreset_mode=mode, context="forkserver"), why_not)


def _make_recorder(
    source: EnvSource, seed: int, index: int, keep_actions: bool, rank_pid: int
) -> gymnasium.Env[Any, Any]:
    if os.getpid() != rank_pid:
        # Signals to a whole job reach this process too. The rank still needs it to save; it ends when the rank does.
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return EpisodeRecorder(source.make(), seed=seed, index=index, keep_actions=keep_actions)


def _make_vectorized(settings: Settings, source: EnvSource, rank: int, restart: int) -> Environments:
    first = rank * settings.num_envs

    def make(why_not: str | None = None) -> VectorizedEnvironments:
        return VectorizedEnvironments(
            _make_own_vector(settings, source),
            seed=seed_from(settings.seed, first, restart),
            first_index=first,
            reward_threshold=source.reward_threshold,
            why_not_restorable=why_not,
        )

    _make_own_vector(settings, source).close()  # errors that are no part of the trial
    return make(why_not_restorable(make))


def _make_own_vector(settings: Settings, source: EnvSource) -> VectorEnv[Any, Any, Any]:
    if source.is_atari:
        raise ValueError(
            f"vectorization='vector_entry_point': that of env={settings.env!r} begins a new game whenever a life is "
            f"lost, and tells no score; choose vectorization='sync', 'async' or 'envpool'"
        )
    if source.spec is None or source.spec.vector_entry_point is None:
        raise ValueError(
            f"vectorization='vector_entry_point': env={settings.env!r} has no vectorised implementation of its own; "
            f"choose vectorization='sync' or 'async'"
        )
    try:
        vector = gymnasium.make_vec(source.spec, settings.num_envs, vectorization_mode="vector_entry_point")
    except (gymnasium.error.Error, ImportError) as error:
        raise cannot_be_made(settings.env, error, needed_for=str(source.spec.vector_entry_point)) from error
    try:
        _check_own_vector(settings, vector)
    except ValueError:
        vector.close()
        raise
    return vector


def _check_own_vector(settings: Settings, vector: VectorEnv[Any, Any, Any]) -> None:
    mode = vector.metadata.get("autoreset_mode")
    check_spaces(settings, vector.single_observation_space, vector.single_action_space)
    if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        raise ValueError(
            f"env={settings.env!r} has metadata['autoreset_mode']={mode!r}; it must be {AutoresetMode.NEXT_STEP} or "
            f"{AutoresetMode.SAME_STEP}, or the ends of episodes would be learnt from wrongly: choose "
            f"vectorization='sync' or 'async'"
        )
    if settings.autoreset == "same_step" and mode == AutoresetMode.NEXT_STEP:
        raise ValueError(
            f"autoreset='same_step' contradicts vectorization='vector_entry_point': env={settings.env!r} restarts "
            f"its episodes in a step of their own; choose vectorization='sync' or 'async'"
        )
