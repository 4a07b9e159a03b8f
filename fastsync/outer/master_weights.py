"""Copies of the weights that an optimizer keeps and steps from, such as float32 masters of a bfloat16 model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..optimizer.steps import innermost, parameters_of

_DEPTH = 5  # how deep the search goes into nested lists, dicts and optimizers
_NUM_SAMPLES = 256
"""About how many values of each weight tell whether a merge was undone."""


@torch.no_grad()
def masters_of(optimizers: Iterable[Optimizer], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Finds the optimizers' own copies of these weights, between their steps, by their values.

    Note [Which tensors are masters]
    Masters have one name in the state, such as ``state[p]["master"]``, or are in a list that the optimizer holds. Each
    has to be within one rounding of a weight of its shape, and not all may be zeros. Moments do not pass.
    """
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        ids = set(map(id, parameters_of(optimizer)))
        # Weights of two optimizers may be equal, such as biases of 0. So each optimizer's own come first.
        in_order = dict(sorted(weights.items(), key=lambda item: id(item[1]) not in ids))
        for family in _families(optimizer, in_order):
            found |= _matched(family, in_order)
    return found


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of the tensor, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _families(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    state = innermost(optimizer).state
    states = [state[weight] for weight in weights.values() if weight in state]
    for key in {key for state in states if isinstance(state, dict) for key in state}:
        yield [value for state in states if isinstance(value := state.get(key), Tensor)]
    yield from _lists(optimizer, _DEPTH)


_TORCH_ATTRIBUTES = ("state", "param_groups", "defaults")


def _lists(value: Any, depth: int) -> Iterator[list[Tensor]]:
    if depth == 0:
        return
    if isinstance(value, Optimizer):  # it may step the masters, so they are in its groups
        yield parameters_of(value)
        value = {name: each for name, each in vars(value).items() if name not in _TORCH_ATTRIBUTES}
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    if tensors := [item for item in items if isinstance(item, Tensor)]:
        yield tensors
    for item in items:
        yield from _lists(item, depth - 1)


def _matched(family: list[Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors by the names of the weights that they are copies of; nothing unless all are copies."""
    found: dict[str, Tensor] = {}
    is_nonzero = False
    if not {id(weight) for weight in weights.values()}.isdisjoint(map(id, family)):
        return {}  # a weight may be equal to another one, and is no copy of it
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


class MergeWatch:
    """Notices that an optimizer has undone a merge, because it steps from copies that ``masters_of`` has not found.

    Note [Merges that are undone]
    Such an optimizer takes the weights back: its first step after a merge ends one step away from where they were
    before it. A step of another optimizer may end there by itself, as where the merge has moved them by a single step.
    So the second step has to be shorter than the way back was. Both times a factor of 4 leaves no doubt.
    """

    def __init__(self, before: Tensor, merged: Tensor) -> None:
        self._before, self._merged = before, merged
        self._went_back_to: Tensor | None = None  # where the first step ended

    def is_ready(self, now: Tensor) -> bool:
        """Tells before a step whether the weights are still as the merge or the first step has left them."""
        return torch.equal(now, self._merged if self._went_back_to is None else self._went_back_to)

    def is_undone(self, now: Tensor) -> bool | None:
        """Tells after a step whether the merge was undone; None if the next step will tell."""
        if self._went_back_to is None:
            if 4 * (now - self._before).norm() >= (now - self._merged).norm():
                return False
            self._went_back_to = now
            return None
        step, way_back = (now - self._went_back_to).norm(), (self._went_back_to - self._merged).norm()
        return bool(0 < 4 * step < way_back)


@torch.no_grad()
def samples_of_narrow(weights: Iterable[Tensor]) -> Tensor:
    """Returns some values of each weight below 32 bits, on the host: an optimizer may keep wider copies of these."""
    narrow = [local(each).reshape(-1) for each in weights if each.is_floating_point() and each.element_size() < 4]
    samples = [each[:: max(1, each.numel() // _NUM_SAMPLES)].to("cpu", torch.float32) for each in narrow]
    return torch.cat([torch.empty(0, dtype=torch.float32, device="cpu"), *samples])
