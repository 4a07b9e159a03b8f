"""The entry points behind one face: a model, and steps after which its gradients are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync.sync.compression import AnyCompression
from fastsync.sync.ddp import HookState
from fastsync.sync.fsdp import ShardedHandle
from tests.models import SMALL_BUCKETS

AVERAGING = ("hook", "drop-in hook", "attach", "synchronize", "all_reduce")
"""Those that average whole gradients."""
ALL = (*AVERAGING, "sharded")

DROP_INS = {
    "none": fastsync.allreduce_hook,
    "bf16": fastsync.bf16_compress_hook,
    "fp16": fastsync.fp16_compress_hook,
}


@dataclass
class Averaged:
    """A model whose gradients an entry point averages."""

    model: nn.Module
    """What is called; in DDP, for one."""
    handle: Any
    """What the entry point returns: ``grad_stats``, mostly ``stats()`` and ``state_dict()``."""
    finish: Callable[[], object] = lambda: None
    """What has to follow backward."""
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def compression(self) -> Any:
        """That of gradients. It may be set."""
        is_sharded = isinstance(self.handle, ShardedHandle)
        return self.handle.compression.gradients if is_sharded else self.handle.compression

    @compression.setter
    def compression(self, compression: AnyCompression) -> None:
        if isinstance(self.handle, ShardedHandle):
            self.handle.compression.gradients = compression
        else:
            self.handle.compression = compression

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.finish()

    def step(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """A step of a ``Given`` model on this rank's gradients. Returns copies of the averages."""
        self.model.zero_grad()
        self.backward(self.model(grads))
        return self.grads()

    def grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else whole(p.grad).clone() for p in self.model.parameters()]

    def grad_norm(self) -> Tensor:
        norm = self.handle.grad_stats().grad_norm
        if not isinstance(self.handle, ShardedHandle):
            return norm
        squares = norm.double().square()  # of this rank's shards
        dist.all_reduce(squares, group=self.handle._group)
        return squares.sqrt().to(norm.dtype)


@dataclass
class _Call:
    """all_reduce_gradients after each backward."""

    model: nn.Module
    compression: AnyCompression
    group: Any
    newest: Any = None

    def __call__(self) -> None:
        self.newest = fastsync.all_reduce_gradients(self.model, self.compression, process_group=self.group)

    def grad_stats(self) -> Any:
        return self.newest


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def average(
    entry_point: str,
    model: nn.Module,
    compression: AnyCompression = "none",
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    bucket_cap_mb: float = SMALL_BUCKETS,
    **options: Any,
) -> Averaged:
    """Hands the model to an entry point. ``options`` are of DDP or of ``attach``."""
    if "hook" in entry_point:
        of_ddp = None if isinstance(group, DeviceMesh) else group
        ddp = DistributedDataParallel(model, process_group=of_ddp, bucket_cap_mb=bucket_cap_mb, **options)
        if entry_point == "hook":
            hook = fastsync.register_comm_hook(ddp, compression, process_group=group)
            return Averaged(ddp, hook, no_sync=ddp.no_sync)
        state = HookState(of_ddp)
        ddp.register_comm_hook(state, DROP_INS[str(compression)])
        return Averaged(ddp, state, no_sync=ddp.no_sync)
    if entry_point == "sharded":
        return _sharded(model, compression, group)
    if entry_point == "all_reduce":
        call = _Call(model, compression, group)
        return Averaged(model, call, call)
    overlap = entry_point == "attach"
    placed: dict[str, Any] = {"process_group": group, "bucket_cap_mb": bucket_cap_mb, "overlap": overlap}
    sync = fastsync.attach(model, compression, **placed, **options)
    return Averaged(model, sync, (lambda: None) if overlap else sync.synchronize, sync.no_sync)


def _sharded(model: nn.Module, compression: AnyCompression, group: Any) -> Averaged:
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    shards: Any = fully_shard(model, mesh=world if group is None else DeviceMesh.from_group(group, "cpu"))

    @contextmanager
    def no_sync() -> Any:
        shards.set_requires_gradient_sync(False)
        yield
        shards.set_requires_gradient_sync(True)

    return Averaged(shards, fastsync.register_fsdp(shards, gradients=compression), no_sync=no_sync)


def whole_numbers(rank: int, step: int, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Gradients whose sums are exact, and so are their means over as many ranks as a power of two."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-15, 16, tuple(shape), generator=generator).float() for shape in shapes]


def mean_of(everyone: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Over the ranks: a missing gradient counts as zeros, and stays missing where nobody has one."""

    def mean(same: Sequence[Tensor | None]) -> Tensor | None:
        there = [grad for grad in same if grad is not None]
        return torch.stack(there).sum(dim=0) / len(same) if there else None

    return [mean(same) for same in zip(*everyone, strict=True)]
