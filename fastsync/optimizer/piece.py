"""A piece of a parameter that a rank steps, with its means and its master."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .masters import follow_weight, round_into


class Piece:
    """Values of a parameter that this rank steps, one after the other in memory, and their means.

    With a master the optimizer steps that, and the values are its rounding.
    """

    def __init__(self, index: int, begin: int, parameter: Tensor, means: Tensor) -> None:
        self.index, self.begin, self.means = index, begin, means
        self.weight = self.of(parameter.detach())
        self.master: Tensor | None = None
        self._rounding = parameter.dtype
        self.parameter = nn.Parameter(self.weight)  # what the optimizer steps
        self.parameter.grad = means

    def take_master(self, master: Tensor, rounding: torch.dtype) -> None:
        """Has the optimizer step a master, in memory that the home keeps. Its gradients are the means in float32."""
        self.master, self._rounding = master, rounding
        self.parameter = nn.Parameter(master)
        self.parameter.grad = torch.empty_like(master)

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad

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
