"""Vector environments: making them, and refusing those that the trainer would treat wrongly."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv


def make_envs(env_id: str, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """``num_envs`` copies of an environment that step together.

    Uses the environment's own vectorised implementation where it registers one (for CartPole more than ten times as
    fast as stepping copies one after the other), else gymnasium's SyncVectorEnv.

    Raises:
        ValueError: the environment does not exist here, or is not of a kind that the trainer can learn.
    """
    try:
        envs = gymnasium.make_vec(env_id, num_envs=num_envs)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"env={env_id!r} cannot be made: {error}") from error
    try:
        check_envs(env_id, envs)
    except ValueError:
        envs.close()
        raise
    return envs


def space_sizes(envs: VectorEnv[Any, Any, Any]) -> tuple[int, int]:
    """The length of one observation and the number of actions, for environments that ``make_envs`` made."""
    observations, actions = envs.single_observation_space, envs.single_action_space
    assert isinstance(observations, spaces.Box)
    assert isinstance(actions, spaces.Discrete)
    return observations.shape[0], int(actions.n)


def check_envs(env_id: str, envs: VectorEnv[Any, Any, Any]) -> None:
    """Checks spaces and autoreset mode.

    Raises:
        ValueError: observations are no flat vectors of numbers, actions are not discrete, or episodes restart in
            another way than with an extra step.
    """
    observations, actions = envs.single_observation_space, envs.single_action_space
    if not isinstance(observations, spaces.Box) or len(observations.shape) != 1:
        raise ValueError(
            f"env={env_id!r} has observations {observations}; only one-dimensional Box spaces are supported"
        )
    if not isinstance(actions, spaces.Discrete) or actions.start != 0:
        raise ValueError(f"env={env_id!r} has actions {actions}; only Discrete spaces that start at 0 are supported")
    mode = envs.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise ValueError(
            f"env={env_id!r} has metadata['autoreset_mode']={mode!r}; only {AutoresetMode.NEXT_STEP} is supported: "
            f"with another one the step after an episode's end would be learnt from wrongly"
        )
