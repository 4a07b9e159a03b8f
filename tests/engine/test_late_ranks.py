"""Which rank the others wait for: ``stats().waited_for``, and the warning of rank 0."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastsync
from fastsync.sync.synchronizer import GradientSynchronizer
from tests.ranks import on_ranks

LATE, SECONDS = 1, 0.02


def _attach(**options: Any) -> tuple[nn.Module, GradientSynchronizer]:
    model = nn.Linear(8, 2)
    sync = fastsync.attach(model, **options)
    sync._engine.warn_of_late_ranks(share=0.2, seconds=0.0)
    return model, sync


def _step(model: nn.Module, late: int | None = None) -> None:
    time.sleep(SECONDS if late is not None and dist.get_rank() == late else 0.0)
    model(torch.full((4, 8), 1.0 + dist.get_rank())).sum().backward()


def _train(num_steps: int, late: int | None) -> GradientSynchronizer:
    model, sync = _attach()
    for _ in range(num_steps):
        _step(model, late)
    return sync


def _warnings_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if "wait for rank" in str(each.message)]


@on_ranks(2)
def test_the_others_wait_for_the_rank_that_sleeps(rank: int, world_size: int):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync = _train(81, LATE)
    waited = sync.stats().waited_for
    assert len(waited) == world_size
    assert waited[LATE] > max(SECONDS / 4, waited[1 - LATE])
    assert f"for rank {LATE}" in repr(sync.stats())
    assert [f"rank {LATE} " in text for text in _warnings_of(caught)] == [True] * (rank == 0)  # once


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_nothing_is_known_at_first_and_on_one_rank(rank: int, world_size: int):
    assert _train(16, None).stats().waited_for == ()
    dist.barrier()
    assert len(_train(17, None).stats().waited_for) == (world_size if world_size > 1 else 0)


@on_ranks(2)
def test_steps_with_weights_tell_nothing_and_do_not_count_behind_them(rank: int, world_size: int) -> None:
    model, sync = _attach()

    def known_at(step: int) -> int:
        while sync._engine.step() < step:
            _step(model)
        return len(sync.stats().waited_for)

    assert known_at(17) == world_size
    with sync.join():
        _step(model)
        assert sync.stats().waited_for == ()
    assert known_at(33) == 0  # what ranks tell there is about the step with weights, too
    assert known_at(49) == world_size
    sync.set_weight(1.0 + rank)
    assert known_at(81) == 0


@on_ranks(2)
def test_nobody_is_warned_of_ranks_that_have_more_micro_batches(rank: int, world_size: int) -> None:
    model, sync = _attach(micro_batches=2)
    sync._engine.set_micro_batches(2)  # anew, because _attach has set when to warn
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(33):
            for _ in sync.micro_batches():
                _step(model, LATE)
    assert sync.stats().waited_for[LATE] > SECONDS / 4
    assert _warnings_of(caught) == []
