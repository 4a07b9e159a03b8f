"""The registry of handles in use: it finds the handles of a module, and the handle that averages a parameter."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor, nn

from .._torch_compat import known_ranks
from .handle import Handle

# A thread may attach while another one steps or detaches. The lock is recursive, because garbage collection may delete
# a handle while it is held.
_lock = threading.RLock()
_in_use: dict[ref[Handle], None] = {}
"""In the order in which ranks attach them: a step waits for other ranks, handle by handle. A WeakSet has no order."""
_kept: WeakKeyDictionary[nn.Module, list[Handle]] = WeakKeyDictionary()
"""The handles that each module keeps alive."""
NOBODY = nn.Module()
"""Stands for a module that keeps handles of loose parameters alive until ``detach()``."""


def begin_use(handle: Handle, modules: Sequence[nn.Module], kept_by: Iterable[nn.Module] = ()) -> None:
    """Lets ``handle_of`` find the handle by its modules.

    The modules of ``kept_by`` keep the handle alive, so the handle must not keep them alive.
    """
    handle._modules = [ref(module) for module in modules]
    with _lock:
        _in_use[ref(handle, lambda gone: _in_use.pop(gone, None))] = None
        for module in kept_by:
            _kept.setdefault(module, []).append(handle)


def end_use(handle: Handle) -> None:
    """Ends what ``begin_use`` began."""
    with _lock:
        _in_use.pop(ref(handle), None)
        for handles in _kept.values():
            if handle in handles:
                handles.remove(handle)


def in_use() -> list[Handle]:
    """Returns the handles in use, in a new list: another thread may attach meanwhile."""
    with _lock:
        return [handle for known in _in_use.copy() if (handle := known()) is not None]


def check_free(named: Mapping[str, Tensor], argument: str) -> None:
    """Raises ValueError where a handle in use averages one of these parameters already."""
    names = {id(parameter): name for name, parameter in named.items()}
    if any(id(parameter) in names for handle in in_use() for parameter in handle._claimed_parameters()):
        gc.collect()  # DDP models are in reference cycles, so one may be garbage that was not collected yet
    for handle in in_use():
        for parameter in handle._claimed_parameters():
            if id(parameter) in names:
                name = names[id(parameter)]
                raise ValueError(f"{argument}: parameter {name} is averaged already, {handle._claimed_by}")


def groups_of(parameters: Iterable[Tensor]) -> set[dist.ProcessGroup]:
    """Returns the groups over which handles in use average gradients of these parameters."""
    ids = set(map(id, parameters))
    return {handle._group for handle in in_use() if any(id(each) in ids for each in handle._claimed_parameters())}


def ids_left_to_each_rank(module: nn.Module, group: dist.ProcessGroup) -> set[int]:
    """Returns the ids of the tensors that handles of this module, or of parts of it, leave to each rank.

    Handles over this group count, if there are any, because handles over several groups may share a module.
    """
    handles = _handles_within(module)
    over_group = [handle for handle in handles if handle._group is group] or handles
    return {id(tensor) for handle in over_group for tensor in handle._left_to_each_rank()}


def check_not_left_to_each_rank(module: nn.Module, group: dist.ProcessGroup, call: str) -> None:
    """Raises ValueError if handles leave tensors of the module to each rank, and ``call`` would make them alike.

    It would if the group has several ranks of such a handle. With one rank of each site it has not.
    """
    names = {id(tensor): name for name, tensor in chain(module.named_parameters(), module.named_buffers())}
    for handle in _handles_within(module):
        ranks = known_ranks(handle._group) & known_ranks(group)
        left = [names[id(tensor)] for tensor in handle._left_to_each_rank() if id(tensor) in names]
        if left and len(ranks) > 1:
            raise ValueError(
                f"model: attach(ignored_states=) leaves {left[0]} to each rank, and {call} over ranks {sorted(ranks)} "
                "would average it; give it a module that has only the others, or a process_group with one rank of each "
                "site"
            )


def _handles_within(module: nn.Module) -> list[Handle]:
    """Returns the handles of this module, or of parts of it."""
    parts = set(module.modules())
    return [handle for handle in in_use() if any(known() in parts for known in handle._modules)]


def handles_of(module: nn.Module) -> list[Handle]:
    """Returns the handles that ``begin_use`` was called with for this module."""
    return [handle for handle in in_use() if any(known() is module for known in handle._modules)]


def handle_of(module: nn.Module) -> Handle:
    """Finds the handle that averages a module's gradients.

    Args:
        module: what ``attach``, ``register_comm_hook`` or ``register_fsdp`` was given, or a part of an attached model
            that has parameters of its own.

    Raises:
        ValueError: the argument is not a module, or it has no handle or several.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
    handles = handles_of(module)
    if len(handles) != 1:
        raise ValueError(
            f"module: {len(handles) or 'no'} handles of fastsync belong to this {type(module).__name__}; pass the "
            "module that attach(), register_comm_hook() or register_fsdp() was given, or keep what they return"
        )
    return handles[0]
