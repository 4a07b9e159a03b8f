"""Process groups: set-up and tear-down, broadcasts, and small reductions of metrics over ranks."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from . import _C
from ._checks import resolve_group as resolve_group
from ._torch_compat import (
    abort_default_group,
    add_backend,
    backend_from_plugin,
    broadcast_coalesced,
    name_group,
    set_default_backend,
)
from .errors import SyncError
from .launch.environment import Rank, this_rank

BackendName = Literal["nccl", "fastsync", "gloo"]
_BROADCAST_BYTES = 250 * 2**20  # the size of the buffers that tensors are broadcast in
_OF_CPUS = ("fastsync", "gloo")
_num_opened = 0  # how many default groups of several ranks were opened so far; they may share a store
# The store of ranks that srun or MPI has started. The next group meets in it, even before all ranks have left this one.
_store: Store | None = None
_left_open: weakref.ref[dist.ProcessGroup] | None = None  # the default group of a block that has not ended well


class MissingRanksError(RuntimeError):
    """Some ranks did not come to ``process_group`` in time."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks
        """Those that did not come."""


@contextmanager
def process_group(timeout: float, *, backend: BackendName | None = None) -> Iterator[torch.device]:
    """Opens the default process group for the time of a ``with`` block and yields this rank's device.

    Ranks find each other through the environment variables that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). If Slurm's ``srun``, ``mpirun`` or ``mpiexec`` has started the ranks,
    the block sets these from that launcher's variables. Without a launcher this process is the only rank. A group that
    is open already, such as that of Ray's workers, is used as it is, and stays open. A block that an error has left
    keeps its group, which other ranks may still need. The next block opens a new one in its place, on every rank.

    Args:
        timeout: how long a rank waits for the others, in seconds: at the start and in each collective.
        backend: ``"nccl"``, each rank on a GPU, or ``"fastsync"`` or ``"gloo"``, on the CPU. A rank that names none
            takes rank 0's. If rank 0 names none, it takes NCCL if it sees as many GPUs as its host has ranks, else
            ``"fastsync"``. It warns if it takes CPUs although it sees GPUs. Pass ``"nccl"`` if a launcher shows each
            rank its own GPU only. Ranks may share GPUs if NCCL_MULTI_RANK_GPU_ENABLE is 1. Where ``"fastsync"`` is
            asked for, a Gloo group that is open serves too. ``fastsync train`` has the option ``--device`` for this.

    Raises:
        ValueError: the backend does not exist, differs from rank 0's or from that of an open group, or is NCCL and this
            rank sees no GPU.
        RuntimeError: the other ranks did not come, or did not take part in a collective, within ``timeout``. Where the
            store tells which ones have not come, its ``.ranks`` has them. Or the launcher does not tell all that ranks
            need to find each other.
    """
    if backend not in ("nccl", *_OF_CPUS, None):
        raise ValueError(f"backend: expected 'nccl', 'fastsync', 'gloo' or None, got {backend!r}")
    global _left_open
    if dist.is_initialized() and _left_open is not None and _left_open() is resolve_group(None):
        _end_left_open()
    if dist.is_initialized():
        opened = dist.get_backend_config()  # such as cpu:gloo,cuda:nccl
        serving = _OF_CPUS if backend == "fastsync" else (backend,)
        if backend is not None and not any(name in opened for name in serving if name):
            raise ValueError(f"backend={backend!r}: a process group of {opened} is open already; leave backend out")
        yield torch.device("cpu") if backend in _OF_CPUS else device_of(resolve_group(None))
        return
    # Optimizers import this module. If that happens while a group is open, it keeps the group and Gloo's threads alive.
    # A thread that drops a tensor while the interpreter shuts down would then abort the process.
    importlib.import_module("torch._dynamo")

    this = this_rank()
    with this.variables():
        device = _open(this, backend, timedelta(seconds=timeout))
        # After an error the group ends with the next block, or the process. If it ended here, other ranks might report
        # a failure first, and NCCL would hold the error back until the collectives in flight are done.
        try:
            yield device
        except BaseException:
            _left_open = weakref.ref(resolve_group(None)) if dist.is_initialized() else None
            raise
        dist.destroy_process_group()
        gc.collect()  # DDP is part of reference cycles and holds the group


def _end_left_open() -> None:
    """Ends the default group of a block that an error has left."""
    global _left_open
    _left_open = None
    if "nccl" in dist.get_backend_config():  # ending it would wait for what others may never send
        abort_default_group()
    else:
        dist.destroy_process_group()
    gc.collect()


def _open(this: Rank, backend: BackendName | None, limit: timedelta) -> torch.device:
    """Opens the default group, and returns this rank's device."""
    store, rank, world_size = _meet(this, limit)
    global _num_opened
    with _missing_are_named(PrefixStore(f"fastsync/come{_num_opened}", store), rank, world_size, limit):
        device = _open_in(store, rank, world_size, this, backend, limit)
    _num_opened += world_size > 1
    return device


@contextmanager
def _missing_are_named(come: Store, rank: int, world_size: int, limit: timedelta) -> Iterator[None]:
    """Names ranks that have not come where opening the group fails. Each notes in the store that it is here."""
    come.set(str(rank), "")
    try:
        yield
    except RuntimeError as error:
        missing: list[int] = []
        with suppress(RuntimeError):  # the store is gone
            missing = [other for other in range(world_size) if not come.check([str(other)])]
        if not missing:
            raise
        who, log = ("ranks", "their logs") if len(missing) > 1 else ("rank", "its log")
        raise MissingRanksError(
            f"process_group: {who} {', '.join(map(str, missing))} of {world_size} did not come within "
            f"{limit.total_seconds():g} s; look at {log}, or raise timeout if it takes longer to start",
            missing,
        ) from error


def _open_in(
    store: Store,
    rank: int,
    world_size: int,
    this: Rank,
    backend: BackendName | None,
    limit: timedelta,
) -> torch.device:
    num_gpus = torch.cuda.device_count()
    key = f"fastsync/backend{_num_opened}"
    if rank == 0:
        store.set(key, backend or _backend_for(num_gpus, this))
    chosen = store.get(key).decode()
    if backend not in (None, chosen):
        way_out = "name the same one on every rank, or none here"
        raise ValueError(f"backend={backend!r} on rank {rank}, but rank 0 has taken {chosen!r}; {way_out}")
    if chosen in _OF_CPUS:
        device = torch.device("cpu")
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=limit)
    else:
        if not num_gpus:
            on_cpu = "pass backend='fastsync' for the CPU (fastsync train: --device cpu)"
            raise ValueError(f"backend: NCCL needs GPUs, and rank {rank} sees none; {on_cpu}")
        device = torch.device("cuda", (rank if this.local_rank is None else this.local_rank) % num_gpus)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    return device


def _meet(this: Rank, limit: timedelta) -> tuple[Store, int, int]:
    """Waits for the other ranks. Returns the store that they share, the rank and the world size."""
    if this.launcher is None:
        # A batch script, or a shell of salloc, is one process: only srun starts the tasks.
        if (num_tasks := int(os.environ.get("SLURM_NTASKS", "1"))) > 1:
            warnings.warn(
                f"this process trains alone, in a Slurm job of {num_tasks} tasks (SLURM_NTASKS). Put srun before the "
                "command to start them all, or torchrun",
                stacklevel=5,  # where the with block begins
            )
        return HashStore(), 0, 1
    global _store
    if _store is not None:
        return PrefixStore(f"group{_num_opened}", _store), this.rank, this.world_size
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
    except RuntimeError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = (
            f"rank {this.rank} of {this.world_size}, by the variables of {this.launcher}, did not meet the others at "
            f"{place} within {limit.total_seconds():g} s"
        )
        said = str(error).splitlines()[0].rstrip(".")  # the other lines are a C++ stack
        raise SyncError(
            f"{reason}: {said}. All of them have to run this script. If rank 0 is elsewhere, or the port is taken, set "
            "MASTER_ADDR and MASTER_PORT on all ranks",
            ranks=[this.rank],
            reason=reason,
        ) from error
    store.set_timeout(limit)
    if this.launcher != "torchrun":
        _store = store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent keeps one store for all attempts. It still holds the addresses of earlier ranks and groups.
        # Other stores are new in each attempt, and machines that joined later have counted fewer attempts.
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = PrefixStore(f"attempt{attempt}/group{_num_opened}", store)
    return store, rank, world_size


def _backend_for(num_gpus: int, this: Rank) -> BackendName:
    """Returns the backend that rank 0 chooses if it sees ``num_gpus`` GPUs."""
    num_ranks = num_gpus if this.local_world_size is None else this.local_world_size
    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if num_gpus > 0 and (is_shared or num_ranks <= max(num_gpus, this.num_gpus)):
        return "nccl"
    if num_gpus > 0:
        warnings.warn(
            f"all ranks train on the CPU: rank 0 sees {num_gpus} GPU(s) for the {num_ranks} ranks of its machine. "
            "Start a rank for each GPU, or say that you mean the CPU with backend='fastsync' (fastsync train: --device "
            "cpu). If a launcher shows each rank its own GPU only, pass backend='nccl' (fastsync train: --device "
            "cuda), or set NCCL_MULTI_RANK_GPU_ENABLE=1",
            stacklevel=6,  # where the with block begins
        )
    return "fastsync"


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device that a group serves: this rank's GPU if the group has NCCL, else the CPU.

    torch 2.15 has several backends for NCCL: nccl, nccl2, nccl-legacy, nccl-lazy. All of them have "nccl" in their
    names. The newer ones serve one device only, to which the group is bound. Others may be bound to one, too.
    """
    if "nccl" not in dist.get_backend_config(group):
        return torch.device("cpu")
    bound: torch.device | None = group.bound_device_id
    return bound if bound is not None and bound.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def group_of_this_rank(device: torch.device) -> dist.ProcessGroup:
    """Returns the default group if it serves the device, else a group of this rank alone."""
    if dist.is_initialized():
        default = resolve_group(None)
        try:
            _C.check_device(default, device)
            return default
        except ValueError:
            name = dist.Backend.default_device_backend_map.get(device.type)
            # Without a device torch 2.15's NCCL takes the GPU with the number of the local rank.
            bound = device if device.type == "cuda" and default.bound_device_id is None else None
            group = dist.new_group([dist.get_rank()], backend=name, use_local_synchronization=True, device_id=bound)
            assert isinstance(group, dist.ProcessGroup)
            return group
    group = gloo_group(HashStore(), 0, 1, timedelta(minutes=1), "fastsync: this rank alone")
    if device.type != "cpu":
        _serve(group, device)
    return group


def _serve(group: dist.ProcessGroup, device: torch.device) -> None:
    """Adds the device's backend to a group that torch does not list. Attaching raises an error if there is none."""
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    store = HashStore()
    if name == "nccl":  # the class that torch 2.15 calls nccl-legacy, which takes the device of what it is given
        kind = dist.ProcessGroup.BackendType.NCCL
        backend = dist.ProcessGroupNCCL(store, 0, 1, dist.ProcessGroupNCCL.Options())
    else:
        kind = dist.ProcessGroup.BackendType.CUSTOM
        backend = backend_from_plugin(name, store, timedelta(minutes=1))
    if backend is not None:
        add_backend(group, torch.device(device.type), kind, backend)


def gloo_group(store: Store, rank: int, world_size: int, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Forms a group that torch does not list. It ends with its last reference.

    Call the group's own methods: after an error, functions of ``torch.distributed`` look for the group in that list.

    Args:
        store: the store that the ranks meet in. No other group may use it.
    """
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, world_size)
    set_default_backend(group, kind)
    add_backend(group, torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, world_size, timeout))
    name_group(group, name)
    return group


def dist_sum(values: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Adds ``values`` over the ranks, into a new tensor. Every rank must call it, with the same shape and dtype."""
    group, total = resolve_group(process_group), values.detach().clone()
    if group.size() > 1:  # on one rank it would only wake a thread
        dist.all_reduce(total, group=group)
    return total


def dist_mean(values: Tensor, *, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Averages ``values`` over the ranks, into a new tensor. Every rank must call it, as ``dist_sum``."""
    return dist_sum(values, process_group=process_group) / resolve_group(process_group).size()


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, root: int = 0) -> None:
    """Gives all ranks of the group the tensors of rank ``root``, in place. All ranks must have the same ones."""
    tensors = [tensor.detach() for tensor in tensors]
    flat = [as_bytes(tensor) for tensor in tensors]  # Gloo supports few dtypes
    broadcast_coalesced(group, flat, _BROADCAST_BYTES, root)
    for tensor, values in zip(tensors, flat, strict=True):
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor, row by row, as uint8: a view if the tensor is contiguous, else a copy."""
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # a single value may have any stride


class Heartbeats:
    """Tells which ranks of a group do not answer. Every rank has to make one, in the same order.

    Args:
        group: the ranks.
        name: what errors call those who do this together, such as the name of a command.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self._liveness = _C.Liveness(group, name)

    def silent_ranks(self) -> list[int]:
        """Returns the ranks that have shown no sign of life for some seconds, which it waits for.

        Raises:
            RuntimeError: the group's store does not answer.
        """
        return self._liveness.silent_ranks()


def close_connections(group: dist.ProcessGroup) -> None:
    """Ends all waits in a Gloo group, on this rank and then on the others. Nobody can use the group any more."""
    _C.close_connections(group)


@contextmanager
def every_rank_calls(function: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Adds to an error of the group in the ``with`` block that every rank has to call the function."""
    try:
        yield
    except RuntimeError as error:
        place = f"on rank {group.rank()} of {group.size()}"
        reason = f"{place} the other ranks did not all come in time, or one is lost ({error})"
        raise SyncError(
            f"{function}: {reason}; every rank has to call it, between steps. Where ranks have different numbers of "
            "batches, put the training loop inside `with sync.join():`",
            reason=reason,
        ) from error
