"""A ``synchronize()`` that was forgotten: what optimizers' steps tell of it, where no hook sees gradients come."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer


class ForgottenCalls:
    """Notices an optimizer that steps again with no call in between.

    At its first step an optimizer is judged by the others that have stepped the same parameters since the newest call:
    gradients that have changed since then nobody has averaged.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._used: dict[str, tuple[int, weakref.ref[Tensor], int]] = {}
        """By parameter, how many calls there had been at its newest step, and the gradient it was with, as it was."""

    def note_call(self) -> None:
        """The gradients there are have been averaged."""
        self._num_calls += 1

    def is_forgotten(self, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> bool:
        """Whether the optimizer is about to step with gradients, by parameter, that came after the newest call."""
        if self._num_calls == 0 or self._seen.get(optimizer) == self._num_calls:
            return True
        return optimizer not in self._seen and any(self._is_newer(*named) for named in gradients.items())

    def _is_newer(self, name: str, gradient: Tensor) -> bool:
        num_calls, used, version = self._used.get(name, (-1, weakref.ref(gradient), 0))
        return num_calls == self._num_calls and (used() is not gradient or version != gradient._version)

    def note_step(self, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> None:
        """It steps with them."""
        self._seen[optimizer] = self._num_calls
        for name, gradient in gradients.items():
            self._used[name] = self._num_calls, weakref.ref(gradient), gradient._version
