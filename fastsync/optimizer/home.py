"""Where the parameters and the optimizer's state lie with ``attach(optimizer=)``, for the ranks that step shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .masters import follow_weight, round_into

if TYPE_CHECKING:
    from ..sync.attach import GradientSynchronizer


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


StatePart = tuple[int, str]
"""A parameter's index, and the name of a part of its state, such as ``"exp_avg"``."""


class ShardHome(ABC):
    """Where parameters and state lie, and how a step's new values reach other ranks. There are two ways."""

    are_pieces_alone = False
    """Whether a rank has the state of its own pieces alone."""

    def __init__(
        self, sync: GradientSynchronizer, parameters: Mapping[int, Tensor], rounding: Mapping[int, torch.dtype]
    ) -> None:
        """Takes the parameters, and what those with a master are rounded to, by index."""
        self._sync, self._parameters, self._rounding = sync, parameters, rounding

    def dtype(self, part: StatePart) -> torch.dtype:
        """Returns the dtype in which it keeps a part of the state."""
        return torch.float32 if part[0] in self._rounding else self._parameters[part[0]].dtype

    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """Returns the ranks that step together, as the group numbers them."""

    def renew(self) -> None:  # noqa: B027
        """Notes that the engine has other pieces now. Before, a rank with pieces alone takes ``copies``."""

    @abstractmethod
    def stand_for(self, part: StatePart) -> Tensor:
        """Returns a new tensor that stands for a part of the state of a whole parameter."""

    @abstractmethod
    def held(self, piece: Piece, part: str) -> Tensor:
        """Returns the tensor in which it keeps a part of a piece's state. The caller writes the first values."""

    @abstractmethod
    def copies(self, parts: Collection[StatePart]) -> dict[StatePart, Tensor]:
        """Returns copies of these parts of the state, of whole parameters. Ranks with pieces alone all call it."""

    @abstractmethod
    def share(self, stepped: Collection[int]) -> None:
        """Gives other ranks the new values of these parameters. All ranks call it.

        Raises RuntimeError if a rank has failed, where the host knows it by then.
        """

    @abstractmethod
    def fail(self, stepped: Collection[int]) -> None:
        """Tells other ranks, in place of ``share``, that this rank has failed."""

    def wait_for_readers(self) -> None:  # noqa: B027
        """Waits until all ranks that have the parameters in one memory have come here. All ranks call it."""

    def wire_bytes(self) -> int:
        """Returns how many bytes of new parameters this rank has sent so far."""
        return 0

    @abstractmethod
    def end(self) -> None:
        """Gives this rank parameters of its own."""
