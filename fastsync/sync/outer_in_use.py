"""The registry of ``DiLoCo`` objects: it refuses what would change the same weights in another way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from torch import Tensor

NO_JOIN = (
    "A rank that has run out of batches takes no steps, so it would miss means between sites that others wait for. Let "
    "the ranks of a site take equally many steps, without join(); sites may take different numbers"
)

# Garbage collection may delete an owner while the lock is held.
_lock = threading.RLock()
_ids: WeakKeyDictionary[object, frozenset[int]] = WeakKeyDictionary()
"""The ids of the weights of each object that lives."""
_in_block: WeakKeyDictionary[object, None] = WeakKeyDictionary()


def begin_outer_use(owner: object, weights: Iterable[Tensor]) -> None:
    """Lets ``name_of_outer`` find the owner by its weights while it lives."""
    with _lock:
        _ids[owner] = frozenset(map(id, weights))


def set_in_block(owner: object, is_in_block: bool) -> None:
    """Notes that a block of the owner has begun, or has ended."""
    with _lock:
        if is_in_block:
            _in_block[owner] = None
        else:
            _in_block.pop(owner, None)


def name_of_outer(weights: Iterable[Tensor], *, in_block: bool = False) -> str | None:
    """Returns the class of an object that averages one of these weights between sites, or that is in its block."""
    ids = frozenset(map(id, weights))

    def found() -> list[str]:
        with _lock:
            owners = list(_in_block if in_block else _ids)
            return [type(owner).__name__ for owner in owners if not ids.isdisjoint(_ids[owner])]

    if not in_block and found():
        gc.collect()  # one may be garbage that was not collected yet
    return next(iter(found()), None)


def check_no_outer(weights: Iterable[Tensor], argument: str, why: str) -> None:
    """Raises ValueError if a ``DiLoCo`` that lives averages one of these weights between sites."""
    if name := name_of_outer(weights):
        raise ValueError(f"{argument}: a {name} averages these weights between sites, and {why}")
