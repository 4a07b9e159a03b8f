"""Observations of several parts as one row of numbers: vectors first, then images, then the mask of actions.

So a rollout stays one tensor, whatever the environment observes. The policy takes the row apart again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray
from torch import Tensor

from ...messages import did_you_mean
from .spaces import LEAST_IMAGE_SIZE

Array = NDArray[Any]
Path = tuple[str, ...]

MASK = "action_mask"
"""The key of ``info``, or of a Dict observation, that tells which actions are allowed, as PettingZoo has it."""

MOST_CHANNELS_LAST = 4
"""Images [H, W, C] have at most so many channels."""


@dataclass(frozen=True)
class Parts:
    """What a row consists of, in this order."""

    num_numbers: int  # Numbers of all vectors.
    images: tuple[tuple[int, int, int], ...]  # Shapes [C, H, W] of the images.
    mask_size: int = 0  # Number of choices that the mask allows or forbids; 0 without a mask.
    num_critic: int = 0  # The first of the numbers, so many, are seen by the critic alone.

    def split(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Splits rows [..., D] into numbers [..., num_numbers] and images [..., C, H, W] from 0 to 255."""
        sizes = [self.num_numbers, *map(math.prod, self.images)]
        numbers, *images = rows[..., : sum(sizes)].split(sizes, dim=-1)
        return numbers, [image.unflatten(-1, shape) for image, shape in zip(images, self.images, strict=True)]


class PartsSpace(spaces.Box):
    """A Box of rows that consist of parts, with their mask or, for a network, without it."""

    def __init__(self, numbers: spaces.Box, parts: Parts, *, with_mask: bool = True) -> None:
        num_pixels, mask_size = sum(map(math.prod, parts.images)), parts.mask_size if with_mask else 0
        low = np.concatenate([numbers.low, np.zeros(num_pixels + mask_size)])
        high = np.concatenate([numbers.high, np.full(num_pixels, 255), np.ones(mask_size)])
        super().__init__(low.astype(numbers.dtype), high.astype(numbers.dtype), dtype=numbers.dtype)
        self.numbers, self.parts = numbers, parts

    def without_mask(self) -> PartsSpace:
        """Returns the space of what the network gets."""
        return PartsSpace(self.numbers, self.parts, with_mask=False)

    def for_actor(self) -> PartsSpace:
        """Returns the space of what the actor's network gets."""
        hidden, parts = self.parts.num_critic, self.parts
        numbers = spaces.Box(self.numbers.low[hidden:], self.numbers.high[hidden:], dtype=self.numbers.dtype.type)
        seen = replace(parts, num_numbers=parts.num_numbers - hidden, num_critic=0)
        return PartsSpace(numbers, seen, with_mask=False)


class PartsInARow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts the parts of observations into one row of float32, or of float64 if a vector needs it.

    Args:
        env: an environment, whose observations are a Dict or not.
        masks_in_info: whether ``info["action_mask"]`` tells which actions are allowed. A mask in the Dict comes first.
        critic_keys: keys of the Dict whose numbers only the critic sees. They come first in a row.

    Raises:
        ValueError: a mask is not as large as the number of choices. Or ``critic_keys`` are not those of numbers in the
            Dict, or leave nothing for the actor.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], *, masks_in_info: bool, critic_keys: Sequence[str] = ()
    ) -> None:  # fmt: skip
        super().__init__(env)
        leaves = dict(_leaves(env.observation_space))
        num_choices = choices_of(env.action_space)
        self._has_mask = (MASK,) in leaves and num_choices > 0
        if self._has_mask and (size := spaces.flatdim(leaves.pop((MASK,)))) != num_choices:
            raise ValueError(f"the observations' {MASK!r} has {size} entries, and there are {num_choices} choices")
        self._boxes = _boxes_of(leaves)
        self._images = [path for path, space in leaves.items() if _is_image(space)]
        _check_critic_keys(env.observation_space, critic_keys, self._images)
        vectors = [path for path in leaves if path not in self._images]
        for_critic = [path for path in vectors if path[:1] and path[0] in critic_keys]
        others = [path for path in vectors if path not in for_critic]
        self._vectors = {path: leaves[path] for path in (*for_critic, *others)}
        num_critic = sum(spaces.flatdim(leaves[path]) for path in for_critic)
        boxes: list[Any] = [spaces.flatten_space(space) for space in self._vectors.values()]
        dtype: Any = np.float32 if all(map(_fits_float32, boxes)) else np.float64
        low = np.concatenate([np.empty(0), *(np.ravel(box.low) for box in boxes)]).astype(dtype)
        high = np.concatenate([np.empty(0), *(np.ravel(box.high) for box in boxes)]).astype(dtype)
        numbers = spaces.Box(low, high, dtype=dtype)
        shapes = [leaves[path].shape or () for path in self._images]
        self._moved = [_has_channels_last(shape) for shape in shapes]
        images = tuple(
            (s[2], s[0], s[1]) if last else (s[0], s[1], s[2]) for s, last in zip(shapes, self._moved, strict=True)
        )
        self._mask_size = num_choices if self._has_mask or masks_in_info else 0
        self.observation_space = PartsSpace(numbers, Parts(len(numbers.low), images, self._mask_size, num_critic))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._row(observation, info, ends=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._row(observation, info, ends=terminated or truncated), reward, terminated, truncated, info

    def _row(self, observation: Any, info: dict[str, Any], *, ends: bool) -> Array:
        _check_boxes(self._boxes, observation)
        parts: list[Array] = [
            np.ravel(spaces.flatten(space, _at(observation, path)))  # type: ignore[arg-type]
            for path, space in self._vectors.items()
        ]
        for path, is_moved in zip(self._images, self._moved, strict=True):
            image = np.asarray(_at(observation, path))
            parts.append(np.ravel(np.moveaxis(image, -1, 0) if is_moved else image))
        if self._mask_size:
            parts.append(self._mask(observation[MASK] if self._has_mask else info.get(MASK), ends=ends))
        dtype: Any = self.observation_space.dtype
        return np.concatenate(parts, dtype=dtype, casting="unsafe")

    def _mask(self, mask: Any, *, ends: bool) -> Array:
        if mask is None:  # nothing is forbidden, such as at the end of an episode
            return np.ones(self._mask_size)
        allowed = np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple) else np.ravel(mask)
        where = "the observation" if self._has_mask else "info"
        if len(allowed) != self._mask_size:
            raise ValueError(f"{where}[{MASK!r}] has {len(allowed)} entries, and there are {self._mask_size} choices")
        if not ends and forbids_all(allowed, self.env.action_space):  # at the end of an episode nobody acts
            raise ValueError(
                f"{where}[{MASK!r}] forbids every action, and the episode goes on; allow one, such as one that does "
                "nothing, or end the episode"
            )
        return allowed


def _check_critic_keys(space: Space[Any], keys: Sequence[str], images: Sequence[Path]) -> None:
    if not keys:
        return
    given = f"critic_keys={list(keys)}"
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"{given} are of a Dict, and its observations are {space}")
    for key in keys:
        if key not in space.spaces or key == MASK:
            others = [each for each in space.spaces if each != MASK]
            raise ValueError(f"{given}: its observations have {', '.join(others)}{did_you_mean(key, others)}")
        if any(path[0] == key for path in images):
            raise ValueError(f"{given}: {key!r} has an image, and only numbers can be hidden from the actor")
    if not {*space.spaces} - {*keys, MASK}:
        raise ValueError(f"{given} are all that it observes, and leave nothing for the actor")


class LeavesChecked(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Checks observations before they are flattened, because a vector no longer tells what was in it."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._boxes = _boxes_of(dict(_leaves(env.observation_space)))

    def observation(self, observation: Any) -> Any:
        _check_boxes(self._boxes, observation)
        return observation


def _boxes_of(leaves: Mapping[Path, Space[Any]]) -> dict[Path, spaces.Box]:
    return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, spaces.Box)}


def _check_boxes(boxes: Mapping[Path, spaces.Box], observation: Any) -> None:
    """Raises ValueError if an array of an observation has another shape than its space, or an unsuitable dtype."""
    for path, box in boxes.items():
        try:
            found = np.asarray(_at(observation, path))
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the observation has no part {'.'.join(path)!r}; observation_space has one") from None
        if found.shape == box.shape and found.dtype == box.dtype:
            continue  # the usual case; it comes at every step
        is_alone = found.size == 1 and box.shape == (1,)  # a number is as good as an array that has it
        are_whole = {found.dtype.kind, box.dtype.kind} <= {"b", "i", "u"}  # such as int64 for uint8
        suits = are_whole or np.can_cast(found.dtype, box.dtype, "same_kind")
        if suits and (found.shape == box.shape or is_alone):
            continue
        name = "the observation" + "".join(f"[{key!r}]" for key in path)
        raise ValueError(
            f"{name} has the shape {found.shape} and the dtype {found.dtype}; observation_space has {box.shape} and "
            f"{box.dtype}"
        )


def has_parts(space: Space[Any]) -> bool:
    """Returns whether observations have an image beside others, or a mask of actions."""
    return isinstance(space, spaces.Dict) and (
        MASK in space.spaces or any(_is_image(leaf) for _, leaf in _leaves(space))
    )


def choices_of(actions: Space[Any]) -> int:
    """Returns the number of choices of discrete actions, over all their components; 0 for others."""
    if isinstance(actions, spaces.Discrete):
        return int(actions.n)
    return int(actions.nvec.sum()) if isinstance(actions, spaces.MultiDiscrete) else 0


def forbids_all(mask: Array, actions: Space[Any]) -> bool:
    """Returns whether a mask [..., num_choices] leaves nothing to choose, in a row or in a component of an action."""
    if isinstance(actions, spaces.MultiDiscrete):
        each = np.split(mask, np.cumsum(actions.nvec)[:-1], axis=-1)
        return not all((part > 0).any(-1).all() for part in each)
    return not (mask > 0).any(-1).all()


def allowed_sample(actions: Space[Any], observations: Space[Any], row: Array) -> Any:
    """Samples a single action that the mask in a single row of observations allows, if there is one."""
    size = observations.parts.mask_size if isinstance(observations, PartsSpace) else 0
    if not size:
        return actions.sample()
    mask = row[-size:].astype(np.int8)
    if isinstance(actions, spaces.MultiDiscrete):
        return actions.sample(mask=tuple(np.split(mask, np.cumsum(actions.nvec)[:-1])))
    return actions.sample(mask=mask)


def _leaves(space: Space[Any], path: Path = ()) -> Iterator[tuple[Path, Space[Any]]]:
    """Yields what a Dict and the Dicts in it consist of, by their keys."""
    if isinstance(space, spaces.Dict):
        for name, inner in space.spaces.items():
            yield from _leaves(inner, (*path, name))
    else:
        yield path, space


def _at(observation: Any, path: Path) -> Any:
    for name in path:
        observation = observation[name]
    return observation


def _is_image(space: Space[Any]) -> bool:
    shape = space.shape or ()
    if not (isinstance(space, spaces.Box) and len(shape) == 3 and space.dtype == np.uint8):
        return False
    return min(shape[1:]) >= LEAST_IMAGE_SIZE or _has_channels_last(shape)


def _has_channels_last(shape: tuple[int, ...]) -> bool:
    return shape[2] <= MOST_CHANNELS_LAST and min(shape[:2]) >= LEAST_IMAGE_SIZE


def _fits_float32(box: spaces.Box) -> bool:
    """Returns whether float32 holds all numbers of a Box, as those of one choice out of n."""
    largest = max(np.abs(box.low).max(initial=0), np.abs(box.high).max(initial=0))
    return np.can_cast(box.dtype, np.float32) or (np.issubdtype(box.dtype, np.integer) and largest <= 2**24)
