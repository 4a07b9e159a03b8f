"""Averages gradients by one call, without hooks. It replaces concatenate → all_reduce → copy back."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .._checks import listed, resolve_group, sparse_weights, trainable_parameters
from ..autotune.choose import in_engine
from ..autotune.measure import candidates_of
from .compression import AnyCompression, Auto, Compression, as_compression
from .late_parameters import note_averaged_in_calls
from .stats import GradStats
from .synchronizer import GradientSynchronizer


def all_reduce_gradients(
    params: nn.Module | Iterable[Tensor] | Tensor,
    compression: AnyCompression = "none",
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> GradStats:
    """Averages the gradients of the parameters over the ranks, now, without hooks. Every rank must call it.

    A parameter without a gradient on this rank counts as zeros if another rank has one. It keeps ``grad is None`` if no
    rank has one. The ranks compare their settings at each new compression, and at each set of parameters that is not
    among the newest 32 of the group. Residuals of error feedback stay with the set. If no rank has any gradient in the
    first call for a set, rank 0 warns.

    Args:
        params: the parameters, or their module. They may differ from call to call. Of sparse gradients only the module
            tells, see ``attach``.
        compression: as in ``attach``.
        process_group: as in ``attach``.

    Returns:
        The statistics of the averaged gradients, among them their norm.

    Raises:
        ValueError: an argument is refused, none of the parameters requires a gradient, or the ranks differ in
            parameters or settings.
        RuntimeError: another rank did not take part in time, or is lost.
    """
    group, chosen = resolve_group(process_group), as_compression(compression)
    if not isinstance(params, nn.Module):
        params = listed(params, "params")
    given = list(params.parameters()) if isinstance(params, nn.Module) else params
    sparse = sparse_weights(params)
    known = _engines.setdefault(group, [])
    found = next((each for each in reversed(known) if each.serves(given) and each.sparse == sparse), None)
    is_first = found is None
    if found is None:
        named = trainable_parameters(params, "params")
        engine = GradientSynchronizer(named, chosen, group, sparse=sparse)._engine
        # A new engine makes all ranks agree, so all ranks must forget the same engines. The order of calls decides
        # which, because it is equal on all ranks. Lifetimes of parameters differ, because garbage is collected at
        # different times. So they only decide when memory is freed.
        del known[: max(0, len(known) + 1 - MAX_ENGINES)]
        for each in known:
            each.free_if_useless()
        note_averaged_in_calls(given)
        found = _Kept(tuple(weakref.ref(parameter) for parameter in given), sparse, chosen, engine)
    else:
        known.remove(found)
    known.append(found)
    assert found.engine is not None
    if found.compression != chosen:
        candidates = candidates_of(chosen, group, trainable_parameters(params, "params"))
        found.engine.set_compressions(in_engine(candidates))
        found.compression = chosen
    found.engine.synchronize()
    if is_first and group.rank() == 0 and all(parameter.grad is None for parameter in given):
        # Later on it may be meant: a step in which no rank has used any of them.
        warnings.warn(
            f"fastsync.all_reduce_gradients: no rank has a gradient of any of these {len(given)} parameters, so there "
            "was nothing to average. Call it after backward(), and before the optimizer steps and zero_grad()",
            stacklevel=2,
        )
    return GradStats(found.engine.grad_stats())


MAX_ENGINES = 32  # for one group: more than the models of any one trainer


@dataclass(eq=False)
class _Kept:
    """An engine kept between calls: it has buffers, scales and residuals, and its ranks have agreed."""

    given: tuple[weakref.ref[Tensor], ...]
    sparse: frozenset[int]
    """The ids of those with sparse gradients."""
    compression: Compression | Auto
    engine: _C.Synchronizer | None

    def serves(self, parameters: Sequence[Tensor]) -> bool:
        # A weak reference to a deleted parameter returns None, which a caller may also have passed instead of a tensor.
        return (
            self.engine is not None
            and len(self.given) == len(parameters)
            and all(
                (p := ref()) is not None and p is theirs for ref, theirs in zip(self.given, parameters, strict=True)
            )
        )

    def free_if_useless(self) -> None:
        if any(ref() is None for ref in self.given):
            self.engine = None  # the entry stays in the list, so that all ranks forget in the same order


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Kept]] = weakref.WeakKeyDictionary()
"""The engines of each group, in the order of their newest calls."""
