"""States that ranks have alike beside the model: they travel from one rank to ranks that have taken fewer steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import _C
from .._torch_compat import has_scheduler
from ..distributed import broadcast_tensors
from .grad_scaler import scaler_of_step
from .optimizer_steps import from_outside_in, innermost, parameters_of, unwrapped


@dataclass(frozen=True)
class _Sent:
    """Replaces a tensor in the pickled state. The tensor is sent separately."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool


class TrainingState:
    """The states of objects that a user has given: optimizers, schedulers, GradScalers, averages, data loaders.

    Args:
        given: anything with ``state_dict`` and ``load_state_dict``. Ranks tell objects of a type apart by their order.
        argument: how a user passes one more, for errors.
        own: parameters that each rank has its own of. What optimizers know of them stays there, too.

    Raises:
        ValueError: one of them has no state.
    """

    def __init__(self, given: Iterable[object], argument: str, own: Iterable[Tensor] = ()) -> None:
        self._given: list[Any] = list({id(each): each for each in given}.values())
        self._argument = argument
        self._own = frozenset(map(id, own))
        for each in self._given:
            if not all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict")):
                raise ValueError(
                    f"{argument}: expected objects with state_dict() and load_state_dict(), such as optimizers, "
                    f"schedulers and GradScalers, got {type(each).__name__}"
                )
        self._chains = [from_outside_in(found) for each in self._given if (found := unwrapped(each)) is not None]
        self._examined: WeakSet[Optimizer] = WeakSet()

    @property
    def scalers(self) -> list[GradScaler]:
        """The GradScalers that are enabled."""
        return [each for each in self._given if isinstance(each, GradScaler) and each.is_enabled()]

    # ---- what a step shows ------------------------------------------------------------------------------------------

    def check_step(self, optimizer: Optimizer) -> None:
        """Looks at an optimizer's first step, from inside of it.

        Raises:
            ValueError: the optimizer was not given. Or it has schedulers, or a GradScaler takes the step, and that was
                not given.
        """
        if optimizer in self._examined:
            return
        inner = innermost(optimizer)
        chain = next((each for each in self._chains if each[-1] is inner), None)
        if chain is None:
            raise self._not_given(
                f"optimizer {type(optimizer).__name__}", "steps parameters whose gradients are averaged here"
            )
        # Only schedulers wrap the method so, and torch does not say which.
        if any(map(has_scheduler, chain)) and not self._has_scheduler_of(chain):
            raise self._not_given("a scheduler", f"moves the learning rates of {type(inner).__name__}")
        found = scaler_of_step(optimizer)
        if found is not None and not any(part is found[0] for each in self._given for part in _parts(each)):
            raise self._not_given(f"a {type(found[0]).__name__}", f"takes the steps of {type(inner).__name__}")
        self._examined.add(optimizer)

    def _has_scheduler_of(self, chain: Sequence[Optimizer]) -> bool:
        """Whether something that was given, or a part of it, belongs to one of these optimizers."""
        others = [each for each in self._given if unwrapped(each) is None]
        owners = [vars(part).get("optimizer") for each in others for part in _parts(each) if hasattr(part, "__dict__")]
        return any(owner is each for owner in owners for each in chain)

    def _not_given(self, what: str, does: str) -> ValueError:
        return ValueError(
            f"fastsync: {what} {does}, and ranks would not share its state, because it was not given. Pass it, on "
            f"every rank: {self._argument}"
        )

    # ---- from one rank to others ------------------------------------------------------------------------------------

    def agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Checks that all ranks have given alike objects. Every rank must call it.

        Raises:
            ValueError: they have not. This is an error on all of them.
        """
        _C.check_agreement(group, self.description(), device, "the objects whose states they share")

    def share(self, group: dist.ProcessGroup, root: int, device: torch.device) -> None:
        """Gives all ranks of the group the states of rank ``root``. Every rank must call it.

        Raises:
            ValueError: a state cannot be sent. This is an error on all of them.
        """
        tensors: list[Tensor] = []
        message: list[Any] = [self._packed(tensors, device) if group.rank() == root else None]
        dist.broadcast_object_list(message, group=group, group_src=root)
        packed, sent, problem = message[0]
        if problem is not None:
            raise ValueError(f"{self._argument}: {problem}")
        if group.rank() != root:
            tensors = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in sent]
        if tensors:
            broadcast_tensors(tensors, group, root)
        if group.rank() != root:
            states = zip(self._given, _with_tensors(pickle.loads(packed), tensors), strict=True)
            for each, state in sorted(states, key=lambda pair: _plain_optimizer(pair[0]) is not None):
                self._load(each, state)  # a scheduler's first, as it may set learning rates

    def _packed(self, tensors: list[Tensor], device: torch.device) -> tuple[bytes, list[_Sent], str | None]:
        sent: list[_Sent] = []

        def take(value: Any) -> Any:
            if not isinstance(value, Tensor) or hasattr(value, "__tensor_flatten__"):
                return value
            marker = _Sent(len(sent), value.shape, value.dtype, value.device.type == "cpu")
            sent.append(marker)
            tensors.append(value.detach().to(device).contiguous())
            return marker

        try:
            return pickle.dumps(map_leaves([self._state_of(each) for each in self._given], take)), sent, None
        except Exception as error:  # a user's object may hold what cannot be pickled; all ranks have to be told
            return b"", [], f"the states of rank {dist.get_rank()} cannot be sent ({error})"

    def description(self) -> str:
        """Returns the text that has to be equal on all ranks."""
        return "".join(f"object {index}: {self._description_of(each)}\n" for index, each in enumerate(self._given))

    def _description_of(self, given: Any) -> str:
        optimizer = _plain_optimizer(given)
        if optimizer is None:
            return type(given).__name__
        shapes = [list(parameter.shape) for parameter in self._shared_by(optimizer)]
        return f"{type(optimizer).__name__} of {len(optimizer.param_groups)} groups, parameters {shapes}"

    def _shared_by(self, optimizer: Optimizer) -> list[Tensor]:
        return [parameter for parameter in parameters_of(optimizer) if id(parameter) not in self._own]

    def _state_of(self, given: Any) -> Any:
        """Returns an object's state. An optimizer's keeps its dtypes, which ``load_state_dict`` would change."""
        optimizer = _plain_optimizer(given)
        if optimizer is None:
            return given.state_dict()
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return groups, [dict(optimizer.state.get(parameter, {})) for parameter in self._shared_by(optimizer)]

    @torch.no_grad()
    def _load(self, given: Any, state: Any) -> None:
        optimizer = _plain_optimizer(given)
        if optimizer is None:
            given.load_state_dict(state)
            return
        groups, states = state
        for group, group_state in zip(optimizer.param_groups, groups, strict=True):
            assign(group, group_state)
        for parameter, parameter_state in zip(self._shared_by(optimizer), states, strict=True):
            if parameter_state:
                assign(optimizer.state[parameter], parameter_state)

    # ---- from one step to the next ----------------------------------------------------------------------------------

    def others(self, than: Sequence[Optimizer]) -> Iterator[Any]:
        """Yields what was given beside these optimizers."""
        inner = [innermost(each) for each in than]
        for each in self._given:
            found = unwrapped(each)
            if found is None or innermost(found) not in inner:
                yield each


def _parts(given: Any) -> list[Any]:
    """Returns an object, and what its attributes hold. A trainer's own scheduler has torch's in one of these."""
    values = list(vars(given).values()) if hasattr(given, "__dict__") else []
    return [given, *values, *(each for value in values if isinstance(value, list | tuple) for each in value)]


def _plain_optimizer(given: Any) -> Optimizer | None:
    """Returns the optimizer whose state is all that torch knows of; None for what has a state of its own making."""
    found = unwrapped(given)
    if found is None or found is not given:
        return None
    chain = from_outside_in(found)
    kinds: Iterable[Any] = map(type, chain)
    are_plain = (
        kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict for kind in kinds
    )
    return chain[-1] if all(are_plain) else None


def map_leaves(state: Any, fn: Callable[[Any], Any]) -> Any:
    """Returns a state with what ``fn`` makes of each value in its dicts, lists and tuples."""
    if isinstance(state, dict):
        copied = copy.copy(state)  # a module's state has attributes of its own
        for key, value in state.items():
            copied[key] = map_leaves(value, fn)
        return copied
    if type(state) in (list, tuple):
        return type(state)(map_leaves(each, fn) for each in state)
    return fn(state)


def _with_tensors(state: Any, tensors: Sequence[Tensor]) -> Any:
    def put(value: Any) -> Any:
        if not isinstance(value, _Sent):
            return value
        tensor = tensors[value.index]
        return tensor.cpu() if value.is_on_host else tensor

    return map_leaves(state, put)


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
