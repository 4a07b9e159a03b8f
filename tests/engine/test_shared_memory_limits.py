"""How many cores ranks may count on where control groups limit them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from fastsync import _C
from tests.ranks import run_ranks

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


TREES: dict[str, tuple[str, dict[str, str], int | None]] = {
    # /proc/self/cgroup, each folder's cpu.max, and how many CPUs that leaves, where it limits them
    "none": ("0::/\n", {}, None),
    "no limit": ("0::/\n", {"": "max 100000"}, None),
    "more than there are": ("0::/\n", {"": "100000000 100000"}, None),
    "of a container": ("0::/\n", {"": "100000 100000"}, 1),
    "a part of one": ("0::/\n", {"": "20000 100000"}, 1),
    "of a container that hides its path": ("0::/docker/5f3a\n", {"": "100000 100000"}, 1),
    "nested": ("4:cpu:/a\n0::/job/step\n", {"job/step": "50000 50000", "job": "max 100000"}, 1),
    "around it": ("0::/job/step\n", {"job/step": "max 100000", "job": "100000 100000"}, 1),
    "version 1": ("4:cpu:/job\n", {"job": "100000 100000"}, None),
}


def _usable_cores(rank: int, world_size: int, own_groups: Path) -> list[int]:
    own_mounts()
    mount(own_groups, Path("/proc/self/cgroup"), "", flags=0x1000)
    found = []
    for groups, folders, _ in TREES.values():
        mount("none", CGROUPS, "tmpfs")
        own_groups.write_text(groups)
        for folder, quota in folders.items():
            (CGROUPS / folder).mkdir(parents=True, exist_ok=True)
            (CGROUPS / folder / "cpu.max").write_text(f"{quota}\n")
        found.append(_C.num_usable_cores())
    return found


@needs_root
def test_the_cpu_quotas_of_cgroups_are_heeded(tmp_path: Path) -> None:
    own_groups = tmp_path / "cgroup"
    own_groups.touch()
    [found] = run_ranks(_usable_cores, 1, own_groups)
    for (name, (_, _, limit)), cores in zip(TREES.items(), found, strict=True):
        assert cores == (len(os.sched_getaffinity(0)) if limit is None else limit), name
