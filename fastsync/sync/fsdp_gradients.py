"""Gradients of models under ``fully_shard``: through the engine on the way to the shards, or between replicas."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _C
from .._torch_compat import has_all_reduce_hook
from .compression import LOW_RANK, AnyCompression, Auto, Compression, as_compression
from .fsdp_units import EngineCollective, Unit, is_left_to_pytorch, ranks_of, shard_group_of, units_of
from .handle import GradientHandle


class ShardedGradients(GradientHandle):
    """The reduce-scatters of some units, or the all-reduces of their shards between replicas: a part of a handle."""

    owner: object = None
    """The handle that this is a part of. The modules refer to their parts, and so they keep the handle alive."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        compression: AnyCompression,
        group: dist.ProcessGroup,
        *,
        scatters: bool,
    ) -> None:
        self._units = units
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)  # until the first gradients
        self._known = {id(unit.group) for unit in units_of(model)}
        self._group = group
        self._scatters = scatters
        self._argument = "gradients" if scatters else "replicas"
        self._engine: _C.ShardedState = _C.ShardedState(group)
        self._identities: dict[str, Tensor] = {}
        self._is_in_use = False
        self.compression = compression
        lines = [f"compression {self.compression}"]
        for unit in units:
            lines += [f"{unit}: a parameter of shape {list(p.shape)}, {p.dtype}" for p in unit.parameters()]
        _C.check_agreement(group, "\n".join(lines), units[0].group.device)

    def begin(self) -> None:
        """Lets ``fully_shard`` call the engine."""
        for unit in self._units:
            if self._scatters:
                EngineReduceScatter(self, unit).begin()
            else:
                unit.module.set_all_reduce_hook(lambda values, unit=unit: self._all_reduce(unit, values))
        self._is_in_use = True

    def detach(self) -> None:
        """Restores the modules' previous reduce-scatter, or removes the all-reduce hook.

        Where ``set_custom_reduce_scatter`` has put another in its place since, that one stays.
        """
        for unit in self._units if self._is_in_use else ():
            if self._scatters:
                EngineReduceScatter.end(unit)
            else:
                unit.module.set_all_reduce_hook(None)
        self._is_in_use = False

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters whose gradients are synchronised."""
        return [parameter for unit in self._units for parameter in unit.parameters() if parameter.requires_grad]

    def _own(self, name: str) -> str:
        return name  # it ends in the rank already

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` has returned on the same rank. See ``GradientHandle.load_state_dict``."""
        parts = [state_dict.get(name) for name in ("scales", "residuals")] if isinstance(state_dict, dict) else []
        residuals = parts[1] if parts and isinstance(parts[1], dict) else {}
        for key in (str(key) for part in parts if isinstance(part, dict) for key in part):
            numel = re.search(r"\[(\d+)\] of rank \d+$", key)
            if numel is not None and any(unit.key(int(numel[1])) == key for unit in self._units):
                dtype = getattr(residuals.get(key), "dtype", torch.float32)
                self._identify(key, int(numel[1]), dtype)
        super().load_state_dict(state_dict)

    def _check_took_all(self) -> None:
        """Raises RuntimeError, before the first gradients are sent, if a module went through fully_shard too late."""
        model = None if self._model is None else self._model()
        self._model = None
        late = [] if model is None else [unit for unit in units_of(model) if id(unit.group) not in self._known]
        for unit in late:
            if is_left_to_pytorch(unit, "reduce-scatter") if self._scatters else not has_all_reduce_hook(unit.group):
                raise RuntimeError(
                    f"fastsync.register_fsdp: {unit} went through fully_shard after this call, which left its "
                    "parameters out; call it after the last fully_shard, on every rank"
                )

    def _reduce_scatter(self, unit: Unit, output: Tensor, values: Tensor, op: Any) -> None:
        """Writes this rank's shard of the mean or sum. On a GPU it is ready on the current stream."""
        self._check_took_all()
        self._engine.reduce_scatter(self._identity_of(unit, values), str(unit), output, values, op)

    def _all_reduce(self, unit: Unit, values: Tensor) -> None:
        """Averages values in place. On a GPU they are ready on the current stream."""
        self._check_took_all()
        self._engine.all_reduce(self._identity_of(unit, values), str(unit), values)

    def _identity_of(self, unit: Unit, values: Tensor) -> Tensor:
        is_wide = values.dtype == torch.float64
        return self._identify(unit.key(values.numel()), values.numel(), torch.float64 if is_wide else torch.float32)

    def _identify(self, key: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a meta tensor that stands for these values in the engine. Its dtype is that of residuals."""
        identity = self._identities.get(key)
        if identity is None or identity.dtype != dtype:
            identity = torch.empty(numel, dtype=dtype, device="meta")
            self._identities[key] = identity
        return identity

    def _named_parameters(self) -> Mapping[str, Tensor]:
        return self._identities

    def _device_of_gradients(self) -> torch.device | None:
        device: torch.device = self._units[0].group.device  # parameters may be offloaded to the CPU
        return device

    def _planned_parameters(self) -> Mapping[str, Tensor]:
        return {f"{index} of {unit}": p for unit in self._units for index, p in enumerate(unit.parameters())}

    def _follow(self, compression: Compression | Auto) -> None:
        if isinstance(compression, Compression) and compression.wire == LOW_RANK:
            raise ValueError(
                f"{self._argument}: {LOW_RANK!r} needs whole matrices, and fully_shard hands over shards of its "
                "parameters one after the other; take 'int8+ef'"
            )
        super()._follow(for_reduce_scatter(compression) if self._scatters else compression)


class EngineReduceScatter(EngineCollective):
    """Calls the engine in place of PyTorch's ``ReduceScatter``."""

    kind = "reduce-scatter"

    def __init__(self, handle: ShardedGradients, unit: Unit) -> None:
        super().__init__(unit)
        self._handle = handle

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        self._handle._reduce_scatter(self._unit, output_tensor, input_tensor, op)


def check_replicas(units: Sequence[Unit], group: dist.ProcessGroup) -> None:
    """Raises ValueError where the units take no all-reduce hook, or the group is not of replicas alone."""
    for unit in units:
        replicas: dist.ProcessGroup | None = getattr(unit.group.mesh_info, "replicate_process_group", None)
        if replicas is not None and replicas.size() > 1:
            raise ValueError(
                f"model: {unit} averages over replicas itself, before any hook: give fully_shard the dimension of the "
                "mesh that it shards over alone, as in fully_shard(model, mesh=mesh['shard']), and replicate one of a "
                "single rank"
            )
        if has_all_reduce_hook(unit.group):
            raise ValueError(f"model: {unit} has an all-reduce hook already, and takes one")
    shard_group = shard_group_of(units)
    both = {*dist.get_process_group_ranks(group)} & {*ranks_of(shard_group)}
    if len(both) > 1:
        raise ValueError(
            f"process_group: it has the ranks {sorted(both)} of one replica, which hold different shards; pass the "
            "ranks that hold the same shards, as in mesh['replicate']"
        )


def for_reduce_scatter(compression: AnyCompression) -> Compression:
    """Returns the compression with sums in float32, which a reduce-scatter always has."""
    chosen = as_compression(compression, "gradients")
    if isinstance(chosen, Auto):
        raise ValueError(f"gradients: {chosen} measures all-reduces, and this is a reduce-scatter; name a Compression")
    if chosen.algorithm is not None or chosen.ranks_per_node > 1:
        raise ValueError(
            f"gradients: a reduce-scatter has one algorithm, over ranks whose links are alike; leave out algorithm="
            f"{chosen.algorithm!r} and ranks_per_node={chosen.ranks_per_node!r}"
        )
    return replace(chosen, reduce="fp32")
