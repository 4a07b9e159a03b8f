"""Notices wrappers of an optimizer that write parameters themselves, where ranks have one copy of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MOST_SAMPLED = 16


class WrapperWatch:
    """Compares some values of each parameter around what a wrapper's ``step`` does beside the optimizer's own.

    Between steps ranks may write to parameters, one of them for all. Inside a wrapper's ``step`` each rank would. So
    ranks come together where they enter it and where they leave it, and no write from outside is taken for one inside.
    """

    def __init__(self, named: Mapping[str, Tensor], meet: Callable[[], None]) -> None:
        """Takes the parameters, and what waits until all ranks that have them in one memory have come."""
        self._named, self._meet = named, meet
        self._inside: list[Optimizer] = []  # the wrappers whose steps are under way, from the outer one on
        self._noted: dict[str, Tensor] = {}
        self._has_stepped = False
        self._is_on = True

    def begin(self, wrappers: Sequence[Optimizer], on_write: Callable[[], None]) -> None:
        """Watches the wrappers' steps. ``on_write`` is called before the error of a step that has written."""
        for wrapper in wrappers:
            self._watch(wrapper, on_write)

    def end(self) -> None:
        self._is_on = False  # a scheduler may have wrapped the watched step by now

    def note_step(self) -> None:
        """Notes what the parameters are after a step that all ranks have taken, if it is inside a wrapper's step."""
        if self._inside:
            self._has_stepped = True
            self._note()

    def _note(self) -> None:
        self._noted = {name: _sample_of(parameter) for name, parameter in self._named.items()}

    def check(self) -> None:
        """Raises RuntimeError if a parameter is not as noted, inside a wrapper's step."""
        for name, noted in self._noted.items():
            if not torch.equal(noted, _sample_of(self._named[name])):
                raise RuntimeError(
                    f"fastsync: {type(self._inside[-1]).__name__} has written parameter {name} itself, in its step(). "
                    "With shard_optimizer the ranks of a host have one copy of the parameters, so that write counts "
                    "once for each rank. Go on from a checkpoint, and leave shard_optimizer out, on every rank"
                )

    def _watch(self, wrapper: Optimizer, on_write: Callable[[], None]) -> None:
        own_step: Callable[..., Any] = wrapper.step

        # A scheduler takes the function of this method, and a copy of the wrapper has it with itself.
        @wraps(own_step)
        def step(called: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if called is not wrapper:
                return type(called).step(called, *args, **kwargs)
            if not self._is_on:
                return own_step(*args, **kwargs)
            with self._entered(wrapper):
                result = own_step(*args, **kwargs)
                try:
                    self.check()
                except RuntimeError:
                    on_write()
                    raise
            return result

        vars(wrapper)["step"] = MethodType(step, wrapper)

    @contextmanager
    def _entered(self, wrapper: Optimizer) -> Iterator[None]:
        is_outer = not self._inside
        self._inside.append(wrapper)
        try:
            if is_outer:
                self._meet()
                self._note()
            yield
        finally:
            self._inside.pop()
            if is_outer:
                self._noted, has_stepped, self._has_stepped = {}, self._has_stepped, False
                if has_stepped:  # all ranks have, or none
                    self._meet()


def _sample_of(parameter: Tensor) -> Tensor:
    """Returns the bytes of some values of a dense tensor, spread over its memory."""
    numel = parameter.numel()
    flat = parameter.detach().as_strided((numel,), (1,))
    return flat[:: (numel // MOST_SAMPLED) | 1].clone().view(torch.uint8)  # odd, or all would be of one column
