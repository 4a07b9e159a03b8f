"""The registry of ``Elastic`` objects: it refuses what would change the same weights in another way."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor


class _Elastic(Protocol):
    @property
    def has_ended(self) -> bool: ...


_ids: WeakKeyDictionary[_Elastic, frozenset[int]] = WeakKeyDictionary()
"""The ids of the weights that each object trains."""


def begin_elastic_use(owner: _Elastic, ids: frozenset[int]) -> None:
    """Lets ``is_in_elastic`` find the owner by the ids of its weights while it lives."""
    _ids[owner] = ids


def is_in_elastic(weights: Iterable[Tensor]) -> bool:
    """Whether an ``Elastic`` whose steps have not ended trains one of these weights."""
    ids = frozenset(map(id, weights))

    def found() -> bool:
        return any(not owner.has_ended and not ids.isdisjoint(of_owner) for owner, of_owner in list(_ids.items()))

    if not found():
        return False
    gc.collect()  # it is in reference cycles, so it may be garbage that was not collected yet
    return found()


def check_no_elastic(weights: Iterable[Tensor], argument: str, kind: str) -> None:
    """Raises ValueError if an ``Elastic`` whose steps have not ended trains one of these weights."""
    if is_in_elastic(weights):
        raise ValueError(
            f"{argument}: an Elastic trains these weights, and its steps have not ended. A lost or new rank would "
            f"be one of Elastic's and none of the {kind}'s. Leave Elastic out, as {kind} goes on without lost sites"
        )
