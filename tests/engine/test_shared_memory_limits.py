"""Shared memory where a host does not give it: memory that is limited, a full /dev/shm, ranks of several networks."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from benchmarks.network.launch import run_in_namespaces
from benchmarks.network.namespaces import Network
from benchmarks.units import RATES
from fastsync import _C, doctor
from tests.engine.system_calls import before
from tests.engine.test_shared_memory import TIMEOUT, averages, engine_of
from tests.ranks import on_ranks, run_ranks

MIB = 2**20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, which only root may do")
CGROUPS = Path("/sys/fs/cgroup")


# ---- control groups -------------------------------------------------------------------------------------------------


def memory_cgroups() -> tuple[Path, str]:
    """Where groups may be made that limit memory, of either version, and the file that holds the limit."""
    version_2 = CGROUPS / "cgroup.subtree_control"
    if version_2.exists() and "memory" in version_2.read_text().split():
        return CGROUPS, "memory.max"
    if (CGROUPS / "memory" / "memory.limit_in_bytes").exists():
        return CGROUPS / "memory", "memory.limit_in_bytes"
    pytest.skip("this system has no control groups that limit memory")


@pytest.fixture
def memory_cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """One of so many bytes, in one that has no limit."""
    root, limit = memory_cgroups()
    outer = root / f"fastsync-tests-{os.getpid()}"
    inner = outer / "inner"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"this machine or its container does not let its user make control groups: {error}")
    try:
        if (outer / "cgroup.subtree_control").exists():
            (outer / "cgroup.subtree_control").write_text("+memory")
        (outer / limit).write_text(str(request.param))
        inner.mkdir()
        yield inner
    finally:
        if inner.exists():
            inner.rmdir()
        outer.rmdir()


def _in_a_cgroup(rank: int, world_size: int, cgroup: Path, size: int) -> None:
    parameters, sync = engine_of([size])
    parameters[0].data.fill_(1.0)  # so that the memory is there before
    parameters[0].grad = torch.ones(size)
    if rank == 1:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    small = engine_of([5_000])
    assert averages(small[1], small[0], rank) == "shared memory"
    for step in range(2):
        parameters[0].grad.fill_(float(rank + step))
        sync.synchronize()
        assert parameters[0].grad.min() == parameters[0].grad.max() == 0.5 + step  # without a copy
        transport = sync.stats().describe_transport()
        assert transport.startswith("process group (no shared memory: rank 1: the memory cgroup has "), transport
        assert transport.endswith(" are needed)")
    assert averages(small[1], small[0], rank) == "shared memory"


@pytest.mark.parametrize("memory_cgroup", [60 * MIB], indirect=True)
def test_a_rank_whose_cgroup_has_too_little_memory_is_not_killed(memory_cgroup: Path) -> None:
    """Two ranks' rows of 32 MiB would not fit; one's fits, which is what messages take."""
    run_ranks(_in_a_cgroup, 2, memory_cgroup, 32 * MIB // 4)


def _all_in_a_cgroup(rank: int, world_size: int, cgroup: Path, size: int) -> None:
    parameters, sync = engine_of([size])
    parameters[0].data.fill_(1.0)
    parameters[0].grad = torch.full((size,), float(rank))
    (cgroup / "cgroup.procs").write_text(str(os.getpid()))
    if rank == 2:
        before("recvmsg", partial(time.sleep, 1))  # the others have their memory by then
    sync.synchronize()
    assert parameters[0].grad.min() == parameters[0].grad.max() == 1.0
    assert sync.stats().transport == "shared_memory"


@pytest.mark.parametrize("memory_cgroup", [(96 + 24) * MIB], indirect=True)
def test_what_other_ranks_have_claimed_is_not_needed_any_more(memory_cgroup: Path) -> None:
    """Three rows of 32 MiB, and less than another 96 MiB left when two ranks have claimed theirs."""
    run_ranks(_all_in_a_cgroup, 3, memory_cgroup, 32 * MIB // 4)


def own_mounts() -> None:
    """What this thread mounts from now on only it sees."""
    new_namespace, private = 0x20000, 0x44000
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(new_namespace) == 0, os.strerror(ctypes.get_errno())
    mount("none", Path("/"), "", private)


def mount(source: Path | str, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    texts = [str(text).encode() for text in (source, target, kind)]
    assert libc.mount(*texts, ctypes.c_ulong(flags), options.encode()) == 0, os.strerror(ctypes.get_errno())


def version_1(limit: int, used: int, reclaimable: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {reclaimable}\n",
    }


def version_2(limit: int | str, used: int, reclaimable: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 1\ninactive_file {reclaimable}\n",
    }


TREES: dict[str, tuple[str, dict[str, dict[str, str]], int | None]] = {
    # /proc/self/cgroup, what lies in which folder of /sys/fs/cgroup, and what is left, where it is not enough
    "none": ("0::/\n", {}, None),
    "enough": ("0::/\n", {"": version_2(90, 80)}, None),
    "no limit": ("0::/\n", {"": version_2("max", 80)}, None),
    "of a container": ("0::/\n", {"": version_2(80, 90)}, -10),
    "of a container that hides its path": ("0::/docker/5f3a\n", {"": version_2(80, 90)}, -10),
    "with files that can go": ("0::/\n", {"": version_2(80, 90, 3)}, -7),
    "nested": ("0::/job/step\n", {"job/step": version_2(80, 90, 3), "job": version_2(200, 90)}, -7),
    "around it": ("0::/job/step\n", {"job/step": version_2("max", 50), "job": version_2(80, 90)}, -10),
    "version 1": ("9:pids:/a\n4:memory:/job\n0::/b\n", {"memory/job": version_1(80, 90, 3)}, -7),
    "version 1, around it": ("4:cpu,memory:/job/step\n", {"memory/job": version_1(80, 90)}, -10),
    "version 1, of a container": ("4:memory:/docker/5f3a\n", {"memory": version_1(80, 90)}, -10),
    "version 1, no limit": ("4:memory:/\n", {"memory": version_1(2**63 - 4096, 90)}, None),
    "another controller's": ("4:pids:/job\n", {"pids/job": version_1(80, 90)}, None),
}


def _obstacles(rank: int, world_size: int, own_groups: Path) -> list[str]:
    own_mounts()
    mount(own_groups, Path("/proc/self/cgroup"), "", flags=0x1000)
    mount("none", CGROUPS, "tmpfs")
    obstacles = []
    for groups, folders, _ in TREES.values():
        own_groups.write_text(groups)
        for folder, files in folders.items():
            (CGROUPS / folder).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (CGROUPS / folder / name).write_text(text)
        obstacles.append(_C.shared_memory_obstacle())
        for path in CGROUPS.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return obstacles


@needs_root
def test_what_cgroups_leave(tmp_path: Path) -> None:
    own_groups = tmp_path / "cgroup"
    own_groups.touch()
    [obstacles] = run_ranks(_obstacles, 1, own_groups)
    for (name, (_, _, left)), obstacle in zip(TREES.items(), obstacles, strict=True):
        expected = "" if left is None else f"the memory cgroup has {left} bytes left, and 1 are needed"
        assert obstacle == expected, name


# ---- /dev/shm -------------------------------------------------------------------------------------------------------


@needs_root
@on_ranks(2)
def test_dev_shm_does_not_matter(rank: int, world_size: int) -> None:
    """Containers have one of 64 MiB, as a rule."""
    own_mounts()
    shm = Path("/dev/shm")
    mount("none", shm, "tmpfs", options="size=4096")
    (shm / "all there is").write_bytes(bytes(4096))
    parameters, sync = engine_of([3 * MIB])
    assert averages(sync, parameters, rank) == "shared memory"
    assert os.listdir(shm) == ["all there is"]


# ---- network namespaces ---------------------------------------------------------------------------------------------


def _over_links() -> tuple[str, str, str]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    parameters, sync = engine_of([5_000])
    transport = averages(sync, parameters, dist.get_rank())
    assert averages(sync, parameters, dist.get_rank()) == transport
    said = str(sync.explain())
    hook = hook_on_a_model()
    dist.destroy_process_group()
    return transport, said, hook


def hook_on_a_model() -> str:
    """How its gradients travel."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    hook = fastsync.register_comm_hook(ddp)
    ddp(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((2, 3), 0.5))
    return hook.stats().describe_transport()


@pytest.mark.end_to_end
@pytest.mark.usefixtures("namespaces")
def test_ranks_in_several_network_namespaces_send_messages() -> None:
    """As pods have them, on one host or on several."""
    with Network(2, RATES["gbit"]) as network:
        told = run_in_namespaces(network, 1, _over_links)
    for transport, explained, of_hook in told:
        assert transport == "process group (no shared memory: no two ranks are on one host, in one network namespace)"
        assert transport in explained
        assert of_hook == transport


def test_doctor_says_who_can_share(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main()
    assert "between CPU ranks of this host and network namespace" in capsys.readouterr().out
