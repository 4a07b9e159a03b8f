"""Where the parameters and the optimizer's state lie with ``shard_optimizer``, for the ranks that step shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..sync.synchronizer import GradientSynchronizer
from .owners import deal
from .piece import Piece

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
    def begin(self) -> None:
        """Has the engine keep shards, and takes the parameters in. The ranks have agreed. All call it."""

    @abstractmethod
    def ranks(self) -> Sequence[int]:
        """Returns the ranks that step together, as the group numbers them."""

    def renew(self) -> None:  # noqa: B027
        """Notes that the engine has other pieces now. Before, a rank with pieces alone takes ``copies``."""

    @cached_property
    def owner_of(self) -> dict[int, int]:
        """Which of ``ranks`` steps a parameter where a step needs whole ones: its place among them, by index."""
        return deal(self._parameters, len(self.ranks()))

    def owned(self) -> list[int]:
        """Returns the parameters that this rank steps as a whole."""
        own = list(self.ranks()).index(self._sync._group.rank())
        return [index for index, owner in self.owner_of.items() if owner == own]

    @abstractmethod
    def whole_means(self, index: int) -> Tensor:
        """Returns where the means of a parameter that this rank owns come to be, one value after the other."""

    @abstractmethod
    def send_means(self, pieces: Sequence[Piece], stepped: Collection[int]) -> None:
        """Brings the means of parameters to their owners, from the pieces that this rank has. All ranks call it."""

    @abstractmethod
    def stand_for(self, part: StatePart) -> Tensor:
        """Returns a new tensor that stands for a part of the state of a whole parameter."""

    @abstractmethod
    def held(self, piece: Piece, part: str) -> Tensor:
        """Returns the tensor in which it keeps a part of a piece's state. The caller writes the first values."""

    @abstractmethod
    def copies(self, parts: Collection[StatePart]) -> dict[StatePart, Tensor]:
        """Returns copies of these parts of the state, of whole parameters. Ranks with pieces alone all call it."""

    def turns(self, stepped: Sequence[int]) -> list[Sequence[int]]:
        """Returns these parameters by turns: a rank steps those of one, begins to share them, and steps the next."""
        return [stepped] if stepped else []

    def begin_share(self, stepped: Collection[int]) -> None:  # noqa: B027
        """Begins to give other ranks the new values of a turn's parameters. All ranks call it."""

    @abstractmethod
    def share(self) -> None:
        """Gives other ranks the new values. All ranks call it after the last turn.

        Raises RuntimeError if a rank has failed, where the host knows it by then.
        """

    @abstractmethod
    def fail(self, stepped: Collection[int]) -> None:
        """Tells other ranks, in place of the turns of these parameters and of ``share``, that this rank has failed."""

    def wait_for_parameters(self) -> None:  # noqa: B027
        """Waits for new values that are on their way still."""

    def failed_late(self) -> list[int]:
        """Returns the ranks that have failed in the newest step, as far as ``share`` has not told."""
        return []

    def wait_for_readers(self) -> None:  # noqa: B027
        """Waits until all ranks that have the parameters in one memory have come here. All ranks call it."""

    def wire_bytes(self) -> int:
        """Returns how many bytes of new parameters this rank has sent so far."""
        return 0

    @abstractmethod
    def end(self) -> None:
        """Gives this rank parameters of its own."""
