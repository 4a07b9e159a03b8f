"""Parameters and state that the ranks of a host have once, in memory that they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from . import _C
from ._shard_home import Piece, ShardHome, StatePart

if TYPE_CHECKING:
    from .attach import GradientSynchronizer

ALIGNMENT = 128
"""Of a tensor in shared memory, in bytes."""
STATISTICS = 4
"""How many numbers the ranks tell each other of each bucket. There are no more buckets than parameters."""
PARAMETERS = "parameters"


class HostMemory(ShardHome):
    """Puts the parameters into the host's memory, with the values of its first rank. Every rank must make it.

    All ranks come together after a step, because each reads what the others have written.

    Raises:
        ValueError: the ranks cannot share memory.
    """

    def __init__(self, sync: GradientSynchronizer, parameters: Mapping[int, Tensor]) -> None:
        self._sync, self._parameters = sync, parameters
        self._offsets, self._num_bytes = {}, 0
        for index, parameter in parameters.items():
            self._offsets[index] = self._num_bytes
            self._num_bytes += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory: dict[str, _C.SharedTensors] = {}  # of the parameters, and of each part of the state
        self._views: dict[StatePart, Tensor] = {}
        memory = self._memory_of(PARAMETERS)
        sync._engine.set_shards(memory)
        views = {index: self._view(index, memory) for index in parameters}
        if sync._group.rank() == memory.ranks()[0]:
            for index, view in views.items():
                view.copy_(parameters[index].detach())
        sync._engine.meet()
        for index, view in views.items():
            parameters[index].data = view

    def _memory_of(self, what: str) -> _C.SharedTensors:
        """Returns memory as large as the parameters. The first call waits for all ranks."""
        if what not in self._memory:
            self._memory[what] = _C.SharedTensors(
                self._sync._group, self._num_bytes, STATISTICS * max(1, len(self._sync._named))
            )
        return self._memory[what]

    def _view(self, index: int, memory: _C.SharedTensors) -> Tensor:
        parameter = self._parameters[index]
        return memory.tensor(self._offsets[index], parameter.shape, parameter.stride(), parameter.dtype)

    def ranks(self) -> Sequence[int]:
        return self._memory[PARAMETERS].ranks()

    def stand_for(self, part: StatePart) -> Tensor:
        index, name = part
        self._views[part] = self._view(index, self._memory_of(name))
        return self._views[part]

    def hold(self, piece: Piece, part: str, values: Tensor | None) -> Tensor:
        held = self.held(piece, part)
        return held.zero_() if values is None else held.copy_(values)

    def held(self, piece: Piece, part: str) -> Tensor:
        return piece.of(self._views[piece.index, part])

    def copies(self, parts: Collection[StatePart]) -> dict[StatePart, Tensor]:
        return {part: self._views[part].clone() for part in parts}

    def share(self, stepped: Collection[int]) -> None:
        self._sync._engine.meet()

    def fail(self, stepped: Collection[int]) -> None:
        self._memory[PARAMETERS].give_up()

    def end(self) -> None:
        memory = self._memory[PARAMETERS]
        for index, parameter in self._parameters.items():
            if parameter.data_ptr() == self._view(index, memory).data_ptr():
                parameter.data = parameter.detach().clone()
