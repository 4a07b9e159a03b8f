"""The fake device itself: it finds what it is there to find, and nothing where all is well."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests import fake_device
from tests.fake_device import DEVICE, unwaited, watched


def _streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)


def _finds_races(rank: int, world_size: int) -> None:
    fake_device.load()
    one, other = _streams()
    with one:
        shared = torch.ones(100, device=DEVICE)
    with watched(), other:
        other.wait_stream(one)
        shared.add_(1)
    with (
        pytest.raises(AssertionError, match=r"race: nothing orders aten::mul \(reads.*after aten::add.* \(writes"),
        watched(),
        one,
    ):
        shared * 2
    one.wait_stream(other)
    with watched():  # two that read
        with one:
            event = one.record_event()
            shared.sum()
        other.wait_event(event)
        with other:
            shared.sum()
    with pytest.raises(AssertionError, match="race"), watched(), one:
        shared.zero_()  # the other stream may still be reading


def test_accesses_that_nothing_orders_are_found() -> None:
    fake_device.run_ranks(_finds_races, 1)


def _finds_what_is_let_go(rank: int, world_size: int) -> None:
    fake_device.load()
    one, other = _streams()

    def used_by_other() -> Tensor:
        with one:
            tensor = torch.ones(100, device=DEVICE)
        other.wait_stream(one)
        with other:
            tensor.sum()
        return tensor

    with pytest.raises(AssertionError, match=r"let go too early: 400 bytes.*aten::sum \(reads"), watched():
        used_by_other()
    with watched():
        used_by_other().record_stream(other)
    with watched():
        tensor = used_by_other()
        one.wait_stream(other)
        del tensor
    with one:
        tensor = torch.ones(100, device=DEVICE)
        del tensor
        reused = torch.empty(100, device=DEVICE)
    with pytest.raises(AssertionError, match=r"race.* after allocation"), watched(), other:
        reused.fill_(1)  # whoever had that memory before may still use it
    with watched():
        assert torch.empty(3, device=DEVICE).isnan().all().item()


def test_memory_that_is_let_go_too_early_is_found() -> None:
    fake_device.run_ranks(_finds_what_is_let_go, 1)


def _counts_waits(rank: int, world_size: int) -> None:
    fake_device.load()
    tensor = torch.ones(3, device=DEVICE)
    pinned = torch.ones(3, pin_memory=True)
    with unwaited():
        (tensor + 1).sqrt().mean()
        tensor.copy_(pinned, non_blocking=True)
        pinned.copy_(tensor, non_blocking=True)
        event = torch.Event(device=DEVICE)
        event.record()
        assert event.query()
    for wait in (
        lambda: tensor.sum().item(),
        lambda: tensor.cpu(),
        lambda: torch.ones(3).to(DEVICE, non_blocking=True),  # it is not pinned
        lambda: tensor.copy_(pinned),
        lambda: tensor.nonzero(),
        lambda: tensor.equal(tensor),
        event.synchronize,
    ):
        with pytest.raises(AssertionError, match="the host waited for"), unwaited():
            wait()


def test_what_the_host_waits_for_is_counted() -> None:
    fake_device.run_ranks(_counts_waits, 1)


def _follows_nccls_rules(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    backend = fake_device.backend_of(group)
    device = torch.device(DEVICE)
    tensor = torch.full((4,), 1.0 + rank, device=DEVICE)
    with watched():
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        assert backend.kept_bytes() == 16
        work.wait()
        assert backend.kept_bytes() == 0
        tensor.add_(0)
    dist.all_reduce(tensor, group=group, async_op=True)
    with pytest.raises(AssertionError, match=r"race.* after allreduce"), watched():
        tensor.add_(0)

    group._start_coalescing(device)
    assert group._end_coalescing(device) is None
    before = tensor.clone()
    group._start_coalescing(device)
    group.allreduce([tensor]).wait()  # for nothing
    assert tensor.equal(before)  # not yet
    group._end_coalescing(device).wait()
    assert tensor.equal(2 * before)

    backend.fail_after(1)
    dist.all_reduce(tensor, group=group)
    with pytest.raises(RuntimeError, match="allreduce failed, as the group was told to"):
        dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)


def test_the_group_follows_nccls_rules() -> None:
    fake_device.run_ranks(_follows_nccls_rules, 2)


def _runs_at_once(rank: int, world_size: int) -> None:
    group = fake_device.new_group()
    fake_device.backend_of(group).run_at_once()
    device = torch.device(DEVICE)
    tensor, sent, got = (torch.full((4,), 1.0 + rank, device=DEVICE) for _ in range(3))

    def given() -> list[dist.Work]:
        group._start_coalescing(device)
        works = [group.allreduce([tensor]), group.recv([got], 1 - rank, 0), group.send([sent], 1 - rank, 0)]
        group._end_coalescing(device).wait()  # for nothing
        return works

    with watched():
        for work in given():
            work.wait()
        assert tensor.tolist() == [3.0] * 4
        assert got.tolist() == [2.0 - rank] * 4
    touches = {"allreduce": lambda: tensor.add_(0), "recv": lambda: got + 1, "send": lambda: sent.zero_()}
    for call, touch in touches.items():
        works = given()
        with pytest.raises(AssertionError, match=rf"race.* after {call}"), watched():
            touch()
        for work in works:
            work.wait()


def test_a_group_whose_calls_run_at_once() -> None:
    fake_device.run_ranks(_runs_at_once, 2)
