"""Step hooks of optimizers: which optimizer runs them, and which of their calls belong to a step of the training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _C

_MOST_WRAPPERS = 8  # around one another; one that is in its own .optimizer has no end


def unwrapped(given: object) -> Optimizer | None:
    """Returns the given optimizer, or the one in the ``.optimizer`` of a wrapper that is none itself; None without one.

    A wrapper has ``step`` and ``zero_grad``, too. A scheduler has no ``zero_grad``, and is taken for a mistake.
    """
    for _ in range(_MOST_WRAPPERS):
        if isinstance(given, Optimizer):
            return given
        if not all(callable(getattr(given, name, None)) for name in ("step", "zero_grad")):
            return None
        given = getattr(given, "optimizer", None)
    return None


def innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that a wrapper, such as Accelerate's, shares its groups with; else the optimizer itself.

    Only the inner one is sure to run step hooks.
    """
    return from_outside_in(optimizer)[-1]


def from_outside_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the optimizer, the one inside that shares its groups, the one inside that, and so on."""
    inside = (each for each in vars(optimizer).values() if isinstance(each, Optimizer) and each is not optimizer)
    wrapped = next((each for each in inside if each.param_groups is optimizer.param_groups), None)
    return [optimizer] if wrapped is None else [optimizer, *from_outside_in(wrapped)]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the tensors that the optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _Call(NamedTuple):
    """A call of an optimizer's ``step`` that is under way."""

    optimizer: int
    """The optimizer's id."""
    is_outermost: bool
    """Whether no other call of the same optimizer's ``step`` has called it."""
    makes_state: bool
    """Whether it can only make state, or is inside a call that can."""


class _Calls(threading.local):
    """What is known of the calls that a thread is inside, by their numbers."""

    def __init__(self) -> None:
        self.known: dict[int, _Call] = {}


_calls = _Calls()


def is_training_step(optimizer: Optimizer) -> bool:
    """Tells, in a step hook, whether the outermost ``step`` of a training step has called it.

    Two other calls reach the hooks: a step that calls ``super().step()``, and ``torch.distributed.checkpoint``, which
    steps a new optimizer with zeros to make its state. PyTorch calls the hooks with the same arguments then. A counter
    of nested calls would be wrong after a step that has failed, so the extension tells which calls are under way.
    """
    numbers = _C.optimizer_calls()
    call = _calls.known.get(numbers[-1]) if numbers else None  # compiled code tells of none
    return call is None or (call.is_outermost and not call.makes_state)


def _note_call(optimizer: Optimizer, args: object, kwargs: Mapping[str, Any]) -> None:
    numbers = _C.optimizer_calls()
    known = {number: call for number, call in _calls.known.items() if number in numbers}
    if numbers:
        is_outermost = all(call.optimizer != id(optimizer) for call in known.values())
        makes_state = any(call.makes_state for call in known.values()) or _makes_state_only(optimizer, kwargs)
        known[numbers[-1]] = _Call(id(optimizer), is_outermost, makes_state)
    _calls.known = known


def _makes_state_only(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether a step begins that can only make the optimizer's state: no state yet, no closure, no rate, no gradient.

    Trainers do not name a closure that is None. So nobody waits for a device to tell whether gradients are zero.
    """
    if kwargs.get("closure", True) is not None or optimizer.state:
        return False
    if any(float(group.get("lr", 0.0)) for group in optimizer.param_groups):
        return False
    gradients = (parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)
    return not any(bool(gradient.any()) for gradient in gradients)


# Note [Hooks of all optimizers]
#   The first handle registers them, all at once, and they stay. PyTorch goes through them in each step of any thread,
#   so one that came or went meanwhile would be an error there. Without handles they do nothing.
_lock = threading.Lock()
_to_register: list[Callable[[], object]] = [lambda: register_optimizer_step_pre_hook(_note_call)]


def register_when_watched(register: Callable[[], object]) -> None:
    """Lets the first ``watch_optimizers`` call this. Modules say so when they are imported."""
    _to_register.append(register)


def watch_optimizers() -> None:
    """Registers the hooks of all optimizers, once. Call it before an optimizer steps that is to be watched."""
    with _lock:
        while _to_register:
            _to_register.pop(0)()
