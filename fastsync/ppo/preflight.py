"""Checks of a training before its ranks start."""

from __future__ import annotations

import importlib.util

import numpy as np

from fastsync.ppo.envs.make import make_one
from fastsync.ppo.envs.spaces import random_actions
from fastsync.ppo.policies import make_policy
from fastsync.ppo.runs.folder import check_room, find_run
from fastsync.ppo.runs.loggers import not_installed
from fastsync.ppo.settings import RunSettings


def check_environment(settings: RunSettings) -> None:
    """Tries what every rank needs.

    Raises:
        ValueError: the environment, the policy, or an extra that the settings ask for, is not there or does not suit.
    """
    if settings.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        raise not_installed(settings.wandb_project)
    with make_one(settings) as environments:
        try:
            environments.reset()
            actions = random_actions(environments.single_action_space, 1, np.random.default_rng(0))
            environments.step(actions)
        except Exception as error:  # whatever is wrong with the user's environment
            raise ValueError(
                f"env={settings.env!r} cannot be played: {type(error).__name__}: {error}; reset(seed=...) has to "
                "return (observation, info) and step(action) (observation, reward, terminated, truncated, info), with "
                "observations as its observation_space says"
            ) from error
        if settings.policy is None:
            return
        try:
            make_policy(settings, environments.single_observation_space, environments.single_action_space)
        except ValueError:
            raise
        except Exception as error:  # whatever is wrong with the user's class
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"policy={settings.policy!r} cannot be made: {reason}") from error


def check_run(settings: RunSettings, world_size: int) -> None:
    """Tries whether the run can begin or go on. It is for the machine of rank 0, where the run's folder lies.

    Raises:
        ValueError: the folder is taken, or cannot be written, or what is to be resumed is missing, damaged, or of
            another kind.
    """
    try:
        check_room(find_run(settings, world_size).folder)
    except RuntimeError as error:
        raise ValueError(f"resume={settings.resume!r}: {error}") from error
