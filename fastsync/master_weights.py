"""Copies of the weights that an optimizer keeps and steps from, such as float32 masters of a bfloat16 model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ._optimizer_steps import innermost

_DEPTH = 4  # how deep the search goes into nested lists, dicts and optimizers


@torch.no_grad()
def masters_of(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finds the optimizer's own copies of these weights, between its steps, by their values.

    Note [Which tensors are masters]
    Masters have one name in the state, such as ``state[p]["master"]``, or are in a list that the optimizer holds. Each
    has to be within one rounding of a weight of its shape, and not all may be zeros. Moments do not pass.
    """
    found: dict[str, Tensor] = {}
    for family in _families(optimizer, weights):
        found |= _matched(family, weights)
    return found


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of the tensor, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _families(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    state = innermost(optimizer).state
    states = [state[weight] for weight in weights.values() if weight in state]
    for key in {key for state in states if isinstance(state, dict) for key in state}:
        yield [value for state in states if isinstance(value := state.get(key), Tensor)]
    yield from _lists({name: value for name, value in vars(optimizer).items() if name not in _TORCH_ATTRIBUTES}, _DEPTH)


_TORCH_ATTRIBUTES = ("state", "param_groups", "defaults")


def _lists(value: Any, depth: int) -> Iterator[list[Tensor]]:
    if depth == 0:
        return
    if isinstance(value, Optimizer):  # it steps the masters, so they are in its groups
        yield [parameter for group in value.param_groups for parameter in group["params"]]
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    if tensors := [item for item in items if isinstance(item, Tensor)]:
        yield tensors
    for item in items:
        yield from _lists(item, depth - 1)


def _matched(family: list[Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by the names of the weights that they are copies of; nothing unless all are copies."""
    found: dict[str, Tensor] = {}
    is_nonzero = False
    for tensor in family:
        name = next((name for name, each in weights.items() if name not in found and _is_copy(tensor, each)), None)
        if name is None:
            return {}
        found[name] = tensor
        is_nonzero = is_nonzero or bool(local(tensor).any())
    return found if is_nonzero else {}


def _is_copy(tensor: Tensor, weight: Tensor) -> bool:
    own, theirs = local(tensor), local(weight)
    if not (own.is_floating_point() and theirs.is_floating_point()) or own.shape != theirs.shape:
        return False
    is_same_memory = own.data_ptr() == theirs.data_ptr()
    if is_same_memory or torch.promote_types(own.dtype, theirs.dtype) != own.dtype:
        return False
    wide = theirs.to(own.device, own.dtype)
    narrow = torch.finfo(theirs.dtype)  # below its smallest normal number, values are evenly spaced
    return bool(((own - wide).abs() <= narrow.eps * wide.abs().clamp(min=narrow.smallest_normal)).all())
