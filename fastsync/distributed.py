"""Process groups: set-up and tear-down, what a rank knows of itself, and small reductions of metrics over ranks."""

from __future__ import annotations

import gc
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from .checks import resolve_group


@contextmanager
def process_group(timeout: float) -> Iterator[torch.device]:
    """Opens the default process group for the time of a ``with`` block and yields this rank's device.

    Ranks find each other through the environment variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Without RANK this process is the only rank of a world of one.
    The backend is NCCL where every rank of every node has a GPU of its own, and Gloo on the CPU otherwise.

    Args:
        timeout: how long a rank waits for the others, in seconds: at the start and in each collective.

    Raises:
        RuntimeError: the other ranks did not come, or did not take part in a collective, within ``timeout``.
    """
    # Optimizers import it. Imported while a group is open, it keeps that group alive for good, and Gloo's threads with
    # it; a thread that then drops a tensor while the interpreter shuts down aborts the process.
    import torch._dynamo

    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        # Ranks that torchrun starts again meet in the same store, which still holds the addresses of those before.
        store = PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    else:
        store, rank, world_size = HashStore(), 0, 1
    gpu = _candidate_gpu()
    if _all_differ(store, rank, world_size, gpu):
        assert gpu is not None
        device = gpu
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    # After an error the group ends with the process: ended here, other ranks might be the first to report a failure,
    # and NCCL would keep the error back until what is in flight is done.
    yield device
    dist.destroy_process_group()
    gc.collect()  # DDP is part of reference cycles and holds the group


def dist_sum(values: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of ``values`` over the ranks, in a new tensor. Every rank must call it, with the same shape and dtype."""
    total = values.detach().clone()
    if dist.get_world_size(process_group) > 1:  # alone it would only wake a thread
        dist.all_reduce(total, group=process_group)
    return total


def dist_mean(values: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """The mean of ``values`` over the ranks, in a new tensor. Every rank must call it, as ``dist_sum``."""
    return dist_sum(values, process_group) / dist.get_world_size(process_group)


def check_consistency(module: nn.Module, process_group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Checks that all ranks hold bitwise equal parameters and buffers. Every rank must call it.

    Only hashes travel. Buffers count: BatchNorm's running statistics, which every rank takes from its own samples,
    differ after the first forward.

    Raises:
        RuntimeError: on every rank, naming the first tensor that differs and which ranks agree on it.
    """
    group = resolve_group(process_group)
    mine = {name: _digest(tensor) for name, tensor in module.state_dict().items()}
    of_rank: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(of_rank, mine, group=group)
    names = dict.fromkeys(name for digests in of_rank for name in digests)
    for name in names:
        ranks_by_digest: dict[str, list[int]] = defaultdict(list)
        for rank, digests in enumerate(of_rank):
            ranks_by_digest[digests.get(name, "missing")].append(rank)
        if len(ranks_by_digest) > 1:
            camps = "; ".join(
                f"ranks {ranks}: {'missing' if digest == 'missing' else 'sha256 ' + digest[:12]}"
                for digest, ranks in ranks_by_digest.items()
            )
            raise RuntimeError(f"{name!r} of {type(module).__name__} differs between ranks: {camps}")


def _candidate_gpu() -> torch.device | None:
    """The GPU this rank would take. A launcher may show it all GPUs of the node, or just its own."""
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % num_gpus) if num_gpus else None


def _all_differ(store: Store, rank: int, world_size: int, mine: torch.device | None) -> bool:
    """Whether every rank of every node has a GPU, and none the same as another: all ranks need one backend."""
    keys = [f"fastsync/gpu/{rank}" for rank in range(world_size)]
    store.set(keys[rank], str(torch.cuda.get_device_properties(mine).uuid) if mine else "")
    gpus = store.multi_get(keys)
    return all(gpus) and len(set(gpus)) == world_size


def _digest(tensor: Tensor) -> str:
    """A hash of the tensor's bytes, dtype and shape."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + raw.tobytes()).hexdigest()
