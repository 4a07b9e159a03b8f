"""Ranks that train on the same data are told so once: in the first step all of them have the same gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastsync
from tests.models import SMALL_BUCKETS, Given, Mlp, batch
from tests.ranks import on_ranks

MESSAGE = "have the same gradients in their first step"

Loss = Callable[[int, int], torch.Tensor]


def _warnings_of(loss_of: Loss, rank: int, steps: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(steps):
            loss_of(rank, step).backward()
    return [str(each.message) for each in said if MESSAGE in str(each.message)]


def _attached(model: nn.Module, **options: Any) -> nn.Module:
    fastsync.attach(model, bucket_cap_mb=SMALL_BUCKETS, **options)
    return model


def _hooked(model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS)
    fastsync.register_comm_hook(ddp)
    return ddp


@pytest.mark.parametrize("shared_memory", [True, False])
@on_ranks(2, parametrized=("shared_memory",))
def test_ranks_with_the_same_data_are_told(rank: int, world_size: int) -> None:
    for way in (_attached, _hooked):
        torch.manual_seed(0)
        model = way(Mlp())
        said = _warnings_of(lambda rank, step: model(batch(0, step)).square().mean(), rank)  # noqa: B023
        assert len(said) == (rank == 0), (way, said)
        if said:
            assert said[0].startswith(f"fastsync: all {world_size} ranks")


def _one_hot(rank: int, step: int) -> torch.Tensor:
    return nn.functional.one_hot(torch.tensor([[rank + step]]), 8).float()


@on_ranks(3)
def test_others_are_left_alone(rank: int, world_size: int) -> None:
    for way in (_attached, _hooked):
        model = way(Mlp())
        assert not _warnings_of(lambda rank, step: model(batch(rank, step)).square().mean(), rank)  # noqa: B023
        # One number of each gradient would be the same: its sum, or its norm.
        narrow = way(nn.Linear(8, 2, bias=False))
        assert not _warnings_of(lambda rank, step: narrow(_one_hot(rank, step)).sum(), rank)  # noqa: B023
        # Most of the last layer's gradients do not depend on the data; one rank of three is another.
        assert not _warnings_of(lambda rank, step: model(batch(rank // 2, step)).sum(), rank)  # noqa: B023
        zero = way(Given([torch.ones(3)]))
        assert not _warnings_of(lambda rank, step: zero([torch.zeros(3)]), rank)  # noqa: B023
        infinite = way(Given([torch.ones(3)]))
        assert not _warnings_of(lambda rank, step: infinite([torch.full((3,), torch.inf)]), rank)  # noqa: B023
    later = _attached(Mlp())
    batches = [batch(rank, 0), batch(0, 1), batch(0, 2)]
    assert not _warnings_of(lambda rank, step: later(batches[step]).square().mean(), rank, steps=3)
    weighted, joined, alone = Mlp(), Mlp(), Mlp()
    fastsync.attach(weighted).set_weight(1.0)
    assert not _warnings_of(lambda rank, step: weighted(batch(0, step)).square().mean(), rank)
    with fastsync.attach(joined).join():
        assert not _warnings_of(lambda rank, step: joined(batch(0, step)).square().mean(), rank)
    groups = [dist.new_group([each]) for each in range(world_size)]
    fastsync.attach(alone, process_group=groups[rank])
    assert not _warnings_of(lambda rank, step: alone(batch(0, step)).square().mean(), rank)
