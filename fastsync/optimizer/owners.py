"""Which rank steps which tensor, where a step needs whole ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

MOST_BYTES = 25 * 2**20
"""How much of a rank's new values travels at a time, beside a tensor that is larger."""


def cost(tensor: Tensor) -> int:
    """Returns how much work a step is, as that of a matrix is to be multiplied by its own transpose."""
    rows = tensor.shape[0] if tensor.dim() > 1 else 1
    shorter, longer = sorted((rows, tensor.numel() // rows))
    return longer * shorter**2


def deal(tensors: Mapping[int, Tensor], num_ranks: int) -> dict[int, int]:
    """Returns the rank that steps each tensor, by its index: the next costly one goes to who has the least so far."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owner_of = {}
    for index in sorted(tensors, key=lambda index: (-cost(tensors[index]), index)):
        load, rank = loads[0]
        owner_of[index] = rank
        heapq.heapreplace(loads, (load + cost(tensors[index]), rank))
    return owner_of


def in_turns(
    owner_of: Mapping[int, int], num_ranks: int, num_bytes: Mapping[int, int]
) -> Iterator[Sequence[Sequence[int]]]:
    """Yields what ranks send at a time: for each rank some of its tensors, of about as many bytes as the others'."""
    left = [[index for index in sorted(owner_of) if owner_of[index] == rank] for rank in range(num_ranks)]
    while any(left):
        turn: list[list[int]] = []
        for indices in left:
            taken: list[int] = []
            while indices and (not taken or sum(num_bytes[i] for i in [*taken, indices[0]]) <= MOST_BYTES):
                taken.append(indices.pop(0))
            turn.append(taken)
        yield turn
