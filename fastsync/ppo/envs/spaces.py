"""Spaces that the trainer can learn in, and the way of an action from the policy to the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from ..settings import RunSettings

Array = NDArray[Any]

LEAST_IMAGE_SIZE = 36  # height and width that the convolutions need


def check_spaces(settings: RunSettings, observations: Space[Any], actions: Space[Any]) -> None:
    """Checks that a policy can be made for these spaces.

    Raises:
        ValueError: observations are neither vectors nor 8-bit images with channels first; or actions are neither
            Discrete, nor MultiDiscrete, nor vectors of real numbers; or observations cannot be normalised.
    """
    refused = f"env={settings.env!r} has"
    wrapped = "wrap the environment in one of gymnasium.wrappers and give it as 'module:function'"
    is_box = isinstance(observations, spaces.Box)
    is_image = is_box and len(observations.shape or ()) == 3 and observations.dtype == np.uint8
    if not is_image and not (is_box and len(observations.shape or ()) == 1):
        raise ValueError(
            f"{refused} observations {observations}; vectors (a Box of one dimension) and images (a Box of three, of "
            f"dtype uint8) can be learnt from: {wrapped}, such as FlattenObservation"
        )
    if is_image and min((observations.shape or ())[1:]) < LEAST_IMAGE_SIZE:
        raise ValueError(
            f"{refused} images of shape {observations.shape}; they are read as (C, H, W), and H and W must be at least "
            f"{LEAST_IMAGE_SIZE}: {wrapped}, such as TransformObservation or ResizeObservation"
        )
    if is_image and settings.norm_observations:
        raise ValueError(
            f"norm_observations=True is for vectors, but {refused} images, whose bytes are divided by 255 anyway; "
            f"leave norm_observations at False"
        )
    if isinstance(actions, spaces.Box):
        suits = len(actions.shape) == 1 and np.issubdtype(actions.dtype, np.floating)
    else:
        suits = isinstance(actions, spaces.Discrete | spaces.MultiDiscrete) and len(actions.shape or ()) <= 1
    if not suits:
        raise ValueError(
            f"{refused} actions {actions}; Discrete, MultiDiscrete of one dimension, and a Box of one dimension and "
            f"real numbers can be learnt: {wrapped}, such as TransformAction"
        )


def action_translator(space: Space[Any]) -> Callable[[Array], Array]:
    """Makes what takes actions as the policy makes them (int64 [N] or [N, k] from 0, real [N, k] without bounds)
    into the environment's space: shifted to its start, or cut off at its bounds and of its dtype.
    """
    if isinstance(space, spaces.Box):
        low, high, dtype = space.low, space.high, space.dtype
        if not (np.isfinite(low).any() or np.isfinite(high).any()):
            return lambda actions: actions.astype(dtype, copy=False)
        return lambda actions: np.clip(actions, low, high).astype(dtype, copy=False)
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    start = space.start
    return (lambda actions: actions + start) if np.any(start) else (lambda actions: actions)


def random_actions(space: Space[Any], num_envs: int, generator: np.random.Generator) -> Array:
    """A batch of actions such as an untrained policy makes them."""
    if isinstance(space, spaces.Box):
        return generator.standard_normal((num_envs, *space.shape), dtype=np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return generator.integers(space.nvec, size=(num_envs, *space.nvec.shape))
    assert isinstance(space, spaces.Discrete)
    return generator.integers(space.n, size=num_envs)
