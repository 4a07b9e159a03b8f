"""A piece of a parameter that a rank steps, with its means and its master."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .masters import follow_weight, round_into


class Piece:
    """Values of a parameter that this rank steps, one after the other in memory, and their means.

    With a master the optimizer steps that, and the values are its rounding. A whole parameter is stepped in its shape.
    """

    def __init__(self, index: int, begin: int, parameter: Tensor, means: Tensor, is_whole: bool = False) -> None:
        self.index, self.begin, self.means = index, begin, means
        self.weight = self.of(parameter.detach())
        self.master: Tensor | None = None
        self._rounding = parameter.dtype
        self._shape = (parameter.shape, parameter.stride()) if is_whole else None
        self._step(self.weight, means)

    def _step(self, values: Tensor, gradient: Tensor) -> None:
        self.gradient = gradient
        self.parameter = nn.Parameter(self.shaped(values))  # what the optimizer steps
        self.parameter.grad = self.shaped(gradient)

    def take_master(self, master: Tensor, rounding: torch.dtype) -> None:
        """Has the optimizer step a master, in memory that the home keeps. Its gradients are the means in float32."""
        self.master, self._rounding = master, rounding
        self._step(master, torch.empty_like(master))

    def shaped(self, values: Tensor) -> Tensor:
        """Returns these values of the piece in the shape in which the optimizer steps it."""
        return values if self._shape is None else values.as_strided(*self._shape)

    def of(self, whole: Tensor) -> Tensor:
        """Returns the same values of a tensor that lies in memory as the parameter does."""
        return values_at(whole, self.begin, self.means.numel())

    def before_step(self) -> None:
        if self.master is not None:
            follow_weight(self.master, self.weight, self._rounding, scratch=self.gradient)
            self.gradient.copy_(self.means)

    def after_step(self) -> None:
        if self.master is not None:
            round_into(self.weight, self.master, self._rounding)


def values_at(whole: Tensor, begin: int, numel: int) -> Tensor:
    """Returns so many values of a dense tensor from its value ``begin`` on, in the order of its memory."""
    return whole.as_strided((numel,), (1,), whole.storage_offset() + begin)
