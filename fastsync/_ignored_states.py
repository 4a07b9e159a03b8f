"""``attach(ignored_states=)``: parameters and buffers of a model that are left to each rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

IgnoredStates = nn.Module | Tensor | Iterable[nn.Module | Tensor]
"""Modules, parameters and buffers, one or many."""


def all_states(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Returns the parameters and buffers that a module has now, each under all of its names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def names_of(ignored: IgnoredStates, owner: nn.Module | None) -> frozenset[str]:
    """Returns the names that the owner has for these tensors, and for those of these modules.

    Raises:
        ValueError: one of them is neither a module nor a tensor, or is not the owner's. Or no parameter is left.
    """
    listed = _listed(ignored)
    if owner is None:
        if listed:
            raise ValueError("ignored_states: it is for modules; leave such tensors out of module_or_params")
        return frozenset()
    there = {id(tensor) for _, tensor in all_states(owner)}
    chosen: set[int] = set()
    for each in listed:
        ids = {id(tensor) for _, tensor in all_states(each)} if isinstance(each, nn.Module) else {id(each)}
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
    return frozenset(name for name, tensor in all_states(owner) if id(tensor) in chosen)


def _listed(ignored: Any) -> list[nn.Module | Tensor]:
    if isinstance(ignored, nn.Module | Tensor):
        return [ignored]
    listed = list(ignored) if isinstance(ignored, Iterable) and not isinstance(ignored, str) else [ignored]
    for each in listed:
        if not isinstance(each, nn.Module | Tensor):
            raise ValueError(
                f"ignored_states: expected modules, parameters or buffers of the model, got {each!r:.80}; pass the "
                "objects themselves, as in [model.experts]"
            )
    return listed
