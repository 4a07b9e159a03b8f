"""The spaces that the trainer supports, and the conversion of actions from the policy to the environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from torch import Tensor

from ..settings import RunSettings

Array = NDArray[Any]

FAR = 10.0
"""How many standard deviations of the first actions the bounds may be away, and how many times narrower."""
LEAST_IMAGE_SIZE = 36  # height and width that the convolutions need


def suits(observations: Space[Any]) -> bool:
    """Returns whether the networks take these observations as they are: vectors, or uint8 of three dimensions."""
    shape = observations.shape or ()
    is_bytes = len(shape) == 3 and observations.dtype == np.uint8
    return isinstance(observations, spaces.Box) and (len(shape) == 1 or is_bytes)


def check_spaces(
    env: str, observations: Space[Any], actions: Space[Any], *, norm_observations: bool = False
) -> None:  # fmt: skip
    """Checks that the trainer supports these spaces of the environment ``env``.

    Raises:
        ValueError: observations can neither be made vectors nor are 8-bit images with channels first; or actions are
            neither Discrete, nor MultiDiscrete, nor vectors of real numbers; or images are to be normalised.
    """
    refused = f"env={env!r} has"
    wrapped = "wrap the environment in one of gymnasium.wrappers and give it as 'module:function'"
    if unsized := list(_without_a_size(observations)):
        path, kind = unsized[0]
        raise ValueError(
            f"{refused} observations of no fixed size: {'observation' + path} is a {kind}, and networks take as many "
            f"numbers at every step. Choose the most that there may be, and fill up with zeros, or leave the part out: "
            f"{wrapped}, such as TransformObservation, with a Box in its place"
        )
    if not suits(observations):  # flattened they are no Box
        raise ValueError(
            f"{refused} observations {observations}; they have to be a Box, or what "
            f"gymnasium.wrappers.FlattenObservation makes one of: {wrapped}, such as TransformObservation"
        )
    is_image = len(observations.shape or ()) == 3
    if is_image and min((observations.shape or ())[1:]) < LEAST_IMAGE_SIZE:
        raise ValueError(
            f"{refused} images of shape {observations.shape}; the shape is (C, H, W), and H and W must be at least "
            f"{LEAST_IMAGE_SIZE}: {wrapped}, such as TransformObservation or ResizeObservation"
        )
    parts = getattr(observations, "parts", None)
    if norm_observations and (is_image or (parts is not None and not parts.num_numbers)):
        raise ValueError(
            f"norm_observations=True is for vectors, but {refused} images, which are divided by 255 in any case; "
            f"set norm_observations=False"
        )
    if isinstance(actions, spaces.Box):
        is_known = len(actions.shape) == 1 and np.issubdtype(actions.dtype, np.floating)
    else:
        is_known = isinstance(actions, spaces.Discrete | spaces.MultiDiscrete) and len(actions.shape or ()) <= 1
    if not is_known:
        raise ValueError(
            f"{refused} actions {actions}; Discrete, MultiDiscrete of one dimension, and a Box of one dimension and "
            f"real numbers are supported: {wrapped}, such as TransformAction"
        )


def _without_a_size(space: Space[Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yields path and kind of each part of observations that no vector holds, such as a Sequence."""
    inner: Iterable[tuple[Any, Space[Any]]] = ()
    if isinstance(space, spaces.Dict):
        inner = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        inner = enumerate(space.spaces)
    elif not space.is_np_flattenable:
        yield path, type(space).__name__
    for name, part in inner:
        yield from _without_a_size(part, f"{path}[{name!r}]")


def notes_on_actions(settings: RunSettings, observations: Space[Any], actions: Space[Any]) -> list[str]:
    """Returns a sentence for the user if a mask forbids actions, or if a policy that begins with actions about 0 hardly
    suits the bounds.
    """
    parts = getattr(observations, "parts", None)
    if parts is not None and parts.mask_size:
        return [f"env={settings.env!r} has an action_mask: the policy takes only actions that it allows"]
    if not isinstance(actions, spaces.Box) or settings.action_distribution != "normal":
        return []
    deviation = math.exp(settings.log_std_init)
    low, high = actions.low.astype(np.float64) / deviation, actions.high.astype(np.float64) / deviation
    is_bounded = np.isfinite(low) & np.isfinite(high)
    reach = np.maximum(abs(low), abs(high))
    is_far = is_bounded & ((reach > FAR) | (high - low < 2 / FAR) | (low > 2) | (high < -2))
    if not is_far.any():
        return []
    (at, *_), count = is_far.nonzero()[0], is_far.sum()
    others = f", and {count - 1} more like it," if count > 1 else ","
    return [
        f"warning: env={settings.env!r} takes actions in [{actions.low[at]:g}, {actions.high[at]:g}] (number {at})"
        f"{others} but the policy begins with mean 0 and standard deviation {deviation:g}, and its actions are only "
        "clipped. Set action_distribution to 'tanh_normal' or 'beta', which are scaled, or wrap the environment in "
        "gymnasium.wrappers.RescaleAction(env, -1, 1)"
    ]


def action_translator(space: Space[Any]) -> Callable[[Array], Array]:
    """Returns a function from actions of the policy (int64 [N] or [N, k] from 0, or real [N, k] without bounds) to
    actions in the space: shifted to its start, or clipped to its bounds and of its dtype.

    The results share no memory with the policy's actions, because an environment may change them in place.
    """
    if isinstance(space, spaces.Box):
        low, high, dtype = space.low, space.high, space.dtype
        if not (np.isfinite(low).any() or np.isfinite(high).any()):
            return lambda actions: actions.astype(dtype)
        return lambda actions: np.clip(actions, low, high).astype(dtype, copy=False)
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    start = space.start
    return (lambda actions: actions + start) if np.any(start) else (lambda actions: actions.copy())


def tensor_translator(space: Space[Any], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Returns a function that does to tensors on a device what ``action_translator`` does to arrays."""
    if isinstance(space, spaces.Box):
        low, high = (torch.from_numpy(bound).to(device) for bound in (space.low, space.high))
        return lambda actions: actions.to(low.dtype).clamp(low, high)
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    start = torch.as_tensor(space.start, device=device)
    return lambda actions: actions + start


def random_actions(space: Space[Any], num_envs: int, generator: np.random.Generator) -> Array:
    """Returns a batch of random actions, such as those of an untrained policy."""
    if isinstance(space, spaces.Box):
        return generator.standard_normal((num_envs, *space.shape), dtype=np.float32)
    if isinstance(space, spaces.MultiDiscrete):
        return generator.integers(space.nvec, size=(num_envs, *space.nvec.shape))
    assert isinstance(space, spaces.Discrete)
    return generator.integers(space.n, size=num_envs)
