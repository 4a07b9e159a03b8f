"""The fake device itself: it finds what it is there to find, and nothing where all is well."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import fake_device
from tests.fake_device import DEVICE, unwaited, watched


@fake_device.on_ranks(1)
def test_races_and_memory_that_is_let_go_too_early(rank: int, world_size: int) -> None:
    fake_device.load()
    one, other = (torch.Stream(device=DEVICE) for _ in range(2))

    def used_by_other() -> Tensor:
        with one:
            tensor = torch.ones(100, device=DEVICE)
        other.wait_stream(one)
        with other:
            tensor.sum()
        return tensor

    with watched():
        kept = used_by_other()
        with one:
            kept.sum()  # two that read
    with pytest.raises(AssertionError, match="race: nothing orders"), watched(), one:
        kept.zero_()  # the other stream may still be reading
    with pytest.raises(AssertionError, match="let go too early: 400 bytes"), watched():
        used_by_other()
    with watched():
        used_by_other().record_stream(other)
        tensor = used_by_other()
        one.wait_stream(other)
        del tensor
        assert torch.empty(3, device=DEVICE).isnan().all().item()


@fake_device.on_ranks(1)
def test_what_the_host_waits_for_is_counted(rank: int, world_size: int) -> None:
    fake_device.load()
    tensor, pinned = torch.ones(3, device=DEVICE), torch.ones(3, pin_memory=True)
    with unwaited():
        tensor.copy_(pinned, non_blocking=True)
        event = torch.Event(device=DEVICE)
        event.record()
        assert event.query()
    for wait in (
        lambda: tensor.sum().item(),
        lambda: torch.ones(3).to(DEVICE, non_blocking=True),  # it is not pinned
        lambda: tensor.copy_(pinned),
        event.synchronize,
    ):
        with pytest.raises(AssertionError, match="the host waited for"), unwaited():
            wait()


@fake_device.on_ranks(2, cases={"runs_at_once": [False, True]})
def test_the_group_follows_nccls_rules(rank: int, world_size: int, runs_at_once: bool) -> None:
    group, device = fake_device.new_group(), torch.device(DEVICE)
    if runs_at_once:
        fake_device.backend_of(group).run_at_once()
    tensor = torch.full((4,), 1.0 + rank, device=DEVICE)
    with watched():
        dist.all_reduce(tensor, group=group)
        tensor.add_(0)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    with pytest.raises(AssertionError, match=r"race.* after allreduce"), watched():
        tensor.add_(0)
    work.wait()
    group._start_coalescing(device)
    inner = group.allreduce([tensor])
    works = [group._end_coalescing(device), inner]
    works[runs_at_once].wait()  # the other is none, or for nothing
    assert tensor.tolist() == [12.0] * 4
