"""Checks that what is to be measured fits into memory, before it is allocated."""

from pathlib import Path

import torch

from benchmarks.units import format_bytes

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Bytes of main memory that this machine, and the container if it is one, can still give; None if it is unknown."""
    known = []
    if MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        known.append(1024 * int(lines["MemAvailable"].split()[0]))
    limit, current = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and current.exists() and limit.read_text().strip() != "max":
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        cached = int(statistics.get("inactive_file", 0))  # which the kernel drops when it needs the room
        known.append(int(limit.read_text()) - int(current.read_text()) + cached)
    return min(known, default=None)


def available_on(device: torch.device) -> int | None:
    """Bytes that ``device`` can still give; None if it is unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available()


def check_fits(what: str, needed: int, free: int | None, way_out: str) -> None:
    """Refuses what does not fit.

    Raises:
        ValueError: ``needed`` bytes are more than the ``free`` ones. It names both, and the way out.
    """
    if free is not None and needed > free:
        mib = 2**20
        needed_text, free_text = format_bytes(-(-needed // mib) * mib), format_bytes(free // mib * mib)
        raise ValueError(f"{what} takes about {needed_text} of memory, and {free_text} are free: {way_out}")


def check_ranks_fit(
    what: str, needed: int, nproc: int, way_out: str, cpu: bool = False, share_gpus: bool = False
) -> None:
    """Refuses what does not fit, ``needed`` bytes a rank: all ranks' share into main memory, or that of a GPU's ranks.

    With ``cpu`` ranks compute there though each could have a GPU; with ``share_gpus`` they share those that there are.

    Raises:
        ValueError: it does not fit.
    """
    gpus = 0 if cpu else torch.cuda.device_count()
    if nproc <= gpus or (share_gpus and gpus):
        for index in range(min(nproc, gpus)):
            check_fits(what, -(-nproc // gpus) * needed, available_on(torch.device("cuda", index)), way_out)
    else:
        check_fits(what, nproc * needed, available(), way_out)
