"""Parameters and state that the ranks of a host have once, in memory that they share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .. import _C
from .._torch_compat import foreach_copy_
from ..sync.synchronizer import GradientSynchronizer
from .home import ShardHome, StatePart
from .masters import MASTER
from .piece import Piece, values_at

ALIGNMENT = 128
"""The alignment of a tensor in shared memory, in bytes."""
STATISTICS, LEAST_NUMBERS = 4, 8
"""How many numbers the ranks tell each other of each bucket, and before a step. There are no more buckets than
parameters."""
PARAMETERS, MEANS = "parameters", "means"
"""What is no state, and as wide as the parameters. Means are there only if owners step whole parameters."""


class HostMemory(ShardHome):
    """Puts the parameters into the host's memory. Every rank must make it.

    All ranks come together after a step, because each reads what the others have written.

    Raises:
        ValueError: the ranks cannot share memory.
    """

    def __init__(
        self,
        sync: GradientSynchronizer,
        parameters: Mapping[int, Tensor],
        rounding: Mapping[int, torch.dtype],
        state_names: Iterable[str],
        has_owners: bool,
    ) -> None:
        super().__init__(sync, parameters, rounding)
        self._memory: dict[str, _C.SharedTensors] = {}  # of the parameters, and of each part of the state
        self._offsets: dict[str, dict[int, int]] = {}  # in each memory, by parameter
        # All of it now, because without room for it each rank has its own.
        for name in (PARAMETERS, *([MEANS] if has_owners else []), *state_names, *([MASTER] if rounding else [])):
            self._memory_of(name)

    def begin(self) -> None:
        """Gives the parameters the values of the host's first rank."""
        self._sync._engine.set_shards(self._memory[PARAMETERS])
        views = {index: self._view(index, PARAMETERS) for index in self._parameters}
        if self._sync._group.rank() == self.ranks()[0]:
            for index, view in views.items():
                view.copy_(self._parameters[index].detach())
        self._sync._engine.meet()
        for index, view in views.items():
            self._parameters[index].data = view

    def _memory_of(self, what: str) -> _C.SharedTensors:
        """Returns memory of all parameters, or of a part of the state. The first call waits for all ranks."""
        if what not in self._memory:
            offsets, num_bytes = self._offsets.setdefault(what, {}), 0
            for index in sorted(self._rounding) if what == MASTER else self._parameters:
                offsets[index] = num_bytes
                length = self._parameters[index].numel() * self._dtype_in(what, index).itemsize
                num_bytes += -(-length // ALIGNMENT) * ALIGNMENT
            num_numbers = max(LEAST_NUMBERS, STATISTICS * len(self._sync._named))
            self._memory[what] = _C.SharedTensors(self._sync._group, num_bytes, num_numbers)
        return self._memory[what]

    def _dtype_in(self, what: str, index: int) -> torch.dtype:
        return self._parameters[index].dtype if what in (PARAMETERS, MEANS) else self.dtype((index, what))

    def _view(self, index: int, what: str) -> Tensor:
        parameter, memory = self._parameters[index], self._memory_of(what)
        offset = self._offsets[what][index]
        return memory.tensor(offset, parameter.shape, parameter.stride(), self._dtype_in(what, index))

    def ranks(self) -> Sequence[int]:
        return self._memory[PARAMETERS].ranks()

    def whole_means(self, index: int) -> Tensor:
        return values_at(self._view(index, MEANS), 0, self._parameters[index].numel())

    def send_means(self, pieces: Sequence[Piece], stepped: Collection[int]) -> None:
        own = [piece for piece in pieces if piece.index in stepped]
        if own:
            foreach_copy_([piece.of(self._view(piece.index, MEANS)) for piece in own], [piece.means for piece in own])
        self._sync._engine.meet()

    def stand_for(self, part: StatePart) -> Tensor:
        return self._view(*part)

    def held(self, piece: Piece, part: str) -> Tensor:
        return piece.of(self._view(piece.index, part))

    def copies(self, parts: Collection[StatePart]) -> dict[StatePart, Tensor]:
        return {part: self._view(*part).clone() for part in parts}

    def share(self) -> None:
        self._sync._engine.meet()

    def wait_for_readers(self) -> None:
        self._sync._engine.meet()

    def fail(self, stepped: Collection[int]) -> None:
        self._memory[PARAMETERS].give_up()

    def end(self) -> None:
        for index, parameter in self._parameters.items():
            if parameter.data_ptr() == self._view(index, PARAMETERS).data_ptr():
                parameter.data = parameter.detach().clone()
