"""State as plain data: what ``torch.load(weights_only=True)`` reads back, and what environments keep in attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_RNG = "bit_generator"


def to_plain(value: Any) -> Any:
    """Numbers, strings, None, tensors, and dicts and lists of them; numpy's arrays and scalars become tensors.

    Raises:
        TypeError: there is something else in it.
    """
    if value is None or (isinstance(value, (bool, int, float, str, Tensor)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        return {to_plain(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, np.random.Generator):
        return {_RNG: to_plain(value.bit_generator.state)}
    raise TypeError(f"{type(value).__name__} is not plain data")


def to_numpy(value: Any) -> Any:
    """The way back: tensors become arrays of their own memory, those without a dimension numpy scalars."""
    if isinstance(value, Tensor):
        return value.numpy().copy()[()]
    if isinstance(value, dict):
        return {name: to_numpy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [to_numpy(item) for item in value]
    return value


def attributes_of(thing: object) -> dict[str, Any]:
    """The attributes that are plain data or random generators, as plain data. Others are left out."""
    kept = {}
    for name, value in vars(thing).items():
        try:
            kept[name] = to_plain(value)
        except TypeError:
            continue
    return kept


def set_attributes(thing: object, attributes: dict[str, Any]) -> None:
    """Sets what ``attributes_of`` gave. Random generators must be there already; they get their state."""
    for name, value in attributes.items():
        current = getattr(thing, name, None)
        if isinstance(value, dict) and set(value) == {_RNG}:
            current.bit_generator.state = to_numpy(value[_RNG])  # type: ignore[union-attr]
        elif isinstance(current, tuple):
            setattr(thing, name, tuple(to_numpy(value)))
        else:
            setattr(thing, name, to_numpy(value))
