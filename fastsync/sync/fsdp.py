"""Models under ``fully_shard``: gradients and parameters go through the engine, and shards between replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._checks import resolve_group
from .compression import AnyCompression, Auto, Compression, as_compression
from .fsdp_gather import EngineAllGather, ShardedParameters, for_all_gather
from .fsdp_gradients import EngineReduceScatter, ShardedGradients, check_replicas, for_reduce_scatter
from .fsdp_units import PYTORCH, Unit, shard_group_of, units_of, units_to_serve
from .handle import Handle
from .handles_in_use import begin_use, end_use
from .stats import NUM_SATURATED, BucketStats, GradStats, SyncStats


@dataclass(frozen=True, repr=False, kw_only=True)
class ShardedStats(SyncStats):
    """The cost of synchronisation of a model under ``fully_shard`` on this rank.

    Its own figures are of gradients: of their way to the shards, and between replicas. ``parameter_wire_bytes`` are of
    all gathers. On CPUs backward waits for each module's reduce-scatter, so all of its time is exposed;
    ``exposed_time`` counts only the last one.
    """

    gradients: SyncStats | None
    """Of the reduce-scatters; None if they are PyTorch's."""
    parameters: dict[str, BucketStats]
    """Of the gathers, by the names of modules. The model itself has the name ``""``. ``numel`` is how many values a
    gather makes, with those that pad uneven shards. Times on a GPU are estimates. Empty if PyTorch gathers."""
    replicas: SyncStats | None
    """Of the all-reduces between replicas; None if there are none of the engine's."""


class ShardedCompression:
    """The compressions of a model under ``fully_shard``, as in ``handle.compression.parameters = "none"``.

    Each may be set between steps, to an object or a word, before the same step on all ranks. If one rank sets it alone,
    the next step raises ``RuntimeError`` on every rank. What the engine does not send is None, and cannot be set.
    """

    def __init__(
        self,
        gradients: ShardedGradients | None,
        parameters: ShardedParameters | None,
        replicas: ShardedGradients | None,
    ) -> None:
        self._parts = {"gradients": gradients, "parameters": parameters, "replicas": replicas}

    def __repr__(self) -> str:
        known = (f"{name}={str(part.compression)!r}" for name, part in self._parts.items() if part is not None)
        return f"{type(self).__name__}({', '.join(known)})"

    @property
    def gradients(self) -> Compression | None:
        """Of gradients on their way to the shards."""
        return self._get("gradients")  # type: ignore[return-value]  # a reduce-scatter has no Auto

    @gradients.setter
    def gradients(self, compression: AnyCompression) -> None:
        self._set("gradients", compression)

    @property
    def parameters(self) -> Compression | None:
        """Of parameters that are gathered."""
        return self._get("parameters")  # type: ignore[return-value]  # nor has an all-gather

    @parameters.setter
    def parameters(self, compression: AnyCompression) -> None:
        self._set("parameters", compression)

    @property
    def replicas(self) -> Compression | Auto | None:
        """Of shards' gradients between replicas."""
        return self._get("replicas")

    @replicas.setter
    def replicas(self, compression: AnyCompression) -> None:
        self._set("replicas", compression)

    def _get(self, name: str) -> Compression | Auto | None:
        part = self._parts[name]
        return None if part is None else part.compression

    def _set(self, name: str, compression: AnyCompression) -> None:
        part = self._parts[name]
        if part is None:
            raise ValueError(
                f"{name}: register_fsdp has left them to PyTorch, so they have no compression; call detach(), and "
                f"register_fsdp again with {'process_group' if name == 'replicas' else name}"
            )
        part.compression = compression


class ShardedHandle(Handle):
    """The handle that ``register_fsdp`` returns.

    A name in the state has module, number of values that are sent together, and rank, such as ``layers.0[4096] of rank
    1``. Save the state of each rank. It fits the same number of ranks only. Residuals are as large as all of the
    model's gradients, not as their shards. With error feedback the same parameters of a module must have gradients in
    each step, because PyTorch does not send the others. ``set_reduce_scatter_unused_params(True)`` of the module sends
    zeros for them.

    A new handle has no tensors that ``torch.distributed.checkpoint`` could load into. So give it the bytes of
    ``torch.save``, under one key for each rank.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: ShardedGradients | None,
        parameters: ShardedParameters | None,
        replicas: ShardedGradients | None,
    ) -> None:
        self._units = units
        self._gradients, self._parameters, self._replicas = gradients, parameters, replicas
        self._group = next(part._group for part in self._parts())
        self._compression = ShardedCompression(gradients, parameters, replicas)
        for part in self._parts():
            part.owner = self
            part.begin()

    def __repr__(self) -> str:
        what = repr(self._compression).partition("(")[2]
        return f"{type(self).__name__}({len(self._units)} modules, {self._group.size()} ranks, {what}"

    @property
    def compression(self) -> ShardedCompression:
        """The compressions, of which each may be set: ``.gradients``, ``.parameters`` and ``.replicas``."""
        return self._compression

    @compression.setter
    def compression(self, compression: object) -> None:
        raise ValueError(
            f"compression: a model under fully_shard has several, got {compression!r}; set .compression.gradients, "
            ".compression.parameters or .compression.replicas"
        )

    def stats(self) -> ShardedStats:
        """Returns what synchronisation has cost so far; on a GPU with an estimate for steps that are under way."""
        gradients, replicas = (None if part is None else part.stats() for part in (self._gradients, self._replicas))
        parameters = {} if self._parameters is None else self._parameters.stats()
        of_parameters = sum(stats.wire_bytes for stats in parameters.values())
        both = _added(gradients, replicas)
        parts: dict[str, Any] = {"gradients": gradients, "parameters": parameters, "replicas": replicas}
        return ShardedStats(**vars(both) | {"parameter_wire_bytes": of_parameters} | parts)

    def grad_stats(self) -> GradStats:
        """Returns statistics of the newest backward that was synchronised: of this rank's shards.

        Raises:
            RuntimeError: there was none yet, or no gradients go through the engine.
        """
        through = [part.grad_stats() for part in self._sent()]
        if not through:
            raise RuntimeError("grad_stats: register_fsdp has left the gradients to PyTorch")
        newest = through[-1]._sums.clone()  # those of replicas come last
        newest[NUM_SATURATED] = sum(stats._sums[NUM_SATURATED] for stats in through)
        return GradStats(newest)

    def explain(self) -> str:
        """Returns the compressions of the next step, and why they are chosen.

        Raises:
            RuntimeError: no step was synchronised yet.
        """
        lines = [f"{part._argument}: {part.explain()}" for part in self._sent()]
        if self._parameters is not None:
            lines.append(f"parameters: {self._parameters.compression.wire}; given")
        return "\n".join(lines)

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters whose gradients are synchronised."""
        return [parameter for unit in self._units for parameter in unit.parameters() if parameter.requires_grad]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if it had not stopped. See ``GradientHandle.state_dict``.

        Names of what travels between replicas begin with ``replicas:``, and a space.
        """
        state: dict[str, Any] = {"step": 0, "scales": {}, "residuals": {}}
        for part in self._sent():
            saved = part.state_dict()
            state["step"] = saved["step"]
            for kind in ("scales", "residuals"):
                state[kind] |= {self._prefix(part) + name: tensor for name, tensor in saved[kind].items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` has returned on the same rank. See ``GradientHandle.load_state_dict``.

        Raises:
            ValueError: the state is not an engine's, or not this model's, or has parts that this handle has not.
        """
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("scales"), dict):
            raise ValueError(
                f"state_dict: expected what state_dict() returns, a dict with 'scales', got {state_dict!r:.80}"
            )
        kinds = {kind: dict(state_dict.get(kind) or {}) for kind in ("scales", "residuals")}
        for part in reversed(self._sent()):  # what has no prefix is left for the gradients
            prefix = self._prefix(part)
            found = {kind: [name for name in named if name.startswith(prefix)] for kind, named in kinds.items()}
            own = {kind: {name.removeprefix(prefix): kinds[kind].pop(name) for name in found[kind]} for kind in kinds}
            part.load_state_dict({"step": state_dict.get("step", 0), **own})
        if left := [name for named in kinds.values() for name in named]:
            raise ValueError(
                f"state_dict: {left[0]!r} belongs to gradients that register_fsdp has left to PyTorch here; pass the "
                "arguments that the handle of this state had"
            )

    def _prefix(self, part: ShardedGradients) -> str:
        return "" if part is self._gradients else "replicas: "

    def _feeds_back(self) -> bool:
        return any(part._feeds_back() for part in self._sent())

    def detach(self) -> None:
        """Puts PyTorch's own functions back. Call it between two steps, on every rank.

        What ``set_custom_reduce_scatter`` or ``set_custom_all_gather`` has put in the engine's place since stays.
        """
        for part in self._parts():
            part.detach()
        end_use(self)

    def _parts(self) -> Iterator[ShardedGradients | ShardedParameters]:
        yield from (part for part in (self._gradients, self._parameters, self._replicas) if part is not None)

    def _sent(self) -> list[ShardedGradients]:
        """Returns the parts that gradients go through, in this order."""
        return [part for part in (self._gradients, self._replicas) if part is not None]


def register_fsdp(
    model: nn.Module,
    *,
    gradients: AnyCompression = "none",
    parameters: AnyCompression = "none",
    replicas: AnyCompression = "none",
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> ShardedHandle:
    """Sends what a model under ``fully_shard`` sends through the engine: any wire, sums in float32.

    It serves every module of the model that went through ``fully_shard``, however deep, except those of earlier calls.
    ``fully_shard`` still handles mixed precision, accumulation, divide factors and HSDP. Call it on every rank, after
    the last ``fully_shard``.

    **Gradients.** Each rank encodes its gradients once, sends every rank its shard, and adds what it gets in float32.
    So the error does not grow with the number of ranks.

    **Parameters.** They are gathered in forward and backward. Each rank encodes its shards once, and all ranks decode
    the same bytes, also their own. So all ranks compute with the same parameters. With a wire other than ``"none"``
    these are rounded: forward and backward see the rounded ones. The optimizer steps the shards, which stay exact, as
    does ``state_dict()``. Each parameter of a rank's shard begins blocks of its own. On CPUs a gather that
    ``fully_shard`` prefetches travels while it computes, and ranks of one host share memory.

    **Replicas.** With ``process_group`` the shards' gradients are averaged over replicas, too: HSDP with only the slow
    hop compressed. Shard the model over the ranks of a node alone, as in ``fully_shard(model, mesh=mesh["shard"])``, or
    use ``replicate`` with a mesh of a single rank. Replicas have to begin with the same parameters. With
    ``set_requires_gradient_sync`` nothing is sent before the last backward.

    Args:
        model: the model, or a part of it.
        gradients: as in ``attach``, but neither ``"auto"`` nor with ``algorithm`` or ``ranks_per_node``.
            ``"pytorch"`` leaves them to PyTorch's reduce-scatter.
        parameters: the wire alone. ``"none"`` gives the bits that PyTorch gives. ``"pytorch"`` leaves them to PyTorch's
            all-gather.
        replicas: between replicas, as in ``attach``. It needs ``process_group``.
        process_group: the ranks that hold the same shards, one of each replica: a group or a one-dimensional
            ``DeviceMesh``, as in ``mesh["replicate"]``. None leaves replicas to PyTorch.

    Returns:
        The handle: statistics, the norm over this rank's shards, state, and the compressions, which may be set later.

    Raises:
        ValueError: an argument is refused, no module went through ``fully_shard``, all are served already, or the ranks
            differ. Or a module has several groups of parameters, or communicates by a function of the user's. Or it is
            sharded over another process group than the others, or not at all without ``process_group``. Or
            ``process_group`` has another rank of the same replica.
        RuntimeError: in the first backward, if another module went through ``fully_shard`` after this call.
    """
    reduces = None if _is_left(gradients) else for_reduce_scatter(gradients)
    gathers = None if _is_left(parameters) else for_all_gather(parameters)
    averages = as_compression(replicas, "replicas")
    if process_group is None and averages != Compression():
        raise ValueError(
            f"process_group: replicas={replicas!r} needs the ranks that hold the same shards, as in mesh['replicate']"
        )
    if reduces is None and gathers is None and process_group is None:
        raise ValueError(
            f"gradients: {PYTORCH!r} here and for parameters leaves nothing to the engine; name a compression for one "
            "of them, or pass process_group"
        )
    units = units_of(model)
    group = None if process_group is None else resolve_group(process_group)
    if group is not None:
        check_replicas(units, group)
    sharded = _sharded(units, is_averaged=group is not None)
    scattered = units_to_serve(sharded, EngineReduceScatter, "gradients") if reduces else []
    gathered = units_to_serve(sharded, EngineAllGather, "parameters") if gathers else []
    # Whatever one rank alone could get wrong was found by now. From here on the ranks talk.
    of_gradients = of_parameters = of_replicas = None
    if reduces and scattered:
        shard_group = shard_group_of(scattered)
        assert shard_group is not None
        of_gradients = ShardedGradients(model, scattered, reduces, shard_group, scatters=True)
    if gathers and gathered:
        of_parameters = ShardedParameters(gathered, gathers)
    if group is not None:
        of_replicas = ShardedGradients(model, units, averages, group, scatters=False)
    served = units if of_replicas else [unit for unit in units if unit in scattered or unit in gathered]
    handle = ShardedHandle(served, of_gradients, of_parameters, of_replicas)
    begin_use(handle, [model])
    return handle


def _is_left(compression: object) -> bool:
    return isinstance(compression, str) and compression == PYTORCH


def _sharded(units: Sequence[Unit], *, is_averaged: bool) -> list[Unit]:
    """Returns the units that are sharded. Raises ValueError if another one is averaged by nobody."""
    sharded = [unit for unit in units if unit.shard_group is not None]
    if len(sharded) < len(units) and not is_averaged:
        alone = next(unit for unit in units if unit.shard_group is None)
        raise ValueError(
            f"model: {alone} is replicated and not sharded, so it has no reduce-scatter and no all-gather; pass the "
            "ranks of its replicas as process_group, or use DistributedDataParallel with fastsync.register_comm_hook, "
            "or fastsync.attach"
        )
    return sharded


def _added(gradients: SyncStats | None, replicas: SyncStats | None) -> SyncStats:
    """Returns the cost of both ways of a gradient."""
    if gradients is None or replicas is None:
        return gradients or replicas or _NO_COST
    sums = {name: getattr(gradients, name) + getattr(replicas, name) for name in _SUMMED}
    return replace(gradients, **sums, buckets=gradients.buckets + replicas.buckets)


_NO_COST = SyncStats(
    numel=0,
    num_syncs=0,
    wire_bytes=0,
    pack_time=0.0,
    collective_time=0.0,
    unpack_time=0.0,
    num_steps=0,
    exposed_time=0.0,
    buckets=(),
)
_SUMMED = ("num_syncs", "wire_bytes", "pack_time", "collective_time", "unpack_time", "exposed_time")
