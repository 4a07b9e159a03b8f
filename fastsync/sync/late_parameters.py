"""Parameters that came into a model too late: an optimizer steps them, and no rank averages their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from .._checks import is_sharded

Named = Iterable[tuple[str, Tensor]]

_averaged_in_calls = WeakIdKeyDictionary()


def note_averaged_in_calls(parameters: Iterable[Tensor]) -> None:
    """Notes parameters whose gradients ``all_reduce_gradients`` averages, without a handle."""
    for parameter in parameters:
        _averaged_in_calls[parameter] = None


class LateParameters:
    """Finds the parameters of a model that an optimizer steps, and that are not among the averaged ones.

    Args:
        ids: the ids of the averaged parameters.
    """

    def __init__(self, ids: frozenset[int]) -> None:
        self._ids = ids
        self._found: WeakKeyDictionary[Optimizer, tuple[list[tuple[int, int, int]], list[tuple[str, ref[Tensor]]]]]
        self._found = WeakKeyDictionary()

    def stepped_by(self, optimizer: Optimizer, model_parameters: Callable[[], Named]) -> Iterator[tuple[str, Tensor]]:
        """Yields late parameters that have a gradient, with names. It searches the model once for each optimizer."""
        # Comparing the ids of all parameters in each step would take long.
        lists = [(id(params), len(params), id(params[0])) for g in optimizer.param_groups if (params := g["params"])]
        known, late = self._found.get(optimizer, (None, []))
        if lists != known:
            late = self._search(optimizer, model_parameters)
            self._found[optimizer] = lists, late
        for name, reference in late:
            parameter = reference()
            if parameter is not None and parameter.requires_grad and parameter.grad is not None:
                yield name, parameter

    def _search(self, optimizer: Optimizer, model_parameters: Callable[[], Named]) -> list[tuple[str, ref[Tensor]]]:
        stepped = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        if self._ids.issuperset(stepped):
            return []
        return [
            (name, ref(parameter))
            for name, parameter in model_parameters()
            if id(parameter) in stepped
            and id(parameter) not in self._ids
            and parameter not in _averaged_in_calls
            and not is_sharded(parameter)  # FSDP averages these
        ]
