"""Ranks that run out of batches at different times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fastsync
from fastsync.compression import parse_compression
from tests.models import SMALL_BUCKETS, Given, assert_same_on_all_ranks
from tests.ranks import on_ranks, run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 3))


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _joins(rank: int, world_size: int, num_steps: list[int], wire: str, weighted: bool) -> None:
    model, reference = _model(), _model()
    sync = fastsync.attach(model, parse_compression(wire), bucket_cap_mb=SMALL_BUCKETS, broadcast_buffers=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    weights = [1.0 + other if weighted else 1.0 for other in range(world_size)]
    if weighted:
        sync.set_weight(weights[rank])
    for epoch in range(2):
        with sync.join():
            for step in range(num_steps[rank]):
                model.zero_grad()
                model(_inputs(rank, 10 * epoch + step)).square().mean().backward()
                if wire == "none" and epoch == 0:
                    reference.zero_grad()
                    active = [other for other in range(world_size) if step < num_steps[other]]
                    for other in active:
                        share = weights[other] / sum(weights[each] for each in active)
                        (reference(_inputs(other, step)).square().mean() * share).backward()
                    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
                for optimizer in optimizers:
                    optimizer.step()
        assert_same_on_all_ranks([p.detach() for p in model.parameters()])
        assert_same_on_all_ranks([b.float() for b in model.buffers()])
    assert sync.stats().num_steps == 2 * (max(num_steps) + 1)
    model(_inputs(rank, 99)).sum().backward()  # and afterwards it is as before
    assert_same_on_all_ranks([p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    ("num_steps", "wire", "weighted", "shared_memory"),
    [([4, 2], "none", False, True), ([0, 3], "none", True, False), ([2, 2, 5], "int8+ef", False, True)],
)
def test_join(num_steps: list[int], wire: str, weighted: bool, shared_memory: bool) -> None:
    run_ranks(_joins, len(num_steps), num_steps, wire, weighted, shared_memory=shared_memory)


@pytest.mark.parametrize("broadcast_buffers", [True, "mean"])
@on_ranks(3)
def test_ranks_without_batches_do_not_count(rank: int, world_size: int, broadcast_buffers: bool | str) -> None:
    """What rides and buffers go on with the ranks that still have batches."""
    model = nn.BatchNorm1d(1, momentum=1.0, affine=True)
    sync = fastsync.attach(model, broadcast_buffers=broadcast_buffers)
    with sync.join():
        for step in range(3 if rank else 1):
            sync.piggyback("rank", torch.tensor(float(rank)))
            model(torch.tensor([[9.0 * step + rank], [9.0 * step + rank]])).sum().backward()
            active = [0, 1, 2] if step == 0 else [1, 2]
            assert sync.piggybacked()["rank"] == sum(active) / len(active)
            assert model.running_mean is not None
            if broadcast_buffers == "mean":
                assert model.running_mean.item() == pytest.approx(9 * step + sum(active) / len(active))
            else:  # of the first that has batches
                assert model.running_mean.item() == [0, 10, 19][step]
    assert model.running_mean.item() == pytest.approx(19.5 if broadcast_buffers == "mean" else 19)


@on_ranks(2, timeout=40.0)
def test_what_rides_first_where_ranks_have_run_out(rank: int, world_size: int) -> None:
    """Rank 0 has no batch at all in the first loop, and one less in the second."""
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    message = r"rank 0: nothing; rank 1: piggybacked value loss of shape \[\]"
    with pytest.raises(ValueError, match=message), sync.join():  # noqa: PT012
        if rank == 1:
            sync.piggyback("loss", torch.tensor(1.0))
            model([torch.ones(3)]).backward()
    model = Given([torch.ones(3)])
    sync = fastsync.attach(model)
    with sync.join():
        for step in range(1 + rank):
            sync.piggyback("loss", torch.tensor(1.0 + rank))
            if step == 1:
                with pytest.raises(ValueError, match=r"'new' of shape \[2\] is new, and ranks that have run out"):
                    sync.piggyback("new", torch.ones(2))
            model([torch.ones(3)]).backward()
            assert sync.piggybacked()["loss"] == (1.5 if step == 0 else 2.0)
    sync.piggyback("new", torch.ones(2))
    model([torch.ones(3)]).backward()
    assert sync.piggybacked()["new"].tolist() == [1.0, 1.0]


@on_ranks(2)
def test_nobody_waits_for_ever(rank: int, world_size: int) -> None:
    """One that leaves its loop by an error keeps nobody waiting beyond the time-out."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    model = _model()
    sync = fastsync.attach(model, process_group=group)
    if rank == 1:
        with pytest.raises(ArithmeticError), sync.join():
            raise ArithmeticError
        dist.barrier()
        return
    with pytest.raises(RuntimeError, match="rank 1"), sync.join():
        model(_inputs(rank, 0)).sum().backward()
    dist.barrier()


@on_ranks(2, timeout=40.0)
def test_what_is_refused_inside_a_join(rank: int, world_size: int) -> None:
    """What cannot end well is refused where it begins, on every rank, and the loop goes on."""
    models = [Given([torch.ones(3)]) for _ in range(2)]
    first, second = (fastsync.attach(model) for model in models)
    refused: dict[str, Callable[[], object]] = {
        r"join\(\) was called inside another join\(\).*nn\.ModuleList": lambda: first.join().__enter__(),
        r"join\(\) was called inside another join\(\)": lambda: second.join().__enter__(),
        r"use_group\(\) was called inside join\(\); call it after": lambda: first.use_group(None),
        r"detach\(\) was called inside join\(\); call it after": first.detach,
    }
    for _ in range(2):
        with first.join():
            for message, call in refused.items():
                with pytest.raises(RuntimeError, match=message):
                    call()
            second.use_group(None)
            for step in range(1 + rank):
                models[0]([torch.full((3,), 1.0 + rank)]).backward()
                assert models[0].weights[0].grad.tolist() == [2.0 if step else 1.5] * 3
                models[0].zero_grad()
    for sync in (first, second):
        sync.detach()
