"""One call in place of concatenate → all_reduce → copy back: averages the gradients there are, without hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from ._checks import listed, resolve_group, trainable_parameters
from ._late_parameters import note_averaged_in_calls
from .attach import GradientSynchronizer
from .autotune.choose import in_engine
from .autotune.measure import candidates_of
from .compression import AnyCompression, Auto, Compression, as_compression
from .stats import GradStats


def all_reduce_gradients(
    params: nn.Module | Iterable[Tensor] | Tensor,
    compression: AnyCompression = "none",
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> GradStats:
    """Averages the gradients of the parameters over the ranks, now, without hooks. Every rank must call it.

    A parameter without a gradient here counts as zeros where another rank has one, and keeps ``grad is None`` where
    none has. The ranks agree anew at each new compression, and at each set of parameters that is not among the newest
    32 of the group. What error feedback has not sent yet stays with the set.

    Args:
        params: the parameters, or their module. They may be others at each call.
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
        params = listed(params)
    given = list(params.parameters()) if isinstance(params, nn.Module) else params
    known = _engines.setdefault(group, [])
    found = next((each for each in reversed(known) if each.serves(given)), None)
    if found is None:
        named = trainable_parameters(params, "params")
        engine = GradientSynchronizer(named, chosen, group)._engine
        # The calls alone decide which engine is forgotten, because they are alike on all ranks: a new engine makes the
        # ranks agree, and a rank must not be alone with that. Lifetimes are not alike, as garbage is collected here and
        # not yet there; they decide about memory only.
        del known[: max(0, len(known) + 1 - MAX_ENGINES)]
        for each in known:
            each.free_if_useless()
        note_averaged_in_calls(given)
        found = _Kept(tuple(weakref.ref(parameter) for parameter in given), chosen, engine)
    else:
        known.remove(found)
    known.append(found)
    assert found.engine is not None
    if found.compression != chosen:
        candidates = candidates_of(chosen, group, trainable_parameters(params, "params"))
        found.engine.set_compressions(in_engine(candidates))
        found.compression = chosen
    found.engine.synchronize()
    return GradStats(found.engine.grad_stats())


MAX_ENGINES = 32  # for one group: more than the models of any one trainer


@dataclass(eq=False)
class _Kept:
    """An engine kept between calls, for its buffers, its scales, its residuals, and because its ranks have agreed."""

    given: tuple[weakref.ref[Tensor], ...]
    compression: Compression | Auto
    engine: _C.Synchronizer | None

    def serves(self, parameters: Sequence[Tensor]) -> bool:
        # None in the place of a parameter, as of a missing .grad, is not one that is gone.
        return (
            self.engine is not None
            and len(self.given) == len(parameters)
            and all(
                (p := ref()) is not None and p is theirs for ref, theirs in zip(self.given, parameters, strict=True)
            )
        )

    def free_if_useless(self) -> None:
        if any(ref() is None for ref in self.given):
            self.engine = None  # it keeps its place among those to be forgotten


_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Kept]] = weakref.WeakKeyDictionary()
"""Of each group, the newest last."""
