"""Makes the environments of a rank from the settings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import FlattenObservation
from torch import Tensor

from ..settings import RunSettings
from .interface import Environments, seed_from, seed_globals
from .lookup import EnvSource, cannot_be_made, find_env, notes_on, refuse_running_statistics
from .parts import MASK, has_parts
from .spaces import check_spaces, notes_on_actions, suits
from .tensors import NextStep, TensorEnvironments, has_tensors, resets_in_next_step
from .vector import EpisodeRecorder, RecordedEnvironments, VectorizedEnvironments, join


def make_environments(
    settings: RunSettings, *, rank: int, restart: int = 0, device: torch.device | None = None
) -> Environments:  # fmt: skip
    """Makes the environments of one rank. Among those of all ranks their numbers begin at rank * num_envs.

    With vectorization sync and async an environment depends only on the run's seed and its own number. So it does not
    depend on how environments are spread over ranks. An exception is an environment that draws from the global
    generators of numpy or Python. These are seeded, too: for each rank, or with async for each environment.

    Args:
        settings: env, seed, num_envs and vectorization are used.
        rank: this rank.
        restart: a number that grows with each resumption, such as the step. Environments that cannot be restored begin
            with other episodes than last time.
        device: where the policy is, for environments that compute there; by default the CPU.

    Raises:
        ValueError: the environment does not exist here, has spaces that the trainer does not support, does not support
            the vectorization, or normalises by statistics that no checkpoint would hold.
    """
    first = rank * settings.num_envs
    seed_globals(settings.seed, first, restart)
    source = find_env(settings.env, settings.env_kwargs, settings.critic_keys)
    kind = settings.vectorization
    if kind == "auto":
        # gymnasium registers a vectorised implementation of Atari games, which cannot be trained on; see below.
        own = source.spec is not None and source.spec.vector_entry_point is not None and not source.is_atari
        own = own and not settings.critic_keys
        kind = "vector_entry_point" if own or source.makes_vector else "sync"
    if kind == "vector_entry_point":
        seed = seed_from(settings.seed, first, restart)
        device = device or torch.device("cpu")
        own_vector, observation = make_own_vector(
            source, settings.num_envs, device, norm_observations=settings.norm_observations
        )
        spaces = own_vector.single_observation_space, own_vector.single_action_space
        notes = notes_on(settings.env, own_vector) + notes_on_actions(settings, *spaces)
        if not isinstance(observation, Tensor):
            return VectorizedEnvironments(own_vector, seed=seed, first_index=first, notes=notes)
        if isinstance(own_vector, NextStep):
            notes.append(
                f"env={settings.env!r} resets within the last step of an episode: nothing is learnt from the first "
                "step of the next one, and its reward does not count"
            )
        if observation.device.type != device.type:
            notes.append(
                f"warning: env={settings.env!r} is on {observation.device}, and the policy on {device}: each step "
                "copies. A function that makes it may take the argument device"
            )
        return TensorEnvironments(own_vector, seed=seed, first_index=first, notes=notes)
    if source.makes_vector:
        raise ValueError(
            f"vectorization={kind!r}: env={settings.env!r} takes num_envs, and makes environments that step together; "
            "leave vectorization out"
        )
    source, specimen = source.explored(first)
    specimen.close()
    refuse_running_statistics(settings.env, specimen)
    spaces = specimen.observation_space, specimen.action_space
    check_spaces(settings.env, *spaces, norm_observations=settings.norm_observations)
    notes = notes_on(settings.env, specimen) + notes_on_actions(settings, *spaces)
    makers = [
        partial(_make_recorder, source, settings.seed, index, restart, settings.log_info, os.getpid())
        for index in range(first, first + settings.num_envs)
    ]
    vector = join(settings.env, makers, spaces[0], first_index=first, in_processes=kind == "async")
    return RecordedEnvironments(vector, counts_games=source.is_atari, first_index=first, notes=notes)


def make_one(settings: RunSettings) -> Environments:
    """Makes one environment in this process, for a GPU if that is chosen. It raises the same errors as for those of the
    run.
    """
    kind = "sync" if settings.vectorization == "async" else settings.vectorization
    run_values = {field.name: getattr(settings, field.name) for field in fields(RunSettings)}
    one = RunSettings(**run_values | {"num_envs": 1, "micro_batches": None, "vectorization": kind})
    return make_environments(one, rank=0, device=chosen_gpu(settings))


def chosen_gpu(settings: RunSettings) -> torch.device | None:
    """Returns the device for environments that are tried before ranks start: a GPU, or None for the CPU."""
    return torch.device("cuda") if settings.device == "cuda" else None


def _make_recorder(
    source: EnvSource, seed: int, index: int, first_episode: int, log_info: Sequence[str], rank_pid: int
) -> gymnasium.Env[Any, Any]:
    if os.getpid() != rank_pid:
        seed_globals(seed, index, first_episode)
    env = source.make(index)
    return EpisodeRecorder(env, seed=seed, index=index, first_episode=first_episode, log_info=log_info)


def make_own_vector(
    source: EnvSource, num_envs: int, device: torch.device, *, norm_observations: bool = False
) -> tuple[VectorEnv[Any, Any, Any], Any]:
    """Makes environments that step together by their own code, or by the user's function of ``num_envs``.

    Args:
        source: says what to make.
        num_envs: the number of environments.
        device: for a user's function that takes one.
        norm_observations: the setting of that name.

    Returns:
        The environments, and what they observe first.

    Raises:
        ValueError: they cannot be made here, or do not suit the trainer.
    """
    if source.makes_vector:
        refused = f"env={source.name!r}"
        others = "give a function that makes one environment, and does not take num_envs"
    else:
        refused = f"vectorization='vector_entry_point': env={source.name!r}"
        others = "choose vectorization='sync' or 'async'"
    if source.critic_keys:
        raise ValueError(f"{refused} is taken as it is, and critic_keys={list(source.critic_keys)} are not; {others}")
    if source.is_atari:
        raise ValueError(f"{refused} begins a new game whenever a life is lost, and reports no score; {others}")
    if source.makes_vector:
        vector = source.make_vector(num_envs, device)
    elif source.spec is None or source.spec.vector_entry_point is None:
        raise ValueError(f"{refused} has no vectorised implementation of its own; {others}")
    else:
        try:
            vector = gymnasium.make_vec(source.spec, num_envs, vectorization_mode="vector_entry_point", **source.kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            needed_for = str(source.spec.vector_entry_point)
            raise cannot_be_made(source.name, error, needed_for=needed_for, kwargs=source.kwargs) from error
    observation, infos = vector.reset(seed=0)
    if has_parts(vector.single_observation_space) or MASK in infos:
        vector.close()
        raise ValueError(f"{refused} has images in a dictionary or a mask of actions; {others}")
    if not suits(vector.single_observation_space) and not has_tensors(observation):
        vector = FlattenObservation(vector)
    vector = resets_in_next_step(vector, observation)
    try:
        refuse_running_statistics(source.name, vector)
        spaces = vector.single_observation_space, vector.single_action_space
        check_spaces(source.name, *spaces, norm_observations=norm_observations)
        if (mode := vector.metadata.get("autoreset_mode")) != AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"{refused} has metadata['autoreset_mode']={mode!r}; it must be {AutoresetMode.NEXT_STEP}, because "
                f"other modes end episodes in another way: {others}"
            )
        expected = (num_envs, *(spaces[0].shape or ()))
        if isinstance(observation, Tensor) and observation.shape != expected:
            raise ValueError(
                f"{refused} observes a tensor of shape {tuple(observation.shape)}, and the shape by num_envs and "
                f"single_observation_space is {expected}"
            )
    except ValueError:
        vector.close()
        raise
    return vector, observation
