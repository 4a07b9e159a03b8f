"""What the engine does beside backward takes no threads of its own to do it."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from fastsync import Compression
from tests.ranks import on_ranks

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.exists(), reason="this system does not list threads in /proc")


def _threads() -> Counter[str]:
    """By name, which OpenMP's threads have from the one whose team they are."""
    names: Counter[str] = Counter()
    for task in TASKS.iterdir():
        with suppress(OSError):  # it has just ended
            names[(task / "comm").read_text().strip()] += 1
    return names


def _new_threads(entry_point: str, compression: Compression) -> Counter[str]:
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(3)])  # several buckets, of several chunks each
    inputs = torch.randn(8, 300) + torch.distributed.get_rank()
    model(inputs).sum().backward()
    before = _threads()
    if entry_point == "attach":
        averaged = model
        handle: object = fastsync.attach(model, compression, bucket_cap_mb=0.3)
    else:
        averaged = DistributedDataParallel(model, bucket_cap_mb=0.3)
        handle = fastsync.register_comm_hook(averaged, compression)
    for _ in range(2):
        averaged(inputs).sum().backward()
    new = _threads() - before
    del handle
    return new


@pytest.mark.parametrize(("world_size", "shared_memory"), [(2, True), (4, False)])
@on_ranks(parametrized=("shared_memory",))
def test_a_thread_beside_backward_has_no_openmp_team(rank: int, world_size: int) -> None:
    torch.set_num_threads(2)
    one_shot, two_shot = (Compression("fp16", reduce="fp32", algorithm=each) for each in ("one_shot", "two_shot"))
    cases = [("attach", two_shot), ("hook", two_shot), ("hook", one_shot), ("hook", Compression("bf16"))]
    if world_size == 4:
        cases = [("attach", Compression("int8", ranks_per_node=2, error_feedback=True))]
    for entry_point, compression in cases:
        new = _new_threads(entry_point, compression)
        assert new.pop("fastsync", 0) <= 1, f"{entry_point}, {compression}"
        assert new.keys() <= {"fastsync alive"}, f"{entry_point}, {compression}: {new}"
        assert torch.get_num_threads() == 2
