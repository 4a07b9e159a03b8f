"""Spaces that the trainer can learn in, and the way of an action from the policy to the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from fastsync.ppo.envs.dictionaries import PackedSpace
from fastsync.ppo.settings import RunSettings

Array = NDArray[Any]


LEAST_IMAGE_SIZE = 36
"""Height and width that the convolutions need at the least."""
_WANTED_OF_IMAGES = f"images are read as (C, H, W), and H and W must be at least {LEAST_IMAGE_SIZE}"


def check_spaces(settings: RunSettings, observations: Space[Any], actions: Space[Any]) -> None:
    """Checks that a policy can be made for these spaces.

    Raises:
        ValueError: observations are neither vectors of numbers nor 8-bit images with channels first, nor rows that
            ``dictionaries.pack`` has made of a Dict of such, or actions neither
            Discrete, nor MultiDiscrete, nor vectors of real numbers; or observations cannot be normalised as the
            settings want it. The message says what to do about it.
    """

    def refused(what: str, wanted: str, wrapper: str) -> ValueError:
        return ValueError(
            f"env={settings.env!r} has {what}; {wanted}: wrap the environment in gymnasium.wrappers.{wrapper}, and "
            f"give it as 'module:function'"
        )

    seen, done = f"observations {observations}", f"actions {actions}"
    if isinstance(observations, spaces.Dict):
        wanted = "of a Dict, Box, Discrete, MultiDiscrete and MultiBinary can be learnt from, and Dicts of them"
        raise refused(seen, wanted, "FilterObservation, with the keys that can")
    if not isinstance(observations, spaces.Box):
        wanted = "vectors (a Box of one dimension) and images can be learnt from"
        raise refused(seen, wanted, "FlattenObservation")
    if isinstance(observations, PackedSpace):
        for name, shape in observations.images.items():
            _check_image_of_dict(settings, name, shape)
        if observations.num_numbers == 0:
            _check_norm_observations(settings, "nothing but images")
    elif len(observations.shape) == 3 and observations.dtype == np.uint8:
        _check_image(settings, observations.shape)
    elif len(observations.shape) != 1:
        wanted = "a Box must have one dimension, or be an image of three dimensions and dtype uint8"
        raise refused(seen, wanted, "FlattenObservation or ReshapeObservation")
    if isinstance(actions, spaces.Box):
        if len(actions.shape) != 1 or not np.issubdtype(actions.dtype, np.floating):
            raise refused(done, "a Box of actions must have one dimension and real numbers", "TransformAction")
    elif isinstance(actions, spaces.MultiDiscrete):
        if actions.nvec.ndim != 1:
            raise refused(done, "a MultiDiscrete must have one dimension", "TransformAction")
    elif not isinstance(actions, spaces.Discrete):
        raise refused(done, "Discrete, MultiDiscrete and Box can be learnt", "TransformAction")


def _check_image(settings: RunSettings, shape: tuple[int, ...]) -> None:
    first, height, width = shape
    refused = f"env={settings.env!r} has observations of shape {shape}"
    if min(height, width) < LEAST_IMAGE_SIZE:
        if min(first, height) >= LEAST_IMAGE_SIZE:
            raise ValueError(
                f"{refused}; {_WANTED_OF_IMAGES}: where the channels come last, wrap the environment in "
                f"gymnasium.wrappers.TransformObservation(env, lambda image: image.transpose(2, 0, 1), "
                f"gymnasium.spaces.Box(0, 255, ({width}, {first}, {height}), numpy.uint8)), and give it as "
                f"'module:function'"
            )
        raise ValueError(
            f"{refused}; {_WANTED_OF_IMAGES}: enlarge them with gymnasium.wrappers.ResizeObservation, which takes "
            f"channels last, or make vectors of them with FlattenObservation, and give the environment as "
            f"'module:function'"
        )
    _check_norm_observations(settings, f"observations of shape {shape}")


def _check_image_of_dict(settings: RunSettings, name: str, shape: tuple[int, int, int]) -> None:
    if min(shape[1:]) < LEAST_IMAGE_SIZE:
        raise ValueError(
            f"env={settings.env!r} has observations with bytes of shape {shape} under {name!r}; {_WANTED_OF_IMAGES}: "
            f"put the channels first or enlarge the image in a gymnasium.ObservationWrapper, or make one vector of all "
            f"with gymnasium.wrappers.FlattenObservation, and give the environment as 'module:function'"
        )


def _check_norm_observations(settings: RunSettings, seen: str) -> None:
    """Of observations that are images only."""
    if settings.norm_observations:
        raise ValueError(
            f"norm_observations=True is for vectors, but env={settings.env!r} has {seen}: those are images, whose "
            f"bytes are divided by 255 anyway; leave norm_observations at False"
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
    if not np.any(start):
        return lambda actions: actions
    return lambda actions: actions + start


def random_actions(space: Space[Any], num_envs: int, generator: np.random.Generator) -> Array:
    """A batch of actions such as an untrained policy makes them."""
    if isinstance(space, spaces.Box):
        return generator.standard_normal((num_envs, *space.shape), dtype=np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return generator.integers(space.nvec, size=(num_envs, *space.nvec.shape))
    assert isinstance(space, spaces.Discrete)
    return generator.integers(space.n, size=num_envs)
