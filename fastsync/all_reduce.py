"""One call in place of concatenate → all_reduce → copy back: averages the gradients there are, without hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from . import _C
from .checks import check_group, resolve_nodes
from .compression import AnyCompression, Auto, Compression, Schedule, as_compression, on_nodes
from .parameters import listed, trainable_parameters
from .stats import GradStats
from .synchronizer import BUCKET_CAP_MB, GradientSynchronizer


def all_reduce_gradients(
    params: nn.Module | Iterable[Tensor] | Tensor,
    compression: AnyCompression = "none",
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> GradStats:
    """Averages the gradients of the parameters over the ranks, now, without hooks. Every rank must call it.

    What trainers write as concatenate → all_reduce → copy back. A parameter without a gradient here counts as zeros
    where another rank has one, and keeps ``grad is None`` where none has.

    The parameters may be others at each call, such as the fast weights of meta-learning. A set of parameters that is
    new, or was not used among the newest 32 sets of the group, makes the ranks agree anew. What error feedback has not
    sent yet stays with the parameter, whatever set it comes in next.

    Args:
        params: the parameters, or their module.
        compression: as in ``attach``.
        process_group: as in ``attach``.

    Returns:
        The statistics of the averaged gradients, among them their norm.

    Raises:
        ValueError: an argument is not what it should be, none of the parameters requires a gradient, or the ranks
            differ in parameters or settings.
        RuntimeError: another rank did not take part in time, or is lost.
    """
    group, ranks_per_node = resolve_nodes(process_group)
    chosen = on_nodes(as_compression(compression), ranks_per_node)
    if not isinstance(params, nn.Module):
        params = listed(params, "params")

    def make_engine() -> _C.Synchronizer:
        named = trainable_parameters(params, argument="params")
        check_group(group, named)
        return GradientSynchronizer(named, chosen, group, ranks_per_node, BUCKET_CAP_MB)._engine

    given = list(params.parameters()) if isinstance(params, nn.Module) else params
    engine = _reducers.setdefault(group, _Reducers()).engine_for(given, chosen, make_engine)
    engine.synchronize()
    return GradStats(engine.grad_stats())


_MAX_REDUCERS = 32  # for one group: more than the models of any one trainer

_Residual = tuple[Tensor, Tensor, Tensor | None]
"""A parameter, and what error feedback has not sent of it, as ``_C.Synchronizer.residuals`` gives them."""


@dataclass(eq=False)
class _Reducer:
    """An engine kept between calls, for its buffers, its scales, its residuals, and because its ranks have agreed."""

    given: tuple[weakref.ref[Tensor], ...]
    compression: Compression | Auto | Schedule
    engine: _C.Synchronizer | None
    left: list[tuple[weakref.ref[Tensor], Tensor, Tensor | None]] = field(default_factory=list)
    """Residuals, once the engine is gone."""

    def serves(self, parameters: Sequence[Tensor], compression: Compression | Auto | Schedule) -> bool:
        return (
            self.engine is not None
            and self.compression == compression
            and len(self.given) == len(parameters)
            # None in the place of a parameter, as of a missing .grad, is not one that is gone.
            and all(
                (p := mine()) is not None and p is theirs for mine, theirs in zip(self.given, parameters, strict=True)
            )
        )

    def can_serve(self) -> bool:
        return all(parameter() is not None for parameter in self.given)

    def let_go(self) -> None:
        """Frees the engine's memory, but for the residuals of parameters that live on."""
        if self.engine is not None:
            self.left = [(weakref.ref(p), own, of_sums) for p, own, of_sums in self.engine.residuals()]
            self.engine = None

    def give_residuals(self, parameters: Sequence[Tensor]) -> list[_Residual]:
        """Hands over those of the parameters, which are no longer here then."""
        theirs: list[_Residual] = []
        rest: list[_Residual] = []
        wanted = {id(parameter) for parameter in parameters}
        for residual in self._residuals():
            (theirs if id(residual[0]) in wanted else rest).append(residual)
        if self.engine is not None:
            self.engine.set_residuals(rest)
        else:
            self.left = [(weakref.ref(p), own, of_sums) for p, own, of_sums in rest]
        return theirs

    def take_residuals(self, residuals: list[_Residual]) -> None:
        assert self.engine is not None
        replaced = {id(parameter) for parameter, _, _ in residuals}
        self.engine.set_residuals([r for r in self.engine.residuals() if id(r[0]) not in replaced] + residuals)

    def _residuals(self) -> list[_Residual]:
        if self.engine is not None:
            return self.engine.residuals()
        alive = ((ref(), own, of_sums) for ref, own, of_sums in self.left)
        return [(p, own, of_sums) for p, own, of_sums in alive if p is not None]


class _Reducers:
    """The engines of one process group.

    Which engine a call gets, and which one is forgotten, follows from the calls alone, for these are alike on all
    ranks: a new engine makes the ranks agree, and a rank must not be alone with that. What still lives is not alike, as
    garbage is collected here and not yet there; it decides about memory only.
    """

    def __init__(self) -> None:
        self._by_use: list[_Reducer] = []  # the newest last
        self._home = WeakTensorKeyDictionary()  # the reducer that has a parameter's residual

    def engine_for(
        self,
        parameters: Sequence[Tensor],
        compression: Compression | Auto | Schedule,
        make_engine: Callable[[], _C.Synchronizer],
    ) -> _C.Synchronizer:
        reducer = next((each for each in reversed(self._by_use) if each.serves(parameters, compression)), None)
        if reducer is None or reducer is not self._by_use[-1]:  # the newest has its own residuals
            if reducer is None:
                engine = make_engine()  # which says what of the parameters is none
                reducer = _Reducer(tuple(weakref.ref(p) for p in parameters), compression, engine)
                self._forget()
            else:
                self._by_use.remove(reducer)
            self._by_use.append(reducer)
            if self._home or _may_keep_residuals(compression):
                self._bring_residuals(reducer, parameters)
        assert reducer.engine is not None
        return reducer.engine

    def _forget(self) -> None:
        """Makes room for one more."""
        while len(self._by_use) >= _MAX_REDUCERS:
            self._by_use.pop(0).let_go()
        for reducer in self._by_use:
            if not reducer.can_serve():
                reducer.let_go()  # it keeps its place among those to be forgotten

    def _bring_residuals(self, reducer: _Reducer, parameters: Sequence[Tensor]) -> None:
        elsewhere: dict[_Reducer, list[Tensor]] = {}
        for parameter in parameters:
            home = self._home.get(parameter, reducer)
            if home is not reducer:
                elsewhere.setdefault(home, []).append(parameter)
            self._home[parameter] = reducer
        brought = [residual for home, theirs in elsewhere.items() for residual in home.give_residuals(theirs)]
        if brought:
            reducer.take_residuals(brought)


def _may_keep_residuals(compression: Compression | Auto | Schedule) -> bool:
    if isinstance(compression, Schedule):
        return any(_may_keep_residuals(phase) for _, phase in compression.phases)
    return bool(compression.allow) if isinstance(compression, Auto) else compression.error_feedback


_reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Reducers] = weakref.WeakKeyDictionary()
