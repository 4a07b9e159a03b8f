"""``attach(ignored_states=)``: parameters and buffers of a model that are left to each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any
from weakref import ref

from torch import Tensor, nn

from .._torch_compat import own_buffers, own_parameters

States = nn.Module | Tensor | Iterable[nn.Module | Tensor]
"""Modules, parameters and buffers, one or many."""


class IgnoredStates:
    """The places in a model whose tensors are left to each rank, whichever tensors are there. It keeps no module alive.

    Args:
        states: the tensors that are there now, and modules of which all are meant.
        owner: the model; None if there is none, and so no states.

    Raises:
        ValueError: one of the states is neither a module nor a tensor, or is not the owner's. Or no parameter is left.
    """

    def __init__(self, states: States = (), owner: nn.Module | None = None) -> None:
        listed = _listed(states)
        if owner is None and listed:
            raise ValueError("ignored_states: it is for modules; leave such tensors out of module_or_params")
        chosen = set() if owner is None else _ids_of(listed, owner)
        self._places = [
            (ref(module), [name for name, tensor in states_of(module, recurse=False) if id(tensor) in chosen])
            for module in (owner.modules() if owner is not None and chosen else ())
        ]

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that are in these places now."""
        alive = [(module, names) for known, names in self._places if (module := known()) is not None]
        return [each for module, names in alive for name, each in states_of(module, recurse=False) if name in names]

    def ids(self) -> set[int]:
        """Returns the ids of these tensors."""
        return {id(tensor) for tensor in self.tensors()}


def states_of(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers that a module and its children have, each under all of its names.

    Modules may have a ``named_parameters`` of their own, as torchrl's losses do. So it is not asked.
    """
    for prefix, each in module.named_modules(remove_duplicate=False) if recurse else [("", module)]:
        for name, tensor in chain(own_parameters(each).items(), own_buffers(each).items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _ids_of(listed: list[nn.Module | Tensor], owner: nn.Module) -> set[int]:
    there = {id(tensor) for _, tensor in states_of(owner)}
    chosen: set[int] = set()
    for each in listed:
        ids = {id(tensor) for _, tensor in states_of(each)} if isinstance(each, nn.Module) else {id(each)}
        if not ids <= there:
            what = type(each).__name__ if isinstance(each, nn.Module) else f"tensor of shape {list(each.shape)}"
            raise ValueError(
                f"ignored_states: this {what} is not in the {type(owner).__name__} that is attached, so it is left "
                "alone anyway; leave it out, or pass the object that the model holds"
            )
        chosen |= ids
    if chosen and all(id(parameter) in chosen for parameter in owner.parameters()):
        raise ValueError(
            f"ignored_states: it has all parameters of the {type(owner).__name__}, so there is nothing to synchronise; "
            "leave some out, or do not attach"
        )
    return chosen


def _listed(states: Any) -> list[nn.Module | Tensor]:
    if isinstance(states, nn.Module | Tensor):
        return [states]
    listed = list(states) if isinstance(states, Iterable) and not isinstance(states, str) else [states]
    for each in listed:
        if not isinstance(each, nn.Module | Tensor):
            raise ValueError(
                f"ignored_states: expected modules, parameters or buffers of the model, got {each!r:.80}; pass the "
                "objects themselves, as in [model.experts]"
            )
    return listed
