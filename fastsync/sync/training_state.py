"""Sends the states of optimizers, schedulers and GradScalers from one rank to ranks that have taken fewer steps."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from .. import _C
from .._checks import instances_of
from .._torch_compat import schedulers_inside, tree_map
from ..distributed import broadcast_tensors


@dataclass(frozen=True)
class _Sent:
    """Replaces a tensor in the pickled state. The tensor is sent separately."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool


class TrainingState:
    """The optimizers of some parameters, the schedulers of these optimizers, and all GradScalers in use.

    It searches all objects for them, because a rank that has had no batch has stepped none of them.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        gc.collect()  # unused ones of earlier trainings must not be found
        self._alike: list[str] = []
        optimizers = [each for each in instances_of(Optimizer, parameters) if any(self._indices(each))]
        self._optimizers = self._distinct(optimizers, lambda each: f"{type(each).__name__} of {self._indices(each)}")
        indices = {id(optimizer): index for index, optimizer in enumerate(self._optimizers)}
        all_schedulers = instances_of(LRScheduler, parameters)
        schedulers = [each for each in all_schedulers if id(getattr(each, "optimizer", None)) in indices]
        # The state of a scheduler includes those of the schedulers inside it.
        inside = {id(each) for outer in schedulers for each in schedulers_inside(outer)}
        self._schedulers = self._distinct(
            [each for each in schedulers if id(each) not in inside],
            lambda each: f"{type(each).__name__} of optimizer {indices[id(each.optimizer)]}",
        )
        self._scalers = self._distinct(scalers_in_use(parameters), lambda each: type(each).__name__)

    def _distinct(self, objects: list[Any], name_of: Callable[[Any], str]) -> list[Any]:
        """Returns the objects with a unique name, sorted by name, because ranks find them in different orders."""
        named = sorted(((name_of(each), each) for each in objects), key=itemgetter(0))
        counts = Counter(name for name, _ in named)
        self._alike += [f"{number} times {name}" for name, number in counts.items() if number > 1]
        return [each for name, each in named if counts[name] == 1]

    def share(self, group: dist.ProcessGroup, root: int, when: str) -> None:
        """Gives all ranks of the group the states of rank ``root``. All ranks warn if their optimizers differ.

        Args:
            group: the ranks.
            root: the one whose states they take.
            when: begins the warning.
        """
        device = self._parameters[0].device
        try:
            _C.check_agreement(group, self._describe(), device, "their optimizers, schedulers and GradScalers")
        except ValueError as error:
            _warn(when, str(error))
            return
        if self._alike:
            _warn(when, f"nobody can tell apart {', '.join(self._alike)}")
        tensors: list[Tensor] = []
        message: list[Any] = [self._packed(tensors) if group.rank() == root else None]
        dist.broadcast_object_list(message, group=group, group_src=root)
        packed, sent, problem = message[0]
        if problem is not None:
            _warn(when, problem)
            return
        if group.rank() != root:
            tensors = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in sent]
        if tensors:
            broadcast_tensors(tensors, group, root)
        if group.rank() != root:
            self._take(_with_tensors(pickle.loads(packed), tensors))

    def _packed(self, tensors: list[Tensor]) -> tuple[bytes, list[_Sent], str | None]:
        sent: list[_Sent] = []
        device = self._parameters[0].device

        def take(value: Any) -> Any:
            if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
                return value
            marker = _Sent(len(sent), value.shape, value.dtype, value.device.type == "cpu")
            sent.append(marker)
            tensors.append(value.detach().to(device).contiguous())
            return marker

        try:
            return pickle.dumps(tree_map(take, self._state())), sent, None
        except Exception as error:  # a user's scheduler may hold what cannot be pickled; all ranks have to be told
            return b"", [], f"the state of rank {dist.get_rank()} cannot be sent ({error})"

    def _state(self) -> list[Any]:
        optimizer_states = [
            (
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
                {index: dict(optimizer.state.get(self._parameters[index], {})) for index in self._all_of(optimizer)},
            )
            for optimizer in self._optimizers
        ]
        return [optimizer_states, [each.state_dict() for each in (*self._schedulers, *self._scalers)]]

    @torch.no_grad()
    def _take(self, state: list[Any]) -> None:
        optimizer_states, other_states = state
        for other, other_state in zip((*self._schedulers, *self._scalers), other_states, strict=True):
            other.load_state_dict(other_state)
        for optimizer, (groups, states) in zip(self._optimizers, optimizer_states, strict=True):
            for group, group_state in zip(optimizer.param_groups, groups, strict=True):
                assign(group, group_state)
            for index, parameter_state in states.items():
                if parameter_state:
                    assign(optimizer.state[self._parameters[index]], parameter_state)

    def _describe(self) -> str:
        optimizers = [f"{type(each).__name__} of parameters {self._indices(each)}" for each in self._optimizers]
        others = [type(each).__name__ for each in (*self._schedulers, *self._scalers)]
        return "\n".join([*optimizers, *others, *self._alike])

    def _indices(self, optimizer: Optimizer) -> list[list[int]]:
        """Returns, for each group of the optimizer, the indices of its parameters."""
        groups = optimizer.param_groups if "param_groups" in dir(optimizer) else []
        return [[self._index[id(each)] for each in group["params"] if id(each) in self._index] for group in groups]

    def _all_of(self, optimizer: Optimizer) -> Iterable[int]:
        return (index for indices in self._indices(optimizer) for index in indices)


def scalers_in_use(parameters: Iterable[Tensor]) -> list[GradScaler]:
    """Returns the GradScalers that are enabled, among all objects. It misses those frozen before the parameters."""
    return [each for each in instances_of(GradScaler, parameters) if each.is_enabled()]


def averages_beside(model: nn.Module) -> list[AveragedModel]:
    """Returns the averages of the model's weights that are no part of it, among all objects of torch's class."""
    own = set(map(id, model.modules()))
    kinds = [_kind_of(each) for each in model.modules()]
    found = [each for each in instances_of(AveragedModel, model.parameters()) if "_modules" in vars(each)]
    return [each for each in found if id(each) not in own and _kind_of(each.module) in kinds]


def _kind_of(module: nn.Module) -> tuple[object, ...]:
    return type(module), [parameter.shape for parameter in module.parameters()]


def _with_tensors(state: Any, tensors: Sequence[Tensor]) -> Any:
    def put(value: Any) -> Any:
        if not isinstance(value, _Sent):
            return value
        tensor = tensors[value.index]
        return tensor.cpu() if value.is_on_host else tensor

    return tree_map(put, state)


def assign(target: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Assigns values. A tensor is copied into one of the same kind, because a CUDA graph may hold that one."""
    for key, value in values.items():
        there = target.get(key)
        if isinstance(there, Tensor) and isinstance(value, Tensor) and _kind(there) == _kind(value):
            there.copy_(value)
        else:
            target[key] = value


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _warn(when: str, reason: str) -> None:
    warnings.warn(
        f"fastsync: {when} ranks keep their optimizers' states, which differ from now on: {reason}. Make "
        "the same optimizers, schedulers and GradScalers on every rank, or give all ranks one rank's state yourself",
        stacklevel=5,
    )
