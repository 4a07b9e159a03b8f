"""CPU ranks of one host add gradients in memory that they share: the right bits, at any pace, whatever ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastsync
from fastsync import _C, Compression
from fastsync.distributed import gloo_group
from fastsync.sync.compression import Wire
from fastsync.sync.ddp import CommHook
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.engine.system_calls import OPENS_MEMORY, Call, claims_above, end_at, refuse
from tests.ranks import RankError, on_ranks, run_ranks
from tests.refused import refused

TIMEOUT = timedelta(seconds=6)


def parameters_of(sizes: list[int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def engine_of(
    sizes: list[int], compression: Compression | str = "none", group: dist.ProcessGroup | None = None
) -> tuple[list[nn.Parameter], GradientSynchronizer]:
    parameters = parameters_of(sizes)
    return parameters, fastsync.attach(parameters, compression, overlap=False, process_group=group)


def set_grads(parameters: list[nn.Parameter], value: float) -> None:
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)


def assert_shared(sync: GradientSynchronizer | CommHook) -> None:
    assert sync.stats().transport == "shared_memory"


def assert_mean(parameters: list[nn.Parameter], value: float) -> None:
    for parameter in parameters:
        assert torch.equal(parameter.grad, torch.full_like(parameter, value))


# ---- what a peer names ----------------------------------------------------------------------------------------------

TEXT_BYTES = 512


def _tell(group: dist.ProcessGroup, text: str) -> list[str]:
    """What ranks do that find out together whether they can share memory."""
    mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    mine[: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    of_all = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([of_all], [mine]).wait()
    return [bytes(theirs.tolist()).split(b"\0")[0].decode() for theirs in of_all]


@on_ranks(2)
def test_only_another_process_memory_is_opened(rank: int, world_size: int, tmp_path: Path) -> None:
    group = dist.distributed_c10d._get_default_group()
    if rank == 1:
        assert _C.hosts(group) == []
        return
    file = tmp_path / "file"
    file.write_bytes(b"1")
    links = " ".join(os.readlink(f"/proc/thread-self/ns/{each}") for each in ("pid", "net"))
    host = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {links} user {os.geteuid()}"
    _tell(group, f"+{host}\n{os.getpid()} 0")
    _tell(group, f"+{file} {file.stat().st_dev}:{file.stat().st_ino}")
    told = _tell(group, "+")
    assert told[1] == f"-another process's memory has no path such as {file}"


# ---- at any pace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "sizes", "wire", "num_steps"),
    [
        (2, [3, 5_000], "none", 1_500),
        (3, [77], "bf16", 800),
        (3, [300_000], "none", 150),
        (4, [40_000], "none", 150),
    ],
)
@on_ranks()
def test_no_row_is_read_too_early_or_written_too_soon(
    rank: int, world_size: int, sizes: list[int], wire: Wire, num_steps: int
) -> None:
    chance = random.Random(rank)
    parameters, sync = engine_of(sizes, Compression(wire, reduce="fp32"))
    for step in range(num_steps):
        set_grads(parameters, float((rank + 1) * (step % 7 + 1)))
        if chance.random() < 0.05:
            time.sleep(chance.random() * 2e-3)
        sync.synchronize()
        assert_mean(parameters, (step % 7 + 1) * (world_size + 1) / 2)
    assert_shared(sync)


@on_ranks(4)
def test_engines_and_groups_side_by_side_from_several_threads(rank: int, world_size: int) -> None:
    groups = [dist.new_group() for _ in range(3)]

    def work(index: int) -> None:
        chance = random.Random(10 * rank + index)
        engines = [engine_of([1_000 * (index + 1), 3], group=groups[index]) for _ in range(2)]
        for step in range(60):
            for which, (parameters, sync) in enumerate(engines):
                set_grads(parameters, float(rank + step + index + which))
                if chance.random() < 0.05:
                    time.sleep(chance.random() * 1e-3)
                sync.synchronize()
                assert_mean(parameters, step + index + which + (world_size - 1) / 2)
        assert_shared(engines[0][1])

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, range(len(groups))))


# ---- how it begins --------------------------------------------------------------------------------------------------


def all_gathers(sync: GradientSynchronizer) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        sync.synchronize()
    return sum(event.count for event in recorded.key_averages() if event.key == "c10d::allgather_")


@on_ranks(2, cases={"num_buckets": [1, 12]})
def test_ranks_look_for_their_hosts_once_a_group_and_share_memory_by_two_calls_a_bucket(
    rank: int, world_size: int, num_buckets: int
) -> None:
    to_agree, to_find_hosts, to_share = 1, 1, 2 * num_buckets
    for _ in range(2):
        group = dist.new_group()
        for expected in (to_agree + to_find_hosts + to_share, to_agree + to_share):
            parameters = parameters_of([1_000] * num_buckets)
            sync = fastsync.attach(parameters, bucket_cap_mb=0.001, overlap=False, process_group=group)
            for again in (False, True):
                set_grads(parameters, float(rank))
                assert all_gathers(sync) == (0 if again else expected)
                assert_mean(parameters, 0.5)
            assert_shared(sync)
            del parameters, sync
            gc.collect()


@on_ranks(2)
def test_a_fork_finds_hosts_with_ranks_that_are_none(rank: int, world_size: int, tmp_path: Path) -> None:
    """Another group of rank 0 and of a child of rank 1."""
    parameters, sync = engine_of([5_000])
    averages(sync, parameters, rank)
    if rank == 0:
        in_another_group(tmp_path / "store", rank)
        return
    child = os.fork()
    if child == 0:
        in_another_group(tmp_path / "store", rank)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_another_group(file: Path, rank: int) -> None:
    group = gloo_group(dist.FileStore(str(file), 2), rank, 2, TIMEOUT, "another one")
    parameters, sync = engine_of([5_000, 3], group=group)
    assert averages(sync, parameters, rank) == "shared memory"


# ---- nothing is left ------------------------------------------------------------------------------------------------


def shared_mappings() -> list[tuple[int, int]]:
    """Where the memory that this process shares begins and ends."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if "memfd:fastsync" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


# ---- how much is claimed --------------------------------------------------------------------------------------------


def claimed_bytes() -> int:
    return sum(end - begin for begin, end in shared_mappings())


BYTES_A_VALUE = {"int4": 68 / 128, "fp16": 2.0, "none": 4.0}


@pytest.mark.parametrize(("world_size", "numel"), [(2, 2**20), (4, 2**20 + 5)])
@on_ranks()
def test_memory_is_claimed_for_the_wire_and_grows_when_a_wider_one_is_set(
    rank: int, world_size: int, numel: int
) -> None:
    parameters, sync = engine_of([numel, 7], Compression("int4", reduce="fp32"))
    widest = 0.0
    wires: list[Wire] = ["int4", "fp16", "none", "int4", "none"]
    for step, wire in enumerate(wires):
        sync.compression = Compression(wire, reduce="fp32")
        widest = max(widest, BYTES_A_VALUE[wire])
        for _ in range(2):
            set_grads(parameters, float(7 * rank * step))  # which is the largest value of every block, so int4 is exact
            sync.synchronize()
            assert_mean(parameters, 7 * step * (world_size - 1) / 2)
            assert_shared(sync)
            assert len(shared_mappings()) == 1
            assert 0 <= claimed_bytes() / world_size - widest * numel <= 100_000
    sync.detach()
    del sync
    gc.collect()
    assert not shared_mappings()


def _average_in_backward(model: nn.Module, rank: int, step: int) -> None:
    model.zero_grad()
    (model(torch.ones(1, 100)) * float(rank * step)).sum().backward()
    assert_mean([parameter for name, parameter in model.named_parameters() if name.endswith("7.bias")], step / 2)


@on_ranks(2, cases={"with_ddp": [False, True]})
def test_memory_of_buckets_that_travel_in_backward_grows_as_well(rank: int, world_size: int, with_ddp: bool) -> None:
    model: nn.Module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))
    sync: GradientSynchronizer | CommHook
    if with_ddp:
        model = DistributedDataParallel(model, bucket_cap_mb=0.05)
        sync = fastsync.register_comm_hook(model, Compression("fp16", reduce="fp32"))
    else:
        sync = fastsync.attach(model, Compression("fp16", reduce="fp32"), bucket_cap_mb=0.05)
    for step in range(1, 5):
        _average_in_backward(model, rank, step)
    gc.collect()
    narrow, num_buckets = claimed_bytes(), len(shared_mappings())
    assert num_buckets >= 3
    sync.compression = "none"
    for step in range(1, 5):
        _average_in_backward(model, rank, step)
        assert_shared(sync)
    assert claimed_bytes() > 1.2 * narrow
    assert len(shared_mappings()) == num_buckets


# ---- the system says no ---------------------------------------------------------------------------------------------


def averages(sync: GradientSynchronizer, parameters: list[nn.Parameter], rank: int) -> str:
    """How they got to the other rank of two."""
    set_grads(parameters, float(rank))
    sync.synchronize()
    assert_mean(parameters, 0.5)
    return sync.stats().describe_transport()


@pytest.mark.parametrize(
    ("where", "call", "error", "said"),
    [
        (0, Call("memfd_create"), errno.EPERM, r"memfd_create of \d+ bytes: Operation not permitted"),
        (0, Call("fallocate"), errno.ENOSPC, r"fallocate of \d+ bytes: No space left on device"),
        (1, Call("fallocate"), errno.ENOSPC, r"fallocate of \d+ bytes: No space left on device"),
        # As where processes may not look at each other.
        (1, OPENS_MEMORY, errno.EACCES, r"open of another process's memory, /proc/\d+/fd/\d+: Permission denied"),
    ],
)
@on_ranks(2)
def test_where_a_rank_cannot_share_memory_all_send_messages(
    rank: int, world_size: int, where: int, call: Call, error: int, said: str
) -> None:
    before = engine_of([5_000])
    averages(before[1], before[0], rank)
    if rank == where:
        refuse(call, error)
    parameters, sync = engine_of([100_000])
    for _ in range(3):
        transport = averages(sync, parameters, rank)
        assert re.fullmatch(rf"process group \(no shared memory: rank {where}: {said}\)", transport)
        assert averages(before[1], before[0], rank) == "shared memory"
    assert transport in str(sync.explain())


@on_ranks(2)
def test_where_memory_cannot_grow_all_send_messages(rank: int, world_size: int) -> None:
    parameters, sync = engine_of([100_000], "fp16")
    assert averages(sync, parameters, rank) == "shared memory"
    if rank == 1:
        refuse(Call("fallocate"), errno.ENOSPC)
    sync.compression = "none"
    for _ in range(3):
        transport = averages(sync, parameters, rank)
        assert re.fullmatch(
            r"process group \(no shared memory: rank 1: fallocate of \d+ bytes: No space left on device\)", transport
        )
        assert not shared_mappings()
    sync.compression = "fp16"
    assert averages(sync, parameters, rank) == transport


MIB = 2**20


@on_ranks(2, timeout=60.0)
def test_where_signals_interrupt_memory_is_claimed_in_pieces_and_not_for_ever(rank: int, world_size: int) -> None:
    """As before Linux 6.11, where a call that does not end between two signals begins anew at each."""
    small = engine_of([5_000])
    averages(small[1], small[0], rank)
    refuse(claims_above(4 * MIB), errno.EINTR)
    large = engine_of([5 * MIB])
    assert averages(large[1], large[0], rank) == "shared memory"
    refuse(Call("fallocate"), errno.EINTR)
    parameters, sync = engine_of([100_000])
    transport = averages(sync, parameters, rank)
    assert re.fullmatch(
        r"process group \(no shared memory: rank 0: fallocate of \d+ bytes: Interrupted system call\)", transport
    )
    assert averages(small[1], small[0], rank) == "shared memory"


@on_ranks(2)
def test_one_rank_can_turn_it_off(rank: int, world_size: int) -> None:
    off = "process group (no shared memory: rank 1: FASTSYNC_SHARED_MEMORY=0)"
    for word, transport in (("1", "shared memory"), ("0", off), ("", "shared memory")):
        if rank == 1:
            os.environ["FASTSYNC_SHARED_MEMORY"] = word
        parameters, sync = engine_of([5_000])
        assert averages(sync, parameters, rank) == transport


@on_ranks(1)
def test_a_word_that_turns_it_neither_on_nor_off_is_refused(rank: int, world_size: int) -> None:
    os.environ["FASTSYNC_SHARED_MEMORY"] = "nein"
    said = "FASTSYNC_SHARED_MEMORY: expected 0 or 1, got 'nein'"
    refused(lambda: fastsync.attach(parameters_of([3])), said)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    refused(lambda: fastsync.register_comm_hook(ddp), said)
    assert said in fastsync._C.shared_memory_obstacle()


def open_memory_in(folder: str) -> bool:
    """Whether a process has memory in this folder of /proc, and lets this one open it."""
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            if "memfd:fastsync" in os.readlink(f"{folder}/{name}"):
                os.close(os.open(f"{folder}/{name}", os.O_RDWR))
                return True
    return False


def opens_as_another_user(folder: str) -> bool:
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            os._exit(open_memory_in(folder))
        except PermissionError:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 77


def _others_try_while_it_is_shared(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether somebody of the same user, and of another one, can open the memory that rank 0 has made."""
    parameters, sync = engine_of([5_000], group=dist.new_group(timeout=TIMEOUT / 2))
    set_grads(parameters, float(rank))
    if rank == 1:
        end_at(OPENS_MEMORY, signal.SIGSTOP)

    def wait() -> None:
        refused(lambda: sync.synchronize(), "Where the ranks are: rank 1", kind=RuntimeError)

    waiting = threading.Thread(target=wait)
    waiting.start()
    folder = f"/proc/{os.getpid()}/fd"
    while not open_memory_in(folder):
        time.sleep(0.01)
    found = True, opens_as_another_user(folder)
    waiting.join()
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_no_other_user_opens_the_memory() -> None:
    assert run_ranks(_others_try_while_it_is_shared, 2, lost=[1])[0] == (True, False)


@on_ranks(2)
def test_what_is_shared_has_no_file_that_stays_open(rank: int, world_size: int) -> None:
    parameters, sync = engine_of([5_000])
    assert averages(sync, parameters, rank) == "shared memory"
    assert not open_memory_in("/proc/self/fd")


# ---- a rank ends ----------------------------------------------------------------------------------------------------


def _dies_with_a_child(rank: int, world_size: int) -> None:
    parameters, sync = engine_of([5_000])
    averages(sync, parameters, rank)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    averages(sync, parameters, rank)


def test_a_child_does_not_keep_its_rank_alive() -> None:
    refused(lambda: run_ranks(_dies_with_a_child, 2), "rank 1 has ended", kind=RankError)


def take(begin: int, end: int) -> None:
    """Puts memory of this process's own at these addresses, where there is none."""
    mmap = ctypes.CDLL(None).mmap
    mmap.restype = ctypes.c_void_p
    readable_and_writable, private_anonymous, fixed_noreplace = 3, 0x22, 0x100000
    flags = private_anonymous | fixed_noreplace
    assert mmap(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), readable_and_writable, flags, -1, 0) == begin


@on_ranks(2)
def test_goes_on_after_a_fork(rank: int, world_size: int) -> None:
    parameters, sync = engine_of([5_000])
    averages(sync, parameters, rank)
    mappings = shared_mappings()
    assert len(mappings) == 1
    child = os.fork()
    if child == 0:  # nothing of its parent's is open, and what has taken its place stays
        for begin, end in mappings:
            take(begin, end)
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        sync.detach()
        del sync
        gc.collect()
        for file in files:
            os.fstat(file)
        for begin, end in mappings:
            assert not any(ctypes.string_at(begin, end - begin))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert averages(sync, parameters, rank) == "shared memory"


@on_ranks(2)
def test_a_rank_that_leaves_is_named(rank: int, world_size: int) -> None:
    group = dist.new_group()
    parameters, sync = engine_of([5_000], group=group)
    averages(sync, parameters, rank)
    if rank == 1:
        sync.detach()
        del parameters, sync
        gc.collect()
        dist.barrier()
        return
    refused(lambda: averages(sync, parameters, rank), "rank 1 has ended, or has left the process", kind=RuntimeError)
    dist.barrier()
