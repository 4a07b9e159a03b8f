"""Parameters whose new values are still on their way: whatever uses one first waits for it."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from .._torch_compat import without_torch_function

# Note [First use of a parameter]
#   While its values are on their way, a parameter has another class, and PyTorch hands each use of it to
#   __torch_function__: operations, .data, state_dict(), pickle. That waits, gives the parameter its own class again,
#   and goes on. So no module needs a hook, and it does not matter who uses the parameter. What asks only for the
#   gradient, or for what no step changes, does not wait. PyTorch tells nobody of uses by TorchScript, by a CUDA graph,
#   by transforms of torch.func over the parameter, by extensions in C++ that are no operators of torch.ops, and beside
#   a tensor whose own class takes the call, as a nested tensor's does. Our own extension reads after a wait.
#
#   The parameter holds what it waits for, and that holds no handle. So values arrive as long as somebody may use them,
#   and a model that nobody has any more is freed.
_HARMLESS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("grad", "requires_grad", "is_leaf", "grad_fn")),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_sparse", "is_cpu")),
        *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "requires_grad_", "is_floating_point")),
        *(getattr(Tensor.grad, name) for name in ("__set__", "__delete__")),
    }
)
Function = Callable[..., Any]


class _ParameterOnItsWay(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _use(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for_those_in([self])  # before a copy asks for the class
        return copy.deepcopy(self, memo)


class _TensorOnItsWay(Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _use(func, args, kwargs or {})


_CLASSES: Mapping[type[Tensor], type[Tensor]] = {nn.Parameter: _ParameterOnItsWay, Tensor: _TensorOnItsWay}
_WAIT = "_wait_until_it_has_come"
"""The attribute of a parameter on its way that waits for it."""


def _use(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if func in _HARMLESS:
        with without_torch_function():
            return func(*args, **kwargs)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "fastsync: compiled code was about to use a parameter whose new values are on their way, because of "
            "shard_optimizer(overlap_gather=True), and it cannot wait for them. Call wait_for_parameters() of the "
            "handle before it"
        )
    _wait_for_those_in((args, kwargs))
    return func(*args, **kwargs)


def _wait_for_those_in(used: object) -> None:
    if isinstance(used, (_ParameterOnItsWay, _TensorOnItsWay)):
        vars(used).get(_WAIT, _has_come)()
    elif isinstance(used, Mapping):
        _wait_for_those_in([*used.values()])
    elif isinstance(used, (list, tuple)):
        for each in used:
            _wait_for_those_in(each)


def _has_come() -> None:
    """Another thread has waited in the meantime, and has given the parameter its own class."""


class _Sent(NamedTuple):
    number: int
    parameters: Sequence[Tensor]
    own_classes: Sequence[type[Tensor]]
    receive: Callable[[], None]


class Arrivals:
    """New values of parameters that are on their way, in the order in which ranks send them. Thread-safe."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        """Takes a method to call before the error of a wait. Afterwards nothing is on its way any more."""
        self._on_error = WeakMethod(on_error)
        self._lock = threading.RLock()
        self._under_way: deque[_Sent] = deque()

    def begin(self, parameters: Sequence[Tensor], receive: Callable[[], None]) -> None:
        """Has the first use of one of these parameters call ``receive``, which writes the new values.

        A signal may interrupt ``receive``, and its handler call it again. So two calls have to do what one does.
        """
        with self._lock:
            number = self._under_way[-1].number + 1 if self._under_way else 0
            sent = _Sent(number, parameters, [type(each) for each in parameters], receive)
            self._under_way.append(sent)
            for parameter in parameters:
                vars(parameter)[_WAIT] = partial(self.wait, number)
                parameter.__class__ = _CLASSES[type(parameter)]
            if not any(each is sent for each in self._under_way):  # a signal's handler has waited in the meantime
                _give_own_class(sent)

    def wait(self, number: int | None = None) -> None:
        """Waits for what was sent with this number and before; for all without one."""
        with self._lock:
            while self._under_way and (number is None or self._under_way[0].number <= number):
                first = self._under_way[0]
                try:
                    first.receive()
                except Exception:  # after Ctrl-C the values are on their way still
                    while self._under_way:
                        _give_own_class(self._under_way.popleft())
                    if on_error := self._on_error():
                        on_error()
                    raise
                if self._under_way and self._under_way[0] is first:
                    _give_own_class(self._under_way.popleft())


def _give_own_class(sent: _Sent) -> None:
    for parameter, own_class in zip(sent.parameters, sent.own_classes, strict=True):
        parameter.__class__ = own_class
        vars(parameter).pop(_WAIT, None)
