"""Making the environments of a rank, by the settings."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import fields
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from fastsync.launch.signals import STOP_SIGNALS
from fastsync.ppo.envs.dictionaries import has_images, pack_vector
from fastsync.ppo.envs.envpool import make_envpool
from fastsync.ppo.envs.interface import Environments, FinishedEpisode, Step
from fastsync.ppo.envs.lookup import EnvSource, cannot_be_made, find_env
from fastsync.ppo.envs.resume import EpisodeRecorder, Trial, seed_from, try_restoring
from fastsync.ppo.envs.spaces import check_spaces
from fastsync.ppo.envs.vector import RecordedEnvironments, VectorizedEnvironments
from fastsync.ppo.settings import RunSettings

__all__ = ["Environments", "FinishedEpisode", "Step", "make_environments", "make_one", "try_environments"]

# How many copies the trial of saving and restoring takes: several find what one may miss.
TRIED = 6
TRIAL_SECONDS = 5.0


def make_environments(
    settings: RunSettings, *, rank: int, restart: int = 0, is_restorable: bool = True
) -> Environments:
    """Makes the environments of one rank: those numbered from rank * num_envs on among all.

    With vectorization sync and async each depends on the run's seed and its own number only, so that they are the same
    environments however they are spread over ranks.

    Args:
        settings: env, seed, num_envs, vectorization, autoreset and timeout are used.
        rank: this rank.
        restart: a number that differs each time that a run goes on, such as the step: environments which cannot go
            back to their state begin with other episodes then than the last time.
        is_restorable: as ``try_environments`` has found, the same on every rank; without it nothing is saved to go
            back to.

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
        first = rank * settings.num_envs
        return VectorizedEnvironments(
            _make_own_vector(settings, source),
            seed=seed_from(settings.seed, first, restart),
            first_index=first,
            reward_threshold=source.reward_threshold,
            is_restorable=is_restorable,
        )
    return _make_recorded(settings, source, rank, is_restorable, in_processes=kind == "async")


def make_one(settings: RunSettings, num_envs: int = 1) -> Environments:
    """One environment, or a few, none of them in a process of its own: what can go wrong goes wrong there as well."""
    kind = "sync" if settings.vectorization == "async" else settings.vectorization
    of_run = {field.name: getattr(settings, field.name) for field in fields(RunSettings)}
    return make_environments(RunSettings(**of_run | {"num_envs": num_envs, "vectorization": kind}), rank=0)


def try_environments(settings: RunSettings, seconds: float = TRIAL_SECONDS) -> Trial:
    """Tries out, for a few seconds, whether such environments can be saved and go on exactly. Raises nothing.

    One rank does it for all: if each did, not all might come to the same answer.
    """
    if settings.vectorization == "envpool":
        return Trial(False, "EnvPool cannot save the state of its environments")

    def make() -> Environments:
        one = make_one(settings)
        if has_images(one.single_observation_space):
            return one  # more pictures would take long
        one.close()
        return make_one(settings, TRIED)

    return try_restoring(make, seconds)


def _make_recorded(
    settings: RunSettings, source: EnvSource, rank: int, is_restorable: bool, *, in_processes: bool
) -> Environments:
    specimen = source.make()
    specimen.close()
    check_spaces(settings, specimen.observation_space, specimen.action_space)
    first = rank * settings.num_envs
    mode = AutoresetMode.SAME_STEP if settings.autoreset == "same_step" else AutoresetMode.NEXT_STEP

    makers = [
        partial(_make_recorder, source, settings.seed, index, is_restorable, os.getpid())
        for index in range(first, first + settings.num_envs)
    ]
    vector: SyncVectorEnv | AsyncVectorEnv
    if in_processes:
        # A server without threads and without a CUDA context is safe to fork, other than a process that trains.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["fastsync.ppo.envs.lookup"])
        vector = AsyncVectorEnv(makers, autoreset_mode=mode, context="forkserver")
    else:
        vector = SyncVectorEnv(makers, autoreset_mode=mode)
    return RecordedEnvironments(
        vector,
        first_index=first,
        counts_games=source.is_atari,
        timeout=settings.timeout,
        reward_threshold=source.reward_threshold,
        is_restorable=is_restorable,
    )


def _make_recorder(
    source: EnvSource, seed: int, index: int, is_restorable: bool, rank_pid: int
) -> gymnasium.Env[Any, Any]:
    if os.getpid() != rank_pid:
        # Signals to a whole job reach this process too. The rank still needs it to save; it ends when the rank does.
        for number in (*STOP_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return EpisodeRecorder(source.make(), seed=seed, index=index, keep_actions=is_restorable)


def _make_own_vector(settings: RunSettings, source: EnvSource) -> VectorEnv[Any, Any, Any]:
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
        vector = pack_vector(
            gymnasium.make_vec(source.spec, settings.num_envs, vectorization_mode="vector_entry_point")
        )
    except (gymnasium.error.Error, ImportError) as error:
        raise cannot_be_made(settings.env, error, needed_for=str(source.spec.vector_entry_point)) from error
    try:
        _check_own_vector(settings, vector)
    except ValueError:
        vector.close()
        raise
    return vector


def _check_own_vector(settings: RunSettings, vector: VectorEnv[Any, Any, Any]) -> None:
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
