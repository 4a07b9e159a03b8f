"""The base classes of all handles: statistics, state, and the compression."""

from __future__ import annotations

import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from ..autotune.choose import UNTRIED, Candidate, explain, in_engine
from ..autotune.measure import candidates_of
from .compression import AnyCompression, Auto, Compression, as_compression
from .stats import BucketStats, GradStats, SyncStats


def own_rank() -> int:
    """Returns this process's rank in the default group; 0 if there is no such group."""
    return dist.get_rank() if dist.is_initialized() else 0


class SyncHandle:
    """Statistics of an engine."""

    _engine: _C.HookState | _C.Synchronizer | _C.ShardedState

    def grad_stats(self) -> GradStats:
        """Returns statistics of the newest backward that was synchronised.

        Under DDP at full width the first call reads the means. From the next step on they are taken on the way.

        Raises:
            RuntimeError: nothing was synchronised yet; or it is the first call, and the means have changed since.
        """
        return GradStats(self._engine.grad_stats())

    def stats(self) -> SyncStats:
        """Returns what synchronisation has cost so far; on a GPU with an estimate for steps that are under way."""
        stats = self._engine.stats()
        return SyncStats(**stats | {"buckets": tuple(BucketStats(**bucket) for bucket in stats["buckets"])})


class Handle(SyncHandle, ABC):
    """What ``handle_of`` finds: a handle that averages the gradients of modules."""

    _group: dist.ProcessGroup
    _modules: Sequence[ref[nn.Module]] = ()
    """The modules that ``handle_of`` finds the handle by."""
    _claimed_by: ClassVar[str]
    """Ends the error that a parameter is averaged already: it names the entry point, and the way out."""

    @property
    @abstractmethod
    def compression(self) -> Any:
        """The compression. It may be set between steps."""

    @compression.setter
    def compression(self, compression: Any) -> None: ...

    @abstractmethod
    def explain(self) -> str:
        """Says which compression travels in the next step, and why it is chosen."""

    @abstractmethod
    def parameters(self) -> Sequence[Tensor]:
        """Returns the parameters whose gradients are averaged."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if it had not stopped."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` returned."""

    @abstractmethod
    def detach(self) -> None:
        """Gives the model back: from now on this engine averages nothing of it."""

    @abstractmethod
    def _feeds_back(self) -> bool:
        """Whether there may be error feedback, whose residuals are each rank's own."""

    def _claimed_parameters(self) -> Iterable[Tensor]:
        """Returns the parameters that no other handle may average."""
        return ()

    def _left_to_each_rank(self) -> Iterable[Tensor]:
        """Returns the parameters and buffers of the modules that ranks may have different ones of."""
        return ()


class GradientHandle(Handle):
    """A handle that knows the parameters whose gradients it averages, and the compression of each bucket."""

    _compression: Compression | Auto
    _candidates: tuple[Candidate, ...]
    """The compressions that buckets may be sent with. Equal on all ranks."""
    _sparse: frozenset[str] = frozenset()
    """The names of the parameters whose gradients are sparse. They have no residuals and no factors."""
    _argument = "compression"
    """What errors call the compression that was given."""

    def __repr__(self) -> str:
        # The engine may be waiting for other ranks in another thread, so it is not asked anything here.
        numels = [parameter.numel() for parameter in self.parameters()]
        return (
            f"{type(self).__name__}({len(numels)} parameters with {sum(numels):,} values, "
            f"compression: {self._compression}, {self._group.size()} ranks)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if it had not stopped.

        The step, each parameter's fp16 scale and its factor of lowrank are equal on all ranks. The residuals of error
        feedback, which are not sent yet, are each rank's own, under names such as ``layer.weight of rank 1``. With
        error feedback save the states of all ranks: each in a file of its own, or all with
        ``torch.distributed.checkpoint``. Residuals of zeros are left out, except before the first sync:
        ``torch.distributed.checkpoint`` then has tensors to load into, but scales begin anew. It waits for the device.
        """
        named = self._named_parameters()
        rows = self._engine.saved()
        scale_of = {id(p): scale for p, scale, _, _ in rows if scale is not None}
        residual_of = {id(p): residual for p, _, residual, _ in rows if residual is not None and residual.any()}
        factor_of = {id(p): factor for p, _, _, factor in rows if factor is not None}
        is_new = self._engine.num_steps() == self._engine.step() == 0
        if is_new and not residual_of and self._feeds_back():
            trained = (parameter for parameter in self._trained_densely() if parameter.numel() > 0)
            residual_of = {id(parameter): _no_residual(parameter) for parameter in trained}
        if is_new and not factor_of:
            factor_of = self._first_factors()
        state = {
            "step": self._engine.step(),
            "scales": {name: scale_of[id(p)] for name, p in named.items() if id(p) in scale_of},
            "residuals": {self._own(name): residual_of[id(p)] for name, p in named.items() if id(p) in residual_of},
        }
        # Without lowrank there is no entry, as in the states of versions that did not have it.
        factors = {name: factor_of[id(p)] for name, p in named.items() if id(p) in factor_of}
        return state | {"factors": factors} if factors else state

    def _feeds_back(self) -> bool:
        return any(each.compression.error_feedback for each in self._candidates)

    def _first_factors(self) -> dict[int, Tensor]:
        """Returns the factors that lowrank begins with, by the ids of their parameters."""
        rank = self._candidates[0].compression.rank
        if rank is None:
            return {}
        first = {id(parameter): _C.first_factor(parameter, rank) for parameter in self._trained_densely()}
        return {key: factor for key, factor in first.items() if factor is not None}

    def _trained_densely(self) -> list[Tensor]:
        named = self._named_parameters().items()
        return [parameter for name, parameter in named if parameter.requires_grad and name not in self._sparse]

    def _own(self, name: str) -> str:
        """Names an entry of the state that each rank has for itself."""
        return f"{name} of rank {own_rank()}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` returned. Call it on every rank, with the states of one step.

        Each rank takes its own residuals. If the state has residuals of other ranks only, it warns and begins with
        zeros. With another number of ranks leave residuals out: ``state_dict["residuals"] = {}``.

        Raises:
            ValueError: the state is not an engine's, or not this model's.
        """
        named = self._named_parameters()
        scales = state_dict.get("scales") if isinstance(state_dict, dict) else None
        if not isinstance(scales, dict):
            raise ValueError(
                f"state_dict: expected what state_dict() returns, a dict with 'scales', got {state_dict!r:.80}"
            )
        given, own = state_dict.get("residuals") or {}, {self._own(name): name for name in named}
        factors = state_dict.get("factors") or {}
        for name in (*scales, *factors, *given):
            if name not in own and re.sub(r" of rank \d+$", "", name) not in named:
                raise ValueError(f"state_dict: the model has no parameter named {name!r}; is it another model's state?")
        residuals = {own[key]: residual for key, residual in given.items() if key in own}
        if given and not residuals:
            warnings.warn(
                f"fastsync: the state has residuals of other ranks (such as {next(iter(given))!r}) and none of rank "
                f"{own_rank()}, which begins with zeros; to keep them, save the state of every rank",
                stacklevel=2,
            )
        for name, residual in residuals.items():
            if not _is_residual(residual, named[name]):
                raise ValueError(
                    f"state_dict: the residual of {name!r} has another size or dtype than the parameter, which has "
                    f"{named[name].numel()} values; is it another model's state?"
                )
        self._engine.set_step(state_dict.get("step", 0))
        saved = dict.fromkeys((*scales, *residuals, *factors))
        self._engine.set_saved(
            [(named[name], scales.get(name), residuals.get(name), factors.get(name)) for name in saved]
        )

    @property
    def compression(self) -> Compression | Auto:
        """The compression. It may be set between steps, to an object or a word, before the same step on all ranks.

        If one rank sets it alone, the next step raises ``RuntimeError`` on every rank.
        """
        return self._compression

    @compression.setter
    def compression(self, compression: AnyCompression) -> None:
        self._follow(as_compression(compression, self._argument))

    def explain(self) -> str:
        """Returns a line for each run of equal buckets: the compression of the next step, and why it is chosen.

        Raises:
            RuntimeError: no step was synchronised yet. The first one makes the buckets.
        """
        stats = self.stats()
        if not stats.buckets:
            raise RuntimeError(
                "explain: buckets are made when the first backward is synchronised; until then, "
                "fastsync.autotune.measure_group().choose(numel) says which compression a bucket of numel values gets"
            )
        dense = [bucket.numel for bucket in stats.buckets if not bucket.is_sparse]
        text = explain(self._candidates, dense, stats.describe_transport())
        if num_sparse := len(stats.buckets) - len(dense):
            what = "1 sparse gradient" if num_sparse == 1 else f"{num_sparse} sparse gradients"
            text += f"\n{what}: by the process group, as rows; in 16 bits with bf16 and fp16"
        on_gpu = any(parameter.is_cuda for parameter in self._planned_parameters().values())
        is_untried = len(self._candidates) > 1 and on_gpu
        return f"{text}\n{UNTRIED}" if is_untried else text

    def _follow(self, compression: Compression | Auto) -> None:
        named, moved_to = self._planned_parameters(), self._device_of_gradients()
        for device in {parameter.device for parameter in named.values()} if moved_to is None else {moved_to}:
            _C.check_device(self._group, device)
            warn_of_generic_kernels(device.type)
        candidates = candidates_of(compression, self._group, named, moved_to)
        self._engine.set_compressions(in_engine(candidates))
        self._candidates, self._compression = candidates, compression

    @abstractmethod
    def _named_parameters(self) -> Mapping[str, Tensor]: ...

    def _device_of_gradients(self) -> torch.device | None:
        """Returns the device where gradients are sent, if that is not the one of the parameters."""
        return None

    def _planned_parameters(self) -> Mapping[str, Tensor]:
        """Returns the parameters whose gradients have to be sent."""
        return self._named_parameters()


def _no_residual(parameter: Tensor) -> Tensor:
    is_wide = (parameter.grad_dtype or parameter.dtype) == torch.float64
    dtype = torch.float64 if is_wide else torch.float32
    return torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)


def _is_residual(residual: object, parameter: Tensor) -> bool:
    zeros = _no_residual(parameter)
    return isinstance(residual, Tensor) and residual.dtype == zeros.dtype and residual.shape == zeros.shape


@cache
def warn_of_generic_kernels(kind: str) -> None:
    """Warns, once for each type of device, if torch's own operations pack its gradients and FASTSYNC_KERNELS does not
    ask for that.

    Raises ValueError where FASTSYNC_KERNELS is neither "auto" nor "aten".
    """
    if _C.kernels(kind) == "generic" and os.environ.get("FASTSYNC_KERNELS") != "aten":
        warnings.warn(
            f"fastsync: gradients on {kind} are packed by torch's own operations, which take more launches and more "
            "memory than fused kernels; `fastsync doctor` tells for which devices kernels are built",
            stacklevel=5,  # where attach was called
        )
