"""Process groups: set-up and tear-down, what a rank knows of itself, and small reductions of metrics over ranks."""

from __future__ import annotations

import gc
import hashlib
import json
import numbers
import os
import time
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

from . import _C
from ._checks import check_not_sharded, is_wrapper, resolve_group

_Mine = TypeVar("_Mine")

POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0
_BROADCAST_BYTES = 250 * 2**20  # of a flat buffer of several tensors

# Gloo knows these, but no other integers and no float8: those go as bytes.
_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
}


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


def ranks_left(group: dist.ProcessGroup, progress: int, timeout: timedelta, error: Exception) -> dict[int, int]:
    """Agrees with the others who have met an error of the group on who is left, by their numbers in the default group.

    Each writes to the store that the ranks met by how far it has come, and waits for the others to do so: for twice the
    time-out, for who only waits in a collective of the old group meets its error later. The first list of ranks that is
    written then is everybody's. The store has to be alive: it lives with the launcher, or with rank 0.

    Returns:
        How far each of them has come.

    Raises:
        RuntimeError: the store does not answer, or the others have gone on without this rank.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    store = PrefixStore(f"fastsync/left/{group.group_name}/", dist.distributed_c10d._get_default_store())
    try:
        store.set(str(rank), str(progress))
        deadline = time.monotonic() + 2 * timeout.total_seconds() + GRACE_SECONDS
        while not store.check([str(each) for each in ranks]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        here = [each for each in ranks if store.check([str(each)])]
        left = json.loads(store.compare_set("ranks", "", json.dumps(here)))
        if rank in left:
            return {each: int(store.get(str(each))) for each in left}
    except Exception as unreachable:
        raise RuntimeError(
            f"fastsync: rank {rank} has lost some of ranks {ranks} ({error}), and the store that would tell which "
            f"does not answer ({unreachable}); it has to live on a host that is not lost"
        ) from error
    raise RuntimeError(
        f"fastsync: ranks {left} have gone on without rank {rank}, which came too late; start it again from their state"
    ) from error


@torch.no_grad()
def broadcast_tensors(
    named: Mapping[str, Tensor], others: Mapping[str, Tensor], group: dist.ProcessGroup, root: int = 0
) -> None:
    """Gives all ranks of the group the tensors of one, in place, once they know that they have the same others.

    Args:
        named: those that the ranks have agreed on.
        others: what else there is, by what it is called.
        root: whose they are, as a rank of the group.

    Raises:
        ValueError: the ranks have different others.
    """
    if others:
        lines = [
            f"{name} of shape {list(tensor.shape)}, strides {list(tensor.stride())}, {tensor.dtype}"
            for name, tensor in others.items()
        ]
        _C.check_agreement(group, "\n".join(lines), next(iter(named.values())).device)
    tensors = [tensor.detach() for tensor in (*named.values(), *others.values())]
    vectors = [_as_vector(tensor) if tensor.dtype in _DTYPES else _as_bytes(tensor) for tensor in tensors]
    sent = [vector.to(_C.device_of_sums(group, vector.device)) for vector in vectors]
    dist._broadcast_coalesced(group, sent, _BROADCAST_BYTES, root)  # type: ignore[attr-defined]  # as DDP does
    for tensor, values in zip(tensors, sent, strict=True):
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def _as_vector(tensor: Tensor) -> Tensor:
    """Its elements as they lie in memory, where they fill a block of it; else the tensor.

    Strides of dimensions of size 1 may be anything, and torch takes some for elements that overlap.
    """
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)) if dense else tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def check_consistency(
    module: nn.Module, *, process_group: dist.ProcessGroup | DeviceMesh | None = None, buffers: bool = True
) -> None:
    """Checks that all ranks hold bitwise equal parameters and buffers. Every rank must call it.

    Only hashes travel. What else the state dict holds, as
    ``get_extra_state`` gives it, is compared where it is a tensor, bytes, a number or a string; a warning names what is
    not compared.

    Args:
        module: the model.
        process_group: the group whose ranks are compared; None for the default group.
        buffers: whether buffers count. BatchNorm's running statistics, and those of normalisers, which every rank takes
            from its own samples, differ after the first forward.

    Raises:
        ValueError: it is no module, or a parameter is sharded, so that ranks are meant to hold different ones.
        RuntimeError: on every rank, naming the first that differs and which ranks agree on it, with how many differ; or
            not every rank has called it in time.
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
            f"differ{way_out}"
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
