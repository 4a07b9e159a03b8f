"""The modules of a model that went through ``fully_shard``, and the group that their parameters are sharded over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch_compat import (
    COMPILED,
    all_gather_of,
    fsdp_groups_of,
    fsdp_state_of,
    is_default_of_fsdp,
    reduce_scatter_of,
    scattering_group,
)

PYTORCH = "pytorch"
"""The word that leaves something to PyTorch."""


@dataclass(frozen=True, eq=False)
class Unit:
    """The parameters of one call of ``fully_shard``, which it communicates together."""

    name: str
    """The module's name in the model's ``named_modules``; empty for the model itself."""
    module: Any
    """PyTorch's FSDPModule."""
    group: Any
    """PyTorch's FSDPParamGroup."""

    def __str__(self) -> str:
        return f"module {self.name!r}" if self.name else "the model itself"

    def key(self, numel: int) -> str:
        """Names this rank's state for ``numel`` values sent together. Parameters without a gradient are not sent."""
        return f"{self.name}[{numel}] of rank {dist.get_rank()}"

    def parameters(self) -> list[nn.Parameter]:
        return [parameter.sharded_param for parameter in self.group.fsdp_params]

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The group that the parameters are sharded over; None if they are only replicated."""
        return self.gather_group and scattering_group(self.group)

    @property
    def gather_group(self) -> dist.ProcessGroup | None:
        """The group of the same ranks that gathers the parameters. PyTorch may reduce and gather in two groups."""
        return getattr(self.group.mesh_info, "shard_process_group", None)


def units_of(model: nn.Module) -> list[Unit]:
    """Finds the units of a model. Raises ValueError if there are none, or if one has several groups of parameters."""
    from torch.distributed.fsdp import FSDPModule  # importing it takes long

    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a model that went through fully_shard, got {type(model).__name__}")
    units: list[Unit] = []
    states: set[int] = set()
    for name, module in model.named_modules():
        # Several modules that went through one call share a state.
        if not isinstance(module, FSDPModule) or id(state := fsdp_state_of(module)) in states:
            continue
        states.add(id(state))
        groups = fsdp_groups_of(module)
        name = name.replace(f"{COMPILED}.", "").replace(COMPILED, "")
        if len(groups) > 1:
            raise ValueError(
                f"model: module {name!r} has {len(groups)} groups of parameters on different meshes, from "
                "shard_placement_fn, and PyTorch takes no reduce-scatter, all-gather or hook there; call fully_shard "
                "for the modules of each mesh"
            )
        units.extend(Unit(name, module, group) for group in groups)
    if not units:
        raise ValueError(
            f"model: no module of this {type(model).__name__} went through fully_shard; call it first "
            "(FullyShardedDataParallel is not supported), or use fastsync.register_comm_hook for a model in "
            "DistributedDataParallel, fastsync.attach for one without a wrapper"
        )
    return units


class EngineCollective:
    """Implements PyTorch's ``AllGather`` or ``ReduceScatter``: ``fully_shard`` calls the engine for a unit."""

    kind: ClassVar[str]
    """``"reduce-scatter"`` or ``"all-gather"``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._replaced: Any = collective_of(unit, self.kind)

    def begin(self) -> None:
        """Takes the place of the present one."""
        _set_collective(self._unit, self.kind, self)

    @classmethod
    def end(cls, unit: Unit) -> None:
        """Puts back what it has replaced. Where another has taken its place since, that one stays."""
        present = collective_of(unit, cls.kind)
        if isinstance(present, cls):
            _set_collective(unit, cls.kind, present._replaced)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def units_to_serve(units: Sequence[Unit], ours: type[EngineCollective], argument: str) -> list[Unit]:
    """Returns those of the sharded units whose reduce-scatter or all-gather is still PyTorch's own.

    Args:
        ours: by which the engine serves a unit.
        argument: the argument of ``register_fsdp`` that asks for it.

    Raises:
        ValueError: as ``shard_group_of``. Or one has another one already. Or all are served.
    """
    kind, found = ours.kind, []
    for unit in units:
        present = collective_of(unit, kind)
        if isinstance(present, ours):
            continue
        if not is_left_to_pytorch(unit, kind):
            raise ValueError(
                f"{argument}: {unit} has another {kind} already, a {type(present).__name__}, from {_setter(kind)} or "
                f"a method that chooses its memory; leave that call out, or pass {PYTORCH!r} here to keep it"
            )
        found.append(unit)
    if units and not found:
        raise ValueError(
            f"{argument}: register_fsdp serves all modules of the model already; to change the compression, set "
            f".compression.{argument} of the handle that it returned"
        )
    if found:
        shard_group_of(found)  # raises ValueError where there are several
    return found


def is_left_to_pytorch(unit: Unit, kind: str) -> bool:
    """Whether a unit has PyTorch's own reduce-scatter or all-gather."""
    return is_default_of_fsdp(collective_of(unit, kind))


def collective_of(unit: Unit, kind: str) -> object:
    """Returns the reduce-scatter or all-gather that ``fully_shard`` calls for a unit."""
    return reduce_scatter_of(unit.group) if kind == "reduce-scatter" else all_gather_of(unit.group)


def _setter(kind: str) -> str:
    return f"set_custom_{kind.replace('-', '_')}"


def _set_collective(unit: Unit, kind: str, collective: object) -> None:
    getattr(unit.module, _setter(kind))(collective)


def shard_group_of(units: Sequence[Unit]) -> dist.ProcessGroup | None:
    """Returns the group that all units are sharded over; None if they are not sharded.

    Raises:
        ValueError: there are several such groups.
    """
    by_ranks: dict[tuple[int, ...], Unit] = {}
    for unit in units:
        by_ranks.setdefault(ranks_of(unit.shard_group), unit)
    if len(by_ranks) > 1:
        over = "; ".join(f"{unit} over ranks {list(ranks)}" for ranks, unit in by_ranks.items())
        raise ValueError(
            f"model: its modules are sharded over several process groups ({over}); call this for the modules of each, "
            "the inner ones first"
        )
    return units[0].shard_group


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Returns the ranks of a group, in order; none for no group."""
    return () if group is None else tuple(dist.get_process_group_ranks(group))
