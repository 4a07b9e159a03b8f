"""Parameters of models under ``fully_shard``: they go through the engine when they are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..autotune.choose import Candidate, in_engine
from .compression import AnyCompression, Compression, as_compression
from .fsdp_units import EngineCollective, Unit
from .handle import warn_of_generic_kernels
from .stats import BucketStats


class ShardedParameters:
    """The all-gathers of some units: a part of a handle."""

    owner: object = None
    """The handle that this is a part of. The modules refer to their parts, and so they keep the handle alive."""

    def __init__(self, units: Sequence[Unit], compression: AnyCompression) -> None:
        group = units[0].gather_group
        assert group is not None
        self._units = units
        self._group = group
        self._engine = _C.ParameterGather(group, [str(unit) for unit in units])
        self._is_in_use = False
        self.compression = compression
        lines = [f"all-gather, compression {self.compression.wire}"]
        for unit in units:
            for each in unit.group.fsdp_params:
                sharded = each.sharded_param
                dtype = each.mp_policy.param_dtype or sharded.dtype
                lines.append(f"{unit}: a parameter of shape {list(sharded.shape)}, {dtype}")
        _C.check_agreement(group, "\n".join(lines), units[0].group.device)

    def begin(self) -> None:
        """Lets ``fully_shard`` call the engine."""
        for index, unit in enumerate(self._units):
            EngineAllGather(self, index, unit).begin()
        self._is_in_use = True

    @property
    def compression(self) -> Compression:
        """The compression. If one rank sets it alone, the next gather raises ``RuntimeError`` on every rank."""
        return self._compression

    @compression.setter
    def compression(self, compression: AnyCompression) -> None:
        chosen = for_all_gather(compression)
        for device in {unit.group.device for unit in self._units}:
            _C.check_device(self._group, device)
            warn_of_generic_kernels(device.type)
        self._engine.set_compressions(in_engine([Candidate(chosen)]))
        self._compression = chosen

    def stats(self) -> dict[str, BucketStats]:
        """Returns what gathers have cost so far, for each module by its name. See ``ShardedStats``."""
        all_stats = (BucketStats(**stats) for stats in self._engine.module_stats())
        return {unit.name: stats for unit, stats in zip(self._units, all_stats, strict=True)}

    def detach(self) -> None:
        """Restores the modules' previous all-gather.

        Where ``set_custom_all_gather`` has put another in its place since, that one stays.
        """
        for unit in self._units if self._is_in_use else ():
            EngineAllGather.end(unit)
        self._is_in_use = False


class EngineAllGather(EngineCollective):
    """Calls the engine in place of PyTorch's ``AllGather``."""

    kind = "all-gather"

    def __init__(self, part: ShardedParameters, index: int, unit: Unit) -> None:
        super().__init__(unit)
        self._part = part
        self._index = index

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group is not self._unit.gather_group:
            # reshard_after_forward=int has left parts of what forward gathered. Those are rounded already.
            by_pytorch: dist.Work | None = self._replaced(output_tensor, input_tensor, group, async_op)
            return by_pytorch
        assert input_tensor.data_ptr() == output_tensor.data_ptr() + group.rank() * input_tensor.nbytes
        numels = [parameter.padded_sharded_param_size.numel() for parameter in self._unit.group.fsdp_params]
        if sum(numels) != input_tensor.numel():  # tensors with fsdp_pre_all_gather send what they want
            numels = [input_tensor.numel()]
        work = self._part._engine.all_gather(self._index, output_tensor, numels)
        if async_op or output_tensor.device.type == "cpu":
            # On a CPU there are no streams. PyTorch waits where it needs the parameters, so what it has prefetched
            # travels while it computes.
            return _GatherWork(work)
        work.wait()
        return None


class _GatherWork(dist.Work):
    def __init__(self, work: _C.GatherWork) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._work.wait()
        return True


def for_all_gather(compression: AnyCompression) -> Compression:
    """Returns the compression, of which only the wire may be chosen: an all-gather adds nothing up."""
    chosen = as_compression(compression, "parameters")
    if not isinstance(chosen, Compression) or chosen != Compression(chosen.wire):
        raise ValueError(
            "parameters: an all-gather adds nothing up and chooses nothing; name a wire alone, such as 'bf16' or "
            f"'int8', got {compression!r}"
        )
    return chosen
