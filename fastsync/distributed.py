"""Process groups: set-up and tear-down, what a rank knows of itself, and small reductions of metrics over ranks."""

from __future__ import annotations

import gc
import hashlib
import math
import numbers
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from .checks import check_not_sharded, is_wrapper, resolve_group
from .replicas import broadcast

_Mine = TypeVar("_Mine")


@contextmanager
def process_group(
    timeout: float, *, backend: Literal["nccl", "gloo"] | None = None, share_gpus: bool = False
) -> Iterator[torch.device]:
    """Opens the default process group for the time of a ``with`` block and yields this rank's device.

    Ranks find each other through the environment variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Without RANK this process is the only rank of a world of one. A group
    that is open already, as Ray opens one for its workers, is used as it is, and stays open.

    Args:
        timeout: how long a rank waits for the others, in seconds: at the start and in each collective.
        backend: ``"nccl"``, each rank on a GPU, or ``"gloo"``, on the CPU. By default NCCL where every rank of every
            node has a GPU of its own, and Gloo otherwise, with a warning where there are GPUs, but too few.
        share_gpus: NCCL also where ranks have to share GPUs. They take turns there, and wait for each other: good for
            tests, and for nothing else.

    Raises:
        ValueError: a backend that there is not, or ``"nccl"`` where not every rank has a GPU: on every rank. Or a group
            of another backend is open.
        RuntimeError: the other ranks did not come, or did not take part in a collective, within ``timeout``.
    """
    if backend not in ("nccl", "gloo", None):
        raise ValueError(f"backend: expected 'nccl', 'gloo' or None, got {backend!r}")
    if dist.is_initialized():
        yield _device_of_open_group(backend)
        return
    # Optimizers import it. Imported while a group is open, it keeps that group alive for good, and Gloo's threads with
    # it; a thread that then drops a tensor while the interpreter shuts down aborts the process.
    import torch._dynamo

    limit = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # Ranks that torchrun starts again meet in the same store, which still holds the addresses of those before.
            # Elsewhere the store is new, and machines that have joined later count their attempts anew.
            store = PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    else:
        store, rank, world_size = HashStore(), 0, 1
    gpu = None if backend == "gloo" else _candidate_gpu()
    gpus = _gpus_of_ranks(store, rank, world_size, gpu)
    takes_gpus = _takes_gpus(gpus, share_gpus)
    if backend == "nccl" and not takes_gpus:
        raise ValueError(
            f"backend='nccl' needs a GPU for each rank, but {_too_few(gpus)}; leave backend out for the CPU"
        )
    if any(gpus) and backend is None and not takes_gpus and rank == 0:
        warnings.warn(
            f"all ranks train on the CPU, though there are GPUs: {_too_few(gpus)}. Start a rank for each GPU, or say "
            "that you mean the CPU with backend='gloo'",
            stacklevel=3,  # where the with block begins
        )
    if takes_gpus:
        assert gpu is not None
        device = gpu
        if len(set(gpus)) < world_size:
            let_nccl_share_gpus(rank)
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


def group_of_this_rank() -> dist.ProcessGroup:
    """Returns the default group, and where there is none a Gloo group of this rank alone."""
    if dist.is_initialized():
        return resolve_group(None)
    kind = dist.ProcessGroup.BackendType.GLOO
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=1)))
    group._set_group_name(dist.GroupName("fastsync: this rank alone"))
    return group


def let_nccl_share_gpus(rank: int) -> None:
    """Lets ranks of one host use the same GPU, which NCCL refuses; from 2.30 on it can be told not to.

    Before, all that helps is that they look as if they were on different hosts. Call it before NCCL's first use.
    """
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # all that is left between "hosts", and always there
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"


def dist_sum(values: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Adds ``values`` over the ranks, into a new tensor. Every rank must call it, with the same shape and dtype."""
    total = values.detach().clone()
    if dist.get_world_size(process_group) > 1:  # alone it would only wake a thread
        dist.all_reduce(total, group=process_group)
    return total


def dist_mean(values: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Averages ``values`` over the ranks, into a new tensor. Every rank must call it, as ``dist_sum``."""
    return dist_sum(values, process_group=process_group) / dist.get_world_size(process_group)


def check_consistency(
    module: nn.Module, *, process_group: dist.ProcessGroup | DeviceMesh | None = None, buffers: bool = True
) -> None:
    """Checks that all ranks hold bitwise equal parameters and buffers. Every rank must call it.

    Only hashes travel, and where they differ rank 0's tensors, to tell by how much. What else the state dict holds, as
    ``get_extra_state`` gives it, is compared where it is a tensor, bytes, a number or a string; a warning names what is
    not compared.

    Args:
        module: the model.
        process_group: the group whose ranks are compared; None for the default group.
        buffers: whether buffers count. BatchNorm's running statistics, and those of normalisers, which every rank takes
            from its own samples, differ after the first forward.

    Raises:
        ValueError: it is no module, or a parameter is sharded, so that ranks are meant to hold different ones.
        RuntimeError: on every rank, naming the first that differs and which ranks agree on it, with how many differ and
            the largest difference; or not every rank has called it in time.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: expected a module, got {type(module).__name__}; put several into an nn.ModuleList")
    group = resolve_group(process_group)
    check_not_sharded(dict(module.named_parameters()), "module")
    of_module = type(module).__name__
    names_of_buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    entries = {name: value for name, value in module.state_dict().items() if buffers or name not in names_of_buffers}
    mine: dict[str, str] = {}
    for name, value in entries.items():
        mine[name] = f"sha256 {_digest(value)}" if _can_be_compared(value) else f"a {type(value).__name__}"
        if not _can_be_compared(value):
            warnings.warn(
                f"check_consistency: {name!r} of {of_module} is {mine[name]}, which it does not compare", stacklevel=2
            )
    of_rank = _gathered(mine, group)
    names = dict.fromkeys(name for digests in of_rank for name in digests)
    ranks_by_digest: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in names}
    for name in names:
        for rank, digests in enumerate(of_rank):
            ranks_by_digest[name][digests.get(name, "missing")].append(rank)
    differing = [name for name in names if len(ranks_by_digest[name]) > 1]
    if differing:
        first = differing[0]
        camps = "; ".join(f"ranks {ranks}: {_in_short(digest)}" for digest, ranks in ranks_by_digest[first].items())
        way_out = _ABOUT_BUFFERS if first in names_of_buffers else ""
        raise RuntimeError(
            f"{first!r} of {of_module} differs between ranks: {camps}; {len(differing)} of {len(names)} entries "
            f"differ{_by_how_much({name: entries.get(name) for name in differing}, group)}{way_out}"
        )


def _gathered(mine: _Mine, group: dist.ProcessGroup) -> list[_Mine]:
    """That of each rank."""
    of_rank: list[_Mine | None] = [None] * group.size()
    try:
        dist.all_gather_object(of_rank, mine, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"check_consistency: on rank {group.rank()} of {group.size()} the other ranks did not all come in time, or "
            f"one is lost ({error}); every rank has to call it, between steps. Where ranks have different numbers of "
            "batches, put the training loop inside `with sync.join():`"
        ) from error
    return [theirs for theirs in of_rank if theirs is not None]


def _by_how_much(differing: Mapping[str, object], group: dist.ProcessGroup) -> str:
    """Says what differs most from rank 0's, of the tensors that have one shape and dtype on all ranks."""
    kinds = {
        name: (value.dtype, value.shape) if isinstance(value, Tensor) and _can_be_compared(value) else None
        for name, value in differing.items()
    }
    of_rank = _gathered(kinds, group)
    distances: dict[str, float] = {}
    for name, value in differing.items():
        if isinstance(value, Tensor) and all(theirs[name] == of_rank[0][name] is not None for theirs in of_rank):
            of_rank_0 = value.detach().to(_device_for(value, group), copy=True)
            broadcast({name: of_rank_0}, {}, group)
            distances[name] = _distance(value.detach(), of_rank_0.to(value.device))
    if not distances:
        return ""
    found = [(d, name, rank) for rank, theirs in enumerate(_gathered(distances, group)) for name, d in theirs.items()]
    largest, name, rank = max(found, key=lambda each: (math.isnan(each[0]), each[0]))
    return f", by up to {largest:.3g} from rank 0's ({name!r} on rank {rank})"


def _device_for(tensor: Tensor, group: dist.ProcessGroup) -> torch.device:
    """Where the group can send it from."""
    served = {device.type for device in group._device_types}
    return tensor.device if tensor.device.type in served else torch.device(min(served))


def _distance(mine: Tensor, theirs: Tensor) -> float:
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return float((mine.to(wide) - theirs.to(wide)).abs().max())


_ABOUT_BUFFERS = (
    "; it is a buffer: where every rank takes it from its own samples, as BatchNorm and normalisers do, leave buffers "
    "out with buffers=False, or share the statistics, as torch.nn.SyncBatchNorm does"
)


def _device_of_open_group(backend: str | None) -> torch.device:
    opened = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
    if backend is not None and backend not in opened:
        raise ValueError(f"backend={backend!r}: a process group of {opened} is open already; leave backend out")
    takes_gpu = "nccl" in opened and backend != "gloo"
    return torch.device("cuda", torch.cuda.current_device()) if takes_gpu else torch.device("cpu")


def _candidate_gpu() -> torch.device | None:
    """The GPU this rank would take. A launcher may show it all GPUs of the node, or just its own."""
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % num_gpus) if num_gpus else None


def _gpus_of_ranks(store: Store, rank: int, world_size: int, mine: torch.device | None) -> list[str]:
    """The GPU that each rank of every node would take, by its number in the world; empty for one that has none."""
    keys = [f"fastsync/gpu/{rank}" for rank in range(world_size)]
    store.set(keys[rank], str(torch.cuda.get_device_properties(mine).uuid) if mine else "")
    return [gpu.decode() for gpu in store.multi_get(keys)]


def _takes_gpus(gpus: Sequence[str], share_gpus: bool) -> bool:
    """Tells whether every rank has one, and, unless they may be shared, its own: all need one backend."""
    return all(gpus) and (share_gpus or len(set(gpus)) == len(gpus))


def _too_few(gpus: Sequence[str]) -> str:
    """Says in half a sentence why not every rank has a GPU of its own."""
    without = [rank for rank, gpu in enumerate(gpus) if not gpu]
    if without:
        return f"ranks {without} of {len(gpus)} have none"
    return f"{len(gpus)} ranks share {len(set(gpus))}"


def _can_be_compared(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.layout == torch.strided and not value.is_meta and not is_wrapper(value)
    return value is None or isinstance(value, bytes | bytearray | str | numbers.Number)


def _in_short(digest: str) -> str:
    return digest[:19] if digest.startswith("sha256 ") else digest


def _digest(value: object) -> str:
    """A hash of a tensor's bytes, dtype and shape, or of what else can be compared."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        kind, raw = f"{value.dtype} {tuple(value.shape)}", plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        kind, raw = type(value).__name__, bytes(value) if isinstance(value, bytes | bytearray) else repr(value).encode()
    return hashlib.sha256(kind.encode() + raw).hexdigest()
