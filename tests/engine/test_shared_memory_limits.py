"""Shared memory where a control group limits memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from fastsync import _C
from tests.engine.test_shared_memory import averages, engine_of
from tests.ranks import on_ranks, run_ranks

MIB = 2**20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems, which only root may do")
CGROUPS = Path("/sys/fs/cgroup")


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


# ---- control groups -------------------------------------------------------------------------------------------------


def write_group(folder: str, limit: int | str, used: int, reclaimable: int = 0) -> None:
    path = CGROUPS / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 1\ninactive_file {reclaimable}\n")


@needs_root
@on_ranks(2)
def test_a_rank_whose_cgroup_has_too_little_memory_is_not_killed(rank: int, world_size: int) -> None:
    """Two ranks' rows of 32 MiB would not fit; one's fits, which is what messages take."""
    if rank == 1:
        own_mounts()
        mount("none", CGROUPS, "tmpfs")
        write_group("", 80 * MIB, 20 * MIB)
    small = engine_of([5_000])
    assert averages(small[1], small[0], rank) == "shared memory"
    large = engine_of([32 * MIB // 4])
    for _ in range(2):
        transport = averages(large[1], large[0], rank)
        assert transport.startswith(
            f"process group (no shared memory: rank 1: the memory cgroup has {60 * MIB} bytes left, and "
        )
    assert averages(small[1], small[0], rank) == "shared memory"


TREES: dict[str, tuple[str, dict[str, tuple[int | str, int, int]], int | None]] = {
    # /proc/self/cgroup, each folder's limit, use and what can go of it, and what is left, where it is not enough
    "none": ("0::/\n", {}, None),
    "enough": ("0::/\n", {"": (90, 80, 0)}, None),
    "no limit": ("0::/\n", {"": ("max", 80, 0)}, None),
    "of a container": ("0::/\n", {"": (80, 90, 0)}, -10),
    "of a container that hides its path": ("0::/docker/5f3a\n", {"": (80, 90, 0)}, -10),
    "with files that can go": ("0::/\n", {"": (80, 90, 3)}, -7),
    "nested": ("4:cpu:/a\n0::/job/step\n", {"job/step": (80, 90, 3), "job": (200, 90, 0)}, -7),
    "around it": ("0::/job/step\n", {"job/step": ("max", 50, 0), "job": (80, 90, 0)}, -10),
    "version 1": ("4:memory:/job\n", {"job": (80, 90, 0)}, None),
}


def _obstacles(rank: int, world_size: int, own_groups: Path) -> list[str]:
    own_mounts()
    mount(own_groups, Path("/proc/self/cgroup"), "", flags=0x1000)
    obstacles = []
    for groups, folders, _ in TREES.values():
        mount("none", CGROUPS, "tmpfs")
        own_groups.write_text(groups)
        for folder, numbers in folders.items():
            write_group(folder, *numbers)
        obstacles.append(_C.shared_memory_obstacle())
    return obstacles


@needs_root
def test_what_cgroups_leave(tmp_path: Path) -> None:
    own_groups = tmp_path / "cgroup"
    own_groups.touch()
    [obstacles] = run_ranks(_obstacles, 1, own_groups)
    for (name, (_, _, left)), obstacle in zip(TREES.items(), obstacles, strict=True):
        expected = "" if left is None else f"the memory cgroup has {left} bytes left, and 1 are needed"
        assert obstacle == expected, name
