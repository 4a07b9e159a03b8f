"""Dictionaries of observations as rows of one array: what stores, shuffles and saves rows need not know of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
_WORD = 4


def image_shape(space: Space[Any]) -> tuple[int, int, int] | None:
    """The channels, height and width of what a dictionary holds, or None where it is no image.

    Bytes of two or more dimensions are an image. What comes before height and width, as the frames of a stack, are
    channels.
    """
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) < 2:
        return None
    *channels, height, width = space.shape
    return math.prod(channels), height, width


def has_images(space: Space[Any]) -> bool:
    """Tells whether an observation is an image, or a row with images in it."""
    return isinstance(space, PackedSpace) or len(space.shape or ()) == 3


def numbers_of(rows: Tensor, num_numbers: int) -> Tensor:
    """The numbers in rows of a ``PackedSpace`` [..., size], as a view [..., num_numbers]."""
    return rows[..., : num_numbers * _WORD].view(torch.float32)


def images_of(rows: Tensor, space: PackedSpace) -> Iterator[Tensor]:
    """The images in rows of a ``PackedSpace`` [..., size]: bytes [..., C, H, W]."""
    first = space.num_numbers * _WORD
    for shape in space.images.values():
        size = math.prod(shape)
        yield rows[..., first : first + size].unflatten(-1, shape)
        first += size


def parts_of(space: Space[Any], name: str = "") -> Iterator[tuple[str, Space[Any]]]:
    """What a dictionary holds, in the order of its keys, with that of dictionaries in it."""
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from parts_of(part, f"{name}.{key}" if name else key)
    else:
        yield name, space


class PackedSpace(spaces.Box):
    """Rows of bytes that hold a dictionary with images: its numbers as float32, then its images.

    Args:
        images: channels, height and width of each image by its name, in their order.
        num_numbers: how many numbers there are.
    """

    def __init__(self, images: dict[str, tuple[int, int, int]], num_numbers: int) -> None:
        self.images = images
        self.num_numbers = num_numbers
        size = num_numbers * _WORD + sum(math.prod(shape) for shape in images.values())
        # Whole words, or the numbers of the second row could not be read where they lie.
        super().__init__(0, 255, (-(-size // _WORD) * _WORD,), np.uint8)


class Packer:
    """Makes rows of dictionaries: of numbers where there are no images in them, else of bytes, as ``PackedSpace`` says.

    Numbers are those of all parts in the order of their keys: arrays flattened, discrete ones one-hot.

    Args:
        space: of one dictionary, of which ``can_pack`` holds.
    """

    def __init__(self, space: spaces.Dict) -> None:
        self._space = space
        images = {name: shape for name, part in parts_of(space) if (shape := image_shape(part)) is not None}
        self.space: spaces.Box
        """Of one row."""
        if images:
            count = sum(spaces.flatdim(part) for name, part in parts_of(space) if name not in images)
            self.space = PackedSpace(images, count)
        else:
            flat = spaces.flatten_space(space)
            assert isinstance(flat, spaces.Box)
            self.space = flat

    @staticmethod
    def can_pack(space: Space[Any]) -> bool:
        """Tells whether rows can be made of such observations."""
        kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
        return isinstance(space, spaces.Dict) and all(isinstance(part, kinds) for _, part in parts_of(space))

    def __call__(self, observation: dict[str, Any]) -> Array:
        """The row [size] of a dictionary."""
        numbers: list[Array] = []
        images: list[Array] = []
        for part, value in _leaves(self._space, observation):
            if image_shape(part) is not None:
                images.append(np.asarray(value).reshape(-1))
            else:
                _check_inside(part, value)
                numbers.append(np.asarray(spaces.flatten(part, value)))
        if not images:
            return np.concatenate(numbers, dtype=self.space.dtype)
        if numbers:
            images.insert(0, np.concatenate(numbers, dtype=np.float32).view(np.uint8))
        packed = np.concatenate(images)
        return np.pad(packed, (0, self.space.shape[0] - len(packed)))


def pack(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """The environment, with rows in place of dictionaries that rows can be made of."""
    return _Packed(env) if Packer.can_pack(env.observation_space) else env


def pack_vector(vector: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """As ``pack``, of environments with a vectorised implementation of their own."""
    return _PackedVector(vector) if Packer.can_pack(vector.single_observation_space) else vector


class _Packed(gymnasium.ObservationWrapper[Any, Any, Any]):
    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        self._packer = Packer(env.observation_space)
        self.observation_space = self._packer.space

    def observation(self, observation: Any) -> Array:
        return self._packer(observation)


class _PackedVector(VectorWrapper[Any, Any, Any]):
    """Not gymnasium's wrapper of observations, which refuses those that restart in the step that ended an episode."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        assert isinstance(env.single_observation_space, spaces.Dict)
        self._packer = Packer(env.single_observation_space)
        self.single_observation_space = self._packer.space
        self.observation_space = batch_space(self._packer.space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Array, dict[str, Any]]:
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._rows(observations), infos

    def step(self, actions: Any) -> tuple[Array, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        if "final_obs" in infos:
            infos["final_obs"] = self._rows_of_some(infos["final_obs"])
        return self._rows(observations), rewards, terminated, truncated, infos

    def _rows(self, observations: dict[str, Any]) -> Array:
        return np.stack([self._packer(_at(observations, index)) for index in range(self.num_envs)])

    def _rows_of_some(self, observations: Any) -> Array:
        """[N] of dictionaries [N], None where there is none; or [N, size] of a dictionary of arrays."""
        if isinstance(observations, dict):
            return self._rows(observations)
        rows = np.empty(self.num_envs, dtype=object)
        for index, observation in enumerate(observations):
            rows[index] = None if observation is None else self._packer(observation)
        return rows


def _at(observations: Any, index: int) -> Any:
    """That of one environment, out of a dictionary of arrays."""
    if isinstance(observations, dict):
        return {key: _at(value, index) for key, value in observations.items()}
    return observations[index]


def _leaves(space: Space[Any], value: Any) -> Iterator[tuple[Space[Any], Any]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.items():
            yield from _leaves(part, value[key])
    else:
        yield space, value


def _check_inside(space: Space[Any], value: Any) -> None:
    """Raises ValueError for a choice that there is not: one-hot it would be taken for another."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        counted = value - space.start
        if np.any(counted < 0) or np.any(counted >= (space.n if isinstance(space, spaces.Discrete) else space.nvec)):
            raise ValueError(f"an observation is outside of {space}: {value}; mend the environment's observation_space")
