"""Which attached parameters an optimizer steps, and in which of its groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .masters import MASTER, rounding_of
from .registry import kind_of


class ShardedGroups:
    """The groups of the user's optimizer, as far as they are attached. A parameter has the index that it has there."""

    def __init__(
        self,
        optimizer: Optimizer,
        named: Mapping[str, Tensor],
        master_weights: bool,
        parameter_wire: torch.dtype | None,
    ) -> None:
        kind = kind_of(optimizer)
        assert kind is not None
        self.optimizer, self.kind = optimizer, kind
        self.names = list(named)
        index_of = {id(parameter): index for index, parameter in enumerate(named.values())}
        self.indices = [[index_of.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        """Of all parameters of each group; None stands for those that are not attached."""
        self.group_of = {i: number for number, group in enumerate(self.indices) for i in group if i is not None}
        self.parameters = {
            index: parameter
            for index, parameter in enumerate(named.values())
            if index in self.group_of and parameter.numel() > 0
        }
        self.rounding = {
            index: rounding
            for index, parameter in self.parameters.items()
            if (rounding := rounding_of(parameter, master_weights, parameter_wire)) is not None
        }
        """What parameters with a master are rounded to."""
        self._ids = frozenset(map(id, self.parameters.values()))

    def description(self) -> str:
        """Returns the text that has to be equal on all ranks."""
        groups = "; ".join(" ".join(map(str, indices)) for indices in self.indices)
        text = f"optimizer {type(self.optimizer).__name__} of parameters {groups}\n"
        text += f"its state: {', '.join(self.state_names()) or 'none'}\n"
        for dtype in sorted({*self.rounding.values()}, key=str):
            rounded = (str(index) for index, rounding in self.rounding.items() if rounding == dtype)
            text += f"masters, rounded to {dtype}, of parameters {' '.join(rounded)}\n"
        return text

    def state_names(self) -> list[str]:
        """Returns the names of the state that has a value for each value of a parameter, in any group."""
        return sorted({name for group in self.optimizer.param_groups for name in self.kind.state_names(group)})

    def have_changed(self) -> bool:
        """Tells whether the optimizer has got or lost parameters since."""
        return [len(group["params"]) for group in self.optimizer.param_groups] != [*map(len, self.indices)]

    def without_parameters(self) -> list[dict[str, Any]]:
        """Returns the optimizer's groups with the other parameters alone."""
        return [
            {**group, "params": [each for each in group["params"] if id(each) not in self._ids]}
            for group in self.optimizer.param_groups
        ]

    def group(self, index: int) -> dict[str, Any]:
        return self.optimizer.param_groups[self.group_of[index]]

    def state(self, index: int) -> dict[str, Any]:
        return self.optimizer.state.get(self.parameters[index]) or {}

    def parts(self, index: int) -> tuple[str, ...]:
        """Returns the names of the state that has a value for each value of the parameter."""
        names = self.kind.state_names(self.group(index))
        return (*names, MASTER) if index in self.rounding else names

    def numbers(self, index: int) -> dict[str, Any]:
        """Returns the other entries of the parameter's state, such as how many steps it has taken."""
        return numbers_of(self.state(index), self.parts(index))


def numbers_of(state: Mapping[str, Any], parts: Collection[str]) -> dict[str, Any]:
    """Returns what of a state is not of these parts, and no larger tensor that an option has left there."""
    return {
        name: each
        for name, each in state.items()
        if name not in parts and (not isinstance(each, Tensor) or each.numel() == 1)
    }
