"""What ``shard_optimizer`` has to know of an optimizer's class: its state, and how much of a tensor a step looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

Settings = Mapping[str, Any]
"""A group in ``param_groups``."""
StateNames = Iterable[str] | Callable[[Settings], Iterable[str]]
RESERVED = ("master", "step")
"""What has another meaning in a parameter's state."""


@dataclass(frozen=True)
class StepKind:
    """How optimizers of a class step."""

    names_for: Callable[[Settings], Iterable[str]]
    """Returns the names of the state that has a value for each value of a parameter, for a group's settings."""
    is_tensorwise: bool
    """Whether a step needs whole tensors."""

    def state_names(self, settings: Settings) -> tuple[str, ...]:
        return tuple(self.names_for(settings))


_kinds: dict[type[Optimizer], StepKind] = {}


def register_elementwise(optimizer_class: type[Optimizer], *, state: StateNames) -> None:
    """Tells ``shard_optimizer`` that in a class's step each value depends on itself, its gradient and its state alone.

    Call it on every rank, before ``shard_optimizer``. Subclasses are told of by themselves. The step may also use
    settings of its group, and numbers that each parameter has in its state, such as ``"step"``, which counts steps. It
    must change no settings, keep nothing in the optimizer itself, and call a closure once and before anything else.

    Args:
        optimizer_class: the class of the optimizer.
        state: the names of the state that has a tensor of a parameter's shape, in ``optimizer.state[parameter]``. Or
            a function that returns them for a group's settings.

    Raises:
        ValueError: an argument is refused.
    """
    _register(optimizer_class, state, is_tensorwise=False)


def register_tensorwise(optimizer_class: type[Optimizer], *, state: StateNames) -> None:
    """Tells ``shard_optimizer`` that a class's step needs whole tensors, each by itself, as Muon's does.

    Then each rank steps some of the tensors. The rest is as with ``register_elementwise``, but that a parameter's state
    has these tensors alone, and no numbers.

    Args:
        optimizer_class: the class of the optimizer.
        state: the names of the state that has a tensor of a parameter's shape. Or a function that returns them for a
            group's settings.

    Raises:
        ValueError: an argument is refused.
    """
    _register(optimizer_class, state, is_tensorwise=True)


def kind_of(optimizer: Optimizer) -> StepKind | None:
    """Returns how an optimizer steps; None if nobody has told."""
    return _kinds.get(type(optimizer))


def _register(optimizer_class: type[Optimizer], state: StateNames, is_tensorwise: bool) -> None:
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
        raise ValueError(f"optimizer_class: expected a class of torch.optim.Optimizer, got {optimizer_class!r}")
    if callable(state):
        _kinds[optimizer_class] = StepKind(state, is_tensorwise)
        return
    names = () if isinstance(state, str) else tuple(state)
    if isinstance(state, str) or not all(isinstance(name, str) and name not in RESERVED for name in names):
        raise ValueError(
            f"state: expected names of tensors in optimizer.state[parameter], none of {RESERVED}, got {state!r}"
        )
    _kinds[optimizer_class] = StepKind(lambda _: names, is_tensorwise)


def _of_adam(settings: Settings) -> Iterable[str]:
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else []))


def _of_rmsprop(settings: Settings) -> Iterable[str]:
    momentum = ["momentum_buffer"] if settings["momentum"] > 0 else []
    return ("square_avg", *momentum, *(["grad_avg"] if settings["centered"] else []))


def _of_sgd(settings: Settings) -> Iterable[str]:
    return ("momentum_buffer",) if settings["momentum"] != 0 else ()


register_elementwise(Adam, state=_of_adam)
register_elementwise(AdamW, state=_of_adam)
register_elementwise(NAdam, state=("exp_avg", "exp_avg_sq"))
register_elementwise(RAdam, state=("exp_avg", "exp_avg_sq"))
register_elementwise(Adamax, state=("exp_avg", "exp_inf"))
register_elementwise(Adagrad, state=("sum",))
register_elementwise(Adadelta, state=("square_avg", "acc_delta"))
register_elementwise(RMSprop, state=_of_rmsprop)
register_elementwise(Rprop, state=("prev", "step_size"))
register_elementwise(ASGD, state=("ax",))
register_elementwise(SGD, state=_of_sgd)
if hasattr(torch.optim, "Muon"):
    register_tensorwise(torch.optim.Muon, state=("momentum_buffer",))
