"""What a scheduler that steps before the optimizer changes: Elastic puts it back where the step runs again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._checks import instances_of
from ..optimizer.steps import parameters_of
from ..sync.training_state import assign


class Schedules:
    """An optimizer's settings, such as learning rates, and the schedulers that it has by now, also those inside others.

    It searches all objects for them, once.

    Args:
        optimizers: the optimizer, and what may stand for it.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._groups = optimizers[0].param_groups
        all_schedulers = instances_of(LRScheduler, parameters_of(optimizers[0]))
        self._schedulers = [
            weakref.ref(each)
            for each in all_schedulers
            if any(getattr(each, "optimizer", None) is optimizer for optimizer in optimizers)
        ]
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def keep(self) -> None:
        """Notes what they are before a step."""
        places = [*self._groups, *(vars(each) for known in self._schedulers if (each := known()) is not None)]
        self._kept = [(place, _copies(place)) for place in places]

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes them what they were."""
        for place, values in self._kept:
            assign(place, values)


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    copies = {key: value for key, value in values.items() if key != "params"}
    for key, value in copies.items():
        if isinstance(value, Tensor):
            copies[key] = value.detach().clone()
        elif isinstance(value, list | dict):
            copies[key] = value.copy()
    return copies
