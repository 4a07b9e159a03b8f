"""Where the parameters and the optimizer's state lie with ``attach(optimizer=)``, for the ranks that step shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor, nn


class Piece:
    """Values of a parameter that this rank steps, one after the other in memory, and their means."""

    def __init__(self, index: int, begin: int, parameter: Tensor, means: Tensor) -> None:
        self.index, self.begin, self.means = index, begin, means
        self.parameter = nn.Parameter(self.of(parameter.detach()))
        self.parameter.grad = means

    def of(self, whole: Tensor) -> Tensor:
        """Returns the same values of a tensor that lies in memory as the parameter does."""
        return values_at(whole, self.begin, self.means.numel())


def values_at(whole: Tensor, begin: int, numel: int) -> Tensor:
    """Returns so many values of a dense tensor from its value ``begin`` on, in the order of its memory."""
    return whole.as_strided((numel,), (1,), whole.storage_offset() + begin)


StatePart = tuple[int, str]
"""A parameter's index, and the name of a part of its state, such as ``"exp_avg"``."""


class ShardHome(ABC):
    """Where parameters and state lie, and how a step's new values reach other ranks. There are two ways."""

    are_pieces_alone = False
    """Whether a rank has the state of its own pieces alone."""

    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """Returns the ranks that step together, as the group numbers them."""

    def renew(self) -> None:  # noqa: B027
        """Notes that the engine has other pieces now. Before, a rank with pieces alone takes ``copies``."""

    @abstractmethod
    def stand_for(self, part: StatePart) -> Tensor:
        """Returns a new tensor that stands for a part of the state of a whole parameter."""

    @abstractmethod
    def hold(self, piece: Piece, part: str, values: Tensor | None) -> Tensor:
        """Keeps a part of a piece's state, zeros for None. Returns the tensor in which it keeps it."""

    @abstractmethod
    def held(self, piece: Piece, part: str) -> Tensor:
        """Returns the tensor in which it keeps a part of a piece's state."""

    @abstractmethod
    def copies(self, parts: Collection[StatePart]) -> dict[StatePart, Tensor]:
        """Returns copies of these parts of the state, of whole parameters. Ranks with pieces alone all call it."""

    @abstractmethod
    def share(self, stepped: Collection[int]) -> None:
        """Gives other ranks the new values of these parameters. All ranks call it. Raises if a rank has failed."""

    @abstractmethod
    def fail(self, stepped: Collection[int]) -> None:
        """Tells other ranks, in place of ``share``, that this rank has failed."""

    @abstractmethod
    def end(self) -> None:
        """Gives this rank parameters of its own."""
