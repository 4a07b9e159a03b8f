"""Copies of the weights that an optimizer keeps and steps from, such as float32 masters of a bfloat16 model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..sync.optimizer_steps import innermost, parameters_of

MASTER = "master"
"""The name in ``optimizer.state[weight]`` by which an optimizer tells the copy that it steps."""


def masters_of(optimizers: Iterable[Optimizer], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the copies of these weights that the optimizers tell of, by the names of the weights."""
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        state = innermost(optimizer).state
        for name, weight in weights.items():
            master = state[weight].get(MASTER) if weight in state else None
            if isinstance(master, Tensor) and local(master).shape == local(weight).shape:
                found[name] = master
    return found


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of the tensor, in the same memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check_masters_are_known(optimizers: Iterable[Optimizer], weights: Mapping[str, Tensor]) -> None:
    """Raises ValueError after a step, if an optimizer may keep wider copies of some weights, and does not tell.

    It would step from these, and so take each mean back. PyTorch's own optimizers keep none.
    """
    for optimizer, name in _without_masters(optimizers, weights):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} is none of PyTorch's, and steps {name} of {weights[name].dtype}. "
            f"If it keeps wider copies of the weights, and does not tell of them in optimizer.state[weight]"
            f"[{MASTER!r}], it would take each mean back. Pass on_merge=, a function that writes the mean to them; if "
            "it keeps none, on_merge=lambda parameters: None"
        )


def _without_masters(optimizers: Iterable[Optimizer], weights: Mapping[str, Tensor]) -> Iterator[tuple[Optimizer, str]]:
    masters = masters_of(optimizers, weights)
    for optimizer in map(innermost, optimizers):
        if type(optimizer).__module__.partition(".")[0] != torch.__name__:
            stepped = set(map(id, parameters_of(optimizer)))
            for name, weight in weights.items():
                is_narrow = weight.is_floating_point() and weight.element_size() < 4
                if is_narrow and id(weight) in stepped and name not in masters:
                    yield optimizer, name
