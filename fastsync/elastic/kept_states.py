"""What a step may change beside the model and the optimizer's moments: Elastic puts it back where the step runs again.

The optimizer steps last, so its moments have not changed where a step runs again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..sync.optimizer_steps import innermost
from ..sync.training_state import assign, map_leaves


class KeptStates:
    """The settings of optimizers, such as learning rates, and the states of other objects, as they were before a step.

    Args:
        optimizers: what steps the model.
        others: schedulers, GradScalers and anything else with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, optimizers: Sequence[Optimizer], others: Iterable[Any]) -> None:
        self._groups = [group for each in optimizers for group in innermost(each).param_groups]
        self._others = list(others)
        self._kept_groups: list[dict[str, Any]] = []
        self._kept: list[Any] = []
        self._memory: list[list[Tensor]] = [[] for _ in self._others]

    def keep(self) -> None:
        """Notes what they are before a step."""
        self._kept_groups = [_settings_of(group) for group in self._groups]
        self._kept = [_copy(each.state_dict(), memory) for each, memory in zip(self._others, self._memory, strict=True)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes them what they were."""
        for each, state in zip(self._others, self._kept, strict=False):
            each.load_state_dict(_copy(state, []))  # it may keep these tensors, and the next keep() writes to ours
        for group, kept in zip(self._groups, self._kept_groups, strict=False):
            assign(group, kept)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Copies what is in a group beside parameters. It is faster than ``_copy``, and each step waits for it."""
    copies = {key: value for key, value in group.items() if key != "params"}
    for key, value in copies.items():
        if isinstance(value, Tensor):
            copies[key] = value.detach().clone()
        elif isinstance(value, list | dict):
            copies[key] = value.copy()
    return copies


def _copy(state: Any, memory: list[Tensor]) -> Any:
    """Copies a state. Tensors are copied to those of an earlier copy where these fit, and are in ``memory`` then."""
    earlier = iter(memory.copy())
    memory.clear()

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            memory.append(copy_of_tensor(value.detach(), next(earlier, None)))
            return memory[-1]
        return value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)

    return map_leaves(state, copied)


_IMMUTABLE = (bool, int, float, str, bytes, type(None))


def copy_of_tensor(tensor: Tensor, memory: Tensor | None) -> Tensor:
    """Returns a copy of a tensor, in the given memory if that fits."""
    fits = memory is not None and (memory.shape, memory.dtype, memory.device) == (
        tensor.shape, tensor.dtype, tensor.device,
    )  # fmt: skip
    return tensor.clone() if memory is None or not fits else memory.copy_(tensor)
